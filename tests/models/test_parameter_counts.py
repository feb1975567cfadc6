"""Parameter counts equal the papers', or follow from their tables.

Counted on the meta device, without allocation.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from bertkit.models.encoder import EncoderConfig
from bertkit.models.families.albert import AlbertConfig
from bertkit.models.families.bart import BartConfig
from bertkit.models.families.bert import BertConfig
from bertkit.models.families.bigbird import BigBirdConfig
from bertkit.models.families.deberta import DebertaConfig
from bertkit.models.families.deberta_v2 import DebertaV2Config
from bertkit.models.families.distilbert import DistilBertConfig
from bertkit.models.families.electra import ElectraConfig
from bertkit.models.families.elmo import ElmoConfig
from bertkit.models.families.esm import EsmConfig
from bertkit.models.families.eurobert import EuroBertConfig
from bertkit.models.families.gemma3_text import Gemma3TextConfig
from bertkit.models.families.gpt import GptConfig
from bertkit.models.families.gpt2 import Gpt2Config
from bertkit.models.families.gpt_bert import GptBertConfig
from bertkit.models.families.gte import GteConfig
from bertkit.models.families.jina_bert import JinaBertConfig, JinaBertQkConfig
from bertkit.models.families.jina_embeddings_v3 import JinaEmbeddingsV3Config
from bertkit.models.families.longformer import LongformerConfig
from bertkit.models.families.mobilebert import MobileBertConfig
from bertkit.models.families.modernbert import ModernBertConfig
from bertkit.models.families.mosaicbert import MosaicBertConfig
from bertkit.models.families.mpnet import MPNetConfig
from bertkit.models.families.neobert import NeoBertConfig
from bertkit.models.families.nomic_bert import NomicBertConfig
from bertkit.models.families.nomic_bert_moe import NomicBertMoeConfig
from bertkit.models.families.qwen3 import Qwen3Config
from bertkit.models.families.roberta import RobertaConfig, XLMRobertaXLConfig
from bertkit.models.families.t5 import T5Config
from bertkit.models.families.t5_encoder import T5EncoderConfig
from bertkit.models.families.transformer_xl import TransformerXlConfig
from bertkit.models.families.xlnet import XlnetConfig
from bertkit.models.headed import HeadedModel

MILLION = 1_000_000


@dataclass(frozen=True)
class Size:
    """A published model.

    Attributes:
        config: its settings.
        vocabulary: number of tokens.
        backbone: exact number of parameters of embeddings, encoder and pooler, if any.
        total: exact number including these heads.
        heads: heads included in `total`.
        published_millions: the printed number for the total, if known, else for the backbone; and the tolerance.
    """

    config: EncoderConfig
    vocabulary: int
    backbone: int | None = None
    total: int | None = None
    heads: tuple[str, ...] = ()
    published_millions: tuple[float, float] | None = field(default=None)


def bert(layers: int, width: int, heads: int, **more: Any) -> BertConfig:
    return BertConfig(
        num_hidden_layers=layers, hidden_size=width, num_attention_heads=heads, intermediate_size=4 * width, **more
    )


def albert(layers: int, width: int, heads: int, **more: Any) -> AlbertConfig:
    return AlbertConfig(
        num_hidden_layers=layers, hidden_size=width, num_attention_heads=heads, intermediate_size=4 * width, **more
    )


def electra(width: int, heads: int, embedding: int, layers: int = 12) -> ElectraConfig:
    return ElectraConfig(
        num_hidden_layers=layers,
        hidden_size=width,
        num_attention_heads=heads,
        intermediate_size=4 * width,
        embedding_size=embedding,
    )


def gpt2(layers: int, width: int, heads: int) -> Gpt2Config:
    return Gpt2Config(
        num_hidden_layers=layers, hidden_size=width, num_attention_heads=heads, intermediate_size=4 * width
    )


def gpt_bert(width: int, intermediate: int) -> GptBertConfig:
    return GptBertConfig(hidden_size=width, num_attention_heads=width // 64, intermediate_size=intermediate)


IB_BERT = MobileBertConfig(
    intra_bottleneck_size=1024,
    intermediate_size=4096,
    num_feedforward_networks=1,
    key_query_shared_bottleneck=False,
    normalization_type="layer_norm",
)


def esm2(layers: int, width: int, heads: int = 20) -> EsmConfig:
    return EsmConfig(
        num_hidden_layers=layers, hidden_size=width, num_attention_heads=heads, intermediate_size=4 * width
    )


def eurobert(layers: int, width: int, inner: int) -> EuroBertConfig:
    return EuroBertConfig(
        num_hidden_layers=layers,
        hidden_size=width,
        intermediate_size=inner,
        num_attention_heads=18,
        num_key_value_heads=6,
    )


def deberta_v2(layers: int, width: int, heads: int, **more: Any) -> DebertaV2Config:
    return DebertaV2Config(
        num_hidden_layers=layers, hidden_size=width, num_attention_heads=heads, intermediate_size=4 * width, **more
    )


def t5(layers: int, width: int, heads: int) -> T5Config:
    return T5Config(num_hidden_layers=layers, hidden_size=width, num_attention_heads=heads, intermediate_size=4 * width)


PRETRAINING = ("masked_lm", "next_sentence")
SIZES = {
    # Devlin et al. 2019; Turc et al. 2019; the multilingual and SciBERT vocabularies.
    "bert-base": Size(bert(12, 768, 12), 30_522, 109_482_240, 110_106_428, PRETRAINING, (110, 1)),
    "bert-large": Size(bert(24, 1024, 16), 30_522, 335_141_888, 336_226_108, PRETRAINING, (340, 5)),
    "bert-base-cased": Size(bert(12, 768, 12), 28_996, 108_310_272),
    "bert-large-cased": Size(bert(24, 1024, 16), 28_996, 333_579_264),
    "mbert-cased": Size(bert(12, 768, 12), 119_547, 177_853_440),
    "mbert-uncased": Size(bert(12, 768, 12), 105_879, 167_356_416),
    "scibert": Size(bert(12, 768, 12), 31_090, 109_918_464),
    "tinybert-4": Size(
        BertConfig(num_hidden_layers=4, hidden_size=312, num_attention_heads=12, intermediate_size=1200),
        30_522,
        14_350_248,
    ),
    "tinybert-6": Size(bert(6, 768, 12), 30_522, 66_955_008),
    # Liu et al. 2019; the count includes the language-model head and no pooler. fairseq has no segment types, the Hub
    # one row.
    "roberta-base": Size(RobertaConfig(), 50_265, None, 124_696_665 + 768, ("masked_lm",), (125, 1)),
    "roberta-large": Size(
        RobertaConfig(num_hidden_layers=24, hidden_size=1024, num_attention_heads=16, intermediate_size=4096),
        50_265,
        None,
        355_411_033 + 1024,
        ("masked_lm",),
        (355, 1),
    ),
    "distilroberta": Size(RobertaConfig(num_hidden_layers=6), 50_265, None, None, ("masked_lm",), (82, 1)),
    # Sanh et al. 2019.
    "distilbert": Size(DistilBertConfig(), 30_522, 66_362_880, 66_985_530, ("masked_lm",), (66, 1)),
    "distilbert-cased": Size(DistilBertConfig(), 28_996, None, None, (), (65, 1)),
    "distilmbert": Size(DistilBertConfig(), 119_547, None, None, (), (134, 1)),
    # Lan et al. 2020, tables 1 and 4.
    "albert-base": Size(albert(12, 768, 12), 30_000, 11_683_584, published_millions=(12, 1)),
    "albert-large": Size(albert(24, 1024, 16), 30_000, 17_683_968, published_millions=(18, 1)),
    "albert-xlarge": Size(albert(24, 2048, 16), 30_000, 58_724_864, published_millions=(60, 2)),
    # The paper prints 235M, and 233M in the text, although its table sums to 223M.
    "albert-xxlarge": Size(albert(12, 4096, 64), 30_000, 222_595_584),
    "albert-base-shared-attention": Size(albert(12, 768, 12, sharing="attention"), 30_000, published_millions=(64, 1)),
    "albert-base-shared-ffn": Size(albert(12, 768, 12, sharing="ffn"), 30_000, published_millions=(38, 1)),
    "albert-base-not-shared": Size(albert(12, 768, 12, sharing="none"), 30_000, published_millions=(89.7, 0.1)),
    "albert-large-shared-attention": Size(
        albert(24, 1024, 16, sharing="attention"), 30_000, published_millions=(210.8, 0.1)
    ),
    "albert-large-shared-ffn": Size(albert(24, 1024, 16, sharing="ffn"), 30_000, published_millions=(114.3, 0.1)),
    "albert-large-not-shared": Size(albert(24, 1024, 16, sharing="none"), 30_000, published_millions=(307.4, 0.1)),
    "albert-xlarge-not-shared": Size(albert(24, 2048, 16, sharing="none"), 30_000, published_millions=(1217.0, 0.1)),
    "albert-xxlarge-not-shared": Size(albert(12, 4096, 64, sharing="none"), 30_000, published_millions=(2437.8, 0.1)),
    # Clark et al. 2020, table 6; there is no pooler.
    "electra-small": Size(electra(256, 4, 128), 30_522, 13_483_008, 13_549_057, ("replaced_token",), (14, 1)),
    "electra-base": Size(electra(768, 12, 768), 30_522, 108_891_648, 109_483_009, ("replaced_token",), (110, 1)),
    "electra-large": Size(
        electra(1024, 16, 1024, layers=24), 30_522, 334_092_288, 335_142_913, ("replaced_token",), (335, 1)
    ),
    # Radford et al. 2018.
    "gpt": Size(GptConfig(), 40_478, 116_534_784, 116_534_784, ("causal_lm",), (117, 1)),
    # Radford et al. 2019; the paper prints 117M, 345M, 762M and 1542M, which the released model card corrects.
    "gpt2-124m": Size(gpt2(12, 768, 12), 50_257, None, 124_439_808, ("causal_lm",), (124, 1)),
    "gpt2-355m": Size(gpt2(24, 1024, 16), 50_257, None, 354_823_168, ("causal_lm",), (355, 1)),
    "gpt2-774m": Size(gpt2(36, 1280, 20), 50_257, None, 774_030_080, ("causal_lm",), (774, 1)),
    "gpt2-1558m": Size(gpt2(48, 1600, 25), 50_257, None, 1_557_611_200, ("causal_lm",), (1558, 1)),
    "distilgpt2": Size(gpt2(6, 768, 12), 50_257, None, None, ("causal_lm",), (82, 1)),
    # Charpentier and Samuel 2024, 30M and 119M; then the baseline of the BabyLM challenge of 2025.
    "gpt-bert-small": Size(gpt_bert(384, 1280), 8_192, None, 29_892_164, ("masked_lm",), (30, 1)),
    "gpt-bert-base": Size(gpt_bert(768, 2560), 16_384, None, 119_454_532, ("masked_lm",), (119, 1)),
    "gpt-bert-babylm-2025": Size(gpt_bert(384, 1280), 16_384, None, 33_046_084, ("masked_lm",), (33, 1)),
    # Yang et al. 2019.
    "xlnet-base": Size(XlnetConfig(), 32_000, 116_718_336, published_millions=(117, 1)),
    "xlnet-large": Size(
        XlnetConfig(num_hidden_layers=24, hidden_size=1024, num_attention_heads=16, intermediate_size=4096),
        32_000,
        360_268_800,
    ),
    # Peters et al. 2018; published without the softmax.
    "elmo": Size(ElmoConfig(), 793_474, 93_600_848, published_millions=(93.6, 0.1)),
    # Dai et al. 2019, with WikiText-103's words.
    "transformer-xl": Size(TransformerXlConfig(), 267_735, 150_838_570, 151_107_538, ("causal_lm",), (151, 1)),
    # Lewis et al. 2020: "bart.base" of fairseq, 140M.
    "bart-base": Size(BartConfig(num_hidden_layers=6), 50_265, None, 139_420_416, ("seq2seq_lm",), (140, 1)),
    # Raffel et al. 2020, section 2.1 and 3.7; T5 1.1 as released.
    "t5-small": Size(T5Config(), 32_128, None, 60_506_624, ("seq2seq_lm",), (60, 1)),
    "t5-base": Size(t5(12, 768, 12), 32_128, None, 222_903_552, ("seq2seq_lm",), (220, 3)),
    "t5-large": Size(t5(24, 1024, 16), 32_128, None, 737_668_096, ("seq2seq_lm",), (770, 35)),
    "sentence-t5-base": Size(
        T5EncoderConfig(num_hidden_layers=12, hidden_size=768, num_attention_heads=12, intermediate_size=3072),
        32_128,
        published_millions=(110, 1),
    ),
    "t5-v1_1-small": Size(
        T5Config(
            num_hidden_layers=8,
            num_attention_heads=6,
            intermediate_size=1024,
            feed_forward_proj="gated-gelu",
            tie_word_embeddings=False,
        ),
        32_128,
        None,
        76_961_152,
        ("seq2seq_lm",),
        (77, 1),
    ),
    # Sun et al. 2020; the printed count excludes the masked-LM head's own columns, 384 per token of the vocabulary.
    "mobilebert": Size(MobileBertConfig(), 30_522, 24_581_888, published_millions=(25.3, 1)),
    "mobilebert-masked-lm": Size(MobileBertConfig(), 30_522, None, 24_876_090 + 384 * 30_522, ("masked_lm",)),
    "ib-bert-large": Size(IB_BERT, 30_522, published_millions=(293, 2)),
    # He et al. 2021, both papers; version 3's sizes are printed as layers and embeddings.
    "deberta-base": Size(DebertaConfig(), 50_265, 139_192_320, published_millions=(139, 1)),
    "deberta-v3-xsmall": Size(deberta_v2(12, 384, 6), 128_100, published_millions=(22 + 48, 1)),
    "deberta-v3-small": Size(deberta_v2(6, 768, 12), 128_100, published_millions=(44 + 98, 1)),
    "deberta-v3-base": Size(deberta_v2(12, 768, 12), 128_100, 184_422_144, published_millions=(86 + 98, 1)),
    "deberta-v3-large": Size(deberta_v2(24, 1024, 16), 128_100, published_millions=(304 + 131, 1)),
    "deberta-v2-xlarge": Size(
        deberta_v2(24, 1536, 24, conv_kernel_size=3, conv_act="gelu"), 128_100, published_millions=(900, 20)
    ),
    "deberta-v2-xxlarge": Size(
        deberta_v2(48, 1536, 24, conv_kernel_size=3, conv_act="gelu"), 128_100, published_millions=(1500, 70)
    ),
    # Song et al. 2020; RoBERTa's vocabulary would be 50,265, the released model has BERT's and five more.
    "mpnet-base": Size(MPNetConfig(), 30_527, 109_486_464, published_millions=(110, 1)),
    # Warner et al. 2024, table 4. Portes et al. 2023, 137M; 30,522 words rounded up to a multiple of 64.
    # Günther et al. 2023, table 1: 33M and 137M; then the model cards of the one for code and of a reranker.
    "jina-embeddings-v2-small": Size(
        JinaBertConfig(num_hidden_layers=4, hidden_size=512, num_attention_heads=8, intermediate_size=2048),
        30_528,
        published_millions=(33, 1),
    ),
    "jina-embeddings-v2-base": Size(JinaBertConfig(), 30_528, published_millions=(137, 1)),
    "jina-embeddings-v2-base-code": Size(JinaBertQkConfig(), 61_056, published_millions=(161, 1)),
    "jina-reranker-v1-turbo": Size(
        JinaBertConfig(num_hidden_layers=6, hidden_size=384, intermediate_size=1536),
        61_056,
        published_millions=(37.8, 0.1),
    ),
    # Sturua et al. 2024, section 4, without the updates for tasks; Goyal et al. 2021.
    "jina-embeddings-v3": Size(
        JinaEmbeddingsV3Config(num_hidden_layers=24, hidden_size=1024, num_attention_heads=16, intermediate_size=4096),
        250_002,
        published_millions=(559, 1),
    ),
    # As the Hub counts the masked LMs, and gte-base-en-v1.5, whose encoder has no pooler; the first one's card: 306M.
    "gte-multilingual-base": Size(GteConfig(), 250_048, None, 306_210_496, ("masked_lm",), (306, 1)),
    "gte-base-en": Size(GteConfig(type_vocab_size=0), 30_528, 136_776_192 + 590_592, 137_398_848, ("masked_lm",)),
    "xlm-roberta-xl": Size(
        XLMRobertaXLConfig(num_hidden_layers=36, hidden_size=2560, num_attention_heads=32, intermediate_size=10240),
        250_880,
        published_millions=(3500, 30),
    ),
    "mosaicbert-base": Size(MosaicBertConfig(), 30_528, 137_368_320, 137_400_384, ("masked_lm",), (137, 1)),
    "modernbert-base": Size(ModernBertConfig(), 50_368, 149_014_272, 149_655_232, ("masked_lm",), (149, 1)),
    "modernbert-large": Size(
        ModernBertConfig(num_hidden_layers=28, hidden_size=1024, num_attention_heads=16, intermediate_size=2624),
        50_368,
        None,
        None,
        ("masked_lm",),
        (395, 1),
    ),
    # Nussbaum et al. 2024, 137M. Le Breton et al. 2025, 250M with the output projection.
    "nomic-bert": Size(NomicBertConfig(), 30_528, None, None, (), (137, 1)),
    # Nussbaum and Duderstadt 2025: 475M, of which a token passes through 305M.
    "nomic-embed-text-v2-moe": Size(NomicBertMoeConfig(), 250_048, None, None, (), (475, 1)),
    "neobert": Size(NeoBertConfig(), 30_522, None, None, ("masked_lm",), (250, 5)),
    # Lin et al. 2023 name the models by their sizes. The published files also have an unused table of positions.
    "esm2-8m": Size(EsmConfig(), 33, heads=("masked_lm",), published_millions=(8, 0.5)),
    "esm2-35m": Size(esm2(12, 480), 33, heads=("masked_lm",), published_millions=(35, 1.6)),
    "esm2-150m": Size(esm2(30, 640), 33, heads=("masked_lm",), published_millions=(150, 2)),
    "esm2-650m": Size(esm2(33, 1280), 33, heads=("masked_lm",), published_millions=(650, 2)),
    "esm2-3b": Size(esm2(36, 2560, 40), 33, heads=("masked_lm",), published_millions=(3000, 200)),
    # Boizard et al. 2025, without the output projection.
    "eurobert-210m": Size(EuroBertConfig(), 128_256, published_millions=(210, 3)),
    "eurobert-610m": Size(eurobert(26, 1152, 4096), 128_256, published_millions=(610, 5)),
    "eurobert-2b": Size(eurobert(32, 2304, 6144), 128_256, published_millions=(2100, 50)),
    # Zhang et al. 2025, 0.6B; Vera et al. 2025, 308M, of which 4.7M are two maps behind the pooling.
    "qwen3-embedding-600m": Size(
        Qwen3Config(
            hidden_size=1024,
            num_hidden_layers=28,
            num_attention_heads=16,
            num_key_value_heads=8,
            head_dim=128,
        ),
        151_669,
        published_millions=(600, 5),
    ),
    "embeddinggemma-300m": Size(
        Gemma3TextConfig(
            num_hidden_layers=24,
            num_attention_heads=3,
            num_key_value_heads=1,
            intermediate_size=1152,
            use_bidirectional_attention=True,
        ),
        262_144,
        published_millions=(308, 6),
    ),
    # Beltagy et al. 2020: RoBERTa's, longer tables, and projections for global tokens.
    # Zaheer et al. 2020: the Hub's bigbird-roberta-base.
    "bigbird-base": Size(BigBirdConfig(), 50_358, 127_468_800),
    "longformer-base": Size(LongformerConfig(), 50_265, 148_659_456),
    "longformer-large": Size(
        LongformerConfig(num_hidden_layers=24, hidden_size=1024, num_attention_heads=16, intermediate_size=4096),
        50_265,
        published_millions=(435, 2),
    ),
}


def count(config: EncoderConfig, vocabulary: int, heads: tuple[str, ...]) -> int:
    with torch.device("meta"):
        model = HeadedModel(config.build(vocabulary), heads)
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("name", SIZES)
def test_parameters_are_as_many_as_published(name: str) -> None:
    size = SIZES[name]
    has_pooler = size.config.pooler_hub_name is not None
    backbone = count(size.config, size.vocabulary, ("pooler",) if has_pooler else ())
    if size.backbone is not None:
        assert backbone == size.backbone
    if size.total is not None:
        assert count(size.config, size.vocabulary, size.heads) == size.total
    if size.published_millions is not None:
        printed, tolerance = size.published_millions
        counted = size.total or (count(size.config, size.vocabulary, size.heads) if size.heads else backbone)
        assert counted / MILLION == pytest.approx(printed, abs=tolerance)


@pytest.mark.parametrize(
    ("discriminator", "share", "extra_millions"),
    [
        (electra(256, 4, 128), 1 / 4, 0.65),
        (electra(768, 12, 768), 1 / 3, 9.90),
        (electra(1024, 16, 1024, 24), 1 / 4, 19.5),
    ],
)
def test_an_electra_generator_adds_what_its_layers_weigh(
    discriminator: ElectraConfig, share: float, extra_millions: float
) -> None:
    """Embeddings are shared: table 6's sizes, from which the extra weights follow."""
    generator = discriminator.generator(share)
    with torch.device("meta"):
        model = HeadedModel(generator.build(30_522), ("masked_lm",))
    shared = {parameter for name, parameter in model.named_parameters() if name.startswith("encoder.embeddings.")}
    extra = sum(parameter.numel() for parameter in model.parameters() if parameter not in shared)
    assert extra / MILLION == pytest.approx(extra_millions, abs=0.05)
