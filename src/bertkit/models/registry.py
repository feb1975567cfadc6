"""The encoder families, by their names in recipes and config.json; a new family is one file and one entry."""

from __future__ import annotations

from typing import Annotated, get_args

from pydantic import Field

from bertkit.models.encoder import EncoderConfig
from bertkit.models.families.albert import AlbertConfig
from bertkit.models.families.bart import BartConfig
from bertkit.models.families.bert import BertConfig, MegatronBertConfig
from bertkit.models.families.bert_gpt2 import BertGpt2Config
from bertkit.models.families.bigbird import BigBirdConfig
from bertkit.models.families.deberta import DebertaConfig
from bertkit.models.families.deberta_v2 import DebertaV2Config
from bertkit.models.families.distilbert import DistilBertConfig
from bertkit.models.families.electra import ElectraConfig
from bertkit.models.families.elmo import ElmoConfig
from bertkit.models.families.ernie import ErnieConfig
from bertkit.models.families.esm import EsmConfig
from bertkit.models.families.eurobert import EuroBertConfig
from bertkit.models.families.fast_encoder import FastEncoderConfig
from bertkit.models.families.gemma3_text import Gemma3TextConfig
from bertkit.models.families.gpt import GptConfig
from bertkit.models.families.gpt2 import Gpt2Config
from bertkit.models.families.gpt_bert import GptBertConfig
from bertkit.models.families.gte import GteConfig
from bertkit.models.families.jina_bert import JinaBertConfig, JinaBertQkConfig
from bertkit.models.families.jina_embeddings_v3 import JinaEmbeddingsV3Config
from bertkit.models.families.llama import LlamaConfig, Qwen2Config
from bertkit.models.families.longformer import LongformerConfig
from bertkit.models.families.mobilebert import MobileBertConfig
from bertkit.models.families.modernbert import ModernBertConfig
from bertkit.models.families.mosaicbert import MosaicBertConfig
from bertkit.models.families.mpnet import MPNetConfig
from bertkit.models.families.neobert import NeoBertConfig
from bertkit.models.families.nomic_bert import NomicBertConfig
from bertkit.models.families.nomic_bert_moe import NomicBertMoeConfig
from bertkit.models.families.qwen3 import Qwen3Config
from bertkit.models.families.roberta import (
    CamembertConfig,
    Data2VecTextConfig,
    RobertaConfig,
    RobertaPreLayerNormConfig,
    XLMRobertaConfig,
    XLMRobertaXLConfig,
)
from bertkit.models.families.t5 import T5Config
from bertkit.models.families.t5_encoder import T5EncoderConfig
from bertkit.models.families.transformer import TransformerSeq2SeqConfig
from bertkit.models.families.transformer_xl import TransformerXlConfig
from bertkit.models.families.ultrabert import UltraBertConfig
from bertkit.models.families.universal_transformer import UniversalTransformerConfig
from bertkit.models.families.xlnet import XlnetConfig

AnyEncoderConfig = Annotated[
    AlbertConfig
    | BartConfig
    | BertConfig
    | BertGpt2Config
    | BigBirdConfig
    | CamembertConfig
    | Data2VecTextConfig
    | DebertaConfig
    | DebertaV2Config
    | DistilBertConfig
    | ElectraConfig
    | ElmoConfig
    | ErnieConfig
    | EsmConfig
    | EuroBertConfig
    | FastEncoderConfig
    | Gemma3TextConfig
    | Gpt2Config
    | GptBertConfig
    | GptConfig
    | GteConfig
    | JinaBertConfig
    | JinaBertQkConfig
    | JinaEmbeddingsV3Config
    | LlamaConfig
    | LongformerConfig
    | MPNetConfig
    | MegatronBertConfig
    | MobileBertConfig
    | ModernBertConfig
    | MosaicBertConfig
    | NeoBertConfig
    | NomicBertConfig
    | NomicBertMoeConfig
    | Qwen2Config
    | Qwen3Config
    | RobertaConfig
    | RobertaPreLayerNormConfig
    | T5Config
    | T5EncoderConfig
    | TransformerSeq2SeqConfig
    | TransformerXlConfig
    | UltraBertConfig
    | UniversalTransformerConfig
    | XLMRobertaConfig
    | XLMRobertaXLConfig
    | XlnetConfig,
    Field(discriminator="family"),
]

FAMILIES: dict[str, type[EncoderConfig]] = {kind.model_type: kind for kind in get_args(get_args(AnyEncoderConfig)[0])}
"""Settings classes by `model_type`."""
