"""Quality of generated texts as a set: their variety, and their perplexity under another model.

- distinct-n: Li et al. 2016, arXiv:1510.03055, section 5.3: different n-grams divided by all n-grams.
- self-BLEU: Zhu et al. 2018, arXiv:1802.01886 (Texygen), section 3.2: the mean BLEU-4 (Papineni et al. 2002) of each
  text against all others; an order without a match counts as a tenth of one. High means that the texts repeat each
  other.
- perplexity under a second model, from left to right: a low value alone means little, since dull text has it too.

Words are separated by white space.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence

import torch

from bertkit.models.headed import HeadedModel
from bertkit.models.scoring.pseudo_likelihood import score_texts
from bertkit.models.scoring.rules import EncoderLeftToRight, choose_rule
from bertkit.progress import Progress, silent_progress
from bertkit.text.tokenizer import Tokenizer

ORDERS = (1, 2, 3, 4)
_NO_MATCH = 0.1
"""Count used for no match at all: Chen and Cherry 2014, smoothing 1."""
_LARGEST_MEAN = 700.0
_CPU = torch.device("cpu")


def ngrams(words: Sequence[str], order: int) -> Counter[tuple[str, ...]]:
    """How often each n-gram of this order is in a text."""
    return Counter(tuple(words[start : start + order]) for start in range(len(words) - order + 1))


def distinct(texts: Sequence[str], order: int) -> float | None:
    """Different n-grams divided by all n-grams of the texts; None if there are none."""
    found: Counter[tuple[str, ...]] = Counter()
    for text in texts:
        found += ngrams(text.split(), order)
    return len(found) / found.total() if found else None


def bleu(length: int, matches: Sequence[int], lengths: Iterable[int]) -> float:
    """BLEU-4 of one text: the geometric mean of the clipped precisions, times the brevity penalty for the reference of
    nearest length (the shorter one of two); 0 if no word occurs in a reference.

    Args:
        length: number of its words.
        matches: for each order, the number of its n-grams that are in a reference, each at most as often as there.
        lengths: of the references.
    """
    if not matches[0]:
        return 0.0
    log_precision = 0.0
    for order, found in zip(ORDERS, matches, strict=True):
        log_precision += math.log((found or _NO_MATCH) / max(1, length - order + 1)) / len(ORDERS)
    nearest = min((abs(each - length), each) for each in lengths)[1]
    return math.exp(log_precision + min(0.0, 1 - nearest / length))


def self_bleu(texts: Sequence[str]) -> float | None:
    """The mean BLEU of each text against all others; None for fewer than two texts."""
    words = [text.split() for text in texts]
    if len(words) < 2:
        return None
    matches: list[list[int]] = [[] for _ in words]
    for order in ORDERS:
        # The two greatest counts of each n-gram: a text with the greatest is compared with the other.
        most: dict[tuple[str, ...], tuple[int, int]] = {}
        own = [ngrams(each, order) for each in words]
        for counts in own:
            for ngram, count in counts.items():
                first, second = most.get(ngram, (0, 0))
                most[ngram] = (max(first, count), max(min(first, count), second))
        for found, counts in zip(matches, own, strict=True):
            found.append(sum(min(count, most[ngram][count == most[ngram][0]]) for ngram, count in counts.items()))
    lengths = Counter(map(len, words))
    scores = [
        bleu(len(each), found, (lengths - Counter([len(each)])).keys())
        for each, found in zip(words, matches, strict=True)
    ]
    return sum(scores) / len(scores)


def variety(texts: Sequence[str]) -> dict[str, float | None]:
    """distinct-1 to distinct-4, and self-BLEU."""
    return {**{f"distinct_{order}": distinct(texts, order) for order in ORDERS}, "self_bleu": self_bleu(texts)}


def perplexities(
    model: HeadedModel,
    tokenizer: Tokenizer,
    texts: Sequence[str],
    *,
    source: str = "the model",
    device: torch.device = _CPU,
    progress: Progress = silent_progress,
) -> list[float | None]:
    """The perplexity of each text, by the rule that the model was trained for; None for a text without words, or if it
    exceeds every float. A text longer than the model's maximum is cut at its end.

    Raises:
        DataError: the model cannot compute a text's likelihood.
    """
    recorded = model.extras.get("scoring_rule")
    name = EncoderLeftToRight.name if recorded == "masked_next_token" else None
    rule = choose_rule(model, name, source=source)
    scoring = rule(tokenizer)
    room = model.encoder.max_tokens - scoring.special_tokens
    whole = []
    for text in texts:
        offsets = tokenizer.encodings_plain([text])[0].offsets
        whole.append(text[: offsets[room - 1][1]] if len(offsets) > room else text)
    lengths = [ids.size for ids in (tokenizer.encode_plain([text])[0] for text in whole)]
    scored = [number for number, length in enumerate(lengths) if room >= length > scoring.unscored_tokens]
    found: list[float | None] = [None] * len(texts)
    if not scored:
        return found
    scores = score_texts(
        model, tokenizer, [whole[number] for number in scored], rule=rule.name, device=device, progress=progress
    )
    for number, score in zip(scored, scores, strict=True):
        mean = -score.total / score.tokens
        found[number] = math.exp(mean) if mean < _LARGEST_MEAN else None
    return found
