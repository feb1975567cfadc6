"""Semantic search: an index of the vectors of a corpus, BM25 beside it, re-ranking, paraphrases, hard negatives."""
