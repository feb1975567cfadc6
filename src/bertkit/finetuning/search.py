"""The settings that a suite tries: all combinations of a grid's values, or a random sample.

Bergstra and Bengio 2012, "Random search for hyper-parameter optimization", JMLR 13: if only a few settings matter,
random trials cover those better than a grid. Trials are drawn from a scrambled Halton sequence (Owen 2017,
arXiv:1706.02808), which leaves no large gaps. Sibling sweep.py makes the runs.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence

from bertkit.errors import UsageError

MOST_RUNS = 1000
_RANGE = re.compile(r"(?P<low>[-+.\deE]+?)\.\.(?P<high>[-+.\deE]+)")
_DIGITS = 3
"""Significant digits of a number drawn from a range."""

DEFAULT_SEARCH: Mapping[str, Sequence[str]] = {"lr": ("1e-5..1e-4",), "batch": ("16", "32"), "epochs": ("2..4",)}
"""The default search of `bertkit tune`: approximately the ranges used for BERT, RoBERTa and similar models."""
DEFAULT_TRIALS = 10


def settings_of(grid: Mapping[str, Sequence[str]], trials: int | None, *, seed: int) -> list[dict[str, str]]:
    """The settings, each a value for every key, as written on the command line.

    Args:
        grid: the values of each key, or one range such as `1e-5..1e-4`. Numbers in a range are whole if both ends are;
            otherwise their logarithm is uniform, or they are uniform if the range begins at zero or below.
        trials: how many are drawn; equal ones count once. None: all combinations.
        seed: of the draws.

    Raises:
        UsageError: a range without trials, an empty range, or too many settings.
    """
    ranges = {key: _range(key, values) for key, values in grid.items()}
    if trials is None:
        if named := next((key for key, found in ranges.items() if found is not None), None):
            written = grid[named][0]
            raise UsageError(f"--grid {named}={written}: a range needs --trials N, or write the values: {named}=A,B,C")
        _check_count(math.prod(map(len, grid.values())))
        return [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]
    if not grid:
        raise UsageError(f"--trials {trials}: nothing to search; give --grid, such as --grid lr=1e-5..1e-4")
    _check_count(trials)
    from scipy.stats.qmc import Halton

    drawn = Halton(len(grid), seed=seed).random(trials)
    found = [
        {key: _at(ranges[key], grid[key], float(place)) for key, place in zip(grid, places, strict=True)}
        for places in drawn
    ]
    return list({tuple(each.items()): each for each in found}.values())


def _check_count(count: int) -> None:
    if count > MOST_RUNS:
        raise UsageError(f"--grid makes {count:,} runs, more than {MOST_RUNS:,}; try fewer values")


def _range(key: str, values: Sequence[str]) -> tuple[float, float] | None:
    """The ends of a range; None if the values are listed.

    Raises:
        UsageError: the range is empty, or is mixed with other values.
    """
    matches = [_RANGE.fullmatch(value) for value in values]
    if not any(matches):
        return None
    try:
        (match,) = matches
        assert match is not None
        low, high = float(match["low"]), float(match["high"])
    except ValueError:
        low, high = math.nan, math.nan
    if not low < high:
        raise UsageError(f"--grid {key}={','.join(values)}: expected one range LOW..HIGH, such as {key}=1e-5..1e-4")
    return low, high


def _at(ends: tuple[float, float] | None, values: Sequence[str], place: float) -> str:
    """The value at a place from 0 to 1 (exclusive)."""
    if ends is None:
        return values[int(place * len(values))]
    low, high = ends
    if low.is_integer() and high.is_integer() and not re.search("[.e]", values[0].replace("..", ""), re.IGNORECASE):
        return str(math.floor(low + place * (high - low + 1)))
    number = low * (high / low) ** place if low > 0 else low + place * (high - low)
    return f"{number:.{_DIGITS}g}"
