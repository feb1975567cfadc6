"""DeBERTaV3's pretraining: the generator's mask decoder, embeddings shared without gradients, and the contextual head.

The formulas are written out here for one sequence at a time; the code was compared with the released one by losses and
gradients.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from bertkit.data.batch import PackedBatch
from bertkit.data.config import DataConfig
from bertkit.errors import UsageError
from bertkit.models.encoder import EncoderConfig
from bertkit.models.families.deberta import DebertaConfig
from bertkit.models.families.deberta_v2 import DebertaV2Config
from bertkit.models.files.hub import load_companions, load_model, save_model
from bertkit.models.headed import HeadedModel, with_whole_tables
from bertkit.objectives.forward import encode, pretraining_model
from bertkit.objectives.masked_lm import MaskedLM
from bertkit.objectives.random_token_detection import RandomTokenDetection
from bertkit.objectives.replaced_token import ReplacedToken
from bertkit.pretraining.loss_terms import ObjectiveTerms
from bertkit.training.cost import training_flops
from tests.objectives.test_replaced_token import CONFIG as ELECTRA
from tests.objectives.test_replaced_token import MASKED, VOCABULARY, batch_of, corrupted, generator_of, made_model

DETECTOR = ReplacedToken(
    weight=10,
    generator_size=1,
    generator_depth=0.5,
    generator_mask_decoder=True,
    tie="gradient-disentangled",
    head="contextual",
)
OBJECTIVES = (MASKED, DETECTOR)
CONFIG = DebertaV2Config(
    hidden_size=35,
    num_hidden_layers=4,
    num_attention_heads=5,
    intermediate_size=51,
    max_position_embeddings=41,
    position_buckets=8,
    legacy=False,
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
)
DIFFERENCES = "encoder.embeddings.word.difference.weight"


def decoded(model: HeadedModel, ids: Tensor) -> Tensor:
    """The states that predict the tokens of one sequence, (S, D): He et al. 2021, sections 3.1 and 3.2."""
    encoder, config = model.encoder, model.encoder.config
    *_, last = encoder.layers  # type: ignore[misc]  # a list of modules
    before = (
        type(config)
        .model_validate({**config.model_dump(), "num_hidden_layers": len(encoder.layers) - 1})
        .build(  # type: ignore[arg-type]  # a list of modules
            VOCABULARY
        )
    )
    before.load_state_dict(encoder.state_dict(), strict=False)
    hidden_SD = before(PackedBatch.from_ids([ids.tolist()]))
    size = ids.numel()
    table_RD = encoder.distance_norm(encoder.distance.weight)  # type: ignore[operator,union-attr]  # modules
    rows_d = config.rows(size)  # type: ignore[attr-defined]  # a DeBERTa's
    row_SS = rows_d[torch.arange(size)[:, None] - torch.arange(size)[None] + size - 1]
    attention, heads = last.attention, config.num_attention_heads  # type: ignore[attr-defined]  # a DeBERTa's

    def by_head(states: Tensor) -> Tensor:
        return states.unflatten(-1, (heads, -1)).transpose(0, 1)

    query_SD = hidden_SD + encoder.decoder_position.weight[:size]  # type: ignore[union-attr]  # a module
    for _ in range(2):
        query, key, value = (
            by_head(each) for each in (attention.query(query_SD), attention.key(hidden_SD), attention.value(hidden_SD))
        )
        key_of_place, query_of_place = (by_head(attention.position_map(kind)(table_RD)) for kind in ("c2p", "p2c"))
        scores = query @ key.transpose(1, 2)
        scores = scores + (query @ key_of_place.transpose(1, 2)).gather(-1, row_SS.expand_as(scores))
        asked = key @ query_of_place.transpose(1, 2)
        scores = scores + asked.gather(-1, row_SS.t().expand_as(scores)).transpose(1, 2)
        mixed = (scores / math.sqrt(3 * query.shape[-1])).softmax(dim=-1) @ value
        attended = last.attention_norm(query_SD + attention.output(mixed.transpose(0, 1).flatten(1)))
        inner = functional.gelu(last.feed_forward.inner(attended))
        query_SD = last.feed_forward_norm(attended + last.feed_forward.outer(inner))
    return query_SD


@pytest.mark.parametrize(
    "config", [CONFIG, DebertaConfig(**CONFIG.model_dump(include=DebertaConfig.model_fields.keys() - {"family"}))]
)
def test_masked_tokens_are_predicted_by_the_mask_decoder(config: EncoderConfig) -> None:
    config = type(config).model_validate({**config.model_dump(), "enhanced_mask_decoder": True})
    model = made_model((MASKED,), config).eval()
    batch = batch_of((MASKED,))
    index_M = batch.targets["masked_lm"].index_M
    with torch.no_grad():
        states_TD = encode(model, (MASKED,), batch)["masked_lm"].hidden_TD
        expected_TD = torch.cat(
            [decoded(model, ids) for ids in batch.ids_T.split(batch.sequences.cu_seqlens_B1.diff().tolist())]
        )
        plain_TD = model(batch)
    torch.testing.assert_close(states_TD[index_M], expected_TD[index_M], rtol=1e-4, atol=1e-5)
    assert (plain_TD - expected_TD).abs().max() > 0.1


def test_the_loss_is_the_same_beside_another_objective_and_a_recorder_changes_nothing() -> None:
    """Heads that are not predicted by the decoder read the last layer's states."""
    beside = RandomTokenDetection()
    config = CONFIG.model_copy(update={"enhanced_mask_decoder": True})
    model = made_model((MASKED, beside), config).eval()
    batch = batch_of((MASKED, beside))
    both = encode(model, (MASKED, beside), batch)
    alone = [encode(model, (each,), batch)[each.term] for each in (MASKED, beside)]
    for output, objective in zip(alone, (MASKED, beside), strict=True):
        assert torch.equal(both[objective.term].loss(objective).sum, output.loss(objective).sum)


