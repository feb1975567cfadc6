"""Metrics as `evaluate` modules: bertkit's own, a user's script by its path, and metrics in `evaluate`'s cache.

Hugging Face evaluate (von Werra et al. 2022, arXiv:2210.01970). Tasks compute their scores through these modules
(bertkit.tasks.base). `evaluate.load("accuracy")` runs code from the Hub; here a name means bertkit's own metric or one
in evaluate's cache, and the Hub is used only for names that begin with `hub:`. Scores are fractions, as everywhere in
bertkit. evaluate and datasets are imported when a metric is first used, since this takes a second.
"""

from __future__ import annotations

import ast
import math
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache, partial
from pathlib import Path
from typing import Any

from bertkit.errors import BertkitError, DataError, first_line
from bertkit.hub import is_offline
from bertkit.metrics import METRICS, find_metric, mlqa
from bertkit.metrics.base import Scores, check_aligned, log
from bertkit.metrics.spans import DEFAULT_THRESHOLD

HUB = "hub:"
"""The prefix of names that may be fetched from the Hub."""


@cache
def _evaluate() -> Any:
    """The library without `transformers`, which its pipelines would import if installed; this takes three seconds."""
    absent = "transformers" not in sys.modules
    if absent:
        sys.modules["transformers"] = None  # type: ignore[assignment]  # how Python marks a module as not importable
    try:
        import evaluate
        import evaluate.loading
    finally:
        if absent:
            del sys.modules["transformers"]
    evaluate.loading.get_imports = _with_parsed_libraries(evaluate.loading.get_imports)
    evaluate.logging.set_verbosity_error()  # it warns that a cached metric is not on the Hub without checking
    return evaluate


_Import = tuple[str, str, str, str | None]
"""How evaluate lists an import: kind, name, place and folder."""


