"""Errors as REST shows them: one shape, and a status for each cause."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from isthmus.errors import PeerFault
from isthmus_control.outcome import Rejected, Rejection
from isthmus_plugins.links import OperationError

REJECTION_STATUS: Final = {
    Rejection.INVALID: 422,
    Rejection.NOT_FOUND: 404,
    Rejection.ALREADY_EXISTS: 409,
    Rejection.CONFLICT: 409,
    Rejection.NOT_SUPPORTED: 422,
    Rejection.NOT_GRANTED: 409,
    Rejection.LEASE_LOST: 503,
    Rejection.STALE: 503,
    Rejection.MALFORMED: 422,
    Rejection.UNSIGNED: 422,
}
_NUMBERS: Final = {
    "NOT_FOUND": 1,
    "ALREADY_EXISTS": 1,
    "CONFLICT": 2,
    "NOT_GRANTED": 3,
    "REMOTE_NOT_ALLOWED": 4,
    "INVALID": 1,
    "NOT_SUPPORTED": 2,
    "MALFORMED": 3,
    "INVALID_REQUEST": 4,
    "UNSIGNED": 5,
    "NOT_READY": 1,
    "LEASE_LOST": 2,
    "STALE": 3,
    "CONTROL_LOG_UNAVAILABLE": 4,
    "UNAUTHENTICATED": 1,
    "FORBIDDEN": 1,
    "ORIGIN_NOT_ALLOWED": 2,
    "HOST_NOT_ALLOWED": 1,
    "TOO_LARGE": 1,
    "REQUEST_TIMEOUT": 1,
}
"""The last two digits of ``error_code``. Never given anew: programs may have stored them."""


def problem(status: int, code: str, message: str) -> JSONResponse:
    """An error's answer."""
    body = {"error_code": status * 100 + _NUMBERS.get(code, 0), "code": code, "message": message}
    return JSONResponse(body, status)


def not_ready(what: str) -> OperationError:
    """A part of the process is not up yet."""
    return OperationError("NOT_READY", f"{what} is not up yet: try again, /health/ready tells when", 503)


def rejected(outcome: Rejected) -> OperationError:
    """What the control log refused."""
    return OperationError(outcome.code.name, outcome.message, REJECTION_STATUS[outcome.code])


async def _operation_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, OperationError)
    return problem(error.http_status, error.code, error.message)


async def _peer_fault(request: Request, error: Exception) -> JSONResponse:
    return problem(503, "CONTROL_LOG_UNAVAILABLE", f"the control log has not confirmed the change: {error}")


async def _http(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        return problem(404, "NO_SUCH_PATH", f"there is no {request.url.path}; /openapi.json lists what there is")
    if error.status_code == 405:
        return problem(405, "METHOD_NOT_ALLOWED", f"{request.url.path} does not take {request.method}")
    return problem(error.status_code, "HTTP_ERROR", str(error.detail))


async def _validation(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    # Where and why, and not what was sent: it may have been a token.
    parts = []
    for each in error.errors():
        place = ".".join(str(part) for part in each["loc"][1:]) or str(each["loc"][0])
        parts.append(f"{place}: {each['msg']}")
    return problem(422, "INVALID_REQUEST", "; ".join(parts))


async def _bug(request: Request, error: Exception) -> JSONResponse:
    return problem(500, "INTERNAL_ERROR", "an error of the proxy itself: its log has the details")


def install(app: FastAPI) -> None:
    """Give every error of ``app`` the one shape."""
    handlers: dict[type[Exception], Callable[[Request, Any], Awaitable[JSONResponse]]] = {
        OperationError: _operation_error,
        PeerFault: _peer_fault,
        HTTPException: _http,
        RequestValidationError: _validation,
        Exception: _bug,
    }
    for kind, handler in handlers.items():
        app.add_exception_handler(kind, handler)
