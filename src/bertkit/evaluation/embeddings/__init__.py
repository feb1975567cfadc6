"""Evaluation of sentence vectors from a model or averaged word vectors: similarity, pairs, triplets, clusters, retrieval."""
