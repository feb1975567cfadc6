"""ELMo: an LSTM equal to torch's, words from characters, one-sided directions, and lanes that continue."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor, nn

from bertkit.data.batch import BatchLanes, PackedBatch
from bertkit.finetuning.methods.features import FeatureBased
from bertkit.models.families.elmo import Elmo, ElmoConfig, Reading
from bertkit.models.feature_lstm import FeatureLstm, FeatureLstmConfig
from bertkit.models.files.hub import load_model, save_model
from bertkit.models.headed import HeadedModel
from bertkit.models.operators.character_cnn import (
    PADDING,
    TEXT_BEGINS,
    TEXT_ENDS,
    WORD_BEGINS,
    WORD_ENDS,
    CharacterCnn,
    spelling,
)
from bertkit.models.operators.projected_lstm import ProjectedLstm
from bertkit.models.operators.sampled_softmax import draw_words, expected_counts, sampled_cross_entropy
from bertkit.models.operators.vocabulary import VocabularyProjection
from bertkit.models.recorder import Recorder
from bertkit.models.scoring.pseudo_likelihood import score_texts
from bertkit.text.tokenizer import Tokenizer
from bertkit.text.vocabulary import word_tokenizer

SIZES: dict[str, Any] = {
    "character_size": 4,
    "filters": ((1, 6), (3, 10)),
    "highway_layers": 1,
    "max_characters": 9,
    "projection_size": 6,
    "lstm_width": 11,
}
WORDS = [f"{first}{second}" for first in "abcdefgh" for second in ("", "ä", "xyz", "ongerword")]
TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}


def tokenizer() -> Tokenizer:
    return word_tokenizer([" ".join(WORDS)], 40)


def model_of(**settings: Any) -> HeadedModel:
    known = tokenizer()
    config = ElmoConfig.model_validate({**SIZES, **settings})
    model = HeadedModel(config.build(known.vocab_size), ["causal_lm"])
    model.initialise(0)
    model.encoder.read_vocabulary(known)
    return model.eval()


def encoder_of(model: HeadedModel) -> Elmo:
    assert isinstance(model.encoder, Elmo)
    return model.encoder


def ids_of(*lengths: int, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(5, 37, (length,), generator=generator).tolist() for length in lengths]


def in_lanes(ids: list[list[int]], backwards: list[bool]) -> PackedBatch:
    lanes = BatchLanes(torch.arange(len(ids)), torch.tensor(backwards), len(ids[0]))
    return replace(PackedBatch.from_ids(ids), lanes=lanes)


def torch_twin(ours: ProjectedLstm, width: int) -> nn.LSTM:
    cell, projection = ours.projection.in_features, ours.projection.out_features
    theirs = nn.LSTM(width, cell, proj_size=projection, batch_first=True)
    with torch.no_grad():
        theirs.weight_ih_l0.copy_(ours.input.weight)
        theirs.bias_ih_l0.copy_(ours.input.bias)
        theirs.bias_hh_l0.zero_()
        theirs.weight_hh_l0.copy_(ours.hidden.weight)
        theirs.weight_hr_l0.copy_(ours.projection.weight)
    return theirs


@pytest.mark.parametrize("started", [False, True])
def test_without_bounds_it_is_torchs_lstm_with_a_projection(started: bool) -> None:
    """Sequences of unequal length, one by one in torch; outputs, last states and gradients."""
    torch.manual_seed(0)
    ours = ProjectedLstm(5, 7, 3)
    theirs = torch_twin(ours, 5)
    lengths = [6, 4, 4, 1]
    texts = [torch.randn(length, 5) for length in lengths]
    start = (torch.randn(4, 3), torch.randn(4, 7)) if started else None
    reading = Reading.of(
        torch.tensor([0, 6, 10, 14]).numpy(), torch.tensor(lengths).numpy(), torch.device("cpu"), backward=False
    )
    output, (hidden, cell) = ours(torch.cat(texts)[reading.order_T], reading.running_S, start)
    placed = torch.empty_like(output).index_copy(0, reading.order_T, output)
    expected = []
    for number, text in enumerate(texts):
        own = None if start is None else (start[0][None, number, None], start[1][None, number, None])
        states, (last, last_cell) = theirs(text[None], own)
        expected.append(states[0])
        torch.testing.assert_close(hidden[number], last[0, 0], **TOLERANCE)
        torch.testing.assert_close(cell[number], last_cell[0, 0], **TOLERANCE)
    torch.testing.assert_close(placed, torch.cat(expected), **TOLERANCE)
    mine = torch.autograd.grad(placed.square().sum(), [ours.input.weight, ours.hidden.weight, ours.projection.weight])
    other = torch.autograd.grad(
        torch.cat(expected).square().sum(), [theirs.weight_ih_l0, theirs.weight_hh_l0, theirs.weight_hr_l0]
    )
    for one, two in zip(mine, other, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5)


def test_bounds_hold_the_cell_and_what_it_gives() -> None:
    """Against the equations of one sequence, token by token; both bounds are reached."""
    torch.manual_seed(1)
    ours = ProjectedLstm(5, 7, 3, cell_clip=0.3, projection_clip=0.1)
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.mul_(3)
    text = torch.randn(9, 5) * 3
    output, _ = ours(text, [1] * 9)
    hidden, cell, reached = torch.zeros(3), torch.zeros(7), [False, False]
    for place in range(9):
        gates = ours.input.weight @ text[place] + ours.input.bias + ours.hidden.weight @ hidden
        take, keep, new, give = gates.split(7)
        cell = keep.sigmoid() * cell + take.sigmoid() * new.tanh()
        reached[0] |= bool((cell.abs() > 0.3).any())
        cell = cell.clamp(-0.3, 0.3)
        hidden = ours.projection.weight @ (give.sigmoid() * cell.tanh())
        reached[1] |= bool((hidden.abs() > 0.1).any())
        hidden = hidden.clamp(-0.1, 0.1)
        torch.testing.assert_close(output[place], hidden, **TOLERANCE)
    assert reached == [True, True]


def test_words_are_spelled_in_bytes_between_their_marks() -> None:
    known = tokenizer()
    table = spelling(known, 7)
    number = known.id("axyz")
    assert number is not None
    assert table[number].tolist() == [WORD_BEGINS, *b"axyz", WORD_ENDS, PADDING]
    long = known.id("aongerword")
    assert long is not None
    assert table[long].tolist() == [WORD_BEGINS, *b"aonge", WORD_ENDS]
    assert table[known.sep_id].tolist() == [WORD_BEGINS, TEXT_ENDS, WORD_ENDS, *[PADDING] * 4]
    assert table[known.cls_id, 1] == TEXT_BEGINS


def test_a_words_vector_is_that_of_the_equations() -> None:
    torch.manual_seed(0)
    cnn = CharacterCnn(4, ((1, 6), (3, 10)), 2, 5)
    spelled = torch.randint(261, (3, 8))
    found = cnn(spelled)
    for word in range(3):
        characters = cnn.characters.weight[spelled[word]]
        parts = []
        for convolution, width in zip(cnn.convolutions, (1, 3), strict=True):
            windows = [
                torch.einsum("fkw,wk->f", convolution.weight, characters[at : at + width]) + convolution.bias
                for at in range(8 - width + 1)
            ]
            parts.append(torch.stack(windows).amax(0).relu())
        states = torch.cat(parts)
        for highway in cnn.highways:
            gate = torch.sigmoid(highway.gate(states))
            states = gate * highway.transform(states).relu() + (1 - gate) * states
        torch.testing.assert_close(found[word], cnn.projection(states), **TOLERANCE)


def test_each_direction_sees_one_side() -> None:
    """Changing a token changes the forward half from there on, the backward half up to there."""
    model = model_of()
    ids = ids_of(7, 1, 5)
    batch = PackedBatch.from_ids(ids)
    before = model(batch)
    sequence = [0] * 7 + [1] + [2] * 5
    for place in range(13):
        changed = batch.ids_T.clone()
        changed[place] = 5 + (changed[place] - 4) % 32
        after = model(replace(batch, ids_T=changed))
        for half, sees in ((slice(0, 6), lambda token, at: token >= at), (slice(6, 12), lambda token, at: token <= at)):
            differs = (before[:, half] != after[:, half]).any(dim=1).tolist()
            assert differs == [sequence[token] == sequence[place] and sees(token, place) for token in range(13)]


@pytest.mark.parametrize("backward", [False, True])
def test_a_lane_is_one_direction_of_its_text(backward: bool) -> None:
    """A lane read backwards has its tokens in reading order."""
    model = model_of()
    (ids,) = ids_of(9)
    whole = model(PackedBatch.from_ids([ids]))
    lane = model(in_lanes([ids[::-1] if backward else ids], [backward]))
    assert not lane[:, 6:].any()
    expected = whole[:, 6:].flip(0) if backward else whole[:, :6]
    torch.testing.assert_close(lane[:, :6], expected, **TOLERANCE)


def test_two_parts_of_a_lane_are_one_text() -> None:
    """States continue where they stopped, in either direction of a lane."""
    encoder = encoder_of(model_of())
    ids, backwards = ids_of(9, 9, 9), [True, False, True]
    whole, end = encoder.forward_carried(in_lanes(ids, backwards), None)
    first, state = encoder.forward_carried(in_lanes([each[:4] for each in ids], backwards), None)
    second, last = encoder.forward_carried(in_lanes([each[4:] for each in ids], backwards), state)
    parts = torch.cat([first.view(3, 4, -1), second.view(3, 5, -1)], dim=1)
    torch.testing.assert_close(parts, whole.view(3, 9, -1), **TOLERANCE)
    assert sorted(end) == ["cell.0", "cell.1", "hidden.0", "hidden.1"]
    for name, tensor in end.items():
        torch.testing.assert_close(last[name], tensor, **TOLERANCE)


def test_packed_equals_one_by_one() -> None:
    model = model_of()
    ids = ids_of(7, 1, 5)
    ones = torch.cat([model(PackedBatch.from_ids([one])) for one in ids])
    torch.testing.assert_close(model(PackedBatch.from_ids(ids)), ones, **TOLERANCE)


def test_the_second_layer_adds_its_input() -> None:
    """Equation by equation for the forward direction: the skip connection starts at the second layer."""
    encoder = encoder_of(model_of(num_hidden_layers=3))
    batch = PackedBatch.from_ids(ids_of(6))
    recorder = Recorder([f"blocks.{layer}.hook_resid_pre" for layer in range(3)])
    last = encoder(batch, recorder)
    states = [recorder.kept[f"blocks.{layer}.hook_resid_pre"] for layer in range(3)] + [last]
    assert torch.equal(states[0][:, :6], states[0][:, 6:])
    for number in range(3):
        output, _ = encoder.forward_layers[number](states[number][:, :6], [1] * 6)
        expected = output + states[number][:, :6] if number else output
        torch.testing.assert_close(states[number + 1][:, :6], expected, **TOLERANCE)


def test_a_task_reads_the_sum_of_all_three_layers() -> None:
    """gamma times the sum of softmax(w)_j h_j, with the words among the states (equation 1)."""
    model = model_of()
    config = FeatureLstmConfig(
        base=model.encoder.config, layers="weighted-sum-with-embeddings", lstm_width=3, lstm_layers=1, dropout=0.0
    )
    features = FeatureLstm(config, model.encoder).eval()
    with torch.no_grad():
        features.mix.weight.copy_(torch.tensor([0.3, -1.0, 0.5]))
        features.mix.scale.fill_(1.7)
    batch = PackedBatch.from_ids(ids_of(4, 6))
    recorder = Recorder(["blocks.0.hook_resid_pre", "blocks.1.hook_resid_pre", "features.hook_read"])
    features(batch, recorder)
    states = [recorder.kept["blocks.0.hook_resid_pre"], recorder.kept["blocks.1.hook_resid_pre"], model(batch)]
    shares = torch.softmax(torch.tensor([0.3, -1.0, 0.5]), 0)
    expected = 1.7 * sum(share * state for share, state in zip(shares, states, strict=True))
    torch.testing.assert_close(recorder.kept["features.hook_read"], expected, **TOLERANCE)


def test_a_model_for_a_task_has_all_of_it_in_its_directory(tmp_path: Path) -> None:
    """The method of fine-tuning puts the frozen model below an LSTM; a directory gives the same states."""
    method = FeatureBased(layers="weighted-sum-with-embeddings", lstm_width=3, lstm_layers=1)
    encoder = model_of().encoder
    task_model = HeadedModel(encoder, ["token_classification"])
    task_model.initialise(1, only={"token_classification.output.weight"})
    model = method.prepare(task_model, seed=0)
    assert {name for name, _ in model.encoder.named_parameters() if "mix" in name} == {"mix.weight", "mix.scale"}
    save_model(model, tokenizer(), tmp_path)
    loaded, report = load_model(tmp_path)
    assert not report.missing
    batch = PackedBatch.from_ids(ids_of(4, 6))
    assert torch.equal(loaded(batch), model(batch))


def test_a_sentence_is_scored_from_left_to_right() -> None:
    """Predictions from the preceding words, in the forward direction only."""
    model, known = model_of(), tokenizer()
    (score,) = score_texts(model, known, ["axyz b c"])
    ids = [known.cls_id, *(known.id(word) for word in ("axyz", "b", "c"))]
    assert all(number is not None for number in ids)
    batch = PackedBatch.from_ids([[int(number or 0) for number in ids]])
    log_probabilities = model.token_logits("causal_lm", model(batch)).detach().log_softmax(-1)
    expected = [float(log_probabilities[place, ids[place + 1] or 0]) for place in range(3)]
    assert score.total == pytest.approx(sum(expected), rel=1e-4)


def test_initial_weights_are_those_of_the_released_code() -> None:
    encoder = encoder_of(model_of(character_size=16, lstm_width=40))
    assert encoder.words.characters.weight.abs().max() > 0.9
    layer = encoder.backward_layers[1]
    assert isinstance(layer, ProjectedLstm)
    gates = layer.input.bias.view(4, -1)
    assert gates[1].eq(1).all()
    assert not gates[[0, 2, 3]].any()
    assert all(highway.gate.bias.eq(-2).all() for highway in encoder.words.highways)


def test_a_directory_has_the_spelling(tmp_path: Path) -> None:
    model = model_of()
    save_model(model, tokenizer(), tmp_path)
    loaded, report = load_model(tmp_path)
    assert not report.missing
    batch = PackedBatch.from_ids(ids_of(4, 6))
    assert torch.equal(loaded(batch), model(batch))
    assert loaded.encoder.config == model.encoder.config
    hidden = model(batch)
    assert torch.equal(loaded.token_logits("causal_lm", hidden), model.token_logits("causal_lm", hidden))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"filters": ()}, "at least 1"),
        ({"filters": ((10, 4),)}, r"\(10, 4\)"),
        ({"filters": ((2, 0),)}, r"\(2, 0\)"),
        ({"cell_clip": 0.0}, "greater than 0"),
        ({"max_characters": 3}, "greater than or equal to 4"),
    ],
)
def test_invalid_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        ElmoConfig.model_validate({**SIZES, **settings})


def test_drawn_words_are_different_and_log_uniform() -> None:
    torch.manual_seed(0)
    counts = torch.zeros(50)
    tries_of = []
    for _ in range(600):
        word, tries = draw_words(8, 50)
        assert word.unique().numel() == 8
        counts[word] += 1
        tries_of.append(tries)
    assert min(tries_of) >= 8
    expected = torch.stack([expected_counts(torch.arange(50), 50, tries) for tries in tries_of]).sum(0)
    assert ((counts - expected).abs() < 6 * expected.sqrt()).all()
    assert counts[0] > counts[5] > counts[40]


def plain_loss(projection: VocabularyProjection, id_M: Tensor, word_N: Tensor, tries: int) -> float:
    total, size = 0.0, projection.weight_VE.shape[0]
    logits = projection.logits().double()
    for row, word in enumerate(id_M.tolist()):
        scores = [logits[row, word] - expected_counts(torch.tensor(word), size, tries).log()]
        scores += [
            logits[row, other] - expected_counts(torch.tensor(other), size, tries).log()
            for other in word_N.tolist()
            if other != word
        ]
        total += float(torch.logsumexp(torch.stack(scores), 0) - scores[0])
    return total


def test_the_sampled_loss_is_that_of_the_formula() -> None:
    torch.manual_seed(0)
    projection = VocabularyProjection(torch.randn(20, 6), torch.randn(50, 6), torch.randn(50))
    id_M = torch.randint(50, (20,))
    state = torch.get_rng_state()
    loss, _ = sampled_cross_entropy(projection, id_M, 12)
    torch.set_rng_state(state)
    word_N, tries = draw_words(12, 50)
    assert float(loss) == pytest.approx(plain_loss(projection, id_M, word_N, tries), rel=1e-5)
