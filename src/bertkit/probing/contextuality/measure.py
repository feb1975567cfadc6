"""How much of a word's vector depends on its context.

Ethayarajh 2019, arXiv:1909.00512, section 3: self-similarity, intra-sentence similarity, maximum explainable variance,
and the anisotropy baselines that are subtracted from them; section 4.3: static vectors from principal components. All
three follow the paper's text. The published code differs in two ways. It centres a word's vectors before taking the
first component; here that is a separate measure, because the two differ widely: the mean is most of what the uncentred
component explains. It also estimates cosines from at most 1,000 pairs; here the means over all pairs are exact, because
the sum of all cosines is the squared length of the sum of unit vectors.

The explainable variance of n vectors depends on n (the first component of n isotropic vectors explains at least 1/n),
so each word is compared with as many random occurrences as it has occurrences itself.

Shapes: W words, n occurrences of a word, N occurrences of all words, R random occurrences, D width, B sentences.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from bertkit.arrays import Float64Array
from bertkit.data.random import Draw
from bertkit.models.headed import HeadedModel
from bertkit.models.hook_points import layer_points
from bertkit.probing.sentences import EncodedSentence
from bertkit.probing.states import layer_states
from bertkit.progress import Progress, silent_progress
from bertkit.training.engine import Engine

Place = tuple[int, int]
"""The index of a sentence, and of a word in the sentence."""

RANDOM_SETS = 10
"""Number of random sets over which the baseline of the explainable variance is averaged."""
_EQUAL = 1e-10
"""Share of the sum of squares below which differences from the mean are rounding errors of float32."""


@dataclass(frozen=True)
class Occurrences:
    """The occurrences to measure.

    Attributes:
        words: in alphabetical order.
        places: for each word, where it occurs, each in a different sentence.
        contexts: for each word, the number of sentences it occurs in, including those not drawn.
        random: one random word from each of several random sentences.
        rare: number of words that occur in too few sentences.
        passed_over: number of words left out because the limit on vectors was reached.
    """

    words: tuple[str, ...]
    places: tuple[tuple[Place, ...], ...]
    contexts: tuple[int, ...]
    random: tuple[Place, ...]
    rare: int = 0
    passed_over: int = 0

    @property
    def sizes(self) -> list[int]:
        """The number of measured occurrences of each word."""
        return [len(places) for places in self.places]


def index_words(sentences: Sequence[EncodedSentence], *, lowercase: bool) -> dict[str, list[Place]]:
    """Where each word occurs: its first occurrence in every sentence that has it.

    The sentences must be distinct, since a repeated one would count as another context.
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
    """The words that occur often enough, a sample of their occurrences, and random ones to compare with.

    Args:
        places: where words occur, as returned by `index_words`, for all words or some.
        min_contexts: minimum number of sentences that a word must occur in.
        max_contexts: maximum number of occurrences per word; if there are more, this many are drawn.
        max_vectors: maximum number of occurrences in total; words are drawn until it is reached.
        random_sentences: number of sentences from which one random word each is drawn; at least `max_contexts`, so that
            each word can be compared with as many random occurrences.
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
    some = np.sort(numbers[: max(random_sentences, max_contexts)])
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
    """The vectors of the measured occurrences in one layer, word by word, and those of random occurrences.

    `intra` is the mean intra-sentence similarity of all sentences.
    """

    words_ND: Tensor
    random_RD: Tensor
    intra: float


def collect(
    model: HeadedModel,
    sentences: Sequence[EncodedSentence],
    occurrences: Occurrences,
    engine: Engine,
    *,
    progress: Progress = silent_progress,
) -> list[LayerVectors]:
    """The vectors of each layer, in one pass over the sentences; only those of the occurrences are kept in memory."""
    first_S = np.cumsum([0, *(len(sentence.words) for sentence in sentences)])
    places = [*(place for own in occurrences.places for place in own), *occurrences.random]
    row_N = np.array([first_S[sentence] + word for sentence, word in places])
    points = layer_points(model)
    vectors: list[Tensor] = []
    intra_L = np.zeros(len(points))
    first = done = 0
    with progress("hidden states", len(sentences), "sentences") as meter:
        for batch in layer_states(model, sentences, engine, points=points):
            vectors = vectors or [torch.empty(len(places), states.shape[1]) for states in batch.states]
            here_N = np.flatnonzero((first <= row_N) & (row_N < first + batch.word_W.size))
            for layer, states_WD in enumerate(batch.states):
                vectors[layer][here_N] = states_WD[row_N[here_N] - first]
                intra_L[layer] += intra_sentence_similarity(states_WD, torch.from_numpy(batch.sentence_W)).sum().item()
            first += batch.word_W.size
            done += len(batch.sentences)
            meter.update(done)
    words = sum(occurrences.sizes)
    return [
        LayerVectors(each[:words], each[words:], intra / len(sentences))
        for each, intra in zip(vectors, intra_L.tolist(), strict=True)
    ]


@dataclass(frozen=True)
class LayerFigures:
    """The measures of one layer, before any baseline is subtracted.

    Attributes:
        self_similarity_W: self-similarity of each word.
        explainable_W: maximum explainable variance of each word, as a share.
        random_explainable_W: the same for as many random occurrences.
        centred_W, random_centred_W: both for centred vectors, as in the published code; NaN if all are equal.
        intra_sentence: mean intra-sentence similarity.
        anisotropy: mean cosine of random occurrences, the baseline of both similarities.
    """

    self_similarity_W: Float64Array
    explainable_W: Float64Array
    random_explainable_W: Float64Array
    centred_W: Float64Array
    random_centred_W: Float64Array
    intra_sentence: float
    anisotropy: float


def layer_figures(layer: LayerVectors, occurrences: Occurrences, draw: Draw) -> LayerFigures:
    """All measures of one layer."""
    parts = torch.split(layer.words_ND, occurrences.sizes)
    different = sorted(set(occurrences.sizes))
    baseline = random_explainable(layer.random_RD, different, draw)
    centred_baseline = random_explainable(layer.random_RD, different, draw, _centred_share)
    return LayerFigures(
        np.array([mean_cosine(part) for part in parts]),
        np.array([explainable_variance(part) for part in parts]),
        np.array([baseline[size] for size in occurrences.sizes]),
        np.array([_centred_share(_gram(part)) for part in parts]),
        np.array([centred_baseline[size] for size in occurrences.sizes]),
        layer.intra,
        mean_cosine(layer.random_RD),
    )


def mean_cosine(vectors_ND: Tensor) -> float:
    """Mean cosine over all ordered pairs of different vectors; NaN for fewer than two.

    For the occurrences of a word this is self-similarity, for random occurrences anisotropy. The sum of all cosines is
    ||sum of unit vectors||^2, which includes the n on the diagonal; these are not pairs.
    """
    count = vectors_ND.shape[0]
    if count < 2:
        return float("nan")
    unit_ND = _unit(vectors_ND.double())
    total = unit_ND.sum(0).square().sum() - unit_ND.square().sum()
    return total.item() / (count * (count - 1))


def explainable_variance(vectors_ND: Tensor) -> float:
    """Share of the variance that the first principal component explains: s_1^2 / sum of s_i^2, uncentred.

    The s_i are the singular values of the matrix of occurrences. 1 if all vectors are multiples of one.
    """
    return _share(_gram(vectors_ND if vectors_ND.shape[0] <= vectors_ND.shape[1] else vectors_ND.T))


def _share(gram_NN: Tensor) -> float:
    """The largest eigenvalue's share: eigenvalues of X X^T and X^T X are the squared singular values of X."""
    total = gram_NN.diagonal().sum()
    if total == 0:
        return float("nan")
    return float(torch.linalg.eigvalsh(gram_NN)[-1] / total)


