"""Tests of `bertkit.jobs`."""
