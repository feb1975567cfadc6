"""BLEU of scripts with and without spaces, by sacrebleu's own tokenisation for each."""

from __future__ import annotations

import pytest
from sacrebleu.metrics.bleu import BLEU

from bertkit.metrics.translation import translation_scores


@pytest.mark.parametrize(
    ("translation", "reference", "tokenisation"),
    [
        ("The cat saw 北京 today, it is said.", "The cat saw 北京 today.", "13a"),
        ("हिन्दी में लिखा हुआ पृष्ठ", "हिन्दी में लिखा हुआ पृष्ठ है", "13a"),
        ("今天天气很好，GPT也说", "今天天气很坏，GPT 也说", "zh"),
        ("彼はソニーへ行く", "彼はソニーに行く", "char"),
        ("ฉันไปกรุงเทพ", "ฉันไปกรุงเทพฯ", "char"),
    ],
)
def test_scripts_without_spaces_are_scored_by_their_characters(
    translation: str, reference: str, tokenisation: str
) -> None:
    scores = translation_scores([translation], [reference])
    assert f"tok:{tokenisation}|" in scores.signature
    assert scores.bleu == BLEU(tokenize=tokenisation).corpus_score([translation], [[reference]]).score / 100 > 0.2
