"""Fine-tuning tasks: the examples in a file, the published tasks, and how each kind of task is trained."""
