"""int8 and float models at batch 1, in bertkit and in ONNX Runtime: milliseconds per sentence and the score on a task.

    python -m benchmarks.int8_speed RUN --threads 1 --lengths 16 32 64 128
    python -m benchmarks.int8_speed RUN --threads 1 --task sst2 --data-dir DATA/glue
    python -m benchmarks.int8_speed RUN --threads 1 --texts sentences.txt

RUN is any model or run directory; with --task, one fine-tuned on that classification task. It is exported as int8 and
as both graphs into a temporary directory. The four alternate, one sentence at a time; printed are the medians over the
rounds of milliseconds per sentence and of the ratio to bertkit's float model in the same round, with the 10th and 90th
percentile. Token ids are random, or from the texts (one per line), or from the first examples of the task's dev split,
which is then scored in full. Other processes on the same cores distort the figures.
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
from numpy.typing import NDArray

from bertkit.data.batch import PackedBatch
from bertkit.inference.export.export import export_model
from bertkit.inference.export.onnx_graph import GRAPH_FILE, INT8_GRAPH_FILE
from bertkit.inference.predict import Predictor
from bertkit.models.files.hub import find_model, load_model
from bertkit.models.headed import HeadedModel
from bertkit.tasks.catalogue import find_task
from bertkit.tasks.readers import load_split
from bertkit.text.tokenizer_files import load_tokenizer
from bertkit.training.config import EngineConfig
from bertkit.training.engine import resolve_engine

Sentence = tuple[list[int], list[int]]
"""Token ids and segments."""
Answer = Callable[[Sentence], NDArray[np.float32]]
"""The first head's logits for one sequence, or all states if the model has no head."""


def of_bertkit(directory: Path) -> Answer:
    model, _ = load_model(directory)

    def answer(sentence: Sentence) -> NDArray[np.float32]:
        with torch.inference_mode():
            return asked(model, PackedBatch.from_ids([sentence[0]], [sentence[1]])).numpy()

    return answer


def asked(model: HeadedModel, batch: PackedBatch) -> torch.Tensor:
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

    def answer(sentence: Sentence) -> NDArray[np.float32]:
        ids, types = (np.array([row], dtype=np.int64) for row in sentence)
        given = {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": types}
        found: NDArray[np.float32] = session.run(wanted, {name: given[name] for name in names})[0]
        return found

    return answer


def compare(answers: dict[str, Answer], sentences: Sequence[Sentence], rounds: int) -> None:
    """Print milliseconds per sentence, and the ratio to the first."""
    seconds: dict[str, list[float]] = {name: [] for name in answers}
    for number in range(rounds + 2):
        for name, answer in answers.items():
            started = time.perf_counter()
            for sentence in sentences:
                answer(sentence)
            if number >= 2:  # the first rounds pack weights and fill caches
                seconds[name].append((time.perf_counter() - started) / len(sentences))
    first = np.array(next(iter(seconds.values())))
    for name, found in seconds.items():
        ratio = np.percentile(first / np.array(found), [10, 50, 90])
        print(
            f"  {name:18s} {1e3 * float(np.median(found)):7.2f} ms   {1 / float(np.median(found)):7.1f} sentences/s"
            f"   x{ratio[1]:.2f} ({ratio[0]:.2f} to {ratio[2]:.2f})"
        )


def compare_on_task(answers: dict[str, Answer], given: argparse.Namespace) -> None:
    """Time the first examples of the dev split, and score all of it."""
    spec = find_task(given.task)
    examples = load_split(spec, "dev", given.data_dir).examples
    predictor = Predictor.load(given.model, resolve_engine(EngineConfig(device="cpu")), spec=spec, examples=examples)
    features = predictor.task.encode(examples, predictor.encoder)
    sentences: list[Sentence] = []
    for item in range(features.num_examples):
        packed = features.batch(np.array([item])).packed
        sentences.append((packed.ids_T.tolist(), packed.token_types_T.tolist()))
    timed = sentences[: given.sentences]
    print(f" {given.task}: the first {len(timed)} of dev, {np.mean([len(ids) for ids, _ in timed]):.1f} tokens")
    compare(answers, timed, given.rounds)
    floats: NDArray[np.float32] | None = None
    for name, answer in answers.items():
        logits = np.concatenate([answer(sentence).reshape(1, -1) for sentence in sentences])
        floats = logits if floats is None else floats
        predictions = predictor.task.predictions(examples, features, list(logits))
        scores = predictor.task.score(predictions, examples)
        told = ", ".join(f"{metric} {100 * score:.2f}" for metric, score in scores.items() if score is not None)
        others = int((logits.argmax(1) != floats.argmax(1)).sum())
        error = np.sqrt(((logits - floats) ** 2).mean()) / floats.std()
        print(f"  {name:18s} {told}; {others} of {len(examples)} answered differently, logits {100 * error:.1f}% off")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--lengths", type=int, nargs="*", default=[32, 128], help="tokens of the drawn sentences")
    parser.add_argument("--texts", type=Path, help="sentences, one a line, in place of drawn ones")
    parser.add_argument("--task", help="examples of this task in place of drawn ones, and its score")
    parser.add_argument("--data-dir", help="the task's official files")
    parser.add_argument("--sentences", type=int, default=24, help="of each round")
    parser.add_argument("--rounds", type=int, default=9)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    source = find_model(given.model)
    with tempfile.TemporaryDirectory() as scratch:
        for kind in ("int8", "onnx", "onnx-int8"):
            export_model(given.model, Path(scratch) / kind, kind=kind)
        files = {
            "bertkit fp32": source / "model.safetensors",
            "bertkit int8": Path(scratch) / "int8" / "model.safetensors",
            "ONNX fp32": Path(scratch) / "onnx" / GRAPH_FILE,
            "ONNX int8": Path(scratch) / "onnx-int8" / INT8_GRAPH_FILE,
        }
        answers = {
            name: of_graph(path, given.threads) if path.suffix == ".onnx" else of_bertkit(path.parent)
            for name, path in files.items()
        }
        print(f"{given.model}, batch 1, threads {given.threads}, {torch.backends.cpu.get_cpu_capability()}")
        print("  " + ", ".join(f"{name} {path.stat().st_size / 1e6:.1f} MB" for name, path in files.items()))
        if given.task is not None:
            compare_on_task(answers, given)
        elif given.texts is not None:
            lines = [line for line in given.texts.read_text(encoding="utf-8").splitlines() if line.strip()]
            encoded = load_tokenizer(source).backend.encode_batch(lines)
            print(f" {len(lines)} texts of {np.mean([len(encoding.ids) for encoding in encoded]):.1f} tokens")
            compare(answers, [(encoding.ids, encoding.type_ids) for encoding in encoded], given.rounds)
        else:
            generator = np.random.default_rng(0)
            for length in given.lengths:
                print(f" {length} tokens")
                drawn = [generator.integers(1000, 20000, length).tolist() for _ in range(given.sentences)]
                compare(answers, [(ids, [0] * length) for ids in drawn], given.rounds)


if __name__ == "__main__":
    main()
