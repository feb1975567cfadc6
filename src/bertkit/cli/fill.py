"""`bertkit fill`: the most probable words at each [MASK]."""

from __future__ import annotations

from typing import Annotated

import typer

from bertkit.cli.console import console, result
from bertkit.cli.options import Common, Model, model_or_default


def fill(
    texts: Annotated[list[str], typer.Argument(metavar="TEXT", help="Texts with [MASK] in place of words.")],
    model: Model = None,
    top: Annotated[int, typer.Option("--top", metavar="K", min=1, help="Number of words to show per mask.")] = 5,
    *,
    common: Common,
) -> None:
    """Fill in masked words: `bertkit fill --model RUN "The [MASK] returns a list."`"""
    from bertkit.models.files.hub import check_vocabulary, find_model, load_model
    from bertkit.models.files.model_files import encoder_directory
    from bertkit.models.scoring.fill_mask import fill_masks
    from bertkit.text.tokenizer_files import load_tokenizer

    name = model_or_default(model)
    directory = find_model(name, offline=common.offline)
    loaded, report = load_model(directory)
    console.debug(f"{directory}: {len(report.loaded)} weights loaded, unexpected: {report.unexpected or 'none'}")
    tokenizer = load_tokenizer(encoder_directory(directory), offline=common.offline)
    check_vocabulary(loaded, tokenizer, source=name)
    filled = fill_masks(loaded, tokenizer, texts, top=top)
    if common.as_json:
        result(filled, as_json=True)
        return
    for text in filled:
        result(text["text"])
        for guesses in text["masks"]:
            result("  " + "  ".join(f"{guess['text']} {guess['probability']:.1%}" for guess in guesses))
