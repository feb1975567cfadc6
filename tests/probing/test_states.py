"""Hidden states of words equal `transformers` layer by layer; a word's is the mean of its tokens', for any batch."""

from __future__ import annotations

import errno
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from bertkit.errors import DataError
from bertkit.models.families.gpt2 import Gpt2Config
from bertkit.models.hook_points import FINAL_NORM, layer_points, recordable_points
from bertkit.probing.sentences import EncodedSentence, Sentence, TextEncoder, packed
from bertkit.probing.state_store import StateStore
from bertkit.probing.states import layer_states
from tests.models.oracle import Case, Inputs, all_cases, ask_oracle, make_inputs, make_twins
from tests.probing.tiny_models import GPT2, TEXTS, cpu_engine, tiny_model, tiny_tokenizer

FAMILIES = ("bert", "megatron-bert", "albert-groups", "distilbert", "gpt2", "modernbert", "xlnet", "roberta")
CASES = [case for case in all_cases() if case.name in FAMILIES]


def as_sentences(inputs: Inputs) -> list[EncodedSentence]:
    """Each sequence as words of one to three tokens, the first token special if there is more than one."""
    rows = []
    bounds = inputs.batch.sequences.cu_seqlens_B1.tolist()
    for number, (start, end) in enumerate(pairwise(bounds)):
        size, first = end - start, int(end - start > 1)
        cuts, step = [first], 1
        while cuts[-1] < size:
            cuts.append(min(size, cuts[-1] + step))
            step = step % 3 + 1
        spans = np.array(list(pairwise(cuts)))
        word_T = np.full(size, -1)
        for word, (begin, behind) in enumerate(spans.tolist()):
            word_T[begin:behind] = word
        ids, types = inputs.batch.ids_T[start:end].numpy(), inputs.batch.token_types_T[start:end].numpy()
        rows.append(EncodedSentence(number, str(number), ("w",) * len(spans), ids, types, word_T, spans))
    return rows


@pytest.mark.parametrize("case", CASES, ids=str)
def test_states_equal_the_hidden_states_of_transformers(case: Case, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    head = next(iter(case.heads))
    twins = make_twins(case, case.heads[head], tmp_path)
    inputs = make_inputs(case, twins.model)
    sentences = as_sentences(inputs)
    with torch.no_grad():
        hidden = ask_oracle(head, twins.oracle, inputs.padded).hidden_states
    (found,) = layer_states(twins.model, sentences, cpu_engine(1000))
    assert len(found.states) == len(hidden)
    starts = inputs.batch.sequences.cu_seqlens_B1.tolist()
    for ours_WD, oracle_BSD in zip(found.states, hidden, strict=True):
        rows_TD = oracle_BSD[inputs.real_BS]
        expected = [
            rows_TD[start + begin : start + behind].mean(0)
            for start, sentence in zip(starts, sentences, strict=False)
            for begin, behind in sentence.spans_W2.tolist()
        ]
        torch.testing.assert_close(ours_WD, torch.stack(expected), rtol=1e-5, atol=1e-5)


def test_the_last_layer_is_behind_the_final_norm() -> None:
    tokenizer = tiny_tokenizer()
    assert layer_points(tiny_model(tokenizer)) == (
        "blocks.0.hook_resid_pre",
        "blocks.0.hook_resid_post",
        "blocks.1.hook_resid_post",
    )
    causal = tiny_model(tokenizer, Gpt2Config(**GPT2), ("causal_lm",))
    assert layer_points(causal)[1:] == ("blocks.0.hook_resid_post", FINAL_NORM)


def test_a_model_without_layers_to_record_is_refused() -> None:
    model = tiny_model(tiny_tokenizer())
    encoder = model.encoder
    model.forward = lambda batch, recorder=None: encoder(batch)  # type: ignore[method-assign]  # a family without taps
    with pytest.raises(DataError, match="family bert has no hidden states that can be recorded by layer"):
        layer_points(model)


def encoded_texts() -> list[EncodedSentence]:
    tokenizer = tiny_tokenizer()
    return list(TextEncoder.of(tiny_model(tokenizer), tokenizer).encode(Sentence(text, text) for text in TEXTS))


def test_the_batch_changes_nothing_beyond_rounding() -> None:
    model, sentences = tiny_model(tiny_tokenizer()), encoded_texts()
    whole = list(layer_states(model, sentences, cpu_engine(10_000)))
    single = list(layer_states(model, sentences, cpu_engine(1)))
    assert (len(whole), len(single)) == (1, len(TEXTS))
    for layer, states_WD in enumerate(whole[0].states):
        torch.testing.assert_close(states_WD, torch.cat([each.states[layer] for each in single]), rtol=0, atol=2e-6)
    words = [
        (batch.sentences[s].words[w]) for batch in single for s, w in zip(batch.sentence_W, batch.word_W, strict=True)
    ]
    assert words == [word for sentence in sentences for word in sentence.words]


def test_a_words_state_is_the_mean_of_its_tokens() -> None:
    model, sentences = tiny_model(tiny_tokenizer()), encoded_texts()
    assert any(end - start > 1 for sentence in sentences for start, end in sentence.spans_W2.tolist())
    numbers = [np.arange(sentence.ids_T.size) for sentence in sentences]
    pieces = [
        replace(sentence, spans_W2=np.stack([each, each + 1], axis=1), words=("x",) * each.size)
        for sentence, each in zip(sentences, numbers, strict=True)
    ]
    (tokens,) = layer_states(model, pieces, cpu_engine(10_000))
    offsets = np.cumsum([0, *(s.ids_T.size for s in sentences)])
    spans = np.concatenate([s.spans_W2 + offset for s, offset in zip(sentences, offsets, strict=False)]).tolist()
    (found,) = layer_states(model, sentences, cpu_engine(10_000))
    for states_WD, tokens_TD in zip(found.states, tokens.states, strict=True):
        expected = torch.stack([tokens_TD[start:end].mean(0) for start, end in spans])
        torch.testing.assert_close(states_WD, expected)


def test_a_survey_records_nothing_and_changes_nothing() -> None:
    model, sentences = tiny_model(tiny_tokenizer()), encoded_texts()
    before = model(packed(sentences))
    shapes = recordable_points(model, packed(sentences))
    assert torch.equal(model(packed(sentences)), before)
    tokens, longest = sum(each.ids_T.size for each in sentences), max(each.ids_T.size for each in sentences)
    assert shapes["blocks.1.attn.hook_pattern"] == (len(TEXTS), 2, longest, longest)
    assert shapes["blocks.0.hook_resid_post"] == (tokens, 20)
    assert shapes["blocks.0.mlp.hook_post"] == (tokens, 36)


def test_states_that_are_no_numbers_are_refused() -> None:
    model = tiny_model(tiny_tokenizer())
    with torch.no_grad():
        model.encoder.layers[1].attention.output.bias.fill_(float("nan"))
    with pytest.raises(DataError, match=r"blocks\.1\.hook_resid_post are not numbers"):
        list(layer_states(model, encoded_texts(), cpu_engine()))


def test_disk_space_of_states_is_reserved_before_they_are_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int, start: int, size: int) -> None:
        assert (start, size) == (0, 3 * 7 * 20 * 4)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    with pytest.raises(OSError, match="No space left on device"):
        StateStore(tmp_path, 3, [4, 3], 20)
