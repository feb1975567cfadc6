"""One prediction explained, for `probe attribution`: what is asked, and by which tokens the answer is had.

Sundararajan et al. 2017, arXiv:1703.01365; Abnar and Zuidema 2020, arXiv:2005.00928; the methods are in
probes/explanations.py. Sibling attribution.py looks at hidden states instead of answers.

Shapes: n tokens of the text, E width of the embeddings, R copies of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bertkit.data.batch import PackedBatch
from bertkit.errors import UsageError
from bertkit.evaluation.figures import new_figure, plain
from bertkit.evaluation.loaded_model import LoadedModel
from bertkit.models.headed import HeadedModel
from bertkit.probing.attribution.explanations import (
    GRADIENT_METHODS,
    METHODS,
    ROLLOUT,
    Score,
    Text,
    embeddings,
    gradients,
    integrated_gradients,
    rollout,
    text_maps,
)
from bertkit.probing.run import Finding
from bertkit.tasks.encoding import SequenceEncoder
from bertkit.text.tokenizer import Tokenizer
from bertkit.training.engine import Engine

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Baseline = Literal["mask", "pad", "zero"]
Floats = NDArray[np.float64]
MASKED, CLASSES = "masked_lm", "sequence_classification"

DEFINITIONS = {
    "prediction": "the probability of the target (the most probable one where none is given) at the text's one mask, or"
    " of a class; a regression's output itself",
    "integrated_gradients": "(x - x0) times the mean gradient of the prediction on the line from baseline x0 to word"
    " embeddings x, summed over dimensions, by Gauss and Legendre's rule (Sundararajan et al. 2017); `gap` is what they"
    " miss of F(x) - F(x0). In the baseline every token of the text is the mask, the padding or a vector of zeros;"
    " special tokens and the mask that is asked about stay",
    "input_x_gradient": "x times the gradient at x, summed over dimensions",
    "saliency": "Euclidean norm of the gradient",
    "attention_rollout": "row of the token that is read in the product over layers of (A + I) / 2, A the mean of the"
    " heads' maps (Abnar and Zuidema 2020); mean of the rows where the head reads the mean of all states",
}


@dataclass(frozen=True)
class Question:
    """What is explained.

    Attributes:
        written: the text as it was given.
        text: as the model reads it.
        tokens: as the vocabulary writes them.
        fixed_n: tokens that are the same in the baseline.
        head: that answers; None for a model without one, whose attention alone can be looked at.
        read: the token whose state is read; None where it is the mean of all.
        asked: the target by name; None for the most probable one.
    """

    written: str
    text: Text
    tokens: tuple[str, ...]
    fixed_n: NDArray[np.bool_]
    head: str | None
    read: int | None
    asked: str | None = None


@dataclass(frozen=True)
class Explanation:
    """A prediction and what it rests on.

    Attributes:
        question: what was asked.
        target: what is predicted, by name; None without a head.
        score: F; None without a head.
        baseline_score, gap: of integrated gradients, where they were asked for.
        values: of each method, (n,).
    """

    question: Question
    target: str | None
    score: float | None
    baseline_score: float | None
    gap: float | None
    values: dict[str, Floats] = field(default_factory=dict)


def wanted_methods(asked: Sequence[str]) -> tuple[str, ...]:
    """The methods of these names, all where there are none.

    Raises:
        UsageError: there is no such method.
    """
    for name in asked:
        if name not in METHODS:
            near = get_close_matches(name, METHODS, n=1)
            hint = f"did you mean {near[0]}?" if near else f"one of: {', '.join(METHODS)}"
            raise UsageError(f"--method {name}: no such method; {hint}")
    return tuple(name for name in METHODS if name in asked) if asked else METHODS


def make_question(subject: LoadedModel, written: str, asked: str | None) -> Question:
    """What a text asks of a model: the word at its mask, or its class.

    Raises:
        UsageError: no mask or several where one is needed, a target that is none, or a text that is too long or empty.
    """
    model, tokenizer = subject.model, subject.tokenizer
    mask = tokenizer.token(tokenizer.mask_id) if "mask" in tokenizer.roles else None
    masks = 0 if mask is None else written.count(mask)
    head = next((name for name in (CLASSES, MASKED) if name in model.head_names), None)
    head = MASKED if masks and MASKED in model.head_names else head
    if head == MASKED and masks != 1:
        raise UsageError(f"--text {written[:60]!r} has {masks} times {mask}; write it once, where a word is predicted")
    if head is None and asked is not None:
        raise UsageError(f"--target {asked}: the model has no {MASKED} or {CLASSES} head, so it predicts nothing")
    config = subject.config
    parts = tokenizer.encode_batch(written.split(mask) if masks and mask is not None else [written])
    body: list[int] = []
    for number, part in enumerate(parts):
        body += [tokenizer.mask_id] * (number > 0) + part
    sequences = SequenceEncoder(tokenizer, max_tokens=config.max_tokens, token_types=config.reads_token_types)
    if not 1 <= len(body) <= sequences.room(1):
        raise UsageError(f"--text {written[:60]!r}: {len(body)} tokens, expected 1 to {sequences.room(1)}")
    ids, types = sequences.sequence(body, example=written[:60])
    fixed_n = np.ones(len(ids), dtype=np.bool_)
    before = sequences.single.before
    fixed_n[before : before + len(body)] = False
    read: int | None = 0
    if head == MASKED:
        read = ids.index(tokenizer.mask_id)
        fixed_n[read] = True
    elif head is not None:
        summary = model.plans[head].summary
        read = {"first": 0, "last": len(ids) - 1, "mean": None}[summary]
    if head is not None and asked is not None:
        _target_number(model, tokenizer, head, asked)
    tokens = tuple(tokenizer.token(i) for i in ids)
    return Question(written, Text(tuple(ids), tuple(types)), tokens, fixed_n, head, read, asked)


def _target_number(model: HeadedModel, tokenizer: Tokenizer, head: str, asked: str) -> int:
    """The output that a target is.

    Raises:
        UsageError: a word of several tokens, or no class of this name.
    """
    if head == CLASSES:
        if asked not in model.labels.names:
            raise UsageError(f"--target {asked}: no such class; the model has {', '.join(model.labels.names)}")
        return model.labels.names.index(asked)
    # A word inside a text is behind a space, which some vocabularies write into the piece.
    for text in (f" {asked}", asked):
        (ids,) = tokenizer.encode_batch([text])
        if len(ids) == 1 and ids[0] not in tokenizer.special_ids:
            return int(ids[0])
    pieces = " ".join(tokenizer.token(i) for i in ids)
    raise UsageError(f"--target {asked}: {len(ids)} tokens ({pieces}); a mask stands for one token of the vocabulary")


def explain(
    subject: LoadedModel,
    question: Question,
    methods: Sequence[str],
    *,
    baseline: Baseline,
    steps: int,
    engine: Engine,
) -> Explanation:
    """Ask and explain.

    Args:
        subject: the model.
        question: from `make_question`.
        methods: names out of `METHODS`; those by gradients are passed over for a model without a head.
        baseline: what stands for words in x0.
        steps: of the path integral.
        engine: where to compute.

    Raises:
        DataError: the family has no word embeddings or maps to record.
    """
    device = engine.device
    model = subject.model.to(device).eval()
    values: dict[str, Floats] = {}
    target = score = baseline_score = gap = None
    if question.head is not None:
        number, target = _target(subject, question, device)
        ask = _score(model, question, number)
        if "integrated_gradients" in methods:
            start_nE = _baseline(subject, question, baseline, device)
            tokens = engine.micro_batch_tokens
            found = integrated_gradients(
                model, question.text, start_nE, ask, steps=steps, max_batch_tokens=tokens, device=device
            )
            values["integrated_gradients"] = found.attributions_n.numpy()
            baseline_score, gap = found.baseline_score, found.gap
        own_nE = embeddings(model, question.text, device=device)
        (score_1, gradient_1nE) = gradients(model, question.text, own_nE[None], ask, device=device)
        score = float(score_1[0])
        if "input_x_gradient" in methods:
            values["input_x_gradient"] = (own_nE * gradient_1nE[0]).double().sum(-1).cpu().numpy()
        if "saliency" in methods:
            values["saliency"] = gradient_1nE[0].double().norm(dim=-1).cpu().numpy()
    if ROLLOUT in methods:
        through_nn = rollout(text_maps(model, question.text, device=device))
        row_n = through_nn.mean(0) if question.read is None else through_nn[question.read]
        values[ROLLOUT] = row_n.numpy()
    return Explanation(question, target, score, baseline_score, gap, values)


def _score(model: HeadedModel, question: Question, number: int) -> Score:
    """F for one target."""
    head, size = question.head, len(question.text.ids)
    assert head is not None

    def score(states_TD: Tensor, batch: PackedBatch) -> Tensor:
        if head == MASKED:
            assert question.read is not None
            read_R = torch.arange(batch.num_sequences, device=states_TD.device) * size + question.read
            return torch.softmax(model.token_logits(head, states_TD[read_R]), dim=-1)[:, number]
        logits_RK = model.logits(head, states_TD, batch)
        return logits_RK[:, 0] if logits_RK.shape[1] == 1 else torch.softmax(logits_RK, dim=-1)[:, number]

    return score


@torch.no_grad()
def _target(subject: LoadedModel, question: Question, device: torch.device) -> tuple[int, str]:
    """The target's number and name: the one asked for, or the most probable."""
    model, tokenizer, head = subject.model, subject.tokenizer, question.head
    assert head is not None
    if question.asked is not None:
        return _target_number(model, tokenizer, head, question.asked), question.asked
    batch = question.text.batch().to(device)
    states_TD = model(batch)
    if head == MASKED:
        number = int(model.token_logits(head, states_TD[question.read])[None].argmax())
        return number, tokenizer.token(number)
    number = int(model.logits(head, states_TD, batch)[0].argmax())
    return number, model.labels.names[number]


