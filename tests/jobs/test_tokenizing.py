"""Workers that tokenise and embed text produce the bytes of one process."""

from __future__ import annotations

from pathlib import Path

import pytest

from bertkit.data import tokenizing
from bertkit.data.prepare import prepare_shards
from bertkit.data.shards import TokenShards
from bertkit.inference.embed import InputText, embed_to_file
from bertkit.inference.embed_settings import EmbedSettings
from bertkit.inference.embedder import Embedder
from bertkit.jobs.settings import ExecutorSettings
from bertkit.text import corpus
from bertkit.text.sources import open_corpus
from bertkit.training.config import EngineConfig
from bertkit.training.engine import resolve_engine
from tests.data.preparing import CONFIG
from tests.data.test_shards import same_files
from tests.tasks.tiny_task import write_model
from tests.text.corpora import english


def shards(source: Path, out: Path, executor: ExecutorSettings | None) -> TokenShards:
    cache = out.parent / f"{out.name}-cache"
    corpus = open_corpus([str(source)], cache=cache)
    return prepare_shards(corpus, CONFIG, out, cache=cache, workers=1, executor=executor, shard_tokens=3_000)


@pytest.mark.slow
def test_a_ray_cluster_writes_the_shards_of_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray", reason="the extra `ray` is not installed")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(corpus, "BLOCK_CHARACTERS", 4_000)
    monkeypatch.setattr(tokenizing, "BLOCKS_OF_A_JOB", 2)
    source = tmp_path / "text.txt"
    source.write_text("\n\n".join(english(900)), encoding="utf-8")
    shards(source, tmp_path / "alone", None)
    shards(source, tmp_path / "ray", ExecutorSettings(executor="ray", jobs=2))
    assert len(TokenShards.open(tmp_path / "ray", verify=True).manifest["shards"]) > 2
    assert same_files(tmp_path / "alone", tmp_path / "ray")


def test_vectors_of_several_processes_are_those_of_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bertkit.inference.embed.LARGEST_BLOCK", 3)
    engine = resolve_engine(EngineConfig(device="cpu", precision="fp32"))
    embedder = Embedder.load(write_model(tmp_path / "model"), engine)
    texts = [InputText(str(n), text, f"line {n}") for n, text in enumerate([*english(7), "", "word " * 50])]
    for name, executor in (("alone", None), ("together", ExecutorSettings(jobs=2))):
        out = tmp_path / f"{name}.npy"
        embed_to_file(embedder, iter(texts), out, EmbedSettings(), source=None, executor=executor)
    assert (tmp_path / "together.npy").read_bytes() == (tmp_path / "alone.npy").read_bytes()
