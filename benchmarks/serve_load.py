"""`bertkit serve` under load, compared with a plain FastAPI and sentence-transformers server of the same model.

N clients, each with one persistent connection, request the vector of one real sentence after another, each as soon as
the previous response has arrived. The servers are separate processes that run alternately, each after an uncounted
warm-up. Reported: responses per second, latency in milliseconds, the server's processor time per response (least
affected by other work on the machine), resident memory over time, and the largest difference between the two servers'
vectors. Then bertkit's server gets SIGTERM under the same load, and the outcome of each sent request is counted.

    python -m benchmarks.serve_load --seconds 60
    python -m benchmarks.serve_load --seconds 600 --rounds 1      # memory over ten minutes

The plain server follows the libraries' documentation: a `def` endpoint, which FastAPI runs in its threads, that calls
`model.encode` on the request. With `--peer locked` one thread at a time encodes. The clients are a third process, which
uses the same share of the processor with both servers.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from benchmarks.finetune_peer import minilm

from bertkit.files import cache_directory
from bertkit.text.pydocs import harvest
from bertkit.text.sentences import split_sentences

PEER = """
import sys, threading, uvicorn
from fastapi import FastAPI
from pydantic import BaseModel
from sentence_transformers import SentenceTransformer

model = SentenceTransformer(sys.argv[1], device="cpu")
app = FastAPI()
lock = threading.Lock()

class Body(BaseModel):
    model: str
    input: list[str]

@app.post("/v1/embeddings")
def embeddings(body: Body):
    if sys.argv[3] == "locked":
        with lock:
            vectors = model.encode(body.input)
    else:
        vectors = model.encode(body.input)
    return {"data": [{"index": n, "embedding": v} for n, v in enumerate(vectors.tolist())]}

uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[2]), log_level="warning", access_log=False)
"""
"""The plain server: model directory, port, `threads` or `locked`."""
NAME = "minilm"
START_SECONDS = 300
COMPARED = 32


@dataclass
class Load:
    """The clients' measurements.

    Attributes:
        milliseconds: latency of each response.
        lost: outcomes of requests without a response or with a status other than 200.
        sent: requests that were sent completely.
        memory_mb: resident memory of the server, once per second.
        cpu_seconds: processor time of the server under load.
    """

    milliseconds: list[float] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    sent: int = 0
    memory_mb: list[float] = field(default_factory=list)
    cpu_seconds: float = 0.0


class KeptConnection:
    """A client's connection, with hand-written HTTP so that clients cost little."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.closes = False

    async def open(self) -> None:
        self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port)

    async def post(self, body: bytes) -> tuple[int, bytes]:
        """Status and body of the response."""
        head = (
            "POST /v1/embeddings HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        self._writer.write(head.encode() + body)
        await self._writer.drain()
        answer = (await self._reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
        self.closes = "connection: close" in answer
        (length,) = re.findall(r"content-length: (\d+)", answer)
        return int(answer.split(" ", 2)[1]), await self._reader.readexactly(int(length))

    def close(self) -> None:
        self._writer.close()


def body_of(sentence: str) -> bytes:
    """One sentence with its vector as a list of numbers, which both servers can send."""
    return json.dumps({"model": NAME, "input": [sentence]}).encode()


async def load(port: int, sentences: Sequence[str], clients: int, seconds: float, server: psutil.Process) -> Load:
    """Send requests from all clients for this long, or until the clients are closed if `seconds` is infinite."""
    found, bodies = Load(), [body_of(each) for each in sentences]
    before = sum(server.cpu_times()[:2])
    end = time.monotonic() + seconds

    async def client(number: int) -> None:
        connection = KeptConnection(port)
        await connection.open()
        place = number * 97
        while time.monotonic() < end and not connection.closes:
            started = time.perf_counter()
            found.sent += 1
            try:
                status, _ = await connection.post(bodies[place % len(bodies)])
            except (OSError, EOFError) as error:
                found.lost.append(repr(error))
                return
            if status != 200:
                found.lost.append(f"status {status}")
            else:
                found.milliseconds.append((time.perf_counter() - started) * 1000)
            place += 1
        connection.close()

    async def watch() -> None:
        while True:
            found.memory_mb.append(server.memory_info().rss / 1e6)
            await asyncio.sleep(1)

    watching = asyncio.create_task(watch())
    try:
        await asyncio.gather(*(client(number) for number in range(clients)))
    finally:
        watching.cancel()
    if server.is_running() and server.status() != psutil.STATUS_ZOMBIE:
        found.cpu_seconds = sum(server.cpu_times()[:2]) - before
    return found


@contextmanager
def running(
    side: str, model: Path, peer: str, folder: Path, precision: str
) -> Iterator[tuple[int, subprocess.Popen[bytes]]]:
    """Start one of the two servers and wait until it responds."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    if side == "bertkit":
        command = [sys.executable, "-m", "bertkit", "serve", f"{NAME}={model}", "--port", str(port)]
        command += ["--precision", precision]
    else:
        script = folder / "peer.py"
        script.write_text(PEER, encoding="utf-8")
        command = [sys.executable, str(script), str(model), str(port), peer]
    process = subprocess.Popen(command, env=os.environ | {"HF_HUB_OFFLINE": "1"})
    try:
        end = time.monotonic() + START_SECONDS
        while True:
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                break
            except ConnectionRefusedError:
                if process.poll() is not None or time.monotonic() > end:
                    raise RuntimeError(f"the server of {side} did not start") from None
                time.sleep(0.1)
        yield port, process
    finally:
        process.kill()
        process.wait()


async def vectors(port: int, sentences: Sequence[str]) -> np.ndarray[Any, Any]:
    """Request bodies, one sentence each."""
    connection = KeptConnection(port)
    await connection.open()
    answers = [json.loads((await connection.post(body_of(each)))[1]) for each in sentences]
    connection.close()
    return np.array([each["data"][0]["embedding"] for each in answers])


def real_sentences(path: Path | None, count: int, seed: int) -> list[str]:
    """Sentences of 3 to 60 words from a text or from the documentation of this Python."""
    file = harvest(cache_directory()) if path is None else path
    with file.open(encoding="utf-8") as lines:
        found = [each for line in lines for each in split_sentences(line.strip()) if 3 <= len(each.split()) <= 60]
    generator = np.random.default_rng(seed)
    return [found[number] for number in generator.permutation(len(found))[:count]]


def summary(found: Load, seconds: float) -> dict[str, Any]:
    """Figures of one side's round."""
    p50, p95, p99 = np.percentile(found.milliseconds, [50, 95, 99]).round(1).tolist()
    return {
        "answers_per_second": round(len(found.milliseconds) / seconds, 1),
        "cpu_ms_per_answer": round(1000 * found.cpu_seconds / max(1, len(found.milliseconds)), 2),
        "p50_ms": p50,
        "p95_ms": p95,
        "p99_ms": p99,
        "memory_mb": [round(each) for each in found.memory_mb[:: max(1, len(found.memory_mb) // 10)]],
        "failed": len(found.lost),
    }


def stop_under_load(model: Path, sentences: Sequence[str], clients: int, folder: Path) -> dict[str, Any]:
    """Send SIGTERM in the middle of a load of at least five seconds."""
    with running("bertkit", model, "", folder, "fp32") as (port, process):

        async def run() -> Load:
            asyncio.get_running_loop().call_later(5, process.send_signal, signal.SIGTERM)
            return await load(port, sentences, clients, float("inf"), psutil.Process(process.pid))

        found = asyncio.run(run())
        code = process.wait(120)
    return {"sent": found.sent, "answered": len(found.milliseconds), "lost": found.lost, "exit_code": code}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", type=Path, default=None, help="a directory of sentence-transformers (all-MiniLM-L6-v2)"
    )
    parser.add_argument("--data", type=Path, default=None, help="a text (the documentation of this Python)")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--warm-up", type=float, default=5)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--peer", choices=("threads", "locked"), default="threads")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32", help="of bertkit's vectors")
    given = parser.parse_args()
    model = given.model or minilm()
    sentences = real_sentences(given.data, 5_000, seed=0)
    turns: list[dict[str, Any]] = []
    compared = {}
    with tempfile.TemporaryDirectory() as name:
        for number in range(2 * given.rounds):
            side = ("bertkit", "plain")[number % 2]
            with running(side, model, given.peer, Path(name), given.precision) as (port, process):
                server = psutil.Process(process.pid)
                compared[side] = asyncio.run(vectors(port, sentences[:COMPARED]))
                asyncio.run(load(port, sentences, given.clients, given.warm_up, server))
                found = asyncio.run(load(port, sentences, given.clients, given.seconds, server))
            turns.append({"side": side, **summary(found, given.seconds)})
            print(json.dumps(turns[-1]), file=sys.stderr, flush=True)
        stopped = stop_under_load(model, sentences, given.clients, Path(name))
    difference = float(np.abs(compared["bertkit"] - compared["plain"]).max())
    document = {
        "clients": given.clients,
        "seconds": given.seconds,
        "precision": given.precision,
        "words_per_sentence": round(float(np.mean([len(each.split()) for each in sentences])), 1),
        "largest_difference": difference,
        "turns": turns,
        "sigterm": stopped,
    }
    print(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()
