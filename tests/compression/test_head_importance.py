"""Gates on heads: 1 changes nothing, 0 removes the head's weights, and importance equals its formula."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional

from bertkit.compression import head_importance as probe
from bertkit.compression.head_importance import (
    Heads,
    ablate_all_but_one,
    ablate_each_head,
    gated,
    gated_score,
    head_importance,
    least_important_first,
    normalised_by_layer,
    pruned_counts,
    pruning_curve,
)
from bertkit.errors import DataError
from bertkit.evaluation.run import MeasurementArguments
from bertkit.models.encoder import EncoderConfig
from bertkit.models.families.gpt2 import Gpt2Config
from bertkit.models.families.modernbert import ModernBertConfig
from bertkit.models.headed import HeadedModel
from bertkit.models.labels import Labels
from bertkit.models.recorder import Recorder
from bertkit.models.scoring.pseudo_likelihood import score_texts
from bertkit.models.scoring.rules import choose_rule
from bertkit.models.sentence import SentenceModel
from bertkit.probing.heads.measure import HalfRetrieval, TaskScore, WordLoss, halves
from bertkit.probing.sentences import EncodedSentence, Sentence, TextEncoder, packed
from bertkit.tasks.classification import Classification, TextSettings
from bertkit.tasks.encoding import SequenceEncoder
from bertkit.tasks.examples import TextExample
from bertkit.training.engine import Engine
from tests.probing.tiny_models import BERT, GPT2, TEXTS, tiny_causal_model, tiny_model, tiny_tokenizer
from tests.text.corpora import english

CPU = torch.device("cpu")
SMALL = {key: BERT[key] for key in ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")}


def cpu(batch_tokens: int) -> Engine:
    return MeasurementArguments(device="cpu", batch_tokens=batch_tokens).engine()


def encoded(model: HeadedModel, count: int = 7) -> list[EncodedSentence]:
    sentences = [Sentence(f"s{number}", text) for number, text in enumerate(english(count, seed=5))]
    return list(TextEncoder.of(model, tiny_tokenizer()).encode(sentences))


def words(model: HeadedModel, sentences: list[EncodedSentence] | None = None, *, batch: int = 90) -> WordLoss:
    rule = choose_rule(model)(tiny_tokenizer())
    sentences = encoded(model) if sentences is None else sentences
    return WordLoss(model, sentences, rule, cpu(batch), masking_rate=0.3, seed=1)


def answers(model: HeadedModel, *, batch: int = 60, count: int = 9) -> TaskScore:
    examples = [
        TextExample(str(number), text, None, ("no", "yes")[number % 2]) for number, text in enumerate(english(count))
    ]
    task = Classification(Labels(("no", "yes")), ("accuracy",), TextSettings())
    encoder = SequenceEncoder(tiny_tokenizer(), max_tokens=50)
    return TaskScore(model, task, encoder, examples, cpu(batch), metric="accuracy", tuned={})


@pytest.fixture(scope="module")
def model() -> HeadedModel:
    return tiny_model(tiny_tokenizer())


@pytest.fixture(scope="module")
def classifier() -> HeadedModel:
    return tiny_model(tiny_tokenizer(), heads=("sequence_classification",))


def found(model: HeadedModel, *, batch: int = 60) -> HalfRetrieval:
    return HalfRetrieval(SentenceModel(model), encoded(model, 23), cpu(batch))


def without_columns(model: HeadedModel, layer: int, head: int) -> HeadedModel:
    """A copy with the head removed from the output projection."""
    copy = tiny_model(tiny_tokenizer(), model.encoder.config, model.head_names)
    copy.load_state_dict(model.state_dict())
    output = copy.encoder.layers[layer].attention.output  # type: ignore[index, union-attr]  # modules by name
    width = output.weight.shape[1] // model.encoder.config.num_attention_heads  # type: ignore[attr-defined]  # as above
    with torch.no_grad():
        output.weight[:, head * width : (head + 1) * width] = 0
    return copy


def test_gates_of_one_change_nothing(model: HeadedModel) -> None:
    heads, batch = Heads.of(model), packed(encoded(model))
    assert heads.shape == (2, 2)
    ones = Recorder(edits={point: probe._gate(torch.ones(2)) for point in heads.points})
    assert torch.equal(model(batch, ones), model(batch))
    assert not gated(heads, heads.all_on(), CPU).edits


@pytest.mark.parametrize(
    ("config", "head"),
    [
        (None, "masked_lm"),
        (ModernBertConfig(**SMALL, max_position_embeddings=60), "masked_lm"),
        (Gpt2Config(**GPT2), "causal_lm"),
    ],
    ids=["bert", "modernbert", "gpt2"],
)
def test_a_gated_head_is_a_head_whose_columns_are_cut_out(config: EncoderConfig | None, head: str) -> None:
    model = tiny_model(tiny_tokenizer(), config, (head,))
    heads, batch = Heads.of(model), packed(encoded(model))
    whole = model(batch)
    for layer, number in ((0, 1), (1, 0)):
        gate_LN = heads.all_on()
        gate_LN[layer, number] = 0
        found = model(batch, gated(heads, gate_LN, CPU))
        torch.testing.assert_close(found, without_columns(model, layer, number)(batch), atol=2e-5, rtol=1e-4)
        assert not torch.allclose(found, whole, atol=1e-3)


def test_importance_is_the_mean_over_examples_of_the_finite_difference(model: HeadedModel) -> None:
    heads, sentences, step = Heads.of(model), encoded(model, 3), 0.02
    expected_LN = np.zeros(heads.shape)
    signed_LN = np.zeros(heads.shape)
    for sentence in sentences:
        measure = words(model, [sentence])
        (batch,) = measure.batches()
        for layer, head in np.ndindex(heads.shape):
            losses = []
            for sign in (1, -1):
                gate_LN = heads.all_on()
                gate_LN[layer, head] += sign * step
                with torch.no_grad():
                    hidden_TD = model(batch.packed, gated(heads, gate_LN, CPU))
                    losses.append(float(measure.loss(hidden_TD, batch)))
            slope = (losses[0] - losses[1]) / (2 * step)
            expected_LN[layer, head] += abs(slope) / len(sentences)
            signed_LN[layer, head] += slope / len(sentences)
    found_LN = head_importance(words(model, sentences), heads)
    np.testing.assert_allclose(found_LN, expected_LN, rtol=0.02, atol=2e-3)
    # If a batch's gradients were summed before taking the absolute value, some would cancel.
    assert (found_LN > 1.05 * np.abs(signed_LN)).any()


@pytest.mark.parametrize("kind", ["words", "task", "halves"])
def test_importance_and_score_do_not_depend_on_the_batch(
    kind: str, model: HeadedModel, classifier: HeadedModel
) -> None:
    measures = {
        "words": lambda batch: words(model, batch=batch),
        "task": lambda batch: answers(classifier, batch=batch),
        "halves": lambda batch: found(model, batch=batch),
    }
    seen = []
    for batch in (1, 41, 2000):
        measure = measures[kind](batch)
        heads = Heads.of(measure.model)
        seen.append(
            (len(measure.batches()), head_importance(measure, heads), gated_score(measure, heads, heads.all_on()))
        )
    assert [seen[0][0] == measure.examples, seen[2][0]] == [True, 1]
    for _, importance_LN, score in seen[:2]:
        np.testing.assert_allclose(importance_LN, seen[2][1], rtol=2e-4, atol=1e-5)
        assert score == pytest.approx(seen[2][2], rel=1e-5)


def test_importance_over_two_parts_is_the_mean_of_theirs(model: HeadedModel) -> None:
    heads, sentences = Heads.of(model), encoded(model)
    parts = [head_importance(words(model, part), heads) for part in (sentences[:3], sentences[3:])]
    whole_LN = head_importance(words(model, sentences), heads)
    np.testing.assert_allclose(whole_LN, (3 * parts[0] + 4 * parts[1]) / 7, rtol=1e-4)


def test_a_layers_norm_is_one_and_a_layer_of_zeros_stays() -> None:
    found_LN = normalised_by_layer(np.array([[3.0, 4.0], [0.0, 0.0], [0.003, 0.004]]))
    np.testing.assert_allclose(found_LN, [[0.6, 0.8], [0, 0], [0.6, 0.8]])


def test_ablations_equal_models_with_the_weights_taken_out(model: HeadedModel, classifier: HeadedModel) -> None:
    heads, told = Heads.of(model), []
    found_LN = ablate_each_head(words(model), heads, done=told.append)
    for layer, head in np.ndindex(heads.shape):
        cut = without_columns(model, layer, head)
        assert found_LN[layer, head] == pytest.approx(gated_score(words(cut), heads, heads.all_on()), rel=1e-5)
    assert told == [1, 2, 3, 4]
    # With two heads per layer, keeping one is removing the other.
    np.testing.assert_allclose(ablate_all_but_one(words(model), heads), found_LN[:, ::-1], rtol=1e-6)
    scores_LN = ablate_each_head(answers(classifier), Heads.of(classifier))
    assert set(np.round(9 * scores_LN.ravel(), 6)) <= set(range(10))


def test_pruning_goes_from_the_least_worth_up(model: HeadedModel) -> None:
    importance_scores_LN = np.array([[0.4, 0.1], [np.nan, 0.1]])
    assert least_important_first(importance_scores_LN).tolist() == [1, 3, 0, 2]
    heads, measure = Heads.of(model), words(model)
    order_A = least_important_first(importance_scores_LN)
    curve = pruning_curve(measure, heads, order_A, [0, 2, 4])
    gates = [[[1, 1], [1, 1]], [[1, 0], [1, 0]], [[0, 0], [0, 0]]]
    assert curve == [gated_score(measure, heads, np.array(gate, dtype=float)) for gate in gates]


@pytest.mark.parametrize(
    ("heads", "share", "counts"),
    [
        (10, 0.1, list(range(11))),
        (4, 0.5, [0, 2, 4]),
        (3, 0.1, [0, 1, 2, 3]),
        (7, 0.3, [0, 2, 4, 6, 7]),
        (5, 1, [0, 5]),
    ],
)
def test_a_step_removes_its_share_of_all_heads(heads: int, share: float, counts: list[int]) -> None:
    assert pruned_counts(heads, share) == counts


def test_hidden_words_are_a_share_of_those_that_are_not_special(model: HeadedModel) -> None:
    sentences = encoded(model)
    measure, mask = words(model, sentences), tiny_tokenizer().mask_id
    ids_T = torch.cat([batch.packed.ids_T for batch in measure.batches()])
    counts = [max(1, round(0.3 * int((~sentence.special_T).sum()))) for sentence in sentences]
    assert int((ids_T == mask).sum()) == sum(counts) == measure.predicted
    total = 0.0
    for batch in measure.batches():
        index_M, id_M = batch.content
        assert (batch.packed.ids_T[index_M] == mask).all()
        with torch.no_grad():
            total += float(
                functional.cross_entropy(model.masked_lm_logits(model(batch.packed)[index_M]), id_M, reduction="sum")
            )
    heads = Heads.of(model)
    assert gated_score(measure, heads, heads.all_on()) == pytest.approx(total / sum(counts), rel=1e-5)


def test_a_causal_model_predicts_every_next_word() -> None:
    model = tiny_causal_model(tiny_tokenizer())
    sentences = [Sentence("s", text) for text in TEXTS]
    measure = words(model, list(TextEncoder.of(model, tiny_tokenizer()).encode(sentences)))
    scores = score_texts(model, tiny_tokenizer(), TEXTS)
    mean = -sum(score.total for score in scores) / sum(score.tokens for score in scores)
    heads = Heads.of(model)
    assert gated_score(measure, heads, heads.all_on()) == pytest.approx(mean, rel=1e-4)
    assert head_importance(measure, heads).min() > 0


def test_halves_are_the_sentence_and_keep_its_special_tokens(model: HeadedModel) -> None:
    for sentence in encoded(model):
        first, second = halves(sentence)
        assert first.words + second.words == sentence.words
        assert len(first.words) == len(sentence.words) // 2
        assert [*first.ids_T[:-1], *second.ids_T[1:]] == sentence.ids_T.tolist()
        for half in (first, second):
            assert half.special_T.tolist() == [True, *[False] * (half.ids_T.size - 2), True]
            for number, (start, stop) in enumerate(half.spans_W2):
                assert set(half.word_T[start:stop]) == {number}


def test_halves_are_found_by_the_rank_of_their_cosine(model: HeadedModel) -> None:
    measure, heads = found(model), Heads.of(model)
    kept = [each for each in encoded(model, 23) if len(each.words) >= 8]
    assert (measure.examples, measure.too_short) == (len(kept), 23 - len(kept))
    assert measure.too_short > 0
    vectors = []
    for which in (0, 1):
        some = [halves(each)[which] for each in kept]
        with torch.no_grad():
            states = [model(packed([half])).mean(0) for half in some]
        vectors.append(functional.normalize(torch.stack(states), dim=-1))
    order_CC = (vectors[0] @ vectors[1].T).argsort(dim=1, descending=True)
    ranks = [1 + row.tolist().index(number) for number, row in enumerate(order_CC)]
    assert gated_score(measure, heads, heads.all_on()) == pytest.approx(np.mean(1 / np.array(ranks)), rel=1e-4)


def test_worse_is_positive_whichever_way_the_score_goes(model: HeadedModel, classifier: HeadedModel) -> None:
    after = np.array([0.5, 2.0])
    assert words(model).loss_of_score(1.0, after).tolist() == [-0.5, 1.0]
    assert answers(classifier).loss_of_score(1.0, after).tolist() == [0.5, -1.0]


def test_a_model_without_heads_is_refused(model: HeadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "point_shapes", lambda model, lengths: {"blocks.0.hook_resid_post": (7, 20)})
    with pytest.raises(DataError, match=r"no attention heads to switch off .*bertkit probe points"):
        Heads.of(model)


def test_gradients_that_are_no_numbers_are_an_error() -> None:
    model = tiny_model(tiny_tokenizer(), seed=2)
    with torch.no_grad():
        model.encoder.word_embedding.weight[5:] = float("nan")
    with pytest.raises(DataError, match="not finite"):
        head_importance(words(model), Heads.of(model))
