"""Base of the objectives: a corruption of samples in a data worker, and a loss on the encoder's states in the step.

An objective declares the kind of its target, the states that it reads, and the head that predicts. `show-batch`, the
cost model, the metrics and the forward pass rely on these declarations and never name an objective.

A loss is a sum and a count, never a mean: the step divides once, by the count over all micro-batches and ranks, so
gradient accumulation and world size do not change it. Sibling forward.py decides which model computes the states.

Shapes: T packed tokens, B sequences, D width, M targets, K classes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal, Self

from pydantic import Field
from torch import Tensor
from torch.nn import functional

from bertkit.data.batch import PackedBatch
from bertkit.data.config import DataConfig
from bertkit.data.random import Draw
from bertkit.data.samples import Samples, Targets, Vocabulary
from bertkit.data.shards import TokenShards
from bertkit.errors import UsageError
from bertkit.models.encoder import EncoderConfig
from bertkit.models.headed import HeadedModel, summarised_token
from bertkit.models.loss_sum import LossSum
from bertkit.objectives.schedule import LinearRate
from bertkit.settings import Settings, UnreadKey
from bertkit.text.tokenizer import Tokenizer

Target = Literal["token", "class", "number", "mark"]
"""What is predicted: the id of a token, one of several classes, a number, or a binary mark."""

States = Literal["targets", "tokens", "sequences"]
"""The states that a loss reads: those at its targets (`Targets.index_M`), of all tokens, or one of each sequence."""

_PLAN_POINTS = 16
"""Number of points in a part of the run over which a changing objective's expected count is averaged."""


