"""How much of a word's vector is its context's.

Ethayarajh 2019, arXiv:1909.00512, section 3: self-similarity, intra-sentence similarity, maximum explainable variance,
and the anisotropy baselines that are subtracted from them; section 4.3: static vectors from principal components. All
three follow the paper's text. The code that was published beside it differs: it centres a word's vectors before it
takes the first component (here a measure of its own, for the two lie far apart: the mean is most of what the uncentred
component explains), and estimates cosines from at most 1,000 pairs. Here the means over all pairs are exact, for the
sum of all cosines is the squared length of the sum of unit vectors.

The baseline of the explainable variance depends on how many vectors it is taken of (of n isotropic ones the first
component explains at least 1/n), so each word is compared with as many random occurrences as it has itself.

Shapes: W words, n occurrences of a word, R random occurrences, D width, L layers, the embeddings counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bertkit.data.random import Draw
from bertkit.models.headed import HeadedModel
from bertkit.models.recorder import layer_points
from bertkit.probing.sentences import EncodedSentence
from bertkit.probing.states import WordStates, layer_states
from bertkit.progress import Progress, silent_progress

Floats = NDArray[np.float64]
Int64s = NDArray[np.int64]
Place = tuple[int, int]
"""A sentence, by its place in the list, and a word in it."""

RANDOM_SETS = 10
"""Sets of random occurrences that a word's explainable variance is compared with."""
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Occurrences:
    """Which occurrences are looked at.

    Attributes:
        words: in alphabetical order.
        places: for each word where it occurs, each in another sentence.
        contexts: for each word in how many sentences it occurs, those included that are not looked at.
        random: one random word each of random sentences.
        rare: words that occur in too few sentences.
        passed_over: words that would have been too many to hold.
    """

    words: tuple[str, ...]
    places: tuple[tuple[Place, ...], ...]
    contexts: tuple[int, ...]
    random: tuple[Place, ...]
    rare: int = 0
    passed_over: int = 0


def index_words(sentences: Sequence[EncodedSentence], *, lowercase: bool) -> dict[str, list[Place]]:
    """Where each word occurs: its first occurrence in every sentence that has it.

    Args:
        sentences: each written once; a repeat would be a context that is none.
        lowercase: whether `The` and `the` are one word.
    """
    places: dict[str, list[Place]] = {}
    for number, sentence in enumerate(sentences):
        seen: set[str] = set()
        for place, written in enumerate(sentence.words):
            word = written.lower() if lowercase else written
            if word not in seen:
                seen.add(word)
                places.setdefault(word, []).append((number, place))
    return places


def choose_occurrences(
    sentences: Sequence[EncodedSentence],
    places: Mapping[str, Sequence[Place]],
    draw: Draw,
    *,
    min_contexts: int,
    max_contexts: int,
    max_vectors: int,
    random_sentences: int = 1000,
) -> Occurrences:
    """The words that occur often enough, a draw of their occurrences, and random ones to compare with.

    Args:
        sentences: all of them.
        places: where words occur, as `index_words` gives it, or those of some words.
        draw: of all choices.
        min_contexts: sentences that a word must occur in.
        max_contexts: of a word that occurs in more, so many are drawn.
        max_vectors: occurrences in all; words are drawn until they are as many, and the rest is passed over.
        random_sentences: how many sentences a random word is drawn from, each another one.
    """
    often = sorted(word for word, found in places.items() if len(found) >= min_contexts)
    kept: list[str] = []
    total = 0
    for number in np.argsort(draw.uniform("word", sample=np.arange(len(often))), kind="stable").tolist():
        size = min(max_contexts, len(places[often[number]]))
        if total + size <= max_vectors:
            kept.append(often[number])
            total += size
    kept.sort()
    chosen = []
    for number, word in enumerate(kept):
        found = places[word]
        key = draw.uniform("context", sample=number, position=np.arange(len(found)))
        members = np.sort(np.argsort(key, kind="stable")[:max_contexts]).tolist()
        chosen.append(tuple(found[member] for member in members))
    numbers = np.argsort(draw.uniform("random sentence", sample=np.arange(len(sentences))), kind="stable")
    some = np.sort(numbers[:random_sentences])
    lengths = np.array([len(sentences[number].words) for number in some.tolist()])
    words = draw.integers("random word", lengths, sample=some)
    return Occurrences(
        words=tuple(kept),
        places=tuple(chosen),
        contexts=tuple(len(places[word]) for word in kept),
        random=tuple(zip(some.tolist(), words.tolist(), strict=True)),
        rare=len(places) - len(often),
        passed_over=len(often) - len(kept),
    )


