"""The errors of commands travel between processes unchanged."""

from __future__ import annotations

import inspect
import pickle
from importlib import import_module
from pathlib import Path

import bertkit
from bertkit.errors import BertkitError, StoppedError

SOURCE = Path(bertkit.__file__).parent


def error_classes() -> list[type[BertkitError]]:
    """All errors of the package, also those outside `bertkit.errors`."""
    bases = ("BertkitError", "UsageError", "DataError", "MissingColumnError", "DivergedError", "CheckError")
    for file in SOURCE.rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        if any(f"Error({base})" in text for base in (*bases, "StoppedError")):
            import_module(".".join(("bertkit", *file.relative_to(SOURCE).with_suffix("").parts)))
    found, open_classes = [], [BertkitError]
    while open_classes:
        found.append(open_classes.pop())
        open_classes += [each for each in found[-1].__subclasses__() if each.__module__.startswith("bertkit.")]
    return found


def arguments_of(made: type[BertkitError]) -> list[object]:
    """Arguments for its `__init__`: a number where one is expected, else a text."""
    if not inspect.isfunction(made.__init__):
        return ["message"]
    _, *parameters = inspect.signature(made.__init__).parameters.values()
    positional = [each for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD]
    return [3 if each.annotation == "int" else each.name for each in positional]


def test_a_pickled_error_keeps_its_class_message_and_attributes() -> None:
    classes = error_classes()
    assert {"RanksNeededError", "RankLostError", "MicroBatchMemoryError", "StoreError"} <= {c.__name__ for c in classes}
    for each in classes:
        for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
            error = each(*arguments_of(each))
            copy = pickle.loads(pickle.dumps(error, protocol))
            assert type(copy) is each
            assert str(copy) == str(error)
            assert (copy.args, vars(copy)) == (error.args, vars(error))


def test_a_stopped_run_keeps_its_reason_for_another_remedy() -> None:
    copy = pickle.loads(pickle.dumps(StoppedError("stopped after step 3", "continue with --resume")))
    assert (str(copy), copy.reason) == ("stopped after step 3; continue with --resume", "stopped after step 3")
