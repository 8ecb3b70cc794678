"""The admin listener, from the outside."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Any, Final, Self

import typer

from isthmus.cli.connection import DEFAULT_URL, UNIX_SCHEME, chosen, tls_of, token_of
from isthmus.cli.output import CliError, Exit, Output

if TYPE_CHECKING:
    import httpx

CONNECT_TIMEOUT_S: Final = 5.0
ANSWER_TIMEOUT_S: Final = 120.0
"""A reservation is answered when every proxy enforces it, which may take a lease."""
LOOK_AGAIN_S: Final = 0.2

UrlOption = Annotated[
    str | None,
    typer.Option(
        "--url",
        envvar="ISTHMUS_URL",
        help="The proxy's admin listener: http://..., https://... or unix:PATH. Else the current profile's "
        f"(`isthmus config`), else {DEFAULT_URL}.",
    ),
]


class Admin:
    """One command's connection to an admin listener. Every failure is a :class:`CliError`."""

    def __init__(self, url: str | None, output: Output) -> None:
        """``url``: None where the command was given none."""
        import httpx  # a tenth of a second that `--help` need not take

        profile = chosen(url, output)
        self.url = profile.url.rstrip("/")
        self.output = output
        token = None if profile.token_file is None else token_of(profile.token_file, output)
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
            verify=False if base.lower().startswith("http:") else tls_of(profile, output),
            transport=transport,
        )
        self._errors = httpx

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._client.close()

    def get(self, path: str, **query: Any) -> Any:
        return self._request("GET", path, query)

    def post(self, path: str, body: Mapping[str, Any] | None = None, **query: Any) -> Any:
        return self._request("POST", path, query, body)

    def patch(self, path: str, body: Mapping[str, Any], **query: Any) -> Any:
        return self._request("PATCH", path, query, body)

    def delete(self, path: str, **query: Any) -> Any:
        return self._request("DELETE", path, query)

    def wait_for(self, what: str, look: Callable[[], tuple[Any, str | None]], timeout_s: float) -> Any:
        """Look until what is waited for is there, and return it. Raises CliError after ``timeout_s``.

        ``look`` returns what it saw, and what is missing (None: nothing). A proxy that does not answer yet is waited
        for as well.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                seen, missing = look()
                if missing is None:
                    return seen
                failure = self.error("NOT_IN_TIME", f"{what}: not within {timeout_s:g} s; {missing}")
            except CliError as error:
                if error.exit_code is not Exit.NOT_REACHABLE:
                    raise
                failure = error
            if time.monotonic() > deadline:
                raise failure
            time.sleep(LOOK_AGAIN_S)

    def error(self, code: str, message: str, exit_code: Exit = Exit.FAILED, error_code: int | None = None) -> CliError:
        """An error in the form that the command's output asks for."""
        return CliError(code, message, exit_code, self.output, error_code)

    def _request(self, method: str, path: str, query: Mapping[str, Any], body: Mapping[str, Any] | None = None) -> Any:
        errors = self._errors
        wanted = {name: value for name, value in query.items() if value is not None}
        try:
            response = self._client.request(method, self._base + path, params=wanted, json=body)
        except (errors.UnsupportedProtocol, errors.InvalidURL, errors.LocalProtocolError) as error:
            message = f"{self.url!r} is not the URL of an admin listener ({error}): give one like {DEFAULT_URL}"
            raise self.error("INVALID_URL", message, Exit.USAGE) from None
        except errors.TransportError as error:
            message = (
                f"no answer from a proxy at {self.url} ({str(error) or type(error).__name__}):"
                " is it running? --url or ISTHMUS_URL says where"
            )
            raise self.error("NOT_REACHABLE", message, Exit.NOT_REACHABLE) from None
        return self._result(response)

    def _result(self, response: httpx.Response) -> Any:
        if response.status_code == 204:
            return None
        try:
            answer = response.json()
        except ValueError:
            message = f"{self.url} is not an admin listener: it answered {response.status_code} and no JSON"
            raise self.error("NOT_REACHABLE", message, Exit.NOT_REACHABLE) from None
        if response.is_success:
            return answer
        if not isinstance(answer, dict) or "message" not in answer:
            message = f"{self.url} is not an admin listener: it answered {response.status_code}"
            raise self.error("NOT_REACHABLE", message, Exit.NOT_REACHABLE)
        code = str(answer.get("code", "ERROR"))
        raise self.error(code, str(answer["message"]), Exit.FAILED, answer.get("error_code"))
