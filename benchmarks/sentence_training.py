"""Claims of the Sentence-BERT and SimCSE papers about training, tested on small models: dev Spearman on STS-B over
seeds.

Reimers and Gurevych 2019, arXiv:1908.10084: untrained mean pooling against the average of word vectors (table 1), and
against training; (u, v, |u-v|) against (u, v) (table 6); a cross-encoder against a bi-encoder (table 2). Gao et al.
2021, arXiv:2104.08821: SimCSE against no training. Seed i starts from the i-th --model (from the first if there are
fewer), so models from several pretraining seeds also give the untrained figures a spread. The last weights are
measured, never the best on dev. With the same command, an interrupted benchmark continues after its last finished arm.

Needs --data with glue/STS-B, nli/mnli-part-train.jsonl and text/wikipedia-train.txt.xz (or --texts).

    python -m benchmarks.sentence_training --model MODEL... --data DATA --out OUT --seeds 3
"""

from __future__ import annotations

import argparse
import json
import lzma
import shutil
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import load_file, save_file

from bertkit.evaluation.embeddings.settings import VectorSettings
from bertkit.evaluation.embeddings.sources import cosines, encoded_once, word_source
from bertkit.finetuning.arguments import FinetuneArguments
from bertkit.finetuning.inputs import CustomTask
from bertkit.finetuning.run import finetune
from bertkit.inference.model import Model
from bertkit.metrics.regression import spearman
from bertkit.progress import silent_progress
from bertkit.recipe.resolve import overrides_of
from bertkit.tasks.readers import Columns, load_split
from bertkit.text.sentences import split_sentences

SIMCSE = "SimCSE, dropout 0.1"
UNTRAINED, TABLE, WORDS = "untrained, mean pooling", "average of its word embeddings", "average of word vectors"
CLAIMS = (
    (WORDS, UNTRAINED),
    (TABLE, UNTRAINED),
    ("NLI (u, v, |u-v|)", UNTRAINED),
    ("STS-B bi-encoder", UNTRAINED),
    ("NLI (u, v, |u-v|)", "NLI (u, v)"),
    ("STS-B cross-encoder", "STS-B bi-encoder"),
    (SIMCSE, UNTRAINED),
)
"""Pairs of arms of which the papers find the first better."""


def first_layers(source: Path, target: Path, layers: int) -> Path:
    """A model directory with the first layers of another, without the files of a sentence embedder."""
    target.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        if file.is_file() and file.name not in ("modules.json", "model.safetensors", "config.json"):
            shutil.copy(file, target / file.name)
    config = json.loads((source / "config.json").read_text())
    config["num_hidden_layers"] = layers
    (target / "config.json").write_text(json.dumps(config))
    tensors = load_file(source / "model.safetensors")
    kept = {
        name: tensor
        for name, tensor in tensors.items()
        if "encoder.layer." not in name or int(name.partition("encoder.layer.")[2].split(".")[0]) < layers
    }
    save_file(kept, target / "model.safetensors", metadata={"format": "pt"})
    return target


def with_dropout(source: Path, target: Path) -> Path:
    """A model directory whose encoder has BERT's dropout, which makes SimCSE's two readings of a text differ."""
    shutil.copytree(source, target, dirs_exist_ok=True)
    config = json.loads((source / "config.json").read_text())
    names = [name for name in config if "dropout" in name and not name.startswith("classifier")]
    (target / "config.json").write_text(json.dumps(config | dict.fromkeys(names, 0.1)))
    return target


def dev_pairs(data: Path) -> tuple[list[str], list[str], list[float]]:
    examples: list[Any] = load_split("stsb", "dev", data / "glue").examples
    first, second = ([getattr(each, name) for each in examples] for name in ("text", "text_pair"))
    return first, second, [each.label for each in examples]


def dev_spearman(vectors: Any, data: Path) -> float:
    first, second, scores = dev_pairs(data)
    return float(spearman(cosines(vectors(first), vectors(second)).tolist(), scores)["spearman"] or 0.0)


def of_word_vectors(path: Path, data: Path) -> float:
    """As in `bertkit eval sts --word-vectors`, on dev."""
    first, second, scores = dev_pairs(data)
    source = word_source(path, VectorSettings(), lambda: [*first, *second])
    return float(spearman(cosines(*encoded_once(source, first, second)).tolist(), scores)["spearman"] or 0.0)


def word_average(model: Path) -> Any:
    """Each text's mean over the rows of the embedding table, without special tokens."""
    from bertkit.models.files.hub import load_model
    from bertkit.text.tokenizer_files import load_tokenizer

    table = load_model(model)[0].encoder.word_embedding.weight.detach().numpy()
    tokenizer = load_tokenizer(model)

    def vectors(texts: list[str]) -> Any:
        ids_T, lengths = tokenizer.encode_plain(texts)
        ends = np.cumsum(lengths)
        return np.stack([table[ids_T[end - size : end]].mean(0) for end, size in zip(ends, lengths, strict=True)])

    return vectors


def sentences(corpus: Path) -> Iterator[str]:
    """The sentences of at least six words in a compressed text, the first of each paragraph."""
    with lzma.open(corpus, "rt", encoding="utf-8") as lines:
        for line in lines:
            found = split_sentences(line.strip())
            if found and len(found[0].split()) >= 6:
                yield found[0]


