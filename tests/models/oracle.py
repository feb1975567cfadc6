"""The families under test and their oracle: classes of `transformers` with random weights, and the same model here.

A family is a file in cases/ with a list `CASES`; every file there is found. The oracle
is built by its own class, saved by its own `save_pretrained`, and read by the package like any checkpoint.
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
from bertkit.models.headed import HeadedModel
from bertkit.models.hub import load_model

VOCABULARY = 97
NUM_LABELS = 3
LENGTHS = [19, 1, 7, 18, 2, 7]
MANY_TYPES = 3

SEQUENCE_HEADS = ("sequence_classification", "multiple_choice", "next_sentence", "sentence_order")


@dataclass(frozen=True)
class Case:
    """One configuration of a family.

    Attributes:
        name: for the test's id.
        config_class: of `transformers`.
        settings: its arguments; unequal odd sizes, two layers.
        heads: the class of `transformers` for each head here.
        joint: a class with several heads: its name, and for each head the output that holds its logits.
        max_tokens: longest sequence; LENGTHS has one of exactly this length.
        unlimited: the family can read longer ones, too, however long.
        pad_id: for padding the oracle's input.
        pad_left: whether the oracle wants padding before the tokens.
        token_types: whether the oracle takes segment types.
        states: whether hidden states of every layer are compared, and which of the oracle's they are: index i of the
            list is the oracle's hidden state that equals `blocks.i.hook_resid_post`, None where it has no equal.
        first_state: the oracle's hidden state before the first layer, None where it has no equal.
        zero_pad_row: whether the oracle looks at the padding's embedding, so that it must be zero.
        type_count: segment types, where its settings do not say.
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

    def __str__(self) -> str:
        return self.name


def all_cases() -> list[Case]:
    from tests.models import cases

    names = sorted(module.name for module in pkgutil.iter_modules(cases.__path__))
    return [case for name in names for case in importlib.import_module(f"{cases.__name__}.{name}").CASES]


@dataclass(frozen=True)
class Twins:
    """An oracle, the same model here, and the directory that the oracle was saved to."""

    oracle: Any
    model: HeadedModel
    directory: Path


def make_oracle(case: Case, architecture: str, *, seed: int = 1) -> Any:
    """A class of `transformers` with random weights, large enough that every part matters."""
    import transformers

    config_class = getattr(transformers, case.config_class)
    # Heads without labels of their own take their two outputs from the number of labels, too.
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
    """The oracle, saved, and what the package reads from there."""
    oracle = make_oracle(case, architecture)
    oracle.save_pretrained(directory)
    model, report = load_model(directory)
    assert not report.missing
    assert not report.unexpected
    return Twins(oracle, model, directory)


@dataclass(frozen=True)
class Inputs:
    """The same sequences, packed and padded.

    Attributes:
        batch: packed.
        padded: arguments of the oracle.
        real_BS: where the oracle's input is no padding.
    """

    batch: PackedBatch
    padded: dict[str, Tensor]
    real_BS: Tensor


def make_inputs(case: Case, model: HeadedModel, lengths: list[int] = LENGTHS, *, seed: int = 0) -> Inputs:
    """Random ids without the padding's, in segments of random types."""
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
    """What the oracle gives for a head, in the shape of ours: (T, K) or (B, K)."""
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
    """The oracle's outputs with all hidden states; choices go in as one question with B of them."""
    if head == "multiple_choice":
        padded = {name: tensor[None] for name, tensor in padded.items()}
    return oracle(**padded, output_hidden_states=True)


def with_distinct_dropout(case: Case) -> Case:
    """The case with a rate of its own for every setting that is a dropout rate."""
    import transformers

    defaults = getattr(transformers, case.config_class)().to_dict()
    rates = [key for key, value in sorted(defaults.items()) if "drop" in key and not isinstance(value, bool | str)]
    settings = {key: round(0.05 + 0.02 * number, 2) for number, key in enumerate(rates)}
    return replace(case, settings={**case.settings, **settings})
