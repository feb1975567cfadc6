"""Age of acquisition: where curves cross, which words have an age, and the reading of the challenge's files."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from bertkit.errors import DataError
from bertkit.evaluation.babylm.acquisition import agreement, child_age, model_age, read_children, read_contexts

AGES = np.arange(16, 31, dtype=float)
READ = np.array([*range(1, 10), *range(10, 101, 10)]) * 1e6
GUESS = math.log(1000)


def said_by(age: float) -> np.ndarray:
    return 1 / (1 + np.exp(-0.6 * (AGES - age)))


def surprisal(midpoint: float, least: float) -> np.ndarray:
    """Falls from the guess to its minimum, by a sigmoid in the logarithm of the words read."""
    return GUESS - (GUESS - least) / (1 + np.exp(-4 * (np.log10(READ + 1) - midpoint)))


def test_ages_are_where_the_curves_cross() -> None:
    assert child_age(AGES, said_by(21.3)) == pytest.approx(21.3, abs=1e-3)
    assert model_age(READ, surprisal(7.1, 2.0), GUESS) == pytest.approx(7.1, abs=0.05)
    noisy = surprisal(7.1, 2.0) + np.random.default_rng(0).normal(0, 0.05, len(READ))
    assert model_age(READ, noisy, GUESS) == pytest.approx(7.1, abs=0.1)


def test_words_that_are_never_learnt_have_no_age() -> None:
    assert child_age(AGES, np.full(len(AGES), 0.1)) is None
    assert child_age(AGES[:2], said_by(17)[:2]) is None
    assert model_age(READ, np.full(len(READ), 5.0), GUESS) is None
    assert model_age(READ[:2], np.array([3.0, 2.0]), GUESS) is None
    # Below the threshold from the first checkpoint on.
    assert model_age(READ, surprisal(4.0, 2.0), GUESS) is None


def test_agreement_is_over_the_words_that_have_both_ages() -> None:
    midpoints = {"dog": 6.3, "cat": 6.8, "tree": 7.2, "idea": 7.7}
    children = {word: (AGES, said_by(17 + 3 * k)) for k, word in enumerate([*midpoints, "unheard"])}
    curves = {word: surprisal(at, 1.5) for word, at in midpoints.items()} | {"unknown": surprisal(7.0, 1.0)}
    surprisals = {int(read): {w: [own[k], own[k]] for w, own in curves.items()} for k, read in enumerate(READ)}
    found = agreement(surprisals, children, GUESS)
    assert found["words"] == 4
    assert found["value"] == pytest.approx(np.corrcoef(list(midpoints.values()), [17, 20, 23, 26])[0, 1], abs=0.01)
    del children["dog"], children["cat"]
    assert agreement(surprisals, children, GUESS) == {"value": None, "words": 2}


def test_faulty_files_are_told_by_their_place(tmp_path: Path) -> None:
    contexts = tmp_path / "cdi_childes.json"
    contexts.write_text(json.dumps({"dog": [{"context": "See the"}, {"context": "A"}], "a": [{"context": "It is"}]}))
    (only,) = read_contexts(contexts)
    assert (only.word, only.contexts) == ("dog", ("See the", "A"))
    contexts.write_text(json.dumps({"dog": [{"text": "See the"}]}))
    with pytest.raises(DataError, match="dog"):
        read_contexts(contexts)
    contexts.write_text("{}")
    with pytest.raises(DataError, match="no word with a context"):
        read_contexts(contexts)
    children = tmp_path / "cdi_human.csv"
    children.write_text(",word,16,17,18\n0,dog,0.1,,0.5\n")
    ages, shares = read_children(children)["dog"]
    assert ages.tolist() == [16, 18]
    assert shares.tolist() == [0.1, 0.5]
    children.write_text(",word,16\n0,dog,many\n")
    with pytest.raises(DataError, match="line 2: a share is not a number"):
        read_children(children)
    children.write_text("word\ndog\n")
    with pytest.raises(DataError, match="none of ages 16 to 30"):
        read_children(children)
