"""Objectives: one file each; corruption in numpy on the way in, a sum and a count on the way out."""
