"""Global tokens and chunked windows: Longformer against `transformers` and against full attention.

Properties of all families are in test_families.py.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.models.attention_masks import sliding_window
from tests.models.cases.longformer import CASES, SIZES
from tests.models.oracle import Case, Inputs, ask_oracle, make_inputs, make_twins, oracle_logits
from tests.probing.tiny_models import tiny_tokenizer
from torch import Tensor

from bertkit.data.batch import PackedBatch, PackedSequences
from bertkit.models.attention.self_attention import attend
from bertkit.models.attention.windows import sliding_window_attention
from bertkit.models.families.longformer import LongformerConfig
from bertkit.models.files.hub import load_model, save_model
from bertkit.models.headed import HeadedModel
from bertkit.models.recorder import Recorder, Scope

pytest.importorskip("transformers")

TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}
ALL_HEADS = {
    **CASES[0].heads,
    "span": "LongformerForQuestionAnswering",
    "multiple_choice": "LongformerForMultipleChoice",
}
CASE = replace(CASES[0], heads=ALL_HEADS)
SEPARATOR = 2


def with_global(inputs: Inputs, share: float, *, seed: int = 3) -> Inputs:
    """A random share of all tokens is global, so some sequences have none."""
    generator = torch.Generator().manual_seed(seed)
    mask_BS = (torch.rand(inputs.real_BS.shape, generator=generator) < share) & inputs.real_BS
    batch = replace(inputs.batch, global_T=mask_BS[inputs.real_BS])
    return Inputs(batch, {**inputs.padded, "global_attention_mask": mask_BS.long()}, inputs.real_BS)


def assert_equal_with_gradients(twins: Any, head: str, inputs: Inputs) -> None:
    recorder = Recorder(["blocks.0.hook_resid_post", "blocks.1.hook_resid_post"])
    logits = twins.model.logits(head, twins.model(inputs.batch, recorder), inputs.batch)
    outputs = ask_oracle(head, twins.oracle, inputs.padded)
    expected = oracle_logits(head, outputs, inputs.real_BS)
    torch.testing.assert_close(logits, expected, **TOLERANCE)
    for layer in (0, 1):
        ours = recorder.kept[f"blocks.{layer}.hook_resid_post"]
        torch.testing.assert_close(ours, outputs.hidden_states[layer + 1][inputs.real_BS], **TOLERANCE)
    logits.square().mean().backward()
    expected.square().mean().backward()
    theirs = dict(twins.oracle.named_parameters(remove_duplicate=False))
    gradients = {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        for name, parameter in twins.model.named_parameters()
    }
    for name, gradient in twins.model.hub_form().to_hub(gradients).items():
        wanted = theirs[name].grad
        wanted = torch.zeros_like(gradient) if wanted is None else wanted
        torch.testing.assert_close(gradient, wanted, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("head", ALL_HEADS)
@pytest.mark.parametrize("share", [0.2, 1.0])
def test_a_global_mask_of_the_batch_gives_the_originals_numbers(head: str, share: float, tmp_path: Path) -> None:
    twins = make_twins(CASE, ALL_HEADS[head], tmp_path)
    assert_equal_with_gradients(twins, head, with_global(make_inputs(CASE, twins.model), share))


@pytest.mark.parametrize("head", ["span", "multiple_choice"])
def test_questions_and_choices_are_global_without_a_mask(head: str, tmp_path: Path) -> None:
    twins = make_twins(CASE, ALL_HEADS[head], tmp_path)
    rows, lengths = [], [19, 7, 13, 4]
    for length, first in zip(lengths, [5, 1, 9, 0], strict=True):
        row = [(7 * token) % 83 + 10 for token in range(length)]
        row[first] = row[first + 1] = row[-1] = SEPARATOR
        rows.append(row)
    real_BS = torch.arange(19) < torch.tensor(lengths)[:, None]
    ids_BS = torch.ones(4, 19, dtype=torch.int64)
    ids_BS[real_BS] = torch.tensor([token for row in rows for token in row])
    padded = {"input_ids": ids_BS, "attention_mask": real_BS.long()}
    assert_equal_with_gradients(twins, head, Inputs(PackedBatch.from_ids(rows), padded, real_BS))


def test_recording_probabilities_changes_nothing_where_some_tokens_are_global(tmp_path: Path) -> None:
    twins = make_twins(CASE, ALL_HEADS["masked_lm"], tmp_path)
    inputs = with_global(make_inputs(CASE, twins.model), 0.2)
    recorder = Recorder(["blocks.1.attn.hook_global_pattern"])
    torch.testing.assert_close(twins.model(inputs.batch, recorder), twins.model(inputs.batch), **TOLERANCE)
    pattern_BNGS = recorder.kept["blocks.1.attn.hook_global_pattern"]
    torch.testing.assert_close(pattern_BNGS.sum(-1), torch.ones(pattern_BNGS.shape[:3]))
    assert not pattern_BNGS.masked_select(~inputs.real_BS[:, None, None]).any()


def test_a_mask_moves_with_its_batch() -> None:
    batch = PackedBatch.from_ids([[1, 2, 3]])
    assert batch.to(torch.device("meta")).global_T is None
    moved = replace(batch, global_T=torch.tensor([True, False, False])).to(torch.device("meta"))
    assert moved.global_T is not None
    assert moved.global_T.is_meta
    assert moved.sequences.cu_seqlens_B1.is_meta


@pytest.mark.parametrize("each_side", [1, 4, 11])
def test_chunks_give_what_the_whole_square_gives(each_side: int) -> None:
    generator = torch.Generator().manual_seed(7)
    lengths = [67, 1, 66, 13, 30, 29]
    sequences = PackedSequences.from_lengths(lengths)
    heads = [
        torch.randn(sum(lengths), 3, 5, generator=generator, dtype=torch.float64, requires_grad=True) for _ in range(3)
    ]
    scope = Scope(None, "")
    weight = torch.randn(sum(lengths), 3, 5, generator=generator, dtype=torch.float64)

    def gradients(mixed: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad((mixed * weight).sum(), heads)

    near = sliding_window_attention(*heads, sequences, each_side=each_side, dropout_rate=0.0, scope=scope)
    whole = attend(*heads, sequences, dropout_rate=0.0, scope=scope, visible=sliding_window(each_side))
    torch.testing.assert_close(near, whole)
    for ours, theirs in zip(gradients(near), gradients(whole), strict=True):
        torch.testing.assert_close(ours, theirs)
    torch.manual_seed(1)
    dropped = sliding_window_attention(*heads, sequences, each_side=each_side, dropout_rate=1e-9, scope=scope)
    torch.testing.assert_close(dropped, whole)


def test_global_projections_begin_as_the_ordinary_ones() -> None:
    from bertkit.models.headed import HeadedModel

    sizes = {key: value for key, value in SIZES.items() if key != "attention_window"}
    model = HeadedModel(LongformerConfig(**sizes, attention_window=(4, 10)).build(97), ("masked_lm",))
    model.initialise(3)
    state = model.encoder.state_dict()
    for name in ("query", "key", "value"):
        own, ordinary = (state[f"layers.1.attention.{name}{end}.weight"] for end in ("_global", ""))
        assert torch.equal(own, ordinary)
        assert own.std() > 0


@pytest.mark.parametrize("window", [3, 0, (4, 6, 8), (4, 5)])
def test_a_window_that_cannot_be_is_refused(window: Any) -> None:
    with pytest.raises(ValueError, match="attention_window"):
        LongformerConfig(num_hidden_layers=2, attention_window=window)


def test_the_case_has_sequences_longer_than_its_windows() -> None:
    """Otherwise no chunk would be tested."""
    case: Case = CASES[0]
    assert min(case.settings["attention_window"]) < case.max_tokens


def test_the_separator_is_that_of_the_vocabulary_that_a_run_has_learnt(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    assert tokenizer.sep_id != SEPARATOR
    model = HeadedModel(
        LongformerConfig(**SIZES | {"attention_window": 8}).build(tokenizer.vocab_size, pad_id=tokenizer.pad_id),
        ("span",),
    )
    model.initialise(seed=1)
    model.encoder.read_vocabulary(tokenizer)
    save_model(model, tokenizer, tmp_path)
    again, _ = load_model(tmp_path)
    question, context = tokenizer.encode_batch(["a reader", "the reader tests a document"])
    ids = [tokenizer.cls_id, *question, tokenizer.sep_id, *context, tokenizer.sep_id]
    marked = again.encoder.with_global_tokens(PackedBatch.from_ids([ids]), ("span",))
    assert marked.global_T is not None
    assert marked.global_T.tolist() == [True] * (1 + len(question)) + [False] * (len(context) + 2)


def test_only_untrained_copies_of_the_ordinary_projections_are_renewed() -> None:
    model = HeadedModel(
        LongformerConfig.model_validate(SIZES | {"attention_window": 6}).build(50), heads=["masked_lm", "span"]
    )
    model.initialise(1)
    encoder = model.encoder
    assert encoder.untrained_copies(["masked_lm", "span"]) == {}  # the question's tokens are global
    names = ("layers.0.attention.query", "layers.1.attention.value")
    with torch.no_grad():
        encoder.get_submodule("layers.1.attention.key_global").weight[0, 0] += 1  # type: ignore[index, operator]
    copies = encoder.untrained_copies(["masked_lm"])
    assert "layers.1.attention.key_global" not in copies
    assert {f"{name}_global": name for name in names}.items() <= copies.items()
    assert len(copies) == 3 * len(encoder.layers) - 1  # type: ignore[arg-type]
    for name in names:
        torch.nn.init.normal_(encoder.get_parameter(f"{name}.weight"))
    encoder.renew_copies(copies)
    for name in names:
        assert encoder.get_parameter(f"{name}_global.weight").equal(encoder.get_parameter(f"{name}.weight"))
