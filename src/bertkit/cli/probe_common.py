"""Options that the kinds of `bertkit probe` share, and how each of them begins and ends.

Nothing here follows a paper. A kind's command takes these aliases and `common: Probing`, makes its request by
`common.request`, calls its job and hands what came of it to `common.tell`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from bertkit.cli.common import DEFAULT_MODEL, model_or_default, option, story
from bertkit.cli.shared import Computing

if TYPE_CHECKING:
    from bertkit.probing.run import Probed, ProbeRequest

Models = Annotated[
    list[str] | None,
    option(
        "--model",
        metavar="MODEL",
        help="A Hub id, a model or a run directory; RUN@500 is the checkpoint of that step, RUN@all every one that the"
        f" run has kept. Repeatable where a probe compares models (default: BERTKIT_MODEL, else {DEFAULT_MODEL}).",
    ),
]
Texts = Annotated[
    list[str] | None,
    option(
        "--data",
        metavar="SOURCE...",
        help="Text: files, directories, globs, hub:ORG/NAME or builtin:pydocs; or treebanks (.conllu).",
    ),
]
Sentences = Annotated[
    int, typer.Option("--sentences", metavar="N", min=1, help="Sentences, drawn at random from the text.")
]
DrawSeed = Annotated[int, typer.Option("--seed", metavar="N", min=0, help="Of all random choices.")]


@dataclass(frozen=True)
class Probing(Computing):
    """Of every kind that writes a run directory."""

    seed: DrawSeed = 0

    def request(self, models: Sequence[str] | None, data: Sequence[str] | None = None) -> ProbeRequest:
        """What every kind is told, from the options that all of them have."""
        from bertkit.probing.run import ProbeRequest

        return ProbeRequest(
            models=models or [model_or_default(None)],
            data=data or (),
            progress=story.progress,
            **self.request_fields(),
        )

    def tell(self, probed: Probed) -> None:
        """What was found as sentences on stderr; the contract's document or the run's directory on stdout."""
        for sentence in probed.sentences:
            story.info(sentence)
        assert probed.run is not None
        self.finish(probed.run, probed.document)
