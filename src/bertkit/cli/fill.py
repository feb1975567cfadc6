"""`bertkit fill`: the most probable words at each [MASK].

Nothing here follows a paper. The quickest look at what a pretrained model knows.
"""

from __future__ import annotations

from typing import Annotated

import typer

from bertkit.cli.common import Model, command_app, model_or_default, result, story
from bertkit.cli.shared import Common, with_options

app = command_app()


@app.command()
@with_options
def fill(
    texts: Annotated[
        list[str], typer.Argument(metavar="TEXT...", help="Texts with [MASK] where a word is to be filled in.")
    ],
    model: Model = None,
    top: Annotated[int, typer.Option("--top", metavar="K", min=1, help="Words for each mask.")] = 5,
    *,
    common: Common,
) -> None:
    """Fill in masked words: `bertkit fill --model RUN "The [MASK] returns a list."`"""
    from bertkit.models.fill_mask import fill_masks
    from bertkit.models.hub import find_model, load_model
    from bertkit.text.tokenizer_files import load_tokenizer

    directory = find_model(model_or_default(model), offline=common.offline)
    loaded, report = load_model(directory)
    story.debug(f"{directory}: {len(report.loaded)} weights loaded, unexpected: {report.unexpected or 'none'}")
    filled = fill_masks(loaded, load_tokenizer(directory), texts, top=top)
    if common.as_json:
        result(filled, as_json=True)
        return
    for text in filled:
        result(text["text"])
        for guesses in text["masks"]:
            result("  " + "  ".join(f"{guess['token']} {guess['probability']:.1%}" for guess in guesses))
