"""`probe layers`, `structure` and `senses` as runs: results with a known answer, and errors."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bertkit.errors import DataError, UsageError
from bertkit.files import sha256_of
from bertkit.probing.annotated import align, hashes_of
from bertkit.probing.layers import LayersSettings, ProbeFit
from bertkit.probing.layers.data import read_labelled
from bertkit.probing.layers.run import probe_layers
from bertkit.probing.run import ProbeResult
from bertkit.probing.senses import SensesSettings
from bertkit.probing.senses.run import configurations, probe_senses
from bertkit.probing.sentences import TextEncoder
from bertkit.probing.structure import ProbeTraining, StructureSettings
from bertkit.probing.structure.run import probe_structure
from bertkit.study.check import check_measures
from bertkit.study.settings import Study
from tests.conftest import Outcome
from tests.probing.request import request_for, write_treebank
from tests.probing.tiny_models import BERT, tiny_model, tiny_tokenizer
from tests.study.tiny_study import study
from tests.text.corpora import english

pytestmark = pytest.mark.usefixtures("drawn_figures")


def sentences(count: int, seed: int = 3) -> list[list[str]]:
    return [text.replace(".", " .").split() for text in english(count, seed=seed)]


def tag_of(word: str) -> str:
    """Determined by the word alone, so embeddings suffice."""
    return "PUNCT" if word == "." else "NOUN" if len(word) > 4 else "DET"


def write_trees(path: Path, count: int = 26, seed: int = 3) -> Path:
    """Every word depends on the next; the last word is the root, and the full stop depends on it."""
    blocks = []
    for number, words in enumerate(sentences(count, seed), 1):
        rows = [f"# sent_id = s{number}"]
        for place, word in enumerate(words, 1):
            last = len(words) - (words[-1] == ".")
            head = 0 if place == last else last if place > last else place + 1
            relation = "root" if head == 0 else "punct" if word == "." else f"dep:{'a' if len(word) > 4 else 'b'}"
            rows.append(f"{place}\t{word}\t_\t{tag_of(word)}\t_\t_\t{head}\t{relation}\t_\t_")
        blocks.append("\n".join(rows) + "\n\n")
    path.write_text("".join(blocks), encoding="utf-8")
    return path


def write_columns(path: Path, count: int = 30) -> Path:
    """IOB1: words of more than four letters are chunks, neighbours one chunk."""
    lines = []
    for words in sentences(count, 8):
        lines += [f"{word} {'I-NP' if tag_of(word) == 'NOUN' else 'O'}" for word in words] + [""]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def table(probed: ProbeResult, name: str) -> list[dict[str, str]]:
    assert probed.run is not None
    with (probed.run.path / "tables" / f"{name}.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture(autouse=True)
def _undrawn(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures take longer than everything else; one test draws them."""
    if request.node.name != "test_every_kind_draws_its_figures":
        monkeypatch.setattr("bertkit.run.figure_files.save", lambda figure, stem: [])


# ---- layers


def layers_run(directory: Path, *data: Path, **more: Any) -> ProbeResult:
    settings = LayersSettings(
        sentences=14, test_sentences=7, fit=ProbeFit(max_iterations=7), **{"tasks": [], **more.pop("settings", {})}
    )
    request = request_for(directory, **{"batch_tokens": 70, **more})
    return probe_layers(type(request)(**(vars(request) | {"data": [str(path) for path in data]})), settings)


def test_layers_of_a_treebank_and_of_columns(tmp_path: Path) -> None:
    probed = layers_run(tmp_path, write_trees(tmp_path / "t.conllu"), write_columns(tmp_path / "c.txt"))
    tasks = probed.results["summary"]["tasks"]
    assert list(tasks) == ["pos", "dep", "chunks"]
    layers = BERT["num_hidden_layers"] + 1
    for task in tasks.values():
        assert len(task["score"]) == len(task["random_score"]) == len(task["mix_weights"]) == layers
        assert sum(task["mix_weights"]) == pytest.approx(1)
        assert task["uniform_bits"] == pytest.approx(task["train_items"] * np.log2(task["labels"]))
        assert task["selectivity"] == pytest.approx(np.subtract(task["accuracy"], task["control_accuracy"]))
    assert tasks["pos"]["score"][0] > tasks["pos"]["majority_accuracy"] + 0.2
    assert tasks["pos"]["compression"][0] > 1
    assert (tasks["pos"]["metric"], tasks["chunks"]["metric"]) == ("accuracy", "chunk F1")
    assert tasks["dep"]["labels"] == 2  # without subtypes, and without the root
    rows = table(probed, "layers")
    assert [(row["task"], row["layer"]) for row in rows[:layers]] == [("pos", str(n)) for n in range(layers)]
    assert probed.run is not None
    results = json.loads((probed.run.path / "results.json").read_text(encoding="utf-8"))
    assert results["summary"]["tasks"]["pos"]["score"] == tasks["pos"]["score"]
    assert not [path for path in probed.run.path.parent.iterdir() if path.is_file() and path.suffix != ".json"]


