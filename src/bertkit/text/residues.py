"""ESM's vocabulary of proteins: one token per residue.

Lin et al. 2023, Science 379:1123; ids as in facebookresearch/esm, esm/data.py and esm/constants.py (the alphabet
`ESM-1b`), which the Hub's vocab.txt has, too. Residues need no spaces between them. Anything else, such as lower case,
is one unknown token for each run of it, as in the Hub's `EsmTokenizer`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from bertkit.text.tokenizer import Tokenizer

BUILTIN = "builtin:residues"
"""The name of ESM's vocabulary as a tokenizer."""
ROLES = {"cls": "<cls>", "pad": "<pad>", "sep": "<eos>", "unk": "<unk>", "mask": "<mask>"}
ALPHABET = ("<cls>", "<pad>", "<eos>", "<unk>", *"LAGVSERTIDPKQNFYMHWCXBUZO.-", "<null_1>", "<mask>")
"""The 20 amino acids by frequency, X for any, B and Z for one of two, U and O for the rare two, gaps of alignments, and
an entry that rounds up the size."""


def is_residue_vocabulary(tokens: Sequence[str]) -> bool:
    """Whether a vocab.txt is one of ESM's rather than BERT's."""
    return set(ROLES.values()) <= set(tokens)


def residue_backend(tokens: Sequence[str] = ALPHABET) -> Backend:
    """The tokenizer of a vocabulary with ESM's special tokens, without those around a text."""
    backend = Backend(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token=ROLES["unk"]))
    residues = sorted((token for token in tokens if token not in ROLES.values()), key=len, reverse=True)
    each = Regex("|".join(map(re.escape, residues)))
    special_start = Regex("<(?=" + "|".join(re.escape(token[1:]) for token in ROLES.values()) + ")")
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(each, "isolated"),
            # A special token that is read as text: in one part, the model would find it in its vocabulary.
            pre_tokenizers.Split(special_start, "isolated"),
            pre_tokenizers.WhitespaceSplit(),
        ]
    )
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in ROLES.values()])
    return backend


def writes_residues(tokenizer: Tokenizer) -> bool:
    """Whether the Hub's `EsmTokenizer` reads this tokenizer, from a vocab.txt."""
    return isinstance(tokenizer.backend.model, models.WordLevel) and ROLES.items() <= tokenizer.roles.items()
