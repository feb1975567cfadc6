"""Logits of the next token, for generation token by token."""
