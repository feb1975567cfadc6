"""What papers print for the tasks: the rows that `bertkit eval` sets beside its own figures.

The figures are those of the papers' tables or of the authors' repositories, in percent as they are printed; each row
names its split and where it stands. Devlin et al. 2019, BERT, arXiv:1810.04805, tables 1 to 7; Turc et al. 2019,
arXiv:1908.08962; Liu et al. 2019, RoBERTa, arXiv:1907.11692, tables 4 to 8; Lan et al. 2020, ALBERT, arXiv:1909.11942;
Clark et al. 2020, ELECTRA, arXiv:2003.10555; Sanh et al. 2019, DistilBERT, arXiv:1910.01108; Yang et al. 2019, XLNet,
arXiv:1906.08237; Jiao et al. 2020, TinyBERT, arXiv:1909.10351; Sun et al. 2020, MobileBERT, arXiv:2004.02984; Sun et
al. 2020, ERNIE 2.0, arXiv:1907.12412; Joshi et al. 2020, SpanBERT, arXiv:1907.10529.

A figure stands under its metric; where a source does not say which one it is of, it is left out and a note says so.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Literal

from bertkit.errors import UsageError

Figures = Mapping[str, Mapping[str, float]]
"""Percent by task and metric, by the names of bertkit's results; `mnli-mm` is the mismatched half of MNLI."""

_TWO_METRICS = ("mrpc", "qqp", "stsb")
PAPER = {"mrpc": "f1", "qqp": "f1", "stsb": "spearman"}
"""BERT's table 1 (and TinyBERT's): of two metrics, this one."""
ROBERTA = {"mrpc": "accuracy", "qqp": "accuracy", "stsb": "pearson"}
"""Dev rows of RoBERTa, XLNet and ERNIE."""
ELECTRA = {"mrpc": "accuracy", "qqp": "accuracy", "stsb": "spearman"}
"""Dev rows of ELECTRA."""
UNSTATED: dict[str, str] = {}
"""A source that does not say which metric these three are in: they are left out."""


@dataclass(frozen=True)
class PublishedRow:
    """One row of a table.

    Attributes:
        split: what it was measured on; a metric that ends in `/test` is of the test split in any row.
        figures: percent by task and metric.
        source: where it stands.
        averages: percent by the names of `bertkit.evaluation.glue.AVERAGES`, as printed.
        note: what else to know.
    """

    split: Literal["dev", "test"]
    figures: Figures
    source: str
    averages: Mapping[str, float] = field(default_factory=dict)
    note: str = ""


@dataclass(frozen=True)
class PublishedModel:
    """A model that has rows.

    Attributes:
        name: what `--published` calls it.
        title: for people.
        shape: model_type, layers and hidden size of config.json.
        rows: its rows.
        pattern: what the name of a model must hold, where another one has the same shape.
    """

    name: str
    title: str
    shape: tuple[str, int, int]
    rows: tuple[PublishedRow, ...]
    pattern: str | None = None


def _glue(order: str, values: str, convention: Mapping[str, str]) -> dict[str, dict[str, float]]:
    """`"mnli qqp"`, `"84.6/83.4 71.2"` as figures: `a/b` is matched/mismatched, or F1/accuracy, or Spearman/Pearson."""
    pairs = {"mrpc": ("f1", "accuracy"), "qqp": ("f1", "accuracy"), "stsb": ("spearman", "pearson")}
    found: dict[str, dict[str, float]] = {}
    for task, text in zip(order.split(), values.split(), strict=True):
        numbers = [float(each) for each in text.split("/")]
        if task == "mnli":
            found |= {name: {"accuracy": each} for name, each in zip(("mnli", "mnli-mm"), numbers, strict=False)}
        elif task in _TWO_METRICS and len(numbers) == 2:
            found[task] = dict(zip(pairs[task], numbers, strict=True))
        elif task not in _TWO_METRICS:
            metric = "matthews_correlation" if task in ("cola", "ax") else "accuracy"
            found[task] = {metric: numbers[0]}
        elif task in convention:
            found[task] = {convention[task]: numbers[0]}
    return found


def _squad(
    exact: float, f1: float, exact_v2: float | None = None, f1_v2: float | None = None
) -> dict[str, dict[str, float]]:
    """SQuAD 1.1, and 2.0 whose metric has another name."""
    found = {"squad": {"exact_match": exact, "f1": f1}}
    return found if exact_v2 is None or f1_v2 is None else found | {"squad2": {"exact": exact_v2, "f1": f1_v2}}


