"""The hash of the data that a study's measures read, by which a finished study is found again.

Not from a paper. Sibling check.py reads the same data to check them.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from bertkit.evaluation.blimp import chosen_paradigms
from bertkit.evaluation.settings import BlimpSettings
from bertkit.files import joint_sha256, json_sha256, sha256_of
from bertkit.finetuning.data import splits_sha256, watched_splits
from bertkit.finetuning.inputs import CustomTask
from bertkit.finetuning.recipe import files_of
from bertkit.study.check import finetune_arguments
from bertkit.study.measure_settings import BlimpMeasure, FinetuneMeasure, LayersMeasure, MeasureSettings, MlmMeasure
from bertkit.study.settings import Study
from bertkit.tasks.readers import load_split
from bertkit.text.sources import open_corpus


def measures_sha256(study: Study, *, offline: bool) -> str | None:
    """The hash of the data of all measures; None if the runs' own held-out text is all that they read.

    Raises:
        DataError: data are missing.
    """
    hashes = [each for measure in study.measures.values() for each in _hashes(measure, offline=offline)]
    return joint_sha256(hashes) if hashes else None


def _hashes(measure: MeasureSettings, *, offline: bool) -> Iterator[str]:
    if isinstance(measure, MlmMeasure):
        yield open_corpus(measure.data, offline=offline).fingerprint
    elif isinstance(measure, BlimpMeasure):
        chosen = chosen_paradigms(Path(measure.directory), BlimpSettings(pairs=measure.pairs, only=measure.only))
        yield from (sha256_of(path) for path in dict.fromkeys(paradigm.path for paradigm in chosen))
    elif isinstance(measure, LayersMeasure):
        yield from (sha256_of(Path(file)) for file in (measure.data, measure.test_data) if file is not None)
    elif isinstance(measure, FinetuneMeasure):
        recipe = finetune_arguments(measure, "a model").requested()
        spec, task = recipe.specs[0], recipe.task
        if isinstance(task, CustomTask):
            yield json_sha256(task.model_dump(mode="json"))
            yield from (sha256_of(Path(file)) for file in files_of(task).values())
        else:
            names = ("train", watched_splits(spec)[0])
            yield splits_sha256({name: load_split(spec, name, measure.directory, offline=offline) for name in names})
