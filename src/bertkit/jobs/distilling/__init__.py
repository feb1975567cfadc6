"""Distillation: of a task beside fine-tuning, of text beside pretraining."""
