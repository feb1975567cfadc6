"""Structural probes: an exact embedding is found and scored perfectly, and every measure equals an independent one."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.sparse.csgraph import floyd_warshall
from scipy.stats import spearmanr

from bertkit.data.random import Draw
from bertkit.errors import DataError
from bertkit.probing.structure import ProbeTraining
from bertkit.probing.structure.measure import (
    DepthScores,
    DistanceScores,
    GoldTree,
    Treebank,
    chain_scores,
    depth_scores,
    distance_scores,
    held_out_loss,
    spearman_rows,
    train,
)
from bertkit.probing.structure.report import LayerScores, StructureScores
from bertkit.probing.structure.trees import chain, spanning_tree, tree_distances, tree_edges
from bertkit.tasks.readers.trees import TreeExample, find_cycle, read_trees


def random_heads(words: int, seed: int) -> list[int]:
    """A tree with its words in random order."""
    generator = np.random.default_rng(seed)
    place = generator.permutation(words).tolist()
    heads = [0] * words
    for number in range(words):
        heads[place[number]] = -1 if number == 0 else place[int(generator.integers(number))]
    return heads


def embedded(heads: list[int]) -> np.ndarray:
    """Vectors whose squared distances are the tree's distances, and whose squared lengths are the depths, (W, W).

    A word is the sum of its own unit vector and its head's vector; the root is the origin, without its own unit vector.
    """
    vectors = np.zeros((len(heads), len(heads)))
    for place in np.argsort(tree_distances(heads)[heads.index(-1)], kind="stable").tolist():
        if heads[place] >= 0:
            vectors[place] = vectors[heads[place]]
            vectors[place, place] = 1.0
    return vectors


def prims_tree(distances: np.ndarray) -> list[tuple[int, int]]:
    """Grow one tree from word 0 by the nearest word outside of it (Prim 1957)."""
    inside, edges = {0}, []
    while len(inside) < len(distances):
        _, a, b = min((distances[a, b], a, b) for a in inside for b in set(range(len(distances))) - inside)
        inside.add(b)
        edges.append((min(a, b), max(a, b)))
    return sorted(edges)


def gold(words: int, seed: int, punctuation: tuple[int, ...] = ()) -> GoldTree:
    return GoldTree.of(random_heads(words, seed), np.array([place not in punctuation for place in range(words)]))


@given(st.integers(1, 14), st.integers(0, 99))
def test_tree_distances_are_the_shortest_paths(words: int, seed: int) -> None:
    heads = random_heads(words, seed)
    graph = np.full((words, words), np.inf)
    for place, head in enumerate(heads):
        if head >= 0:
            graph[place, head] = graph[head, place] = 1
    np.fill_diagonal(graph, 0)
    paths = floyd_warshall(graph)
    assert np.array_equal(tree_distances(heads), paths)
    tree = GoldTree.of(heads, np.ones(words, bool))
    assert np.array_equal(tree.distances_WW.numpy(), paths)
    assert np.array_equal(tree.depths_W.numpy(), paths[heads.index(-1)])


@given(st.integers(1, 12), st.integers(0, 99))
def test_an_embedding_has_the_trees_distances_and_depths(words: int, seed: int) -> None:
    heads = random_heads(words, seed)
    vectors = embedded(heads)
    apart = ((vectors[:, None] - vectors[None]) ** 2).sum(2)
    assert np.array_equal(apart, tree_distances(heads))
    assert np.array_equal((vectors**2).sum(1), tree_distances(heads)[heads.index(-1)])


@given(st.integers(1, 11), st.integers(0, 99))
def test_the_spanning_tree_is_prims(words: int, seed: int) -> None:
    apart = np.random.default_rng(seed).uniform(0.1, 1, (words, words))
    apart = apart + apart.T
    assert spanning_tree(apart, np.ones(words, bool)) == prims_tree(apart)


def test_distances_of_zero_still_make_a_tree() -> None:
    assert spanning_tree(np.zeros((3, 3)), np.ones(3, bool)) == [(0, 1), (0, 2)]
    assert spanning_tree(np.zeros((3, 3)), np.array([False, True, False])) == []


@given(st.integers(2, 12), st.integers(0, 99))
def test_the_trees_own_distances_give_back_its_edges(words: int, seed: int) -> None:
    heads = random_heads(words, seed)
    kept = np.ones(words, bool)
    assert spanning_tree(tree_distances(heads), kept) == tree_edges(heads, kept)


@given(st.integers(2, 30), st.integers(0, 99))
def test_spearman_is_scipys_ties_included(words: int, seed: int) -> None:
    generator = np.random.default_rng(seed)
    first, second = (
        generator.integers(0, 6, (3, words)).astype(float),
        generator.integers(0, 4, (3, words)).astype(float),
    )
    first[:, 0], second[:, 0] = -1, -2
    first[:, -1], second[:, -1] = 9, 8
    expected = [spearmanr(a, b).statistic for a, b in zip(first, second, strict=True)]
    assert spearman_rows(first, second) == pytest.approx(expected, abs=1e-12)


def test_a_constant_row_has_no_correlation() -> None:
    assert spearman_rows(np.ones((1, 5)), np.arange(5.0)[None]).tolist() == [0.0]


def test_gold_distances_and_depths_score_one() -> None:
    trees = [gold(words, words) for words in range(2, 23)]
    distances = distance_scores(trees, [tree.distances_WW.numpy().astype(float) for tree in trees])
    depths = depth_scores(trees, [tree.depths_W.numpy().astype(float) for tree in trees])
    assert (distances.uuas, distances.spearman) == (1.0, pytest.approx(1.0))
    assert (depths.root_accuracy, depths.spearman) == (1.0, pytest.approx(1.0))


def test_spearman_averages_words_then_lengths() -> None:
    trees = [gold(5, 1), gold(5, 2), gold(7, 3), gold(4, 4)]
    generator = np.random.default_rng(0)
    predicted = [generator.uniform(size=tuple(tree.distances_WW.shape)) for tree in trees]
    of_length: dict[int, list[float]] = {}
    for tree, each in zip(trees, predicted, strict=True):
        rows = zip(each, tree.distances_WW.numpy(), strict=True)
        of_length.setdefault(len(each), []).extend(float(spearmanr(a, b).statistic) for a, b in rows)
    expected = np.mean([np.mean(of_length[5]), np.mean(of_length[7])])
    assert distance_scores(trees, predicted).spearman == pytest.approx(expected)


def test_correlations_are_those_of_sentences_of_5_to_50_words() -> None:
    """Gold distances are predicted of lengths that count, and negated ones, which would lower the mean, of others."""
    trees = [gold(words, words) for words in (4, 5, 50, 51)]
    predicted = [sign * tree.distances_WW.double().numpy() for sign, tree in zip((-1, 1, 1, -1), trees, strict=True)]
    assert distance_scores(trees, predicted).spearman == pytest.approx(1.0)
    assert distance_scores(trees[1:2], predicted[1:2]).spearman == pytest.approx(1.0)
    assert distance_scores(trees[2:3], predicted[2:3]).spearman == pytest.approx(1.0)


def test_punctuation_counts_for_no_edge_and_no_root() -> None:
    """`a b ,` with b over both: the comma's edge does not count, and a comma of depth 0 is not a root."""
    tree = GoldTree.of([1, -1, 1], np.array([True, True, False]))
    near_the_comma = np.array([[0.0, 9, 1], [9, 0, 1], [1, 1, 0]])
    assert distance_scores([tree], [near_the_comma]).uuas == 1.0
    assert distance_scores([tree], [near_the_comma]).edges == 1
    assert depth_scores([tree], [np.array([2.0, 1.0, 0.0])]).root_accuracy == 1.0


