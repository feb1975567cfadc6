"""What an embedder does with a text before it is tokenised: prompts, lower case, the maximum length.

Reimers and Gurevych 2019, Sentence-BERT, arXiv:1908.10084; as in the files of `sentence-transformers`, under all names
that its versions have used. Sibling sentence.py computes vectors of what is read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bertkit.errors import DataError, UsageError
from bertkit.files import read_json

SETTINGS_FILE = "sentence_bert_config.json"
VERSION_FILE = "config_sentence_transformers.json"
QUERY_PROMPT, DOCUMENT_PROMPTS = "query", ("document", "passage", "corpus")
"""Names of the prompts of queries and of documents; of several for documents, the first one counts."""
_SETTINGS_FILES = tuple(
    f"sentence_{name}_config.json"
    for name in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
"""The settings of an encoder module, under all names that `sentence-transformers` has used for them."""


def settings_file(root: Path) -> Path:
    """The settings file of an encoder module: the first of its possible names that exists, or the usual one."""
    return next((root / name for name in _SETTINGS_FILES if (root / name).is_file()), root / SETTINGS_FILE)


@dataclass(frozen=True)
class TextReading:
    """What an embedder does with a text before it is tokenised.

    A prompt is a prefix such as "query: ". The names of the prompts of queries and documents are those of
    `encode_query` and `encode_document` in `sentence-transformers`.

    Attributes:
        prompts: by name; empty ones are left out.
        default: name of the prompt that is before every text unless another one is given; None: no prompt is.
        lowercases: whether texts are lower-cased, together with the prompt.
        has_roles: whether training reads an example's first text as a query and its others as documents, each with its
            own prompt; not stored with a model.
    """

    prompts: Mapping[str, str] = field(default_factory=dict)
    default: str | None = None
    lowercases: bool = False
    has_roles: bool = False

    @classmethod
    def of(cls, directory: Path, encoder: Path) -> TextReading:
        """Of a directory of `sentence-transformers` and its encoder's.

        Raises:
            DataError: a file is damaged.
        """
        prompts = read_prompts(directory / VERSION_FILE)
        name = optional_json(directory / VERSION_FILE).get("default_prompt_name")
        lowercases = bool(optional_json(settings_file(encoder)).get("do_lower_case", False))
        return cls(prompts, name if isinstance(name, str) and name in prompts else None, lowercases)

    @property
    def default_prompt(self) -> str:
        """The prompt of a text for which none is given; empty if there is none."""
        return "" if self.default is None else self.prompts[self.default]

    @property
    def query_prompt(self) -> str:
        """The prompt of a query that is compared with documents."""
        return self._of_role(QUERY_PROMPT)

    @property
    def document_prompt(self) -> str:
        """The prompt of a document that is compared with queries."""
        return self._of_role(*DOCUMENT_PROMPTS)

    def _of_role(self, *names: str) -> str:
        """A model with no prompt for either role has its default for both."""
        if not any(name in self.prompts for name in (QUERY_PROMPT, *DOCUMENT_PROMPTS)):
            return self.default_prompt
        return next((self.prompts[name] for name in names if name in self.prompts), "")

    def with_roles(self, query: str | None, document: str | None) -> TextReading:
        """With these prompts of queries and documents in place of its own; None: its own."""
        query = self.query_prompt if query is None else query
        document = self.document_prompt if document is None else document
        others = {name: text for name, text in self.prompts.items() if name not in (QUERY_PROMPT, *DOCUMENT_PROMPTS)}
        roles = {QUERY_PROMPT: query, DOCUMENT_PROMPTS[0]: document}
        prompts = others | {name: text for name, text in roles.items() if text}
        keeps_default = self.default in prompts and bool(query or document)
        return replace(self, prompts=prompts, default=self.default if keeps_default else None)

    def named(self, name: str) -> str:
        """A prompt by its name; empty if it is that of queries or documents, and only others have one.

        Raises:
            UsageError: the model has no such prompt.
        """
        if self.prompts and name in (QUERY_PROMPT, DOCUMENT_PROMPTS[0]):
            return self.prompts.get(name, "")
        if name not in self.prompts:
            there = f"its prompts are {', '.join(sorted(self.prompts))}" if self.prompts else "it has none by name"
            raise UsageError(f"the model has no prompt {name!r}; {there}")
        return self.prompts[name]

    def __call__(self, text: str, prompt: str | None = None) -> str:
        """The text that is tokenised, with a prompt, by default the model's."""
        whole = (self.default_prompt if prompt is None else prompt) + text
        return whole.lower() if self.lowercases else whole


def read_prompts(path: Path) -> dict[str, str]:
    """The prompts in a config_sentence_transformers.json by name, without empty ones.

    Raises:
        DataError: they are not texts.
    """
    prompts = optional_json(path).get("prompts") or {}
    if not isinstance(prompts, dict) or not all(isinstance(each, str | None) for each in prompts.values()):
        raise DataError(f"{path}: prompts: expected texts by name")
    return {name: text for name, text in prompts.items() if text}


def stored_limit(root: Path) -> int | None:
    """The maximum length of an encoder module with any version's files; None: the encoder's.

    Raises:
        DataError: it is not a whole number of at least 1.
    """
    file = settings_file(root)
    return whole_number(optional_json(file), "max_seq_length", file) or stored_length(root)


def stored_length(root: Path) -> int | None:
    """The maximum length where sentence-transformers 6 stores it; older versions use sentence_bert_config.json."""
    limit = optional_json(root / "tokenizer_config.json").get("model_max_length")
    return int(limit) if isinstance(limit, int | float) and 1 <= limit < math.inf else None


def whole_number(settings: Mapping[str, Any], key: str, path: Path) -> int | None:
    """A number in a file; None if the key is missing.

    Raises:
        DataError: it is not a whole number of at least 1.
    """
    value = settings.get(key)
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
        raise DataError(f"{path}: {key} is {value!r}; expected a whole number of at least 1")
    return value


def optional_json(path: Path) -> dict[str, Any]:
    """The contents of a JSON file; empty if there is none."""
    return read_json(path) if path.is_file() else {}
