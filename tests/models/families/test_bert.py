"""BERT against `transformers`, packed against padded and single sequences, and independence between sequences."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from bertkit.data.batch import PackedBatch
from bertkit.models.families.bert import BertConfig, MegatronBertConfig
from bertkit.models.headed import HeadedModel
from bertkit.models.recorder import Recorder
from bertkit.models.weights import compare_weights, load_weights, to_hub_names
from bertkit.training.cost import count_parameters

HEADS = ("masked_lm", "next_sentence")
SIZES = {
    "hidden_size": 35,
    "num_hidden_layers": 2,
    "num_attention_heads": 5,
    "intermediate_size": 51,
    "max_position_embeddings": 23,
    "type_vocab_size": 3,
}
VOCABULARY = 97
LENGTHS = [[23, 1, 7, 22, 16, 7], [9, 9, 9], [4], [2, 21, 20, 19, 3, 3, 18]]
ORACLES = [(BertConfig, "BertForPreTraining"), (MegatronBertConfig, "MegatronBertForPreTraining")]


def ids_of(lengths: list[int], seed: int = 0) -> tuple[list[list[int]], list[list[int]]]:
    generator = torch.Generator().manual_seed(seed)
    # Id 0 is padding in `transformers`, whose embedding gets no gradient; packed batches contain none of it.
    ids = [torch.randint(1, VOCABULARY, (length,), generator=generator).tolist() for length in lengths]
    types = [torch.randint(0, 3, (length,), generator=generator).tolist() for length in lengths]
    return ids, types


def random_model(kind: type[BertConfig] | type[MegatronBertConfig] = BertConfig, **changes: Any) -> HeadedModel:
    model = HeadedModel(kind(**{**SIZES, **changes}).build(VOCABULARY), HEADS)
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3)
    return model.eval()


def oracle_pair(kind: Any, oracle_name: str, activation: str) -> tuple[HeadedModel, Any]:
    """A random `transformers` model, and bertkit's with its weights."""
    transformers = pytest.importorskip("transformers")
    config = kind(**SIZES, hidden_act=activation)
    oracle_class = getattr(transformers, oracle_name)
    oracle_config = oracle_class.config_class(
        **config.model_dump(exclude={"family"}), vocab_size=VOCABULARY, attn_implementation="eager"
    )
    torch.manual_seed(1)
    oracle = oracle_class(oracle_config).eval()
    with torch.no_grad():
        for parameter in oracle.parameters():
            parameter.normal_(0, 0.2)
    model = HeadedModel(config.build(VOCABULARY), HEADS).eval()
    tensors, form = dict(oracle.named_parameters()), model.hub_form()
    report = compare_weights(model, tensors, form, source="oracle")
    with torch.no_grad():
        load_weights(model, tensors, form, report)
    assert not report.missing
    assert not report.unexpected
    return model, oracle


def padded(rows: list[list[int]]) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True)


