"""`bertkit probe`: linguistic knowledge and attention of a model, with one command per kind of probe.

The papers are cited in the probes. To add a probe, add it to KINDS; its options are generated from its settings.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from bertkit.cli.commands import CommandGroup
from bertkit.cli.console import console, result
from bertkit.cli.generated_options import Spelling, spelled
from bertkit.cli.options import Common, DataDir, Measuring, model_or_default, option
from bertkit.visible import number_of

if TYPE_CHECKING:
    from bertkit.probing.run import ProbeArguments

Models = Annotated[
    list[str] | None,
    option(
        "--model",
        metavar="MODEL",
        help="A Hub id, a model directory or a run directory; RUN@500 is the run's checkpoint at step 500, RUN@all"
        " every checkpoint it kept, RUN@words every model it saved by words. Repeatable (default: BERTKIT_MODEL, else"
        " BERT base, uncased).",
    ),
]
StoreGb = Annotated[
    float | None,
    option(
        "--store-gb",
        metavar="GB",
        min=0,
        help="Maximum disk space in GB for hidden states while the probe runs (default: 8).",
    ),
]
EXAMPLE = "The reader walks to the old house."
TEXT = "Text: files, directories, globs, hub:ORG/NAME or builtin:pydocs; or treebanks (.conllu)."


@dataclass(frozen=True)
class Kind:
    """A kind of probe on the command line.

    Attributes:
        settings: class that its options are generated from, as `module:class`; `probe_KIND` of the module's run.py runs
            it.
        spelling: of options whose name differs from the field's.
        data: help of `--data`.
        test_data: help of `--test-data`; None if the probe is not trained.
        is_task: whether it reads a task's folder.
    """

    settings: str
    spelling: Spelling = field(default_factory=Spelling)
    data: str = TEXT
    test_data: str | None = None
    is_task: bool = False

    def parameters(self) -> list[inspect.Parameter]:
        """The options: models and data, settings, and those of every measurement."""
        module, _, name = self.settings.partition(":")
        inputs: dict[str, Any] = {"model": Models, "data": _files("--data", "SOURCE...", self.data)}
        if self.test_data is not None:
            inputs |= {"test_data": _files("--test-data", "FILE", f"{self.test_data} Repeatable."), "store_gb": StoreGb}
        if self.is_task:
            inputs["data_dir"] = DataDir
        schema = getattr(import_module(module), name)
        settings = Annotated[schema, self.spelling]  # type: ignore[valid-type]  # a class known when this runs
        keyword = inspect.Parameter.KEYWORD_ONLY
        return [
            *(inspect.Parameter(each, keyword, default=None, annotation=hint) for each, hint in inputs.items()),
            inspect.Parameter("settings", keyword, annotation=settings),
            inspect.Parameter("common", keyword, annotation=Measuring),
        ]


def _files(flag: str, metavar: str, help: str) -> Any:
    return Annotated[list[str] | None, option(flag, metavar=metavar, help=help)]


_HELD_OUT = "(default: a fifth of the sentences of --data, which are then not trained on)."
KINDS = {
    "contextuality": Kind(
        "bertkit.probing.contextuality:ContextualitySettings",
        spelled(words="--word WORD", static_layers="--static-layer L"),
    ),
    "attention": Kind(
        "bertkit.probing.attention:AttentionSettings", spelled(pattern_pairs="--pairs N", show="--show TEXT")
    ),
    "attribution": Kind(
        "bertkit.probing.attribution:AttributionSettings",
        spelled(texts="--text TEXT", target="--target WORD", methods="--method NAME", directions="--directions K"),
    ),
    "effective-attention": Kind(
        "bertkit.probing.effective_attention:EffectiveAttentionSettings", spelled(lengths="--length TOKENS")
    ),
    "heads": Kind(
        "bertkit.probing.heads:HeadsSettings",
        spelled(task="--task TASK", prune_share="--prune-share SHARE", mask_rate="--masking-rate SHARE"),
        is_task=True,
    ),
    "layers": Kind(
        "bertkit.probing.layers:LayersSettings",
        spelled(tasks="--task TASK"),
        data="Annotated sentences: a treebank (.conllu), CoNLL columns (chunks, entities), or .jsonl with labelled"
        " spans.",
        test_data=f"Sentences to compute scores on, one file for each of --data, in the same order {_HELD_OUT}",
    ),
    "structure": Kind(
        "bertkit.probing.structure:StructureSettings",
        spelled(rank="--rank R", ranks="--ranks R"),
        data="A treebank (.conllu).",
        test_data=f"Sentences to compute scores on {_HELD_OUT}",
    ),
    "senses": Kind(
        "bertkit.probing.senses:SensesSettings",
        spelled(ks="--k N", words="--word LEMMA", capped="--capped/--not-capped"),
        data="Examples: a .jsonl file in SemCor's format, or .data.xml.",
        test_data=f"Examples to score: X.data.xml with X.gold.key.txt next to it, or .jsonl {_HELD_OUT}",
    ),
    "similarity": Kind("bertkit.probing.similarity:SimilaritySettings", spelled(variance="--variance SHARE")),
    "behaviour": Kind(
        "bertkit.probing.behaviour:BehaviourSettings",
        spelled(only="--only PATTERN", top="--top K"),
        data="Minimal pairs (a directory or a .jsonl, .csv or .tsv file in BLiMP's format) or diagnostics (a .tsv file"
        " of lm-diagnostics, or a directory of them). Repeatable.",
    ),
}
"""Each kind's name on the command line; one entry per kind."""


