"""Requests to an admin listener: who is asked, how the caller says who it is, and what goes wrong.

The command line and :mod:`isthmus.client` stand on it. Answers are JSON with the fields of REST.
"""

from __future__ import annotations

import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

if TYPE_CHECKING:
    import httpx

DEFAULT_URL: Final = "http://127.0.0.1:28080"
UNIX_SCHEME: Final = "unix:"
CONNECT_TIMEOUT_S: Final = 5.0
ANSWER_TIMEOUT_S: Final = 120.0
"""A reservation is answered when every proxy enforces it, which may take a lease."""
LOOK_AGAIN_S: Final = 0.2
OPERATION_WAIT_S: Final = 20.0
"""How long a proxy may wait for the end of an operation before it answers that it goes on."""


class AdminError(Exception):
    """It was refused, or failed. ``code`` is a constant for programs, ``message`` one line for people."""

    def __init__(self, code: str, message: str, error_code: int | None = None) -> None:
        super().__init__(f"{message} ({code})")
        self.code = code
        self.message = message
        self.error_code = error_code
        """REST's number, where a proxy has answered."""


class NotReachable(AdminError):
    """There is no admin listener at the URL, or it does not answer."""


class NotUsable(AdminError):
    """What the caller gave cannot be used: a URL, a token file, certificates."""


class AdminRequests:
    """A connection to one admin listener. Every failure is an :class:`AdminError`."""

    def __init__(
        self,
        url: str = DEFAULT_URL,
        *,
        token_file: Path | str | None = None,
        cacert: Path | str | None = None,
        cert: Path | str | None = None,
        key: Path | str | None = None,
    ) -> None:
        """``url``: ``http://...``, ``https://...`` or ``unix:PATH``. ``token_file``: a file with a token, as the
        proxy's own. ``cacert``: authorities in place of the system's; ``cert``, ``key``: the caller's own."""
        import httpx  # a tenth of a second that a command's `--help` need not take

        self.url = url.rstrip("/")
        token = None if token_file is None else token_of(Path(token_file))
        base, transport = self.url, None
        if self.url.startswith(UNIX_SCHEME):
            path = self.url.removeprefix(UNIX_SCHEME)
            path = "/" + path.lstrip("/") if path.startswith("/") else path
            base, transport = "http://localhost", httpx.HTTPTransport(uds=path)
        self._base = base
        # Proxies of the environment are for the world outside, admin listeners are on private addresses.
        self._client = httpx.Client(
            timeout=httpx.Timeout(ANSWER_TIMEOUT_S, connect=CONNECT_TIMEOUT_S),
            trust_env=False,
            headers={} if token is None else {"authorization": f"Bearer {token}"},
            # To read the world's authorities takes longer than a request, and plain HTTP has no use for them.
            verify=False if base.lower().startswith("http:") else tls_of(cacert, cert, key),
            transport=transport,
        )
        self._errors = httpx

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        self._client.close()

    def get(self, path: str, **query: Any) -> Any:
        return self._request("GET", path, query)

    def post(self, path: str, body: Mapping[str, Any] | None = None, **query: Any) -> Any:
        return self._request("POST", path, query, body)

    def put(self, path: str, body: Mapping[str, Any]) -> Any:
        return self._request("PUT", path, {}, body)

    def patch(self, path: str, body: Mapping[str, Any], **query: Any) -> Any:
        return self._request("PATCH", path, query, body)

    def delete(self, path: str, **query: Any) -> Any:
        return self._request("DELETE", path, query)

    def progress(self, operation: dict[str, Any], each_s: float = OPERATION_WAIT_S) -> Iterator[dict[str, Any]]:
        """An operation as it was told, and again at least each so many seconds, until it has ended."""
        while operation["state"] == "running":
            yield operation
            operation = self.get(f"/v1/operations/{operation['id']}", wait_s=each_s)
        yield operation

    def wait_for(self, what: str, look: Callable[[], tuple[Any, str | None]], timeout_s: float) -> Any:
        """Look until what is waited for is there, and return it. Raises AdminError after ``timeout_s``.

        ``look`` returns what it saw, and what is missing (None: nothing). A proxy that does not answer yet is waited
        for as well.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                seen, missing = look()
                if missing is None:
                    return seen
                failure = AdminError("NOT_IN_TIME", f"{what}: not within {timeout_s:g} s; {missing}")
            except NotReachable as error:
                failure = error
            if time.monotonic() > deadline:
                raise failure
            time.sleep(LOOK_AGAIN_S)

    def _request(self, method: str, path: str, query: Mapping[str, Any], body: Mapping[str, Any] | None = None) -> Any:
        errors = self._errors
        wanted = {name: value for name, value in query.items() if value is not None}
        try:
            response = self._client.request(method, self._base + path, params=wanted, json=body)
        except (errors.UnsupportedProtocol, errors.InvalidURL, errors.LocalProtocolError) as error:
            message = f"{self.url!r} is not the URL of an admin listener ({error}): give one like {DEFAULT_URL}"
            raise NotUsable("INVALID_URL", message) from None
        except errors.TransportError as error:
            reason = str(error) or type(error).__name__
            message = f"no answer from a proxy at {self.url} ({reason}): is it running? --url or ISTHMUS_URL says where"
            raise NotReachable("NOT_REACHABLE", message) from None
        return self._result(response)

    def _result(self, response: httpx.Response) -> Any:
        if response.status_code == 204:
            return None
        try:
            answer = response.json()
        except ValueError:
            message = f"{self.url} is not an admin listener: it answered {response.status_code} and no JSON"
            raise NotReachable("NOT_REACHABLE", message) from None
        if response.is_success:
            return answer
        if not isinstance(answer, dict) or "message" not in answer:
            message = f"{self.url} is not an admin listener: it answered {response.status_code}"
            raise NotReachable("NOT_REACHABLE", message)
        raise AdminError(str(answer.get("code", "ERROR")), str(answer["message"]), answer.get("error_code"))


def token_of(path: Path) -> str:
    """The first token in a file: that of its first line, behind a name if there is one. Raises NotUsable."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise NotUsable("FILE", f"the token file {path} cannot be read: {reason}") from None
    for line in lines:
        if words := line.partition("#")[0].split():
            if not words[-1].isascii() or not words[-1].isprintable():
                break
            return words[-1]
    raise NotUsable("FILE", f"there is no token in {path}")


def tls_of(cacert: Path | str | None, cert: Path | str | None, key: Path | str | None) -> ssl.SSLContext:
    """Raises NotUsable."""
    try:
        context = ssl.create_default_context(cafile=None if cacert is None else str(cacert))
        if cert is not None:
            context.load_cert_chain(cert, key)
    except OSError as error:  # an SSLError is one, too
        files = ", ".join(str(path) for path in (cacert, cert, key) if path is not None)
        reason = error.reason if isinstance(error, ssl.SSLError) else error.strerror
        raise NotUsable("FILE", f"{files} cannot be used: {reason}") from None
    return context
