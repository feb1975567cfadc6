"""Keys that nothing reads: named, refused in a new run, warned of in a resumed one; shipped recipes have none."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.overrides import parsed
from tests.training.tiny_run import write_recipe

from bertkit.distillation.task_recipe import DistillRecipe
from bertkit.distillation.task_recipe import parts_of as run_parts
from bertkit.distillation.text_recipe import DistillTextRecipe
from bertkit.errors import UsageError
from bertkit.finetuning.recipe import FinetuneRecipe
from bertkit.pretraining.arguments import PretrainArguments
from bertkit.pretraining.recipe import Recipe, load_recipe
from bertkit.pretraining.run import run_pretraining
from bertkit.pretraining.stages import parts_of as stage_parts
from bertkit.progress import silent_progress
from bertkit.recipe.errors import validate
from bertkit.recipe.find import recipe_names, shipped_directory
from bertkit.recipe.resolve import Override, base_of, load_any, with_values
from bertkit.recipe.tree import Located
from bertkit.recipe.unread import UnreadSetting, unread_settings
from bertkit.run.directory import RECIPE

TEXT = {
    "name": "x",
    "data": {"sources": ["a.txt"], "sequence_length": 32},
    "model": {"family": "bert"},
    "objective": ["masked_lm"],
    "optimisation": {"steps": 100, "schedule": {"name": "bert", "peak": 0.001, "warmup_steps": 4}},
}
TASK = {"name": "x", "task": "mnli", "model": "m"}
DISTIL = {"name": "x", "kind": "distill", "task": "mnli", "teacher": "t", "distillation": ["labels", "soft_targets"]}
PAIR = ["masked_lm", {"next_sentence": {"told_apart_by": "separator"}}]
PHRASES = {"name": "phrases", "lexicon": "words.txt"}


def messages(start: dict[str, Any], changes: dict[str, Any], overridden: tuple[str, ...] = ()) -> list[UnreadSetting]:
    """The messages for a recipe with these changes."""
    schema: Any = {"finetune": FinetuneRecipe, "distill": DistillRecipe}.get(start.get("kind", ""), Recipe)
    schema = FinetuneRecipe if start is TASK else schema
    tree = with_values(Located.of(start, "x"), [Override(key, value) for key, value in changes.items()])
    recipe = validate(tree, schema)
    parts = stage_parts(recipe) if schema is Recipe else run_parts(recipe) if schema is DistillRecipe else ()
    return unread_settings(recipe, parts, overridden=overridden)


def told(start: dict[str, Any], changes: dict[str, Any], overridden: tuple[str, ...] = ()) -> list[str]:
    """The same, only the keys."""
    return [each.key for each in messages(start, changes, overridden)]


@pytest.mark.parametrize(
    ("start", "key", "changes"),
    [
        (TEXT, "objective.next_sentence.told_apart_by", {"objective": PAIR}),
        (TEXT, "data.language_smoothing", {"data.language_smoothing": 0.5}),
        (TEXT, "data.language_smoothing", {"data.language_smoothing": 0.5, "data.languages": {"en": ["a.txt"]}}),
        (TEXT, "data.sources", {"data.languages": {"en": ["a.txt"], "de": ["b.txt"]}}),
        (TEXT, "new_pieces", {"new_pieces": "random"}),
        (TEXT, "tokenizer.character_coverage", {"tokenizer": {"type": "byte-bpe", "character_coverage": 0.9}}),
        (TEXT, "tokenizer.min_frequency", {"tokenizer": {"type": "unigram", "min_frequency": 5}}),
        (TEXT, "tokenizer.min_frequency", {"tokenizer": {"path": "t", "min_frequency": 5}}),
        (
            TEXT,
            "model.cutoffs",
            {
                "model": {"family": "transfo-xl", "cutoffs": [50, 30_522]},
                "objective": [{"causal_lm": {"head": "causal_lm"}}],
            },
        ),
        (TEXT, "data.reading.text_field", {"data.reading.text_field": "body"}),
        (TEXT, "data.reading.documents", {"data.reading.documents": "line", "data.sources": ["a.jsonl"]}),
        (TEXT, "data.reading.mark_capitals", {"data.reading.mark_capitals": True}),
        (TEXT, "data.reading.span_fields", {"data.reading.span_fields": ["spans"], "data.sources": ["a.jsonl"]}),
        (
            TEXT,
            "data.layout.swap_probability",
            {"data.layout": {"name": "sentence-pair", "random_partner_probability": 1.0, "swap_probability": 0.5}},
        ),
        (
            TEXT,
            "data.static_copies",
            {"data.static_copies": 2, "data.layout": {"name": "full-sentences"}, "objective": ["causal_lm"]},
        ),
        (
            TEXT,
            "objective.masked_lm.units.collocations",
            {"objective": [{"masked_lm": {"units": {**PHRASES, "collocations": {"longest": 2}}}}]},
        ),
        (
            TEXT,
            "objective.masked_lm.units.read_tokens",
            {"objective": [{"masked_lm": {"units": {**PHRASES, "read_tokens": 99}}}]},
        ),
        (
            TEXT,
            "objective.masked_lm.random_from",
            {"objective": [{"masked_lm": {"random_share": 0.0, "random_from": "corpus"}}]},
        ),
        (TEXT, "objective.masked_lm", {"objective": ["masked_lm", "causal_lm"]}),
        (
            TEXT,
            "objective.masked_lm.rate.until",
            {"objective": [{"masked_lm": {"rate": {"start": 0.2, "end": 0.2, "until": 0.5}}}]},
        ),
        (
            TEXT,
            "objective.masked_lm.units.p",
            {"objective": [{"masked_lm": {"units": {"name": "spans", "longest": 1, "p": 0.5}}}]},
        ),
        (TEXT, "model.conv_act", {"model": {"family": "deberta-v2", "conv_act": "relu"}}),
        (TEXT, "model.conv_groups", {"model": {"family": "deberta-v2", "conv_groups": 2}}),
        (TEXT, "model.task_type_vocab_size", {"model": {"family": "ernie", "task_type_vocab_size": 4}}),
        (
            TEXT,
            "model.local_attention",
            {"model": {"family": "modernbert", "global_attn_every_n_layers": 1, "local_attention": 64}},
        ),
        (
            TEXT,
            "model.initializer_cutoff_factor",
            {"model": {"family": "modernbert", "initializer": "normal", "initializer_cutoff_factor": 3.0}},
        ),
        (
            TEXT,
            "optimisation.optimizer.decay_biases_and_norms",
            {"optimisation.optimizer": {"weight_decay": 0.0, "decay_biases_and_norms": True}},
        ),
        (
            TEXT,
            "optimisation.optimizer.decay_biases_and_norms",
            {"optimisation.optimizer": {"name": "adafactor", "decay_biases_and_norms": True}},
        ),
        (TEXT, "optimisation.schedule.total_steps", {"optimisation.schedule.total_steps": 50}),
        (
            TEXT,
            "optimisation.schedule.power",
            {"optimisation.schedule": {"name": "polynomial", "peak": 0.001, "floor": 1.0, "power": 2.0}},
        ),
        (
            TEXT,
            "optimisation.schedule.decay",
            {
                "optimisation.schedule": {
                    "name": "warmup-stable-decay",
                    "peak": 0.001,
                    "stable_share": 1.0,
                    "decay": "linear",
                }
            },
        ),
        (TASK, "optimisation.task_smoothing", {"optimisation.task_smoothing": 0.5}),
        (TASK, "optimisation.layer_decay", {"optimisation.layer_decay": 0.9, "method": {"name": "frozen"}}),
        (TASK, "method.constant_steps", {"method": {"name": "theseus", "constant_steps": 9}}),
        (TASK, "method.slope", {"method": {"name": "theseus", "replacing": "constant", "slope": 0.1}}),
        (TASK, "method.magnitude_ramp", {"method": {"name": "pruned", "heads": 2, "magnitude_ramp": 0.1}}),
        (TASK, "method.examples", {"method": {"name": "pruned", "layers": "first", "examples": 9}}),
        (TASK, "method.high_bits", {"method": {"name": "qbert", "bits": 4, "high_bits": 4}}),
        (TASK, "method.step_size", {"method": {"name": "freelb", "ascent_steps": 1, "step_size": 0.1}}),
        (DISTIL, "student.embeddings", {"student": {"init": "random", "embeddings": False}}),
        (DISTIL, "new_head", {"new_head": True}),
        (DISTIL, "distillation", {"control": True}),
        (DISTIL, "text.label_smoothing", {"text.label_smoothing": 0.1, "distillation": ["soft_targets"]}),
        (
            DISTIL,
            "distillation.soft_targets.temperature",
            {"distillation": ["labels", {"soft_targets": {"weight": 0.0, "temperature": 2.0}}]},
        ),
        (
            DISTIL,
            "augmentation.tags",
            {
                "augmentation": {"name": "masking", "same_tag": 0.0, "tags": "f"},
            },
        ),
        (DISTIL, "augmentation.longest_ngram", {"augmentation": {"name": "masking", "ngram": 0.0, "longest_ngram": 3}}),
    ],
)
def test_a_key_without_effect_is_named(start: dict[str, Any], key: str, changes: dict[str, Any]) -> None:
    assert key in told(start, changes)


def test_keys_at_their_defaults_are_never_told_of() -> None:
    assert told(TEXT, {}) == told(TASK, {}) == told(DISTIL, {}) == []
    assert told(TEXT, {"tokenizer": {"type": "unigram", "min_frequency": 2}}) == []


def test_a_key_of_a_stage_is_told_of_with_its_place_and_one_that_another_stage_reads_is_not() -> None:
    stages = [{"share": 0.5, "set": {"objective": [{"masked_lm": {"random_share": 0.0, "random_from": "corpus"}}]}}]
    start = {**TEXT, "objective": [{"masked_lm": {"random_from": "corpus"}}]}
    (found,) = messages(start, {"optimisation.stages": [*stages, {"share": 0.5}]})
    assert found.why.startswith("optimisation.stages.0.set: objective.masked_lm.random_from")
    assert told(TEXT, {"optimisation.stages": [{"share": 0.5}, {"share": 0.5}]}) == []
    half = {"share": 0.5, "set": {"objective": [{"masked_lm": {"random_share": 0.0}}]}}
    assert told(start, {"optimisation.stages": [half, {"share": 0.5}]}) == []


def test_what_every_stage_sets_for_itself_is_told_of_where_the_command_line_sets_it() -> None:
    stages = [{"share": 0.5, "set": {"data.sequence_length": length}} for length in (16, 24)]
    changes = {"optimisation.stages": stages, "data.sequence_length": 64}
    assert told(TEXT, changes) == []
    assert told(TEXT, changes, overridden=("data.sequence_length",)) == ["data.sequence_length"]


def test_a_key_that_the_run_before_reads_is_not_told_of() -> None:
    changes: dict[str, Any] = {
        "distillation": [{"labels": {"weight": 0.0}}, "logit_error"],
        "text.label_smoothing": 0.1,
    }
    assert told(DISTIL, changes) == ["text.label_smoothing"]
    assert told(DISTIL, {**changes, "before": {"set": {"distillation": ["labels"]}}}) == []


def test_the_message_says_why_and_what_to_change() -> None:
    (found,) = messages(TEXT, {"tokenizer": {"type": "unigram", "min_frequency": 5}})
    assert found.why == (
        "tokenizer.min_frequency (5) has no effect: a unigram vocabulary has no merges; leave it out, or write its"
        " default, 2, or take another tokenizer.type"
    )


@pytest.mark.parametrize("name", recipe_names())
def test_shipped_recipes_have_no_key_without_effect(name: str, tmp_path: Path) -> None:
    own = str(shutil.copy(shipped_directory() / f"{name}.yaml", tmp_path))
    recipe = load_any(own)
    parts = stage_parts(recipe) if isinstance(recipe, Recipe) else ()
    parts = run_parts(recipe) if isinstance(recipe, DistillRecipe) else parts
    assert unread_settings(recipe, parts, base=base_of(own)) == []


def test_a_key_of_a_shipped_recipe_is_told_of_only_where_the_command_line_changes_it() -> None:
    def keys(*overrides: str) -> list[str]:
        recipe = load_recipe("quickstart", parsed(overrides))
        return [each.key for each in unread_settings(recipe, base=base_of("quickstart"))]

    assert load_recipe("quickstart").tokenizer.lowercase is True
    assert keys("tokenizer.path=a") == []
    assert keys("tokenizer.path=a", "tokenizer.lowercase=false") == ["tokenizer.lowercase"]


def test_what_a_recipe_inherits_is_not_told_of_and_what_it_sets_is(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text("data: {sources: [a.txt]}\ntokenizer: {min_frequency: 7}\n")
    own = tmp_path / "own.yaml"
    own.write_text(
        "extends: base\ntokenizer: {type: unigram}\nmodel: {family: bert}\nobjective: [masked_lm]\noptimisation: {}\n"
    )
    recipe = load_any(str(own))
    assert [each.key for each in unread_settings(recipe)] == ["tokenizer.min_frequency"]
    assert unread_settings(recipe, base=base_of(str(own))) == []
    own.write_text(own.read_text().replace("type: unigram", "type: unigram, min_frequency: 8"))
    assert len(unread_settings(load_any(str(own)), base=base_of(str(own)))) == 1


def request(home: Path, *overrides: str, **more: Any) -> PretrainArguments:
    recipe, text = write_recipe(home)
    given = {"recipe": str(recipe), "sources": [str(text)], "run_dir": home / "run", "cache": home / "cache", **more}
    return PretrainArguments(overrides=parsed(overrides), command=["test"], max_steps=3, **given)


def test_a_new_run_is_refused_with_all_keys_at_once(tmp_path: Path) -> None:
    wanted = request(tmp_path, "new_pieces=random", "data.language_smoothing=0.5")
    with pytest.raises(UsageError, match=r"2 keys without effect(.|\n)*new_pieces(.|\n)*language_smoothing"):
        run_pretraining(wanted, progress=silent_progress)
    assert not (tmp_path / "run").exists()


def test_an_old_run_with_such_a_key_resumes_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = run_pretraining(request(tmp_path), progress=silent_progress).run
    recorded = run.path / RECIPE
    recorded.write_text(recorded.read_text().replace("language_smoothing: 0.7", "language_smoothing: 0.5"))
    record = run.path / "run.json"
    record.write_text(record.read_text().replace('"status": "done"', '"status": "stopped"'))
    resumed = request(tmp_path, recipe=None, sources=(), run_dir=None, resume=str(run.path))
    with caplog.at_level(logging.WARNING):
        run_pretraining(resumed, progress=silent_progress)
    assert "data.language_smoothing (0.5) has no effect" in caplog.text


def test_shards_in_place_of_text_are_used_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = run_pretraining(request(tmp_path), progress=silent_progress).run
    shards = run.record["shards"]
    with caplog.at_level(logging.WARNING):
        recipe = request(tmp_path, "tokenizer.min_frequency=3", sources=[shards]).new_recipe()
    assert recipe.data.sources == [shards]
    assert "tokenizer.min_frequency (3) has no effect" in caplog.text


@pytest.mark.parametrize(("objective", "expected"), [("hidden_states", ["student.head"]), ("soft_targets", [])])
def test_a_student_without_a_head_takes_none_from_its_teacher(objective: str, expected: list[str]) -> None:
    settings = {"layers": [[1, 1]]} if objective == "hidden_states" else {}
    changes = {"kind": "distill", "teacher": "t", "student": {"head": False}, "objective": [{objective: settings}]}
    recipe = validate(Located.of(TEXT | changes, "x"), DistillTextRecipe)
    assert [each.key for each in unread_settings(recipe, stage_parts(recipe), overridden=["student.head"])] == expected
