"""Contextuality: the closed forms equal brute force, and have values known in advance."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from bertkit.data.random import Draw
from bertkit.models.hook_points import layer_points
from bertkit.probing.contextuality.measure import (
    LayerVectors,
    Occurrences,
    choose_occurrences,
    collect,
    explainable_variance,
    first_component,
    index_words,
    intra_sentence_similarity,
    layer_figures,
    mean_cosine,
    random_explainable,
)
from bertkit.probing.contextuality.report import ContextualityScores
from bertkit.probing.sentences import EncodedSentence, Sentence, TextEncoder
from bertkit.probing.states import layer_states
from tests.probing.tiny_models import cpu_engine, tiny_model, tiny_tokenizer
from tests.text.corpora import english


def cloud(count: int, width: int, seed: int = 0) -> Tensor:
    """Isotropic: standard normal in every direction."""
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def encoded(count: int = 60) -> list[EncodedSentence]:
    tokenizer = tiny_tokenizer()
    sentences = dict.fromkeys(english(count, seed=8))
    return list(TextEncoder.of(tiny_model(tokenizer), tokenizer).encode(Sentence(text, text) for text in sentences))


@given(st.integers(2, 9), st.integers(1, 7), st.integers(0, 99))
def test_self_similarity_is_the_mean_over_all_pairs(count: int, width: int, seed: int) -> None:
    vectors_ND = cloud(count, width, seed) + 0.7
    pairs = [
        torch.nn.functional.cosine_similarity(vectors_ND[j], vectors_ND[k], dim=0).item()
        for j in range(count)
        for k in range(count)
        if j != k
    ]
    assert mean_cosine(vectors_ND) == pytest.approx(np.mean(pairs), abs=1e-12)


def test_one_occurrence_has_no_similarity() -> None:
    assert math.isnan(mean_cosine(cloud(1, 5)))


def test_variance_of_multiples_of_one_vector_is_explained_whole() -> None:
    multiples_ND = cloud(7, 1) * cloud(1, 5, seed=2)
    assert explainable_variance(multiples_ND) == pytest.approx(1, abs=1e-12)


def test_variance_of_an_isotropic_cloud_is_explained_to_one_in_its_dimensions() -> None:
    width = 8
    shares = [explainable_variance(cloud(count, width)) for count in (50, 500, 20_000)]
    assert shares == sorted(shares, reverse=True)
    assert shares[-1] == pytest.approx(1 / width, rel=0.05)


def test_explained_variance_is_uncentred() -> None:
    vectors_ND = cloud(40, 6) + 10.0
    values = np.linalg.svd(vectors_ND.numpy(), compute_uv=False)
    assert explainable_variance(vectors_ND) == pytest.approx(values[0] ** 2 / (values**2).sum(), abs=1e-12)
    centred_ND = vectors_ND - vectors_ND.mean(0)
    assert explainable_variance(vectors_ND) > 0.9 > 2 * explainable_variance(centred_ND)


def test_an_isotropic_cloud_has_no_anisotropy_and_a_shifted_one_has() -> None:
    vectors_ND = cloud(1000, 30)
    assert abs(mean_cosine(vectors_ND)) < 0.002
    assert mean_cosine(vectors_ND + 1.0) == pytest.approx(0.5, abs=0.02)


def test_the_baseline_of_explained_variance_is_of_sets_of_the_same_size() -> None:
    vectors_ND = cloud(400, 16)
    found = random_explainable(vectors_ND, [3, 20, 400, 900], Draw(0))
    assert list(found) == [3, 20, 400, 900]
    assert found[3] > 1 / 3
    assert found[3] > found[20] > found[400]
    assert found[900] == pytest.approx(found[400], abs=1e-12)
    assert found[400] == pytest.approx(explainable_variance(vectors_ND), abs=1e-12)
    own = [explainable_variance(cloud(20, 16, seed)) for seed in range(100, 130)]
    assert found[20] == pytest.approx(np.mean(own), rel=0.1)


def test_intra_sentence_similarity_is_that_of_words_with_their_mean() -> None:
    states_WD = cloud(6, 4).float()
    sentence_W = torch.tensor([0, 0, 0, 1, 2, 2])
    found_B = intra_sentence_similarity(states_WD, sentence_W)
    for number, found in enumerate(found_B.tolist()):
        own_WD = states_WD[sentence_W == number]
        expected = torch.nn.functional.cosine_similarity(own_WD, own_WD.mean(0, keepdim=True)).mean().item()
        assert found == pytest.approx(expected, abs=1e-6)
    assert found_B[1].item() == pytest.approx(1)


def test_the_first_component_explains_most_and_points_to_the_mean() -> None:
    vectors_ND = cloud(30, 5) - torch.tensor([3.0, 0, 0, 1, 0])
    component_D = first_component(vectors_ND)
    assert np.linalg.norm(component_D) == pytest.approx(1)
    assert vectors_ND.mean(0).numpy() @ component_D > 0
    explained = ((vectors_ND.numpy() @ component_D) ** 2).sum() / vectors_ND.square().sum().item()
    assert explained == pytest.approx(explainable_variance(vectors_ND), abs=1e-12)


def test_occurrences_are_in_different_sentences_and_words_frequent() -> None:
    sentences = encoded()
    places = index_words(sentences, lowercase=True)
    chosen = choose_occurrences(
        sentences, places, Draw(4), min_contexts=5, max_contexts=11, max_vectors=10_000, random_sentences=40
    )
    assert chosen.words
    assert chosen.rare
    for word, found, contexts in zip(chosen.words, chosen.places, chosen.contexts, strict=True):
        having = [n for n, sentence in enumerate(sentences) if word in [each.lower() for each in sentence.words]]
        assert len(having) == contexts >= 5
        numbers = [sentence for sentence, _ in found]
        assert len(set(numbers)) == len(numbers) == min(11, contexts)
        assert set(numbers) <= set(having)
        assert all(sentences[sentence].words[place].lower() == word for sentence, place in found)
    assert len({sentence for sentence, _ in chosen.random}) == len(chosen.random) == 40


def test_every_word_has_as_many_random_occurrences_to_compare_with() -> None:
    sentences = encoded()
    places = index_words(sentences, lowercase=True)
    chosen = choose_occurrences(
        sentences, places, Draw(4), min_contexts=5, max_contexts=30, max_vectors=10_000, random_sentences=8
    )
    assert max(chosen.sizes) > 8
    assert len(chosen.random) == 30


def test_a_limit_on_vectors_passes_words_over_and_counts_them() -> None:
    sentences = encoded()
    places = index_words(sentences, lowercase=True)
    every = choose_occurrences(sentences, places, Draw(4), min_contexts=5, max_contexts=11, max_vectors=10_000)
    some = choose_occurrences(sentences, places, Draw(4), min_contexts=5, max_contexts=11, max_vectors=50)
    assert 0 < sum(map(len, some.places)) <= 50
    assert set(some.words) < set(every.words)
    assert some.passed_over == len(every.words) - len(some.words)
    total = sum(every.sizes)
    exact = choose_occurrences(sentences, places, Draw(4), min_contexts=5, max_contexts=11, max_vectors=total)
    assert (exact.words, exact.passed_over) == (every.words, 0)


def test_random_words_are_drawn_by_sentence_then_by_word() -> None:
    tokenizer = tiny_tokenizer()
    encoder = TextEncoder(tokenizer, max_tokens=99)
    sentences = list(
        encoder.encode(Sentence(str(n), "a value" if n % 2 else "the reader tests a file") for n in range(999))
    )
    chosen = choose_occurrences(
        sentences, {}, Draw(0), min_contexts=5, max_contexts=9, max_vectors=9, random_sentences=999
    )
    places = np.array([(len(sentences[s].words), w) for s, w in chosen.random])
    for words in (2, 5):
        counts = np.bincount(places[places[:, 0] == words, 1], minlength=words)
        assert counts.sum() in (499, 500)
        assert counts / counts.sum() == pytest.approx([1 / words] * words, abs=0.07)


def test_vectors_are_those_of_their_occurrences_and_the_batch_does_not_matter() -> None:
    model, sentences = tiny_model(tiny_tokenizer()), encoded()
    chosen = choose_occurrences(
        sentences,
        index_words(sentences, lowercase=True),
        Draw(1),
        min_contexts=4,
        max_contexts=7,
        max_vectors=300,
        random_sentences=23,
    )
    wide, narrow = (collect(model, sentences, chosen, cpu_engine(size)) for size in (5000, 37))
    (states,) = layer_states(model, sentences, cpu_engine(100_000))
    starts = np.cumsum([0, *(len(each.words) for each in sentences)])
    flat = [place for places in chosen.places for place in places]
    assert len(wide) == len(layer_points(model))
    for layer, (one, other) in enumerate(zip(wide, narrow, strict=True)):
        torch.testing.assert_close(one.words_ND, other.words_ND, rtol=0, atol=5e-6)
        assert one.intra == pytest.approx(other.intra, abs=1e-6)
        torch.testing.assert_close(
            one.words_ND, states.states[layer][[starts[s] + w for s, w in flat]], rtol=0, atol=5e-6
        )
        torch.testing.assert_close(
            one.random_RD, states.states[layer][[starts[s] + w for s, w in chosen.random]], rtol=0, atol=5e-6
        )


def made_up(sizes: tuple[int, ...]) -> tuple[LayerVectors, Occurrences]:
    parts = [cloud(size, 6, seed=size) + number for number, size in enumerate(sizes)]
    layer = LayerVectors(torch.cat(parts), cloud(50, 6, seed=77) + 0.4, 0.8)
    places = tuple(tuple((n, 0) for n in range(size)) for size in sizes)
    return layer, Occurrences(tuple("abc"), places, sizes, tuple((n, 0) for n in range(50)))


def test_figures_of_a_layer_are_its_words_and_their_baselines() -> None:
    layer, occurrences = made_up((5, 9, 30))
    found = layer_figures(layer, occurrences, Draw(2))
    parts = layer.words_ND.split([5, 9, 30])
    assert found.anisotropy == mean_cosine(layer.random_RD)
    for number, part in enumerate(parts):
        assert found.self_similarity_W[number] == mean_cosine(part)
        baseline = random_explainable(layer.random_RD, [len(part)], Draw(2))[len(part)]
        assert found.explainable_W[number] == explainable_variance(part)
        assert found.random_explainable_W[number] == baseline
        assert found.centred_W[number] == pytest.approx(explainable_variance(part - part.mean(0)), abs=1e-12)
    sets = [explainable_variance((rows := cloud(9, 6, seed)) - rows.mean(0)) for seed in range(300, 340)]
    assert found.random_centred_W[1] == pytest.approx(np.mean(sets), rel=0.15)
    assert found.intra_sentence == 0.8


def test_equal_vectors_have_no_centred_share() -> None:
    """Rounding errors would otherwise be taken for differences, with shares from below 0 to above 1."""
    equal_ND = cloud(1, 24).float().double().expand(7, 24)
    layer, occurrences = made_up((7, 9, 30))
    layer = replace(layer, words_ND=torch.cat([equal_ND[:, :6] * 0.1, layer.words_ND[7:]]))
    found = layer_figures(layer, occurrences, Draw(2))
    assert np.isnan(found.centred_W).tolist() == [True, False, False]
    assert found.explainable_W[0] == pytest.approx(1)
    scores = ContextualityScores("made up", 50, occurrences, [found, found])
    assert scores.by_layer["centred_explainable_variance"] == [pytest.approx(np.mean(found.centred_W[1:]))] * 2
    moved_ND = equal_ND[:, :6] + 1e-6 * cloud(7, 6, seed=3)
    assert math.isnan(layer_figures(replace(layer, words_ND=moved_ND), one_word(7), Draw(2)).centred_W[0])
    moved_ND = equal_ND[:, :6] + 1e-3 * cloud(7, 6, seed=3)
    assert 0 < layer_figures(replace(layer, words_ND=moved_ND), one_word(7), Draw(2)).centred_W[0] < 1


def one_word(size: int) -> Occurrences:
    return Occurrences(("a",), (tuple((n, 0) for n in range(size)),), (size,), tuple((n, 0) for n in range(50)))
