"""Fine-tuning, from a command line to finished runs: one task or several, one seed or a suite."""
