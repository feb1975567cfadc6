"""Fine-tuning of models on tasks."""
