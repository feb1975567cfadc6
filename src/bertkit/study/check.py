"""Checks before a study's first step: arms that do not differ, settings that change nothing, missing data.

The schema (settings.py) checks everything that needs no recipe. Here every recipe that may be run is loaded, which
finds all errors in the arms.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bertkit.errors import BertkitError, DataError, UsageError
from bertkit.evaluation.blimp import chosen_paradigms
from bertkit.evaluation.settings import BlimpSettings
from bertkit.files import joint_sha256, json_sha256, sha256_of
from bertkit.finetuning.arguments import FinetuneArguments
from bertkit.finetuning.data import splits_sha256, watched_splits
from bertkit.finetuning.inputs import CustomTask
from bertkit.finetuning.recipe import files_of
from bertkit.metrics import LOWER_IS_BETTER
from bertkit.models.scoring.rules import SCORING_RULES, MaskedNextTokenScoring, QueryStream
from bertkit.objectives.base import CompanionObjective
from bertkit.objectives.forward import scoring_rule
from bertkit.pretraining.recipe import Recipe
from bertkit.pretraining.stages import stages_of
from bertkit.probing.layers.data import check_tasks, read_labelled, task_of_file
from bertkit.probing.sentence_sources import existing
from bertkit.recipe.hashing import hashed_settings
from bertkit.recipe.resolve import Override
from bertkit.study.measure_settings import (
    BlimpMeasure,
    FinetuneMeasure,
    HeldOutMeasure,
    LayersMeasure,
    MeasureSettings,
    MlmMeasure,
)
from bertkit.study.settings import Study
from bertkit.study.study_runs import shown_setting
from bertkit.tasks.readers import load_split
from bertkit.text.sources import open_corpus

_HEADS = {rule.head for rule in SCORING_RULES.values() if not rule.must_be_recorded}
"""Heads that assign a probability to a text."""


def check_recipes(study: Study, recipes: dict[str, list[tuple[dict[str, Any], Recipe]]]) -> None:
    """Check that no two arms or candidates are the same.

    Args:
        study: resolved.
        recipes: each arm's settings with the resulting recipe, all with the same seed.

    Raises:
        UsageError: two are the same; with their names.
    """
    seen: dict[str, tuple[str, str]] = {}
    for arm, own in recipes.items():
        for setting, recipe in own:
            key = json.dumps([hashed_settings(recipe), study.arms[arm].budget_share], sort_keys=True)
            if key not in seen:
                seen[key] = (arm, shown_setting(setting).rstrip(", "))
                continue
            other, shown = seen[key]
            if other == arm:
                raise UsageError(
                    f"arms.{arm}: the candidates {shown!r} and {shown_setting(setting).rstrip(', ')!r} are the same"
                    " run; a key of the grid changes nothing, or a setting of the arm replaces it"
                )
            raise UsageError(
                f"arms.{arm} does not differ from arms.{other}: their runs would be the same; change its `set`, or"
                " leave it out"
            )


def check_measurable(study: Study, recipes: dict[str, Recipe]) -> None:
    """Check that the measures of the choice and the claims are defined for all their arms.

    Args:
        study: resolved.
        recipes: one per arm.

    Raises:
        UsageError: a measure is not; with the reason.
    """
    wanted = (
        [] if study.choose is None else [("choose.by", name, arm) for name in study.choose.names for arm in recipes]
    )
    for number, claim in enumerate(study.claims):
        sides = (claim.arm, claim.against or study.against)
        wanted += [(f"claims.{number}", name, arm) for name in claim.names for arm in sides]
    for place, name, arm in wanted:
        reason = not_measurable(study.measures[name], recipes[arm])
        if reason is not None:
            raise UsageError(
                f"{place}: measures.{name} cannot be computed for arm {arm}: {reason}; take another measure"
            )


def not_measurable(measure: MeasureSettings, recipe: Recipe) -> str | None:
    """Why a measure cannot be computed for a run of this recipe; None if it can."""
    objectives = stages_of(recipe)[-1].recipe.objectives
    rule = SCORING_RULES.get(str(scoring_rule(objectives)))
    in_place = any(each.fills_masks for each in objectives) and (rule is None or not rule.shifted)
    learnt = {head for each in objectives for head in each.heads}
    fills_masks = in_place or rule is MaskedNextTokenScoring or QueryStream.head in learnt
    if isinstance(measure, MlmMeasure) and not fills_masks:
        return "it does not learn to predict a masked token"
    if isinstance(measure, MlmMeasure) and (measure.sequence_length or 0) > recipe.model.max_tokens:
        return f"it reads at most {recipe.model.max_tokens} tokens, and sequence_length is {measure.sequence_length}"
    if isinstance(measure, BlimpMeasure) and rule is None and not _HEADS & learnt:
        return "it learns no language model"
    if isinstance(measure, FinetuneMeasure):
        head = finetune_arguments(measure, "a model").requested().specs[0].head
        if head not in recipe.model.all_heads():
            return f"model.family {recipe.model.model_type!r} has no head for {head}"
    if isinstance(measure, HeldOutMeasure):
        terms = {each.term for each in objectives}
        known = [metric for metric in measure.metrics if metric.partition("/")[2] in terms | {""}]
        if not known:
            return f"its objectives are {', '.join(sorted(terms))}, and {' and '.join(measure.metrics)} of others"
    return None


def masked_lm_companion(recipe: Recipe) -> str | None:
    """The companion model with a run's masked-LM head, such as ELECTRA's generator; None for the model itself."""
    objectives = stages_of(recipe)[-1].recipe.objectives
    companions = {each.companion for each in objectives if isinstance(each, CompanionObjective)}
    learners = [each.learnt_by for each in objectives if each.fills_masks]
    return next((name for name in learners if name in companions), None)


def check_measures(study: Study, *, offline: bool) -> str | None:
    """Check the data of every measure by reading it.

    Returns:
        The hash of the data of all measures, by which a finished study is found again; None if the runs' own held-out
        text is all that they read.

    Raises:
        UsageError: prefixed with the measure's name.
        DataError: all measures with missing or faulty data, each with its name, and how to leave them out.
    """
    faulty: dict[str, str] = {}
    hashes: list[str] = []
    for name, measure in study.measures.items():
        try:
            hashes += _check(measure, offline=offline)
        except DataError as error:
            other = f"; another text will do, if no run is trained on it: --set measures.{name}.data=[FILE]"
            faulty[name] = f"measures.{name}: {error}{other if isinstance(measure, MlmMeasure) else ''}"
        except BertkitError as error:
            raise type(error)(f"measures.{name}: {error}") from error
    if faulty:
        without = " ".join(f"--set measures.{name}=null" for name in faulty)
        if study.choose is not None and not faulty.keys().isdisjoint(study.choose.names):
            others = ", ".join(name for name in study.measures if name not in faulty)
            without += f" --set choose.by=NAME, with another measure for the choice ({others or 'none is left'})"
        raise DataError("\n".join([*faulty.values(), f"to run without these data: {without}"]))
    return joint_sha256(hashes) if hashes else None


def _check(measure: MeasureSettings, *, offline: bool) -> Iterator[str]:
    """Check the data of a measure by reading it; the hash of each part."""
    if isinstance(measure, MlmMeasure):
        yield open_corpus(measure.data, offline=offline).fingerprint
    elif isinstance(measure, BlimpMeasure):
        chosen = chosen_paradigms(Path(measure.directory), BlimpSettings(pairs=measure.pairs, only=measure.only))
        yield from map(sha256_of, dict.fromkeys(paradigm.path for paradigm in chosen))
    elif isinstance(measure, LayersMeasure):
        given = [file for file in (measure.data, measure.test_data) if file is not None]
        files = [existing(file, option="the labelled sentences") for file in given]
        for file in files:
            labelled = read_labelled(file, task_of_file(files[0]))
            check_tasks([measure.task], list(dict.fromkeys(name for each in labelled for name in each.targets)))
        yield from map(sha256_of, files)
    elif isinstance(measure, FinetuneMeasure):
        yield from _check_task(measure, offline=offline)
    else:
        assert isinstance(measure, HeldOutMeasure), measure  # measured by pretraining, without further data


def finetune_arguments(measure: FinetuneMeasure, model: str, **more: Any) -> FinetuneArguments:
    """The command-line arguments of a fine-tuning measure.

    Args:
        measure: its settings.
        model: the model to fine-tune.
        more: further arguments.
    """
    overrides = [Override(key, value, f"set.{key}") for key, value in measure.set.items()]
    return FinetuneArguments(
        task=measure.task,
        model=model,
        data_dir=measure.directory,
        overrides=[*overrides, *more.pop("overrides", [])],
        **more,
    )


def _check_task(measure: FinetuneMeasure, *, offline: bool) -> Iterator[str]:
    recipe = finetune_arguments(measure, "a model").requested()
    spec, task = recipe.specs[0], recipe.task
    if measure.metric is not None and measure.metric not in spec.metrics:
        raise UsageError(f"metric: {spec.name} has no metric {measure.metric!r}; there are: {', '.join(spec.metrics)}")
    if measure.metric is None and measure.higher_is_better is None and spec.primary in LOWER_IS_BETTER:
        raise UsageError(f"metric: lower is better for {spec.primary}, the first metric of {spec.name}; name it here")
    if isinstance(task, CustomTask):
        files = [Path(file) for file in files_of(task).values()]
        if missing := [file for file in files if not file.exists()]:
            raise DataError(f"{missing[0]}: no such file")
        yield json_sha256(task.model_dump(mode="json"))
        yield from map(sha256_of, files)
        return
    watched = watched_splits(spec)
    splits = {name: load_split(spec, name, measure.directory, offline=offline) for name in ("train", *watched)}
    yield splits_sha256({name: splits[name] for name in ("train", watched[0])})
