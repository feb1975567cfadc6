"""`bertkit pretrain`: pretrains a model from a recipe and text.

Sibling tokenize.py only makes the shards.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from bertkit.cli.console import console
from bertkit.cli.options import Data, Hyperparameters, RecipeName, Resume, Training, option
from bertkit.errors import UsageError

if TYPE_CHECKING:
    from bertkit.recipe.resolve import Override

_OF_MASKS = ("masked_lm", "masked_permuted_lm", "masked_diffusion")
"""Terms that predict masked words, which a baseline of the most frequent word is compared with."""


def pretrain(
    recipe: RecipeName = "",
    data: Data = None,
    resume: Resume = None,
    init: Annotated[
        str | None,
        option("--init", metavar="MODEL", help="Model to start from: a Hub id, a model directory or a run directory."),
    ] = None,
    add_tokens: Annotated[
        int | None,
        option(
            "--add-tokens",
            metavar="N",
            help="With --init: add N words of the text to the model's vocabulary, those that save the most tokens.",
        ),
    ] = None,
    *,
    hyperparameters: Hyperparameters,
    common: Training,
) -> None:
    """Pretrain a model: tokenizer, token shards, training and a Hugging Face model directory in one command.

    Examples:
    `bertkit pretrain quickstart`
    `bertkit pretrain bert-tiny --data my.txt`
    `bertkit pretrain --resume`
    """
    from bertkit.pretraining.arguments import PretrainArguments
    from bertkit.pretraining.plan import pretraining_plan
    from bertkit.pretraining.run import run_pretraining

    with common.place(resume) as place:
        request = PretrainArguments(
            recipe=recipe or None,
            overrides=[*added_tokens(add_tokens), *hyperparameters.overrides, *common.overrides],
            sources=data or (),
            max_steps=common.max_steps,
            init=init,
            resume=place.resume,
            **common.argument_fields(place),
        )
        common.execute(
            place,
            request,
            plan=lambda each: pretraining_plan(each.new_recipe(), offline=common.offline),
            run=run_pretraining,
            show=lambda finished: print_held_out(finished.results),
        )


def added_tokens(count: int | None) -> list[Override]:
    """The recipe override for `--add-tokens`.

    Raises:
        UsageError: no token would be added.
    """
    from bertkit.recipe.resolve import Override

    if count is None:
        return []
    if count < 1:
        raise UsageError(f"--add-tokens {count}: adds nothing; give 1 or more, or leave it out to keep the vocabulary")
    return [Override("tokenizer.add_tokens", count, "--add-tokens")]


def _is_share(name: str) -> bool:
    """Whether a metric is shown in percent."""
    return name.startswith(("accuracy/", "baseline/", "precision/", "recall/")) or name in ("bleu", "chrf", "exact")


def print_held_out(results: dict[str, Any]) -> None:
    """The metrics on held-out text, and sample texts with the masks filled in."""
    from bertkit.pretraining.held_out import HeldOutSize

    held_out = results["held_out"]
    rows = [(name, f"{value:.4g}") for name, value in held_out.items() if not _is_share(name)]
    for name, value in held_out.items():
        if _is_share(name) and name != "accuracy/unigram":
            rows.append((name, f"{value:.1%}"))
    if "accuracy/unigram" in held_out:
        baseline = held_out["accuracy/unigram"]
        # If rare words are masked, predicting the most frequent word may never be right.
        own = next((name for name in _OF_MASKS if f"accuracy/{name}" in held_out), None)
        times = f" ({own} is at {held_out[f'accuracy/{own}'] / baseline:.1f}x)" if baseline and own else ""
        rows.append(("unigram baseline", f"{baseline:.1%}{times}"))
    for name, value in results.get("teacher", {}).get("held_out", {}).items():
        rows.append((f"the teacher's {name}", f"{value:.1%}" if _is_share(name) else f"{value:.4g}"))
    console.table(["held-out text", ""], rows)
    size = HeldOutSize.of(results.get("held_out_text"))
    if size is not None and not size.suffices:
        console.warn(size.in_words)
    for example in results.get("examples", ()):
        masks = [
            # Runs of earlier versions have only the token.
            "  ".join(f"{word.get('text', word['token'])} {word['probability']:.0%}" for word in mask)
            for mask in example["masks"]
        ]
        hidden = f" ({example['word']})" if "word" in example else ""
        console.line(f"  {example['text']}{hidden}  ->  {' | '.join(masks)}")
