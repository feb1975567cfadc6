"""Fine-tuning of causal models as in GPT: the auxiliary language-model loss, and the tokens around the texts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer as Backend
from torch.nn import functional

from bertkit.data.batch import PackedBatch
from bertkit.finetuning.causal import (
    DELIMITERS,
    CausalFinetuning,
    causal_loss,
    next_token_targets,
    predicted_tokens,
)
from bertkit.models.conversion.convert import with_more_tokens
from bertkit.models.families.elmo import Elmo, ElmoConfig
from bertkit.models.families.gpt2 import Gpt2Config
from bertkit.models.files.hub import load_model, save_model
from bertkit.models.headed import HeadedModel
from bertkit.models.operators.character_cnn import spelling
from bertkit.tasks.encoding import SequenceEncoder
from bertkit.text.tokenizer import Tokenizer
from bertkit.text.tokenizer_files import load_tokenizer, template
from tests.tasks.tiny_task import reviews, tiny_tokenizer, write_table

SMALL: dict[str, Any] = {
    "hidden_size": 18,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 20,
    "max_position_embeddings": 40,
    "initializer_range": 0.1,
}


def bare_tokenizer() -> Tokenizer:
    """A vocabulary without special tokens around sequences, as GPT's."""
    backend = Backend.from_str(tiny_tokenizer().backend.to_str())
    document = json.loads(backend.to_str())
    document["post_processor"] = None
    return Tokenizer(Backend.from_str(json.dumps(document)), {"unk": "[UNK]"})


def model_of(tokenizer: Tokenizer, heads: tuple[str, ...] = ("causal_lm",)) -> HeadedModel:
    made = HeadedModel(Gpt2Config(**SMALL).build(tokenizer.vocab_size), heads)
    made.initialise(3)
    return made.eval()


def test_the_loss_is_the_next_tokens_of_each_sequence_alone() -> None:
    model, rows = model_of(tiny_tokenizer()), [[7, 8, 9, 10], [11], [12, 13]]
    batch = PackedBatch.from_ids(rows)
    index_M, id_M = next_token_targets(batch)
    assert index_M.tolist() == [0, 1, 2, 5]
    assert id_M.tolist() == [8, 9, 10, 13]
    loss = causal_loss(model, model(batch), batch)
    assert loss.count == predicted_tokens(batch) == 4
    expected = torch.zeros(())
    for row in (rows[0], rows[2]):
        logits = model.token_logits("causal_lm", model(PackedBatch.from_ids([row])))
        expected = expected + functional.cross_entropy(logits[:-1], torch.tensor(row[1:]), reduction="sum")
    torch.testing.assert_close(loss.sum, expected)


def test_three_tokens_frame_texts_and_pairs_and_all_ids_stay() -> None:
    old = bare_tokenizer()
    new = CausalFinetuning().framed(old)
    start, delimiter, extract = (new.id(token) for token in DELIMITERS)
    assert [start, delimiter, extract] == list(range(old.vocab_size, old.vocab_size + 3))
    encoder = SequenceEncoder(new, max_tokens=20)
    assert encoder.sequence([7, 8], example="0")[0] == [start, 7, 8, extract]
    assert encoder.sequence([7, 8], [9], example="0")[0] == [start, 7, 8, delimiter, 9, extract]
    assert new.encode_batch(["a good film"]) == old.encode_batch(["a good film"])
    assert CausalFinetuning().framed(new) is new
    assert CausalFinetuning(delimiters=False).framed(old) is old
    assert CausalFinetuning().framed(tiny_tokenizer()) is not None
    assert DELIMITERS[0] not in CausalFinetuning().framed(tiny_tokenizer()).backend.get_vocab()


def test_a_text_that_only_has_a_start_is_ended_for_its_classifier() -> None:
    old = tiny_tokenizer()
    old.backend.post_processor = template(old, "open")
    new = CausalFinetuning().framed(old)
    encoder = SequenceEncoder(new, max_tokens=20)
    assert encoder.sequence([7, 8], [9], example="0")[0] == [old.cls_id, 7, 8, old.sep_id, 9, old.sep_id]
    assert old.backend.encode("a").ids[-1] != old.sep_id
    assert CausalFinetuning(delimiters=False).framed(old) is old


def test_a_longer_vocabulary_keeps_every_weight_to_the_bit() -> None:
    model = model_of(tiny_tokenizer())
    size = model.encoder.vocab_size
    longer = with_more_tokens(model, size + 3, seed=1)
    before, after = dict(model.named_parameters()), dict(longer.named_parameters())
    for name, parameter in before.items():
        assert torch.equal(after[name][: len(parameter)] if parameter.dim() else after[name], parameter)
    assert after["encoder.embeddings.word.weight"].shape[0] == size + 3
    assert 0 < float(after["encoder.embeddings.word.weight"][size:].detach().std()) < 0.5
    again = with_more_tokens(model, size + 3, seed=1)
    assert torch.equal(again.encoder.word_embedding.weight, longer.encoder.word_embedding.weight)


@pytest.fixture
def table(tmp_path: Path) -> list[str]:
    files = [str(write_table(tmp_path / f"{name}.csv", reviews(24, number))) for number, name in enumerate(("a", "b"))]
    return ["--train", files[0], "--dev", files[1], "--text", "review", "--label", "stars"]


