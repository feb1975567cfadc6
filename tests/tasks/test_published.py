"""Published figures: averages printed in the papers follow from their columns, and metrics have bertkit's names."""

from __future__ import annotations

import pytest

from bertkit.errors import UsageError
from bertkit.evaluation.glue import AVERAGES, average_of
from bertkit.evaluation.plan import MISMATCHED
from bertkit.tasks.catalogue import TASKS
from bertkit.tasks.published import PUBLISHED, published_for, published_named

ROWS = [(model, row) for model in PUBLISHED.values() for row in model.rows]
PRINTED = [(model.name, row, name) for model, row in ROWS for name in row.averages]


@pytest.mark.parametrize(("model", "row", "name"), PRINTED, ids=[f"{m}-{n}" for m, _, n in PRINTED])
def test_a_printed_average_is_that_of_its_columns(model: str, row, name: str) -> None:
    """If a row has every column; the average's name defines which metrics, halves of MNLI and tasks count."""
    figures = {task: {**values} for task, values in row.figures.items()}
    # For these the two figures of STS-B are printed but not distinguished; both count equally in the server's score.
    both = {"bert-tiny": 73.95, "bert-mini": 74.35, "bert-small": 77.9, "bert-medium": 79.4, "spanbert-large": 89.5}
    if model in both:
        figures["stsb"] = {"pearson": both[model], "spearman": both[model]}
    if model == "spanbert-large":  # the majority class, by the table's note
        figures["wnli"] = {"accuracy": 65.1}
    found = average_of(AVERAGES[name], figures)
    assert found["lacking"] == []
    assert found["value"] == pytest.approx(row.averages[name], abs=0.1)


def test_figures_stand_under_the_names_that_results_have() -> None:
    for model, row in ROWS:
        for task, figures in row.figures.items():
            spec = TASKS["mnli" if task == MISMATCHED else task]
            names = {*spec.metrics, *(f"{metric}/test" for metric in spec.metrics)}
            assert set(figures) <= names, (model.name, task)
            assert all(0 <= value <= 100 for value in figures.values())


def test_every_row_names_its_split_and_source() -> None:
    assert len({model.name for model, _ in ROWS}) == len(PUBLISHED)
    for model, row in ROWS:
        assert row.split in ("dev", "test")
        assert len(row.source) > 10, model.name
        assert row.figures


@pytest.mark.parametrize(
    ("shape", "name", "found"),
    [
        (("bert", 12, 768), "google-bert/bert-base-uncased", "bert-base"),
        (("bert", 24, 1024), "SpanBERT/spanbert-large-cased", "spanbert-large"),
        (("bert", 24, 1024), "runs/mine", "bert-large"),
        (("bert", 6, 768), "huawei-noah/TinyBERT_General_6L_768D", "tinybert-6"),
        (("bert", 6, 768), "runs/mine", None),
        (("bert", 4, 256), "google/bert_uncased_L-4_H-256_A-4", "bert-mini"),
        (("albert", 12, 768), "albert/albert-base-v1", "albert-base-v1"),
        (("albert", 12, 768), "albert/albert-base-v2", "albert-base-v2"),
        (("electra", 12, 256), "google/electra-small-discriminator", "electra-small"),
        (("bert", 3, 33), "runs/mine", None),
    ],
)
def test_a_checkpoint_gets_the_rows_of_its_shape_and_name(
    shape: tuple[str, int, int], name: str, found: str | None
) -> None:
    model = published_for(shape, name)
    assert (None if model is None else model.name) == found


def test_an_unknown_name_gives_the_nearest() -> None:
    with pytest.raises(UsageError, match=r"did you mean roberta-base\?"):
        published_named("roberta-bas")


def test_the_figures_of_bert_base_are_those_of_table_1() -> None:
    test, dev = PUBLISHED["bert-base"].rows
    figures = {task: next(iter(values.values())) for task, values in test.figures.items()}
    assert figures == {
        "mnli": 84.6,
        "mnli-mm": 83.4,
        "qqp": 71.2,
        "qnli": 90.5,
        "sst2": 93.5,
        "cola": 52.1,
        "stsb": 85.8,
        "mrpc": 88.9,
        "rte": 66.4,
        "wnli": 65.1,
        "ax": 34.2,
    }
    assert dev.figures["squad"] == {"exact_match": 80.8, "f1": 88.5}
    assert dev.figures["conll2003"] == {"f1": 96.4, "f1/test": 92.4}
