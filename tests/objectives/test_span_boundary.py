"""The span-boundary objective: a span is predicted only from its boundary; counts; skipped spans."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from bertkit.data.batch import PackedBatch
from bertkit.data.random import Draw
from bertkit.data.samples import Samples, Targets
from bertkit.errors import UsageError
from bertkit.models.families.albert import AlbertConfig
from bertkit.models.families.bert import BertConfig
from bertkit.models.files.hub import find_model, load_model, save_model
from bertkit.models.headed import HeadedModel
from bertkit.models.registry import FAMILIES
from bertkit.objectives.masked_lm import MaskedLM
from bertkit.objectives.masked_next_token import MaskedNextToken
from bertkit.objectives.masking import Ngrams, Spans, TiledSpans, Tokens
from bertkit.objectives.span_boundary import SpanBoundary, span_boundary_projection
from bertkit.text.tokenizer import TokenizerConfig
from bertkit.text.vocabulary import train_tokenizer
from tests.objectives.worded import VOCABULARY, VOCABULARY_SIZE, worded_samples
from tests.text.corpora import english

SIZES = {"hidden_size": 22, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 30}
LENGTHS = np.random.default_rng(6).integers(3, 70, 90).tolist()


def corrupted(samples: Samples, objective: SpanBoundary | None = None, rate: float = 0.15) -> Samples:
    masked = MaskedLM(units=Spans(), rate=rate).corrupt(samples, VOCABULARY, Draw(1))
    return (objective or SpanBoundary()).corrupt(masked, VOCABULARY, Draw(1))


def targets(samples: Samples) -> Targets:
    return samples.targets["span_boundary"]


def spans_of(samples: Samples) -> list[list[int]]:
    """The spans of the masked LM: runs of neighbours, found token by token."""
    spans: list[list[int]] = []
    for index in samples.targets["masked_lm"].index_M.tolist():
        if spans and spans[-1][-1] == index - 1:
            spans[-1].append(index)
        else:
            spans.append([index])
    return spans


def model_of(config: BertConfig | AlbertConfig, heads: tuple[str, ...] = ("span_boundary",)) -> HeadedModel:
    model = HeadedModel(config.build(VOCABULARY_SIZE), heads)
    model.initialise(3)
    for parameter in model.parameters():  # also biases, so each one matters
        parameter.data.add_(torch.linspace(-0.05, 0.05, parameter.numel()).reshape(parameter.shape))
    return model.eval()


@pytest.mark.parametrize("most", [1, 4, 20])
def test_targets_are_the_first_tokens_of_each_span_between_two_ordinary_tokens(most: int) -> None:
    before = worded_samples(LENGTHS)
    after = corrupted(before, SpanBoundary(max_targets=most), rate=0.4)
    expected = [
        (index, int(before.ids_T[index]), span[0] - 1, span[-1] + 1, offset)
        for span in spans_of(after)
        if not before.special_T[span[0] - 1] and not before.special_T[span[-1] + 1]
        for offset, index in enumerate(span[:most])
    ]
    found = targets(after)
    columns = (found.index_M, found.id_M, found.places["left"], found.places["right"], found.columns["offset"])
    assert list(zip(*(column.tolist() for column in columns), strict=True)) == expected
    assert len(expected) < after.targets["masked_lm"].index_M.size
    assert max(len(span) for span in spans_of(after)) > 4
    hidden = set(after.targets["masked_lm"].index_M.tolist())
    assert not hidden & {*found.places["left"].tolist(), *found.places["right"].tolist()}


def test_spans_of_tiled_spans_that_touch_count_as_one_and_one_without_its_first_token_as_its_rest() -> None:
    before = worded_samples([40] * 30)
    later = before.with_changes(epoch_B=before.epoch_B + 3)
    masked = MaskedLM(units=TiledSpans()).corrupt(later, VOCABULARY, Draw(1))
    after = SpanBoundary().corrupt(masked, VOCABULARY, Draw(1))
    found, hidden = targets(after), set(after.targets["masked_lm"].index_M.tolist())
    assert not hidden & {*found.places["left"].tolist(), *found.places["right"].tolist()}
    inner = [span for span in spans_of(after) if not before.special_T[[span[0] - 1, span[-1] + 1]].any()]
    assert found.columns["offset"].tolist() == [offset for span in inner for offset in range(len(span))]


@settings(max_examples=25)
@given(lengths=st.lists(st.integers(3, 60), min_size=2, max_size=9), max_tokens=st.integers(3, 200))
def test_a_sample_has_the_same_targets_in_any_company(lengths: list[int], max_tokens: int) -> None:
    whole = corrupted(worded_samples(lengths), rate=0.3)
    parts = [corrupted(part, rate=0.3) for part in worded_samples(lengths).split(max_tokens)]
    np.testing.assert_array_equal(np.concatenate([targets(part).id_M for part in parts]), targets(whole).id_M)
    for part, cut in zip(parts, whole.split(max_tokens), strict=True):
        ours, theirs = targets(part), targets(cut)
        np.testing.assert_array_equal(ours.index_M, theirs.index_M)
        for name in ("left", "right"):
            np.testing.assert_array_equal(ours.places[name], theirs.places[name])
        np.testing.assert_array_equal(ours.columns["offset"], theirs.columns["offset"])


def test_a_prediction_depends_on_nothing_inside_its_span() -> None:
    model = model_of(BertConfig(**SIZES))
    after = corrupted(worded_samples(LENGTHS), rate=0.3)
    batch = PackedBatch.from_samples(after)
    hidden_TD = model(batch)
    logits_MV = span_boundary_projection(model, hidden_TD, batch).logits()
    inside = torch.from_numpy(after.targets["masked_lm"].index_M)
    perturbed_TD = hidden_TD.clone()
    perturbed_TD[inside] = torch.randn(inside.numel(), hidden_TD.shape[1])
    assert torch.equal(span_boundary_projection(model, perturbed_TD, batch).logits(), logits_MV)
    for side in ("left", "right"):
        perturbed_TD = hidden_TD.clone()
        perturbed_TD[batch.targets["span_boundary"].places[side]] += 1
        assert not (span_boundary_projection(model, perturbed_TD, batch).logits() == logits_MV).all(dim=1).any()


@pytest.mark.parametrize("config", [BertConfig(**SIZES), AlbertConfig(**SIZES, embedding_size=14)])
def test_the_loss_is_the_papers_formula_span_by_span(config: BertConfig | AlbertConfig) -> None:
    """h = LN(gelu(W2 LN(gelu(W1 [x_{s-1}; x_{e+1}; p_i])))), and cross-entropy over the tied word embedding."""
    model = model_of(config)
    after = corrupted(worded_samples([40, 23, 57]), rate=0.3)
    batch = PackedBatch.from_samples(after)
    hidden_TD = model(batch).detach()
    weights = dict(model.span_boundary.named_parameters())

    def layer(states: torch.Tensor, number: int) -> torch.Tensor:
        states = functional.gelu(states @ weights[f"dense_{number}.weight"].T + weights[f"dense_{number}.bias"])
        centred = states - states.mean()
        normed = centred / (centred.square().mean() + 1e-12).sqrt()
        return normed * weights[f"norm_{number}.weight"] + weights[f"norm_{number}.bias"]

    expected, count = torch.tensor(0.0), 0
    for span in spans_of(after):
        left, right = span[0] - 1, span[-1] + 1
        if after.special_T[left] or after.special_T[right]:
            continue
        for offset, index in enumerate(span):
            place = weights["offset_embedding.weight"][offset]
            states = layer(layer(torch.cat([hidden_TD[left], hidden_TD[right], place]), 1), 2)
            logits_V = model.encoder.word_embedding.weight @ states + weights["bias"]
            original = int(after.targets["masked_lm"].id_M[after.targets["masked_lm"].index_M == index][0])
            expected = expected - logits_V.log_softmax(dim=0)[original]
            count += 1
    part = SpanBoundary().loss(model, hidden_TD, batch)
    torch.testing.assert_close(part.sum, expected)
    assert part.count == SpanBoundary().count(batch) == count > 10


def test_the_paper_widths_make_the_papers_head() -> None:
    """For BERT base, cased: 2 x 768 + 200 in, 768, 768 out, 20 positions, and a bias for every token."""
    with torch.device("meta"):
        config = BertConfig()
        plain = HeadedModel(config.build(28_996), ["masked_lm"])
        both = HeadedModel(config.build(28_996), ["masked_lm", "span_boundary"])
    size = sum(each.numel() for each in both.parameters()) - sum(each.numel() for each in plain.parameters())
    assert size == 20 * 200 + (1736 * 768 + 768) + (768 * 768 + 768) + 2 * 2 * 768 + 28_996


def test_asked_of_any_token_it_takes_the_token_for_both_sides_of_a_span() -> None:
    """As when an exported model is compared with its source, head by head."""
    model = model_of(BertConfig(**SIZES))
    batch = PackedBatch.from_samples(worded_samples([9, 4]))
    hidden_TD = model(batch)
    offset_T = torch.zeros(13, dtype=torch.int64)
    words_VE = model.encoder.word_embedding.weight
    expected = model.span_boundary.project_span(hidden_TD, hidden_TD, offset_T, words_VE).logits()
    assert torch.equal(model.logits("span_boundary", hidden_TD, batch), expected)
    assert expected.shape == (13, VOCABULARY_SIZE)


def test_every_family_can_have_the_head() -> None:
    for family, config in FAMILIES.items():
        assert "span_boundary" in config().all_heads(), family


def test_the_head_is_saved_and_read_back(tmp_path: Path) -> None:
    tokenizer = train_tokenizer(TokenizerConfig(vocab_size=VOCABULARY_SIZE, lowercase=True), english(80))
    model = model_of(BertConfig(**SIZES), ("masked_lm", "span_boundary"))
    save_model(model, tokenizer, tmp_path / "model")
    again, _ = load_model(find_model(str(tmp_path / "model")), heads=["masked_lm", "span_boundary"])
    for name, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name


def test_without_spans_beside_it_there_is_nothing_to_predict() -> None:
    samples = worded_samples([30, 20])
    for before in (
        samples,
        MaskedLM(units=Tokens()).corrupt(samples, VOCABULARY, Draw(0)),
        MaskedLM(units=Ngrams()).corrupt(samples, VOCABULARY, Draw(0)),
    ):
        with pytest.raises(UsageError, match=r"masked_lm: \{units: \{name: spans\}\}"):
            SpanBoundary().corrupt(before, VOCABULARY, Draw(0))
    assert SpanBoundary().rank > MaskedLM().rank


def test_a_batch_without_predictable_spans_counts_nothing() -> None:
    after = corrupted(worded_samples([3, 3]))
    assert targets(after).index_M.size == 0
    model = model_of(BertConfig(**SIZES))
    batch = PackedBatch.from_samples(after)
    part = SpanBoundary().loss(model, model(batch), batch)
    assert part.count == 0
    assert part.sum.item() == 0


def test_a_recipe_needs_spans_that_are_predicted_in_their_place() -> None:
    spans = SpanBoundary()
    assert spans.combination_errors((spans, MaskedLM(units=Spans()))) == []
    for other in (MaskedLM(units=Tokens()), MaskedNextToken(units=Spans())):
        (fault,) = spans.combination_errors((spans, other))
        assert "needs masked_lm with spans" in fault
