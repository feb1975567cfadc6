"""A training batch of a task in readable form: the examples of an update, their tokens and labels.

The examples of an update are a pure function of the recipe, the data and the step (task_order.py), so any step of any
run can be shown. Sibling of pretraining/show_batch.py; a distillation on a task is shown as its student reads it.
"""

from __future__ import annotations

from typing import Any

from bertkit.errors import UsageError
from bertkit.finetuning.arguments import FinetuneArguments
from bertkit.finetuning.data import Prepared
from bertkit.finetuning.task_order import TaskOrder
from bertkit.pretraining.show_batch import ShownBatch, ShownSequence, ShownToken
from bertkit.tasks.classification import LABEL
from bertkit.tasks.examples import ChoiceExample, SentenceExample
from bertkit.tasks.tagging import TAG


def show_task_batch(arguments: FinetuneArguments, *, step: int, sequences: int) -> ShownBatch:
    """The batch of a step.

    Args:
        arguments: with a recipe, or that of a run.
        step: the run's update, counted from 1 as in metrics.jsonl.
        sequences: how many sequences are shown; an example is always shown with all its sequences.

    Raises:
        UsageError: no such recipe, or a step that the run does not have.
        DataError: invalid data or model.
    """
    recipe = arguments.new_recipe()
    prepared = [arguments.prepare(each) for each in recipe.alone]
    assert recipe.optimisation.epochs is not None
    order = TaskOrder.of(recipe, prepared)
    steps = order.steps(recipe.optimisation.epochs, recipe.optimisation.steps)
    if not 1 <= step <= steps:
        raise UsageError(f"--step {step}: {recipe.name} has steps 1 to {steps:,}; give one of them")
    own, items = prepared[order.task(step - 1)], order.items(step - 1).tolist()
    counts = own.train.features.example_starts_I1
    shown: list[ShownSequence] = []
    for item in items:
        if len(shown) < sequences:
            shown += _sequences(own, item, order.epoch(step - 1))
    name = recipe.name if len(prepared) == 1 else f"{recipe.name} ({own.spec.name})"
    return ShownBatch(name, step, 0, shown, sum(int(counts[item + 1] - counts[item]) for item in items))


def _sequences(prepared: Prepared, item: int, epoch: int) -> list[ShownSequence]:
    """The sequences of one item, each with the item's labels."""
    features, tokenizer = prepared.train.features, prepared.tokenizer
    sample = int(features.origin_I[item])
    tags_T = features.token_labels.get(TAG)
    sequences = []
    for sequence in range(features.example_starts_I1[item], features.example_starts_I1[item + 1]):
        place = slice(features.starts_S1[sequence], features.starts_S1[sequence + 1])
        words = [tokenizer.token(token) for token in features.ids_T[place].tolist()]
        tags = [-1] * len(words) if tags_T is None else tags_T[place].tolist()
        names = prepared.task.labels.names
        predicts: list[dict[str, str]] = [{TAG: names[tag]} if tag >= 0 else {} for tag in tags]
        tokens = [ShownToken(word, predicts=each) for word, each in zip(words, predicts, strict=True)]
        labels = {name: rows[item] for name, rows in features.example_labels.items()}
        label_names = {name: _label_name(prepared, sample, name, label, words) for name, label in labels.items()}
        numbers = {name: label.item() for name, label in labels.items() if not label.ndim}
        sequences.append(
            ShownSequence(
                epoch, sample, False, numbers, {name: each for name, each in label_names.items() if each}, tokens
            )
        )
    return sequences


def _label_name(prepared: Prepared, sample: int, name: str, label: Any, words: list[str]) -> str:
    """A label as text: a class's name, an ending's text, a span's token; "" for a number."""
    example = prepared.train.examples[sample]
    if isinstance(example, ChoiceExample):
        return example.endings[int(label)]
    if isinstance(example, SentenceExample):
        return example.label if name == LABEL and isinstance(example.label, str) else ""
    if name != LABEL:
        return words[int(label)]
    if prepared.spec.kind == "regression":
        return ""
    names = prepared.task.labels.names
    return ", ".join(each for each, holds in zip(names, label, strict=True) if holds) if label.ndim else names[label]
