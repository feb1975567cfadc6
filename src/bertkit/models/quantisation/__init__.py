"""Weights of fewer bits: bfloat16, int8, two to eight bits, and their place in a model directory."""
