"""`bertkit push`: share a finished model on the Hub.

The work is done in bertkit.report.push; sibling export.py writes a directory.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bertkit.cli.console import console, result, size
from bertkit.cli.options import Common, option
from bertkit.run import runs_root


def push(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Run (its directory or id), or a model directory.")],
    repository: Annotated[str, typer.Argument(metavar="ORG/NAME", help="Repository on the Hub; created if missing.")],
    private: Annotated[bool, option("--private", help="Make a new repository private.", metavar="")] = False,
    license_id: Annotated[
        str | None, option("--license", metavar="ID", help="License in the model card, such as apache-2.0.")
    ] = None,
    revision: Annotated[str | None, option("--revision", metavar="BRANCH", help="Upload to this branch.")] = None,
    new_card: Annotated[bool, option("--new-card", help="Replace the repository's existing card.", metavar="")] = False,
    dry_run: Annotated[
        bool, option("--dry-run", help="Show files and card without uploading them.", metavar="")
    ] = False,
    *,
    common: Common,
) -> None:
    """Upload a finished model to the Hugging Face Hub, with a card of its results and its recipe.

    Log in first: `hf auth login`, or set HF_TOKEN.

    Examples:
    `bertkit push bert-tiny-01234567 me/bert-tiny --dry-run`
    `bertkit push runs/mine me/mine --license apache-2.0 --private`
    """
    from bertkit.errors import DataError
    from bertkit.report.push import push as upload
    from bertkit.report.push import run_of_model
    from bertkit.run.find import find_run

    run = run_of_model(Path(model))
    if run is None and not Path(model).exists():
        try:
            run = find_run(model, runs_root())
        except DataError as error:
            raise DataError(f"{error}; push takes a run or a model directory") from error
    pushed = upload(
        model,
        repository,
        run=run,
        private=private,
        license_id=license_id,
        revision=revision,
        new_card=new_card,
        dry_run=dry_run,
        offline=common.offline,
    )
    console.table(("file", "size"), [(name, size(count)) for name, count in pushed.files.items()])
    if dry_run and pushed.card is not None and not common.as_json:
        result(pushed.card, as_document=True)
    if common.as_json:
        document = {"repository": repository, "url": pushed.url, "files": pushed.files, "card": pushed.card}
        result(document, as_json=True)
    elif not dry_run:
        result(pushed.url)
