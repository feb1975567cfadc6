"""A tokenizer's files: writes a Hugging Face directory, and reads all supported formats.

File formats of `transformers` (tokenizer.json, tokenizer_config.json, special_tokens_map.json, vocab.txt, vocab.json
with merges.txt); its Python classes are not needed. sentencepiece.py reads SentencePiece's own format.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from bertkit.errors import DataError
from bertkit.files import open_text_to_write, read_json
from bertkit.hub import hub_errors, is_offline, model_revision, note_model, refusal
from bertkit.text.residues import ALPHABET, BUILTIN, is_residue_vocabulary, residue_backend, writes_residues
from bertkit.text.residues import ROLES as RESIDUE_ROLES
from bertkit.text.sentencepiece import SENTENCEPIECE_FILES, load_sentencepiece
from bertkit.text.tokenizer import ROLES, Tokenizer

log = logging.getLogger(__name__)

# Names that the known families use for each role, most likely first.
KNOWN_NAMES = {
    "pad": ("[PAD]", "<pad>", "<|padding|>"),
    "unk": ("[UNK]", "<unk>", "<|endoftext|>"),
    "cls": ("[CLS]", "<cls>", "<s>"),
    "sep": ("[SEP]", "<sep>", "</s>"),
    "mask": ("[MASK]", "<mask>"),
}
MAX_WORD_CHARACTERS = 200
"""A longer word becomes [UNK]: max_input_chars_per_word of google-research/bert tokenization.py (`tokenizers`: 100)."""
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.txt")
FILE_SUFFIXES = (".json", ".txt", ".model")
READ_FIRST = ("tokenizer.json", "vocab.txt", "vocab.json", "encoder.json", *SENTENCEPIECE_FILES)
"""In order of preference."""
HUB_FILES = (
    *(*TOKENIZER_FILES, "added_tokens.json", "vocab.json", "merges.txt", "config.json"),
    *SENTENCEPIECE_FILES,
)
_TOKEN_OPTIONS = ("lstrip", "rstrip", "normalized", "single_word", "special")


def save_tokenizer(
    tokenizer: Tokenizer, directory: str | Path, *, max_tokens: int = 512, token_types: bool = True
) -> None:
    """Write the files that `transformers.AutoTokenizer` loads; equal tokenizers write identical bytes.

    They are tokenizer.json, tokenizer_config.json, special_tokens_map.json and, for WordPiece and ESM's residues,
    vocab.txt.

    Args:
        directory: created if missing.
        max_tokens: length of the longest text that the model reads, including special tokens.
        token_types: whether the model distinguishes segments.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    is_wordpiece = isinstance(tokenizer.backend.model, models.WordPiece)
    tokens = {f"{role}_token": token for role, token in tokenizer.roles.items()}
    first = tokenizer.backend.pre_tokenizer
    config = {
        # The class that loads tokenizer.json unchanged. BertTokenizerFast (transformers 5) derives its rules from
        # vocab.txt, with a different limit on the length of words.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_input_names": ["input_ids", *(["token_type_ids"] if token_types else []), "attention_mask"],
        # Without a limit there is no entry.
        **({"model_max_length": max_tokens} if max_tokens < sys.maxsize else {}),
        "clean_up_tokenization_spaces": False,
        **({"do_lower_case": tokenizer.lowercases, **_bert_options(tokenizer)} if is_wordpiece else {}),
        # transformers 4 switches the space before a text off unless it is named here.
        **({"add_prefix_space": True} if getattr(first, "add_prefix_space", False) else {}),
        **tokens,
    }
    _write(directory / "tokenizer.json", tokenizer.backend.to_str(pretty=True))
    _write(directory / "tokenizer_config.json", json.dumps(config, indent=2, ensure_ascii=False))
    _write(directory / "special_tokens_map.json", json.dumps(tokens, indent=2, ensure_ascii=False))
    if is_wordpiece or writes_residues(tokenizer):
        pieces = sorted(tokenizer.backend.get_vocab().items(), key=lambda entry: entry[1])
        _write(directory / "vocab.txt", "\n".join(piece for piece, _ in pieces))


def _bert_options(tokenizer: Tokenizer) -> dict[str, Any]:
    normalizer = json.loads(tokenizer.backend.to_str())["normalizer"] or {}
    if normalizer.get("type") != "BertNormalizer":
        return {}
    return {
        "strip_accents": normalizer["strip_accents"],
        "tokenize_chinese_chars": normalizer["handle_chinese_chars"],
    }


def _write(path: Path, text: str) -> None:
    with open_text_to_write(path) as file:
        file.write(text + "\n")


