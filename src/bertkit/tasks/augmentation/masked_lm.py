"""TinyBERT's augmentation: words are replaced by predictions of a masked language model.

Jiao et al. 2020, TinyBERT, arXiv:1909.10351, algorithm 1. A word that is one token is masked, and the model's M
likeliest words are its candidates; a word of several tokens has the M nearest words by word vectors. In each of N
copies every word becomes one of its candidates with probability p. As in the released data_augmentation.py, the input
is the sentence twice, as a pair, masked in the first: the model sees the original word and proposes similar ones.
Stop words and words with characters other than letters and digits are unchanged (with `letters: a-z`, as in the code,
words with any character outside a to z). The texts of a pair are altered separately: N copies with one altered and N
with the other. Sibling masking.py needs no model.

Quirks: candidates are whole words of letters and digits (tokens that continue a word, and punctuation, are skipped);
copies are drawn as in the paper, so a word may be replaced by itself; without a file of word vectors, words of several
tokens are unchanged.

Shapes: R masked copies of sentences, M candidates, V vocabulary, W words.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from bertkit.data.batch import PackedBatch
from bertkit.data.random import Draw
from bertkit.errors import DataError
from bertkit.models.files.hub import load_model
from bertkit.models.files.model_files import encoder_directory, find_model, weights_hash
from bertkit.models.headed import SCORING_RULE, HeadedModel
from bertkit.settings import UnreadKey
from bertkit.tasks.augmentation.base import Augmentation, AugmentationContext, Augmenter, Variant, address, content_hash
from bertkit.tasks.augmentation.function_words import FUNCTION_WORDS
from bertkit.tasks.augmentation.words import WordSplitText
from bertkit.tasks.encoding import SequenceEncoder
from bertkit.tasks.examples import TextExample
from bertkit.text.lexicon import read_lexicon
from bertkit.text.tokenizer import Tokenizer
from bertkit.text.tokenizer_files import load_tokenizer
from bertkit.text.word_vectors import WordVectors, read_word_vectors

_HEAD = "masked_lm"
_A_TO_Z = re.compile("[a-z]+", re.IGNORECASE | re.ASCII)
_BATCH_TOKENS = 8192

Candidates = dict[int, tuple[str, ...]]
"""The words that may replace a word, by its number."""


class MaskedLMWords(Augmentation):
    """Replace words by predictions of a masked language model or nearest word vectors."""

    name: Literal["masked_lm"] = "masked_lm"
    labels: Literal["kept", "none"] = Field(
        "kept",
        description="kept: a copy keeps its example's label; none: it has no label, and the teacher's outputs are"
        " its labels.",
    )
    later_fields: ClassVar[frozenset[str]] = frozenset({"letters"})

    model: str = Field(description="Model with a masked-LM head: a Hub id, a model directory or a run directory.")
    copies: int = Field(
        20,
        ge=1,
        description="Number of copies per text (N); TinyBERT uses 10 for MNLI and QQP, 20 for SST-2 and QNLI, else 30.",
    )
    replace: float = Field(0.4, ge=0, le=1, description="Probability p that a word is replaced.")
    candidates: int = Field(15, ge=1, description="Number of candidates per word (M).")
    word_vectors: str | None = Field(
        None,
        description="File of word vectors (GloVe or word2vec text) for words of several tokens; null: those words"
        " are unchanged.",
    )
    vector_words: int = Field(100_000, ge=2, description="Number of words read from that file, the most common first.")
    letters: Literal["any", "a-z"] = Field(
        "any",
        description="Which words may be replaced: those of any letters and digits, or only those of the letters a to"
        " z.",
    )
    stop_words: str | None = Field(
        None,
        description="File of words that are never replaced, one per line, in lower case; null: English function words.",
    )

    def unread_keys(self, recipe: Any) -> Iterator[UnreadKey]:
        yield from super().unread_keys(recipe)
        if self.word_vectors is None:
            yield UnreadKey("vector_words", "augmentation.word_vectors names no file", "give word_vectors")

    def augmenter(self, examples: Sequence[TextExample], surroundings: AugmentationContext) -> MaskedLMAugmenter:
        directory = self._directory(offline=surroundings.offline)
        model, _ = load_model(directory)
        if _HEAD not in model.head_names:
            raise DataError(f"{directory}: has no masked-LM head; use a model that was pretrained with one")
        rule = model.extras.get(SCORING_RULE)
        if rule is not None:
            raise DataError(f"{directory}: was trained to be scored by {rule}; use a model trained by masked_lm alone")
        vectors = None
        if self.word_vectors is not None:
            vectors = read_word_vectors(Path(self.word_vectors).expanduser(), most_words=self.vector_words)
        tokenizer = load_tokenizer(directory, offline=surroundings.offline)
        proposer = Proposer(model.to(surroundings.device), tokenizer, self.candidates, device=surroundings.device)
        stop_words = FUNCTION_WORDS
        if self.stop_words is not None:
            stop_words = frozenset(read_lexicon(Path(self.stop_words).expanduser()))
        return MaskedLMAugmenter(self, proposer, vectors, stop_words, surroundings.draw)

    def reads(self, *, offline: bool) -> dict[str, str]:
        directory = self._directory(offline=offline)
        tokenizer = load_tokenizer(directory, offline=offline)
        files = {"word_vectors": self.word_vectors, "stop_words": self.stop_words}
        own = {name: content_hash(path, name) for name, path in files.items() if path is not None}
        return {"model": f"{weights_hash(directory)} {tokenizer.fingerprint}", **own}

    def _directory(self, *, offline: bool) -> Path:
        return encoder_directory(find_model(self.model, offline=offline))


class MaskedLMAugmenter(Augmenter):
    """Creates the copies.

    Args:
        settings: probability and number of copies.
        proposer: of candidates for words of one token.
        vectors: for words of several tokens.
        stop_words: words that are not replaced, in lower case.
        draw: random draws of all choices.
    """

    def __init__(
        self,
        settings: MaskedLMWords,
        proposer: Proposer,
        vectors: WordVectors | None,
        stop_words: frozenset[str],
        draw: Draw,
    ) -> None:
        self.settings = settings
        self.proposer = proposer
        self.stop_words = stop_words
        self.draw = draw
        self._nearest = lru_cache(maxsize=None)(
            lambda word: () if vectors is None else tuple(vectors.nearest(word, settings.candidates))
        )

    def variants(self, examples: Sequence[TextExample]) -> list[list[Variant]]:
        texts = dict.fromkeys(text for each in examples for text in (each.text, each.text_pair) if text is not None)
        found = dict(zip(texts, self.candidates(list(texts)), strict=True))
        return [self._of(example, found) for example in examples]

    def candidates(self, texts: Sequence[str]) -> list[Candidates]:
        """The candidates for each text's words; words that are not replaced are left out."""
        cuts = [WordSplitText.of(text).words for text in texts]
        chosen = [[number for number, word in enumerate(words) if self._may_change(word)] for words in cuts]
        proposed = self.proposer.propose(cuts, chosen)
        found: list[Candidates] = []
        for words, numbers, own in zip(cuts, chosen, proposed, strict=True):
            several = [number for number in numbers if number not in own]
            near = {
                number: words_near
                for number in several
                if (words_near := self._nearest(words[number]) or self._nearest(words[number].lower()))
            }
            kept = {number: found_words for number, found_words in own.items() if found_words}
            found.append(dict(sorted({**kept, **near}.items())))
        return found

    def _may_change(self, word: str) -> bool:
        of_letters = word.isalnum() if self.settings.letters == "any" else _A_TO_Z.fullmatch(word) is not None
        return of_letters and word.lower() not in self.stop_words

    def _of(self, example: TextExample, found: dict[str, Candidates]) -> list[Variant]:
        first, second = example.text, example.text_pair
        if second is None:
            return [(text, None) for text in self._altered(first, 0, found[first], address(example))]
        altered = [
            self._altered(text, side, found[text], address(example)) for side, text in enumerate((first, second))
        ]
        return [*((text, second) for text in altered[0]), *((first, text) for text in altered[1])]

    def _altered(self, text: str, side: int, candidates: Candidates, example: int) -> list[str]:
        """N copies of one text of an example."""
        cut, copies = WordSplitText.of(text), self.settings.copies
        numbers = list(candidates)
        if not numbers:
            return [text] * copies
        copy_N1, word_W = np.arange(copies)[:, None], np.array(numbers)
        sizes_W = np.array([len(candidates[number]) for number in numbers])
        is_new_NW = (
            self.draw.uniform(f"replace/{side}", epoch=copy_N1, sample=example, position=word_W) < self.settings.replace
        )
        which_NW = self.draw.integers(f"candidate/{side}", sizes_W, epoch=copy_N1, sample=example, position=word_W)
        return [
            cut.changed({numbers[at]: candidates[numbers[at]][which_NW[copy, at]] for at in np.flatnonzero(is_new)})
            for copy, is_new in enumerate(is_new_NW)
        ]