def test_edges_are_counted_over_all_sentences() -> None:
    short, long = gold(2, 0), GoldTree.of([3, 3, 3, -1, 3], np.ones(5, bool))
    scores = chain_scores([short, long])
    assert (scores.uuas, scores.edges) == (pytest.approx((1 + 2) / (1 + 4)), 5)
    assert chain(np.array([True, False, True, True])) == [(0, 2), (2, 3)]


def test_the_figure_shows_negative_correlations() -> None:
    good = LayerScores(DistanceScores(0.5, 0.6, 4), DepthScores(0.3, 0.4), 1.0)
    bad = LayerScores(DistanceScores(0.1, 0.2, 4), DepthScores(0.1, -0.3), 1.0)
    example = TreeExample("a", 1, ("a", "b"), ("X", "X"), (1, -1), ("dep", "root"))
    scores = StructureScores("tiny", 2, 9, [(example, gold(2, 0))], [good, bad], [good, good], {2: good.distance}, [[]])
    finding = scores.findings()[0]
    assert finding.draw is not None
    distance, depth = finding.draw(finding.table).axes
    assert distance.get_ylim() == (0, 1)
    assert depth.get_ylim()[0] < -0.3
    assert "DSpr is at most 0.600." in finding.sentence


def test_short_sentences_have_no_correlation_and_the_summary_says_why() -> None:
    score = LayerScores(DistanceScores(0.5, math.nan, 4), DepthScores(0.3, math.nan), 1.0)
    example = TreeExample("a", 1, ("a", "b"), ("X", "X"), (1, -1), ("dep", "root"))
    scores = StructureScores("tiny", 2, 9, [(example, gold(2, 0))], [score], [score], {2: score.distance}, [[]])
    assert "DSpr is not defined (no test sentence has 5 to 50 words)." in scores.findings()[0].sentence


