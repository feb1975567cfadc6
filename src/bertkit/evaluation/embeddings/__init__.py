"""Evaluation of sentence vectors from a model or averaged word vectors: pairs, triplets, clusters, retrieval."""
