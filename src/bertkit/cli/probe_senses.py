"""`bertkit probe senses`: word senses by nearest neighbours.

Nothing here follows a paper; the job of the same name does.
"""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from bertkit.cli.options import Models, option
from bertkit.cli.probe_common import Probing
from bertkit.cli.probe_syntax import StoreGb


def senses(
    model: Models = None,
    data: Annotated[
        list[str] | None,
        option("--data", metavar="FILE", help="Examples: a .jsonl file of SemCor's shape, or .data.xml."),
    ] = None,
    test_data: Annotated[
        list[str] | None,
        option(
            "--test-data",
            metavar="FILE",
            help="X.data.xml with X.gold.key.txt beside it, or .jsonl. Repeatable (default: a fifth of the sentences of"
            " --data).",
        ),
    ] = None,
    k: Annotated[
        list[int] | None,
        option("--k", metavar="N", min=1, help="Neighbours that vote. Repeatable (default: 1 3 5 10)."),
    ] = None,
    capped: Annotated[
        bool,
        typer.Option("--capped/--not-capped", help="No more vote than the word's rarest sense has examples."),
    ] = True,
    candidates: Annotated[
        Literal["lemma", "lemma-pos", "word"],
        typer.Option(
            "--candidates", metavar="WHAT", help="What examples share: lemma, lemma-pos or word (as written)."
        ),
    ] = "lemma",
    word: Annotated[
        list[str] | None, option("--word", metavar="LEMMA", help="Draw the senses of this word. Repeatable.")
    ] = None,
    sentences: Annotated[
        int, typer.Option("--sentences", metavar="N", min=0, help="Sentences of --data drawn at random; 0: all.")
    ] = 0,
    store_gb: StoreGb = 8.0,
    *,
    common: Probing,
) -> None:
    """Word senses by nearest neighbours, layer by layer: `bertkit probe senses --model M --data semcor.jsonl`"""
    from bertkit.probing.senses.run import SensesSettings, probe_senses

    settings = SensesSettings(
        ks=k or [1, 3, 5, 10],
        capped=capped,
        candidates=candidates,
        sentences=sentences,
        words=word or [],
        seed=common.seed,
    )
    common.show(probe_senses(common.request(model, data), settings, test_data=test_data or (), store_gb=store_gb))
