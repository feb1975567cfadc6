"""A stage of a run on its corpus: objectives, batches and held-out samples, and how often all stages read the text.

Not from a paper. Sibling stages.py determines the stages of a recipe.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path

from bertkit.data.deduplication import LeftOut
from bertkit.data.language_stream import training_and_held_out
from bertkit.data.layouts.base import Ranges
from bertkit.data.samples import Vocabulary
from bertkit.data.shards import TokenShards
from bertkit.data.stream import StepBatches
from bertkit.errors import DataError
from bertkit.objectives.base import Objective
from bertkit.pretraining.held_out import HeldOut, HeldOutSize
from bertkit.pretraining.recipe import PretrainingOptimisation
from bertkit.pretraining.stages import Stage
from bertkit.text.tokenizer import Tokenizer


class StageRun:
    """A stage on a corpus: its objectives, its batches and its held-out samples.

    Args:
        stage: of a recipe.
        shards: the tokenised corpus.
        tokenizer: of the shards.
        cache: the cache's root, for epoch plans.
        micro_batch_tokens: maximum number of tokens in a micro-batch; None: batches are not split.
        prepare: used instead of `Objective.prepared`.

    Raises:
        UsageError: the tokenizer does not support an objective.
    """

    def __init__(
        self,
        stage: Stage,
        shards: TokenShards,
        tokenizer: Tokenizer,
        *,
        cache: Path,
        micro_batch_tokens: int | None = None,
        prepare: Callable[[Objective], Objective] | None = None,
    ) -> None:
        optimisation = stage.recipe.optimisation
        prepare = prepare or (lambda objective: objective.prepared(tokenizer, shards))
        self.stage = stage
        self._plans = cache / "plans"
        self.objectives = tuple(map(prepare, stage.recipe.objectives))
        training, self._held_out_stream = training_and_held_out(
            stage.recipe.data,
            shards,
            seed=stage.recipe.seed,
            stage=stage.number,
            plans=self._plans,
            lanes=optimisation.batch_sequences,
            sep_id=tokenizer.sep_id,
        )
        self.batches = StepBatches(
            training,
            Vocabulary.of(tokenizer),
            self.objectives,
            batch_sequences=optimisation.batch_sequences,
            micro_batch_tokens=micro_batch_tokens,
            first_step=stage.first_step,
            run_steps=optimisation.steps,
            sizes=stage.batch_sizes,
        )

    @cached_property
    def held_out(self) -> HeldOut:
        batches = self.batches
        assert batches.micro_batch_tokens is not None
        return HeldOut.prepare(
            self._held_out_stream,
            batches.vocabulary,
            self.objectives,
            sequences=self.stage.recipe.engine.evaluation_sequences,
            micro_batch_tokens=batches.micro_batch_tokens,
        )

    @property
    def held_out_N2(self) -> Ranges:
        """The held-out text, as ranges of segments."""
        return self._held_out_stream.documents_N2

    @property
    def left_out(self) -> LeftOut | None:
        """The documents that `data.deduplicate` leaves out; None without it."""
        return LeftOut.of(self.batches.stream.shards, self.stage.recipe.data.deduplicate, self._plans)

    @property
    def held_out_size(self) -> HeldOutSize:
        return self.held_out.size(self._held_out_stream, self.batches.stream, self.objectives, cache=self._plans)


def check_epochs(limit: float | None, optimisation: PretrainingOptimisation, stages: Sequence[StageRun]) -> None:
    """Raise DataError if the run would read its text more often than `data.max_epochs`, the limit."""
    if limit is None:
        return
    epoch_samples = [each.batches.stream.epoch_length(0) for each in stages]

    def epochs(steps: int) -> float:
        own = [each.stage.recipe.optimisation.model_copy(update={"steps": steps}) for each in stages]
        ends = optimisation.model_copy(update={"steps": steps}).stage_ends()
        sizes = [each.batch_sizes() for each in own]
        stretches = zip([0, *ends], ends, sizes, epoch_samples, strict=False)
        return sum((each.before(end) - each.before(first)) / samples for first, end, each, samples in stretches)

    wanted = epochs(optimisation.steps)
    if wanted <= limit:
        return
    fitting = int(optimisation.steps * limit / wanted)
    while fitting >= len(stages) and epochs(fitting) > limit:
        fitting -= 1
    fewer = f"give --max-steps {fitting} or less, or " if fitting >= len(stages) else ""
    raise DataError(
        f"{stages[0].batches.stream.shards.name}: {optimisation.steps:,} steps would read the text {wanted:.2f}"
        f" times, but data.max_epochs allows only {limit:g}; {fewer}give more text"
    )
