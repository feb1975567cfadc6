"""Entities in plain text, and answers with their positions, measured on real data.

Trains nothing. Entities are compared by type and characters, so a different word segmentation can be correct. Needs
finished runs of `bertkit finetune --task conll2003` and of a span task with impossible questions, and the folder of the
corpora: conll2003/, squad/, text/. Prints a line of JSON per measurement.

    python -m benchmarks.predict_text --data DATA --tagger RUN --reader RUN
"""

from __future__ import annotations

import argparse
import json
import lzma
import re
import resource
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from bertkit.evaluation.run import MeasurementArguments
from bertkit.inference.documents import documents
from bertkit.inference.entities import RawText
from bertkit.inference.predict import Predictor
from bertkit.metrics.spans import squad_v2
from bertkit.metrics.tagging import conlleval, conlleval_spans
from bertkit.tasks.readers.columns import read_conll
from bertkit.tasks.readers.squad import read_squad
from bertkit.tasks.tagging import Tagging
from bertkit.text.word_split import whole_words

DOCUMENT_WORDS = 20_000
_NO_SPACE_BEFORE = re.compile(r"(?:[,.;:?!%)\]}]|\.\.\.|n't|'(?:s|re|ve|ll|d|m|S)?)$")
_NO_SPACE_BEHIND = frozenset("$([{#")


def joined(words: Sequence[str], *, natural: bool) -> tuple[str, list[tuple[int, int]]]:
    """A sentence and the position of each word: joined by single spaces, or detokenised."""
    text, places, quoted, glue = "", list[tuple[int, int]](), False, True
    for word in words:
        closes = word == '"' and quoted
        if not glue and not (natural and (closes or _NO_SPACE_BEFORE.match(word))):
            text += " "
        places.append((len(text), len(text) + len(word)))
        text += word
        opens = word == '"' and not quoted
        quoted ^= word == '"'
        glue = natural and (opens or word in _NO_SPACE_BEHIND or word.endswith("$"))
    return text, places


def entity_f1(predicted: Iterable[Any], gold: Iterable[Any]) -> dict[str, float]:
    """Precision, recall and F1 of sets, in percent."""
    guesses, wanted = set(predicted), set(gold)
    right = len(guesses & wanted)
    precision, recall = right / max(1, len(guesses)), right / max(1, len(wanted))
    f1 = 2 * right / max(1, len(guesses) + len(wanted))
    return {name: round(100 * value, 2) for name, value in (("precision", precision), ("recall", recall), ("f1", f1))}


def raw_text(
    predictor: Predictor, units: Sequence[Sequence[Any]], separator: str, *, natural: bool
) -> dict[str, float]:
    """Entities of texts of several sentences each, against the gold ones."""
    gold, texts = [], []
    for number, sentences in enumerate(units):
        text = ""
        for sentence in sentences:
            text += separator if text else ""
            own, places = joined(sentence.words, natural=natural)
            for span in conlleval_spans(sentence.tags):
                start, end = places[span.start][0], places[span.stop - 1][1]
                gold.append((str(number), span.type, len(text) + start, len(text) + end))
            text += own
        texts.append(RawText(str(number), text))
    found = [
        (document["id"], each["label"], each["start"], each["end"])
        for _, document in documents(predictor, texts)
        for each in document["entities"]
    ]
    return entity_f1(found, gold)


def measure_entities(predictor: Predictor, data: Path, most: int | None) -> Iterator[tuple[str, Any]]:
    """CoNLL-2003 dev, or its first documents, with its own words, and as text."""
    examples: list[Any] = read_conll(data / "conll2003" / "eng.testa").examples
    examples = [each for each in examples if most is None or each.document < most]
    yield "sentences", len(examples)
    tags = [each.prediction for each in predictor(examples)]
    own = conlleval(tags, [each.tags for each in examples])
    yield "own words", {name: round(100 * float(own[name] or 0), 2) for name in ("precision", "recall", "f1")}
    alone = [[example] for example in examples]
    yield "sentences as printed", raw_text(predictor, alone, "", natural=True)
    yield "sentences joined by spaces", raw_text(predictor, alone, "", natural=False)
    by_document: dict[int, list[Any]] = {}
    for example in examples:
        by_document.setdefault(example.document, []).append(example)
    whole = list(by_document.values())
    yield "documents as printed, a sentence a line", raw_text(predictor, whole, "\n", natural=True)
    yield "documents as printed, running text", raw_text(predictor, whole, " ", natural=True)


