"""The published tasks: data, label names, kind, metrics and the paper's settings, one entry each.

Wang et al. 2019, GLUE, arXiv:1804.07461 (tasks, metrics, table 1); Devlin et al. 2019, BERT, arXiv:1810.04805
(settings: section 4 and appendix A.3); every further paper is named in its entry. How the files are read is the
readers' business (bertkit.tasks.readers), how a kind is learnt the task classes'.
"""

from __future__ import annotations

from difflib import get_close_matches

from bertkit.errors import UsageError
from bertkit.tasks.spec import HEADS, FinetuneDefaults, Kind, Layout, TaskSpec

__all__ = ["GLUE", "HEADS", "TASKS", "FinetuneDefaults", "Kind", "Layout", "TaskSpec", "find_task", "iob2", "plain"]

_GLUE = FinetuneDefaults(
    learning_rate=2e-5,
    epochs=3,
    batch_sequences=32,
    learning_rates=(5e-5, 4e-5, 3e-5, 2e-5),
    source="BERT, section 4.1: batch 32, 3 epochs, the rate chosen on dev of 5e-5, 4e-5, 3e-5, 2e-5; which one is not"
    " published per task; 2e-5 is that of the released MRPC example",
)
_GENERAL = FinetuneDefaults(
    learning_rate=3e-5,
    epochs=4,
    batch_sequences=32,
    learning_rates=(5e-5, 3e-5, 2e-5),
    batch_grid=(16, 32),
    epoch_grid=(2, 3, 4),
    source="BERT, appendix A.3, the general grid; the values chosen of it are not published",
)
_SWAG = FinetuneDefaults(
    learning_rate=2e-5, epochs=3, batch_sequences=16, source="BERT, section 4.4: 3 epochs, 2e-5, batch 16"
)
NLI_LABELS = ("contradiction", "entailment", "neutral")
UPOS = (
    *("ADJ", "ADP", "ADV", "AUX", "CCONJ", "DET", "INTJ", "NOUN", "NUM"),
    *("PART", "PRON", "PROPN", "PUNCT", "SCONJ", "SYM", "VERB", "X"),
)
_CHUNKS = ("ADJP", "ADVP", "CONJP", "INTJ", "LST", "NP", "PP", "PRT", "SBAR", "UCP", "VP")


def iob2(types: tuple[str, ...]) -> tuple[str, ...]:
    """O, then B- and I- of each type: the tags of the IOB2 scheme."""
    return ("O", *(f"{prefix}-{kind}" for kind in types for prefix in "BI"))


def _glue(name: str, title: str, folder: str, paper: str, **other: object) -> TaskSpec:
    """A GLUE task of train.tsv, dev.tsv and an unlabelled test.tsv."""
    fields: dict[str, object] = {
        "kind": "classification",
        "metrics": ("accuracy",),
        "primary": "accuracy",
        "splits": {split: (f"{split}.tsv",) for split in ("train", "dev", "test")},
        "folders": (folder,),
        "layout": "glue",
        "archive": "gluebenchmark.com/tasks",
        "hub_id": "nyu-mll/glue",
        "settings": _GLUE,
    }
    return TaskSpec.model_validate({"name": name, "title": title, "paper": paper, **fields, **other})


