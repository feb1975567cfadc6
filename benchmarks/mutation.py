"""Mutation testing: how many small faults, put into the numeric code one at a time, do the tests notice?

    python -m benchmarks.mutation --scratch ../mutants metrics/spans training/average=tests/training/test_trainer.py

DeMillo, Lipton and Sayward 1978, Hints on test data selection. A mutant is a module with one changed operator, number,
condition or aggregation (min, mean, any), or without a statement or returned value. The tests of its module, given or
found by name and imports, run once under a line tracer; each mutant then meets only those that reach its line, the
fastest first. It survives if all pass. A survivor is a hole in the tests, or equivalent to the original: each has to
be read. Only the copy of the checkout in --scratch is changed, where tests run in limited processes. Statements that
touch files or processes, conditions of `while`, messages and annotations are never changed.
"""

from __future__ import annotations

import argparse
import ast
import copy
import importlib
import json
import multiprocessing
import os
import random
import re
import resource
import shutil
import signal
import sys
import time
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import accumulate
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest

CHECKOUT = Path(__file__).parents[1]
UNCOPIED = shutil.ignore_patterns(".git", ".venv", ".*_cache", "__pycache__", "runs", ".hypothesis")
IMPORTED = ("torch", "scipy.stats", "sklearn.metrics", "transformers", "pyarrow", "hypothesis", "matplotlib.figure")
MUTANTS_OF_A_MODULE, TESTS_SECONDS = 10, 6.0
SECONDS, MEMORY_BYTES, FILE_BYTES = 120, 8 << 30, 1 << 29
RISKY = re.compile(r"unlink|rmtree|remove|rename|rmdir|subprocess|fork|kill|\bos\.|shutil|open\(|write|mkdir|Path\(")
TEXT = str | ast.JoinedStr
UNCHANGED_FIELDS = {"annotation", "returns", "decorator_list", "bases"}
UNCHANGED = ast.Raise | ast.Import | ast.ImportFrom | ast.Assert | ast.Delete | ast.JoinedStr
_OPERATOR_PAIRS = [
    (ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.Eq, ast.NotEq), (ast.Is, ast.IsNot), (ast.In, ast.NotIn),
    (ast.Add, ast.Sub), (ast.And, ast.Or), (ast.BitAnd, ast.BitOr), (ast.Mult, ast.Div),
]  # fmt: skip
OPERATORS: dict[type, type] = {ast.FloorDiv: ast.Mult, ast.Mod: ast.Mult, ast.Pow: ast.Mult}
OPERATORS |= {**dict(_OPERATOR_PAIRS), **{b: a for a, b in _OPERATOR_PAIRS}}
_NAME_PAIRS = [
    ("min", "max"), ("sum", "mean"), ("any", "all"), ("floor", "ceil"), ("argmax", "argmin"), ("log", "exp"),
    ("amin", "amax"), ("sin", "cos"), ("minimum", "maximum"),
]  # fmt: skip
NAMES = {**dict(_NAME_PAIRS), **{b: a for a, b in _NAME_PAIRS}, "log1p": "log"}


Mutant = tuple[int, range | None, str, str]
"""Its line, the lines whose tests it meets (None: all that import the module), what changes, and the changed source."""


def drawn_mutants(source: str, seed: str) -> list[Mutant]:
    """A sample of a module's mutants, in the order of its lines."""
    tree = ast.parse(source)
    sites = enumerate(_sites(tree))
    possible = [(site, number) for site, (_, node, _) in sites for number, _ in enumerate(_changes(node))]
    chosen = random.Random(seed).sample(possible, min(MUTANTS_OF_A_MODULE, len(possible)))
    return sorted((_mutant(copy.deepcopy(tree), *each) for each in chosen), key=itemgetter(0))


def _mutant(tree: ast.Module, site: int, number: int) -> Mutant:
    statement, node, function = list(_sites(tree))[site]
    before = ast.unparse(node).splitlines()[0]
    change, field, value = list(_changes(node))[number]
    last = statement.end_lineno
    if statement is not function and isinstance(getattr(statement, "body", None), list):  # its first line alone
        last = max(statement.lineno, statement.body[0].lineno - 1)
    setattr(node, field, value)
    lines = None if function is None else range(statement.lineno, last + 1)
    return statement.lineno, lines, f"{before} -> {change}", ast.unparse(tree)


