"""Training: the one loop, optimisers, schedules and meters."""
