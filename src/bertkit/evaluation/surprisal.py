"""Surprisal of every word of a text, for reading-time studies, and of every sentence: minus log2 of its probability.

Hale 2001, NAACL; Levy 2008, Cognition 106: a causal model predicts each word from those before it. For a masked model
the terms of the pseudo-log-likelihood are reported, which also depend on the words after it (Salazar et al. 2020,
arXiv:1910.14659). models/scoring/pseudo_likelihood.py computes them. Siblings: lm.py scores long documents in windows,
babylm/reading_times.py the words of one data set by the rules of a challenge.

A word is what white space separates; its surprisal is the sum over its tokens. A blank belongs to the word after it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tokenizers import Encoding

from bertkit.arrays import Int64Array
from bertkit.errors import DataError
from bertkit.evaluation.loaded_model import LoadedModel
from bertkit.evaluation.run import (
    EvalArguments,
    EvaluationResult,
    measure_or_reuse,
    measurement_identity,
    open_evaluation_text,
    single_score,
)
from bertkit.evaluation.settings import SurprisalSettings
from bertkit.evaluation.text_sums import TextSums, perplexity, write_sums
from bertkit.models.scoring.pseudo_likelihood import TextScore, score_texts
from bertkit.models.scoring.rules import LeftToRight, check_distribution, choose_rule
from bertkit.progress import Progress, silent_progress
from bertkit.run.directory import RunDirectory
from bertkit.tables import write_csv
from bertkit.text.source_options import SourceOptions
from bertkit.text.tokenizer import Tokenizer

SUITE = TASK = "surprisal"
TABLES = "tables"
WORD_COLUMNS = ("document", "sentence", "position", "word", "tokens", "unknown", "surprisal_bits")
SENTENCE_COLUMNS = ("document", "sentence", "text", "words", "tokens", "unknown", "surprisal_bits", "bits_per_word")
_WORD = re.compile(r"\S+")


@dataclass(frozen=True, slots=True)
class Line:
    """A sentence: a line of the text, or of a record.

    Attributes:
        document: the number of its document, from 1.
        text: what the model reads, with preceding lines if it reads any.
        start: the character at which the sentence itself begins.
    """

    document: int
    text: str
    start: int = 0

    @property
    def sentence(self) -> str:
        """The sentence itself."""
        return self.text[self.start :]


@dataclass(frozen=True, slots=True)
class WordScore:
    """A word's tokens, how many of them are unknown, and its surprisal; None if no token of it is predicted, or one is
    given to the model."""

    word: str
    tokens: int
    unknown: int
    bits: float | None


def evaluate_surprisal(
    arguments: EvalArguments,
    sources: Sequence[str],
    settings: SurprisalSettings,
    *,
    progress: Progress = silent_progress,
) -> EvaluationResult:
    """Score all words and write the run: results.json, tables/words.csv and tables/sentences.csv.

    Args:
        arguments: the model, and where to compute and write.
        sources: text sources, with one sentence per line or record.
        settings: how the model reads.
        progress: the display, in scored tokens.

    Raises:
        DataError: invalid text or model, the model has no distribution over words, or a sentence is too long for it.
        UsageError: no source, or the rule does not fit the model.
    """
    options = SourceOptions(text_field=settings.text_field)
    corpus = open_evaluation_text(sources, arguments, options, what="sentences, one per line,")
    loaded = LoadedModel.load(arguments.model, offline=arguments.offline)
    rule = choose_rule(loaded.model, settings.rule, source=arguments.model)
    check_distribution(rule, source=arguments.model)
    engine = arguments.engine()
    identity = measurement_identity("eval", SUITE, [loaded], settings, arguments, data=corpus.hashes)
    room = loaded.model.encoder.max_tokens - rule(loaded.tokenizer).special_tokens
    lines = list(lines_of(corpus.documents(), loaded.tokenizer, settings.context_lines, room))
    if not lines:
        raise DataError(f"{', '.join(corpus.sources)}: contains no sentences")

    def compute(run: RunDirectory) -> dict[str, Any]:
        scores = score_texts(
            loaded.model,
            loaded.tokenizer,
            [line.text for line in lines],
            rule=rule.name,
            starts=[line.start for line in lines],
            max_batch_tokens=engine.micro_batch_tokens,
            device=engine.device,
            progress=progress,
        )
        encodings = loaded.tokenizer.encodings_plain([line.text for line in lines])
        unknown_id = loaded.tokenizer.unk_id if "unk" in loaded.tokenizer.roles else None
        words = [
            word_scores(line, encoding, score, unknown_id)
            for line, encoding, score in zip(lines, encodings, scores, strict=True)
        ]
        sums = _write_tables(run, lines, words, scores)
        write_sums(run, TASK, sums)
        figures = _figures(sums, "perplexity" if issubclass(rule, LeftToRight) else "pseudo_perplexity")
        return {
            "suite": SUITE,
            "model": loaded.name,
            "average": figures["bits_per_word"],
            "tasks": {TASK: {name: single_score(value) for name, value in figures.items()}},
            "protocol": {
                "rule": rule.name,
                "statement": rule.statement,
                "words": "separated by white space; the sum over tokens; a blank belongs to the word after it",
                "context": f"the sentence alone; with up to {settings.context_lines} preceding lines of its document"
                if settings.context_lines
                else "the sentence alone",
                "dtype": "float32 model and log-softmax, float64 sums",
                "settings": json.loads(settings.model_dump_json()),
            },
            "trained": loaded.training,
        }

    return measure_or_reuse(identity, arguments, compute)


def lines_of(documents: Iterable[Sequence[str]], tokenizer: Tokenizer, context: int, room: int) -> Iterator[Line]:
    """Each line with at most `context` lines of its document before it, fewer if all would exceed `room` tokens. Words
    are separated by one blank, because a tokenizer may have tokens for more."""
    for number, document in enumerate(documents, start=1):
        lines = [" ".join(line.split()) for line in document]
        for index, line in enumerate(lines):
            for first in range(max(0, index - context), index + 1):
                text = " ".join(lines[first : index + 1])
                if first == index or len(tokenizer.encode_plain([text])[0]) <= room:
                    yield Line(number, text, len(text) - len(line))
                    break


def word_scores(line: Line, encoding: Encoding, score: TextScore, unknown_id: int | None) -> list[WordScore]:
    """The words of a line with their surprisals."""
    spans = [(word.start(), word.end()) for word in _WORD.finditer(line.text) if word.start() >= line.start]
    word_N = _word_of_tokens(encoding, np.array([end for _, end in spans], dtype=np.int64))
    first = len(encoding.ids) - score.tokens
    bits: list[float | None] = [None] * len(spans)
    tokens, unknown = [0] * len(spans), [0] * len(spans)
    for place, word in enumerate(word_N.tolist()):
        if encoding.offsets[place][1] <= line.start:
            continue
        tokens[word] += 1
        unknown[word] += encoding.ids[place] == unknown_id
    for word, log_p in zip(word_N[first:].tolist(), score.log_p_N.astype(np.float64).tolist(), strict=True):
        bits[word] = (bits[word] or 0.0) - log_p / math.log(2)
    if first and encoding.offsets[first - 1][1] > line.start:  # the model is given the first token
        bits[int(word_N[first - 1])] = None
    return [
        WordScore(line.text[slice(*span)], *each)
        for span, each in zip(spans, zip(tokens, unknown, bits, strict=True), strict=True)
    ]


def _word_of_tokens(encoding: Encoding, end_W: Int64Array) -> Int64Array:
    """The word that contains each token's last character; the next word if that is white space."""
    last_N = np.array([max(end - 1, start) for start, end in encoding.offsets], dtype=np.int64)
    return np.asarray(np.minimum(np.searchsorted(end_W, last_N, side="right"), len(end_W) - 1))


