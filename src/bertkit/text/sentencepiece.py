"""SentencePiece models (`spiece.model` and the like) as tokenizers of `tokenizers`.

Kudo and Richardson 2018, arXiv:1808.06226; the file is a message of sentencepiece_model.proto, read by `protobuf`.
`Style` has each family's additions to SentencePiece: Lan et al. 2020 (ALBERT) and Yang et al. 2019 (XLNet) rewrite
quotes and strip accents, fairseq's models have different ids.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory  # type: ignore[import-untyped]  # no stubs
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]  # among the dependencies
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from bertkit.errors import DataError
from bertkit.text.tokenizer import Tokenizer, sentinel

SENTENCEPIECE_FILES = ("spiece.model", "sentencepiece.bpe.model", "spm.model", "tokenizer.model")
"""Names of the file in the known families."""

_UNIGRAM = 1
_UNKNOWN, _BYTE = 2, 6
_MARK = "▁"
_PROTO: dict[str, dict[int, tuple[str, str, str | None]]] = {
    "Piece": {1: ("piece", "STRING", None), 2: ("score", "FLOAT", None), 3: ("type", "INT32", "1")},
    "TrainerSpec": {3: ("model_type", "INT32", "1")},
    "NormalizerSpec": {2: ("precompiled_charsmap", "BYTES", None)},
    "Model": {
        1: ("pieces", "Piece", None),
        2: ("trainer_spec", "TrainerSpec", None),
        3: ("normalizer_spec", "NormalizerSpec", None),
    },
}
"""Messages of sentencepiece_model.proto: number, name, type and default of the fields that are read."""
_COMMA_PENALTY = 100.0
_CAMEMBERT_UNUSED = -100.0


@dataclass(frozen=True)
class SentencePieceModel:
    """The content of a SentencePiece file.

    Attributes:
        pieces: text, score and type of each, in the order of their ids.
        character_map: the normaliser's compiled table.
        algorithm: 1 for Unigram, 2 for BPE.
    """

    pieces: tuple[tuple[str, float, int], ...]
    character_map: bytes
    algorithm: int


@dataclass(frozen=True)
class Style:
    """A family's rules in addition to SentencePiece.

    Attributes:
        roles: its special tokens.
        single, pair: templates of one text and of two.
        lowercases: whether it lowercases, unless the tokenizer's configuration overrides it.
        rewrites: whether quotes are replaced by plain ones, accents are stripped, and `9,` is split into two tokens.
        before, dropped, behind: tokens before the file's tokens, the number of the file's tokens that are left out, and
            tokens after them.
        sentinels: the number of tokens behind the vocabulary that stand for spans of text.
    """

    roles: Mapping[str, str]
    single: str
    pair: str
    lowercases: bool = False
    rewrites: bool = False
    before: tuple[tuple[str, float], ...] = ()
    dropped: int = 0
    behind: tuple[tuple[str, float], ...] = ()
    sentinels: int = 0


_BRACKETS = {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}
_BERT_TEMPLATES = ("[CLS]:0 $A:0 [SEP]:0", "[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1")
_FAIRSEQ_ROLES = {"pad": "<pad>", "unk": "<unk>", "cls": "<s>", "sep": "</s>", "mask": "<mask>"}
_FAIRSEQ = Style(
    _FAIRSEQ_ROLES,
    "<s> $A </s>",
    "<s> $A </s> </s> $B </s>",
    before=(("<s>", 0.0), ("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)),
    dropped=3,
    behind=(("<mask>", 0.0),),
)

STYLES: dict[str, Style] = {
    "albert": Style({**_BRACKETS, "pad": "<pad>", "unk": "<unk>"}, *_BERT_TEMPLATES, lowercases=True, rewrites=True),
    "xlnet": Style(
        {"pad": "<pad>", "unk": "<unk>", "cls": "<cls>", "sep": "<sep>", "mask": "<mask>"},
        "$A:0 <sep>:0 <cls>:2",
        "$A:0 <sep>:0 $B:1 <sep>:1 <cls>:2",
        rewrites=True,
    ),
    "xlm-roberta": _FAIRSEQ,
    "camembert": replace(
        _FAIRSEQ,
        before=(
            ("<s>NOTUSED", 0.0),
            ("<pad>", 0.0),
            ("</s>NOTUSED", 0.0),
            ("<unk>", 0.0),
            ("<unk>NOTUSED", _CAMEMBERT_UNUSED),
        ),
        dropped=1,
    ),
    "deberta-v2": Style(_BRACKETS, *_BERT_TEMPLATES),
    "t5": Style({"pad": "<pad>", "unk": "<unk>", "sep": "</s>"}, "$A </s>", "$A </s> $B </s>", sentinels=100),
}


def load_sentencepiece(path: Path, config: Mapping[str, Any]) -> Tokenizer:
    """Read a tokenizer from a SentencePiece file.

    Args:
        path: the file.
        config: tokenizer_config.json and, under `model_type`, config.json's; may be empty.

    Raises:
        DataError: the file is damaged, not a Unigram model, or of an unknown family.
    """
    model = read_sentencepiece(path)
    if model.algorithm != _UNIGRAM:
        raise DataError(f"{path}: a SentencePiece model of algorithm {model.algorithm}; only Unigram (1) is supported")
    style = _style(path, model, config)
    lowercases = bool(config.get("do_lower_case", style.lowercases))
    scores = [*style.before, *_scores(model, style)[style.dropped :], *style.behind]
    unknown = next((number for number, (piece, _) in enumerate(scores) if piece == style.roles["unk"]), None)
    if unknown is None:
        raise DataError(f"{path}: has no piece {style.roles['unk']} for unknown text")
    byte_fallback = any(kind == _BYTE for _, _, kind in model.pieces)
    backend = Backend(models.Unigram(scores, unk_id=unknown, byte_fallback=byte_fallback))
    backend.normalizer = _normalizer(model, style, lowercases, keeps_accents=bool(config.get("keep_accents", False)))
    mark = pre_tokenizers.Metaspace(replacement=_MARK, prepend_scheme="always")
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), mark])
    backend.decoder = decoders.Metaspace(replacement=_MARK, prepend_scheme="always")
    backend.add_special_tokens(
        [
            # A mask includes the space before it, so that it can stand for a word.
            AddedToken(token, special=True, normalized=False, lstrip=role == "mask")
            for role, token in style.roles.items()
        ]
    )
    if style.sentinels:
        count = config.get("extra_ids")
        names = map(sentinel, reversed(range(count if isinstance(count, int) else style.sentinels)))
        backend.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names])
    ends = {token: backend.token_to_id(token) for role, token in style.roles.items() if role in ("cls", "sep")}
    backend.post_processor = processors.TemplateProcessing(
        single=style.single, pair=style.pair, special_tokens=list(ends.items())
    )
    return Tokenizer(backend, dict(style.roles), lowercases=lowercases)


def _style(path: Path, model: SentencePieceModel, config: Mapping[str, Any]) -> Style:
    kind = str(config.get("model_type", ""))
    named = str(config.get("tokenizer_class", "")).removesuffix("Fast").removesuffix("Tokenizer")
    for name, style in STYLES.items():
        if kind == name or named.casefold() == name.replace("-", ""):
            return style
    pieces = {piece for piece, _, _ in model.pieces}
    if "[CLS]" in pieces:
        return STYLES["albert" if "<pad>" in pieces else "deberta-v2"]
    if "<cls>" in pieces:
        return STYLES["xlnet"]
    if {"<s>", "</s>"} <= pieces and "<mask>" not in pieces:
        return STYLES["xlm-roberta"]
    raise DataError(
        f"{path}: cannot tell which family's SentencePiece model this is; put a config.json next to it whose model_type"
        f" is one of {', '.join(STYLES)}"
    )


def _scores(model: SentencePieceModel, style: Style) -> list[tuple[str, float]]:
    """A token that ends in digit and comma is used only if nothing else fits: ALBERT and XLNet separate the two."""

    def score(piece: str, value: float) -> float:
        penalised = style.rewrites and len(piece) > 1 and piece[-1] == "," and piece[-2].isdigit()
        return value - _COMMA_PENALTY if penalised else value

    return [(piece, score(piece, value)) for piece, value, _ in model.pieces]


def _normalizer(
    model: SentencePieceModel, style: Style, lowercases: bool, *, keeps_accents: bool
) -> normalizers.Normalizer:
    steps: list[normalizers.Normalizer] = []
    if style.rewrites:
        steps += [normalizers.Replace("``", '"'), normalizers.Replace("''", '"')]
        steps += [] if keeps_accents else [normalizers.NFKD(), normalizers.StripAccents()]
    steps += [normalizers.Lowercase()] if lowercases else []
    if model.character_map:
        steps += [normalizers.Precompiled(model.character_map)]
    return normalizers.Sequence(steps)


def read_sentencepiece(path: Path) -> SentencePieceModel:
    """Read a file; DataError if it is not a SentencePiece model."""
    try:
        proto = _model_proto().FromString(path.read_bytes())
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error}") from error
    except DecodeError as error:
        raise DataError(f"{path}: not a SentencePiece model, or damaged: {error}") from error
    pieces = tuple((piece.piece, piece.score, piece.type) for piece in proto.pieces)
    model = SentencePieceModel(pieces, proto.normalizer_spec.precompiled_charsmap, proto.trainer_spec.model_type)
    if not any(kind == _UNKNOWN for _, _, kind in model.pieces):
        raise DataError(f"{path}: not a SentencePiece model: none of its {len(model.pieces)} pieces is the unknown one")
    return model


def _model_proto() -> Any:
    """sentencepiece_model.proto, as far as needed; other fields of a file are skipped."""
    file = descriptor_pb2.FileDescriptorProto(name="sentencepiece_model.proto", package="bertkit", syntax="proto2")
    for message, fields in _PROTO.items():
        entry = file.message_type.add(name=message)
        for number, (name, kind, default) in fields.items():
            is_message = kind in _PROTO
            entry.field.add(
                name=name,
                number=number,
                label="LABEL_REPEATED" if name == "pieces" else "LABEL_OPTIONAL",
                type="TYPE_MESSAGE" if is_message else f"TYPE_{kind}",
                type_name=f".bertkit.{kind}" if is_message else None,
                default_value=default,
            )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("bertkit.Model"))
