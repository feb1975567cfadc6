"""Text out of a model: from left to right, or by filling in masks."""
