"""The settings of `bertkit serve`: its address, how requests are packed, and the limits on requests.

Not from a paper. A separate file without torch and FastAPI, because command-line options are generated from it.
"""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from bertkit.settings import Settings


class ServeSettings(Settings):
    """Where a server listens and what it accepts."""

    host: str = Field("127.0.0.1", min_length=1, description="Address to listen on; 0.0.0.0: all interfaces.")
    port: int = Field(8000, ge=0, le=65_535, description="Port to listen on; 0: any free one.")
    long: Literal["cut", "error"] = Field(
        "cut",
        description="How to treat texts to embed that are longer than the model's maximum: cut at the end (and"
        " counted in the answer), or error (refused with 422).",
    )
    wait_ms: float = Field(
        3.0,
        ge=0,
        le=1_000,
        description="Milliseconds that the first request of a batch waits for others while the model is idle.",
    )
    max_body_mb: float = Field(
        4.0, gt=0, le=1_024, description="Maximum size of a request's body in megabytes; larger ones get 413."
    )
    max_inputs: int = Field(2_048, ge=1, le=1 << 20, description="Maximum number of texts per request; more get 422.")
    max_request_tokens: int = Field(
        300_000,
        ge=1,
        le=1 << 30,
        description="Maximum number of tokens per request, over all of its texts; more get 422.",
    )
    queue_tokens: int = Field(
        600_000,
        ge=1,
        le=1 << 32,
        description="Maximum number of tokens waiting for the model; further requests get 429 with Retry-After.",
    )
    queue_requests: int = Field(
        512,
        ge=1,
        le=65_536,
        description="Maximum number of requests in progress; further ones get 429 with Retry-After.",
    )
    client_seconds: float = Field(
        10.0,
        gt=0,
        le=3_600,
        description="Seconds within which a client must send its headers, send its body and continue to read an"
        " answer; slower clients are disconnected (408 for a body).",
    )
    stop_seconds: int = Field(
        60, ge=1, le=86_400, description="Seconds after SIGTERM for completing the requests in progress."
    )

    @model_validator(mode="after")
    def _a_request_fits_into_the_queue(self) -> Self:
        if self.max_request_tokens > self.queue_tokens:
            raise ValueError(
                f"max_request_tokens is {self.max_request_tokens:,}, more than the queue holds"
                f" (queue_tokens: {self.queue_tokens:,}); raise queue_tokens or lower max_request_tokens"
            )
        return self
