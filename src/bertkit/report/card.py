"""The model card of a run: what the model is, its results, how it was trained, and the recipe to reproduce it.

Format: a README.md for the Hugging Face Hub, a block of metadata above Markdown (huggingface.co/docs/hub/model-cards).
Sibling push.py uploads it. To keep the machine's paths private, the card contains only the last part of absolute paths.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from bertkit.files import read_json, read_json_file
from bertkit.models.files.hub import family_in
from bertkit.models.files.model_files import CONFIG_FILE, MODULES_FILE
from bertkit.recipe.tree import read_tree
from bertkit.report.gather import SCORES, ReportedRun
from bertkit.run.directory import RECIPE, RESULTS
from bertkit.run.similar_models import is_local_name
from bertkit.tasks.catalogue import TASKS
from bertkit.tasks.classification import TEMPERATURE, THRESHOLDS
from bertkit.tasks.span import THRESHOLD as NULL_THRESHOLD
from bertkit.visible import visible

_WITHOUT_CLASS = frozenset(
    {"fast-encoder", "gpt-bert", "gpt_bert", "mosaicbert", "neobert", "elmo", "transfo-xl", "universal-transformer"}
    | {"bert-gpt2", "bilstm", "feature-lstm", "jina-bert", "jina-bert-qk", "nomic-bert-moe"}
)
"""Kinds of model that `transformers` has no class for."""
_TASKS = {
    "ElectraForPreTraining": None,  # detects replaced tokens
    "ForMaskedLM": "fill-mask",
    "NeoBERTLMHead": "fill-mask",
    "ForPreTraining": "fill-mask",
    "ForSequenceClassification": "text-classification",
    "ForTokenClassification": "token-classification",
    "ForQuestionAnswering": "question-answering",
    "ForQuestionAnsweringSimple": "question-answering",
    "ForMultipleChoice": "multiple-choice",
    "LMHeadModel": "text-generation",
    "ForCausalLM": "text-generation",
    "MarianMTModel": "translation",
}
"""The Hub's name of a task, by the suffix of the class name; the first that fits."""
_CALLS = {
    "fill-mask": 'model.fill("The {mask} returns a list.")',
    "text-classification": 'model.predict(["A text."])',
    "token-classification": 'model.predict(["A sentence about Berlin."])',
    "question-answering": 'model.predict([("Who wrote it?", "Ann wrote it.")])',
    "multiple-choice": 'model.predict([{"context": "The cat", "endings": ["sat down.", "is a list."]}])',
    "text-generation": 'model.generate("The company")',
    "translation": 'model.generate("A sentence to translate.")',
    "sentence-similarity": 'model.encode(["A sentence.", "Another one."])',
    "feature-extraction": 'model.encode(["A sentence.", "Another one."])',
}
"""How `bertkit.load`'s model is called, by the Hub's name of its task."""
_DENSE, _SPARSE, _BY_TOKEN = "SentenceTransformer", "SparseEncoder", "MultiVectorEncoder"
_COMPARES_TOKENS = 'model.late_scores("A question?", ["A text that answers it.", "Another one."])'
_PAIRS = 'model.predict([("A text.", "The second text of its pair.")])'
_TUNED = {
    TEMPERATURE: "`softmax(logits / temperature)` gives calibrated probabilities",
    THRESHOLDS: "a label applies if its probability is at least its own of `label_thresholds`",
    NULL_THRESHOLD: "no answer is predicted if the classification token's logits exceed the best one's by more than it",
}
"""What `predict` does with the values that fine-tuning tuned and stored in config.json."""
_MOST_SCORES = 40
_MOST_LABELS = 30
_LIBRARY_LABEL = re.compile(r"LABEL_\d+")
"""A label without a name of its own, as `transformers` writes it."""
_FACTS = (
    "steps",
    "tokens",
    "training FLOPs",
    "processor",
    "GPU",
    "bertkit, torch",
    "hash of the recipe",
)


