"""`bertkit eval sts`: does the similarity of sentence vectors rank pairs like human scores?

Reimers and Gurevych 2019, arXiv:1908.10084, section 4.1 (Spearman's correlation of the cosine with the scores); Gao et
al. 2021, SimCSE, arXiv:2104.08821, appendix B: a year's subsets are concatenated before ranking ("all"), which gives
`spearman`; `spearman_mean` is the mean over the subsets.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bertkit.evaluation.embeddings.run import VectorArguments, measure, vector_source, with_interval
from bertkit.evaluation.embeddings.settings import StsSettings
from bertkit.evaluation.embeddings.similarity_sets import ScoredPairs, find_sets, table_pairs
from bertkit.evaluation.embeddings.sources import VectorSource, encoded_once
from bertkit.evaluation.run import EvaluationResult, single_score
from bertkit.files import sha256_of
from bertkit.metrics.regression import Pearson, pearson, spearman, spearman_value
from bertkit.progress import Progress, counted, silent_progress

SUITE = "sts"
COLUMNS = ("sentence1", "sentence2", "score")


def evaluate_sts(
    arguments: VectorArguments,
    data_dir: Path | None,
    table: Path | None,
    settings: StsSettings,
    *,
    columns: Sequence[str] = COLUMNS,
    progress: Progress = silent_progress,
) -> EvaluationResult:
    """Measure and write the run's results.json.

    Args:
        arguments: the model, or word vectors, and where to write.
        data_dir: a directory with the published sets.
        table: a user's own table, instead of a directory.
        settings: what to score.
        columns: columns of the table: both sentences and the score.
        progress: the display.

    Raises:
        UsageError: an unknown set.
        DataError: invalid model or data.
    """
    sets = [table_pairs(table, columns)] if table is not None else find_sets(data_dir or Path(), settings)
    texts = [text for each in sets for first, second, _ in each.pairs for text in (first, second)]
    source = vector_source(arguments, settings, lambda: texts)

    def compute() -> dict[str, Any]:
        tasks = {each.name: scores_of(each, source) for each in counted(sets, progress, SUITE, unit="sets")}
        primary = [found["spearman"]["mean"] for found in tasks.values()]
        known = [value for value in primary if value is not None]
        return {
            "tasks": tasks,
            "average": sum(known) / len(known) if len(known) == len(primary) else None,
            "pairs": {each.name: len(each.pairs) for each in sets},
            "splits": {each.name: each.split for each in sets if each.split},
        }

    data = {str(path): sha256_of(path) for each in sets for path in each.files}
    return measure(SUITE, source, settings, arguments, data=data, compute=compute)


def scores_of(pairs: ScoredPairs, source: VectorSource) -> dict[str, Any]:
    """The correlations of a set."""
    first, second, scores = zip(*pairs.pairs, strict=True)
    similarity_N = source.similarities(*encoded_once(source, first, second))
    guesses = similarity_N.tolist()
    found = {
        "spearman": with_interval(spearman(guesses, scores)["spearman"], guesses, scores, spearman_value),
        "pearson": with_interval(pearson(guesses, scores)["pearson"], guesses, scores, Pearson()),
    }
    if len(pairs.subsets) > 1:
        ends = np.cumsum([len(each) for each in pairs.subsets.values()])[:-1]
        each = [
            spearman_value(guess_part, score_part)
            for guess_part, score_part in zip(*(np.split(all_N, ends) for all_N in (guesses, scores)), strict=True)
        ]
        found["spearman_mean"] = single_score(float(np.mean(each)) if np.isfinite(each).all() else None)
    return found
