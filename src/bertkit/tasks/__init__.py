"""Fine-tuning tasks: what a file of examples holds, where published tasks are found, how each kind is learned."""
