"""The kinds of `bertkit probe`: each reads, checks, has its analysis made and writes figure, table and sentence."""
