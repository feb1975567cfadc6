"""ESM-2: an encoder of proteins, one token per residue, with pre-norm layers, rotary positions and token dropout.

Lin et al. 2023, Science 379:1123 (bioRxiv 2022.07.20.500902), supplement A.1; details as in facebookresearch/esm,
esm/model/esm2.py, and the Hub's class. Layers are BERT's with the norms before the sub-layers and one at the end;
positions and the masked-LM head are those of eurobert.py and roberta.py. There is no norm on the embeddings.

Token dropout: the embeddings of [MASK] are zero, and the others of a sequence are multiplied by (1 - 0.12) / (1 - s),
where s is the share of [MASK] in that sequence and 0.12 the share in pretraining. So a sequence without masks, as tasks
have, is scaled by 0.88. The released code divides by zero if a sequence has only masks; here its embeddings are zero.

Quirk: the published weights were trained in float16, and so were the frequencies of their rotary positions, which files
contain; they are kept as they are there, since computing them again changes angles by up to 0.16 radians at 1,000
residues.

Hub: the classifier of contacts between residues (`contact_head`), a logistic regression on attention maps, is not read
and not written: training changes the maps. ESM-1b and ESM-1v, with a table of positions, and ESMFold are refused. The
Hub has no classes for answers and multiple choice.

Shapes: T packed tokens, B sequences, D width, H head width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from typing import Any, ClassVar, Literal, Self

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from bertkit.data.batch import PackedBatch
from bertkit.models.attention.rotary import RotaryTable, require_even_heads, rotary_frequencies
from bertkit.models.encoder import EncoderConfig, TransformerConfig
from bertkit.models.families.bert import LAYER_NAMES, bert_layers
from bertkit.models.families.roberta import roberta_heads
from bertkit.models.families.rotary_encoder import RotaryAttention, RotaryEncoder
from bertkit.models.heads import HeadPlan
from bertkit.models.layers import PreNormLayer
from bertkit.models.operators.word_embedding import WordEmbedding
from bertkit.models.recorder import Scope
from bertkit.models.weights import Names
from bertkit.text.tokenizer import Tokenizer

_LAYER = "encoder.layer.{n}."
_ROTARY = _LAYER + "attention.self.rotary_embeddings"
_FREQUENCIES = ".rotary_embeddings.inv_freq"
_MASKED_IN_TRAINING = 0.15 * 0.8


class EsmConfig(TransformerConfig):
    """ESM-2; defaults are those of the smallest model, with 8M parameters."""

    family: Literal["esm"] = "esm"
    hidden_size: int = Field(320, ge=1, description="Width D of the hidden states.")
    num_hidden_layers: int = Field(6, ge=1, description="Number of layers.")
    num_attention_heads: int = Field(20, ge=1, description="Attention heads per layer; must divide hidden_size.")
    intermediate_size: int = Field(1280, ge=1, description="Width of the feed-forward layer.")
    hidden_act: Literal["gelu"] = Field("gelu", description="Activation of the feed-forward layers and the head.")
    hidden_dropout_prob: float = Field(0.0, ge=0, lt=1, description="Dropout on sub-layer outputs.")
    attention_probs_dropout_prob: float = Field(0.0, ge=0, lt=1, description="Dropout on attention probabilities.")
    max_position_embeddings: int = Field(1026, ge=1, description="Maximum sequence length in tokens.")
    layer_norm_eps: float = Field(1e-5, gt=0, description="Epsilon added to the variance in layer normalisation.")
    rope_theta: float = Field(10_000.0, gt=0, description="Base theta of the rotary positions.")
    token_dropout: bool = Field(
        True,
        description="Whether masked tokens have an embedding of zero, and the others of their sequence are scaled.",
    )

    live_fields: ClassVar[frozenset[str]] = frozenset({"token_dropout"})
    hub_prefix: ClassVar[str] = "esm"
    classes: ClassVar[str] = "Esm"
    truncates_weights: ClassVar[bool] = False
    pooler_hub_name: ClassVar[str | None] = "esm.pooler.dense"
    default_pad_id: ClassVar[int] = 1
    hub_defaults: ClassVar[Mapping[str, Any]] = {
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "intermediate_size": 3072,
        "hidden_dropout_prob": 0.1,
        "attention_probs_dropout_prob": 0.1,
        "layer_norm_eps": 1e-12,
        "token_dropout": False,
    }
    hub_fixed: ClassVar[Mapping[str, Any]] = {
        **EncoderConfig.hub_fixed,
        "position_embedding_type": "rotary",
        "tie_word_embeddings": True,
    }
    # The class ignores the table of positions in the published files, too.
    hub_ignored: ClassVar[tuple[str, ...]] = (
        *EncoderConfig.hub_ignored,
        ".position_embeddings.weight",
        ".contact_head.regression.weight",
        ".contact_head.regression.bias",
    )

    def model_post_init(self, context: Any) -> None:
        super().model_post_init(context)
        require_even_heads(self.hidden_size, self.num_attention_heads)

    @cached_property
    def mask_id(self) -> int:
        """The id of [MASK]: that of the config.json from which the settings were read, or of the vocabulary. It is no
        setting: a recipe's model has that of its tokenizer."""
        return 32

    def with_mask(self, mask_id: int) -> Self:
        """The same settings with this id of [MASK]."""
        config = self.model_copy()
        config.__dict__["mask_id"] = mask_id  # as cached_property keeps it: no part of comparisons and dumps
        return config

    @property
    def frequencies(self) -> Tensor:
        """The angle that a pair of dimensions is rotated by for each position, (H/2,)."""
        return rotary_frequencies(self.hidden_size // self.num_attention_heads, self.rope_theta)

    def build(self, vocab_size: int, *, pad_id: int = 1) -> Esm:
        return Esm(self, vocab_size, pad_id=pad_id)

    def heads(self) -> dict[str, HeadPlan]:
        rate = self.hidden_dropout_prob
        return roberta_heads(self.classes, norm_eps=self.layer_norm_eps, dropout_rate=rate, choice_dropout_rate=rate)

    @classmethod
    def from_hub(cls, contents: Mapping[str, Any]) -> Self:
        if contents.get("is_folding_model"):
            raise ValueError("is_folding_model is true: ESMFold is not supported, only its language model ESM-2")
        if contents.get("position_embedding_type", "absolute") != "rotary" or contents.get("emb_layer_norm_before"):
            raise ValueError(
                "only ESM-2 is supported, which has position_embedding_type 'rotary' and no emb_layer_norm_before;"
                " ESM-1b and ESM-1v have a table of positions"
            )
        others = {key: value for key, value in contents.items() if key != "hidden_act"}  # which the class does not read
        config, mask_id = super().from_hub(others), contents.get("mask_token_id")
        return config if mask_id is None else config.with_mask(mask_id)

    def to_hub(self) -> dict[str, Any]:
        return {**super().to_hub(), "position_embedding_type": "rotary"}

    def from_older_files(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """With the frequencies of the first layer alone: files repeat them in every layer, transformers 5 names them
        otherwise, and some files have none."""
        stored = {name: tensor for name, tensor in tensors.items() if f".{name}".endswith(_FREQUENCIES)}
        found = {name: tensor for name, tensor in tensors.items() if name not in stored}
        prefix = f"{self.hub_prefix}." if any(name.startswith(f"{self.hub_prefix}.") for name in found) else ""
        name = f"{prefix}{_ROTARY.format(n=0)}.inv_freq"
        return {**found, name: next(iter(stored.values()), self.frequencies).float()}


class Esm(RotaryEncoder):
    """ESM-2's encoder.

    Attributes:
        inv_freq: the angle per position of each pair of dimensions, (H/2,), under the Hub's name.
        mask_id: the id of [MASK].
    """

    config: EsmConfig
    padded_tables: ClassVar[tuple[str, ...]] = ("word",)  # as in the released code
    hub_names: ClassVar[Names] = {
        **LAYER_NAMES,
        "": _ROTARY.format(n=0),
        "word": "embeddings.word_embeddings",
        "layers.{n}.attention_norm": _LAYER + "attention.LayerNorm",
        "layers.{n}.feed_forward_norm": _LAYER + "LayerNorm",
        "norm": "encoder.emb_layer_norm_after",
    }
    inv_freq: Tensor

    def __init__(self, config: EsmConfig, vocab_size: int, *, pad_id: int) -> None:
        super().__init__(config, width=config.hidden_size, vocab_size=vocab_size)
        self.head_width = config.hidden_size // config.num_attention_heads
        self.pad_id = pad_id
        self.mask_id = config.mask_id
        self.register_buffer("inv_freq", config.frequencies)
        self.word = WordEmbedding(vocab_size, config.hidden_size)
        self.layers = bert_layers(
            PreNormLayer,
            config,
            norm_eps=config.layer_norm_eps,
            attention=partial(RotaryAttention, bias=True),
        )
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def read_vocabulary(self, tokenizer: Tokenizer) -> None:
        if "mask" in tokenizer.roles:
            self.mask_id = tokenizer.mask_id
            self.config = self.config.with_mask(self.mask_id)

    @torch.no_grad()
    def finish_initialisation(self) -> None:
        super().finish_initialisation()
        self.inv_freq.copy_(self.config.frequencies)

    def hub_copies(self) -> Names:
        """The frequencies, which files have in every layer."""
        first = f"{_ROTARY.format(n=0)}.inv_freq"
        return {f"{_ROTARY.format(n=number)}.inv_freq": first for number in range(1, len(self.layers))}

    def tables(self, batch: PackedBatch) -> Sequence[RotaryTable]:
        return [RotaryTable.of(batch.positions_T, self.inv_freq)] * len(self.layers)

    def embed(self, batch: PackedBatch, scope: Scope) -> Tensor:
        """(T, D). Point: `hook_embed`, before token dropout."""
        word_TD = scope.tap("hook_embed", self.word(batch.ids_T))
        return word_TD * self._scale_T1(batch).to(word_TD.dtype) if self.config.token_dropout else word_TD

    def _scale_T1(self, batch: PackedBatch) -> Tensor:
        """The factor of each token's embedding: zero for [MASK], and one per sequence for all others."""
        token_T, text_T = batch.ids_T != self.pad_id, batch.ids_T != self.mask_id  # exported graphs read padding
        tokens_B, text_B = (self._counted_B(each_T, batch) for each_T in (token_T, token_T & text_T))
        factor_B = (1 - _MASKED_IN_TRAINING) * tokens_B.float() / text_B.clamp(min=1)
        # torch.onnx cannot export repeat_interleave, and a graph's bucketize counts wrongly.
        bounds_B1 = batch.sequences.cu_seqlens_B1.long()
        begins_T1 = batch.ids_T.new_zeros(batch.num_tokens + 1)
        sequence_T1 = begins_T1.index_add(0, bounds_B1, torch.ones_like(bounds_B1)).cumsum(0) - 1
        return (factor_B[sequence_T1[:-1]] * text_T)[:, None]

    @staticmethod
    def _counted_B(flag_T: Tensor, batch: PackedBatch) -> Tensor:
        """How many tokens of each sequence are flagged, (B,)."""
        before_T1 = functional.pad(flag_T.long().cumsum(0), (1, 0))
        return before_T1[batch.sequences.cu_seqlens_B1.long()].diff()

    def to_hub(self) -> dict[str, Any]:
        return {**super().to_hub(), "pad_token_id": self.pad_id, "mask_token_id": self.mask_id}
