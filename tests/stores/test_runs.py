"""Runs on a store are complete at any moment, and another machine resumes them to the same bits."""

from __future__ import annotations

import errno
import hashlib
import json
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from bertkit.cache import WORKING_COPIES
from bertkit.cli import app
from bertkit.errors import DataError
from bertkit.files import cache_directory
from bertkit.progress import silent_progress
from bertkit.run import uploading
from bertkit.run.checkpoint import checkpoint_errors, checkpoint_name, latest_name, list_checkpoints, save_checkpoint
from bertkit.run.stored import RunLocation, StoredRun
from bertkit.run.verify import verify_run
from bertkit.stores.store import Store
from bertkit.stores.url import StoreUrl
from tests.stores.s3_server import BUCKET, SECRET, S3Server
from tests.tasks.tiny_task import reviews, write_model, write_table
from tests.training.stopping import stopping_at
from tests.training.tiny_run import write_recipe

Command = Callable[..., Any]
PLACE = f"s3://{BUCKET}/runs/tiny"
STEPS = "9"


@pytest.fixture
def pretrain(machine: Path, bertkit: Command) -> Command:
    """`bertkit pretrain` of the tiny recipe, with further arguments."""
    write_recipe(machine)

    def call(*words: str | Path, again: bool = False) -> Any:
        recipe = () if again else ("tiny.yaml", "--data", "text.txt", "--max-steps", STEPS)
        return bertkit("pretrain", *recipe, *words)

    return call


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run, neither stopped nor on a store."""
    directory = tmp_path_factory.mktemp("straight")
    write_recipe(directory)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(directory)
        words = ("tiny.yaml", "--data", "text.txt", "--max-steps", STEPS, "--run-dir", "run", "-q")
        assert app.run(["pretrain", *words]) == 0
    return directory / "run"


def another_machine(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Delete everything except the text and the store."""
    shutil.rmtree(cache_directory())
    monkeypatch.setenv("BERTKIT_CACHE", str(machine / "another-cache"))


def working_copy() -> Path:
    (record,) = (cache_directory() / WORKING_COPIES).glob("*/*/run.json")
    return record.parent


def weights(run: Path) -> str:
    return hashlib.sha256((run / "model" / "model.safetensors").read_bytes()).hexdigest()


def stored(s3: S3Server) -> dict[str, bytes]:
    prefix = "runs/tiny/"
    return {name.removeprefix(prefix): s3.content(name) for name in s3.names() if name.startswith(prefix)}


def stopped_at(step: int, pretrain: Command) -> Any:
    with stopping_at(step):
        return pretrain("--run-dir", PLACE)


def test_a_finished_run_is_on_the_store_as_it_is_here(s3: S3Server, pretrain: Command) -> None:
    done = pretrain("--run-dir", PLACE, "--json")
    assert done.code == 0, done.stderr
    assert json.loads(done.stdout)["run"] == PLACE
    here = working_copy()
    assert here.name == "tiny"
    assert stored(s3) == {name: (here / name).read_bytes() for name in uploading.uploadable(here)}
    assert not verify_run(here).errors
    again = pretrain("--run-dir", PLACE)
    assert (again.code, again.stdout) == (0, f"{PLACE}\n")
    assert "finished already" in again.stderr
    other = pretrain("--run-dir", PLACE, "--seed", "1")
    assert other.code == 2
    assert other.stderr.endswith(f"error: {PLACE}: already contains a run; it is done: name another --run-dir\n")


