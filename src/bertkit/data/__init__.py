"""Data: token shards, layouts of samples, packed batches and counter-based randomness."""
