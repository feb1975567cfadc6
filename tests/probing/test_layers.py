"""Linear probes of layers: equal to scikit-learn's, with codes and controls of values known in advance."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.linear_model import LogisticRegression
from torch import Tensor

from bertkit.data.random import Draw
from bertkit.models.hook_points import layer_points
from bertkit.probing.layers import ProbeFit
from bertkit.probing.layers import measure as module
from bertkit.probing.layers.measure import (
    Items,
    LinearProbe,
    accuracy_interval,
    centre_of_gravity,
    control_labels,
    divergence_from_uniform,
    expected_layer,
    online_code,
    pool_spans,
    span_rows,
)
from bertkit.probing.sentences import EncodedSentence, Sentence, TextEncoder
from bertkit.probing.state_store import collect_states
from bertkit.probing.states import layer_states
from tests.probing.tiny_models import cpu_engine, tiny_model, tiny_tokenizer
from tests.text.corpora import english


def cloud(rows: int, width: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))


def words(labels: np.ndarray, first: int = 0) -> Items:
    """One item per row."""
    rows = np.arange(first, first + labels.size)
    return Items(np.stack([rows, rows + 1], 1)[:, None], labels.astype(np.int64), [f"w{row}" for row in rows])


@pytest.mark.parametrize("penalty", [0.3, 5.0])
def test_a_probe_is_scikit_learns_logistic_regression(penalty: float) -> None:
    table = cloud(61, 7)
    labels = (table[:, 0] + 0.5 * cloud(61, 1, 3)[:, 0] > 0).long().numpy() + 2 * (table[:, 1] > 0.6).numpy()
    probe = LinearProbe([table], 1, 4, ProbeFit(penalty=penalty, max_iterations=300)).fit(words(labels))
    # The bias is penalised like a weight, so it is an additional feature for scikit-learn.
    features = np.concatenate([table.numpy(), np.ones((61, 1))], 1)
    theirs = LogisticRegression(C=1 / penalty, fit_intercept=False, tol=1e-8, max_iter=1000).fit(features, labels)
    expected = theirs.predict_proba(features)
    ours = torch.softmax(probe.logits(words(labels).spans_NP2), 1).detach().numpy()
    assert ours == pytest.approx(expected, abs=2e-3)
    assert probe.bits(words(labels)) == pytest.approx(-np.log2(expected[np.arange(61), labels]).sum(), rel=1e-3)
    assert (probe.predict(words(labels)) == theirs.predict(features)).all()


def test_a_probe_that_was_stopped_before_it_converged_is_known_and_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    table = cloud(61, 7)
    labels = (table[:, 0] > 0).long().numpy()
    known = []
    for most in (0, 3, 300):
        fit = ProbeFit(max_iterations=most)
        known.append(LinearProbe([table], 1, 2, fit).fit(words(labels)).is_converged)
        module.warn_of_unconverged(known.count(False), len(known), fit)
    assert known == [True, False, True]
    assert caplog.messages[0].startswith("1 of 2 probes had not converged after 3 iterations")


def test_the_number_of_items_computed_together_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    tables, labels = [cloud(53, 5, 1), cloud(53, 5, 2)], np.arange(53) % 3
    fit = ProbeFit(max_iterations=15)
    whole = LinearProbe(tables, 1, 3, fit).fit(words(labels))
    monkeypatch.setattr(module, "_ITEMS_AT_ONCE", 10)
    parts = LinearProbe(tables, 1, 3, fit).fit(words(labels))
    assert torch.allclose(whole.weight_KF, parts.weight_KF, atol=1e-3)
    assert parts.mix_weights == pytest.approx(whole.mix_weights, abs=1e-3)
    assert (whole.predict(words(labels)) == parts.predict(words(labels))).all()


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 4)), min_size=1, max_size=6), st.integers(0, 9))
def test_pooling_equals_brute_force(places: list[tuple[int, int]], seed: int) -> None:
    table, query = cloud(14, 3, seed), cloud(1, 3, seed + 1)[0]
    spans = np.array([(start, start + length) for start, length in places])
    states = table[torch.from_numpy(span_rows(spans))]
    pooled = {how: pool_spans(states, spans, how, query) for how in ("attention", "endpoints", "mean")}  # type: ignore[arg-type]
    for number, (start, stop) in enumerate(spans.tolist()):
        span = table[start:stop]
        weights = torch.softmax(span @ query, 0)
        assert torch.allclose(pooled["attention"][number], weights @ span, atol=1e-5)
        assert torch.allclose(pooled["mean"][number], span.mean(0), atol=1e-5)
        assert torch.equal(pooled["endpoints"][number], torch.cat([span[0], span[-1]]))


def test_attention_finds_the_word_that_decides() -> None:
    """The label depends on the one marked word of a span; the mean of four words blurs it."""
    generator = np.random.default_rng(0)
    table = torch.zeros(4 * 120, 6)
    labels = generator.integers(0, 2, 120)
    for item in range(120):
        rows = table[4 * item : 4 * item + 4]
        rows[:, 2:] = torch.from_numpy(generator.normal(size=(4, 4)))
        rows[:, 0] = torch.from_numpy(3.0 * generator.choice([-1, 1], 4))
        marked = int(generator.integers(4))
        rows[marked, 1], rows[marked, 0] = 4.0, 3.0 * (2 * labels[item] - 1)
    spans = np.arange(0, 480, 4)[:, None] + [[0, 4]]
    items = Items(spans[:, None], labels.astype(np.int64), ["x"] * 120)
    right = {}
    for pooling in ("attention", "mean"):
        probe = LinearProbe([table], 1, 2, ProbeFit(pooling=pooling, penalty=0.1)).fit(items)  # type: ignore[arg-type]
        right[pooling] = (probe.predict(items) == labels).mean()
    assert right["attention"] > 0.97
    assert right["mean"] < 0.9


def test_two_spans_have_features_of_their_own() -> None:
    """The label is the sign of the first word's number, for any second: their order matters."""
    table = cloud(80, 2)
    first, second = np.arange(80), np.roll(np.arange(80), 7)
    spans = np.stack([np.stack([first, first + 1], 1), np.stack([second, second + 1], 1)], 1)
    labels = (table[:, 0] > 0).long().numpy()
    probe = LinearProbe([table], 2, 2, ProbeFit(penalty=0.01)).fit(Items(spans, labels, ["x"] * 80))
    assert (probe.predict(Items(spans, labels, ["x"] * 80)) == labels).mean() > 0.98
    swapped = probe.predict(Items(spans[:, ::-1], labels, ["x"] * 80))
    assert (swapped == labels).mean() < 0.8


