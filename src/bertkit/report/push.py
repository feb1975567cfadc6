"""Upload a finished model to the Hugging Face Hub, with a model card: `bertkit push`.

Contract: `bertkit push`. Protocol and login are those of `huggingface_hub`. All files are uploaded in one commit, so
that the repository has all of them or none. An existing card is kept, because someone may have written it by hand.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from bertkit.errors import CheckError, DataError, UsageError, first_line
from bertkit.files import sha256_of
from bertkit.hub import hub_errors, is_offline
from bertkit.models.files.model_files import encoder_directory, find_model, find_weights
from bertkit.report.card import model_card
from bertkit.report.gather import ReportedRun
from bertkit.run.directory import RECORD, RunDirectory
from bertkit.run.find import run_of_suite
from bertkit.run.verify import model_errors

log = logging.getLogger(__name__)

CARD = "README.md"
_PRIVATE = frozenset({".git", ".cache"})
"""Folders that a clone or a download of `huggingface_hub` has beside a model, and that no repository takes."""
_LICENSES = frozenset(
    {
        *("afl-3.0", "agpl-3.0", "apache-2.0", "artistic-2.0", "bigcode-openrail-m", "bigscience-bloom-rail-1.0"),
        *("bigscience-openrail-m", "bsd", "bsd-2-clause", "bsd-3-clause", "bsd-3-clause-clear", "bsl-1.0", "c-uda"),
        *("cc", "cc-by-2.0", "cc-by-2.5", "cc-by-3.0", "cc-by-4.0", "cc-by-nc-2.0", "cc-by-nc-3.0", "cc-by-nc-4.0"),
        *("cc-by-nc-nd-3.0", "cc-by-nc-nd-4.0", "cc-by-nc-sa-2.0", "cc-by-nc-sa-3.0", "cc-by-nc-sa-4.0"),
        *("cc-by-nd-4.0", "cc-by-sa-3.0", "cc-by-sa-4.0", "cc0-1.0", "cdla-permissive-1.0", "cdla-permissive-2.0"),
        *("cdla-sharing-1.0", "creativeml-openrail-m", "ecl-2.0", "epl-1.0", "epl-2.0", "etalab-2.0", "eupl-1.1"),
        *("eupl-1.2", "gemma", "gfdl", "gpl", "gpl-2.0", "gpl-3.0", "isc", "lgpl", "lgpl-2.1", "lgpl-3.0", "lgpl-lr"),
        *("llama2", "llama3", "llama3.1", "llama3.2", "llama3.3", "lppl-1.3c", "mit", "mpl-2.0", "ms-pl", "ncsa"),
        *("odbl", "odc-by", "ofl-1.1", "openrail", "openrail++", "osl-3.0", "other", "pddl", "postgresql", "unknown"),
        *("unlicense", "wtfpl", "zlib"),
    }
)
"""Identifiers from the Hub's list (huggingface.co/docs/hub/repositories-licenses), to which new ones are added."""


@dataclass(frozen=True)
class Pushed:
    """What was uploaded, or would be.

    Attributes:
        files: size in bytes by name in the repository; includes the card if it is written.
        card: the card's text; None if the repository keeps its own.
        url: URL of the commit; None if nothing was uploaded.
    """

    files: dict[str, int]
    card: str | None
    url: str | None


