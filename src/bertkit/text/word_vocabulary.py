"""A vocabulary of whole words: the commonest of some texts; all others are [UNK].

What word vectors are made for, and what Tang et al. 2019, arXiv:1903.12136, section 4.2, give their BiLSTM. Sibling
vocabulary.py learns pieces of words. Words are cut as BERT cuts them, and the tokenizer is a WordPiece one without
pieces that continue a word: a word that is not there whole is [UNK].
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from bertkit.errors import DataError, UsageError
from bertkit.text.tokenizer import Tokenizer
from bertkit.text.tokenizer_files import bert_template
from bertkit.text.vocabulary import MAX_WORD_CHARACTERS, SPECIAL_TOKENS


def word_tokenizer(texts: Iterable[str], vocab_size: int, *, lowercase: bool = True) -> Tokenizer:
    """A tokenizer of the commonest words; of equally common ones the first by code points.

    Args:
        texts: read once.
        vocab_size: entries, special tokens included; fewer where the texts have fewer words.
        lowercase: of all words; accents go, too.

    Raises:
        UsageError: `vocab_size` leaves no room for a word.
        DataError: the texts hold no word.
    """
    if vocab_size <= len(SPECIAL_TOKENS):
        raise UsageError(
            f"vocab_size: {vocab_size} does not hold a word beside the {len(SPECIAL_TOKENS)} special tokens; raise it"
        )
    normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    cutter = pre_tokenizers.BertPreTokenizer()
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(word for word, _ in cutter.pre_tokenize_str(normalizer.normalize_str(text)))
    if not counts:
        raise DataError("there is no text to take words from")
    known = [word for word in counts if word not in SPECIAL_TOKENS.values() and len(word) <= MAX_WORD_CHARACTERS]
    ranked = sorted(known, key=lambda word: (-counts[word], word))[: vocab_size - len(SPECIAL_TOKENS)]
    entries = {token: number for number, token in enumerate([*SPECIAL_TOKENS.values(), *ranked])}
    backend = Backend(
        models.WordPiece(entries, unk_token=SPECIAL_TOKENS["unk"], max_input_chars_per_word=MAX_WORD_CHARACTERS)
    )
    backend.normalizer, backend.pre_tokenizer = normalizer, cutter
    backend.decoder = decoders.WordPiece(prefix="##")
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS.values()])
    tokenizer = Tokenizer(backend, dict(SPECIAL_TOKENS), lowercases=lowercase)
    backend.post_processor = bert_template(tokenizer)
    return tokenizer