def _centred_share(gram_NN: Tensor) -> float:
    """The same for the vectors minus their mean, computed from the products of the uncentred vectors.

    NaN if they do not differ, as in layer 0 of a family without positions in its embeddings.
    """
    rows_N1 = gram_NN.mean(1, keepdim=True)
    centred_NN = gram_NN - rows_N1 - rows_N1.T + gram_NN.mean()
    if centred_NN.diagonal().sum() <= _EQUAL * gram_NN.diagonal().sum():
        return float("nan")
    return _share(centred_NN)


def random_explainable(
    vectors_RD: Tensor, sizes: Sequence[int], draw: Draw, share: Callable[[Tensor], float] = _share
) -> dict[int, float]:
    """Mean explainable variance of random sets of vectors, by the size of the sets; a set has at most R vectors.

    `share` computes the explained share of the variance from the products of all pairs.
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
    """Mean cosine of a sentence's words with their mean, (B,); sentences are numbered from 0 without gaps."""
    states_WD = states_WD.double()
    counts_B = torch.bincount(sentence_W)
    sums_BD = states_WD.new_zeros(counts_B.numel(), states_WD.shape[1]).index_add_(0, sentence_W, states_WD)
    cosine_W = (_unit(states_WD) * _unit(sums_BD)[sentence_W]).sum(1)
    return cosine_W.new_zeros(counts_B.numel()).index_add_(0, sentence_W, cosine_W) / counts_B


def first_component(vectors_ND: Tensor) -> Float64Array:
    """A static vector of a word (section 4.3 of the paper): the first right singular vector of its uncentred vectors.

    It has unit length, and of the two directions it is the one that the word's mean points in.
    """
    vectors_ND = vectors_ND.double()
    _, _, right = torch.linalg.svd(vectors_ND, full_matrices=False)
    component_D = right[0]
    if (vectors_ND.mean(0) @ component_D).item() < 0:
        component_D = -component_D
    found: Float64Array = component_D.numpy()
    return found


def _gram(vectors_ND: Tensor) -> Tensor:
    vectors_ND = vectors_ND.double()
    return vectors_ND @ vectors_ND.T


def _unit(vectors: Tensor) -> Tensor:
    return torch.nn.functional.normalize(vectors, dim=-1)
