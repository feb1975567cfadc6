"""Electric: towers and loss against `transformers` and the formulas, gradients, counts, and energies as scores."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from bertkit.data.batch import PackedBatch, TokenTargets
from bertkit.data.config import DataConfig
from bertkit.data.random import Draw
from bertkit.data.samples import Samples
from bertkit.errors import UsageError
from bertkit.models.families.bert import BertConfig
from bertkit.models.families.electra import ElectraConfig
from bertkit.models.families.two_tower import TwoTower
from bertkit.models.files.hub import save_model
from bertkit.models.headed import SCORING_RULE, HeadedModel
from bertkit.models.scoring.pseudo_likelihood import score_ids
from bertkit.models.scoring.rules import Energy, choose_rule
from bertkit.objectives.base import Objective
from bertkit.objectives.forward import encode, pretraining_model, scoring_rule
from bertkit.objectives.masked_lm import MaskedLM
from bertkit.objectives.noise_contrastive import NoiseContrastive
from bertkit.objectives.sentence_relations import SentenceOrder
from bertkit.objectives.two_tower_cloze import TwoTowerCloze
from bertkit.pretraining.loss_terms import ObjectiveTerms
from bertkit.training.cost import training_flops
from tests.data.toy_corpus import vocabulary
from tests.objectives.test_masked_lm import made_samples
from tests.probing.tiny_models import tiny_tokenizer

VOCABULARY = 103
LENGTHS = [41, 5, 17, 30, 3, 29]
CONFIG = ElectraConfig(
    num_hidden_layers=2,
    max_position_embeddings=41,
    embedding_size=13,
    hidden_size=36,
    num_attention_heads=4,
    intermediate_size=52,
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
)
CLOZE = TwoTowerCloze()


def electric(**settings: Any) -> tuple[TwoTowerCloze, NoiseContrastive]:
    return CLOZE, NoiseContrastive(**{"generator_size": 0.5, "rate": 0.2, **settings})


def made_model(of: tuple[Objective, ...]) -> HeadedModel:
    """With weights large enough that predictions differ from position to position."""
    model = pretraining_model(CONFIG, of, VOCABULARY)
    model.initialise(3)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.15)
    return model


def corrupted(of: tuple[Objective, ...], lengths: list[int], samples: Samples | None = None) -> Samples:
    samples = made_samples(lengths) if samples is None else samples
    words = samples.ids_T % (VOCABULARY - 5) + 5
    samples = samples.with_changes(ids_T=np.where(samples.special_T, samples.ids_T, words))
    for objective in sorted(of, key=lambda each: each.rank):
        samples = objective.corrupt(samples, vocabulary(VOCABULARY), Draw(1))
    return samples


def batch_of(of: tuple[Objective, ...], lengths: list[int] | None = None) -> PackedBatch:
    return PackedBatch.from_samples(corrupted(of, lengths or LENGTHS))


def cloze_model_of(model: HeadedModel) -> HeadedModel:
    found = model.companion("cloze_model")
    assert found is not None
    return found


class Oracle:
    """Both models in `transformers`, and the released procedure for one sequence without padding."""

    def __init__(self, model: HeadedModel, directory: Path) -> None:
        transformers = pytest.importorskip("transformers")
        self.cloze = cloze_model_of(model)
        two_tower = self.cloze.encoder
        assert isinstance(two_tower, TwoTower)
        self.towers = []
        for number, tower in enumerate(two_tower.towers):
            save_model(HeadedModel(tower), None, directory / str(number))
            self.towers.append(transformers.ElectraModel.from_pretrained(directory / str(number)).eval())
        save_model(model, None, directory / "model")
        self.model, report = transformers.ElectraForPreTraining.from_pretrained(
            directory / "model", output_loading_info=True
        )
        assert not report["missing_keys"]
        assert not report["unexpected_keys"]
        self.model.eval()

    def log_q(self, ids_S: torch.Tensor) -> torch.Tensor:
        """Each token's distribution given all others, (S, V), from masks of ones on one side of the diagonal, and
        rolls."""
        length = len(ids_S)
        ones = torch.ones(1, 1, length, length, dtype=torch.bool)
        left, right = (
            tower(input_ids=ids_S[None], attention_mask=mask).last_hidden_state[0]
            for tower, mask in zip(self.towers, (ones.tril(), ones.triu()), strict=True)
        )
        joined = torch.cat([left.roll(1, dims=0), right.roll(-1, dims=0)], dim=-1)
        weights = dict(self.cloze.masked_lm.named_parameters())  # type: ignore[union-attr]  # a head
        hidden = functional.gelu(functional.linear(joined, weights["dense.weight"], weights["dense.bias"]))
        hidden = functional.layer_norm(
            hidden, hidden.shape[-1:], weights["norm.weight"], weights["norm.bias"], CONFIG.layer_norm_eps
        )
        words = self.towers[0].embeddings.word_embeddings.weight
        return functional.log_softmax(hidden @ words.T + weights["bias"], dim=-1)


@pytest.mark.parametrize("tie", ["none", "embeddings"])
def test_values_and_gradients_are_those_of_the_released_procedure(tie: str, tmp_path: Path) -> None:
    of = electric(tie=tie)
    model, batch = made_model(of).eval(), batch_of(of)
    oracle = Oracle(model, tmp_path)
    read = encode(model, of, batch)["noise_contrastive"].batch
    noise_T = batch.targets["noise_contrastive"].id_M
    assert torch.equal(read.ids_T[noise_T == 0], batch.ids_T[noise_T == 0])

    cloze, contrast = [], []
    for original, noisy, label in zip(
        *(each.split(LENGTHS) for each in (batch.ids_T, read.ids_T, noise_T)), strict=True
    ):
        log_q = oracle.log_q(original)
        ordinary = torch.ones_like(original, dtype=torch.bool)
        ordinary[[0, -1]] = False
        cloze.append(-log_q[ordinary, original[ordinary]])
        energy = oracle.model(input_ids=noisy[None], attention_mask=torch.ones(1, len(noisy))).logits[0]
        logits = energy + log_q.gather(1, noisy[:, None])[:, 0].detach() + math.log(0.2 / 0.8)
        contrast.append(functional.binary_cross_entropy_with_logits(logits, label.float(), reduction="none"))
    expected_cloze, expected = torch.cat(cloze), torch.cat(contrast)

    parts = ObjectiveTerms(of).losses(model, batch)
    assert (parts["two_tower_cloze"].count, parts["noise_contrastive"].count) == (len(expected_cloze), sum(LENGTHS))
    torch.testing.assert_close(parts["two_tower_cloze"].sum, expected_cloze.sum(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(parts["noise_contrastive"].sum, expected.sum(), rtol=1e-5, atol=1e-5)

    parts["noise_contrastive"].sum.backward()
    expected.sum().backward()
    own = dict(model.named_parameters())
    of_oracle = dict(oracle.model.named_parameters())
    pairs = {
        "encoder.embeddings.word.weight": "electra.embeddings.word_embeddings.weight",
        "encoder.layers.1.attention.query.weight": "electra.encoder.layer.1.attention.self.query.weight",
        "replaced_token.dense.weight": "discriminator_predictions.dense.weight",
        "replaced_token.output.bias": "discriminator_predictions.dense_prediction.bias",
    }
    for name, there in pairs.items():
        torch.testing.assert_close(own[name].grad, of_oracle[there].grad, rtol=1e-4, atol=1e-5)
    # Neither the drawing nor log q trains the cloze model.
    assert all(own[f"companions.cloze_model.{name}"].grad is None for name in model.unshared("cloze_model"))


def test_no_state_that_predicts_a_token_has_read_it() -> None:
    of = electric()
    model = made_model(of).eval()
    cloze = cloze_model_of(model)
    batch = PackedBatch.from_ids([[2, 7, 8, 9, 10, 3], [2, 11, 12, 3]])
    states = cloze(batch)
    changed = PackedBatch.from_ids([[2, 7, 20, 9, 10, 3], [2, 11, 12, 3]])
    moved = (cloze(changed) != states).any(dim=-1)
    assert moved.tolist() == [True, True, False, True, True, True, False, False, False, False]


def test_noise_follows_the_cloze_model_s_distribution() -> None:
    """One text in 4,000 samples: at its noise positions, words occur as often as q predicts (chi-square)."""
    of = electric(rate=0.5)
    model = made_model(of).eval()
    with torch.no_grad():  # so no word is too rare to be counted
        cloze_model_of(model).get_parameter("masked_lm.norm.weight").mul_(0.1)
        cloze_model_of(model).get_parameter("masked_lm.bias").zero_()
    copies, length = 4000, 5
    samples = made_samples([length] * copies)
    samples = samples.with_changes(ids_T=np.tile([2, 40, 50, 60, 3], copies))
    batch = PackedBatch.from_samples(corrupted(of, [], samples))
    filled = encode(model, of, batch)["noise_contrastive"].batch
    column = filled.ids_T.view(copies, length)[:, 2]
    is_noise = batch.targets["noise_contrastive"].id_M.view(copies, length)[:, 2] == 1
    assert 0.5 * copies < int(is_noise.sum()) < copies  # two or three of the three words
    cloze = cloze_model_of(model)
    q_V = cloze.masked_lm_logits(cloze(PackedBatch.from_samples(samples.with_changes(ids_T=batch.ids_T.numpy())))[2:3])
    expected = q_V[0].detach().double().softmax(dim=0).numpy() * int(is_noise.sum())
    assert expected.min() > 4
    found = np.bincount(column[is_noise].numpy(), minlength=VOCABULARY)
    assert stats.chisquare(found, expected).pvalue > 0.01


def test_an_exact_share_of_each_sequence_is_noise_and_no_special_token() -> None:
    samples = corrupted(electric(rate=0.15), LENGTHS)
    noise_T = samples.targets["noise_contrastive"].id_M
    assert not noise_T[samples.special_T].any()
    counts = [part.sum() for part in np.split(noise_T, samples.cu_seqlens_B1[1:-1])]
    assert counts == [max(1, round(0.15 * length)) for length in LENGTHS]
    assert samples.targets["two_tower_cloze"].index_M.tolist() == np.flatnonzero(~samples.special_T).tolist()


def test_a_noise_token_equal_to_the_text_s_counts_as_noise() -> None:
    of = electric()
    model, word = made_model(of).eval(), 11
    samples = made_samples(LENGTHS)
    samples = samples.with_changes(ids_T=np.where(samples.special_T, samples.ids_T, word))
    for objective in of:
        samples = objective.corrupt(samples, vocabulary(VOCABULARY), Draw(1))
    batch = PackedBatch.from_samples(samples)
    with torch.no_grad():
        cloze_model_of(model).get_parameter("masked_lm.bias")[word] = 1e4
    read = encode(model, of, batch)["noise_contrastive"].batch
    assert torch.equal(read.ids_T, batch.ids_T)
    assert int(of[1].marks_M(read).sum()) == sum(max(1, round(0.2 * length)) for length in LENGTHS)


def test_drawing_noise_does_not_wait_for_the_device() -> None:
    """No number can be read from a tensor on torch's meta device, which stands for a GPU that would be waited for."""
    of = electric()
    batch = batch_of(of)
    outputs = encode(made_model(of).to("meta"), of, batch.to(torch.device("meta")))
    assert outputs["noise_contrastive"].batch.targets["noise_contrastive"].columns["log_q"].shape == batch.ids_T.shape


