"""What is attacked: for each surface a strategy of hostile input, and a function that reads it.

A surface's function returns, or raises an error of bertkit's; anything else is a finding. All files are below one
directory. Commands run in this process; those that train are asked for their plan alone.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from hypothesis import strategies as st

from bertkit.errors import BertkitError
from bertkit.files import read_json
from tests.fuzz.hostile import WORDS, damaged_bytes, damaged_json, hostile, json_bytes


@dataclass(frozen=True)
class Surface:
    """A way for input into bertkit.

    Attributes:
        name: of it.
        inputs: a strategy.
        attack: reads one input.
        share: of the inputs of a long attack, in relation to the others.
    """

    name: str
    inputs: st.SearchStrategy[Any]
    attack: Callable[[Any], object]
    share: float = 1.0


class CodeError(AssertionError):
    """A command ended otherwise than it may."""


def made_surfaces(home: Path) -> list[Surface]:
    """All surfaces; what they damage is written into `home`, a new directory."""
    home.mkdir(parents=True)
    return [
        *_recipes(home / "recipes"),
        *_readers(home / "readers"),
        *_models(home / "models"),
        *_runs(home / "runs"),
        _command_lines(home / "commands"),
    ]


def _written(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


RECIPE: dict[str, Any] = {
    "extends": "bert-tiny",
    "name": "mine",
    "data": {"layout": {"name": "segment-pair"}, "sources": ["a.txt"], "sequence_length": 32, "held_out": 0.1},
    "tokenizer": {"type": "wordpiece", "vocab_size": 300},
    "model": {"family": "bert", "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3},
    "objective": [{"masked_lm": {"rate": {"start": 0.3, "end": 0.15}}}, "next_sentence"],
    "optimisation": {
        "optimizer": {"name": "adamw", "betas": [0.9, 0.98]},
        "schedule": {"name": "linear", "peak": 1e-3, "warmup_steps": 3},
        "batch_sequences": 8,
        "steps": 30,
        "stages": [{"share": 0.5, "set": {"data.sequence_length": 16}}, {"share": 0.5}],
        "groups": [{"parameters": "encoder.layers.0.*", "rate": 0.5}],
        "roll_back": {"at_most": 2},
        "spikes": {"deviations": 4.0},
    },
    "engine": {"device": "cpu", "log_every_steps": 3},
}
TASK_RECIPE: dict[str, Any] = {
    "kind": "finetune",
    "task": {"train": "a.csv", "dev": "b.csv", "columns": {"text": "review", "label": "stars"}},
    "model": "some/model",
    "method": {"name": "lora", "rank": 4},
    "optimisation": {"epochs": 2.0, "early_stopping": 2, "schedule": {"peak": 1e-4}},
    "data": {"train_examples": 100},
}
DISTILL_RECIPE: dict[str, Any] = {
    "kind": "distill",
    "teacher": "some/model",
    "task": "mrpc",
    "student": {"layers": "last", "number": 1},
    "distillation": [{"labels": {"weight": 0.3}}, {"hidden_states": {"layers": [[0, 0], [1, 2]]}}],
}


def _yaml_bytes(value: Any) -> bytes:
    return yaml.safe_dump(value, allow_unicode=True).encode("utf-8", "surrogatepass")


def _recipes(home: Path) -> list[Surface]:
    from bertkit.finetuning.recipe import load_own_task
    from bertkit.recipe.resolve import Override, load_any
    from bertkit.study.run import load_study
    from tests.study.tiny_study import STUDY

    scalar_keys = st.sampled_from([1, -3, 2.5, True, None, float("nan"), 10**30])
    keys = [".".join(map(str, place)) for place in _dotted(RECIPE)]
    path = home / "mine.yaml"

    def load(value: Any) -> object:
        return load_any(str(_written(path, value if isinstance(value, bytes) else _yaml_bytes(value))))

    recipes = st.sampled_from([RECIPE, TASK_RECIPE, DISTILL_RECIPE])
    damaged = recipes.flatmap(damaged_json)
    with_odd_keys = st.tuples(damaged, scalar_keys, hostile).map(
        lambda drawn: {**drawn[0], drawn[1]: drawn[2]} if isinstance(drawn[0], dict) else drawn[0]
    )
    task = {"kind": "classification", **TASK_RECIPE["task"]}
    return [
        Surface("recipes", damaged | with_odd_keys, load, 3),
        Surface("recipes, damaged text", recipes.map(_yaml_bytes).flatmap(damaged_bytes), load, 2),
        Surface(
            "--set",
            st.tuples(st.sampled_from(keys) | st.sampled_from(WORDS) | st.text("abdo.0²_- ", max_size=20), hostile),
            lambda drawn: load_any("bert-tiny", [Override.parse(f"{drawn[0]}={_yaml_text(drawn[1])}")]),
            3,
        ),
        Surface(
            "studies",
            damaged_json(STUDY),
            lambda value: load_study(str(_written(home / "study.yaml", _yaml_bytes(value)))),
        ),
        Surface(
            "task files",
            damaged_json(task).map(_yaml_bytes) | damaged_bytes(_yaml_bytes(task)),
            lambda content: load_own_task(_written(home / "task.yaml", content)),
        ),
    ]


def _dotted(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value if isinstance(value, list) else ())
    return ([at] if at else []) + [place for key, item in items for place in _dotted(item, (*at, key))]


def _yaml_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


TABLE = b'id,review,stars,pair\n1,a fine cat,good,x\n2,"a poor, ""list""",bad,y\n3,the word,good,z\n'
TAGGED = b'{"words": ["A", "cat"], "tags": ["O", "B-X"]}\n{"words": ["b"], "tags": ["O"]}\n'
CONLL = b"1\tA\ta\tDET\t_\t_\t2\tdet\t_\t_\n2\tcat\tcat\tNOUN\t_\t_\t0\troot\t_\t_\n\n"
SENSES = (
    b'<?xml version="1.0" encoding="utf-8"?>\n<corpus><text id="d"><sentence id="d.s"><wf lemma="a" pos="DET">A</wf>'
    b'<instance id="d.s.t0" lemma="cat" pos="NOUN">cat</instance></sentence></text></corpus>\n'
)
CHOICE = b'{"context": "a", "question": "b", "choices": ["c", "d"], "label": 1}\n'
SQUAD = json.dumps(
    {
        "version": "2",
        "data": [
            {
                "title": "t",
                "paragraphs": [
                    {
                        "context": "A cat reads.",
                        "qas": [
                            {
                                "id": "q",
                                "question": "Who?",
                                "is_impossible": False,
                                "answers": [{"text": "cat", "answer_start": 2}],
                            }
                        ],
                    }
                ],
            }
        ],
    }
).encode()


