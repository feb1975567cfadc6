"""Runs on parallel text: training, bit-identical resuming, translation of held-out pairs, evaluation and use."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from bertkit.errors import DataError, StoppedError, UsageError
from bertkit.generation.from_source import SourceTokens, write_targets
from bertkit.generation.run import generate
from bertkit.generation.settings import GenerationSettings
from bertkit.inference.export.export import export_model
from bertkit.models.families.bert import BertConfig
from bertkit.models.families.bert_gpt2 import BertGpt2Config
from bertkit.models.families.gpt2 import Gpt2Config
from bertkit.models.files.hub import load_model
from bertkit.pretraining.arguments import PretrainArguments
from bertkit.pretraining.recipe import load_recipe
from bertkit.pretraining.run import run_pretraining
from bertkit.progress import silent_progress
from bertkit.recipe.resolve import Override
from bertkit.text.tokenizer_files import load_tokenizer
from tests.training.stopping import stopping_at
from tests.training.tiny_run import write_model, write_pairs, write_text

SMALL = {
    "tokenizer.vocab_size": 150,
    "data.sequence_length": 64,
    "model.hidden_size": 32,
    "model.num_hidden_layers": 1,
    "model.num_attention_heads": 4,
    "model.intermediate_size": 48,
    "model.max_position_embeddings": 64,
    "optimisation.schedule": {"name": "inverse-sqrt", "peak": 1e-2, "warmup_share": 0.13},
    "optimisation.batch_sequences": 16,
    "optimisation.steps": 150,
    "engine.device": "cpu",
    "engine.precision": "fp32",
    "engine.log_every_steps": 50,
    "engine.save_every_steps": 40,
    "engine.evaluate_every_steps": 75,
    "engine.translated_pairs": 20,
}


def arguments(tmp_path: Path, pairs: Path, name: str = "run", **changes: Any) -> PretrainArguments:
    settings = {**SMALL, **changes}
    return PretrainArguments(
        recipe="transformer-small",
        overrides=[Override(key, value) for key, value in settings.items()],
        sources=[str(pairs)],
        run_dir=tmp_path / name,
        cache=tmp_path / "cache",
    )


@pytest.fixture(scope="module")
def learnt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("learnt")
    pairs = write_pairs(directory / "pairs.tsv", 400)
    return run_pretraining(arguments(directory, pairs), progress=silent_progress).run.path


def test_a_run_learns_to_translate_what_it_held_out(learnt: Path) -> None:
    results = json.loads((learnt / "results.json").read_text())
    held_out = results["held_out"]
    assert held_out["bleu"] > 0.9
    assert held_out["exact"] > 0.7
    assert held_out["perplexity/seq2seq_lm"] < 1.5
    assert set(results["translations"][0]) == {"source", "translation", "reference"}
    config = json.loads((learnt / "model" / "config.json").read_text())
    tokenizer = load_tokenizer(learnt / "model")
    assert (config["decoder_start_token_id"], config["eos_token_id"]) == (tokenizer.cls_id, tokenizer.sep_id)


def test_transformers_translates_the_same(learnt: Path) -> None:
    transformers = pytest.importorskip("transformers")
    oracle = transformers.MarianMTModel.from_pretrained(learnt / "model", local_files_only=True).eval()
    model, _ = load_model(learnt / "model")
    tokens = SourceTokens.of(model, load_tokenizer(learnt / "model"))
    sources = tokens.sources(["the cat reads a list", "the number often holds a tensor"])
    for beams in (1, 3):
        settings = GenerationSettings(
            method="beam", beam=beams, max_new_tokens=12, penalty="length", length_penalty=1.0
        ).resolved(is_causal=False, reads_source=True)
        ours = write_targets(model, tokens, sources, settings, batch_tokens=1000)
        for source, own in zip(sources, ours, strict=True):
            theirs = oracle.generate(
                torch.tensor([source]), num_beams=beams, max_new_tokens=12, do_sample=False, length_penalty=1.0
            )[0]
            words = [token for token in theirs.tolist() if token not in tokens.tokenizer.special_ids]
            assert own[0].ids == words


def test_a_beam_of_one_is_greedy_and_other_sources_change_nothing(learnt: Path) -> None:
    model, _ = load_model(learnt / "model")
    tokens = SourceTokens.of(model, load_tokenizer(learnt / "model"))
    sources = tokens.sources(["the cat reads a list", "a", "the paper often writes a token", "the the the the"])

    def ids(some: list[list[int]], **settings: Any) -> list[list[int]]:
        how = GenerationSettings(**settings).resolved(is_causal=False, reads_source=True)
        return [own[0].ids for own in write_targets(model, tokens, some, how, batch_tokens=2000)]

    greedy = ids(sources, method="greedy")
    assert greedy == ids(sources, beam=1)
    wide, drawn = ids(sources, beam=4), ids(sources, method="sample", seed=3)
    for number, source in enumerate(sources):
        assert ids([source], method="greedy") == [greedy[number]]
        assert ids([source], beam=4) == [wide[number]]
    assert drawn == ids(sources, method="sample", seed=3)
    assert drawn != ids(sources, method="sample", seed=4)


def test_prompts_without_room_or_text_are_told(learnt: Path) -> None:
    model, _ = load_model(learnt / "model")
    tokenizer = load_tokenizer(learnt / "model")

    def generated(text: str, **settings: Any) -> Any:
        return generate(model, tokenizer, [text], GenerationSettings(**settings))

    with pytest.raises(DataError, match="prompt 0 is empty"):
        generated("")
    with pytest.raises(DataError, match=r"has 82 tokens, and the model reads at most 64"):
        generated("the " * 80)
    with pytest.raises(UsageError, match="--method gibbs fills masks"):
        generated("the cat", method="gibbs")
    with pytest.raises(UsageError, match="an empty text is in every output"):
        generated("the cat", stop=[""])
    headless, _ = load_model(learnt / "model", heads=())
    with pytest.raises(DataError, match="no head that predicts a target's tokens"):
        SourceTokens.of(headless, tokenizer)


def test_a_stopped_run_ends_with_the_same_bytes(tmp_path: Path) -> None:
    pairs = write_pairs(tmp_path / "pairs.tsv", 60)
    few = {"optimisation.steps": 12, "engine.save_every_steps": 3, "engine.translated_pairs": 4}
    straight = run_pretraining(arguments(tmp_path, pairs, "straight", **few), progress=silent_progress).run.path
    wanted = arguments(tmp_path, pairs, "stopped", **few)
    with stopping_at(7), pytest.raises(StoppedError):
        run_pretraining(wanted, progress=silent_progress)
    resumed = PretrainArguments(resume=str(tmp_path / "stopped"), cache=tmp_path / "cache")
    again = run_pretraining(resumed, progress=silent_progress).run.path
    plain = {**few, "model.hidden_dropout_prob": 0.0}
    whole, cut = (
        run_pretraining(
            arguments(tmp_path, pairs, f"cut-{tokens}", **plain, **{"engine.micro_batch_tokens": tokens}),
            progress=silent_progress,
        ).run.path
        for tokens in (4096, 90)
    )
    weights = [(run / "model" / "model.safetensors").read_bytes() for run in (straight, again)]
    assert weights[0] == weights[1]
    losses = [json.loads((run / "results.json").read_text())["held_out"]["loss"] for run in (whole, cut)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-4)


def test_the_commands_of_a_translator(
    learnt: Path, bertkit: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pairs = write_pairs(tmp_path / "test.tsv", 12, seed=9)
    tokens: list[int] = []

    def written(*given: Any, batch_tokens: int, **more: Any) -> Any:
        tokens.append(batch_tokens)
        return write_targets(*given, batch_tokens=batch_tokens, **more)

    monkeypatch.setattr("bertkit.evaluation.translation.write_targets", written)
    place = ("--data", pairs, "--run-dir", tmp_path / "e")
    scored = bertkit("eval", "translation", "--model", learnt, *place, "--batch-tokens", "50", "--json")
    assert scored.code == 0, scored.stderr
    assert tokens == [50]
    document = json.loads(scored.stdout)
    assert document["average"] == document["tasks"]["translation"]["bleu"]["mean"] > 0.8
    lines = (tmp_path / "e" / "predictions" / "translation.jsonl").read_text().splitlines()
    assert len(lines) == 12
    assert set(json.loads(lines[0])) == {"source", "prediction", "reference"}
    done = bertkit("generate", "--model", learnt, "the cat reads a list", "--samples", "2", "--json")
    outputs = json.loads(done.stdout)[0]["outputs"]
    assert len(outputs) == 2
    assert outputs[0]["text"] == "cata listo readas"
    assert outputs[0]["finish"] == "end"
    assert bertkit("generate", "--model", learnt, "the cat", "--beam", "0").code == 2
    shown = bertkit("show-batch", learnt, "--step", "1")
    assert shown.code == 0, shown.stderr


def test_a_translator_starts_from_a_bert(tmp_path: Path) -> None:
    pairs = write_pairs(tmp_path / "pairs.tsv", 60)
    sizes = {"hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 3, "intermediate_size": 40}
    bert = write_model(BertConfig(**sizes, max_position_embeddings=70), pairs, tmp_path / "bert", vocab_size=200)
    kept = ("data.", "optimisation.", "engine.")
    changes = {key: value for key, value in SMALL.items() if key.startswith(kept)}
    changes |= {"model.family": "bart", "model.max_position_embeddings": 64, "optimisation.steps": 4}
    request = PretrainArguments(
        recipe="transformer-small",
        overrides=[Override(key, value) for key, value in changes.items()],
        sources=[str(pairs)],
        init=str(bert),
        run_dir=tmp_path / "run",
        cache=tmp_path / "cache",
    )
    run = run_pretraining(request, progress=silent_progress).run.path
    model, _ = load_model(run / "model")
    assert model.architectures == ["BartForConditionalGeneration"]
    assert model.encoder.width == 24
    assert load_tokenizer(run / "model").fingerprint == load_tokenizer(bert).fingerprint


def test_a_translator_starts_from_a_bert_and_a_gpt2(tmp_path: Path) -> None:
    pairs = write_pairs(tmp_path / "pairs.tsv", 60)
    sizes = {"hidden_size": 24, "num_attention_heads": 3, "intermediate_size": 40}
    bert_config = BertConfig(**sizes, num_hidden_layers=1, max_position_embeddings=70)
    bert = write_model(bert_config, pairs, tmp_path / "bert", vocab_size=200)
    gpt2 = write_model(
        Gpt2Config(**sizes, num_hidden_layers=2, max_position_embeddings=66),
        pairs,
        tmp_path / "gpt2",
        vocab_size=200,
        heads=["causal_lm"],
    )
    kept = ("data.", "optimisation.", "engine.")
    changes = {key: value for key, value in SMALL.items() if key.startswith(kept)}
    changes |= {"model.max_position_embeddings": 64, "optimisation.steps": 4}

    def request(run: str, **more: Any) -> PretrainArguments:
        own = {key: value for key, value in {**changes, "init_decoder": str(gpt2), **more}.items() if value is not None}
        return PretrainArguments(
            recipe="bert2gpt",
            overrides=[Override(key, value) for key, value in own.items()],
            sources=[str(pairs)],
            init=str(bert),
            run_dir=tmp_path / run,
            cache=tmp_path / "cache",
        )

    run = run_pretraining(request("run"), progress=silent_progress).run.path
    model, _ = load_model(run / "model")
    assert isinstance(model.encoder.config, BertGpt2Config)
    assert (model.encoder.config.num_hidden_layers, model.encoder.config.decoder_layer_count) == (1, 2)
    record = json.loads((run / "run.json").read_text())
    assert set(record["fingerprints"]) >= {"model", "decoder"}, record
    alone = run_pretraining(request("alone", init_decoder=None), progress=silent_progress).run.path
    assert load_model(alone / "model")[0].encoder.config.decoder_layer_count == 1
    other = write_model(
        Gpt2Config(**sizes, num_hidden_layers=2, max_position_embeddings=66),
        pairs,
        tmp_path / "other",
        vocab_size=60,
        heads=["causal_lm"],
    )
    with pytest.raises(UsageError, match=r"has another vocabulary than .*--set tokenizer\.path="):
        run_pretraining(request("other-run", init_decoder=str(other)), progress=silent_progress)
    with pytest.raises(UsageError, match="name a model of family gpt2"):
        run_pretraining(request("bert-run", init_decoder=str(bert)), progress=silent_progress)
    with pytest.raises(UsageError, match="init_decoder needs an encoder-decoder that starts from a BERT"):
        load_recipe("transformer-small", [Override("init_decoder", str(gpt2))])


def test_a_t5_learns_from_pairs_and_transformers_generates_the_same(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    pairs = write_pairs(tmp_path / "pairs.tsv", 300)
    kept = ("data.", "optimisation.", "engine.", "tokenizer.")
    changes: dict[str, Any] = {key: value for key, value in SMALL.items() if key.startswith(kept)}
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 3, "intermediate_size": 48}
    changes |= {"model": {"family": "t5", **sizes, "head_width": 9, "hidden_dropout_prob": 0.0}}
    request = PretrainArguments(
        recipe="transformer-small",
        overrides=[Override(key, value) for key, value in changes.items()],
        sources=[str(pairs)],
        run_dir=tmp_path / "run",
        cache=tmp_path / "cache",
    )
    run = run_pretraining(request, progress=silent_progress).run.path
    results = json.loads((run / "results.json").read_text())
    assert results["held_out"]["perplexity/seq2seq_lm"] < 4
    oracle = transformers.T5ForConditionalGeneration.from_pretrained(run / "model", local_files_only=True).eval()
    model, _ = load_model(run / "model")
    tokens = SourceTokens.of(model, load_tokenizer(run / "model"))
    sources = tokens.sources(["the cat reads a list", "the number often holds a tensor"])
    settings = GenerationSettings(method="greedy", max_new_tokens=12).resolved(is_causal=False, reads_source=True)
    for source, own in zip(sources, write_targets(model, tokens, sources, settings, batch_tokens=1000), strict=True):
        theirs = oracle.generate(torch.tensor([source]), max_new_tokens=12, do_sample=False)[0].tolist()
        assert own[0].ids == [token for token in theirs if token not in tokens.tokenizer.special_ids]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"data.layout": {"name": "full-sentences"}},
            r"objective\.seq2seq_lm needs pairs of .*layout full-sentences has none",
        ),
        ({"data.reading.target_field": None}, r"data\.layout parallel needs parallel text"),
        ({"model": {"family": "bert"}}, r"needs an encoder-decoder"),
        ({"objective": ["masked_lm"]}, r"no head for masked_lm"),
    ],
)
def test_recipes_that_do_not_fit_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    pairs = write_pairs(tmp_path / "pairs.tsv", 60)
    request = arguments(tmp_path, pairs)
    request = PretrainArguments(
        recipe=request.recipe,
        overrides=[Override(key, value) for key, value in changes.items()],
        sources=request.sources,
        run_dir=request.run_dir,
        cache=request.cache,
    )
    with pytest.raises(UsageError, match=message):
        run_pretraining(request, progress=silent_progress)


def test_text_that_is_no_pairs_ends_with_code_3(bertkit: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_text("one\teins\ntwo\n")
    (tmp_path / "a.en").write_text("one\ntwo\n")
    (tmp_path / "a.de").write_text("eins\n")
    write_text(tmp_path / "text.txt")
    for sources, code in ((["a.tsv"], 3), (["a.en", "a.de"], 3), (["text.txt"], 2)):
        words = [word for source in sources for word in ("--data", tmp_path / source)]
        done = bertkit("pretrain", "transformer-small", *words, "--run-dir", tmp_path / "run", "-q")
        assert done.code == code, done.stderr
        assert "Traceback" not in done.stderr


def test_a_forced_first_token_is_the_first_as_in_the_original(learnt: Path, tmp_path: Path) -> None:
    """Released BARTs force <s>; transformers 5 specifies it only in generation_config.json."""
    transformers = pytest.importorskip("transformers")
    oracle = transformers.MarianMTModel.from_pretrained(learnt / "model", local_files_only=True).eval()
    tokenizer = load_tokenizer(learnt / "model")
    forced = tokenizer.encode_batch(["the number"])[0][-1]
    shutil.copytree(learnt / "model", tmp_path / "forced")
    oracle.generation_config.forced_bos_token_id = forced
    oracle.generation_config.save_pretrained(tmp_path / "forced")
    model, _ = load_model(tmp_path / "forced")
    tokens = SourceTokens.of(model, tokenizer)
    sources = tokens.sources(["the cat reads a list"])
    settings = GenerationSettings(method="greedy", max_new_tokens=8).resolved(is_causal=False, reads_source=True)
    ((ours,),) = write_targets(model, tokens, sources, settings, batch_tokens=1000)
    theirs = oracle.generate(torch.tensor(sources), num_beams=1, max_new_tokens=9, do_sample=False)[0].tolist()
    assert theirs[1] == forced
    assert ours.ids == [token for token in theirs[2:] if token not in tokenizer.special_ids]
    export_model(str(tmp_path / "forced"), tmp_path / "out")
    again = transformers.MarianMTModel.from_pretrained(tmp_path / "out", local_files_only=True).eval()
    assert again.generate(torch.tensor(sources), num_beams=1, max_new_tokens=9, do_sample=False)[0].tolist() == theirs
