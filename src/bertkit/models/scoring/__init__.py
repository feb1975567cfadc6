"""The probability of a text and of single tokens, by models that read both sides or one."""
