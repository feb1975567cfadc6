"""`bertkit probe structure` and `layers`: what a small probe, trained on annotated sentences, finds in hidden states.

Nothing here follows a paper; the jobs of the same names do.
"""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from bertkit.cli.options import Models, option
from bertkit.cli.probe_common import Probing

TestData = Annotated[
    str | None,
    option(
        "--test-data",
        metavar="FILE",
        help="What scores are of (default: a fifth of the sentences of --data, which are then not trained on).",
    ),
]
TestSentences = Annotated[
    int, typer.Option("--test-sentences", metavar="N", min=1, help="Sentences drawn at random for testing.")
]
StoreGb = Annotated[
    float, typer.Option("--store-gb", metavar="GB", min=0, help="Disk that states may take while the run lasts.")
]


def structure(
    model: Models = None,
    data: Annotated[list[str] | None, option("--data", metavar="FILE", help="A treebank (.conllu).")] = None,
    test_data: TestData = None,
    sentences: Annotated[
        int, typer.Option("--sentences", metavar="N", min=10, help="Sentences drawn at random for training.")
    ] = 2000,
    test_sentences: TestSentences = 500,
    rank: Annotated[int, typer.Option("--rank", metavar="R", min=1, help="Of the probes of all layers.")] = 64,
    ranks: Annotated[
        list[int] | None,
        option(
            "--ranks",
            metavar="R",
            min=1,
            help="Ranks tried on the best layer. Repeatable (default: powers of two up to --rank).",
        ),
    ] = None,
    max_epochs: Annotated[int, typer.Option("--max-epochs", metavar="N", min=1, help="Of each probe.")] = 40,
    learning_rate: Annotated[
        float, typer.Option("--learning-rate", metavar="X", min=1e-9, help="Of Adam, to begin with.")
    ] = 5e-3,
    store_gb: StoreGb = 8.0,
    *,
    common: Probing,
) -> None:
    """Dependency trees as distances and depths, layer by layer: `bertkit probe structure --model M --data t.conllu`"""
    from bertkit.probing.structure.measure import ProbeTraining
    from bertkit.probing.structure.run import StructureSettings, probe_structure

    settings = StructureSettings(
        sentences=sentences,
        test_sentences=test_sentences,
        rank=rank,
        ranks=ranks or [],
        training=ProbeTraining(max_epochs=max_epochs, learning_rate=learning_rate),
        seed=common.seed,
    )
    common.show(probe_structure(common.request(model, data), settings, test_data=test_data, store_gb=store_gb))


def layers(
    model: Models = None,
    data: Annotated[
        list[str] | None,
        option(
            "--data",
            metavar="FILE...",
            help="Annotated sentences: a treebank (.conllu), CoNLL columns (chunks, entities), or .jsonl with labelled"
            " spans.",
        ),
    ] = None,
    test_data: Annotated[
        list[str] | None,
        option(
            "--test-data",
            metavar="FILE",
            help="What scores are of, one file for each of --data, in their order. Repeatable (default: a fifth of the"
            " sentences of each, which are then not trained on).",
        ),
    ] = None,
    task: Annotated[
        list[str] | None,
        option(
            "--task",
            metavar="TASK",
            help="pos, dep, chunks, ner, chunks-spans, ner-spans, tags or a .jsonl file's name. Repeatable (default:"
            " all that the data are annotated for but those of given spans).",
        ),
    ] = None,
    sentences: Annotated[
        int, typer.Option("--sentences", metavar="N", min=10, help="Sentences of each file drawn for training.")
    ] = 1000,
    test_sentences: TestSentences = 500,
    pooling: Annotated[
        Literal["attention", "endpoints", "mean"],
        typer.Option("--pooling", metavar="HOW", help="Of a span's words: attention, endpoints or mean."),
    ] = "attention",
    penalty: Annotated[
        float, typer.Option("--penalty", metavar="X", min=1e-9, help="Of half the squared weights of a probe.")
    ] = 1.0,
    store_gb: StoreGb = 8.0,
    *,
    common: Probing,
) -> None:
    """Labels of words and spans by layer, and by a learnt mix: `bertkit probe layers --model M --data t.conllu`"""
    from bertkit.probing.layers.measure import ProbeFit
    from bertkit.probing.layers.run import LayersSettings, probe_layers

    fit = ProbeFit(penalty=penalty, pooling=pooling)
    settings = LayersSettings(
        tasks=task or [], sentences=sentences, test_sentences=test_sentences, fit=fit, seed=common.seed
    )
    common.show(probe_layers(common.request(model, data), settings, test_data=test_data or (), store_gb=store_gb))
