"""NeoBERT: pre-norm with root mean squares, rotary positions, gated feed-forward layers, and no biases in its layers.

Le Breton et al. 2025, arXiv:2502.19587, section 3; details as in chandar-lab/NeoBERT, src/neobert/model/model.py. The
output projection is not tied to the word embeddings.

Quirks: `intermediate_size` is the width of an ungated layer with as many weights; the gated one is two thirds as wide,
rounded up to a multiple of 8. Initial weights are uniform, in the classifier normal. The rotated pairs of dimensions
are neighbours on the Hub; here they are i and i + H/2, so the rows of queries and keys are in another order.

Hub: the classes are published with the checkpoints (`trust_remote_code`), for masked LM and sequence classification;
the names of the other heads follow their pattern.

Shapes: T packed tokens, D width, F width of the gated layer, N heads, H head width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, Self

import torch
from pydantic import Field
from torch import Tensor, nn

from bertkit.models.attention.rotary import require_even_heads
from bertkit.models.encoder import EncoderConfig, TransformerConfig
from bertkit.models.families.bert import bert_layers
from bertkit.models.families.rotary_encoder import RmsNormRotaryEncoder, RotaryAttention
from bertkit.models.heads import HeadPlan, UntiedVocabularyHead, dense_classifier_plan
from bertkit.models.layers import Activation, GatedFeedForward, rms_norm_layer
from bertkit.models.weights import Names, TensorLayout, attention_names, stacked

_LAYER = "transformer_encoder.{n}."
_MULTIPLE = 8
_GATED = "swiglu"


class NeoBertConfig(TransformerConfig):
    """NeoBERT; defaults are those of the released model."""

    family: Literal["neobert"] = "neobert"
    num_hidden_layers: int = Field(28, ge=1, description="Number of layers.")
    intermediate_size: int = Field(
        3072,
        ge=1,
        description="Width of a feed-forward layer without a gate; that with a gate is two thirds as wide, rounded up"
        " to a multiple of 8.",
    )
    hidden_act: Activation = Field("silu", description="Activation of the feed-forward layers' gate.")
    hidden_dropout_prob: float = Field(0.0, ge=0, lt=1, description="Dropout on sub-layer outputs.")
    attention_probs_dropout_prob: float = Field(0.0, ge=0, lt=1, description="Dropout on attention probabilities.")
    max_position_embeddings: int = Field(4096, ge=1, description="Maximum sequence length in tokens.")
    norm_eps: float = Field(1e-5, gt=0, description="Epsilon added to the mean square in normalisation.")
    classifier_dropout: float = Field(0.1, ge=0, lt=1, description="Dropout before a classifier's linear maps.")
    initializer_range: float = Field(
        0.02,
        gt=0,
        description="Bound of the uniform initial weights, and standard deviation of a classifier's normal ones.",
    )

    rope_theta: ClassVar[float] = 10_000.0
    hub_prefix: ClassVar[str] = "model"
    classes: ClassVar[str] = "NeoBERT"
    base_class_ending: ClassVar[str] = ""
    hub_keys: ClassVar[Mapping[str, str]] = {
        "hidden_dropout_prob": "dropout",
        "max_position_embeddings": "max_length",
        "initializer_range": "decoder_init_range",
    }
    hub_defaults: ClassVar[Mapping[str, Any]] = {"norm_eps": 1e-6, "max_position_embeddings": 1024}
    hub_fixed: ClassVar[Mapping[str, Any]] = {
        **EncoderConfig.hub_fixed,
        "rms_norm": True,
        "rope": True,
        "ngpt": False,
    }

    def model_post_init(self, context: Any) -> None:
        super().model_post_init(context)
        require_even_heads(self.hidden_size, self.num_attention_heads)

    @property
    def gated_width(self) -> int:
        """F."""
        return -(-int(2 * self.intermediate_size / 3) // _MULTIPLE) * _MULTIPLE

    def build(self, vocab_size: int, *, pad_id: int = 0) -> NeoBert:
        return NeoBert(self, vocab_size)

    def draw(self, name: str, parameter: Tensor, generator: torch.Generator) -> None:
        """Uniform in the encoder and the output projection, else normal."""
        if name.startswith(("encoder.", "masked_lm.")):
            nn.init.uniform_(parameter, -self.initializer_range, self.initializer_range, generator=generator)
        else:
            nn.init.normal_(parameter, std=self.initializer_range, generator=generator)

    def heads(self) -> dict[str, HeadPlan]:
        return {
            "masked_lm": HeadPlan(
                "NeoBERTLMHead",
                lambda shape: UntiedVocabularyHead(shape.width, shape.vocab_size, bias=True),
                {"": "decoder"},
            ),
            "sequence_classification": self._classifier("SequenceClassification"),
            "token_classification": self._classifier("TokenClassification"),
            "span": self._classifier("QuestionAnswering", 2),
            "multiple_choice": self._classifier("MultipleChoice", 1),
        }

    def _classifier(self, task: str, outputs: int | None = None) -> HeadPlan:
        return dense_classifier_plan(
            f"NeoBERTFor{task}",
            activation="tanh",
            dropout_rate=self.classifier_dropout,
            input_dropout_rate=self.classifier_dropout,
            hub=("dense", "classifier"),
            outputs=outputs,
        )

    @classmethod
    def from_hub(cls, contents: Mapping[str, Any]) -> Self:
        """The settings in a config.json, where the activation is named together with the gate."""
        gated = contents.get("hidden_act", _GATED)
        if not isinstance(gated, str) or gated.lower() != _GATED:
            raise ValueError(f"hidden_act is {gated!r:.60}; only {_GATED!r} is supported")
        return super().from_hub({**contents, "hidden_act": "silu"})

    def to_hub(self) -> dict[str, Any]:
        return {**super().to_hub(), "hidden_act": _GATED, "embedding_init_range": self.initializer_range}


class NeoBert(RmsNormRotaryEncoder):
    """NeoBERT's encoder."""

    hub_names: ClassVar[Names] = {
        "word": "encoder",
        "layers.{n}.attention_norm": _LAYER + "attention_norm",
        **attention_names(_LAYER, "query", "key", "value", "wo"),
        "layers.{n}.feed_forward_norm": _LAYER + "ffn_norm",
        "layers.{n}.feed_forward.gate": _LAYER + "ffn.gate",
        "layers.{n}.feed_forward.gated": _LAYER + "ffn.gated",
        "layers.{n}.feed_forward.outer": _LAYER + "ffn.w3",
        "norm": "layer_norm",
    }

    def __init__(self, config: NeoBertConfig, vocab_size: int) -> None:
        layers = bert_layers(
            rms_norm_layer,
            config,
            norm_eps=config.norm_eps,
            attention=RotaryAttention,
            feed_forward=GatedFeedForward,
            inner_width=config.gated_width,
        )
        super().__init__(config, vocab_size, layers, norm_eps=config.norm_eps)

    def to_hub(self) -> dict[str, Any]:
        return {**super().to_hub(), "tie_word_embeddings": False}

    def tensor_layouts(self) -> Sequence[TensorLayout]:
        """One matrix has queries, keys and values head by head, another both maps of a gated layer."""
        parts = tuple(f"{_LAYER}{name}.weight" for name in ("query", "key", "value"))
        gated = stacked(f"{_LAYER}ffn.w12.weight", [f"{_LAYER}ffn.{name}.weight" for name in ("gate", "gated")])
        return [TensorLayout(f"{_LAYER}qkv.weight", parts, self._split_heads, self._joined_heads), gated]

    def _split_heads(self, whole: Tensor) -> Sequence[Tensor]:
        by_head_N3HD = whole.reshape(-1, 3, self.head_width, whole.shape[1])
        query_NHD, key_NHD, value_NHD = by_head_N3HD.unbind(1)
        return [part.flatten(0, 1) for part in (_apart(query_NHD), _apart(key_NHD), value_NHD)]

    def _joined_heads(self, parts: Sequence[Tensor]) -> Tensor:
        query_NHD, key_NHD, value_NHD = (part.reshape(-1, self.head_width, part.shape[1]) for part in parts)
        return torch.stack([_together(query_NHD), _together(key_NHD), value_NHD], dim=1).flatten(0, 2)


def _apart(rows_NHD: Tensor) -> Tensor:
    """Each head's rows 0, 2, 4, ..., then 1, 3, 5, ..."""
    return torch.cat([rows_NHD[:, ::2], rows_NHD[:, 1::2]], dim=1)


def _together(rows_NHD: Tensor) -> Tensor:
    """The inverse of `_apart`."""
    return torch.stack(rows_NHD.chunk(2, dim=1), dim=2).flatten(1, 2)
