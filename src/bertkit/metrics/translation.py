"""Scores of translations against references: BLEU, chrF, and the share of exact matches.

Papineni et al. 2002 (BLEU) and Popović 2015 (chrF), by sacrebleu (Post 2018, arXiv:1804.08771): the tokenisation is
part of the score and is recorded in the signature. Fractions, not percent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bertkit.errors import DataError
from bertkit.text.word_split import search_pattern


@dataclass(frozen=True)
class TranslationScores:
    """Scores of a whole test set.

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
    """Scores of translations with one reference each.

    Raises:
        DataError: there are no translations, or the numbers differ.
    """
    if not translations or len(translations) != len(references):
        raise DataError(f"{len(translations)} translations and {len(references)} references; give one reference each")
    from sacrebleu.metrics.bleu import BLEU
    from sacrebleu.metrics.chrf import CHRF

    bleu = BLEU(tokenize=_tokenisation(references))
    score = bleu.corpus_score(list(translations), [list(references)]).score
    chrf = CHRF().corpus_score(list(translations), [list(references)]).score
    equal = sum(ours == theirs for ours, theirs in zip(translations, references, strict=True))
    return TranslationScores(score / 100, chrf / 100, equal / len(references), str(bleu.get_signature()))


def _tokenisation(references: Sequence[str]) -> str:
    """The name of sacrebleu's tokenisation: `zh` for Chinese, `char` for other scripts without spaces, if most of the
    words are their characters; otherwise the usual one, for which such a sentence is one word."""
    found = list(search_pattern().finditer(" ".join(references)))
    alone = "".join(match[1] for match in found if match[1])
    if 2 * len(alone) <= len(found):
        return "13a"
    return "zh" if 10 * sum("\u3400" <= each <= "\u9fff" for each in alone) > 9 * len(alone) else "char"
