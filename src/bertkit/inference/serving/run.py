"""`bertkit serve`: loads models under their names, and serves them at an address until a signal arrives.

Not from a paper.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from bertkit.errors import UsageError
from bertkit.inference.model import Model
from bertkit.inference.serving.app import build_app
from bertkit.inference.serving.connections import address_of, open_socket, run_server
from bertkit.inference.serving.served import ServedModel
from bertkit.inference.serving.settings import ServeSettings
from bertkit.run.similar_models import is_local_name

_MODEL_DIRECTORY = "model"


def serve_models(
    given: Sequence[str],
    settings: ServeSettings,
    *,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    precision: Literal["auto", "fp32", "bf16"] = "auto",
    offline: bool = False,
    tell: Callable[[str], None] = lambda line: None,
    announce: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Serve models until a signal arrives and everything that was accepted is answered.

    Args:
        given: models, each optionally preceded by a name: `NAME=MODEL`.
        settings: address and limits.
        device: where to compute.
        precision: of vectors, as for `bertkit embed`; everything else is computed in fp32.
        offline: read Hub models only from the local cache.
        tell: prints lines about the progress.
        announce: prints the line with the address of the server.

    Returns:
        `address`, `seconds`, and `answers` by status.

    Raises:
        UsageError: two models have the same name, or the address cannot be listened on.
        DataError: a model cannot be read.
    """
    by_name = names_of(given)
    with open_socket(settings.host, settings.port) as listener:
        address = address_of(listener)
        models = []
        for name, model in by_name.items():
            served = ServedModel.load(name, Model(model, device=device, precision=precision, offline=offline))
            tell(f"{name}: {', '.join(sorted(served.abilities))}")
            models.append(served)
        app, service = build_app(models, settings)
        started = time.monotonic()

        def stopping() -> None:
            service.draining = True
            tell("stopping; what was accepted is answered first")

        run_server(
            app,
            listener,
            client_seconds=settings.client_seconds,
            stop_seconds=settings.stop_seconds,
            on_listening=lambda: announce(f"listening on {address}"),
            on_stopping=stopping,
        )
    answers = service.metrics.answers_by_status()
    return {"address": address, "seconds": round(time.monotonic() - started, 3), "answers": answers}


def names_of(given: Sequence[str]) -> dict[str, str]:
    """Models by the names that requests use: the name before `=`, an unchanged Hub id, or else the name of the
    directory (for RUN/model, the run's). Clients do not need to know the path.

    Raises:
        UsageError: two models have the same name, or a name is empty.
    """
    found: dict[str, str] = {}
    for each in given:
        name, sign, model = each.partition("=")
        if not sign or "/" in name or Path(each).exists():
            name, model = _own_name(each), each
        if not name or not model:
            raise UsageError(f"{each}: expected MODEL or NAME=MODEL")
        if name in found:
            raise UsageError(f"{each}: a model named {name} is served already; give it another name: NAME={model}")
        found[name] = model
    return found


def _own_name(model: str) -> str:
    path = Path(model).expanduser()
    if not is_local_name(model) and not path.exists():
        return model
    path = path.resolve()
    return path.parent.name if path.name == _MODEL_DIRECTORY and path.parent.name else path.name
