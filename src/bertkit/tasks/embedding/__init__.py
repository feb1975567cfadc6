"""Texts embedded separately and compared by their vectors: the task (task.py), its losses, and its evaluation."""