@pytest.mark.parametrize(("layers", "informative"), [(4, 2), (2, 1)])
def test_a_mix_learns_the_layer_that_holds_the_labels(layers: int, informative: int) -> None:
    labels = np.random.default_rng(1).integers(0, 3, 150)
    tables = [cloud(150, 6, seed) for seed in range(layers)]
    tables[informative] = tables[informative] + 3 * torch.nn.functional.one_hot(torch.from_numpy(labels), 6)
    probe = LinearProbe(tables, 1, 3, ProbeFit()).fit(words(labels))
    assert probe.mix_weights.argmax() == informative
    assert probe.mix_weights.sum() == pytest.approx(1)
    assert abs(centre_of_gravity(probe.mix_weights) - informative) < 0.5


def test_a_fit_ends_where_the_penalised_likelihood_of_all_parameters_is_flat() -> None:
    """Weights, the mix's logits and the attention's queries are penalised alike, by half their squares."""
    penalty, count = 0.5, 60
    tables = [cloud(2 * count, 5, seed) for seed in range(2)]
    labels = (tables[1][::2, 0] + tables[0][1::2, 1] > 0).long().numpy()
    first = 2 * np.arange(count)
    items = Items(np.stack([first, first + 2], 1)[:, None], labels, [""] * count)
    probe = LinearProbe(tables, 1, 2, ProbeFit(penalty=penalty, max_iterations=500)).fit(items)
    parameters = [probe.weight_KF, probe.mix_L, probe.query_PD]
    nats = torch.nn.functional.cross_entropy(probe.logits(items.spans_NP2), torch.from_numpy(labels), reduction="sum")
    for parameter, slope in zip(parameters, torch.autograd.grad(nats, parameters), strict=True):
        assert parameter.abs().max() > 0.1
        assert torch.allclose(slope, -penalty * parameter, atol=0.01)


