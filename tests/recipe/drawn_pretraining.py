"""Random pretraining recipes for the property test of keys: families, objectives, layouts, vocabularies, stages."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from tests.recipe.observed_runs import write_texts
from tests.training.tiny_run import write_model

from bertkit.distillation.text_recipe import DistillTextRecipe
from bertkit.errors import UsageError
from bertkit.models.families.bert import BertConfig
from bertkit.models.layers import ACTIVATIONS
from bertkit.pretraining.recipe import Recipe
from bertkit.pretraining.stages import stages_of
from bertkit.recipe.errors import validate
from bertkit.recipe.tree import Located

SIZES = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 40,
}
_EMBEDDINGS = {"embedding_size": 8}
FAMILIES: dict[str, dict[str, Any]] = {
    "bert": {},
    "megatron-bert": {},
    "roberta": {},
    "distilbert": {},
    "mpnet": {},
    "gpt-bert": {},
    "albert": _EMBEDDINGS,
    "electra": _EMBEDDINGS,
    "ernie": {},
    "mobilebert": {**_EMBEDDINGS, "intra_bottleneck_size": 8, "num_feedforward_networks": 2},
    "mosaicbert": {},
    "jina-bert": {},
    "fast-encoder": {},
    "modernbert": {"num_hidden_layers": 3, "local_attention": 6},
    "neobert": {},
    "esm": {},
    "eurobert": {"num_key_value_heads": 1},
    "nomic_bert": {},
    "nomic-bert-moe": {"num_hidden_layers": 4},
    "gte": {},
    "ultrabert": {"num_hidden_layers": 3, "num_key_value_heads": 1, "sliding_window": 3},
    "deberta": {},
    "deberta-v2": {"position_buckets": 8},
    "longformer": {"attention_window": 8},
    "xlnet": {"max_position_embeddings": None},
    "gpt2": {},
    "openai-gpt": {"intermediate_size": 64},
}
_SPANS = {"masked_lm": {"units": {"name": "spans"}}}
OBJECTIVES: list[list[Any]] = [
    ["masked_lm"],
    ["masked_lm", "next_sentence"],
    [_SPANS, "span_boundary"],
    ["masked_lm", "enhanced_decoding"],
    ["masked_lm", "bag_of_words"],
    ["masked_lm", {"replaced_token": {"generator_size": 0.5, "tie": "none"}}],
    ["two_tower_cloze", {"noise_contrastive": {"generator_size": 0.5, "tie": "none"}}],
    ["masked_lm", {"word_order": {"share": 0.15}}],
    [{"causal_lm": {"share": 0.5}}, "masked_next_token"],
    [{"causal_lm": {"share": 0.5}}, "masked_lm"],
    ["random_token_detection"],
    ["masked_lm", {"sentence_order": {}}],
]
_PAIRS = {"layers": [[1, 1], [2, 2]]}
_TAUGHT: list[list[Any]] = [
    [{"soft_targets": {"weight": 2.0}}, "masked_lm", "cosine"],
    [{"hidden_states": _PAIRS}, {"attention": _PAIRS}],
    [{"logit_error": {"positions": "masked"}}, {"masked_lm": {"weight": 0.0}}, {"feature_maps": _PAIRS}],
]
_DISTILLED = 0.2
"""Share of the recipes that distil."""
_LAYOUTS: list[dict[str, Any]] = [
    {"name": "segment-pair", "swap_probability": 0.3},
    {"name": "sentence-pair", "swap_probability": 0.3},
    {"name": "full-sentences"},
    {"name": "doc-sentences"},
]
_SHORT = {"data.sequence_length": 16}
_STAGES: list[list[dict[str, Any]]] = [
    [],
    [{"share": 0.5, "set": _SHORT}, {"share": 0.5}],
    [
        {"share": 0.5, "set": {**_SHORT, "optimisation.schedule": {"name": "constant", "peak": 0.02}}},
        {"share": 0.5, "set": {"optimisation.batch_sequences": 3}},
    ],
]
_MOST_DRAWS = 6
"""Changes between a plain recipe and the one of which a key is then changed."""


class PretrainingDraws:
    """Draws recipes over the texts of a directory; also writes a model there to start from."""

    def __init__(self, directory: Path) -> None:
        self.files = {name: str(path) for name, path in write_texts(directory).items()}
        # Weights that none of these recipes produces from its seed.
        self.model = str(write_model(BertConfig(**SIZES), Path(self.files["en.txt"]), directory / "model", seed=777))

    def base(self, generator: random.Random) -> Recipe | None:
        """A plain recipe of a family; None if its parts do not fit."""
        family = generator.choice(list(FAMILIES))
        model = {"family": family, **SIZES, **FAMILIES[family]}
        objective = generator.choice(OBJECTIVES)
        if family in ("gpt2", "openai-gpt"):
            objective = [{"causal_lm": {"head": "causal_lm"}}]
        model = {key: value for key, value in model.items() if value is not None}
        settings = settings_of(self.files["en.txt"], model, objective, generator.choice(_LAYOUTS), generator)
        if generator.random() < _DISTILLED:
            settings |= {
                "kind": "distill",
                "teacher": self.model,
                "student": generator.choice([None, {"layers": [0, 1]}]),
                "tokenizer": {"path": self.model},
                "model": {"family": "bert", **SIZES},
                "objective": generator.choice(_TAUGHT),
                "teacher_store": generator.choice([None, {"top_k": 4}]),
            }
        return validated(settings)

    @property
    def left_out(self) -> dict[str, str]:
        """Keys that are not drawn, with reasons."""
        return {
            "kind": "names the command",
            "family": "drawn with the recipe",
            "lexicon_sha256": "is filled in when a run begins, and checks a file",
            "stages": "drawn with the recipe, and their settings below",
            "share": "shares of stages sum to 1, so that one alone cannot be changed",
            "objective": "its items are drawn",
            "teacher": "names a model",
            "progressive": "makes stages of its own, as the command does before a run",
            "passes": "makes so few steps of a small text that other keys do not show: test_continuing.py",
            "deduplicate": "does nothing in a text without repeats: tests/data/test_duplicates.py",
            "held_out_tokens": "a floor that only a text near it shows: tests/data/test_split.py",
            "gb": "decides what is kept on disk alone",
        }

    def meaning(self, recipe: Recipe) -> Any:
        """The recipe with null, and other ways to write the same value, replaced by what they mean; None
        if its stages do not fit."""
        data = recipe.model_dump(mode="json")
        tokenizer, model, optimisation = recipe.tokenizer, recipe.model, recipe.optimisation
        for name, value in data["model"].items():
            if isinstance(value, str) and value in ACTIVATIONS:
                data["model"][name] = next(one for one, each in ACTIVATIONS.items() if each is ACTIVATIONS[value])
        data["tokenizer"] |= {"lowercase": tokenizer.lowercases, "strip_accents": tokenizer.strips_accents}
        for name in ("classifier_dropout", "cls_dropout"):
            if getattr(model, name, 0) is None:
                data["model"][name] = 0.1 if model.model_type == "gpt2" else model.hidden_dropout_prob
        for name in ("windows", "kinds", "embedding_width", "furthest"):
            if hasattr(model, name):
                written = {"windows": "attention_window", "kinds": "layer_types", "embedding_width": "embedding_size"}
                data["model"][written.get(name, "max_relative_positions")] = list(_flat(getattr(model, name)))
        for name in ("mem_len", "reuse_len"):
            if hasattr(model, name):
                data["model"][name] = getattr(model, name) or None
        try:
            stages = stages_of(recipe)
        except UsageError:
            return None
        for stage, resolved in zip(data["optimisation"]["stages"], stages, strict=False):
            whole = resolved.recipe.model_dump(mode="json", exclude={"optimisation": {"stages"}})
            of_model = {key: value for key, value in stage["set"].items() if key.startswith("model.")}
            stage["set"] = of_model | {name: whole[name] for name in ("data", "objective", "optimisation")}
        schedule, steps = optimisation.schedule, optimisation.steps
        if schedule.total_steps == steps:
            data["optimisation"]["schedule"].pop("total_steps")
        data["optimisation"]["schedule"]["warmup"] = schedule.warmup(steps)
        for name in ("warmup_steps", "warmup_share"):
            data["optimisation"]["schedule"].pop(name, None)
        return data

    @property
    def domains(self) -> dict[str, Any]:
        """Values by key, for keys that are not plain numbers or whose effect a small run shows only at some values."""
        files = self.files
        text, german, records = files["en.txt"], files["de.txt"], files["records.jsonl"]
        return {
            "init": [None, self.model],
            "path": [None, self.model],
            "tokenizer.type": ["wordpiece", "bpe", "byte-bpe", "unigram"],
            # With a given tokenizer, the size is only for --plan.
            "vocab_size": lambda recipe: [80, 95, 200] if recipe.tokenizer.path is None else [],
            # The most frequent pairs alone fill a small vocabulary.
            "min_frequency": lambda recipe: [2, 40] if recipe.tokenizer.vocab_size == 200 else [],
            "character_coverage": [0.9999, 0.99, 0.9],
            "sample_megabytes": [64.0, 0.002, 0.004],
            "sources": [[text], [records], [text, german], [german]],
            "languages": [{}, {"en": [text]}, {"en": [text], "de": [german]}, {"en": [records], "de": [german]}],
            # From a single file, `file` makes one document, of which no part can be drawn.
            "documents": ["blank-line", "wikitext", "line"],
            "text_field": ["text", "other"],
            "span_fields": [[], ["spans"], ["more"]],
            # Pairs of single sentences have up to 16 tokens.
            "sequence_length": lambda recipe: (
                [12, 32] if recipe.data.layout.choice == "sentence-pair" else [12, 16, 32]
            ),
            "static_copies": [None, 1, 2],
            "max_epochs": [None, 0.01],
            # Token shards have no words to count.
            "max_words": lambda recipe: [None] if recipe.data.is_tokenised else [None, 3],
            "held_out": [0.1, 0.3],
            "random_partner_probability": [0.0, 0.5, 0.3, 1.0],
            "swap_probability": [0.0, 0.3, 0.7],
            "short_sequence_probability": [0.1, 0.7, 1.0],
            # If the text is one document, or no document continues into the next, two of the layouts are the same.
            "layout": lambda recipe: _LAYOUTS[:2] if recipe.data.layout.choice.endswith("sentences") else _LAYOUTS,
            "units": lambda recipe: _units(recipe, files["lexicon.txt"]),
            "enhanced_decoding.units": [{"name": "words"}, {"name": "pieces"}],
            "lexicon": [None, files["lexicon.txt"]],
            "field": ["spans", "more"],
            "min_count": [2, 5],
            "min_association": [-0.5, 0.7],
            "most": [1, 4, 100_000],
            "longest": [2, 10],
            "collocations.longest": [2, 3],
            "read_tokens": [200, 30_000_000],
            "p": [0.2, 0.8],
            "phrase_rate": [0.15, 0.9],
            "rate": [0.15, 0.4, {"start": 0.5, "end": 0.1}, {"start": 0.2, "end": 0.2}],
            "start": [0.2, 0.5],
            "end": [0.2, 0.1],
            "until": [1.0, 0.2],
            "max_predictions": [None, 1],  # more are not reached with short sequences
            "mask_share": [0.0, 0.5, 0.8],
            # Of the few spans of a small batch, possibly none is drawn at random.
            "random_share": lambda recipe: [] if _masks_spans(recipe) else [0.0, 0.2],
            "random_from": lambda recipe: [] if _masks_spans(recipe) else ["vocabulary", "corpus"],
            # The gates of these families have their own activation, and some recipes have no vocabulary head.
            "hidden_act": lambda recipe: (
                [] if recipe.model.model_type in ("mosaicbert", "jina-bert") else list(ACTIVATIONS)
            ),
            "word_order.share": [0.15, 0.3],  # of 12 tokens a smaller share is none
            "word_order.length": [2, 3],
            "causal_lm.share": [0.3, 0.5, 1.0],
            "max_targets": [1, 20],
            "generator_size": [0.5, 1.0],
            "z_loss": [0.0, 1e-4, 1e-2],
            "optimizer": [
                {"name": name, "clip_norm": 0.05, **more}
                for name in ("adamw", "adam", "stable-adamw", "lamb", "adafactor", "muon")
                for more in ({}, {"weight_decay": 0.0})
            ],
            "betas": [(0.9, 0.999), (0.8, 0.999), (0.9, 0.95)],
            "eps": [1e-6, 1e-3],
            "eps1": [1e-2, 1e-3],
            "eps2": [1e-3, 0.1],
            "beta2_decay": [-0.8, -0.5],
            "clip_threshold": [1.0, 1.01],
            "clip_norm": [None, 0.01, 0.05],
            "weight_decay": [0.0, 0.01, 0.5],
            "schedule": [
                {"name": "linear", "peak": 0.01, "warmup_steps": 4},
                {"name": "cosine", "peak": 0.01, "floor": 0.1},
                {"name": "constant", "peak": 0.01, "warmup_steps": 2},
                {"name": "polynomial", "peak": 0.01, "power": 2.0},
                {"name": "polynomial", "peak": 0.01, "floor": 1.0},
                {"name": "inverse-sqrt", "peak": 0.01, "warmup_steps": 4},
                {"name": "warmup-stable-decay", "peak": 0.01, "stable_share": 0.5},
                {"name": "warmup-stable-decay", "peak": 0.01, "stable_share": 1.0},
                {"name": "warmup-stable-decay", "peak": 0.01, "stable_share": 0.5, "floor": 1.0},
            ],
            # A warm-up that ends before the first stage with this schedule goes unnoticed.
            "warmup_steps": lambda recipe: [] if _first_has_own_schedule(recipe) else [0, 3, 4],
            "warmup_share": lambda recipe: [] if _first_has_own_schedule(recipe) else [0.1, 0.2],
            "total_steps": [None, 300, 900],
            "batch_ramp": [None],
            "groups": [(), ({"parameters": "encoder.layers.0.*", "rate": 0.5},), ({"parameters": "*", "rate": 2.0},)],
            # Sequences matter only for growing batches, which are tested by name.
            "clock": ["updates"],
            "peak": [0.005, 0.01, 0.02],
            "hours": [None],
            "floor": [0.0, 0.2, 1.0],
            "stable_share": [0.5, 0.7, 1.0],
            "optimisation.steps": [600, 650],
            "batch_sequences": [4, 5],
            "ema": [None, 0.5, 0.9],
            "max_nonfinite_steps": [0, 1, 3],
            # They matter only if an update fails, which is tested by name.
            "roll_back": [None],
            "spikes": [None],
            "set": [
                _SHORT,
                {"data.sequence_length": 12},
                {"optimisation.batch_sequences": 3},
                {"optimisation.schedule": {"name": "polynomial", "peak": 0.01, "floor": 1.0, "power": 2.0}},
                {"optimisation.schedule": {"name": "constant", "peak": 0.02}},
                {"objective": [{"masked_lm": {"random_share": 0.0, "random_from": "corpus"}}]},
                {"objective": ["masked_lm"]},
            ],
            "student": [None, {"layers": [0, 1]}, {"layers": None}, {"layers": [1, 1]}],
            "student.layers": [None, [0, 1], [1, 1]],
            "frozen": [[], ["embeddings.position"]],
            "hidden_states.layers": [[[1, 1]], [[2, 1]]],
            "attention.layers": [[[1, 1]], [[2, 1]]],
            "feature_maps.layers": [[[1, 1]], [[2, 1]]],
            "cosine.layers": [[[1, 1]], [[2, 1]]],
            "projection": [None, "fit"],
            "temperature": [1.0, 3.0],
            "teacher_store": [None, {"top_k": 4}],
            "top_k": [2, 4],
            # Sizes that fit the others.
            "hidden_size": [16, 24],
            "num_hidden_layers": [2, 3, 4],
            "num_attention_heads": [2, 4],
            "intermediate_size": [24, 32],
            "embedding_size": [8, 12],
            "intra_bottleneck_size": [8, 12],
            "num_feedforward_networks": [1, 2],
            "num_hidden_groups": [1, 2],
            "inner_group_num": [1, 2],
            "max_position_embeddings": [40, 48],
            "type_vocab_size": [1, 2, 3],
            "layer_norm_eps": [1e-12, 1e-3],
            "norm_eps": [1e-5, 1e-3],
            "initializer_range": [0.02, 0.1],
            "initializer_cutoff_factor": [2.0, 1.0],
            "hidden_dropout_prob": [0.0, 0.1, 0.3],
            "attention_probs_dropout_prob": [0.0, 0.1, 0.3],
            "global_attn_every_n_layers": [1, 2, 3],
            "layer_types": [None, ("full_attention",) * 3, ("sliding_attention",) * 3],
            "local_attention": [4, 6],
            "global_rope_theta": [160_000.0, 10.0],
            "local_rope_theta": [10_000.0, 10.0],
            "attention_window": [4, 8],
            "sep_token_id": [2, 5, None],
            "relative_attention_num_buckets": [32, 40],
            "position_bucket_size": [4, 8, 32],
            "position_buckets": [4, 8],
            "max_relative_positions": [-1, 6],
            "pos_att_type": [("c2p", "p2c"), ("c2p",), ()],
            "conv_kernel_size": [0, 3],
            "conv_groups": [1, 2],
            "task_type_vocab_size": [3, 4],
            "clamp_len": [-1, 3],
            "mem_len": [None, 8],
            "reuse_len": [None, 4],
        }


def settings_of(
    text: str, model: dict[str, Any], objective: list[Any], layout: dict[str, Any], generator: random.Random
) -> dict[str, Any]:
    """A recipe that trains in a moment."""
    return {
        "name": "drawn",
        "tokenizer": {"vocab_size": 200},
        "data": {"sources": [text], "layout": layout, "sequence_length": 32, "held_out": 0.1},
        "model": model,
        "objective": objective,
        "optimisation": {
            "optimizer": {"clip_norm": 0.05},
            "schedule": {"name": "bert", "peak": 0.01, "warmup_steps": 4},
            "batch_sequences": 4,
            "steps": 600,
            "stages": generator.choice(_STAGES),
        },
        "engine": {"device": "cpu", "precision": "fp32", "micro_batch_tokens": 100_000, "workers": 0},
    }


def validated(settings: dict[str, Any]) -> Recipe | None:
    """The recipe, or None if its parts do not fit."""
    try:
        return validate(Located.of(settings, "drawn"), DistillTextRecipe if "teacher" in settings else Recipe)
    except ValueError:
        return None


def _masks_spans(recipe: Recipe) -> bool:
    return any(getattr(getattr(each, "units", None), "name", "") == "spans" for each in recipe.objectives)


def _units(recipe: Recipe, lexicon: str) -> list[dict[str, Any]]:
    """Units of masking; the teacher's vocabulary has all words of the text, so words and tokens are the same."""
    words = [] if isinstance(recipe, DistillTextRecipe) else ["words"]
    return [
        *({"name": name} for name in ("pieces", *words, "ngrams", "spans", "tiled-spans", "rare", "phrases")),
        {"name": "annotated", "field": "spans"},
        {"name": "phrases", "lexicon": lexicon},
        {"name": "spans", "longest": 1},
        {"name": "phrases", "collocations": {"min_count": 2, "min_association": -0.5}},
    ]


def _flat(value: Any) -> Any:
    return value if isinstance(value, tuple) else (value,)


def _first_has_own_schedule(recipe: Recipe) -> bool:
    stages = recipe.optimisation.stages
    return bool(stages) and "optimisation.schedule" in stages[0].set
