"""A student's training on text: pretraining with a teacher beside the model.

Sanh et al. 2019, DistilBERT, arXiv:1910.01108, section 3. Pretraining has the loop, text.py decides
what is trained; here is what a teacher adds: what the student begins as, its learnt maps, who is asked in a step.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bertkit.data.shards import TokenShards
from bertkit.distillation.objectives import (
    DistilledWords,
    TeacherSession,
    add_maps,
    distilled_among,
    wanted_of,
    word_rows,
)
from bertkit.distillation.student_init import begin_as
from bertkit.distillation.teacher_cache import Answers
from bertkit.distillation.teacher_store import TeacherStore
from bertkit.distillation.teachers import answers_identity
from bertkit.distillation.terms import Sizes
from bertkit.distillation.text_loss_terms import TaughtObjectiveTerms
from bertkit.distillation.text_recipe import DistillTextRecipe
from bertkit.errors import DataError, UsageError
from bertkit.models.encoder import EncoderConfig
from bertkit.models.headed import HeadedModel
from bertkit.models.hub import check_vocabulary, load_model
from bertkit.models.layer_choice import chosen_layers
from bertkit.objectives.base import Objective
from bertkit.objectives.forward import pretraining_model
from bertkit.objectives.masked_lm import MaskedLM
from bertkit.pretraining.loss_terms import ObjectiveTerms
from bertkit.pretraining.stages import stages_of
from bertkit.pretraining.trainer import Pretrainer, StageRun
from bertkit.progress import Progress, counted
from bertkit.run.directory import RunDirectory
from bertkit.text.tokenizer import Tokenizer
from bertkit.text.tokenizer_files import load_tokenizer
from bertkit.training.cost import count_parameters
from bertkit.training.step import evaluate

log = logging.getLogger(__name__)


class TextDistillation(Pretrainer):
    """One run of a student.

    Args:
        recipe: resolved.
        shards: the tokenised corpus.
        run: the directory, whose lock the caller holds.
        cache: where plans of epochs are kept.
        teacher: with the heads that the recipe's terms ask.
        teacher_hash: of its weights, by which its answers are kept.
    """

    def __init__(
        self,
        recipe: DistillTextRecipe,
        shards: TokenShards,
        run: RunDirectory,
        *,
        cache: Path,
        teacher: HeadedModel,
        teacher_hash: str,
    ) -> None:
        self.student_recipe = recipe
        self.teacher = teacher.eval().requires_grad_(False)
        self.sizes = Sizes.told_by(recipe.model, teacher.encoder.config)
        self._stores: dict[str, TeacherStore] = {}
        self._cache, self._teacher_hash = cache, teacher_hash
        super().__init__(recipe, shards, run, cache=cache)
        self.teacher.to(self.engine.device)

    def _check_growth(self) -> None:
        if len({each.stage.recipe.model for each in self.stages}) > 1:
            raise UsageError(
                "optimisation.stages: a student cannot grow beside its teacher, for the layers that are compared would"
                " be others; leave model.num_hidden_layers out of the stages"
            )

    def train(self, *, progress: Progress, max_minutes: float | None = None) -> dict[str, Any]:
        try:
            return super().train(progress=progress, max_minutes=max_minutes)
        finally:
            while self._stores:
                self._stores.popitem()[1].close()

    def new_terms(self, stage_run: StageRun) -> ObjectiveTerms:
        objectives = stage_run.objectives
        if not distilled_among(objectives):
            return ObjectiveTerms(objectives)
        answers = self._answers(objectives)
        session = TeacherSession(self.teacher, self.model, objectives, self.sizes, answers=answers)
        return TaughtObjectiveTerms(objectives, session)

    def _answers(self, objectives: Sequence[Objective]) -> Answers | None:
        """Where the teacher's answers to these objectives are kept; None where they are not."""
        settings = self.student_recipe.teacher_store
        if settings is None:
            return None
        _, wanted = wanted_of(objectives, self.sizes)
        positions = sorted({each.positions for each in objectives if isinstance(each, DistilledWords)})
        top_k = settings.top_k if positions else 0
        words = f"{top_k} at {positions[0]} positions" if positions else "none"
        identity = answers_identity(
            [self.teacher],
            weights=self._teacher_hash,
            tokenizer=self.tokenizer,
            wanted=wanted,
            precision=self.engine.precision,
        )
        asked = f"{wanted.in_words()} {words}"
        if asked not in self._stores:
            identity["words"] = words
            self._stores[asked] = TeacherStore.in_cache(self._cache, identity, max_bytes=settings.gb * 1e9)
        encoder = self.teacher.encoder
        return Answers(self._stores[asked], wanted, width=encoder.width, vocab_size=encoder.vocab_size, top_k=top_k)

    def _say_size(self, stage_run: StageRun, answers: Answers) -> None:
        """How much the teacher's answers in this stage will take."""
        recipe, batches = stage_run.stage.recipe, stage_run.batches
        sequences = (stage_run.stage.end_step - stage_run.stage.first_step) * recipe.optimisation.batch_sequences
        if recipe.data.static_copies is not None:
            sequences = min(sequences, recipe.data.static_copies * batches.stream.epoch_length(0))
        sequences += sum(batch.num_sequences for batch in stage_run.held_out.batches)
        length = recipe.data.sequence_length
        size = 4 * answers.floats_of(tokens=length, rows=word_rows(stage_run.objectives, length))
        log.info(
            "the teacher's answers: at most %.3g GB (%.3g kB for each of %s sequences), of which %.3g are kept in %s",
            size * sequences / 1e9,
            size / 1e3,
            f"{sequences:,}",
            min(size * sequences, answers.store.max_bytes) / 1e9,
            answers.store.directory,
        )

    def _new_model(self, config: EncoderConfig) -> HeadedModel:
        recipe = self.student_recipe
        objectives = [objective for stage_run in self.stages for objective in stage_run.objectives]
        if recipe.init is not None:
            model = super()._new_model(config)
        else:
            # As many rows as the teacher's table has, should that have some to spare.
            vocab_size = self.teacher.encoder.vocab_size
            model = pretraining_model(config, objectives, vocab_size, pad_id=self.vocabulary.pad_id)
            model.initialise(recipe.seed)
        if recipe.student is not None:
            begin_as(
                model,
                self.teacher,
                layers=copied_layers(recipe, self.sizes),
                embeddings=recipe.student.embeddings,
                head=recipe.student.head,
            )
        add_maps(model, objectives, self.sizes, seed=recipe.seed)
        freeze(model, recipe.frozen)
        return model

    def log_start(self) -> None:
        super().log_start()
        teacher = self.sizes.teacher
        log.info(
            "teacher %s: %s parameters, %d layers of %d; the student has %d of %d",
            self.student_recipe.teacher,
            f"{count_parameters(self.teacher).total:,}",
            *(teacher.layers, teacher.width, self.sizes.student.layers, self.sizes.student.width),
        )
        if self.student_recipe.student is not None and self.student_recipe.student.layers is not None:
            log.info("the student's layers begin as the teacher's %s", copied_layers(self.student_recipe, self.sizes))
        for stage, term, weight, compares in layer_rows(self.student_recipe, self.sizes):
            log.info("  %s%-14s weight %-8g %s", stage and f"{stage}  ", term, weight, compares)
        for stage_run in self.stages:
            answers = self._answers(stage_run.objectives) if distilled_among(stage_run.objectives) else None
            if answers is not None:
                self._say_size(stage_run, answers)

    def results(self) -> dict[str, Any]:
        results = super().results()
        last = self.stages[-1]
        masked = [each for each in last.objectives if isinstance(each, MaskedLM)]
        if masked and MaskedLM.term in self.teacher.head_names:
            batches = counted(
                last.held_out.batches, self.closing_progress, "the teacher on held-out text", unit="batches"
            )
            total = evaluate(self.teacher, ObjectiveTerms(masked), batches, self.engine)[MaskedLM.term]
            results["teacher"] = {
                "model": self.student_recipe.teacher,
                "held_out": {"loss/masked_lm": total.mean, "accuracy/masked_lm": total.accuracy},
            }
        return results


