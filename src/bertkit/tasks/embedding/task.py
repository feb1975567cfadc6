"""The embedding task: each text becomes a vector, and a loss compares the vectors.

Reimers and Gurevych 2019, Sentence-BERT, arXiv:1908.10084, section 3. A training example has one or more texts, each a
separate sequence; `logits` are their vectors. Evaluation uses the similarities (similarity.py), never the loss.

A loss that compares a batch's examples reads the whole batch. If it is larger than a micro-batch, the vectors of all
parts are computed first, and each part again in the backward pass (finetuning/loss_terms.py). Memory therefore does not
grow with the batch (Gao et al. 2021, GradCache, arXiv:2101.06983).

Shapes: T packed tokens, I examples, A texts of each, B = I A sequences, D width of states, E width of vectors, K
classes.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from bertkit.arrays import Int64Array
from bertkit.data.random import Draw
from bertkit.errors import DataError, UsageError
from bertkit.models.encoder import Encoder
from bertkit.models.headed import HeadedModel
from bertkit.models.labels import Labels
from bertkit.models.loss_sum import LossSum
from bertkit.models.sentence import AnyPooling, Dense, pooled, shortening
from bertkit.models.sentence_files import write_sentence_files
from bertkit.models.similarity import Similarity
from bertkit.models.splade import is_sparse
from bertkit.models.text_reading import TextReading
from bertkit.tasks.base import EncodedTokenCounts, Features, FeatureWriter, Prediction, Task, TaskBatch
from bertkit.tasks.classification import LABEL
from bertkit.tasks.embedding.deletion import WHOLE, WORD, without_words, words_of_tokens
from bertkit.tasks.embedding.losses.base import EmbeddingLoss, TextVectors
from bertkit.tasks.embedding.losses.matryoshka import Matryoshka
from bertkit.tasks.embedding.losses.tsdae import predicted_tokens
from bertkit.tasks.embedding.similarity import ACCURACY, PairEvaluation, compared, predicted, reference
from bertkit.tasks.encoding import SequenceEncoder
from bertkit.tasks.examples import SentenceExample
from bertkit.tasks.label_ids import label_ids

log = logging.getLogger(__name__)

TEXT_NUMBER = "text"
"""Numbers of the example's texts; equal for equal texts."""
MODULE = "loss"
"""The name of the companion that the loss trains with the model and that is dropped after training."""
MAPS = "maps"
"""The name of the companion with the modules between pooling and scaling, which are written with the model."""


METRICS_OF: Mapping[PairEvaluation | None, tuple[str, ...]] = {
    PairEvaluation.SCORES: ("spearman", "pearson"),
    PairEvaluation.TRIPLETS: (ACCURACY,),
    PairEvaluation.PAIRS: (ACCURACY,),
}
"""The scores for each way of evaluating examples."""


@dataclass(frozen=True)
class VectorForm:
    """How a text becomes a vector, and how vectors are compared; the defaults are those of a plain encoder.

    Attributes:
        pooling: modes; their vectors are concatenated.
        normalise: whether dense vectors have length one.
        reading: what is done with a text before it is tokenised.
        similarity: how dense vectors are compared if the loss does not determine it.
        kept: the first numbers of a dense vector, or the greatest weights of a sparse one, that evaluation and the
            finished model keep; the loss reads all. None: all.
        maps: modules between pooling and scaling, from which their training starts.
    """

    pooling: tuple[AnyPooling, ...] = ("mean",)
    normalise: bool = False
    reading: TextReading = field(default_factory=TextReading)
    similarity: Similarity = "cosine"
    kept: int | None = None
    maps: tuple[Dense, ...] = ()


_PLAIN = VectorForm()


