"""Pretraining objectives under one roof: one encoder, one text, one budget of training FLOPs, several seeds each.

The encoder is the quickstart's (ModernBERT layers) at 256 x 4, because it leaves the unigram plateau well within the
budget; where an objective tells two segments apart, the separator alone does it, since this encoder has no segment
embeddings. Steps follow from the budget: an objective that costs more a step takes fewer. Each finished run is then
asked what it knows: masked words of other text, the same windows and masks for all; BLiMP by pseudo-log-likelihood; a
linear probe of parts of speech; two short fine-tunes.

    python -m benchmarks.compare_objectives all --data TEXT --tasks DATA --out DIR      the whole study, or --seeds 1 2
    python -m benchmarks.compare_objectives train masked_lm 0 --data TEXT --out DIR     a run of it
    python -m benchmarks.compare_objectives score masked_lm 0 --tasks DATA --out DIR
    python -m benchmarks.compare_objectives table --out DIR

DATA is a folder with `text/wikipedia-dev.txt.xz`, `blimp/`, `glue/` and `ud-english-ewt/`. What was broken off goes on;
what has a row in DIR/objectives.csv is not repeated, so the study can go on elsewhere with that file. `table` adds the
rows of what was scored in DIR, prints means and spreads and draws DIR/objectives.png and .svg.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import resource
import shutil
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from bertkit.data.batch import PackedBatch
from bertkit.evaluation.blimp import evaluate_blimp
from bertkit.evaluation.mlm import evaluate_mlm
from bertkit.evaluation.run import EvalArguments, Evaluated
from bertkit.evaluation.settings import BlimpSettings, MlmSettings
from bertkit.files import cache_directory
from bertkit.finetuning.arguments import FinetuneArguments
from bertkit.finetuning.run import finetune
from bertkit.models.hub import find_model, load_model
from bertkit.models.recorder import Recorder
from bertkit.objectives.forward import pretraining_model
from bertkit.pretraining.arguments import PretrainArguments
from bertkit.pretraining.recipe import load_recipe
from bertkit.pretraining.run import open_shards, run_pretraining
from bertkit.pretraining.stages import stages_of
from bertkit.pretraining.trainer import StageRun
from bertkit.progress import silent_progress
from bertkit.recipe.resolve import Override
from bertkit.tasks.examples import TaggedExample
from bertkit.tasks.readers import load_split
from bertkit.text.tokenizer import Tokenizer
from bertkit.text.tokenizer_files import load_tokenizer
from bertkit.training.cost import training_flops

BUDGET_FLOPS = 8e13
LAYERS = 4
COMMON = [
    *("model.hidden_size=256", f"model.num_hidden_layers={LAYERS}", "model.num_attention_heads=4"),
    *("model.intermediate_size=384", "model.initializer_range=0.04", "data.sequence_length=128"),
    *("optimisation.schedule.peak=1.5e-3", "engine.log_every_steps=25", "engine.evaluate_every_steps=250"),
    *("engine.evaluation_sequences=512", "engine.examples=[]"),
]
_RUNS = "data.layout={name: doc-sentences}"
_PAIRS = "data.layout={name: segment-pair, lone_segment: cut, random_partner_probability: %s, swap_probability: %s}"
_APART = "{told_apart_by: separator}"
_REPLACED = "objective=[{masked_lm: {mask_share: 0.85, random_share: 0.0}}, {replaced_token: {tie: none}}]"
ARMS = {
    "masked_lm": [_RUNS, "objective=[masked_lm]"],
    "whole_words": [_RUNS, "objective=[{masked_lm: {units: {name: words}}}]"],
    "spans": [_RUNS, "objective=[{masked_lm: {units: {name: spans}}}, span_boundary]"],
    "next_sentence": [_PAIRS % (0.5, 0.0), f"objective=[masked_lm, {{next_sentence: {_APART}}}]"],
    "sentence_order": [_PAIRS % (0.0, 0.5), f"objective=[masked_lm, {{sentence_order: {_APART}}}]"],
    "word_order": [_PAIRS % (0.3333, 0.5), f"objective=[masked_lm, word_order, {{sentence_structure: {_APART}}}]"],
    "replaced_token": [_RUNS, _REPLACED],
    # At the rate of ELECTRA's small model: at the common one the model hardly tells replaced tokens from others.
    "replaced_token_5e-4": [_RUNS, _REPLACED, "optimisation.schedule.peak=5e-4"],
    "causal_lm": [_RUNS, "objective=[causal_lm]"],
    "masked_and_causal": [_RUNS, "objective=[masked_lm, {causal_lm: {share: 0.5}}]"],
}
"""What is compared, in a recipe's words: a paper's objective each, on the common encoder and text."""

FINETUNES = {
    "sst2": ["data.train_examples=6000", "optimisation.epochs=2", "optimisation.learning_rate=2e-4"],
    "stsb": ["optimisation.epochs=2", "optimisation.learning_rate=2e-4"],
}
PRIMARY = {"sst2": "accuracy", "stsb": "spearman"}
BLIMP_PAIRS = 50
PROBE_SENTENCES = 2000
MASKED_WINDOWS = 1024
COLUMNS = ("held_out", "masked", "blimp", "pos", "sst2", "stsb")
"""`held_out` is the accuracy of the objective's own first term on the run's held-out text, under its own masking;
`masked` that of 15% masked pieces of other text, which a left-to-right model cannot be asked for; `stsb` is a rank
correlation."""
PANELS = {
    "masked": "masked pieces (%)",
    "blimp": "BLiMP (%)",
    "pos": "parts of speech (%)",
    "sst2": "SST-2 (%)",
    "stsb": "STS-B (rank correlation x 100)",
}
"""Of the figure: the columns that compare objectives, which `held_out` does not."""


def main() -> None:
    options = arguments()
    if options.command == "train":
        train(options.arm, options.seed, options.data, options.out)
    elif options.command == "score":
        score(options.arm, options.seed, options.tasks, options.out)
    elif options.command == "all":
        for seed, arm in itertools.product(options.seeds, ARMS):
            if not is_known(arm, seed, options.out):
                train(arm, seed, options.data, options.out)
                score(arm, seed, options.tasks, options.out)
        table(options.out)
    else:
        table(options.out)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("all", "train", "score", "table"):
        command = commands.add_parser(name)
        command.add_argument("--out", type=Path, required=True)
        if name in ("train", "score"):
            command.add_argument("arm", choices=ARMS)
            command.add_argument("seed", type=int)
        if name == "all":
            command.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
        if name in ("all", "train"):
            command.add_argument("--data", nargs="+", required=True)
        if name in ("all", "score"):
            command.add_argument("--tasks", type=Path, required=True)
    return parser.parse_args()


def train(arm: str, seed: int, data: Sequence[str], out: Path) -> None:
    """Pretrain one arm up to the budget, or go on with it."""
    run = out / f"{arm}-{seed}"
    command = ["compare_objectives", arm, str(seed)]
    if (run / "run.json").is_file():
        request = PretrainArguments(None, resume=str(run), command=command)
    else:
        overrides = [*COMMON, *ARMS[arm], f"seed={seed}"]
        overrides.append(f"optimisation.steps={steps_within_budget(overrides, data)}")
        request = PretrainArguments(
            "quickstart",
            [Override.parse(text) for text in overrides],
            sources=data,
            run_dir=run,
            command=command,
        )
    run_pretraining(request, progress=silent_progress)
    minutes = resource.getrusage(resource.RUSAGE_SELF).ru_utime / 60
    print(f"{run}: {minutes:.1f} CPU minutes", flush=True)


def steps_within_budget(overrides: Sequence[str], data: Sequence[str], *, sample: int = 48) -> int:
    """The budget over the mean cost of a step, measured on the first batches."""
    sources = json.dumps([str(Path(source).absolute()) for source in data])
    recipe = load_recipe("quickstart", [Override.parse(text) for text in [*overrides, f"data.sources={sources}"]])
    shards = open_shards(recipe, cache=cache_directory(), offline=True, progress=silent_progress)
    tokenizer = load_tokenizer(shards.directory)
    batches = StageRun(stages_of(recipe)[0], shards, tokenizer, cache=cache_directory()).batches
    model = pretraining_model(recipe.model, recipe.objectives, tokenizer.vocab_size, pad_id=tokenizer.pad_id)
    costs = (training_flops(model, batches[step], recipe.objectives) for step in range(sample))
    return round(BUDGET_FLOPS / statistics.mean(costs))


def score(arm: str, seed: int, tasks: Path, out: Path) -> None:
    """Ask a finished run what it knows."""
    run = out / f"{arm}-{seed}"
    record, results = (json.loads((run / name).read_text()) for name in ("run.json", "results.json"))
    causal = arm == "causal_lm"
    scores: dict[str, Any] = {"arm": arm, "seed": seed, "steps": record["steps"], "tokens": record["tokens"]}
    term = "causal_lm" if causal else "masked_lm"
    scores["held_out"] = results["held_out"][f"accuracy/{term}"]
    scores["pos"] = tagging_probe(run, tasks, causal=causal)
    # The generator of replaced-token detection is the masked LM there; the model itself has no words to give.
    speaker = run / "generator" if _REPLACED in ARMS[arm] else run
    scores["masked"] = None if causal else masked(speaker, tasks, out / f"{arm}-{seed}-masked")
    scores["blimp"] = blimp(speaker, tasks, out / f"{arm}-{seed}-blimp", causal=causal)
    for task, overrides in FINETUNES.items():
        scores[task] = fine_tuned(run, task, overrides, seed, tasks, out / "finetuned" / f"{arm}-{seed}-{task}")
    (out / f"{arm}-{seed}.json").write_text(json.dumps(scores, indent=2) + "\n")
    print(json.dumps(scores), flush=True)


def fine_tuned(model: Path, task: str, overrides: Sequence[str], seed: int, tasks: Path, run: Path) -> float:
    """The task's main score on dev."""
    if (run / "run.json").is_file():
        request = FinetuneArguments(resume=str(run))
    else:
        request = FinetuneArguments(
            task=task,
            model=str(model),
            data_dir=str(tasks / "glue"),
            overrides=[Override.parse(text) for text in overrides],
            seeds=[seed],
            run_dir=run,
            command=["compare_objectives"],
        )
    outcome = finetune(request, progress=silent_progress)
    return float(outcome.results["tasks"][task][PRIMARY[task]]["mean"])