_GLUE_TASKS = (
    _glue(
        "cola",
        "Corpus of Linguistic Acceptability",
        "CoLA",
        "Warstadt et al. 2019, arXiv:1805.12471",
        labels=("0", "1"),
        metrics=("matthews_correlation", "accuracy"),
        primary="matthews_correlation",
    ),
    _glue("sst2", "Stanford Sentiment Treebank", "SST-2", "Socher et al. 2013, EMNLP", labels=("0", "1")),
    _glue(
        "mrpc",
        "Microsoft Research Paraphrase Corpus",
        "MRPC",
        "Dolan and Brockett 2005, IWP",
        labels=("0", "1"),
        metrics=("f1", "accuracy"),
        primary="f1",
        splits={
            "train": ("train.tsv", "msr_paraphrase_train.txt"),
            "dev": ("dev.tsv", "msr_paraphrase_train.txt"),
            "test": ("test.tsv", "msr_paraphrase_test.txt"),
        },
    ),
    _glue(
        "stsb",
        "Semantic Textual Similarity Benchmark",
        "STS-B",
        "Cer et al. 2017, arXiv:1708.00055",
        kind="regression",
        metrics=("spearman", "pearson"),
        primary="spearman",
    ),
    _glue(
        "qqp",
        "Quora Question Pairs",
        "QQP",
        "Wang et al. 2019, arXiv:1804.07461, section 3.2",
        labels=("0", "1"),
        metrics=("f1", "accuracy"),
        primary="f1",
    ),
    _glue(
        "mnli",
        "Multi-Genre Natural Language Inference",
        "MNLI",
        "Williams et al. 2018, arXiv:1704.05426",
        labels=NLI_LABELS,
        splits={
            "train": ("train.tsv", "multinli_1.0_train.jsonl"),
            "dev": ("dev_matched.tsv", "multinli_1.0_dev_matched.jsonl"),
            "dev_mm": ("dev_mismatched.tsv", "multinli_1.0_dev_mismatched.jsonl"),
            "test": ("test_matched.tsv",),
            "test_mm": ("test_mismatched.tsv",),
        },
        scored=("dev", "dev_mm"),
        folders=("MNLI", "multinli_1.0"),
    ),
    _glue(
        "qnli",
        "Question-answering Natural Language Inference (the split of January 2019)",
        "QNLI",
        "Wang et al. 2019, arXiv:1804.07461, section 3.3, from Rajpurkar et al. 2016, arXiv:1606.05250",
        labels=("entailment", "not_entailment"),
        folders=("QNLI", "QNLIv2"),
    ),
    _glue(
        "rte",
        "Recognizing Textual Entailment",
        "RTE",
        "Wang et al. 2019, arXiv:1804.07461, section 3.3: RTE-1, -2, -3 and -5 together",
        labels=("entailment", "not_entailment"),
    ),
    _glue(
        "wnli",
        "Winograd Natural Language Inference",
        "WNLI",
        "Wang et al. 2019, arXiv:1804.07461, section 3.3; left out by BERT: pairs that differ in one word have opposite"
        " labels in train and dev, so that most models score below the majority",
        labels=("0", "1"),
    ),
    _glue(
        "ax",
        "GLUE diagnostic set (for a model of MNLI)",
        "AX",
        "Wang et al. 2019, arXiv:1804.07461, section 4; its score is the Matthews correlation of three classes",
        labels=NLI_LABELS,
        metrics=("matthews_correlation", "accuracy"),
        primary="matthews_correlation",
        archive="gluebenchmark.com/diagnostics",
        splits={"test": ("diagnostic-full.tsv", "diagnostic.tsv", "AX.tsv")},
        scored=(),
        folders=("AX", "diagnostic"),
    ),
)

_SQUAD = {
    "kind": "span",
    "metrics": ("f1", "exact_match"),
    "primary": "f1",
    "layout": "squad",
    "archive": "rajpurkar.github.io/SQuAD-explorer",
    "max_length": 384,
}
_TEXT_TASKS = (
    TaskSpec(
        name="snli",
        title="Stanford Natural Language Inference",
        kind="classification",
        labels=NLI_LABELS,
        metrics=("accuracy",),
        primary="accuracy",
        splits={split: (f"snli_1.0_{split}.jsonl",) for split in ("train", "dev", "test")},
        scored=("dev", "test"),
        folders=("snli_1.0", "SNLI"),
        layout="snli",
        archive="nlp.stanford.edu/projects/snli",
        hub_id="stanfordnlp/snli",
        settings=_GLUE.model_copy(update={"source": "as BERT on MNLI (section 4.1); BERT did not publish SNLI"}),
        paper="Bowman et al. 2015, arXiv:1508.05326; pairs without a majority label are dropped, as usual",
    ),
    *(
        TaskSpec.model_validate(
            {
                "splits": {
                    "train": ("SICK_train.txt", "SICK.txt"),
                    "dev": ("SICK_trial.txt", "SICK.txt"),
                    "test": ("SICK_test_annotated.txt", "SICK.txt"),
                },
                "scored": ("dev", "test"),
                "folders": ("SICK",),
                "layout": "sick",
                "archive": "alt.qcri.org/semeval2014/task1",
                "hub_id": "RobZamp/sick",
                "settings": _GENERAL,
                "paper": "Marelli et al. 2014, LREC; SemEval-2014 task 1",
                **each,
            }
        )
        for each in (
            {
                "name": "sick-e",
                "title": "Sentences Involving Compositional Knowledge: entailment",
                "kind": "classification",
                "labels": NLI_LABELS,
                "metrics": ("accuracy",),
                "primary": "accuracy",
            },
            {
                "name": "sick-r",
                "title": "Sentences Involving Compositional Knowledge: relatedness from 1 to 5",
                "kind": "regression",
                "metrics": ("pearson", "spearman"),
                "primary": "pearson",
            },
        )
    ),
    TaskSpec(
        name="imdb",
        title="Large Movie Review Dataset",
        kind="classification",
        labels=("neg", "pos"),
        metrics=("accuracy",),
        primary="accuracy",
        splits={"train": ("train",), "test": ("test",)},
        scored=("test",),
        folders=("aclImdb", "IMDb"),
        layout="imdb",
        archive="ai.stanford.edu/~amaas/data/sentiment",
        hub_id="stanfordnlp/imdb",
        max_length=512,
        settings=_GENERAL,
        paper="Maas et al. 2011, ACL; it has no dev split, and the papers report test",
    ),
)