_DEV = "mnli qnli qqp rte sst2 mrpc cola stsb"
_SERVER = "cola sst2 mrpc stsb qqp mnli qnli rte wnli ax"
_TURC = "cola sst2 mrpc qqp mnli qnli rte wnli ax"
_DISTIL = "cola mnli mrpc qnli qqp rte sst2 stsb wnli"
_SMALL = "cola sst2 mrpc stsb qqp mnli qnli rte"
_TINY = "mnli qqp qnli sst2 cola stsb mrpc rte"
_BERT_SERVER = "BERT, table 1, with both metrics from the GLUE server's rows as ERNIE's repository prints them"
_BERT_TASKS = "BERT, tables 2, 3, 4 and 7 (one model, no extra data)"
_ALBERT = "ALBERT's repository, README (v1 at 125k steps also table 2)"
_ELECTRA_README = "ELECTRA's repository, README: median of its fine-tuning runs"
_DISTIL_NOTE = "its MRPC, QQP and STS-B ({}) are left out: the source does not name their metrics"
_ERNIE_README = "ERNIE's repository, README"
_ROBERTA_NOTE = "RTE, MRPC and STS-B start from the model of MNLI"
_TURC_NOTE = "its STS-B ({}) is left out: the source does not say which correlation comes first"


def _test(figures: Figures, source: str, averages: Mapping[str, float] | None = None, note: str = "") -> PublishedRow:
    return PublishedRow("test", figures, source, averages or {}, note)


def _dev(figures: Figures, source: str, note: str = "") -> PublishedRow:
    return PublishedRow("dev", figures, source, note=note)


def _model(
    name: str, title: str, shape: tuple[str, int, int], *rows: PublishedRow, pattern: str | None = None
) -> PublishedModel:
    return PublishedModel(name, title, shape, rows, pattern)


def _bert_server(values: str, source: str, averages: tuple[float, float], **more: Mapping[str, float]) -> PublishedRow:
    paper, server = averages
    figures = {**_glue(_SERVER, values, PAPER), **more}
    return _test(figures, source, {"paper": paper, "server": server}, "WNLI is the majority class")


def _bert_dev(figures: Figures, source: str, tasks: tuple[float, float, float], note: str = "") -> PublishedRow:
    """With SWAG, and CoNLL-2003's dev and test."""
    swag, conll, conll_test = tasks
    figures = {**figures, "swag": {"accuracy": swag}, "conll2003": {"f1": conll, "f1/test": conll_test}}
    return _dev(figures, f"{source}; {_BERT_TASKS}", f"{note}CoNLL-2003 is of the cased model")


def _turc(name: str, layers: int, hidden: int, values: str, score: float, stsb: str) -> PublishedModel:
    figures = _glue(_TURC, values, PAPER)
    row = _test(figures, "BERT's repository, README", {"server": score}, _TURC_NOTE.format(stsb))
    return _model(name, f"{name} (Turc et al. 2019)", ("bert", layers, hidden), row)


def _albert(size: str, layers: int, hidden: int, version: str, values: tuple[float, ...]) -> PublishedModel:
    f1, exact, f1_v2, exact_v2, mnli, sst2 = values
    figures = {
        **_squad(exact, f1, exact_v2, f1_v2),
        "mnli": {"accuracy": mnli},
        "sst2": {"accuracy": sst2},
    }
    name, title = f"albert-{size}-{version}", f"ALBERT {size} {version}"
    pattern = "v1" if version == "v1" else None
    return _model(name, title, ("albert", layers, hidden), _dev(figures, _ALBERT), pattern=pattern)


def _electra(name: str, title: str, shape: tuple[int, int], values: str, pattern: str | None = None) -> PublishedModel:
    row = _dev(_glue(_SMALL, values, ELECTRA), _ELECTRA_README)
    return _model(name, title, ("electra", *shape), row, pattern=pattern)


def _tinybert_table(values: str, average: float) -> PublishedRow:
    return _test(_glue(_TINY, values, PAPER), "TinyBERT, table 1", {"paper": average})


def _ernie_server(values: str, score: float) -> PublishedRow:
    return _test(_glue(_SERVER, values, PAPER), _ERNIE_README, {"server": score})


def _roberta_dev(values: str, source: str, **more: Mapping[str, float]) -> PublishedRow:
    return _dev({**_glue(_DEV, values, ROBERTA), **more}, source, _ROBERTA_NOTE)


