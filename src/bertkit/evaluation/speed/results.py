"""The results of `eval speed`: contents of results.json, with the compression table and the Pareto frontier.

Contract: `eval`. Each model is a task of the document, with metrics that name their units. The compression table
follows surveys of compressed BERTs: how many times smaller, which share of the score is kept, how many times faster
than the first model, and the published row of the model's method.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch

from bertkit.evaluation.run import single_score
from bertkit.evaluation.settings import SpeedSettings
from bertkit.evaluation.speed.record import Score
from bertkit.evaluation.speed.timing import Cell, TimedModel, Timings
from bertkit.metrics.statistics import summarise
from bertkit.tasks.published_compression import published_compression
from bertkit.visible import number_of

SUITE = "speed"
_MEGA = 1e6
_MILLI = 1e3


def retention(scores: Mapping[str, Score], reference: Mapping[str, Score]) -> tuple[float | None, tuple[str, ...]]:
    """The mean score divided by the reference's, on the tasks that both have in the same metric; and these tasks.

    None if there are none, or if the reference's mean is not above zero.
    """
    tasks = tuple(task for task in reference if task in scores and scores[task].metric == reference[task].metric)
    own, theirs = (sum(each[task].value for task in tasks) for each in (scores, reference))
    return (own / theirs if theirs > 0 else None), tasks


def frontier(points: Sequence[tuple[float, float]]) -> list[int]:
    """The points that no other point beats: less in the first coordinate and more in the second are better.

    A point is beaten by another that is at least as good in both and better in one; equal points do not beat each
    other. Indices are in the order of the points.
    """

    def beats(one: tuple[float, float], other: tuple[float, float]) -> bool:
        return one != other and one[0] <= other[0] and one[1] >= other[1]

    return [index for index, point in enumerate(points) if not any(beats(each, point) for each in points)]


def speed_results(
    timed_models: Sequence[TimedModel],
    timings: Timings,
    settings: SpeedSettings,
    *,
    threads: int,
    device: torch.device,
) -> dict[str, Any]:
    """The contents of results.json, except those about the machine."""
    reference = timed_models[0]
    return {
        "suite": SUITE,
        "model": reference.loaded.name,
        "average": None,
        "tasks": {each.loaded.name: _metrics(each, reference, timings) for each in timed_models},
        "models": [_described(each) for each in timed_models],
        "cells": [_cell_row(cell, each, timings, reference) for cell in timings for each in timed_models],
        "compression": compression_table(timed_models, timings, settings),
        "pareto": _pareto(timed_models, timings, settings),
        "threads": threads,
        "device": device.type,
        "settings": settings.model_dump(mode="json"),
        "protocol": _protocol(settings, threads, device),
    }


def _metrics(timed_model: TimedModel, reference: TimedModel, timings: Timings) -> dict[str, Any]:
    """Metrics by name, in the contract's format; timed metrics have one value per round instead of one per seed."""
    size = timed_model.footprint
    found: dict[str, Any] = {
        "parameters": single_score(size.parameters),
        "parameters_without_embeddings": single_score(size.without_embeddings),
        "disk_mb": single_score(size.disk_bytes / _MEGA),
        **{f"multiply_adds/length={length}": single_score(n) for length, n in timed_model.multiply_adds.items()},
    }
    for cell, timed in timings.items():
        own, theirs = timed.get(timed_model.label), timed.get(reference.label)
        if own is None:
            continue
        per_sentence = {number: _MILLI * seconds / cell.batch for number, seconds in enumerate(own.seconds)}
        low, high = (_MILLI * seconds / cell.batch for seconds in own.quartiles)
        summary = summarise(dict(per_sentence))
        found[f"ms_per_sentence/{cell.name}"] = summary | {"quartiles": [low, high]}
        found[f"sentences_per_second/{cell.name}"] = single_score(cell.batch / own.median)
        if theirs is not None:
            found[f"speed_up/{cell.name}"] = single_score(own.times_as_fast_as(theirs))
    found |= {f"{task}/{score.metric}": single_score(score.value) for task, score in timed_model.scores.items()}
    kept, _ = retention(timed_model.scores, reference.scores)
    return found if kept is None else found | {"retention": single_score(kept)}


def _described(timed_model: TimedModel) -> dict[str, Any]:
    config = timed_model.loaded.model.encoder.config
    return {
        "name": timed_model.loaded.name,
        "label": timed_model.label,
        "model_type": config.model_type,
        "asked": timed_model.asked,
        "fingerprint": timed_model.loaded.fingerprint,
        "trained": timed_model.loaded.training,
        "parameters": timed_model.footprint.parameters,
        "parameters_without_embeddings": timed_model.footprint.without_embeddings,
        "disk_mb": timed_model.footprint.disk_bytes / _MEGA,
        "multiply_adds": {str(length): count for length, count in timed_model.multiply_adds.items()},
        "cannot": {str(length): reason for length, reason in timed_model.cannot.items()},
        "scores": {task: asdict(each) for task, each in timed_model.scores.items()},
        "method": None if timed_model.method is None else timed_model.method[0],
    }


