"""Failing updates: counts them, detects loss spikes, and rolls back to a checkpoint if the recipe says so.

Not from a paper. Sibling divergence.py has the settings and the record of events, which a resumed run repeats.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from bertkit.errors import DivergedError
from bertkit.ranks import Ranks
from bertkit.run.checkpoint import go_back
from bertkit.run.directory import RunDirectory
from bertkit.training.config import OptimisationConfig
from bertkit.training.divergence import (
    ROLLED_BACK,
    SKIPPED,
    SPIKE,
    DivergenceRecord,
    RolledBackError,
    RunningLoss,
)
from bertkit.training.step import StepOutcome
from bertkit.visible import shell_word

log = logging.getLogger(__name__)


class FailingUpdates:
    """How a run handles updates with non-finite numbers or loss spikes.

    Args:
        settings: of the recipe.
        record: of the run.
        run: the run directory.
        ranks: the ranks, of which the first one writes.
        remedy: settings to change after divergence, for the message.

    Attributes:
        in_a_row: updates skipped since the last one that was applied.
        last_sound: the step of the checkpoint to roll back to: the last one saved on schedule and outside a row of
            skipped updates. It therefore does not depend on where the run was stopped.
    """

    def __init__(
        self, settings: OptimisationConfig, record: DivergenceRecord, run: RunDirectory, ranks: Ranks, remedy: str
    ) -> None:
        self._settings = settings
        self._record = record
        self._run = run
        self._ranks = ranks
        self._remedy = remedy
        self._losses: dict[str, RunningLoss] = {}
        self.in_a_row = 0
        self.last_sound = 0

    @property
    def rolls_back(self) -> bool:
        """Whether the recipe rolls back to checkpoints at all."""
        return self._settings.roll_back is not None

    @property
    def watches(self) -> bool:
        """Whether the recipe watches for spikes."""
        return self._settings.spikes is not None

    @property
    def may_be_nonfinite(self) -> bool:
        """Whether a checkpoint saved now could contain failing weights, and so is none to roll back to."""
        return self.in_a_row > 0 and self.rolls_back

    def skipped(self, step: int, outcome: StepOutcome) -> None:
        """Record that the update leading to `step` was skipped.

        Raises:
            RolledBackError: there were too many in a row, and the run continues from a checkpoint.
            DivergedError: there were too many in a row.
        """
        self.in_a_row += 1
        terms = {name: total.sum for name, total in outcome.terms.items()}
        self._record.add(step, SKIPPED, terms=terms, grad_norm=outcome.gradient_norm)
        log.warning("step %d: loss or gradient is not finite; the update is skipped", step)
        if self.in_a_row <= self._settings.max_nonfinite_steps:
            return
        why = f"{self.in_a_row} updates in a row up to step {step} had a non-finite loss or gradient"
        self._roll_back(step, why)
        raise DivergedError(
            f"training diverged: {why}; {self._remedy}; `bertkit replay-batch {shell_word(self._run.path)}` recomputes"
            " the batch and names the first value that is not finite"
        )

    def made(self) -> None:
        """Note that the last update was applied."""
        self.in_a_row = 0

    def watch(self, step: int, loss: float, kind: str) -> None:
        """Compare the loss of the update leading to `step` with those before it; only if the recipe `watches`.

        Args:
            step: updates so far.
            loss: of the last update.
            kind: names the losses that are comparable.

        Raises:
            RolledBackError: it is a spike, and the run continues from a checkpoint.
        """
        settings = self._settings.spikes
        assert settings is not None, "called only if the recipe watches"
        running = self._losses.setdefault(kind, RunningLoss(settings))
        if running.is_spike(loss):
            mean, deviation = running.mean, running.deviation
            if not self._record.has(SPIKE, step):
                log.warning("step %d: the loss %.4g is a spike over %.4g ± %.4g", step, loss, mean, deviation)
            self._record.add(step, SPIKE, loss=loss, mean=mean, deviation=deviation)
            if settings.response == "roll_back":
                self._roll_back(
                    step, f"the loss {loss:.4g} of step {step} is a spike over {mean:.4g} ± {deviation:.4g}"
                )
        running.add(loss)

    def _roll_back(self, step: int, why: str) -> None:
        """Roll back to the last scheduled checkpoint, unless the recipe does not allow it or its limit is reached.

        Raises:
            RolledBackError: the run continues from there.
        """
        settings, before = self._settings.roll_back, len(self._record.rolled_back)
        if settings is None or before >= settings.at_most:
            return
        factor = settings.rate_factor ** (before + 1)
        self._record.add(step, ROLLED_BACK, to=self.last_sound, rate_factor=factor, reason=why)
        if self._ranks.is_first:
            go_back(self._run.checkpoints, self.last_sound)
        raise RolledBackError(
            f"{why}; back to step {self.last_sound} with {factor:g} of the learning rate"
            f" ({before + 1} of at most {settings.at_most} times)"
        )

    def state(self) -> dict[str, Any]:
        """The state for a checkpoint."""
        state: dict[str, Any] = {"skipped_in_a_row": self.in_a_row}
        if self.rolls_back:
            state |= {"rolled_back": len(self._record.rolled_back), "last_sound": self.last_sound}
        losses = {kind: running.state() for kind, running in self._losses.items()}
        return state | ({"losses_so_far": losses} if losses else {})

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a checkpoint's state."""
        self.in_a_row = int(state["skipped_in_a_row"])
        self.last_sound = int(state.get("last_sound", state["step"]))
        if (settings := self._settings.spikes) is not None:
            for kind, running in state.get("losses_so_far", {}).items():
                self._losses[kind] = RunningLoss(settings)
                self._losses[kind].restore(running)
