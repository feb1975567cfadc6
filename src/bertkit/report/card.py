"""The model card of a run: what the model is, its results, how it was trained, and the recipe to reproduce it.

Format: a README.md for the Hugging Face Hub, a block of metadata above Markdown (huggingface.co/docs/hub/model-cards).
Sibling push.py uploads it. To keep the machine's paths private, the card contains only the last part of absolute paths.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from bertkit.files import read_json
from bertkit.models.model_files import CONFIG_FILE
from bertkit.models.near_models import looks_local
from bertkit.recipe.tree import read_tree
from bertkit.report.gather import ReportedRun
from bertkit.run.directory import RECIPE

SENTENCE_MODULES = "modules.json"
_WITHOUT_CLASS = frozenset(
    {"fast-encoder", "gpt-bert", "gpt_bert", "mosaicbert", "elmo", "transfo-xl", "universal-transformer", "bilstm"}
)
"""Kinds of model that `transformers` has no class for."""
_TASKS = {
    "ForMaskedLM": "fill-mask",
    "ForPreTraining": "fill-mask",
    "ForSequenceClassification": "text-classification",
    "ForTokenClassification": "token-classification",
    "ForQuestionAnswering": "question-answering",
    "ForMultipleChoice": "multiple-choice",
    "LMHeadModel": "text-generation",
    "ForCausalLM": "text-generation",
    "ForConditionalGeneration": "translation",
}
"""The Hub's name of a task, by the suffix of the class name."""
_MOST_SCORES = 40
_FACTS = (
    "steps",
    "tokens",
    "training FLOPs",
    "processor",
    "GPU",
    "bertkit, torch",
    "hash of the recipe",
    "hash of the text",
)


def model_card(model: Path, repository: str, run: ReportedRun | None, *, license_id: str | None = None) -> str:
    """The text of README.md.

    Args:
        model: the model's directory.
        repository: ORG/NAME, the model's destination.
        run: the run that produced the model; None if unknown.
        license_id: an identifier from the Hub's list, such as `apache-2.0`.

    Raises:
        DataError: config.json, or the run's recipe, cannot be read.
    """
    config = read_json(model / CONFIG_FILE) if (model / CONFIG_FILE).is_file() else {}
    is_embedder = (model / SENTENCE_MODULES).is_file()
    recipe = {} if run is None else dict(read_tree(run.recipe, str(run.path / RECIPE)).plain())
    metadata = yaml.safe_dump(
        dict(_metadata(config, recipe, is_embedder=is_embedder, license_id=license_id)), sort_keys=False
    )
    parts = [f"---\n{metadata}---", f"# {repository.rpartition('/')[2]}"]
    if run is not None:
        paper = f" After: {recipe['paper']}." if recipe.get("paper") else ""
        parts.append(f"{recipe.get('title') or recipe.get('name')}.{paper}")
    parts += ["## Use", _usage(config, repository, is_embedder=is_embedder)]
    if run is not None:
        if run.scores:
            parts += ["## Results", _table({name: each.in_words for name, each in run.scores.items()})]
        facts = {name: run.facts[name] for name in _FACTS if name in run.facts}
        written = yaml.safe_dump(_without_paths(recipe), sort_keys=False, allow_unicode=True, width=100)
        parts += ["## Training", _table(facts), "The recipe:", f"```yaml\n{written}```"]
    return "\n\n".join(parts) + "\n"


def _metadata(
    config: Mapping[str, Any], recipe: Mapping[str, Any], *, is_embedder: bool, license_id: str | None
) -> Iterator[tuple[str, Any]]:
    kind = str(config.get("model_type", ""))
    if license_id:
        yield "license", license_id
    yield (
        "library_name",
        "sentence-transformers" if is_embedder else "bertkit" if kind in _WITHOUT_CLASS else "transformers",
    )
    classes = str((config.get("architectures") or [""])[0])
    task = next((task for end, task in _TASKS.items() if classes.endswith(end)), None)
    if is_embedder or task:
        yield "pipeline_tag", "sentence-similarity" if is_embedder else task
    yield "tags", [tag for tag in ("bertkit", kind) if tag]
    started_from = recipe.get("init") or recipe.get("model")
    if isinstance(started_from, str) and started_from != "?" and not _is_path(started_from):
        yield "base_model", started_from.partition("@")[0]
    data = recipe.get("data")
    sources = data.get("sources") if isinstance(data, Mapping) else None
    named = [str(each).split(":")[1].partition("@")[0] for each in sources or () if str(each).startswith("hub:")]
    if named:
        yield "datasets", list(dict.fromkeys(named))


def _usage(config: Mapping[str, Any], repository: str, *, is_embedder: bool) -> str:
    kind = str(config.get("model_type", ""))
    lines = ["import bertkit", "", f'model = bertkit.load("{repository}")']
    text = f"```python\n{chr(10).join(lines)}\n```"
    if is_embedder:
        other = f'from sentence_transformers import SentenceTransformer\n\nmodel = SentenceTransformer("{repository}")'
        return f"{text}\n\n```python\n{other}\n```"
    if kind in _WITHOUT_CLASS or not config.get("architectures"):
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
    return looks_local(text) or Path(text).expanduser().is_absolute()


def _without_paths(value: Any) -> Any:
    """A tree of settings with absolute paths reduced to their last part."""
    if isinstance(value, Mapping):
        return {key: _without_paths(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_without_paths(each) for each in value]
    if isinstance(value, str) and Path(value).expanduser().is_absolute():
        return Path(value).name
    return value
