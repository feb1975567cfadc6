"""Sparse vectors (SPLADE) and token vectors (ColBERT) beside dense ones and BM25: questions find their paragraphs.

Formal et al. 2021, arXiv:2107.05720 and 2109.10086; Khattab and Zaharia 2020, arXiv:2004.12832. All embedders start
from one model with a masked-LM head and are trained on the same pairs of question and paragraph, with the other
paragraphs of the batch as negatives, for as many updates; they are measured before and after. The articles of the test
questions are not among those of training; the corpus has the paragraphs of both. With the same command, an interrupted
benchmark continues.

Needs --squad with squad2-part-train.json and squad2-part-dev.json (SQuAD 2.0's format, different articles).

    python -m benchmarks.sparse_retrieval --model MODEL --squad SQUAD --out OUT
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from bertkit.evaluation.embeddings.retrieval import query_scores, read_folder
from bertkit.inference.search.bm25 import Bm25
from bertkit.models.late_interaction import PUNCTUATION, LateInteraction, write_token_files
from bertkit.models.sentence_files import write_sentence_files
from bertkit.models.text_reading import TextReading
from bertkit.text.tokenizer_files import load_tokenizer

MAX_TOKENS = 128
LATE_INTERACTION = [
    *("--set", "embedding.late_interaction={}"),
    *("--set", "embedding.query_prompt='[unused0] '"),
    *("--set", "embedding.document_prompt='[unused1] '"),
]


def pairs(file: Path) -> Iterator[tuple[str, str]]:
    """Question and paragraph of each question that has an answer."""
    for article in json.loads(file.read_text(encoding="utf-8"))["data"]:
        for paragraph in article["paragraphs"]:
            for asked in paragraph["qas"]:
                if not asked.get("is_impossible"):
                    yield asked["question"].strip(), paragraph["context"]


def write_lines(path: Path, rows: list[dict[str, str]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def write_data(squad: Path, out: Path) -> tuple[Path, Path, Path]:
    """Tables to train on and to select by, and a folder in BEIR's layout."""
    train, test = (list(pairs(squad / f"squad2-part-{split}.json")) for split in ("train", "dev"))
    random.Random(0).shuffle(train)
    rows = [{"question": question, "paragraph": text} for question, text in train]
    tables = [write_lines(out / f"{name}.jsonl", part) for name, part in (("train", rows[:-200]), ("dev", rows[-200:]))]
    ids = {text: f"d{n}" for n, text in enumerate(dict.fromkeys(text for _, text in [*test, *train]))}
    folder = out / "squad"
    write_lines(folder / "corpus.jsonl", [{"_id": name, "text": text} for text, name in ids.items()])
    write_lines(folder / "queries.jsonl", [{"_id": f"q{n}", "text": asked} for n, (asked, _) in enumerate(test)])
    grades = [f"q{n}\t{ids[text]}\t1" for n, (_, text) in enumerate(test)]
    (folder / "qrels").mkdir(exist_ok=True)
    (folder / "qrels" / "test.tsv").write_text("\n".join(["query\tdocument\tgrade", *grades]) + "\n", encoding="utf-8")
    return tables[0], tables[1], folder


def bertkit(*words: object) -> Any:
    done = subprocess.run(
        [sys.executable, "-m", "bertkit", *map(str, words), "--json"], stdout=subprocess.PIPE, check=True
    )
    return json.loads(done.stdout)


def untrained(model: Path, out: Path, pooling: str) -> Path:
    """The model as a sentence embedder with this pooling."""
    directory = out / f"untrained-{pooling}"
    shutil.copytree(model, directory, dirs_exist_ok=True)
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    width = load_tokenizer(model).vocab_size if pooling == "splade" else config["hidden_size"]
    write_sentence_files(directory, width=width, pooling=(pooling,), normalise=False, max_tokens=MAX_TOKENS)  # type: ignore[arg-type]  # one of two
    return directory


def untrained_tokens(model: Path, out: Path) -> Path:
    """The model with a vector for each token, whose linear map is drawn."""
    directory = out / "untrained-colbert"
    shutil.copytree(model, directory, dirs_exist_ok=True)
    torch.manual_seed(0)
    width = json.loads((model / "config.json").read_text(encoding="utf-8"))["hidden_size"]
    interaction = LateInteraction(32, MAX_TOKENS, "hidden", PUNCTUATION)
    reading = TextReading({"query": "[unused0] ", "document": "[unused1] "})
    weight = torch.nn.Linear(width, 128, bias=False).weight
    write_token_files(directory, weight, interaction, max_tokens=MAX_TOKENS, reading=reading)
    return directory


def measured(model: Path, folder: Path, out: Path) -> dict[str, float]:
    found = bertkit(
        "eval", "retrieval", "--model", model, "--data-dir", folder, "--run-dir", out / f"eval-{model.name}"
    )
    scores: dict[str, float] = {name: each["mean"] for name, each in found["tasks"][folder.name].items()}
    return {**scores, **found.get("words", {})}


def of_bm25(folder: Path) -> dict[str, float]:
    read = read_folder(folder, "test")
    names, texts = zip(*read.documents(), strict=True)
    index = Bm25.of(texts)
    hits = {query: [names[n] for n in index.nearest(text, 100)[0]] for query, text in read.queries.items()}
    scores = query_scores(hits, read.grades, [1, 10, 100])
    return {name: sum(values) / len(values) for name, values in scores.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="directory with a masked-LM head")
    parser.add_argument("--squad", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--epochs", type=float, default=1)
    parser.add_argument("--peak", type=float, default=1e-4)
    parser.add_argument("--weights", type=float, nargs="+", default=[0.01], help="of the penalty, one run each")
    parser.add_argument("--late-interaction", action="store_true", help="also train token vectors (ColBERT)")
    given = parser.parse_args()
    train, dev, folder = write_data(given.squad, given.out)
    columns = ["--text", "question", "--text-pair", "paragraph"]
    shared = ["--kind", "embedding", "--train", train, "--dev", dev, *columns, "--model", given.model]
    shared += ["--set", f"data.max_length={MAX_TOKENS}", "--set", "embedding.train_max_length=64", "--batch", 32]
    shared += ["--set", "optimisation.schedule.warmup_share=0.1", "--lr", given.peak, "--epochs", given.epochs]
    rows = {"BM25": of_bm25(folder)}
    for pooling in ("mean", "splade"):
        rows[f"{pooling}, untrained"] = measured(untrained(given.model, given.out, pooling), folder, given.out)
    if given.late_interaction:
        rows["colbert, untrained"] = measured(untrained_tokens(given.model, given.out), folder, given.out)
    arms = {"mean": ["--pooling", "mean"]} | {
        f"splade-{weight:g}": [
            *("--pooling", "splade"),
            *("--set", f"embedding.sparsity={{queries: {weight:g}, documents: {weight:g}}}"),
        ]
        for weight in given.weights
    }
    if given.late_interaction:
        arms["colbert"] = LATE_INTERACTION
    for name, own in arms.items():
        run = given.out / name
        resumed = ["finetune", "--resume", run] if (run / "recipe.yaml").is_file() else None
        bertkit(*(resumed or ["finetune", *shared, *own, "--run-dir", run]))
        rows[f"{name}, trained"] = measured(run / "model", folder, given.out / name)
    for name, scores in rows.items():
        print(name, {key: round(value, 4) for key, value in scores.items()})


if __name__ == "__main__":
    main()
