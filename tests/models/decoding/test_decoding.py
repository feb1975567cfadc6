"""Decoding with a cache of keys and values equals decoding without one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.models.oracle import Case, all_cases, make_oracle

from bertkit.errors import DataError
from bertkit.models.decoding.causal import CachedNextTokens, RecomputedNextTokens, next_tokens
from bertkit.models.files.hub import load_model
from bertkit.models.headed import SCORING_RULE, HeadedModel

pytest.importorskip("transformers")

LENGTHS = [5, 1, 9, 4]
STEPS = 7


def cached_cases() -> list[Case]:
    """Every case of a family with a cache that can predict a token."""
    return [case for case in all_cases() if _head(case) is not None]


def _head(case: Case) -> str | None:
    return next((head for head in ("causal_lm", "masked_lm") if head in case.heads), None)


def loaded(case: Case, directory: Path) -> HeadedModel:
    head = _head(case)
    assert head is not None
    make_oracle(case, case.heads[head]).save_pretrained(directory)
    model, _ = load_model(directory)
    if head == "masked_lm":
        model.extras[SCORING_RULE] = "encoder_left_to_right"
    return model


def prompts(case: Case) -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    ids = [torch.randint(4, 97, (length,), generator=generator).tolist() for length in LENGTHS]
    return [[token + (token == case.pad_id) for token in row] for row in ids]


@pytest.mark.parametrize("case", cached_cases(), ids=str)
@torch.inference_mode()
def test_cached_equals_uncached_with_rows_of_unequal_length_that_are_dropped_and_repeated(
    case: Case, tmp_path: Path
) -> None:
    model = loaded(case, tmp_path)
    if not model.encoder.caches_keys:
        pytest.skip("the family reads the whole sequence again")
    head = _head(case)
    assert head is not None
    cached, plain = CachedNextTokens(model, head), RecomputedNextTokens(model, head)
    ids = prompts(case)
    room = max(LENGTHS) + STEPS
    generator = torch.Generator().manual_seed(1)
    ours, theirs = cached.start(ids, room), plain.start(ids, room)
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    orders = {2: [3, 0, 1], 3: [1, 1, 2, 0, 0], 5: [4, 2], 6: [1, 0]}
    for step in range(STEPS):
        if step in orders:
            row_R = torch.tensor(orders[step])
            cached.select(row_R)
            plain.select(row_R)
        token_R = torch.randint(4, 97, (len(plain.ids),), generator=generator)
        token_R += token_R == case.pad_id
        ours, theirs = cached.step(token_R), plain.step(token_R)
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def test_which_families_have_a_cache(tmp_path: Path) -> None:
    """Fails if a family is forgotten when its attention changes."""
    having = {case.name.partition("-")[0] for case in cached_cases() if _caches(case)}
    assert {"gpt2", "openai", "bert", "megatron", "roberta", "distilbert", "modernbert", "albert"} <= having


def _caches(case: Case) -> bool:
    import transformers

    from bertkit.models.files.hub import _KINDS

    config = getattr(transformers, case.config_class)(**case.settings, vocab_size=97)
    kind = _KINDS[config.model_type]
    with torch.device("meta"):
        return kind.from_hub(config.to_dict()).build(97).caches_keys


def test_an_encoder_that_was_trained_on_masks_does_not_decode(tmp_path: Path) -> None:
    case = next(case for case in all_cases() if case.name == "bert")
    model = loaded(case, tmp_path)
    del model.extras[SCORING_RULE]
    with pytest.raises(DataError, match="was not trained to predict the next token"):
        next_tokens(model)
    model.extras[SCORING_RULE] = "masked_next_token"
    assert isinstance(next_tokens(model), CachedNextTokens)
    assert isinstance(next_tokens(model, cached=False), RecomputedNextTokens)
