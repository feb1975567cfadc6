"""XLNet's predictions of missing tokens equal `transformers`, one text at a time, for every way to request them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.probing.tiny_models import TEXTS, save_tiny, tiny_model, tiny_tokenizer
from torch import Tensor

from bertkit.cli.app import run
from bertkit.errors import DataError
from bertkit.generation.masked_text import MaskedPredictor
from bertkit.models.families.xlnet import XlnetConfig
from bertkit.models.headed import HeadedModel
from bertkit.models.scoring.fill_mask import fill_masks
from bertkit.models.scoring.pseudo_likelihood import score_texts
from bertkit.models.scoring.rules import QueryStream, choose_rule, mask_rule
from bertkit.text.tokenizer import Tokenizer

transformers = pytest.importorskip("transformers")

SIZES: dict[str, Any] = {
    "hidden_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 36,
    "initializer_range": 0.3,
}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return tiny_tokenizer()


@pytest.fixture(scope="module")
def xlnet(tokenizer: Tokenizer) -> HeadedModel:
    return tiny_model(tokenizer, XlnetConfig(**SIZES), ("permutation_lm",))


@pytest.fixture(scope="module")
def directory(xlnet: HeadedModel, tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("xlnet")
    save_tiny(xlnet, tokenizer, path)
    return path


def from_the_library(directory: Path, inner: list[int], missing: list[int], tokenizer: Tokenizer) -> Tensor:
    """Log-probabilities at the missing positions, (M, V): no token attends to those, and known tokens to no special
    token."""
    oracle = transformers.XLNetLMHeadModel.from_pretrained(directory).eval()
    ids = [*inner, tokenizer.sep_id, tokenizer.cls_id]
    length, shown = len(ids), [place for place in range(len(inner)) if place not in missing]
    unseen_SS = torch.zeros(length, length)
    unseen_SS[:, missing] = 1
    for special in (len(inner), len(inner) + 1):
        unseen_SS[shown, special] = 1
    mapping_MS = torch.zeros(len(missing), length)
    mapping_MS[torch.arange(len(missing)), missing] = 1
    with torch.no_grad():
        logits = oracle(torch.tensor([ids]), perm_mask=unseen_SS[None], target_mapping=mapping_MS[None]).logits[0]
    return torch.log_softmax(logits, dim=-1)


def test_the_score_of_a_text_is_the_librarys_with_one_token_missing_at_a_time(
    xlnet: HeadedModel, tokenizer: Tokenizer, directory: Path
) -> None:
    assert choose_rule(xlnet) is mask_rule(xlnet) is QueryStream
    for text, score in zip(TEXTS, score_texts(xlnet, tokenizer, TEXTS, max_batch_tokens=70), strict=True):
        (inner,) = tokenizer.encode_batch([text])
        expected = [
            float(from_the_library(directory, inner, [place], tokenizer)[0, token]) for place, token in enumerate(inner)
        ]
        np.testing.assert_allclose(score.log_p_N, expected, atol=2e-5)


def test_masks_are_filled_by_the_query_stream(xlnet: HeadedModel, tokenizer: Tokenizer, directory: Path) -> None:
    """For any id of a mask: no token attends to it, and one mask does not see another."""
    text = "The [MASK] tests a [MASK]."
    (inner,) = tokenizer.encode_batch(["The"])
    inner += [tokenizer.mask_id, *tokenizer.encode_batch([" tests a"])[0], tokenizer.mask_id]
    inner += tokenizer.encode_batch(["."])[0]
    masks = [place for place, token in enumerate(inner) if token == tokenizer.mask_id]
    expected_MV = from_the_library(directory, inner, masks, tokenizer)
    (filled,) = fill_masks(xlnet, tokenizer, [text], top=3)
    for own, expected_V in zip(filled["masks"], expected_MV, strict=True):
        assert [each["id"] for each in own] == expected_V.topk(3).indices.tolist()
        assert own[0]["probability"] == pytest.approx(float(expected_V.exp().max()), rel=1e-4)
    predictor = MaskedPredictor(xlnet, tokenizer, batch_tokens=9)
    rows = [predictor.rule.read(ids) for ids in (inner, [tokenizer.mask_id], inner)]
    places = [(2, masks[1]), (1, 0), (0, masks[0]), (0, masks[1])]
    found_MV = torch.log_softmax(predictor(rows, places), dim=-1)
    torch.testing.assert_close(found_MV[[2, 3]], expected_MV, atol=2e-5, rtol=1e-5)
    alone_1V = from_the_library(directory, [tokenizer.mask_id], [0], tokenizer)
    torch.testing.assert_close(found_MV[[1]], alone_1V, atol=2e-5, rtol=1e-5)


def document(capsys: pytest.CaptureFixture[str], *arguments: object) -> Any:
    assert run([*map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    "method", ["gibbs", "metropolis-hastings", "left-to-right", "parallel", "mask-predict", "diffusion"]
)
def test_every_method_for_masks_writes(directory: Path, method: str, capsys: pytest.CaptureFixture[str]) -> None:
    iterations = [] if method == "left-to-right" else ["--iterations", 3]
    options = ["--model", directory, "--method", method, *iterations, "--max-new-tokens", 5]
    filled, added = document(capsys, "generate", "The [MASK] of a [MASK].", "A value", *options)
    assert len(filled["outputs"][0]["ids"]) == 2
    assert filled["outputs"][0]["text"].startswith("the")
    assert filled["outputs"][0]["text"].endswith(".")
    assert len(added["outputs"][0]["ids"]) == 5
    assert not added["outputs"][0]["text"].startswith("a value")


def test_it_is_evaluated_and_told_apart(directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(TEXTS * 3) + "\n", encoding="utf-8")
    found = document(
        capsys, "eval", "mlm", "--model", directory, "--data", text, "--run-dir", tmp_path / "mlm", "--sequences", 6
    )
    figures = found["tasks"]["mlm"]
    assert figures["perplexity"]["mean"] > 1
    assert figures["pseudo_perplexity"]["mean"] > 1
    pairs = tmp_path / "pairs.jsonl"
    pair = {"sentence_good": TEXTS[0], "sentence_bad": TEXTS[1], "UID": "agreement", "pairID": "0"}
    pairs.write_text(json.dumps(pair) + "\n", encoding="utf-8")
    document(capsys, "eval", "blimp", "--model", directory, "--data-dir", pairs, "--run-dir", tmp_path / "blimp")
    results = json.loads((tmp_path / "blimp" / "results.json").read_text(encoding="utf-8"))
    assert results["protocol"]["rule"] == "query_stream"


def test_a_model_without_a_query_stream_is_refused(tokenizer: Tokenizer) -> None:
    masked = tiny_model(tokenizer)
    with pytest.raises(DataError, match="no permutation_lm head to score a text with"):
        score_texts(masked, tokenizer, TEXTS, rule="query_stream")