class Embedding(Task):
    """Texts as vectors.

    Args:
        loss: the training loss.
        metrics: names of the scores that are reported.
        form: how a text becomes a vector.
        classes: names of the classes that the loss reads; empty if it reads none.
        matryoshka: the widths at which the loss is computed; None: only the full width.
        largest_score: scores are divided by this.
        has_teacher: whether the loss uses a teacher in place of labels.
    """

    head: ClassVar[str] = "sentence_vector"
    metric_of: ClassVar[Mapping[str, str]] = {name: name for name in ("spearman", "pearson", ACCURACY)}
    of_encoder: ClassVar[bool] = True
    """Whether vectors need no weights but the encoder's, so that several data sets train one embedder."""

    def __init__(
        self,
        loss: EmbeddingLoss,
        metrics: Sequence[str],
        *,
        form: VectorForm = _PLAIN,
        classes: Sequence[str] = (),
        matryoshka: Matryoshka | None = None,
        largest_score: float = 1.0,
        has_teacher: bool = False,
    ) -> None:
        super().__init__(Labels.unnamed(), metrics)
        self.objective = loss
        self.has_accuracy = loss.has_accuracy
        self.form = form
        self.pooling, self.normalise, self.reading = form.pooling, form.normalise, form.reading
        self.classes_of_loss = tuple(classes)
        self.matryoshka = matryoshka
        self.largest_score = largest_score
        self.has_teacher = has_teacher
        self.similarity: Similarity = loss.compared_by or form.similarity

    def vector_width(self, encoder: Encoder) -> int:
        """E for this encoder."""
        maps = self.form.maps
        return maps[-1].linear.out_features if maps else encoder.width * len(self.pooling)

    @property
    def reads_whole_batch(self) -> bool:
        return self.objective.compares_examples

    def encode(self, examples: Sequence[SentenceExample], encoder: SequenceEncoder) -> Features:
        """Each text as a sequence; with the labels of the loss if all examples have them.

        Examples of an evaluated split may have other labels than those of the loss; these are left out here.
        """
        repeats = self.objective.repeats_text and all(len(each.texts) == 1 for each in examples)
        query, document = self._prompts
        texts = [self.reading(text, document if n else query) for each in examples for n, text in enumerate(each.texts)]
        ids, room = encoder.ids_in_turn(texts), encoder.room(1)
        writer = FeatureWriter()
        cut = dropped = 0
        for number, example in enumerate(examples):
            lost = 0
            for own in [next(ids) for _ in example.texts] * (1 + repeats):
                writer.add(*encoder.sequence(own[:room], example=example.id))
                lost += max(0, len(own) - room)
            writer.close(number)
            cut += lost > 0
            dropped += lost
        labels = self.example_labels(examples, reads=1 + repeats)
        words = {WORD: words_of_tokens(texts, encoder)} if self.objective.rebuilds_text else None
        labelled = self.metrics == METRICS_OF.get(compared(examples))
        return writer.finish(EncodedTokenCounts(len(examples), 0, 0, cut, dropped), labels, words, labelled=labelled)

    def example_labels(self, examples: Sequence[SentenceExample], *, reads: int = 1) -> dict[str, NDArray[Any]]:
        """What the loss reads of each example besides its vectors; `reads`: how often each text is read."""
        numbers, labels = dict[str, int](), dict[str, NDArray[Any]]()
        if self.objective.compares_examples and len({len(each.texts) for each in examples}) == 1:
            rows = [[numbers.setdefault(text, len(numbers)) for text in each.texts] for each in examples]
            labels[TEXT_NUMBER] = np.asarray(rows, dtype=np.int64).repeat(reads, axis=1)
        target = self._targets(examples)
        if target is not None:
            labels[LABEL] = target
        return labels

    @property
    def _prompts(self) -> tuple[str | None, str | None]:
        """The prompts of an example's first text and of its others; None: the default one."""
        return (self.reading.query_prompt, self.reading.document_prompt) if self.reading.has_roles else (None, None)

    def check_training(self, examples: Sequence[SentenceExample]) -> None:
        """Check that the loss can be computed for these examples.

        Raises:
            UsageError: the loss needs a different number of texts, or labels that are missing.
            DataError: an example has a different number of texts, or a label of the wrong form.
        """
        name, (least, most) = getattr(self.objective, "name", ""), self.objective.texts
        count = len(examples[0].texts)
        odd = next((each for each in examples if len(each.texts) != count), None)
        if odd is not None:
            raise DataError(f"example {odd.id}: has {len(odd.texts)} texts, but the first example has {count}")
        if count < least or (most is not None and count > most):
            wanted = f"{least}" if least == most else f"{least} or more" if most is None else f"{least} to {most}"
            raise UsageError(
                f"embedding.loss: {name} needs {wanted} texts per example, but there are {count}; name their columns"
                " with --text, --text-pair and --negatives, or choose another loss"
            )
        if self.reading.has_roles and count == 1:
            raise UsageError(
                "embedding.query_prompt and embedding.document_prompt: are for examples of a query and documents, but"
                " each example has one text; leave them out"
            )
        reads = self.objective.wanted
        if reads == "vectors" and not self.has_teacher:
            raise UsageError(f"embedding.loss: {name} needs a teacher; name it with embedding.teacher=MODEL")
        if self.has_teacher:
            return
        if reads is not None and any(each.label is None for each in examples):
            needed, other = f"a {reads}", ""
            if reads == "margins":
                needed, other = "margins", ", let a teacher compute them (embedding.teacher=MODEL)"
            raise UsageError(
                f"embedding.loss: {name} needs {needed} for each example, but an example has none; name its column"
                f" with --label{other}, or choose another loss, such as multiple_negatives"
            )
        if reads is None and count > 1 and len({str(each.label) for each in examples}) > 1:
            log.warning(
                "embedding.loss: %s does not read labels, so all %s examples count as texts that belong together;"
                " choose cosine or cosent for scores, softmax for classes, or leave out those that do not",
                name,
                f"{len(examples):,}",
            )
        self._targets(examples, strict=True)

    def _targets(self, examples: Sequence[SentenceExample], *, strict: bool = False) -> NDArray[Any] | None:
        """The loss's targets from the labels; None if the labels are of another form.

        Raises:
            DataError: the labels are of another form, and `strict` is set.
        """
        wanted = self.objective.wanted
        if wanted is None or wanted == "vectors" or self.has_teacher or not examples:
            return None
        try:
            if wanted == "class":
                return label_ids([(each.id, class_name(each)) for each in examples], self.classes_of_loss)
            if wanted == "score":
                return np.asarray([self._score(each) for each in examples], dtype=np.float32)
            return np.asarray([_margins(each) for each in examples], dtype=np.float32)
        except DataError:
            if strict:
                raise
            return None

    def _score(self, example: SentenceExample) -> float:
        score = number_of(example)
        if not self.objective.compares_bounded_scores:
            return score
        scaled = score / self.largest_score
        if not -1 <= scaled <= 1:
            raise DataError(
                f"example {example.id}: the score {score:g} divided by {self.largest_score:g} is not between -1 and 1"
                " like a cosine; set embedding.largest_score to the largest possible score, such as 5"
            )
        return scaled

    def modules(self, model: HeadedModel, seed: int, directory: Path | None = None) -> dict[str, nn.Module]:
        """The module that the loss trains along with the encoder, initialised from the seed like torch's layers, apart
        from what the initial model's directory has for it, and copies of the form's maps.

        Raises:
            UsageError: Matryoshka's widths do not fit.
        """
        width = self.vector_width(model.encoder)
        if self.matryoshka is not None:
            self.matryoshka.check(self.objective, width)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            module = self.objective.module(width, len(self.classes_of_loss), model)
        own = self.copied_maps()
        if module is None:
            return own
        if directory is not None:
            self.objective.take_weights_of(directory, module)
        return {**own, MODULE: module}

    def copied_maps(self) -> dict[str, nn.Module]:
        """The form's maps as a module to train; none if it has none."""
        return {MAPS: nn.Sequential(*copy.deepcopy(self.form.maps))} if self.form.maps else {}

    def corrupted(self, batch: TaskBatch, items: Int64Array, *, seed: int, epoch: int) -> TaskBatch:
        return without_words(batch, items, self.objective, Draw(seed, "tsdae"), epoch)

    def count(self, batch: TaskBatch) -> int:
        if WHOLE in batch.example_labels:
            return predicted_tokens(batch.example_labels[WHOLE])
        return self.objective.count(batch.num_examples)

    def logits(self, model: HeadedModel, hidden_TD: Tensor, batch: TaskBatch) -> Tensor:
        """The vectors of each example's texts, (I, A, E), in float32."""
        pooled_BE = pooled(model, self.pooling, hidden_TD.float(), batch.packed)
        if MAPS in model.companions:
            pooled_BE = model.companions[MAPS](pooled_BE).float()
        if self.normalise:
            pooled_BE = functional.normalize(pooled_BE, dim=-1)
        return pooled_BE.view(batch.num_examples, -1, pooled_BE.shape[-1])

    def loss_with(self, model: HeadedModel, logits: Tensor, batch: TaskBatch) -> LossSum:
        labels = batch.example_labels
        vectors = TextVectors(logits, labels.get(LABEL), labels.get(TEXT_NUMBER), labels.get(WHOLE), model)
        module: nn.Module | None = model.companions[MODULE] if MODULE in model.companions else None  # noqa: SIM401  # a ModuleDict has no get
        if self.matryoshka is not None:
            return self.matryoshka.loss(self.objective, vectors, module)
        return self.objective.loss(vectors, module)

    def loss_of(self, logits: Tensor, batch: TaskBatch) -> LossSum:
        labels = batch.example_labels
        return self.objective.loss(TextVectors(logits, labels.get(LABEL), labels.get(TEXT_NUMBER)))

    def decode(self, model: HeadedModel, hidden_TD: Tensor, batch: TaskBatch) -> list[Any]:
        """The vectors of each example's texts, (A, E)."""
        found = super().decode(model, hidden_TD, batch)
        if self.form.kept is None:
            return found
        cut = shortening(self.form.kept, sparse=is_sparse(self.pooling))
        return [cut(torch.from_numpy(each)).numpy() for each in found]

    def predictions(
        self, examples: Sequence[SentenceExample], features: Features, outputs: Sequence[NDArray[Any]]
    ) -> list[Prediction]:
        return predicted(examples, outputs, self.similarity)

    def gold(self, example: SentenceExample) -> Any:
        return reference(example)

    def comparable(self, predictions: Sequence[Prediction], examples: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """As strings: a cosine is not on the scale of the scores, so the mean score is no baseline."""
        guesses, gold = self.metric_inputs(predictions, examples)
        return [f"{each:.6f}" if isinstance(each, float) else each for each in guesses], [str(each) for each in gold]

    def write_files(self, directory: Path, model: HeadedModel, *, max_tokens: int) -> None:
        """Add the files of a sentence embedder to the directory of the model's encoder."""
        write_sentence_files(
            directory,
            width=model.encoder.vocab_size if is_sparse(self.pooling) else model.encoder.width,
            pooling=self.pooling,
            normalise=self.normalise,
            max_tokens=max_tokens,
            reading=self.reading,
            similarity=self.similarity,
            kept=self.form.kept,
            maps=list(model.companions[MAPS]) if MAPS in model.companions else (),  # type: ignore[call-overload]  # a Sequential of `Dense`
        )

    def fitting_metrics(self, examples: Sequence[SentenceExample]) -> tuple[str, ...]:
        """The scores for examples to evaluate: correlations for scored pairs, else an accuracy.

        Raises:
            UsageError: they cannot be evaluated.
        """
        kind = compared(examples)
        if kind not in METRICS_OF:
            raise UsageError(
                "task.dev: vectors are evaluated on pairs with a score, pairs without a label, or triplets, but these"
                " examples are none of them; give scored pairs, such as --dev stsb (with --data-dir)"
            )
        return METRICS_OF[kind]


def class_name(example: SentenceExample) -> str:
    """The name of an example's class, which may be a whole number."""
    label = example.label
    if isinstance(label, float) and label.is_integer():
        return str(int(label))
    if isinstance(label, str):
        return label
    raise DataError(f"example {example.id}: the label is {label!r}; expected the name of a class")


def number_of(example: SentenceExample) -> float:
    """An example's score.

    Raises:
        DataError: its label is not a number.
    """
    if isinstance(example.label, int | float):
        return float(example.label)
    raise DataError(f"example {example.id}: the label is {example.label!r}; the loss needs a score")


def _margins(example: SentenceExample) -> list[float]:
    """The margin of the positive over each negative; computed from scores, the positive's first, if there is one more
    number."""
    label, negatives = example.label, len(example.texts) - 2
    if isinstance(label, int | float):
        label = (float(label),)
    if isinstance(label, tuple) and len(label) == negatives + 1 and negatives:
        label = tuple(label[0] - each for each in label[1:])
    if not isinstance(label, tuple) or len(label) != negatives:
        raise DataError(f"example {example.id}: the label is {example.label!r}; expected {negatives} margins")
    return list(label)
