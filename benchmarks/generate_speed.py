"""Generation speed of bertkit and `transformers.generate`: the same random GPT-2, greedy, alternating in one process.

    python -m benchmarks.generate_speed                    batch 1 and 16, 124M parameters, 128 new tokens
    python -m benchmarks.generate_speed --bf16             compared with `transformers` in both precisions
    python -m benchmarks.generate_speed --uncached         with and without the cache, 256 new tokens

Reports ratios of each side's fastest rounds. Run it on an idle machine, or with `--clock processor --threads 1`, which
is less affected by other processes.
"""

from __future__ import annotations

import argparse
import copy
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bertkit.bench.generate import own_tokens, peer_tokens
from bertkit.models.files.hub import load_model
from bertkit.models.headed import HeadedModel
from bertkit.models.quantisation.bf16 import cast_linears_to_bf16

SIZES: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "small": {"n_embd": 256, "n_layer": 4, "n_head": 4, "vocab_size": 8192},
}


def models(size: str) -> tuple[Any, HeadedModel]:
    """One model, as a class of `transformers` and of bertkit."""
    import transformers

    config = transformers.GPT2Config(**SIZES[size], bos_token_id=0, eos_token_id=0, pad_token_id=0)
    torch.manual_seed(0)
    oracle = transformers.GPT2LMHeadModel(config).eval()
    with tempfile.TemporaryDirectory() as directory:
        oracle.save_pretrained(directory)
        return oracle, load_model(Path(directory))[0]


def in_bf16(model: HeadedModel) -> HeadedModel:
    """A copy as used by `bertkit generate --precision bf16`."""
    reduced = copy.deepcopy(model)
    cast_linears_to_bf16(reduced, words=True)
    return reduced


def written_in_bf16(model: HeadedModel, ids: list[list[int]], tokens: int) -> list[list[int]]:
    """The new tokens of each prompt."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return own_tokens(model, ids, tokens)


def seconds(run: Callable[[], object], clock: Callable[[], float]) -> float:
    """The time of one call."""
    start = clock()
    run()
    return clock() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="gpt2")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--prompt", type=int, default=32, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=None, help="new tokens (default: 128; with --uncached 256)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--uncached", action="store_true", help="with and without the cache")
    parser.add_argument("--bf16", action="store_true", help="in bfloat16, beside both precisions of transformers")
    parser.add_argument("--clock", choices=["wall", "processor"], default="wall")
    chosen = parser.parse_args()
    clock = time.perf_counter if chosen.clock == "wall" else time.process_time
    if chosen.threads is not None:
        torch.set_num_threads(chosen.threads)
    oracle, model = models(chosen.size)
    reduced, peer = (in_bf16(model), copy.deepcopy(oracle).bfloat16()) if chosen.bf16 else (None, None)
    tokens = chosen.tokens or (256 if chosen.uncached else 128)
    for batch in chosen.batches:
        ids = torch.randint(1, model.encoder.vocab_size, (batch, chosen.prompt)).tolist()
        sides: dict[str, Callable[[], list[list[int]]]] = {"bertkit": lambda: own_tokens(model, ids, tokens)}  # noqa: B023  # called in this round
        if reduced is not None:
            sides = {
                "bertkit, bf16": lambda: written_in_bf16(reduced, ids, tokens),  # noqa: B023
                "transformers": lambda: peer_tokens(oracle, ids, tokens),  # noqa: B023
                "transformers, bf16": lambda: peer_tokens(peer, ids, tokens),  # noqa: B023
            }
        elif chosen.uncached:
            sides["bertkit, uncached"] = lambda: own_tokens(model, ids, tokens, cached=False)  # noqa: B023
        else:
            sides["transformers"] = lambda: peer_tokens(oracle, ids, tokens)  # noqa: B023
        outputs = [run() for run in sides.values()]  # also warms up
        agreeing = sum(a == b for a, b in zip(outputs[0], outputs[-1], strict=True))  # of the same precision
        times = dict.fromkeys(sides, float("inf"))
        for _ in range(chosen.rounds):
            times = {name: min(times[name], seconds(side, clock)) for name, side in sides.items()}
        (first, fast), *others = times.items()
        beside = "; ".join(f"{other} {1000 * slow / tokens:.1f}, ratio {slow / fast:.2f}" for other, slow in others)
        print(
            f"{chosen.size}, batch {batch}, {chosen.prompt} + {tokens} tokens, {torch.get_num_threads()} threads:"
            f" {first} {1000 * fast / tokens:.1f} ms a step; {beside}; {agreeing} of {batch} outputs equal"
        )


if __name__ == "__main__":
    main()
