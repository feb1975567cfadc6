"""A bidirectional LSTM on a frozen encoder: BERT as a source of features.

Devlin et al. 2019, BERT, arXiv:1810.04805, section 5.3 and table 7: the states of one or several layers, without
fine-tuning, are the input of a randomly initialised two-layer BiLSTM of width 768 before the classifier. The weighted
sum of layers is ELMo's (Peters et al. 2018, arXiv:1802.05365, equation 1), since the BERT paper gives no formula.

This family contains another family's encoder, and no recipe pretrains it: its config.json has the encoder's settings
under `base`, its weight file has the encoder's weights under `features.`. The Hub has no class for it.

Quirks: dropout (before, inside and after the LSTM) is an addition, the paper mentions none; sequence heads read the
mean of the LSTM's states.

Shapes: T packed tokens, B sequences, S longest sequence, D width of the encoder, N layers read, H width of the LSTM.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Literal, Protocol, Self, get_args

import torch
from pydantic import Field
from torch import Tensor, nn

from bertkit.data.batch import PackedBatch
from bertkit.models.conversion.pruning import INNER, pruned_to_hub
from bertkit.models.encoder import Encoder, EncoderConfig
from bertkit.models.families.bilstm import packed_lstm
from bertkit.models.heads import HeadPlan, classifier_plan
from bertkit.models.operators.dropout import Dropout
from bertkit.models.recorder import Recorder, Scope
from bertkit.models.registry import FAMILIES
from bertkit.models.weights import Names, TensorLayout, prefixed

LayerChoice = Literal[
    "embeddings",
    "second-to-last",
    "last",
    "weighted-sum-last-four",
    "concat-last-four",
    "weighted-sum-all",
    "weighted-sum-with-embeddings",
]
"""The rows of table 7, and ELMo's sum, which includes the first layer's input."""

_LAST_FOUR = 4


_STATES: dict[LayerChoice, Callable[[int], range]] = {
    "embeddings": lambda last: range(1),
    "second-to-last": lambda last: range(last - 1, last),
    "last": lambda last: range(last, last + 1),
    "weighted-sum-last-four": lambda last: range(last + 1 - _LAST_FOUR, last + 1),
    "concat-last-four": lambda last: range(last + 1 - _LAST_FOUR, last + 1),
    "weighted-sum-all": lambda last: range(1, last + 1),
    "weighted-sum-with-embeddings": lambda last: range(last + 1),
}
"""Which states are read, as a function of L, from 0 (the embeddings) to L (the last layer)."""
_WITH_EMBEDDINGS = ("embeddings", "weighted-sum-with-embeddings")
assert set(_STATES) == set(get_args(LayerChoice))


class FeatureSource(Protocol):
    """Precomputed features of sequences."""

    def get(self, batch: PackedBatch) -> Tensor | None:
        """The features of a batch, (T, N * D); None if any are missing."""


class FeatureLstmConfig(EncoderConfig):
    """Settings of the LSTM and of the encoder whose states it reads."""

    base: EncoderConfig = Field(description="Configuration of the encoder.")
    layers: LayerChoice = Field(
        "concat-last-four", description="Which of the encoder's states are read, as in table 7 of the BERT paper."
    )
    lstm_width: int = Field(768, ge=1, description="Width H of the LSTM in each direction.")
    lstm_layers: int = Field(2, ge=1, description="Number of LSTM layers.")
    dropout: float = Field(0.1, ge=0, lt=1, description="Dropout before each LSTM layer and before the classifier.")

    model_type: ClassVar[str] = "feature-lstm"
    hub_prefix: ClassVar[str] = "features"
    classes: ClassVar[str] = "FeatureLstm"

    def model_post_init(self, _context: Any) -> None:
        if self.base.model_type not in FAMILIES:
            raise ValueError(f"name: the family {self.base.model_type} has no layers whose states could be read")
        if self.states.start < 1 and self.layers not in _WITH_EMBEDDINGS:
            raise ValueError(
                f"layers: {self.layers} needs {self.base_layers + 1 - self.states.start} layers; the encoder has"
                f" {self.base_layers}"
            )

    @property
    def base_layers(self) -> int:
        """L, the number of layers of the encoder."""
        return int(self.base.model_dump()["num_hidden_layers"])

    @property
    def states(self) -> range:
        """The states that are read: 0 is the embeddings, L the last layer."""
        return _STATES[self.layers](self.base_layers)

    @property
    def is_sum(self) -> bool:
        """Whether the states are summed rather than concatenated."""
        return self.layers.startswith("weighted-sum")

    @property
    def max_tokens(self) -> int:
        return self.base.max_tokens

    @property
    def reads_token_types(self) -> bool:
        return self.base.reads_token_types

    def build(self, vocab_size: int, *, pad_id: int = 0) -> FeatureLstm:
        return FeatureLstm(self, self.base.build(vocab_size, pad_id=pad_id))

    def heads(self) -> dict[str, HeadPlan]:
        def plan(task: str, **settings: Any) -> HeadPlan:
            return classifier_plan(f"FeatureLstmFor{task}", dropout_rate=self.dropout, **settings)

        return {
            "sequence_classification": plan("SequenceClassification", summary="mean"),
            "token_classification": plan("TokenClassification"),
            "span": plan("QuestionAnswering", hub="qa_outputs", outputs=2),
            "multiple_choice": plan("MultipleChoice", outputs=1, summary="mean"),
        }

    @torch.no_grad()
    def draw(self, name: str, parameter: Tensor, generator: torch.Generator) -> None:
        """The LSTM as in torch, equal weights for the layers, everything else as in the encoder's family."""
        if ".lstm." in f".{name}":
            bound = self.lstm_width**-0.5
            parameter.uniform_(-bound, bound, generator=generator)
        elif ".mix." in f".{name}":
            parameter.fill_(1.0 if name.endswith("scale") else 0.0)
        else:
            self.base.draw(name.replace(f".{INNER}.", ".", 1), parameter, generator)

    @classmethod
    def from_hub(cls, contents: Mapping[str, Any]) -> Self:
        base = contents.get(INNER)
        if not isinstance(base, dict) or base.get("model_type") not in FAMILIES:
            raise ValueError(f"{INNER}: expected the encoder's own settings with its model_type; found {base!r}")
        own = {name: contents[name] for name in cls.model_fields if name != INNER and name in contents}
        return cls.model_validate({INNER: FAMILIES[base["model_type"]].from_hub(base), **own})

    def to_hub(self) -> dict[str, Any]:
        return {
            **self.model_dump(mode="json", exclude={INNER}),
            INNER: {**self.base.to_hub(), "model_type": self.base.model_type},
        }


