"""The families under test and their oracle: classes of `transformers` with random weights, and the same model here.

A family is a file in cases/ with a list `CASES`; every file there is found. The oracle is built by its own class, saved
by its own `save_pretrained`, and read by bertkit like any checkpoint.
"""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bertkit.data.batch import PackedBatch
from bertkit.models.files.hub import load_model
from bertkit.models.headed import HeadedModel

VOCABULARY = 97
NUM_LABELS = 3
LENGTHS = [19, 1, 7, 18, 2, 7]
MANY_TYPES = 3

SEQUENCE_HEADS = ("sequence_classification", "multiple_choice", "next_sentence", "sentence_order")


@dataclass(frozen=True)
class Case:
    """One configuration of a family.

    Attributes:
        name: part of the test's id.
        config_class: configuration class of `transformers`.
        settings: its arguments, with unequal odd sizes and two layers.
        heads: the class of `transformers` for each head here.
        joint: a class with several heads: its name, and the output with the logits of each head.
        max_tokens: longest sequence; LENGTHS has one of exactly this length.
        unlimited: whether the family also reads longer sequences of any length.
        pad_id: padding id of the oracle's input.
        pad_left: whether the oracle needs padding before the tokens.
        token_types: whether the oracle takes segment types.
        states: the compared hidden states: item i is the index of the oracle's hidden state that equals
            `blocks.i.hook_resid_post`, None if there is none.
        first_state: index of the oracle's hidden state before the first layer, None if there is none.
        zero_pad_row: whether the oracle uses the padding's embedding, which must then be zero.
        type_count: number of segment types, if the settings do not contain it.
        left_out: endings of the oracle's weights that are neither read nor written.
    """

    name: str
    config_class: str
    settings: dict[str, Any]
    heads: dict[str, str]
    joint: tuple[str, dict[str, str]] | None = None
    max_tokens: int = 19
    unlimited: bool = False
    pad_id: int = 0
    pad_left: bool = False
    token_types: bool = True
    states: tuple[int | None, ...] = (1, 2)
    first_state: int | None = 0
    zero_pad_row: bool = False
    type_count: int | None = None
    left_out: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.name


def all_cases() -> list[Case]:
    from tests.models import cases

    names = sorted(module.name for module in pkgutil.iter_modules(cases.__path__))
    return [case for name in names for case in importlib.import_module(f"{cases.__name__}.{name}").CASES]


@dataclass(frozen=True)
class Twins:
    """An oracle, the same model here, and the directory in which the oracle is saved."""

    oracle: Any
    model: HeadedModel
    directory: Path


def make_oracle(case: Case, architecture: str, *, seed: int = 1) -> Any:
    """A class of `transformers` with random weights, large enough that every part matters."""
    import transformers

    config_class = getattr(transformers, case.config_class)
    # Heads without their own labels also get their two outputs from the number of labels.
    labels = NUM_LABELS if architecture.endswith(("ForSequenceClassification", "ForTokenClassification")) else 2
    config = config_class(**case.settings, vocab_size=VOCABULARY, num_labels=labels, attn_implementation="eager")
    torch.manual_seed(seed)
    oracle = getattr(transformers, architecture)(config).eval()
    with torch.no_grad():
        for parameter in oracle.parameters():
            parameter.normal_(0, 0.2)
        if case.zero_pad_row:
            oracle.get_input_embeddings().weight[case.pad_id].zero_()
    return oracle


def make_twins(case: Case, architecture: str, directory: Path) -> Twins:
    """The saved oracle, and the model that bertkit reads from it."""
    oracle = make_oracle(case, architecture)
    oracle.save_pretrained(directory)
    model, report = load_model(directory)
    assert not report.missing
    assert not report.unexpected
    return Twins(oracle, model, directory)


@dataclass(frozen=True)
class Inputs:
    """The same sequences in packed and padded form.

    Attributes:
        batch: the packed sequences.
        padded: the oracle's arguments.
        real_BS: true for tokens of the oracle's input that are not padding.
    """

    batch: PackedBatch
    padded: dict[str, Tensor]
    real_BS: Tensor


def make_inputs(case: Case, model: HeadedModel, lengths: list[int] = LENGTHS, *, seed: int = 0) -> Inputs:
    """Random ids other than the padding's, in segments of random types."""
    generator = torch.Generator().manual_seed(seed)
    kinds = case.type_count or max(1, getattr(model.encoder.config, "type_vocab_size", 1))
    rows, types = [], []
    for length in lengths:
        ids = torch.randint(0, VOCABULARY - 1, (length,), generator=generator)
        rows.append((ids + (ids >= case.pad_id)).tolist())
        types.append(torch.randint(0, kinds, (length,), generator=generator).sort().values.tolist())
    side = "left" if case.pad_left else "right"

    def pad(parts: list[list[int]], value: int) -> Tensor:
        tensors = [torch.tensor(part) for part in parts]
        return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True, padding_value=value, padding_side=side)

    mask_BS = pad([[1] * length for length in lengths], 0)
    padded = {"input_ids": pad(rows, case.pad_id), "attention_mask": mask_BS}
    if case.token_types:
        padded["token_type_ids"] = pad(types, 0)
    return Inputs(PackedBatch.from_ids(rows, types), padded, mask_BS.bool())


def oracle_logits(head: str, outputs: Any, real_BS: Tensor) -> Tensor:
    """The oracle's output of a head in bertkit's shape: (T, K) or (B, K)."""
    if head == "span":
        return torch.stack([outputs.start_logits, outputs.end_logits], dim=-1)[real_BS]
    if head == "multiple_choice":
        logits: Tensor = outputs.logits
        return logits.reshape(-1, 1)
    if head in SEQUENCE_HEADS:
        sequence_logits: Tensor = outputs.logits
        return sequence_logits
    token_logits: Tensor = outputs.logits[real_BS]
    return token_logits[:, None] if token_logits.dim() == 1 else token_logits


def ask_oracle(head: str, oracle: Any, padded: dict[str, Tensor]) -> Any:
    """The oracle's outputs with all hidden states; choices are one question with B of them."""
    if head == "multiple_choice":
        padded = {name: tensor[None] for name, tensor in padded.items()}
    return oracle(**padded, output_hidden_states=True)


def with_distinct_dropout(case: Case) -> Case:
    """The case with a different rate for every dropout setting."""
    import transformers

    defaults = getattr(transformers, case.config_class)().to_dict()
    rates = [key for key, value in sorted(defaults.items()) if "drop" in key and not isinstance(value, bool | str)]
    settings = {key: round(0.05 + 0.02 * number, 2) for number, key in enumerate(rates)}
    return replace(case, settings={**case.settings, **settings})
