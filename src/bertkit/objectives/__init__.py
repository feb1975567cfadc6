"""Objectives: one file each; corruption in numpy on the way in, a sum and a count on the way out."""

from bertkit.models.loss_sum import LossSum
from bertkit.objectives.base import Objective

__all__ = ["LossSum", "Objective"]
