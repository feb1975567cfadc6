"""The examples run unchanged and train in seconds on small text."""

from __future__ import annotations

import itertools
import re
import runpy
import tempfile
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


def write_sentences(path: Path) -> Path:
    """Forty documents of sentences composed from a few words."""
    parts = (["the cat", "a dog", "the girl", "a friend"], ["sees", "likes", "finds"], ["a house", "the river"])
    sentences = [" ".join(words) + "." for words in itertools.product(*parts)]
    documents = ["\n".join(sentences[start % 24 :] + sentences[: start % 24]) for start in range(40)]
    path.write_text("\n\n".join(documents))
    return path


def test_minimal_pretraining_learns_and_fills_a_mask(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = EXAMPLES / "minimal_pretrain.py"
    assert len(script.read_text().splitlines()) < 150
    main = runpy.run_path(str(script))["main"]
    with tempfile.TemporaryDirectory() as cache:
        main(str(write_sentences(tmp_path / "text.txt")), "the cat [MASK] the river.", 30, Path(cache))
    lines = capsys.readouterr().out.splitlines()
    losses = [float(loss) for line in lines for loss in re.findall(r"masked_lm ([\d.]+)", line)]
    assert len(losses) == 11
    assert losses[-1] < losses[0] - 1
    sentence, _, tokens = lines[-1].partition(" -> ")
    assert sentence == "the cat [MASK] the river."
    assert set(tokens.split(", ")) & {"sees", "likes", "finds"}