def embedded_bank(sentences: int, seed: int, width: int = 6) -> Treebank:
    """Trees embedded exactly, then rotated by one rotation of the space: no single dimension is meaningful."""
    turn = np.linalg.qr(np.random.default_rng(5).normal(size=(width, width)))[0]
    states, trees = [], []
    for number in range(sentences):
        words = 4 + number % (width - 3)
        heads = random_heads(words, 1000 * seed + number)
        vectors = np.zeros((words, width))
        vectors[:, :words] = embedded(heads)
        states.append(torch.from_numpy(vectors @ turn).float())
        trees.append(GoldTree.of(heads, np.ones(words, bool)))
    return Treebank(states, trees)


@pytest.mark.parametrize("form", ["distance", "depth"])
def test_a_probe_finds_embedded_trees(form: str) -> None:
    training, held_out = embedded_bank(200, 1), embedded_bank(31, 2)
    settings = ProbeTraining(max_epochs=60, learning_rate=3e-2, batch_sentences=20, patience_epochs=15)
    probe = train(form, training, held_out, rank=6, draw=Draw(0), settings=settings)  # type: ignore[arg-type]
    predicted = probe.predict(held_out.states)
    assert probe.held_out_loss < 2e-3
    targets = [tree.distances_WW if form == "distance" else tree.depths_W for tree in held_out.trees]
    errors = [np.abs(each - target.numpy()).mean() for each, target in zip(predicted, targets, strict=True)]
    assert np.mean(errors) == pytest.approx(probe.held_out_loss, rel=1e-2)
    # Correlations stay below 1: words at equal distance in the tree are not at exactly equal distance in the space.
    if form == "distance":
        distances = distance_scores(held_out.trees, predicted)
        assert distances.uuas == 1.0
        assert distances.spearman > 0.95
    else:
        depths = depth_scores(held_out.trees, predicted)
        assert depths.root_accuracy == 1.0
        assert depths.spearman > 0.93


def test_the_loss_is_the_mean_over_pairs_whatever_the_batch() -> None:
    bank = embedded_bank(9, 3)
    projection = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))
    total = 0.0
    for states, tree in zip(bank.states, bank.trees, strict=True):
        words = states.shape[0]
        for a, b in itertools.product(range(words), repeat=2):
            apart = ((projection @ (states[a] - states[b])) / 2.0).square().sum()
            total += abs(apart.item() - tree.distances_WW[a, b].item()) / words**2
    for size in (1, 4, 9):
        assert held_out_loss("distance", bank, projection, 2.0, size) == pytest.approx(total / 9, rel=1e-5)


