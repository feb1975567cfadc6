"""The cost of a model: counts against the products computed by a forward pass."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from bertkit.data.batch import PackedBatch
from bertkit.models.encoder import EncoderConfig
from bertkit.models.families.albert import AlbertConfig
from bertkit.models.families.bert import BertConfig
from bertkit.models.families.deberta_v2 import DebertaV2Config
from bertkit.models.families.distilbert import DistilBertConfig
from bertkit.models.families.electra import ElectraConfig
from bertkit.models.families.eurobert import EuroBertConfig
from bertkit.models.families.gemma3_text import Gemma3TextConfig
from bertkit.models.families.gpt2 import Gpt2Config
from bertkit.models.families.gpt_bert import GptBertConfig
from bertkit.models.families.mobilebert import MobileBertConfig
from bertkit.models.families.modernbert import ModernBertConfig
from bertkit.models.families.neobert import NeoBertConfig
from bertkit.models.families.qwen3 import Qwen3Config
from bertkit.models.families.xlnet import XlnetConfig
from bertkit.models.headed import HeadedModel
from bertkit.models.heads import HEAD_KINDS
from bertkit.training.cost import count_parameters, step_flops

SIZES = {
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 80,
    "max_position_embeddings": 64,
}
XLNET_SIZES = {key: value for key, value in SIZES.items() if key != "max_position_embeddings"}
VOCABULARY, LENGTH, SEQUENCES, PREDICTIONS = 101, 40, 6, 17


def forward_flops(model: HeadedModel) -> float:
    """Operations of the matrix products of one forward pass, as counted by torch."""
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(5, VOCABULARY, (SEQUENCES, LENGTH), generator=generator).tolist()
    batch = PackedBatch.from_ids(rows)
    counter = FlopCounterMode(display=False)
    # The fused attention of the CPU is not counted.
    with counter, torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        hidden_TD = model(batch)
        for head in model.head_names:
            if HEAD_KINDS[head] == "vocabulary":
                model.token_logits(head, hidden_TD[:PREDICTIONS])
            else:
                model.logits(head, hidden_TD, batch)
    return float(counter.get_total_flops())


@pytest.mark.parametrize(
    ("config", "heads", "tolerance"),
    [
        (BertConfig(**SIZES), ("masked_lm", "next_sentence"), 0),
        (DistilBertConfig(**SIZES), ("masked_lm",), 0),
        (AlbertConfig(**SIZES, embedding_size=20), ("masked_lm", "sentence_order"), 0),
        (AlbertConfig(**SIZES, embedding_size=20, inner_group_num=2), ("masked_lm",), 0),
        (AlbertConfig(**SIZES, embedding_size=20, sharing="ffn"), ("masked_lm",), 0),
        (ElectraConfig(**SIZES, embedding_size=20), ("replaced_token",), 0),
        (Gpt2Config(**SIZES), ("causal_lm",), 0),
        (MobileBertConfig(**SIZES, embedding_size=20, intra_bottleneck_size=24), ("masked_lm",), 0),
        (ModernBertConfig(**SIZES, local_attention=64), ("masked_lm",), 0),
        (ModernBertConfig(**SIZES, local_attention=8), ("masked_lm",), 0.02),
        (NeoBertConfig(**SIZES), ("masked_lm",), 0),
        (EuroBertConfig(**SIZES, num_key_value_heads=2), ("masked_lm",), 0),
        (Qwen3Config(**SIZES, num_key_value_heads=2, head_dim=20), ("causal_lm",), 0),
        (Gemma3TextConfig(**SIZES, num_key_value_heads=1, head_dim=20, sliding_window=8), ("causal_lm",), 0.03),
        # Only maps of relative positions, and the two segments' scores, are omitted.
        (XlnetConfig(**XLNET_SIZES), (), 0.1),
        (DebertaV2Config(**SIZES, position_buckets=64), ("masked_lm",), 0.1),
        # Only the maps of its 15 rows are omitted.
        (GptBertConfig(**SIZES, position_bucket_size=8), ("masked_lm",), 0.025),
    ],
    ids=lambda value: value.model_type if isinstance(value, EncoderConfig) else None,
)
def test_flops_are_those_of_the_products_that_are_computed(
    config: EncoderConfig, heads: tuple[str, ...], tolerance: float
) -> None:
    model = HeadedModel(config.build(VOCABULARY), heads).eval()
    model.initialise(0)
    counted = step_flops(
        model,
        tokens=SEQUENCES * LENGTH,
        squared_lengths=SEQUENCES * LENGTH**2,
        predictions=PREDICTIONS,
        sequences=SEQUENCES,
    )
    assert counted / 3 == pytest.approx(forward_flops(model), rel=max(tolerance, 1e-12))


@pytest.mark.parametrize(
    ("config", "pooler"),
    [
        (BertConfig(**SIZES), 48 * 49),
        (DistilBertConfig(**SIZES), 0),
        (ElectraConfig(**SIZES), 0),
        (XlnetConfig(**XLNET_SIZES), 0),
        (AlbertConfig(**SIZES), 48 * 49),
        (MobileBertConfig(**SIZES, embedding_size=20, classifier_activation=False), 0),
    ],
    ids=lambda value: value.model_type if isinstance(value, EncoderConfig) else None,
)
def test_the_backbone_has_a_pooler_where_the_family_has_one(config: EncoderConfig, pooler: int) -> None:
    with torch.device("meta"):
        model = HeadedModel(config.build(VOCABULARY), ())
    counted = count_parameters(model)
    assert counted.total == sum(parameter.numel() for parameter in model.encoder.parameters())
    assert counted.backbone == counted.total + pooler
