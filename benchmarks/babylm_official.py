"""Compare `bertkit eval babylm` with the official BabyLM pipeline: both score one model on the same items.

    git clone https://github.com/babylm-org/babylm-eval
    python -m benchmarks.babylm_official --official babylm-eval/strict --data-dir evaluation_data --model RUN/model \
        --backend causal --items 6 --work compared

The official code runs unchanged, in separate processes (`--python`: an interpreter with its requirements: torch,
transformers, datasets, pandas, statsmodels, aiohttp), and so does `bertkit`. The answer to every item, the
probabilities of the WUG tasks, the surprisal of every word and the reported scores are compared.

COMPS is not in every copy of the data. If it is missing, items of its form are built from a few words, which compares
the counting only.

If the tokenizer appends an end token such as [SEP] and the model is causal, the official reading times are computed
from the state after that token. The official code then gets a copy of the model with a tokenizer that appends none.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RULES = {"causal": "left_to_right", "mlm": "original", "mntp": "masked_next_token"}
CHOICES = {
    "blimp": ("blimp", "blimp_filtered"),
    "blimp_supplement": ("blimp", "supplement_filtered"),
    "entity_tracking": ("entity_tracking", "entity_tracking"),
    "comps": ("comps", "comps"),
    "wug_adj": ("wug_adj", "wug_adj_nominalization"),
    "wug_past": ("wug_past", "wug_past_tense"),
}
"""The official name and the folder of each task."""
READING = "reading/reading_data.csv"


@dataclass(frozen=True)
class Row:
    """Both results on one task."""

    task: str
    items: int
    subsets: int
    differing: int
    official: float
    ours: float
    shared: float
    farthest: float
    """The largest difference of a subset's score in percentage points, or of a surprisal in nats."""

    def line(self) -> str:
        """A line of the table."""
        cells = (self.task, f"{self.items} in {self.subsets}", str(self.differing), f"{self.official:.2f}")
        return "| " + " | ".join((*cells, f"{self.ours:.3f}", f"{self.shared:.3f}", f"{self.farthest:.2g}")) + " |"


