"""Objectives: one file each; corruption in numpy on the way in, a sum and a count on the way out."""

from bertkit.objectives.base import LossSum, Objective

__all__ = ["LossSum", "Objective"]