class Objective(Settings, ABC):
    """One term of the loss. An objective consists of its settings: plain data that is sent to workers."""

    weight: float = Field(1.0, ge=0, description="Weight of this term's mean in the total loss.")

    term: ClassVar[str]
    """Its name in recipes and metrics, and the name of its targets and labels in a batch."""

    target: ClassVar[Target | None] = None
    """What it predicts. Token targets are in `batch.targets[term]`: in `id_M`, a number in `columns["number"]`.
    Sequence labels are in `batch.labels[term]`. None: the batch has no target, as when a teacher provides it."""

    states: ClassVar[States] = "tokens"
    """The states that its loss reads."""

    outputs: ClassVar[int] = 0
    """Number of outputs of its own head, which is named like the term and which registration adds to every family: 1
    for a mark or a number, K for a class. 0: it uses existing heads, see `heads`."""

    label_names: ClassVar[tuple[str, ...]] = ()
    """The names of its classes, or of the two values of its mark."""

    in_place: ClassVar[bool] = False
    """Whether a target is the text's token at the position of the state, not at another position."""

    change: ClassVar[str] = "replaced"
    """The word that `show-batch` displays at its targets that are `in_place`; other changed tokens are `replaced`."""

    is_shown: ClassVar[bool] = True
    """Whether `show-batch` can show its targets; false if they belong to a text of other tokens."""

    is_random: ClassVar[bool] = True
    """Whether its corruption is random, so that epochs or static copies differ."""

    has_accuracy: ClassVar[bool] = True
    """Whether its predictions can be right or wrong; for a number or a distance there is only the loss."""

    fills_masks: ClassVar[bool] = False
    """Whether it trains the masked-LM head to predict the text's token at a [MASK]. If so, evaluations report a
    perplexity, a pseudo-perplexity and examples of filled masks."""

    has_perplexity: ClassVar[bool] = False
    """Whether the exponential of its mean loss is a perplexity of the text, which evaluations report under its name."""

    learnt_by: ClassVar[str | None] = None
    """The companion that is trained on it in place of the model, if the model has one of that name."""

    rank: ClassVar[int] = 0
    """Objectives corrupt a sample in ascending rank: one of higher rank chooses among the remaining tokens."""

    @property
    def leaves_no_tokens(self) -> bool:
        """Whether it takes all tokens of every sample and leaves none to objectives of higher rank."""
        return False

    def unread_keys(self, recipe: Any) -> Iterator[UnreadKey]:
        taking = [each for each in getattr(recipe, "objectives", ()) if each.leaves_no_tokens]
        if taking and self.rank > taking[0].rank and self.target in ("token", "mark"):
            why = f"objective.{taking[0].term} takes all sequences, so no token is left to predict"
            yield UnreadKey("", why, f"lower objective.{taking[0].term}.share")

    @property
    def draws(self) -> bool:
        """`is_random`, given its settings."""
        return self.is_random

    @property
    def heads(self) -> tuple[str, ...]:
        """The heads of the model that it uses, by their names in `bertkit.models.heads.HEAD_KINDS`."""
        return (self.term,)

    @property
    def scoring_rule(self) -> str | None:
        """The rule of `bertkit.models.scoring.rules` for scoring text with a model that it trains; None: that of
        another objective."""
        return None

    def errors(self, data: DataConfig, model: EncoderConfig) -> list[str]:
        """Why it cannot be trained on these data or with this model: one sentence each, with key and remedy."""
        return []

    def combination_errors(self, objectives: Sequence[Objective]) -> list[str]:
        """Why it cannot be combined with these objectives (including itself): one sentence each, with key and fix."""
        return []

    def prepared(self, tokenizer: Tokenizer, shards: TokenShards) -> Self:
        """The objective with what it needs from the vocabulary and the corpus, computed once before the first step.

        Raises:
            UsageError: if the tokenizer does not have what it needs.
            DataError: if a file in its settings is invalid.
        """
        return self

    def at(self, progress: float) -> Self:
        """The objective at a point of the run; itself if nothing changes during the run.

        Args:
            progress: share of the run's steps that have been taken, from 0 to 1: a pure function of the step.
        """
        changing = {name: value.at(progress) for name, value in self if isinstance(value, LinearRate)}
        return self.model_copy(update=changing) if changing else self

    def corrupt(self, samples: Samples, vocabulary: Vocabulary, draw: Draw) -> Samples:
        """Corrupt samples and mark targets; the default changes nothing."""
        return samples

    @abstractmethod
    def expected_count(self, length: int) -> float:
        """The number of predictions in a sequence of this many tokens, for estimates."""

    def sample_tokens(self, length: int) -> float:
        """The number of tokens of a sample after corruption, given the number before, for estimates."""
        return float(length)

    def mean_expected_count(self, length: int, start: float, end: float) -> float:
        """The mean of `expected_count` over a part of the run, given by the progress at both ends."""
        if self.at(start) is self:
            return self.expected_count(length)
        points = [start + (end - start) * (number + 0.5) / _PLAN_POINTS for number in range(_PLAN_POINTS)]
        return sum(self.at(progress).expected_count(length) for progress in points) / _PLAN_POINTS

    def count(self, batch: PackedBatch) -> int:
        """The number of predictions in a micro-batch, known before the step."""
        if self.states == "targets":
            return batch.targets[self.term].count
        return batch.num_tokens if self.states == "tokens" else batch.num_sequences

    def share_of_sequences(self, data: DataConfig) -> float:
        """The share of the sequences in which it predicts, for estimates; `expected_count` is that of one of these."""
        return 1.0

    def head_states(self, predictions: float, tokens: float, sequences: float, vocab_size: int) -> float:
        """The number of states that its token and vocabulary heads read, given these numbers, for FLOPs; where a step
        computes the logits of some words only, the share of the states for which all would cost as much."""
        return predictions

    def reads(self, model: HeadedModel, batch: PackedBatch) -> Tensor | None:
        """The tokens whose states its loss reads, in any order and possibly repeated; None if it reads all."""
        if self.states == "targets":
            return batch.targets[self.term].index_M
        summary = "mean" if self.states == "tokens" else model.plans[self.heads[0]].summary
        return None if summary == "mean" else summarised_token(summary, batch)

    def expected_reads(self, model: HeadedModel, predictions: float) -> float | None:
        """The number of tokens of a sequence that `reads` returns if it has this many predictions, for estimates; None
        if it reads all."""
        if self.states == "targets":
            return predictions
        summary = "mean" if self.states == "tokens" else model.plans[self.heads[0]].summary
        return None if summary == "mean" else 1.0

    @abstractmethod
    def loss(self, model: HeadedModel, hidden_TD: Tensor, batch: PackedBatch) -> LossSum:
        """The loss term of one micro-batch."""

    def figures(self, counters: Mapping[str, int], count: int) -> dict[str, float]:
        """Figures that an evaluation reports in addition to loss and accuracy, by name.

        Args:
            counters: of its losses, summed over all micro-batches.
            count: number of predictions.
        """
        return {}

    def described(self, targets: Targets, tokenizer: Tokenizer) -> list[str | None]:
        """Its token targets as text, for `show-batch`; None if there is nothing to show, such as for an unset mark."""
        if self.target == "token":
            return [tokenizer.token(target) for target in targets.id_M.tolist()]
        if self.target == "number":
            return [f"{number:.4g}" for number in targets.columns["number"].tolist()]
        names = dict(enumerate(self.label_names))
        shown: list[str | None] = [names.get(target, str(target)) for target in targets.id_M.tolist()]
        if self.target == "mark":
            shown = [name if mark else None for name, mark in zip(shown, targets.id_M.tolist(), strict=True)]
        return shown


