"""Access to the Hugging Face Hub: when the network may be used, and what its client's errors mean.

Protocol and cache are those of `huggingface_hub`: cached files are not fetched again, an interrupted fetch continues,
and HF_ENDPOINT, HF_HUB_OFFLINE and HF_TOKEN have their usual meaning. The client is imported only where needed, since
the import takes a third of a second.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from bertkit.errors import DataError, first_line


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


@cache
def dataset_commit(repository: str, *, offline: bool = False) -> str:
    """The current commit of a data set; it stays the same for the whole process.

    Args:
        repository: `ORG/NAME` or `ORG/NAME@REVISION`; a commit hash is returned unchecked.
        offline: use no network, but the last known commit in the cache.

    Raises:
        DataError: there is no such data set, or the Hub cannot be reached.
    """
    from huggingface_hub import HfApi, hf_hub_download
    from huggingface_hub.errors import RemoteEntryNotFoundError

    name, _, branch = repository.partition("@")
    if re.fullmatch(r"[0-9a-f]{40}", branch):
        return branch
    revision = branch or None
    try:
        try:
            # One small file, because the client records in its cache which commit it came from.
            card = hf_hub_download(
                name, "README.md", repo_type="dataset", revision=revision, local_files_only=is_offline(offline)
            )
        except RemoteEntryNotFoundError:
            return str(HfApi().dataset_info(name, revision=revision).sha)
    except hub_errors() as error:
        raise DataError(f"hub:{repository}: {refusal(error, 'data set')}") from error
    return Path(card).parent.name


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