def test_the_interval_is_that_of_resampled_sentences() -> None:
    generator = np.random.default_rng(3)
    sentence_N = np.repeat(np.arange(40) * 2, generator.integers(1, 15, size=40))  # every other has no item
    label_N = np.zeros(sentence_N.size, dtype=np.int64)
    predicted_N = (generator.random(sentence_N.size) < (sentence_N % 3) / 3).astype(np.int64)
    right_S, items_S = (
        np.array([rows(sentence_N == s) for s in np.unique(sentence_N)])
        for rows in (lambda own: (predicted_N[own] == 0).sum(), np.sum)
    )
    chosen_RS = generator.integers(40, size=(20_000, 40))
    expected = np.percentile(right_S[chosen_RS].sum(1) / items_S[chosen_RS].sum(1), [2.5, 97.5])
    assert accuracy_interval(label_N, predicted_N, sentence_N) == pytest.approx(expected.tolist(), abs=0.01)


def test_labels_that_cannot_be_learnt_take_n_log_k_bits() -> None:
    """Constant states, and a penalty so strong that all labels remain equally probable."""
    labels, table = np.arange(97) % 5, torch.zeros(97, 3)
    order = np.random.default_rng(0).permutation(97)
    code = online_code([table], words(labels), 5, ProbeFit(penalty=1e9), order)
    assert code.bits == pytest.approx(97 * math.log2(5), rel=1e-5)
    assert code.uniform_bits == pytest.approx(97 * math.log2(5))
    untrained = online_code([table], words(labels), 5, ProbeFit(max_iterations=0), order)
    assert untrained.bits == pytest.approx(97 * math.log2(5), rel=1e-9)


def test_the_code_is_the_sum_of_the_portions_coded_by_each_probe() -> None:
    table = cloud(400, 4)
    labels = (table[:, 0] > 0).long().numpy()
    order = np.random.default_rng(2).permutation(400)
    fit = ProbeFit(max_iterations=200)
    ends = [1, 2, 3, 6, 13, 25, 50, 100, 200, 400]  # round(0.0625 * 400) = 25
    expected = 1.0
    for begin, end in pairwise(ends):
        probe = LinearProbe([table], 1, 2, fit).fit(words(labels).at(order[:begin]))
        expected += probe.bits(words(labels).at(order[begin:end]))
    code = online_code([table], words(labels), 2, fit, order)
    assert code.bits == pytest.approx(expected, rel=1e-2)
    assert code.compression > 2


def test_selectivity_is_nothing_where_memory_suffices() -> None:
    """States are the word's number, labels depend only on the word: the control task is as easy as the task."""
    generator = np.random.default_rng(0)
    kinds = generator.integers(0, 6, 240)
    table = torch.nn.functional.one_hot(torch.from_numpy(kinds), 6).float()
    keys = [f"word{kind}" for kind in kinds]
    spans = words(kinds).spans_NP2
    right = []
    known: dict[str, int] = {}
    for labels in (kinds % 3, control_labels(keys, kinds % 3, Draw(0), known)):
        probe = LinearProbe([table], 1, 3, ProbeFit(penalty=0.1)).fit(Items(spans[:200], labels[:200], keys[:200]))
        right.append((probe.predict(Items(spans[200:], labels[200:], keys[200:])) == labels[200:]).mean())
    assert right == [1.0, 1.0]


