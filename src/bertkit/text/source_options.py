"""How text files are read into a corpus: the section `data.reading` of a recipe.

Not from a paper; file_format.py has the part that all file readers share. corpus.py is what these options open.
"""

from __future__ import annotations

import glob
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from bertkit.settings import UnreadKey
from bertkit.text.annotated import CAPITALS, MOST_FIELDS
from bertkit.text.fasta import FASTA_ENDINGS
from bertkit.text.file_format import FileFormat
from bertkit.text.lines import ending

KINDS = {".txt": "text", ".jsonl": "jsonl", ".csv": "csv", ".parquet": "parquet", ".train": "text"}
KINDS |= dict.fromkeys(FASTA_ENDINGS, "fasta")
NAMED_ONLY = {".dev": "text", ".test": "text", ".tsv": "csv"}
"""Read if a file or glob names them, but not as part of a directory: BabyLM's names for texts that are not to be
trained on, and tables of labelled examples."""


class SourceOptions(FileFormat):
    """How sources are read, and what a segment is."""

    later_fields: ClassVar[frozenset[str]] = frozenset({*FileFormat.model_fields, "mark_capitals", "target_field"})

    text_field: str = Field(
        "text",
        description="Field of the text in JSON Lines, CSV, Parquet and Hub records (meta.body is the field body in"
        " meta).",
    )
    target_field: str | None = Field(
        None,
        description="Read parallel text, pairs of a source and its target. This is the target's field in JSON Lines,"
        " Parquet and Hub records; the source's is text_field (translation.de is the field de in translation). In a"
        " .tsv file, each line has the source, a tab and the target; text files are read in twos, sources and targets,"
        " with the same number of lines.",
    )
    span_fields: tuple[str, ...] = Field(
        (),
        max_length=MOST_FIELDS,
        description="Field of JSON Lines, Parquet and Hub records that annotates spans in the text, such as"
        " entities: a list of [start, end] in characters, or of records with start and end, as `bertkit predict`"
        " writes entities. The spans are stored with the tokens, for masking.",
    )
    mark_capitals: bool = Field(
        False,
        description="Store with the tokens which words began with a capital letter before the text was lowercased,"
        " for the objective capitalisation.",
    )
    documents: Literal["blank-line", "wikitext", "line", "file"] = Field(
        "blank-line",
        description="What separates documents in a text file: blank lines, WikiText titles (` = Title = `), line"
        " ends, or nothing. In other formats each record is a document.",
    )
    segments: Literal["sentence", "line"] = Field(
        "sentence",
        description="Unit that sentence pairs are built from: a sentence, or a line of the text.",
    )

    @model_validator(mode="after")
    def _fields_differ(self) -> SourceOptions:
        if self.target_field is not None and (self.marked_fields or self.target_field == self.text_field):
            raise ValueError(
                "target_field: parallel text has its target in a field other than text_field, and can have neither"
                " span_fields nor mark_capitals"
            )
        if len({self.text_field, *self.span_fields}) < 1 + len(self.span_fields):
            raise ValueError(f"span_fields names a field twice, or the one of the text: {', '.join(self.span_fields)}")
        if self.mark_capitals and (CAPITALS in self.span_fields or len(self.span_fields) == MOST_FIELDS):
            raise ValueError(
                f"mark_capitals marks words as an additional field, {CAPITALS!r}; name at most {MOST_FIELDS - 1}"
                " span_fields next to it, and none with that name"
            )
        return self

    @property
    def cut(self) -> str:
        """What a segment is; for parallel text, one side of a pair, which is a line."""
        return self.segments if self.target_field is None else "line"

    @property
    def marked_fields(self) -> tuple[str, ...]:
        """The fields whose spans are marked next to the tokens, in the order of their bits."""
        return (*self.span_fields, CAPITALS) if self.mark_capitals else self.span_fields

    @property
    def decides(self) -> dict[str, Any]:
        """Everything that affects the tokens; without spans, the same as before spans were introduced."""
        later = {"span_fields", "target_field"}
        return {key: value for key, value in self.model_dump(mode="json").items() if key not in later or value}

    def unread_keys(self, recipe: Any) -> Iterator[UnreadKey]:
        data: Any = getattr(recipe, "data", None)
        if getattr(data, "is_tokenised", False):
            why = f"data.sources ({data.sources[0]}) are token shards, which are used unchanged"
            yield from (UnreadKey(name, why, refused=False) for name in type(self).model_fields)
            return
        if self.target_field is not None:
            why = "data.reading.target_field is set: text is read in pairs"
            yield UnreadKey("documents", why, refused=False)
            yield UnreadKey("segments", why, refused=False)
            yield UnreadKey("delimiter", why, refused=False)
            if not getattr(data.layout, "keeps_documents", True):
                yield UnreadKey(
                    "target_field",
                    f"data.layout {data.layout.choice} does not support pairs",
                    "write data.layout: {name: parallel}",
                )
        # A recipe may be written for other sources than the command line's; its keys for them are no mistake.
        kinds = {kind_of_source(source) for source in getattr(data, "all_sources", ())}
        if kinds and kinds <= {"text", "builtin", "fasta"}:
            why = "no source has records with fields, as JSONL, CSV, Parquet or Hub data have"
            yield UnreadKey("text_field", why, refused=False)
            if self.target_field is None:
                yield UnreadKey("delimiter", "no source is a CSV file", refused=False)
        if kinds and kinds <= {"records", "builtin", "fasta"}:
            why = "no source is a text file, and in other formats each record is a document"
            yield UnreadKey("documents", why, refused=False)
        if not any(getattr(each, "reads_annotated_spans", False) for each in getattr(recipe, "objectives", ())):
            yield UnreadKey(
                "span_fields",
                "no objective masks annotated spans",
                "write objective.masked_lm.units: {name: annotated, field: ...}",
            )
        if not any(getattr(each, "reads_capitals", False) for each in getattr(recipe, "objectives", ())):
            yield UnreadKey("mark_capitals", "no objective predicts capitals", "add the objective capitalisation")


def kind_of_file(path: Path, kinds: Mapping[str, str] = KINDS) -> str | None:
    kind = kinds.get(ending(path))
    return None if kind == "parquet" and path.suffix.lower() != ".parquet" else kind


def kind_of_source(source: str) -> str:
    """text, fasta, records, builtin, or any: the kind of a directory or a glob is known only once it is opened."""
    scheme = source.partition(":")[0]
    if scheme in ("hub", "builtin"):
        return {"hub": "records"}.get(scheme, scheme)
    if glob.has_magic(source) or Path(source).expanduser().is_dir():
        return "any"
    kind = kind_of_file(Path(source), {**KINDS, **NAMED_ONLY})
    return "any" if kind is None else kind if kind in ("text", "fasta") else "records"
