"""`bertkit eval lm`: every token is scored once, with the context of its window."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from bertkit.arrays import Int64Array
from bertkit.cli.app import run
from bertkit.data.batch import BatchLanes, PackedBatch
from bertkit.evaluation.lm import score_text, sliding_windows
from bertkit.generation.text import PromptTokens
from bertkit.models.families.elmo import ElmoConfig
from bertkit.models.families.gpt2 import Gpt2Config
from bertkit.models.files.hub import load_model
from bertkit.models.headed import SCORING_RULE, HeadedModel
from bertkit.text.sources import open_corpus
from bertkit.text.tokenizer import TokenizerConfig
from bertkit.text.tokenizer_files import load_tokenizer
from bertkit.text.vocabulary import train_tokenizer
from tests.probing.tiny_models import GPT2, save_tiny, tiny_model, tiny_tokenizer

LENGTH, STRIDE = 20, 7


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "new.txt"
    first = "The reader tests a document. " * 9
    path.write_text(f"{first.strip()}\n\nA value – walked to the building\nand learned.\n\nshort\n", encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def causal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizer = tiny_tokenizer()
    made = tiny_model(tokenizer, Gpt2Config(**GPT2), ("causal_lm",))
    return save_tiny(made, tokenizer, tmp_path_factory.mktemp("causal"))


def evaluated(capsys: pytest.CaptureFixture[str], runs: Path, *arguments: object) -> dict[str, float]:
    assert run(["eval", "lm", "--json", "--run-dir", str(runs), *map(str, arguments)]) == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert document["suite"] == "lm"
    return {name: figure["mean"] for name, figure in document["tasks"]["lm"].items()}


def plain_nats(model: HeadedModel, ids: list[int], start: int) -> float:
    """Token by token: the first window that reaches a token scores it."""
    total = 0.0
    for place in range(len(ids)):
        first = 0
        while first + LENGTH - 1 <= place:
            first += STRIDE
        row = [start, *ids[first : place + 1]]
        with torch.no_grad():
            logits = model.token_logits("causal_lm", model(PackedBatch.from_ids([row[:-1]])))[-1]
        total -= float(torch.log_softmax(logits.double(), dim=-1)[row[-1]])
    return total


def test_perplexity_and_bits_per_byte_are_those_of_a_plain_loop(
    causal: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--model", causal, "--data", text, "--sequence-length", LENGTH, "--stride", STRIDE]
    figures = evaluated(capsys, tmp_path / "a", *options)
    model, tokenizer = load_model(causal)[0], load_tokenizer(causal)
    documents = [part.replace("\n", " ").strip() for part in text.read_text(encoding="utf-8").split("\n\n")]
    ids = [tokenizer.encode_plain([document])[0].tolist() for document in documents]
    nats = sum(plain_nats(model, row, tokenizer.cls_id) for row in ids)
    tokens = sum(map(len, ids))
    assert figures["tokens"] == tokens
    assert figures["perplexity"] == pytest.approx(math.exp(nats / tokens), rel=1e-5)
    size = sum(len(document.encode()) for document in documents)
    assert figures["bytes"] == size
    assert figures["bits_per_byte"] == pytest.approx(nats / math.log(2) / size, rel=1e-5)
    other = evaluated(capsys, tmp_path / "b", *options, "--batch-tokens", 1)
    assert other["loss"] == pytest.approx(figures["loss"], rel=1e-6)
    few = evaluated(capsys, tmp_path / "c", *options, "--max-tokens", len(ids[0]))
    assert few["tokens"] == len(ids[0])


@pytest.mark.parametrize("start", [(), (1,)])
def test_a_documents_first_token_is_given_only_without_a_token_before_it(start: tuple[int, ...], text: Path) -> None:
    def even(rows: list[list[int]], index_M: Int64Array, target_M: Int64Array) -> Any:
        assert (np.concatenate(rows)[index_M + 1] == target_M).all()
        return SimpleNamespace(log_p_M=np.full(index_M.size, -2.0))

    starts = PromptTokens(tiny_tokenizer(), start, frozenset(), 110, start, 60)
    corpus = open_corpus([str(text)])
    found = score_text(even, corpus, starts, length=20, stride=7, max_tokens=None, max_batch_tokens=50)  # type: ignore[arg-type]  # a model that predicts evenly
    lengths = [len(tiny_tokenizer().encode_plain([" ".join(lines)])[0]) for lines in corpus.documents()]
    assert found.given == (0 if start else 3)
    assert found.tokens == sum(lengths) - found.given
    assert found.nats == 2 * found.tokens


def test_the_column_of_a_table_is_named(causal: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, column in (("a", "text"), ("b", "body")):
        (tmp_path / f"{name}.csv").write_text(f"id,{column}\n1,The reader tests a document.\n", encoding="utf-8")
    own, named = (
        evaluated(capsys, tmp_path / name, "--model", causal, "--data", tmp_path / f"{name}.csv", *option)
        for name, option in (("a", ()), ("b", ("--text-field", "body")))
    )
    assert named == own


@pytest.mark.parametrize("start_ids", [[], [1]])
@pytest.mark.parametrize("lone_ids", [[], [2]])
@pytest.mark.parametrize("count", [0, 1, 5, 19, 20, 21, 50])
@pytest.mark.parametrize("stride", [1, 7, 19])
def test_windows_score_every_token_once_with_enough_before_it(
    start_ids: list[int], lone_ids: list[int], count: int, stride: int
) -> None:
    ids = list(range(100, 100 + count))
    found = list(sliding_windows(np.array(ids, dtype=np.int64), start_ids, lone_ids, length=20, stride=stride))
    scored = [token for window in found for token in window.ids[window.first :]]
    assert scored == (ids if start_ids or lone_ids else ids[1:])
    assert all(window.first >= 1 and len(window.ids) <= 20 for window in found)
    assert all(window.ids[: len(start_ids)] == start_ids for window in found)
    for window in found[1:]:
        assert window.first >= 20 - stride


def test_an_encoder_trained_from_left_to_right_is_scored_and_one_trained_on_masks_is_not(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = tiny_tokenizer()
    made = tiny_model(tokenizer)
    masked = save_tiny(made, tokenizer, tmp_path / "masked")
    assert run(["eval", "lm", "--model", str(masked), "--data", str(text)]) == 3
    assert "`bertkit eval mlm --model" in capsys.readouterr().err
    made.extras[SCORING_RULE] = "encoder_left_to_right"
    causal = save_tiny(made, tokenizer, tmp_path / "causal")
    own = evaluated(capsys, tmp_path / "a", "--model", causal, "--data", text)
    named = ["--model", masked, "--data", text, "--rule", "encoder_left_to_right"]
    assert evaluated(capsys, tmp_path / "b", *named) == own
    made.extras[SCORING_RULE] = "masked_next_token"
    hybrid = save_tiny(made, tokenizer, tmp_path / "hybrid")
    assert evaluated(capsys, tmp_path / "c", "--model", hybrid, "--data", text) == own


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--stride", "60"], "must be below the window's 60 tokens"),
        (["--sequence-length", "61"], "the model reads at most 60 tokens"),
        (["--stride", "0"], "stride"),
        ([], "give --data SOURCE"),
    ],
)
def test_bad_settings(
    causal: Path, text: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    data = ["--data", str(text)] if arguments else []
    assert run(["eval", "lm", "--model", str(causal), *data, *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_model_that_reads_from_both_ends_is_scored_from_both(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Compared with ELMo's training on lanes of text; its documents begin after the separator that closes another."""
    settings = TokenizerConfig(type="word", vocab_size=30, min_frequency=1, template="closed")
    known = train_tokenizer(settings, [text.read_text(encoding="utf-8")])
    config = ElmoConfig(character_size=4, filters=((1, 6),), projection_size=6, lstm_width=11)
    model = HeadedModel(config.build(known.vocab_size), ["causal_lm"])
    model.initialise(3)
    model.encoder.read_vocabulary(known)
    directory = save_tiny(model.eval(), known, tmp_path / "elmo")
    options = ["--model", str(directory), "--data", str(text), "--run-dir", str(tmp_path / "run")]
    assert run(["eval", "lm", "--json", *options]) == 0
    found = json.loads(capsys.readouterr().out)
    documents = [" ".join(part.split("\n")) for part in text.read_text(encoding="utf-8").strip().split("\n\n")]
    rows = [known.encode_plain([document])[0].tolist() for document in documents]
    for task, backward in (("lm", False), ("lm_backward", True)):
        nats, tokens = 0.0, 0
        for row in rows:
            ids = [known.sep_id, *(row[::-1] if backward else row)]
            lanes = BatchLanes(torch.arange(1), torch.tensor([backward]), len(ids))
            with torch.no_grad():
                states = model(replace(PackedBatch.from_ids([ids]), lanes=lanes))
                logits = model.token_logits("causal_lm", states[:-1]).double()
            nats -= float(logits.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None]).sum())
            tokens += len(row)
        assert found["tasks"][task]["loss"]["mean"] == pytest.approx(nats / tokens, rel=1e-5)
    means = [found["tasks"][task]["bits_per_byte"]["mean"] for task in ("lm", "lm_backward")]
    assert found["average"] == pytest.approx(sum(means) / 2)
    assert means[0] != pytest.approx(means[1], rel=1e-3)
