"""`bertkit probe points`, `contextuality` and `similarity`: what can be recorded, and hidden states by layer.

Nothing here follows a paper; the jobs of the same names do.
"""

from __future__ import annotations

from typing import Annotated

import typer

from bertkit.cli.console import console, result
from bertkit.cli.options import Common, Models, Texts, option
from bertkit.cli.probe_common import Probing, Sentences


def points(
    model: Models = None,
    sentence: Annotated[str | None, option("--sentence", metavar="TEXT", help="Give its sizes, too.")] = None,
    *,
    common: Common,
) -> None:
    """Every point that can be recorded, with its shape: `bertkit probe points --model M`"""
    from bertkit.probing.points import EXAMPLE, SYMBOLS, list_points

    probed = list_points(Probing(offline=common.offline).request(model), sentence or EXAMPLE)
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
    console.info(f"sizes are those of {found['example']['sentence']!r}, {found['example']['tokens']} tokens")


def contextuality(
    model: Models = None,
    data: Texts = None,
    sentences: Sentences = 1000,
    word: Annotated[
        list[str] | None, option("--word", metavar="WORD", help="Look at these words only. Repeatable.")
    ] = None,
    min_contexts: Annotated[
        int, typer.Option("--min-contexts", metavar="N", min=2, help="A word must occur in so many sentences.")
    ] = 5,
    max_contexts: Annotated[
        int, typer.Option("--max-contexts", metavar="N", min=2, help="Of a word in more sentences, so many are drawn.")
    ] = 100,
    static_layer: Annotated[
        list[int] | None,
        option(
            "--static-layer",
            metavar="L",
            min=0,
            help="Write one static vector a word, its first principal component in this layer, as word2vec text."
            " Repeatable.",
        ),
    ] = None,
    *,
    common: Probing,
) -> None:
    """How much a word's vector depends on its sentence: `bertkit probe contextuality --model M --data text.txt`"""
    from bertkit.probing.contextuality.run import ContextualitySettings, probe_contextuality

    settings = ContextualitySettings(
        sentences=sentences,
        words=word or [],
        min_contexts=min_contexts,
        max_contexts=max_contexts,
        static_layers=static_layer or [],
        seed=common.seed,
    )
    common.show(probe_contextuality(common.request(model, data), settings))


def similarity(
    model: Models = None,
    data: Texts = None,
    sentences: Sentences = 1000,
    words: Annotated[
        int,
        typer.Option("--words", metavar="N", min=2, help="Words drawn from the sentences, the same for all models."),
    ] = 5000,
    variance: Annotated[
        float,
        typer.Option(
            "--variance", metavar="SHARE", min=0.01, max=1, help="Variance that SVCCA keeps of each layer, by SVD."
        ),
    ] = 0.99,
    *,
    common: Probing,
) -> None:
    """CKA and SVCCA between layers, models, checkpoints: `bertkit probe similarity --model A --model B --data t.txt`"""
    from bertkit.probing.similarity.run import SimilaritySettings, probe_similarity

    settings = SimilaritySettings(sentences=sentences, words=words, variance=variance, seed=common.seed)
    common.show(probe_similarity(common.request(model, data), settings))
