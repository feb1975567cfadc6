"""Encoder-decoders against `transformers`, and their properties: packed equals padded, and pairs are independent."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.models.recomputed_source import RecomputedSourceNextTokens
from torch import Tensor
from torch.nn import functional

from bertkit.data.batch import PackedBatch
from bertkit.errors import DataError, UsageError
from bertkit.models.conversion.convert import converted, converted_config
from bertkit.models.decoding.conditional import CachedSourceNextTokens
from bertkit.models.encoder_decoder import SEQ2SEQ, EncoderDecoder
from bertkit.models.families.bart import BartConfig
from bertkit.models.families.bert import BertConfig
from bertkit.models.families.transformer import TransformerSeq2SeqConfig
from bertkit.models.files.hub import load_model, save_model
from bertkit.models.files.model_files import read_weights, write_safetensors
from bertkit.models.headed import HeadedModel
from bertkit.models.operators import dropout
from bertkit.models.recorder import Recorder

transformers = pytest.importorskip("transformers")

VOCABULARY = 97
SOURCES, TARGETS = [7, 19, 1, 9, 9, 24], [5, 2, 17, 8, 1, 9]
TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}
IDS = {"pad_token_id": 0, "eos_token_id": 3, "decoder_start_token_id": 2, "bos_token_id": None}
SIZES = {
    "d_model": 36,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 3,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 50,
    "decoder_ffn_dim": 44,
    "max_position_embeddings": 30,
    "forced_eos_token_id": None,
    **IDS,
}


@dataclass(frozen=True)
class Family:
    """A class of `transformers`, its configuration, and the bare class."""

    name: str
    config_class: str
    architecture: str
    settings: dict[str, Any]

    def __str__(self) -> str:
        return self.name


T5_SIZES = {
    "d_model": 36,
    "d_kv": 7,
    "d_ff": 50,
    "num_layers": 2,
    "num_decoder_layers": 3,
    "num_heads": 3,
    # So few that sources and targets reach the last ones.
    "relative_attention_num_buckets": 10,
    "relative_attention_max_distance": 14,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "decoder_start_token_id": 0,
}
FAMILIES = [
    Family(
        "transformer",
        "MarianConfig",
        "MarianMTModel",
        {**SIZES, "scale_embedding": True, "activation_function": "relu"},
    ),
    Family(
        "transformer-swish",
        "MarianConfig",
        "MarianMTModel",
        {**SIZES, "activation_function": "swish", "activation_dropout": 0.2, "attention_dropout": 0.15},
    ),
    Family("bart", "BartConfig", "BartForConditionalGeneration", SIZES),
    Family("bart-scaled", "BartConfig", "BartForConditionalGeneration", {**SIZES, "scale_embedding": True}),
    Family("t5", "T5Config", "T5ForConditionalGeneration", T5_SIZES),
    Family(
        "t5-1.1",
        "T5Config",
        "T5ForConditionalGeneration",
        {**T5_SIZES, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False, "num_layers": 1},
    ),
]
families = pytest.mark.parametrize("family", FAMILIES, ids=str)


def make_oracle(family: Family) -> Any:
    config = getattr(transformers, family.config_class)(
        **family.settings, vocab_size=VOCABULARY, attn_implementation="eager"
    )
    oracle = getattr(transformers, family.architecture)(config)
    if family.settings.get("tie_word_embeddings") is False:
        # transformers 5 ties new models in any case, and keeps separate weights of a file.
        oracle.lm_head.weight = torch.nn.Parameter(torch.empty(VOCABULARY, config.d_model))
    return redrawn(oracle)


def redrawn(oracle: Any) -> Any:
    """With weights large enough that every part matters."""
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in oracle.parameters():
            # Sinusoids are parameters there that get no gradient.
            if parameter.requires_grad:
                parameter.normal_(0, 0.2)
    return oracle.eval()


def twins(family: Family, directory: Path) -> tuple[Any, HeadedModel]:
    oracle = make_oracle(family)
    oracle.save_pretrained(directory)
    model, report = load_model(directory)
    assert not report.missing
    assert not report.unexpected
    return oracle, model


def rows(lengths: list[int], seed: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(1, VOCABULARY, (length,), generator=generator).tolist() for length in lengths]


def padded(some: list[list[int]]) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in some], batch_first=True)


def sides(batch: PackedBatch, states_TD: Tensor) -> tuple[Tensor, Tensor]:
    assert batch.pairs is not None
    return batch.pairs.sides(states_TD)


def real(some: list[list[int]], of_BS: Tensor) -> Tensor:
    return torch.cat([of_BS[number, : len(row)] for number, row in enumerate(some)])


@families
def test_every_dropout_is_where_the_originals_is(
    family: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In training, with every dropout replaced by a factor that depends on its rate, the logits are the original's."""
    monkeypatch.setattr(functional, "dropout", lambda x, p=0.5, training=True, inplace=False: x * (1 + p * training))
    monkeypatch.setattr(dropout, "_dropped", lambda hidden, rate: hidden * (1 + rate))
    names = ("dropout_rate",) if family.config_class == "T5Config" else ("dropout", "attention_dropout")
    rates = {name: 0.07 + 0.04 * number for number, name in enumerate((*names, "activation_dropout"))}
    oracle, model = twins(replace(family, settings={**family.settings, **rates}), tmp_path)
    sources, targets = rows(SOURCES, 1), rows(TARGETS, 2)
    batch = PackedBatch.from_pairs(sources, targets)
    with torch.no_grad():
        _, decoded_UD = sides(batch, model.train()(batch))
        logits_UV = model.token_logits(SEQ2SEQ, decoded_UD)
        outputs = oracle.train()(
            input_ids=padded(sources),
            attention_mask=padded([[1] * len(row) for row in sources]),
            decoder_input_ids=padded(targets),
        )
    torch.testing.assert_close(logits_UV, real(targets, outputs.logits), **TOLERANCE)