def arms(data: Path, texts: Path, given: argparse.Namespace) -> dict[str, tuple[Any, dict[str, Any]]]:
    """Each arm's task and settings."""
    nli = CustomTask(
        kind="embedding",
        train=str(data / "nli/mnli-part-train.jsonl"),
        dev="stsb",
        columns=Columns(text="premise", text_pair="hypothesis"),
    )
    shared = {"data.max_length": 64, "optimisation.select": "last", "optimisation.batch_sequences": 16}
    shared |= {"optimisation.schedule.peak": given.peak}
    once = shared | {"optimisation.epochs": 1, "data.train_examples": given.examples}
    scores = shared | {"optimisation.epochs": 4, "data.train_examples": given.scored}
    contrast = shared | {"optimisation.epochs": 1, "optimisation.schedule.peak": 0.3 * given.peak}
    contrast |= {"optimisation.batch_sequences": 64, "data.max_length": 32}
    return {
        "NLI (u, v)": (nli, {"embedding.loss": {"name": "softmax", "parts": ["u", "v"]}, **once}),
        "NLI (u, v, |u-v|)": (nli, {"embedding.loss": {"name": "softmax"}, **once}),
        "STS-B bi-encoder": ("sts-embedding", scores),
        "STS-B cross-encoder": ("stsb", scores | {"text.largest_score": 5.0}),
        SIMCSE: (
            CustomTask(kind="embedding", train=str(texts), dev="stsb"),
            {"embedding.loss": {"name": "simcse", "projection": False}, **contrast},
        ),
    }


def trained(task: Any, model: Path, seed: int, settings: dict[str, Any], given: argparse.Namespace) -> float:
    """Spearman on dev after training."""
    values = {"engine.device": "cpu", "engine.precision": "fp32", "engine.save_every_steps": 100_000, **settings}
    outcome = finetune(
        FinetuneArguments(
            task=task,
            model=str(model),
            data_dir=str(given.data / "glue"),
            overrides=overrides_of(values),
            seeds=(seed,),
            runs_root=given.out / "runs",
        ),
        progress=silent_progress,
    )
    return float(outcome.results["splits"]["dev"]["spearman"])


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, nargs="+", required=True)
    parser.add_argument("--layers", type=int, help="The first layers of --model alone (default: all).")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--texts", type=Path, help="A sentence a line, for SimCSE (default: Wikipedia's, of --data).")
    parser.add_argument("--word-vectors", type=Path, help="A text file of word vectors (benchmarks/word_vectors.py).")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--examples", type=int, default=8000, help="Of natural language inference.")
    parser.add_argument("--scored", type=int, default=5749, help="Of STS-B, for four epochs.")
    parser.add_argument("--sentences", type=int, default=8000, help="Of Wikipedia, for SimCSE.")
    parser.add_argument("--peak", type=float, default=1e-4, help="The learning rate; SimCSE's is 0.3 of it.")
    return parser.parse_args()


def main() -> None:
    given = arguments()
    given.out.mkdir(parents=True, exist_ok=True)
    texts = given.texts or given.out / "sentences.txt"
    if not texts.exists():
        found = islice(sentences(given.data / "text/wikipedia-train.txt.xz"), given.sentences)
        texts.write_text("".join(f"{each}\n" for each in found), encoding="utf-8")
    record = given.out / "figures.jsonl"
    known = [json.loads(line) for line in record.read_text().splitlines()] if record.exists() else []
    figures = {(each["arm"], each["seed"]): each["spearman"] for each in known}

    def note(arm: str, seed: int, measure: Any) -> None:
        if (arm, seed) in figures:
            return
        figures[arm, seed] = measure()
        with record.open("a") as out:
            print(json.dumps({"arm": arm, "seed": seed, "spearman": figures[arm, seed]}), file=out)
        print(f"{arm}, seed {seed}: {figures[arm, seed]:.4f}", flush=True)

    models = given.model
    if given.layers is not None:
        models = [first_layers(each, given.out / f"model-{n}", given.layers) for n, each in enumerate(given.model)]
    if given.word_vectors is not None:
        note(WORDS, 0, lambda: of_word_vectors(given.word_vectors, given.data))
    for seed in range(given.seeds):
        model = models[seed % len(models)]
        if seed < len(models):
            note(UNTRAINED, seed, lambda model=model: dev_spearman(Model(str(model)).encode, given.data))
            note(TABLE, seed, lambda model=model: dev_spearman(word_average(model), given.data))
        for name, (task, settings) in arms(given.data, texts, given).items():
            if name == SIMCSE:
                model = with_dropout(model, given.out / f"with-dropout-{seed}")
            note(
                name,
                seed,
                lambda model=model, task=task, settings=settings, seed=seed: trained(
                    task, model, seed, settings, given
                ),
            )
    report(figures)


def report(figures: dict[tuple[str, int], float]) -> None:
    """Means with their spread, and for each claim the differences per seed."""
    arms_found = {arm: [x for (name, _), x in sorted(figures.items()) if name == arm] for arm, _ in figures}
    for name, values in arms_found.items():
        spread = f"{np.std(values, ddof=1):.4f}" if len(values) > 1 else "-"
        print(f"| {name} | {np.mean(values):.4f} | {spread} | {', '.join(f'{x:.4f}' for x in values)} |")
    for better, worse in CLAIMS:
        if better not in arms_found or worse not in arms_found:
            continue
        one, other = arms_found[better], arms_found[worse]
        differences = [one[n % len(one)] - other[n % len(other)] for n in range(max(len(one), len(other)))]
        holds = sum(each > 0 for each in differences)
        print(f"{better} above {worse}: {holds} of {len(differences)} ({', '.join(f'{x:+.4f}' for x in differences)})")


if __name__ == "__main__":
    main()
