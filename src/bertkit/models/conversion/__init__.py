"""A trained model changed: another family or vocabulary, more or fewer layers, fewer heads or weights."""
