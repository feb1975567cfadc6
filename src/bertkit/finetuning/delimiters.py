"""GPT's tokens around the texts of a task: a start, a delimiter between two texts, and one whose state is classified.

Radford et al. 2018, GPT, section 3.3 and figure 1; names as in openai/finetune-transformer-lm, train.py. They are
appended to the vocabulary. text/added_tokens.py adds words of a text.
"""

from __future__ import annotations

from tokenizers import Tokenizer as Backend
from tokenizers import processors

from bertkit.text.tokenizer import Tokenizer
from bertkit.text.tokenizer_files import template

START, DELIMITER, EXTRACT = DELIMITERS = ("_start_", "_delimiter_", "_classify_")


def has_delimiters(tokenizer: Tokenizer) -> bool:
    """Whether the vocabulary contains all three."""
    return all(tokenizer.id(token) is not None for token in DELIMITERS)


def with_delimiters(tokenizer: Tokenizer) -> Tokenizer:
    """The tokenizer with the three tokens, which frame every text and pair; all its ids are kept."""
    backend = Backend.from_str(tokenizer.backend.to_str())
    backend.add_special_tokens(list(DELIMITERS))
    backend.post_processor = processors.TemplateProcessing(
        single=f"{START} $A {EXTRACT}",
        pair=f"{START} $A {DELIMITER} $B {EXTRACT}",
        special_tokens=[(token, backend.token_to_id(token)) for token in DELIMITERS],
    )
    return Tokenizer(backend, tokenizer.roles, lowercases=tokenizer.lowercases)


def with_closing_separator(tokenizer: Tokenizer) -> Tokenizer:
    """A tokenizer with [CLS] and [SEP] whose texts end with [SEP], which takes the place of the token whose state is
    classified."""
    backend = Backend.from_str(tokenizer.backend.to_str())
    closed = Tokenizer(backend, tokenizer.roles, lowercases=tokenizer.lowercases)
    backend.post_processor = template(closed, "bert")
    return closed