@families
def test_states_logits_and_gradients_equal_the_original(family: Family, tmp_path: Path) -> None:
    oracle, model = twins(family, tmp_path)
    assert model.head_names == (SEQ2SEQ,)
    sources, targets = rows(SOURCES, 1), rows(TARGETS, 2)
    batch = PackedBatch.from_pairs(sources, targets)
    encoded_SD, decoded_UD = sides(batch, model(batch))
    logits_UV = model.token_logits(SEQ2SEQ, decoded_UD)
    outputs = oracle(
        input_ids=padded(sources),
        attention_mask=padded([[1] * len(row) for row in sources]),
        decoder_input_ids=padded(targets),
    )
    torch.testing.assert_close(logits_UV, real(targets, outputs.logits), **TOLERANCE)
    torch.testing.assert_close(encoded_SD, real(sources, outputs.encoder_last_hidden_state), **TOLERANCE)
    logits_UV.square().mean().backward()
    real(targets, outputs.logits).square().mean().backward()
    ours = model.hub_form().to_hub({name: part.grad for name, part in model.named_parameters()})
    theirs = {name: part.grad for name, part in oracle.named_parameters() if part.grad is not None}
    assert set(ours) == set(theirs)
    for name, gradient in ours.items():
        torch.testing.assert_close(gradient, theirs[name], rtol=1e-4, atol=1e-6, msg=name)


@families
def test_what_is_saved_loads_in_the_original_class(family: Family, tmp_path: Path) -> None:
    oracle, model = twins(family, tmp_path / "theirs")
    save_model(model, None, tmp_path / "ours")
    again, information = getattr(transformers, family.architecture).from_pretrained(
        tmp_path / "ours", output_loading_info=True, local_files_only=True
    )
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        assert not information[problem], information[problem]
    theirs, ours = oracle.state_dict(), again.state_dict()
    assert set(theirs) == set(ours)
    assert all(torch.equal(theirs[name], ours[name]) for name in theirs)
    written = again.config.to_dict()
    for key, value in oracle.config.to_dict().items():
        if key not in ("_name_or_path", "transformers_version", "dtype"):
            assert written[key] == value, key


