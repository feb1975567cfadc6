"""Greedy decoding compared with `transformers.generate`: the same random GPT-2, the same prompts.

Radford et al. 2019, GPT-2. Both sides cache keys and values. With bfloat16 the peer is timed in both precisions,
because single is its default. The document includes how many outputs equal those of the same precision: in single
precision nearly all, since random weights have few ties. Sibling benchmarks/generate_speed.py also compares with and
without the cache.

Shapes: B prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bertkit.bench.settings import SIZES, BenchSettings
from bertkit.bench.workload import OWN, Peers, Work, Workload, peer_library
from bertkit.generation.causal import Limits, Prompt, decode
from bertkit.models.decoding.causal import next_tokens
from bertkit.models.families.gpt2 import Gpt2Config
from bertkit.models.files.hub import save_model
from bertkit.models.headed import HeadedModel
from bertkit.models.quantisation.bf16 import cast_linears_to_bf16
from bertkit.training.cost import FORWARD_SHARE, count_parameters, step_flops
from bertkit.training.engine import Engine
from bertkit.training.product_rate import synchronise

PROMPT_TOKENS = 32
HEAD = "causal_lm"
PEER = "transformers.generate"

Ids = list[list[int]]


def generation(settings: BenchSettings, engine: Engine, directory: Path) -> Workload:
    """The greedy continuations of a batch of random prompts.

    Args:
        settings: size, number of prompts and of new tokens.
        engine: for its device.
        directory: an empty one, through which the peer gets the weights.
    """
    size = SIZES[settings.size]
    config = Gpt2Config(
        hidden_size=size.width,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        intermediate_size=4 * size.width,
    )
    model = HeadedModel(config.build(settings.vocab_size), (HEAD,))
    model.initialise(0)
    save_model(model, None, directory)
    model.to(engine.device).eval()
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, settings.vocab_size, (settings.prompts, PROMPT_TOKENS), generator=generator).tolist()
    outputs: dict[str, Ids] = {}

    def kept(name: str, work: Callable[[], Ids]) -> None:
        outputs[name] = work()
        synchronise(engine.device)

    def written() -> Ids:
        with engine.autocast():
            return own_tokens(model, ids, settings.new_tokens)

    if engine.bf16:
        cast_linears_to_bf16(model, words=True)
    own = partial(kept, OWN, written)
    own()
    peers = Peers(wanted=settings.peers)
    kinds = {PEER: torch.float32, **({f"{PEER}, bf16": torch.bfloat16} if engine.bf16 else {})}
    for name, dtype in kinds.items():

        def peer(name: str = name, dtype: torch.dtype = dtype) -> Work:
            return partial(kept, name, partial(peer_tokens, _peer(directory, engine, dtype), ids, settings.new_tokens))

        peers.add(name, peer)
    *_, alike = kinds
    equal = {} if alike not in outputs else {"equal_outputs": sum(map(list.__eq__, outputs[OWN], outputs[alike]))}
    read = PROMPT_TOKENS + settings.new_tokens - 1
    return Workload(
        about={
            "model": f"random GPT-2, {size.width} x {size.layers}",
            "prompts": settings.prompts,
            "new_tokens": settings.new_tokens,
            "precision": engine.precision,
            **equal,
        },
        unit="new tokens",
        amount=settings.prompts * settings.new_tokens,
        sides={OWN: own, **peers.sides},
        left_out=peers.left_out,
        flops=FORWARD_SHARE
        * step_flops(
            model,
            tokens=settings.prompts * read,
            squared_lengths=settings.prompts * read**2 / 2,
            predictions=settings.prompts * settings.new_tokens,
            sequences=settings.prompts,
        ),
        memory_bytes=(2 if engine.bf16 else 4) * count_parameters(model).total * settings.new_tokens,
    )


def own_tokens(model: HeadedModel, ids: Sequence[list[int]], tokens: int, *, cached: bool = True) -> Ids:
    """bertkit's new tokens for each prompt; no output ends early."""
    prompts = [Prompt(row, number, tokens) for number, row in enumerate(ids)]
    outputs = decode(next_tokens(model, cached=cached), prompts, Limits(), sampling=None)
    return [own[0].ids for own in outputs]


def _peer(directory: Path, engine: Engine, dtype: torch.dtype) -> Any:
    transformers = peer_library("transformers")
    return transformers.GPT2LMHeadModel.from_pretrained(directory, dtype=dtype).to(engine.device).eval()


@torch.inference_mode()
def peer_tokens(model: Any, ids: Sequence[list[int]], tokens: int) -> Ids:
    """The same from `transformers`: a model of its class `GPT2LMHeadModel`."""
    prompt = torch.tensor(ids, device=model.device)
    found = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=tokens,
        min_new_tokens=tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    new: Ids = found[:, prompt.shape[1] :].tolist()
    return new
