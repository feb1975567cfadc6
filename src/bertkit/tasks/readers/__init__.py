"""Readers of files with examples: one module per format; load.py chooses among them."""

from bertkit.tasks.readers.labels import label_names
from bertkit.tasks.readers.load import load_split
from bertkit.tasks.readers.own import read_own, read_perhaps_labelled
from bertkit.tasks.readers.reading import TableReading
from bertkit.tasks.readers.table import Columns

__all__ = ["Columns", "TableReading", "label_names", "load_split", "read_own", "read_perhaps_labelled"]
