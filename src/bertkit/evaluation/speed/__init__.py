"""`bertkit eval speed`: models are timed in turn, and stand in a table with their sizes and scores."""
