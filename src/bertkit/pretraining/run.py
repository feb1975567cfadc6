"""From a request to a run: which corpus, which directory; new, or going on with an old one.

Own design (contract: `pretrain`). Sibling request.py holds what is asked, pretrain.py does the work once all this is
decided.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bertkit.data.languages import open_languages
from bertkit.data.prepare import prepare_shards
from bertkit.data.shards import TokenShards, is_shards
from bertkit.errors import DataError
from bertkit.pretraining.arguments import PretrainRequest, shortened
from bertkit.pretraining.file_hashes import with_contents
from bertkit.pretraining.recipe import Recipe
from bertkit.progress import Progress
from bertkit.recipe.dump import dump_recipe
from bertkit.recipe.hashing import require_same_result, what_hash
from bertkit.recipe.resolve import load_as, with_overrides
from bertkit.run.directory import RunDirectory, RunIdentity
from bertkit.run.find import run_to_resume
from bertkit.text.sources import hub_commits, open_corpus
from bertkit.text.tokenizer_files import load_tokenizer

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Finished:
    """What came of it: the run and the contents of its results.json."""

    run: RunDirectory
    results: dict[str, Any]


def run_pretraining(
    request: PretrainRequest,
    *,
    progress: Progress,
    begun: Callable[[RunDirectory], None] = lambda run: None,
) -> Finished:
    """Start or resume a run and train it to its end.

    Args:
        request: what the user asked for.
        progress: the display.
        begun: called with the run's directory before the training starts.

    Raises:
        UsageError: a faulty recipe, or a resume whose recipe gives another result.
        DataError: text, model, shards or checkpoints at fault.
        StoppedError, DivergedError: see `Pretraining.train`.
    """
    recipe, run = _resumed(request) if request.resume is not None else (request.requested(), None)
    if run is not None and run.status == "done" and run.results is not None:
        log.info("%s is done already", run.path)
        return Finished(run, run.results)
    models = request.fingerprints(recipe)
    commits = run.record.get("commits") if run is not None else None
    if commits is None:
        commits = hub_commits(_text_of(recipe), offline=request.offline)
    shards = open_shards(recipe, cache=request.cache, offline=request.offline, progress=progress, commits=commits)
    if run is None:
        run = RunDirectory.create(
            request.runs_root,
            RunIdentity(
                kind=recipe.kind,
                recipe=recipe.name,
                recipe_yaml=dump_recipe(recipe),
                what_hash=what_hash(recipe),
                seed=recipe.seed,
                command=request.command,
                fingerprints={
                    "data": shards.fingerprint,
                    "tokenizer": load_tokenizer(shards.directory).fingerprint,
                    **models,
                },
            ),
            request.run_dir,
        )
    elif run.record["fingerprints"]["data"] != shards.fingerprint:
        raise DataError(
            f"{run.path}: the text has changed since the run began (shards {run.record['fingerprints']['data'][:12]},"
            f" now {shards.fingerprint[:12]}); restore the text, or start a new run without --resume"
        )
    elif changed := [name for name, value in models.items() if run.record["fingerprints"].get(name) != value]:
        raise DataError(
            f"{run.path}: {', '.join(changed)} has changed since the run began; restore it, or start a new run without"
            " --resume"
        )
    log.info("run directory %s", run.path)
    begun(run)
    with run.recording(request.command):
        run.write_environment()
        run.update(shards=str(shards.directory.resolve()), commits=commits)
        training = request.training(recipe, shards, run)
        results = training.train(progress=progress, max_minutes=request.max_minutes)
    return Finished(run, results)


def _text_of(recipe: Recipe) -> list[str]:
    """The sources that are read."""
    languages = recipe.data.languages
    return [source for own in languages.values() for source in own] if languages else recipe.data.sources


def open_shards(
    recipe: Recipe, *, cache: Path, offline: bool, progress: Progress, commits: Mapping[str, str] | None = None
) -> TokenShards:
    """The recipe's corpus as shards: those given, or those of its text, made now where the cache has none.

    Args:
        commits: at which the Hub's data sets are read, in place of those that they are at now.
    """
    sources = recipe.data.sources
    if recipe.data.languages:
        languages = open_languages(recipe.data, offline=offline, commits=commits)
        return prepare_shards(languages, recipe.tokenizer, None, cache=cache, offline=offline, progress=progress)
    if len(sources) == 1 and is_shards(sources[0]):
        return TokenShards.open(Path(sources[0]), verify=True)
    corpus = open_corpus(sources, recipe.data.reading, offline=offline, commits=commits)
    return prepare_shards(corpus, recipe.tokenizer, None, cache=cache, offline=offline, progress=progress)


def _resumed(request: PretrainRequest) -> tuple[Recipe, RunDirectory]:
    """The run to go on with, and its recipe with the engine of the request.

    Raises:
        UsageError: there is no such run, or the request gives another result; the differing keys are listed.
    """
    run = _run_to_resume(request)
    recorded = load_as(request.schema, str(run.path / "recipe.yaml"))
    if request.recipe is None:
        wanted = shortened(with_overrides(recorded, list(request.overrides)), request.max_steps)
        wanted = with_contents(wanted, anew=True)
    else:
        wanted = request.requested()
    # A run of before there were hashes of files has none to compare with.
    require_same_result(with_contents(recorded), wanted, run.path)
    return recorded.model_copy(update={"engine": wanted.engine}), run


def _run_to_resume(request: PretrainRequest) -> RunDirectory:
    assert request.resume is not None

    def fitting(runs: Sequence[RunDirectory]) -> Sequence[RunDirectory]:
        if request.recipe is None:
            return runs
        wanted = request.requested()
        same = [run for run in runs if run.record["what_hash"] == what_hash(wanted)]
        # A run of this recipe under another hash is offered too, so that its differing keys are named.
        return same or [run for run in runs if run.record["recipe"] == wanted.name]

    kind = request.schema.model_fields["kind"].default
    return run_to_resume(request.resume, request.runs_root, kind, run_dir=request.run_dir, fitting=fitting)
