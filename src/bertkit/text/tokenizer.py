"""A tokenizer: text to ids and back, for any kind of vocabulary.

Devlin et al. 2019, BERT, arXiv:1810.04805, section 3 (WordPiece, [CLS], [SEP], [MASK]); implemented by `tokenizers`.
This class is the interface for models and objectives; vocabulary.py trains one, tokenizer_files.py reads and writes it.

Shapes: V vocabulary.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any, ClassVar, Literal, Self

import numpy as np
import tokenizers
from pydantic import Field, model_validator

from bertkit.arrays import BoolArray, Int64Array
from bertkit.errors import DataError
from bertkit.settings import Settings, UnreadKey
from bertkit.text.plain_encoder import PlainEncoder

TokenizerType = Literal["wordpiece", "bpe", "byte-bpe", "unigram", "word"]
ROLES = ("pad", "unk", "cls", "sep", "mask")


class TokenizerConfig(Settings):
    """Which vocabulary to train on the corpus, or which existing tokenizer to use."""

    type: TokenizerType = Field("wordpiece", description="Kind of vocabulary to train on the corpus.")
    vocab_size: int = Field(
        30_522,
        gt=0,
        le=1 << 24,
        description="Vocabulary size, including special tokens and single characters.",
    )
    lowercase: bool | None = Field(
        None, description="Lowercase the text (default: yes, except for byte-bpe, as in the papers)."
    )
    strip_accents: bool | None = Field(
        None, description="Remove accents (default: if the text is lowercased, as in BERT)."
    )
    min_frequency: int = Field(
        2, gt=0, description="Minimum count of a merge of two tokens, or of a word (not used by unigram)."
    )
    character_coverage: float = Field(
        0.9999,
        gt=0,
        le=1,
        description="Share of the text's characters that get a token of their own; the remaining, rarest ones become"
        " [UNK].",
    )
    sample_megabytes: float = Field(
        64.0, gt=0, description="Megabytes of text that the vocabulary is trained on, sampled from the whole corpus."
    )
    path: str | None = Field(
        None,
        description="Existing tokenizer to use unchanged: a model or run, a tokenizer.json, a vocab.txt, a Hub id, or"
        " builtin:residues, ESM-2's for proteins. Of the other settings, only add_tokens and what it needs are then"
        " read.",
    )
    sentinels: int = Field(
        0,
        ge=0,
        le=10_000,
        description="Number of entries at the end of a trained vocabulary that stand for spans of text, with"
        " <extra_id_0> as the very last one; T5's objective span_corruption needs them.",
    )
    template: Literal["bert", "xlnet", "closed", "open"] = Field(
        "bert",
        description="Special tokens around the texts of a task: [CLS] A [SEP] B [SEP]; as in XLNet, A [SEP] B [SEP]"
        " [CLS]; only separators after the texts; or, for models that continue a text, [CLS] A [SEP] B.",
    )
    pad_id: Literal[0, 1] = Field(
        0, description="Id of [PAD] in a trained vocabulary; [UNK] has the other one. MPNet needs 1, fairseq's."
    )
    add_tokens: int = Field(
        0,
        ge=0,
        description="With path (--tokenizer): number of new words to append to its vocabulary, those that save the"
        " most tokens; existing ids are unchanged.",
    )
    added_frequency: int = Field(5, gt=0, description="Minimum count in the sample of a word that is added.")

    later_fields: ClassVar[frozenset[str]] = frozenset(
        {"add_tokens", "added_frequency", "pad_id", "sentinels", "template"}
    )

    @model_validator(mode="after")
    def _extends_something(self) -> Self:
        if self.add_tokens and self.path is None:
            raise ValueError(
                "add_tokens: extends an existing vocabulary, but this one is trained; give a path (--init MODEL uses"
                " the model's, `bertkit tokenize --tokenizer PATH` any), or raise vocab_size"
            )
        return self

    @model_validator(mode="after")
    def _numbers_its_words(self) -> Self:
        if self.pad_id and self.type == "word":
            raise ValueError("pad_id: a vocabulary of words has [PAD] at 0; leave it out, or choose another type")
        return self

    @model_validator(mode="after")
    def _stands_for_spans(self) -> Self:
        if self.sentinels and self.type == "word":
            raise ValueError("sentinels need tokens that are parts of words, as in T5; choose another tokenizer.type")
        return self

    @property
    def lowercases(self) -> bool:
        """Whether a trained vocabulary is uncased."""
        return self.type != "byte-bpe" if self.lowercase is None else self.lowercase

    @property
    def strips_accents(self) -> bool:
        """Whether the normaliser of a trained vocabulary removes accents."""
        return self.lowercases and self.type != "byte-bpe" if self.strip_accents is None else self.strip_accents

    def unread_keys(self, recipe: Any) -> Iterator[UnreadKey]:
        data: Any = getattr(recipe, "data", None)
        names = set(type(self).model_fields)
        if getattr(data, "is_tokenised", False):
            why = f"data.sources ({data.sources[0]}) are token shards, which have a tokenizer"
            # With a model to start from, path is the model's and not a setting of the user's.
            given = names if self.path != getattr(recipe, "init", None) else names - {"path"}
            yield from (UnreadKey(name, why, refused=name == "add_tokens") for name in sorted(given))
        elif self.path is not None:
            why = "tokenizer.path names a tokenizer, which is used unchanged"
            # The size is read by --plan, which does not open the tokenizer.
            read = {"path", "vocab_size", "add_tokens"}
            read |= {"added_frequency", "sample_megabytes"} if self.add_tokens else set()
            remedy = "leave tokenizer.path out to train a vocabulary"
            yield from (UnreadKey(name, why, remedy, refused=False) for name in sorted(names - read))
        else:
            yield from self._unread_of_learnt()

    def _unread_of_learnt(self) -> Iterator[UnreadKey]:
        yield UnreadKey("added_frequency", "no words are added to a vocabulary that is trained")
        if self.type == "unigram":
            yield UnreadKey("min_frequency", "a unigram vocabulary has no merges", "take another tokenizer.type")
        elif self.type == "word":
            why = "a vocabulary of words has the commonest ones, without single characters"
            for name in ("character_coverage", "strip_accents"):
                yield UnreadKey(name, why, "take another tokenizer.type")
        elif self.type == "byte-bpe":
            yield UnreadKey(
                "character_coverage",
                "byte-level BPE has a token for every byte, and so for every character",
                "take another tokenizer.type",
            )


def sentinel(number: int) -> str:
    """T5's name of the token that stands for a span of text, counted from 0."""
    return f"<extra_id_{number}>"


