"""`bertkit export`: a model in another format, and a check that its outputs agree."""
