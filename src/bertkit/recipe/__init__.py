"""Recipes in general: YAML, `extends`, overrides, validation, and the hash of what decides the result."""
