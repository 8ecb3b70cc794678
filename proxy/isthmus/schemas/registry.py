"""A registry that is asked over HTTP, of whatever kind."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, Self, TypeVar
from urllib.parse import quote

from isthmus.admin_requests import NotUsable, tls_of, token_of
from isthmus.schemas.contents import Contents, Version

if TYPE_CHECKING:
    import httpx

CONNECT_TIMEOUT_S: Final = 5.0
ANSWER_TIMEOUT_S: Final = 60.0
"""An import of a registry that has just started takes seconds."""
PAGE: Final = 500
READINGS_MAX: Final = 3
BEHIND_ALL: Final = 2**31 - 1
"""A place in a list where nothing stands."""

K = TypeVar("K")
T = TypeVar("T")


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

    def authorization(self) -> str | None:
        """What a request says of who asks, as files have it now. Raises NotUsable."""
        if self.token_file is not None:
            return f"Bearer {token_of(self.token_file)}"
        if self.user is not None and self.password_file is not None:
            return f"Basic {b64encode(f'{self.user}:{_password(self.password_file)}'.encode()).decode()}"
        return None


class Rest:
    """Requests to one registry, one after the other."""

    def __init__(self, url: str, credentials: Credentials, transport: httpx.BaseTransport | None = None) -> None:
        """Raises NotUsable (``isthmus.admin_requests``): files cannot be used. ``transport``: for tests."""
        import httpx

        credentials.authorization()
        plain = url.lower().startswith("http:")
        self.url = url.rstrip("/")
        self._errors = httpx
        self._credentials = credentials
        self._client = httpx.Client(
            timeout=httpx.Timeout(ANSWER_TIMEOUT_S, connect=CONNECT_TIMEOUT_S),
            trust_env=False,  # registries are on private addresses
            auth=self._authorized,  # by files that may be others by then: tokens end while a service runs
            verify=False if plain else tls_of(credentials.cacert, credentials.cert, credentials.key),
            transport=transport,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._client.close()

    def get(self, path: str, of: type = dict, **query: Any) -> Any:
        """Raises Refused, also where there is nothing. ``of``: what the answer is, an object or a list."""
        return self._json(self._ask("GET", path, params=query), of)

    def find(self, path: str, of: type = dict, **query: Any) -> Any | None:
        """None: it says that there is nothing."""
        response = self._ask("GET", path, missing=True, params=query)
        return None if response.status_code == 404 else self._json(response, of)

    def find_text(self, path: str) -> str | None:
        response = self._ask("GET", path, missing=True)
        return None if response.status_code == 404 else response.text

    def pages(self, page: Callable[[int], dict[K, T]]) -> dict[K, T]:
        """All of a list that is asked for from one place on, and from a later one, by what tells one from another.

        Each page has the last one of the page before as well: where something went for good meanwhile, all behind it
        have moved, and one would be passed over. So one that comes again is to have its place of before, or to be told
        as another one. In which order a page says what it has does not matter: Apicurio sorts each by its names.

        Raises Unreachable where things come and go again and again.
        """
        for _ in range(READINGS_MAX):
            found = page(0)
            while found:
                more = page(len(found) - 1)
                if more.keys() == found.keys() and page(BEHIND_ALL).keys() == found.keys():
                    return found  # one that has no pages says all of it again, whatever is asked
                if len(more.keys() & found.keys()) != 1:
                    break
                if len(more) == 1:
                    return found
                found |= more
            else:
                return found
        raise Unreachable(f"{self.url} cannot be read: what it holds changes all the time")

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
        except NotUsable as error:
            raise Unreachable(f"{self.url} was not asked: {error.message}") from None
        if response.is_success or (missing and _says_missing(response)):
            return response
        message = f"{self.url} answered {response.status_code} to {method} {path}: {_said(response)}"
        # Who may not log in, comes too often or is sent elsewhere, or meets an error, has learned nothing of what is
        # there; nor from a 404 that is not the registry's own.
        unknown = response.is_redirect or response.is_server_error or response.status_code in (401, 403, 408, 429)
        raise Unreachable(message) if unknown or (missing and response.status_code == 404) else Refused(message)

    def _authorized(self, request: httpx.Request) -> httpx.Request:
        authorization = self._credentials.authorization()
        if authorization is not None:
            request.headers["authorization"] = authorization
        return request

    def _json(self, response: httpx.Response, of: type) -> Any:
        try:
            answer = response.json(object_hook=_Fields)
        except ValueError:
            raise Unreachable(f"{self.url} is not a schema registry: what it answered is not JSON") from None
        if not isinstance(answer, of):
            raise Unreachable(f"{self.url} is not a schema registry: {response.text[:100]}")
        return answer


class _Fields(dict[str, Any]):
    """Of an answer. One that is left out is no bug of ours."""

    def __missing__(self, name: str) -> Any:
        raise Unreachable(f"it is not a schema registry: an answer has no {name}")


def _password(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise NotUsable("FILE", f"the password file {path} cannot be read: {reason}") from None


def _says_missing(response: httpx.Response) -> bool:
    """That there is nothing, in a registry's own words: what stands in front of one answers 404 as well."""
    if response.status_code != 404:
        return False
    try:
        answer = response.json()
    except ValueError:
        return False
    if not isinstance(answer, dict):
        return False
    code, name = str(answer.get("error_code")), str(answer.get("name"))
    # Confluent's codes, of which 404 is for a path that it does not know; Apicurio's names.
    return (code.startswith("404") and code != "404") or name.endswith("NotFoundException")


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