def test_control_labels_depend_on_the_word_and_follow_the_labels_frequencies() -> None:
    keys = [f"w{number % 3000}" for number in range(5000)]
    labels = np.array([0] * 4000 + [1] * 750 + [-1] * 250)
    known: dict[str, int] = {}
    drawn = control_labels(keys, labels, Draw(3), known)
    assert all(known[key] == label for key, label in zip(keys, drawn.tolist(), strict=True))
    assert set(drawn.tolist()) == {0, 1}
    assert drawn.mean() == pytest.approx(750 / 4750, abs=0.03)
    again = control_labels([*keys[:10], "new"], labels, Draw(3), known)
    assert (again[:10] == drawn[:10]).all()
    assert not np.array_equal(control_labels(keys, labels, Draw(4), {}), drawn)


def test_layers_of_mixes_in_closed_form() -> None:
    assert centre_of_gravity(np.full(5, 0.2)) == pytest.approx(2.0)
    assert centre_of_gravity(np.array([0.0, 0.0, 1.0])) == 2.0
    assert divergence_from_uniform(np.full(5, 0.2)) == pytest.approx(0.0)
    assert divergence_from_uniform(np.array([0.0, 1.0, 0.0])) == pytest.approx(math.log(3))
    assert expected_layer([0.5, 0.5, 0.9, 0.9]) == 2.0
    assert expected_layer([0.5, 0.7, 0.9]) == pytest.approx(1.5)
    assert math.isnan(expected_layer([0.5, 0.5, 0.5]))
    assert math.isnan(expected_layer([0.5, 0.9, 0.51]))


def encoded(count: int = 23) -> list[EncodedSentence]:
    tokenizer = tiny_tokenizer()
    return list(
        TextEncoder.of(tiny_model(tokenizer), tokenizer).encode(Sentence(text, text) for text in english(count, seed=8))
    )


def test_a_store_holds_the_states_of_every_word_whatever_the_batch(tmp_path: Path) -> None:
    model, sentences = tiny_model(tiny_tokenizer()), encoded()
    points = layer_points(model)
    parts = list(layer_states(model, sentences, cpu_engine(100_000), points=points))
    for tokens in (30, 100_000):
        with collect_states(model, sentences, points, tmp_path, cpu_engine(tokens)) as store:
            assert store.offsets_S1.tolist() == np.cumsum([0, *(len(each.words) for each in sentences)]).tolist()
            for number in range(store.layers):
                expected = torch.cat([part.states[number] for part in parts])
                assert torch.allclose(store.layer(number), expected, atol=1e-5)
    assert not list(tmp_path.iterdir())


def test_a_store_of_some_words_holds_these_in_their_order(tmp_path: Path) -> None:
    model, sentences = tiny_model(tiny_tokenizer()), encoded()
    wanted = [[number % len(each.words), 0][: number % 3] for number, each in enumerate(sentences)]
    points = layer_points(model)
    with (
        collect_states(model, sentences, points, tmp_path, cpu_engine(80)) as whole,
        collect_states(model, sentences, points, tmp_path, cpu_engine(50), wanted=wanted) as some,
    ):
        rows = [int(whole.offsets_S1[number]) + word for number, own in enumerate(wanted) for word in own]
        assert some.rows == len(rows)
        for number in range(whole.layers):
            assert torch.allclose(some.layer(number), whole.layer(number)[rows], atol=1e-5)


def test_standardised_states_have_mean_0_and_variance_1_on_the_training_rows(tmp_path: Path) -> None:
    with collect_states(tiny_model(tiny_tokenizer()), encoded(), ("hook_embed",), tmp_path, cpu_engine()) as store:
        store.states_LWD[0, :, 3] = 7.0
        count = store.rows // 2
        store.standardise(count)
        table = store.layer(0)[:count].double()
        varying = torch.arange(store.width) != 3
        assert torch.allclose(table.mean(0), torch.zeros(store.width, dtype=torch.float64), atol=1e-6)
        assert torch.allclose(table.var(0, correction=0)[varying], torch.ones(1, dtype=torch.float64), atol=1e-5)
        assert store.layer(0)[:, 3].abs().max() == 0
