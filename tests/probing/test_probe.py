"""Probes as runs: outputs, supported models and texts, and refusals before there is a run."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bertkit.errors import DataError, UsageError
from bertkit.evaluation.run import measurement_identity
from bertkit.models.families.gpt2 import Gpt2Config
from bertkit.models.families.modernbert import ModernBertConfig
from bertkit.probing import ProbeSettings
from bertkit.probing.contextuality.run import ContextualitySettings, probe_contextuality
from bertkit.probing.points import list_points
from bertkit.probing.report import Finding, Report, Table
from bertkit.probing.run import ProbeArguments, ProbeResult, run_probe
from bertkit.probing.sentence_sources import read_texts
from bertkit.probing.similarity.run import SimilaritySettings, probe_similarity
from bertkit.run.directory import RunDirectory
from bertkit.run.verify import verify_run
from tests.probing.request import request_for, write_sentences, write_treebank
from tests.probing.tiny_models import BERT, GPT2, cpu_engine, save_tiny, tiny_model, tiny_tokenizer, write_run
from tests.text.corpora import english

pytestmark = pytest.mark.usefixtures("drawn_figures")


def table(probed: ProbeResult, name: str) -> list[dict[str, str]]:
    assert probed.run is not None
    with (probed.run.path / "tables" / f"{name}.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture
def draws() -> None:
    """For tests that check drawn figures, which take longer than everything else."""


@pytest.fixture(autouse=True)
def _undrawn(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "draws" not in request.fixturenames:
        monkeypatch.setattr("bertkit.run.figure_files.save", lambda figure, stem: [])


# ---- what every kind shares


class NoSettings(ProbeSettings):
    """None except the seed."""

    kind = "none"


def probe(request: ProbeArguments, report: Report, data: dict[str, str] | None = None) -> ProbeResult:
    return run_probe(request, NoSettings(), request.subjects(), lambda: report, data=data or {"t": "0"})


@pytest.mark.usefixtures("draws")
def test_findings_become_tables_figures_and_sentences(tmp_path: Path) -> None:
    from bertkit.evaluation.plots import new_figure

    drawn: list[Any] = []

    def draw(table: Table) -> Any:
        drawn.append(table)
        return new_figure("x")[0]

    numbers = {"layer": [0, 1, 2], "x": [0.25, None, float("nan")]}
    report = Report(
        {"value": np.float32(0.5), "values": np.arange(3), "none": float("nan")},
        {"value": "half"},
        [
            Finding("drawn", "It is half.", numbers, draw),
            Finding("told", "It is told."),
        ],
        {"more/page.html": lambda path: path.write_text("<p>") and None},
    )
    probed = probe(request_for(tmp_path), report)
    run = probed.run
    assert run is not None
    assert run.path.name.startswith("probe-none-")
    found = {str(path.relative_to(run.path)) for path in run.path.rglob("*") if path.is_file()}
    wanted = {"tables/drawn.csv", "figures/drawn.svg", "figures/drawn.png", "summary.txt", "more/page.html"}
    assert wanted <= found
    assert not any("told" in name for name in found)
    assert [list(row.values()) for row in table(probed, "drawn")] == [["0", "0.25"], ["1", ""], ["2", ""]]
    assert drawn == [numbers]
    assert (run.path / "summary.txt").read_text() == "It is half.\nIt is told.\n"
    assert run.results is not None
    assert run.results["summary"] == {"value": 0.5, "values": [0, 1, 2], "none": None}
    assert (run.record["kind"], run.status) == ("probe", "done")
    assert not verify_run(run.path).errors
    assert list(probed.document) == ["kind", "model", "run", "summary", "definitions"]
    assert probed.document["run"] == str(run.path)


def test_a_run_is_named_by_what_decides_its_result(tmp_path: Path) -> None:
    empty = Report({}, {}, [])
    names = [
        probe(request_for(tmp_path, batch_tokens=size), empty, {"t": content}).run.path.name.split("-")[2]  # type: ignore[union-attr]  # there is a run
        for size, content in ((300, "0"), (77, "0"), (300, "1"))
    ]
    assert names[0] == names[1] != names[2]


def test_every_models_tokenizer_is_recorded(tmp_path: Path) -> None:
    found = set()
    for place, size in enumerate((110, 100, 100)):
        names = [tmp_path / "one", tmp_path / f"two{place}"]
        for name, tokenizer in zip(names, (tiny_tokenizer(), tiny_tokenizer(vocab_size=size)), strict=True):
            save_tiny(tiny_model(tiny_tokenizer()), tokenizer, name)
        request = request_for(tmp_path, models=[str(name) for name in names])
        subjects = request.subjects()
        identity = measurement_identity("probe", "none", subjects, NoSettings(), request, data={})
        found.add(identity.fingerprints["tokenizer"])
    assert len(found) == 2


def test_a_failed_analysis_is_a_failed_run(tmp_path: Path) -> None:
    request = request_for(tmp_path, run_dir=tmp_path / "here")

    def fail() -> Report:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run_probe(request, NoSettings(), request.subjects(), fail, data={})
    assert RunDirectory.open(tmp_path / "here").status == "failed"


def test_an_analysis_of_faulty_data_leaves_no_run(tmp_path: Path) -> None:
    request = request_for(tmp_path, run_dir=tmp_path / "here")

    def refuse() -> Report:
        raise DataError("no")

    with pytest.raises(DataError):
        run_probe(request, NoSettings(), request.subjects(), refuse, data={})
    assert not (tmp_path / "here").exists()


# ---- texts


def test_sentences_are_a_fair_draw_in_their_order(tmp_path: Path) -> None:
    lines = [f"{line} {number}." for number, line in enumerate(english(83, seed=3))]
    path = write_sentences(tmp_path / "text.txt", lines)
    whole = read_texts([str(path)])
    assert [each.text for each in whole.sentences] == [text for line in lines for text in split(line)]
    counts = np.zeros(whole.available)
    place = {each.name: number for number, each in enumerate(whole.sentences)}
    for seed in range(60):
        drawn = read_texts([str(path)], most=21, seed=seed).sentences
        numbers = [place[each.name] for each in drawn]
        assert (len(drawn), numbers) == (21, sorted(numbers))
        counts[numbers] += 1
    assert counts.sum() == 60 * 21
    share = 21 / whole.available
    assert np.abs(counts / 60 - share).max() < 4.5 * np.sqrt(share * (1 - share) / 60)


def split(line: str) -> list[str]:
    from bertkit.text.sentences import split_sentences

    return split_sentences(line)


def test_a_treebank_has_words_and_repeats_are_left_out_where_asked(tmp_path: Path) -> None:
    bank = write_treebank(tmp_path / "bank.conllu", [["A", "value"], ["The", "file", "."], ["A", "value"]])
    texts = read_texts([str(bank)], unique=True)
    assert [(each.name, each.words) for each in texts.sentences] == [
        ("s1", ("A", "value")),
        ("s2", ("The", "file", ".")),
    ]
    assert (texts.available, texts.repeats, list(texts.hashes)) == (3, 1, [str(bank)])
    assert len(read_texts([str(bank)]).sentences) == 3
    assert len(read_texts([str(bank), str(bank)]).sentences) == 3, "a file named twice is read once, as other text is"


def test_no_text_is_said(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("\n\n")
    with pytest.raises(UsageError, match="give --data SOURCE"):
        read_texts([])
    with pytest.raises(DataError, match="contains no sentence"):
        read_texts([str(tmp_path / "empty.txt")])
    with pytest.raises(DataError, match=r"none\.conllu: no such file"):
        read_texts([str(tmp_path / "none.conllu")])


# ---- points


def shapes(probed: ProbeResult) -> dict[str, tuple[str, list[int]]]:
    return {each["name"]: (" x ".join(each["shape"]), each["example"]) for each in probed.results["summary"]["points"]}


def test_points_are_listed_with_symbols_and_sizes(tmp_path: Path) -> None:
    probed = list_points(request_for(tmp_path), "The reader tests.")
    tokens = probed.results["summary"]["example"]["tokens"]
    found = shapes(probed)
    assert found["hook_embed"] == ("T x D", [tokens, 20])
    assert found["blocks.1.attn.hook_pattern"] == ("B x N x S x S", [1, 2, tokens, tokens])
    assert found["blocks.0.attn.hook_q"] == ("T x N x H", [tokens, 2, 10])
    assert found["blocks.0.mlp.hook_post"] == ("T x F", [tokens, 36])
    assert found["blocks.1.hook_resid_post"] == ("T x D", [tokens, 20])
    assert probed.document["run"] is None
    assert set("TBSDNHF") <= set(probed.document["definitions"])
    assert not (tmp_path / "runs").exists()


def test_points_of_another_family_are_its_own(tmp_path: Path) -> None:
    sizes = BERT | {"hidden_size": 24, "num_attention_heads": 4}
    model = tiny_model(tiny_tokenizer(), ModernBertConfig(**sizes))
    found = shapes(list_points(request_for(tmp_path, model=model), "The reader tests."))
    assert found["blocks.0.mlp.hook_pre"][0] == "T x 2F"
    assert found["blocks.1.attn.hook_v"][0] == "T x N x H"
    assert found["ln_final.hook_normalized"][0] == "T x D"
    with pytest.raises(DataError, match="has no words, or more tokens"):
        list_points(request_for(tmp_path), "word " * 200)


# ---- contextuality


def contextuality(tmp_path: Path, **settings: Any) -> ProbeResult:
    data = tmp_path / "text.txt"
    if not data.exists():
        write_sentences(data)
    more = {key: settings.pop(key) for key in list(settings) if key in ("batch_tokens", "model")}
    return probe_contextuality(request_for(tmp_path, data, **more), ContextualitySettings(**settings))


def test_contextuality_writes_layers_words_and_vectors(tmp_path: Path) -> None:
    probed = contextuality(tmp_path, sentences=70, static_layers=[0, 2], max_contexts=9, seed=3)
    summary = probed.results["summary"]
    assert summary["layers"] == [0, 1, 2]
    rows = table(probed, "contextuality")
    assert [float(row["anisotropy"]) for row in rows] == pytest.approx(summary["anisotropy"])
    for measure, baseline in (
        ("self_similarity", "anisotropy"),
        ("intra_sentence_similarity", "anisotropy"),
        ("maximum_explainable_variance", "random_explainable_variance"),
    ):
        adjusted = np.subtract(summary[measure], summary[baseline])
        assert summary[f"{measure}_adjusted"] == pytest.approx(adjusted, abs=1e-12)
    words = table(probed, "self_similarity")
    assert len(words) == summary["words"]
    for layer in range(3):
        assert np.mean([float(row[f"layer_{layer}"]) for row in words]) == pytest.approx(
            summary["self_similarity"][layer], abs=1e-12
        )
    assert all(int(row["contexts"]) >= 5 for row in words)
    assert probed.run is not None
    for layer in (0, 2):
        lines = (probed.run.path / "vectors" / f"layer-{layer}.txt").read_text(encoding="utf-8").splitlines()
        assert lines[0] == f"{summary['words']} 20"
        assert [line.split(" ")[0] for line in lines[1:]] == [row["word"] for row in words]
        assert all(
            np.linalg.norm([float(x) for x in line.split(" ")[1:]]) == pytest.approx(1, abs=1e-4) for line in lines[1:]
        )
    assert not (probed.run.path / "vectors" / "layer-1.txt").exists()


def test_the_batch_changes_no_figure_beyond_rounding(tmp_path: Path) -> None:
    wide, narrow = (contextuality(tmp_path, sentences=40, batch_tokens=size) for size in (4000, 30))
    for name, value in wide.results["summary"].items():
        if isinstance(value, list) and value and isinstance(value[0], float):
            assert narrow.results["summary"][name] == pytest.approx(value, abs=2e-6)


def test_words_that_are_asked_for_are_looked_at_alone(tmp_path: Path) -> None:
    probed = contextuality(tmp_path, words=["The", "of"])
    assert [row["word"] for row in table(probed, "self_similarity")] == ["of", "the"]
    whole = {row["word"]: row for row in table(contextuality(tmp_path), "self_similarity")}
    assert [float(row["layer_0"]) for row in table(probed, "self_similarity")] != []
    assert set(whole) > {"of", "the"}
    assert re.search(r'The only word, "the", has a self-similarity of [0-9.]+ in layer 2\.', alone(tmp_path))


def alone(tmp_path: Path) -> str:
    return " ".join(contextuality(tmp_path, words=["the"]).sentences)


def test_words_and_layers_that_are_not_there_are_named_before_there_is_a_run(tmp_path: Path) -> None:
    cases: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (DataError, r"--word tokns: does not occur .* did you mean 'tokens'\?", {"words": ["tokns"]}),
        (DataError, "--word reads: occurs in .* --min-contexts is 80", {"words": ["reads"], "min_contexts": 80}),
        (DataError, "no word occurs in 999 of", {"min_contexts": 999}),
        (UsageError, r"--static-layer 3: the model's layers are 0 \(embeddings\) to 2", {"static_layers": [3]}),
        (UsageError, r"--static-layer -1: the model's layers are 0 \(embeddings\) to 2", {"static_layers": [-1]}),
        (UsageError, "--max-vectors 4: fewer than the occurrences of any word", {"max_vectors": 4}),
    ]
    for kind, told, settings in cases:
        with pytest.raises(kind, match=told):
            contextuality(tmp_path, **settings)
    with pytest.raises(UsageError, match="give --data"):
        probe_contextuality(request_for(tmp_path), ContextualitySettings())
    assert not (tmp_path / "runs").exists()


def test_sentences_beyond_the_limit_are_counted_and_named(tmp_path: Path) -> None:
    long = "and the value of the file of the reader " * 12
    write_sentences(tmp_path / "text.txt", [*english(40, seed=3), long])
    left_out = contextuality(tmp_path).results["summary"]["left_out"]
    (entry,) = [value for key, value in left_out.items() if "longer than the model reads" in key]
    assert entry["count"] == 1
    assert "and the value of the file" in entry["such_as"][0]


def test_a_causal_model_has_contextuality_too(tmp_path: Path) -> None:
    model = tiny_model(tiny_tokenizer(), Gpt2Config(**GPT2), ("causal_lm",))
    assert contextuality(tmp_path, model=model, sentences=40).results["summary"]["layers"] == [0, 1, 2]


# ---- similarity


def similarity(tmp_path: Path, models: Sequence[Path] = (), **settings: Any) -> ProbeResult:
    data = tmp_path / "text.txt"
    if not data.exists():
        write_sentences(data)
    more = {"models": [str(model) for model in models]} if models else {}
    return probe_similarity(request_for(tmp_path, data, **more), SimilaritySettings(**settings))


def test_layers_of_one_model_are_compared_with_each_other(tmp_path: Path) -> None:
    probed = similarity(tmp_path, words=150)
    summary = probed.results["summary"]
    cka = np.array(summary["cka"])
    assert (cka.shape, summary["words"]) == ((3, 3), 150)
    assert np.diag(cka) == pytest.approx([1, 1, 1])
    assert cka == pytest.approx(cka.T)
    rows = table(probed, "similarity")
    assert len(rows) == 9
    assert float(rows[1]["cka"]) == pytest.approx(cka[0, 1])


def test_models_with_different_tokenizers_are_compared_on_the_same_words(tmp_path: Path) -> None:
    other = tiny_tokenizer("byte-bpe", 300)
    one = save_tiny(tiny_model(tiny_tokenizer()), tiny_tokenizer(), tmp_path / "one")
    two = save_tiny(tiny_model(other, ModernBertConfig(**BERT | {"hidden_size": 28}), seed=6), other, tmp_path / "two")
    probed = similarity(tmp_path, [one, two], words=120)
    assert probed.results["summary"]["words"] == 120
    assert "white space" in probed.results["definitions"]["word"]
    assert np.array(probed.results["summary"]["cka"]).shape == (6, 6)
    assert probed.results["model"] == f"{one}, {two}"


def test_a_model_is_like_itself_and_its_rotation_and_checkpoints_are_models(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [100, 300])
    probed = similarity(tmp_path, [Path(f"{run}@all"), run], words=100, variance=1.0)
    summary = probed.results["summary"]
    assert [each["model"] for each in summary["layers"][::3]] == [f"{run}@100", f"{run}@300", str(run)]
    for name in ("cka", "svcca"):
        values = np.array(summary[name])
        # The run's model is its last checkpoint.
        assert values[3:6, 6:9] == pytest.approx(values[3:6, 3:6], abs=1e-6)
        assert values[0:3, 6:9] == pytest.approx(values[0:3, 3:6], abs=1e-6)
    assert len(summary["svcca_directions"]) == 9


def test_the_figures_are_those_of_the_states(tmp_path: Path) -> None:
    from bertkit.probing.sentences import Sentence, TextEncoder
    from bertkit.probing.similarity.run import collect, common_words

    tokenizer = tiny_tokenizer()
    subject = request_for(tmp_path).subject()
    sentences = list(TextEncoder.of(subject.model, tokenizer).encode(Sentence(t, t) for t in english(30, seed=2)))
    from bertkit.data.random import Draw
    from bertkit.probing.similarity.measure import similarities

    common = common_words([sentences, sentences[3:]], 90, Draw(0))
    assert common.available == sum(len(each.words) for each in sentences[3:])
    assert len(common.places) == 90
    layers = collect(subject, common.sentences[1], common.places, cpu_engine(55))
    found = similarities(layers)
    pair = similarities(layers[1:])
    assert found.cka[1, 2] == pytest.approx(pair.cka[0, 1], abs=1e-12)
    assert found.svcca[1, 2] == pytest.approx(pair.svcca[0, 1], abs=1e-6)


def test_results_are_json_of_numbers(tmp_path: Path) -> None:
    probed = similarity(tmp_path, words=60)
    assert probed.run is not None
    stored = json.loads((probed.run.path / "results.json").read_text())
    assert stored["kind"] == "similarity"
    assert all(isinstance(value, float) for row in stored["summary"]["cka"] for value in row)
