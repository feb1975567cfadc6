"""Training a vocabulary on text: WordPiece, BPE, byte-level BPE, Unigram, or whole words.

Devlin et al. 2019, arXiv:1810.04805 (WordPiece); Sennrich et al. 2016, arXiv:1508.07909 (BPE); Radford et al. 2019,
GPT-2 (byte-level BPE); Kudo 2018, arXiv:1804.10959 (Unigram). `tokenizers` trains; this file makes the result
reproducible byte for byte. The alphabet is fixed beforehand and Unigram's scores are rounded, since both depend on
hashing there.
Whole words are for word vectors and the BiLSTM of Tang et al. 2019, arXiv:1903.12136, section 4.2.
"""

from __future__ import annotations

import json
import logging
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from tokenizers import (
    AddedToken,
    Regex,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)
from tokenizers import Tokenizer as Backend

from bertkit.errors import DataError, UsageError
from bertkit.text.plain_encoder import WORDS_WITH_MARKS
from bertkit.text.tokenizer import Tokenizer, TokenizerConfig, sentinel
from bertkit.text.tokenizer_files import MAX_WORD_CHARACTERS, template

# Ids 0 to 4 of every trained vocabulary. The google-research vocabularies have [PAD] at 0 and the rest at 100 to 103.
SPECIAL_TOKENS = {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}
SCORE_DECIMALS = 4
BYTE_ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
# A run of punctuation, or of anything else, each with the word mark before it: as in GPT-2, without its contractions.
_WORD_OR_PUNCTUATION = Regex(r"▁?((?!▁)[\p{P}\p{S}])+|▁?[^▁\p{P}\p{S}]+|▁+")

_MARKED_SHARE = 0.01
"""Share of words with combining marks from which byte-level BPE does not split words at these."""
_STRIPPED_SHARE = 0.05
"""Share of words that removing accents changes from which a warning is logged."""

log = logging.getLogger(__name__)

_LONGEST_WORD = 4096
"""Characters. The time of the trainers of `tokenizers` grows with the square of a word's length."""


def _with_short_words(text: str) -> str:
    """The text with a space after every 4,096 characters of a longer word."""
    if len(text) <= _LONGEST_WORD or max(map(len, text.split()), default=0) <= _LONGEST_WORD:
        return text
    return re.sub(rf"\S{{{_LONGEST_WORD}}}(?=\S)", r"\g<0> ", text)


def train_tokenizer(config: TokenizerConfig, texts: Iterable[str]) -> Tokenizer:
    """Train a vocabulary; the same texts in the same order give the same tokenizer.json, byte for byte.

    Args:
        config: kind and size; `path` is ignored.
        texts: kept in memory; pass a sample of a large corpus.

    Raises:
        UsageError: `vocab_size` is too small for the special tokens and the alphabet.
        DataError: no text.
    """
    texts = list(texts)
    if not any(text and not text.isspace() for text in texts):
        raise DataError("there is no text to train a vocabulary on")
    words_of_text = _Words(texts)
    if config.strip_accents is None and config.strips_accents:
        words_of_text.warn_of_stripped()
    if config.type == "word":
        words = word_tokenizer(
            texts, config.vocab_size, lowercase=config.lowercases, min_frequency=config.min_frequency
        )
        words.backend.post_processor = template(words, config.template)
        return words
    config = config.model_copy(update={"vocab_size": config.vocab_size - config.sentinels})
    backend = _untrained(config, keeps_marks=words_of_text.marked > _MARKED_SHARE and not config.strips_accents)
    alphabet = BYTE_ALPHABET if config.type == "byte-bpe" else _alphabet(backend, texts, config.character_coverage)
    continuing = [f"##{c}" for c in alphabet if _continues_words(backend, c)] if config.type == "wordpiece" else []
    _check_size(config, len(alphabet), len(continuing))
    if config.type == "unigram":
        texts = _without_rare_characters(backend, texts, alphabet)
    backend.train_from_iterator(map(_with_short_words, texts), _trainer(config, alphabet, continuing))
    return _finished(backend, config)