class Kinds(CommandGroup):
    """Probe a model; each kind of probe has its own options: `bertkit probe KIND --help`."""

    table: ClassVar = {"points": f"{__name__}:points", **{name: kind.settings for name, kind in KINDS.items()}}
    noun = "kind of probe"
    metavar = "KIND"
    path = "bertkit probe"

    def load(self, name: str) -> Callable[..., None] | type[CommandGroup]:
        """The function of a kind, with the settings' docstring as its help text."""
        return command_of(name, KINDS[name]) if name in KINDS else super().load(name)


def command_of(name: str, kind: Kind) -> Callable[..., None]:
    """The function that runs a kind, with the kind's options as its signature."""
    parameters = kind.parameters()

    def command(*, settings: Any, common: Measuring, **inputs: Any) -> None:
        from bertkit.probing.several import probe_each

        package = kind.settings.partition(":")[0]
        probe = getattr(import_module(f"{package}.run"), f"probe_{name.replace('-', '_')}")
        probed = probe_each(request(common, **inputs), settings, probe)
        for sentence in probed.sentences:
            console.info(sentence)
        assert probed.run is not None, "only points writes no run"
        common.finish(probed.run, probed.document)

    settings = next(each.annotation for each in parameters if each.name == "settings")
    command.__doc__ = settings.__origin__.__doc__
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # of the command line
    return command


def request(
    common: Measuring,
    *,
    model: list[str] | None,
    data: list[str] | None = None,
    test_data: list[str] | None = None,
    store_gb: float | None = None,
    data_dir: str | None = None,
) -> ProbeArguments:
    """The arguments of a probe."""
    from bertkit.probing import STORE_GB
    from bertkit.probing.run import ProbeArguments

    return ProbeArguments(
        models=model or [model_or_default(None)],
        data=data or (),
        test_data=test_data or (),
        store_gb=STORE_GB if store_gb is None else store_gb,
        data_dir=None if data_dir is None else Path(data_dir),
        progress=console.progress,
        **common.argument_fields(),
    )


def points(
    model: Models = None,
    sentence: Annotated[
        str, option("--sentence", metavar="TEXT", help=f"Sentence whose shapes are shown (default: {EXAMPLE}).")
    ] = EXAMPLE,
    *,
    common: Common,
) -> None:
    """List every point that can be recorded, with its shape: `bertkit probe points --model M`"""
    from bertkit.probing.points import SYMBOLS, list_points

    probed = list_points(request(Measuring(offline=common.offline), model=model), sentence)
    if common.as_json:
        result(probed.document, as_json=True)
        return
    found = probed.results["summary"]
    used = {symbol for point in found["points"] for symbol in point["shape"]}
    for point in found["points"]:
        shape = " x ".join(point["shape"])
        sizes = " x ".join(map(str, point["example"]))
        result(f"{point['name']:<42}{shape:<16}{sizes}")
    console.info("; ".join(f"{symbol}: {meaning}" for symbol, meaning in SYMBOLS.items() if symbol in used))
    console.info(f"sizes are for {found['example']['sentence']!r}, {number_of(found['example']['tokens'], 'token')}")
