"""A generated translation task, numbers in English words to digits: its BLEU shows whether an encoder-decoder trains.

    python -m benchmarks.translation                 # trains transformer-small and scores 500 unseen pairs
    python -m benchmarks.translation --pairs 6000 --steps 1200 --out DIR
    python -m benchmarks.translation --fixed-heads   # compares seven of eight fixed encoder heads with none
    python -m benchmarks.translation --universal     # one layer applied repeatedly, and with adaptive halting
    python -m benchmarks.translation --starts        # BART's architecture from a BERT and from random weights

The pairs are drawn with seed 0 from the numbers below a million; a digit of the target depends on one word and on which
words are missing ("four thousand and two": 4 0 0 2), so copying word by word scores low. The test numbers do not occur
in training.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

SMALLEST = "zero one two three four five six seven eight nine ten".split()  # noqa: SIM905
TEENS = "eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen nineteen".split()  # noqa: SIM905
ONES = [*SMALLEST, *TEENS]
TENS = ["", "", *"twenty thirty forty fifty sixty seventy eighty ninety".split()]  # noqa: SIM905
SMALL = {
    "tokenizer.vocab_size": 200,
    "model.hidden_size": 64,
    "model.intermediate_size": 256,
    "optimisation.schedule.peak": 3.0e-3,
    "engine.precision": "fp32",
    "engine.evaluate_every_steps": 600,
    "engine.micro_batch_tokens": 4096,
}
TEST_PAIRS = 500
UNIVERSAL: dict[str, Any] = {
    "model": "{family: universal-transformer, hidden_size: 64, num_attention_heads: 4, intermediate_size: 256,"
    " num_hidden_layers: 4, max_position_embeddings: 128, hidden_dropout_prob: 0.1, attention_probs_dropout_prob: 0.0,"
    " activation_dropout_prob: 0.0, halting: %s}",
    "tokenizer.vocab_size": 200,
    "optimisation.schedule.peak": 3.0e-3,
    "engine.precision": "fp32",
    "engine.evaluate_every_steps": 600,
    "engine.micro_batch_tokens": 4096,
}
BERT = {
    "tokenizer.vocab_size": 200,
    "tokenizer.min_frequency": 1,
    "data.layout": "{name: doc-sentences}",
    "data.reading.segments": "line",
    "data.sequence_length": 64,
    "data.static_copies": "null",
    "model.hidden_size": 64,
    "model.num_hidden_layers": 2,
    "model.num_attention_heads": 4,
    "model.intermediate_size": 256,
    "model.max_position_embeddings": 128,
    "objective": "[masked_lm]",
    "optimisation.stages": "[]",
    "optimisation.schedule": "{name: linear, peak: 2.0e-3, warmup_steps: 50}",
    "optimisation.batch_sequences": 64,
    "optimisation.steps": 400,
    "engine.precision": "fp32",
}
"""A BERT of the text of both sides, one document per line."""


def words(number: int) -> str:
    """A number below a million in English words."""
    if number < 20:
        return ONES[number]
    if number < 100:
        return TENS[number // 10] + (f" {ONES[number % 10]}" if number % 10 else "")
    if number < 1000:
        return f"{ONES[number // 100]} hundred" + (f" and {words(number % 100)}" if number % 100 else "")
    rest = number % 1000
    joined = " and " if 0 < rest < 100 else " "
    return f"{words(number // 1000)} thousand" + (f"{joined}{words(rest)}" if rest else "")


def write_task(directory: Path, pairs: int) -> tuple[Path, Path]:
    """The files of training and test pairs: source, tab, target."""
    directory.mkdir(parents=True, exist_ok=True)
    numbers = random.Random(0).sample(range(1_000_000), pairs + TEST_PAIRS)
    lines = [f"{words(number)}\t{' '.join(str(number))}\n" for number in numbers]
    paths = directory / "train.tsv", directory / "test.tsv"
    for path, own in zip(paths, (lines[:pairs], lines[pairs:]), strict=True):
        path.write_text("".join(own), encoding="utf-8")
    return paths


def bertkit(*arguments: str) -> dict[str, object]:
    """The document printed by a command."""
    found = subprocess.run(
        [sys.executable, "-m", "bertkit", *arguments, "--json"], check=True, stdout=subprocess.PIPE, text=True
    )
    document: dict[str, object] = json.loads(found.stdout)
    return document


def settings(values: dict[str, object]) -> list[str]:
    """Options that set these keys."""
    return [part for key, value in values.items() for part in ("--set", f"{key}={value}")]


def compare_starts(directory: Path, train: Path, test: Path, steps: int) -> dict[str, object]:
    """Scores on the test pairs of two runs that differ only in their initial weights: a BERT's, or random ones."""
    text = directory / "both-sides.txt"
    text.write_text(train.read_text(encoding="utf-8").replace("\t", "\n\n").replace("\n", "\n\n"), encoding="utf-8")
    bert = directory / "bert"
    bertkit("pretrain", "bert-tiny", "--data", str(text), "--run-dir", str(bert), *settings(BERT))
    sizes = {key: value for key, value in BERT.items() if key.startswith("model.")}
    own = {"model.family": "bart", **sizes, "model.hidden_act": "gelu_new", "optimisation.schedule.peak": 2.0e-3}
    own |= {"model.scale_embedding": "false", "engine.precision": "fp32", "optimisation.steps": steps}
    starts: dict[str, list[str]] = {
        "random": ["--set", f"tokenizer={{path: {bert.resolve() / 'model'}, vocab_size: 200}}", *settings(own)],
        "bert": ["--init", str(bert.resolve()), *settings(own)],
    }
    found: dict[str, object] = {}
    for name, options in starts.items():
        run = directory / f"from-{name}"
        bertkit("pretrain", "transformer-small", "--data", str(train), "--run-dir", str(run), *options)
        scored = bertkit("eval", "translation", "--model", str(run), "--data", str(test), "--run-dir", f"{run}-test")
        found[name] = scored["tasks"]["translation"]  # type: ignore[index]  # the document of eval
    return found