def test_batches_do_not_change_the_results(tmp_path: Path) -> None:
    path = write_trees(tmp_path / "t.conllu")
    found = [
        layers_run(tmp_path, path, batch_tokens=tokens, settings={"tasks": ["pos"]}).results["summary"]["tasks"]["pos"]
        for tokens in (25, 4000)
    ]
    assert found[0]["score"] == pytest.approx(found[1]["score"], abs=0.02)
    assert found[0]["codelength_bits"] == pytest.approx(found[1]["codelength_bits"], rel=1e-2)


def test_spans_and_pairs_of_spans_from_a_users_file(tmp_path: Path) -> None:
    lines = []
    for number, words in enumerate(sentences(40, 5)):
        targets = [
            {"span1": [place, place + 1], "span2": [place + 1, min(place + 3, len(words))], "label": tag_of(word)}
            for place, word in enumerate(words[:-1])
        ]
        lines.append(json.dumps({"id": f"x{number}", "text": " ".join(words), "targets": targets}))
    path = tmp_path / "roles.jsonl"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    task = layers_run(tmp_path, path).results["summary"]["tasks"]["roles"]
    assert task["score"][0] > task["majority_accuracy"] + 0.1
    assert task["train_items"] > 50


def test_types_of_given_spans_are_chosen_by_name(tmp_path: Path) -> None:
    path = tmp_path / "c.txt"
    path.write_text("".join(f"w{n} {'B-PER' if n % 2 else 'B-LOC'}\nis O\n\n" for n in range(40)), encoding="utf-8")
    assert {name for each in read_labelled(path) for name in each.targets} == {"ner", "ner-spans"}
    assert list(layers_run(tmp_path, path, settings={"tasks": ["ner-spans"]}).results["summary"]["tasks"]) == [
        "ner-spans"
    ]
    with pytest.raises(UsageError, match=r"--task ner-span: .* did you mean ner-spans"):
        layers_run(tmp_path, path, settings={"tasks": ["ner-span"]})


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ({"text": "a b", "targets": [{"span1": [0, 3], "label": "x"}]}, "line 1, target 1, span1: [0, 3], expected"),
        ({"text": "a b", "targets": [{"span1": [1, 1], "label": "x"}]}, "in a sentence of 2 words"),
        ({"text": "a b", "targets": [{"span1": [0, 1], "label": ["x", "y"]}]}, "expected one name"),
        ({"text": "a b", "target": []}, "did you mean 'target'"),
        (
            {
                "text": "a b",
                "targets": [{"span1": [0, 1], "label": "x"}, {"span1": [0, 1], "span2": [1, 2], "label": "x"}],
            },
            "a target with 2 spans, but others have 1",
        ),
    ],
)
def test_an_invalid_span_is_named(tmp_path: Path, record: dict[str, Any], said: str) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(json.dumps(record) + "\n", encoding="utf-8")
    with pytest.raises(DataError) as caught:
        read_labelled(path)
    assert said in str(caught.value)


@dataclass(frozen=True)
class Plain:
    """A single sentence."""

    id: str
    words: tuple[str, ...]


def test_sentences_that_do_not_align_or_are_too_long_are_counted_and_named() -> None:
    tokenizer = tiny_tokenizer()
    encoder = TextEncoder.of(tiny_model(tokenizer), tokenizer)
    given = [Plain("good", ("the", "file")), Plain("blank", ("the", "", "file")), Plain("long", ("number",) * 70)]
    pairs = align(encoder, given)
    assert [example.id for example, _ in pairs] == ["good"]
    assert sum(encoder.notes.counts.values()) == 2
    named = [name for names in encoder.notes.named.values() for name in names]
    assert any(name.startswith("blank: 3 words, 2 given back") for name in named)
    assert any(name.startswith("long: ") for name in named)


def spans_file(path: Path, labels: tuple[str, str]) -> Path:
    lines = []
    for words in sentences(40, 5):
        targets = [
            {"span1": [place, place + 1], "label": labels[tag_of(word) == "NOUN"]} for place, word in enumerate(words)
        ]
        lines.append(json.dumps({"text": " ".join(words), "targets": targets[::2]}))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


