"""What `bertkit serve` does: models by their names, an address, and a server until a signal comes.

Nothing here follows a paper.
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
from bertkit.models.near_models import looks_local

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
    """Serve models until a signal comes and all that was accepted is answered.

    Args:
        given: models, each perhaps with a name before it: `NAME=MODEL`.
        settings: address and limits.
        device: where to compute.
        precision: of vectors, as of `bertkit embed`; all else is computed in fp32.
        offline: read Hub models from the local cache alone.
        tell: takes lines of the story.
        announce: takes the line that says where the server listens.

    Returns:
        `address`, `seconds`, and `answers` by status.

    Raises:
        UsageError: two models of one name, or an address that cannot be listened on.
        DataError: a model that cannot be read.
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
    """Models by the names that requests give: the one before `=`, a Hub id as it is, else the name of the directory (of
    RUN/model: the run's), since no client needs to know where it lies.

    Raises:
        UsageError: two models of one name, or an empty name.
    """
    found: dict[str, str] = {}
    for each in given:
        name, sign, model = each.partition("=")
        if not sign or "/" in name:
            name, model = _own_name(each), each
        if not name or not model:
            raise UsageError(f"{each}: expected MODEL or NAME=MODEL")
        if name in found:
            raise UsageError(f"{each}: a model named {name} is served already; give it another name: NAME={model}")
        found[name] = model
    return found


def _own_name(model: str) -> str:
    path = Path(model).expanduser()
    if not looks_local(model) and not path.exists():
        return model
    path = path.resolve()
    return path.parent.name if path.name == _MODEL_DIRECTORY and path.parent.name else path.name
