"""Sentences a second at batch 1: floats and int8, bertkit and ONNX Runtime, side by side in one process.

    python benchmarks/int8_speed.py RUN --threads 1 --lengths 16 32 64 128
    python benchmarks/int8_speed.py RUN --threads 1 --texts sentences.txt

RUN is any model or run directory. It is exported as int8 and as both graphs into a temporary directory; then the four
take turns, one sentence at a time, and what is printed is the median over the rounds of milliseconds a sentence and of
the ratio to bertkit's floats in the same round, with the 10th and 90th percentile. Token ids are drawn at random, or
are those of the texts, one a line. Another process on the same cores spoils the figures: run it alone.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import onnxruntime
import torch

from bertkit.data.batch import PackedBatch
from bertkit.jobs.exporting.export import export_model
from bertkit.jobs.exporting.onnx_graph import GRAPH_FILE, INT8_GRAPH_FILE
from bertkit.models.headed import HeadedModel
from bertkit.models.hub import find_model, load_model
from bertkit.text.tokenizer import Tokenizer

Answer = Callable[[list[int]], object]


def of_bertkit(directory: Path) -> Answer:
    model, _ = load_model(directory)

    def answer(ids: list[int]) -> object:
        with torch.inference_mode():
            return asked(model, PackedBatch.from_ids([ids]))

    return answer


def asked(model: HeadedModel, batch: PackedBatch) -> torch.Tensor:
    """The first head's logits, or all states where the model has no head."""
    if not model.head_names:
        states: torch.Tensor = model(batch)
        return states
    head = model.head_names[0]
    return model.logits(head, model.states(head, batch), batch)


def of_graph(path: Path, threads: int) -> Answer:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    names = [entry.name for entry in session.get_inputs()]
    outputs = [entry.name for entry in session.get_outputs()]
    wanted = [name for name in outputs if name not in ("hidden", "pooler")][:1] or outputs[:1]

    def answer(ids: list[int]) -> object:
        row = np.array([ids], dtype=np.int64)
        given = {"input_ids": row, "attention_mask": np.ones_like(row), "token_type_ids": np.zeros_like(row)}
        return session.run(wanted, {name: given[name] for name in names})

    return answer


def compare(answers: dict[str, Answer], sentences: Sequence[list[int]], rounds: int) -> None:
    """Print milliseconds a sentence, and the ratio to the first."""
    seconds: dict[str, list[float]] = {name: [] for name in answers}
    for number in range(rounds + 2):
        for name, answer in answers.items():
            started = time.perf_counter()
            for ids in sentences:
                answer(ids)
            if number >= 2:  # the first rounds pack weights and fill caches
                seconds[name].append((time.perf_counter() - started) / len(sentences))
    first = np.array(next(iter(seconds.values())))
    for name, found in seconds.items():
        ratio = np.percentile(first / np.array(found), [10, 50, 90])
        print(
            f"  {name:18s} {1e3 * float(np.median(found)):7.2f} ms   {1 / float(np.median(found)):7.1f} sentences/s"
            f"   x{ratio[1]:.2f} ({ratio[0]:.2f} to {ratio[2]:.2f})"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--lengths", type=int, nargs="*", default=[32, 128], help="tokens of the drawn sentences")
    parser.add_argument("--texts", type=Path, help="sentences, one a line, in place of drawn ones")
    parser.add_argument("--sentences", type=int, default=24, help="of each round")
    parser.add_argument("--rounds", type=int, default=9)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    source = find_model(given.model)
    with tempfile.TemporaryDirectory() as scratch:
        for kind in ("int8", "onnx", "onnx-int8"):
            export_model(given.model, Path(scratch) / kind, kind=kind)  # type: ignore[arg-type]
        answers = {
            "bertkit fp32": of_bertkit(source),
            "bertkit int8": of_bertkit(Path(scratch) / "int8"),
            "ONNX fp32": of_graph(Path(scratch) / "onnx" / GRAPH_FILE, given.threads),
            "ONNX int8": of_graph(Path(scratch) / "onnx-int8" / INT8_GRAPH_FILE, given.threads),
        }
        print(f"{given.model}, batch 1, threads {given.threads}, {torch.backends.cpu.get_cpu_capability()}")
        if given.texts is not None:
            lines = [line for line in given.texts.read_text(encoding="utf-8").splitlines() if line.strip()]
            sentences = [encoding.ids for encoding in Tokenizer.load(source).backend.encode_batch(lines)]
            print(f" {len(sentences)} texts of {np.mean([len(ids) for ids in sentences]):.1f} tokens")
            compare(answers, sentences, given.rounds)
            return
        generator = np.random.default_rng(0)
        for length in given.lengths:
            print(f" {length} tokens")
            drawn = [generator.integers(1000, 20000, length).tolist() for _ in range(given.sentences)]
            compare(answers, drawn, given.rounds)


if __name__ == "__main__":
    main()
