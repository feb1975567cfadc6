"""`bertkit probe attention`, `attribution` and `effective-attention`: how information flows between tokens.

Nothing here follows a paper; the jobs of the same names do.
"""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from bertkit.cli.options import Models, Texts, option
from bertkit.cli.probe_common import Probing, Sentences


def attention(
    model: Models = None,
    data: Texts = None,
    sentences: Sentences = 1000,
    show: Annotated[
        list[str] | None,
        option("--show", metavar="TEXT", help="A sentence for the viewer (default: six of the text). Repeatable."),
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
    *,
    common: Probing,
) -> None:
    """What every head looks at, with a page to look at it; with trees, what it parses:
    `bertkit probe attention --model M --data treebank.conllu`"""
    from bertkit.probing.attention.run import AttentionSettings, probe_attention

    settings = AttentionSettings(
        sentences=sentences,
        divergence_tokens=divergence_tokens,
        pattern_pairs=pairs,
        least_words=least_words,
        show=show or [],
        seed=common.seed,
    )
    common.show(probe_attention(common.request(model, data), settings))


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
        option(
            "--text",
            metavar="TEXT",
            help="Explain the prediction for it: the word at its one [MASK], or its class. Repeatable.",
        ),
    ] = None,
    target: Annotated[
        str | None, option("--target", metavar="WORD", help="Explain this word or class, not the most probable.")
    ] = None,
    method: Annotated[
        list[str] | None,
        option(
            "--method",
            metavar="NAME",
            help="integrated_gradients, input_x_gradient, saliency or attention_rollout (default: all). Repeatable.",
        ),
    ] = None,
    baseline: Annotated[
        Literal["mask", "pad", "zero"],
        typer.Option("--baseline", help="What stands for words where integrated gradients begin."),
    ] = "mask",
    steps: Annotated[int, typer.Option("--steps", metavar="N", min=1, help="Points of their path.")] = 50,
    *,
    common: Probing,
) -> None:
    """What of each token is in a hidden state, and what a prediction rests on:
    `bertkit probe attribution --model M --data text.txt --text "The capital of France is [MASK]."`"""
    from bertkit.probing.attribution.run import AttributionSettings, probe_attribution

    settings = AttributionSettings(
        sentences=sentences,
        directions=directions,
        identify_sentences=identify_sentences,
        texts=text or [],
        target=target,
        methods=method or [],
        baseline=baseline,
        steps=steps,
        seed=common.seed,
    )
    common.show(probe_attribution(common.request(model, data), settings))


def effective_attention(
    model: Models = None,
    data: Texts = None,
    sentences: Sentences = 1000,
    texts: Annotated[int, typer.Option("--texts", metavar="N", min=1, help="Texts of each length.")] = 20,
    length: Annotated[
        list[int] | None,
        option(
            "--length",
            metavar="TOKENS",
            help="Of the texts, which are sentences one behind the other (default: from 8 to what the model reads)."
            " Repeatable.",
        ),
    ] = None,
    *,
    common: Probing,
) -> None:
    """How much of attention makes no difference, by length: `bertkit probe effective-attention --model M --data F`"""
    from bertkit.probing.effective_attention.run import EffectiveAttentionSettings, probe_effective_attention

    settings = EffectiveAttentionSettings(sentences=sentences, texts=texts, lengths=length or [], seed=common.seed)
    common.show(probe_effective_attention(common.request(model, data), settings))