TEMPLATES = {
    "bert": ("{cls}:0 $A:0 {sep}:0", "{cls}:0 $A:0 {sep}:0 $B:1 {sep}:1"),
    "xlnet": ("$A:0 {sep}:0 {cls}:2", "$A:0 {sep}:0 $B:1 {sep}:1 {cls}:2"),
    "closed": ("$A:0 {sep}:0", "$A:0 {sep}:0 $B:1 {sep}:1"),
    "open": ("{cls}:0 $A:0", "{cls}:0 $A:0 {sep}:0 $B:1"),
}
"""The special tokens around one text and around a pair, by the name of the template, each with its token type."""


def template(tokenizer: Tokenizer, name: str) -> processors.TemplateProcessing:
    """The post-processor that puts a tokenizer's special tokens around its texts.

    Args:
        tokenizer: has the special tokens.
        name: in `TEMPLATES`.
    """
    single, pair = TEMPLATES[name]
    ids = {"cls": tokenizer.cls_id, "sep": tokenizer.sep_id}
    used = [role for role in ids if f"{{{role}}}" in pair]
    return processors.TemplateProcessing(
        single=single.format(**tokenizer.roles),
        pair=pair.format(**tokenizer.roles),
        special_tokens=[(tokenizer.roles[role], ids[role]) for role in used],
    )


def load_tokenizer(source: str | Path, *, offline: bool = False) -> Tokenizer:
    """Load a model or run directory, a tokenizer.json, a vocab.txt, a SentencePiece model, a Hub id (`ORG/NAME` or
    `NAME`), or `builtin:residues`.

    Raises:
        DataError: no such tokenizer, a damaged file, or a Hub id that is neither cached nor reachable.
    """
    if str(source).startswith("builtin:"):
        if source != BUILTIN:
            raise DataError(f"tokenizer {source!r}: the only built-in tokenizer is {BUILTIN}")
        return _from_residues(ALPHABET)
    path = Path(source).expanduser()
    if path.is_dir():
        return _load_directory(path)
    if path.is_file():
        return _load_file(path)
    name = str(source)
    if path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1 or path.suffix in FILE_SUFFIXES:
        raise DataError(f"tokenizer not found: {name} is neither a file nor a directory")
    return _load_directory(_downloaded(name, offline=offline), shown=f"hub:{name}")


def _load_directory(directory: Path, shown: str | None = None) -> Tokenizer:
    for place in (directory, directory / "model"):  # the second in a run directory
        for file in READ_FIRST:
            if (place / file).is_file():
                return _load_file(place / file)
    raise DataError(
        f"no tokenizer in {shown or directory}: expected tokenizer.json, vocab.txt, vocab.json with merges.txt,"
        f" or one of {', '.join(SENTENCEPIECE_FILES)}"
    )


def _load_file(path: Path) -> Tokenizer:
    config = _companion(path, "tokenizer_config.json")
    names = {**_companion(path, "special_tokens_map.json"), **config}
    # The model's own configuration is the best evidence of the family.
    model = _companion(path, "config.json")
    kind = model.get("model_type")
    if path.suffix == ".txt":
        return _from_wordpieces(path, names)
    if path.suffix == ".model":
        found = load_sentencepiece(path, {**config, **({} if kind is None else {"model_type": kind})})
        _add_listed_tokens(found.backend, path, names)
        return found
    if path.name in ("vocab.json", "encoder.json"):
        return _from_byte_pieces(path, names, kind=str(config.get("tokenizer_class", kind)))
    backend = _read(path, lambda: Backend.from_file(str(path)))
    backend = _without_tokens_behind(backend, model.get("vocab_size"), path)
    if config.get("tokenizer_class") not in _GENERIC_CLASSES:
        _read(path.parent / "tokenizer_config.json", lambda: _set_options(backend, config))
    rules = b"" if backend.normalizer is None else backend.normalizer.__getstate__()
    lowercases = config.get("do_lower_case", b'"Lowercase"' in rules or b'"lowercase":true' in rules)
    return Tokenizer(backend, _roles(backend, names), lowercases=bool(lowercases))


def _without_tokens_behind(backend: Backend, rows: Any, path: Path) -> Backend:
    """Without special tokens that were added behind the table of the model's words, as Gemma 3's for images; they are
    read as text."""
    added = backend.get_added_tokens_decoder()
    behind = {number for number, token in added.items() if isinstance(rows, int) and token.special and number >= rows}
    behind = {number for number in behind if number >= backend.get_vocab_size(with_added_tokens=False)}
    if not behind:
        return backend
    names = ", ".join(added[number].content for number in sorted(behind))
    log.info("%s: the model has no row for %s, which is read as text", path, names)
    settings = json.loads(backend.to_str())
    settings["added_tokens"] = [token for token in settings["added_tokens"] if token["id"] not in behind]
    return Backend.from_str(json.dumps(settings))


