"""`runs diff` of `eval mlm` and `eval lm`: figures from sums over texts, and what is not comparable."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bertkit.errors import DataError, UsageError
from bertkit.evaluation.lm import evaluate_lm
from bertkit.evaluation.mlm import evaluate_mlm
from bertkit.evaluation.run import EvalArguments
from bertkit.evaluation.runs_diff import compare_runs
from bertkit.evaluation.settings import LmSettings, MlmSettings
from bertkit.evaluation.text_sums import read_sums
from bertkit.models.families.gpt2 import Gpt2Config
from bertkit.models.headed import HeadedModel
from bertkit.run.directory import RunDirectory
from bertkit.text.tokenizer import Tokenizer, TokenizerConfig
from bertkit.text.vocabulary import train_tokenizer
from tests.probing.tiny_models import GPT2, save_tiny, tiny_model, tiny_tokenizer
from tests.text.corpora import english

Bertkit = Callable[..., Any]


def byte_tokenizer() -> Tokenizer:
    settings = TokenizerConfig(type="byte-bpe", vocab_size=300, lowercase=False)
    return train_tokenizer(settings, english(49, seed=2))


def other(model: HeadedModel, tokenizer: Tokenizer) -> HeadedModel:
    """The model with other weights, which predicts the commonest token, so that some predictions are right."""
    generator = torch.Generator().manual_seed(8)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
            if parameter.shape == (tokenizer.vocab_size,):
                parameter[np.bincount(tokenizer.encode_plain([" ".join(english(49, seed=2))])[0]).argmax()] += 20
    return model


class Place:
    """Four models, and one text in two files that differ."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        sentences = english(49, seed=2)
        documents = ["\n".join(sentences[n * n : (n + 1) * (n + 1)]) for n in range(7)]
        (directory / "text.txt").write_text("\n\n".join(documents), encoding="utf-8")
        (directory / "other.txt").write_text("\n\n".join(documents[2:]), encoding="utf-8")
        own, by_bytes = tiny_tokenizer(), byte_tokenizer()
        causal = Gpt2Config(**GPT2)
        save_tiny(tiny_model(own), own, directory / "before")
        save_tiny(other(tiny_model(own), own), own, directory / "after")
        save_tiny(tiny_model(by_bytes), by_bytes, directory / "bytes")
        save_tiny(tiny_model(own, causal, ("causal_lm",)), own, directory / "causal")
        save_tiny(other(tiny_model(own, causal, ("causal_lm",)), own), own, directory / "causal after")

    def run(self, model: str, suite: str = "mlm", text: str = "text.txt", **settings: Any) -> RunDirectory:
        """An evaluation, made once."""
        arguments = EvalArguments(str(self.directory / model), device="cpu", runs_root=self.directory / "runs")
        source = [str(self.directory / text)]
        if suite == "lm":
            return evaluate_lm(arguments, source, LmSettings(**{"sequence_length": 20, **settings})).run
        windows = {"sequence_length": 31, "sequences": 12, "pseudo_sequences": 4} | settings
        return evaluate_mlm(arguments, source, MlmSettings(**windows)).run


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(tmp_path_factory.mktemp("language"))


BYTES = {"sequence_length": None, "window_bytes": 90}


def compared(a: RunDirectory, b: RunDirectory, **options: Any) -> dict[str, dict[str, Any]]:
    return {each["metric"]: each for each in compare_runs(a, b, resamples=200, **options)["comparisons"]}


def mean(run: RunDirectory, task: str, metric: str) -> float:
    assert run.results is not None
    found: float = run.results["tasks"][task][metric]["mean"]
    return found


@pytest.mark.parametrize(
    ("suite", "models", "settings", "metrics"),
    [
        ("mlm", ("before", "after"), {}, ["accuracy", "perplexity", "pseudo_perplexity"]),
        (
            "mlm",
            ("before", "after"),
            BYTES,
            ["accuracy", "perplexity", "pseudo_perplexity", "pseudo_bits_per_byte"],
        ),
        ("lm", ("causal", "causal after"), {}, ["bits_per_byte", "perplexity", "loss"]),
    ],
)
def test_differences_are_those_of_the_results_and_have_an_interval(
    place: Place, suite: str, models: tuple[str, str], settings: Any, metrics: list[str]
) -> None:
    a, b = (place.run(model, suite, **settings) for model in models)
    found, turned, same = compared(a, b), compared(b, a), compared(a, a)
    assert list(found) == metrics
    for name, each in found.items():
        expected = [mean(run, suite, name) for run in (a, b)]
        assert [each["score_a"], each["score_b"]] == pytest.approx(expected, rel=1e-6)
        assert each["difference"] == pytest.approx(expected[1] - expected[0], rel=1e-5)
        assert [each["scores"][name][side] for side in "ab"] == expected
        low, high = each["interval"]
        assert low <= each["difference"] <= high
        assert low < high
        assert turned[name]["difference"] == -each["difference"]
        assert sum(each["agreement"].values()) == each["examples"] > 1
        assert turned[name]["agreement"]["a_better"] == each["agreement"]["b_better"]
        better = each["agreement"]["b_better"] > each["agreement"]["a_better"]
        assert each["recipe"] == [{"key": "models", "a": [a_model(a)], "b": [a_model(b)]}]
        assert better == ((each["difference"] > 0) == (name == "accuracy"))
        assert (same[name]["difference"], same[name]["interval"], same[name]["p_value"]) == (0, [0, 0], 1)


