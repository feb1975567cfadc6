"""`bertkit pretrain`: a recipe and text in, a run directory out.

Nothing here follows a paper. Sibling tokenize.py stops at the shards; this goes on to a model.
"""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from bertkit.cli.common import (
    AsJson,
    Data,
    Device,
    MaxMinutes,
    MaxSteps,
    Offline,
    Plan,
    Precision,
    Quiet,
    RecipeName,
    Resume,
    RunDir,
    Seed,
    SetOption,
    Verbose,
    cache_root,
    command_app,
    result,
    runs_root,
    story,
)

app = command_app()

Init = Annotated[
    str | None,
    typer.Option(
        "--init", metavar="MODEL", show_default=False, help="Start from a model: a Hub id, a model or a run directory."
    ),
]


@app.command()
def pretrain(
    recipe: RecipeName = "",
    data: Data = None,
    resume: Resume = None,
    init: Init = None,
    overrides: SetOption = None,
    plan: Plan = False,
    run_dir: RunDir = None,
    seed: Seed = None,
    device: Device = None,
    precision: Precision = None,
    max_steps: MaxSteps = None,
    max_minutes: MaxMinutes = None,
    offline: Offline = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
    verbose: Verbose = 0,
) -> None:
    """Pretrain a model: tokenizer, shards, training and a Hugging Face directory in one go.

    Examples: `bertkit pretrain quickstart`, `bertkit pretrain bert-tiny --data my.txt`, `bertkit pretrain --resume`.
    """
    from bertkit.jobs.launch import PretrainRequest, requested_recipe, run_pretraining
    from bertkit.jobs.plan import plan_in_words, pretraining_plan
    from bertkit.run.directory import RunDirectory

    shorthand = {"seed": seed, "engine.device": device, "engine.precision": precision}
    request = PretrainRequest(
        recipe=recipe or None,
        overrides=[*(overrides or ()), *(f"{key}={value}" for key, value in shorthand.items() if value is not None)],
        sources=data or (),
        max_steps=max_steps,
        init=init,
        resume=resume,
        runs_root=runs_root(),
        run_dir=run_dir,
        cache=cache_root(),
        offline=offline,
        max_minutes=max_minutes,
        command=sys.argv,
    )
    if plan:
        document = pretraining_plan(requested_recipe(request))
        if as_json:
            result(document, as_json=True)
        else:
            for name, value in plan_in_words(document):
                result(f"{name:<12}{value}")
        return

    def keep_log(run: RunDirectory) -> None:
        story.log_file = run.log_file

    finished = run_pretraining(request, progress=story.progress, begun=keep_log)
    _tell(finished.results)
    document = {
        "run": str(finished.run.path),
        "status": "done",
        "steps": finished.run.record["steps"],
        "tokens": finished.run.record["tokens"],
        "results": finished.results,
    }
    result(document if as_json else str(finished.run.path), as_json=as_json)


def _tell(results: dict[str, Any]) -> None:
    """The figures for people."""
    held_out = results["held_out"]
    rows = [(name, f"{value:.4g}") for name, value in held_out.items() if not name.startswith("accuracy/")]
    for name, value in held_out.items():
        if name.startswith("accuracy/") and name != "accuracy/unigram":
            rows.append((name, f"{value:.1%}"))
    if "accuracy/unigram" in held_out:
        times = held_out["accuracy/masked_lm"] / max(held_out["accuracy/unigram"], 1e-9)
        rows.append(("unigram baseline", f"{held_out['accuracy/unigram']:.1%} (masked_lm is at {times:.1f}x)"))
    story.table(["held-out text", ""], rows)
    for example in results.get("examples", ()):
        masks = ["  ".join(f"{word['token']} {word['probability']:.0%}" for word in mask) for mask in example["masks"]]
        story.line(f"  {example['text']}  ->  {' | '.join(masks)}")
