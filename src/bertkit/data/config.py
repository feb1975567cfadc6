"""The `data` section of a pretraining recipe: which text, and how it becomes samples (see layouts/)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar

from pydantic import Field

from bertkit.data.layouts import AnyLayout, SegmentPair
from bertkit.data.shards import is_shards
from bertkit.settings import Settings, UnreadKey
from bertkit.text.source_options import SourceOptions


class DataConfig(Settings):
    """Where the text comes from and how it becomes samples."""

    sources: list[str] = Field(
        ["builtin:pydocs"],
        min_length=1,
        description="Files, directories, globs, those of a store (s3://, gs://, file://), hub:ORG/NAME or"
        " builtin:pydocs; or a directory of token shards.",
    )
    languages: dict[str, Annotated[list[str], Field(min_length=1)]] = Field(
        default_factory=dict,
        description="Sources by language, in place of `sources`: {en: [en.txt], de: [de.txt]}; small ones are read more"
        " often than their share.",
    )
    language_smoothing: float = Field(
        0.7,
        ge=0,
        le=1,
        description="S in P^S, by which languages are drawn that have the share P of the text, for the vocabulary and"
        " in training; 1: by their share, 0: all alike.",
    )
    reading: SourceOptions = Field(default_factory=SourceOptions, description="How the sources are read.")
    layout: AnyLayout = Field(default_factory=SegmentPair, description="How text becomes samples.")
    sequence_length: int = Field(512, ge=8, description="Tokens of the longest sample, special tokens included.")
    static_copies: int | None = Field(
        None,
        ge=1,
        description="How many fixed copies of the corpus are made, each with its own pairs and masks, used in turn,"
        " one an epoch; null draws new ones in every epoch (dynamic masking).",
    )
    max_epochs: float | None = Field(
        None,
        gt=0,
        description="How often the text as a whole may be read, over all stages; a run of more steps is refused before"
        " it begins. null: no limit.",
    )
    max_words: int | None = Field(
        None,
        ge=1,
        description="Most words, between white space, that the text may have; one of more is refused before it is read."
        " null: no limit.",
    )
    held_out: float = Field(
        0.01, gt=0, lt=1, description="Share of the text that is never trained on, for the held-out figures."
    )
    held_out_tokens: int = Field(
        10_000,
        ge=0,
        description="Tokens that are held out at least, or a tenth of the text where that is less: whole documents,"
        " then the last sentences of documents. 0: `held_out` is a share of the documents, whatever their lengths.",
    )
    later_fields: ClassVar[frozenset[str]] = frozenset({"held_out_tokens", "max_words"})

    @property
    def is_tokenised(self) -> bool:
        """Whether the source is a directory of token shards, which are used as they are."""
        return not self.languages and len(self.sources) == 1 and is_shards(self.sources[0])

    @property
    def all_sources(self) -> list[str]:
        """The sources that are read, of all languages."""
        return [source for own in self.languages.values() for source in own] or self.sources

    def unread_keys(self, recipe: Any) -> Iterator[UnreadKey]:
        if self.languages:
            yield UnreadKey("sources", "data.languages are read in their place", "write data.languages: {}")
        if len(self.languages) < 2:
            count = "one language" if self.languages else "no languages"
            yield UnreadKey("language_smoothing", f"there are {count} in data.languages", "give data.languages two")
        objectives = getattr(recipe, "objectives", ())
        if not self.layout.epoch_dependent and not any(each.draws for each in objectives):
            why = f"neither the layout {self.layout.choice} nor an objective draws anything"
            yield UnreadKey("static_copies", why, refused=False)
