"""The encoder families, one file each, and parts that only some of them share. ../registry.py has their names."""
