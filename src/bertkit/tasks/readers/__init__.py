"""Readers of files with examples: one module per format; load.py chooses among them."""

from bertkit.tasks.readers.labels import label_names
from bertkit.tasks.readers.load import load_split
from bertkit.tasks.readers.own import read_own, read_perhaps_labelled
from bertkit.tasks.readers.read_options import TableReadOptions
from bertkit.tasks.readers.table import Columns

__all__ = ["Columns", "TableReadOptions", "label_names", "load_split", "read_own", "read_perhaps_labelled"]
