"""Recipes: schema, loading (extends, --set), and the hash of the half that decides the result."""