class LayerMix(nn.Module):
    """scale * the sum of softmax(weight)_n * state_n; with equal weights and a scale of 1, the mean."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(layers))
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, states: Tensor) -> Tensor:
        """(T, N * D) to (T, D)."""
        share_N = torch.softmax(self.weight, dim=0)
        mixed_TD = torch.einsum("n,tnd->td", share_N, states.view(states.shape[0], share_N.numel(), -1))
        return self.scale * mixed_TD


class FeatureLstm(Encoder):
    """A frozen encoder and the LSTM that reads it.

    Attributes:
        base: the encoder; always in evaluation mode, so without dropout.
        store: precomputed features; None: compute them each time.
    """

    config: FeatureLstmConfig

    def __init__(self, config: FeatureLstmConfig, base: Encoder) -> None:
        super().__init__(config, width=2 * config.lstm_width, vocab_size=base.vocab_size)
        self.base = base
        read = base.width * len(config.states)
        self.mix = LayerMix(len(config.states)) if config.is_sum else nn.Identity()
        self.dropout = Dropout(config.dropout)
        self.lstm = nn.LSTM(
            base.width if config.is_sum else read,
            config.lstm_width,
            num_layers=config.lstm_layers,
            bidirectional=True,
            dropout=config.dropout if config.lstm_layers > 1 else 0.0,
        )
        self.features_width = read
        self.store: FeatureSource | None = None

    @property
    def hub_names(self) -> Names:  # type: ignore[override]  # a class variable elsewhere; here they depend on the base
        """The encoder's names with its own prefix, and the LSTM's."""
        own = {name: name for name, part in (("mix", self.mix), ("lstm", self.lstm)) if list(part.parameters())}
        return {**prefixed(self.base.hub_names, f"{INNER}.", f"{self._prefix}."), **own}

    @property
    def _prefix(self) -> str:
        return self.base.config.hub_prefix

    @property
    def word_embedding(self) -> nn.Embedding:
        return self.base.word_embedding

    @property
    def max_tokens(self) -> int:
        return self.base.max_tokens

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        self.base.eval()
        return self

    def forward(self, batch: PackedBatch, recorder: Recorder | None = None) -> Tensor:
        """(T, 2 H). Points: the encoder's own, `features.hook_read` (the LSTM's input) and `features.hook_lstm`."""
        features = self.features(batch, recorder)
        scope = Scope(recorder, "features.")
        with torch.autocast(features.device.type, enabled=False):
            read_TD = scope.tap("hook_read", self.mix(features))
            return scope.tap("hook_lstm", packed_lstm(self.lstm, self.dropout(read_TD), batch.sequences.cu_seqlens_B1))

    def features(self, batch: PackedBatch, recorder: Recorder | None = None) -> Tensor:
        """The states that are read, concatenated, (T, N * D), in float32.

        They have a gradient only with a recorder: the encoder is not trained.
        """
        kept = self.store.get(batch) if self.store is not None and recorder is None else None
        if kept is not None:
            return kept.to(batch.ids_T.device)
        points = [_point(state) for state in self.config.states if state < self.config.base_layers]
        relay = _Relay(points, recorder)
        with torch.set_grad_enabled(torch.is_grad_enabled() and recorder is not None):
            last_TD = self.base(batch, relay)
            states = [relay.kept.get(_point(state), last_TD) for state in self.config.states]
            return torch.cat(states, dim=-1).float()

    def with_global_tokens(self, batch: PackedBatch, heads: Sequence[str]) -> PackedBatch:
        return self.base.with_global_tokens(batch, heads)

    def executed_modules(self) -> Iterable[nn.Module]:
        """The LSTM, which is all that training computes per token: features are computed once."""
        return (self.lstm,)

    def to_hub(self) -> dict[str, Any]:
        own = self.base.to_hub()
        gone = pruned_to_hub(self.base)
        return {**own, INNER: {**self.config.to_hub()[INNER], **gone}} if gone else own

    def tensor_layouts(self) -> Sequence[TensorLayout]:
        return [layout.below(f"{self._prefix}.") for layout in self.base.tensor_layouts()]

    def hub_copies(self) -> Names:
        copies = self.base.hub_copies()
        return {f"{self._prefix}.{copy}": f"{self._prefix}.{source}" for copy, source in copies.items()}

    @torch.no_grad()
    def finish_initialisation(self) -> None:
        self.base.finish_initialisation()


class _Relay(Recorder):
    """Keeps some points, after passing all of them through another recorder."""

    def __init__(self, wanted: Collection[str], outer: Recorder | None) -> None:
        super().__init__(wanted)
        self.outer = outer

    def needs(self, point: str) -> bool:
        return super().needs(point) or (self.outer is not None and self.outer.needs(point))

    def needs_within(self, prefix: str) -> bool:
        return super().needs_within(prefix) or (self.outer is not None and self.outer.needs_within(prefix))

    def __call__(self, point: str, tensor: Tensor) -> Tensor:
        return super().__call__(point, tensor if self.outer is None else self.outer(point, tensor))


def _point(state: int) -> str:
    """The recorder point of a state that is not the last: the next layer's input."""
    return f"blocks.{state}.hook_resid_pre"
