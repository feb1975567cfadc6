"""Replaced-token detection: sampling against softmax, both models against `transformers`, and gradients."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from sklearn.metrics import accuracy_score, precision_recall_fscore_support
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from bertkit.data.batch import PackedBatch
from bertkit.data.config import DataConfig
from bertkit.data.random import Draw
from bertkit.data.samples import Samples
from bertkit.errors import UsageError
from bertkit.models.encoder import EncoderConfig
from bertkit.models.families.albert import AlbertConfig
from bertkit.models.families.bert import BertConfig
from bertkit.models.families.electra import ElectraConfig
from bertkit.models.families.gpt2 import Gpt2Config
from bertkit.models.families.modernbert import ModernBertConfig
from bertkit.models.families.roberta import RobertaConfig
from bertkit.models.files.hub import load_model, save_model
from bertkit.models.headed import HeadedModel
from bertkit.objectives.base import Objective
from bertkit.objectives.forward import encode, masked_lm_of, pretraining_model
from bertkit.objectives.masked_lm import MaskedLM
from bertkit.objectives.replaced_token import ReplacedToken, drawn_ids
from bertkit.objectives.sentence_relations import SentenceOrder
from bertkit.pretraining.loss_terms import ObjectiveTerms
from bertkit.training.config import EngineConfig
from bertkit.training.cost import training_flops
from bertkit.training.engine import resolve_engine
from bertkit.training.optimizers import AdamWConfig
from bertkit.training.step import Step, evaluate
from tests.data.toy_corpus import vocabulary
from tests.objectives.test_masked_lm import made_samples

VOCABULARY = 103
LENGTHS = [41, 5, 17, 30, 3, 29]
MASKED = MaskedLM(mask_share=0.85, random_share=0.0)
SIZES = {"num_hidden_layers": 2, "max_position_embeddings": 41}
CONFIG = ElectraConfig(
    **SIZES,
    embedding_size=13,
    hidden_size=36,
    num_attention_heads=4,
    intermediate_size=52,
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
)
Tie = Literal["embeddings", "none", "all"]


def objectives(*, weight: float = 50.0, size: float = 0.5, tie: Tie = "embeddings") -> tuple[MaskedLM, ReplacedToken]:
    return MASKED, ReplacedToken(weight=weight, generator_size=size, tie=tie)


def made_model(of: tuple[Objective, ...], config: EncoderConfig = CONFIG, *, large: bool = True) -> HeadedModel:
    """On request, with weights large enough that predictions differ from position to position."""
    model = pretraining_model(config, of, VOCABULARY)
    model.initialise(3)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters() if large else ():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.15)
    return model


def corrupted(
    of: tuple[Objective, ...], lengths: list[int] | None = None, *, samples: Samples | None = None
) -> Samples:
    if samples is None:
        samples = made_samples(lengths or LENGTHS)
        words = samples.ids_T % (VOCABULARY - 5) + 5
        samples = samples.with_changes(ids_T=np.where(samples.special_T, samples.ids_T, words))
    for objective in sorted(of, key=lambda each: each.rank):
        samples = objective.corrupt(samples, vocabulary(VOCABULARY), Draw(1))
    return samples


def batch_of(of: tuple[Objective, ...]) -> PackedBatch:
    return PackedBatch.from_samples(corrupted(of))


def generator_of(model: HeadedModel) -> HeadedModel:
    found = model.companion("generator")
    assert found is not None
    return found


@pytest.mark.parametrize("logits_type", [torch.float32, torch.bfloat16])
def test_ids_are_drawn_from_the_softmax(logits_type: torch.dtype) -> None:
    """Chi-square over 200,000 draws, for likely and unlikely words."""
    count, words = 200_000, 53
    logits_V = (torch.randn(words, generator=torch.Generator().manual_seed(0)) * 2).to(logits_type)
    uniform_M = torch.from_numpy(Draw(4).uniform("test", sample=np.arange(count)))
    drawn_M = drawn_ids(logits_V.expand(count, words), uniform_M)
    expected_V = logits_V.double().softmax(dim=0).numpy() * count
    assert expected_V.min() > 5
    assert stats.chisquare(np.bincount(drawn_M.numpy(), minlength=words), expected_V).pvalue > 0.01


def test_words_without_probability_are_never_drawn() -> None:
    logits_V = torch.tensor([-torch.inf, 0.5, -torch.inf, 1.5, -torch.inf])
    edges_M = torch.tensor([0.0, 1e-300, 0.268, 0.270, 1 - 2**-53], dtype=torch.float64)
    assert drawn_ids(logits_V.expand(5, 5), edges_M).tolist() == [1, 1, 1, 3, 3]


def test_no_target_draws_nothing() -> None:
    assert drawn_ids(torch.empty(0, 7), torch.empty(0, dtype=torch.float64)).shape == (0,)


@given(st.lists(st.integers(3, 60), min_size=2, max_size=12), st.integers(3, 200))
def test_a_sample_draws_the_same_in_any_company(lengths: list[int], max_tokens: int) -> None:
    def uniforms(samples: Samples) -> list[float]:
        return samples.targets["replaced_token"].columns["uniform"].tolist()

    whole = corrupted(objectives(), lengths)
    uncorrupted = made_samples(lengths).split(max_tokens)
    parts = [corrupted(objectives(), samples=part) for part in uncorrupted]
    assert [each for part in parts for each in uniforms(part)] == uniforms(whole)
    assert [each for part in whole.split(max_tokens) for each in uniforms(part)] == uniforms(whole)
    assert len(set(uniforms(whole))) == len(uniforms(whole))


def test_only_chosen_tokens_are_replaced_and_no_mask_is_left_unfilled() -> None:
    model, batch = made_model(objectives()), batch_of(objectives())
    filled = encode(model, objectives(), batch)["replaced_token"].batch
    original = corrupted((), LENGTHS)
    chosen_T = torch.zeros(batch.num_tokens, dtype=torch.bool).index_fill(0, batch.targets["masked_lm"].index_M, True)
    original_T = torch.from_numpy(original.ids_T)
    assert torch.equal(filled.ids_T[~chosen_T], original_T[~chosen_T])
    assert not torch.equal(filled.ids_T[chosen_T], batch.ids_T[chosen_T])
    assert torch.equal(objectives()[1].marks_M(filled), filled.ids_T != original_T)


def test_a_drawn_token_equal_to_the_original_counts_as_original() -> None:
    """With a generator that always predicts one word, nothing is replaced where the text has that word."""
    masked, detector = objectives()
    model = made_model((masked, detector))
    samples = corrupted((), LENGTHS)
    word = 11
    ids_T = np.where(np.arange(samples.ids_T.size) % 2 == 0, word, samples.ids_T)
    samples = samples.with_changes(ids_T=np.where(samples.special_T, samples.ids_T, ids_T))
    batch = PackedBatch.from_samples(corrupted((masked, detector), samples=samples))
    with torch.no_grad():
        generator_of(model).get_parameter("masked_lm.bias")[word] = 1e4
    reading = encode(model, (masked, detector), batch)["replaced_token"]
    targets = batch.targets["masked_lm"]
    assert (reading.batch.ids_T[targets.index_M] == word).all()
    replaced_T = detector.marks_M(reading.batch)
    assert torch.equal(replaced_T[targets.index_M], targets.id_M != word)
    assert int(replaced_T.sum()) == int((targets.id_M != word).sum())
    assert 0 < int(replaced_T.sum()) < targets.count


def gradients(weight: float, tie: Tie, batch: PackedBatch) -> tuple[HeadedModel, dict[str, torch.Tensor]]:
    """Gradients of all parameters, by name, for one weight of the detection."""
    of = objectives(weight=weight, tie=tie)
    model = made_model(of)
    parts = ObjectiveTerms(of).losses(model, batch)
    torch.stack([parts[each.term].sum * each.weight / each.count(batch) for each in of]).sum().backward()
    return model, {name: each.grad for name, each in model.named_parameters() if each.grad is not None}


@pytest.mark.parametrize("tie", ["none", "embeddings"])
def test_no_gradient_passes_the_drawing(tie: Tie) -> None:
    """The generator's unshared weights get bit-identical gradients for a detection weight of 0 or 50."""
    batch = batch_of(objectives())
    model, without = gradients(0.0, tie, batch)
    _, with_it = gradients(50.0, tie, batch)
    own = {f"companions.generator.{name}" for name in model.unshared("generator")}
    layers, projection, head, embeddings = 2 * 16, 2, 5, 5
    assert len(own) == layers + projection + head + (embeddings if tie == "none" else 0)
    for name in own:
        assert torch.equal(without[name], with_it[name]), name
        assert without[name].abs().sum() > 0
    word = "encoder.embeddings.word.weight"
    assert not torch.equal(with_it[word], without[word])
    detector = [name for name in with_it if name not in own and name != word]
    assert all(with_it[name].abs().sum() > 0 for name in detector)


