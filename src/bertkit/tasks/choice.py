"""Multiple choice: which of several endings is right, as in SWAG and RACE.

Devlin et al. 2019, BERT, arXiv:1810.04805, section 4.4: each ending forms one sequence with the context, a vector
gives each sequence one number, and a softmax over the endings chooses. If a passage is too long, its end is cut, never
the question (ALBERT's and XLNet's readers for RACE). A blank `_` in the question is filled with the ending.

Shapes: T packed tokens, B sequences, I examples, C endings, D width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from bertkit.models.headed import HeadedModel
from bertkit.models.labels import Labels
from bertkit.models.loss_sum import LossSum
from bertkit.settings import Settings
from bertkit.tasks.base import EncodedTokenCounts, Features, FeatureWriter, Prediction, Task, TaskBatch
from bertkit.tasks.encoding import SequenceEncoder
from bertkit.tasks.examples import ChoiceExample

LABEL = "label"
BLANK = "_"


class ChoiceSettings(Settings):
    """How endings are encoded."""

    max_question_tokens: int = Field(
        128, ge=1, description="Maximum length of question and ending together, in tokens; the rest is cut."
    )


class Choice(Task):
    """Choose one of an example's endings; the number of endings may differ between examples."""

    head: ClassVar[str] = "multiple_choice"
    metric_of: ClassVar[Mapping[str, str]] = {"accuracy": "accuracy"}
    constant_is_baseline: ClassVar[bool] = True

    def __init__(self, metrics: Sequence[str], settings: ChoiceSettings) -> None:
        super().__init__(Labels.unnamed(), metrics)
        self.settings = settings

    def encode(self, examples: Sequence[ChoiceExample], encoder: SequenceEncoder) -> Features:
        contexts = encoder.ids_in_turn(example.context for example in examples)
        endings = encoder.ids_in_turn(completed(each.question, end) for each in examples for end in each.endings)
        writer = FeatureWriter()
        room = encoder.room(2)
        longest = min(self.settings.max_question_tokens, room - 1)
        cut = dropped = 0
        for number, example in enumerate(examples):
            context, lost = next(contexts), 0
            for ending in islice(endings, len(example.endings)):
                second = ending[:longest]
                first = context[: room - len(second)]
                writer.add(*encoder.sequence(first, second, example=example.id))
                lost += len(ending) - len(second) + len(context) - len(first)
            writer.close(number)
            cut += lost > 0
            dropped += lost
        labelled = bool(examples) and all(example.label is not None for example in examples)
        labels = {LABEL: np.asarray([example.label for example in examples], dtype=np.int64)} if labelled else {}
        return writer.finish(EncodedTokenCounts(len(examples), 0, 0, cut, dropped), labels, labelled=labelled)

    def logits(self, model: HeadedModel, hidden_TD: Tensor, batch: TaskBatch) -> Tensor:
        """(I, C) in float32; minus infinity for endings that an example does not have."""
        logits_B = model.logits(self.head, hidden_TD, batch.packed).float()[:, 0]
        count_I = torch.bincount(batch.example_B)
        first_I = torch.cumsum(count_I, 0) - count_I
        place_B = torch.arange(batch.example_B.numel(), device=logits_B.device) - first_I[batch.example_B]
        logits_IC = logits_B.new_full((count_I.numel(), int(count_I.max())), -torch.inf)
        return logits_IC.index_put((batch.example_B, place_B), logits_B)

    def loss_of(self, logits: Tensor, batch: TaskBatch) -> LossSum:
        return LossSum.cross_entropy(logits, batch.example_labels[LABEL])

    def decode(self, model: HeadedModel, hidden_TD: Tensor, batch: TaskBatch) -> list[NDArray[Any]]:
        """(C,) for each example, its own endings only."""
        counts = torch.bincount(batch.example_B).tolist()
        rows = self.logits(model, hidden_TD, batch).cpu().numpy()
        return [row[:count] for row, count in zip(rows, counts, strict=True)]

    def predictions(
        self, examples: Sequence[ChoiceExample], features: Features, outputs: Sequence[NDArray[Any]]
    ) -> list[Prediction]:
        return [
            Prediction(example.id, int(logits_C.argmax()), torch.softmax(torch.from_numpy(logits_C), 0).tolist())
            for example, logits_C in zip(examples, outputs, strict=True)
        ]

    def comparable(
        self, predictions: Sequence[Prediction], examples: Sequence[ChoiceExample]
    ) -> tuple[list[Any], list[Any]]:
        """The endings by the names that they have in the file: numbers from 0, or letters."""
        guesses, gold = self.metric_inputs(predictions, examples)
        lettered = any(example.lettered for example in examples)

        def names(numbers: list[int]) -> list[str]:
            return [chr(ord("A") + number) if lettered else str(number) for number in numbers]

        return names(guesses), names(gold)


def completed(question: str, ending: str) -> str:
    """The question with its blank filled in, or followed by the ending."""
    if BLANK in question:
        return question.replace(BLANK, ending, 1)
    return f"{question} {ending}" if question else ending
