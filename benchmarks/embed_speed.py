"""Sentences per second of bertkit's embeddings and of sentence-transformers', on the same real sentences.

    bertkit export MODEL --format int8 --to INT8
    bertkit export MODEL --format int8 --calibrate TEXT --to CALIBRATED
    python -m benchmarks.embed_speed --model MODEL --text wiki.txt [--lengths 16 64 256 --plot speed.svg] \
        [--int8 INT8] [--calibrated CALIBRATED]

The sides encode the same sentences one after the other, round by round, so that a drift of the machine affects all of
them. The result is the median ratio to sentence-transformers' default (fp32, batches of 32), in wall time and in
processor time; on a busy machine only the latter is meaningful. Every side's vectors are compared with the default's by
their cosine. `--lengths` times texts of one length each, in tokens.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from bertkit.errors import first_line

Encode = Callable[[Sequence[str]], Any]


def sentences_of(path: Path, count: int) -> list[str]:
    """The first sentences of a text of paragraphs, without headings."""
    found: list[str] = []
    with path.open(encoding="utf-8") as file:
        for line in file:
            if line.strip() and not line.startswith(" ="):
                found += [each for each in re.split(r"(?<=[.!?]) +(?=[A-Z])", line.strip()) if len(each) > 20]
            if len(found) >= count:
                break
    return found[:count]


def sides(model: str, names: Sequence[str], own: Mapping[str, str]) -> dict[str, Encode]:
    """The named ways to encode, ready for use; `own` contains the directories of bertkit's int8 models by name."""
    import torch
    from sentence_transformers import SentenceTransformer

    import bertkit

    def peer(**more: Any) -> Encode:
        oracle = SentenceTransformer(model, device="cpu", **more)
        return lambda texts: oracle.encode(list(texts), convert_to_tensor=True).float().numpy()

    def of_directory(directory: str) -> Encode:
        return bertkit.load(directory, device="cpu", precision="auto").encode

    makers: dict[str, Callable[[], Encode]] = {
        "st-fp32": lambda: peer(),
        "st-bf16": lambda: peer(model_kwargs={"torch_dtype": torch.bfloat16}),
        "st-onnx-int8": lambda: peer(backend="onnx", model_kwargs={"file_name": "onnx/model_qint8_avx512_vnni.onnx"}),
        "st-openvino-int8": lambda: peer(
            backend="openvino", model_kwargs={"file_name": "openvino/openvino_model_qint8_quantized.xml"}
        ),
        "bertkit-fp32": lambda: bertkit.load(model, device="cpu").encode,
        "bertkit-bf16": lambda: bertkit.load(model, device="cpu", precision="bf16").encode,
    }
    for name, directory in own.items():
        makers[name] = partial(of_directory, directory)
    found = {}
    for name in names:
        try:
            found[name] = makers[name]()
            found[name](["a sentence to begin with"] * 3)
        except Exception as error:  # an optional backend that is not installed or cannot read the model
            found.pop(name, None)
            print(json.dumps({"side": name, "left_out": f"{type(error).__name__}: {first_line(error)}"}))
    return found


def timed(encode: Encode, texts: Sequence[str]) -> tuple[float, float, Any]:
    """Wall time, processor time, and the vectors."""
    wall, processor = time.perf_counter(), time.process_time()
    vectors = encode(texts)
    return time.perf_counter() - wall, time.process_time() - processor, vectors


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--sentences", type=int, default=5000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--lengths", type=int, nargs="*", default=[])
    parser.add_argument(
        "--sides",
        nargs="*",
        default=["st-fp32", "st-bf16", "st-onnx-int8", "st-openvino-int8", "bertkit-fp32", "bertkit-bf16"],
    )
    parser.add_argument("--int8", help="the model in bertkit's int8; one more side")
    parser.add_argument("--calibrated", help="the same with ranges measured on a text; one more side")
    parser.add_argument("--plot", type=Path, help="figure of sentences a second by length")
    arguments = parser.parse_args()
    import torch

    torch.set_num_threads(arguments.threads)
    given = {"bertkit-int8": arguments.int8, "bertkit-int8-calibrated": arguments.calibrated}
    own = {name: directory for name, directory in given.items() if directory}
    ready = sides(arguments.model, [*arguments.sides, *own], own)
    base = next(iter(ready))
    texts = sentences_of(arguments.text, arguments.sentences)
    _compare("sentences", ready, base, texts, arguments.rounds)
    words = " ".join(texts).split()
    by_length: dict[int, dict[str, float]] = {}
    for length in arguments.lengths:
        # About this many tokens; the same texts for every side.
        count = max(16, 20_000 // length)
        size = max(1, round(length * 0.75))
        cut = [" ".join(words[(n * size) % len(words) :][:size]) for n in range(count)]
        by_length[length] = _compare(f"length {length}", ready, base, cut, arguments.rounds)
    if arguments.plot is not None:
        _draw(by_length, arguments.plot)


def _compare(what: str, ready: dict[str, Encode], base: str, texts: Sequence[str], rounds: int) -> dict[str, float]:
    """Print a line per side; returns texts per second."""
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in ready}
    vectors: dict[str, Any] = {}
    for _ in range(rounds):
        for name, encode in ready.items():
            wall, processor, vectors[name] = timed(encode, texts)
            seconds[name].append((wall, processor))
    for name, taken in seconds.items():
        ratios = [(b[0] / a[0], b[1] / a[1]) for a, b in zip(taken, seconds[base], strict=True)]
        a, b = vectors[name].astype(float), vectors[base].astype(float)
        cosine = (a * b).sum(1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)
        row = {
            "what": what,
            "side": name,
            "texts": len(texts),
            "per_second": round(len(texts) / statistics.median(each[0] for each in taken), 1),
            "per_processor_second": round(len(texts) / statistics.median(each[1] for each in taken), 1),
            "wall_ratio": round(statistics.median(each[0] for each in ratios), 2),
            "processor_ratio": round(statistics.median(each[1] for each in ratios), 2),
            "least_cosine": round(float(cosine.min()), 6),
        }
        print(json.dumps(row), flush=True)
    return {name: len(texts) / statistics.median(each[0] for each in taken) for name, taken in seconds.items()}


def _draw(by_length: dict[int, dict[str, float]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.5, 3.6), layout="constrained")
    axes = figure.subplots()
    for number, name in enumerate(next(iter(by_length.values()))):
        speeds = [speed[name] for speed in by_length.values()]
        style = "-" if name.startswith("bertkit") else "--"
        axes.plot(list(by_length), speeds, style, marker="os^vDPX"[number % 7], markersize=4, label=name)
    axes.set(xscale="log", yscale="log", xlabel="length (tokens, about)", ylabel="sentences a second")
    axes.set_xticks(list(by_length), [str(length) for length in by_length], minor=False)
    axes.minorticks_off()
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize="small")
    figure.savefig(path)


if __name__ == "__main__":
    main()
