"""Options that the kinds of `bertkit probe` share, and how each of them begins and ends.

Nothing here follows a paper. A kind's command takes these aliases, makes its request by `probe_request`, calls its job
and hands what came of it to `finish`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from bertkit.cli.common import DEFAULT_MODEL, model_or_default, result, runs_root, story

if TYPE_CHECKING:
    from bertkit.jobs.probing.base import Probed, ProbeRequest
    from bertkit.run.directory import RunDirectory

Models = Annotated[
    list[str] | None,
    typer.Option(
        "--model",
        metavar="MODEL",
        show_default=False,
        help="A Hub id, a model or a run directory; RUN@500 is the checkpoint of that step, RUN@all every one that the"
        f" run has kept. Repeatable where a probe compares models (default: BERTKIT_MODEL, else {DEFAULT_MODEL}).",
    ),
]
Texts = Annotated[
    list[str] | None,
    typer.Option(
        "--data",
        metavar="SOURCE...",
        show_default=False,
        help="Text: files, directories, globs, hub:ORG/NAME or builtin:pydocs; or treebanks (.conllu).",
    ),
]
Sentences = Annotated[
    int, typer.Option("--sentences", metavar="N", min=1, help="Sentences, drawn at random from the text.")
]
DrawSeed = Annotated[int, typer.Option("--seed", metavar="N", min=0, help="Of all random choices.")]
BatchTokens = Annotated[
    int | None,
    typer.Option(
        "--batch-tokens",
        metavar="N",
        min=1,
        show_default=False,
        help="Tokens computed at once (default: 4096 on a CPU, 32768 on a GPU); changes speed and memory alone.",
    ),
]


def probe_request(
    models: Sequence[str] | None,
    data: Sequence[str] | None,
    device: Literal["auto", "cpu", "cuda"] | None,
    batch_tokens: int | None,
    run_dir: Path | None,
    offline: bool,
) -> ProbeRequest:
    """What every kind is told, from the options that all of them have."""
    from bertkit.jobs.probing.base import ProbeRequest

    def keep_log(run: RunDirectory) -> None:
        story.log_file = run.log_file

    return ProbeRequest(
        models=models or [model_or_default(None)],
        data=data or (),
        device=device or "auto",
        batch_tokens=batch_tokens,
        runs_root=runs_root(),
        run_dir=run_dir,
        offline=offline,
        command=sys.argv,
        begun=keep_log,
        progress=story.progress,
    )


def finish(probed: Probed, *, as_json: bool) -> None:
    """What was found as sentences on stderr; the contract's document or the run's directory on stdout."""
    for sentence in probed.sentences:
        story.info(sentence)
    assert probed.run is not None
    story.info(f"everything is in {probed.run.path}")
    result(probed.document if as_json else probed.run.path, as_json=as_json)
