"""builtin:pydocs: only prose, found without importing anything, the same on every run."""

from __future__ import annotations

import os
import re
from importlib import metadata
from pathlib import Path

import pytest

from bertkit.errors import DataError
from bertkit.text import pydocs
from bertkit.text.docstrings import prose

NUMPY_STYLE = """
    mean(a, axis=None, *, out=None)

    Compute the arithmetic mean along the
    specified axis [1]_.

    Returns the average of :class:`~numpy.ndarray` elements, see `the guide <https://x.org>`_::

        >>> mean([1, 2])
        1.5

    Parameters
    ----------
    a : array_like
        Array of *numbers* whose mean is ``desired``. If `a` is not an
        array, a conversion is tried.
    axis : None or int, optional

    See Also
    --------
    average : The weighted average of all the things.

    Notes
    -----
    .. versionadded:: 1.7
       This is not for the reader of the text.

    .. note:: The mean is the sum of the elements divided by their number.

    .. math:: x = \\frac{1}{n}

    ====  ====
    key   value of the table
    ====  ====

    Examples
    --------
    Here is how it is used in the wild.

    >>> import this
    The Zen of Python, by Tim Peters
"""
GOOGLE_STYLE = """Fetches the rows of a table.

Args:
    handle (Table): An open table that the rows are fetched from,
        which must not be closed.
    keys: the keys of the rows that are wanted

Returns:
    A dict that maps the keys to the rows.

    :param other: This is what Sphinx calls a field.
    :type other: int or the like of it

- First point that is made in the list.
- Second point that is made
  over two lines.
"""


def test_numpy_style_leaves_sentences_only() -> None:
    assert prose(NUMPY_STYLE) == [
        "Compute the arithmetic mean along the specified axis.",
        "Array of numbers whose mean is desired. If a is not an array, a conversion is tried.",
        "The mean is the sum of the elements divided by their number.",
    ]


def test_google_style_and_sphinx_fields_leave_sentences_only() -> None:
    assert prose(GOOGLE_STYLE) == [
        "Fetches the rows of a table.",
        "An open table that the rows are fetched from, which must not be closed.",
        "The keys of the rows that are wanted.",
        "A dict that maps the keys to the rows.",
        "This is what Sphinx calls a field.",
        "First point that is made in the list.",
        "Second point that is made over two lines.",
    ]


@pytest.mark.parametrize("text", ["", "x", "foo(a, b) -> int", ">>> a\n1", "a : int\nb : str", "==== ====", "$ ls -l"])
def test_what_is_no_prose_gives_nothing(text: str) -> None:
    assert prose(text) == []


def test_source_is_parsed_and_never_imported(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text(
        '"""What the module is for, in a sentence."""\nraise SystemExit("imported")\n'
        'class A:\n    """This is a class of the module."""\n'
        '    def f(self):\n        """It is not in the least lost."""\n'
        'add_newdoc("numpy", "f", """\nThe documentation of a compiled function is here.\n""")\n'
    )
    assert pydocs.documented_prose(path) == [
        "What the module is for, in a sentence.",
        "This is a class of the module.",
        "It is not in the least lost.",
        "The documentation of a compiled function is here.",
    ]
    path.write_text('"""A file that is not Python""" ?')
    assert pydocs.documented_prose(path) == []


def test_paragraphs_are_distinct_and_short_documents_joined() -> None:
    long = "A sentence that is long enough for a document of its own. " * 6
    documents = list(pydocs.distinct_documents([["One."], ["Two.", "one."], [long], ["Two."], ["Three."]]))
    assert documents == [["One.", "Two.", long], ["Three."]]


def test_only_what_bertkit_needs_is_read() -> None:
    names = set(pydocs.required_distributions("bertkit"))
    assert {"torch", "numpy", "tokenizers", "sympy"} <= names
    assert not names & {"bertkit", "pytest", "ruff", "mypy", "transformers", "hypothesis"}


@pytest.fixture(scope="module")
def small_harvest(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two separate harvests of a few packages."""
    with pytest.MonkeyPatch.context() as patch:
        few = {name: metadata.distribution(name) for name in ("rich", "networkx")}
        patch.setattr(pydocs, "required_distributions", lambda name: few)
        patch.setattr(pydocs, "source_files", _without_library(pydocs.source_files))
        first, second = (pydocs.harvest(tmp_path_factory.mktemp("cache")) for _ in range(2))
        assert pydocs.harvest(first.parents[1]) == first
        return first, second


def _without_library(source_files: object) -> object:
    def few(distributions: dict[str, metadata.Distribution]) -> list[Path]:
        return [path for path in source_files(distributions) if "site-packages" in path.parts]  # type: ignore[operator]

    return few


def test_a_killed_worker_is_no_bug(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pydocs, "usable_cores", lambda: 2)
    monkeypatch.setattr(pydocs, "documented_prose", os._exit)
    monkeypatch.setattr(pydocs, "source_files", lambda distributions: iter([9]))  # the worker's exit code
    with pytest.raises(DataError, match=r"a worker process ended unexpectedly.*run again to harvest"):
        pydocs.harvest(tmp_path)
    assert not list(tmp_path.rglob("*.txt"))


def test_two_harvests_are_equal(small_harvest: tuple[Path, Path]) -> None:
    first, second = small_harvest
    assert first.read_bytes() == second.read_bytes()
    assert first.name == second.name


def test_the_harvest_reads_like_english(small_harvest: tuple[Path, Path]) -> None:
    text = small_harvest[0].read_text(encoding="utf-8")
    assert len(text) > 500_000
    lines = [line for line in text.split("\n") if line]
    assert len(set(lines)) == len(lines)
    words = re.findall(r"\w+", text.lower())
    common = sum(word in {"the", "of", "a", "to", "is", "and", "in", "for", "be", "it"} for word in words)
    assert common / len(words) > 0.2
    for sign in (">>>", "::", "``", ":class:", "----", "===", ".. "):
        assert sum(sign in line for line in lines) / len(lines) < 0.002, sign
