"""GPT-BERT: gated attention by content and distance; after each sub-layer, a trained weighted sum of outputs so far.

Charpentier and Samuel 2024, arXiv:2410.24159, section 2; details as in ltgoslo/gpt-bert, pretraining/model_extra.py.
Based on LTG-BERT (Samuel et al. 2023, arXiv:2303.09859, section 2.1): norms without weights before each sub-layer and
inside it, gated feed-forward layers, DeBERTa's distances in a few buckets. GPT-BERT adds a gate on the values and,
after every sub-layer, a weighted sum of its output and all earlier ones (Pagliardini et al. 2024, DenseFormer,
arXiv:2402.02622, section 3). One head predicts the next token, masked or not: objectives/masked_next_token.py and
causal_lm.py.

Quirks: one dropout rate applies to the probabilities, the table of distances and the output of attention. The
feed-forward gate uses GELU's tanh approximation, the attention gate the exact form. Hub: `transformers` has no such
class; names follow the code published with the checkpoints, which keep tables of distances in their files. That code
has only the masked-LM head; the other heads are named in the same style.

Shapes: T packed tokens, D width, F width of the feed-forward layer, N heads, H head width, M selected tokens, R rows of
the table of distances, V vocabulary, K outputs.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, Literal, Self

import torch
from pydantic import Field
from torch import Tensor, nn

from bertkit.data.batch import PackedBatch, PackedSequences
from bertkit.models.attention.disentangled import Distances, SharedPositions
from bertkit.models.attention.self_attention import Mix
from bertkit.models.encoder import EncoderConfig, require_whole_heads
from bertkit.models.heads import Classifier, HeadPlan, TransformedVocabularyHead
from bertkit.models.operators.dropout import Dropout
from bertkit.models.operators.gelu import gelu, gelu_by_tanh
from bertkit.models.operators.matmul import Linear
from bertkit.models.operators.weighted_sum import weighted_sum
from bertkit.models.operators.word_embedding import WordEmbedding
from bertkit.models.recorder import Scope
from bertkit.models.selective_encoder import SelectiveEncoder
from bertkit.models.weights import Names, TensorLayout, attention_names, stacked

_ATTENTION = "attention_layers.{n}."
_FEED_FORWARD = re.compile(r"layers\.(\d+)\.feed_forward\.")


class GptBertConfig(EncoderConfig):
    """GPT-BERT; defaults are those of the base model."""

    family: Literal["gpt-bert"] = "gpt-bert"
    hidden_size: int = Field(768, ge=1, description="Width D of the hidden states.")
    num_hidden_layers: int = Field(12, ge=1, description="Number of layers.")
    num_attention_heads: int = Field(12, ge=1, description="Attention heads per layer; must divide hidden_size.")
    intermediate_size: int = Field(
        2560, ge=1, description="Width of the feed-forward layer; its gate has the same width."
    )
    hidden_dropout_prob: float = Field(
        0.1, ge=0, lt=1, description="Dropout on the embeddings, on what feed-forward layers add, and in the heads."
    )
    attention_probs_dropout_prob: float = Field(
        0.1, ge=0, lt=1, description="Dropout on attention probabilities, on distances, and on what attention adds."
    )
    max_position_embeddings: int = Field(512, ge=2, description="Maximum sequence length in tokens.")
    position_bucket_size: int = Field(
        32,
        ge=2,
        description="Number of distance buckets to either side, including zero, of which the outer half grow in size.",
    )
    layer_norm_eps: float = Field(1e-5, gt=0, description="Epsilon added to the variance in layer normalisation.")

    hub_prefix: ClassVar[str] = "model"
    classes: ClassVar[str] = "GPTBERT"
    base_class_ending: ClassVar[str] = ""
    hub_ignored: ClassVar[tuple[str, ...]] = (*EncoderConfig.hub_ignored, ".position_indices")
    default_pad_id: ClassVar[int] = 3

    def model_post_init(self, _context: Any) -> None:
        require_whole_heads(self.hidden_size, self.num_attention_heads)

    def build(self, vocab_size: int, *, pad_id: int = 3) -> GptBert:
        return GptBert(self, vocab_size)

    def draw(self, name: str, parameter: Tensor, generator: torch.Generator) -> None:
        """Normal with standard deviation sqrt(2 / 5D), truncated at two of them. The deviation of the feed-forward maps
        of layer n, counted from 0, is divided by sqrt(2 (n + 1)). Weighted sums start as the last output alone."""
        if ".mixing." in f".{name}":
            parameter.zero_()
            parameter[-1] = 1.0
            return
        std = math.sqrt(2 / (5 * self.hidden_size))
        layer = _FEED_FORWARD.search(name)
        if layer is not None:
            std /= math.sqrt(2 * (int(layer[1]) + 1))
        nn.init.trunc_normal_(parameter, std=std, a=-2 * std, b=2 * std, generator=generator)

    def rows(self, longest: int) -> Tensor:
        """The table row of each distance (query minus key) in sequences up to this length, smallest distance first.
        Buckets contain one distance each up to half of the buckets, then grow until they cover the longest
        sequence."""
        distance = torch.arange(1 - longest, longest)
        middle, furthest = self.position_bucket_size // 2, self.max_position_embeddings - 1
        bucket = distance
        if furthest > middle:
            # Keep single precision and this order of operations: they decide on which side of a boundary a distance is.
            share = torch.log(distance.abs().clamp(middle, furthest) / middle) / math.log(furthest / middle)
            # Rounding up must not exceed the last bucket, as it does in the released code at some lengths.
            grown = (torch.ceil(share * (middle - 1)).long() + middle).clamp(max=2 * middle - 1)
            bucket = torch.where(distance.abs() <= middle, distance, grown * distance.sign())
        return bucket + self.position_bucket_size - 1

    def heads(self) -> dict[str, HeadPlan]:
        def classifier(architecture: str, hub: str, outputs: int | None = None) -> HeadPlan:
            return HeadPlan(
                architecture,
                lambda shape: Classifier(self.hidden_size, shape.outputs(outputs), transform=GptBertTransform(self)),
                {"transform.dense": f"{hub}.nonlinearity.1", "output": f"{hub}.nonlinearity.5"},
            )

        return {
            "masked_lm": HeadPlan(
                "GPTBERTForMaskedLM",
                lambda shape: TransformedVocabularyHead(GptBertTransform(self), shape.vocab_size),
                {"transform.dense": "lm_head.nonlinearity.1", "": "lm_head.nonlinearity.5"},
                decoder="lm_head.nonlinearity.5",
            ),
            "sequence_classification": classifier("GPTBERTForSequenceClassification", "classifier"),
            "token_classification": classifier("GPTBERTForTokenClassification", "token_classifier"),
            "span": classifier("GPTBERTForQuestionAnswering", "span_classifier", 2),
            "multiple_choice": classifier("GPTBERTForMultipleChoice", "choice_classifier", 1),
        }

    @classmethod
    def from_hub(cls, contents: Mapping[str, Any]) -> Self:
        """The settings in a config.json, where the depth may be named `num_layers`."""
        depth = {"num_hidden_layers": contents["num_layers"]} if "num_layers" in contents else {}
        return super().from_hub({**depth, **contents})

    def to_hub(self) -> dict[str, Any]:
        """Keys of config.json; the published code reads the depth under two names."""
        return {**super().to_hub(), "num_layers": self.num_hidden_layers}


def plain_norm(width: int, eps: float) -> nn.LayerNorm:
    """Layer normalisation without weights."""
    return nn.LayerNorm(width, eps=eps, elementwise_affine=False)


class GptBertTransform(nn.Module):
    """The first part of all heads: norm, dense, GELU, norm, dropout; classifiers as in the released code's evaluation
    on GLUE."""

    def __init__(self, config: GptBertConfig) -> None:
        super().__init__()
        self.input_norm = plain_norm(config.hidden_size, config.layer_norm_eps)
        self.dense = Linear(config.hidden_size, config.hidden_size)
        self.norm = plain_norm(config.hidden_size, config.layer_norm_eps)
        self.dropout = Dropout(config.hidden_dropout_prob)

    def forward(self, states: Tensor) -> Tensor:
        """(M, D) or (B, D), to the same shape."""
        dense = gelu(self.dense(self.input_norm(states)))
        return self.dropout(self.norm(dense))


class GptBertEmbeddings(nn.Module):
    """Word embeddings, and the table of distances with its norm."""

    def __init__(self, config: GptBertConfig, vocab_size: int) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.layer_norm_eps
        self.word = WordEmbedding(vocab_size, width)
        self.norm = plain_norm(width, eps)
        self.dropout = Dropout(config.hidden_dropout_prob)
        self.relative_embedding = nn.Parameter(torch.empty(2 * config.position_bucket_size - 1, width))
        self.relative_norm = nn.LayerNorm(width, eps=eps)

    def forward(self, batch: PackedBatch, scope: Scope) -> Tensor:
        """(T, D). Point: `hook_embed`, (T, D), the word embeddings before the norm."""
        return self.dropout(self.norm(scope.tap("hook_embed", self.word(batch.ids_T))))


class GptBertAttention(SharedPositions):
    """Disentangled attention with a gate and a norm between the heads' outputs and the output map."""

    pruning_obstacle = "a norm over the outputs of all heads follows them"

    def __init__(self, config: GptBertConfig) -> None:
        width, heads, rate = config.hidden_size, config.num_attention_heads, config.attention_probs_dropout_prob
        super().__init__(
            width,
            heads,
            kinds=("c2p", "p2c"),
            scale=1 / math.sqrt(3 * width // heads),
            dropout_rate=rate,
            position_dropout_rate=rate,
        )
        # Content with content and probability with value; query and key of each token with every row of the table.
        self.products_per_pair, self.products_per_token = 2, 2 * (2 * config.position_bucket_size - 1)
        self.gate = Linear(width, width)
        self.norm = plain_norm(width, config.layer_norm_eps)
        self.output_dropout = Dropout(rate)

    def project(self, hidden_TD: Tensor, mix: Mix, scope: Scope, index_M: Tensor | None = None) -> Tensor:
        """(T, D) to (T, D), or to (M, D) for the tokens `index_M`.

        Points: those of `SelfAttention.project`, where `hook_z` is the input of the output map, and `hook_gate`,
        (T, D) or (M, D), the factor of the heads' outputs.
        """
        gated_TD = hidden_TD if index_M is None else hidden_TD.index_select(0, index_M)
        gate_TD = scope.tap("hook_gate", gelu(self.gate(gated_TD)))
        mixed_TNH = mix(*self.queries_keys_values(hidden_TD, scope))
        selected_TNH = mixed_TNH if index_M is None else mixed_TNH.index_select(0, index_M)
        normed_TD = self.norm(selected_TNH.flatten(1) * gate_TD)
        z_TNH = scope.tap("hook_z", normed_TD.view(selected_TNH.shape))
        return self.output_dropout(self.output(z_TNH.flatten(1)))


class GptBertFeedForward(nn.Module):
    """norm((x A) * GELU(x B)), then a linear map; A and B share one matrix; no biases."""

    def __init__(self, config: GptBertConfig) -> None:
        super().__init__()
        self.inner = Linear(config.hidden_size, 2 * config.intermediate_size, bias=False)
        self.norm = plain_norm(config.intermediate_size, config.layer_norm_eps)
        self.outer = Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.dropout = Dropout(config.hidden_dropout_prob)

    def forward(self, hidden_TD: Tensor, scope: Scope) -> Tensor:
        """(T, D) to (T, D). Points: `hook_pre`, (T, 2F), and `hook_post`, (T, F), around the gate."""
        value_TF, gate_TF = scope.tap("hook_pre", self.inner(hidden_TD)).chunk(2, dim=-1)
        gated_TF = scope.tap("hook_post", value_TF * gelu_by_tanh(gate_TF))
        return self.dropout(self.outer(self.norm(gated_TF)))


class GptBertLayer(nn.Module):
    """Attention and feed-forward layer, each preceded by its norm; the encoder computes the sums."""

    def __init__(self, config: GptBertConfig) -> None:
        super().__init__()
        self.attention_norm = plain_norm(config.hidden_size, config.layer_norm_eps)
        self.attention = GptBertAttention(config)
        self.feed_forward_norm = plain_norm(config.hidden_size, config.layer_norm_eps)
        self.feed_forward = GptBertFeedForward(config)

    def attended(
        self,
        hidden_TD: Tensor,
        sequences: PackedSequences,
        distances: Distances,
        scope: Scope,
        index_M: Tensor | None = None,
    ) -> Tensor:
        """Output of attention, before the residual sum: (T, D), or (M, D) for the tokens `index_M` alone."""
        read_TD = self.attention_norm(hidden_TD)
        added_TD = self.attention(read_TD, sequences, scope.within("attn."), index_M, distances=distances)
        return scope.tap("hook_attn_out", added_TD)

    def fed(self, hidden_TD: Tensor, scope: Scope) -> Tensor:
        """Output of the feed-forward layer, before the residual sum, (T, D)."""
        return scope.tap("hook_mlp_out", self.feed_forward(self.feed_forward_norm(hidden_TD), scope.within("mlp.")))


class GptBert(SelectiveEncoder):
    """GPT-BERT's encoder.

    Attributes:
        mixing: for sub-layer s, counted from 0, the factors of the embeddings and of the outputs of sub-layers 0 to s.
            The output of a sub-layer here includes the residual sum.
    """

    config: GptBertConfig
    layers_run_once: ClassVar[bool] = False
    recomputes_layers: ClassVar[bool] = False  # weighted sums that connect layers are computed between their parts
    hub_names: ClassVar[Names] = {
        "embeddings": "embedding",
        "embeddings.word": "embedding.word_embedding",
        "embeddings.relative_norm": "embedding.relative_layer_norm",
        "mixing": "dwa_modules.alphas",
        **attention_names(_ATTENTION, "query", "key", "value", "out_proj"),
        "layers.{n}.attention.gate": _ATTENTION + "gate",
        "layers.{n}.feed_forward.inner": "mlp_layers.{n}.mlp.1",
        "layers.{n}.feed_forward.outer": "mlp_layers.{n}.mlp.4",
    }

    def __init__(self, config: GptBertConfig, vocab_size: int) -> None:
        super().__init__(config, width=config.hidden_size, vocab_size=vocab_size)
        self.embeddings = GptBertEmbeddings(config, vocab_size)
        self.layers = nn.ModuleList(GptBertLayer(config) for _ in range(config.num_hidden_layers))
        self.mixing = nn.ParameterList(
            nn.Parameter(torch.empty(number + 2)) for number in range(2 * config.num_hidden_layers)
        )

    def tensor_layouts(self) -> Sequence[TensorLayout]:
        """On the Hub, queries and keys share one matrix, values and gates another."""
        return [
            stacked(f"{_ATTENTION}{hub}.{leaf}", [f"{_ATTENTION}{part}.{leaf}" for part in parts])
            for hub, parts in (("in_proj_qk", ("query", "key")), ("in_proj_vg", ("value", "gate")))
            for leaf in ("weight", "bias")
        ]

    def selected_token_modules(self) -> Iterable[nn.Module]:
        return self.layers[-1].get_submodule("attention.gate"), *super().selected_token_modules()

    def through(self, batch: PackedBatch, scope: Scope, index_M: Tensor | None = None) -> Tensor:
        """As in the base class. Points: `hook_embed`, and those of each layer below `blocks.N.`; `hook_resid_mid` and
        `hook_resid_post` are the weighted sums after its sub-layers."""
        table_RD = self.embeddings.relative_norm(self.embeddings.relative_embedding)
        distances = Distances(table_RD, self.config.rows(batch.sequences.max_length))
        hidden_TD: Tensor = self.embeddings(batch, scope)
        outputs: list[Tensor] = []
        for number, layer in enumerate(self.layers):
            assert isinstance(layer, GptBertLayer)
            selected_M = index_M if number == len(self.layers) - 1 else None
            within = scope.within(f"blocks.{number}.")
            hidden_TD = within.tap("hook_resid_pre", hidden_TD)
            outputs = outputs or [hidden_TD]
            attended_TD = layer.attended(hidden_TD, batch.sequences, distances, within, selected_M)
            if selected_M is not None:
                hidden_TD = hidden_TD.index_select(0, selected_M)
                outputs = [output.index_select(0, selected_M) for output in outputs]
            outputs.append(hidden_TD + attended_TD)
            hidden_TD = within.tap("hook_resid_mid", weighted_sum(self.mixing[2 * number], outputs))
            outputs.append(hidden_TD + layer.fed(hidden_TD, within))
            hidden_TD = within.tap("hook_resid_post", weighted_sum(self.mixing[2 * number + 1], outputs))
        return hidden_TD