def masked(model: Path, tasks: Path, run: Path) -> float:
    """Accuracy on masked pieces of text that no run has learnt from."""
    settings = MlmSettings(sequences=MASKED_WINDOWS, pseudo_sequences=0)
    sources = [str(tasks / "text" / "wikipedia-dev.txt.xz")]
    return average(run, lambda request: evaluate_mlm(request, sources, settings), model)


def blimp(model: Path, tasks: Path, run: Path, *, causal: bool) -> float:
    """Preference for the grammatical sentence over all paradigms, ties counted half."""
    settings = BlimpSettings(pairs=BLIMP_PAIRS, rule="encoder_left_to_right" if causal else None)
    return average(run, lambda request: evaluate_blimp(request, tasks / "blimp", settings), model)


def average(run: Path, evaluate: Callable[[EvalArguments], Evaluated], model: Path) -> float:
    """Of a measurement, which is not repeated; of one that was broken off nothing is kept."""
    if not (run / "results.json").is_file():
        shutil.rmtree(run, ignore_errors=True)
        evaluate(EvalArguments(str(model), run_dir=run, command=["compare_objectives"]))
    return float(json.loads((run / "results.json").read_text())["average"])


def tagging_probe(run: Path, tasks: Path, *, causal: bool) -> float:
    """Accuracy on dev of the best layer's linear probe of universal parts of speech, first pieces of words.

    Without a common scale of the dimensions the probe's optimiser does not converge.
    """
    model, _ = load_model(find_model(str(run)))
    tokenizer = load_tokenizer(run / "model")
    splits = {}
    for split in ("train", "dev"):
        examples = load_split("ud-pos", split, tasks).examples[:PROBE_SENTENCES]
        splits[split] = word_states(model, tokenizer, examples, causal=causal)
    best = 0.0
    for layer in range(LAYERS):
        (states_WD, tags_W), (dev_WD, dev_W) = (
            (states[layer], tags) for states, tags in (splits["train"], splits["dev"])
        )
        probe = make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000)).fit(states_WD, tags_W)
        best = max(best, float(probe.score(dev_WD, dev_W)))
    return best