def _readers(home: Path) -> list[Surface]:
    import gzip

    import zstandard

    from bertkit.tasks.readers import Columns
    from bertkit.tasks.readers.own import read_own
    from bertkit.tasks.readers.senses import read_senses
    from bertkit.tasks.readers.table import read_texts
    from bertkit.tasks.readers.trees import read_trees
    from bertkit.text.sources import open_corpus
    from tests.training.tiny_run import write_text

    home.mkdir()
    text = write_text(home / "text.txt", documents=4).read_bytes()
    lines = b"".join(json_bytes({"text": f"line {n}", "id": n}) + b"\n" for n in range(5))
    columns = Columns(text="review", label="stars")
    write_table = _parquet(home / "valid.parquet")

    def corpus(suffix: str) -> Callable[[bytes], object]:
        path = home / f"corpus{suffix}"
        return lambda content: [
            str(document).encode("utf-8", "surrogatepass")
            for document in open_corpus([str(_written(path, content))], cache=home / "cache").documents()
        ]

    def own(kind: Any, suffix: str) -> Callable[[bytes], object]:
        return lambda content: read_own(_written(home / f"own-{kind}{suffix}", content), kind, Columns())

    def senses(content: bytes) -> object:
        _written(home / "a.gold.key.txt", b"d.s.t0 cat%1:05:00::\n")
        return read_senses(_written(home / "a.data.xml", content))

    valid = {
        ".txt": text,
        ".jsonl": lines,
        ".csv": TABLE.replace(b"review", b"text"),
        ".txt.gz": gzip.compress(text, mtime=0),
        ".txt.zst": zstandard.compress(text),
        ".csv.zst": zstandard.compress(TABLE.replace(b"review", b"text")),
        ".parquet": write_table,
    }
    readers = [
        Surface(f"text {suffix}", damaged_bytes(content) | st.binary(max_size=60), corpus(suffix))
        for suffix, content in valid.items()
    ]
    line = {"text": "a", "id": 1}
    return [
        *readers,
        Surface(
            "text .jsonl, damaged values",
            damaged_json([line, line]).map(_as_lines),
            corpus(".jsonl"),
        ),
        Surface(
            "tables",
            damaged_bytes(TABLE),
            lambda content: read_texts(_written(home / "table.csv", content), "classification", columns),
            2,
        ),
        Surface(
            "tables .jsonl",
            damaged_json([{"review": "a", "stars": "b", "id": "1"}] * 2).map(_as_lines),
            lambda content: read_texts(_written(home / "table.jsonl", content), "classification", columns),
            2,
        ),
        Surface(
            "regression tables",
            damaged_bytes(TABLE.replace(b"good", b"1.5").replace(b"bad", b"2")),
            lambda content: read_texts(_written(home / "numbers.csv", content), "regression", columns),
        ),
        Surface("tagged lines", damaged_bytes(TAGGED), own("tagging", ".jsonl")),
        Surface(
            "tagged values", damaged_json(json.loads(TAGGED.splitlines()[0])).map(_as_line), own("tagging", ".jsonl")
        ),
        Surface("tagged columns", damaged_bytes(b"A O\ncat B-X\n\nb O\n"), own("tagging", ".conll")),
        Surface("questions", damaged_bytes(SQUAD), own("span", ".json")),
        Surface("questions, damaged values", damaged_json(json.loads(SQUAD)).map(json_bytes), own("span", ".json"), 2),
        Surface("choices", damaged_json(json.loads(CHOICE)).map(_as_line), own("choice", ".jsonl")),
        Surface("treebanks", damaged_bytes(CONLL), lambda content: read_trees(_written(home / "a.conllu", content))),
        Surface("senses", damaged_bytes(SENSES), senses),
    ]


