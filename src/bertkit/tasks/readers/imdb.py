"""IMDb reviews: one folder per label, one text file per review.

Maas et al. 2011, ACL: the archive aclImdb_v1.tar.gz, train/pos/0_9.txt and so on (review 0, nine stars). The folder
train/unsup has no labels and is not read. Line breaks are written `<br />` in the files; these are kept.
"""

from __future__ import annotations

from pathlib import Path

from bertkit.errors import DataError
from bertkit.tasks.catalogue import TaskSpec
from bertkit.tasks.examples import Split, TextExample
from bertkit.tasks.readers.common import Notes, text_in
from bertkit.text.lines import read_lines


def read_imdb(path: Path, spec: TaskSpec, split: str) -> Split:
    """Read `path`/neg/*.txt and `path`/pos/*.txt; ids look like `pos/0_9`.

    Raises:
        DataError: a label's folder is missing or empty, or a review is blank.
    """
    examples: list[TextExample] = []
    for label in spec.labels or ():
        files = sorted((path / label).glob("*.txt"), key=lambda file: (len(file.stem.partition("_")[0]), file.name))
        if not files:
            raise DataError(f"{path / label}: no such folder, or no .txt file in it; expected one review per file")
        for file in files:
            text = "\n".join(line for lines in read_lines(file) for line in lines)
            examples.append(TextExample(f"{label}/{file.stem}", text_in(text, str(file)), None, label))
    return Notes().split(examples, path)