class Tokenizer:
    """A vocabulary with its rules.

    Attributes:
        backend: the `tokenizers.Tokenizer`, without truncation and padding.
        roles: the token of each role ("pad", "unk", "cls", "sep", "mask"); a role may be missing.
        lowercases: the value of `do_lower_case` in tokenizer_config.json.
    """

    def __init__(self, backend: tokenizers.Tokenizer, roles: dict[str, str], *, lowercases: bool = False) -> None:
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self.roles = {role: roles[role] for role in ROLES if backend.token_to_id(roles.get(role, "")) is not None}
        self.lowercases = lowercases
        self._encoder: PlainEncoder | None = None

    @property
    def vocab_size(self) -> int:
        """Number of rows that an embedding table needs: the greatest id plus one."""
        return max(self._vocabulary.values(), default=-1) + 1

    @property
    def pad_id(self) -> int:
        return self._role_id("pad")

    @property
    def unk_id(self) -> int:
        return self._role_id("unk")

    @property
    def cls_id(self) -> int:
        return self._role_id("cls")

    @property
    def sep_id(self) -> int:
        return self._role_id("sep")

    @property
    def mask_id(self) -> int:
        return self._role_id("mask")

    @cached_property
    def start_id(self) -> int | None:
        """The token before every text: [CLS]; if texts are only closed by separators, the separator that closes the
        text before. None if the vocabulary has no [CLS]."""
        if "cls" not in self.roles:
            return None
        (framed,) = self.backend.encode_batch(["a"])
        is_closed = framed.ids[-1:] == [self.sep_id] and self.cls_id not in framed.ids
        return self.sep_id if is_closed else self.cls_id

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids of all tokens that are not text: those with a role and all others flagged as special."""
        flagged = {i for i, added in self.backend.get_added_tokens_decoder().items() if added.special}
        return frozenset(flagged | {self._role_id(role) for role in self.roles})

    @cached_property
    def sentinel_ids(self) -> tuple[int, ...]:
        """Ids of <extra_id_0>, <extra_id_1> and so on, T5's names of the tokens that stand for a span of text."""
        found: list[int] = []
        while (number := self.id(sentinel(len(found)))) is not None:
            found.append(number)
        return tuple(found)

    @cached_property
    def canonical_json(self) -> str:
        """tokenizer.json with its keys sorted: equal for equal tokenizers."""
        return json.dumps(json.loads(self.backend.to_str()), sort_keys=True, ensure_ascii=False)

    @cached_property
    def fingerprint(self) -> str:
        """sha256 (hex) of everything that determines the ids: the canonical tokenizer.json and the roles."""
        content = json.dumps([self.canonical_json, sorted(self.roles.items())])
        return hashlib.sha256(content.encode()).hexdigest()

    @cached_property
    def word_start_V(self) -> BoolArray:
        """Whether each token begins a word. Special tokens count as separate words.

        WordPiece marks tokens that continue a word (`##`); byte-level BPE (`Ġ`) and SentencePiece-like vocabularies
        (`▁`) mark tokens that begin one.

        Raises:
            DataError: the vocabulary marks only the ends of words.
        """
        marker, marks_start = self.word_marker()
        starts_V = np.zeros(self.vocab_size, dtype=np.bool_)
        for token, i in self._vocabulary.items():
            starts_V[i] = token.startswith(marker) == marks_start
        starts_V[list(self.special_ids)] = True
        starts_V.flags.writeable = False
        return starts_V

    def without_special_tokens(self) -> Tokenizer:
        """The same vocabulary, without special tokens around a text."""
        content = json.loads(self.backend.to_str()) | {"post_processor": None}
        backend = tokenizers.Tokenizer.from_str(json.dumps(content))
        return Tokenizer(backend, self.roles, lowercases=self.lowercases)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text without added special tokens; a special token written out (`[MASK]`) is recognised."""
        encodings = self.backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def encode_with_masks(self, text: str) -> list[int]:
        """Ids of a text in which masks are written out, without added special tokens.

        A mask stands for a word: the other tokens are those of a text that has a word in its place. It includes the
        white space before it, as in RoBERTa's released tokenizer, since a byte-level vocabulary would otherwise have a
        token for it; and text that directly follows it, such as a full stop, gets no space that begins a word, which
        many tokenizers add to every part of a text between special tokens.

        Raises:
            DataError: there is no mask token.
        """
        mask_id = self.mask_id
        *before, last = text.split(self.token(mask_id))
        first, *after = (*(part.rstrip() for part in before), last)
        (ids,) = self.encode_batch([first])
        for part in after:
            continues = part != "" and not part[0].isspace()
            backend = self._backend_within_words if continues else self.backend
            ids += [mask_id, *backend.encode(part, add_special_tokens=False).ids]
        return ids

    def encode_plain(self, texts: Sequence[str]) -> tuple[Int64Array, Int64Array]:
        """The concatenated ids of all texts, and the number of ids of each; `[MASK]` in a text is ordinary text.

        For corpora: several times faster than `encode_batch`, and no text can insert a special token (see
        `plain_backend`).
        """
        if self._encoder is None:
            # Reading a backend takes seconds for large vocabularies, and PlainEncoder makes a plain one itself.
            self._encoder = PlainEncoder(self.plain_backend if self._markers else self.backend)
        return self._encoder.encode(texts)

    def offsets_plain(self, texts: Sequence[str]) -> list[Int64Array]:
        """The character range (start, exclusive end) in its text of each id of `encode_plain`, (T, 2) per text.

        Much slower than `encode_plain`.
        """
        return [np.array(each.offsets, dtype=np.int64).reshape(-1, 2) for each in self.encodings_plain(texts)]

    def encodings_plain(self, texts: Sequence[str]) -> list[tokenizers.Encoding]:
        """The library's encoding of each text, with offsets and word numbers; `[MASK]` in a text is ordinary text."""
        found: list[tokenizers.Encoding] = self.plain_backend.encode_batch(list(texts), add_special_tokens=False)
        return found

    def decode(self, ids: Iterable[int]) -> str:
        """The text of the ids, including special tokens."""
        return str(self.backend.decode([int(i) for i in ids], skip_special_tokens=False))

    def token(self, token_id: int) -> str:
        """The token with this id; DataError if there is none."""
        token = self.backend.id_to_token(int(token_id))
        if token is None:
            raise DataError(f"id {token_id} is not in the vocabulary of {self.vocab_size} entries")
        return str(token)

    def shown(self, token_id: int) -> str:
        """A token in readable form: without the word mark, and with complete byte sequences as characters."""
        text = self.decode([token_id]).strip()
        return text if text and "\N{REPLACEMENT CHARACTER}" not in text else self.token(token_id)

    def id(self, token: str) -> int | None:
        """The id of a token, None if it is not in the vocabulary."""
        found = self.backend.token_to_id(token)
        return None if found is None else int(found)

    @cached_property
    def _markers(self) -> set[int]:
        """Special tokens that were added behind the vocabulary without a role in sequences, such as marks around
        entities: they can only be meant for use in texts."""
        found = {i for i in self.special_ids if i >= self.backend.get_vocab_size(with_added_tokens=False)}
        found -= {*map(self._role_id, self.roles), *self.sentinel_ids}
        return found.difference(*(framed.ids for framed in self.backend.encode_batch(["a", ("a", "a")])))

    @cached_property
    def plain_backend(self) -> tokenizers.Tokenizer:
        """The same tokenizer, but special tokens written out in a text are text, except marks for texts."""
        content = self.backend.to_str()
        if self._markers:
            settings = json.loads(content)
            for token in settings["added_tokens"]:
                token["special"] &= token["id"] not in self._markers
            content = json.dumps(settings)
        backend = tokenizers.Tokenizer.from_str(content)
        backend.encode_special_tokens = True
        return backend

    @cached_property
    def _backend_within_words(self) -> tokenizers.Tokenizer:
        """The same tokenizer, but it adds no space before a text."""
        content = json.loads(self.backend.to_str())
        _leave_out_first_space(content["pre_tokenizer"])
        return tokenizers.Tokenizer.from_str(json.dumps(content))

    @cached_property
    def _vocabulary(self) -> dict[str, int]:
        return dict(self.backend.get_vocab(with_added_tokens=True))

    def _role_id(self, role: str) -> int:
        if role not in self.roles:
            raise DataError(
                f"the tokenizer has no {role} token (it has: {', '.join(self.roles.values()) or 'none'}); "
                "train a new one, or choose that of a BERT-like model"
            )
        return int(self._vocabulary[self.roles[role]])

    def word_marker(self) -> tuple[str, bool]:
        """The prefix that marks tokens, and whether it marks those that begin a word or those that continue one.

        Raises:
            DataError: the vocabulary marks only the ends of words.
        """
        settings = json.loads(self.canonical_json)
        prefix = settings["model"].get("continuing_subword_prefix")
        if prefix:
            return prefix, False
        rules = json.dumps([settings["pre_tokenizer"], settings["decoder"]])
        for name, marker in (("ByteLevel", "Ġ"), ("Metaspace", "▁")):
            if f'"{name}"' in rules:
                return marker, True
        raise DataError("the tokenizer does not mark where words begin, so whole words cannot be found in its tokens")

    def __getstate__(self) -> dict[str, Any]:
        return {"json": self.backend.to_str(), "roles": self.roles, "lowercases": self.lowercases}

    def __setstate__(self, state: dict[str, Any]) -> None:
        backend = tokenizers.Tokenizer.from_str(state["json"])
        self.__init__(backend, state["roles"], lowercases=state["lowercases"])  # type: ignore[misc]  # unpickling builds


def _leave_out_first_space(rule: dict[str, Any] | None) -> None:
    """Change a pre-tokenizer's settings, including those of its parts, so that it adds no space before a text."""
    if rule is None:
        return
    for part in rule.get("pretokenizers", ()):
        _leave_out_first_space(part)
    off = {"add_prefix_space": False, "prepend_scheme": "never"}
    rule.update({name: value for name, value in off.items() if name in rule})
