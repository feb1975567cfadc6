"""One prediction and its explanation: the word at a text's mask, or its class, and each token's contribution.

Sundararajan et al. 2017, arXiv:1703.01365; Abnar and Zuidema 2020, arXiv:2005.00928; the methods are in
explanations.py.

Shapes: n tokens of the text, E width of the embeddings, T packed tokens, R copies of the text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches

import numpy as np
import torch
from torch import Tensor

from bertkit.arrays import BoolArray, Float64Array
from bertkit.data.batch import PackedBatch
from bertkit.errors import DataError, UsageError
from bertkit.evaluation.loaded_model import LoadedModel
from bertkit.models.headed import HeadedModel
from bertkit.models.hook_points import device_of, of_layers, point_shapes
from bertkit.models.labels import Labels
from bertkit.models.scoring.rules import mask_rule, reads_causally
from bertkit.probing.attention.measure import PATTERN
from bertkit.probing.attribution import Baseline
from bertkit.probing.attribution.explanations import (
    GRADIENT_METHODS,
    METHODS,
    ROLLOUT,
    Score,
    TokenisedText,
    embeddings,
    gradients,
    integrated_gradients,
    rollout,
    text_maps,
)
from bertkit.tasks.encoding import SequenceEncoder
from bertkit.text.tokenizer import Tokenizer
from bertkit.training.engine import Engine

MASKED, CLASSES = "masked_lm", "sequence_classification"
MULTI_LABEL = "multi_label_classification"


@dataclass(frozen=True)
class Question:
    """The prediction to explain.

    Attributes:
        written: the text as given.
        text: the encoded text.
        tokens: tokens as in the vocabulary.
        fixed_n: tokens that are the same in the baseline.
        head: the head that predicts; None for a model without one, for which only attention can be explained.
        read: the token whose state the head reads; None if it reads the mean of all tokens.
        target: number and name of the output to explain; None for the most probable one.
    """

    written: str
    text: TokenisedText
    tokens: tuple[str, ...]
    fixed_n: BoolArray
    head: str | None
    read: int | None
    target: tuple[int, str] | None


@dataclass(frozen=True)
class Explanation:
    """A prediction and the contributions of the tokens.

    Attributes:
        question: the input.
        target: the predicted output's name; None without a head.
        score: F; None without a head.
        is_probability: whether F is a probability; if not, it is the output of a regression.
        baseline_score, gap: for integrated gradients, if they were computed.
        values: contributions by each method, (n,).
    """

    question: Question
    target: str | None = None
    score: float | None = None
    is_probability: bool = True
    baseline_score: float | None = None
    gap: float | None = None
    values: dict[str, Float64Array] = field(default_factory=dict)


def chosen_methods(names: Sequence[str], model: HeadedModel) -> tuple[str, ...]:
    """The methods with these names; if none are given, all that the model's family has.

    Raises:
        UsageError: no such method.
    """
    for name in names:
        if name not in METHODS:
            near = get_close_matches(name, METHODS, n=1)
            hint = f"did you mean {near[0]}?" if near else f"one of: {', '.join(METHODS)}"
            raise UsageError(f"--method {name}: no such method; {hint}")
    if names:
        return tuple(name for name in METHODS if name in names)
    return METHODS if of_layers(point_shapes(model), PATTERN) else GRADIENT_METHODS


def make_question(subject: LoadedModel, written: str, target: str | None) -> Question:
    """Prepare a text for which the model predicts the word at the mask, or the class.

    Raises:
        UsageError: not exactly one mask if one is needed, an invalid target, or a text that is too long or empty.
        DataError: the model predicts masked tokens but has no mask token.
    """
    model, tokenizer = subject.model, subject.tokenizer
    mask = tokenizer.token(tokenizer.mask_id) if "mask" in tokenizer.roles else None
    masks = 0 if mask is None else written.count(mask)
    head = next((name for name in (CLASSES, MASKED) if name in model.head_names), None)
    head = MASKED if masks and MASKED in model.head_names else head
    if head == MASKED and mask is None:
        raise DataError(
            f"{subject.name}: it predicts masked tokens, but its vocabulary has no mask token; use its own tokenizer"
        )
    if head == MASKED and masks != 1:
        raise UsageError(f"--text {written[:60]!r} contains {mask} {masks} times; write it once, where to predict")
    if head is None and target is not None:
        raise UsageError(f"--target {target}: the model has no {MASKED} or {CLASSES} head, so it predicts nothing")
    body = tokenizer.encode_with_masks(written) if masks else tokenizer.encode_batch([written])[0]
    config = subject.config
    sequences = SequenceEncoder(tokenizer, max_tokens=config.max_tokens, token_types=config.reads_token_types)
    if not 1 <= len(body) <= sequences.room(1):
        raise UsageError(f"--text {written[:60]!r}: {len(body)} tokens, expected 1 to {sequences.room(1)}")
    ids, types = sequences.sequence(body, example=written[:60])
    before = sequences.single.before
    fixed_n = np.ones(len(ids), dtype=np.bool_)
    fixed_n[before : before + len(body)] = False
    read: int | None = 0
    if head == MASKED:
        place = ids.index(tokenizer.mask_id)
        fixed_n[place] = True
        read = place - mask_rule(model, source=subject.name).shifted
    elif head is not None:
        read = {"first": 0, "last": len(ids) - 1, "mean": None}[model.plans[head].summary]
    output = None if target is None or head is None else (_output(model, tokenizer, head, target), target)
    tokens = tuple(tokenizer.token(i) for i in ids)
    text = TokenisedText(tuple(ids), tuple(types), causal=head is None and reads_causally(model))
    return Question(written, text, tokens, fixed_n, head, read, output)


def _output(model: HeadedModel, tokenizer: Tokenizer, head: str, target: str) -> int:
    """The number of the output with the target's name.

    Raises:
        UsageError: the word has several tokens, or there is no class of this name.
    """
    if head == CLASSES:
        if target not in model.labels.names:
            raise UsageError(f"--target {target}: no such class; the model has {', '.join(model.labels.names)}")
        return model.labels.names.index(target)
    # A word inside a text follows a space, which some vocabularies include in the token.
    for text in (f" {target}", target):
        (ids,) = tokenizer.encode_batch([text])
        if len(ids) == 1 and ids[0] not in tokenizer.special_ids:
            return int(ids[0])
    tokens = " ".join(tokenizer.token(i) for i in ids)
    raise UsageError(f"--target {target}: {len(ids)} tokens ({tokens}); a mask stands for one token of the vocabulary")


def check_methods(
    subject: LoadedModel, questions: Sequence[Question], methods: Sequence[str], baseline: Baseline
) -> None:
    """Check that the methods can explain the model's predictions.

    Raises:
        UsageError: they need a head and there is none, or the vocabulary lacks the baseline's token.
    """
    if any(each.head is None for each in questions) and ROLLOUT not in methods:
        raise UsageError(
            f"--text: the model has no {MASKED} or {CLASSES} head, so there is no prediction to explain by"
            f" {', '.join(methods)}; --method {ROLLOUT} explains a model with attention alone"
        )
    explains = any(each.head is not None for each in questions) and "integrated_gradients" in methods
    if explains and baseline not in ("zero", *subject.tokenizer.roles):
        raise UsageError(f"--baseline {baseline}: the vocabulary has no {baseline} token; use --baseline zero")


def explain(
    subject: LoadedModel,
    question: Question,
    methods: Sequence[str],
    *,
    baseline: Baseline,
    steps: int,
    engine: Engine,
) -> Explanation:
    """Predict and explain.

    Args:
        subject: the model.
        question: from `make_question`.
        methods: names from `METHODS`; gradient methods are skipped for a model without a head.
        baseline: replaces words in x0.
        steps: number of steps of the path integral.
        engine: the device and batch size.

    Raises:
        DataError: the family has no word embeddings or maps to record.
    """
    text, model = question.text, subject.model.to(engine.device).eval()
    values: dict[str, Float64Array] = {}
    target = score = baseline_score = gap = None
    if question.head is not None:
        output, target = question.target or _most_probable(subject, question)
        of_output = _score(model, question, output)
        own_nE = embeddings(model, text)
        (score_1, (gradient_nE,)) = gradients(model, text, own_nE[None], of_output)
        score = float(score_1[0])
        if "integrated_gradients" in methods:
            found = integrated_gradients(
                model,
                text,
                _baseline(subject, question, baseline, own_nE),
                of_output,
                steps=steps,
                max_batch_tokens=engine.micro_batch_tokens,
            )
            values["integrated_gradients"] = found.attributions_n.numpy()
            baseline_score, gap = found.baseline_score, found.gap
        if "input_x_gradient" in methods:
            values["input_x_gradient"] = (own_nE * gradient_nE).double().sum(-1).cpu().numpy()
        if "saliency" in methods:
            values["saliency"] = gradient_nE.double().norm(dim=-1).cpu().numpy()
    if ROLLOUT in methods:
        through_nn = rollout(text_maps(model, text))
        if question.head is None and not through_nn.triu(1).any():  # read from left to right
            question = replace(question, read=len(text.ids) - 1)
        row_n = through_nn.mean(0) if question.read is None else through_nn[question.read]
        values[ROLLOUT] = row_n.numpy()
    is_probability = question.head != CLASSES or not _is_number(model.labels)
    return Explanation(question, target, score, is_probability, baseline_score, gap, values)


def _score(model: HeadedModel, question: Question, output: int) -> Score:
    """F for one output."""
    head, size = question.head, len(question.text.ids)
    assert head is not None

    def score(states_TD: Tensor, batch: PackedBatch) -> Tensor:
        if head == MASKED:
            assert question.read is not None
            read_R = torch.arange(batch.num_sequences, device=states_TD.device) * size + question.read
            return torch.softmax(model.token_logits(head, states_TD[read_R]), dim=-1)[:, output]
        logits_RK = model.logits(head, states_TD, batch)
        if _is_number(model.labels):
            return logits_RK[:, output]
        several = model.labels.problem_type == MULTI_LABEL
        return (logits_RK.sigmoid() if several else torch.softmax(logits_RK, dim=-1))[:, output]

    return score


def _is_number(labels: Labels) -> bool:
    """Whether a classification head's outputs are numbers, not scores of classes."""
    return labels.is_regression or (labels.count == 1 and labels.problem_type != MULTI_LABEL)


@torch.no_grad()
def _most_probable(subject: LoadedModel, question: Question) -> tuple[int, str]:
    """Number and name of the most probable output."""
    model, head = subject.model, question.head
    assert head is not None
    batch = question.text.batch().to(device_of(model))
    states_TD = model(batch)
    if head == MASKED:
        output = int(model.token_logits(head, states_TD[question.read])[None].argmax())
        return output, subject.tokenizer.token(output)
    output = int(model.logits(head, states_TD, batch)[0].argmax())
    return output, model.labels.names[output]


def _baseline(subject: LoadedModel, question: Question, kind: Baseline, own_nE: Tensor) -> Tensor:
    """x0, (n, E)."""
    if kind == "zero":
        return own_nE * torch.from_numpy(question.fixed_n)[:, None].to(own_nE.device)
    token_id = subject.tokenizer.mask_id if kind == "mask" else subject.tokenizer.pad_id
    ids = np.where(question.fixed_n, np.array(question.text.ids), token_id)
    return embeddings(subject.model, replace(question.text, ids=tuple(ids.tolist())))
