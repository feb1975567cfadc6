"""Text: its sources, and the tokenizers that turn it into ids."""
