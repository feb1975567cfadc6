"""What Sentence-BERT's paper claims of training, on a small model: dev Spearman on STS-B over seeds, as a table.

Reimers and Gurevych 2019, arXiv:1908.10084: untrained mean pooling against the average of word vectors (table 1),
(u, v, |u-v|) against (u, v) (table 6), a cross-encoder against a bi-encoder (table 2); SimCSE against no training. The
model is the first layers of any BERT. Needs --data with glue/STS-B, nli/mnli-part-train.jsonl and text/.

    python -m benchmarks.sentence_training --model MODEL --layers 2 --data DATA --out OUT --seeds 3 --examples 2000
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import load_file, save_file

from bertkit.finetuning.arguments import FinetuneArguments
from bertkit.finetuning.inputs import OwnTask
from bertkit.finetuning.run import finetune
from bertkit.inference.model import Model
from bertkit.metrics.regression import spearman
from bertkit.progress import silent_progress
from bertkit.recipe.resolve import overrides_of
from bertkit.tasks.readers import Columns, load_split

EPOCHS = {"nli": 1, "stsb": 2, "simcse": 1}


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


def dev_spearman(vectors: Any, data: Path) -> float:
    examples: list[Any] = load_split("stsb", "dev", data / "glue").examples
    first, second = (vectors([getattr(each, name) for each in examples]) for name in ("text", "text_pair"))
    cosines = (first * second).sum(1) / (np.linalg.norm(first, axis=1) * np.linalg.norm(second, axis=1))
    return float(spearman(cosines.tolist(), [each.label for each in examples])["spearman"] or 0.0)


def word_average(model: Path) -> Any:
    """Each text's mean over the rows of the embedding table, special tokens left out."""
    from bertkit.models.hub import load_model
    from bertkit.text.tokenizer_files import load_tokenizer

    table = load_model(model)[0].encoder.word_embedding.weight.detach().numpy()
    tokenizer = load_tokenizer(model)

    def vectors(texts: list[str]) -> Any:
        ids_T, lengths = tokenizer.encode_plain(texts)
        ends = np.cumsum(lengths)
        return np.stack([table[ids_T[end - size : end]].mean(0) for end, size in zip(ends, lengths, strict=True)])

    return vectors


def arms(data: Path, examples: int) -> dict[str, tuple[Any, dict[str, Any]]]:
    """Each arm's task and settings."""
    nli = OwnTask(
        kind="embedding",
        train=str(data / "nli/mnli-part-train.jsonl"),
        dev="stsb",
        columns=Columns(text="premise", text_pair="hypothesis"),
    )
    texts = OwnTask(kind="embedding", train=str(data / "text/sentences.txt"), dev="stsb")
    shared = {"data.max_length": 64, "data.train_examples": examples}
    softmax = {"optimisation.epochs": EPOCHS["nli"], "optimisation.schedule.peak": 1e-4, **shared}
    scores = {"optimisation.epochs": EPOCHS["stsb"], "optimisation.schedule.peak": 1e-4, **shared}
    contrast = {
        "optimisation.epochs": EPOCHS["simcse"],
        "optimisation.schedule.peak": 3e-5,
        "optimisation.batch_sequences": 64,
        **shared,
        "data.max_length": 32,
    }
    return {
        "NLI (u, v)": (nli, {"embedding.loss": {"name": "softmax", "parts": ["u", "v"]}, **softmax}),
        "NLI (u, v, |u-v|)": (nli, {"embedding.loss": {"name": "softmax"}, **softmax}),
        "STS-B bi-encoder": ("sts-embedding", scores | {"optimisation.batch_sequences": 16}),
        "STS-B cross-encoder": (
            "stsb",
            scores | {"text.largest_score": 5.0, "optimisation.batch_sequences": 16},
        ),
        "SimCSE": (texts, {"embedding.loss": {"name": "simcse", "projection": False}, **contrast}),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--texts", type=Path, help="A file of sentences, for SimCSE (default: none).")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--examples", type=int, default=2000)
    given = parser.parse_args()
    small = first_layers(given.model, given.out / "model", given.layers)
    table: dict[str, list[float]] = {
        "untrained, mean pooling": [dev_spearman(Model(str(small)).encode, given.data)],
        "average of word embeddings": [dev_spearman(word_average(small), given.data)],
    }
    for seed in range(given.seeds):
        for name, (task, settings) in arms(given.data, given.examples).items():
            if name == "SimCSE":
                if given.texts is None:
                    continue
                task = task.model_copy(update={"train": str(given.texts)})
            values = {"engine.device": "cpu", "engine.precision": "fp32", "engine.save_every_steps": 10_000, **settings}
            outcome = finetune(
                FinetuneArguments(
                    task=task,
                    model=str(small),
                    data_dir=str(given.data / "glue"),
                    overrides=overrides_of(values),
                    seeds=(seed,),
                    runs_root=given.out / "runs",
                ),
                progress=silent_progress,
            )
            table.setdefault(name, []).append(outcome.results["splits"]["dev"]["spearman"])
            print(json.dumps({"arm": name, "seed": seed, "spearman": table[name][-1]}), flush=True)
    for name, scores in table.items():
        print(f"{name:32} {np.mean(scores):.4f} +- {np.std(scores, ddof=1) if len(scores) > 1 else 0:.4f}  {scores}")


if __name__ == "__main__":
    main()
