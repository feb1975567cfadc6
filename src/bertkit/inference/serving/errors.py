"""Error answers: a status and a body that OpenAI's clients understand.

The shape is that of OpenAI's API: `{"error": {"message", "type", "param", "code"}}`. All routes use it.
"""

from __future__ import annotations

from typing import Any

from fastapi import HTTPException
from fastapi.responses import JSONResponse

_TYPES = {408: "timeout_error", 429: "rate_limit_error"}
"""By status; others are invalid_request_error below 500, and server_error."""
_MOST_CHARACTERS = 500
"""Maximum length of a message, which may repeat what a client sent."""


class RequestError(HTTPException):
    """A request that is refused; FastAPI passes an HTTPException on from anywhere it is raised.

    Args:
        status: of HTTP.
        message: what is wrong, and the fix.
        code: a word for programs, such as model_not_found.
        param: the field at fault.
        retry_seconds: when to try again.
    """

    def __init__(
        self, status: int, message: str, *, code: str, param: str | None = None, retry_seconds: int | None = None
    ) -> None:
        super().__init__(status, message)
        self.status, self.message, self.code, self.param = status, message[:_MOST_CHARACTERS], code, param
        self.retry_seconds = retry_seconds

    @property
    def document(self) -> dict[str, Any]:
        """The body."""
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        """The answer."""
        headers = {} if self.retry_seconds is None else {"Retry-After": str(self.retry_seconds)}
        return JSONResponse(self.document, status_code=self.status, headers=headers)


def internal_error() -> RequestError:
    """The error for a bug, whose details are not sent to clients."""
    return RequestError(500, "the server failed to answer this request; its log has more", code="internal_error")