def a_model(run: RunDirectory) -> str:
    assert run.results is not None
    found: str = run.results["model"]
    return found


def test_the_interval_is_that_of_resampled_windows(place: Place) -> None:
    a, b = place.run("before"), place.run("after")
    each = compare_runs(a, b, metric="perplexity", resamples=4000)["comparisons"][0]
    nats, masked = (
        np.array([[row[key] for row in read_sums(run, "mlm")] for run in (a, b)]) for key in ("nats", "masked")
    )
    generator = np.random.default_rng(1)
    draws = generator.integers(masked.shape[1], size=(4000, masked.shape[1]))
    perplexity = [np.exp(nats[k][draws].sum(1) / masked[k][draws].sum(1)) for k in range(2)]
    expected = np.percentile(perplexity[1] - perplexity[0], [2.5, 97.5])
    width = expected[1] - expected[0]
    assert each["interval"] == pytest.approx(expected, abs=0.1 * width)


def test_models_with_other_tokenizers_are_compared_by_bytes_alone(place: Place) -> None:
    a, b = place.run("before", **BYTES), place.run("bytes", **BYTES)
    (each,) = compared(a, b).values()
    assert (each["metric"], list(each["scores"])) == ("pseudo_bits_per_byte", ["pseudo_bits_per_byte"])
    with pytest.raises(UsageError, match=r"--metric perplexity: is per token, .* tokenizers differ; .*--window-bytes"):
        compare_runs(a, b, metric="perplexity")
    with pytest.raises(DataError, match=r"all figures are per token, .*; evaluate them with `--window-bytes 300`"):
        compare_runs(place.run("before"), place.run("bytes"))


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"text": "other.txt"}, "measured different texts; evaluate both models on the same --data"),
        ({"rate": 0.3}, r"masked different tokens: rate 0.15 and 0.3; evaluate both models with the same settings"),
        ({"seed": 1}, "masked different tokens: seed 0 and 1"),
        ({"sequence_length": 25}, r"accuracy: .* cut the text into different parts"),
        ({"sequences": 5}, r"cut the text into different parts \(12 and 5\)"),
    ],
)
def test_other_texts_or_masks_are_refused(place: Place, changed: Any, told: str) -> None:
    with pytest.raises(DataError, match=told):
        compare_runs(place.run("before"), place.run("after", **changed))


def test_what_no_run_has_is_refused(place: Place, tmp_path: Path) -> None:
    a, b = place.run("before"), place.run("after")
    with pytest.raises(UsageError, match="--metric f1: mlm has accuracy, perplexity, pseudo_perplexity"):
        compare_runs(a, b, metric="f1")
    with pytest.raises(UsageError, match="--split dev: `bertkit eval mlm` has no splits"):
        compare_runs(a, b, split="dev")
    with pytest.raises(DataError, match=r"nothing to compare of rte: .* has mlm"):
        compare_runs(a, b, task="rte")
    with pytest.raises(DataError, match=r"a run of `bertkit eval mlm`, .* of `bertkit eval lm`"):
        compare_runs(a, place.run("causal", "lm"))


def test_a_run_of_an_earlier_version_has_no_sums(place: Place, tmp_path: Path) -> None:
    run = place.run("before", sequences=3)
    (run.path / "predictions" / "mlm.jsonl").unlink()
    with pytest.raises(DataError, match=r"mlm.jsonl: is missing, .*: evaluate again with this one"):
        compare_runs(run, run)


def test_one_text_has_no_interval_and_an_infinite_sum_no_comparison(place: Place) -> None:
    run = place.run("causal", "lm", max_tokens=1)
    each = compared(run, run)["loss"]
    assert (each["examples"], each["interval"], each["p_value"]) == (1, None, None)
    file = run.path / "predictions" / "lm.jsonl"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"nats": None}) + "\n")
    assert math.isinf(read_sums(run, "lm")[0]["nats"])
    with pytest.raises(DataError, match="undefined on all examples"):
        compare_runs(run, run)


def test_people_see_one_table_and_a_line_per_figure(place: Place, bertkit: Bertkit) -> None:
    a, b = place.run("before"), place.run("after")
    outcome = bertkit("runs", "diff", a.path, b.path, "--resamples", "50")
    assert outcome.code == 0, outcome.stderr
    lines = outcome.stdout.splitlines()
    assert [line.split(": ")[0] for line in lines] == ["mlm accuracy", "mlm perplexity", "mlm pseudo_perplexity"]
    assert all("95% interval" in line for line in lines)
    assert outcome.stderr.count("constant_accuracy") == 1
    (models,) = [line for line in outcome.stderr.splitlines() if line.startswith("models ")]
    assert "'" not in models
    document = json.loads(bertkit("runs", "diff", a.path, b.path, "--resamples", "50", "--json").stdout)
    assert [each["metric"] for each in document["comparisons"]] == ["accuracy", "perplexity", "pseudo_perplexity"]