def _baseline(subject: LoadedModel, question: Question, kind: Baseline, device: torch.device) -> Tensor:
    """x0, (n, E).

    Raises:
        DataError: the vocabulary has no such token.
    """
    own_nE = embeddings(subject.model, question.text, device=device)
    fixed_n1 = torch.from_numpy(question.fixed_n)[:, None].to(device)
    if kind == "zero":
        return torch.where(fixed_n1, own_nE, torch.zeros_like(own_nE))
    number = subject.tokenizer.mask_id if kind == "mask" else subject.tokenizer.pad_id
    ids = np.where(question.fixed_n, np.array(question.text.ids), number)
    other = Text(tuple(ids.tolist()), question.text.types)
    return embeddings(subject.model, other, device=device)


def summary_of(explanation: Explanation) -> dict[str, Any]:
    """For results.json."""
    question = explanation.question
    return {
        "text": question.written,
        "tokens": list(question.tokens),
        "head": question.head,
        "read_token": question.read,
        "target": explanation.target,
        "prediction": explanation.score,
        "baseline_prediction": explanation.baseline_score,
        "gap": explanation.gap,
        "methods": explanation.values,
    }


def finding_of(explanation: Explanation, label: str, number: int) -> Finding:
    """Table, figure and sentence of one explanation."""
    question, values = explanation.question, explanation.values

    def draw() -> Figure:
        return _draw(explanation, label)

    answer = (
        f"the probability of {explanation.target!r} is {explanation.score:.3f}"
        if explanation.score is not None and explanation.target is not None
        else "no head answers"
    )
    leading = "; ".join(
        f"{name}: {', '.join(repr(question.tokens[place]) for place in _greatest(values[name]))}" for name in values
    )
    completeness = (
        ""
        if explanation.gap is None
        else f"; integrated gradients add up to F(x) - F(x0) but for {abs(explanation.gap):.1e}"
    )
    skipped = "" if question.head is not None else f" ({', '.join(GRADIENT_METHODS)} need a head)"
    sentence = f"{label} on {question.written!r}: {answer}; it rests most on {leading}{completeness}{skipped}."
    rows = [
        [place + 1, token, *(values[name][place] for name in values)] for place, token in enumerate(question.tokens)
    ]
    return Finding(f"prediction-{number}", sentence, ["place", "token", *values], rows, draw)


