"""The encoder families, by their names in recipes and config.json; a new family is one file and one entry."""

from __future__ import annotations

from typing import Annotated, get_args

from pydantic import Field

from bertkit.models.albert import AlbertConfig
from bertkit.models.bart import BartConfig
from bertkit.models.bert import BertConfig, MegatronBertConfig
from bertkit.models.bert_gpt2 import BertGpt2Config
from bertkit.models.bigbird import BigBirdConfig
from bertkit.models.deberta import DebertaConfig
from bertkit.models.deberta_v2 import DebertaV2Config
from bertkit.models.distilbert import DistilBertConfig
from bertkit.models.electra import ElectraConfig
from bertkit.models.elmo import ElmoConfig
from bertkit.models.encoder import EncoderConfig
from bertkit.models.ernie import ErnieConfig
from bertkit.models.eurobert import EuroBertConfig
from bertkit.models.fast_encoder import FastEncoderConfig
from bertkit.models.gpt import GptConfig
from bertkit.models.gpt2 import Gpt2Config
from bertkit.models.gpt_bert import GptBertConfig
from bertkit.models.longformer import LongformerConfig
from bertkit.models.mobilebert import MobileBertConfig
from bertkit.models.modernbert import ModernBertConfig
from bertkit.models.mosaicbert import MosaicBertConfig
from bertkit.models.mpnet import MPNetConfig
from bertkit.models.neobert import NeoBertConfig
from bertkit.models.nomic_bert import NomicBertConfig
from bertkit.models.roberta import CamembertConfig, RobertaConfig, XLMRobertaConfig
from bertkit.models.t5 import T5Config
from bertkit.models.transformer import TransformerSeq2SeqConfig
from bertkit.models.transformer_xl import TransformerXlConfig
from bertkit.models.universal_transformer import UniversalTransformerConfig
from bertkit.models.xlnet import XlnetConfig

AnyEncoderConfig = Annotated[
    AlbertConfig
    | BartConfig
    | BertConfig
    | BertGpt2Config
    | BigBirdConfig
    | CamembertConfig
    | DebertaConfig
    | DebertaV2Config
    | DistilBertConfig
    | ElectraConfig
    | ElmoConfig
    | ErnieConfig
    | EuroBertConfig
    | FastEncoderConfig
    | Gpt2Config
    | GptBertConfig
    | GptConfig
    | LongformerConfig
    | MPNetConfig
    | MegatronBertConfig
    | MobileBertConfig
    | ModernBertConfig
    | MosaicBertConfig
    | NeoBertConfig
    | NomicBertConfig
    | RobertaConfig
    | T5Config
    | TransformerSeq2SeqConfig
    | TransformerXlConfig
    | UniversalTransformerConfig
    | XLMRobertaConfig
    | XlnetConfig,
    Field(discriminator="family"),
]

FAMILIES: dict[str, type[EncoderConfig]] = {kind.model_type: kind for kind in get_args(get_args(AnyEncoderConfig)[0])}
"""Settings classes by `model_type`."""
