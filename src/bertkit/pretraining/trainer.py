"""The trainer of pretraining: the stages' batches and models, held-out evaluation, and the results.

Not from a paper. Used by every pretraining recipe; differences between papers are in the nouns' folders. Sibling run.py
prepares the corpus, held_out.py evaluates.
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from bertkit.data.batch import PackedBatch
from bertkit.data.samples import Vocabulary
from bertkit.data.shards import TokenShards
from bertkit.errors import DataError, UsageError
from bertkit.models.conversion.convert import grown
from bertkit.models.encoder import EncoderConfig
from bertkit.models.files.hub import save_model
from bertkit.models.headed import SCORING_RULE, HeadedModel
from bertkit.models.scoring.fill_mask import fill_masks, masked_ids
from bertkit.models.scoring.rules import SingleMaskRule
from bertkit.objectives.base import Objective
from bertkit.objectives.forward import (
    masked_lm_of,
    pretraining_model,
    scoring_rule,
    set_trained,
    take_over,
    takes_over,
)
from bertkit.pretraining.examples import MaskedSentence, masked_sentences
from bertkit.pretraining.growth import check_growth
from bertkit.pretraining.initial_model import Initial, initial_model
from bertkit.pretraining.loss_terms import ObjectiveTerms
from bertkit.pretraining.rates import stage_rates, width_transfer
from bertkit.pretraining.recipe import Recipe
from bertkit.pretraining.stage_run import StageRun, check_epochs
from bertkit.pretraining.stages import multi_rank_obstacle, stages_of
from bertkit.pretraining.translated import held_out_translations
from bertkit.pretraining.words import FOLDER, WORDS, WordsRead, kept_document, milestone_name
from bertkit.progress import Progress
from bertkit.run.checkpoint import Checkpoint
from bertkit.run.directory import RunDirectory
from bertkit.run.plots import draw_curves
from bertkit.text.tokenizer_files import load_tokenizer
from bertkit.text.vocabulary import SPECIAL_TOKENS
from bertkit.training.engine import resolve_engine
from bertkit.training.model_state import write_whole
from bertkit.training.out_of_memory import MicroBatchMemoryError
from bertkit.training.placement import unshardable_optimizer
from bertkit.training.rates import ParameterRates
from bertkit.training.step import Step, StepOutcome
from bertkit.training.trainer import Trainer

log = logging.getLogger(__name__)

CARRIED = "carried"
"""The tensors of a checkpoint that contain state carried from one batch to the next."""


class Pretrainer(Trainer[PackedBatch]):
    """One run, from its start or its newest checkpoint to its end.

    Args:
        recipe: resolved.
        shards: the tokenised corpus.
        run: the run directory, whose lock the caller holds.
        cache: the cache's root, for epoch plans.
    """

    remedy = "lower optimisation.schedule.peak, or raise warmup_steps"
    batch_class: ClassVar[type] = PackedBatch
    recipe: Recipe
    model: HeadedModel

    def __init__(self, recipe: Recipe, shards: TokenShards, run: RunDirectory, *, cache: Path) -> None:
        super().__init__(run, resolve_engine(recipe.engine))
        self.recipe = recipe
        self.shards = shards
        self._terms: dict[int, ObjectiveTerms] = {}
        self.tokenizer = load_tokenizer(shards.directory)
        self.vocabulary = Vocabulary.of(self.tokenizer)
        self.steps = recipe.optimisation.steps
        self.stages = [
            StageRun(
                stage,
                shards,
                self.tokenizer,
                cache=cache,
                micro_batch_tokens=self.engine.micro_batch_tokens,
                prepare=self._prepared,
            )
            for stage in stages_of(recipe)
        ]
        model = self._new_model(self.stages[0].stage.recipe.model)
        self._copies = model.encoder.untrained_copies(model.head_names)
        self._use(model)
        self._check_lengths()
        self._check_growth()
        self._check_groups()
        self.current = self.stages[0]
        self._entered: StageRun | None = None
        self._set_rates(self.current)
        self._last_evaluation: tuple[int, dict[str, Any]] = (-1, {})

    def multi_rank_obstacle(self) -> str | None:
        return multi_rank_obstacle([stage_run.stage for stage_run in self.stages])

    def sharding_obstacle(self) -> str | None:
        if len({stage_run.stage.recipe.model for stage_run in self.stages}) > 1:
            return "optimisation.stages: the model grows, which needs unsharded weights"
        if any(takes_over(stage_run.objectives) for stage_run in self.stages):
            return "optimisation.stages: the model takes over its generator's weights, which needs them unsharded"
        return unshardable_optimizer(self.recipe.optimisation.optimizer)

    def check_data(self) -> None:
        for stage_run in self.stages:
            _ = stage_run.held_out
            stage_run.batches.check_enough()
        check_epochs(self.recipe.data.max_epochs, self.recipe.optimisation, self.stages)
        self._check_examples()
        if (left_out := self.stages[0].left_out) is not None:
            log.info("data.deduplicate: %s", left_out.in_words)
        self.stages[-1].held_out_size.report()
        self.run.update(held_out={"least_tokens": self.recipe.data.held_out_tokens})

    @property
    def _examples(self) -> list[MaskedSentence]:
        """The texts to fill in after training, with the tokenizer's own mask in place of [MASK]."""
        if (given := self.recipe.engine.examples) is None:
            return []
        if given:
            mask = self.tokenizer.roles["mask"]
            return [MaskedSentence(text.replace(SPECIAL_TOKENS["mask"], mask)) for text in given]
        return masked_sentences(
            self.shards,
            self.stages[-1].held_out_N2,
            self.tokenizer,
            seed=self.recipe.seed,
            max_tokens=self.model.encoder.max_tokens,
        )

    def _check_examples(self) -> None:
        """Raise UsageError if a text to fill in after training has no mask, or is too long."""
        if "mask" not in self.tokenizer.roles or not any(each.fills_masks for each in self.stages[-1].objectives):
            return
        try:
            for example in self._examples:
                masked_ids(SingleMaskRule(self.tokenizer), example.text, self.model.encoder.max_tokens)
        except DataError as error:
            raise UsageError(f"engine.examples: {error}") from error

    def _check_lengths(self) -> None:
        """Raise UsageError if sequences are too long for a model that counts positions from the tokenizer's padding
        id."""
        encoder = self.model.encoder
        length = max(each.stage.recipe.data.sequence_length for each in self.stages)
        if "pad_token_id" in encoder.to_hub() and length > encoder.max_tokens:
            raise UsageError(
                f"data.sequence_length is {length}, but the model reads at most {encoder.max_tokens} tokens, since it"
                f" counts positions from the tokenizer's padding id, {encoder.padding_id}; lower it, or raise"
                " model.max_position_embeddings"
            )

    def _check_growth(self) -> None:
        """Raise UsageError if the model cannot grow as the stages have it."""
        check_growth([each.stage for each in self.stages])

    def _check_groups(self) -> None:
        """Raise UsageError if a stage's groups do not match the parameters of its model."""
        known = {self.stages[0].stage.recipe.model: self.model}
        for each in self.stages:
            config = each.stage.recipe.model
            if config not in known:
                with torch.device("meta"):
                    known[config] = pretraining_model(config, each.objectives, self.vocabulary.size)
            self.parameter_rates(known[config], each)

    def parameter_rates(self, model: HeadedModel, stage_run: StageRun) -> dict[str, float]:
        """The factor of each parameter's learning rate in a stage.

        Raises:
            UsageError: a group names no parameter of the model.
        """
        names = [name for name, _ in model.named_parameters()]
        return stage_rates(names, stage_run.stage, stages=len(self.stages))

    def _set_rates(self, stage_run: StageRun) -> None:
        """Enable gradients for what the stage trains, and set each parameter's learning rate."""
        self.rates.thaw()
        set_trained(self.model, stage_run.objectives)
        by_width = self._width_rates(self.model)
        rates = self.parameter_rates(self.model, stage_run)
        self.rates.set({name: rate * by_width.get(name, 1.0) for name, rate in rates.items()}, decay_divisors=by_width)

    def _width_rates(self, model: HeadedModel) -> dict[str, float]:
        """The part of each parameter's factor that is due to the model's width."""
        transfer = width_transfer(model, self.recipe.optimisation)
        return {} if transfer is None else transfer.rates()

    def new_terms(self, stage_run: StageRun) -> ObjectiveTerms:
        """The loss terms that a stage minimises."""
        return ObjectiveTerms(stage_run.objectives)

    def terms(self, stage_run: StageRun) -> ObjectiveTerms:
        """`new_terms`, created once, when the stage is first trained or evaluated."""
        number = stage_run.stage.number
        if number not in self._terms:
            self._terms[number] = self.new_terms(stage_run)
        return self._terms[number]

    def loss_terms(self, step: int) -> ObjectiveTerms:
        return self.terms(self.current)

    def kind_of_loss(self) -> str:
        return f"stage {self.current.stage.number}"

    def update(self, batches: Sequence[PackedBatch]) -> StepOutcome:
        carried = self.terms(self.current).carried
        before = carried.tensors
        try:
            outcome = super().update(batches)
        except MicroBatchMemoryError:
            carried.drop()
            carried.tensors = before
            raise
        if outcome.finite:
            carried.commit()
        else:
            carried.drop()
        return outcome

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        carried = self.terms(self.current).carried.tensors
        return {**super().tensors(), **({CARRIED: carried} if carried else {})}

    def learning_rate(self, step: int) -> float:
        if self.clock is not None:
            return self.recipe.optimisation.schedule.at_progress(self.clock.share(step))
        return self.current.stage.learning_rate(step)

    def _use(self, model: HeadedModel) -> None:
        """Train this model from here on, with a new optimiser."""
        self.model = model.to(self.engine.device)
        self.place(self.model)
        self._new_optimizer()
        self.start_average()

    def _new_optimizer(self) -> None:
        optimisation = self.recipe.optimisation
        assert optimisation.schedule.peak is not None
        settings = optimisation.optimizer.for_peak(optimisation.schedule.peak)
        optimizer = settings.build(self.model)
        self.training_step = Step.plain(self.model, optimizer, self.engine, settings.clip_norm, self.placement)
        self.rates = ParameterRates(self.model, optimizer)

    def _enter(self, stage_run: StageRun) -> None:
        """Grow the model, start it from its generator or freeze the generator, as the stage requires."""
        stage = stage_run.stage
        before = self.stages[stage.number - 1] if stage.number else None
        if stage.first_step == self.step:
            if before is not None and stage.recipe.model != before.stage.recipe.model:
                model = grown(self.model, stage.recipe.model)
                if model is not self.model:
                    model.encoder.read_vocabulary(self.tokenizer)
                    self._use(model)
                    depth = stage.recipe.model.model_dump()["num_hidden_layers"]
                    log.info("step %d: the model grows to %d layers", self.step, depth)
            leader = takes_over(stage_run.objectives)
            if leader is not None and before is not None and takes_over(before.objectives) is None:
                take_over(self.model, leader)
                self._use(self.model)
                log.info("step %d: the model takes over the weights of its generator", self.step)
            if stage.new_moments and before is not None:
                self.rates.thaw()
                self._new_optimizer()
        self._set_rates(stage_run)

    def batches(self) -> Generator[list[PackedBatch], None, None]:
        for stage_run in self.stages:
            first, end = stage_run.stage.first_step, stage_run.stage.end_step
            if self.step < end:
                self.current = stage_run
                if self._entered is not stage_run:
                    self._enter(stage_run)
                    self._entered = stage_run
                steps = range(self.step - first, end - first)
                yield from stage_run.batches.loader(steps, workers=self.engine.workers, pin=self.engine.pins_batches)

    def limit_micro_batches(self, tokens: int) -> None:
        super().limit_micro_batches(tokens)
        for stage_run in self.stages:
            stage_run.batches.micro_batch_tokens = tokens

    def evaluation_is_due(self) -> bool:
        ends = {self.steps, self.current.stage.end_step}
        return self.step in ends or self.step % self.recipe.engine.evaluate_every_steps == 0

    def evaluate(self) -> None:
        figures = self._figures(self.current, self.progress)
        self._last_evaluation = (self.step, figures)
        self._metrics.log(self.step, {f"held_out/{name}": value for name, value in figures.items()})
        shown = ", ".join(f"{name} {value:.4g}" for name, value in figures.items())
        log.info("step %d: held-out %s", self.step, shown)

    def _figures(self, stage_run: StageRun, progress: Progress) -> dict[str, Any]:
        return stage_run.held_out.figures(self.model, self.terms(stage_run), self.engine, progress=progress)

    @property
    def words_read(self) -> WordsRead | None:
        """The words read at each step; None if they were not counted."""
        words = self.run.record.get(WORDS)
        return None if words is None else WordsRead(self.stages, int(words), self.steps)

    @property
    def _marks_due(self) -> list[int]:
        """The word marks for which the model is to be saved now."""
        read, marks = self.words_read, self.recipe.engine.models_at_words
        return [] if read is None else read.due(self.step, marks)

    def after_update(self) -> None:
        if self.step < self.steps and (marks := self._marks_due):
            self._record_rule(self.current)
            with self.averaged():
                self.model.encoder.renew_copies(self._copies)
                self._keep_model(marks)

    def _keep_model(self, marks: Sequence[int]) -> None:
        """Save the current model, once for each word mark."""
        for words in marks if self.ranks.is_first else ():
            directory = self.run.path / FOLDER / milestone_name(words)
            directory.parent.mkdir(exist_ok=True)
            write_whole(directory, partial(save_model, self.model, self.tokenizer))
            log.info("step %d: the model after %s words is saved in %s", self.step, f"{words:,}", directory)

    def _record_rule(self, stage_run: StageRun) -> None:
        """Record in the model's config.json the scoring rule for which a stage trains it."""
        self.model.extras.pop(SCORING_RULE, None)  # from an initial model or an earlier stage
        rule = scoring_rule(stage_run.objectives)
        if rule is not None:
            self.model.extras[SCORING_RULE] = rule

    def _line(self) -> dict[str, Any]:
        read = self.words_read
        return {**super()._line(), **({} if read is None else {WORDS: read.before(self.step)})}

    def finish(self) -> dict[str, Any]:
        self.save_checkpoint()
        self.take_average()
        self._record_rule(self.stages[-1])
        self.model.encoder.renew_copies(self._copies)
        self._keep_model(self._marks_due)
        for name, companion in self.model.named_companions().items():
            if not companion.encoder.has_hub_class or not self.ranks.is_first:
                continue
            write_whole(self.run.path / name, partial(save_model, companion, self.tokenizer))
        self.write_model(partial(save_model, self.model, self.tokenizer))
        results = self.results()
        if self.ranks.is_first:
            draw_curves(
                self.run.metrics,
                self.run.path / "figures",
                title=f"{self.recipe.name}: {self.step:,} steps, {self.tokens:,} tokens",
                baseline=results["held_out"].get("accuracy/unigram"),
            )
        return results

    def results(self) -> dict[str, Any]:
        last, held_out_text = self.stages[-1], self.stages[-1].held_out
        evaluated, figures = self._last_evaluation
        if evaluated != self.step:  # resumed after the last step
            figures = self._figures(last, self.closing_progress)
        held_out = dict(figures)
        results: dict[str, Any] = {"held_out": held_out, "held_out_text": last.held_out_size.document}
        wanted = self.recipe.engine.translated_pairs
        if wanted and last.stage.recipe.data.layout.keeps_documents and self.model.encoder.config.is_encoder_decoder:
            scores, results["translations"] = held_out_translations(
                self.model,
                self.tokenizer,
                held_out_text.samples,
                self.engine,
                pairs=wanted,
                progress=self.closing_progress,
            )
            held_out.update(scores)
        if (left_out := self.stages[0].left_out) is not None:
            results["duplicates"] = left_out.document
        if self.words_read is not None:
            results[WORDS] = kept_document(self.words_read, self.recipe.engine.models_at_words)
        filling = next((objective for objective in last.objectives if objective.fills_masks), None)
        if filling is not None:
            unigram = held_out_text.unigram_accuracy(filling.term, self.shards.token_counts_V)
            held_out |= {} if unigram is None else {"accuracy/unigram": unigram}
        # A masked LM that only replaces words does not need a [MASK] token.
        if filling is not None and "mask" in self.tokenizer.roles:
            scored = self.recipe.engine.pseudo_perplexity_sequences
            if scored:
                held_out["pseudo_perplexity"] = held_out_text.pseudo_perplexity(
                    self.model, self.vocabulary, self.engine, sequences=scored, progress=self.closing_progress
                )
            examples, model = self._examples, masked_lm_of(self.model)
            texts = [example.text for example in examples]
            filled = fill_masks(model, self.tokenizer, texts, device=self.engine.device)
            results["examples"] = [one.document(found) for one, found in zip(examples, filled, strict=True)]
        return results

    def restore(self, checkpoint: Checkpoint) -> None:
        step = int(checkpoint.state["step"])
        reached = next(each.stage for each in self.stages if step <= each.stage.end_step)
        if reached.recipe.model != self.stages[0].stage.recipe.model:
            self._use(self._new_model(reached.recipe.model))
        super().restore(checkpoint)
        # A stage that begins here starts reading other samples.
        if reached.end_step > step:
            self.terms(self.stages[reached.number]).carried.tensors = dict(checkpoint.tensors.get(CARRIED, {}))

    def _new_model(self, config: EncoderConfig) -> HeadedModel:
        """The model that all stages need, with its initial weights."""
        objectives = [objective for stage_run in self.stages for objective in stage_run.objectives]
        recipe = self.recipe
        if recipe.init is not None:
            first = self.stages[0].stage.recipe.model
            initial = Initial(recipe.init, recipe.init_decoder, recipe.init_tiling, recipe.new_pieces, recipe.seed)
            model = grown(initial_model(initial, first, objectives, self.tokenizer), config)
            model.encoder.read_vocabulary(self.tokenizer)
            return model
        model = pretraining_model(config, objectives, self.vocabulary.size, pad_id=self.vocabulary.pad_id)
        self.draw_weights(model)
        model.encoder.read_vocabulary(self.tokenizer)
        return model

    def draw_weights(self, model: HeadedModel) -> None:
        """Give a model its initial weights, from the recipe's seed, scaled for its width."""
        model.initialise(self.recipe.seed)
        transfer = width_transfer(model, self.recipe.optimisation)
        if transfer is not None:
            transfer.scale_initial_weights(model)

    def _prepared(self, objective: Objective) -> Objective:
        """An objective with what it needs from the vocabulary and the corpus."""
        return objective.prepared(self.tokenizer, self.shards)

    def log_start(self) -> None:
        parameters = sum(parameter.numel() for parameter in self.model.parameters())
        log.info(
            "%s: %s parameters, %s tokens of text, %s steps of %s sequences, %s on %s",
            self.recipe.name,
            f"{parameters:,}",
            f"{self.shards.tokens:,}",
            f"{'at most ' if self.recipe.optimisation.schedule.hours is not None else ''}{self.steps:,}",
            f"{self.recipe.optimisation.batch_sequences:,}",
            self.engine.precision,
            self.engine.device.type,
        )
