"""docs/first-hour.md: every command runs on small data of the same shape and prints the shown lines.

A shown line is found by its first word, a JSON line by its keys. Models and steps are shrunk.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.pretraining.test_shipped import SHRUNK
from tests.tasks.tiny_task import write_model
from tests.training.tiny_run import NOUNS, VERBS, write_text

pytestmark = pytest.mark.usefixtures("drawn_figures")

PAGE = (Path(__file__).parents[1] / "docs" / "first-hour.md").read_text(encoding="utf-8")
STEPS = re.findall(r"^```bash\n(.*?)^```\n(?:\n```text\n(.*?)^```$)?", PAGE, flags=re.DOTALL | re.MULTILINE)
ORIGINS = ("japanese", "norse", "slavic", "chinese")


def write_data(directory: Path) -> None:
    """The page's files: tales with an origin and a page, later ones, words with a time and one empty text, texts."""
    rows = [f"the {NOUNS[n % 10]} {VERBS[n % 6]} a {NOUNS[n % 7]},{ORIGINS[n % 4]}" for n in range(160)]
    tales = [f"{row},page-{n // 4 % 20}" for n, row in enumerate(rows)]
    (directory / "tales.csv").write_text("\n".join(["text,origin,page", *tales]) + "\n")
    (directory / "later.csv").write_text("\n".join(["text,origin", *rows[:24]]) + "\n")
    (directory / "new.txt").write_text("the cat reads\nthe list keeps a word\nthe word\n")
    times = [f"the {NOUNS[n % 10]};{NOUNS[n % 7]};{250 + n % 9}.5;{n // 3}" for n in range(60)]
    times[20] = ";word;250.5;6"
    (directory / "reading.csv").write_text("\n".join(["before;word;milliseconds;sentence_id", *times]) + "\n")
    write_text(directory / "english.txt", documents=300)
    write_text(directory / "celtic.txt", documents=200, seed=3)
    with (directory / "celtic.txt").open("a", encoding="utf-8") as file:
        file.write("\n" + "The wizard enchants a castle.\n" * 20)
    write_model(directory / "minilm", max_tokens=128)


def shrunk(words: list[str], *, new: bool) -> list[str]:
    """The command with fewer steps and tokens and, if the model is new, smaller sizes."""
    if words[0] != "pretrain":
        return words
    words = ["2" if before == "--add-tokens" else word for before, word in zip(["", *words], words, strict=False)]
    sizes = [word for key, value in SHRUNK.items() for word in ("--set", f"{key}={value}")] if new else []
    return [*words, *sizes, "--max-steps", "4"]


def expected(shown: str) -> list[str]:
    """The first words of the lines shown on a page, skipping omitted parts (`...`)."""
    return [line.split()[0] for line in shown.splitlines() if line.strip() and not line.startswith("...")]


@pytest.mark.slow
def test_the_page_runs_as_it_stands(
    bertkit: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_data(tmp_path)
    ran = set()
    assert sum(bool(shown) for _, shown in STEPS) >= 10
    for block, shown in STEPS:
        said: list[str] = []
        for line in block.splitlines():
            command, _, comment = line.partition("  # ")
            words = shlex.split(command)
            assert words[0] == "bertkit", line
            code = int((re.findall(r"exit code (\d+)", comment) or ["0"])[0])
            done = bertkit(*shrunk(words[1:], new="quickstart" in words))
            assert done.code == code, (line, done.stderr)
            said += done.stdout.splitlines() + done.stderr.splitlines()
            ran.add(words[1])
        first_words = {line.split()[0] for line in said if line.strip()}
        for word, line in zip(expected(shown), (each for each in shown.splitlines() if each.strip()), strict=False):
            if word.startswith("{"):
                keys = json.loads(next(each for each in said if each.startswith("{"))).keys()
                assert json.loads(line).keys() == keys, (block, line)
            elif not re.search(r"\d|-[0-9a-f]{8}$", word):
                assert word in first_words, (block, line, said)
    assert {"finetune", "predict", "eval", "pretrain", "fill", "runs", "cache"} <= ran
    (script,) = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    names: dict[str, Any] = {}
    exec(script, names)  # the page's own lines
    assert [row["prediction"] in ORIGINS for row in names["found"]] == [True]
    assert names["vectors"].shape[0] == 2