def load_teacher(recipe: DistillTextRecipe, directory: Path) -> HeadedModel:
    """The teacher with all its heads.

    Raises:
        DataError: words are compared, and it has no masked LM's head, or its tokenizer does not fit its table.
    """
    teacher, _ = load_model(directory)
    check_vocabulary(teacher, load_tokenizer(directory), source=str(directory))
    asked = [
        each.term for stage in stages_of(recipe) for each in stage.recipe.objectives if isinstance(each, DistilledWords)
    ]
    if asked and MaskedLM.term not in teacher.head_names:
        raise DataError(
            f"{directory}: objective.{asked[0]} compares words, and this teacher has no masked LM's head (it has:"
            f" {', '.join(teacher.head_names) or 'none'}); take a pretrained model as it was pretrained, or leave the"
            " term out"
        )
    return teacher


def check_tokenizer(student: Tokenizer, teacher: Tokenizer, *, source: str) -> None:
    """Raise DataError if the two do not give the same pieces the same ids."""
    if student.backend.get_vocab() != teacher.backend.get_vocab() or student.roles != teacher.roles:
        raise DataError(
            f"{source}: the text is in another tokenizer's pieces ({student.vocab_size:,}, the teacher's has"
            f" {teacher.vocab_size:,}); a student reads what its teacher reads: leave `tokenizer` out of the recipe,"
            " and give text, not shards of another tokenizer"
        )


def layer_rows(recipe: DistillTextRecipe, sizes: Sizes) -> list[tuple[str, str, float, str]]:
    """What is compared, as rows for people: stage ("" where there is one), term, weight, and the layers by pairs
    (student's: teacher's)."""
    stages = stages_of(recipe)
    rows = []
    for stage in stages:
        steps = f"steps {stage.first_step:,} to {stage.end_step:,}" if len(stages) > 1 else ""
        for objective in distilled_among(stage.recipe.objectives):
            pairs = objective.distilled.table(sizes)
            if isinstance(objective, DistilledWords):
                compares = f"words at {objective.positions} positions"
            else:
                compares = "layers " + ", ".join(f"{m}: {n}" for m, n in pairs)
            rows.append((steps, objective.term, objective.weight, compares))
    return rows


def copied_layers(recipe: DistillTextRecipe, sizes: Sizes) -> list[int] | None:
    """The teacher's layers that the student begins with.

    Raises:
        UsageError: they are not there, or there are more or fewer than the student has.
    """
    if recipe.student is None or recipe.student.layers is None:
        return None
    try:
        return chosen_layers(recipe.student.layers, of=sizes.teacher.layers, keep=sizes.student.layers)
    except UsageError as error:
        raise UsageError(f"student.{error}") from None


def freeze(model: HeadedModel, parts: Sequence[str]) -> None:
    """Let no gradient reach these parts of the encoder.

    Raises:
        UsageError: there is no such part.
    """
    parameters = dict(model.encoder.named_parameters())
    for part in parts:
        own = [parameter for name, parameter in parameters.items() if name == part or name.startswith(f"{part}.")]
        if not own:
            known = sorted({".".join(name.split(".")[:2]) for name in parameters})
            raise UsageError(f"frozen: the student has no {part!r}; it has {', '.join(known)}")
        for parameter in own:
            parameter.requires_grad_(False)