class _Words:
    """The words of a text that are not ASCII, separated by white space, with their counts; most have accents or marks.

    Attributes:
        total: number of all words.
        marked: the share of words with combining marks or joiners.
    """

    def __init__(self, texts: Iterable[str]) -> None:
        self.total = 0
        self.counts: Counter[str] = Counter()
        for text in texts:
            words = text.split()
            self.total += len(words)
            if not text.isascii():
                self.counts.update(word for word in words if not word.isascii())
        self.marked = self._share(word for word in self.counts if any(map(_is_mark, word)))

    def _share(self, words: Iterable[str]) -> float:
        return sum(self.counts[word] for word in words) / self.total

    def warn_of_stripped(self) -> None:
        """Log a warning if removing accents, which is the default, changes many words."""
        changed = {}
        for word in self.counts:
            composed, parts = (unicodedata.normalize(form, word) for form in ("NFC", "NFD"))
            plain = unicodedata.normalize("NFC", "".join(c for c in parts if unicodedata.category(c) != "Mn"))
            if plain != composed:
                changed[word] = plain
        share = self._share(changed)
        if share > _STRIPPED_SHARE:
            frequent = sorted(changed, key=lambda word: (-self.counts[word], word))[:3]
            log.warning(
                "tokenizer.strip_accents: without accents and vowel signs, as in BERT's uncased models, %.0f%% of words"
                " change, such as %s; `--set tokenizer.strip_accents=false` keeps them (of `bertkit tokenize`:"
                " --keep-accents)",
                *(100 * share, ", ".join(f"{word!r:.30} to {changed[word]!r:.30}" for word in frequent)),
            )


def _is_mark(character: str) -> bool:
    return unicodedata.category(character)[0] == "M" or character in "\u200c\u200d"


def _untrained(config: TokenizerConfig, *, keeps_marks: bool) -> Backend:
    """The rules of a kind of vocabulary; `keeps_marks`: byte-level BPE splits no words at combining marks."""
    unk = SPECIAL_TOKENS["unk"]
    if config.type == "wordpiece":
        model = models.WordPiece(unk_token=unk, max_input_chars_per_word=MAX_WORD_CHARACTERS)
        backend = Backend(model)
        backend.normalizer = normalizers.BertNormalizer(
            clean_text=True,
            handle_chinese_chars=True,
            strip_accents=config.strips_accents,
            lowercase=config.lowercases,
        )
        backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        backend.decoder = decoders.WordPiece(prefix="##")
    elif config.type == "byte-bpe":
        backend = Backend(models.BPE())
        steps: list[Any] = [normalizers.Lowercase()] if config.lowercases else []
        steps = [normalizers.NFD(), normalizers.StripAccents(), *steps] if config.strips_accents else steps
        if steps:
            backend.normalizer = normalizers.Sequence(steps)
        # RoBERTa gives the first word of a text no space; here a word has the same tokens in every position.
        # ByteLevel's own option would also put a space between a mask and the full stop that follows it.
        first_space = pre_tokenizers.Metaspace(replacement=" ", prepend_scheme="first", split=False)
        into_words = [pre_tokenizers.Split(Regex(WORDS_WITH_MARKS), "isolated")] if keeps_marks else []
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not keeps_marks)
        backend.pre_tokenizer = pre_tokenizers.Sequence([first_space, *into_words, byte_level])
        backend.decoder = decoders.ByteLevel()
    else:
        backend = Backend(models.BPE(unk_token=unk) if config.type == "bpe" else models.Unigram())
        backend.normalizer = _sentencepiece_normalizer(config)
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Metaspace(prepend_scheme="always"), pre_tokenizers.Split(_WORD_OR_PUNCTUATION, "isolated")]
        )
        backend.decoder = decoders.Metaspace(prepend_scheme="always")
    return backend


def _sentencepiece_normalizer(config: TokenizerConfig) -> normalizers.Normalizer:
    """Plain quotes, compatibility forms composed, single spaces: google-research/albert tokenization.py."""
    steps: list[Any] = [normalizers.Replace("``", '"'), normalizers.Replace("''", '"')]
    if config.strips_accents:
        steps += [normalizers.NFKD(), normalizers.StripAccents()]
    else:
        steps += [normalizers.NFKC()]
    if config.lowercases:
        steps += [normalizers.Lowercase()]
    return normalizers.Sequence([*steps, normalizers.Replace(Regex(r"\s+"), " "), normalizers.Strip()])


