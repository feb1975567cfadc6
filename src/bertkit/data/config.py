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
        description="Files, directories, globs, any of these on a store (s3://, gs://, file://), hub:ORG/NAME or"
        " builtin:pydocs; or a directory of token shards.",
    )
    languages: dict[str, Annotated[list[str], Field(min_length=1)]] = Field(
        default_factory=dict,
        description="Sources by language, instead of `sources`: {en: [en.txt], de: [de.txt]}. Small languages are"
        " read more often than their share of the text.",
    )
    language_smoothing: float = Field(
        0.7,
        ge=0,
        le=1,
        description="Exponent S of the language sampling, for the vocabulary and in training: a language with share"
        " P of the text is drawn in proportion to P^S. 1: by share; 0: uniformly.",
    )
    reading: SourceOptions = Field(default_factory=SourceOptions, description="How the sources are read.")
    layout: AnyLayout = Field(default_factory=SegmentPair, description="How text becomes samples.")
    sequence_length: int = Field(
        512, ge=8, description="Maximum length of a sample in tokens, including special tokens."
    )
    static_copies: int | None = Field(
        None,
        ge=1,
        description="Number of fixed copies of the corpus, each with its own pairs and masks, used in rotation, one"
        " per epoch; null: new pairs and masks in every epoch (dynamic masking).",
    )
    deduplicate: bool | Annotated[float, Field(ge=0.5, lt=1)] = Field(
        False,
        description="true: leave out every document whose tokens are those of an earlier one, before text is held out;"
        " a similarity such as 0.8: also those that share so much of their 5-grams of tokens with an earlier one, by"
        " an estimate of their Jaccard index.",
    )
    max_epochs: float | None = Field(
        None,
        gt=0,
        description="Maximum number of passes over the text, over all stages; a run with more steps is refused"
        " before it starts. null: no limit.",
    )
    max_words: int | None = Field(
        None,
        ge=1,
        description="Maximum number of words, separated by white space, in the text; a larger text is refused before"
        " it is read. null: no limit.",
    )
    held_out: float = Field(
        0.01,
        gt=0,
        lt=1,
        description="Share of the text that is held out, approximately: never trained on, used for the held-out"
        " metrics. Whole documents are held out.",
    )
    held_out_tokens: int = Field(
        10_000,
        ge=0,
        description="Minimum number of held-out tokens, or a tenth of the text if that is less: whole documents,"
        " then the last sentences of documents. 0: `held_out` is a share of the documents, whatever their lengths.",
    )
    later_fields: ClassVar[frozenset[str]] = frozenset({"deduplicate", "held_out_tokens", "max_words"})

    @property
    def is_tokenised(self) -> bool:
        """Whether the source is a directory of token shards, which are used unchanged."""
        return not self.languages and len(self.sources) == 1 and is_shards(self.sources[0])

    @property
    def all_sources(self) -> list[str]:
        """The sources that are read, for all languages."""
        return [source for own in self.languages.values() for source in own] or self.sources

    def unread_keys(self, recipe: Any) -> Iterator[UnreadKey]:
        if self.languages:
            yield UnreadKey("sources", "data.languages are read in their place", "write data.languages: {}")
        if len(self.languages) < 2 and not self.is_tokenised:  # token shards can have languages, too
            count = "one language" if self.languages else "no languages"
            yield UnreadKey("language_smoothing", f"there are {count} in data.languages", "give data.languages two")
        objectives = getattr(recipe, "objectives", ())
        if not self.layout.epoch_dependent and not any(each.draws for each in objectives):
            why = f"neither the layout {self.layout.choice} nor an objective draws anything"
            yield UnreadKey("static_copies", why, refused=False)
