"""Errors in the shape that clients of this interface read."""

from __future__ import annotations

from typing import Any

from mcore_inference.async_engine import EngineClosedError, GenerationError

_TYPES = {
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
}


class APIError(Exception):
    """An answer that is an error.

    Args:
        status: of HTTP.
        message: one clear line.
        param: the parameter that is at fault, if one is.
        code: a name for programs.
    """

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code

    def body(self) -> dict[str, Any]:
        """Return the JSON object of the answer."""
        return {
            "error": {
                "message": self.message,
                "type": _TYPES.get(self.status, "invalid_request_error"),
                "param": self.param,
                "code": self.code,
            }
        }


def failure(error: GenerationError) -> APIError:
    """Return what a client is told of an answer that could not be finished."""
    if isinstance(error, EngineClosedError):
        return APIError(503, str(error), code="shut_down")
    return APIError(500, str(error), code="generation_failed")