def test_epochs_without_gain_cut_the_learning_rate_and_end_training_with_the_best(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A gain starts the count anew; after two epochs in a row without one, a third of training is not begun."""
    after: list[torch.Tensor] = []

    def scripted(form: str, bank: Treebank, projection_RD: torch.Tensor, *_: object) -> float:
        after.append(projection_RD.detach().clone())
        return (3.0, 2.0, 2.5, 1.0, 1.0, 1.1, 0.0)[len(after) - 1]

    monkeypatch.setattr("bertkit.probing.structure.measure.held_out_loss", scripted)
    bank = embedded_bank(30, 1)
    settings = ProbeTraining(max_epochs=9, learning_rate=1e-3, batch_sentences=5, patience_epochs=2)
    probe = train("distance", bank, bank, rank=6, draw=Draw(0), settings=settings)
    assert (len(after), probe.held_out_loss) == (6, 1.0)
    assert torch.equal(probe.projection_RD, after[3])
    moves = [(new - old).abs().max().item() for old, new in itertools.pairwise(after)]
    assert moves[2] < moves[1] / 5, "the fourth epoch comes after one without gain"
    assert moves[4] < moves[3] / 5, "the sixth, too"
    assert moves[3] > moves[2] / 5, "the fifth does not"
    after.clear()
    train("distance", bank, bank, rank=6, draw=Draw(0), settings=settings.model_copy(update={"max_epochs": 2}))
    assert len(after) == 2


def test_equal_seeds_give_equal_probes_and_others_do_not() -> None:
    bank, settings = embedded_bank(20, 1), ProbeTraining(max_epochs=2)
    probes = [
        train("distance", bank, bank, rank=3, draw=Draw(seed), settings=settings).projection_RD for seed in (1, 1, 2)
    ]
    assert torch.equal(probes[0], probes[1])
    assert not torch.equal(probes[0], probes[2])


def conllu(heads: list[str], *, name: str = "weblog-7") -> str:
    rows = [f"{n}\tw{n}\t_\tX\t_\t_\t{head}\tdep\t_\t_" for n, head in enumerate(heads, 1)]
    return "\n".join([f"# sent_id = {name}", *rows]) + "\n\n"


@pytest.mark.parametrize(
    ("heads", "line", "said"),
    [
        (["0", "3", "4", "2"], 5, "cycle, 2 'w2' -> 3 'w3' -> 4 'w4' -> 2 'w2'"),
        (["0", "2"], 5, "cycle, 2 'w2' -> 2 'w2'"),
        (["0", "0", "1"], 4, "2 roots (1 'w1', 2 'w2')"),
        (["0", "9"], 5, "'9', expected 0 (the root) or a word from 1 to 2"),
        (["_", "1"], 4, "'_', expected 0"),
    ],
)
def test_invalid_trees_are_named_with_sentence_and_line(tmp_path: Path, heads: list[str], line: int, said: str) -> None:
    path = tmp_path / "bad.conllu"
    path.write_text("# newdoc\n" + conllu(heads).replace("# sent_id", "# text = x\n# sent_id"), encoding="utf-8")
    with pytest.raises(DataError) as caught:
        read_trees(path)
    assert f"line {line}: sentence weblog-7" in str(caught.value)
    assert said in str(caught.value)


def test_ranges_and_empty_nodes_are_no_words(tmp_path: Path) -> None:
    path = tmp_path / "t.conllu"
    extra = "1-2\tdel\t_\t_\t_\t_\t_\t_\t_\t_\n"
    empty = "1.1\tx\t_\t_\t_\t_\t_\t_\t_\t_\n"
    text = conllu(["2", "0", "2"]).splitlines(keepends=True)
    path.write_text(text[0] + extra + text[1] + empty + "".join(text[2:]), encoding="utf-8")
    (tree,) = read_trees(path)
    assert (tree.id, tree.line, tree.words, tree.heads) == ("weblog-7", 3, ("w1", "w2", "w3"), (1, -1, 1))


@given(st.lists(st.integers(-1, 7), min_size=1, max_size=8))
def test_a_cycle_is_found_wherever_there_is_one(heads: list[int]) -> None:
    heads = [min(head, len(heads) - 1) for head in heads]
    reach_root = []
    for place in range(len(heads)):
        for _ in heads:
            place = heads[place] if place >= 0 else -1
        reach_root.append(place == -1)
    cycle = find_cycle(heads)
    assert bool(cycle) == (not all(reach_root))
    assert all(heads[a] == b for a, b in itertools.pairwise([*cycle, *cycle[:1]]))


def test_every_tree_of_the_treebank_is_one(shared_data: Path) -> None:
    trees = read_trees(shared_data / "ud-english-ewt" / "en_ewt-ud-dev.conllu")
    assert len(trees) == 2001
    assert all(len(tree.words) == len(tree.heads) == len(tree.tags) for tree in trees)
