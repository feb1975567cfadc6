"""Record small runs of every kind bit for bit, to check that a code change changes no number.

    python -m benchmarks.golden_runs record --data DATA --source BEFORE/src --out before.json
    python -m benchmarks.golden_runs record --data DATA --source src --out after.json
    python -m benchmarks.golden_runs compare before.json after.json

DATA has text/wikipedia-dev*.xz, babylm/dev/simple_wiki.dev.txt.xz, glue, conll2003, choice, squad/xquad-en-v1.1.json;
a few lines of each are copied to FILE.runs next to FILE.json, which also contains the runs. Only the command line is
used, on one CPU thread, so any version can run the cases. All take some 15 minutes; `record NAME ...` runs these cases
and those whose models they read, `--add` keeps the successful cases of FILE.json.

A record contains exit codes, the SHA-256 of weights and predictions, a digest of the newest checkpoint's tensors for
any names (jointly trained teachers and projections are only there), metrics, results and plan, all without values that
depend on the clock. Messages about bad input are compared for information only.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import json
import lzma
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from string import Template
from typing import Any

# A word KEY=VALUE stands for `--set KEY=VALUE`, and $NAME for one of these; the model of a case is in runs/CASE.
GROUPS = {
    "log": "engine.log_every_steps=1 engine.evaluate_every_steps=3 engine.save_every_steps=1"
    " engine.evaluation_sequences=12 engine.pseudo_perplexity_sequences=2",
    "width": "model.hidden_size=48 model.num_attention_heads=4 model.intermediate_size=96",
    "steps": "data.sequence_length=64 optimisation.batch_sequences=8 optimisation.steps=6"
    " optimisation.schedule.peak=2e-3 optimisation.schedule.warmup_steps=2 optimisation.schedule.warmup_share=null"
    " $log",
    "own": "tokenizer.vocab_size=600 $width model.num_hidden_layers=4 $steps",
    "tiny": "--data text.txt $own",
    "several": "'data.languages={en: [text.txt], simple: [simple.txt]}' optimisation.stages=[]",
    "student": "--data text.txt $width model.num_hidden_layers=2 $steps",
    "few": "batch=8 lr=1e-3 max_length=64 optimisation.max_steps=4 engine.log_every_steps=1 engine.save_every_steps=1",
    "tune": "--data-dir tasks $few",
    "bert": "$tune --model runs/bert",
    "mrpc": "finetune --task mrpc $bert",
    "read": "--json --run-dir runs",
    "taught": "--teacher runs/mrpc --task mrpc $tune",
}
CASES = {
    "bert": "pretrain bert $tiny --max-steps 5",
    "electra-small": "pretrain electra-small $tiny model.embedding_size=32",
    "electra-two-stage": "pretrain electra-two-stage $tiny model.embedding_size=48 'optimisation.stages=[{share: 0.5,"
    " set: {objective: [{masked_lm: {rate: 0.15, mask_share: 0.85, random_share: 0.0}}]}}, {share: 0.5}]'",
    "albert": "pretrain albert-base $tiny model.embedding_size=24",
    "spanbert": "pretrain spanbert-base $tiny",
    "stacking": "pretrain bert-stacking $tiny 'optimisation.stages=[{share: 0.33, set: {model.num_hidden_layers: 1,"
    " optimisation.batch_sequences: 4}}, {share: 0.33, set: {model.num_hidden_layers: 2, optimisation.schedule:"
    " {name: polynomial, power: 1.0, peak: 1.0e-3, floor: 0.5, warmup_steps: 1}}}, {share: 0.34}]'",
    "mbert": "pretrain mbert $several $own",
    "roberta": "pretrain roberta $tiny",
    "deberta-v3": "pretrain deberta-v3-small $tiny",
    "mpnet": "pretrain mpnet $tiny",
    "dupmae": "pretrain dupmae init=null tokenizer.path=null optimisation.passes=null $tiny",
    "babylm": "pretrain babylm-strict-small $tiny 'optimisation.stages=[{share: 0.5, set: {data.sequence_length: 32,"
    " objective.masked_next_token.rate: 0.2875, optimisation.batch_sequences: 4}}, {share: 0.34}, {share: 0.16, set:"
    " {optimisation.schedule: {name: linear, peak: 7.0e-4}}}]'",
    "modernbert": "pretrain modernbert $tiny model.local_attention=16 optimisation.batch_ramp=null"
    " optimisation.schedule.warmup_steps=null optimisation.schedule.warmup_share=0.34"
    " 'optimisation.stages=[{share: 0.5, set: {optimisation.batch_sequences: 4}}, {share: 0.5, set:"
    " {data.sequence_length: 128, optimisation.schedule: {name: warmup-stable-decay, peak: 3.0e-4,"
    " stable_share: 0.0, decay: 1-sqrt}}}]'",
    "structbert": "pretrain structbert $tiny optimisation.stages=[]",
    "domain-adapt": "pretrain domain-adapt --init runs/bert --data simple.txt $steps",
    "bert-bf16": "pretrain bert $tiny optimisation.stages=[] --precision bf16",
    "mobile-teacher": "pretrain bert $tiny optimisation.stages=[] 'model={family: mobilebert, hidden_size: 48,"
    " embedding_size: 24, intra_bottleneck_size: 48, num_hidden_layers: 2, num_attention_heads: 4, hidden_act: gelu,"
    " intermediate_size: 96, num_feedforward_networks: 1, normalization_type: layer_norm}'",
    "mrpc": "$mrpc",
    "mrpc-other": "$mrpc --seed 1",
    "cola": "finetune --task cola $bert optimisation.early_stopping=2 optimisation.evaluations_per_epoch=4",
    "stsb": "finetune --task stsb $bert optimisation.schedule=cosine",
    "conll2003": "finetune --task conll2003 $bert tagging.context=document",
    "squad": "finetune --task squad $bert max_length=96 span.max_query_tokens=32 span.doc_stride=16",
    "codah": "finetune --task codah $bert",
    "race": "finetune --task race $tune --model runs/roberta batch=2",
    "freelb": "finetune rte-freelb $tune --model runs/roberta",
    "lora": "$mrpc method.name=lora",
    "frozen": "$mrpc method.name=frozen",
    "gradual": "$mrpc method.name=gradual batch=32 epochs=3",
    "features": "finetune conll2003-features $bert method.lstm_width=16",
    "multi-task": "finetune --task rte,mrpc,stsb $bert optimisation.max_steps=6 optimisation.task_smoothing=0.5",
    "suite": "$mrpc --seeds 0-1 --grid=lr=2e-3,3e-3",
    "own-table": "finetune --train reviews-train.csv --dev reviews-dev.csv --text review --label stars $few --model"
    " runs/modernbert optimisation.layer_decay=0.9 text.class_weights=balanced text.label_smoothing=0.1",
    "mrpc-bf16": "$mrpc --precision bf16",
    "q8bert": "finetune q8bert $bert",
    "magnitude": "$mrpc 'method={name: pruned, magnitude: 0.5}'",
    "distilbert": "distill distilbert --teacher runs/bert $student 'student.layers=[0, 3]'",
    "distilbert-control": "distill distilbert --control --teacher runs/bert $student 'student.layers=[0, 3]'",
    "tinybert-general": "distill tinybert-general --teacher runs/bert $student model.hidden_size=24",
    "mobilebert": "distill mobilebert --teacher runs/mobile-teacher --data text.txt $width model.num_hidden_layers=2"
    " data.sequence_length=64 optimisation.batch_sequences=8 optimisation.steps=6 $log model.embedding_size=24"
    " model.intra_bottleneck_size=24 progressive.steps_per_layer=2 'progressive.then={optimisation.schedule:"
    " {name: bert, peak: 1.0e-3, warmup_steps: 1}}'",
    "small-vocabulary": "distill small-vocabulary --teacher runs/bert --data text.txt $steps tokenizer.vocab_size=300"
    " 'model={hidden_size: 24, intermediate_size: 48}'",
    "minibert": "distill minibert --teacher runs/mbert tokenizer.path=runs/mbert/model $several $width $steps",
    "distil-task": "distill distil-task $taught",
    "two-teachers": "distill distil-task --teacher runs/mrpc-other $taught",
    "pkd": "distill pkd $taught",
    "tinybert-task": "distill tinybert-task --student runs/tinybert-general $taught augmentation.model=runs/bert"
    " augmentation.copies=1",
    "distilbert-task": "distill distilbert-task --teacher runs/squad --student runs/distilbert $tune max_length=96"
    " span.max_query_tokens=32",
    "pd": "distill pd --student runs/distilbert $taught",
    "bilstm": "distill distil-task $taught 'student={family: bilstm, vocab_size: 200, embedding_size: 16,"
    " lstm_width: 16, classifier_width: 16}'",
    "theseus": "distill theseus $taught method.successors=2",
    "qbert": "distill qbert $taught method.groups=4 method.sensitivity_examples=8",
    "prune-heads": "distill prune-heads $taught",
    "export-int8": "export runs/mrpc --format int8 --to runs/export-int8 --json",
    "eval-mlm": "eval mlm --model runs/bert --data simple.txt --sequences 16 --pseudo-sequences 2 $read/eval-mlm",
    "contextuality": "probe contextuality --model runs/bert --data simple.txt --sentences 60 $read/contextuality",
    "attention": "probe attention --model runs/bert --data simple.txt --sentences 20 --pairs 10 $read/attention",
}
STOPPED = {  # run again with an interruption: killed after step 2, or stopped after step 1 by the time limit
    **dict.fromkeys(("bert", "mrpc", "distilbert", "distil-task"), "kill"),
    **dict.fromkeys(("electra-small", "stacking", "multi-task", "small-vocabulary", "theseus"), "--max-minutes"),
}
MESSAGES = {
    "unknown recipe": "pretrain bertt --data text.txt",
    "misspelt key": "pretrain bert --data text.txt model.hiden_size=48",
    "value out of range": "pretrain bert --data text.txt optimisation.steps=0",
    "heads that do not divide": "pretrain bert $tiny model.num_attention_heads=5",
    "no such text": "pretrain bert --data nowhere.txt",
    "recipe of another command": "pretrain distil-task --data text.txt",
    "resume with another recipe": "pretrain roberta --resume runs/bert",
    "unknown task": "finetune --task mrpcc $bert",
    "no such folder": "$mrpc --data-dir nowhere",
    "no such model": "$mrpc --model runs/nothing",
    "missing column": "finetune --train reviews-train.csv --dev reviews-dev.csv --text text --label stars $bert",
    "section of another task": "$mrpc span.doc_stride=16",
    "unknown method": "$mrpc method.name=lorra",
    "grid over an unknown key": "$mrpc --grid=rate=1e-3,2e-3",
    "two teachers on text": "distill distilbert --teacher runs/bert --teacher runs/mbert --data text.txt",
    "no teacher": "distill distil-task --task mrpc $tune",
    "training what has int8 weights": "$mrpc --model runs/q8bert",
}
# Keys that depend on the clock, on the machine, or on the spelling of settings.
UNSTABLE = re.compile(r"(^|_)(seconds|minutes|time|per_s|mfu|stall|hash|versions)($|_)|peak_memory")


class Place:
    """A folder of runs, and the source code that they use."""

    def __init__(self, folder: Path, python: str, source: Path | None) -> None:
        self.folder, self.python = folder, python
        self.checkout = "" if source is None else f"{source.resolve().parent}/"
        path = {} if source is None else {"PYTHONPATH": str(source.resolve())}
        caches = {"BERTKIT_CACHE": str(folder / "cache"), "BERTKIT_RUNS": str(folder / "runs"), "HF_HUB_OFFLINE": "1"}
        self.environment = os.environ | path | caches | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}

    def call(self, words: list[str], kill_at: Path | None = None) -> tuple[int, str, str]:
        """Exit code, stdout and stderr of a command, which is killed once a file with that name exists."""
        pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        command = [self.python, "-m", "bertkit", *words]
        process = subprocess.Popen(command, cwd=self.folder, env=self.environment, **pipes)
        while kill_at is not None and process.poll() is None:
            if kill_at.exists():
                process.kill()
            time.sleep(0.001)
        stdout, stderr = process.communicate()
        return process.returncode, stdout, stderr

    def plain(self, value: Any) -> Any:
        """A document without parts that change from run to run, with paths relative to the folder."""
        if isinstance(value, dict):
            return {self.plain(key): self.plain(each) for key, each in value.items() if not UNSTABLE.search(key)}
        if isinstance(value, list):
            return [self.plain(each) for each in value]
        return value.replace(f"{self.folder}/", "").replace(self.checkout, "") if isinstance(value, str) else value

    def case(self, name: str, how: str | None) -> dict[str, Any]:
        """Run a case, optionally stopped and resumed, and gather the files that it wrote."""
        begin, words = time.monotonic(), words_of(CASES[name])
        run = self.folder / "runs" / (f"{name}-resumed" if how else name)
        shutil.rmtree(run, ignore_errors=True)
        record: dict[str, Any] = {}
        is_training = words[0] in ("pretrain", "finetune", "distill")
        if is_training:
            precision = [] if "--precision" in words else ["--precision", "fp32"]
            words += ["--run-dir", f"runs/{run.name}", *precision, "-q"]
        if is_training and how is None:
            planned = self.call([*words, "--plan", "--json"])
            record["plan"] = self.plain(json.loads(planned[1])) if planned[0] == 0 else planned[0]
        elif how is not None:
            limit = [] if how == "kill" else ["--max-minutes", "0"]
            kill_at = run / "checkpoints/step-00000002" if how == "kill" else None
            record["stopped"] = self.call([*words, *limit], kill_at)[0]
            words = [words[0], "--resume", f"runs/{run.name}", "-q"]
        record["exit"], stdout, stderr = self.call(words)
        if record["exit"]:
            print(f"{name}: bertkit {shlex.join(words)}\n{stderr[-1000:]}", file=sys.stderr)
        elif not is_training:
            record["answer"] = self.plain(json.loads(stdout))
        return record | self.left_in(run) | {"seconds": round(time.monotonic() - begin, 1)}

    def left_in(self, run: Path) -> dict[str, Any]:
        """Digests and contents of the files of a run, a suite or an export."""
        found: dict[str, Any] = {}
        for path in sorted(path for path in run.rglob("*") if path.is_file()):
            name = path.relative_to(run).as_posix()
            if "checkpoints/step-" in name:
                if path.name == "weights.safetensors" and path.parent == max(path.parents[1].glob("step-*")):
                    found[name] = tensors_digest(path.read_bytes())
            elif path.suffix == ".safetensors" or "predictions/" in name:
                found[name] = hashlib.sha256(path.read_bytes()).hexdigest()
            elif path.name == "metrics.jsonl":
                found[name] = [self.plain(json.loads(line)) for line in path.read_text().splitlines()]
            elif path.name == "results.json":
                found[name] = self.plain(json.loads(path.read_text()))
        return {"files": found}

    def message(self, command: str) -> dict[str, Any]:
        """The exit code and the last lines of the message about a bad input."""
        code, _, stderr = self.call([*words_of(command), "-q"])
        return {"exit": code, "message": self.plain(stderr.strip().splitlines()[-3:])}


def words_of(command: str) -> list[str]:
    """The words of a command with its groups and settings expanded."""
    while "$" in command:
        command = Template(command).substitute(GROUPS)
    parted = (["--set", word] if re.match(r"[a-z][\w.]*=", word) else [word] for word in shlex.split(command))
    return [word for words in parted for word in words]


def tensors_digest(data: bytes) -> str:
    """The digest of the tensors of a safetensors file, for any tensor names."""
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    header.pop("__metadata__", None)
    tensors = []
    for each in header.values():
        first, end = (start + offset for offset in each["data_offsets"])
        tensors.append(f"{each['dtype']} {each['shape']} {hashlib.sha256(data[first:end]).hexdigest()}")
    return hashlib.sha256("\n".join(sorted(tensors)).encode()).hexdigest()


def cut_data(data: Path, folder: Path) -> None:
    """Excerpts of each text and task, in the files that the cases name."""

    def head(source: Path, target: str, lines: int) -> None:
        opened = lzma.open if source.suffix == ".xz" else open
        (folder / target).parent.mkdir(parents=True, exist_ok=True)
        with opened(source, "rt", encoding="utf-8") as file:
            text = "".join(line for _, line in zip(range(lines), file, strict=False))
        (folder / target).write_text(text, encoding="utf-8")

    head(next((data / "text").glob("wikipedia-dev*")), "text.txt", 600)
    head(data / "babylm/dev/simple_wiki.dev.txt.xz", "simple.txt", 300)
    for split, lines in {"train": 65, "dev": 33}.items():
        for task in ("MRPC", "RTE", "STS-B", "CoLA", "SST-2"):
            head(data / f"glue/{task}/{split}.tsv", f"tasks/{task}/{split}.tsv", lines)
        for file in sorted((data / "choice/race" / split).iterdir())[: lines // 16]:
            head(file, f"tasks/RACE/{split}/{file.name}", 10_000)
        rows = [line.split("\t") for line in (folder / f"tasks/SST-2/{split}.tsv").read_text().splitlines()[1:]]
        with (folder / f"reviews-{split}.csv").open("w", newline="") as table:
            csv.writer(table).writerows([("review", "stars"), *((text, f"{label} stars") for text, label in rows)])
    for split, lines in {"train": 800, "testa": 300, "testb": 300}.items():
        head(data / f"conll2003/eng.{split}", f"tasks/CoNLL-2003/eng.{split}", lines)
    head(data / "choice/codah.tsv", "tasks/CODAH/codah.tsv", 100)
    articles = json.loads((data / "squad/xquad-en-v1.1.json").read_text())["data"]
    (folder / "tasks/SQuAD").mkdir()
    for split, article in zip(("train", "dev"), articles, strict=False):
        few = {"version": "1.1", "data": [{**article, "paragraphs": article["paragraphs"][:2]}]}
        (folder / f"tasks/SQuAD/{split}-v1.1.json").write_text(json.dumps(few))


def read_by(name: str) -> list[str]:
    """The cases whose runs a case reads."""
    words = shlex.join(words_of(CASES[name]))
    return sorted({other for other in re.findall(r"runs/([\w-]+)", words) if other in CASES} - {name})


def record(options: argparse.Namespace) -> int:
    """Run the cases and write the records after each of them."""
    out: Path = options.out.resolve()
    place = Place(out.with_suffix(".runs"), options.python, options.source)
    done: dict[str, Any] = {"cases": {}, "messages": {}}
    if options.add and out.exists():
        done = json.loads(out.read_text())
    else:
        shutil.rmtree(place.folder, ignore_errors=True)
        cut_data(options.data, place.folder)
    wanted, left = set[str](), list(options.names or CASES)
    while left:
        wanted.add(left[-1])
        left += [other for other in read_by(left.pop()) if other not in wanted]

    def job(name: str, how: str | None, before: list[Future[None]]) -> None:
        for each in before:
            each.result()
        label = f"{name}-resumed" if how else name
        if done["cases"].get(label, {"exit": None})["exit"] != 0:
            found = done["cases"][label] = place.case(name, how)
            print(f"{label:24} {found['seconds']:6.1f} s  exit {found['exit']}", flush=True)
            out.write_text(json.dumps(done, indent=1) + "\n")

    jobs: dict[str, Future[None]] = {}
    with ThreadPoolExecutor(options.jobs) as pool:
        for name in (name for name in CASES if name in wanted):
            before = [jobs[other] for other in read_by(name)]
            jobs[name] = pool.submit(job, name, None, before)
            if name in STOPPED:
                jobs[f"{name}-resumed"] = pool.submit(job, name, STOPPED[name], before)
    for each in jobs.values():
        each.result()
    if not options.names:
        done["messages"] = {label: place.message(command) for label, command in MESSAGES.items()}
    out.write_text(json.dumps(done, indent=1) + "\n")
    return 0


def differences(one: Any, other: Any, where: str = "") -> Iterator[str]:
    """Where two documents differ, and how."""
    if isinstance(one, dict) and isinstance(other, dict):
        for key in sorted({*one, *other} - {"seconds"}):
            yield from differences(one.get(key), other.get(key), f"{where}/{key}")
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for number, pair in enumerate(zip(one, other, strict=True)):
            yield from differences(*pair, f"{where}[{number}]")
    elif one != other:
        yield f"    {where}: {str(one)[:100]} | {str(other)[:100]}"


def compare(options: argparse.Namespace) -> int:
    """Print case by case whether two records are identical; returns 1 if one of them is not."""
    one, other = (json.loads(path.read_text()) for path in (options.one, options.other))
    names = list({**one["cases"], **other["cases"]})
    changed = 0
    for name in names:
        pair = [each["cases"].get(name, "not recorded") for each in (one, other)]
        found = list(differences(*pair))
        print("\n".join([f"{name:24} {f'{len(found)} differ' if found else 'identical'}", *found[: options.show]]))
        changed += bool(found)
    messages = list(differences(one["messages"], other["messages"]))
    print("\n".join([f"messages, for information: {len(messages)} differ", *messages]))
    print(f"{changed} of {len(names)} cases differ")
    return int(changed > 0)


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    writer = commands.add_parser("record", help="run the cases and write FILE.json")
    writer.add_argument("names", nargs="*", metavar="NAME", help=f"cases (default: all of {', '.join(CASES)})")
    writer.add_argument("--data", type=Path, required=True, metavar="DIR", help="real text and tasks")
    writer.add_argument("--out", type=Path, required=True, metavar="FILE.json")
    writer.add_argument("--python", default=sys.executable, help="interpreter that has the requirements")
    writer.add_argument("--source", type=Path, metavar="DIR", help="folder of the package (default: the installed one)")
    writer.add_argument("--jobs", type=int, default=1, metavar="N", help="cases at a time (default: 1)")
    writer.add_argument("--add", action="store_true", help="keep what FILE.json has, and its runs")
    writer.set_defaults(run=record)
    reader = commands.add_parser("compare", help="say which cases differ; exit code 1 if one does")
    reader.add_argument("one", type=Path, metavar="A.json")
    reader.add_argument("other", type=Path, metavar="B.json")
    reader.add_argument("--show", type=int, default=5, metavar="N", help="differences shown of a case (default: 5)")
    reader.set_defaults(run=compare)
    options = parser.parse_args()
    if unknown := set(getattr(options, "names", ())) - set(CASES):
        parser.error(f"no such case: {', '.join(sorted(unknown))}")
    return int(options.run(options))


if __name__ == "__main__":
    sys.exit(main())