def write_sample(data: Path, out: Path, items: int, words: int) -> None:
    """Evenly spaced lines of each file, with the challenge's folder structure."""
    for _, folder in CHOICES.values():
        beside = data / f"{folder}.jsonl"
        files = sorted((data / folder).glob("*.jsonl")) or ([beside] if beside.exists() else [])
        (out / folder).mkdir(parents=True, exist_ok=True)
        for file in files:
            lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
            count = min(len(lines), items if folder == "blimp_filtered" else 4 * items)
            chosen = [lines[k * len(lines) // count] for k in range(count)]
            (out / folder / file.name).write_text("".join(chosen), encoding="utf-8")
        if not files and folder == "comps":
            write_made_comps(out / folder)
    reading = data / READING if (data / READING).exists() else data / "reading_data.csv"
    (out / READING).parent.mkdir(parents=True, exist_ok=True)
    rows = reading.read_text(encoding="utf-8").splitlines(keepends=True)
    (out / READING).write_text("".join(rows[: words + 1]), encoding="utf-8")


def write_made_comps(folder: Path) -> None:
    """Six items in each of the four files of COMPS."""
    pairs = [("duck", "knife", "can swim"), ("oven", "apple", "is used for baking"), ("crow", "shirt", "has wings")]
    starts = {"base": "A {}", "wugs": "A wug is a {}. Therefore, a wug"}
    starts["wugs_dist-before"] = "A dax is a stone. A wug is a {}. Therefore, a wug"
    starts["wugs_dist-in-between"] = "A wug is a {}. A dax is a stone. Therefore, a wug"
    for name, start in starts.items():
        rows = [
            {"prefix_acceptable": start.format(a), "prefix_unacceptable": start.format(b), "property_phrase": f"{p}{e}"}
            for a, b, p in pairs
            for e in (".", " well.")
        ]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"comps_{name}.jsonl").write_text(text, encoding="utf-8")


def without_end_token(model: Path, out: Path) -> Path:
    """The model with a tokenizer that appends no end token."""
    shutil.copytree(model, out, dirs_exist_ok=True)
    file = out / "tokenizer.json"
    tokenizer = json.loads(file.read_text(encoding="utf-8"))
    template = tokenizer.get("post_processor") or {}
    if template.get("type") == "TemplateProcessing":
        while template["single"] and "SpecialToken" in template["single"][-1]:
            template["single"].pop()
        file.write_text(json.dumps(tokenizer), encoding="utf-8")
    return out


def run_official(arguments: argparse.Namespace, model: Path, sample: Path, out: Path) -> Path:
    """Run the official code on all tasks; returns its folder of results."""
    results: Path = out / model.stem / "main" / "zero_shot" / arguments.backend
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": os.environ.get("OFFICIAL_PYTHONPATH", "")}
    common = ["--model_path_or_name", str(model.resolve()), "--backend", arguments.backend, "--output_dir", str(out)]
    for name, (task, folder) in CHOICES.items():
        if name in arguments.only:
            where = ["--task", task, "--data_path", str(sample / folder), "--save_predictions"]
            command = [arguments.python, "-m", "evaluation_pipeline.sentence_zero_shot.run", *common, *where]
            subprocess.run(command, cwd=arguments.official, env=environment, check=True, stdout=sys.stderr)
    if "reading" in arguments.only:
        where = ["--data_path", str(sample / READING)]
        command = [arguments.python, "-m", "evaluation_pipeline.reading.run", *common, *where]
        subprocess.run(command, cwd=arguments.official, env=environment, check=True, stdout=sys.stderr)
    return results


def run_ours(arguments: argparse.Namespace, sample: Path, out: Path) -> Path:
    """Run `bertkit eval babylm` on the same files; returns its run directory."""
    rule = arguments.rule or RULES[arguments.backend]
    only = [part for task in arguments.only for part in ("--only", task)]
    command = [sys.executable, "-m", "bertkit", "eval", "babylm", "--model", str(arguments.model), "--data-dir"]
    command += [str(sample), "--rule", rule, *only, "--run-dir", str(out), "--fresh", "--device", "cpu"]
    shutil.rmtree(out, ignore_errors=True)  # of an earlier comparison
    subprocess.run(command, check=True, stdout=sys.stderr)
    return out


def reported(path: Path) -> tuple[dict[str, float], float]:
    """The scores of an official report by name, and the average at its end."""
    lines = path.read_text(encoding="utf-8").strip().splitlines()
    found = {each[1]: float(each[2]) for line in lines if (each := re.match(r"(.+): (-?[\d.]+|nan)$", line))}
    return found, float(lines[-1])


def compare_choices(task: str, official: Path, ours: dict[str, Any], submitted: dict[str, Any]) -> Row:
    """One multiple-choice task."""
    theirs = json.loads((official / "predictions.json").read_text(encoding="utf-8"))
    own = submitted[task]
    assert theirs.keys() == own.keys(), (task, theirs.keys() ^ own.keys())
    count = differing = 0
    for subset, each in theirs.items():
        for a, b in zip(each["predictions"], own[subset]["predictions"], strict=True):
            assert a["id"] == b["id"]
            count += 1
            if a["pred"] != b["pred"]:
                differing += 1
                print(f"differs: {task} {a['id']}: {a['pred']!r} there, {b['pred']!r} here", file=sys.stderr)
    scores, average = reported(official / "best_temperature_report.txt")
    if task.startswith("wug"):
        probabilities = [
            abs(a["prob"] - b["prob"])
            for a, b in zip(theirs[task]["predictions"], own[task]["predictions"], strict=True)
        ]
        figures, factor, farthest = ("spearman", "spearman_unrounded"), 1, max(probabilities)
    else:
        subsets = ours["subsets"][task]
        farthest = max(abs(scores[name] - 100 * each["accuracy"]) for name, each in subsets.items())
        figures, factor = ("accuracy", "accuracy_ties_shared"), 100
    found = [factor * (ours["tasks"][task][name]["mean"] or math.nan) for name in figures]
    return Row(task, count, len(theirs), differing, average, found[0], found[1], farthest)


def compare_reading(official: Path, ours: dict[str, Any], submitted: dict[str, Any]) -> list[Row]:
    """Surprisals of all words, and the two scores."""
    theirs = json.loads((official / "predictions.json").read_text(encoding="utf-8"))["reading"]["predictions"]
    pairs = [
        (a[key], b[key])
        for a, b in zip(theirs, submitted["reading"]["reading"]["predictions"], strict=True)
        for key in ("pred", "prev_pred")
    ]
    alone = sum(math.isnan(a) != math.isnan(b) for a, b in pairs)
    if alone:  # pandas reads the context "None" as an empty cell
        print(f"differs: reading: {alone} surprisals that only one of the two has", file=sys.stderr)
    gaps = [abs(a - b) for a, b in pairs if not math.isnan(a) and not math.isnan(b)]
    scores, _ = reported_reading(official / "report.txt")
    rows = []
    for name, title in (("eye_tracking", "EYE TRACKING SCORE"), ("self_paced_reading", "SELF-PACED READING SCORE")):
        own = 100 * ours["tasks"]["reading"][name]["mean"]
        rows.append(
            Row(name, len(theirs), 1, alone + sum(gap > 1e-3 for gap in gaps), scores[title], own, own, max(gaps))
        )
    return rows


def reported_reading(path: Path) -> tuple[dict[str, float], None]:
    """The two reading-time scores of the official report."""
    lines = [line.rpartition(": ") for line in path.read_text(encoding="utf-8").splitlines()]
    return {name: float(value) for name, _, value in lines}, None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--official", type=Path, required=True, help="the folder that holds evaluation_pipeline")
    parser.add_argument("--data-dir", type=Path, required=True, help="full_eval of the challenge's evaluation_data")
    parser.add_argument("--model", type=Path, required=True, help="a model directory that transformers loads")
    parser.add_argument("--backend", choices=RULES, required=True)
    parser.add_argument("--rule", help="scoring rule of bertkit, where it is not the backend's usual one")
    parser.add_argument("--items", type=int, default=6, help="of a BLiMP paradigm; four times as many of other files")
    parser.add_argument("--words", type=int, default=200, help="rows of the reading times")
    parser.add_argument("--only", nargs="+", default=[*CHOICES, "reading"], choices=[*CHOICES, "reading"])
    parser.add_argument("--work", type=Path, required=True, help="a folder for samples and results")
    parser.add_argument("--python", default=sys.executable, help="the interpreter of the official code")
    arguments = parser.parse_args()
    work = arguments.work.resolve()
    arguments.model = arguments.model.resolve()
    sample = work / "sample"
    write_sample(arguments.data_dir, sample, arguments.items, arguments.words)
    model = arguments.model
    if arguments.backend == "causal":
        model = without_end_token(model, work / "model-without-end-token")
    official = run_official(arguments, model, sample, work / "official")
    run = run_ours(arguments, sample, work / f"ours-{arguments.backend}")
    results = json.loads((run / "results.json").read_text(encoding="utf-8"))
    submitted = json.loads((run / results["submission"]["file"]).read_text(encoding="utf-8"))
    rows = []
    for task, (name, folder) in CHOICES.items():
        if task in results["left_out"]:
            print(f"{task} is left out: {results['left_out'][task]}", file=sys.stderr)
        elif task in arguments.only:
            rows.append(compare_choices(task, official / name / folder, results, submitted))
    if "reading" in arguments.only:
        rows += compare_reading(official / "reading", results, submitted)
    print("| task | items in subsets | answers that differ | official | here | ties shared | farthest |")
    print("|---|---|---|---|---|---|---|")
    for row in rows:
        print(row.line())


if __name__ == "__main__":
    main()
