"""Sentence vectors measured: similarity, pairs, triplets, retrieval; of a model, or of averaged word vectors."""
