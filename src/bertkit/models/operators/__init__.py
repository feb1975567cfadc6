"""Operators without a place in one family: products, dropout, embeddings, and losses over the vocabulary."""
