"""`bertkit pretrain`: a recipe and text in, a run directory out.

Nothing here follows a paper. Sibling tokenize.py stops at the shards; this goes on to a model.
"""

from __future__ import annotations

import sys
from typing import Annotated, Any

from bertkit.cli.common import Data, RecipeName, Resume, cache_root, command_app, option, runs_root, story
from bertkit.cli.shared import Training, as_overrides, keep_log, with_options

app = command_app()

Init = Annotated[
    str | None, option("--init", metavar="MODEL", help="Start from a model: a Hub id, a model or a run directory.")
]


@app.command()
@with_options
def pretrain(
    recipe: RecipeName = "",
    data: Data = None,
    resume: Resume = None,
    init: Init = None,
    *,
    common: Training,
) -> None:
    """Pretrain a model: tokenizer, shards, training and a Hugging Face directory in one go.

    Examples: `bertkit pretrain quickstart`, `bertkit pretrain bert-tiny --data my.txt`, `bertkit pretrain --resume`.
    """
    from bertkit.pretraining.arguments import PretrainArguments
    from bertkit.pretraining.plan import pretraining_plan
    from bertkit.pretraining.run import run_pretraining

    shorthand = {"seed": common.seed, "engine.device": common.device, "engine.precision": common.precision}
    request = PretrainArguments(
        recipe=recipe or None,
        overrides=[*(common.overrides or ()), *as_overrides(shorthand)],
        sources=data or (),
        max_steps=common.max_steps,
        init=init,
        resume=resume,
        runs_root=runs_root(),
        run_dir=common.run_dir,
        cache=cache_root(),
        offline=common.offline,
        max_minutes=common.max_minutes,
        command=sys.argv,
    )
    if common.plan:
        common.finish_plan(pretraining_plan(request.requested()))
        return
    finished = run_pretraining(request, progress=story.progress, begun=keep_log)
    tell_held_out(finished.results)
    common.finish(finished.run, finished.results)


def tell_held_out(results: dict[str, Any]) -> None:
    """The figures for people."""
    held_out = results["held_out"]
    rows = [(name, f"{value:.4g}") for name, value in held_out.items() if not name.startswith("accuracy/")]
    for name, value in held_out.items():
        if name.startswith("accuracy/") and name != "accuracy/unigram":
            rows.append((name, f"{value:.1%}"))
    if "accuracy/unigram" in held_out:
        baseline = held_out["accuracy/unigram"]
        # Where rare words are masked, the commonest one may never be right.
        times = f" (masked_lm is at {held_out['accuracy/masked_lm'] / baseline:.1f}x)" if baseline else ""
        rows.append(("unigram baseline", f"{baseline:.1%}{times}"))
    for name, value in results.get("teacher", {}).get("held_out", {}).items():
        rows.append((f"the teacher's {name}", f"{value:.1%}" if name.startswith("accuracy/") else f"{value:.4g}"))
    story.table(["held-out text", ""], rows)
    for example in results.get("examples", ()):
        masks = ["  ".join(f"{word['token']} {word['probability']:.0%}" for word in mask) for mask in example["masks"]]
        story.line(f"  {example['text']}  ->  {' | '.join(masks)}")