_SPAN_TASKS = (
    TaskSpec.model_validate(
        {
            **_SQUAD,
            "name": "squad",
            "title": "SQuAD 1.1",
            "splits": {"train": ("train-v1.1.json",), "dev": ("dev-v1.1.json",)},
            "folders": ("SQuAD", "squad1.1", "squad_v1", "SQuADv1.1"),
            "hub_id": "rajpurkar/squad",
            "settings": FinetuneDefaults(
                learning_rate=5e-5,
                epochs=3,
                batch_sequences=32,
                source="BERT, section 4.2: 3 epochs, 5e-5, batch 32; length 384 is the released example's (which has"
                " batch 12, 3e-5 and 2 epochs, for a dev F1 of 88.41 with the base model)",
            ),
            "paper": "Rajpurkar et al. 2016, arXiv:1606.05250",
        }
    ),
    TaskSpec.model_validate(
        {
            **_SQUAD,
            "name": "squad2",
            "title": "SQuAD 2.0",
            "metrics": ("f1", "exact"),
            "splits": {"train": ("train-v2.0.json",), "dev": ("dev-v2.0.json",)},
            "folders": ("SQuAD", "squad2.0", "squad_v2", "SQuADv2.0", "squad2"),
            "hub_id": "rajpurkar/squad_v2",
            "settings": FinetuneDefaults(
                learning_rate=5e-5,
                epochs=2,
                batch_sequences=48,
                source="BERT, section 4.3: 2 epochs, 5e-5, batch 48; length 384 is the released example's",
            ),
            "paper": "Rajpurkar et al. 2018, arXiv:1806.03822",
        }
    ),
)

_CHOICE = {"kind": "choice", "metrics": ("accuracy",), "primary": "accuracy"}
_CHOICE_TASKS = tuple(
    TaskSpec.model_validate({**_CHOICE, **each})
    for each in (
        {
            "name": "swag",
            "title": "Situations With Adversarial Generations",
            "splits": {"train": ("train.csv",), "dev": ("val.csv",), "test": ("test.csv",)},
            "folders": ("SWAG", "swagaf"),
            "layout": "swag",
            "archive": "github.com/rowanz/swagaf",
            "hub_id": "allenai/swag",
            "settings": _SWAG,
            "paper": "Zellers et al. 2018, arXiv:1808.05326",
        },
        {
            "name": "hellaswag",
            "title": "HellaSwag",
            "splits": {
                "train": ("hellaswag_train.jsonl",),
                "dev": ("hellaswag_val.jsonl",),
                "test": ("hellaswag_test.jsonl",),
            },
            "folders": ("HellaSwag",),
            "layout": "hellaswag",
            "archive": "github.com/rowanz/hellaswag",
            "hub_id": "Rowan/hellaswag",
            "settings": _SWAG.model_copy(update={"source": "as BERT on SWAG (section 4.4)"}),
            "paper": "Zellers et al. 2019, arXiv:1905.07830",
        },
        {
            "name": "codah",
            "title": "CODAH",
            "splits": dict.fromkeys(("train", "dev"), ("full_data.tsv", "codah.tsv")),
            "folders": ("CODAH", "choice"),
            "layout": "codah",
            "archive": "github.com/Websail-NU/CODAH",
            "settings": _SWAG.model_copy(update={"source": "as BERT on SWAG (section 4.4)"}),
            "paper": "Chen et al. 2019, arXiv:1904.04365; one file without a split: the questions whose prompt's CRC-32"
            " is divisible by five are dev here, so figures are not comparable with the paper's cross-validation",
        },
        {
            "name": "race",
            "title": "RACE",
            "splits": {split: (split,) for split in ("train", "dev", "test")},
            "scored": ("dev", "test"),
            "folders": ("RACE",),
            "layout": "race",
            "archive": "www.cs.cmu.edu/~glai1/data/race",
            "hub_id": "ehovy/race",
            "max_length": 512,
            "settings": FinetuneDefaults(
                learning_rate=1e-5,
                epochs=4,
                batch_sequences=16,
                warmup_share=0.06,
                weight_decay=0.1,
                source="RoBERTa, arXiv:1907.11692, table 10: 1e-5, batch 16, decay 0.1, 4 epochs, warm-up 6%; BERT did"
                " not publish RACE",
            ),
            "paper": "Lai et al. 2017, arXiv:1704.04683",
        },
    )
)

