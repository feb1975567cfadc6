"""Objectives, one file each: corruption in numpy, and a loss as a sum and a count."""

from bertkit.models.loss_sum import LossSum
from bertkit.objectives.base import Objective

__all__ = ["LossSum", "Objective"]