@dataclass(frozen=True)
class LayerVectors:
    """The vectors of the chosen occurrences in one layer.

    Attributes:
        words_ND: of all words' occurrences, word after word.
        random_RD: of the random ones.
        intra: mean over sentences of their intra-sentence similarity.
    """

    words_ND: Tensor
    random_RD: Tensor
    intra: float


def collect(
    model: HeadedModel,
    sentences: Sequence[EncodedSentence],
    occurrences: Occurrences,
    *,
    max_batch_tokens: int = 4096,
    device: torch.device = _CPU,
    progress: Progress = silent_progress,
) -> list[LayerVectors]:
    """One pass over the sentences; what is kept of each layer is the chosen occurrences' vectors.

    Args:
        model: of any family with layers.
        sentences: all of them.
        occurrences: what is kept.
        max_batch_tokens: tokens computed at once; decides speed and memory alone.
        device: where to compute.
        progress: the display, in sentences.
    """
    flat = [place for places in occurrences.places for place in places]
    words, random = _Wanted(flat), _Wanted(occurrences.random)
    points = layer_points(model)
    stores: list[tuple[Tensor, Tensor]] = []
    intra_L = np.zeros(len(points))
    first = 0
    with progress("hidden states", len(sentences), "sentences") as meter:
        for batch in layer_states(model, sentences, points=points, max_batch_tokens=max_batch_tokens, device=device):
            if not stores:
                widths = [states.shape[1] for states in batch.states]
                stores = [(torch.empty(words.size, width), torch.empty(random.size, width)) for width in widths]
            for layer, states_WD in enumerate(batch.states):
                for wanted, store in zip((words, random), stores[layer], strict=True):
                    slots, rows = wanted.within(batch, first)
                    store[slots] = states_WD[rows]
                intra_L[layer] += intra_sentence_similarity(states_WD, torch.from_numpy(batch.sentence_W)).sum().item()
            first += len(batch.sentences)
            meter.update(first)
    return [LayerVectors(*store, intra / len(sentences)) for store, intra in zip(stores, intra_L.tolist(), strict=True)]


class _Wanted:
    """Places, found again while sentences come by in their order."""

    def __init__(self, places: Sequence[Place]) -> None:
        self.size = len(places)
        self._by_sentence: dict[int, list[tuple[int, int]]] = {}
        for slot, (sentence, word) in enumerate(places):
            self._by_sentence.setdefault(sentence, []).append((slot, word))

    def within(self, batch: WordStates, first: int) -> tuple[list[int], list[int]]:
        """Which places lie in a batch whose sentences are counted from `first`, and the rows of their states."""
        slots, rows, start = [], [], 0
        for number, sentence in enumerate(batch.sentences, first):
            for slot, word in self._by_sentence.get(number, ()):
                slots.append(slot)
                rows.append(start + word)
            start += len(sentence.words)
        return slots, rows


@dataclass(frozen=True)
class LayerFigures:
    """What one layer comes to; nothing is adjusted.

    Attributes:
        self_similarity_W: of each word.
        explainable_W: maximum explainable variance of each word, as a share.
        random_explainable_W: the same of as many random occurrences.
        centred_W, random_centred_W: both of centred vectors, as the published code has it.
        intra_sentence: mean over sentences.
        anisotropy: mean cosine of random occurrences, the baseline of both similarities.
    """

    self_similarity_W: Floats
    explainable_W: Floats
    random_explainable_W: Floats
    centred_W: Floats
    random_centred_W: Floats
    intra_sentence: float
    anisotropy: float

    @property
    def adjusted_self_similarity_W(self) -> Floats:
        return self.self_similarity_W - self.anisotropy

    @property
    def adjusted_intra_sentence(self) -> float:
        return self.intra_sentence - self.anisotropy

    @property
    def adjusted_explainable_W(self) -> Floats:
        return self.explainable_W - self.random_explainable_W

    @property
    def adjusted_centred_W(self) -> Floats:
        return self.centred_W - self.random_centred_W


def layer_figures(layer: LayerVectors, occurrences: Occurrences, draw: Draw) -> LayerFigures:
    """All measures of one layer."""
    sizes = [len(places) for places in occurrences.places]
    parts = torch.split(layer.words_ND, sizes)
    different = sorted(set(sizes))
    baseline = random_explainable(layer.random_RD, different, draw)
    centred_baseline = random_explainable(layer.random_RD, different, draw, _centred_share)
    return LayerFigures(
        np.array([mean_cosine(part) for part in parts]),
        np.array([explainable_variance(part) for part in parts]),
        np.array([baseline[size] for size in sizes]),
        np.array([_centred_share(_gram(part)) for part in parts]),
        np.array([centred_baseline[size] for size in sizes]),
        layer.intra,
        mean_cosine(layer.random_RD),
    )


