"""Writes figures as SVG and PNG: equal figures give identical files, in any language.

Sibling plots.py draws training curves; evaluation/plots.py has the style of all other figures.
"""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

from bertkit.files import replacing, write_bytes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

log = logging.getLogger(__name__)

_DOTS_PER_INCH = 130
_MOST_CHARACTERS = 20
"""A warning names at most this many characters."""
_NO_GLYPH = re.compile(r"Glyph (\d+) .*missing from")
"""matplotlib's warning about a character that a font lacks."""


def save(figure: Figure, stem: Path) -> list[Path]:
    """Write `stem.svg` and `stem.png`; the same figure gives the same bytes."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    paths = [stem.with_name(f"{stem.name}{suffix}") for suffix in (".svg", ".png")]
    write_bytes(paths[0], svg_of(figure))
    figure.set_layout_engine("none")  # keep the layout of the first drawing
    missing = _write_png(figure, paths[1])
    if missing and _add_fonts(figure, missing):
        missing = _write_png(figure, paths[1])
    if missing:
        some = "".join(sorted(missing)[:_MOST_CHARACTERS])
        log.warning("%s: the font has no %s and shows boxes there; %s is complete", paths[1], some, paths[0].name)
    return paths


def _write_png(figure: Figure, path: Path) -> set[str]:
    """Write the figure; the characters that its fonts lack."""
    with _characters_without_glyph() as missing, replacing(path) as file:
        figure.savefig(file, format="png", dpi=_DOTS_PER_INCH, metadata={"Software": None})
    return missing


def _add_fonts(figure: Figure, missing: set[str]) -> bool:
    """Give the texts that contain these characters the installed fonts that have them; false if no font has any.
    matplotlib takes only fonts that are named."""
    from matplotlib import font_manager
    from matplotlib.text import Text

    names: list[str] = []
    wanted = set(map(ord, missing))
    for entry in sorted(font_manager.fontManager.ttflist, key=lambda each: (each.name, each.fname)):
        if not wanted or entry.name.startswith("Last Resort") or entry.name in names:
            continue
        try:
            found = wanted & font_manager.get_font(entry.fname).get_charmap().keys()
        except (OSError, RuntimeError):  # removed since matplotlib listed it, or damaged
            continue
        if found:
            names.append(entry.name)
            wanted -= found
    for text in figure.findobj(Text):
        assert isinstance(text, Text)
        if missing & set(text.get_text()):
            text.set_fontfamily([*text.get_fontfamily(), *names])
    return bool(names)


def svg_of(figure: Figure) -> bytes:
    """A figure as SVG; the same figure gives the same bytes."""
    import matplotlib

    _take_dollars_as_they_are(figure)
    with matplotlib.rc_context({"svg.hashsalt": "bertkit", "svg.fonttype": "none"}), BytesIO() as file:
        with _characters_without_glyph():  # an SVG contains text, which a viewer draws with its own fonts
            figure.savefig(file, format="svg", metadata={"Date": None})
        return file.getvalue()


@contextmanager
def _characters_without_glyph() -> Iterator[set[str]]:
    """The characters that are drawn within the block and that the font lacks, instead of matplotlib's warnings."""
    missing: set[str] = set()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield missing
    for each in caught:
        if found := _NO_GLYPH.match(str(each.message)):
            missing.add(chr(int(found[1])))
        else:
            warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)


def _take_dollars_as_they_are(figure: Figure) -> None:
    """Show `$` literally: texts are names of runs, labels and files, not formulas, except powers of ten on log axes."""
    from matplotlib.text import Text

    logarithmic = [axis for axes in figure.axes for axis in (axes.xaxis, axes.yaxis) if axis.get_scale() == "log"]
    powers = {label for axis in logarithmic for label in axis.findobj(Text)} - {axis.label for axis in logarithmic}
    for text in figure.findobj(Text):
        if text not in powers:
            text.set_parse_math(False)