def _alphabet(backend: Backend, texts: list[str], coverage: float) -> list[str]:
    """The most frequent characters, after normalising, that cover `coverage` of the text; in code point order."""
    occurrences: Counter[str] = Counter()
    for text in texts:
        occurrences.update(text.split(" "))
    counts = np.zeros(0x110000, dtype=np.int64)
    words = list(occurrences)
    for first in range(0, len(words), 100_000):
        part = words[first : first + 100_000]
        normal = [backend.normalizer.normalize_str(word) if backend.normalizer else word for word in part]
        characters = np.frombuffer("".join(normal).encode("utf-32-le", errors="surrogatepass"), dtype=np.uint32)
        weights = np.repeat([occurrences[word] for word in part], [len(word) for word in normal])
        np.add.at(counts, characters, weights)
    seen = [int(c) for c in np.flatnonzero(counts) if not chr(c).isspace()]
    if not seen:
        raise DataError("the text is empty: the tokenizer's rules remove every character of it")
    seen.sort(key=lambda c: (-counts[c], c))
    missing_share = 1 - np.cumsum(counts[seen]) / counts[seen].sum()
    kept = int(np.argmax(missing_share <= 1 - coverage + 1e-12)) + 1
    return sorted(chr(c) for c in seen[:kept])


def _continues_words(backend: Backend, character: str) -> bool:
    """Whether this character can be inside a word; punctuation and ideographs never are."""
    normal = backend.normalizer.normalize_str(f"a{character}a")
    return len(backend.pre_tokenizer.pre_tokenize_str(normal)) == 1


def _check_size(config: TokenizerConfig, alphabet: int, continuing: int) -> None:
    # Metaspace vocabularies also need the word mark itself.
    needed = len(SPECIAL_TOKENS) + alphabet + continuing + (config.type in ("bpe", "unigram"))
    if config.vocab_size < needed:
        standing = f" and {config.sentinels} that stand for spans" if config.sentinels else ""
        parts = f"{len(SPECIAL_TOKENS)} special tokens{standing} and {needed - len(SPECIAL_TOKENS)} single characters"
        remedy = "" if config.type == "byte-bpe" else " or lower tokenizer.character_coverage"
        raise UsageError(
            f"tokenizer.vocab_size: {config.vocab_size + config.sentinels} has no room for the {parts} of this text; "
            f"give at least {needed + config.sentinels}{remedy}"
        )


def _trainer(config: TokenizerConfig, alphabet: list[str], continuing: list[str]) -> trainers.Trainer:
    specials = list(SPECIAL_TOKENS.values())
    specials.insert(config.pad_id, specials.pop(0))
    if config.type == "wordpiece":
        # By itself the trainer numbers the alphabet in the order of a hash table, different in each process. Entered as
        # special tokens the characters get fixed ids; _finished makes them ordinary again.
        return trainers.WordPieceTrainer(
            vocab_size=config.vocab_size,
            min_frequency=config.min_frequency,
            special_tokens=[*specials, *alphabet, *continuing],
            limit_alphabet=0,
            show_progress=False,
        )
    if config.type == "unigram":
        return trainers.UnigramTrainer(
            vocab_size=config.vocab_size,
            special_tokens=specials,
            initial_alphabet=alphabet,
            unk_token=SPECIAL_TOKENS["unk"],
            show_progress=False,
        )
    letters = alphabet if config.type == "byte-bpe" else [*alphabet, "▁"]
    return trainers.BpeTrainer(
        vocab_size=config.vocab_size,
        min_frequency=config.min_frequency,
        special_tokens=[*specials, *letters],
        limit_alphabet=0,
        show_progress=False,
    )


def _without_rare_characters(backend: Backend, texts: list[str], alphabet: list[str]) -> list[str]:
    """The text without rare characters: Unigram's trainer keeps every character that it sees."""
    kept = set(alphabet) | {" "}

    def clean() -> Iterator[str]:
        for text in texts:
            normal = backend.normalizer.normalize_str(text)
            rare = set(normal) - kept
            yield normal.translate(dict.fromkeys(map(ord, rare))) if rare else normal

    return list(clean())


