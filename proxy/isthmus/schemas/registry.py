"""A registry that is asked over HTTP, of whatever kind."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, Self
from urllib.parse import quote

from isthmus.admin_requests import NotUsable, tls_of, token_of
from isthmus.schemas.contents import Contents, Version

if TYPE_CHECKING:
    import httpx

CONNECT_TIMEOUT_S: Final = 5.0
ANSWER_TIMEOUT_S: Final = 60.0
"""An import of a registry that has just started takes seconds."""


class RegistryError(Exception):
    """The message says which registry, and what it answered."""


class Unreachable(RegistryError):
    """It does not answer, or is not what it is said to be: nothing is known of it."""


class Refused(RegistryError):
    """It answered, and did not do it."""


class Registry(Protocol):
    """Every call raises RegistryError."""

    def contents(self) -> Contents: ...

    def version(self, subject: str, number: int) -> Version | None:
        """As a client reads it now."""

    def level(self, subject: str | None) -> str | None: ...

    def refuses_writes(self) -> bool:
        """Whether clients' registrations are refused, by the registry's own switch."""

    def refuse_writes(self, refuse: bool) -> None:
        """Turn the switch unless it is turned that way; ends ``begin_writing``, also that of a pass that was killed."""

    def begin_writing(self) -> None: ...

    def register(self, subject: str, number: int, version: Version) -> None:
        """With this number and this id, live."""

    def restore(self, subject: str, number: int, version: Version) -> None: ...

    def delete(self, subject: str, number: int, for_good: bool) -> None: ...

    def set_level(self, subject: str | None, level: str | None) -> None: ...

    def close(self) -> None: ...


class Credentials(NamedTuple):
    user: str | None = None
    password_file: Path | None = None
    token_file: Path | None = None
    cacert: Path | None = None
    cert: Path | None = None
    key: Path | None = None


class Rest:
    """Requests to one registry, one after the other."""

    def __init__(self, url: str, credentials: Credentials, transport: httpx.BaseTransport | None = None) -> None:
        """Raises NotUsable (``isthmus.admin_requests``): files cannot be used. ``transport``: for tests."""
        import httpx

        headers, auth = {}, None
        if credentials.token_file is not None:
            headers["authorization"] = f"Bearer {token_of(credentials.token_file)}"
        elif credentials.user is not None and credentials.password_file is not None:
            auth = httpx.BasicAuth(credentials.user, _password(credentials.password_file))
        plain = url.lower().startswith("http:")
        self.url = url.rstrip("/")
        self._errors = httpx
        self._client = httpx.Client(
            timeout=httpx.Timeout(ANSWER_TIMEOUT_S, connect=CONNECT_TIMEOUT_S),
            trust_env=False,  # registries are on private addresses
            headers=headers,
            auth=auth,
            verify=False if plain else tls_of(credentials.cacert, credentials.cert, credentials.key),
            transport=transport,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._client.close()

    def get(self, path: str, **query: Any) -> Any:
        """Raises Refused, also where there is nothing."""
        return self._json(self._ask("GET", path, params=query))

    def find(self, path: str, **query: Any) -> Any | None:
        """None: it says that there is nothing."""
        response = self._ask("GET", path, missing=True, params=query)
        return None if response.status_code == 404 else self._json(response)

    def find_text(self, path: str) -> str | None:
        response = self._ask("GET", path, missing=True)
        return None if response.status_code == 404 else response.text

    def send(self, method: str, path: str, body: Any = None, missing: bool = False, **query: Any) -> None:
        """``missing``: that there is nothing is as good as done."""
        self._ask(method, path, missing=missing, json=body, params=query)

    def send_bytes(self, path: str, body: bytes, headers: dict[str, str]) -> None:
        self._ask("POST", path, content=body, headers=headers)

    def _ask(self, method: str, path: str, missing: bool = False, **arguments: Any) -> httpx.Response:
        if arguments.get("json", ...) is None:
            del arguments["json"]
        try:
            response = self._client.request(method, self.url + path, **arguments)
        except (self._errors.TransportError, self._errors.InvalidURL, self._errors.DecodingError) as error:
            raise Unreachable(f"no answer from {self.url} ({str(error) or type(error).__name__})") from None
        if response.is_success or (missing and response.status_code == 404):
            return response
        message = f"{self.url} answered {response.status_code} to {method} {path}: {_said(response)}"
        # Who may not log in, or meets an error of the registry itself, has learned nothing of its contents.
        kind = Unreachable if response.status_code in (401, 403) or response.status_code >= 500 else Refused
        raise kind(message)

    def _json(self, response: httpx.Response) -> Any:
        try:
            return response.json()
        except ValueError:
            raise Unreachable(f"{self.url} is not a schema registry: what it answered is not JSON") from None


def _password(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise NotUsable("FILE", f"the password file {path} cannot be read: {reason}") from None


def _said(response: httpx.Response) -> str:
    try:
        answer = response.json()
    except ValueError:
        return response.reason_phrase
    if isinstance(answer, dict):
        return str(answer.get("message") or answer.get("title") or answer)[:500]
    return str(answer)[:500]


def quoted(name: str) -> str:
    """A subject as part of a path."""
    return quote(name, safe="")