def _with_parsed_libraries(listed: Callable[[str], list[_Import]]) -> Callable[[str], list[_Import]]:
    """evaluate's function that lists a script's imports, with the libraries read by Python's parser.

    evaluate splits lines at spaces: in `import evaluate, datasets` it would look for a library named `evaluate,`.
    """

    def imports(file_path: str) -> list[_Import]:
        found = listed(file_path)
        places = {name: place for kind, name, place, _ in found if kind == "library"}
        names: dict[str, None] = {}
        for node in ast.parse(Path(file_path).read_bytes(), Path(file_path).name).body:
            if isinstance(node, ast.Import):
                names |= dict.fromkeys(alias.name.partition(".")[0] for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names[node.module.partition(".")[0]] = None
        libraries: list[_Import] = [("library", name, places.get(name, name), None) for name in names]
        return [*(each for each in found if each[0] != "library"), *libraries]

    return imports


def _by_id(items: Sequence[Mapping[str, Any]], read: Callable[[Mapping[str, Any]], Any]) -> dict[str, Any]:
    values = {str(item["id"]): read(item) for item in items}
    if len(values) < len(items):
        twice = Counter(str(item["id"]) for item in items).most_common(1)[0][0]
        raise DataError(f"question {twice} occurs twice; expected one item per id")
    return values


def _answers(item: Mapping[str, Any]) -> list[str]:
    return list(item["answers"]["text"])


def _squad(name: str, predictions: Sequence[Mapping[str, Any]], references: Sequence[Mapping[str, Any]]) -> Scores:
    texts = _by_id(predictions, lambda item: item["prediction_text"])
    return METRICS[name](texts, _by_id(references, _answers))


def _squad_v2(
    predictions: Sequence[Mapping[str, Any]],
    references: Sequence[Mapping[str, Any]],
    no_answer_threshold: float = DEFAULT_THRESHOLD,
) -> Scores:
    texts = _by_id(predictions, lambda item: item["prediction_text"])
    null = _by_id(predictions, lambda item: item["no_answer_probability"])
    return METRICS["squad_v2"](texts, _by_id(references, _answers), null, no_answer_threshold)


_OF_ITEMS: dict[str, Callable[..., Scores]] = {
    **{name: partial(_squad, name) for name in ("squad", *(f"mlqa_{language}" for language in mlqa.LANGUAGES))},
    "squad_v2": _squad_v2,
}
"""Metrics whose function takes mappings by question; evaluate uses lists of items."""
_NUMBERS = ("pearson", "spearman", "mean_squared_error")
_SENTENCES = ("conlleval", "strict_iob2", "tag_accuracy")


def _features(name: str) -> Any:
    """The input types that evaluate accepts, in order; text first, since evaluate would read "1" as a number."""
    from datasets import Features, List, Value

    def both(feature: Any) -> Any:
        return Features({"predictions": feature, "references": feature})

    if name in _OF_ITEMS:
        prediction = {"id": Value("string"), "prediction_text": Value("string")}
        if name == "squad_v2":
            prediction["no_answer_probability"] = Value("float64")
        answers = {"text": List(Value("string")), "answer_start": List(Value("int64"))}
        return Features({"predictions": prediction, "references": {"id": Value("string"), "answers": answers}})
    if name in _NUMBERS:
        return both(Value("float64"))
    if name in _SENTENCES:
        return both(List(Value("string")))
    if name == "multi_label":
        return [both(List(Value("string"))), both(List(Value("int64")))]
    return [both(Value("string")), both(Value("int64"))]


@cache
def metric_class(name: str) -> type[Any]:
    """The subclass of `evaluate.Metric` for a metric of METRICS.

    Raises:
        UsageError: there is no metric of that name.
    """
    function = _OF_ITEMS.get(name, find_metric(name))
    evaluate = _evaluate()

    class LocalMetric(evaluate.Metric):  # type: ignore[misc, name-defined]  # evaluate has no types
        """A metric of bertkit with evaluate's interface; it keeps its inputs in memory and writes no files."""

        def _info(self) -> Any:
            return evaluate.MetricInfo(
                description=str(METRICS[name].__doc__), citation="", inputs_description="", features=_features(name)
            )

        def _build_data_dir(self) -> str:
            return ""

        def _compute(self, *, predictions: Any, references: Any, **options: Any) -> Scores:
            return function(list(predictions), list(references), **options)

    LocalMetric.__name__ = LocalMetric.__qualname__ = "".join(part.title() for part in name.split("_"))
    return LocalMetric


def local_metric(name: str) -> Any:
    """The `evaluate.Metric` of a metric of METRICS; `compute(predictions=..., references=...)` gives its scores.

    It takes lists of label ids or names; numbers (pearson, spearman, mean_squared_error); lists of tags (conlleval,
    strict_iob2, tag_accuracy) or of labels (multi_label: names or ids, not zeros and ones); items
    `{"id", "prediction_text"}` and `{"id", "answers": {"text", "answer_start"}}` (squad; squad_v2 also needs
    "no_answer_probability").

    Raises:
        UsageError: there is no metric of that name.
    """
    return metric_class(name)(keep_in_memory=True)


@dataclass(frozen=True)
class AdditionalMetric:
    """A metric that is reported in addition to a task's own.

    Attributes:
        name: as the user gave it.
        module: of `evaluate`.
    """

    name: str
    module: Any

    @property
    def fingerprint(self) -> str | None:
        """sha256 (hex) of the script; None for bertkit's own metrics."""
        digest: str | None = self.module._hash
        return digest

    @property
    def stem(self) -> str:
        """A short name: the script's, or the last part of the metric's."""
        return Path(self.name.removeprefix(HUB)).stem

    @property
    def _options(self) -> list[Any]:
        """The features that it accepts, one set or several."""
        features = self.module.features
        return features if isinstance(features, list) else [features]

    def _fitting(self, side: str, items: Sequence[Any]) -> list[Any]:
        """The items, with only the fields that the metric reads (squad has no `no_answer_probability`)."""
        known = self._options[0][side]
        if not isinstance(known, dict):
            return list(items)
        return [{name: item[name] for name in known} if isinstance(item, Mapping) else item for item in items]

    @property
    def takes_numbers(self) -> bool:
        """Whether labels must be ids: none of the features that it accepts is text."""
        return not any(_innermost(option["predictions"]) == "string" for option in self._options)

    def compute(self, predictions: Sequence[Any], references: Sequence[Any], **options: Any) -> Scores:
        """The scores that are numbers; None if not finite.

        Args:
            predictions, references: one per example.
            options: further arguments of one of bertkit's own metrics.

        Raises:
            DataError: the metric fails on these inputs, or returns no scores by name; or it reads labels, and the
                predictions are numbers, of which evaluate would drop the fractions.
        """
        check_aligned(predictions, references)
        read = {_innermost(option["predictions"]) for option in self._options}
        if isinstance(predictions[0], float) and not any("float" in each for each in read):
            raise DataError(f"metric {self.name}: reads labels, not numbers such as {predictions[0]:.4g}; leave it out")
        try:
            found = self.module.compute(
                predictions=self._fitting("predictions", predictions),
                references=self._fitting("references", references),
                **options,
            )
        except BertkitError as error:
            raise DataError(f"metric {self.name}: {error}") from error
        except Exception as error:  # a user's or the Hub's code, which may raise anything
            raise DataError(f"metric {self.name}: failed on {len(references)} predictions: {_where(error)}") from error
        if not isinstance(found, Mapping):
            raise DataError(f"metric {self.name}: returned {found!r:.60}; expected a dictionary of scores by name")
        scores = {str(name): _number(value) for name, value in found.items() if _is_number(value)}
        if not scores:
            raise DataError(f"metric {self.name}: none of its values is a number: {', '.join(map(str, found))}")
        if left_out := [str(name) for name in found if str(name) not in scores]:
            log.info("metric %s: values that are not numbers are left out: %s", self.name, ", ".join(left_out))
        return scores


def load_metric(name: str, *, offline: bool = False) -> AdditionalMetric:
    """A metric by its name or path.

    Args:
        name: a metric of METRICS; the path of a script that defines an `evaluate.Metric`, or of a folder with a script
            of the same name; a metric in `evaluate`'s cache; or `hub:NAME`, which is fetched from the Hub and run.
        offline: do not use the network, not even for `hub:`.

    Raises:
        DataError: there is no such metric here, it cannot be fetched, or its script is invalid.
    """
    if name in METRICS:
        return AdditionalMetric(name, local_metric(name))
    loading = _evaluate().loading
    try:
        module = _module(loading, name, offline=is_offline(offline))
        kind = loading.import_main_class(module.module_path)
        if kind is None:
            raise DataError(f"metric {name}: defines no subclass of evaluate.Metric")
        metric = kind(keep_in_memory=True, hash=module.hash)
        metric.download_and_prepare()
    except BertkitError:
        raise
    except Exception as error:  # a user's or the Hub's code, which may raise anything
        raise DataError(f"metric {name}: cannot be loaded: {_where(error)}") from error
    inputs = set(metric._feature_names())
    if inputs != {"predictions", "references"}:
        raise DataError(
            f"metric {name}: takes {', '.join(sorted(inputs))}; only predictions and references are supported"
        )
    return AdditionalMetric(name, metric)


def _module(loading: Any, name: str, *, offline: bool) -> Any:
    """The importable module of a script, of a cached metric, or of one on the Hub."""
    path = Path(name).expanduser()
    script = path / f"{path.resolve().name}.py" if path.is_dir() else path
    if script.is_file():
        return loading.LocalEvaluationModuleFactory(str(script)).get_module()
    bare = name.removeprefix(HUB)
    if name.startswith(HUB) and not offline:
        return loading.evaluation_module_factory(bare)
    for cached in (f"evaluate-metric--{bare}", bare.replace("/", "--")):
        if "/" not in cached and cached:
            try:
                return loading.CachedEvaluationModuleFactory(cached).get_module()
            except FileNotFoundError:
                continue
    if name.startswith(HUB):
        raise DataError(f"metric {name}: not in the local cache, and the network is off; run once with network access")
    near = get_close_matches(name, METRICS, n=1)
    hint = f"did you mean {near[0]}? Otherwise " if near else ""
    raise DataError(
        f"metric {name}: not one of bertkit's ({', '.join(METRICS)}), not the path of a script, and not in evaluate's"
        f" local cache; {hint}give the path of a script, or {HUB}{name} to fetch it from the Hub and run it"
    )


def _innermost(feature: Any) -> str:
    """The innermost type of nested lists."""
    while (inner := getattr(feature, "feature", None)) is not None:
        feature = inner
    return str(getattr(feature, "dtype", "string"))


def _is_number(value: Any) -> bool:
    try:
        float(value)
    except (TypeError, ValueError):
        return value is None
    return not isinstance(value, str)


def _number(value: Any) -> float | None:
    return float(value) if value is not None and math.isfinite(float(value)) else None


def _where(error: Exception) -> str:
    """Type and first line of an error that a script raised, with the script's line number."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "evaluate_modules" in frame.filename]
    line = f"line {frames[-1].lineno}: " if frames else ""
    return f"{line}{type(error).__name__}: {first_line(error)}"