def test_the_detector_teaches_shared_embeddings_and_the_generator_does_too() -> None:
    batch = batch_of(objectives())
    _, tied = gradients(50.0, "embeddings", batch)
    _, alone = gradients(0.0, "embeddings", batch)
    word = "encoder.embeddings.word.weight"
    assert alone[word].abs().sum() > 0
    assert not torch.equal(tied[word], alone[word])


def padded(parts: list[Any], fill: int) -> torch.Tensor:
    tensors = [torch.as_tensor(part) for part in parts]
    return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True, padding_value=fill)


@pytest.mark.parametrize("tie", ["none", "embeddings"])
def test_both_models_agree_with_transformers_on_the_same_batch(tie: Tie, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    of = objectives(tie=tie)
    detector = of[1]
    model, batch = made_model(of).eval(), batch_of(of)
    save_model(model, None, tmp_path / "model")
    save_model(generator_of(model), None, tmp_path / "generator")
    oracles = {}
    for name, kind in (("generator", "ElectraForMaskedLM"), ("model", "ElectraForPreTraining")):
        oracle, report = getattr(transformers, kind).from_pretrained(tmp_path / name, output_loading_info=True)
        assert oracle.config.architectures == [kind]
        assert not report["missing_keys"]
        assert not report["unexpected_keys"]
        oracles[name] = oracle.eval()
    readings, parts = encode(model, of, batch), ObjectiveTerms(of).losses(model, batch)
    filled, lengths = readings["replaced_token"].batch, LENGTHS
    real_BS = padded([[1] * length for length in lengths], 0)
    targets = batch.targets["masked_lm"]

    label_T = torch.full_like(batch.ids_T, -100).index_copy(0, targets.index_M, targets.id_M)
    expected = oracles["generator"](
        input_ids=padded(list(batch.ids_T.split(lengths)), 0),
        attention_mask=real_BS,
        labels=padded(list(label_T.split(lengths)), -100),
    )
    hidden_TD = generator_of(model)(batch)
    ours_TV = generator_of(model).masked_lm_logits(hidden_TD)
    torch.testing.assert_close(
        readings["masked_lm"].hidden_TD[targets.index_M], hidden_TD[targets.index_M], rtol=1e-5, atol=1e-6
    )
    torch.testing.assert_close(ours_TV, expected.logits[real_BS.bool()], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(parts["masked_lm"].sum / parts["masked_lm"].count, expected.loss, rtol=1e-5, atol=1e-5)

    expected = oracles["model"](
        input_ids=padded(list(filled.ids_T.split(lengths)), 0),
        attention_mask=real_BS,
        labels=padded(list(detector.marks_M(filled).long().split(lengths)), 0),
    )
    ours_T = model.token_logits("replaced_token", readings["replaced_token"].hidden_TD).squeeze(-1)
    torch.testing.assert_close(ours_T, expected.logits[real_BS.bool()], rtol=1e-5, atol=1e-5)
    part = parts["replaced_token"]
    assert part.count == sum(lengths)
    torch.testing.assert_close(part.sum / part.count, expected.loss, rtol=1e-5, atol=1e-5)
    assert int(part.correct) == int(((ours_T > 0) == detector.marks_M(filled)).sum())


def stepped(max_tokens: int | None) -> tuple[Any, torch.Tensor]:
    of = objectives()
    model = made_model(of)
    engine = resolve_engine(EngineConfig(device="cpu", precision="fp32"))
    # A large eps makes the update smooth in the gradient; otherwise Adam's first step is its sign.
    training_step = Step.plain(model, AdamWConfig(eps=1e-2).build(model), engine, 1.0)
    batches = [PackedBatch.from_samples(part) for part in corrupted(of).split(max_tokens)]
    outcome = training_step.update(batches, ObjectiveTerms(of), 1e-2)
    return outcome, torch.nn.utils.parameters_to_vector(model.parameters())


@pytest.mark.parametrize("max_tokens", [1, 47, 60])
def test_micro_batches_change_nothing_but_rounding(max_tokens: int) -> None:
    (whole, weights), (parts, cut_weights) = stepped(None), stepped(max_tokens)
    for term, total in whole.terms.items():
        assert (parts.terms[term].count, parts.terms[term].correct) == (total.count, total.correct)
        assert parts.terms[term].sum == pytest.approx(total.sum, rel=1e-5)
    assert parts.gradient_norm == pytest.approx(whole.gradient_norm, rel=1e-4)
    torch.testing.assert_close(cut_weights, weights, rtol=1e-4, atol=1e-6)


def test_it_learns_to_tell_drawn_tokens_from_the_text() -> None:
    """In a text of ten words with an untrained generator, nine of ten sampled tokens are not in the text."""
    of = (MASKED.model_copy(update={"weight": 0.0}), ReplacedToken(weight=1.0, generator_size=0.5, tie="none"))
    model = made_model(of, large=False)
    engine = resolve_engine(EngineConfig(device="cpu", precision="fp32"))
    training_step = Step.plain(model, AdamWConfig().build(model), engine, 1.0)
    totals = []
    for step in range(60):
        samples = made_samples([23] * 8, seed=step)
        samples = samples.with_changes(
            ids_T=np.where(samples.special_T, samples.ids_T, samples.ids_T % 10 + 20), sample_B=np.arange(8) + 8 * step
        )
        batch = PackedBatch.from_samples(corrupted(of, samples=samples))
        totals.append(training_step.update([batch], ObjectiveTerms(of), 3e-3).terms["replaced_token"])
    masked_share = round(0.15 * 23) / 23
    assert totals[-1].accuracy > 0.98 > 1 - 0.9 * masked_share


def test_evaluation_draws_the_same_each_time_and_leaves_torch_alone() -> None:
    of = objectives()
    model = made_model(of, CONFIG.model_copy(update={"hidden_dropout_prob": 0.3}))
    engine = resolve_engine(EngineConfig(device="cpu", precision="fp32"))
    before = torch.get_rng_state()
    first, second = (evaluate(model, ObjectiveTerms(of), [batch_of(of)], engine) for _ in range(2))
    assert first == second
    assert torch.equal(before, torch.get_rng_state())


def test_shared_embeddings_are_one_tensor_with_the_norm() -> None:
    model = made_model(objectives(), large=False)
    own, others = model.encoder.embeddings, generator_of(model).encoder.embeddings
    assert {name for name, _ in own.named_parameters()} == {
        "word.weight",
        "position.weight",
        "token_type.weight",
        "norm.weight",
        "norm.bias",
    }
    assert all(left is right for left, right in zip(own.parameters(), others.parameters(), strict=True))
    names = dict(model.named_parameters())
    assert "encoder.embeddings.word.weight" in names
    assert not any(name.startswith("companions.generator.encoder.embeddings") for name in names)


def test_without_ties_nothing_is_shared_and_nothing_begins_alike() -> None:
    model = made_model(objectives(size=1.0, tie="none"), large=False)
    generator = dict(generator_of(model).encoder.named_parameters())
    for name, parameter in model.encoder.named_parameters():
        assert parameter is not generator[name]
        if parameter.std() > 0:
            assert not torch.equal(parameter, generator[name]), name


def test_all_ties_leave_the_generator_its_head_alone() -> None:
    model = made_model(objectives(size=1.0, tie="all"))
    assert generator_of(model).encoder is model.encoder
    assert {name.partition(".")[0] for name in model.unshared("generator")} == {"masked_lm"}
    parts = ObjectiveTerms(objectives(size=1.0, tie="all")).losses(model, batch_of(objectives()))
    assert all(bool(part.sum.isfinite()) for part in parts.values())


def test_a_model_without_generator_reads_once_and_a_generator_can_begin_alone() -> None:
    masked, detector = objectives()
    batch = PackedBatch.from_samples(corrupted((masked,)))
    plain = pretraining_model(CONFIG, (masked,), VOCABULARY)
    assert not plain.companions
    assert masked_lm_of(plain) is plain
    model = made_model((masked, detector))
    reading = encode(model, (masked,), batch)["masked_lm"]
    assert reading.model is masked_lm_of(model) is generator_of(model)
    assert reading.hidden_TD.shape[1] == CONFIG.hidden_size // 2
    ObjectiveTerms((masked,)).losses(model, batch)["masked_lm"].sum.backward()
    assert all(each.grad is None for each in model.encoder.layers.parameters())


def test_other_objectives_read_the_filled_batch() -> None:
    of = (*objectives(), SentenceOrder())
    readings = encode(made_model(of), of, batch_of(objectives()))
    assert readings["sentence_order"] is readings["replaced_token"]
    assert readings["masked_lm"] is not readings["replaced_token"]


@pytest.mark.parametrize(
    "config",
    [
        BertConfig(**SIZES, hidden_size=30, num_attention_heads=3, intermediate_size=44),
        RobertaConfig(**{**SIZES, "max_position_embeddings": 43}, hidden_size=30, num_attention_heads=3),
        ModernBertConfig(**SIZES, hidden_size=36, num_attention_heads=3, intermediate_size=44),
        AlbertConfig(**SIZES, embedding_size=14, hidden_size=36, num_attention_heads=4, intermediate_size=44),
    ],
    ids=lambda config: config.model_type,
)
def test_any_family_can_be_trained_so(config: EncoderConfig, tmp_path: Path) -> None:
    """Without ties at any size; with ties if the embeddings have a separate width or the sizes are equal."""
    tie: Tie = "embeddings" if isinstance(config, AlbertConfig) else "none"
    of = objectives(size=1 / 3 if tie == "none" else 0.5, tie=tie)
    assert of[1].errors(DataConfig(), config) == []
    model = made_model(of, config)
    parts = ObjectiveTerms(of).losses(model, batch_of(of))
    (parts["masked_lm"].sum + parts["replaced_token"].sum).backward()
    assert all(each.grad is not None and bool(each.grad.isfinite().all()) for each in model.parameters())
    equal = made_model(objectives(size=1.0), config)
    words = generator_of(equal).encoder.word_embedding
    assert words is equal.encoder.word_embedding
    save_model(model, None, tmp_path)
    loaded, report = load_model(tmp_path)
    assert loaded.head_names == ("replaced_token",)
    assert not report.missing
    state = loaded.state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in model.own_state_dict().items())


def test_the_generator_s_products_are_counted_with_those_of_the_drawing() -> None:
    of = objectives()
    model = made_model(of).eval()
    samples = corrupted(of, [40] * 6)
    batch = PackedBatch.from_samples(samples)
    counter = FlopCounterMode(display=False)
    with counter, torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        ObjectiveTerms(of).losses(model, batch)
    predictions = batch.targets["masked_lm"].count
    generator = generator_of(model)
    drawing = 2 * predictions * (generator.encoder.width + VOCABULARY) * generator.encoder.embedding_width
    backward = 2 / 3 * (training_flops(model, [batch], of) - drawing)
    assert training_flops(model, [batch], of) - backward == pytest.approx(float(counter.get_total_flops()), rel=1e-12)


GPT = Gpt2Config(hidden_size=30, num_hidden_layers=2, num_attention_heads=3, intermediate_size=44)
FAULTS = [
    (CONFIG, ReplacedToken(generator_size=0.25, tie="all"), ["tie", "generator_size 1", "0.25"]),
    (CONFIG.model_copy(update={"num_attention_heads": 6}), ReplacedToken(generator_size=0.6), ["generator_size", "22"]),
    (GPT, ReplacedToken(), ["masked-LM head", "gpt2"]),
]


@pytest.mark.parametrize(("config", "detector", "told"), FAULTS)
def test_a_recipe_that_makes_no_generator_is_told(
    config: EncoderConfig, detector: ReplacedToken, told: list[str]
) -> None:
    (fault,) = detector.errors(DataConfig(), config)
    assert all(word in fault for word in told), fault


def test_embeddings_of_another_width_cannot_be_shared() -> None:
    config = BertConfig(**SIZES, hidden_size=30, num_attention_heads=3, intermediate_size=44)
    with pytest.raises(UsageError, match=r"bert.*embeddings\.word\.weight is \(103, 30\) and \(103, 10\).*tie=none"):
        pretraining_model(config, objectives(size=1 / 3), VOCABULARY)


def test_two_generators_are_refused() -> None:
    with pytest.raises(UsageError, match="the same in all stages"):
        pretraining_model(CONFIG, (*objectives(size=0.5), *objectives(size=0.25)), VOCABULARY)


def test_precision_recall_and_the_baseline_are_those_of_scikit_learn() -> None:
    """Over all micro-batches, as an evaluation reports them next to accuracy."""
    of = objectives()
    model = made_model(of)
    with torch.no_grad():  # about half of the tokens are then predicted as replaced
        reading = encode(model.eval(), of, batch_of(of))["replaced_token"]
        median = model.token_logits("replaced_token", reading.hidden_TD).median()
        model.get_parameter("replaced_token.output.bias").sub_(median)
    engine = resolve_engine(EngineConfig(device="cpu", precision="fp32"))
    batches = [PackedBatch.from_samples(part) for part in corrupted(of).split(60)]
    assert len(batches) > 1
    total = evaluate(model, ObjectiveTerms(of), batches, engine)["replaced_token"]
    replaced, called = [], []
    for batch in batches:
        reading = encode(model.eval(), of, batch)["replaced_token"]
        replaced += of[1].marks_M(reading.batch).tolist()
        called += (model.token_logits("replaced_token", reading.hidden_TD).squeeze(-1) > 0).tolist()
    precision, recall, _, _ = precision_recall_fscore_support(replaced, called, average="binary")
    assert 0 < precision < 1 > recall > 0
    assert of[1].figures(total.counters, total.count) == pytest.approx(
        {
            "baseline/replaced_token": accuracy_score(replaced, np.zeros(len(replaced))),
            "precision/replaced_token": precision,
            "recall/replaced_token": recall,
        }
    )
    assert total.accuracy == pytest.approx(accuracy_score(replaced, called))


def test_who_never_calls_a_token_replaced_has_the_accuracy_of_the_baseline_and_no_recall() -> None:
    counters = {"marked": 13, "predicted": 0, "both": 0}
    figures = ReplacedToken().figures(counters, 100)
    assert list(figures.values()) == [0.87, 0.0, 0.0]
    assert ReplacedToken().figures({"marked": 70, "predicted": 100, "both": 70}, 100)["baseline/replaced_token"] == 0.7


def test_without_a_masked_lm_beside_it_there_is_nothing_to_detect() -> None:
    masked, detector = objectives()
    assert detector.combination_errors((detector, masked)) == []
    (fault,) = detector.combination_errors((detector, SentenceOrder()))
    assert "needs masked_lm for its generator" in fault
    with pytest.raises(UsageError, match="needs masked_lm for its generator"):
        corrupted((detector,))