def push(
    model: str,
    repository: str,
    *,
    run: RunDirectory | None = None,
    private: bool = False,
    license_id: str | None = None,
    revision: str | None = None,
    new_card: bool = False,
    dry_run: bool = False,
    offline: bool = False,
) -> Pushed:
    """Upload a model.

    Args:
        model: a model or a run directory.
        repository: ORG/NAME; created if it does not exist.
        run: the run that produced the model, for the card.
        private: whether a new repository is private.
        license_id: licence for the card, from the Hub's list; in capitals as well.
        revision: a branch, created if it does not exist; None for main.
        new_card: replace the card that the repository has.
        dry_run: upload nothing.
        offline: do not use the network; only a dry run is possible.

    Raises:
        UsageError: the repository's name is invalid, the network is not allowed, or the Hub does not accept the card's
            metadata.
        CheckError: the run's model has changed since it was written.
        DataError: there is no model, it has no weights, or the Hub refuses.
    """
    if is_offline(offline) and not dry_run:
        raise UsageError("push: needs the network; leave --offline (HF_HUB_OFFLINE) out, or give --dry-run")
    if repository.count("/") != 1 or not all(repository.split("/")):
        raise UsageError(f"{repository}: give the repository as ORG/NAME, or with your user name instead of ORG")
    license_id = None if license_id is None else license_id.lower()
    if license_id is not None and license_id not in _LICENSES:
        near = get_close_matches(license_id, sorted(_LICENSES), n=1)
        log.warning(
            "--license %s: not a known identifier of the Hub, which may refuse it%s; for another licence, give `other`",
            *(license_id, f"; did you mean {near[0]}?" if near else ""),
        )
    if run is not None and (errors := model_errors(run)):
        raise CheckError(f"{run.path}: its model has changed since the run wrote it: {'; '.join(errors)}")
    directory = find_model(str(run.path) if run is not None else model, offline=True)
    if not any(directory.rglob("*.onnx")):
        find_weights(encoder_directory(directory))
    found = {path.relative_to(directory): path for path in sorted(directory.rglob("*")) if path.is_file()}
    paths = {name.as_posix(): path for name, path in found.items() if not _PRIVATE.intersection(name.parts)}
    reported = None if run is None else ReportedRun.of(run)
    inner = None if run is None else _chosen(run)
    chosen = None if inner is None else ReportedRun.of(inner)
    card = None if CARD in paths else model_card(directory, repository, reported, chosen=chosen, license_id=license_id)
    if card is None and license_id is not None:
        log.warning("%s has a %s, which is uploaded as it is: --license has no effect", directory, CARD)
    if dry_run:
        return Pushed(_sizes(paths, card), card, None)
    try:
        return _upload(paths, repository, card, private=private, revision=revision, new_card=new_card)
    except hub_errors() as error:
        raise DataError(f"{repository}: {_why(error)}") from error
    except ValueError as error:  # from the client, before it sends any file
        raise UsageError(f"{repository}: nothing was uploaded: {' '.join(str(error).split())}") from error


def run_of_model(path: Path) -> RunDirectory | None:
    """The run at a path, or the run that a model directory belongs to; None if there is none."""
    for place in (path, path.parent):
        if (place / RECORD).is_file():
            return RunDirectory.open(place)
    return None


def _chosen(run: RunDirectory) -> RunDirectory | None:
    """The run of a suite whose model is the suite's; None for a single run."""
    chosen = (run.results or {}).get("chosen")
    path = chosen.get("run") if isinstance(chosen, dict) else None
    place = None if path is None else run_of_suite(run.path, str(path))
    return RunDirectory.open(place) if place is not None and (place / RECORD).is_file() else None


def _sizes(paths: dict[str, Path], card: str | None) -> dict[str, int]:
    sizes = {name: path.stat().st_size for name, path in paths.items()}
    return sizes if card is None else {CARD: len(card.encode()), **sizes}


def _upload(
    paths: dict[str, Path], repository: str, card: str | None, *, private: bool, revision: str | None, new_card: bool
) -> Pushed:
    from huggingface_hub import CommitOperationAdd, HfApi

    api = HfApi()
    api.create_repo(repository, private=private, exist_ok=True)
    if revision is not None:
        api.create_branch(repository, branch=revision, exist_ok=True)
    if not new_card and api.file_exists(repository, CARD, revision=revision):
        log.warning("%s keeps the %s that it has; --new-card replaces it", repository, CARD)
        card = None
        paths = {name: path for name, path in paths.items() if name != CARD}
    operations = [CommitOperationAdd(name, str(path)) for name, path in paths.items()]
    if card is not None:
        operations.append(CommitOperationAdd(CARD, card.encode()))
    weights = next((name for name in paths if name.endswith(".safetensors")), None)
    digest = "" if weights is None else f": {weights} {sha256_of(paths[weights])[:16]}"
    done = api.create_commit(repository, operations, commit_message=f"Upload by bertkit{digest}", revision=revision)
    return Pushed(_sizes(paths, card), card, done.commit_url)


def _why(error: BaseException) -> str:
    """Why the Hub refused, and how to fix it."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status == 401:
        return "not logged in to the Hub; run `hf auth login`, or set HF_TOKEN to a token with write access"
    if status == 403:
        return "your token has no write access there; use one that has, and an ORG that you belong to"
    return f"could not be uploaded: {first_line(error)}; run the command again, uploaded files are not sent twice"