def _write_tables(
    run: RunDirectory, lines: Sequence[Line], words: Sequence[Sequence[WordScore]], scores: Sequence[TextScore]
) -> list[TextSums]:
    """Write both tables.

    Returns:
        The sums of each sentence.
    """
    rows: list[list[Any]] = []
    sentences: list[list[Any]] = []
    sums: list[TextSums] = []
    for number, (line, own, score) in enumerate(zip(lines, words, scores, strict=True), start=1):
        place = [line.document, number]
        rows += [[*place, n, w.word, w.tokens, w.unknown, w.bits] for n, w in enumerate(own, start=1)]
        bits = -score.total / math.log(2)
        scored = sum(each.bits is not None for each in own)
        counts = [len(own), score.tokens, sum(each.unknown for each in own)]
        sentences.append([*place, line.sentence, *counts, bits, bits / max(1, scored)])
        sums.append({"id": number, "tokens": score.tokens, "words": scored, "nats": -score.total})
    write_csv(run.path / TABLES / "words.csv", WORD_COLUMNS, rows)
    write_csv(run.path / TABLES / "sentences.csv", SENTENCE_COLUMNS, sentences)
    return sums


def _figures(sums: Sequence[TextSums], name: str) -> dict[str, float | None]:
    """Bits per word, perplexity per token under this name, and what was counted."""
    nats, tokens, words = (math.fsum(each[key] for each in sums) for key in ("nats", "tokens", "words"))
    return {
        "bits_per_word": nats / math.log(2) / max(1.0, words),
        name: perplexity(nats / tokens),
        "sentences": float(len(sums)),
        "words": words,
        "tokens": tokens,
    }