def tuned(bertkit: Callable[..., Any], table: list[str], model: Path, run: Path, *words: str) -> Any:
    settings = ["--set", "causal.lm_weight=0.5", "--batch", "6", "--epochs", "1", "--lr", "1e-3", "--device", "cpu"]
    return bertkit("finetune", *table, "--model", model, "--run-dir", run, "-q", *settings, *words)


def test_a_run_learns_both_and_its_model_predicts_with_the_three_tokens(
    bertkit: Callable[..., Any], table: list[str], tmp_path: Path
) -> None:
    tokenizer = bare_tokenizer()
    save_model(model_of(tokenizer), tokenizer, tmp_path / "gpt")
    done = tuned(bertkit, table, tmp_path / "gpt", tmp_path / "run")
    assert done.code == 0, done.stderr
    logged = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    last = next(entry for entry in reversed(logged) if "loss/causal_lm" in entry)
    assert last["loss"] == pytest.approx(last["loss/task"] + 0.5 * last["loss/causal_lm"], rel=1e-5)
    saved, _ = load_model(tmp_path / "run" / "model")
    assert set(saved.head_names) == {"causal_lm", "sequence_classification"}
    assert saved.encoder.vocab_size == tokenizer.vocab_size + 3
    assert load_tokenizer(tmp_path / "run" / "model").id(DELIMITERS[1]) == tokenizer.vocab_size + 1
    predicted = bertkit("predict", "--model", tmp_path / "run", table[3], "--text", "review")
    assert predicted.code == 0, predicted.stderr
    assert len(predicted.stdout.splitlines()) == 24


def test_elmo_spells_the_three_tokens(bertkit: Callable[..., Any], table: list[str], tmp_path: Path) -> None:
    """Its words are composed of characters: the spelling of the longer vocabulary is in the model's file."""
    tokenizer = bare_tokenizer()
    config = ElmoConfig(character_size=4, filters=((1, 6),), max_characters=9, projection_size=6, lstm_width=11)
    model = HeadedModel(config.build(tokenizer.vocab_size), ("causal_lm",))
    model.initialise(3)
    model.encoder.read_vocabulary(tokenizer)
    save_model(model, tokenizer, tmp_path / "elmo")
    done = tuned(bertkit, table, tmp_path / "elmo", tmp_path / "run", "--max-steps", "1")
    assert done.code == 0, done.stderr
    saved, longer = load_model(tmp_path / "run" / "model")[0].encoder, load_tokenizer(tmp_path / "run" / "model")
    assert longer.vocab_size == tokenizer.vocab_size + 3
    assert isinstance(saved, Elmo)
    assert torch.equal(saved.spelling_VC, spelling(longer, 9))


def test_each_setting_of_a_grid_reads_its_own_tokens(
    bertkit: Callable[..., Any], table: list[str], tmp_path: Path
) -> None:
    tokenizer = bare_tokenizer()
    save_model(model_of(tokenizer), tokenizer, tmp_path / "gpt")
    done = tuned(bertkit, table, tmp_path / "gpt", tmp_path / "suite", "--grid", "causal.delimiters=true,false")
    assert done.code == 0, done.stderr
    sizes = {path.name: load_tokenizer(path / "model").vocab_size for path in (tmp_path / "suite" / "runs").iterdir()}
    framed, plain = tokenizer.vocab_size + len(DELIMITERS), tokenizer.vocab_size
    assert sizes == {"causal.delimiters=true-seed=0": framed, "causal.delimiters=false-seed=0": plain}


def test_without_weight_and_tokens_it_is_plain_fine_tuning_to_the_bit(
    bertkit: Callable[..., Any], table: list[str], tmp_path: Path
) -> None:
    tokenizer = tiny_tokenizer()
    save_model(model_of(tokenizer), tokenizer, tmp_path / "gpt")
    plain = ["--set", "causal=null"]
    none = ["--set", "causal.lm_weight=0.0", "--set", "causal.delimiters=false"]
    for name, words in (("plain", plain), ("none", none)):
        done = tuned(bertkit, table, tmp_path / "gpt", tmp_path / name, *words)
        assert done.code == 0, done.stderr
    weights = [(tmp_path / name / "model" / "model.safetensors").read_bytes() for name in ("plain", "none")]
    assert weights[0] == weights[1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--set", "method.name=frozen"], "causal: works with method.name full, not frozen"),
        (["--set", "causal.lm_weight=-1.0"], "causal.lm_weight"),
    ],
)
def test_what_it_does_not_go_with(
    bertkit: Callable[..., Any], table: list[str], tmp_path: Path, words: list[str], message: str
) -> None:
    tokenizer = tiny_tokenizer()
    save_model(model_of(tokenizer), tokenizer, tmp_path / "gpt")
    done = tuned(bertkit, table, tmp_path / "gpt", tmp_path / "run", *words)
    assert done.code == 2
    assert message in done.stderr


def test_a_model_that_is_not_causal_is_refused(bertkit: Callable[..., Any], table: list[str], tmp_path: Path) -> None:
    from tests.finetuning.test_shipped_finetune import write_five_layers

    done = tuned(bertkit, table, write_five_layers(tmp_path / "bert"), tmp_path / "run")
    assert done.code == 2
    assert "has no head that predicts the next token" in done.stderr
