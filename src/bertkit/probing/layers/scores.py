"""Only the scores of every layer's linear probe, without controls, codes and mixes: a sixth of the work of run.py.

Tenney et al. 2019, arXiv:1905.05950; files and tasks are in data.py, probes in measure.py. For comparisons of many
models, such as those of a study.
"""

from __future__ import annotations

from bertkit.models.hook_points import layer_points
from bertkit.probing.annotated import check_store, kept_states, width_of
from bertkit.probing.layers import LayersSettings
from bertkit.probing.layers.measure import LinearProbe, warn_of_unconverged
from bertkit.probing.layers.run import read_files
from bertkit.probing.run import ProbeArguments
from bertkit.probing.sentence_sources import existing
from bertkit.probing.sentences import TextEncoder


def layer_scores(request: ProbeArguments, settings: LayersSettings) -> dict[str, list[float]]:
    """Each task's score by layer, the embeddings first: conlleval's F1 for chunks, else accuracy.

    Uses the same probes on the same sentences as `probe_layers`. Nothing is written except temporary states.

    Raises:
        UsageError, DataError: see `probe_layers`.
    """
    subject = request.subject()
    paths, test_paths = ([existing(file) for file in files] for files in (request.data, request.test_data))
    points = layer_points(subject.model)
    files = read_files(paths, test_paths, settings, TextEncoder.of(subject.model, subject.tokenizer))
    check_store(len(points), max(each.words() for each in files), width_of(subject.model, points), request.store_gb)
    found: dict[str, list[float]] = {}
    probes = unconverged = 0
    for file in files:
        with kept_states(request, subject, [encoded for _, encoded in file.pairs], points) as store:
            store.standardise(file.words(file.train))
            for task in file.tasks:
                scores = []
                for number in range(store.layers):
                    tables, spans = [store.layer(number)], task.train.spans_NP2.shape[1]
                    probe = LinearProbe(tables, spans, len(task.labels), settings.fit).fit(task.train)
                    scores.append(task.score(probe.predict(task.test)))
                    probes, unconverged = probes + 1, unconverged + (not probe.is_converged)
                found[task.name] = scores
    warn_of_unconverged(unconverged, probes, settings.fit)
    return found
