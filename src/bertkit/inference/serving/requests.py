"""The bodies of requests: what `/openapi.json` describes and what is checked before anything is computed.

`/v1/embeddings` is OpenAI's (api reference, "Create embeddings"), `/rerank` that of Jina and Cohere. A wrong type is
never converted to another, and an unknown field is refused by name.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue

_ModelName = Annotated[
    str | None, Field(max_length=512, description="A served model; may be left out where only one can answer.")
]
_MOST = 1 << 20
"""Of any list: a bound for the page; the server's own limits are lower."""


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)


class EmbeddingRequest(_Body):
    """Texts to vectors, as OpenAI's clients send it."""

    model: _ModelName = None
    input: str | Annotated[list[str] | list[int] | list[list[int]], Field(min_length=1, max_length=_MOST)] = Field(
        description="A text, texts, the ids of a text's tokens without the special ones, or a list of such."
    )
    encoding_format: Literal["float", "base64"] = Field(
        "float", description="base64: the little-endian float32 numbers of a vector."
    )
    dimensions: int | None = Field(
        None,
        ge=1,
        le=_MOST,
        description="Keep the first so many numbers of a vector; one of length one is scaled to it again.",
    )
    user: str | None = Field(None, max_length=512, description="Not read.")


class PredictRequest(_Body):
    """Inputs to label, as `bertkit predict` reads them."""

    model: _ModelName = None
    inputs: str | Annotated[list[str | list[str] | dict[str, JsonValue]], Field(min_length=1, max_length=_MOST)] = (
        Field(
            description="Texts, lists of words (of a tagger), or objects with the fields that `bertkit predict` reads:"
            " text and text_pair; words; question and context; context and endings."
        )
    )
    top: int | None = Field(
        None, ge=1, le=_MOST, description="Keep so many of the highest scores or best answers (5 answers by default)."
    )


class RerankRequest(_Body):
    """A query and the documents to put in order."""

    model: _ModelName = None
    query: str = Field(description="What is searched for.")
    documents: Annotated[list[str], Field(min_length=1, max_length=_MOST)] = Field(description="What is found.")
    top_n: int | None = Field(None, ge=1, le=_MOST, description="Give so many of the best.")
    return_documents: bool = Field(False, description="Whether results repeat the documents.")


class FillRequest(_Body):
    """Texts with masks."""

    model: _ModelName = None
    input: str | Annotated[list[str], Field(min_length=1, max_length=_MOST)] = Field(
        description="Texts with the model's mask token in place of words."
    )
    top: int = Field(5, ge=1, le=1_000, description="Tokens for each mask.")


Document = dict[str, Any]
