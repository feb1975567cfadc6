"""`bertkit serve`: an HTTP server for finished models.

The work is done in bertkit.inference.serving.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Annotated

import typer

from bertkit.cli.console import console, result
from bertkit.cli.generated_options import spelled
from bertkit.cli.options import Common, Device, Precision
from bertkit.errors import UsageError
from bertkit.inference.serving.settings import ServeSettings

_EXTRA = ("fastapi", "uvicorn", "prometheus_client")


def serve(
    models: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL",
            help="Hub ids, model directories or run directories; NAME=MODEL sets the name that requests use (default:"
            " the Hub id, or the directory's name).",
        ),
    ],
    *,
    settings: Annotated[
        ServeSettings,
        spelled(
            long="--long <cut|error>",
            wait_ms="--wait-ms X",
            max_body_mb="--max-body-mb X",
            client_seconds="--client-seconds X",
            stop_seconds="--stop-seconds N",
        ),
    ],
    device: Device = None,
    precision: Precision = None,
    common: Common,
) -> None:
    """Serve models over HTTP: embeddings in OpenAI's format, labels, entities, answers, reranking, mask filling.

    Requests from many clients share batches. After SIGTERM, accepted requests are answered before the server ends.
    There is no password: keep the address private, or put a proxy in front of it.

    Examples:
    `bertkit serve RUN --port 8000`
    `bertkit serve minilm=sentence-transformers/all-MiniLM-L6-v2 ner=RUN`
    """
    if missing := [name for name in _EXTRA if find_spec(name) is None]:
        raise UsageError(f"bertkit serve needs {', '.join(missing)}: pip install 'bertkit[serve]'")
    from bertkit.inference.serving.run import serve_models

    summary = serve_models(
        models,
        settings,
        device=device or "auto",
        precision=precision or "auto",
        offline=common.offline,
        tell=console.info,
        announce=console.announce,
    )
    counts = ", ".join(f"{count:,} with {status}" for status, count in sorted(summary["answers"].items()))
    console.info(f"stopped; answers: {counts or 'none'}")
    if common.as_json:
        result(summary, as_json=True)