_GENERIC_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")
"""Names of the Hub's class that uses a tokenizer.json unchanged."""
_OPTIONS = (
    (
        "normalizer",
        normalizers.BertNormalizer,
        {
            "lowercase": "do_lower_case",
            "strip_accents": "strip_accents",
            "handle_chinese_chars": "tokenize_chinese_chars",
        },
    ),
    ("pre_tokenizer", pre_tokenizers.ByteLevel, {"add_prefix_space": "add_prefix_space"}),
)
"""Rules whose options the other classes read from tokenizer_config.json: part, its kind, and the key of each option."""


def _set_options(backend: Backend, config: dict[str, Any]) -> None:
    """Set the options that tokenizer_config.json names, which may differ from those in tokenizer.json."""
    for name, kind, keys in _OPTIONS:
        part = getattr(backend, name)
        if isinstance(part, kind):
            for option, key in keys.items():
                setattr(part, option, config.get(key, getattr(part, option)))


def _add_listed_tokens(backend: Backend, path: Path, names: dict[str, Any]) -> None:
    """Add the tokens that files beside a vocabulary list with their ids, which a tokenizer.json contains itself:
    `added_tokens_decoder` of tokenizer_config.json, and added_tokens.json of `transformers` before 4.34.

    Raises:
        DataError: an id is not the next one, or the vocabulary has another for the token.
    """
    older = _companion(path, "added_tokens.json")
    tokens = _read(path.parent / "tokenizer_config.json", lambda: dict(_listed_tokens(names, older)))
    for number, token in sorted(tokens.items(), key=lambda entry: entry[0]):
        known = backend.token_to_id(token.content)
        expected = backend.get_vocab_size() if known is None else known
        if number != expected:
            raise DataError(
                f"{path.parent}: the added token {token.content!r} has id {number}, but would get {expected} after"
                f" {path.name}; the files do not belong together"
            )
        backend.add_special_tokens([token]) if token.special else backend.add_tokens([token])


def _listed_tokens(names: dict[str, Any], older: dict[str, int]) -> Iterator[tuple[int, AddedToken]]:
    """The tokens of both files by id; the newer file, `names`, also has their options."""
    named = [*(names.get("additional_special_tokens") or []), *(names.get(f"{role}_token") for role in ROLES)]
    special = [each["content"] if isinstance(each, dict) else each for each in named]
    for content, number in older.items():
        yield int(number), AddedToken(content, special=content in special, normalized=content not in special)
    for number, token in (names.get("added_tokens_decoder") or {}).items():
        yield (
            int(number),
            AddedToken(token["content"], **{name: token[name] for name in _TOKEN_OPTIONS if name in token}),
        )


def _read(path: Path, reader: Callable[[], Any]) -> Any:
    """The reader's result; `tokenizers` raises a plain Exception for every error of a file."""
    try:
        return reader()
    except Exception as error:
        raise DataError(f"{path}: not a readable tokenizer file: {error}") from error


def _companion(path: Path, name: str) -> dict[str, Any]:
    file = path.parent / name
    if not file.is_file():
        return {}
    return read_json(file)


_ENDS_OF_TEXT = {"cls": "bos_token", "sep": "eos_token"}
"""Names that vocabularies of decoders have for a text's first and last token."""


def _roles(backend: Backend, names: dict[str, Any]) -> dict[str, str]:
    """The token of each role: according to the files, else by the names of known families. If there is a mask, the
    tokens at the ends of a text stand for [CLS] and [SEP], as in EuroBERT's vocabulary, which was Llama's."""
    roles = {}
    for role in ROLES:
        candidates = _named(names, f"{role}_token") or list(KNOWN_NAMES[role])
        known = [token for token in candidates if backend.token_to_id(token) is not None]
        if known:
            roles[role] = known[0]
    if "mask" in roles:
        for role, key in _ENDS_OF_TEXT.items():
            for token in _named(names, key):
                if role not in roles and backend.token_to_id(token) is not None:
                    roles[role] = token
    return roles


def _named(names: dict[str, Any], key: str) -> list[str]:
    """The token that the files have for a key, if any."""
    named = names.get(key)
    named = named.get("content") if isinstance(named, dict) else named
    return [named] if isinstance(named, str) else []


def _from_residues(tokens: Sequence[str]) -> Tokenizer:
    """A vocabulary of ESM's."""
    backend = residue_backend(tokens)
    tokenizer = Tokenizer(backend, dict(RESIDUE_ROLES))
    backend.post_processor = template(tokenizer, "bert")
    return tokenizer


