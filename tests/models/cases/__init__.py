"""One file a family: what to compare it with."""
