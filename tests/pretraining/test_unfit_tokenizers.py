"""Tokenizers that do not suit an objective: an error of the recipe with its remedy, not of the data."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from bertkit.text.tokenizer import Tokenizer
from bertkit.text.tokenizer_files import save_tokenizer
from tests.training.tiny_run import NOUNS, VERBS, write_recipe

WORDS = ("the", "a", ".", *NOUNS, *VERBS)


def write_tokenizer(directory: Path, *roles: str, form: str = "[{}]") -> Path:
    """One whose tokens are whole words without any mark, with these special tokens."""
    names = {role: form.format(role.upper()) for role in roles}
    pieces = {piece: number for number, piece in enumerate([*names.values(), *WORDS])}
    backend = Backend(models.WordLevel(pieces, unk_token=names.get("unk", "[UNK]")))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.add_special_tokens([AddedToken(token, special=True) for token in names.values()])
    save_tokenizer(Tokenizer(backend, names), directory)
    return directory


ALL = ("pad", "unk", "cls", "sep", "mask")
CAUSAL = "objective=[causal_lm: {}]"
FAULTS = [
    (ALL[:4], "objective=[masked_lm]", ["objective.masked_lm needs a [MASK] token", "mask_share: 0"]),
    (ALL[:4], "objective=[masked_next_token]", ["objective.masked_next_token needs a [MASK] token"]),
    (ALL, "objective=[masked_lm: {units: {name: words}}]", ["needs whole words", "take units pieces"]),
    (ALL, "objective=[masked_lm: {units: {name: spans}}]", ["needs whole words", "tokenizer.type wordpiece"]),
]


@pytest.mark.parametrize(("roles", "objective", "expected"), FAULTS, ids=[objective for _, objective, _ in FAULTS])
def test_an_objective_that_the_tokenizer_cannot_serve_is_a_fault_of_the_recipe(
    roles: tuple[str, ...], objective: str, expected: list[str], bertkit: Callable[..., Any], tmp_path: Path
) -> None:
    recipe, text = write_recipe(tmp_path)
    tokenizer = write_tokenizer(tmp_path / "tokenizer", *roles)
    words = ["--set", f"tokenizer.path={tokenizer}", "--set", objective, "--set", "data.layout={name: doc-sentences}"]
    done = bertkit("pretrain", recipe, "--data", text, "--run-dir", tmp_path / "run", *words)
    assert done.code == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert all(word in done.stderr for word in expected), done.stderr


@pytest.mark.parametrize("objective", [CAUSAL, "objective=[masked_lm: {mask_share: 0.0, random_share: 0.9}]"])
def test_objectives_that_need_neither_masks_nor_words_run(
    objective: str, bertkit: Callable[..., Any], tmp_path: Path
) -> None:
    recipe, text = write_recipe(tmp_path)
    tokenizer = write_tokenizer(tmp_path / "tokenizer", *ALL[:4])
    words = ["--set", f"tokenizer.path={tokenizer}", "--set", objective, "--set", "data.layout={name: doc-sentences}"]
    words += ["--set", "engine.examples=[]", "--max-steps", "2"]
    done = bertkit("pretrain", recipe, "--data", text, "--run-dir", tmp_path / "run", *words)
    assert done.code == 0, done.stderr


def test_a_tokenizer_that_lacks_a_token_of_every_run_is_refused_by_the_plan_too(
    bertkit: Callable[..., Any], tmp_path: Path
) -> None:
    recipe, text = write_recipe(tmp_path)
    tokenizer = write_tokenizer(tmp_path / "tokenizer", "unk", "cls", "sep", "mask")
    words = ["pretrain", recipe, "--data", text, "--set", f"tokenizer.path={tokenizer}"]
    for more in (["--plan"], ["--run-dir", tmp_path / "run"]):
        done = bertkit(*words, *more)
        assert done.code == 3
        assert "the tokenizer has no pad token" in done.stderr


@pytest.mark.parametrize(
    ("example", "code", "expected"),
    [
        ("the [MASK] .", 0, "the <MASK> ."),
        ("the cat .", 2, "engine.examples: 'the cat .' has no <MASK>"),
        ("the " * 600 + "[MASK]", 2, "shorten it"),
    ],
    ids=["own mask", "no mask", "too long"],
)
def test_texts_to_fill_in_are_checked_first_and_get_the_tokenizers_own_mask(
    example: str, code: int, expected: str, bertkit: Callable[..., Any], tmp_path: Path
) -> None:
    recipe, text = write_recipe(tmp_path)
    tokenizer = write_tokenizer(tmp_path / "tokenizer", *ALL, form="<{}>")
    words = ["--set", f"tokenizer.path={tokenizer}", "--set", "data.layout={name: doc-sentences}"]
    words += ["--set", "objective=[masked_lm]", "--set", f"engine.examples={json.dumps([example])}"]
    done = bertkit("pretrain", recipe, "--data", text, "--run-dir", tmp_path / "run", "--max-steps", "2", *words)
    assert done.code == code, done.stderr
    if code:
        assert expected in done.stderr
        assert not (tmp_path / "run" / "checkpoints").exists()
    else:
        (filled,) = json.loads((tmp_path / "run" / "results.json").read_text())["examples"]
        assert filled["text"] == expected


def test_a_padding_id_that_leaves_too_few_positions_is_refused(bertkit: Callable[..., Any], tmp_path: Path) -> None:
    """RoBERTa counts positions from the padding id, which is 1 in its own vocabulary."""
    recipe, text = write_recipe(tmp_path)
    tokenizer = write_tokenizer(tmp_path / "tokenizer", "unk", "cls", "sep", "mask", "pad")
    model = "{family: roberta, hidden_size: 12, num_hidden_layers: 1, num_attention_heads: 3, intermediate_size: 9"
    words = [f"tokenizer.path={tokenizer}", "objective=[masked_lm]", "data.layout={name: doc-sentences}"]
    words += ["data.sequence_length=32", f"model={model}, max_position_embeddings: 34}}"]
    options = [option for word in words for option in ("--set", word)]
    done = bertkit("pretrain", recipe, "--data", text, "--run-dir", tmp_path / "run", *options)
    assert done.code == 2, done.stderr
    assert "the model reads at most 29 tokens, since it counts positions from the tokenizer's padding" in done.stderr
    assert not (tmp_path / "run").exists()
