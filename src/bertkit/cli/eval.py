"""`bertkit eval`: the suites that evaluate a model, and what scores or checks saved predictions.

Nothing here follows a paper. To add a suite, write its function and enter it in SUITES. The published tasks are suites
too (eval_tasks.py); `score`, `check` and `ensemble` need no model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from bertkit.cli.commands import CommandGroup

SUITES = {
    "glue": "bertkit.cli.eval_tasks:glue",
    "blimp": "bertkit.cli.eval_suites:blimp",
    "mlm": "bertkit.cli.eval_suites:mlm",
    "speed": "bertkit.cli.eval_speed:speed",
}
"""Each suite's name on the command line and its command."""

WITHOUT_MODEL = {
    "score": "bertkit.cli.eval_saved:score",
    "check": "bertkit.cli.eval_saved:check",
    "ensemble": "bertkit.cli.eval_saved:ensemble",
}
"""Commands that read saved predictions."""

TASK_TITLES = {
    "cola": "Corpus of Linguistic Acceptability",
    "sst2": "Stanford Sentiment Treebank",
    "mrpc": "Microsoft Research Paraphrase Corpus",
    "stsb": "Semantic Textual Similarity Benchmark",
    "qqp": "Quora Question Pairs",
    "mnli": "Multi-Genre Natural Language Inference",
    "qnli": "Question-answering Natural Language Inference (the split of January 2019)",
    "rte": "Recognizing Textual Entailment",
    "wnli": "Winograd Natural Language Inference",
    "snli": "Stanford Natural Language Inference",
    "sick-e": "Sentences Involving Compositional Knowledge: entailment",
    "sick-r": "Sentences Involving Compositional Knowledge: relatedness from 1 to 5",
    "imdb": "Large Movie Review Dataset",
    "squad": "SQuAD 1.1",
    "squad2": "SQuAD 2.0",
    "swag": "Situations With Adversarial Generations",
    "hellaswag": "HellaSwag",
    "codah": "CODAH",
    "race": "RACE",
    "conll2003": "CoNLL-2003 named entities, English",
    "wnut17": "WNUT-17 emerging entities",
    "conll2000": "CoNLL-2000 chunking",
    "ud-pos": "Universal Dependencies, universal parts of speech (English Web Treebank)",
}
"""The tasks of the catalogue that can be evaluated alone; listed here without importing it."""

ALIASES = {"sts": "stsb"}


class Suites(CommandGroup):
    """Evaluate a model; each suite has options of its own: `bertkit eval SUITE --help`."""

    table: ClassVar = {**SUITES, **WITHOUT_MODEL, **dict.fromkeys(TASK_TITLES, "")}
    noun = "suite"
    path = "bertkit eval"

    def known_name(self, name: str) -> str | None:
        """Published tasks in any spelling: SST-2 is sst2."""
        if name in self.table:
            return name
        plain = {"".join(filter(str.isalnum, task)): task for task in TASK_TITLES} | ALIASES
        return plain.get("".join(filter(str.isalnum, name.lower())))

    def load(self, name: str) -> Callable[..., None] | type[CommandGroup]:
        if name not in TASK_TITLES:
            return super().load(name)
        from bertkit.cli.eval_tasks import task_command

        return task_command(name, TASK_TITLES[name])

    def summary(self, name: str) -> str:
        return TASK_TITLES.get(name) or super().summary(name)
