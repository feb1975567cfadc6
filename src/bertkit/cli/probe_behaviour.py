"""`bertkit probe behaviour`: what a model prefers, in minimal pairs and in blanks.

Nothing here follows a paper; the job of the same name does.
"""

from __future__ import annotations

from typing import Annotated, Literal

from bertkit.cli.options import Models, option
from bertkit.cli.probe_common import Probing


def behaviour(
    model: Models = None,
    data: Annotated[
        list[str] | None,
        option(
            "--data",
            metavar="PATH...",
            help="Minimal pairs (a folder or .jsonl file of BLiMP's shape) or diagnostics (a .tsv file of"
            " lm-diagnostics, or a folder of them). Repeatable.",
        ),
    ] = None,
    rule: Annotated[
        Literal["original", "within_word_l2r", "left_to_right", "encoder_left_to_right", "masked_next_token"] | None,
        option("--rule", help="How a sentence is scored (default: by the model's head)."),
    ] = None,
    pairs: Annotated[
        int | None, option("--pairs", metavar="N", min=1, help="Pairs drawn from each paradigm (default: all).")
    ] = None,
    only: Annotated[
        list[str] | None,
        option(
            "--only",
            metavar="PATTERN",
            help="Paradigms, fields, phenomena or diagnostics, such as 'anaphor_*' or 'NEG*'. Repeatable.",
        ),
    ] = None,
    top: Annotated[
        list[int] | None, option("--top", metavar="K", min=1, help="K of the accuracy in a blank (default: 1 5).")
    ] = None,
    ending: Annotated[str, option("--ending", metavar="TEXT", help="Behind a blank, such as a full stop.")] = "",
    *,
    common: Probing,
) -> None:
    """Grammar, common sense, roles and negation by preference: `bertkit probe behaviour --model M --data PATH`"""
    from bertkit.probing.behaviour.run import BehaviourSettings, probe_behaviour

    settings = BehaviourSettings(
        rule=rule, pairs=pairs, only=only or [], top=top or [1, 5], ending=ending, seed=common.seed
    )
    common.show(probe_behaviour(common.request(model, data), settings))
