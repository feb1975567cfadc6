"""The bodies of requests, described in `/openapi.json` and checked before anything is computed.

`/v1/embeddings` follows OpenAI's API ("Create embeddings"), `/rerank` those of Jina and Cohere. Values of a wrong type
are never converted, and unknown fields are refused by name.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue

_ModelName = Annotated[
    str | None, Field(max_length=512, description="Name of a served model; optional if only one can answer.")
]
_MOST = 1 << 20
"""Maximum length of any list, for the schema; the server's own limits are lower."""


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)


class SparseRequest(_Body):
    """Texts to embed with a model of sparse vectors."""

    model: _ModelName = None
    input: str | Annotated[list[str] | list[int] | list[list[int]], Field(min_length=1, max_length=_MOST)] = Field(
        description="A text, a list of texts, the token ids of one text without special tokens, or a list of these."
    )
    prompt_name: str | None = Field(
        None,
        max_length=512,
        description="Name of one of the model's prompts, such as query, which is put before each text (default: the"
        " model's default prompt, if it has one).",
    )


class EmbeddingRequest(SparseRequest):
    """Texts to embed, as OpenAI's clients send them."""

    encoding_format: Literal["float", "base64"] = Field(
        "float", description="float: a list of numbers per vector; base64: its little-endian float32 bytes."
    )
    dimensions: int | None = Field(
        None,
        ge=1,
        le=_MOST,
        description="Keep only this many first numbers of each vector; unit vectors are scaled to unit length again.",
    )
    user: str | None = Field(None, max_length=512, description="Ignored.")


class PredictRequest(_Body):
    """Inputs to label, as for `bertkit predict`."""

    model: _ModelName = None
    inputs: str | Annotated[list[str | list[str] | dict[str, JsonValue]], Field(min_length=1, max_length=_MOST)] = (
        Field(
            description="Texts, lists of words (for a tagger), or objects with the fields that `bertkit predict` reads:"
            " text and text_pair; words; question and context; context and endings."
        )
    )
    top: int | None = Field(
        None, ge=1, le=_MOST, description="Return only this many highest scores, or best answers (default: 5 answers)."
    )


class RerankDocument(BaseModel):
    """A document with fields of its own, of which only the text is read."""

    model_config = ConfigDict(extra="ignore", strict=True, frozen=True)

    text: str = Field(description="The text to rank.")


class RerankRequest(_Body):
    """A query and the documents to rank."""

    model: _ModelName = None
    query: str = Field(description="The text to search for.")
    documents: Annotated[list[str | RerankDocument], Field(min_length=1, max_length=_MOST)] = Field(
        description="The texts to rank, or objects with a field `text`."
    )
    top_n: int | None = Field(None, ge=1, le=_MOST, description="Return only this many best documents (default: all).")
    return_documents: bool = Field(False, description="Whether the results include the documents' texts.")

    @property
    def texts(self) -> list[str]:
        """The documents' texts."""
        return [each if isinstance(each, str) else each.text for each in self.documents]


class FillRequest(_Body):
    """Texts with masks."""

    model: _ModelName = None
    input: str | Annotated[list[str], Field(min_length=1, max_length=_MOST)] = Field(
        description="A text, or a list of texts, with the model's mask token in place of words."
    )
    top: int = Field(5, ge=1, le=1_000, description="Number of tokens per mask.")
