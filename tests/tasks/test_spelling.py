"""Labels that differ only in case are one label, unless several names differ only in case."""

from __future__ import annotations

from bertkit.tasks.examples import TaggedExample, TextExample, match_label_case


def labelled(label: str | float | tuple[str, ...] | None) -> TextExample:
    return TextExample("0", "text", None, label)


def test_labels_are_written_like_the_known_one() -> None:
    names = ("pos", "Neg")
    given = ["POS", "pos", "neg", "other", None, 2.5, ("NEG", "other")]
    found = [example.label for example in match_label_case(map(labelled, given), names)]
    assert found == ["pos", "pos", "Neg", "other", None, 2.5, ("Neg", "other")]
    (tagged,) = match_label_case([TaggedExample("0", ("a", "b"), ("b-PER", "o"))], ("B-PER", "O"))
    assert tagged.tags == ("B-PER", "O")


def test_names_that_differ_only_in_case_are_different_labels() -> None:
    names = ("Polish", "polish")
    assert [example.label for example in match_label_case(map(labelled, ["polish", "Polish", "POLISH"]), names)] == [
        "polish",
        "Polish",
        "POLISH",
    ]
