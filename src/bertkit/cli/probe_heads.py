"""`bertkit probe heads`: what each attention head is worth.

Nothing here follows a paper; the job of the same name does.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from bertkit.cli.options import DataDir, Models, Texts, option
from bertkit.cli.probe_common import Probing


def heads(
    model: Models = None,
    data: Texts = None,
    task: Annotated[
        str | None,
        option(
            "--task",
            metavar="TASK",
            help="The task that the model was fine-tuned on, in place of words of --data (default: its run's own).",
        ),
    ] = None,
    data_dir: DataDir = None,
    sentences: Annotated[
        int,
        typer.Option("--sentences", metavar="N", min=1, help="Sentences, or training examples, for importance."),
    ] = 1000,
    score_sentences: Annotated[
        int,
        typer.Option(
            "--score-sentences",
            metavar="N",
            min=1,
            help="Other sentences, or dev examples, that every ablation is scored on.",
        ),
    ] = 200,
    normalise: Annotated[
        Literal["layer", "none"],
        typer.Option("--normalise", metavar="HOW", help="Importance by its L2 norm over the layer, or none."),
    ] = "layer",
    prune_share: Annotated[
        float, typer.Option("--prune-share", metavar="SHARE", min=0.001, max=1, help="Of all heads, in each step.")
    ] = 0.1,
    random_orders: Annotated[
        int, typer.Option("--random-orders", metavar="N", min=0, help="Random orders of pruning, as a baseline.")
    ] = 3,
    *,
    common: Probing,
) -> None:
    """Which heads a model could do without: `bertkit probe heads --model M --data text.txt`, or --task rte"""
    from bertkit.probing.heads.run import HeadsSettings, probe_heads

    settings = HeadsSettings(
        task=task,
        sentences=sentences,
        score_sentences=score_sentences,
        normalise=normalise,
        prune_share=prune_share,
        random_orders=random_orders,
        seed=common.seed,
    )
    common.show(
        probe_heads(common.request(model, data), settings, data_dir=None if data_dir is None else Path(data_dir))
    )
