"""`bertkit eval speed`: models are timed in turn, and listed with their sizes and scores."""
