"""Fetches and loads models in a separate process, because the Hub's client reads its settings once; argv is what to
fetch.

Prints one JSON list: for each model its directory and the sum of all weights, or the error.
"""

from __future__ import annotations

import json
import sys

from bertkit.errors import DataError
from bertkit.models.bge_m3 import find_embedder
from bertkit.models.files.hub import load_model


def fetch(name: str, *, offline: bool) -> dict[str, object]:
    try:
        directory = find_embedder(name, offline=offline)
        model, _ = load_model(directory)
    except DataError as error:
        return {"error": str(error)}
    total = sum(float(parameter.detach().double().sum()) for parameter in model.parameters())
    return {"directory": str(directory), "sum": total}


def main() -> None:
    names = [name for name in sys.argv[1:] if name != "--offline"]
    print(json.dumps([fetch(name, offline="--offline" in sys.argv) for name in names]))


if __name__ == "__main__":
    main()