@torch.inference_mode()
def word_states(
    model: Any, tokenizer: Tokenizer, examples: Sequence[Any], *, causal: bool, at_once: int = 64
) -> tuple[list[NDArray[np.float32]], NDArray[np.str_]]:
    """Each layer's states at the first piece of every word, and the words' tags."""
    points = [f"blocks.{layer}.hook_resid_post" for layer in range(LAYERS)]
    states: list[list[NDArray[np.float32]]] = [[] for _ in points]
    tags: list[str] = []
    for first in range(0, len(examples), at_once):
        ids: list[list[int]] = []
        places: list[int] = []
        offset = 0
        for example in examples[first : first + at_once]:
            assert isinstance(example, TaggedExample)
            assert example.tags is not None
            sequence = [tokenizer.cls_id]
            for word, tag in zip(tokenizer.encode_batch(example.words), example.tags, strict=True):
                if word and len(sequence) + len(word) < model.encoder.max_tokens:
                    places.append(offset + len(sequence))
                    tags.append(tag)
                    sequence += word
            ids.append([*sequence, tokenizer.sep_id])
            offset += len(ids[-1])
        recorder = Recorder(points)
        model(PackedBatch.from_ids(ids, causal=causal), recorder)
        for kept, point in zip(states, points, strict=True):
            kept.append(recorder.kept[point][places].numpy())
    return [np.concatenate(kept) for kept in states], np.array(tags)