def test_micro_batches_change_nothing_but_rounding() -> None:
    of = electric()
    model = made_model(of).eval()
    whole = ObjectiveTerms(of).losses(model, batch_of(of))
    cut = [
        ObjectiveTerms(of).losses(model, PackedBatch.from_samples(part)) for part in corrupted(of, LENGTHS).split(47)
    ]
    for term, loss in whole.items():
        assert loss.count == sum(part[term].count for part in cut)
        torch.testing.assert_close(torch.stack([part[term].sum for part in cut]).sum(), loss.sum, rtol=1e-5, atol=1e-4)


def test_all_products_are_counted() -> None:
    of = electric()
    model = made_model(of).eval()
    batch = batch_of(of, [40] * 6)
    counter = FlopCounterMode(display=False)
    with counter, torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        ObjectiveTerms(of).losses(model, batch)
    two_tower = cloze_model_of(model).encoder
    drawing = 2 * batch.num_tokens * (two_tower.width + VOCABULARY) * two_tower.embedding_width
    backward = 2 / 3 * (training_flops(model, [batch], of) - drawing)
    assert training_flops(model, [batch], of) - backward == pytest.approx(float(counter.get_total_flops()), rel=1e-12)


def test_energies_score_a_text_in_one_pass() -> None:
    of = electric()
    model = made_model(of).eval()
    model.extras[SCORING_RULE] = scoring_rule(of)
    rule = choose_rule(model)
    assert rule is Energy
    tokenizer = tiny_tokenizer()
    ids = [[10, 20, 30], [15, 25], [10, 21, 30]]
    passes = []
    model.encoder.register_forward_hook(lambda *_: passes.append(1))
    found = score_ids(rule(tokenizer).predictor(model), rule(tokenizer), ids, ids, max_batch_tokens=100)
    assert len(passes) == 2  # one for each length
    for row, scores in zip(ids, found, strict=True):
        alone = PackedBatch.from_ids([[tokenizer.cls_id, *row, tokenizer.sep_id]])
        energy = model.token_logits("replaced_token", model(alone))[1:-1, 0]
        np.testing.assert_allclose(scores, -energy.detach().numpy(), rtol=1e-5, atol=1e-5)


