"""A BERT with a GPT-2 as its decoder: against `transformers`' class of both, and its initial weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.models.recomputed_source import RecomputedSourceNextTokens
from tests.probing.tiny_models import tiny_tokenizer
from torch import Tensor

from bertkit.data.batch import PackedBatch
from bertkit.errors import DataError, UsageError
from bertkit.generation.from_source import SourceTokens
from bertkit.models.conversion.convert import converted, converted_config
from bertkit.models.decoding.conditional import CachedSourceNextTokens
from bertkit.models.encoder_decoder import SEQ2SEQ
from bertkit.models.families.bert import BertConfig
from bertkit.models.families.bert_gpt2 import BertGpt2Config, start_decoder
from bertkit.models.families.gpt2 import Gpt2Config
from bertkit.models.files.hub import load_model, save_model
from bertkit.models.headed import HeadedModel

transformers = pytest.importorskip("transformers")

VOCABULARY = 53
SOURCES, TARGETS = [7, 13, 1, 9], [5, 2, 11, 8]
TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}
BERT = BertConfig(
    hidden_size=24, num_hidden_layers=2, num_attention_heads=3, intermediate_size=40, max_position_embeddings=20
)
GPT2 = Gpt2Config(
    hidden_size=24, num_hidden_layers=3, num_attention_heads=4, intermediate_size=30, max_position_embeddings=16
)
_MAPS = {"query": "q_attn", "output": "c_proj"}


def trained(config: BertConfig | Gpt2Config, directory: Path, seed: int) -> tuple[Any, HeadedModel]:
    """A model of `transformers` with weights large enough that every part matters, and the same here."""
    kinds = {BertConfig: ("BertConfig", "BertModel"), Gpt2Config: ("GPT2Config", "GPT2LMHeadModel")}
    config_class, model_class = (getattr(transformers, name) for name in kinds[type(config)])
    oracle = model_class(config_class(**config.to_hub(), vocab_size=VOCABULARY, attn_implementation="eager"))
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in oracle.parameters():
            parameter.normal_(0, 0.2)
    oracle.eval().save_pretrained(directory)
    return oracle, load_model(directory, heads=[])[0]


def joined(directory: Path) -> tuple[Any, HeadedModel]:
    """Both sides with randomly initialised cross-attention, in `transformers` and here."""
    _, bert = trained(BERT, directory / "bert", 1)
    _, gpt2 = trained(GPT2, directory / "gpt2", 2)
    found = converted_config(BERT, BertGpt2Config(hidden_size=48, max_position_embeddings=20))
    assert isinstance(found, BertGpt2Config)
    model = converted(bert, found.with_decoder(GPT2), [SEQ2SEQ])
    start_decoder(model, gpt2)
    oracle = transformers.EncoderDecoderModel.from_encoder_decoder_pretrained(
        directory / "bert", directory / "gpt2", decoder_attn_implementation="eager", encoder_attn_implementation="eager"
    ).eval()
    torch.manual_seed(3)
    with torch.no_grad():
        for number, block in enumerate(oracle.decoder.transformer.h):
            ours = model.encoder.get_submodule(f"decoder_layers.{number}")
            for name, part in ours.named_parameters():
                if "cross_attention" in name:
                    part.normal_(0, 0.2)
            attention = ours.get_submodule("cross_attention")
            for here, there in _MAPS.items():  # a Conv1D there, whose weight is transposed
                block.crossattention.get_submodule(there).weight.copy_(attention.get_parameter(f"{here}.weight").t())
                block.crossattention.get_submodule(there).bias.copy_(attention.get_parameter(f"{here}.bias"))
            for kind, ending in (("weight", 1), ("bias", 0)):
                both = [attention.get_parameter(f"{name}.{kind}").t() for name in ("key", "value")]
                block.crossattention.c_attn.get_parameter(kind).copy_(torch.cat(both, dim=ending))
            norm = ours.get_submodule("cross_attention_norm")
            block.ln_cross_attn.load_state_dict(norm.state_dict())
    return oracle, model.eval()


def rows(lengths: list[int], seed: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(1, VOCABULARY, (length,), generator=generator).tolist() for length in lengths]


def padded(some: list[list[int]]) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in some], batch_first=True)


def test_logits_are_those_of_both_joined_there(tmp_path: Path) -> None:
    oracle, model = joined(tmp_path)
    sources, targets = rows(SOURCES, 1), rows(TARGETS, 2)
    batch = PackedBatch.from_pairs(sources, targets)
    assert batch.pairs is not None
    encoded_SD, decoded_UD = batch.pairs.sides(model(batch))
    outputs = oracle(
        input_ids=padded(sources),
        attention_mask=padded([[1] * len(row) for row in sources]),
        decoder_input_ids=padded(targets),
    )

    def real(some: list[list[int]], of_BS: Tensor) -> Tensor:
        return torch.cat([of_BS[number, : len(row)] for number, row in enumerate(some)])

    torch.testing.assert_close(encoded_SD, real(sources, outputs.encoder_last_hidden_state), **TOLERANCE)
    logits_UV = model.token_logits(SEQ2SEQ, decoded_UD)
    torch.testing.assert_close(logits_UV, real(targets, outputs.logits), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(logits_UV.softmax(-1), real(targets, outputs.logits).softmax(-1), **TOLERANCE)


def test_each_side_starts_to_the_bit_and_what_joins_them_is_drawn(tmp_path: Path) -> None:
    _, bert = trained(BERT, tmp_path / "bert", 1)
    _, gpt2 = trained(GPT2, tmp_path / "gpt2", 2)
    config = converted_config(BERT, BertGpt2Config(max_position_embeddings=20))
    assert isinstance(config, BertGpt2Config)
    model = converted(bert, config.with_decoder(GPT2), [SEQ2SEQ])
    start_decoder(model, gpt2)
    ours = dict(model.encoder.named_parameters())
    for name, parameter in bert.encoder.named_parameters():
        assert torch.equal(ours[f"source.{name}"], parameter)
    assert torch.equal(ours["target_words.weight"], gpt2.encoder.get_parameter("embeddings.word.weight"))
    for number in range(3):
        for part in ("attention.query.weight", "feed_forward.outer.bias", "attention_norm.weight"):
            assert torch.equal(
                ours[f"decoder_layers.{number}.{part}"], gpt2.encoder.get_parameter(f"layers.{number}.{part}")
            )
        assert 0.01 < ours[f"decoder_layers.{number}.cross_attention.key.weight"].std() < 0.03
        assert ours[f"decoder_layers.{number}.cross_attention_norm.weight"].eq(1).all()
    with pytest.raises(UsageError, match="the GPT-2 is 32 wide and the encoder 24"):
        config.with_decoder(GPT2.model_copy(update={"hidden_size": 32}))
    with pytest.raises(UsageError, match="layer_norm_epsilon is 1e-06"):
        config.with_decoder(GPT2.model_copy(update={"layer_norm_eps": 1e-6}))
    with pytest.raises(UsageError, match="scales its scores by layer"):
        config.with_decoder(GPT2.model_copy(update={"scale_attn_by_inverse_layer_idx": True}))


def test_the_cache_gives_the_logits_of_reading_all_again(tmp_path: Path) -> None:
    _, model = joined(tmp_path)
    sources, prompts = rows([4, 11, 2], 1), [[2], [2, 9, 4], [2, 7]]
    decoders: list[CachedSourceNextTokens] = [CachedSourceNextTokens(model), RecomputedSourceNextTokens(model)]
    generator = torch.Generator().manual_seed(4)
    with torch.inference_mode():
        for decoder in decoders:
            decoder.read(sources)
        torch.testing.assert_close(*(decoder.start(prompts, 14) for decoder in decoders), rtol=1e-4, atol=1e-4)
        for order in ([0, 0, 2, 1], [3, 1, 0, 0], [2, 0]):
            for decoder in decoders:
                decoder.select(torch.tensor(order))
            token_R = torch.randint(1, VOCABULARY, (len(order),), generator=generator)
            torch.testing.assert_close(*(decoder.step(token_R) for decoder in decoders), rtol=1e-4, atol=1e-4)


def test_it_comes_back_from_its_directory(tmp_path: Path) -> None:
    _, model = joined(tmp_path)
    save_model(model, None, tmp_path / "saved")
    again, report = load_model(tmp_path / "saved")
    assert (report.missing, report.unexpected) == ([], [])
    assert again.encoder.config == model.encoder.config
    batch = PackedBatch.from_pairs(rows(SOURCES, 1), rows(TARGETS, 2))
    assert torch.equal(again.eval()(batch), model(batch))


@pytest.mark.parametrize(("side", "lengths"), [("source", (21, 5)), ("target", (5, 17))])
def test_a_side_longer_than_its_own_table_is_a_fault_of_the_data(side: str, lengths: tuple[int, int]) -> None:
    """BERT has 20 positions, GPT-2 has 16; the model's maximum is that of the longer table."""
    config = BertGpt2Config(hidden_size=48, max_position_embeddings=20).with_decoder(
        GPT2.model_copy(update={"hidden_size": 48})
    )
    assert (config.max_tokens, config.max_source_tokens, config.max_target_tokens) == (20, 20, 16)
    model = HeadedModel(config.build(VOCABULARY), [SEQ2SEQ])
    model.initialise(0)
    source, target = rows(list(lengths), 1)
    with pytest.raises(DataError, match=rf"a {side} has {max(lengths)} tokens, but the model reads at most"):
        model(PackedBatch.from_pairs([source], [target]))
    model(PackedBatch.from_pairs([source[:20]], [target[:16]]))


def test_sources_and_targets_are_limited_each_by_its_own_table() -> None:
    tokenizer = tiny_tokenizer()
    config = BertGpt2Config(hidden_size=48, max_position_embeddings=20, decoder_position_embeddings=30)
    tokens = SourceTokens.of(HeadedModel(config.build(tokenizer.vocab_size), [SEQ2SEQ]), tokenizer)
    assert tokens.prompts([[1, 2, 3]], 99)[0].room == 29
    with pytest.raises(DataError, match="reads at most 20; shorten it"):
        tokens.sources(["a cat " * 20])
