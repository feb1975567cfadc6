"""Every family and head against `transformers`: its files are read, its outputs reproduced, and bertkit's files load.

The families are in cases/, one file each.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.models.oracle import (
    NUM_LABELS,
    Case,
    Inputs,
    all_cases,
    ask_oracle,
    make_inputs,
    make_twins,
    oracle_logits,
    with_distinct_dropout,
)
from torch import Tensor, nn
from torch.nn import functional

from bertkit.data.batch import PackedBatch
from bertkit.models.attention.self_attention import SelfAttention
from bertkit.models.files.hub import load_model, save_model
from bertkit.models.operators import dropout
from bertkit.models.operators.dropout import Dropout
from bertkit.models.recorder import Recorder

pytest.importorskip("transformers")

CASES = all_cases()
HEADS = [pytest.param(case, head, id=f"{case}-{head}") for case in CASES for head in case.heads]
JOINT = [pytest.param(case, id=str(case)) for case in CASES if case.joint]
FIRST_HEADS = [pytest.param(case, id=str(case)) for case in CASES]
TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}


def assert_states_equal(case: Case, kept: dict[str, Tensor], outputs: Any, real_BS: Tensor) -> None:
    if case.first_state is not None:
        torch.testing.assert_close(
            kept["blocks.0.hook_resid_pre"], outputs.hidden_states[case.first_state][real_BS], **TOLERANCE
        )
    for layer, state in enumerate(case.states):
        if state is not None:
            ours = kept[f"blocks.{layer}.hook_resid_post"]
            torch.testing.assert_close(ours, outputs.hidden_states[state][real_BS], **TOLERANCE)


def points(case: Case) -> list[str]:
    return ["blocks.0.hook_resid_pre", *(f"blocks.{layer}.hook_resid_post" for layer in range(len(case.states)))]


@pytest.mark.parametrize(("case", "head"), HEADS)
def test_states_logits_and_gradients_equal_the_original(case: Case, head: str, tmp_path: Path) -> None:
    twins = make_twins(case, case.heads[head], tmp_path)
    model, oracle = twins.model, twins.oracle
    assert model.head_names == (head,)
    assert model.encoder.max_tokens == (sys.maxsize if case.unlimited else case.max_tokens)
    assert model.encoder.config.max_tokens == model.encoder.max_tokens
    inputs = make_inputs(case, model)
    recorder = Recorder(points(case))
    hidden_TD = model(inputs.batch, recorder)
    logits = model.logits(head, hidden_TD, inputs.batch)
    outputs = ask_oracle(head, oracle, inputs.padded)
    expected = oracle_logits(head, outputs, inputs.real_BS)
    assert logits.shape == expected.shape
    torch.testing.assert_close(logits, expected, **TOLERANCE)
    assert_states_equal(case, recorder.kept, outputs, inputs.real_BS)

    logits.square().mean().backward()
    expected.square().mean().backward()
    assert_gradients_equal(model, oracle, left_out=case.left_out)


def assert_gradients_equal(model: Any, oracle: Any, *, left_out: tuple[str, ...] = ()) -> None:
    """Compared in the oracle's layout: gradients are split, fused and transposed like their weights."""
    ours = {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        for name, parameter in model.named_parameters()
    }
    # The oracle's choice of name for a tied tensor is undocumented.
    theirs = dict(oracle.named_parameters(remove_duplicate=False))
    theirs = {name: parameter for name, parameter in theirs.items() if not name.endswith(left_out)}
    form = model.hub_form()
    compared = form.to_hub(ours)
    assert set(theirs) - set(form.tied) == set(compared)
    for name, gradient in compared.items():
        expected = theirs[name].grad
        expected = torch.zeros_like(gradient) if expected is None else expected
        torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("case", JOINT)
def test_heads_trained_together_equal_the_original(case: Case, tmp_path: Path) -> None:
    architecture, fields = case.joint or ("", {})
    twins = make_twins(case, architecture, tmp_path)
    assert set(twins.model.head_names) == set(fields)
    assert twins.model.architectures == [architecture]
    inputs = make_inputs(case, twins.model)
    outputs = twins.oracle(**inputs.padded)
    hidden_TD = twins.model(inputs.batch)
    for head, field in fields.items():
        expected = getattr(outputs, field)
        expected = expected[inputs.real_BS] if expected.dim() == 3 else expected
        torch.testing.assert_close(twins.model.logits(head, hidden_TD, inputs.batch), expected, **TOLERANCE)


def read_back(directory: Path, architecture: str, *, left_out: tuple[str, ...] = ()) -> Any:
    """Load with `transformers`, without unexpected weights and with none missing except those `left_out`."""
    import transformers

    loaded, information = getattr(transformers, architecture).from_pretrained(
        directory, output_loading_info=True, attn_implementation="eager", local_files_only=True
    )
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        found = [name for name in information[problem] if problem != "missing_keys" or not name.endswith(left_out)]
        assert not found, (problem, found)
    return loaded.eval()


