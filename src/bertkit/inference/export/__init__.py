"""`bertkit export`: a model written anew, and the proof that it is the same."""
