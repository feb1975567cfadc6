"""Texts with entities marked as ranges of characters, as annotation tools and `bertkit predict` write them.

Each entity is `{"start": 0, "end": 5, "label": "PER"}` or, as in doccano's files, `[0, 5, "PER"]`; ends are exclusive.
The words and sentences are those that `predict` finds in plain text (bertkit.text), so a tagger is trained on what it
will read. Sibling own.py reads sentences whose words the file itself separates.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import Any, NamedTuple

from bertkit.errors import DataError
from bertkit.tasks.readers.common import Notes, field, kind_of, list_in, text_in
from bertkit.tasks.readers.table import label_name
from bertkit.text.passages import paragraph_places, sentence_places_in
from bertkit.text.word_split import Place, word_places

ENTITIES = ("entities", "spans", "labels")
"""The usual names of the field that lists the entities."""
_OTHER_NAMES = {"start": "start_offset", "end": "end_offset", "label": "entity_group"}
"""What doccano (of texts with relations) and the pipelines of `transformers` call an entity's fields."""
EXTENDED = "entities extended to whole words"
OVERLAPPING = "entities that overlap a longer one (left out)"
EMPTY = "entities without a word (left out)"


class Entity(NamedTuple):
    """A range of characters with its type."""

    start: int
    end: int
    label: str


class TaggedSentence(NamedTuple):
    """Words and, if the entities are known, their tags in IOB2."""

    words: tuple[str, ...]
    tags: tuple[str, ...] | None


def entities_in(value: Any, text: str, where: str) -> list[Entity]:
    """Check the entities of a text.

    Args:
        value: a list of objects (`start`, `end`, `label`, optionally `text`) or of lists `[start, end, label]`.
        text: the text they mark.
        where: the place in the file, for errors.

    Raises:
        DataError: another form, a range outside the text, or one that does not contain the entity's own `text`.
    """
    found = []
    for number, each in enumerate(list_in(value, where)):
        place = f"{where}[{number}]"
        if isinstance(each, dict):
            each = {name: each[other] for name, other in _OTHER_NAMES.items() if other in each} | {"text": None, **each}
            if isinstance(named := each.get("labels"), list) and len(named) == 1:  # Label Studio's
                each.setdefault("label", named[0])
            start, end, label, copy = (field(each, name, place) for name in ("start", "end", "label", "text"))
        elif isinstance(each, list) and len(each) == 3:
            (start, end, label), copy = each, None
        else:
            raise DataError(
                f'{place}: {kind_of(each)}, expected {{"start": 0, "end": 5, "label": "PER"}} or [0, 5, "PER"]'
            )
        if not (type(start) is int and type(end) is int and 0 <= start < end <= len(text)):
            raise DataError(
                f"{place}: start {start!r:.20} and end {end!r:.20} in a text of {len(text)} characters; expected the"
                " position of the first character, from 0, and that after the last"
            )
        if copy is not None and copy != text[start:end]:
            raise DataError(
                f"{place}: its text is {copy!r:.60}, but characters {start} to {end} are {text[start:end]!r:.60};"
                " positions count characters (not bytes) from 0, and the end is exclusive"
            )
        found.append(Entity(start, end, label_name(label, f"{place}, label")))
    return found


def tagged_sentences(text: Any, entities: Any, name: str, where: str, notes: Notes) -> list[TaggedSentence]:
    """The sentences of a text, with tags in IOB2. A sentence ends only where no entity continues.

    Args:
        text: the text.
        entities: see `entities_in`; None if they are not known.
        name: the id of the text, for notes.
        where: the place in the file, for errors.
        notes: entities that tags cannot represent exactly are added.

    Raises:
        DataError: see `entities_in`.
    """
    text = text_in(text, f"{where}, text")
    marked = [] if entities is None else entities_in(entities, text, f"{where}, entities")
    kept = _without_overlaps(marked, name, notes)
    sentences: list[Place] = []
    for paragraph in paragraph_places(text):
        for start, end in sentence_places_in(text, paragraph):
            inside = sentences and any(each.start < start < each.end for each in kept)
            sentences.append((sentences.pop()[0], end) if inside else (start, end))
    places = [word_places(text, start, end) for start, end in sentences]
    tags = iter(_tags([place for words in places for place in words], kept, name, notes))
    return [
        TaggedSentence(
            tuple(text[start:end] for start, end in words),
            None if entities is None else tuple(next(tags) for _ in words),
        )
        for words in places
    ]


def _without_overlaps(entities: list[Entity], name: str, notes: Notes) -> list[Entity]:
    """The entities in the order of the text; of those that overlap, the longest (the first if equally long)."""
    kept: list[Entity] = []
    for entity in sorted(set(entities), key=lambda each: (each.start - each.end, each)):
        if any(entity.start < other.end and other.start < entity.end for other in kept):
            notes.add(OVERLAPPING, name)
        else:
            kept.append(entity)
    return sorted(kept)


def _tags(places: list[Place], entities: list[Entity], name: str, notes: Notes) -> list[str]:
    starts, ends = [start for start, _ in places], [end for _, end in places]
    tags = ["O"] * len(places)
    for entity in entities:
        first, last = bisect_right(ends, entity.start), bisect_left(starts, entity.end)
        if first >= last or tags[first] != "O":
            notes.add(EMPTY if first >= last else OVERLAPPING, name)
            continue
        if starts[first] < entity.start or ends[last - 1] > entity.end:
            notes.add(EXTENDED, name)
        tags[first:last] = [f"B-{entity.label}", *[f"I-{entity.label}"] * (last - first - 1)]
    return tags