def table(out: Path) -> None:
    """Mean and spread by arm, as Markdown and as a figure, and every run's row."""
    rows = rows_of(out)
    print("| objective | seeds | steps | tokens | " + " | ".join(COLUMNS) + " |\n|" + "---|" * (4 + len(COLUMNS)))
    figures = 100 * rows.groupby("arm", sort=False)[list(COLUMNS)].agg(["mean", "std"])
    for arm, own in rows.groupby("arm", sort=False):
        cells = [in_percent(*figures.loc[arm, column]) for column in COLUMNS]
        counts = f"{len(own)} | {own['steps'].mean():,.0f} | {own['tokens'].mean() / 1e6:.2f} M"
        print(f"| {arm} | {counts} | " + " | ".join(cells) + " |")
    draw(rows, out)


def rows_of(out: Path) -> pd.DataFrame:
    """What every run scored, here or before; the file of them is brought up to date."""
    rows = measured(out)
    rows["arm"] = pd.Categorical(rows["arm"], list(ARMS)).remove_unused_categories()
    rows = rows.astype(dict.fromkeys(COLUMNS, float)).round(5).sort_values(["arm", "seed"])
    rows.to_csv(out / "objectives.csv", index=False)
    return rows


def is_known(arm: str, seed: int, out: Path) -> bool:
    """Whether a run was scored, here or before."""
    rows = measured(out)
    return bool(((rows["arm"] == arm) & (rows["seed"] == seed)).any())


def measured(out: Path) -> pd.DataFrame:
    """The rows of the runs that were scored before, and of those that were scored here."""
    before = out / "objectives.csv"
    rows = pd.read_csv(before).to_dict("records") if before.is_file() else []
    rows += [json.loads(path.read_text()) for path in sorted(out.glob("*-[0-9].json"))]
    columns = ["arm", "seed", "steps", "tokens", *COLUMNS]
    return pd.DataFrame(rows, columns=columns).drop_duplicates(["arm", "seed"], keep="last")


def in_percent(mean: float, deviation: float) -> str:
    """A mean and its sample standard deviation; of a single seed the value alone."""
    if math.isnan(mean):
        return "–"
    return f"{mean:.1f}" + ("" if math.isnan(deviation) else f" ± {deviation:.1f}")


def draw(rows: pd.DataFrame, out: Path) -> None:
    """One panel a column that compares objectives, one line an objective: every seed, mean and standard deviation."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    arms = list(rows["arm"].cat.categories)[::-1]
    figure, axes = pyplot.subplots(1, len(PANELS), figsize=(14, 0.4 * len(arms) + 1.4), sharey=True)
    for axis, (column, label) in zip(axes, PANELS.items(), strict=True):
        for line, arm in enumerate(arms):
            seeds = 100 * rows.loc[rows["arm"] == arm, column]
            axis.plot(seeds, [line] * len(seeds), "o", color="tab:blue", alpha=0.5, markersize=4)
            spread = seeds.std() if len(seeds) > 1 else 0.0
            axis.errorbar(seeds.mean(), line, xerr=spread, fmt="|", markersize=12, color="black", capsize=3)
        axis.set_yticks(range(len(arms)), [arm.replace("_", " ") for arm in arms])
        axis.locator_params(axis="x", nbins=5)
        axis.set_xlabel(label)
        axis.grid(color="0.9")
        axis.set_axisbelow(True)
    figure.tight_layout()
    for suffix in ("png", "svg"):
        figure.savefig(out / f"objectives.{suffix}", dpi=120)


if __name__ == "__main__":
    main()
