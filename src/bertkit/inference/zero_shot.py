"""Labels without examples: a model of natural language inference, or the vectors of the labels' names, chooses.

Yin et al. 2019, arXiv:1909.00161, section 4: a text is the premise, "This example is LABEL." the hypothesis, and the
label whose hypothesis has the highest entailment is the prediction. Scores are the softmax over the labels of the
entailment outputs, as in the zero-shot pipeline of `transformers`. An embedder compares the text's vector with that of
each label's name (or of a sentence containing it); its scores are cosines. Sibling predict.py has heads that were
trained for their labels.

Shapes: I texts, L labels, E width of the vectors.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bertkit.errors import DataError, UsageError
from bertkit.finetuning.prediction import WINDOW_ITEMS, predict
from bertkit.finetuning.recipe import FinetuneRecipe
from bertkit.inference.embedder import Embedder
from bertkit.inference.predict import LARGEST_CHARACTERS, Predictor
from bertkit.inference.predict_input import InputColumns
from bertkit.models.files.hub import read_config
from bertkit.models.files.model_files import encoder_directory, find_model
from bertkit.models.labels import Labels
from bertkit.models.sentence import is_embedder
from bertkit.progress import Progress
from bertkit.tasks.base import EncodedTokenCounts, Features, Prediction
from bertkit.tasks.embedding.losses.cosine import CosineLoss
from bertkit.tasks.embedding.task import Embedding
from bertkit.tasks.encoding import SequenceEncoder
from bertkit.tasks.examples import TextExample
from bertkit.training.engine import Engine

log = logging.getLogger(__name__)

ENTAILMENT = "entailment"
_SLOT = "{}"


@dataclass(frozen=True)
class ZeroShot(Predictor):
    """A model that chooses among labels that it was not trained for.

    Attributes:
        names: of the labels.
        template: a sentence with {} in place of a label's name.
    """

    names: tuple[str, ...] = ()
    template: str = _SLOT

    @abstractmethod
    def scores(
        self, texts: Sequence[TextExample], progress: Progress, label: str
    ) -> tuple[NDArray[Any], EncodedTokenCounts]:
        """(I, L); the prediction for a text is the label with the greatest score."""

    @property
    def scored_labels(self) -> tuple[str, ...]:
        return self.names

    @property
    def sentences(self) -> list[str]:
        """The template filled with each label."""
        return [self.template.replace(_SLOT, name) for name in self.names]

    def _read(
        self, examples: Sequence[Any], progress: Progress, label: str, *, with_candidates: bool
    ) -> tuple[list[Prediction], EncodedTokenCounts]:
        score_IL, account = self.scores(examples, progress, label)
        self._check_finite(score_IL, examples, range(len(examples)))
        return [
            Prediction(each.id, self.names[int(row.argmax())], dict(zip(self.names, row.tolist(), strict=True)))
            for each, row in zip(examples, score_IL, strict=True)
        ], account


@dataclass(frozen=True)
class EntailedLabels(ZeroShot):
    """Labels chosen by a model of natural language inference."""

    def scores(
        self, texts: Sequence[TextExample], progress: Progress, label: str
    ) -> tuple[NDArray[Any], EncodedTokenCounts]:
        pairs = (TextExample(each.id, each.text, sentence) for each in texts for sentence in self.sentences)
        place = next(i for i, name in enumerate(self.task.labels.names) if name.casefold() == ENTAILMENT)
        logits, accounts = list[np.floating[Any]](), list[EncodedTokenCounts]()
        # The windows in which `predict` sorts by length, so that pieces do not change what is computed together.
        while piece := list(islice(pairs, WINDOW_ITEMS)):
            features = self._encoded(piece)
            outputs = predict(self.model, self.task, features, self.engine, progress=progress, label=label)
            logits += [output[place] for output in outputs]
            accounts.append(features.account)
        logit_IL = np.array(logits).reshape(len(texts), -1).astype(np.float64)
        share_IL = np.exp(logit_IL - logit_IL.max(axis=1, keepdims=True))
        return share_IL / share_IL.sum(axis=1, keepdims=True), _summed(accounts)

    def _encoded(self, pairs: Sequence[TextExample]) -> Features:
        """The same features as of all pairs at once. Each text is encoded as a whole before it is cut, once per label,
        so long texts are encoded a few at a time."""
        parts = [self.task.encode(block, self.encoder) for block in _blocks(pairs)]
        sequences = np.concatenate([np.diff(each.starts_S1) for each in parts])
        examples = np.concatenate([np.diff(each.example_starts_I1) for each in parts])
        return replace(
            parts[0],
            ids_T=np.concatenate([each.ids_T for each in parts]),
            token_types_T=np.concatenate([each.token_types_T for each in parts]),
            starts_S1=np.concatenate([[0], np.cumsum(sequences)]),
            example_starts_I1=np.concatenate([[0], np.cumsum(examples)]),
            origin_I=np.arange(len(pairs)),
            account=_summed([each.account for each in parts]),
        )

    def _warn_of_cut(self, cut: int, count: int) -> None:
        if cut:
            pairs, most = count * len(self.names), self.encoder.max_tokens
            log.warning("%d of %d pairs of a text and a label were cut to %d tokens", cut, pairs, most)


def _blocks(pairs: Sequence[TextExample]) -> Iterator[list[TextExample]]:
    """The pairs in blocks of a bounded number of characters."""
    block, characters = list[TextExample](), 0
    for pair in pairs:
        block.append(pair)
        characters += len(pair.text) + len(pair.text_pair or "")
        if characters > LARGEST_CHARACTERS:
            yield block
            block, characters = [], 0
    if block:
        yield block


def _summed(accounts: Sequence[EncodedTokenCounts]) -> EncodedTokenCounts:
    names = ("examples", "sequences", "tokens", "examples_cut", "tokens_dropped")
    return EncodedTokenCounts(*(sum(getattr(each, name) for each in accounts) for name in names))


@dataclass(frozen=True)
class NearestLabels(ZeroShot):
    """Labels chosen by the vectors of an embedder.

    Attributes:
        embedder: computes the vectors.
    """

    embedder: Embedder = field(kw_only=True)

    def scores(
        self, texts: Sequence[TextExample], progress: Progress, label: str
    ) -> tuple[NDArray[Any], EncodedTokenCounts]:
        sequences = self.embedder.sequences([*(each.text for each in texts), *self.sentences])
        vectors = self.embedder.vectors(sequences).astype(np.float64)
        vectors /= np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
        cut = [each.cut for each in sequences[: len(texts)] if each.cut]
        account = EncodedTokenCounts(len(texts), 0, 0, len(cut), sum(cut))
        return vectors[: len(texts)] @ vectors[len(texts) :].T, account


def zero_shot(
    name: str,
    labels: Sequence[str],
    engine: Engine,
    *,
    template: str | None = None,
    max_length: int | None = None,
    offline: bool = False,
) -> ZeroShot:
    """The predictor of these labels.

    Args:
        name: a model of natural language inference or an embedder: a Hub id, a model directory or a run directory.
        labels: two or more.
        engine: device and batch size.
        template: a sentence with {} for the label's name; by default "This example is {}.", or for an embedder the name
            alone.
        max_length: maximum sequence length in tokens; None: as in training, or the embedder's.
        offline: do not use the network.

    Raises:
        UsageError: fewer than two labels, a label given twice, a template without {}, or a length that the model cannot
            read.
        DataError: the model can do neither.
    """
    loader = partial(zero_shot, name, list(labels), engine, template=template, max_length=max_length, offline=offline)
    names = tuple(each.strip() for each in labels)
    twice = sorted({each for each in names if names.count(each) > 1})
    if twice or len(names) < 2 or not all(names):
        fault = f"{twice[0]} is given twice" if twice else "give at least two labels, none of them empty"
        raise UsageError(f"--labels {','.join(names)}: {fault}")
    if template is not None and template.count(_SLOT) != 1:
        raise UsageError(f"--template {template!r}: expected a sentence with one {{}} for the label's name")
    directory = find_model(name, offline=offline)
    files = encoder_directory(directory)
    if not is_embedder(directory):
        _, contents = read_config(files)
        known = [each.casefold() for each in Labels.from_hub(contents).names]
        if ENTAILMENT in known:
            plain = Predictor.load(name, engine, max_length=max_length, offline=offline)
            parts = {each.name: getattr(plain, each.name) for each in fields(Predictor)}
            parts |= {"columns": InputColumns(), "loader": loader}
            return EntailedLabels(**parts, names=names, template=template or "This example is {}.")
        if contents.get("id2label"):
            raise DataError(
                f"{name}: is a classifier for {', '.join(known[:5])}; --zero-shot needs a model of natural language"
                " inference (with a label `entailment`) or an embedder"
            )
    # In single precision, like all predictions.
    embedder = Embedder.load(directory, replace(engine, bf16=False), name=name, max_tokens=max_length, offline=offline)
    return NearestLabels(
        files,
        "classification",
        Embedding(CosineLoss(), ("spearman",)),
        embedder.model.model,
        SequenceEncoder(embedder.tokenizer, max_tokens=embedder.max_tokens),
        engine,
        InputColumns(),
        FinetuneRecipe(name="zero-shot"),
        names=names,
        template=template or _SLOT,
        embedder=embedder,
        loader=loader,
    )
