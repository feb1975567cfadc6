"""The settings of `bertkit serve`: its address, how requests are packed, and the limits on what a client may ask for.

Own design. A file of its own, without torch and FastAPI, because command-line options are generated from it.
"""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from bertkit.settings import Settings


class ServeSettings(Settings):
    """Where a server listens and what it accepts."""

    host: str = Field("127.0.0.1", min_length=1, description="Address to listen on; 0.0.0.0: every interface.")
    port: int = Field(8000, ge=0, le=65_535, description="Port to listen on; 0: any free one.")
    long: Literal["cut", "error"] = Field(
        "cut",
        description="Texts to embed that are longer than the model reads: cut at their end (and counted in the answer),"
        " or refused with 422.",
    )
    wait_ms: float = Field(
        3.0,
        ge=0,
        le=1_000,
        description="Milliseconds that the first request of a batch waits for others while the model is idle.",
    )
    max_body_mb: float = Field(4.0, gt=0, le=1_024, description="Megabytes of a request's body; more: 413.")
    max_inputs: int = Field(2_048, ge=1, le=1 << 20, description="Texts of a request; more: 422.")
    max_request_tokens: int = Field(
        300_000, ge=1, le=1 << 30, description="Tokens of a request, all of its texts together; more: 422."
    )
    queue_tokens: int = Field(
        600_000, ge=1, le=1 << 32, description="Tokens that wait for the model; a request beyond: 429 with Retry-After."
    )
    queue_requests: int = Field(512, ge=1, le=65_536, description="Requests in work at once; one beyond: 429 likewise.")
    client_seconds: float = Field(
        10.0,
        gt=0,
        le=3_600,
        description="Seconds in which a client has to send its headers, its body, and to read on in an answer; slower"
        " ones are disconnected (408 for a body).",
    )
    stop_seconds: int = Field(
        60, ge=1, le=86_400, description="Seconds after SIGTERM in which the requests in work are answered."
    )

    @model_validator(mode="after")
    def _a_request_fits_into_the_queue(self) -> Self:
        if self.max_request_tokens > self.queue_tokens:
            raise ValueError(
                f"max_request_tokens is {self.max_request_tokens:,}, more than the queue holds"
                f" (queue_tokens: {self.queue_tokens:,}); raise queue_tokens or lower max_request_tokens"
            )
        return self