def _as_line(value: Any) -> bytes:
    return json_bytes(value) + b"\n"


def _as_lines(value: Any) -> bytes:
    return b"".join(_as_line(each) for each in value) if isinstance(value, list) else _as_line(value)


def _parquet(path: Path) -> bytes:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table({"text": ["one", "two"], "label": ["a", "b"]}), path)
    return path.read_bytes()


def _models(home: Path) -> list[Surface]:
    """Files of a model directory, each damaged in turn beside the others, which are whole."""
    from bertkit.models.fill_mask import fill_masks
    from bertkit.models.hub import load_model, read_config
    from bertkit.models.labels import Labels
    from bertkit.models.sentence import read_modules
    from bertkit.text.tokenizer_files import load_tokenizer
    from tests.inference.test_export import small_model

    model = small_model(home / "model")
    weights = (model / "model.safetensors").read_bytes()
    modules = [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
        {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
    ]
    header = int.from_bytes(weights[:8], "little") + 8
    names = json.loads(weights[8:header])
    index = {"metadata": {"total_size": 3}, "weight_map": dict.fromkeys(list(names)[:4], "model.safetensors")}

    def with_file(name: str, read: Callable[[], object]) -> Callable[[bytes | None], object]:
        path = model / name
        whole = path.read_bytes() if path.exists() else None

        def attack(content: bytes | None) -> object:
            try:
                if content is not None:
                    _written(path, content)
                return read()
            finally:
                path.unlink(missing_ok=True) if whole is None else path.write_bytes(whole)

        return attack

    def loaded() -> object:
        found, _ = load_model(model)
        return found

    def used() -> object:
        found, _ = load_model(model)
        return fill_masks(found, load_tokenizer(model), ["a [MASK]"])

    def indexed() -> object:
        whole = model / "model.safetensors"
        aside = whole.rename(model / "aside")
        try:
            return load_model(model)
        finally:
            aside.rename(whole)

    used()  # what is imported then takes no input's time
    config = read_json(model / "config.json")
    tokenizer = (model / "tokenizer.json").read_bytes()
    settings = read_json(model / "tokenizer_config.json")
    return [
        Surface("config.json", damaged_json(config).map(json_bytes), with_file("config.json", loaded), 2),
        Surface("config.json, damaged text", damaged_bytes(json_bytes(config)), with_file("config.json", loaded)),
        Surface(
            "labels of config.json",
            damaged_json({"id2label": {"0": "a", "1": "b"}, "label2id": {"a": 0, "b": 1}, "num_labels": 2}).map(
                lambda value: json_bytes({**config, **(value if isinstance(value, dict) else {"id2label": value})})
            ),
            with_file("config.json", lambda: Labels.from_hub(read_config(model)[1])),
        ),
        Surface("weights", damaged_bytes(weights[: header + 4000]), with_file("model.safetensors", loaded)),
        Surface(
            "weights, damaged header",
            damaged_json(names).map(lambda value: _with_header(value, weights[header:])),
            with_file("model.safetensors", used),
        ),
        Surface(
            "index of weights",
            damaged_json(index).map(json_bytes),
            with_file("model.safetensors.index.json", indexed),
        ),
        Surface(
            "modules.json",
            damaged_json(modules).map(json_bytes),
            with_file("modules.json", lambda: read_modules(model / "modules.json")),
        ),
        Surface("tokenizer.json", damaged_bytes(tokenizer), with_file("tokenizer.json", lambda: load_tokenizer(model))),
        Surface(
            "tokenizer.json, damaged values",
            damaged_json(_short(json.loads(tokenizer))).map(json_bytes),
            with_file("tokenizer.json", lambda: load_tokenizer(model)),
        ),
        Surface(
            "tokenizer_config.json",
            damaged_json(settings).map(json_bytes),
            with_file("tokenizer_config.json", lambda: load_tokenizer(model)),
        ),
    ]


def _short(tokenizer: Any) -> Any:
    """With a vocabulary of some dozen entries, so that damage is not all in there."""
    vocabulary = tokenizer["model"]["vocab"]
    tokenizer["model"]["vocab"] = dict(list(vocabulary.items())[:30])
    return tokenizer


def _with_header(value: Any, data: bytes) -> bytes:
    header = json_bytes(value)
    return len(header).to_bytes(8, "little") + header + data


def _runs(home: Path) -> list[Surface]:
    """Files of a finished run, each damaged in turn."""
    from bertkit.run.checkpoint import load_newest_checkpoint
    from bertkit.run.directory import RunDirectory
    from bertkit.run.find import find_runs
    from bertkit.run.verify import verify_run
    from bertkit.training.clock import RunClock
    from bertkit.training.divergence import DivergenceRecord
    from tests.run.making import finished_run

    home.mkdir()
    run = finished_run(home).path
    (run / "divergence.jsonl").write_text(
        '{"step": 2, "event": "skipped"}\n{"step": 3, "event": "rolled_back", "to": 1, "rate_factor": 0.5}\n'
    )
    names = [
        "run.json",
        "results.json",
        "metrics.jsonl",
        "environment.json",
        "files.json",
        "recipe.yaml",
        "model/config.json",
    ]
    names += ["checkpoints/latest", "checkpoints/step-00000005/manifest.json", "checkpoints/step-00000005/state.json"]
    names += ["checkpoints/step-00000005/model.safetensors", "divergence.jsonl"]
    whole = {name: (run / name).read_bytes() for name in names}

    def look() -> None:
        for found in find_runs(home):
            _ = found.status, found.steps, found.exit_reason, found.results
        _answered(lambda: verify_run(run))
        _answered(lambda: load_newest_checkpoint(RunDirectory.open(run).checkpoints))
        _answered(lambda: DivergenceRecord(run / "divergence.jsonl").rate_factor(3))
        _run_command(["runs", "list", "--json"], home)
        _run_command(["runs", "show", str(run), "--json"], home)

    def attack(drawn: tuple[str, bytes]) -> None:
        name, content = drawn
        try:
            (run / name).write_bytes(content)
            _answered(look)
        finally:
            (run / name).write_bytes(whole[name])
            (run / "divergence.jsonl").write_bytes(whole["divergence.jsonl"])

    def damaged_value(name: str) -> st.SearchStrategy[tuple[str, bytes]]:
        return damaged_json(json.loads(whole[name])).map(lambda value: (name, json_bytes(value)))

    def damaged_text(name: str) -> st.SearchStrategy[tuple[str, bytes]]:
        return damaged_bytes(whole[name]).map(lambda content: (name, content))

    def times(content: bytes) -> None:
        RunClock(_written(home / "times.tsv", content), 1.0, lambda share: share).close()

    of_json = [name for name in names if name.endswith(".json")]
    return [
        Surface("run directories", st.sampled_from(names).flatmap(damaged_text), attack),
        Surface("run directories, damaged values", st.sampled_from(of_json).flatmap(damaged_value), attack),
        Surface("times of a run", damaged_bytes(b"0.0\t0.1\n1.5\t0.05\n2.5\t0.01\n"), times),
    ]


def _answered(read: Callable[[], object]) -> None:
    try:
        read()
    except BertkitError:
        return


PLANNED = ("pretrain", "finetune", "distill", "study")
ENDLESS = ("serve",)


def _command_lines(home: Path) -> Surface:
    """Words after `bertkit`: commands, options that exist, and values of every kind."""
    from bertkit.cli.app import COMMANDS
    from tests.inference.test_export import small_model
    from tests.run.making import finished_run
    from tests.training.tiny_run import write_text

    home.mkdir()
    small_model(home / "model")
    write_text(home / "text.txt", documents=3)
    finished_run(home / "runs")
    (home / "table.csv").write_bytes(TABLE)
    (home / "empty").write_bytes(b"")
    commands = [name for name in COMMANDS if name not in ENDLESS]
    options = [
        "--json",
        "--set",
        "--seed",
        "--seeds",
        "--model",
        "--data",
        "--run-dir",
        "--resume",
        "--task",
        "--train",
        "--dev",
        "--text",
        "--label",
        "--out",
        "--to",
        "--format",
        "--top",
        "--teacher",
        "--max-steps",
        "--max-minutes",
        "--plan",
        "--help",
        "--device",
        "--precision",
        "--offline",
        "-q",
        "-v",
        "--step",
        "--grid",
        "--lr",
        "--epochs",
        "--batch",
        "--vocab-size",
        "--tokenizer",
        "--workers",
        "--method",
        "--predictions",
        "--gold",
        "--metric",
        "--init",
        "--dry-run",
        "--yes",
    ]
    values = st.sampled_from(WORDS) | st.sampled_from(
        [
            "model",
            "text.txt",
            "table.csv",
            "empty",
            "runs",
            "bert-tiny",
            "finetune",
            "mrpc",
            "glue",
            "mlm",
            "0-3",
            "1e9",
            "3",
            "list",
            "runs/bert-tiny-01234567",
            "show",
            "verify",
            "info",
            "fill [MASK]",
            "a=b",
            "model.hidden_size=7",
            "missing",
            "wordpiece",
            "{}",
        ]
    )
    word = values | st.sampled_from(options) | st.text(max_size=5)

    def attack(words: list[str]) -> None:
        more = ["--plan", "--offline"] if words[0] in PLANNED else []
        _run_command([*words, *more], home)

    inputs = st.tuples(st.sampled_from(commands), st.lists(word, max_size=6)).map(lambda drawn: [drawn[0], *drawn[1]])
    return Surface("command lines", inputs, attack, 3)


def _run_command(words: list[str], home: Path) -> None:
    """Run a command in this process, in `home`; its exit code is one of the contract's, and never that of a bug."""
    import contextlib
    import io
    import os

    from bertkit.cli.app import run

    before = Path.cwd()
    os.chdir(home)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as story:
            code = run(words)
    finally:
        os.chdir(before)
    if code not in (0, 2, 3, 5) or "Traceback" in story.getvalue():
        raise CodeError(f"{words}: exit {code}: {story.getvalue()[-600:]}")