def _from_wordpieces(path: Path, config: dict[str, Any]) -> Tokenizer:
    """A vocab.txt of google-research/bert: one token per line, whose id is the line's number from 0."""
    for key, known in {"word_tokenizer_type": "basic", "subword_tokenizer_type": "wordpiece"}.items():
        if config.get(key, known) != known:
            raise DataError(
                f"{path.parent / 'tokenizer_config.json'}: {key} is {config[key]!r}, which splits text by rules that"
                f" {path.name} does not contain; only {known!r} is supported"
            )
    lines = _read(path, lambda: path.read_text(encoding="utf-8")).split("\n")
    pieces = [line.rstrip("\r") for line in (lines[:-1] if lines[-1] == "" else lines)]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    if len(vocabulary) < len(pieces):
        line = next(i for i, piece in enumerate(pieces) if vocabulary[piece] != i)
        raise DataError(f"{path}, line {line + 1}: token {pieces[line]!r} occurs a second time further down")
    if is_residue_vocabulary(pieces):
        return _from_residues(pieces)
    missing = [names[0] for names in KNOWN_NAMES.values() if names[0] not in vocabulary]
    if missing:
        raise DataError(f"{path}: not a BERT vocabulary: missing {', '.join(missing)}")
    # In the original code do_lower_case is an option; a cased vocabulary is recognised by its capitals.
    capitals = any(piece != piece.lower() for piece in pieces if not piece.startswith("["))
    lowercases = bool(config.get("do_lower_case", not capitals))
    backend = Backend(models.WordPiece(vocabulary, unk_token="[UNK]", max_input_chars_per_word=MAX_WORD_CHARACTERS))
    backend.normalizer = normalizers.BertNormalizer(
        strip_accents=config.get("strip_accents"),
        lowercase=lowercases,
        handle_chinese_chars=config.get("tokenize_chinese_chars", True),
    )
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(prefix="##")
    roles = {role: names[0] for role, names in KNOWN_NAMES.items()}
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in roles.values()])
    _add_listed_tokens(backend, path, config)
    tokenizer = Tokenizer(backend, roles, lowercases=lowercases)
    backend.post_processor = template(tokenizer, "bert")
    return tokenizer


def _from_byte_pieces(path: Path, config: dict[str, Any], *, kind: str) -> Tokenizer:
    """vocab.json with merges.txt (RoBERTa), or encoder.json with vocab.bpe (GPT-2).

    Args:
        config: tokenizer_config.json and special_tokens_map.json.
        kind: class of the tokenizer, or type of the model.
    """
    merges = path.parent / ("merges.txt" if path.name == "vocab.json" else "vocab.bpe")
    if not merges.is_file():
        raise DataError(f"{path}: {merges.name} must be in the same directory")
    backend = Backend(_read(path, lambda: models.BPE.from_file(str(path), str(merges))))
    prefix = bool(config.get("add_prefix_space", False))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    backend.decoder = decoders.ByteLevel()
    names = {name for known in KNOWN_NAMES.values() for name in known}
    specials = sorted((i, token) for token, i in backend.get_vocab().items() if token in names)
    # A mask includes the space before it, so that it can stand for a word.
    backend.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False, lstrip=token in KNOWN_NAMES["mask"])
            for _, token in specials
        ]
    )
    _add_listed_tokens(backend, path, config)
    tokenizer = Tokenizer(backend, _roles(backend, config))
    if not {"cls", "sep"} <= tokenizer.roles.keys() or kind.casefold().startswith("gpt2"):
        return tokenizer
    if tokenizer.roles["cls"] == "[CLS]":  # DeBERTa 1
        backend.post_processor = template(tokenizer, "bert")
    else:
        cls, sep = ((tokenizer.roles[role], i) for role, i in (("cls", tokenizer.cls_id), ("sep", tokenizer.sep_id)))
        backend.post_processor = processors.RobertaProcessing(sep, cls, trim_offsets=True, add_prefix_space=prefix)
    return tokenizer


def _downloaded(name: str, *, offline: bool) -> Path:
    """Download the tokenizer's files of a Hub model, unless they are in the Hub cache."""
    from huggingface_hub import snapshot_download

    repository, revision = model_revision(name)
    try:
        directory = Path(
            snapshot_download(
                repository,
                revision=revision,
                allow_patterns=list(HUB_FILES),
                local_files_only=is_offline(offline),
            )
        )
    except hub_errors() as error:
        raise DataError(
            f"tokenizer {name!r}: no file or directory of this name, and {refusal(error, 'model')}"
        ) from error
    note_model(name, directory)
    return directory
