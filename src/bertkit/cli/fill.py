"""`bertkit fill`: the most probable words at each [MASK]."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bertkit.cli.console import console, result
from bertkit.cli.options import Common, Model, model_or_default
from bertkit.errors import UsageError

if TYPE_CHECKING:
    from bertkit.models.headed import HeadedModel
    from bertkit.text.tokenizer import Tokenizer


def fill(
    texts: Annotated[list[str], typer.Argument(metavar="TEXT", help="Texts with [MASK] in place of words.")],
    model: Model = None,
    top: Annotated[int, typer.Option("--top", metavar="K", min=1, help="Number of words to show per mask.")] = 5,
    *,
    common: Common,
) -> None:
    """Fill in masked words: `bertkit fill --model RUN "The [MASK] returns a list."`"""
    from bertkit.models.scoring.fill_mask import fill_masks

    if model is None and Path(texts[0]).is_dir():
        raise UsageError(f"TEXT {texts[0]}: is a directory, not a text with [MASK]; give a model with --model")
    filled = fill_masks(*load_with_tokenizer(model_or_default(model), offline=common.offline), texts, top=top)
    if common.as_json:
        result(filled, as_json=True)
        return
    for text in filled:
        result(text["text"])
        for guesses in text["masks"]:
            result("  " + "  ".join(f"{guess['text']} {guess['probability']:.1%}" for guess in guesses))


def load_with_tokenizer(name: str, *, offline: bool) -> tuple[HeadedModel, Tokenizer]:
    """A model and its tokenizer.

    Raises:
        DataError: no such model, damaged files, or a tokenizer of another model.
    """
    from bertkit.models.files.hub import check_vocabulary, find_model, load_model
    from bertkit.models.files.model_files import encoder_directory
    from bertkit.text.tokenizer_files import load_tokenizer

    directory = find_model(name, offline=offline)
    model, report = load_model(directory)
    console.debug(f"{directory}: {len(report.loaded)} weights loaded, unexpected: {report.unexpected or 'none'}")
    tokenizer = load_tokenizer(encoder_directory(directory), offline=offline)
    check_vocabulary(model, tokenizer, source=name)
    return model, tokenizer