def test_no_gradient_crosses_between_the_embeddings() -> None:
    model, batch = made_model(OBJECTIVES, CONFIG), batch_of(OBJECTIVES)
    difference_VE = model.get_parameter(DIFFERENCES)
    shared_VE = generator_of(model).encoder.word_embedding.weight
    outputs = encode(model, OBJECTIVES, batch)
    by_detector = torch.autograd.grad(
        outputs["replaced_token"].loss(DETECTOR).sum, [difference_VE, shared_VE], allow_unused=True
    )
    assert by_detector[0] is not None
    assert by_detector[0].abs().max() > 0
    assert by_detector[1] is None
    by_generator = torch.autograd.grad(
        outputs["masked_lm"].loss(MASKED).sum, [difference_VE, shared_VE], allow_unused=True
    )
    assert by_generator[0] is None
    assert by_generator[1].abs().max() > 0


def test_differences_begin_at_zero_and_the_saved_model_has_the_sum(tmp_path: Path) -> None:
    new = made_model(OBJECTIVES, CONFIG, large=False)
    assert not new.get_parameter(DIFFERENCES).any()
    shared_VE = generator_of(new).encoder.word_embedding.weight
    assert float(shared_VE.detach().std()) == pytest.approx(CONFIG.initializer_range, rel=0.1)
    trained = made_model(OBJECTIVES, CONFIG).eval()
    ids = [1, *range(7, 29), 2]
    save_model(trained, None, tmp_path / "model")
    loaded, report = load_model(tmp_path / "model")
    assert not report.missing
    batch = PackedBatch.from_ids([ids, ids[:5]])
    assert torch.equal(loaded(batch), trained(batch))
    checkpoint = {name: parameter.detach() for name, parameter in trained.named_parameters()}
    assert torch.equal(
        with_whole_tables(checkpoint)["encoder.embeddings.word.weight"], loaded.encoder.word_embedding.weight
    )


