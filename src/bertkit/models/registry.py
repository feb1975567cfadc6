"""The encoder families, by the name that a recipe and a config.json give them."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from bertkit.models.bert import BertConfig, MegatronBertConfig
from bertkit.models.encoder import EncoderConfig

AnyEncoderConfig = Annotated[BertConfig | MegatronBertConfig, Field(discriminator="family")]

FAMILIES: dict[str, type[EncoderConfig]] = {kind.model_type: kind for kind in (BertConfig, MegatronBertConfig)}