@pytest.mark.parametrize("name", ["ner", "chunks", "srl-spans"])
def test_spans_may_have_the_name_of_a_task_of_columns(tmp_path: Path, name: str) -> None:
    task = layers_run(tmp_path, spans_file(tmp_path / f"{name}.jsonl", ("B-X", "B-Y"))).results["summary"]["tasks"][
        name
    ]
    assert task["metric"] == "accuracy"
    assert task["score"] == task["accuracy"]


def test_a_task_has_the_name_of_the_training_file_in_the_test_file_too(tmp_path: Path) -> None:
    train, test = (spans_file(tmp_path / f"{name}.jsonl", ("x", "y")) for name in ("train", "test"))
    tasks = layers_run(tmp_path, train, test_data=[str(test)]).results["summary"]["tasks"]
    assert {name: each["train_items"] > each["test_items"] > 0 for name, each in tasks.items()} == {"train": True}
    check_measures(
        Study.model_validate(
            study(
                name="t",
                measures={
                    "own": {"kind": "layers", "data": str(train), "test_data": str(test), "task": "train"},
                    "other": None,
                },
            )
        ),
        offline=True,
    )
    record = {"text": "a b", "targets": [{"span1": [0, 1], "span2": [1, 2], "label": "x"}]}
    test.write_text(f"{json.dumps(record)}\n", encoding="utf-8")
    with pytest.raises(DataError, match=r"train\.jsonl and .*test\.jsonl: .* 1 spans for training, 2 for testing"):
        layers_run(tmp_path, train, test_data=[str(test)])
    with pytest.raises(DataError, match=r"no target of pos in the test sentences"):
        layers_run(tmp_path, write_trees(tmp_path / "t.conllu"), test_data=[str(write_columns(tmp_path / "c.txt"))])


def test_files_of_one_name_have_results_of_their_own(tmp_path: Path) -> None:
    paths = []
    for number, folder in enumerate(("a", "b")):
        (tmp_path / folder).mkdir()
        paths.append(write_trees(tmp_path / folder / "train.conllu", 20 + number))
    tasks = layers_run(tmp_path, *paths, settings={"tasks": ["pos"]}).results["summary"]["tasks"]
    assert list(tasks) == ["pos (train 1)", "pos (train 2)"]


def test_which_test_file_belongs_to_which_training_file_decides_the_result(tmp_path: Path) -> None:
    train, tests = tmp_path / "t.conllu", [tmp_path / "u.conllu", tmp_path / "v.conllu"]
    for number, path in enumerate((train, *tests)):
        write_trees(path, 20, seed=number)
    first, second = (hashes_of([train, train], order) for order in (tests, tests[::-1]))
    assert sorted(first.values()) != sorted(second.values())
    assert hashes_of([train])[str(train)] == sha256_of(train)


@pytest.mark.parametrize(
    "text",
    [
        "The reader walks to the old house.\nIt is raining there.\n",
        "".join(f"word{n} and word{n + 100}\n\n" for n in range(60)),
    ],
)
def test_running_text_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "text.txt"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(DataError, match=r"annotated sentences and no running text: a treebank \(\.conllu\)"):
        read_labelled(path)


# ---- structure


def structure_run(directory: Path, data: Path, test_data: Path | None = None, **more: Any) -> ProbeResult:
    settings = StructureSettings(
        sentences=30, test_sentences=12, training=ProbeTraining(max_epochs=2), **{"rank": 4, **more}
    )
    test = [] if test_data is None else [str(test_data)]
    return probe_structure(request_for(directory, data, test_data=test), settings)


def test_structure_of_every_layer_with_controls_and_ranks(tmp_path: Path) -> None:
    train, test = write_trees(tmp_path / "t.conllu"), write_trees(tmp_path / "u.conllu", 15, seed=9)
    probed = structure_run(tmp_path, train, test)
    summary = probed.results["summary"]
    layers = BERT["num_hidden_layers"] + 1
    for name in ("uuas", "dspr", "root_accuracy", "nspr"):
        assert len(summary[name]) == len(summary[f"random_{name}"]) == layers
    assert summary["adjacent"]["uuas"] == 1.0  # every word depends on its neighbour
    assert list(summary["uuas_by_rank"]) == ["1", "2", "4"]
    assert summary["uuas_by_rank"]["4"] == summary["uuas"][summary["best_layer"]]
    trees = table(probed, "trees")
    gold = [row for row in trees if row["tree"] == "gold"]
    assert len(gold) == summary["test_edges"]
    assert all(int(row["other_word"]) == int(row["word"]) + 1 for row in gold)
    assert "." not in {row["other_form"] for row in trees}