def model_card(
    model: Path,
    repository: str,
    run: ReportedRun | None,
    *,
    chosen: ReportedRun | None = None,
    license_id: str | None = None,
) -> str:
    """The text of README.md.

    Args:
        model: the model's directory.
        repository: ORG/NAME, the model's destination.
        run: the run that produced the model; None if unknown.
        chosen: if that is a suite, its run whose model this is.
        license_id: an identifier from the Hub's list, such as `apache-2.0`.

    Raises:
        DataError: config.json, or the run's recipe, cannot be read.
    """
    config = read_json(model / CONFIG_FILE) if (model / CONFIG_FILE).is_file() else {}
    embedder = _embedder_class(model)
    trained = chosen or run
    recipe = {} if trained is None else dict(read_tree(trained.recipe, str(trained.path / RECIPE)).plain())
    metadata = yaml.safe_dump(
        dict(_metadata(config, recipe, embedder=embedder, license_id=license_id)) | _metrics(run), sort_keys=False
    )
    parts = [f"---\n{metadata}---", f"# {repository.rpartition('/')[2]}"]
    if run is not None:
        parts.append(" ".join(_description(recipe)))
    if labels := _labels(config):
        parts.append(f"Labels: {labels}.")
    parts += tuned_in(config)
    call = _call(_task_of(config, recipe, embedder=embedder), model, recipe)
    call = _COMPARES_TOKENS if embedder == _BY_TOKEN else call
    parts += ["## Use", _usage(config, repository, call, embedder=embedder)]
    if run is not None and trained is not None:
        if scores := _results(run):
            parts += ["## Results", _table(scores)]
        facts = _example_counts(trained) | {name: trained.facts[name] for name in _FACTS if name in trained.facts}
        # Empty parts, such as a title or the settings of other kinds of task, are the defaults.
        given = {key: value for key, value in recipe.items() if value not in (None, "")}
        settings = {key: value for key, value in _without_paths(given).items() if key != "engine"}
        written = yaml.safe_dump(settings, sort_keys=False, allow_unicode=True, width=100)
        folded = f"<details>\n<summary>Recipe</summary>\n\n```yaml\n{written}```\n\n</details>"
        parts += ["## Training", _table(facts), folded]
    return "\n\n".join(parts) + "\n"


def tuned_in(config: Mapping[str, Any]) -> list[str]:
    """A sentence on each value of a config.json that fine-tuning tuned and other tools do not use by themselves."""
    is_classifier = "ForSequenceClassification" in str(config.get("architectures"))
    # A language model's temperature is one of its settings for generation.
    here = (key for key in _TUNED if key in config and (is_classifier or key != TEMPERATURE))
    return [f"`{key}` in config.json was tuned on dev and is used by bertkit only: {_TUNED[key]}." for key in here]


def _metadata(
    config: Mapping[str, Any], recipe: Mapping[str, Any], *, embedder: str | None, license_id: str | None
) -> Iterator[tuple[str, Any]]:
    if license_id:
        yield "license", license_id
    yield (
        "library_name",
        "sentence-transformers" if embedder else "transformers" if _has_class(config) else "bertkit",
    )
    if task := _task_of(config, recipe, embedder=embedder):
        yield "pipeline_tag", task
    yield "tags", [tag for tag in ("bertkit", family_in(config)) if tag]
    started_from = recipe.get("init") or recipe.get("model")
    if isinstance(started_from, str) and started_from != "?" and not _is_path(started_from):
        yield "base_model", started_from.partition("@")[0]
    data, tasks = recipe.get("data"), recipe.get("task")
    sources = list(data.get("sources") or ()) if isinstance(data, Mapping) else []
    for task in tasks if isinstance(tasks, Sequence) and not isinstance(tasks, str) else [tasks]:
        sources += [task.get("train")] if isinstance(task, Mapping) else []
    if named := [name for each in sources if (name := _data_set(each))]:
        yield "datasets", list(dict.fromkeys(named))


def _data_set(source: Any) -> str:
    """The name of a data set on the Hub; empty for other sources."""
    text = str(source)
    return text.split(":")[1].partition("@")[0] if text.startswith("hub:") else ""


