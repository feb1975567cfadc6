"""What papers print for compressed models: how much smaller, how much faster, and what is left of the score.

The rows of the survey's compression table are those of the overview of a lecture on BERT, taken as it prints them, and
say so; where a paper's own figures are known they stand in the row's note. Papers: Sanh et al. 2019, DistilBERT,
arXiv:1910.01108; Sun et al. 2019, BERT-PKD, arXiv:1908.09355; Turc et al. 2019, arXiv:1908.08962; Jiao et al. 2020,
TinyBERT, arXiv:1909.10351, table 1; Sun et al. 2020, MobileBERT, arXiv:2004.02984; Tsai et al. 2019, MiniBERT,
arXiv:1909.00100; Tang et al. 2019, arXiv:1903.12136; Xu et al. 2020, BERT-of-Theseus, arXiv:2002.02925; Zhao et al.
2019, arXiv:1909.11687; Zafrir et al. 2019, Q8BERT, arXiv:1910.06188; Shen et al. 2019, Q-BERT, arXiv:1909.05840; Lan
et al. 2020, ALBERT, arXiv:1909.11942.

Sibling published.py has the scores that papers print for whole models.
"""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches

from bertkit.errors import UsageError

NO_METHOD = "none"
"""In place of a method: no published row."""
_OVERVIEW = "overview of a lecture on BERT"


@dataclass(frozen=True)
class PublishedCompression:
    """One row.

    Attributes:
        method: a key of METHODS.
        title: for people.
        compression: how many times smaller than `against`.
        retention: share of the score of `against` that is left.
        speed_up: how many times faster than `against`; None where nothing is printed.
        source: where it stands.
        against: what it is compared with.
        layers, width: of the student, where a method has several rows.
        note: what the paper itself says.
    """

    method: str
    title: str
    compression: float
    retention: float
    speed_up: float | None = None
    source: str = _OVERVIEW
    against: str = "BERT base"
    layers: int | None = None
    width: int | None = None
    note: str = ""


COMPRESSIONS = (
    PublishedCompression(
        "distilbert",
        "DistilBERT",
        *(2.5, 0.90, 1.6),
        note="its repository prints 66M of 110M parameters and GLUE dev 77.0 of 79.5 (97%); table 3: 410 s of 668 s"
        " (x1.63) for a pass over STS-B on a CPU",
    ),
    PublishedCompression("pkd", "BERT-PKD, 6 layers", *(1.6, 0.97, 1.9), layers=6),
    PublishedCompression("pkd", "BERT-PKD, 3 layers", *(2.4, 0.92, 3.7), layers=3),
    PublishedCompression("pd", "PD, 6 layers", *(1.6, 0.98, 2.5), layers=6),
    PublishedCompression(
        "tinybert",
        "TinyBERT, 4 layers",
        *(7.5, 0.96, 9.4),
        layers=4,
        note="table 1: 14.5M of 109M parameters, GLUE test 77.0 of 79.5, x9.4",
    ),
    PublishedCompression(
        "tinybert",
        "TinyBERT, 6 layers",
        *(109 / 67, 79.4 / 79.5, 2.0),
        source="TinyBERT, table 1: 67.0M of 109M parameters, GLUE test 79.4 of 79.5",
        layers=6,
    ),
    PublishedCompression(
        "mobilebert",
        "MobileBERT",
        *(4.3, 1.00, 4.0),
        note="the paper prints 25.3M parameters, and 62 ms of BERT base's 342 ms on a Pixel 4 (x5.5)",
    ),
    PublishedCompression(
        "minibert",
        "MiniBERT",
        *(6.0, 0.98, 27.0),
        against="mBERT",
        note="the abstract has x6 and x27, the latter on one core of a CPU",
    ),
    PublishedCompression(
        "bilstm",
        "BiLSTM-soft",
        *(110.0, 0.91, 434.0),
        against="BERT large",
        note="the same lecture prints 0.96M of 335M parameters (x349)",
    ),
    PublishedCompression(
        "zhao", "BERT-48, small vocabulary", *(62.0, 0.87, 77.0), width=48, note="on MNLI, MRPC and SST-2"
    ),
    PublishedCompression(
        "zhao", "BERT-192, small vocabulary", *(5.7, 0.94, 22.0), width=192, note="on MNLI, MRPC and SST-2"
    ),
    PublishedCompression("theseus", "BERT-of-Theseus, 6 layers", 1.6, 0.98),
    PublishedCompression("q8bert", "Q8BERT", 4.0, 0.99, note="the paper measures no speed"),
    PublishedCompression("qbert", "Q-BERT", 13.0, 0.99, note="on MNLI and SST-2; of the weights, at 2 and 3 bits"),
    PublishedCompression("albert", "ALBERT base", *(9.0, 0.97, 5.6), layers=12, width=768),
    PublishedCompression("albert", "ALBERT xxlarge", *(0.47, 1.07, 0.3), layers=12, width=4096),
)
"""Every row, in the order of the methods."""

METHODS = tuple(dict.fromkeys(row.method for row in COMPRESSIONS))
"""Every method that has rows."""

_OTHER_NAMES = {
    "bertpkd": "pkd",
    "patient": "pkd",
    "pretraineddistillation": "pd",
    "bertoftheseus": "theseus",
    "smallvocabulary": "zhao",
    "dualvocabulary": "zhao",
}


def method_named(name: str) -> str:
    """The method that a user names, in any spelling: `Q-BERT`, `tinybert`.

    Raises:
        UsageError: there is none; the nearest name is given.
    """
    plain = _plain(name)
    found = plain if plain in METHODS else _OTHER_NAMES.get(plain)
    if found is None:
        near = get_close_matches(plain, METHODS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"one of: {', '.join(METHODS)}; or {NO_METHOD}"
        raise UsageError(f"--method {name}: no published rows of this method; {hint}")
    return found


def method_in(name: str) -> str | None:
    """The method that the name of a recipe begins with: `tinybert-sst2` is of `tinybert`; None where it is of none."""
    plain = _plain(name)
    known = {each: each for each in METHODS} | _OTHER_NAMES
    found = [prefix for prefix in known if plain.startswith(prefix)]
    return known[max(found, key=len)] if found else None


def published_compression(method: str, *, layers: int | None, width: int | None) -> PublishedCompression:
    """The row of a method: of several the one whose student is nearest in layers, then in width.

    Args:
        method: one of METHODS.
        layers, width: of the model beside which it will stand; None where it has none.
    """

    def distance(row: PublishedCompression) -> tuple[int, int]:
        return _apart(row.layers, layers), _apart(row.width, width)

    return min((row for row in COMPRESSIONS if row.method == method), key=distance)


def _apart(one: int | None, other: int | None) -> int:
    return 0 if one is None or other is None else abs(one - other)


def _plain(name: str) -> str:
    return "".join(filter(str.isalnum, name.lower()))