def measure_long_document(predictor: Predictor, data: Path, separator: str) -> dict[str, Any]:
    """Articles with one paragraph per line, labelled one by one and all in one document with this separator."""
    with lzma.open(data / "text" / "wikipedia-dev.txt.xz", "rt", encoding="utf-8") as file:
        articles = file.read().split("\n\n")
    chapters, words = list[str](), 0
    for article in articles:
        if words >= DOCUMENT_WORDS:
            break
        chapters.append(article.strip())
        words += len(article.split())
    starts, text = [], ""
    for chapter in chapters:
        text += separator if text else ""
        starts.append(len(text))
        text += chapter
    alone = {
        (each["label"], start + each["start"], start + each["end"])
        for start, (_, document) in zip(
            starts, documents(predictor, [RawText(str(i), each) for i, each in enumerate(chapters)]), strict=True
        )
        for each in document["entities"]
    }
    ((_, document),) = documents(predictor, [RawText("all", text)])
    together = {(each["label"], each["start"], each["end"]) for each in document["entities"]}
    exact = all(text[each["start"] : each["end"]] == each["text"] for each in document["entities"])
    return {
        "words": words,
        "chapters": len(chapters),
        "entities of the chapters": len(alone),
        "entities of the document": len(together),
        "recall": round(len(alone & together) / len(alone), 4),
        "precision": round(len(alone & together) / len(together), 4),
        "offsets exact": exact,
    }


def measure_answers(predictor: Predictor, data: Path) -> dict[str, Any]:
    """Positions and scores of the answers to all questions of the dev part of SQuAD 2.0."""
    examples: list[Any] = read_squad(data / "squad" / "squad2-part-dev.json").examples
    contexts = {example.id: example.context for example in examples}
    rows = {document["id"]: document for _, document in documents(predictor, examples)}
    wrong = partial = overlapping = count = 0
    for name, row in rows.items():
        context, answers = contexts[name], row["answers"]
        count += len(answers)
        for each in answers:
            place = each["start"], each["end"]
            wrong += context[slice(*place)] != each["text"]
            partial += whole_words(context, *place) != place
        places = sorted((each["start"], each["end"]) for each in answers)
        overlapping += sum(before[1] > after[0] for before, after in pairwise(places))
    references = {example.id: [answer.text for answer in example.answers] for example in examples}
    scores = squad_v2(
        {name: row["prediction"] for name, row in rows.items()},
        references,
    )
    return {
        "questions": len(rows),
        "answers": count,
        "answers whose offsets give another text": wrong,
        "answers that cut a word": partial,
        "pairs that overlap": overlapping,
        "scores": {name: scores[name] for name in ("exact", "f1") if name in scores},
    }


def measure_long_context(predictor: Predictor, data: Path, copies: int = 40) -> dict[str, Any]:
    """Whether the same answer is found if a question's paragraph is one of many in a text."""
    read: list[Any] = read_squad(data / "squad" / "squad2-part-dev.json").examples
    examples = [each for each in read if each.answers]
    contexts = list(dict.fromkeys(example.context for example in examples))[:copies]
    text = "\n\n".join(contexts)
    asked = [example for example in examples if example.context in contexts][:: max(1, len(examples) // 40)][:20]
    own = {row["id"]: row for _, row in documents(predictor, asked)}
    found = {row["id"]: row for _, row in documents(predictor, [replace(each, context=text) for each in asked])}
    offsets = all(
        text[each["start"] : each["end"]] == each["text"] for row in found.values() for each in row["answers"]
    )
    same = sum(
        any(each["text"] == own[name]["answers"][0]["text"] for each in row["answers"])
        for name, row in found.items()
        if own[name]["answers"]
    )
    return {
        "words": len(text.split()),
        "questions": len(asked),
        "best answer of the paragraph among the five of the whole text": same,
        "offsets exact": offsets,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--tagger", help="run of conll2003")
    parser.add_argument("--context", choices=["sentence", "document"], help="read as such, however it was trained")
    parser.add_argument("--documents", type=int, help="of CoNLL-2003 dev; all of them if not given")
    parser.add_argument("--reader", help="run of a span task")
    arguments = parser.parse_args()
    engine = MeasurementArguments().engine()

    def show(name: str, found: Any) -> None:
        print(json.dumps({name: found}), flush=True)

    if arguments.tagger is not None:
        predictor = Predictor.load(arguments.tagger, engine, offline=True)
        task = predictor.task
        assert isinstance(task, Tagging)
        if arguments.context is not None:
            task.settings = task.settings.model_copy(update={"context": arguments.context})
        show("context", task.settings.context)
        show("long document", measure_long_document(predictor, arguments.data, "\n\n"))
        show("long document, no blank lines", measure_long_document(predictor, arguments.data, "\n"))
        for name, found in measure_entities(predictor, arguments.data, arguments.documents):
            show(name, found)
    if arguments.reader is not None:
        predictor = Predictor.load(arguments.reader, engine, offline=True)
        show("answers", measure_answers(predictor, arguments.data))
        show("long context", measure_long_context(predictor, arguments.data))
    show("peak memory, MB", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)


if __name__ == "__main__":
    main()