_MODELS = (
    _model(
        "bert-base",
        "BERT base",
        ("bert", 12, 768),
        _bert_server(
            "52.1 93.5 88.9/84.8 85.8/87.1 71.2/89.2 84.6/83.4 90.5 66.4 65.1 34.2", _BERT_SERVER, (79.6, 78.3)
        ),
        _bert_dev(
            _glue("mnli qnli mrpc sst2", "84.4 88.4 86.7 92.7", ROBERTA) | _squad(80.8, 88.5),
            "BERT, table 5",
            (81.6, 96.4, 92.4),
            "QNLI is of its first split; ",
        ),
    ),
    _model(
        "bert-large",
        "BERT large",
        ("bert", 24, 1024),
        _bert_server(
            "60.5 94.9 89.3/85.4 86.5/87.6 72.1/89.3 86.7/85.9 92.7 70.1 65.1 39.6",
            f"{_BERT_SERVER}; RACE: RoBERTa, table 6",
            (82.1, 80.5),
            race={"accuracy/test": 72.0},
        ),
        _bert_dev(
            _glue(_DEV, "86.6 92.3 91.3 70.4 93.2 88.0 60.6 90.0", ROBERTA) | _squad(84.1, 90.9, 78.7, 81.9),
            "RoBERTa, table 4",
            (86.6, 96.6, 92.8),
        ),
    ),
    _model(
        "spanbert-large",
        "SpanBERT large",
        ("bert", 24, 1024),
        _test(
            _glue("cola sst2 mrpc qqp mnli qnli rte", "64.3 94.8 90.9/87.9 71.9/89.5 88.1/87.7 94.3 79.0", PAPER),
            "SpanBERT, table 5",
            {"server": 82.8},
            _TURC_NOTE.format("89.9/89.1"),
        ),
        pattern="spanbert",
    ),
    _turc("bert-tiny", 2, 128, "0.0 83.2 81.1/71.1 62.2/83.4 70.2/70.3 81.5 57.2 62.3 21.0", 64.2, "74.3/73.6"),
    _turc("bert-mini", 4, 256, "0.0 85.9 81.1/71.8 66.4/86.2 74.8/74.3 84.1 57.9 62.3 26.1", 65.8, "75.4/73.3"),
    _turc("bert-small", 4, 512, "27.8 89.7 83.4/76.2 68.1/87.0 77.6/77.0 86.4 61.8 62.3 28.6", 71.2, "78.8/77.0"),
    _turc("bert-medium", 8, 512, "38.0 89.6 86.6/81.6 69.6/87.9 80.0/79.1 87.7 62.2 62.3 30.5", 73.5, "80.4/78.4"),
    _model(
        "roberta-base",
        "RoBERTa base",
        ("roberta", 12, 768),
        _roberta_dev(
            "87.6 92.8 91.9 78.7 94.8 90.2 63.6 91.2", "RoBERTa, table 8, and fairseq's README: median of 5 seeds"
        ),
    ),
    _model(
        "roberta-large",
        "RoBERTa large",
        ("roberta", 24, 1024),
        _roberta_dev(
            "90.2/90.2 94.7 92.2 86.6 96.4 90.9 68.0 92.4",
            "RoBERTa, tables 4 to 6: median of 5 seeds",
            **_squad(88.9, 94.6, 86.5, 89.4),
            race={"accuracy/test": 83.2},
        ),
    ),
    _model(
        "distilroberta",
        "DistilRoBERTa",
        ("roberta", 6, 768),
        _dev(
            _glue(_DISTIL, "59.3 84.0 86.6 90.8 89.4 67.9 92.5 88.3 52.1", UNSTATED),
            "DistilBERT's directory in transformers, README",
            note=_DISTIL_NOTE.format("86.6, 89.4, 88.3"),
        ),
    ),
    _model(
        "distilbert",
        "DistilBERT",
        ("distilbert", 6, 768),
        _dev(
            {
                **_glue(_DISTIL, "51.3 82.1 87.5 89.2 88.5 59.9 91.3 86.9 56.3", UNSTATED),
                **_squad(77.7, 85.8),
                "imdb": {"accuracy": 92.82},
            },
            "DistilBERT's directory in transformers, README; SQuAD and IMDb (test): DistilBERT, table 2",
            note=_DISTIL_NOTE.format("87.5, 88.5, 86.9"),
        ),
        _tinybert_table("82.6/81.3 70.1 88.9 92.5 49.0 81.3 86.9 58.4", 76.8),
    ),
    _model(
        "tinybert-4",
        "TinyBERT, 4 layers",
        ("bert", 4, 312),
        _tinybert_table("82.5/81.8 71.3 87.7 92.6 44.1 80.4 86.4 66.6", 77.0),
    ),
    _model(
        "tinybert-6",
        "TinyBERT, 6 layers",
        ("bert", 6, 768),
        _tinybert_table("84.6/83.2 71.6 90.4 93.1 51.1 83.7 87.3 70.0", 79.4),
        pattern="tinybert",
    ),
    _model(
        "mobilebert",
        "MobileBERT",
        ("mobilebert", 24, 512),
        _test(
            _glue(_SMALL, "50.5 92.8 88.8 84.4 70.2 83.3/82.6 90.6 66.2", PAPER),
            "MobileBERT, table 4",
            note="its columns are taken to be BERT's (F1, Spearman); its GLUE score is printed as 77.7",
        ),
        _dev(_squad(82.9, 90.0, 76.2, 79.2), "MobileBERT, table 5"),
    ),
    _albert("base", 12, 768, "v2", (90.2, 83.2, 82.1, 79.3, 84.6, 92.9)),
    _albert("base", 12, 768, "v1", (89.3, 82.3, 80.0, 77.1, 81.6, 90.3)),
    _albert("large", 24, 1024, "v2", (91.8, 85.2, 84.9, 81.8, 86.5, 94.9)),
    _albert("large", 24, 1024, "v1", (90.6, 83.9, 82.3, 79.4, 83.5, 91.7)),
    _albert("xlarge", 24, 2048, "v2", (92.9, 86.4, 87.9, 84.1, 87.9, 95.4)),
    _albert("xlarge", 24, 2048, "v1", (92.5, 86.1, 86.1, 83.1, 86.4, 92.4)),
    _albert("xxlarge", 12, 4096, "v2", (94.6, 89.1, 89.8, 86.9, 90.6, 96.8)),
    _albert("xxlarge", 12, 4096, "v1", (94.8, 89.3, 90.2, 87.4, 90.8, 96.9)),
    _electra("electra-small", "ELECTRA small (small++)", (12, 256), "57.0 91.2 88.0 87.5 89.0 81.3 88.4 66.7"),
    _electra(
        "electra-small-owt",
        "ELECTRA small on OpenWebText",
        (12, 256),
        "56.8 88.3 87.4 86.8 88.3 78.9 87.9 68.5",
        "owt|openwebtext",
    ),
    _electra("electra-base", "ELECTRA base (base++)", (12, 768), "67.7 95.1 89.5 91.2 91.5 88.8 93.2 82.7"),
    _electra("electra-large", "ELECTRA large", (24, 1024), "69.1 96.9 90.8 92.6 92.4 90.9 95.0 88.0"),
    _model(
        "xlnet-base",
        "XLNet base (June 2019)",
        ("xlnet", 12, 768),
        _dev(_glue(_DEV, "86.8 91.7 91.4 74.0 94.7 88.2 60.2 89.5", ROBERTA), "XLNet's repository, README"),
    ),
    _model(
        "xlnet-large",
        "XLNet large",
        ("xlnet", 24, 1024),
        _dev(
            {
                **_glue(_DEV, "90.8/90.8 94.9 92.3 85.9 97.0 90.8 69.0 92.5", ROBERTA),
                **_squad(89.7, 95.1, 87.9, 90.6),
            },
            "XLNet, tables 3 and 5",
        ),
    ),
    _model(
        "ernie-base",
        "ERNIE 2.0 base",
        ("ernie", 12, 768),
        _ernie_server("55.2 95.0 89.9/86.1 86.5/87.6 73.2/89.8 86.1/85.5 92.9 74.8 65.1 37.4", 80.6),
    ),
    _model(
        "ernie-large",
        "ERNIE 2.0 large",
        ("ernie", 24, 1024),
        _ernie_server("63.5 95.6 90.2/87.4 90.6/91.2 73.8/90.1 88.7/88.8 94.6 80.2 67.8 48.0", 83.6),
        _dev(_glue(_SMALL, "65.4 96.0 89.7 92.3 92.5 89.1 94.3 85.2", ROBERTA), _ERNIE_README),
    ),
)

PUBLISHED: dict[str, PublishedModel] = {model.name: model for model in _MODELS}
"""Every model that has rows, by name."""


def published_named(name: str) -> PublishedModel:
    """The model of that name.

    Raises:
        UsageError: there is none; the nearest name is given.
    """
    if name in PUBLISHED:
        return PUBLISHED[name]
    near = get_close_matches(name.lower(), PUBLISHED, n=1)
    hint = f"did you mean {near[0]}?" if near else f"one of: {', '.join(PUBLISHED)}; or none"
    raise UsageError(f"--published {name}: no published rows of this name; {hint}")


def published_for(shape: tuple[str, int, int], name: str) -> PublishedModel | None:
    """The model that a checkpoint is most likely one of: its shape must agree, and its name where that decides.

    Args:
        shape: model_type, layers and hidden size.
        name: the Hub id or path that the user gave.
    """
    of_shape = [model for model in PUBLISHED.values() if model.shape == shape]
    named = [model for model in of_shape if model.pattern and re.search(model.pattern, name.lower())]
    plain = [model for model in of_shape if model.pattern is None]
    return next(iter([*named, *plain]), None)