@pytest.mark.parametrize("activation", ["gelu", "gelu_new", "relu"])
@pytest.mark.parametrize(("kind", "oracle_name"), ORACLES)
@pytest.mark.parametrize("lengths", LENGTHS)
def test_states_logits_and_gradients_equal_transformers(
    kind: Any, oracle_name: str, activation: str, lengths: list[int]
) -> None:
    model, oracle = oracle_pair(kind, oracle_name, activation)
    ids, types = ids_of(lengths)
    batch = PackedBatch.from_ids(ids, types)
    layers = SIZES["num_hidden_layers"]
    recorder = Recorder([f"blocks.{layer}.hook_resid_post" for layer in range(layers)])
    hidden_TD = model(batch, recorder)
    token_logits_TV = model.masked_lm_logits(hidden_TD)
    pair_logits_B2 = model.sequence_logits("next_sentence", hidden_TD[batch.first_token_B])

    real_BS = padded([[1] * length for length in lengths]).bool()
    expected = oracle(
        padded(ids), attention_mask=real_BS.long(), token_type_ids=padded(types), output_hidden_states=True
    )
    # Megatron's class returns the states after its final norm instead of the last layer's.
    for layer in range(layers - (kind is MegatronBertConfig)):
        ours, theirs = recorder.kept[f"blocks.{layer}.hook_resid_post"], expected.hidden_states[layer + 1][real_BS]
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(hidden_TD, expected.hidden_states[-1][real_BS], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(token_logits_TV, expected.prediction_logits[real_BS], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(pair_logits_B2, expected.seq_relationship_logits, rtol=1e-5, atol=1e-5)

    (token_logits_TV.square().mean() + pair_logits_B2.square().mean()).backward()
    loss = expected.prediction_logits[real_BS].square().mean() + expected.seq_relationship_logits.square().mean()
    loss.backward()
    names = {parameter: name for name, parameter in model.named_parameters()}
    gradients = {name: parameter.grad for parameter, name in names.items()}
    oracle_gradients = {name: parameter.grad for name, parameter in oracle.named_parameters()}
    for name, hub_name in to_hub_names(gradients, model.hub_form().names).items():
        torch.testing.assert_close(gradients[name], oracle_gradients[hub_name], rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("kind", [BertConfig, MegatronBertConfig])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_a_batch_equals_its_sequences_one_by_one(kind: Any, lengths: list[int]) -> None:
    model = random_model(kind)
    ids, types = ids_of(lengths)
    together_TD = model(PackedBatch.from_ids(ids, types))
    together_TD.square().sum().backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    model.zero_grad(set_to_none=True)
    alone = [model(PackedBatch.from_ids([one], [kinds])) for one, kinds in zip(ids, types, strict=True)]
    torch.testing.assert_close(together_TD, torch.cat(alone), rtol=1e-5, atol=1e-5)
    torch.cat(alone).square().sum().backward()
    for ours, theirs in zip(gradients, (parameter.grad for parameter in model.parameters()), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("training", [False, True])
def test_one_sequence_never_sees_another(training: bool) -> None:
    lengths = [5, 17, 9, 23, 9]
    model = random_model().train(training)
    ids, types = ids_of(lengths)
    changed = [list(row) for row in ids]
    changed[1] = [(token + 1) % VOCABULARY for token in changed[1]]
    changed_T = torch.tensor([number == 1 for number, length in enumerate(lengths) for _ in range(length)])
    states = []
    for rows in (ids, changed):
        torch.manual_seed(5)
        states.append(model(PackedBatch.from_ids(rows, types)))
    before_TD, after_TD = states
    assert torch.equal(before_TD[~changed_T], after_TD[~changed_T])
    assert not torch.equal(before_TD[changed_T], after_TD[changed_T])


def test_the_order_of_sequences_does_not_matter() -> None:
    model = random_model()
    ids, types = ids_of([5, 17, 9, 23])
    forward_TD = model(PackedBatch.from_ids(ids, types))
    backward_TD = model(PackedBatch.from_ids(ids[::-1], types[::-1]))
    parts = backward_TD.split([23, 9, 17, 5])
    torch.testing.assert_close(forward_TD, torch.cat(parts[::-1]), rtol=1e-5, atol=1e-5)


def test_recording_attention_changes_nothing_and_rows_sum_to_one() -> None:
    lengths = [5, 17, 9]
    model = random_model()
    batch = PackedBatch.from_ids(*ids_of(lengths))
    recorder = Recorder(["blocks.1.attn.hook_pattern"])
    torch.testing.assert_close(model(batch, recorder), model(batch), rtol=1e-5, atol=1e-5)
    pattern_BNSS = recorder.kept["blocks.1.attn.hook_pattern"]
    assert pattern_BNSS.shape == (3, 5, 17, 17)
    for number, length in enumerate(lengths):
        sums = pattern_BNSS[number].sum(dim=-1)
        torch.testing.assert_close(sums[:, :length], torch.ones_like(sums[:, :length]))
        assert not pattern_BNSS[number, :, :, length:].any()
        assert not pattern_BNSS[number, :, length:].any()


def test_a_gated_head_is_a_removed_head() -> None:
    model = random_model()
    batch = PackedBatch.from_ids(*ids_of([5, 17]))

    def gate(z_TNH: Tensor) -> Tensor:
        return z_TNH * torch.tensor([1.0, 0, 1, 1, 1])[:, None]

    gated_TD = model(batch, Recorder(edits={"blocks.0.attn.hook_z": gate}))
    with torch.no_grad():
        model.encoder.layers[0].attention.output.weight[:, 7:14] = 0
    torch.testing.assert_close(gated_TD, model(batch), rtol=1e-5, atol=1e-5)


PUBLISHED = {
    # Devlin et al. 2019 and the released configurations; computed from the architecture.
    "base": ((12, 768, 12), 30_522, 110_106_428, 109_482_240),
    "large": ((24, 1024, 16), 30_522, 336_226_108, 335_141_888),
    "base-cased": ((12, 768, 12), 28_996, None, 108_310_272),
    "large-cased": ((24, 1024, 16), 28_996, None, 333_579_264),
    "tiny": ((2, 128, 2), 30_522, 4_433_468, 4_385_920),
    "mini": ((4, 256, 4), 30_522, 11_267_900, 11_170_560),
    "small": ((4, 512, 8), 30_522, 29_058_876, 28_763_648),
    "medium": ((8, 512, 8), 30_522, 41_668_412, 41_373_184),
}


@pytest.mark.parametrize("size", PUBLISHED)
def test_parameters_are_as_many_as_published(size: str) -> None:
    (layers, width, heads), vocabulary, total, backbone = PUBLISHED[size]
    config = BertConfig(
        num_hidden_layers=layers, hidden_size=width, num_attention_heads=heads, intermediate_size=4 * width
    )
    with torch.device("meta"):
        counted = count_parameters(HeadedModel(config.build(vocabulary), HEADS))
    assert counted.backbone == backbone
    assert total is None or counted.total == total