_TAGGING = {"kind": "tagging", "metrics": ("f1", "precision", "recall", "accuracy"), "primary": "f1"}
_TAGGING_TASKS = tuple(
    TaskSpec.model_validate({**_TAGGING, "settings": _GENERAL, **each})
    for each in (
        {
            "name": "conll2003",
            "archive": "www.clips.uantwerpen.be/conll2003/ner",
            "title": "CoNLL-2003 named entities, English",
            "labels": iob2(("PER", "ORG", "LOC", "MISC")),
            "splits": {
                "train": ("eng.train", "train.txt"),
                "dev": ("eng.testa", "valid.txt", "dev.txt"),
                "test": ("eng.testb", "test.txt"),
            },
            "scored": ("dev", "test"),
            "folders": ("CoNLL-2003", "conll03"),
            "layout": "conll",
            "hub_id": "eriktks/conll2003",
            "max_length": 512,
            "paper": "Tjong Kim Sang and De Meulder 2003, CoNLL; BERT, section 5.3: the maximal document context",
        },
        {
            "name": "wnut17",
            "archive": "noisy-text.github.io/2017/emerging-rare-entities.html",
            "title": "WNUT-17 emerging entities",
            "labels": iob2(("corporation", "creative-work", "group", "location", "person", "product")),
            "splits": {
                "train": ("wnut17train.conll",),
                "dev": ("emerging.dev.conll",),
                "test": ("emerging.test.annotated",),
            },
            "scored": ("dev", "test"),
            "folders": ("WNUT-17", "emerging_entities_17", "wnut_2017"),
            "layout": "conll",
            "hub_id": "leondz/wnut_17",
            "paper": "Derczynski et al. 2017, W-NUT",
        },
        {
            "name": "conll2000",
            "archive": "www.clips.uantwerpen.be/conll2000/chunking",
            "title": "CoNLL-2000 chunking",
            "labels": iob2(_CHUNKS),
            "splits": {"train": ("train.txt",), "test": ("test.txt",)},
            "scored": ("test",),
            "folders": ("CoNLL-2000", "conll00"),
            "layout": "conll",
            "hub_id": "eriktks/conll2000",
            "paper": "Tjong Kim Sang and Buchholz 2000, CoNLL; it has no dev split",
        },
        {
            "name": "ud-pos",
            "title": "Universal Dependencies, universal parts of speech (English Web Treebank)",
            "labels": UPOS,
            "metrics": ("accuracy",),
            "primary": "accuracy",
            "splits": {split: (f"*-ud-{split}.conllu",) for split in ("train", "dev", "test")},
            "scored": ("dev", "test"),
            "folders": ("UD_English-EWT", "ud-english-ewt"),
            "layout": "conllu",
            "archive": "universaldependencies.org",
            "hub_id": "universal-dependencies/universal_dependencies",
            "paper": "Silveira et al. 2014, LREC; Nivre et al. 2020, arXiv:2004.10643",
        },
    )
)

TASKS: dict[str, TaskSpec] = {
    spec.name: spec for spec in (*_GLUE_TASKS, *_TEXT_TASKS, *_SPAN_TASKS, *_CHOICE_TASKS, *_TAGGING_TASKS)
}
"""Every published task by name."""

GLUE = ("cola", "sst2", "mrpc", "stsb", "qqp", "mnli", "qnli", "rte", "wnli")
"""The nine tasks of the GLUE score; `ax` is outside it."""


def plain(name: str) -> str:
    """A name without case and punctuation: `SST-2`, `sst_2` and `sst2` are one."""
    return "".join(each for each in name.lower() if each.isalnum())


def find_task(name: str) -> TaskSpec:
    """The task of a name, whatever its case and punctuation.

    Raises:
        UsageError: there is none; the nearest name is given.
    """
    known = {plain(each): spec for each, spec in TASKS.items()}
    if spec := known.get(plain(name)):
        return spec
    near = get_close_matches(plain(name), known, n=1)
    hint = f"did you mean {known[near[0]].name}?" if near else "there are: " + ", ".join(TASKS)
    raise UsageError(f"unknown task {name!r}; {hint}")
