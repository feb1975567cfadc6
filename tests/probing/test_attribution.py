"""Attribution: Jacobians against finite differences and backward passes, shares that sum to 1, token identifiability,
and complete explanations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose

from bertkit.data.batch import PackedBatch
from bertkit.errors import DataError, UsageError
from bertkit.evaluation.loaded_model import LoadedModel
from bertkit.models.families.elmo import ElmoConfig
from bertkit.models.headed import HeadedModel
from bertkit.models.hook_points import layer_points
from bertkit.models.recorder import Recorder
from bertkit.models.registry import FAMILIES
from bertkit.models.scoring.fill_mask import fill_masks
from bertkit.models.scoring.rules import SCORING_RULE, EncoderLeftToRight, MaskedNextTokenScoring
from bertkit.probing.attribution import AttributionSettings
from bertkit.probing.attribution.explanations import (
    GRADIENT_METHODS,
    METHODS,
    TokenisedText,
    embeddings,
    gradients,
    integrated_gradients,
    rollout,
    text_maps,
)
from bertkit.probing.attribution.identifiability import (
    as_tokens,
    identifiability,
    identified,
    linear_map,
    perceptron_map,
    token_states,
)
from bertkit.probing.attribution.measure import (
    FARTHEST,
    GROUPS,
    OFFSETS,
    Contributions,
    contributions,
    directions,
    squared_norms,
)
from bertkit.probing.attribution.predictions import check_methods, chosen_methods, explain, make_question
from bertkit.probing.attribution.run import probe_attribution
from bertkit.probing.sentences import EncodedSentence, Sentence, TextEncoder, packed
from bertkit.text.tokenizer import Tokenizer
from bertkit.text.vocabulary import word_tokenizer
from tests.models.oracle import all_cases, make_twins
from tests.probing.request import request_for, write_sentences
from tests.probing.tiny_models import TEXTS, cpu_engine, tiny_model, tiny_tokenizer

D = 20
"""Width of the tiny model."""


def encoded() -> list[EncodedSentence]:
    tokenizer = tiny_tokenizer()
    return list(TextEncoder.of(tiny_model(tokenizer), tokenizer).encode(Sentence(text, text) for text in TEXTS))


def states_at(model: HeadedModel, sentence: EncodedSentence, inputs_nD: torch.Tensor) -> list[torch.Tensor]:
    """States of all layers if the first one reads these inputs."""
    first, *points = layer_points(model)
    recorder = Recorder(points, {first: lambda _: inputs_nD})
    model(packed([sentence]), recorder)
    return [recorder.kept[point] for point in points]


def inputs_of(model: HeadedModel, sentence: EncodedSentence) -> torch.Tensor:
    recorder = Recorder([layer_points(model)[0]])
    with torch.no_grad():
        model(packed([sentence]), recorder)
    return recorder.kept[layer_points(model)[0]]


def exact(model: HeadedModel, sentence: EncodedSentence, **more: int) -> torch.Tensor:
    return squared_norms(model, sentence, layer_points(model), torch.eye(D), **more)


def test_jacobians_equal_finite_differences() -> None:
    model, sentence = tiny_model(tiny_tokenizer()).double(), encoded()[4]
    found_Lnn = squared_norms(model, sentence, layer_points(model), torch.eye(D))
    inputs_nD, step = inputs_of(model, sentence), 1e-5
    expected = torch.zeros_like(found_Lnn)
    with torch.no_grad():
        for i in range(inputs_nD.shape[0]):
            for d in range(D):
                moved = torch.zeros_like(inputs_nD)
                moved[i, d] = step
                ahead, behind = (states_at(model, sentence, inputs_nD + s * moved) for s in (1, -1))
                for layer, (one, other) in enumerate(zip(ahead, behind, strict=True)):
                    expected[layer, :, i] += ((one - other) / (2 * step)).square().sum(-1)
    torch.testing.assert_close(found_Lnn, expected, rtol=1e-6, atol=1e-10)


def test_derivatives_that_are_not_numbers_in_the_last_layer_alone_are_refused() -> None:
    model = tiny_model(tiny_tokenizer())
    with torch.no_grad():
        next(model.encoder.layers[-1].parameters())[0] = torch.nan
    with pytest.raises(DataError, match="are not numbers: the weights are damaged or diverged"):
        exact(model, encoded()[2])


@pytest.mark.parametrize("name", ["modernbert", "xlnet", "gpt2"])
def test_forward_mode_equals_backward_passes_in_other_families(name: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    case = next(case for case in all_cases() if case.name == name)
    model = make_twins(case, next(iter(case.heads.values())), tmp_path).model.eval()
    ids = encoded()[2].ids_T % 90 + 2
    text = EncodedSentence(0, "", (), ids, 0 * ids, np.full(ids.size, -1), np.zeros((0, 2), np.int64))
    inputs_nD = inputs_of(model, text)
    found_Lnn = squared_norms(model, text, layer_points(model), torch.eye(inputs_nD.shape[1]))
    jacobian = torch.autograd.functional.jacobian(lambda x: states_at(model, text, x)[-1], inputs_nD)
    expected_nn = jacobian.double().square().sum((1, 3))
    torch.testing.assert_close(found_Lnn[-1], expected_nn, rtol=1e-4, atol=1e-5 * float(expected_nn.max()))


@pytest.mark.parametrize(
    ("family", "settings"), [("gpt-bert", {}), ("fast-encoder", {"embedding_skip": True, "value_embeddings": 1})]
)
def test_derivatives_include_the_paths_that_skip_the_first_layer(
    family: str, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"hidden_size": 24, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 36}
    config = FAMILIES[family].model_validate({**sizes, "max_position_embeddings": 60, **settings})
    model = tiny_model(tiny_tokenizer(), config, ()).double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3, generator=generator)
    sentence, points = encoded()[2], layer_points(model)
    found_Lnn = squared_norms(model, sentence, points, torch.eye(24))

    def states(inputs_nD: torch.Tensor) -> torch.Tensor:
        owner, name = (
            (model.encoder, "_embedded") if family == "fast-encoder" else (model.encoder.embeddings, "forward")
        )
        monkeypatch.setattr(owner, name, lambda *_: inputs_nD)
        recorder = Recorder(points[1:])
        model(packed([sentence]), recorder)
        return torch.stack([recorder.kept[point] for point in points[1:]])

    inputs_nD = inputs_of(model, sentence)
    jacobian = torch.autograd.functional.jacobian(states, inputs_nD)
    torch.testing.assert_close(found_Lnn, jacobian.square().sum((2, 4)), rtol=1e-6, atol=1e-9)


def test_contributions_sum_to_one_and_the_batch_changes_nothing() -> None:
    model = tiny_model(tiny_tokenizer())
    sentence = encoded()[4]
    shares = contributions(exact(model, sentence))
    n = sentence.ids_T.size
    assert shares.shape == (2, n, n)
    assert_allclose(shares.sum(-1), np.ones((2, n)))
    for tokens in (7 * n + 3, 1):
        assert_allclose(contributions(exact(model, sentence, max_batch_tokens=tokens)), shares, atol=1e-6)


def test_a_layer_that_mixes_nothing_leaves_every_token_its_own() -> None:
    model = tiny_model(tiny_tokenizer())
    with torch.no_grad():
        for layer in model.encoder.layers:
            layer.attention.value.weight.zero_()
    shares = contributions(exact(model, encoded()[0]))
    assert_allclose(shares, np.broadcast_to(np.eye(shares.shape[1]), shares.shape), atol=1e-6)


def test_random_directions_are_right_on_average_and_exact_when_there_are_enough() -> None:
    model, sentence = tiny_model(tiny_tokenizer()), encoded()[2]
    true_Lnn = exact(model, sentence)
    points = layer_points(model)
    for count in (D, D + 5):
        assert torch.equal(directions(D, count, seed=0, sentence=0), torch.eye(D))
    along_KD = directions(D, 6, seed=0, sentence=3)
    torch.testing.assert_close(along_KD @ along_KD.T, torch.eye(6) * D / 6)
    assert torch.equal(along_KD, directions(D, 6, seed=0, sentence=3))
    assert not torch.equal(along_KD, directions(D, 6, seed=0, sentence=4))
    drawn = torch.stack(
        [squared_norms(model, sentence, points, directions(D, 6, seed=s, sentence=0)) for s in range(60)]
    )
    torch.testing.assert_close(drawn.mean(0), true_Lnn, rtol=0.25, atol=0)
    one = contributions(squared_norms(model, sentence, points, along_KD))
    assert_allclose(one, contributions(true_Lnn), atol=0.1)


def test_what_is_gathered_equals_a_loop_over_pairs() -> None:
    generator = np.random.default_rng(0)
    sentences = []
    gathered = Contributions()
    for n in (3, 13, 6):
        shares = generator.dirichlet(np.ones(n), size=(2, n))
        sentences.append(shares)
        gathered.add(shares)
    tokens = sum(shares.shape[1] for shares in sentences)
    assert gathered.tokens == tokens == gathered.own_LT.shape[1]
    assert_allclose(gathered.group_means.sum(1), np.ones(2))
    for layer in range(2):
        pairs = [(i - j, s[layer, j, i]) for s in sentences for j in range(s.shape[1]) for i in range(s.shape[1])]
        for place, offset in enumerate(OFFSETS):
            values = [value for distance, value in pairs if distance == offset]
            assert gathered.offset_means[layer, place] == pytest.approx(np.mean(values))
        for place, (_, low, high) in enumerate(GROUPS):
            values = [value for distance, value in pairs if low <= abs(distance) <= (99 if high is None else high)]
            assert gathered.group_means[layer, place] == pytest.approx(sum(values) / tokens)
        led = [s[layer, j].argmax() != j for s in sentences for j in range(s.shape[1])]
        assert gathered.led_by_others_L[layer] == pytest.approx(np.mean(led))
    assert max(OFFSETS) == FARTHEST


def test_offsets_that_no_sentence_has_are_empty() -> None:
    gathered = Contributions()
    gathered.add(np.full((1, 4, 4), 0.25))
    assert np.isnan(gathered.offset_means[0]).tolist() == [abs(offset) > 3 for offset in OFFSETS]


# Token identifiability.


def test_states_of_tokens_are_those_of_the_recorder() -> None:
    model, sentences = tiny_model(tiny_tokenizer()), encoded()
    found = token_states(model, sentences, cpu_engine(25))
    assert np.array_equal(found.sentence_T, np.repeat(np.arange(len(sentences)), [s.ids_T.size for s in sentences]))
    expected = torch.cat([inputs_of(model, sentence) for sentence in sentences])
    torch.testing.assert_close(found.layers[0], expected, rtol=0, atol=2e-6)
    some = found.of([1, 4])
    assert set(some.sentence_T.tolist()) == {1, 4}
    assert as_tokens(sentences[0]).spans_W2.shape == (sentences[0].ids_T.size, 2)


def test_inputs_are_identified_by_themselves_and_never_by_another_sentence() -> None:
    found = token_states(tiny_model(tiny_tokenizer()), encoded(), cpu_engine())
    assert identified(found.layers[0], found.layers[0], found.sentence_T).all()
    inputs = torch.eye(3)[[0, 1, 0, 2]]
    guess = torch.eye(3)[[0, 0, 0, 0]]
    assert identified(guess, inputs, np.array([0, 0, 1, 1])).tolist() == [True, False, True, False]
    assert identified(guess, inputs[[0, 0, 1, 2]], np.array([0, 0, 1, 1])).tolist() == [True, True, False, True]


def test_a_linear_map_undoes_a_linear_map() -> None:
    generator = torch.Generator().manual_seed(0)
    inputs_TD = torch.randn(400, 7, generator=generator)
    states_TD = inputs_TD @ torch.randn(7, 9, generator=generator) + 3
    guess_TD = linear_map(states_TD, inputs_TD)(states_TD)
    assert float((guess_TD - inputs_TD).abs().max()) < 0.02
    sentence_T = np.repeat(np.arange(80), 5)
    assert identified(guess_TD, inputs_TD, sentence_T).all()


def test_a_perceptron_learns_a_map_of_new_rows_in_any_units() -> None:
    generator = torch.Generator().manual_seed(0)
    inputs_TD = torch.randn(1024, 12, generator=generator)
    states_TD = inputs_TD @ torch.linalg.qr(torch.randn(16, 16, generator=generator))[0][:12]
    plain, moved = (
        perceptron_map(scale * states_TD[:512] + shift, inputs_TD[:512] / scale - shift, epochs=80, seed=1)
        for scale, shift in ((1.0, 0.0), (50.0, 7.0))
    )
    guess_TD = plain(states_TD[512:])
    unexplained = (guess_TD - inputs_TD[512:]).square().mean() / inputs_TD[512:].var()
    assert float(unexplained) < 0.6
    torch.testing.assert_close(moved(50 * states_TD[512:] + 7), guess_TD / 50 - 7, rtol=0, atol=1e-4)


def test_identifiability_is_repeatable_and_perfect_at_the_inputs() -> None:
    model, sentences = tiny_model(tiny_tokenizer()), [*encoded(), *encoded(), *encoded()]
    states = token_states(model, sentences, cpu_engine())
    train, test = states.of(range(12)), states.of(range(12, 18))
    runs = [identifiability(train, test, epochs=3, seed=1) for _ in range(2)]
    assert runs[0] == runs[1]
    assert runs[0]["nearest"][0] == runs[0]["linear"][0] == 1.0
    assert all(0 <= value <= 1 for values in runs[0].values() for value in values)
    assert all(len(values) == 3 for values in runs[0].values())


# Explanations.


def a_text() -> TokenisedText:
    sentence = encoded()[0]
    return TokenisedText(tuple(sentence.ids_T.tolist()), tuple(sentence.types_T.tolist()))


def probability(model: HeadedModel, place: int, number: int):  # type: ignore[no-untyped-def]
    def score(states_TD: torch.Tensor, batch: PackedBatch) -> torch.Tensor:
        rows_R = batch.first_token_B + place
        return torch.softmax(model.masked_lm_logits(states_TD[rows_R]), -1)[:, number]

    return score


def test_gradients_equal_finite_differences() -> None:
    model, text = tiny_model(tiny_tokenizer()).double(), a_text()
    score, own_nE = probability(model, 3, 17), embeddings(model, text)
    (value,), gradient_1nE = gradients(model, text, own_nE[None], score)
    for place, dimension in ((0, 0), (3, 7), (5, 19)):
        moved = torch.zeros_like(own_nE)
        moved[place, dimension] = 1e-5
        (ahead, behind), _ = gradients(model, text, torch.stack([own_nE + moved, own_nE - moved]), score)
        assert float(gradient_1nE[0, place, dimension]) == pytest.approx(float(ahead - behind) / 2e-5, rel=1e-5)
    with torch.no_grad():
        assert float(value) == pytest.approx(score(model(text.batch()), text.batch()).item())


def test_integrated_gradients_are_complete_and_nothing_where_nothing_changes() -> None:
    model, text = tiny_model(tiny_tokenizer()), a_text()
    own_nE = embeddings(model, text)
    start_nE = torch.zeros_like(own_nE)
    start_nE[2] = own_nE[2]
    score = probability(model, 4, 11)
    found = integrated_gradients(model, text, start_nE, score, steps=60)
    assert abs(found.score - found.baseline_score) > 1e-4
    assert abs(found.gap) < 1e-3 * abs(found.score - found.baseline_score)
    assert float(found.attributions_n[2]) == 0.0
    coarse = integrated_gradients(model, text, start_nE, score, steps=2)
    assert abs(coarse.gap) > abs(found.gap)
    small = integrated_gradients(model, text, start_nE, score, steps=60, max_batch_tokens=1)
    torch.testing.assert_close(small.attributions_n, found.attributions_n, rtol=0, atol=1e-6)


def test_integrated_gradients_of_a_linear_score_are_exact_with_one_step() -> None:
    model, text = tiny_model(tiny_tokenizer()), a_text()
    model.encoder.layers = torch.nn.ModuleList()
    model.encoder.embeddings.norm = torch.nn.Identity()
    weight_D = torch.randn(D, generator=torch.Generator().manual_seed(0))

    def score(states_TD: torch.Tensor, batch: PackedBatch) -> torch.Tensor:
        return (states_TD @ weight_D).view(batch.num_sequences, -1).sum(1)

    own_nE = embeddings(model, text)
    found = integrated_gradients(model, text, torch.zeros_like(own_nE), score, steps=1)
    torch.testing.assert_close(found.attributions_n.float(), own_nE @ weight_D, rtol=1e-4, atol=1e-5)
    assert abs(found.gap) < 1e-4


def test_rollout_is_the_product_of_half_attention_half_identity_and_its_rows_sum_to_one() -> None:
    model, text = tiny_model(tiny_tokenizer()), a_text()
    maps = text_maps(model, text)
    n = len(text.ids)
    found_nn = rollout(maps)
    torch.testing.assert_close(found_nn.sum(-1), torch.ones(n, dtype=torch.float64))
    first, second = ((layer.mean(0) + torch.eye(n)) / 2 for layer in maps)
    torch.testing.assert_close(found_nn, second @ first)
    assert bool((found_nn >= 0).all())


def test_what_is_explained_is_what_fill_predicts_by_the_rule_that_the_model_was_trained_for() -> None:
    tokenizer = tiny_tokenizer()
    said = {}
    for rule in (None, MaskedNextTokenScoring.name):
        model = tiny_model(tokenizer)
        if rule is not None:
            model.extras[SCORING_RULE] = rule
        subject = LoadedModel("tiny", Path("tiny"), model, tokenizer, "", None)
        question = make_question(subject, "the tokens of the [MASK] in files", None)
        engine = cpu_engine()
        explained = explain(subject, question, ("saliency",), baseline="mask", steps=4, engine=engine)
        (filled,) = fill_masks(model, tokenizer, ["the tokens of the [MASK] in files"], top=1)[0]["masks"]
        assert explained.target == filled[0]["token"]
        assert explained.score == pytest.approx(filled[0]["probability"], rel=1e-5)
        said[rule] = explained.score
    assert said[None] != said[MaskedNextTokenScoring.name]


def test_a_model_of_left_to_right_alone_has_no_share_of_what_is_behind() -> None:
    tokenizer = tiny_tokenizer()
    model = tiny_model(tokenizer)
    model.extras[SCORING_RULE] = EncoderLeftToRight.name
    sentence = encoded()[0]
    assert float(exact(model, sentence).triu(1).abs().max()) == 0
    subject = LoadedModel("tiny", Path("tiny"), model, tokenizer, "", None)
    with pytest.raises(DataError, match="only from left to right"):
        make_question(subject, "the tokens of the [MASK] in files", None)


@pytest.mark.parametrize(
    ("settings", "option"),
    [
        ({"methods": ["saliency"]}, "--method saliency: .*--text"),
        ({"steps": 9}, "--steps 9: .*--text"),
        ({"target": "file"}, "--target file: .*--text"),
        ({"texts": ["A [MASK]."], "sentences": 9}, "--sentences 9: .*--data"),
        ({"texts": ["A [MASK]."], "epochs": 2}, "--epochs 2: .*--data"),
    ],
)
def test_an_option_without_its_input_is_refused(tmp_path: Path, settings: dict[str, Any], option: str) -> None:
    data = None if "texts" in settings else write_sentences(tmp_path / "text.txt")
    with pytest.raises(UsageError, match=option):
        probe_attribution(request_for(tmp_path, data), AttributionSettings(**settings))


def test_too_little_text_is_refused_with_what_was_left_out(tmp_path: Path) -> None:
    request = request_for(tmp_path, write_sentences(tmp_path / "text.txt", ["the file " * 40]))
    expected = r"0 sentences .*, expected at least {} \(sentences longer .*: 1\); give more text{}$"
    with pytest.raises(DataError, match=expected.format(10, ", or --identify-sentences 0")):
        probe_attribution(request, AttributionSettings())
    with pytest.raises(DataError, match=expected.format(1, "")):
        probe_attribution(request, AttributionSettings(identify_sentences=0))


def test_a_vocabulary_without_the_baseline_or_a_mask_is_refused() -> None:
    tokenizer = tiny_tokenizer()
    roles = {role: token for role, token in tokenizer.roles.items() if role != "mask"}
    maskless = Tokenizer(type(tokenizer.backend).from_str(tokenizer.backend.to_str()), roles)
    masked = LoadedModel("tiny", Path("tiny"), tiny_model(tokenizer), maskless, "", None)
    with pytest.raises(DataError, match="tiny: it predicts masked tokens, but its vocabulary has no mask token"):
        make_question(masked, "A file.", None)
    classifier = tiny_model(tokenizer, heads=("sequence_classification",))
    subject = LoadedModel("tiny", Path("tiny"), classifier, maskless, "", None)
    questions = [make_question(subject, "A file.", None)]
    check_methods(subject, questions, ("integrated_gradients",), "zero")
    check_methods(subject, questions, ("saliency",), "mask")
    with pytest.raises(UsageError, match="--baseline mask: the vocabulary has no mask token; use --baseline zero"):
        check_methods(subject, questions, ("integrated_gradients",), "mask")


def test_a_family_without_attention_maps_is_explained_by_its_gradients() -> None:
    known = word_tokenizer(["a reader tests a document"], 20)
    config = ElmoConfig.model_validate(
        {"character_size": 4, "filters": ((1, 6),), "highway_layers": 1, "projection_size": 6, "lstm_width": 11}
    )
    model = HeadedModel(config.build(known.vocab_size), ["sequence_classification"])
    assert chosen_methods((), model) == GRADIENT_METHODS
    assert chosen_methods((), tiny_model(tiny_tokenizer())) == METHODS
