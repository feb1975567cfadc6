"""Jobs: one folder per long command; puts a recipe's parts together in a run directory."""
