"""Models: shared layers, one file per family, heads, and the Hugging Face file formats."""
