"""Trains a vocabulary in a separate process and prints the sha256 of its files: `TYPE SIZE TEXTFILE OUT`."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

from bertkit.text.tokenizer import TokenizerConfig
from bertkit.text.tokenizer_files import save_tokenizer
from bertkit.text.vocabulary import train_tokenizer

if __name__ == "__main__":
    kind, size, source, out = sys.argv[1:]
    config = TokenizerConfig.model_validate({"type": kind, "vocab_size": int(size)})
    save_tokenizer(train_tokenizer(config, Path(source).read_text(encoding="utf-8").split("\n")), out)
    for path in sorted(Path(out).iterdir()):
        print(path.name, hashlib.sha256(path.read_bytes()).hexdigest())
