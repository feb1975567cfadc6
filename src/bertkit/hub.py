"""Access to the Hugging Face Hub: when the network may be used, and what its client's errors mean.

Protocol and cache are those of `huggingface_hub`: cached files are not fetched again, an interrupted fetch continues,
and HF_ENDPOINT, HF_HUB_OFFLINE and HF_TOKEN have their usual meaning. The client is imported only where needed, since
the import takes a third of a second.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Literal

from bertkit.errors import DataError, first_line

PINNED = "BERTKIT_HUB_COMMITS"
"""Environment variable with commits to read instead of the newest, as from `pinning`; for a run that is repeated."""

_model_commits: dict[str, str] = {}
_pinned_models: dict[str, str] = {}
_task_commits: dict[str, str] = {}
_pinned_datasets: dict[str, str] = {}


def is_offline(offline: bool = False) -> bool:
    """Whether the network may not be used, because of `--offline` or the environment."""
    return offline or os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on")


def hub_errors() -> tuple[type[Exception], ...]:
    """The client's exceptions for failed requests: refusals, wrong names and network failures."""
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    # Refusals derive from OSError and from the errors of the HTTP library, which differs between releases; if the
    # network fails, that library's own errors are raised.
    return (*HfHubHTTPError.__bases__, HFValidationError)


def refusal(error: BaseException, what: str) -> str:
    """Why the Hub's client failed, and what to do.

    Args:
        error: one of `hub_errors`.
        what: what was requested: model, tokenizer, data set.
    """
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    if isinstance(error, LocalEntryNotFoundError):
        return "not in the local Hub cache while the Hub cannot be reached; go online once"
    if isinstance(error, HFValidationError):
        return f"not a valid name for a {what} on the Hub: {first_line(error)}"
    if isinstance(error, GatedRepoError):
        return (
            f"access to this {what} on the Hub requires accepting its terms; accept them on its page and set HF_TOKEN"
        )
    if isinstance(error, RevisionNotFoundError):
        return f"this {what} on the Hub has no branch, tag or commit with this name"
    if isinstance(error, RepositoryNotFoundError):
        return f"the Hub has no {what} with this name; check the name, and set HF_TOKEN if the {what} is private"
    return f"cannot be fetched from the Hub: {first_line(error)}; run again to continue"


def pinning(*, datasets: Mapping[str, str], models: Mapping[str, str]) -> dict[str, str]:
    """The environment variable that makes a process read these commits, each by the name and branch asked for."""
    return {PINNED: json.dumps({"datasets": dict(datasets), "models": dict(models)})}


def pin_models(commits: Mapping[str, str]) -> None:
    """Make this process read these commits of models, each by the name and branch asked for."""
    _pinned_models.update(commits)


def pin_datasets(commits: Mapping[str, str]) -> None:
    """Make this process read these commits of data sets, each by the name and branch asked for."""
    _pinned_datasets.update(commits)


def pinned_dataset(repository: str) -> str | None:
    """The commit of a data set that this process was made to read; None: the newest."""
    return _pinned_datasets.get(repository) or _pinned("datasets", repository)


def _pinned(kind: Literal["datasets", "models"], repository: str) -> str | None:
    commits: dict[str, dict[str, str]] = json.loads(os.environ.get(PINNED) or "{}")
    return commits.get(kind, {}).get(repository)


def model_revision(repository: str) -> tuple[str, str | None]:
    """The name and the revision of a model given as `ORG/NAME` or `ORG/NAME@REVISION`; None: the newest."""
    name, _, branch = repository.partition("@")
    return name, _pinned_models.get(repository) or _pinned("models", repository) or branch or None


def note_model(repository: str, snapshot: Path) -> None:
    """Note the commit of a model that was fetched: the name of its directory in the Hub's cache."""
    if re.fullmatch(r"[0-9a-f]{40}", snapshot.name):
        _model_commits.setdefault(repository, snapshot.name)


def model_commits() -> dict[str, str]:
    """The commits of the Hub's models that this process has read, by the name and branch asked for."""
    return dict(_model_commits)


def note_task(repository: str, commit: str) -> None:
    """Note the commit of a data set of a task that is read."""
    _task_commits.setdefault(repository, commit)


def task_commits() -> dict[str, str]:
    """The commits of the Hub's tasks that this process has read, by the name and branch asked for."""
    return dict(_task_commits)


def dataset_commit(repository: str, *, offline: bool = False) -> str:
    """The commit of a data set: the pinned one, else the current one, which stays the same for the whole process.

    Args:
        repository: `ORG/NAME` or `ORG/NAME@REVISION`; a commit hash is returned unchecked.
        offline: use no network, but the last known commit in the cache.

    Raises:
        DataError: there is no such data set, or the Hub cannot be reached.
    """
    return pinned_dataset(repository) or _current_commit(repository, offline=offline)


@cache
def _current_commit(repository: str, *, offline: bool) -> str:
    from huggingface_hub import HfApi, hf_hub_download, snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError, RemoteEntryNotFoundError

    name, _, branch = repository.partition("@")
    if re.fullmatch(r"[0-9a-f]{40}", branch):
        return branch
    revision = branch or None
    card = "README.md"
    try:
        try:
            # One small file, because the client records in its cache which commit it came from.
            found = hf_hub_download(
                name, card, repo_type="dataset", revision=revision, local_files_only=is_offline(offline)
            )
        except RemoteEntryNotFoundError:
            return str(HfApi().dataset_info(name, revision=revision).sha)
        except LocalEntryNotFoundError:  # a data set without a card has other files in the cache
            return Path(
                snapshot_download(
                    name, repo_type="dataset", revision=revision, allow_patterns=card, local_files_only=True
                )
            ).name
    except hub_errors() as error:
        raise DataError(f"hub:{repository}: {refusal(error, 'data set')}") from error
    return Path(found).parent.name


@contextmanager
def without_network(offline: bool = True) -> Iterator[None]:
    """Restrict `datasets` and the Hub's client to their caches, if `offline`; both read the environment only on
    import."""
    import datasets
    import huggingface_hub.constants

    settings = ((datasets.config, "HF_HUB_OFFLINE"), (huggingface_hub.constants, "HF_HUB_OFFLINE"))
    before = [getattr(module, name) for module, name in settings]
    try:
        for module, name in settings:
            setattr(module, name, offline or getattr(module, name))
        yield
    finally:
        for (module, name), value in zip(settings, before, strict=True):
            setattr(module, name, value)
