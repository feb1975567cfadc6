"""builtin:pydocs: the documentation strings of the Python installation, real English on every machine.

Not from a paper. The standard library and the distributions that bertkit needs (and no other installed ones) are read
by parsing their source, never by importing it; docstrings.py converts a string into prose. A module is a document, and
each paragraph is one of its lines.
"""

from __future__ import annotations

import ast
import logging
import multiprocessing
import platform
import re
import sysconfig
import warnings
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from importlib import metadata
from pathlib import Path

from bertkit.cache import cache_file
from bertkit.errors import DataError, worker_ended
from bertkit.files import write_text
from bertkit.openmp import usable_cores
from bertkit.text.docstrings import prose

# Increased when the harvesting rules change, so that no older harvest is used.
VERSION = 1
MIN_DOCUMENT_CHARACTERS = 300
_DISTRIBUTION = "bertkit"
_LEFT_OUT = frozenset({"test", "tests", "testing", "site-packages", "dist-packages", "_vendor", "vendor", "externals"})
# Functions with which numpy, torch and scipy set the documentation strings of compiled objects.
_DOCUMENTING_CALLS = frozenset({"add_newdoc", "add_docstr", "add_doc", "_add_docstr", "add_docstr_all", "_add_newdoc"})
_Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
log = logging.getLogger(__name__)


def harvest(cache: Path) -> Path:
    """The corpus as a text file with a blank line between documents; created on the first call for this installation.

    Raises:
        DataError: the installation has no sources (only compiled files), or a worker process was killed.
    """
    distributions = required_distributions(_DISTRIBUTION)
    versions = sorted((name, found.version) for name, found in distributions.items())
    identity = [VERSION, platform.python_implementation(), platform.python_version(), versions]
    path = cache_file(cache, "pydocs", identity, ".txt")
    if path.is_file():
        return path
    log.info("harvesting the documentation strings of Python and %s packages; this is done once", len(versions))
    files = list(source_files(distributions))
    documents = list(distinct_documents(_harvested(files)))
    if not documents:
        raise DataError("builtin:pydocs: this Python installation has no source files with documentation strings")
    write_text(path, "\n\n".join("\n".join(document) for document in documents) + "\n")
    return path


def required_distributions(name: str) -> dict[str, metadata.Distribution]:
    """All installed distributions that `name` needs, directly or indirectly, without its extras and itself."""
    found: dict[str, metadata.Distribution] = {}
    waiting, seen = [name], set[str]()
    while waiting:
        key = re.sub(r"[-_.]+", "-", waiting.pop()).lower()
        if key in seen:
            continue
        seen.add(key)
        try:
            distribution = metadata.distribution(key)
        except metadata.PackageNotFoundError:
            continue  # needed on another platform or Python version only
        found[key] = distribution
        for requirement in distribution.requires or []:
            wanted, _, marker = requirement.partition(";")
            match = re.match(r"[\w.-]+", wanted)
            if match and "extra" not in marker:
                waiting.append(match[0])
    found.pop(name, None)
    return found


def source_files(distributions: dict[str, metadata.Distribution]) -> Iterator[Path]:
    """Source files of the standard library, then of each distribution by name, without tests and vendored copies."""
    library = Path(sysconfig.get_path("stdlib"))
    yield from sorted(path for path in library.rglob("*.py") if not _LEFT_OUT & set(path.relative_to(library).parts))
    for _, distribution in sorted(distributions.items()):
        files = (file for file in distribution.files or [] if file.suffix == ".py" and not _LEFT_OUT & set(file.parts))
        yield from sorted(Path(str(distribution.locate_file(file))) for file in files)


def documented_prose(path: Path) -> list[str]:
    """Paragraphs of all documentation strings of a source file, in source order."""
    try:
        content = path.read_bytes()
        if b'"""' not in content and b"'''" not in content:
            return []  # parsing takes nine tenths of the time
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(content)
    except (OSError, SyntaxError, ValueError, RecursionError):
        return []  # a template, a file for another version of Python, or one that is not installed
    return [paragraph for docstring in _docstrings(tree) for paragraph in prose(docstring)]


def distinct_documents(documents: Iterable[list[str]]) -> Iterator[list[str]]:
    """Documents without paragraphs that occur in an earlier one; short documents are joined to the next."""
    seen: set[str] = set()
    gathered: list[str] = []
    for paragraphs in documents:
        for paragraph in paragraphs:
            key = paragraph.lower()
            if key not in seen:
                seen.add(key)
                gathered.append(paragraph)
        if sum(map(len, gathered)) >= MIN_DOCUMENT_CHARACTERS:
            yield gathered
            gathered = []
    if gathered:
        yield gathered


def _harvested(files: list[Path]) -> Iterator[list[str]]:
    workers = usable_cores()
    if workers == 1:
        yield from map(documented_prose, files)
        return
    try:
        with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
            yield from pool.map(documented_prose, files, chunksize=32)
    except BrokenProcessPool as error:
        raise worker_ended("run again to harvest builtin:pydocs from the beginning") from error


def _docstrings(tree: ast.Module) -> list[str]:
    found: list[tuple[int, str]] = []
    for node in ast.walk(tree):
        if isinstance(node, _Documented):
            docstring = ast.get_docstring(node, clean=False)
            if docstring:
                found.append((getattr(node, "lineno", 0), docstring))
        elif isinstance(node, ast.Call) and _called(node.func) in _DOCUMENTING_CALLS:
            texts = [argument for argument in ast.walk(node) if isinstance(argument, ast.Constant)]
            found += [(text.lineno, text.value) for text in texts if isinstance(text.value, str) and "\n" in text.value]
    return [docstring for _, docstring in sorted(found)]


def _called(function: ast.expr) -> str:
    return (
        function.attr if isinstance(function, ast.Attribute) else function.id if isinstance(function, ast.Name) else ""
    )
