"""`bertkit probe attention`, `attribution` and `effective-attention`: how information flows between tokens.

Nothing here follows a paper; the jobs of the same names do.
"""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from bertkit.cli.common import AsJson, Device, Offline, Quiet, RunDir, Verbose
from bertkit.cli.probe_common import BatchTokens, DrawSeed, Models, Sentences, Texts, finish, probe_request


def attention(
    model: Models = None,
    data: Texts = None,
    sentences: Sentences = 1000,
    show: Annotated[
        list[str] | None,
        typer.Option(
            "--show",
            metavar="TEXT",
            show_default=False,
            help="A sentence for the viewer (default: six of the text). Repeatable.",
        ),
    ] = None,
    pairs: Annotated[
        int, typer.Option("--pairs", metavar="N", min=0, help="Pairs of sentences whose maps are sorted by shape.")
    ] = 100,
    divergence_tokens: Annotated[
        int, typer.Option("--divergence-tokens", metavar="N", min=1, help="Tokens by which heads are compared, about.")
    ] = 5000,
    least_words: Annotated[
        int, typer.Option("--least-words", metavar="N", min=1, help="Rarer relations of a treebank are not reported.")
    ] = 50,
    seed: DrawSeed = 0,
    batch_tokens: BatchTokens = None,
    run_dir: RunDir = None,
    device: Device = None,
    offline: Offline = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
    verbose: Verbose = 0,
) -> None:
    """What every head looks at, with a page to look at it; with trees, what it parses:
    `bertkit probe attention --model M --data treebank.conllu`"""
    from bertkit.jobs.probing.attention import AttentionSettings, probe_attention

    settings = AttentionSettings(
        sentences=sentences,
        divergence_tokens=divergence_tokens,
        pattern_pairs=pairs,
        least_words=least_words,
        show=show or [],
        seed=seed,
    )
    request = probe_request(model, data, device, batch_tokens, run_dir, offline)
    finish(probe_attention(request, settings), as_json=as_json)


def attribution(
    model: Models = None,
    data: Texts = None,
    sentences: Annotated[
        int,
        typer.Option(
            "--sentences", metavar="N", min=0, help="Sentences whose Jacobians are taken, drawn from the text; costly."
        ),
    ] = 30,
    directions: Annotated[
        int,
        typer.Option(
            "--directions",
            metavar="K",
            min=1,
            help="Random directions by which norms are estimated; as many as the model is wide are exact.",
        ),
    ] = 8,
    identify_sentences: Annotated[
        int,
        typer.Option(
            "--identify-sentences",
            metavar="N",
            min=0,
            help="Sentences by which it is learnt to tell a token from its state; 0 leaves that out.",
        ),
    ] = 500,
    text: Annotated[
        list[str] | None,
        typer.Option(
            "--text",
            metavar="TEXT",
            show_default=False,
            help="Explain the prediction for it: the word at its one [MASK], or its class. Repeatable.",
        ),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(
            "--target", metavar="WORD", show_default=False, help="Explain this word or class, not the most probable."
        ),
    ] = None,
    method: Annotated[
        list[str] | None,
        typer.Option(
            "--method",
            metavar="NAME",
            show_default=False,
            help="integrated_gradients, input_x_gradient, saliency or attention_rollout (default: all). Repeatable.",
        ),
    ] = None,
    baseline: Annotated[
        Literal["mask", "pad", "zero"],
        typer.Option("--baseline", help="What stands for words where integrated gradients begin."),
    ] = "mask",
    steps: Annotated[int, typer.Option("--steps", metavar="N", min=1, help="Points of their path.")] = 50,
    seed: DrawSeed = 0,
    batch_tokens: BatchTokens = None,
    run_dir: RunDir = None,
    device: Device = None,
    offline: Offline = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
    verbose: Verbose = 0,
) -> None:
    """What of each token is in a hidden state, and what a prediction rests on:
    `bertkit probe attribution --model M --data text.txt --text "The capital of France is [MASK]."`"""
    from bertkit.jobs.probing.attribution import AttributionSettings, probe_attribution

    settings = AttributionSettings(
        sentences=sentences,
        directions=directions,
        identify_sentences=identify_sentences,
        texts=text or [],
        target=target,
        methods=method or [],
        baseline=baseline,
        steps=steps,
        seed=seed,
    )
    request = probe_request(model, data, device, batch_tokens, run_dir, offline)
    finish(probe_attribution(request, settings), as_json=as_json)


def effective_attention(
    model: Models = None,
    data: Texts = None,
    sentences: Sentences = 1000,
    texts: Annotated[int, typer.Option("--texts", metavar="N", min=1, help="Texts of each length.")] = 20,
    length: Annotated[
        list[int] | None,
        typer.Option(
            "--length",
            metavar="TOKENS",
            show_default=False,
            help="Of the texts, which are sentences one behind the other (default: from 8 to what the model reads)."
            " Repeatable.",
        ),
    ] = None,
    seed: DrawSeed = 0,
    batch_tokens: BatchTokens = None,
    run_dir: RunDir = None,
    device: Device = None,
    offline: Offline = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
    verbose: Verbose = 0,
) -> None:
    """How much of attention makes no difference, by length: `bertkit probe effective-attention --model M --data F`"""
    from bertkit.jobs.probing.effective_attention import EffectiveAttentionSettings, probe_effective_attention

    settings = EffectiveAttentionSettings(sentences=sentences, texts=texts, lengths=length or [], seed=seed)
    request = probe_request(model, data, device, batch_tokens, run_dir, offline)
    finish(probe_effective_attention(request, settings), as_json=as_json)
