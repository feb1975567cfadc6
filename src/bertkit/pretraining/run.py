"""`bertkit pretrain`, and `bertkit distill` on text: from the corpus and a run directory to training.

Own design (contract: `pretrain`). Sibling arguments.py holds the command line, trainer.py trains.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from bertkit.data.languages import open_languages
from bertkit.data.prepare import prepare_shards
from bertkit.data.shards import TokenShards, is_shards
from bertkit.pretraining.arguments import PretrainArguments
from bertkit.pretraining.recipe import Recipe
from bertkit.pretraining.trainer import Pretrainer
from bertkit.progress import Progress
from bertkit.run.directory import RunDirectory
from bertkit.text.sources import hub_commits, open_corpus
from bertkit.text.tokenizer_files import load_tokenizer
from bertkit.training.run import (
    Begun,
    Deadline,
    FinishedRun,
    identity_of,
    require_unchanged,
    resumed_recipe,
    run_of,
    train_run,
)


def run_pretraining(
    arguments: PretrainArguments, *, progress: Progress, begun: Begun = lambda run: None
) -> FinishedRun:
    """Start or resume a run and train it to its end.

    Args:
        arguments: of the command line.
        progress: the display.
        begun: called with the run's directory before the training starts.

    Raises:
        UsageError: a faulty recipe, or a resume whose recipe gives another result.
        DataError: text, model, shards or checkpoints at fault.
        StoppedError, DivergedError: see `Trainer.train`.
    """
    run = None if arguments.resume is None else run_of(arguments)
    recipe = arguments.requested() if run is None else resumed_recipe(arguments, run)
    if run is not None and (finished := FinishedRun.done(run)):
        return finished
    models = arguments.fingerprints(recipe)
    commits = None if run is None else run.record.get("commits")
    if commits is None:
        commits = hub_commits(_text_of(recipe), offline=arguments.offline)
    shards = open_shards(recipe, cache=arguments.cache, offline=arguments.offline, progress=progress, commits=commits)
    if run is None:
        fingerprints = {
            "data": shards.fingerprint,
            "tokenizer": load_tokenizer(shards.directory).fingerprint,
            **models,
        }
        identity = identity_of(arguments, recipe, fingerprints)
        run = RunDirectory.create(arguments.runs_root, identity, arguments.run_dir)
    require_unchanged(run, {"data": shards.fingerprint, **models})

    def trainer(run: RunDirectory = run) -> Pretrainer:
        run.update(shards=str(shards.directory.resolve()), commits=commits)
        return arguments.trainer(recipe, shards, run)

    return train_run(
        run,
        trainer,
        command=arguments.command,
        progress=progress,
        begun=begun,
        deadline=Deadline.after(arguments.max_minutes),
    )


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