def _sites(node: Any, statement: Any = None, function: Any = None) -> Iterator[tuple[Any, Any, Any]]:
    """Every node below this one that may be changed, with its statement and its function."""
    if isinstance(node, UNCHANGED) or (not hasattr(node, "body") and RISKY.search(ast.unparse(node))):
        return
    statement = node if isinstance(node, ast.stmt) else statement
    function = node if isinstance(node, ast.FunctionDef) else function
    if statement is not None:
        yield statement, node, function
    for name, value in ast.iter_fields(node):
        if name in UNCHANGED_FIELDS or (name == "test" and isinstance(node, ast.While)):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _sites(child, statement, function)


def _changes(node: Any) -> Iterator[tuple[str, str, object]]:
    """The changes of one node: in words, and as a field of the node with its new value."""
    match node:
        case ast.Compare(ops=ops):
            for place, other in enumerate(OPERATORS[type(operator)] for operator in ops):
                yield other.__name__, "ops", [*ops[:place], other(), *ops[place + 1 :]]
        case ast.BinOp() if any(isinstance(getattr(side, "value", side), TEXT) for side in (node.left, node.right)):
            pass
        case ast.BinOp() | ast.BoolOp() | ast.AugAssign() if type(node.op) in OPERATORS:
            yield OPERATORS[type(node.op)].__name__, "op", OPERATORS[type(node.op)]()
        case ast.UnaryOp(op=ast.USub()):
            yield "without the sign", "op", ast.UAdd()
        case ast.UnaryOp(op=ast.Not()):
            yield "without not", "operand", ast.UnaryOp(ast.Not(), node.operand)
        case ast.Constant(value=int() | float() as value):
            changed = not value if isinstance(value, bool) else value + 1
            yield repr(changed), "value", changed
        case ast.Attribute(attr=name) | ast.Name(id=name, ctx=ast.Load()) if name in NAMES:
            yield NAMES[name], "attr" if isinstance(node, ast.Attribute) else "id", NAMES[name]
        case ast.IfExp() | ast.If() if not isinstance(node.test, ast.Compare):
            yield "negated", "test", ast.UnaryOp(ast.Not(), node.test)
        case ast.Return(value=ast.AST()):
            yield "return None", "value", ast.Constant(None)
    match node:
        case ast.AugAssign() | ast.Expr(value=ast.Call()) | ast.Assign(targets=[ast.Attribute() | ast.Subscript(), *_]):
            yield "deleted", "__class__", ast.Pass


class Tracer:
    """A plugin of pytest: which tests reach which lines of a module, their processor time, and those that fail."""

    def __init__(self, module: Path) -> None:
        self.module = str(module)
        self.reached: dict[int, set[str]] = defaultdict(set)
        self.seconds: dict[str, float] = {}
        self.failed: set[str] = set()
        self.test = ""

    def trace(self, frame: Any, event: str, argument: Any) -> Any:
        """Record a line; called by the interpreter."""
        if frame.f_code.co_filename != self.module:
            return None
        if event == "line":
            self.reached[frame.f_lineno].add(self.test)
        return self.trace

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.test = nodeid.partition("::")[0]  # while fixtures are made, which may serve every test of the file
        self.seconds[nodeid] = -time.process_time()
        sys.settrace(self.trace)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> None:
        self.test = item.nodeid

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed.add(report.nodeid)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        sys.settrace(None)
        self.seconds[nodeid] += time.process_time()
        if nodeid in self.failed:  # it would seem to notice every mutant
            del self.seconds[nodeid]


def run_tests(scratch: Path, tests: list[str], tracer: Tracer | None = None) -> bool:
    """Whether the tests pass, in a fork of this process. A traced run goes on after a failed test."""
    process = multiprocessing.get_context("fork").Process(target=_pytest, args=(scratch, tests, tracer))
    process.start()
    process.join(SECONDS if tracer is None else 5 * SECONDS)
    if process.is_alive():
        os.killpg(process.pid or 0, signal.SIGKILL)
        process.join()
    return process.exitcode == 0