def test_a_detector_of_replaced_tokens_is_not_scored_by_energies() -> None:
    model = made_model(electric())
    with pytest.raises(UsageError, match="not trained for the rule energy"):
        choose_rule(model, "energy")


def test_where_the_energies_are_minus_log_p_the_loss_is_least() -> None:
    """Gutmann and Hyvarinen 2010: over text drawn from p and noise from q, E = -log p minimises the expected loss."""
    generator = torch.Generator().manual_seed(0)
    p_V, q_V = (torch.randn(12, generator=generator, dtype=torch.float64).softmax(dim=0) for _ in range(2))
    rate, objective = 0.2, NoiseContrastive(rate=0.2)
    energy_V = (-p_V.log()).requires_grad_()

    class Model(torch.nn.Module):
        def token_logits(self, head: str, hidden_MD: torch.Tensor) -> torch.Tensor:
            return energy_V[:, None]

    batch = PackedBatch.from_ids([list(range(12))])
    all_12 = torch.arange(12)
    batch = replace(batch, targets={"noise_contrastive": TokenTargets(all_12, all_12, columns={"log_q": q_V.log()})})
    logits_V = objective.logits_M(Model(), torch.zeros(12, 1), batch)  # type: ignore[arg-type]  # a stand-in
    (slope_V,) = torch.autograd.grad(
        -(rate * q_V * functional.logsigmoid(logits_V) + (1 - rate) * p_V * functional.logsigmoid(-logits_V)).sum(),
        energy_V,
    )
    assert slope_V.abs().max() < 1e-7


FAULTS = [
    ((NoiseContrastive(),), "needs two_tower_cloze for its noise"),
    ((*electric(), MaskedLM()), "needs the unchanged text, but objective.masked_lm"),
    ((TwoTowerCloze(), MaskedLM()), "add `- noise_contrastive`"),
]


@pytest.mark.parametrize(("of", "told"), FAULTS)
def test_what_cannot_stand_beside_it_is_told(of: tuple[Objective, ...], told: str) -> None:
    (fault,) = [fault for each in of for fault in each.combination_errors(of)]
    assert told in fault


def test_objectives_of_sequences_may_stand_beside_it() -> None:
    of = (*electric(), SentenceOrder())
    assert not [fault for each in of for fault in each.combination_errors(of)]


def test_a_model_without_two_towers_is_told() -> None:
    (fault,) = NoiseContrastive().errors(DataConfig(), BertConfig())
    assert "model.family electra" in fault
    (fault,) = NoiseContrastive(generator_size=0.6).errors(
        DataConfig(), CONFIG.model_copy(update={"num_attention_heads": 6})
    )
    assert "generator_size" in fault
