"""`bertkit generate`: its document, its stream, and its messages about bad input."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.probing.tiny_models import save_tiny, tiny_causal_model, tiny_model, tiny_tokenizer

import bertkit
from bertkit.cli.app import run
from bertkit.cli.generate import _Stream
from bertkit.errors import DataError, UsageError


@pytest.fixture(scope="module")
def causal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizer = tiny_tokenizer("byte-bpe", 300)
    return save_tiny(tiny_causal_model(tokenizer), tokenizer, tmp_path_factory.mktemp("causal"))


@pytest.fixture(scope="module")
def masked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizer = tiny_tokenizer()
    return save_tiny(tiny_model(tokenizer), tokenizer, tmp_path_factory.mktemp("masked"))


def generated(capsys: pytest.CaptureFixture[str], *arguments: object) -> Any:
    assert run(["generate", "--json", *map(str, arguments)]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_document_is_the_contracts_and_the_same_again(causal: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--model", causal, "--samples", 2, "--max-new-tokens", 7, "--top-k", 20, "--seed", 3]
    document = generated(capsys, "The reader", "A value", *options)
    assert [each["prompt"] for each in document] == ["The reader", "A value"]
    for each in document:
        assert len(each["outputs"]) == 2
        for output in each["outputs"]:
            assert isinstance(output["text"], str)
            assert 0 < len(output["ids"]) <= 7
            assert output["score"] < 0
            assert output["finish"] in ("length", "end")
    assert generated(capsys, "The reader", "A value", *options) == document
    for alone, together in zip(
        generated(capsys, "The reader", *options)[0]["outputs"], document[0]["outputs"], strict=True
    ):
        assert alone == {**together, "score": pytest.approx(together["score"], rel=1e-5)}
    other = generated(capsys, "The reader", "A value", *options[:-1], 4)
    assert [each["outputs"] for each in other] != [each["outputs"] for each in document]


def test_bf16_is_near_fp32(causal: Path, masked: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["The reader", "--model", causal, "--max-new-tokens", 6, "--method", "greedy"]
    (exact,) = generated(capsys, *options)
    assert generated(capsys, *options, "--precision", "fp32") == [exact]
    (near,) = generated(capsys, *options, "--precision", "bf16")
    assert near["outputs"][0]["score"] == pytest.approx(exact["outputs"][0]["score"], rel=0.03)
    assert near["outputs"][0]["score"] != exact["outputs"][0]["score"]
    (filled,) = generated(
        capsys, "The [MASK] reader", "--model", masked, "--method", "left-to-right", "--precision", "bf16"
    )
    assert filled["outputs"][0]["text"]


def test_beams_and_greedy(causal: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["The reader", "--model", causal, "--max-new-tokens", 6]
    (greedy,) = generated(capsys, *options, "--method", "greedy")
    (narrow,) = generated(capsys, *options, "--beam", 1)
    (wide,) = generated(capsys, *options, "--beam", 4, "--samples", 3, "--length-penalty", 0)
    assert narrow["outputs"][0]["ids"] == greedy["outputs"][0]["ids"]
    scores = [output["score"] for output in wide["outputs"]]
    assert scores == sorted(scores, reverse=True)
    assert len(scores) == 3
    (as_wide,) = generated(capsys, *options, "--method", "beam", "--samples", 3)
    assert len(as_wide["outputs"]) == 3


def test_plain_output_is_the_prompt_and_what_follows(
    causal: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("The reader\nA value\n", encoding="utf-8")
    options = ["--model", causal, "--max-new-tokens", 4, "--method", "greedy"]
    document = generated(capsys, "--file", prompts, *options)
    assert [each["prompt"] for each in document] == ["The reader", "A value"]
    assert run(["generate", "--file", str(prompts), *map(str, options)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("The reader")
    assert "\n\nA value" in out
    assert len(generated(capsys, *options)[0]["outputs"]) == 1  # the empty prompt


@pytest.mark.parametrize(
    "method", ["gibbs", "metropolis-hastings", "left-to-right", "parallel", "mask-predict", "diffusion"]
)
def test_a_masked_model_fills_masks_or_adds_them(masked: Path, method: str, capsys: pytest.CaptureFixture[str]) -> None:
    iterations = [] if method == "left-to-right" else ["--iterations", 3]
    options = ["--model", masked, "--method", method, *iterations, "--max-new-tokens", 5]
    filled, added = generated(capsys, "The [MASK] of a [MASK].", "A value", *options)
    assert len(filled["outputs"][0]["ids"]) == 2
    assert filled["outputs"][0]["finish"] == "filled"
    assert filled["outputs"][0]["text"].startswith("the")
    assert len(added["outputs"][0]["ids"]) == 5
    assert not added["outputs"][0]["text"].startswith("a value")
    assert run(["generate", "The [MASK] of a [MASK].", *map(str, options)]) == 0
    assert capsys.readouterr().out.strip() == filled["outputs"][0]["text"]


def test_from_python(causal: Path, masked: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = bertkit.load(str(causal))
    pieces: list[str] = []
    (output,) = model.generate("The reader", max_new_tokens=6, top_p=0.9, seed=2, on_text=pieces.append)
    (document,) = generated(capsys, "The reader", "--model", causal, "--max-new-tokens", 6, "--top-p", 0.9, "--seed", 2)
    assert document["outputs"] == [output]
    assert len(pieces) == len(output["ids"]) + (output["finish"] == "end")
    assert pieces[-1] == output["text"]
    with pytest.raises(UsageError, match="max_new_tokens"):
        model.generate("The reader", max_new_tokens=0)
    with pytest.raises(UsageError, match="did you mean"):
        model.generate("The reader", temprature=1.0)
    with pytest.raises(DataError, match="was not trained to predict the next token"):
        bertkit.load(str(masked)).generate("The reader", method="greedy")


def test_a_stop_text_ends_an_output_before_it(causal: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["The reader", "--model", causal, "--max-new-tokens", 12, "--method", "greedy"]
    (whole,) = generated(capsys, *options)
    text = whole["outputs"][0]["text"]
    stop = text[3:5]
    (stopped,) = generated(capsys, *options, "--stop", stop, "--stop", "zzzz")
    assert stopped["outputs"][0]["text"] == text[: text.index(stop)]
    assert stopped["outputs"][0]["finish"] == "stop"


def test_what_is_streamed_is_the_output(capsys: pytest.CaptureFixture[str]) -> None:
    stream = _Stream("The")
    for text in (" cat", " cat \ufffd", " cat é", " cat é\x1b["):
        stream(0, 0, text)
    stream.finish(" cat é\x1b[.")
    assert capsys.readouterr().out == "The cat é\\x1b[.\n"


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--beam", "0"], 2, "expected a number greater than or equal to 1, got '0'"),
        (["--max-new-tokens", "0"], 2, "expected a number greater than or equal to 1"),
        (["--samples", "3", "--method", "greedy"], 2, "--samples has no effect with --method greedy"),
        (["--beam", "4", "--top-k", "3"], 2, "--top-k has no effect with --method beam; it works with sample, gibbs"),
        (["--beam", "2", "--samples", "3"], 2, "a beam of 2 has no more outputs"),
        (["--iterations", "3"], 2, "--iterations has no effect with --method sample"),
        (["--top-p", "1.5"], 2, "top-p"),
        (["--temperature", "0"], 2, "temperature: 0 is too low to draw tokens; --method greedy takes"),
        (["--temperature", "1e-38"], 2, "temperature"),
        (["--stop", ""], 2, "an empty text is in every output"),
        (["--method", "gibbs"], 3, "no head that fills in masks"),
        (["--method", "gibs"], 2, "gibs"),
        (["--file", "absent.txt"], 2, "given twice"),
        (["word " * 70], 3, "the model reads at most 60, a new one included; shorten it"),
    ],
)
def test_bad_input_of_a_causal_model(
    causal: Path, arguments: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["generate", "The reader", "--model", str(causal), *arguments]) == code
    error = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert message in error
    assert "Traceback" not in error


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--method", "greedy"], 3, "was not trained to predict the next token"),
        (["--beam", "2"], 2, "--beam has no effect with --method gibbs"),
        (["--max-new-tokens", "58"], 3, "and the model reads at most 60"),
        (["--burn-in", "3"], 2, "has no effect without --top-k or --top-p"),
        (["--stop", "end"], 2, "--stop has no effect with --method gibbs; it works with greedy, sample, beam"),
        (["--block-length", "3"], 2, "--block-length has no effect"),
    ],
)
def test_bad_input_of_a_masked_model(
    masked: Path, arguments: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["generate", "The reader", "--model", str(masked), *arguments]) == code
    assert message in capsys.readouterr().err


def test_a_stop_text_that_the_vocabulary_cannot_form_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = tiny_tokenizer()
    directory = save_tiny(tiny_causal_model(tokenizer), tokenizer, tmp_path)
    for stop in ("日本", "END", "\n"):
        assert run(["generate", "a", "--model", str(directory), "--max-new-tokens", "3", "--stop", stop]) == 2
        assert "vocabulary cannot form this text" in capsys.readouterr().err
    for stop in ("the", " the", ".", "reader of"):
        assert run(["generate", "a", "--model", str(directory), "--max-new-tokens", "3", "--stop", stop]) == 0


def test_an_empty_file_of_prompts_and_a_room_that_is_short(
    causal: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty.txt").touch()
    assert run(["generate", "--file", str(tmp_path / "empty.txt"), "--model", str(causal)]) == 3
    capsys.readouterr()
    assert run(["generate", "The reader", "--model", str(causal), "--max-new-tokens", "70"]) == 0
    assert "1 of 1 prompts have room for fewer than 70 new tokens" in capsys.readouterr().err