def _settled(pieces: list[list[Any]], room: int) -> list[list[Any]]:
    """Unigram's tokens by score, at most `room` (the trainer may return more), without what varies between runs.

    Floats are summed in a different order each time, so scores are rounded. The trainer restores characters that it
    pruned at the lowest score plus a ten-thousandth for each, in the order of a hash table: all get the lowest.
    """
    lowest = round(min(score for _, score in pieces), SCORE_DECIMALS)
    put_back = lowest + 10**-SCORE_DECIMALS * (1 + sum(len(piece) == 1 for piece, _ in pieces))
    rounded = [
        [piece, lowest if len(piece) == 1 and score <= put_back else round(score, SCORE_DECIMALS)]
        for piece, score in pieces
    ]
    # Every character keeps its entry; of the longer tokens the most likely are kept.
    rounded.sort(key=lambda entry: (len(entry[0]) > 1, -entry[1], entry[0]))
    return sorted(rounded[:room], key=lambda entry: (-entry[1], entry[0]))


def _finished(backend: Backend, config: TokenizerConfig) -> Tokenizer:
    """A tokenizer of the trained model in which only the five special tokens are special, followed by sentinels."""
    settings = json.loads(backend.to_str())
    settings["added_tokens"] = []
    if config.type == "unigram":
        pieces = settings["model"]["vocab"]
        special, learnt = pieces[: len(SPECIAL_TOKENS)], pieces[len(SPECIAL_TOKENS) :]
        settings["model"]["vocab"] = special + _settled(learnt, config.vocab_size - len(special))
    plain = Backend.from_str(json.dumps(settings))
    special_tokens = [*SPECIAL_TOKENS.values(), *map(sentinel, reversed(range(config.sentinels)))]
    # As in RoBERTa, the space before a mask belongs to it: otherwise it would be a token of its own.
    spaced = SPECIAL_TOKENS["mask"] if config.type == "byte-bpe" else None
    plain.add_special_tokens(
        [AddedToken(token, special=True, normalized=False, lstrip=token == spaced) for token in special_tokens]
    )
    tokenizer = Tokenizer(plain, dict(SPECIAL_TOKENS), lowercases=config.lowercases)
    plain.post_processor = template(tokenizer, config.template)
    return tokenizer


def word_tokenizer(
    texts: Iterable[str], vocab_size: int, *, lowercase: bool = True, min_frequency: int = 1
) -> Tokenizer:
    """A tokenizer of the most frequent words, ties by code points; any other word is [UNK].

    Words are split as in BERT, and the tokenizer is a WordPiece one without continuing tokens.

    Args:
        texts: from which words are counted.
        vocab_size: number of entries including special tokens; fewer if the texts have fewer words.
        lowercase: whether to lowercase all words and remove their accents.
        min_frequency: minimum count of a word.

    Raises:
        UsageError: `vocab_size` leaves no room for a word.
        DataError: the texts have no words, or none that is frequent enough.
    """
    if vocab_size <= len(SPECIAL_TOKENS):
        raise UsageError(
            f"vocab_size: {vocab_size} leaves no room for words beyond {len(SPECIAL_TOKENS)} special tokens; raise it"
        )
    normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    cutter = pre_tokenizers.BertPreTokenizer()
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(word for word, _ in cutter.pre_tokenize_str(normalizer.normalize_str(text)))
    if not counts:
        raise DataError("there is no text to take words from")
    known = [
        word
        for word, count in counts.items()
        if count >= min_frequency and word not in SPECIAL_TOKENS.values() and len(word) <= MAX_WORD_CHARACTERS
    ]
    if not known:
        rare = f" that occurs {min_frequency} times; lower tokenizer.min_frequency, or give more text"
        raise DataError(f"the text has no word{rare if min_frequency > 1 else ''}")
    ranked = sorted(known, key=lambda word: (-counts[word], word))[: vocab_size - len(SPECIAL_TOKENS)]
    entries = {token: number for number, token in enumerate([*SPECIAL_TOKENS.values(), *ranked])}
    backend = Backend(
        models.WordPiece(entries, unk_token=SPECIAL_TOKENS["unk"], max_input_chars_per_word=MAX_WORD_CHARACTERS)
    )
    backend.normalizer, backend.pre_tokenizer = normalizer, cutter
    backend.decoder = decoders.WordPiece(prefix="##")
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS.values()])
    tokenizer = Tokenizer(backend, dict(SPECIAL_TOKENS), lowercases=lowercase)
    backend.post_processor = template(tokenizer, "bert")
    return tokenizer