def _pytest(scratch: Path, tests: list[str], tracer: Tracer | None) -> None:
    os.setsid()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_BYTES, FILE_BYTES))
    for stream in (1, 2):
        os.dup2(os.open(scratch / "tmp" / "pytest.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    os.chdir(scratch)
    os.environ |= {"PYTHONPATH": f"{scratch}/src", "TMPDIR": f"{scratch}/tmp", "PYTHONDONTWRITEBYTECODE": "1"}
    sys.path[:0] = [str(scratch), f"{scratch}/src"]
    sys.dont_write_bytecode = tracer is None
    options = ["-q", "-p", "no:cacheprovider", "-m", "not slow", "--tb=line", f"--basetemp={scratch}/tmp/base"]
    code = pytest.main([*options, *([] if tracer else ["-x"]), *tests], [tracer] if tracer else [])
    if tracer is not None:
        (scratch / "tmp" / "trace.json").write_text(
            json.dumps([tracer.reached, tracer.seconds, tracer.failed], default=list)
        )
    sys.exit(code)


def tests_of(name: str, scratch: Path) -> list[str]:
    """The test files that have a module's name or import it, or names of its package, in the folder of its tests."""
    *folders, stem = name.split("/")
    package = re.escape(".".join(("bertkit", *folders)))
    imports = re.compile(rf"\b{package}\.{stem}\b|from {package} import \(?\s*[A-Z]|from {package} import .*\b{stem}\b")
    files = sorted((scratch / "tests" / folders[0]).rglob("test_*.py"))
    return [str(file) for file in files if file.stem == f"test_{stem}" or imports.search(file.read_text("utf-8"))]


def tests_for(lines: range | None, reached: dict[str, list[str]], seconds: dict[str, float]) -> list[str]:
    """The tests that reach these lines, the fastest first, as many as fit."""
    names = {name for line in reached if lines is None or int(line) in lines for name in reached[line]}
    ordered = sorted(seconds, key=lambda test: seconds[test])
    reaching = [test for test in ordered if not names.isdisjoint((test, test.partition("::")[0]))]
    fitting = bisect_right(list(accumulate(seconds[test] for test in reaching)), TESTS_SECONDS)
    return sorted(reaching[: max(1, fitting)], key=lambda test: test.partition("::")[0])


def examine(name: str, tests: list[str], scratch: Path) -> None:
    """Sample mutants of a module, and print those that are not killed by its tests and a summary."""
    module, record = scratch / "src" / "bertkit" / f"{name}.py", scratch / "tmp" / "trace.json"
    source = module.read_text(encoding="utf-8")
    record.write_text("[{}, {}, []]")
    run_tests(scratch, tests, Tracer(module))
    reached, seconds, failed = json.loads(record.read_text())
    if failed:
        print(f"{name}: left out, because they fail without a mutant: {', '.join(failed)}", flush=True)
    outcomes = Counter[str]()
    for line, lines, change, mutated in drawn_mutants(source, f"0 {name}"):
        meets = tests_for(lines, reached, seconds)
        try:
            module.write_text(mutated, encoding="utf-8")
            outcome = "not reached" if not meets else "survived" if run_tests(scratch, meets) else "killed"
        finally:
            module.write_text(source, encoding="utf-8")
        outcomes[outcome] += 1
        if outcome != "killed":
            print(f"{name}:{line} {change}: {outcome} ({len(meets)} tests)", flush=True)
    print(f"{name}: {', '.join(f'{count} {outcome}' for outcome, count in outcomes.items())}", flush=True)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("modules", nargs="+", help="such as metrics/spans, or metrics/spans=tests/a.py,tests/b.py")
    parser.add_argument("--scratch", type=Path, required=True, help="a folder outside the checkout, for a copy of it")
    arguments = parser.parse_args()
    scratch = arguments.scratch.resolve()
    if CHECKOUT in (scratch, *scratch.parents):
        parser.error(f"--scratch {scratch}: is in the checkout; give a folder outside")
    shutil.copytree(CHECKOUT, scratch, ignore=UNCOPIED, dirs_exist_ok=True)
    (scratch / "tmp").mkdir(exist_ok=True)
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    for name in IMPORTED:
        importlib.import_module(name)
    for name, _, given in (each.partition("=") for each in arguments.modules):
        tests = given.split(",") if given else tests_of(name, scratch)
        if tests:
            examine(name, tests, scratch)
        else:
            print(f"{name}: no test file in the folder of its tests has its name or imports it; add =FILES", flush=True)


if __name__ == "__main__":
    main()