def _cell_row(cell: Cell, timed_model: TimedModel, timings: Timings, reference: TimedModel) -> dict[str, Any]:
    """A row of tables/speed.csv and of the printed table."""
    row: dict[str, Any] = {"batch": cell.batch, "length": cell.length, "model": timed_model.label}
    own, theirs = timings[cell].get(timed_model.label), timings[cell].get(reference.label)
    if own is None:
        return row | {"reason": timed_model.cannot[cell.length]}
    low, high = own.quartiles
    return row | {
        "ms_per_sentence": _MILLI * own.median / cell.batch,
        "ms_lower_quartile": _MILLI * low / cell.batch,
        "ms_upper_quartile": _MILLI * high / cell.batch,
        "sentences_per_second": cell.batch / own.median,
        "speed_up": None if theirs is None else own.times_as_fast_as(theirs),
    }


def compression_table(
    timed_models: Sequence[TimedModel], timings: Timings, settings: SpeedSettings
) -> list[dict[str, Any]]:
    """Every model compared with the first, timed at the first batch size and the reported length.

    `size`, `parameters` and `speed_up` are how many times smaller or faster than the first model it is; `retention` is
    the share of the first model's score on `tasks`, `published` the published row of its method, and `known_by` the
    source of the method's name. What is not known is None.
    """
    reference = timed_models[0]
    cell = Cell(settings.batch_sizes[0], settings.reported_length)
    rows = []
    for each in timed_models:
        own, theirs = timings[cell].get(each.label), timings[cell].get(reference.label)
        kept, tasks = retention(each.scores, reference.scores)
        shape = each.loaded.model.encoder.config.model_dump()
        published = None
        if each.method is not None and each is not reference:
            layers, width = shape.get("num_hidden_layers"), shape.get("hidden_size")
            published = published_compression(each.method[0], layers=layers, width=width)
        rows.append(
            {
                "label": each.label,
                "size": reference.footprint.disk_bytes / each.footprint.disk_bytes,
                "parameters": reference.footprint.parameters / each.footprint.parameters,
                "retention": kept,
                "tasks": tasks,
                "speed_up": None if own is None or theirs is None else own.times_as_fast_as(theirs),
                "measured_at": cell.name,
                "published": None if published is None else published.model_dump(),
                "known_by": None if each.method is None or published is None else each.method[1],
            }
        )
    return rows


def _pareto(timed_models: Sequence[TimedModel], timings: Timings, settings: SpeedSettings) -> dict[str, Any]:
    """The data of the figure: milliseconds against the mean score or the size."""
    tasks = common_tasks(timed_models)
    against = settings.against or ("score" if tasks else "parameters")
    points = []
    for batch in settings.batch_sizes:
        cell = Cell(batch, settings.reported_length)
        timed = [each for each in timed_models if each.label in timings[cell]]
        heights = {each.label: _height(each, against, tasks) for each in timed}
        milliseconds = {each.label: _MILLI * timings[cell][each.label].median / batch for each in timed}
        # A smaller model is better, but a higher score is.
        sign = 1 if against == "score" else -1
        signed = [(milliseconds[label], sign * height) for label, height in heights.items()]
        best = set(frontier(signed))
        for number, each in enumerate(timed):
            low, high = timings[cell][each.label].quartiles
            points.append(
                {
                    "batch": batch,
                    "length": cell.length,
                    "model": each.label,
                    "ms_per_sentence": milliseconds[each.label],
                    "ms_lower_quartile": _MILLI * low / batch,
                    "ms_upper_quartile": _MILLI * high / batch,
                    against: heights[each.label],
                    "on_frontier": number in best,
                }
            )
    return {"against": against, "tasks": tasks, "points": points}


def common_tasks(timed_models: Sequence[TimedModel]) -> list[str]:
    """The tasks on which every model has a score."""
    return [task for task in timed_models[0].scores if all(task in each.scores for each in timed_models)]


def _height(timed_model: TimedModel, against: str, tasks: Sequence[str]) -> float:
    """A model's place on the second axis of the figure."""
    if against == "score":
        return sum(timed_model.scores[task].value for task in tasks) / len(tasks)
    size = timed_model.footprint
    return size.parameters if against == "parameters" else size.disk_bytes / _MEGA


def _protocol(settings: SpeedSettings, threads: int, device: torch.device) -> dict[str, str]:
    """How the numbers were measured, in words."""
    where = number_of(threads, "thread") if device.type == "cpu" else device.type
    return {
        "timed": f"forward pass on {where}, without gradients, up to the output of the task head if the model has one,"
        " else the states of all tokens; tokenization is not timed",
        "sentences": f"random tokens, all of the same length including special tokens, drawn with seed {settings.seed}",
        "clock": "elapsed time" if settings.clock == "wall" else "processor time of the single thread",
        "rounds": f"{settings.rounds} after a warm-up; each round times all models in a different order",
        "milliseconds": "per sentence of the batch, median over the rounds; spread: quartiles over the rounds",
        "speed_up": "the reference's time divided by the model's in each round; median over the rounds",
        "parameters": "including heads, tied parameters counted once; without embeddings: excluding the word, position"
        " and segment tables",
        "multiply_adds": "in linear layers, attention products and LSTMs of the timed computation, for one sentence",
        "disk_mb": "weight files only, 1 MB = 1,000,000 bytes",
        "retention": "mean main score divided by the reference's, over the tasks that both have",
    }