def train_and_score(run: Path, train: Path, test: Path, more: dict[str, object]) -> dict[str, object]:
    """Outputs of a small Transformer for held-out pairs and for the test pairs, and the time taken."""
    began = time.perf_counter()
    given = ("--data", str(train), "--run-dir", str(run), *settings(more))
    document = bertkit("pretrain", "transformer-small", *given)
    scored = bertkit("eval", "translation", "--model", str(run), "--data", str(test), "--run-dir", f"{run}-test")
    return {
        "held_out": document["results"]["held_out"],  # type: ignore[index]  # the document of pretrain
        "test": scored["tasks"]["translation"],  # type: ignore[index]  # the document of eval
        "seconds": time.perf_counter() - began,
    }


def main() -> None:
    """Train, score, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=6000)
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--starts", action="store_true")
    parser.add_argument("--fixed-heads", action="store_true")
    parser.add_argument("--universal", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("translation"))
    arguments = parser.parse_args()
    train, test = write_task(arguments.out, arguments.pairs)
    if arguments.starts:
        print(json.dumps(compare_starts(arguments.out, train, test, arguments.steps), indent=2))
        return
    models: dict[str, dict[str, Any]] = {"run": {**SMALL}}
    if arguments.fixed_heads:
        eight = {**SMALL, "model.num_attention_heads": 8}
        models = {"learnt-heads": eight, "fixed-heads": {**eight, "model.fixed_heads": "true"}}
    if arguments.universal:
        halting = {"objective": "[{seq2seq_lm: {label_smoothing: 0.1}}, {pondering: {weight: 0.02}}]"}
        models = {
            "four-steps": {**UNIVERSAL, "model": UNIVERSAL["model"] % "false"},
            "halting": {**UNIVERSAL, **halting, "model": UNIVERSAL["model"] % "true"},
        }
    for name, more in models.items():
        found = train_and_score(arguments.out / name, train, test, {"optimisation.steps": arguments.steps, **more})
        print(json.dumps({name: found}, indent=2))


if __name__ == "__main__":
    main()
