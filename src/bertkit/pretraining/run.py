"""Run `bertkit pretrain`, and `bertkit distill` on text: the corpus, the run directory, the training.

Contract: `pretrain`. Siblings: arguments.py has the command line and the recipe, trainer.py the training.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from bertkit.data.languages import open_languages
from bertkit.data.prepare import prepare_shards
from bertkit.data.shards import MANIFEST, TokenShards
from bertkit.data.stored_shards import shards_directory
from bertkit.files import sha256_of
from bertkit.pretraining.arguments import PretrainArguments, with_recorded_held_out
from bertkit.pretraining.recipe import Recipe
from bertkit.pretraining.trainer import Pretrainer
from bertkit.pretraining.words import (
    WORDS,
    check_countable,
    check_words,
    count_words,
    needs_words,
    warn_of_unexpected_files,
)
from bertkit.progress import Progress, silent_progress
from bertkit.ranks import current
from bertkit.run.directory import RunDirectory
from bertkit.run.trackers import require_trackers
from bertkit.text.corpus import Corpus
from bertkit.text.sources import hub_commits, open_corpus
from bertkit.text.tokenizer_files import load_tokenizer
from bertkit.training.run import (
    FinishedRun,
    OnStart,
    compare_ranks,
    deadline_after,
    finished_of,
    identity_of,
    new_run,
    own_run,
    require_ranks,
    require_unchanged,
    resumed_recipe,
    run_of,
    train_run,
)

_MOST_NAMED = 3
"""A message names up to this many sources of a text."""


def run_pretraining(
    arguments: PretrainArguments, *, progress: Progress, on_start: OnStart = lambda run: None
) -> FinishedRun:
    """Start or resume a run and train it to its end; a finished run is not repeated.

    Args:
        arguments: of the command line.
        progress: the progress display.
        on_start: called with the run directory before the training starts.

    Raises:
        UsageError: errors in the recipe, or a resume with a recipe that would give another result.
        DataError: text, model, shards or checkpoints cannot be used.
        StoppedError, DivergedError: see `Trainer.train`.
    """
    run = None if arguments.resume is None else run_of(arguments)
    recipe = arguments.new_recipe() if run is None else with_recorded_held_out(resumed_recipe(arguments, run), run)
    if run is not None and (finished := FinishedRun.done(run)):
        return finished
    require_ranks(recipe)
    require_trackers(recipe.engine.report_to, arguments.run_dir if run is None else run.path)
    check_countable(recipe.data, recipe.engine)
    with current().in_turn():
        models = arguments.fingerprints(recipe)
    commits = None if run is None else run.record.get("commits")
    if commits is None:
        commits = current().from_first(lambda: hub_commits(recipe.data.all_sources, offline=arguments.offline))
    words = None if run is None else run.record.get(WORDS)
    if words is None:
        opened = partial(open_text, recipe, offline=arguments.offline, commits=commits, progress=progress)
        words = current().from_first(lambda: _words_of(recipe, opened, progress))
    if words is not None:
        check_words(recipe.data, words)
    with current().in_turn():
        shards = open_shards(
            recipe, cache=arguments.cache, offline=arguments.offline, progress=progress, commits=commits
        )
    compare_ranks(recipe, {"data": shards.fingerprint, **models})
    if run is None:
        fingerprints = {
            "data": shards.fingerprint,
            "tokenizer": load_tokenizer(shards.directory).fingerprint,
            **models,
        }
        identity = identity_of(arguments, recipe, fingerprints)
        if finished := finished_of(arguments, recipe, identity):
            return finished
        run = new_run(arguments.runs_root, identity, arguments.run_dir)
    require_unchanged(run, {"data": shards.fingerprint, **models})
    run = own_run(run)

    def trainer(run: RunDirectory = run) -> Pretrainer:
        run.update(
            shards=str(shards.directory.resolve()),
            shards_manifest_sha256=sha256_of(shards.directory / MANIFEST),
            commits=commits,
            **({} if words is None else {WORDS: words}),
        )
        return arguments.trainer(recipe, shards, run)

    return train_run(
        run,
        trainer,
        command=arguments.command,
        progress=progress,
        on_start=on_start,
        deadline=deadline_after(arguments.max_minutes),
        timeout_seconds=recipe.engine.rank_timeout_seconds,
    )


def open_shards(
    recipe: Recipe, *, cache: Path, offline: bool, progress: Progress, commits: Mapping[str, str] | None = None
) -> TokenShards:
    """The recipe's corpus as shards: given ones, or those of its text from the cache, created if missing.

    Args:
        commits: of the Hub's data sets, instead of the newest ones.
    """
    if recipe.data.is_tokenised:
        directory = shards_directory(recipe.data.sources[0], cache=cache, offline=offline, progress=progress)
        shards = TokenShards.open(directory, verify=True)
        shards.name = recipe.data.sources[0]
        return shards
    corpus = open_text(recipe, offline=offline, commits=commits, progress=progress)
    engine = recipe.engine
    shards = prepare_shards(
        corpus,
        recipe.tokenizer,
        None,
        cache=cache,
        workers=engine.jobs if engine.jobs > 1 else None,
        executor=engine,
        offline=offline,
        progress=progress,
    )
    shards.name = _named(corpus.sources)  # the directory is one in the cache, which the user does not know
    return shards


def _named(sources: Sequence[str]) -> str:
    """The sources of a text in messages."""
    more = f" and {len(sources) - _MOST_NAMED} more" if len(sources) > _MOST_NAMED else ""
    return f"{', '.join(sources[:_MOST_NAMED])}{more}"


def open_text(
    recipe: Recipe,
    *,
    offline: bool,
    commits: Mapping[str, str] | None = None,
    progress: Progress = silent_progress,
) -> Corpus:
    """The recipe's text."""
    data = recipe.data
    if data.languages:
        return open_languages(data, offline=offline, commits=commits, progress=progress)
    return open_corpus(data.sources, data.reading, offline=offline, commits=commits, progress=progress)


def _words_of(recipe: Recipe, opened: Callable[[], Corpus], progress: Progress) -> int | None:
    """Words of the text if the recipe depends on them; warns of files that it does not expect."""
    data, expected = recipe.data, recipe.engine.expected_files
    counts = needs_words(data, recipe.engine)
    if data.is_tokenised or not (counts or expected):
        return None
    corpus = opened()
    warn_of_unexpected_files(expected, corpus, sources=data.sources, name=recipe.name)
    return count_words(corpus, progress) if counts else None
