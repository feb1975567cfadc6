"""Command line: one file per subcommand; parse, call, print."""