def test_a_treebank_alone_is_split(tmp_path: Path) -> None:
    summary = structure_run(tmp_path, write_trees(tmp_path / "t.conllu", 30), ranks=[3]).results["summary"]
    assert (summary["train_sentences"], summary["test_sentences"]) == (24, 6)


def test_structure_refuses_other_files_than_treebanks(tmp_path: Path) -> None:
    trees = write_trees(tmp_path / "t.conllu", 12)
    with pytest.raises(UsageError, match=r"give --data FILE\.conllu"):
        structure_run(tmp_path, write_columns(tmp_path / "c.txt"))
    with pytest.raises(UsageError, match="--rank 21: the rank can be at most the model's width, 20"):
        structure_run(tmp_path, trees, rank=21)
    with pytest.raises(DataError, match=r"no such file; did you mean t\.conllu"):
        structure_run(tmp_path, tmp_path / "tt.conllu")
    with pytest.raises(DataError, match="5 sentences are left, at least 10"):
        structure_run(tmp_path, write_trees(tmp_path / "few.conllu", 6))
    with pytest.raises(UsageError, match="more than --store-gb 1e-06; lower --sentences or raise"):
        probe_structure(request_for(tmp_path, trees, store_gb=1e-6), StructureSettings(rank=2))


def test_structure_refuses_test_sentences_without_an_edge(tmp_path: Path) -> None:
    trees = write_trees(tmp_path / "t.conllu", 24)
    with pytest.raises(DataError, match=r"u\.conllu: no edge between words .* in 2 test sentence\(s\)"):
        structure_run(tmp_path, trees, write_treebank(tmp_path / "u.conllu", [["Yes"], ["No"]]))
    with pytest.raises(ValueError, match="greater than or equal to 1"):
        StructureSettings(ranks=[0])


# ---- senses


def write_senses(path: Path, count: int = 40, first: int = 0) -> Path:
    """`file` has one sense before a noun and another elsewhere; `the` has one."""
    lines = []
    for number in range(first, first + count):
        even = number % 2 == 0
        tokens = ["the", "file", "numbers"] if even else ["learned", "the", "file"]
        place = tokens.index("file")
        senses = [
            [place, "file", "NN", "file%1:10:00::" if even else "file%1:06:00::"],
            [tokens.index("the"), "the", "XX", "the%4:02:00::"],
        ]
        lines.append(json.dumps({"id": f"s{number}", "tokens": [*tokens, f"w{number}"], "senses": senses}))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def senses_run(directory: Path, *test: Path, **more: Any) -> ProbeResult:
    data = more.pop("data", None) or write_senses(directory / "train.jsonl")
    settings = SensesSettings(**{"ks": [1, 3], **more})
    return probe_senses(request_for(directory, data, test_data=[str(path) for path in test]), settings)


def test_senses_of_every_layer_and_of_the_last_ones_together(tmp_path: Path) -> None:
    test = tmp_path / "test.jsonl"
    test.write_text(
        write_senses(tmp_path / "some.jsonl", 8, first=100).read_text(encoding="utf-8")
        + '{"id": "new", "tokens": ["walk"], "senses": [[0, "walk", "VB", "walk%2:38:00::"]]}\n',
        encoding="utf-8",
    )
    probed = senses_run(tmp_path, test, words=["file"])
    found = probed.results["summary"]["tests"]["test"]
    assert found["instances"] == 17
    assert found["coverage"] == pytest.approx(16 / 17)
    assert list(found["configurations"]) == ["layer 0", "layer 1", "layer 2", "last 2 layers"]
    # Layer 2 has seen the neighbours; the most frequent sense is right for half of `file` and for all of `the`.
    assert found["configurations"]["layer 2"]["1"]["accuracy"] == 1.0
    assert found["most_frequent_sense_f1"] == pytest.approx(2 * 12 / (16 + 17))
    assert probed.results["summary"]["words"]["file"]["occurrences"] == 40
    assert probed.results["summary"]["words"]["file"]["purity"] == 1.0
    assert len(table(probed, "senses-file")) == 40
    assert len(table(probed, "senses")) == 4 * 2 + 1


def test_the_back_off_answers_for_words_not_seen_as_they_are_written(tmp_path: Path) -> None:
    test = tmp_path / "t.jsonl"
    record = {"id": "x", "tokens": ["Files"], "senses": [[0, "file", "NN", "file%1:10:00::"]]}
    seen = {"id": "y", "tokens": ["file"], "senses": [[0, "file", "NN", "file%1:10:00::"]]}
    test.write_text(f"{json.dumps(record)}\n{json.dumps(seen)}\n", encoding="utf-8")
    found = senses_run(tmp_path, test, candidates="word").results["summary"]["tests"]["t"]
    layer = found["configurations"]["layer 0"]["1"]
    assert found["coverage"] == 0.5
    assert layer["f1_with_back_off"] == pytest.approx(layer["accuracy"] * 0.5 + 0.5)


