"""Senses by nearest neighbours: scikit-learn's on cosine, with the paper's rules for ties, caps and back-off."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.neighbors import KNeighborsClassifier

from bertkit.errors import DataError
from bertkit.probing.senses.measure import (
    FrequentSenses,
    backed_off,
    cosines,
    knn_answers,
    left_out_purity,
    sense_scores,
    vote,
)
from bertkit.tasks.readers.senses import keys_of, read_senses


def cloud(rows: int, width: int, seed: int) -> torch.Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))


@given(st.integers(0, 50))
def test_cosines_of_several_layers_are_those_of_their_concatenation(seed: int) -> None:
    tests, trains = ([cloud(rows, width, seed + width) for width in (3, 5)] for rows in (4, 7))
    a, b = torch.cat(tests, 1), torch.cat(trains, 1)
    expected = torch.nn.functional.cosine_similarity(a[:, None], b[None], dim=2)
    assert cosines(tests, trains) == pytest.approx(expected.numpy(), abs=1e-6)


@pytest.mark.parametrize("k", [1, 3, 9])
def test_answers_are_scikit_learns(k: int) -> None:
    """Two senses and an odd k: no ties and no cap."""
    train, test = cloud(60, 5, 1), cloud(41, 5, 2)
    senses = ["x%1" if row[0] > 0 else "x%2" for row in train + 0.6 * cloud(60, 5, 3)]
    theirs = KNeighborsClassifier(k, metric="cosine", algorithm="brute").fit(train.numpy(), senses)
    ours = knn_answers({"x": range(41)}, {"x": range(60)}, [(test, train)], senses, [k], capped=False)
    assert ours[k] == theirs.predict(test.numpy()).tolist()


def test_of_equally_frequent_senses_the_first_to_be_so_frequent_wins() -> None:
    assert vote(["a", "b", "b", "a"]) == "b"
    assert vote(["a", "b", "a", "b"]) == "a"
    assert vote(["a", "b", "c"]) == "a"


def test_no_more_neighbours_vote_than_the_rarest_sense_has_examples() -> None:
    def answer(near: list[str], k: int, *, capped: bool = True) -> str | None:
        """For a word whose examples have these senses, nearest first."""
        train = torch.stack([torch.ones(len(near)), torch.arange(float(len(near)))], dim=1)
        tables = [(torch.tensor([[1.0, 0.0]]), train)]
        return knn_answers({"x": [0]}, {"x": range(len(near))}, tables, near, [k, 1], capped=capped)[k][0]

    near = ["rare", "common", "common", "common"]
    assert answer(near, 3) == "rare"
    assert answer(near, 3, capped=False) == "common"
    assert answer(["b", "a", "a", "b"], 10) == "b"
    assert answer(["a", "b", "b", "a", "b"], 10, capped=False) == "b"


def test_only_occurrences_of_the_same_word_are_neighbours() -> None:
    train = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.1]])
    test = torch.tensor([[1.0, 0.0], [1.0, 0.0], [1.0, 1.0]])
    senses = ["bank%1", "tree%1", "tree%2"]
    tests, trains = {"tree": [0], "new": [1], "bank": [2]}, {"bank": [0], "tree": [1, 2]}
    answers = knn_answers(tests, trains, [(test, train)], senses, [1])
    assert answers == {1: ["tree%2", None, "bank%1"]}


def test_the_back_off_is_the_lemmas_most_frequent_sense() -> None:
    frequent = FrequentSenses(
        [("run", "n", "run%1:b"), ("run", "v", "run%2:a"), ("run", "n", "run%1:a"), ("run", "v", "run%2:a")]
    )
    assert frequent.of("run", "n") == "run%1:b"
    assert frequent.of("run", "v") == "run%2:a"
    assert frequent.of("run", "a") == "run%2:a"
    assert frequent.of("walk", "v") is None
    assert backed_off(["x", None, None], ["y", "z", None]) == ["x", "z", None]


def test_words_without_an_answer_lower_the_recall_and_not_the_accuracy() -> None:
    scores = sense_scores([("a",), ("b", "c"), ("d",), ("e",)], ["a", "c", "x", None])
    assert scores.coverage == 0.75
    assert scores.precision == pytest.approx(2 / 3)
    recall = 2 / 4
    assert scores.f1 == pytest.approx(2 * (2 / 3) * recall / ((2 / 3) + recall))
    everywhere = sense_scores([("a",), ("b",)], ["a", "a"])
    assert everywhere.f1 == everywhere.precision == 0.5


def test_purity_leaves_the_occurrence_itself_out() -> None:
    vectors = torch.tensor([[1.0, 0.0], [1.0, 0.1], [0.0, 1.0], [0.1, 1.0], [1.0, 0.3]])
    near = cosines([vectors], [vectors])
    assert left_out_purity(near, ["a", "a", "b", "b", "b"]) == pytest.approx(4 / 5)


SENTENCE = '{"id": "s", "tokens": ["He", "took place"], "senses": [[1, "take_place", "VB", "take_place%2:30:00::"]]}'


def test_an_occurrence_may_have_several_senses() -> None:
    assert keys_of("case%1:26:00::;1:11:00::") == ("case%1:26:00::", "case%1:11:00::")
    assert keys_of("a%1:00:00::;b%2:00:00::") == ("a%1:00:00::", "b%2:00:00::")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            '{"id": "x", "tokens": ["a"], "senses": [[1, "a", "NN", "a%1"]]}',
            "line 2, sense 1: token 1 of a sentence",
        ),
        ('{"id": "x", "tokens": ["a"], "senses": [[0, "a", "NN"]]}', "line 2, sense 1: [0, 'a', 'NN'], expected"),
        ('{"id": "x", "tokens": "a", "senses": []}', "line 2: tokens are 'a'"),
        ('{"id": "x", "token": ["a"], "senses": []}', "did you mean 'token'"),
    ],
)
def test_an_invalid_line_is_named(tmp_path: Path, line: str, said: str) -> None:
    path = tmp_path / "s.jsonl"
    path.write_text(f"{SENTENCE}\n{line}\n", encoding="utf-8")
    with pytest.raises(DataError) as caught:
        read_senses(path)
    assert said in str(caught.value)


XML = """<corpus><text id="d"><sentence id="d.s0">
<wf lemma="the" pos="DET">The</wf><instance id="d.s0.t0" lemma="bank" pos="NOUN">banks</instance>
<instance id="d.s0.t1" lemma="Rise" pos="VERB">rise</instance></sentence></text></corpus>"""


def test_the_frameworks_files_give_words_and_all_gold_keys(tmp_path: Path) -> None:
    data, gold = tmp_path / "x.data.xml", tmp_path / "x.gold.key.txt"
    data.write_text(XML, encoding="utf-8")
    gold.write_text("d.s0.t0 bank%1:14:00:: bank%1:17:00::\n", encoding="utf-8")
    (sentence,) = read_senses(data)
    assert sentence.words == ("The", "banks", "rise")
    first, second = sentence.marks
    assert (first.place, first.lemma, first.pos, first.keys) == (1, "bank", "n", ("bank%1:14:00::", "bank%1:17:00::"))
    assert (second.place, second.lemma, second.pos, second.keys) == (2, "rise", "v", ())
    gold.write_text("other bank%1:14:00::\n", encoding="utf-8")
    with pytest.raises(DataError, match="no word has a gold sense"):
        read_senses(data)
    gold.unlink()
    with pytest.raises(DataError, match=r"no gold keys; expected them in x\.gold\.key\.txt"):
        read_senses(data)


def test_broken_xml_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.gold.key.txt").write_text("a b%1\n", encoding="utf-8")
    (tmp_path / "x.data.xml").write_text("<corpus><text>", encoding="utf-8")
    with pytest.raises(DataError, match="not valid XML"):
        read_senses(tmp_path / "x.data.xml")


def test_the_frameworks_sets_are_read_whole(shared_data: Path) -> None:
    for name, instances in (("senseval2", 2282), ("semeval2007", 455)):
        sentences = read_senses(shared_data / "senses" / name / f"{name}.data.xml")
        marks = [mark for sentence in sentences for mark in sentence.marks]
        assert len(marks) == instances
        assert all(mark.keys for mark in marks)
        assert {mark.pos for mark in marks} <= set("nvar")
