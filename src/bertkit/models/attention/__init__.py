"""Attention over packed sequences: the plain form, faster and sparser forms, positions, and the cache of generation."""
