"""Random recipes of language models for the property test of keys: continuing lanes of text, permutations, pairs of
source and target, and masked diffusion."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from tests.recipe.drawn_pretraining import SIZES, PretrainingDraws, settings_of, validated

from bertkit.data.layouts import LaneLayout, ParallelText
from bertkit.models.encoder_decoder import EncoderDecoderConfig
from bertkit.pretraining.recipe import Recipe

_ELMO = {
    "character_size": 5,
    "filters": [[1, 3], [2, 5]],
    "highway_layers": 1,
    "max_characters": 9,
    "projection_size": 6,
    "lstm_width": 7,
    "num_hidden_layers": 2,
    "cell_clip": 0.05,
    "projection_clip": 0.05,
}
_WITHOUT_POSITIONS = {key: value for key, value in SIZES.items() if key != "max_position_embeddings"}
_T5 = {key: SIZES[key] for key in ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")}
_LANES = {"name": "continuous"}
_BOTH_WAYS = {"name": "continuous", "bidirectional": True}
_PAIRS = {"name": "parallel"}
_SAMPLED = {"negatives": 20}
_GEMMA = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
FAMILIES: list[dict[str, Any]] = [
    {
        "model": {"family": "elmo", **_ELMO},
        "tokenizer": {"type": "word", "vocab_size": 200, "lowercase": False},
        "layout": _BOTH_WAYS,
        "objective": [{"forward_lm": _SAMPLED}, {"backward_lm": _SAMPLED}],
    },
    {
        "model": {"family": "transfo-xl", **_WITHOUT_POSITIONS, "mem_len": 12, "cutoffs": [20]},
        "tokenizer": {"type": "word", "vocab_size": 200},
        "layout": _LANES,
        "objective": ["forward_lm"],
    },
    {
        "model": {"family": "xlnet", **_WITHOUT_POSITIONS, "mem_len": 12},
        "layout": {"name": "reused-segments", "reused_tokens": 6},
        "objective": [{"permutation_lm": {"k": 3, "order_tokens": 5}}],
    },
    {
        "model": {"family": "xlnet", **_WITHOUT_POSITIONS},
        "layout": {"name": "full-sentences"},
        "objective": [{"permutation_lm": {"k": 3}}],
    },
    {
        "model": {"family": "mpnet", **SIZES},
        "tokenizer": {"vocab_size": 200, "pad_id": 1},
        "layout": {"name": "full-sentences"},
        "objective": ["masked_permuted_lm"],
    },
    {"model": {"family": "transformer", **SIZES}, "layout": _PAIRS, "objective": ["seq2seq_lm"]},
    {"model": {"family": "bert-gpt2", **SIZES}, "layout": _PAIRS, "objective": ["seq2seq_lm"]},
    {
        "model": {"family": "transformer", **SIZES, "num_attention_heads": 8, "fixed_heads": True},
        "layout": _PAIRS,
        "objective": ["seq2seq_lm"],
    },
    {"model": {"family": "universal-transformer", **SIZES}, "layout": _PAIRS, "objective": ["seq2seq_lm"]},
    {
        "model": {"family": "universal-transformer", **SIZES, "halting": True},
        "layout": _PAIRS,
        "objective": ["seq2seq_lm", "pondering"],
    },
    {"model": {"family": "bart", **SIZES}, "layout": _PAIRS, "objective": ["seq2seq_lm"]},
    {"model": {"family": "t5", **_T5, "head_width": 7}, "layout": _PAIRS, "objective": ["seq2seq_lm"]},
    {"model": {"family": "bart", **SIZES}, "layout": {"name": "doc-sentences"}, "objective": ["denoising"]},
    {
        "model": {"family": "t5", **_T5, "head_width": 7},
        "tokenizer": {"type": "byte-bpe", "vocab_size": 330, "sentinels": 9},
        "layout": {"name": "doc-sentences"},
        "objective": ["span_corruption"],
    },
    {
        "model": {"family": "gpt2", **SIZES},
        "layout": {"name": "contiguous"},
        "objective": [{"causal_lm": {"head": "causal_lm"}}],
    },
    {
        "model": {"family": "modernbert", **SIZES, "num_hidden_layers": 3, "local_attention": 6},
        "layout": {"name": "contiguous"},
        "objective": ["masked_diffusion"],
    },
    {
        "model": {"family": "gemma3_text", **SIZES, "num_hidden_layers": 3, **_GEMMA},
        "layout": {"name": "contiguous"},
        "objective": [{"causal_lm": {"head": "causal_lm"}}],
    },
]


class LanguageModelDraws(PretrainingDraws):
    """Draws recipes of the families above."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.pairs = directory / "pairs.jsonl"
        self.pairs.write_text("".join(f"{json.dumps(pair)}\n" for pair in _pairs(Path(self.files["en.txt"]))))

    def base(self, generator: random.Random) -> Recipe | None:
        """A plain recipe of a family; None if its parts do not fit."""
        family = generator.choice(FAMILIES)
        settings = settings_of(self.files["en.txt"], family["model"], family["objective"], family["layout"], generator)
        settings["tokenizer"] = family.get("tokenizer", settings["tokenizer"])
        if family["layout"] == _PAIRS:
            settings["data"] |= {"sources": [str(self.pairs)], "reading": {"target_field": "target"}}
        return validated(settings)

    @property
    def domains(self) -> dict[str, Any]:
        """Those of all recipes, except for keys that have another meaning here."""
        plain = super().domains
        return plain | {
            "sources": lambda recipe: [] if _is_of_pairs(recipe) else plain["sources"],
            "languages": [{}],
            "reading": [],
            "text_field": lambda recipe: ["text", "other"] if _is_of_pairs(recipe) else plain["text_field"],
            "target_field": lambda recipe: ["target", "other"] if _is_of_pairs(recipe) else [None],
            "tokenizer.type": lambda recipe: (
                ["word"] if recipe.model.model_type == "elmo" else [*plain["tokenizer.type"], "word"]
            ),
            "layout": lambda recipe: _layouts(recipe),
            "reused_tokens": [6, 5],
            "filters": [[[1, 3], [2, 5]], [[2, 5]]],
            "max_characters": [9, 5],
            "character_size": [5, 6],
            "projection_size": [6, 8],
            "lstm_width": [7, 9],
            "highway_layers": [0, 1, 2],
            # Bounds that cells reach within a few words.
            "cell_clip": [None, 0.05, 0.02],
            "projection_clip": [None, 0.05, 0.02],
            "negatives": [None, 20, 30],
            # Below the few words of the text.
            "cutoffs": lambda recipe: [(), (20,), (20, 30)] if recipe.tokenizer.min_frequency <= 2 else [],
            "mem_len": [0, 12, 7],
            "k": [3, 2],
            "longest_span": [5, 2],
            "order_tokens": [5, 3],
            "smallest_rate": [0.001, 0.2],
            "num_decoder_layers": [None, 1],
            "decoder_attention_heads": [None, 4],
            "decoder_intermediate_size": [None, 20],
            "label_smoothing": [0.0, 0.1],
            "activation_dropout_prob": [0.0, 0.2],
            "head_width": [7, 5],
            "relative_attention_num_buckets": [32, 8],
            # Reached by sentences of more than eight words.
            "relative_attention_max_distance": lambda recipe: (
                [6, 8, 9] if recipe.model.relative_attention_num_buckets == 8 else []
            ),
            "initializer_factor": [1.0, 0.5],
            "mean_span": [3.0, 1.5],
            "sentinels": lambda recipe: [9, 12] if recipe.tokenizer.sentinels else [],
            "vocab_size": lambda recipe: _vocabularies(recipe, plain),
            # For pairs, the most frequent characters alone fill the vocabulary.
            "min_frequency": lambda recipe: [] if _is_of_pairs(recipe) else plain["min_frequency"](recipe),
        }


def _is_of_pairs(recipe: Recipe) -> bool:
    return isinstance(recipe.data.layout, ParallelText)


def _vocabularies(recipe: Recipe, plain: dict[str, Any]) -> list[int]:
    if recipe.tokenizer.sentinels:
        return [330, 300]  # 256 bytes, five special tokens, and the sentinels
    # The text has hardly fifty words.
    return [20, 30] if recipe.tokenizer.type == "word" else plain["vocab_size"](recipe)


def _layouts(recipe: Recipe) -> list[dict[str, Any]]:
    if isinstance(recipe.model, EncoderDecoderConfig):
        return []
    if recipe.model.model_type == "elmo":
        return [_LANES, _BOTH_WAYS]
    if isinstance(recipe.data.layout, LaneLayout):
        return [_LANES, {"name": "reused-segments"}]
    return [{"name": "contiguous"}, {"name": "full-sentences"}]


def _pairs(text: Path) -> list[dict[str, str]]:
    """A sentence, its words in reverse order, and its letters in reverse order."""
    lines = [line for line in text.read_text(encoding="utf-8").splitlines() if line and not line.startswith(" =")]
    return [{"text": line, "target": " ".join(line.split()[::-1]), "other": line[::-1]} for line in lines]