@dataclass(frozen=True)
class _Masked:
    """A sentence twice, masked in the first: ids, types, the mask's position, and the word that it replaces."""

    ids: list[int]
    types: list[int]
    place: int
    sentence: int
    word: int


class Proposer:
    """A masked language model that proposes words.

    Args:
        model: with a masked-LM head, on its device.
        tokenizer: the model's.
        candidates: M.
        device: of the model.

    Raises:
        DataError: the vocabulary has no whole words, or no mask.
    """

    def __init__(
        self, model: HeadedModel, tokenizer: Tokenizer, candidates: int, *, device: torch.device | None = None
    ) -> None:
        config = model.encoder.config
        self.model = model.eval()
        self.device = device or torch.device("cpu")
        self.mask_id = tokenizer.mask_id
        self.unknown = tokenizer.unk_id if "unk" in tokenizer.roles else -1
        self._encoder = SequenceEncoder(tokenizer, max_tokens=config.max_tokens, token_types=config.reads_token_types)
        starts_V = tokenizer.word_start_V[: model.encoder.vocab_size]
        texts = {
            number: tokenizer.decode([number]).strip()
            for number in np.flatnonzero(starts_V).tolist()
            if number not in tokenizer.special_ids
        }
        self._words = {number: text for number, text in texts.items() if text.isalnum()}
        if not self._words:
            raise DataError("the model's vocabulary has no whole words to propose; use another model")
        self._word_ids = torch.tensor(list(self._words), device=self.device)
        self.candidates = min(candidates, len(self._words))

    def propose(self, sentences: Sequence[Sequence[str]], chosen: Sequence[Sequence[int]]) -> list[Candidates]:
        """Candidates for the chosen words that are one token, the likeliest first.

        A word beyond the model's maximum length has none; if a sentence does not fit twice, its second copy is cut.

        Args:
            sentences: words.
            chosen: numbers of words of each sentence.
        """
        found: list[Candidates] = [{} for _ in sentences]
        for some in _batches(self._masked(sentences, chosen)):
            best_RM = self._likeliest(some).tolist()
            for masked, ids in zip(some, best_RM, strict=True):
                found[masked.sentence][masked.word] = tuple(self._words[i] for i in ids)
        return found

    def _masked(self, sentences: Sequence[Sequence[str]], chosen: Sequence[Sequence[int]]) -> Iterator[_Masked]:
        room = self._encoder.room(2)
        encodings = self._encoder.word_encodings([words or [""] for words in sentences])
        for sentence, (encoding, numbers) in enumerate(zip(encodings, chosen, strict=True)):
            places: dict[int, list[int]] = {}
            for place, word in enumerate(encoding.word_ids):
                places.setdefault(word, []).append(place)
            first = list(encoding.ids)[:room]
            second = list(encoding.ids)[: room - len(first)]
            for word in numbers:
                own = places.get(word, [])
                if len(own) != 1 or own[0] >= len(first) or first[own[0]] == self.unknown:
                    continue
                copy = [*first]
                copy[own[0]] = self.mask_id
                ids, types = self._encoder.pair.fill(copy, second)
                yield _Masked(ids, types, self._encoder.pair.before + own[0], sentence, word)

    @torch.inference_mode()
    def _likeliest(self, some: Sequence[_Masked]) -> Tensor:
        """The M likeliest words at the masks, (R, M)."""
        batch = PackedBatch.from_ids([each.ids for each in some], [each.types for each in some]).to(self.device)
        place_R = torch.tensor([each.place for each in some], device=self.device)
        model = self.model
        hidden_RD = model.encoder.forward_tokens(
            model.encoder.with_global_tokens(batch, model.head_names), batch.first_token_B + place_R
        )
        logits_RV = model.token_logits(_HEAD, hidden_RD)[:, self._word_ids]
        return self._word_ids[logits_RV.topk(self.candidates, dim=-1).indices]


def _batches(masked: Iterator[_Masked]) -> Iterator[list[_Masked]]:
    """Batches of sentences that are computed at once."""
    some: list[_Masked] = []
    tokens = 0
    for each in masked:
        if some and tokens + len(each.ids) > _BATCH_TOKENS:
            yield some
            some, tokens = [], 0
        some.append(each)
        tokens += len(each.ids)
    if some:
        yield some