@families
def test_a_bare_model_goes_there_and_back(family: Family, tmp_path: Path) -> None:
    bare = redrawn(transformers.AutoModel.from_config(make_oracle(family).config))
    bare.save_pretrained(tmp_path / "theirs")
    model, report = load_model(tmp_path / "theirs")
    assert (report.missing, report.unexpected, model.head_names) == ([], [], ())
    save_model(model, None, tmp_path / "ours")
    again = type(bare).from_pretrained(tmp_path / "ours", local_files_only=True)
    assert all(torch.equal(tensor, again.state_dict()[name]) for name, tensor in bare.state_dict().items())


@families
@pytest.mark.parametrize("training", [False, True])
def test_no_pair_sees_another(family: Family, training: bool, tmp_path: Path) -> None:
    _, model = twins(family, tmp_path)
    model.train(training)
    sources, targets = rows(SOURCES, 1), rows(TARGETS, 2)
    states = []
    for shift in (0, 1):
        changed = [[(token + shift) % VOCABULARY for token in row] for row in (sources[1], targets[1])]
        torch.manual_seed(5)
        batch = PackedBatch.from_pairs([sources[0], changed[0], *sources[2:]], [targets[0], changed[1], *targets[2:]])
        states.append(model(batch))
    bounds = batch.sequences.cu_seqlens_B1.tolist()
    own = torch.zeros(batch.num_tokens, dtype=torch.bool)
    own[bounds[1] : bounds[2]] = True
    assert torch.equal(states[0][~own], states[1][~own])
    assert not torch.equal(states[0][own], states[1][own])