def _greatest(values_n: Floats) -> list[int]:
    order: list[int] = np.argsort(-np.abs(values_n), kind="stable")[:3].tolist()
    return order


def _draw(explanation: Explanation, label: str) -> Figure:
    question, values = explanation.question, explanation.values
    what = (
        "attention rollout"
        if explanation.score is None
        else f"probability of {explanation.target!r}: {explanation.score:.3f}"
    )
    figure, axes = new_figure(
        f"{label}: {what} (n = 1 text of {len(question.tokens)} tokens)",
        panels=len(values),
        width=2.6 * len(values) + 1.2,
        height=0.24 * len(question.tokens) + 1.3,
    )
    heights = np.arange(len(question.tokens), 0, -1)
    for column, (axis, (name, values_n)) in enumerate(zip(np.ravel(axes), values.items(), strict=True)):
        shades = ["0.25" if value >= 0 else "white" for value in values_n]
        axis.barh(heights, values_n, color=shades, edgecolor="0.25", linewidth=0.8)
        axis.axvline(0, color="0.3", linewidth=0.8)
        axis.set_yticks(heights, question.tokens if column == 0 else [""] * len(question.tokens))
        unit = "share" if name == ROLLOUT else "probability" if name == "integrated_gradients" else "gradient"
        plain(axis, x=unit, y="", title=name)
    return figure
