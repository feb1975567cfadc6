"""Attention and effective attention as runs: outputs, refusals, and the viewer's page."""

from __future__ import annotations

import base64
import csv
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose

from bertkit.errors import DataError, UsageError
from bertkit.models.conversion.pruning import prune_heads
from bertkit.models.families.bert import BertConfig
from bertkit.probing.attention import AttentionSettings
from bertkit.probing.attention.report import _draw_dependencies
from bertkit.probing.attention.run import probe_attention
from bertkit.probing.attention.viewer import ViewedSentence, viewer_page
from bertkit.probing.effective_attention import EffectiveAttentionSettings
from bertkit.probing.effective_attention.run import probe_effective_attention
from tests.probing.request import request_for, write_sentences, write_treebank
from tests.probing.tiny_models import BERT, tiny_model, tiny_tokenizer
from tests.text.corpora import english

SENTENCES = [sentence.split() for sentence in english(41, seed=5)]


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures are drawn but not written, which takes most of a small run's time."""
    monkeypatch.setattr("bertkit.run.figure_files.save", lambda figure, stem: [])


def results(probed: Any) -> dict[str, Any]:
    contents: dict[str, Any] = json.loads((probed.run.path / "results.json").read_text())
    return contents


def table(probed: Any, name: str) -> list[dict[str, str]]:
    with (probed.run.path / "tables" / f"{name}.csv").open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def treebank(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_treebank(tmp_path_factory.mktemp("trees") / "chain.conllu", SENTENCES)


@pytest.fixture(scope="module")
def attention_run(tmp_path_factory: pytest.TempPathFactory, treebank: Path) -> Any:
    directory = tmp_path_factory.mktemp("attention")
    settings = AttentionSettings(sentences=30, pattern_pairs=9, least_words=5, viewed=2)
    return probe_attention(request_for(directory, treebank), settings)


def test_an_attention_run_holds_tables_figures_and_sentences(attention_run: Any) -> None:
    found = results(attention_run)
    summary = found["summary"]
    assert (found["kind"], summary["sentences"], summary["layers"], summary["heads"]) == ("attention", 30, 2, 2)
    names = ["attention", "dependencies", "entropy", "head_distances", "patterns"]
    for folder, suffixes in (("tables", ["csv"]), ("figures", ["png", "svg"])):
        written = sorted(path.name for path in (attention_run.run.path / folder).iterdir())
        assert written == sorted(f"{name}.{suffix}" for name in names for suffix in suffixes)
    assert len((attention_run.run.path / "summary.txt").read_text().splitlines()) == len(names)
    shares = [summary["patterns"][name] for name in ("vertical", "diagonal", "vertical+diagonal", "block")]
    assert sum(shares) + summary["patterns"]["heterogeneous"] == pytest.approx(1)
    rows = table(attention_run, "attention")
    assert [row["head"] for row in rows] == ["1-1", "1-2", "2-1", "2-2", "even"]
    assert_allclose([float(row["cls"]) for row in rows[:4]], np.ravel(summary["by_head"]["cls"]), rtol=1e-9)


def test_the_best_offset_of_a_chain_is_the_word_before(attention_run: Any) -> None:
    (everything, *_) = results(attention_run)["summary"]["dependencies"]
    assert (everything["relation"], everything["offset"], everything["offset_accuracy"]) == ("all", -1, 1.0)
    assert everything["accuracy"] < 1
    assert {row["relation"] for row in table(attention_run, "dependencies")} == {"all", "dep"}


def test_the_label_of_relations_fits_beside_a_single_one() -> None:
    shares: Any = {"accuracy": [0.5], "offset_accuracy": [0.3], "random_accuracy": [0.1]}
    figure = _draw_dependencies("", {"relation": ["all"], "words": [7], "head": ["1-1"], "offset": [1]} | shares)
    figure.draw_without_rendering()
    assert figure.bbox.y0 <= figure.axes[0].yaxis.label.get_window_extent().y0


@pytest.mark.usefixtures("undrawn")
def test_the_batch_changes_no_figure(attention_run: Any, treebank: Path, tmp_path: Path) -> None:
    settings = AttentionSettings(sentences=30, pattern_pairs=9, least_words=5, viewed=0)
    again = probe_attention(request_for(tmp_path, treebank, batch_tokens=23), settings)
    one, other = (results(each)["summary"] for each in (attention_run, again))
    for name, values in one["by_head"].items():
        assert_allclose(other["by_head"][name], values, atol=1e-5, err_msg=name)
    assert other["dependencies"] == one["dependencies"]
    assert other["patterns"] == one["patterns"]
    assert not (again.run.path / "viewer.html").exists()


@pytest.mark.usefixtures("undrawn")
def test_plain_text_has_no_dependencies_and_gives_the_sentences_that_are_asked_for(tmp_path: Path) -> None:
    text = write_sentences(tmp_path / "text.txt")
    settings = AttentionSettings(sentences=12, pattern_pairs=0, show=["The reader reads a file."])
    probed = probe_attention(request_for(tmp_path, text), settings)
    summary = results(probed)["summary"]
    assert summary["dependencies"] is None
    assert summary["patterns"] is None
    (viewed,) = data_of(probed.run.path / "viewer.html")["sentences"]
    assert "".join(viewed["tokens"]).lower().startswith("[cls]the")
    with pytest.raises(UsageError, match="--show: sentences longer than the model reads"):
        probe_attention(request_for(tmp_path, text), AttentionSettings(show=["word " * 99]))


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize(
    ("layers", "heads", "told"),
    [
        (1, 1, "has a single head"),
        (1, 2, ", all of one layer, have a mean"),
        (2, 1, ", all of different layers, have a mean"),
    ],
)
def test_few_heads_are_compared_as_far_as_possible(layers: int, heads: int, told: str, tmp_path: Path) -> None:
    config = BertConfig(**BERT | {"num_hidden_layers": layers, "num_attention_heads": heads})
    request = request_for(tmp_path, write_sentences(tmp_path / "text.txt"), model=tiny_model(tiny_tokenizer(), config))
    probed = probe_attention(request, AttentionSettings(sentences=6, pattern_pairs=1, viewed=0))
    (sentence,) = [each for each in probed.sentences if "maximum" in each or "single head" in each]
    assert told in sentence
    assert "nan" not in sentence
    assert [row["head"] for row in table(probed, "head_distances")] == [
        f"{layer}-{head}" for layer in range(1, layers + 1) for head in range(1, heads + 1)
    ]


def test_a_draw_without_tokens_names_the_option_that_decides(tmp_path: Path) -> None:
    settings = AttentionSettings(divergence_tokens=1, pattern_pairs=0, viewed=0, seed=0)
    with pytest.raises(UsageError, match="--divergence-tokens 1: by chance no token was drawn"):
        probe_attention(request_for(tmp_path, write_sentences(tmp_path / "text.txt")), settings)


def test_a_tree_with_a_cycle_is_no_tree(tmp_path: Path) -> None:
    rows = ["1\ta\t_\tX\t_\t_\t2\tdep\t_\t_", "2\tb\t_\tX\t_\t_\t1\tdep\t_\t_"]
    path = tmp_path / "cycle.conllu"
    path.write_text("\n".join(rows) + "\n\n", encoding="utf-8")
    with pytest.raises(DataError, match="cycle"):
        probe_attention(request_for(tmp_path, path), AttentionSettings())
    assert not (tmp_path / "runs").exists()


# The viewer.


class Page(HTMLParser):
    """Open tags, and the contents of scripts."""

    VOID = ("meta", "link", "br", "input", "img")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: set[str] = set()
        self.labels: set[str] = set()
        self.scripts: list[str] = []
        self.addresses: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if tag not in self.VOID:
            self.open.append(tag)
        self.ids |= {values["id"]} if values.get("id") else set()
        self.labels |= {values["for"]} if values.get("for") else set()
        self.addresses += [str(values[key]) for key in ("src", "href", "action") if key in values]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.scripts.append(data)
        self.text += data


def parsed(html: str) -> Page:
    page = Page()
    page.feed(html)
    page.close()
    assert not page.open
    return page


def data_of(path: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(parsed(path.read_text(encoding="utf-8")).scripts[0])
    return document


def test_the_viewer_holds_every_map_and_asks_nothing_of_the_network(attention_run: Any) -> None:
    html = (attention_run.run.path / "viewer.html").read_text(encoding="utf-8")
    page = parsed(html)
    assert page.addresses == []
    assert "default-src 'none'" in html
    assert not any(word in page.scripts[1] for word in ("fetch(", "XMLHttpRequest", "import(", "innerHTML", "http"))
    data = json.loads(page.scripts[0])
    assert (data["layers"], data["heads"], len(data["sentences"])) == (2, 2, 2)
    for sentence in data["sentences"]:
        n = len(sentence["tokens"])
        maps = np.frombuffer(base64.b64decode(sentence["maps"]), np.uint8).reshape(4, n, n) / 255
        assert_allclose(maps.sum(-1), np.ones((4, n)), atol=n * 0.5 / 255)


@pytest.mark.usefixtures("undrawn")
def test_heads_of_a_pruned_model_have_their_numbers_in_the_whole_model(tmp_path: Path) -> None:
    model = tiny_model(tiny_tokenizer(), BertConfig(**BERT | {"hidden_size": 24, "num_attention_heads": 4}))
    prune_heads(model, {0: [0, 2], 1: [1, 2]})
    request = request_for(tmp_path, write_sentences(tmp_path / "text.txt"), model=model)
    probed = probe_attention(request, AttentionSettings(sentences=9, pattern_pairs=2, viewed=1))
    assert [row["head"] for row in table(probed, "attention")] == ["1-2", "1-4", "2-1", "2-4", "even"]
    assert results(probed)["summary"]["head_numbers"] == [[2, 4], [1, 4]]
    assert probed.run is not None
    page = parsed((probed.run.path / "viewer.html").read_text(encoding="utf-8"))
    assert json.loads(page.scripts[0])["numbers"] == [[2, 4], [1, 4]]
    effective = probe_effective_attention(request, EffectiveAttentionSettings(lengths=[16], texts=2))
    assert effective.run is not None
    assert re.search(r"Example: head (1-2|1-4|2-1|2-4) of", (effective.run.path / "summary.txt").read_text())


def test_every_part_of_the_page_that_the_script_names_is_there_and_has_a_label() -> None:
    page = parsed(viewer_page("m", [[0]], [ViewedSentence(["a"], torch.ones(1, 1, 1))]))
    named = set(re.findall(r'\bat\("(\w+)"\)', page.scripts[1]))
    assert named == {"tokens", "direction", "layer", "head", "sentence", "caption", "map", "grid"}
    assert named | {"data"} <= page.ids
    assert page.labels == {"sentence", "layer", "head", "direction"}


def test_tokens_and_titles_cannot_leave_their_place() -> None:
    tokens = ["</script><b>", "&amp;", '"\u2028']
    html = viewer_page("<i>&", [[0]], [ViewedSentence(tokens, torch.full((1, 3, 3), 1 / 3))])
    page = parsed(html)
    assert json.loads(page.scripts[0])["sentences"][0]["tokens"] == tokens
    assert "Attention of <i>&" in page.text
    assert "<b>" not in html


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node to run the page's script")
def test_the_script_runs_and_answers_to_keys(tmp_path: Path) -> None:
    maps = torch.zeros(4, 3, 3)
    maps[:, :, 0] = 1.0
    maps[3] = torch.eye(3)
    page = parsed(viewer_page("m", [[0, 1], [1, 2]], [ViewedSentence(["[CLS]", "a", "[SEP]"], maps)]))
    (tmp_path / "page.js").write_text(_DOM + f"const DATA = {json.dumps(page.scripts[0])};\n" + page.scripts[1] + _PLAY)
    done = subprocess.run(["node", str(tmp_path / "page.js")], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [
        ["Layer 1, head 1: from [CLS]", ["100%", "0%", "0%"], 4],
        ["Layer 1, head 1: from a", ["100%", "0%", "0%"], 4],
        ["Layer 2, head 3: from a", ["0%", "100%", "0%"], 4],
        ["Layer 2, head 2: from a", ["100%", "0%", "0%"], 4],
        ["Layer 2, head 2: to [CLS]", ["100%", "100%", "100%"], 4],
    ]


_DOM = """
"use strict";
class Node_ {
  constructor(tag) { this.tagName = tag.toUpperCase(); this.children = []; this.dataset = {}; this.style = {};
    this.attributes = {}; this.listeners = {}; this.textContent = ""; this.value = "from"; }
  append(...nodes) { this.children.push(...nodes); }
  replaceChildren(...nodes) { this.children = nodes; }
  get firstChild() { return this.children[0]; }
  get lastChild() { return this.children[this.children.length - 1]; }
  addEventListener(name, run) { this.listeners[name] = run; }
  setAttribute(name, value) { this.attributes[name] = value; }
  insertRow() { const row = new Node_("tr"); this.append(row); return row; }
  insertCell() { const cell = new Node_("td"); this.append(cell); return cell; }
  querySelectorAll(tag) {
    return this.children.flatMap(c => c instanceof Node_ ? [...(c.tagName === tag.toUpperCase() ? [c] : []),
      ...c.querySelectorAll(tag)] : []);
  }
  getContext() { return { clearRect() {}, fillRect() {} }; }
  focus() {}
}
const nodes = {};
const document = { documentElement: {}, listeners: {},
  getElementById(id) {
    if (!nodes[id]) { nodes[id] = new Node_("div"); nodes[id].textContent = id === "data" ? DATA : ""; }
    return nodes[id]; },
  createElement: tag => new Node_(tag), createTextNode: text => text,
  addEventListener(name, run) { this.listeners[name] = run; } };
const getComputedStyle = () => ({ getPropertyValue: () => "0, 0, 0" });
const matchMedia = () => ({ addEventListener() {} });
class Option { constructor(text, value) { this.text = text; this.value = value; } }
"""
_PLAY = """
const seen = [];
const look = () => seen.push([nodes.caption.textContent, nodes.tokens.children.map(b => b.lastChild.textContent),
  nodes.grid.querySelectorAll("button").length]);
const press = key => document.listeners.keydown({ key, target: { tagName: "BODY" }, preventDefault() {} });
look();
press("ArrowRight"); look();
press("PageDown"); press("ArrowUp"); look();
press("ArrowDown"); look();
press("ArrowLeft"); nodes.direction.value = "to"; nodes.direction.listeners.change(); look();
console.log(JSON.stringify(seen));
"""


# Effective attention.


@pytest.mark.usefixtures("undrawn")
def test_an_effective_attention_run_goes_by_length(tmp_path: Path) -> None:
    text = write_sentences(tmp_path / "text.txt")
    settings = EffectiveAttentionSettings(sentences=60, texts=3, lengths=[8, 31, 16])
    probed = probe_effective_attention(request_for(tmp_path, text), settings)
    summary = results(probed)["summary"]
    assert (summary["lengths"], summary["texts"], summary["head_width"]) == ([8, 16, 31], 9, 10)
    assert summary["mean_correlation"][0] == pytest.approx(1)
    assert summary["mean_correlation"][2] < 0.99
    assert summary["mean_rank"][2] == 10
    assert_allclose(np.sum(summary["attention_to"]["raw"], axis=1), np.ones(2), atol=1e-6)
    assert summary["attention_to"]["lengths"] == [16, 31]
    assert len(table(probed, "effective_attention")) == 3


@pytest.mark.usefixtures("undrawn")
@pytest.mark.filterwarnings("error")
def test_a_layer_without_an_effect_has_no_correlation(tmp_path: Path) -> None:
    model = tiny_model(tiny_tokenizer())
    for number, expected in ((1, [False, True]), (0, [True, True])):
        with torch.no_grad():
            model.encoder.layers[number].attention.output.weight.zero_()
        request = request_for(tmp_path / str(number), write_sentences(tmp_path / "text.txt"), model=model)
        probed = probe_effective_attention(request, EffectiveAttentionSettings(lengths=[16], texts=2))
        (found,) = results(probed)["summary"]["correlation"]
        assert [value is None for value in found] == expected


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"lengths": [61]}, "--length 61: expected 4 to 60"), ({"lengths": [3]}, "--length 3: expected 4 to 60")],
)
def test_lengths_beyond_the_model_are_refused(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    text = write_sentences(tmp_path / "text.txt")
    with pytest.raises(UsageError, match=message):
        probe_effective_attention(request_for(tmp_path, text), EffectiveAttentionSettings(**settings))


def test_too_little_text_is_refused(tmp_path: Path) -> None:
    text = write_sentences(tmp_path / "text.txt", ["A short file."])
    with pytest.raises(DataError, match="not enough text for 20 texts of 8 tokens"):
        probe_effective_attention(request_for(tmp_path, text), EffectiveAttentionSettings())


# On the command line.


@pytest.mark.usefixtures("undrawn")
def test_the_command_prints_the_document_of_the_contract(bertkit: Any, tmp_path: Path) -> None:
    text = write_sentences(tmp_path / "text.txt")
    request_for(tmp_path)
    model = ["--model", tmp_path / "model", "--data", text, "--json", "-q"]
    outcome = bertkit(
        "probe", "effective-attention", *model, "--length", "12", "--texts", "2", "--run-dir", tmp_path / "run"
    )
    assert outcome.code == 0, outcome.stderr
    document = json.loads(outcome.stdout)
    assert list(document) == ["kind", "model", "run", "summary", "definitions"]
    assert document["kind"] == "effective-attention"
    assert document["summary"]["lengths"] == [12]
