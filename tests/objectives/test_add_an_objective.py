"""docs/add-an-objective.md is followed exactly in a copy of the package: one file, one registration, one recipe.

Objectives of other kinds are registered by the page's script, so that nothing in the package is changed for them.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import bertkit
from tests.objectives.page_lines import CHECKOUT
from tests.training.tiny_run import write_text

PAGE = CHECKOUT / "docs" / "add-an-objective.md"
BLOCK = re.compile(r"```(?:python|yaml)\n# (\S+)\n(.*?)```", re.DOTALL)

OTHER_KINDS = '''
from __future__ import annotations

from typing import ClassVar

import numpy as np
import torch
from torch.nn import functional

from bertkit.models.loss_sum import LossSum
from bertkit.objectives.base import Objective, SequenceClassification, States, Target


class SequenceLength(SequenceClassification):
    """A class of each sequence."""

    term: ClassVar[str] = "sequence_length"
    outputs: ClassVar[int] = 2
    label_names: ClassVar[tuple[str, ...]] = ("short", "long")

    def corrupt(self, samples, vocabulary, draw):
        long_B = (samples.lengths_B > 24).astype(np.int64)
        return samples.with_changes(labels={**samples.labels, self.term: long_B})


class SpecialShare(Objective):
    """A number of each sequence."""

    term: ClassVar[str] = "special_share"
    target: ClassVar[Target | None] = "number"
    states: ClassVar[States] = "sequences"
    outputs: ClassVar[int] = 1
    has_accuracy: ClassVar[bool] = False

    def corrupt(self, samples, vocabulary, draw):
        share_B = np.bincount(samples.sequence_T, weights=samples.special_T) / samples.lengths_B
        return samples.with_changes(labels={**samples.labels, self.term: share_B})

    def expected_count(self, length):
        return 1.0

    def loss(self, model, hidden_TD, batch):
        predicted_B = model.logits(self.term, hidden_TD, batch).squeeze(-1).float()
        share_B = batch.labels[self.term].float()
        return LossSum(functional.mse_loss(predicted_B, share_B, reduction="sum"), self.count(batch), torch.zeros(()))
'''
RUN_ALL = """
import sys
import bertkit_mine
from bertkit.cli.app import run
sys.exit(max(run(each.split()) for each in sys.argv[1:]))
"""


def blocks() -> dict[str, str]:
    found = dict(BLOCK.findall(PAGE.read_text(encoding="utf-8")))
    assert list(found) == [
        "src/bertkit/objectives/repeated_token.py",
        "src/bertkit/objectives/registry.py",
        "recipes/repeated-token.yaml",
        "bertkit_mine.py",
    ]
    return found


class Checkout:
    """A copy of the package, its recipe and a text, with the output and files of the commands."""

    def __init__(self, directory: Path, files: dict[str, str]) -> None:
        self.directory = directory
        package = Path(bertkit.__file__).parent
        shutil.copytree(package, directory / "src" / "bertkit")
        (directory / "recipes").mkdir()
        for name, content in files.items():
            with (directory / name).open("a", encoding="utf-8") as file:  # the registration goes below the others
                file.write(content)
        write_text(directory / "text.txt")

    def __call__(self, *commands: str) -> list[Any]:
        """The JSON documents of these command lines, run one after another in one process."""
        environment = {**os.environ, "PYTHONPATH": str(self.directory / "src"), "BERTKIT_CACHE": str(self.directory)}
        done = subprocess.run(
            [sys.executable, "-c", RUN_ALL, *commands],
            cwd=self.directory,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr
        decoder, documents, rest = json.JSONDecoder(), [], done.stdout.strip()
        while rest:
            document, end = decoder.raw_decode(rest)
            documents.append(document)
            rest = rest[end:].strip()
        return documents

    def held_out(self, run: str) -> dict[str, float]:
        results: dict[str, dict[str, float]] = json.loads((self.directory / run / "results.json").read_text())
        return results["held_out"]

    def metrics(self, run: str) -> dict[str, float]:
        lines = (self.directory / run / "metrics.jsonl").read_text().splitlines()
        merged: dict[str, float] = {}
        for line in lines:
            merged |= json.loads(line)
        return merged


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> tuple[Checkout, list[Any]]:
    files = blocks()
    files["recipes/other-kinds.yaml"] = re.sub(
        r"  - masked_lm.*?(?=optim)",
        "  - masked_lm\n  - sequence_length\n  - special_share\n",
        files["recipes/repeated-token.yaml"],
        flags=re.DOTALL,
    )
    files["other_kinds.py"] = OTHER_KINDS
    files["bertkit_mine.py"] = (
        files["bertkit_mine.py"]
        .replace("from repeated_token import RepeatedToken", "from other_kinds import SequenceLength, SpecialShare")
        .replace("register(RepeatedToken)", "register(SequenceLength)\nregister(SpecialShare)")
    )
    checkout = Checkout(tmp_path_factory.mktemp("checkout"), files)
    page, others = ("recipes/repeated-token.yaml --data text.txt", "recipes/other-kinds.yaml --data text.txt")
    without = "--set objective=[masked_lm]"
    documents = checkout(
        f"show-batch {page} --step 1 --sequences 9 --json",
        f"show-batch {page} --step 3 --sequences 9 --json",
        f"pretrain {page} --plan --json",
        f"pretrain {page} --plan --json {without}",
        f"pretrain {page} --run-dir run --json -q",
        f"show-batch {others} --sequences 9 --json",
        f"pretrain {others} --plan --json",
        f"pretrain {others} --run-dir others --json -q",
    )
    return checkout, documents


def test_show_batch_shows_what_was_overwritten_and_what_is_predicted(outcome: tuple[Checkout, list[Any]]) -> None:
    shares = []
    for batch in outcome[1][:2]:
        marked = free = 0
        for sequence in batch["sequences"]:
            tokens = sequence["tokens"]
            for before, token in pairwise(tokens):
                free += token.get("change") not in ("masked", "kept")
                if token.get("predicts") == {"repeated_token": "repeated"}:
                    marked += 1
                    # Its left neighbour in the text, which may itself have been replaced.
                    assert token["token"] == before.get("original", before["token"])
                    assert token.get("change", "replaced") == "replaced"
        shares.append(marked / free)
    assert shares[0] > shares[1] + 0.05  # 0.3 at the first step, 0.17 at the third


def test_the_plan_counts_the_new_head_where_it_computes(outcome: tuple[Checkout, list[Any]]) -> None:
    plan, without = outcome[1][2:4]
    assert plan["parameters"]["total"] - without["parameters"]["total"] == 24 + 1
    sequences, length = 3 * 9, plan["mean_sequence_tokens"]
    assert 28 < length < 29
    tokens = sequences * (round(length) - 3)
    # masked_lm alone reads four of a sequence's states; both read all, so the last layer is computed for all.
    maps = 24 * 24 + 2 * 24 * 40
    assert plan["flops"] - without["flops"] == pytest.approx(6 * (24 * tokens + maps * sequences * (length - 4)))


def test_a_run_reports_the_new_term(outcome: tuple[Checkout, list[Any]]) -> None:
    checkout, _ = outcome
    held_out = checkout.held_out("run")
    for name in ("loss", "accuracy", "baseline", "precision", "recall"):
        assert f"{name}/repeated_token" in held_out
    metrics = checkout.metrics("run")
    assert metrics["loss"] == pytest.approx(metrics["loss/masked_lm"] + 5 * metrics["loss/repeated_token"])
    assert metrics["mfu"] > 0


def test_objectives_of_other_kinds_need_nothing_else_either(outcome: tuple[Checkout, list[Any]]) -> None:
    checkout, documents = outcome
    batch, plan, held_out = *documents[5:7], checkout.held_out("others")
    for sequence in batch["sequences"]:
        is_long = len(sequence["tokens"]) > 24
        special = sum(token.get("original", token["token"]) in ("[CLS]", "[SEP]") for token in sequence["tokens"])
        assert sequence["labels"]["sequence_length"] == is_long
        assert sequence["label_names"] == {"sequence_length": ("short", "long")[is_long]}
        assert sequence["labels"]["special_share"] == pytest.approx(special / len(sequence["tokens"]))
    width = 24
    pooler, heads = width * (width + 1), 3 * (width + 1)
    assert plan["parameters"]["total"] - documents[3]["parameters"]["total"] == pooler + heads
    assert "accuracy/sequence_length" in held_out
    assert "loss/special_share" in held_out
    assert "accuracy/special_share" not in held_out
    assert "loss/special_share" in checkout.metrics("others")
