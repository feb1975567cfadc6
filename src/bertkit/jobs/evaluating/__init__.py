"""The suites of `bertkit eval`, and what compares finished runs."""
