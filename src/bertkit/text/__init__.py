"""Text: where it comes from, and the tokenizers that turn it into ids."""