@families
def test_a_batch_equals_its_pairs_one_by_one_with_gradients(family: Family, tmp_path: Path) -> None:
    _, model = twins(family, tmp_path)
    sources, targets = rows(SOURCES, 1), rows(TARGETS, 2)
    together = model(PackedBatch.from_pairs(sources, targets))
    together.square().mean().backward()
    gradients = {name: part.grad for name, part in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    alone = torch.cat(
        [model(PackedBatch.from_pairs([one], [other])) for one, other in zip(sources, targets, strict=True)]
    )
    torch.testing.assert_close(together, alone, **TOLERANCE)
    alone.square().mean().backward()
    for name, part in model.named_parameters():
        torch.testing.assert_close(gradients[name], part.grad, rtol=1e-4, atol=1e-5, msg=name)


@families
def test_a_target_sees_its_past_and_all_of_its_source(family: Family, tmp_path: Path) -> None:
    _, model = twins(family, tmp_path)
    source, target = rows([6], 1), rows([7], 2)
    with torch.no_grad():
        before = sides(PackedBatch.from_pairs(source, target), model(PackedBatch.from_pairs(source, target)))[1]
        for place in range(7):
            other = [[*target[0][:place], (target[0][place] + 1) % VOCABULARY, *target[0][place + 1 :]]]
            batch = PackedBatch.from_pairs(source, other)
            after = sides(batch, model(batch))[1]
            assert torch.equal(before[:place], after[:place])
            assert not torch.equal(before[place], after[place])
        other = [[*source[0][:-1], (source[0][-1] + 1) % VOCABULARY]]
        batch = PackedBatch.from_pairs(other, target)
        assert ((sides(batch, model(batch))[1] - before).abs().amax(dim=1) > 0).all()


@families
def test_without_targets_the_encoder_reads_alone(family: Family, tmp_path: Path) -> None:
    _, model = twins(family, tmp_path)
    sources, targets = rows(SOURCES, 1), rows(TARGETS, 2)
    batch = PackedBatch.from_pairs(sources, targets)
    torch.testing.assert_close(model(PackedBatch.from_ids(sources)), sides(batch, model(batch))[0], **TOLERANCE)


@families
def test_attention_to_the_source_is_recorded(family: Family, tmp_path: Path) -> None:
    _, model = twins(family, tmp_path)
    batch = PackedBatch.from_pairs(rows(SOURCES, 1), rows(TARGETS, 2))
    recorder = Recorder(["decoder.blocks.1.cross_attn.hook_pattern"])
    torch.testing.assert_close(model(batch, recorder), model(batch), **TOLERANCE)
    pattern_BNQK = recorder.kept["decoder.blocks.1.cross_attn.hook_pattern"]
    for number, (source, target) in enumerate(zip(SOURCES, TARGETS, strict=True)):
        assert not pattern_BNQK[number, :, :, source:].any()
        assert not pattern_BNQK[number, :, target:].any()
        sums = pattern_BNQK[number, :, :target].sum(dim=-1)
        torch.testing.assert_close(sums, torch.ones_like(sums))


@families
def test_the_cache_gives_the_logits_of_reading_all_again(family: Family, tmp_path: Path) -> None:
    """With sources and prompts of unequal lengths, and rows that are repeated, reordered and dropped."""
    _, model = twins(family, tmp_path)
    sources, prompts = rows([4, 11, 2], 1), [[2], [2, 9, 4], [2, 7]]
    generator = torch.Generator().manual_seed(4)
    decoders: list[CachedSourceNextTokens] = [CachedSourceNextTokens(model), RecomputedSourceNextTokens(model)]
    with torch.inference_mode():
        both = []
        for decoder in decoders:
            decoder.read(sources)
            both.append(decoder.start(prompts, 16))
        torch.testing.assert_close(*both, **TOLERANCE)
        for order in ([0, 0, 2, 1], [3, 1, 0, 0], [2, 0], [1, 0], [0, 1]):
            for decoder in decoders:
                decoder.select(torch.tensor(order))
            token_R = torch.randint(1, VOCABULARY, (len(order),), generator=generator)
            torch.testing.assert_close(*(decoder.step(token_R) for decoder in decoders), **TOLERANCE)


def test_a_bias_for_each_word_is_refused(tmp_path: Path) -> None:
    oracle = make_oracle(FAMILIES[0])
    oracle.save_pretrained(tmp_path)
    tensors = read_weights(tmp_path / "model.safetensors")
    tensors["final_logits_bias"] = torch.ones(1, VOCABULARY)
    write_safetensors(tmp_path / "model.safetensors", tensors)
    with pytest.raises(DataError, match="final_logits_bias is not zero"):
        load_model(tmp_path)


def test_sines_are_those_of_the_paper() -> None:
    """PE(p, 2i) = sin(p / 10000^(2i/D)); here all sines come first."""
    from bertkit.models.families.transformer import sinusoids

    table = sinusoids(50, 8, torch.device("cpu"))
    for position in (0, 1, 17, 49):
        for i in range(4):
            angle = torch.tensor(position / 10000 ** (2 * i / 8))
            torch.testing.assert_close(table[position, i], torch.sin(angle), rtol=0, atol=1e-5)
            torch.testing.assert_close(table[position, 4 + i], torch.cos(angle), rtol=0, atol=1e-5)


def test_the_encoder_is_torchs(tmp_path: Path) -> None:
    """With torch's own layer, which shares no code with bertkit or `transformers`."""
    _, model = twins(FAMILIES[0], tmp_path)
    stacks = model.encoder
    assert isinstance(stacks, EncoderDecoder)
    layer = torch.nn.TransformerEncoderLayer(36, 3, 50, dropout=0.0, batch_first=True)
    state = stacks.layers[0].state_dict()
    kinds = ("query", "key", "value")
    layer.load_state_dict(
        {
            "self_attn.in_proj_weight": torch.cat([state[f"attention.{kind}.weight"] for kind in kinds]),
            "self_attn.in_proj_bias": torch.cat([state[f"attention.{kind}.bias"] for kind in kinds]),
            "self_attn.out_proj.weight": state["attention.output.weight"],
            "self_attn.out_proj.bias": state["attention.output.bias"],
            "linear1.weight": state["feed_forward.inner.weight"],
            "linear1.bias": state["feed_forward.inner.bias"],
            "linear2.weight": state["feed_forward.outer.weight"],
            "linear2.bias": state["feed_forward.outer.bias"],
            "norm1.weight": state["attention_norm.weight"],
            "norm1.bias": state["attention_norm.bias"],
            "norm2.weight": state["feed_forward_norm.weight"],
            "norm2.bias": state["feed_forward_norm.bias"],
        }
    )
    recorder = Recorder(["blocks.0.hook_resid_pre", "blocks.0.hook_resid_post"])
    with torch.no_grad():
        model(PackedBatch.from_ids(rows([9], 1)), recorder)
        expected = layer.eval()(recorder.kept["blocks.0.hook_resid_pre"][None])[0]
    torch.testing.assert_close(recorder.kept["blocks.0.hook_resid_post"], expected, **TOLERANCE)


def test_initial_weights_are_those_of_tensor2tensor() -> None:
    """Words with the inverse root of the width, linear maps uniform up to sqrt(6 / (inputs + outputs)), biases zero."""
    config = TransformerSeq2SeqConfig(hidden_size=64, num_hidden_layers=1, intermediate_size=96)
    model = HeadedModel(config.build(500), (SEQ2SEQ,))
    model.initialise(0)
    for name, part in model.named_parameters():
        if name.endswith("word.weight"):
            assert part.std().item() == pytest.approx(64**-0.5, rel=0.02)
        elif "norm" in name:
            assert part.unique().tolist() == [1.0 if name.endswith("weight") else 0.0]
        elif name.endswith("bias"):
            assert not part.any()
        else:
            bound = (6 / sum(part.shape)) ** 0.5
            assert 0.99 * bound < part.abs().max().item() <= bound
            assert part.std().item() == pytest.approx(bound / 3**0.5, rel=0.05)


def test_both_stacks_start_as_a_bert_but_for_what_joins_them() -> None:
    """BERT2BERT: the encoder computes BERT's states, the decoder has its weights, the cross-attention is new."""
    sizes = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 40}
    config = BertConfig(**sizes, max_position_embeddings=20, layer_norm_eps=1e-5, hidden_act="gelu")
    bert = HeadedModel(config.build(50)).eval()
    bert.initialise(1)
    with torch.no_grad():
        for part in bert.parameters():
            part.add_(torch.randn_like(part) * 0.1)
    wanted = BartConfig(hidden_size=48, max_position_embeddings=16, num_decoder_layers=1, activation_dropout_prob=0.3)
    found = converted_config(config, wanted)
    assert isinstance(found, BartConfig)
    assert found.activation_dropout_prob == 0.3, "BERT has no such setting"
    assert (found.hidden_size, found.max_position_embeddings, found.decoder_layer_count) == (24, 16, 1)
    model = converted(bert, found, [SEQ2SEQ])
    assert model.head_names == (SEQ2SEQ,)
    ids = rows([16, 3, 9], 5)
    ids = [[token % 50 for token in row] for row in ids]
    with torch.no_grad():
        torch.testing.assert_close(model(PackedBatch.from_ids(ids)), bert(PackedBatch.from_ids(ids)), **TOLERANCE)
    ours, theirs = model.state_dict(), bert.state_dict()
    for kind in ("query", "key", "value", "output"):
        same = f"layers.0.attention.{kind}.weight"
        assert torch.equal(ours[f"encoder.decoder_{same}"], theirs[f"encoder.{same}"])
        assert ours[f"encoder.decoder_layers.0.cross_attention.{kind}.weight"].std() > 0.01
    with pytest.raises(UsageError, match=r"max_position_embeddings \(30\) exceeds the initial model's 20"):
        converted(bert, found.model_copy(update={"max_position_embeddings": 30}), [SEQ2SEQ])
