"""`bertkit report`: runs on one HTML page.

Sibling runs.py prints a run in the terminal.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bertkit.cli.completion import complete_run
from bertkit.cli.console import console, result
from bertkit.cli.options import Output, option
from bertkit.errors import UsageError
from bertkit.run import runs_root
from bertkit.visible import number_of

PAGE = "report.html"


def report(
    runs: Annotated[
        list[str],
        typer.Argument(metavar="RUN", help="Run directories or run ids.", autocompletion=complete_run),
    ],
    out: Annotated[
        Path | None,
        option(
            "--out",
            metavar="FILE",
            help="File to write (default: report.html in the run's directory, or in the working directory for several"
            " runs).",
        ),
    ] = None,
    title: Annotated[
        str, option("--title", metavar="TEXT", help="Heading of the page (default: the runs' names).")
    ] = "",
    *,
    common: Output,
) -> None:
    """Write an HTML page about runs of any kind: results, curves, figures, and how their recipes differ.

    The page needs no network and no other file. The results of several runs are shown side by side.

    Examples:
    `bertkit report bert-tiny-01234567`
    `bertkit report runs/bert-* --out compared.html --title "Masking rates"`
    """
    from bertkit.files import write_text
    from bertkit.report.gather import ReportedRun
    from bertkit.report.page import page
    from bertkit.run.directory import RunDirectory
    from bertkit.run.find import find_run

    by_path: dict[Path, RunDirectory] = {}
    for name in runs:  # a run may be named by its id and by its path
        run = find_run(name, runs_root())
        by_path.setdefault(run.path.resolve(), run)
    found = list(by_path.values())
    path = out or (found[0].path / PAGE if len(found) == 1 else Path(PAGE))
    if path.is_dir():
        raise UsageError(f"--out {path}: is a directory; give a file, such as {path / PAGE}")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, page([ReportedRun.of(run) for run in found], title))
    console.info(f"{number_of(len(found), 'run')} in {path}: open it in a browser")
    result({"report": path, "runs": [run.path for run in found]} if common.as_json else path, as_json=common.as_json)