@pytest.mark.parametrize(("case", "head"), HEADS)
def test_what_is_saved_loads_in_the_original_class(case: Case, head: str, tmp_path: Path) -> None:
    twins = make_twins(case, case.heads[head], tmp_path / "theirs")
    save_model(twins.model, None, tmp_path / "ours")
    oracle = read_back(tmp_path / "ours", case.heads[head], left_out=case.left_out)
    ours, theirs = dict(oracle.named_parameters()), dict(twins.oracle.named_parameters())
    assert set(ours) == set(theirs)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours if not name.endswith(case.left_out))
    inputs = make_inputs(case, twins.model)
    with torch.no_grad():
        again = oracle_logits(head, ask_oracle(head, oracle, inputs.padded), inputs.real_BS)
        ours_logits = twins.model.logits(head, twins.model(inputs.batch), inputs.batch)
    torch.testing.assert_close(ours_logits, again, **TOLERANCE)
    written = oracle.config.to_dict()
    for key, value in twins.oracle.config.to_dict().items():
        if key not in ("_name_or_path", "transformers_version", "architectures", "dtype"):
            assert written[key] == value, key
    assert oracle.config.architectures == [case.heads[head]]


@pytest.mark.parametrize("case", JOINT)
def test_what_is_saved_with_several_heads_loads_in_the_original_class(case: Case, tmp_path: Path) -> None:
    architecture, _ = case.joint or ("", {})
    twins = make_twins(case, architecture, tmp_path / "theirs")
    save_model(twins.model, None, tmp_path / "ours")
    oracle = read_back(tmp_path / "ours", architecture)
    theirs = dict(twins.oracle.named_parameters())
    assert all(torch.equal(parameter, theirs[name]) for name, parameter in oracle.named_parameters())


@pytest.mark.parametrize("case", FIRST_HEADS)
def test_a_bare_encoder_goes_there_and_back(case: Case, tmp_path: Path) -> None:
    """Files of a bare encoder name its weights without a prefix; a pooler, if there is one, is included."""
    import transformers

    config_class = getattr(transformers, case.config_class)
    config = config_class(**case.settings, vocab_size=97, num_labels=NUM_LABELS, attn_implementation="eager")
    torch.manual_seed(2)
    oracle = transformers.AutoModel.from_config(config).eval()
    oracle.save_pretrained(tmp_path / "theirs")
    model, report = load_model(tmp_path / "theirs")
    assert not report.missing
    assert not report.unexpected
    assert model.head_names == ()
    inputs = make_inputs(case, model)
    with torch.no_grad():
        expected = oracle(**inputs.padded)
        hidden_TD = model(inputs.batch)
        torch.testing.assert_close(hidden_TD, expected.last_hidden_state[inputs.real_BS], **TOLERANCE)
        if model.has_pooler:
            pooled_BD = model.get_submodule("pooler")(hidden_TD[inputs.batch.first_token_B])
            torch.testing.assert_close(pooled_BD, expected.pooler_output, **TOLERANCE)
    save_model(model, None, tmp_path / "ours")
    again = read_back(tmp_path / "ours", type(oracle).__name__, left_out=case.left_out)
    theirs = dict(oracle.named_parameters())
    kept = {name: each for name, each in again.named_parameters() if not name.endswith(case.left_out)}
    assert all(torch.equal(parameter, theirs[name]) for name, parameter in kept.items())


@pytest.mark.parametrize("case", FIRST_HEADS)
@pytest.mark.parametrize("training", [False, True])
def test_one_sequence_never_sees_another(case: Case, training: bool, tmp_path: Path) -> None:
    model = make_twins(case, next(iter(case.heads.values())), tmp_path).model.train(training)
    lengths = [5, 17, 9, case.max_tokens, 9]
    inputs = make_inputs(case, model, lengths)
    changed_T = torch.tensor([number == 1 for number, length in enumerate(lengths) for _ in range(length)])
    ids_T = inputs.batch.ids_T
    other_T = torch.where(changed_T, (ids_T + 1) % 97, ids_T)
    states = []
    for ids in (ids_T, other_T):
        rows = [part.tolist() for part in ids.split(lengths)]
        types = [part.tolist() for part in inputs.batch.token_types_T.split(lengths)]
        torch.manual_seed(5)
        states.append(model(PackedBatch.from_ids(rows, types)))
    before_TD, after_TD = states
    assert torch.equal(before_TD[~changed_T], after_TD[~changed_T])
    assert not torch.equal(before_TD[changed_T], after_TD[changed_T])


@pytest.mark.parametrize("case", FIRST_HEADS)
def test_a_causal_pass_reads_no_later_token(case: Case, tmp_path: Path) -> None:
    model = make_twins(case, next(iter(case.heads.values())), tmp_path).model
    config = model.encoder.config
    if type(config).causal_attention is False:
        return
    rows = [[5, 6, 7, 8, 9, 10], [11, 12, 13]]
    changed = [[5, 6, 7, 20, 21, 22], [11, 12, 23]]
    before_TD, after_TD = (model(PackedBatch.from_ids(each, causal=True)) for each in (rows, changed))
    unchanged = [0, 1, 2, 6, 7]
    assert torch.equal(before_TD[unchanged], after_TD[unchanged]) == config.causal_attention