def mean_cosine(vectors_ND: Tensor) -> float:
    """Mean cosine over all ordered pairs of different vectors; NaN of fewer than two.

    Self-similarity of the occurrences of a word; anisotropy of random occurrences. The sum of all cosines is
    ||sum of unit vectors||^2, of which the n on the diagonal are no pairs.
    """
    count = vectors_ND.shape[0]
    if count < 2:
        return float("nan")
    unit_ND = _unit(vectors_ND.double())
    total = unit_ND.sum(0).square().sum() - unit_ND.square().sum()
    return total.item() / (count * (count - 1))


def explainable_variance(vectors_ND: Tensor) -> float:
    """Share of the variance that the first principal component explains: s_1^2 / sum of s_i^2, uncentred.

    The s_i are the singular values of the matrix of occurrences. 1 where all vectors are multiples of one.
    """
    return _share(_gram(vectors_ND if vectors_ND.shape[0] <= vectors_ND.shape[1] else vectors_ND.T))


def _share(gram_NN: Tensor) -> float:
    """The greatest eigenvalue's share of all: those of X X^T and of X^T X are the squared singular values of X."""
    total = gram_NN.diagonal().sum()
    if total == 0:
        return float("nan")
    return float(torch.linalg.eigvalsh(gram_NN)[-1] / total)


def _centred_share(gram_NN: Tensor) -> float:
    """The same of the vectors less their mean, from the products of the vectors as they are."""
    rows_N1 = gram_NN.mean(1, keepdim=True)
    return _share(gram_NN - rows_N1 - rows_N1.T + gram_NN.mean())


def random_explainable(
    vectors_RD: Tensor, sizes: Sequence[int], draw: Draw, share: Callable[[Tensor], float] = _share
) -> dict[int, float]:
    """Mean explainable variance of random sets of so many vectors, by their size; of all where there are not as many.

    Args:
        vectors_RD: the random occurrences.
        sizes: of the sets.
        draw: of the sets.
        share: of the variance, from the products of all pairs.
    """
    gram_RR, count = _gram(vectors_RD), vectors_RD.shape[0]
    found = {}
    for size in sizes:
        values = []
        for number in range(RANDOM_SETS):
            key = draw.uniform("random set", epoch=number, sample=size, position=np.arange(count))
            members = torch.from_numpy(np.argsort(key, kind="stable")[:size])
            values.append(share(gram_RR[members][:, members]))
        found[size] = float(np.mean(values))
    return found


def intra_sentence_similarity(states_WD: Tensor, sentence_W: Tensor) -> Tensor:
    """Mean cosine of a sentence's words with their mean, for each sentence of a batch.

    Args:
        states_WD: states of all words, sentence after sentence.
        sentence_W: the sentence of each, from 0 without gaps.
    """
    states_WD = states_WD.double()
    counts_B = torch.bincount(sentence_W)
    sums_BD = states_WD.new_zeros(counts_B.numel(), states_WD.shape[1]).index_add_(0, sentence_W, states_WD)
    cosine_W = (_unit(states_WD) * _unit(sums_BD)[sentence_W]).sum(1)
    return cosine_W.new_zeros(counts_B.numel()).index_add_(0, sentence_W, cosine_W) / counts_B


def static_vectors(layer: LayerVectors, occurrences: Occurrences) -> Iterator[tuple[str, Floats]]:
    """Each word with one vector for all its contexts: the first principal component, uncentred, of unit length.

    Section 4.3 of the paper. Of the two directions of a component it is the one that the word's mean points to.
    """
    sizes = [len(places) for places in occurrences.places]
    for word, part_ND in zip(occurrences.words, torch.split(layer.words_ND, sizes), strict=True):
        yield word, first_component(part_ND)


def first_component(vectors_ND: Tensor) -> Floats:
    """The first right singular vector, turned to the mean's side."""
    vectors_ND = vectors_ND.double()
    _, _, right = torch.linalg.svd(vectors_ND, full_matrices=False)
    component_D = right[0]
    if (vectors_ND.mean(0) @ component_D).item() < 0:
        component_D = -component_D
    found: Floats = component_D.numpy()
    return found


def _gram(vectors_ND: Tensor) -> Tensor:
    vectors_ND = vectors_ND.double()
    return vectors_ND @ vectors_ND.T


def _unit(vectors: Tensor) -> Tensor:
    return torch.nn.functional.normalize(vectors, dim=-1)
