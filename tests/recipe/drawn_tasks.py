"""Random recipes on tasks for the property test of keys: every kind of task, methods, students and terms."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from tests.tasks.tiny_kinds import KINDS, write_kind
from tests.tasks.tiny_task import BAD, GOOD, NOUNS, write_model

from bertkit.distillation.task_recipe import DistillRecipe
from bertkit.finetuning.recipe import FinetuneRecipe
from bertkit.models.labels import Labels
from bertkit.recipe.errors import validate
from bertkit.recipe.tree import Located

_TERMS: list[list[Any]] = [
    [{"labels": {"weight": 0.5}}, {"soft_targets": {"weight": 0.5}}],
    [{"labels": {"weight": 0.0}}, {"logit_error": {}}, {"hidden_states": {"layers": [[1, 2]], "weight": 0.5}}],
    [{"hard_targets": {}}, {"patience": {"layers": [[1, 1]]}}, {"attention": {"layers": [[1, 2]], "weight": 0.0}}],
    [{"labels": {}}, {"embeddings": {"projection": "fit"}}, {"cosine": {}}, {"feature_maps": {"layers": [[1, 2]]}}],
]
_STUDENTS: list[dict[str, Any]] = [
    {"layers": "last", "number": 1},
    {"layers": "first", "number": 1, "init": "random"},
    {"layers": "all"},
    {"family": "bilstm", "vocab_size": 90, "lstm_width": 8, "embedding_size": 8, "classifier_width": 8},
]


_DROPOUT = ("hidden_dropout", "attention_probs_dropout")


class TaskDraws:
    """Draws recipes on tasks, whose files it writes into a directory with a model and a teacher."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(exist_ok=True)
        self.tasks = {kind: write_kind(directory, kind)[0].model_dump(mode="json") for kind in KINDS}
        # Word classes need more words than these texts have.
        tagged = [f"{word}\t{tag}\n" for tag, words in (("N", NOUNS), ("A", GOOD + BAD)) for word in words]
        (directory / "tags.txt").write_text("".join(tagged), encoding="utf-8")
        self.augmentation = {"name": "masking", "copies": 2, "tags": str(directory / "tags.txt")}
        self.model = str(write_model(directory / "model", dropout=0.1))
        labels = Labels(("bad", "good"), "single_label_classification")
        head = ("sequence_classification",)
        self.teacher = str(write_model(directory / "teacher", heads=head, labels=labels))

    def base(self, generator: random.Random) -> FinetuneRecipe | None:
        """A plain recipe."""
        distils = generator.random() < 0.4
        kind = "classification" if distils else generator.choice(KINDS)
        task: Any = self.tasks[kind]
        if not distils and generator.random() < 0.2:
            task = [self.tasks["pair"], self.tasks["regression"]]
        settings: dict[str, Any] = {
            "name": "drawn",
            "task": task,
            "optimisation": {
                "optimizer": {"clip_norm": 0.3},
                "schedule": {"peak": 3e-3, "warmup_share": 0.2},
                "epochs": 2,
                "batch_sequences": 7,
            },
            "data": {"max_length": 24},
            "engine": {"device": "cpu", "precision": "fp32", "micro_batch_tokens": 100_000, "log_every_steps": 1},
        }
        if distils:
            settings |= {"kind": "distill", "teacher": self.teacher, "student": generator.choice(_STUDENTS)}
            settings["distillation"] = generator.choice(_TERMS)
            if generator.random() < 0.3:
                settings["augmentation"] = self.augmentation
        else:
            settings["model"] = self.model
        try:
            return validate(Located.of(settings, "drawn"), DistillRecipe if distils else FinetuneRecipe)
        except ValueError:
            return None

    @property
    def left_out(self) -> dict[str, str]:
        """Keys that are not drawn, with reasons."""
        return {
            "kind": "names the command",
            "task": "drawn with the recipe",
            "train": "names a file",
            "dev": "names a file",
            "test": "names a file",
            "name": "names what is reported",
            "teacher": "names a model",
            "model": "names a model",
            "of": "names a model",
            "word_vectors": "names a file",
            "distillation": "its items are drawn",
            "transfer": "names a file",
            "before": "makes a run of its own, which the test of the schema has",
            "stages": "refused on a task",
            **dict.fromkeys(
                ("reading", "delimiter", "encoding", "quoted", "na", "skip_bad_rows"),
                "shows in files of other forms: tests/tasks/test_readers_reading.py",
            ),
            "split": "excludes dev, which names a file",
            "early_stopping": "ends a run after evaluations that were no better, of which a tiny one has two",
            "texts": "of a student, the task's",
            "train_max_length": "cuts longer texts than there are: tests/finetuning/test_embedding.py",
        }

    @property
    def domains(self) -> dict[str, Any]:
        """Values by key, for keys that are not plain numbers or whose effect a small run shows only at some values."""
        return {
            # Only matters if the model already has the task's head, as the teacher does.
            "new_head": lambda recipe: [False, True] if _kind_of(recipe) == "distill" else [],
            "dropout": lambda recipe: (
                [] if _kind_of(recipe) == "distill" else [{}, *({f"{name}_prob": 0.4} for name in _DROPOUT)]
            ),
            "text": ["review", "other"],
            "text_pair": [None, "left"],
            "label": ["stars", "other"],
            "endings": [["endings"], ["other"]],
            "id": [None, "review"],
            "columns.separator": ["|", ";"],
            # A student's labels have the order of its teacher's logits, and these only name them.
            "labels": lambda recipe: [] if _kind_of(recipe) == "distill" else [None, ["good", "bad"]],
            "task.metrics": [None],
            "directory": [None, "/nowhere"],
            # Sentences have at most eight tokens.
            "max_length": lambda recipe: [8, 24] if _kind_of(recipe) in ("pair", "span") else [],
            "train_examples": [None, 12, 15],
            "predict": [[], ["dev"]],
            "window_stride": [None, 2],
            "label_smoothing": [0.0, 0.2],
            "class_weights": [None, {"good": 3.0}],
            "context": ["sentence"],
            "window_overlap": [0.5],
            "doc_stride": [128, 2],
            "max_query_tokens": [64, 2],
            "max_answer_tokens": [30, 1],
            "n_best": [20, 1],
            "max_question_tokens": [128, 3],
            "method": [
                {"name": "full"},
                {"name": "frozen"},
                {"name": "gradual"},
                {"name": "lora", "rank": 2},
                {"name": "features", "layers": "last-hidden", "lstm_width": 6, "lstm_layers": 1},
                {"name": "freelb", "ascent_steps": 2},
                {"name": "freelb", "ascent_steps": 1},
                {"name": "pruned", "heads": 2},
                {"name": "pruned", "layers": "first", "keep": 1},
                {"name": "pruned", "magnitude": 0.5, "magnitude_every_steps": 2},
                {"name": "theseus", "start": 0.5, "slope": 0.1},
                {"name": "theseus", "replacing": "constant", "constant_steps": 2},
                {"name": "q8bert", "ema_decay": 0.9},
                {"name": "qbert", "bits": 4, "groups": 2},
            ],
            "layers_per_epoch": [1, 2],
            "rank": [1, 2],
            "alpha": [16.0, 4.0],
            "targets": [["query", "value"], ["key"]],
            "method.layers": ["last-hidden", "first", "last"],
            "lstm_width": [6, 8],
            "lstm_layers": [1, 2],
            "step_size": [0.06, 0.5],
            "epsilon": [None, 0.02, 0.14],
            "start": [0.5, 0.2, 1.0],
            "slope": [0.1, 0.3, 0.0],
            "constant_steps": [0, 2, 4],
            "successors": [1, 2],
            "examples": [5, 10],
            "heads": [1, 2, {"0": [0]}],
            "keep": [1, 2],
            "magnitude": [None, 0.5, 0.3],
            "magnitude_ramp": [0.5, 0.0, 1.0],
            "magnitude_every_steps": [1, 2],
            "ema_decay": [0.9, 0.99],
            "start_step": [0, 3],
            "activation_bits": [8, 2],
            "bits": [2, 4],
            "groups": [2, 4],
            "optimizer": [{"name": name, "clip_norm": 0.3} for name in ("adamw", "adam", "lamb", "adafactor")],
            "betas": [(0.9, 0.999), (0.8, 0.999), (0.9, 0.95)],
            "eps": [1e-6, 1e-3],
            "eps1": [1e-2, 1e-3],
            "eps2": [1e-3, 0.1],
            "clip_threshold": [1.0, 1.01],
            "clip_norm": [None, 0.1, 0.3],
            "weight_decay": [0.0, 0.01, 0.5],
            "schedule": [
                {"name": "linear", "peak": 3e-3, "warmup_share": 0.1},
                {"name": "constant", "peak": 3e-3},
                {"name": "warmup-stable-decay", "peak": 3e-3, "stable_share": 0.5},
            ],
            "peak": [3e-3, 1e-3],
            "warmup_steps": [None],
            "warmup_share": [0.2, 0.4],
            "total_steps": [None, 30],
            "batch_sequences": [7, 5],
            "optimisation.steps": [None, 4],
            "epochs": lambda recipe: [2, 1, 3] if recipe.optimisation.steps is None else [],
            "ema": [None, 0.5],
            "layer_decay": [1.0, 0.5],
            "evaluations_per_epoch": [1, 2],
            "early_stopping": [None, 1],
            "select": [None, "best"],
            # Two tasks with equally many examples, as here, are trained in equal shares at any S.
            "task_smoothing": lambda recipe: [] if isinstance(recipe.task, tuple) else [1.0, 0.0],
            "max_nonfinite_steps": lambda recipe: [] if _kind_of(recipe) == "several" else [0, 1, 3],
            # They matter only if an update fails, which is tested by name.
            "roll_back": [None],
            "spikes": [None],
            "student": _STUDENTS,
            "student.layers": ["first", "last", "all"],
            "student.number": [1, 2],
            "form": ["teacher", "distilbert"],
            "projection": [None, "fit"],
            "hidden_states.layers": [[[1, 1]], [[1, 2]]],
            "patience.layers": [[[1, 1]], [[1, 2]]],
            "attention.layers": [[[1, 1]], [[1, 2]]],
            "feature_maps.layers": [[[1, 1]], [[1, 2]]],
            "cosine.layers": [[[1, 1]], [[1, 2]]],
            "temperature": [1.0, 3.0],
            "vocab_size": [90, 100],
            "embedding_size": [8, 6],
            "classifier_width": [8, 6],
            "initializer_range": [0.25, 0.1],
            "student.lowercase": [],  # these texts have no capitals: tests/models/families/test_bilstm.py
            "augmentation": [None, self.augmentation, {**self.augmentation, "ngram": 0.0}],
            "copies": [1, 2],
            "mask": [0.1, 0.5],
            "same_tag": [0.1, 0.0, 0.4],
            "ngram": [0.25, 0.0, 0.9],
            "longest_ngram": [1, 5],
            "tags": [self.augmentation["tags"], None],
            "control": [False, True],
        }

    def meaning(self, recipe: FinetuneRecipe) -> Any:
        """The recipe with null, and other ways to write the same value, replaced by what they mean."""
        data = recipe.model_dump(mode="json")
        optimisation, method, student = data["optimisation"], data["method"], data.get("student")
        optimisation["select"] = "best" if recipe.optimisation.keeps_best else "last"
        if method["name"] == "freelb" and method["start"] is None:
            method["start"] = method["epsilon"] or 0.0
        if method["name"] == "theseus" and method["successors"] is None:
            method["successors"] = 1
        if method["name"] == "pruned" and isinstance(method["layers"], str) and method["keep"] is None:
            method["keep"] = 1
        if student and "number" in student and isinstance(student["layers"], str) and student["layers"] != "all":
            student["number"] = student["number"] or 1
        return data


def _kind_of(recipe: Any) -> str:
    """The kind of a recipe's task; "distill" for any that distils."""
    if isinstance(recipe, DistillRecipe):
        return "distill"
    return "several" if isinstance(recipe.task, tuple) else str(recipe.task.name)
