"""Trees as geometry sees them: distances between words, depths, edges, and trees made of distances.

Hewitt and Manning 2019, "A structural probe for finding syntax in word representations", NAACL, sections 2 and 3: the
distance of two words is the number of edges between them, a word's depth the number of edges to the root. The minimum
spanning tree is Prim's. Sibling structure.py learns a space with these distances.

Shapes: W words of a sentence.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Int64s = NDArray[np.int64]
Bools = NDArray[np.bool_]
Edge = tuple[int, int]
"""Two words, the earlier one first."""


def tree_depths(heads: Sequence[int]) -> Int64s:
    """Edges from each word to the root, (W,).

    Args:
        heads: of a tree; -1 at the root.
    """
    depths = np.full(len(heads), -1, dtype=np.int64)
    for start in range(len(heads)):
        path = []
        place = start
        while place >= 0 and depths[place] < 0:
            path.append(place)
            place = heads[place]
        above = -1 if place < 0 else int(depths[place])
        for steps, below in enumerate(reversed(path), 1):
            depths[below] = above + steps
    return depths


def tree_distances(heads: Sequence[int]) -> Int64s:
    """Edges between every two words, (W, W).

    Args:
        heads: of a tree; -1 at the root.
    """
    order = np.argsort(tree_depths(heads), kind="stable").tolist()
    distances_WW = np.zeros((len(heads), len(heads)), dtype=np.int64)
    for number, place in enumerate(order):
        # A word is one edge further from all that stand above or beside it than its head is.
        above = order[:number]
        if above:
            distances_WW[place, above] = distances_WW[above, place] = distances_WW[heads[place], above] + 1
    return distances_WW


def tree_edges(heads: Sequence[int], kept_W: Bools) -> list[Edge]:
    """The tree's edges between words that are both kept."""
    pairs = ((min(place, head), max(place, head)) for place, head in enumerate(heads) if head >= 0)
    return sorted(pair for pair in pairs if kept_W[pair[0]] and kept_W[pair[1]])


def spanning_tree(distances_WW: Floats, kept_W: Bools) -> list[Edge]:
    """The minimum spanning tree of the words that are kept, by Prim's algorithm; ties go to the earlier word.

    Args:
        distances_WW: symmetric; any real numbers, zeros included.
        kept_W: which words it spans.
    """
    places = np.flatnonzero(kept_W)
    count = places.size
    if count < 2:
        return []
    own_NN = distances_WW[np.ix_(places, places)]
    outside_N = np.ones(count, dtype=bool)
    outside_N[0] = False
    nearest_N = np.zeros(count, dtype=np.int64)
    distance_N = own_NN[0].astype(np.float64)
    edges = []
    for _ in range(count - 1):
        new = int(np.argmin(np.where(outside_N, distance_N, np.inf)))
        edges.append((int(places[min(new, nearest_N[new])]), int(places[max(new, nearest_N[new])])))
        outside_N[new] = False
        closer_N = own_NN[new] < distance_N
        nearest_N[closer_N] = new
        distance_N = np.minimum(distance_N, own_NN[new])
    return sorted(edges)


def chain(kept_W: Bools) -> list[Edge]:
    """Every word tied to the next one that is kept: the baseline of any tree."""
    places = np.flatnonzero(kept_W).tolist()
    return list(pairwise(places))


def embedded(heads: Sequence[int]) -> Floats:
    """Vectors whose squared distances are the tree's distances, and whose squared lengths are the depths, (W, W).

    A word is the sum of a unit vector of its own and its head; the root is the origin, its own vector left out.
    """
    vectors_WW = np.zeros((len(heads), len(heads)))
    for place in np.argsort(tree_depths(heads), kind="stable").tolist():
        if heads[place] >= 0:
            vectors_WW[place] = vectors_WW[heads[place]]
            vectors_WW[place, place] = 1.0
    return vectors_WW