@pytest.mark.parametrize("case", FIRST_HEADS)
def test_a_batch_equals_its_sequences_one_by_one(case: Case, tmp_path: Path) -> None:
    model = make_twins(case, next(iter(case.heads.values())), tmp_path).model
    inputs = make_inputs(case, model)
    together_TD = model(inputs.batch)
    together_TD.square().mean().backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    alone_TD = torch.cat([model(one) for one in one_by_one(inputs)])
    torch.testing.assert_close(together_TD, alone_TD, **TOLERANCE)
    alone_TD.square().mean().backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-4, atol=1e-5, msg=name)


def one_by_one(inputs: Inputs) -> list[PackedBatch]:
    lengths = inputs.batch.sequences.cu_seqlens_B1.diff().tolist()
    rows, types = inputs.batch.ids_T.split(lengths), inputs.batch.token_types_T.split(lengths)
    return [PackedBatch.from_ids([row.tolist()], [kind.tolist()]) for row, kind in zip(rows, types, strict=True)]


@pytest.mark.parametrize("case", FIRST_HEADS)
def test_recording_attention_changes_nothing(case: Case, tmp_path: Path) -> None:
    model = make_twins(case, next(iter(case.heads.values())), tmp_path).model
    inputs = make_inputs(case, model)
    recorder = Recorder(["blocks.1.attn.hook_pattern"])
    torch.testing.assert_close(model(inputs.batch, recorder), model(inputs.batch), **TOLERANCE)
    pattern_BNSS = recorder.kept["blocks.1.attn.hook_pattern"]
    for number, length in enumerate(inputs.batch.sequences.cu_seqlens_B1.diff().tolist()):
        sums = pattern_BNSS[number].sum(dim=-1)
        torch.testing.assert_close(sums[:, :length], torch.ones_like(sums[:, :length]))
        assert not sums[:, length:].any()


@pytest.mark.parametrize(("case", "head"), HEADS)
def test_every_dropout_has_the_rate_of_the_originals(case: Case, head: str, tmp_path: Path) -> None:
    """With a different rate for every setting, encoder and head use the same ones as the original's."""
    twins = make_twins(with_distinct_dropout(case), case.heads[head], tmp_path)
    encoder = twins.oracle.base_model

    def rates(module: Any) -> set[float]:
        ours = {part.rate for part in module.modules() if isinstance(part, Dropout)}
        ours |= {part.dropout_rate for part in module.modules() if isinstance(part, SelfAttention)}
        theirs = {part.p for part in module.modules() if isinstance(part, nn.Dropout)}
        # Some attention modules store their rate as a number.
        stored = [getattr(part, name, None) for part in module.modules() for name in ("dropout", "attention_dropout")]
        theirs |= {rate for rate in stored if isinstance(rate, float)}
        return (ours | theirs) - {0.0}

    in_encoder = set(encoder.modules())
    head_parts = nn.ModuleList(part for part in twins.oracle.children() if part not in in_encoder)
    assert rates(twins.model.encoder) == rates(encoder)
    names = [head, "pooler"] if twins.model.plans[head].pooled else [head]
    assert set().union(*(rates(twins.model.get_submodule(name)) for name in names)) == rates(head_parts)


@pytest.mark.parametrize(("case", "head"), HEADS)
def test_every_dropout_is_where_the_originals_is(
    case: Case, head: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In training, with every dropout replaced by a factor that depends on its rate, the logits are the original's."""
    monkeypatch.setattr(functional, "dropout", lambda x, p=0.5, training=True, inplace=False: x * (1 + p * training))
    monkeypatch.setattr(dropout, "_dropped", lambda hidden, rate: hidden * (1 + rate))
    case = with_distinct_dropout(case)
    if case.name == "bigbird":  # the original reads short sequences with full attention, which has this dropout
        case = replace(case, settings={**case.settings, "attention_probs_dropout_prob": 0.0})
    twins = make_twins(case, case.heads[head], tmp_path)
    model, oracle = twins.model.train(), twins.oracle.train()
    for part in oracle.modules():
        if type(part).__name__ == "AlbertLayer":  # google-research/albert has a dropout here
            part.ffn_output.register_forward_hook(lambda *call: call[2] * (1 + oracle.config.hidden_dropout_prob))
        if type(part).__name__ == "XLMRobertaXLOutput":  # fairseq has a dropout here
            part.dense.register_forward_hook(lambda *call: call[2] * (1 + oracle.config.hidden_dropout_prob))
    inputs = make_inputs(case, model)
    with torch.no_grad():
        expected = oracle_logits(head, ask_oracle(head, oracle, inputs.padded), inputs.real_BS)
        logits = model.logits(head, model(inputs.batch), inputs.batch)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