class TokenPrediction(Objective):
    """An objective that predicts tokens, each from the state at its index, with a head over the vocabulary."""

    z_loss: float = Field(
        0.0,
        ge=0,
        description="In training, weight of the mean squared logarithm of the softmax's denominator (z-loss), which"
        " is added to the term's mean; GPT-BERT's is 1e-4.",
    )

    later_fields: ClassVar[frozenset[str]] = frozenset({"z_loss"})
    target: ClassVar[Target | None] = "token"
    states: ClassVar[States] = "targets"

    @property
    def heads(self) -> tuple[str, ...]:
        """The masked-LM head, which objectives of this kind share."""
        return ("masked_lm",)

    def errors(self, data: DataConfig, model: EncoderConfig) -> list[str]:
        (head,), known = self.heads, model.all_heads()
        if head in known:
            return []
        remedy = "use another family, such as bert"
        if "causal_lm" in known and model.causal_attention:
            remedy = 'use a recipe of this family, or --set "objective=[{causal_lm: {head: causal_lm}}]"'
        return [f"objective.{self.term}: model.family {model.model_type!r} has no head for {head}; {remedy}"]

    def require_mask(self, tokenizer: Tokenizer, remedy: str = "") -> None:
        """Raise UsageError if the tokenizer has no [MASK]; `remedy` is one in addition to another tokenizer."""
        if "mask" not in tokenizer.roles:
            raise UsageError(
                f"objective.{self.term} needs a [MASK] token, but the tokenizer has none (it has:"
                f" {', '.join(tokenizer.roles.values()) or 'no special token'}); use another tokenizer{remedy}"
            )

    def loss(self, model: HeadedModel, hidden_TD: Tensor, batch: PackedBatch) -> LossSum:
        """Summed cross-entropy at the targets, in nats; the vocabulary projection is computed only there."""
        targets = batch.targets[self.term]
        (head,) = self.heads
        projection = model.projection(head, hidden_TD.index_select(0, targets.index_M))
        return LossSum.of_words(projection, targets.id_M, z_loss=self.z_loss if model.training else 0.0)


class SequenceClassification(Objective):
    """An objective that predicts one of several classes per sequence, from the layout: `batch.labels[term]`."""

    target: ClassVar[Target | None] = "class"
    states: ClassVar[States] = "sequences"
    is_random: ClassVar[bool] = False

    def expected_count(self, length: int) -> float:
        return 1.0

    def loss(self, model: HeadedModel, hidden_TD: Tensor, batch: PackedBatch) -> LossSum:
        """Summed cross-entropy over the batch's sequences, in nats."""
        (head,) = self.heads
        return LossSum.cross_entropy(model.logits(head, hidden_TD, batch), batch.labels[self.term])


class TokenDetection(Objective):
    """An objective that predicts a binary mark of each token, or of each target, with a head of one output."""

    target: ClassVar[Target | None] = "mark"
    states: ClassVar[States] = "targets"

    def expected_count(self, length: int) -> float:
        """All tokens but [CLS] and [SEP]."""
        return max(1.0, length - 2.0)

    def marks_M(self, batch: PackedBatch) -> Tensor:
        """Whether each token that it reads has the mark, bool."""
        return batch.targets[self.term].id_M > 0

    def logits_M(self, model: HeadedModel, hidden_TD: Tensor, batch: PackedBatch) -> Tensor:
        """The log-odds of the mark of each token that it reads, in float32."""
        index_M = self.reads(model, batch)
        hidden_MD = hidden_TD if index_M is None else hidden_TD.index_select(0, index_M)
        (head,) = self.heads
        return model.token_logits(head, hidden_MD).squeeze(-1).float()

    def loss(self, model: HeadedModel, hidden_TD: Tensor, batch: PackedBatch) -> LossSum:
        """Summed binary cross-entropy, in nats; a positive logit predicts the mark.

        Counters: tokens that are `marked`, that are `predicted` to be marked, and that are `both`.
        """
        logits_M = self.logits_M(model, hidden_TD, batch)
        marks_M = self.marks_M(batch)
        loss = functional.binary_cross_entropy_with_logits(logits_M, marks_M.to(logits_M.dtype), reduction="sum")
        predicted_M = logits_M.detach() > 0
        counters = {"marked": marks_M.sum(), "predicted": predicted_M.sum(), "both": (predicted_M & marks_M).sum()}
        return LossSum(loss, self.count(batch), (predicted_M == marks_M).sum(), counters)

    def figures(self, counters: Mapping[str, int], count: int) -> dict[str, float]:
        """Figures that put the accuracy in context if marks are rare.

        `baseline/TERM` is the accuracy of predicting the more common value for all tokens. Precision and recall are
        those of the mark; they are 0 if it is never predicted or never present.
        """
        marked, predicted, both = (counters.get(name, 0) for name in ("marked", "predicted", "both"))
        return {
            f"baseline/{self.term}": max(marked, count - marked) / max(1, count),
            f"precision/{self.term}": both / max(1, predicted),
            f"recall/{self.term}": both / max(1, marked),
        }


class CompanionObjective(Objective):
    """An objective that needs a second model, a companion. The companion is trained on the objectives with its name in
    `learnt_by`; it processes each batch first and produces the batch that the model reads."""

    companion: ClassVar[str]
    """The companion's name among `HeadedModel.companions`."""

    @property
    @abstractmethod
    def companion_settings(self) -> Mapping[str, object]:
        """The settings, by key, that define the companion; all stages must agree on them."""

    @property
    def takes_over(self) -> bool:
        """Whether the model starts from the companion's weights, which are then not trained."""
        return False

    @abstractmethod
    def build_companion(self, model: HeadedModel, *, pad_id: int = 0) -> HeadedModel:
        """The companion of a model, with uninitialised weights except those that it shares with the model.

        Raises:
            UsageError: if it cannot be built.
        """

    @abstractmethod
    def filled(self, companion: HeadedModel, hidden_TD: Tensor, batch: PackedBatch) -> PackedBatch:
        """The batch that the model reads, given the companion's states of the batch."""
