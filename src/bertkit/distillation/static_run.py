"""Make a recipe's table of token vectors, as a run with its directory, model and results.

Not from a paper (contract: the run directory, `--plan`). Nothing is trained, so there are no steps or checkpoints. A
run takes minutes, and a stopped run starts again from scratch.
"""

from __future__ import annotations

import logging
import shutil
import time
from typing import Any

import torch

from bertkit.distillation.static_recipe import StaticArguments
from bertkit.distillation.static_table import rows_of, write_static
from bertkit.errors import UsageError
from bertkit.models.files.hub import load_model
from bertkit.models.files.model_files import encoder_directory, find_model
from bertkit.progress import Progress
from bertkit.recipe.hashing import name_and_hash
from bertkit.tasks.encoding import Template
from bertkit.text.tokenizer_files import load_tokenizer
from bertkit.training.config import EngineConfig
from bertkit.training.cost import FORWARD_SHARE, ParameterCount, count_weights, sizes_of, step_flops
from bertkit.training.engine import resolve_engine
from bertkit.training.plan import PlannedCost, plan_document
from bertkit.training.run import FinishedRun, OnStart, finished_of, identity_of, new_run, run_of

log = logging.getLogger(__name__)


def make_static(arguments: StaticArguments, *, progress: Progress, on_start: OnStart = lambda run: None) -> FinishedRun:
    """Make the table; a finished run of the same recipe and model is not repeated.

    Args:
        arguments: of the command line.
        progress: the progress display.
        on_start: called with the run directory before the work starts.

    Raises:
        UsageError: errors in the recipe, or an unfinished run to resume.
        DataError: the model or the text cannot be used.
    """
    if arguments.resume is not None:
        if finished := FinishedRun.done(run_of(arguments)):
            return finished
        raise UsageError("--resume: a table of token vectors is made in one go; leave --resume out to make it again")
    recipe = arguments.new_recipe()
    identity = identity_of(arguments, recipe, arguments.fingerprints(recipe))
    if finished := finished_of(arguments, recipe, identity):
        return finished
    assert recipe.teacher is not None
    run = new_run(arguments.runs_root, identity, arguments.run_dir)
    log.info("run directory %s", run.path)
    on_start(run)
    started = time.monotonic()
    with run.recording(arguments.command):
        run.write_environment()
        shutil.rmtree(run.model, ignore_errors=True)
        made = write_static(recipe.teacher, run.model, recipe.static, offline=arguments.offline, progress=progress)
        run.seal_model()
        results: dict[str, Any] = {"static": made}
        run.write_results(results)
        run.update(seconds=round(time.monotonic() - started, 1))
    return FinishedRun(run, results, (run,))


def static_plan(arguments: StaticArguments) -> dict[str, Any]:
    """The document of `--plan`: the cost of the encoder's passes over all rows of the table."""
    recipe = arguments.new_recipe()
    assert recipe.teacher is not None
    files = encoder_directory(find_model(recipe.teacher, offline=arguments.offline))
    model, _ = load_model(files, heads=())
    tokenizer = load_tokenizer(files, offline=arguments.offline)
    rows, _ = rows_of(tokenizer, recipe.static)
    added = sum(len(frame) for frame in Template.of(tokenizer.backend, 1).frames)
    sizes = sizes_of(torch.tensor([len(row) + added for row in rows]))
    weights = len(rows) * min(recipe.static.width, model.encoder.width)
    flops = FORWARD_SHARE * step_flops(model, **sizes, predictions=0)
    states = 4.0 * len(rows) * model.encoder.width
    cost = PlannedCost(
        parameters=ParameterCount(total=weights, backbone=weights),
        steps=0,
        tokens=int(sizes["tokens"]),
        flops=flops,
        memory={"teacher_weights": 4.0 * count_weights(model), "states": 3 * states, "weights": 4.0 * weights},
        disk_bytes=4.0 * weights,
    )
    return name_and_hash(recipe) | plan_document(resolve_engine(EngineConfig(device="cpu", precision="fp32")), cost)
