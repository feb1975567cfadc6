"""UltraBERT: EuroBERT's layers, two of three of which attend to nearby tokens only, as in ModernBERT.

Details as in the Hub's class. Siblings: eurobert.py, whose layers are all global; modernbert.py, whose global layer is
the first of three, not the last. The masked-LM head has two maps with an activation each before the vocabulary.

Hub: `transformers` has this family since version 5. Files published before name the encoder `ultrabert`, and give
windows and rotary bases layer by layer; both forms are read, the newer one is written. Multiple choice has no class on
the Hub.

Shapes: T packed tokens, M selected tokens, D width, V vocabulary.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Literal, Self

import torch
from pydantic import Field
from torch import Tensor, nn

from bertkit.data.batch import PackedBatch
from bertkit.models.attention.rotary import RotaryTable, rope_theta_in, rope_to_hub
from bertkit.models.families.bert import bert_layer
from bertkit.models.families.eurobert import EuroBert, EuroBertLikeConfig
from bertkit.models.families.layer_types import LayerType, every_so_many, require_type_of_each, unread_without
from bertkit.models.families.rotary_encoder import LocalRotaryAttention
from bertkit.models.heads import HeadPlan, HeadShape, Summary, classifier_plan
from bertkit.models.layers import GatedFeedForward, rms_norm_layer
from bertkit.models.operators.gelu import gelu_by_tanh
from bertkit.models.operators.matmul import Linear
from bertkit.models.operators.vocabulary import VocabularyHead, VocabularyProjection
from bertkit.settings import UnreadKey

_GLOBAL_EVERY = 3
_BASES: dict[LayerType, str] = {"full_attention": "global_rope_theta", "sliding_attention": "local_rope_theta"}
_OLDER_NAMES = ((r"^ultrabert\.", "model."), (r"^cls\.", "head.decoder."))


class UltraBertConfig(EuroBertLikeConfig):
    """UltraBERT; defaults have BERT base's sizes."""

    family: Literal["ultrabert"] = "ultrabert"
    max_position_embeddings: int = Field(32_768, ge=1, description="Maximum sequence length in tokens.")
    norm_eps: float = Field(1e-6, gt=0, description="Epsilon added to the mean square in normalisation.")
    sliding_window: int = Field(128, ge=1, description="Attention of local layers: this many tokens on either side.")
    layer_types: tuple[LayerType, ...] | None = Field(
        None, description="Attention type of each layer; null: every third layer is global."
    )
    global_rope_theta: float = Field(
        2_560_000.0, gt=0, description="Base theta of the rotary positions in global layers."
    )
    local_rope_theta: float = Field(10_000.0, gt=0, description="Base theta of the rotary positions in local layers.")
    prediction_head_size: int = Field(768, ge=1, description="Width between the two maps of the masked-LM head.")
    classifier_pooling: Literal["cls", "mean"] = Field(
        "cls", description="Pooling for a sequence head: the first token or the mean."
    )
    classifier_dropout: float = Field(0.0, ge=0, lt=1, description="Dropout before a task's classifier.")

    live_fields: ClassVar[frozenset[str]] = frozenset(_BASES.values())
    classes: ClassVar[str] = "Ultrabert"
    hub_defaults: ClassVar[Mapping[str, Any]] = {
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "intermediate_size": 11_008,
    }

    def model_post_init(self, context: Any) -> None:
        super().model_post_init(context)
        require_type_of_each(self.layer_types, self.num_hidden_layers)

    def unread_keys(self, recipe: Any) -> Iterator[UnreadKey]:
        yield from unread_without(self.kinds, window="sliding_window")

    @property
    def kinds(self) -> tuple[LayerType, ...]:
        """The attention type of each layer."""
        if self.layer_types is not None:
            return self.layer_types
        return every_so_many(self.num_hidden_layers, _GLOBAL_EVERY, first=1)

    def build(self, vocab_size: int, *, pad_id: int = 0) -> UltraBert:
        return UltraBert(self, vocab_size)

    def heads(self) -> dict[str, HeadPlan]:
        summary: Summary = "first" if self.classifier_pooling == "cls" else "mean"

        def classifier(task: str, outputs: int | None = None) -> HeadPlan:
            rate = self.classifier_dropout
            return classifier_plan(f"UltrabertFor{task}", dropout_rate=rate, outputs=outputs, summary=summary)

        return {
            "masked_lm": HeadPlan(
                "UltrabertForMaskedLM",
                lambda shape: UltraBertHead(shape, self.prediction_head_size, tied=self.tie_word_embeddings),
                {"inner": "head.linear1", "outer": "head.linear2", "": "head.decoder"},
                decoder="head.decoder" if self.tie_word_embeddings else None,
            ),
            "sequence_classification": classifier("SequenceClassification"),
            "token_classification": classifier("TokenClassification"),
            "span": classifier_plan("UltrabertForQuestionAnswering", dropout_rate=0.0, hub="qa_outputs", outputs=2),
            "multiple_choice": classifier("MultipleChoice", 1),
        }

    @classmethod
    def from_hub(cls, contents: Mapping[str, Any]) -> Self:
        """The settings in both versions of config.json."""
        known = dict(contents)
        windows = contents.get("attention_windows")
        if windows is not None and contents.get("layer_types") is None:
            sizes = {window for window in windows if window}
            if len(sizes) > 1:
                raise ValueError(f"attention_windows is {windows!r:.60}; only one size of windows is supported")
            known["layer_types"] = ["sliding_attention" if window else "full_attention" for window in windows]
            known |= {"sliding_window": sizes.pop()} if sizes else {}
        rope = contents.get("rope_parameters")
        if rope is not None:
            for kind, name in _BASES.items():
                known |= rope_theta_in(rope.get(kind), f"rope_parameters.{kind}", field=name)
            return super().from_hub(known)
        config = super().from_hub(known)
        bases = contents.get("rope_theta")
        if bases is None:
            return config
        by_name: dict[str, float] = {}
        for kind, base in zip(config.kinds, bases, strict=False):
            if by_name.setdefault(_BASES[kind], base) != base:
                raise ValueError(f"rope_theta is {bases!r:.60}; layers of one type must have the same base")
        return config.model_copy(update={name: float(base) for name, base in by_name.items()})

    def to_hub(self) -> dict[str, Any]:
        contents = super().to_hub()
        rope = {kind: rope_to_hub(contents.pop(name)) for kind, name in _BASES.items()}
        return {**contents, "layer_types": list(self.kinds), "rope_parameters": rope}

    def from_older_files(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """The tensors of a file whose encoder is `ultrabert` under the names of `transformers`; others are
        unchanged."""
        found = {}
        for old_name, tensor in tensors.items():
            name = old_name
            for pattern, replacement in _OLDER_NAMES:
                name = re.sub(pattern, replacement, name)
            found[name] = tensor
        return found


class UltraBertHead(VocabularyHead):
    """Two maps, each followed by GELU, and the vocabulary; none has a bias.

    Args:
        shape: sizes.
        inner_width: between the two maps.
        tied: whether the output embeddings are the word embeddings.
    """

    def __init__(self, shape: HeadShape, inner_width: int, *, tied: bool) -> None:
        super().__init__()
        self.inner = Linear(shape.width, inner_width, bias=False)
        self.outer = Linear(inner_width, shape.width, bias=False)
        self.weight = None if tied else nn.Parameter(torch.empty(shape.vocab_size, shape.width))

    def project(self, hidden_MD: Tensor, word_embedding_VE: Tensor) -> VocabularyProjection:
        transformed_MD = gelu_by_tanh(self.outer(gelu_by_tanh(self.inner(hidden_MD))))
        return VocabularyProjection(transformed_MD, word_embedding_VE if self.weight is None else self.weight, None)


class UltraBert(EuroBert):
    """UltraBERT's encoder."""

    config: UltraBertConfig

    def new_layers(self, config: UltraBertConfig) -> nn.ModuleList:
        def layer(kind: LayerType) -> nn.Module:
            attention = LocalRotaryAttention(
                config.hidden_size,
                config.num_attention_heads,
                each_side=config.sliding_window if kind == "sliding_attention" else None,
                key_value_heads=config.key_value_heads,
                dropout_rate=config.attention_probs_dropout_prob,
                bias=config.attention_bias,
            )
            fed = partial(GatedFeedForward, bias=config.mlp_bias)
            return bert_layer(rms_norm_layer, attention, config, norm_eps=config.norm_eps, feed_forward=fed)

        return nn.ModuleList(map(layer, config.kinds))

    def tables(self, batch: PackedBatch) -> Sequence[RotaryTable]:
        by_kind = {
            kind: RotaryTable(batch.positions_T, self.head_width, getattr(self.config, name))
            for kind, name in _BASES.items()
        }
        return [by_kind[kind] for kind in self.config.kinds]
