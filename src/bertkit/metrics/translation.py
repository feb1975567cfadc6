"""Translations against their references: BLEU, chrF, and the share that is equal.

Papineni et al. 2002 (BLEU) and Popović 2015 (chrF), by sacrebleu (Post 2018, arXiv:1804.08771): its tokenisation is a
part of the score, and its signature says which one it was. Shares, not percent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bertkit.errors import DataError


@dataclass(frozen=True)
class TranslationScores:
    """Of a whole test set.

    Attributes:
        bleu, chrf: from 0 to 1.
        exact: share of the translations that equal their reference.
        signature: sacrebleu's, of BLEU.
    """

    bleu: float
    chrf: float
    exact: float
    signature: str

    @property
    def figures(self) -> dict[str, float]:
        """The scores by name."""
        return {"bleu": self.bleu, "chrf": self.chrf, "exact": self.exact}


def translation_scores(translations: Sequence[str], references: Sequence[str]) -> TranslationScores:
    """Of translations with one reference each.

    Raises:
        DataError: there are none, or their numbers differ.
    """
    if not translations or len(translations) != len(references):
        raise DataError(f"{len(translations)} translations and {len(references)} references; one of each is needed")
    from sacrebleu.metrics.bleu import BLEU
    from sacrebleu.metrics.chrf import CHRF

    bleu = BLEU()
    score = bleu.corpus_score(list(translations), [list(references)]).score
    chrf = CHRF().corpus_score(list(translations), [list(references)]).score
    equal = sum(ours == theirs for ours, theirs in zip(translations, references, strict=True))
    return TranslationScores(score / 100, chrf / 100, equal / len(references), str(bleu.get_signature()))