def _embedder_class(model: Path) -> str | None:
    """The class of sentence-transformers that loads a model; None if it is no embedder."""
    if not (model / MODULES_FILE).is_file():
        return None
    kinds = [str(each.get("type")) for each in read_json_file(model / MODULES_FILE)]
    marked = {".SpladePooling": _SPARSE, ".MultiVectorMask": _BY_TOKEN}
    return next((named for end, named in marked.items() if any(kind.endswith(end) for kind in kinds)), _DENSE)


def _metrics(run: ReportedRun | None) -> dict[str, list[str]]:
    """The names of the metrics on tasks, as the Hub's field `metrics`; empty if there are none."""
    on_tasks = () if run is None else [name for name in run.scores if name.startswith(("splits.", "tasks."))]
    names = dict.fromkeys(name.rpartition(".")[2].partition("/")[0] for name in on_tasks)
    return {"metrics": list(names)} if names else {}


def _task_of(config: Mapping[str, Any], recipe: Mapping[str, Any], *, embedder: str | None) -> str | None:
    """The Hub's name of what the model does; None if it has none."""
    if embedder:
        return "sentence-similarity" if embedder == _DENSE else "feature-extraction"
    name = str((config.get("architectures") or [""])[0])
    if name.endswith("ForConditionalGeneration"):
        return "translation" if "seq2seq_lm" in str(recipe.get("objective")) else None
    return next((task for end, task in _TASKS.items() if name.endswith(end)), None)


def _call(task: str | None, model: Path, recipe: Mapping[str, Any]) -> str | None:
    """An example of the model's use in bertkit; None if there is none for its task."""
    if task == "text-classification" and _reads_pairs(recipe.get("task")):
        return _PAIRS
    call = _CALLS.get(task or "")
    if call is None or task != "fill-mask":
        return call
    path = model / "tokenizer_config.json"
    mask = read_json(path).get("mask_token") if path.is_file() else None
    mask = mask.get("content") if isinstance(mask, Mapping) else mask
    return call.format(mask=mask) if isinstance(mask, str) else None


def _reads_pairs(task: Any) -> bool:
    """Whether a recipe's task is on pairs of texts."""
    if isinstance(task, Mapping):
        columns = task.get("columns")
        return isinstance(columns, Mapping) and columns.get("text_pair") is not None
    spec = TASKS.get(str(task))
    return spec is not None and spec.columns is not None and bool(spec.columns.text_pair)


def _task_name(task: Any) -> str:
    """The name of a task in a recipe; of the user's own, else that of its training file."""
    if not isinstance(task, Mapping):
        return str(task)
    return str(task.get("name") or _data_set(task.get("train")) or Path(str(task.get("train"))).name)


def _example_counts(run: ReportedRun) -> dict[str, str]:
    """How many examples a fine-tuning run has of each split; empty if it is no such run."""
    path = run.path / RESULTS
    counts = read_json(path).get("examples") if path.is_file() else None
    if not isinstance(counts, Mapping):
        return {}
    known = {name: count for name, count in counts.items() if isinstance(count, int)}
    return {"examples": ", ".join(f"{visible(str(name))} {count:,}" for name, count in known.items())} if known else {}


def _description(recipe: Mapping[str, Any]) -> Iterator[str]:
    """Sentences on what was trained from what, on which data."""
    kind, task, data = (recipe.get(key) for key in ("kind", "task", "data"))
    named = [task] if isinstance(task, str | Mapping) else list(task or ())
    tasks = " and ".join(_cell(_task_name(each)) for each in named)
    start = recipe.get("model") or recipe.get("init")
    source = _model_name(start) if isinstance(start, str) and start != "?" else ""
    if recipe.get("title"):
        yield f"{_cell(str(recipe['title']))}."
    if kind == "finetune":
        yield f"{source or 'A model'} fine-tuned on {tasks}."
    elif kind == "distill":
        taught = recipe.get("teacher")
        teachers = [taught] if isinstance(taught, str) else list(taught or ())
        names = " and ".join(_model_name(str(each)) for each in teachers)
        yield (
            f"A student of {names}{f', on {tasks}' if tasks else ''}."
            if names and not recipe.get("control")
            else (f"A student trained without its teacher{f', on {tasks}' if tasks else ''}.")
        )
    elif not recipe.get("title"):
        yield f"Pretrained with the recipe `{recipe.get('name')}`."
    if recipe.get("paper"):
        yield f"After: {_cell(str(recipe['paper']))}."
    sources = data.get("sources") if isinstance(data, Mapping) else None
    if sources:
        yield f"Trained on {', '.join(_cell(_short(str(each))) for each in sources)}."


