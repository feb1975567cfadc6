"""`bertkit probe behaviour`: what a model prefers, in minimal pairs and in blanks.

Nothing here follows a paper; the job of the same name does.
"""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from bertkit.cli.common import AsJson, Device, Offline, Quiet, RunDir, Verbose
from bertkit.cli.probe_common import BatchTokens, DrawSeed, Models, finish, probe_request


def behaviour(
    model: Models = None,
    data: Annotated[
        list[str] | None,
        typer.Option(
            "--data",
            metavar="PATH...",
            show_default=False,
            help="Minimal pairs (a folder or .jsonl file of BLiMP's shape) or diagnostics (a .tsv file of"
            " lm-diagnostics, or a folder of them). Repeatable.",
        ),
    ] = None,
    rule: Annotated[
        Literal["original", "within_word_l2r", "left_to_right", "encoder_left_to_right", "masked_next_token"] | None,
        typer.Option("--rule", show_default=False, help="How a sentence is scored (default: by the model's head)."),
    ] = None,
    pairs: Annotated[
        int | None,
        typer.Option(
            "--pairs", metavar="N", min=1, show_default=False, help="Pairs drawn from each paradigm (default: all)."
        ),
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(
            "--only",
            metavar="PATTERN",
            show_default=False,
            help="Paradigms, fields, phenomena or diagnostics, such as 'anaphor_*' or 'NEG*'. Repeatable.",
        ),
    ] = None,
    top: Annotated[
        list[int] | None,
        typer.Option(
            "--top", metavar="K", min=1, show_default=False, help="K of the accuracy in a blank (default: 1 5)."
        ),
    ] = None,
    ending: Annotated[
        str, typer.Option("--ending", metavar="TEXT", show_default=False, help="Behind a blank, such as a full stop.")
    ] = "",
    seed: DrawSeed = 0,
    batch_tokens: BatchTokens = None,
    run_dir: RunDir = None,
    device: Device = None,
    offline: Offline = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
    verbose: Verbose = 0,
) -> None:
    """Grammar, common sense, roles and negation by preference: `bertkit probe behaviour --model M --data PATH`"""
    from bertkit.jobs.probing.behaviour import BehaviourSettings, probe_behaviour

    settings = BehaviourSettings(rule=rule, pairs=pairs, only=only or [], top=top or [1, 5], ending=ending, seed=seed)
    request = probe_request(model, data, device, batch_tokens, run_dir, offline)
    finish(probe_behaviour(request, settings), as_json=as_json)