def test_a_run_continues_with_the_sum_it_had(tmp_path: Path) -> None:
    """From the files of model and generator; from those of a model alone, the generator starts with its embeddings."""
    trained = made_model(OBJECTIVES, CONFIG).eval()
    generator = generator_of(trained)
    save_model(trained, None, tmp_path / "model")
    save_model(generator, None, tmp_path / "generator")
    whole_VE = load_model(tmp_path / "model")[0].encoder.word_embedding.weight.detach()
    for with_generator in (True, False):
        again = pretraining_model(CONFIG, OBJECTIVES, VOCABULARY)
        again.initialise(11)
        with torch.no_grad():
            again.get_parameter(DIFFERENCES).copy_(whole_VE)  # as a model has them before it gets a companion
        again.initialise_companions(11)
        if with_generator:
            load_companions(again, tmp_path / "model")
        shared_VE = generator_of(again).encoder.word_embedding.weight
        torch.testing.assert_close(again.encoder.word_embedding.weight, whole_VE, rtol=0, atol=1e-7)
        assert torch.equal(shared_VE, generator.encoder.word_embedding.weight if with_generator else whole_VE)


def test_the_head_reads_the_sum_with_the_first_tokens_state() -> None:
    model, batch = made_model(OBJECTIVES, CONFIG).eval(), batch_of(OBJECTIVES)
    head = model.get_submodule("contextual_replaced_token")
    with torch.no_grad():
        hidden_TD = model(batch)
        logits_T = DETECTOR.logits_M(model, hidden_TD, batch)
        expected = []
        for own_SD in hidden_TD.split(batch.sequences.cu_seqlens_B1.diff().tolist()):
            normed_SD = functional.layer_norm(own_SD + own_SD[0], (35,), head.norm.weight, head.norm.bias, 1e-7)
            expected.append(head.output(functional.gelu(head.dense(normed_SD)))[:, 0])
    torch.testing.assert_close(logits_T, torch.cat(expected), rtol=1e-5, atol=1e-5)
    assert torch.equal(model.logits(head="contextual_replaced_token", hidden_TD=hidden_TD, batch=batch)[:, 0], logits_T)


def test_operations_are_those_of_torchs_counter() -> None:
    """Except for the maps of relative positions, which are computed once per batch."""
    model = made_model(OBJECTIVES, CONFIG.model_copy(update={"relative_attention": False})).eval()
    batch = PackedBatch.from_samples(corrupted(OBJECTIVES, [40] * 6))
    counter = FlopCounterMode(display=False)
    with counter, torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        ObjectiveTerms(OBJECTIVES).losses(model, batch)
    drawing = 2 * batch.targets["masked_lm"].count * (35 + VOCABULARY) * 35
    forward = (training_flops(model, [batch], OBJECTIVES) - drawing) / 3 + drawing
    assert forward == pytest.approx(float(counter.get_total_flops()), rel=1e-12)


FAULTS = [
    (ELECTRA, ReplacedToken(head="contextual"), ["head", "electra", "token"]),
    (ELECTRA, ReplacedToken(generator_mask_decoder=True), ["generator_mask_decoder", "electra", "deberta-v2"]),
    (CONFIG, ReplacedToken(generator_size=1, generator_depth=0.5, tie="all"), ["tie", "generator_depth 1"]),
]


@pytest.mark.parametrize(("config", "detector", "told"), FAULTS)
def test_a_generator_that_cannot_be_is_told(config: EncoderConfig, detector: ReplacedToken, told: list[str]) -> None:
    (fault,) = detector.errors(DataConfig(), config)
    assert all(word in fault for word in told), fault


def test_embeddings_of_a_narrower_generator_cannot_be_disentangled() -> None:
    detector = ReplacedToken(generator_size=0.2, tie="gradient-disentangled")
    with pytest.raises(UsageError, match=r"\(103, 35\) and \(103, 7\).*generator_size=1"):
        pretraining_model(CONFIG, (MASKED, detector), VOCABULARY)


def test_positions_are_added_once() -> None:
    with pytest.raises(ValueError, match=r"position_biased_input.*set one of the two"):
        DebertaV2Config(enhanced_mask_decoder=True, position_biased_input=True)


def test_keys_that_are_not_used_leave_a_recipe_as_it_was() -> None:
    assert set(ReplacedToken().model_dump()) == {"weight", "generator_size", "tie", "training"}
    assert "enhanced_mask_decoder" not in DebertaV2Config().model_dump()
    assert MaskedLM().model_dump()["units"] == {"name": "pieces"}