def _model_name(name: str) -> str:
    """A link to a model of the Hub; the last part of a path."""
    if _is_path(name) or name.count("/") > 1:
        return _cell(_short(name))
    hub_id = name.partition("@")[0]
    return f"[{_cell(hub_id)}](https://huggingface.co/{hub_id})" if "/" in hub_id else _cell(hub_id)


def _short(name: str) -> str:
    return Path(name.rstrip("/")).name if Path(name).expanduser().is_absolute() else name


def _labels(config: Mapping[str, Any]) -> str:
    """The names of a classifier's labels, unless they are only numbered; empty if there are none."""
    names = config.get("id2label")
    if not isinstance(names, Mapping) or len(names) > _MOST_LABELS:
        return ""
    found = [str(names[number]) for number in sorted(names, key=lambda number: (len(number), number))]
    return "" if all(map(_LIBRARY_LABEL.fullmatch, found)) else ", ".join(_cell(visible(name)) for name in found)


def _results(run: ReportedRun) -> dict[str, str]:
    """The main scores in words, by their names without that of the part of results.json."""
    return {_score_name(name): each.in_words for name, each in run.main_scores.items()}


def _score_name(name: str) -> str:
    part, _, rest = name.partition(".")
    if part not in SCORES:
        return name
    return f"{'held-out ' if part == 'held_out' else ''}{rest.replace('.', ' ')}"


def _has_class(config: Mapping[str, Any]) -> bool:
    """Whether `transformers` has the class that config.json names."""
    own = {"T5EncoderForSequenceClassification"} & set(config.get("architectures") or ())
    return family_in(config) not in _WITHOUT_CLASS and not own


def _usage(config: Mapping[str, Any], repository: str, call: str | None, *, embedder: str | None) -> str:
    lines = ["import bertkit", "", f'model = bertkit.load("{repository}")', *([call] if call else [])]
    text = f"```python\n{chr(10).join(lines)}\n```"
    if embedder:
        other = f'from sentence_transformers import {embedder}\n\nmodel = {embedder}("{repository}")'
        return f"{text}\n\n```python\n{other}\n```"
    if not _has_class(config) or not config.get("architectures"):
        return text
    name = str(config["architectures"][0])
    other = f'from transformers import AutoTokenizer, {name}\n\nmodel = {name}.from_pretrained("{repository}")'
    return f'{text}\n\n```python\n{other}\ntokenizer = AutoTokenizer.from_pretrained("{repository}")\n```'


def _table(rows: Mapping[str, str]) -> str:
    shown = list(rows.items())[:_MOST_SCORES]
    lines = [f"| {_cell(name)} | {_cell(value)} |" for name, value in shown]
    more = f"\n\n{len(rows) - len(shown)} more rows are in the run directory." if len(rows) > len(shown) else ""
    return "\n".join(["| | |", "|---|---|", *lines]) + more


def _cell(text: str) -> str:
    return re.sub(r"([|\\`*_<>\[\]])", r"\\\1", text)


def _is_path(text: str) -> bool:
    return is_local_name(text) or Path(text).expanduser().is_absolute()


def _without_paths(value: Any) -> Any:
    """A tree of settings with absolute paths reduced to their last part."""
    if isinstance(value, Mapping):
        return {key: _without_paths(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_without_paths(each) for each in value]
    if isinstance(value, str) and Path(value).expanduser().is_absolute():
        return Path(value).name
    return value