def test_configurations_are_single_layers_and_the_last_four() -> None:
    assert list(configurations(3).values()) == [(0,), (1,), (2,), (1, 2)]
    assert configurations(13)["last 4 layers"] == (9, 10, 11, 12)


def test_senses_refuse_a_word_that_does_not_occur(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="--word fille: never occurs with a sense; similar lemmas: file"):
        senses_run(tmp_path, words=["fille"])
    few = write_senses(tmp_path / "few.jsonl", 4)
    with pytest.raises(DataError, match="--word file: occurs 4 times with a sense, a picture needs 5"):
        senses_run(tmp_path, data=few, words=["file"])
    other = tmp_path / "o.jsonl"
    other.write_text('{"tokens": ["walk"], "senses": [[0, "walk", "VB", "walk%2:38:00::"]]}\n', encoding="utf-8")
    with pytest.raises(DataError, match="none of the words of o occurs"):
        senses_run(tmp_path, other)
    with pytest.raises(UsageError, match="examples from one file"):
        probe_senses(request_for(tmp_path), SensesSettings())


def test_test_files_of_one_name_are_scored_separately(tmp_path: Path) -> None:
    tests = []
    for number, folder in enumerate(("a", "b")):
        (tmp_path / folder).mkdir()
        tests.append(write_senses(tmp_path / folder / "test.jsonl", 4 + number, first=100))
    found = senses_run(tmp_path, *tests).results["summary"]["tests"]
    assert {name: each["instances"] for name, each in found.items()} == {str(tests[0]): 8, str(tests[1]): 10}


def test_the_back_off_counts_training_sentences_that_were_not_drawn(tmp_path: Path) -> None:
    """Every lemma has one sense and occurs in five sentences, of which two are drawn."""
    records = [
        {"tokens": ["the", f"file{n % 8}"], "senses": [[1, f"file{n % 8}", "NN", f"file{n % 8}%1:10:00::"]]}
        for n in range(40)
    ]
    path = tmp_path / "train.jsonl"
    path.write_text("".join(f"{json.dumps(each)}\n" for each in records), encoding="utf-8")
    summary = senses_run(tmp_path, data=path, sentences=2).results["summary"]
    (found,) = summary["tests"].values()
    assert summary["training_occurrences"] <= 2
    assert found["most_frequent_sense_f1"] == 1.0


# ---- all of them


def test_every_kind_draws_its_figures(tmp_path: Path) -> None:
    trees = write_trees(tmp_path / "t.conllu", 24)
    runs = {
        "layers": layers_run(tmp_path, trees, settings={"tasks": ["pos"]}),
        "structure": structure_run(tmp_path, trees, ranks=[1]),
        "senses": senses_run(tmp_path, words=["file"]),
    }
    names = {
        "layers": {"layers", "mix"},
        "structure": {"structure", "ranks", "trees"},
        "senses": {"senses", "senses-file"},
    }
    for kind, probed in runs.items():
        assert probed.run is not None
        figures = probed.run.path / "figures"
        assert {path.name for path in figures.iterdir()} == {
            f"{name}{suffix}" for name in names[kind] for suffix in (".svg", ".png")
        }
        lines = (probed.run.path / "summary.txt").read_text(encoding="utf-8").splitlines()
        assert len(lines) == len(names[kind])
        assert all(line.endswith(".") for line in lines)


def test_the_command_line_prints_one_document(tmp_path: Path, bertkit: Callable[..., Outcome]) -> None:
    trees = write_trees(tmp_path / "t.conllu", 15)
    model = request_for(tmp_path).models[0]
    done = bertkit(
        *("probe", "structure", "--model", model, "--data", trees, "--rank", "1", "--max-epochs", "1"),
        *("--device", "cpu", "--json", "--run-dir", tmp_path / "run"),
    )
    assert done.code == 0
    document = json.loads(done.stdout)
    assert (document["kind"], document["run"]) == ("structure", str(tmp_path / "run"))
    assert set(document) == {"kind", "model", "run", "summary", "definitions"}
    assert bertkit("probe", "layers", "--model", model, "--data", tmp_path / "no.conllu").code == 3
    assert bertkit("probe", "senses", "--model", model, "--k", "1").code == 2
