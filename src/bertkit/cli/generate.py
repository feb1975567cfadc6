"""`bertkit generate`: text out of a model, streamed to a terminal or as one JSON document.

Nothing here follows a paper; the methods do (bertkit.generation).
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from bertkit.cli.console import console, figure, result
from bertkit.cli.generated_options import spelled
from bertkit.cli.options import COMMON_PANEL, BatchTokens, Common, Device, Model, model_or_default, option
from bertkit.errors import DataError, UsageError
from bertkit.generation.settings import GenerationSettings
from bertkit.progress import silent_progress
from bertkit.visible import visible_document

if TYPE_CHECKING:
    import torch

    from bertkit.models.headed import HeadedModel
    from bertkit.text.tokenizer import Tokenizer

STREAMED = (None, "greedy", "sample")
"""Methods whose outputs grow from left to right."""


def generate(
    prompts: Annotated[
        list[str] | None,
        typer.Argument(metavar="[PROMPT]...", show_default=False, help="Texts to continue (default: an empty text)."),
    ] = None,
    file: Annotated[
        Path | None, option("--file", metavar="FILE", help="File with one prompt per line, also compressed; -: stdin.")
    ] = None,
    model: Model = None,
    *,
    settings: Annotated[GenerationSettings, spelled(stop="--stop TEXT", block_length="--block-length N")],
    quality: Annotated[
        bool,
        option(
            "--quality",
            metavar="",
            help="Also compute distinct-n and self-BLEU of each prompt's outputs, and of all outputs together.",
        ),
    ] = False,
    judge: Annotated[
        str | None,
        option(
            "--judge", metavar="MODEL", help="Also compute each output's perplexity, prompt included, under this model."
        ),
    ] = None,
    batch_tokens: BatchTokens = None,
    device: Device = None,
    precision: Annotated[
        Literal["auto", "fp32", "bf16"],
        option(
            "--precision",
            panel=COMMON_PANEL,
            help="Number format. bf16 halves the bytes that are read, which determine the time per token; auto: bf16"
            " if the device has instructions for it. A different format may choose different words.",
        ),
    ] = "fp32",
    common: Common,
) -> None:
    """Generate text: `bertkit generate --model RUN "The company" --samples 3`

    A causal model continues the prompt. A masked model fills in the masks of the prompt or, if there are none,
    --max-new-tokens masks after it. An encoder-decoder writes the target of each text, such as its translation.

    Examples:
    `bertkit generate --model RUN "The company" --temperature 0.8 --top-p 0.9`
    `bertkit generate --model RUN --file prompts.txt --beam 4 --json`
    `bertkit generate --model MASKED-RUN "The [MASK] [MASK] of the year" --method gibbs`
    """
    from bertkit.generation.run import generate as generated
    from bertkit.models.bf16 import keep_in_bf16
    from bertkit.training.config import EngineConfig
    from bertkit.training.engine import resolve_engine

    texts = _prompts(prompts, file)
    tokens = "auto" if batch_tokens is None else batch_tokens
    engine = resolve_engine(EngineConfig(device=device or "auto", precision=precision, micro_batch_tokens=tokens))
    loaded, tokenizer = _loaded(model_or_default(model), offline=common.offline)
    reads_source = loaded.encoder.config.is_encoder_decoder
    is_shown = sys.stdout.isatty() and not common.as_json and len(texts) == settings.samples == 1
    is_streamed = is_shown and settings.method in STREAMED and settings.beam is None
    stream = _Stream("" if reads_source else texts[0]) if is_streamed else None
    if engine.bf16:
        keep_in_bf16(loaded, words=True)
    with engine.autocast():
        documents = generated(
            loaded,
            tokenizer,
            texts,
            settings,
            device=engine.device,
            on_text=None if stream is None else stream,
            progress=silent_progress if sys.stdout.isatty() else console.progress,
            **({} if batch_tokens in (None, "auto") else {"batch_tokens": engine.micro_batch_tokens}),
        )
    if quality:
        _add_quality(documents)
    if judge is not None:
        _add_perplexities(documents, judge, engine.device, reads_source=reads_source, offline=common.offline)
    if common.as_json:
        result(documents, as_json=True)
    elif stream is not None and stream.is_used:
        stream.finish(documents[0]["outputs"][0]["text"])
    else:
        _print(documents, reads_source=reads_source)


def _loaded(name: str, *, offline: bool) -> tuple[HeadedModel, Tokenizer]:
    from bertkit.models.hub import check_vocabulary, find_model, load_model
    from bertkit.models.model_files import encoder_directory
    from bertkit.text.tokenizer_files import load_tokenizer

    directory = find_model(name, offline=offline)
    model, report = load_model(directory)
    console.debug(f"{directory}: {len(report.loaded)} weights loaded, unexpected: {report.unexpected or 'none'}")
    tokenizer = load_tokenizer(encoder_directory(directory), offline=offline)
    check_vocabulary(model, tokenizer, source=name)
    return model, tokenizer


def _prompts(prompts: list[str] | None, file: Path | None) -> list[str]:
    if prompts and file is not None:
        raise UsageError("prompts are given twice, as arguments and with --file; leave one out")
    if file is None:
        return list(prompts or [""])
    from bertkit.inference.predict_input import input_lines

    path = None if str(file) == "-" else file
    lines = [line for _, line in input_lines(path, sys.stdin.buffer)]
    texts = [line.rstrip("\r\n") for line in lines]
    if not texts:
        raise DataError(f"{file}: is empty; write one prompt per line")
    return texts


def _print(documents: list[dict[str, Any]], *, reads_source: bool) -> None:
    """Each prompt with its outputs, a blank line between two; of a source the outputs alone, one a line."""
    number = 0
    for document in documents:
        for output in document["outputs"]:
            if number and not reads_source:
                result("")
            result(output["text"] if reads_source else _whole(document["prompt"], output), as_document=True)
            number += 1


def _add_quality(documents: list[dict[str, Any]]) -> None:
    from bertkit.generation.quality import variety

    for document in documents:
        document["quality"] = variety([output["text"] for output in document["outputs"]])
    found = variety([output["text"] for document in documents for output in document["outputs"]])
    console.table(("of all outputs", ""), [(name, figure(value)) for name, value in found.items()])


def _add_perplexities(
    documents: list[dict[str, Any]], name: str, device: torch.device, *, reads_source: bool, offline: bool
) -> None:
    from statistics import median

    from bertkit.generation.quality import perplexities
    from bertkit.models.hub import find_model, load_model
    from bertkit.models.model_files import encoder_directory
    from bertkit.text.tokenizer_files import load_tokenizer

    directory = find_model(name, offline=offline)
    model, _ = load_model(directory)
    tokenizer = load_tokenizer(encoder_directory(directory), offline=offline)
    outputs = [(document, output) for document in documents for output in document["outputs"]]
    texts = [output["text"] if reads_source else _whole(document["prompt"], output) for document, output in outputs]
    found = perplexities(model, tokenizer, texts, source=name, device=device, progress=console.progress)
    for (_, output), value in zip(outputs, found, strict=True):
        output["perplexity"] = value
    known = [value for value in found if value is not None]
    if known:
        console.info(f"perplexity under {name}: median {median(known):.1f} of {len(known)} outputs")


def _whole(prompt: str, output: dict[str, Any]) -> str:
    return str(output["text"]) if output["finish"] == "filled" else f"{prompt}{output['text']}"


class _Stream:
    """An output on a terminal as it grows. Text that later tokens may change is held back: half a character, and what
    the tokenizer's decoder joins."""

    def __init__(self, prompt: str) -> None:
        self._prompt = prompt
        self._shown = ""
        self.is_used = False

    def __call__(self, prompt: int, sample: int, text: str) -> None:
        self._show(text, held=1)

    def finish(self, text: str) -> None:
        """All of the output."""
        self._show(text, held=0)
        sys.stdout.write("\n")
        sys.stdout.flush()

    def _show(self, text: str, held: int) -> None:
        if not self.is_used:
            console.has_result = self.is_used = True
            sys.stdout.write(visible_document(self._prompt))
        end = len(text.rstrip("\ufffd")) - held
        if text.startswith(self._shown) and end > len(self._shown):
            sys.stdout.write(visible_document(text[len(self._shown) : end]))
            self._shown = text[:end]
        sys.stdout.flush()