def test_a_run_that_another_machine_resumes_ends_with_the_same_bits(
    s3: S3Server, straight: Path, machine: Path, pretrain: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped = stopped_at(5, pretrain)
    assert stopped.code == 75, stopped.stderr
    assert stopped.stderr.endswith(f"continue with `bertkit pretrain --resume {PLACE}`\n")
    another_machine(machine, monkeypatch)
    done = pretrain("--resume", PLACE, again=True)
    assert done.code == 0, done.stderr
    assert done.stdout == f"{PLACE}\n"
    assert weights(working_copy()) == weights(straight)
    model = s3.content("runs/tiny/model/model.safetensors")
    assert hashlib.sha256(model).hexdigest() == weights(straight)
    results = json.loads(s3.content("runs/tiny/results.json"))
    assert results["held_out"] == json.loads((straight / "results.json").read_text())["held_out"]
    assert json.loads(s3.content("runs/tiny/run.json"))["status"] == "done"
    steps = [json.loads(line)["step"] for line in s3.content("runs/tiny/metrics.jsonl").splitlines()]
    assert steps == sorted(steps)


def test_the_model_of_a_run_is_used_where_it_is(
    s3: S3Server, machine: Path, pretrain: Command, bertkit: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert pretrain("--run-dir", PLACE).code == 0
    local = bertkit("fill", "the [MASK] reads a list .", "--model", working_copy(), "--json")
    another_machine(machine, monkeypatch)
    for name in (PLACE, f"{PLACE}/model"):
        done = bertkit("fill", "the [MASK] reads a list .", "--model", name, "--json")
        assert (done.code, done.stdout) == (0, local.stdout), done.stderr
    none = bertkit("fill", "the [MASK] reads a list .", "--model", f"s3://{BUCKET}/runs")
    assert (none.code, "no model here" in none.stderr) == (3, True)


def test_shards_on_a_store_are_trained_on(
    s3: S3Server, machine: Path, pretrain: Command, bertkit: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    shards = f"s3://{BUCKET}/shards"
    assert bertkit("tokenize", "text.txt", "--out", shards, "--vocab-size", "300").code == 0
    assert bertkit("tokenize", "text.txt", "--out", machine / "shards", "--vocab-size", "300").code == 0
    for source, run in ((shards, "from-store"), (machine / "shards", "from-disk")):
        done = bertkit("pretrain", "tiny.yaml", "--data", source, "--max-steps", "4", "--run-dir", run)
        assert done.code == 0, done.stderr
    assert weights(machine / "from-store") == weights(machine / "from-disk")
    assert shards in (machine / "from-store" / "recipe.yaml").read_text()


def test_text_that_changes_on_the_store_is_noticed_by_a_resume(
    s3: S3Server, machine: Path, pretrain: Command, bertkit: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    s3.put("text/a.txt", (machine / "text.txt").read_bytes())
    with stopping_at(5):
        words = ("tiny.yaml", "--data", f"s3://{BUCKET}/text", "--max-steps", STEPS, "--run-dir", "run")
        assert bertkit("pretrain", *words).code == 75
    s3.put("text/a.txt", (machine / "text.txt").read_bytes().replace(b"cat", b"dog"))
    done = bertkit("pretrain", "--resume", "run")
    assert done.code == 3
    assert "the data has changed since the run began" in done.stderr


def test_files_that_go_while_they_are_looked_at_do_not_matter(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    run = machine / "run"
    for name in ("model.writing/weights", "checkpoints/latest", "log.txt", ".lock", "a/.b.1.tmp"):
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_text("")
    scan = os.scandir

    def scan_and_lose(path: Any) -> Any:
        if (run / "a").exists():
            (run / "a").rename(machine / "gone")
        return scan(path)

    monkeypatch.setattr(os, "scandir", scan_and_lose)
    assert sorted(uploading.uploadable(run)) == ["checkpoints/latest", "log.txt"]


def test_a_disk_that_fails_while_files_are_looked_for_delays_the_upload(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uploading, "LOOK_SECONDS", 0.001)
    monkeypatch.setattr(uploading, "FIRST_PAUSE_SECONDS", 0.001)
    uploaded, faults = threading.Event(), [OSError(errno.EIO, "Input/output error")]

    class Failing(uploading.Uploader):
        def newest(self) -> tuple[tuple[str, int], ...]:
            if faults:
                raise faults.pop()
            return ()

        def upload(self, counted: Any = None) -> None:
            uploaded.set()

    table = uploading.UploadTable(tmp_path / "uploaded.json", "file:///x")
    upload = uploading.BackgroundUpload(Failing(tmp_path, Store(StoreUrl.parse("file:///x")), table), "x", tmp_path)
    upload.start()
    assert uploaded.wait(5)
    upload.finish(silent_progress)


class Watched:
    """A store that checks its entire contents after every write, as if the process were killed at that moment."""

    def __init__(self, root: Path, patch: pytest.MonkeyPatch) -> None:
        self.root = root
        self.writes: list[str] = []
        self.seen: list[str] = []
        for method in ("put", "put_bytes"):
            whole = getattr(Store, method)
            patch.setattr(Store, method, self._followed(whole, lambda store, content, name: [name]))
        patch.setattr(Store, "remove", self._followed(Store.remove, lambda store, names: [f"-{n}" for n in names]))

    def _followed(self, whole: Callable[..., Any], names: Callable[..., list[str]]) -> Callable[..., None]:
        def call(*arguments: Any) -> None:
            arguments = (arguments[0], *(list(each) if isinstance(each, map) else each for each in arguments[1:]))
            whole(*arguments)
            self.writes += names(*arguments)
            self.look()

        return call

    def look(self) -> None:
        for latest in self.root.rglob("latest"):
            named = latest_name(latest.parent)
            assert named is not None
            assert checkpoint_errors(latest.parent / named) == []
            self.seen.append(named)


def test_latest_names_a_whole_checkpoint_after_every_write(
    machine: Path, pretrain: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        watched = Watched(machine / "store", patch)
        done = pretrain("--run-dir", (machine / "store" / "tiny").as_uri(), "--set", "engine.keep_checkpoints=1")
        assert done.code == 0, done.stderr
    assert watched.seen
    assert watched.writes.index("run.json") > watched.writes.index("recipe.yaml")
    assert not verify_run(machine / "store" / "tiny").errors
    assert not list((machine / "store").rglob(".*.tmp"))


def test_a_checkpoint_of_the_same_step_and_other_content_replaces_the_one_on_the_store(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, place = machine / "run", (machine / "store").as_uri()
    run.mkdir()
    (run / "run.json").write_text("{}")
    table = uploading.UploadTable(machine / "uploaded.json", place)
    uploader = uploading.Uploader(run, Store(StoreUrl.parse(place)), table)
    watched = Watched(machine / "store", monkeypatch)
    for value in (1.0, 2.0, 2.0):
        save_checkpoint(run / "checkpoints", 5, {"w": {"a": torch.full((9,), value)}}, {}, keep=1)
        uploader.upload()
        here, there = (root / "checkpoints" / checkpoint_name(5) for root in (run, machine / "store"))
        assert (there / "w.safetensors").read_bytes() == (here / "w.safetensors").read_bytes()
        assert latest_name(there.parent) == there.name
    count = len(watched.writes)
    uploader.upload()
    assert len(watched.writes) == count  # nothing is new


def test_a_server_that_goes_away_does_not_stop_the_training(
    s3: S3Server, straight: Path, machine: Path, pretrain: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    upload = uploading.Uploader.upload
    passes: list[int] = []

    def upload_once(self: uploading.Uploader, *arguments: Any) -> None:
        upload(self, *arguments)
        passes.append(1)
        s3.stop()

    with monkeypatch.context() as patch:
        patch.setattr(uploading.Uploader, "upload", upload_once)
        failed = pretrain("--run-dir", PLACE)
    assert failed.code == 3
    here = working_copy()
    last = failed.stderr.strip().splitlines()[-1]
    assert "the store cannot be reached" in last
    assert f"all files are in {here}: `--resume {PLACE}` on this machine uploads the rest" in last
    assert "the run continues, and its upload is retried" in failed.stderr
    assert weights(here) == weights(straight)
    assert not verify_run(here).errors
    s3.start()
    s3.client().create_bucket(Bucket=BUCKET)
    done = pretrain("--resume", PLACE, again=True)
    assert (done.code, done.stdout) == (0, f"{PLACE}\n"), done.stderr
    assert stored(s3) == {name: (here / name).read_bytes() for name in uploading.uploadable(here)}


def test_a_full_store_leaves_the_run_here(
    s3: S3Server, pretrain: Command, monkeypatch: pytest.MonkeyPatch, bertkit: Command
) -> None:
    put = Store.put

    def full(store: Store, path: Path, name: str) -> None:
        if name.endswith("optimizer.safetensors"):
            raise DataError(f"{store.url / name}: the store is full, or its quota is used up; free some space there")
        put(store, path, name)

    with monkeypatch.context() as patch:
        patch.setattr(Store, "put", full)
        failed = pretrain("--run-dir", PLACE)
    assert failed.code == 3
    assert "the store is full" in failed.stderr.strip().splitlines()[-1]
    assert "latest" not in {name.rpartition("/")[2] for name in s3.names()}
    copy = working_copy()
    done = pretrain("--resume", copy, again=True)  # the working copy's path stands for its place on the store
    assert (done.code, done.stdout) == (0, f"{PLACE}\n"), done.stderr
    assert json.loads(s3.content("runs/tiny/run.json"))["status"] == "done"


def test_a_stop_that_the_store_does_not_take_is_no_success(
    s3: S3Server, pretrain: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Store, "put", lambda *_: (_ for _ in ()).throw(DataError("the store is full")))
        stopped = stopped_at(5, pretrain)
    assert stopped.code == 3
    assert "at step 5 of 9, checkpoint saved; the store is full" in stopped.stderr.strip().splitlines()[-1]


@pytest.mark.parametrize(
    ("fault", "message"), [("credentials", "access is refused"), ("bucket", "there is no such bucket")]
)
def test_what_cannot_be_written_is_told_before_the_training(
    fault: str, message: str, s3: S3Server, machine: Path, pretrain: Command
) -> None:
    if fault == "credentials":
        s3.refuse_credentials()
    place = PLACE if fault == "credentials" else "s3://elsewhere/run"
    failed = pretrain("--run-dir", place, "-vv")
    assert failed.code == 3
    assert message in failed.stderr
    assert SECRET not in failed.stderr
    assert not list(machine.rglob("run.json"))


def test_a_place_that_is_taken_is_told(
    s3: S3Server, machine: Path, pretrain: Command, bertkit: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert stopped_at(4, pretrain).code == 75
    taken = pretrain("--run-dir", PLACE)
    assert (taken.code, f"continue with `--resume {PLACE}`" in taken.stderr) == (2, True)
    s3.put("notes/x.txt", b"")
    other = pretrain("--run-dir", f"s3://{BUCKET}/notes")
    assert (other.code, "contains other files (x.txt)" in other.stderr) == (2, True)
    none = pretrain("--resume", f"s3://{BUCKET}/none", again=True)
    assert (none.code, "there is no run here" in none.stderr) == (3, True)
    offline = pretrain("--run-dir", f"s3://{BUCKET}/new", "--offline")
    assert (offline.code, "--offline forbids" in offline.stderr) == (3, True)
    local = bertkit("probe", "similarity", "--run-dir", PLACE)
    assert (local.code, "runs of this command are written to a local directory" in local.stderr) == (2, True)


def test_a_run_that_went_on_elsewhere_is_not_written_over(
    s3: S3Server, machine: Path, pretrain: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = machine / "cache"
    assert stopped_at(4, pretrain).code == 75
    monkeypatch.setenv("BERTKIT_CACHE", str(machine / "another-cache"))
    with stopping_at(4):  # more
        assert pretrain("--resume", PLACE, again=True).code == 75
    monkeypatch.setenv("BERTKIT_CACHE", str(first))
    with RunLocation(None, PLACE) as place:
        assert place.resume is not None
        assert latest_name(Path(place.resume) / "checkpoints") == checkpoint_name(8)
        # Meanwhile the other machine writes again.
        s3.put("runs/tiny/run.json", s3.content("runs/tiny/run.json") + b" ")
        with pytest.raises(uploading.TakenOverError, match="another process has written this run in the meantime"):
            place.complete()


def test_a_damaged_checkpoint_on_the_store_is_passed_over(
    s3: S3Server,
    straight: Path,
    machine: Path,
    pretrain: Command,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert stopped_at(5, pretrain).code == 75
    name = f"runs/tiny/checkpoints/{checkpoint_name(5)}/weights.safetensors"
    s3.put(name, s3.content(name)[:-9] + b"?" * 9)
    another_machine(machine, monkeypatch)
    done = pretrain("--resume", PLACE, again=True)
    assert done.code == 0, done.stderr
    assert "was fetched, because" in done.stderr
    assert weights(working_copy()) == weights(straight)


def test_the_intact_checkpoint_stays_on_the_store_while_the_newest_is_damaged(machine: Path) -> None:
    run, place = machine / "tiny", machine / "store" / "tiny"
    url = StoreUrl.parse(place.as_uri())
    for step in (5, 9):
        save_checkpoint(run / "checkpoints", step, {"w": {"a": torch.full((9,), float(step))}}, {}, keep=2)
    (run / "run.json").write_text('{"status": "stopped"}')
    uploading.Uploader(run, Store(url), uploading.UploadTable(machine / "uploaded.json", str(url))).upload()
    damaged = place / "checkpoints" / checkpoint_name(9) / "w.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    fetched = StoredRun(url, cache_directory())
    fetched.open("run")
    for _ in range(2):
        fetched.uploader().finish(silent_progress)
        assert checkpoint_errors(place / "checkpoints" / checkpoint_name(5)) == []
    save_checkpoint(fetched.path / "checkpoints", 7, {"w": {"a": torch.ones(9)}}, {}, keep=2)
    fetched.uploader().finish(silent_progress)
    assert [path.name for path in list_checkpoints(place / "checkpoints")] == [checkpoint_name(5), checkpoint_name(7)]
    assert latest_name(place / "checkpoints") == checkpoint_name(7)


@pytest.fixture
def task(machine: Path) -> tuple[str, ...]:
    """`bertkit finetune` of a tiny model on a table."""
    write_model(machine / "base")
    for split, seed in (("train", 1), ("dev", 2)):
        write_table(machine / f"{split}.csv", reviews(24, seed))
    table = ("--train", "train.csv", "--dev", "dev.csv", "--text", "review", "--label", "stars")
    return ("finetune", *table, "--model", "base", "--set", "lr=6e-3", "--set", "engine.device=cpu", "--max-steps", "3")


def test_a_suite_of_runs_is_on_the_store_with_its_chosen_model(
    s3: S3Server, machine: Path, task: tuple[str, ...], bertkit: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert bertkit(*task, "--seeds", "0-1", "--run-dir", machine / "local").code == 0
    done = bertkit(*task, "--seeds", "0-1", "--run-dir", PLACE)
    assert (done.code, done.stdout) == (0, f"{PLACE}\n"), done.stderr
    content = s3.content("runs/tiny/model/model.safetensors")
    assert content == (machine / "local" / "model" / "model.safetensors").read_bytes()
    another_machine(machine, monkeypatch)
    again = bertkit(*task, "--seeds", "0-1", "--run-dir", PLACE)
    assert (again.code, again.stdout) == (0, f"{PLACE}\n"), again.stderr
    assert "finished already" in again.stderr  # its runs are found where they are now
    predicted = bertkit("predict", "dev.csv", "--model", PLACE, "--text", "review")
    assert predicted.code == 0, predicted.stderr
