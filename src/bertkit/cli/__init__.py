"""The command line: one file per subcommand, which parses, calls and prints."""
