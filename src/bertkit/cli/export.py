"""`bertkit export`: write a model in the format of other tools, checked against its source.

The work is done in bertkit.inference.export.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from bertkit.cli.console import console, result, size
from bertkit.cli.options import Common

SHOWN_WEIGHTS = 3
"""How many names of weights are shown per group; export.json has them all."""


def export(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A Hub id, a model directory or a run directory.")],
    to: Annotated[
        Path,
        typer.Option(
            "--to",
            "--out",
            metavar="DIR",
            show_default=False,
            help="Directory to write; replaces an earlier export (with --format static it must be new or empty).",
        ),
    ],
    kind: Annotated[
        Literal["hf", "int8", "onnx", "static"],
        typer.Option(
            "--format",
            help="hf: a Hugging Face directory; int8: a quarter of the size and faster on a CPU, for bertkit only;"
            " onnx: an ONNX graph (needs the extra `onnx`); static: a table of token vectors, for `embed` and"
            " sentence-transformers.",
        ),
    ] = "hf",
    width: Annotated[
        int | None,
        typer.Option("--width", metavar="N", min=1, help="With --format static: width of the vectors (default: 256)."),
    ] = None,
    calibrate: Annotated[
        Path | None,
        typer.Option(
            "--calibrate",
            metavar="FILE",
            help="With --format int8: file of lines like those that the model will read. Activation ranges are then"
            " fixed from these lines, which is about twice as fast on processors that multiply bytes (VNNI).",
        ),
    ] = None,
    int8: Annotated[bool, typer.Option("--int8", help="With --format onnx: write a graph with int8 weights.")] = False,
    *,
    common: Common,
) -> None:
    """Export a model for other tools and check it against its source: `bertkit export RUN --to DIR`"""
    from bertkit.errors import UsageError
    from bertkit.files import read_json
    from bertkit.inference.export.export import Format, export_model
    from bertkit.models.files.model_files import CONFIG_FILE
    from bertkit.report.card import tuned_in

    if int8 and kind in ("hf", "static"):
        raise UsageError("--int8: works only with --format onnx; for a directory of int8 weights give --format int8")
    if calibrate is not None and kind != "int8":
        raise UsageError("--calibrate: works only with --format int8")
    if width is not None and kind != "static":
        raise UsageError("--width: works only with --format static")
    if to.resolve() in (Path.cwd(), *Path.cwd().parents):
        raise UsageError(f"--to {to}: is or contains the working directory, which cannot be replaced; name a new one")
    if kind == "static":
        from bertkit.distillation.static_table import StaticTable, write_static

        settings = StaticTable() if width is None else StaticTable(width=width)
        made = write_static(model, to, settings, offline=common.offline, progress=console.progress)
        console.info(f"{made['tokens']:,} tokens, vectors of width {made['width']}")
        result({"to": to, **made} if common.as_json else to, as_json=common.as_json)
        return
    written: Format = "onnx-int8" if int8 and kind == "onnx" else kind
    record = export_model(model, to, kind=written, calibrate=calibrate, offline=common.offline)
    if record["weights"]["unexpected"]:
        console.warn(f"{model}: weights that the model does not use were left out; they are listed below")
    console.table(("weights", "number", ""), _weights(record["weights"]), title=f"{record['family']}: {model}")
    if not record["tokenizer"]:
        console.warn(f"{model}: has no tokenizer files, so none were written")
    before, after = (record["weights_bytes"][name] for name in ("source", "export"))
    console.info(f"weights: {size(before)} in the source, {size(after)} in the export ({after / before:.0%})")
    probe = record["probe"]
    how = "" if record["measure"] == "absolute" else f"; {record['measure']}"
    console.info(
        f"largest difference from the source {record['largest_difference']:.3g} (accepted {record['tolerance']:g}"
        f"{how}), over {probe['sequences']} sequences of {probe['tokens']:,} tokens"
    )
    if kind != "int8" and (to / CONFIG_FILE).is_file():
        for sentence in tuned_in(read_json(to / CONFIG_FILE)):
            console.info(sentence)
    result({"to": to, **record} if common.as_json else to, as_json=common.as_json)


def _weights(report: dict[str, Any]) -> list[tuple[str, int, str]]:
    rows = [("loaded", int(report["loaded"]), "")]
    for kind in ("missing", "unexpected", "reinitialised", "tied"):
        names = report[kind]
        more = ", ..." if len(names) > SHOWN_WEIGHTS else ""
        rows.append((kind, len(names), ", ".join(names[:SHOWN_WEIGHTS]) + more))
    return rows
