"""Dependency trees as graphs: distances between words, edges, and minimum spanning trees of predicted distances.

Hewitt and Manning 2019, "A structural probe for finding syntax in word representations", NAACL, sections 2 and 3.
Sibling measure.py trains a linear space with these distances.

Shapes: W words of a sentence, E pairs of words.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from scipy.sparse import coo_array
from scipy.sparse.csgraph import minimum_spanning_tree, shortest_path
from scipy.stats import rankdata

from bertkit.arrays import BoolArray, Float64Array

Edge = tuple[int, int]
"""Two words, in order of position."""


def tree_distances(heads: Sequence[int]) -> Float64Array:
    """The number of edges between every two words, (W, W); the root's row holds the depths of all words.

    Args:
        heads: the tree's heads; -1 for the root.
    """
    graph_WW = np.zeros((len(heads), len(heads)))
    for place, head in enumerate(heads):
        if head >= 0:
            graph_WW[place, head] = 1
    distances_WW: Float64Array = shortest_path(graph_WW, directed=False, unweighted=True)
    return distances_WW


def tree_edges(heads: Sequence[int], kept_W: BoolArray) -> list[Edge]:
    """The tree's edges between kept words."""
    pairs = ((min(place, head), max(place, head)) for place, head in enumerate(heads) if head >= 0)
    return sorted(pair for pair in pairs if kept_W[pair[0]] and kept_W[pair[1]])


def spanning_tree(distances_WW: Float64Array, kept_W: BoolArray) -> list[Edge]:
    """The minimum spanning tree of the kept words; of equal distances, the earlier pair takes precedence.

    Args:
        distances_WW: symmetric; any real numbers, including zero.
        kept_W: the words to span.
    """
    places = np.flatnonzero(kept_W)
    first_E, second_E = np.triu_indices(places.size, 1)
    # Only the order matters, and ranks are never 0, which scipy would treat as a missing edge.
    rank_E = rankdata(distances_WW[places[first_E], places[second_E]], method="ordinal")
    graph = coo_array((rank_E, (places[first_E], places[second_E])), shape=distances_WW.shape)
    tree = minimum_spanning_tree(graph).tocoo()
    return sorted(zip(tree.row.tolist(), tree.col.tolist(), strict=True))


def chain(kept_W: BoolArray) -> list[Edge]:
    """Every kept word linked to the next one: the baseline for any tree."""
    return list(pairwise(np.flatnonzero(kept_W).tolist()))
