"""`bertkit eval clustering`: do the clusters of a model's vectors agree with the labels of the texts?

Muennighoff et al. 2023, MTEB, arXiv:2210.07316, section 3.1: k-means with as many clusters as there are labels, scored
by the V-measure (Rosenberg and Hirschberg 2007, https://aclanthology.org/D07-1043). The adjusted Rand index, which is 0
for clusters drawn at random, is Hubert and Arabie's (1985). scikit-learn computes all of them.

Quirk: MTEB clusters a model's vectors as they are, in mini-batches. Here vectors that are compared by the cosine are
scaled to unit length first, which embedders usually do themselves.

Shapes: N texts, E width.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bertkit.errors import DataError
from bertkit.evaluation.embeddings.run import VectorArguments, measure_table
from bertkit.evaluation.embeddings.settings import ClusteringSettings
from bertkit.evaluation.embeddings.sources import VectorSource, encoded_once
from bertkit.evaluation.run import EvaluationResult
from bertkit.metrics.statistics import summarise
from bertkit.progress import Progress, counted, silent_progress
from bertkit.tasks.readers.common import field, text_in
from bertkit.tasks.readers.table import table_rows
from bertkit.visible import number_of

SUITE = "clustering"
COLUMNS = ("text", "label")


def evaluate_clustering(
    arguments: VectorArguments,
    table: Path,
    settings: ClusteringSettings,
    *,
    columns: Sequence[str] = COLUMNS,
    progress: Progress = silent_progress,
) -> EvaluationResult:
    """Measure on a table of labelled texts, and write the run's results.json.

    Raises:
        DataError: invalid model or data: a missing column, an empty text or label, or fewer than two labels.
    """
    rows = [
        tuple(text_in(field(record, name, where, "--columns"), f"{where}, {name}") for name in columns)
        for where, record in table_rows(table)
    ]
    texts = [text for text, _ in rows]
    numbers = {label: number for number, label in enumerate(sorted({label for _, label in rows}))}
    if not 2 <= len(numbers) < len(rows):
        raise DataError(
            f"{table}: {number_of(len(rows), 'text')} with {number_of(len(numbers), 'different label')} in the column"
            f" {columns[1]!r}; clusters need two labels or more, and more texts than labels"
        )
    labels = [numbers[label] for _, label in rows]

    def compute(source: VectorSource) -> dict[str, Any]:
        (vector_NE,) = encoded_once(source, texts)
        if source.similarity == "cosine":
            from sklearn.preprocessing import normalize

            vector_NE = normalize(vector_NE)
        runs = [
            cluster_scores(vector_NE, labels, seed)
            for seed in counted(range(settings.starts), progress, SUITE, unit="starts")
        ]
        found = {name: summarise({seed: run[name] for seed, run in enumerate(runs)}) for name in runs[0]}
        return {
            "tasks": {table.stem: found},
            "average": found["v_measure"]["mean"],
            "texts": len(texts),
            "clusters": len(numbers),
        }

    return measure_table(SUITE, arguments, table, settings, texts, compute)


def cluster_scores(vector_NE: Any, labels: Sequence[int], seed: int) -> dict[str, float]:
    """V-measure, its two parts and the adjusted Rand index of one run of k-means.

    Args:
        vector_NE: vectors of texts, dense or sparse.
        labels: the label of each text, from 0.
        seed: of the first centres (k-means++).
    """
    from sklearn.cluster import KMeans
    from sklearn.metrics import adjusted_rand_score, homogeneity_completeness_v_measure

    found = KMeans(max(labels) + 1, n_init=1, random_state=seed).fit(vector_NE).labels_
    homogeneity, completeness, v_measure = homogeneity_completeness_v_measure(labels, found)
    return {
        "v_measure": float(v_measure),
        "homogeneity": float(homogeneity),
        "completeness": float(completeness),
        "adjusted_rand": float(adjusted_rand_score(labels, found)),
    }
