"""`bertkit eval speed`: times models in alternation, and lists them with their sizes and scores."""
