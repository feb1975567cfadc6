"""Entities of plain text: find words and sentences, tag them, and return entities as ranges of characters.

Tjong Kim Sang and De Meulder 2003, CoNLL, for what an entity is (conlleval's interpretation of tags). A tagger trained
on sentences reads each sentence separately. One trained on documents (Devlin et al. 2019, BERT, arXiv:1810.04805,
section 5.3) reads as many whole paragraphs at once as fit, as it did with sentences in training; a paragraph that is
too long is read in overlapping windows. Windows therefore follow the text: a chapter is cut as if it were alone, except
at its edges, whereas windows of a fixed number of words would change with the chapter's position in its book. Sibling
column_files.py tags words that the file itself separates.

Shapes: W words of an entity, K tags, C types.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bertkit.arrays import Float64Array
from bertkit.errors import DataError
from bertkit.metrics.tagging import conlleval_spans, split_tag
from bertkit.tasks.base import Prediction
from bertkit.tasks.examples import TaggedExample
from bertkit.text.passages import blocks_of_paragraphs, paragraph_places, sentence_places_in
from bertkit.text.word_split import Place, word_places

PART_WORDS = 8192
"""Maximum number of words of a text tagged together, so that the memory of a pass does not grow with the text."""
OUTSIDE = "O"
_DIGITS = 6


@dataclass(frozen=True, slots=True)
class RawText:
    """A text that is not yet split into words."""

    id: str
    text: str


@dataclass(frozen=True)
class TextPart:
    """Words of a text that belong into one window if they fit: a sentence or a paragraph.

    Attributes:
        example: the words.
        places: position of each word in the text.
        begins: whether it is read separately from the part before it, even if both would fit.
        closes: whether every open entity ends with this part.
    """

    example: TaggedExample
    places: list[Place]
    begins: bool
    closes: bool


def text_parts(raw: RawText, context: str) -> Iterator[TextPart]:
    """The words of a text that is not blank, in parts.

    Args:
        raw: the text.
        context: `sentence`: a part is a sentence; `document`: a part is a paragraph, or whole sentences of a paragraph
            with more than `PART_WORDS` words.
    """
    if context == "sentence":
        for paragraph in paragraph_places(raw.text):
            for start, end in sentence_places_in(raw.text, paragraph):
                yield _part(raw, word_places(raw.text, start, end), begins=True, closes=True)
        return
    together = 0
    for begins_document, paragraph in _of_documents(raw.text):
        together = 0 if begins_document else together
        sentences = [word_places(raw.text, start, end) for start, end in sentence_places_in(raw.text, paragraph)]
        pieces = list(_pieces(sentences))
        for number, places in enumerate(pieces, start=1):
            begins = not together or together + len(places) > PART_WORDS
            together = len(places) + (0 if begins else together)
            yield _part(raw, places, begins=begins, closes=number == len(pieces))


def _of_documents(text: str) -> Iterator[tuple[bool, Place]]:
    """Each paragraph, and whether it begins a document.

    If blank lines separate paragraphs, the text is one document. If every line is a paragraph, as in pretraining texts,
    blank lines separate documents.
    """
    before = 0
    for block in blocks_of_paragraphs(text):
        for number, paragraph in enumerate(block):
            yield number == 0 and max(before, len(block)) > 1, paragraph
        before = len(block)


def _pieces(sentences: Iterable[list[Place]]) -> Iterator[list[Place]]:
    """The words of a paragraph; a long one is split at the end of a sentence, or anywhere if a sentence is too long."""
    piece: list[Place] = []
    for sentence in sentences:
        for first in range(0, len(sentence), PART_WORDS):
            places = sentence[first : first + PART_WORDS]
            if piece and len(piece) + len(places) > PART_WORDS:
                yield piece
                piece = []
            piece += places
    if piece:
        yield piece


def _part(raw: RawText, places: list[Place], *, begins: bool, closes: bool) -> TextPart:
    words = tuple(raw.text[start:end] for start, end in places)
    return TextPart(TaggedExample(raw.id, words), places, begins, closes)


class EntityCollector:
    """Collects the entities of one text, part by part.

    Args:
        raw: the text.
        names: of the tags, in the order of the model's outputs.
        top: for each entity, list this many of the greatest scores by type; None: no scores.
        context: see `text_parts`.

    Attributes:
        found: `label`, `start`, `end` (characters, end exclusive), `text`, `score`, and `scores` if requested.
    """

    def __init__(
        self, raw: RawText, names: Sequence[str], top: int | None = None, *, context: str = "sentence"
    ) -> None:
        self.item = raw
        self.found: list[dict[str, Any]] = []
        self._top, self._context = top, context
        self._has_chunks = has_chunks(names)
        types = [split_tag(name)[1] or OUTSIDE for name in names] if self._has_chunks else list(names)
        self._types = list(dict.fromkeys(types))
        self._type_KC = np.zeros((len(names), len(self._types)))
        self._type_KC[np.arange(len(names)), [self._types.index(each) for each in types]] = 1
        self._open: list[tuple[Place, str, list[float]]] = []

    def parts(self) -> Iterator[TextPart]:
        """The text's parts."""
        return text_parts(self.item, self._context)

    def add(self, part: TextPart, prediction: Prediction) -> None:
        """Add the tags of the next part."""
        shares = prediction.scores["probabilities"]
        self._open += zip(part.places, prediction.prediction, shares, strict=True)
        if part.closes:
            self._close()

    def document(self) -> dict[str, Any]:
        """`id`, `text`, and `entities`; or `tags`, one per word, if the tags are not of the form B-TYPE."""
        self._close()
        return {"id": self.item.id, "text": self.item.text, "entities" if self._has_chunks else "tags": self.found}

    def _close(self) -> None:
        tags = [tag for _, tag, _ in self._open]
        if self._has_chunks:
            spans = [(span.type, span.start, span.stop) for span in conlleval_spans(tags)]
        else:
            spans = [(tag, place, place + 1) for place, tag in enumerate(tags)]
        for label, first, last in spans:
            words = self._open[first:last]
            self.found.append(self._entity(label, words[0][0][0], words[-1][0][1], [share for _, _, share in words]))
        self._open = []

    def _entity(self, label: str, start: int, end: int, share_WK: list[list[float]]) -> dict[str, Any]:
        """The score is the probability of the type, averaged over the words; prefixes of one type are summed."""
        share_C: Float64Array = (np.array(share_WK) @ self._type_KC).mean(axis=0)
        scores = {name: round(share, _DIGITS) for name, share in zip(self._types, share_C.tolist(), strict=True)}
        found = {"label": label, "start": start, "end": end, "text": self.item.text[start:end], "score": scores[label]}
        if self._top is not None:
            found["scores"] = dict(sorted(scores.items(), key=lambda pair: -pair[1])[: self._top])
        return found


def has_chunks(names: Sequence[str]) -> bool:
    """Whether tags are O or a prefix with a type, such as B-PER; parts of speech are not."""
    try:
        return OUTSIDE in names and all(split_tag(name) for name in names)
    except DataError:
        return False
