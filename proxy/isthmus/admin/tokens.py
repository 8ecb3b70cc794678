"""Files with the tokens of one role: who may use the admin listener.

A line is a token, with or without a name before it; ``#`` begins a comment::

    alice  3f0c...        # openssl rand -hex 32
    9b1e...

A file is read again whenever it changes. While a changed one cannot be used, the tokens of before are good: a file that
is being written keeps nobody out. An empty one has no tokens.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from isthmus.errors import ConfigurationError

log = logging.getLogger("isthmus.admin")

TOKEN_CHARS_MIN: Final = 32
"""128 bits as hexadecimal digits."""
FILE_BYTES_MAX: Final = 64 * 1024
SETTLED_S: Final = 1.0
"""Younger changes of a file may not show in its time: it is read again."""
FIX: Final = "Make a token with: openssl rand -hex 32"
_NAME: Final = re.compile(r"[A-Za-z0-9._@-]{1,100}")
_TOKEN: Final = re.compile(r"[\x21-\x7e]+")


@dataclass(frozen=True, slots=True)
class Token:
    """A token that is good. Itself it is kept nowhere."""

    name: str | None
    digest: bytes


def tokens_in(text: str) -> list[tuple[str | None, str]]:
    """Names and tokens of a file's text. Raises ValueError, whose message does not show what stands there."""
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        if len(words) > 2 or (len(words) == 2 and not _NAME.fullmatch(words[0])):
            raise ValueError(f"line {number} is neither a token nor a name and a token")
        if len(words[-1]) < TOKEN_CHARS_MIN or not _TOKEN.fullmatch(words[-1]):
            raise ValueError(f"the token in line {number} has not {TOKEN_CHARS_MIN} characters of ASCII, or more")
        found.append((words[0] if len(words) == 2 else None, words[-1]))
    return found


class TokenFile:
    """The tokens in a file. Raises ConfigurationError where it cannot be read to begin with."""

    def __init__(self, key: str, path: Path) -> None:
        """``key``: the setting that names the file."""
        self.trouble: str | None = None
        """Why the file as it is now is not used; None: it is."""
        self._key = key
        self._path = path
        self._seen: tuple[int, int, int] | None = None
        self._settled = False
        try:
            self._tokens = self._read()
        except (OSError, ValueError) as error:
            raise ConfigurationError(key, f'"{path}": {_reason(error)}', FIX) from None

    def find(self, presented: str) -> Token | None:
        """The token, if it is good. How long that takes does not depend on what was presented."""
        self._look()
        digest, found = _digest(presented), None
        for token in self._tokens:
            if hmac.compare_digest(token.digest, digest):
                found = token
        return found

    def _look(self) -> None:
        """Read the file again if it has changed."""
        try:
            status = os.stat(self._path)
            seen = status.st_mtime_ns, status.st_size, status.st_ino
            if seen == self._seen and self._settled:
                return
            self._tokens = self._read()
        except (OSError, ValueError) as error:
            trouble = f'{self._key} is not used as it is now: "{self._path}": {_reason(error)}'
            if trouble != self.trouble:
                log.error("token file not used", extra={"setting": self._key, "error": _reason(error)})
            self.trouble, self._seen = trouble, None
        else:
            if self.trouble is not None:
                log.info("token file used again", extra={"setting": self._key})
            self.trouble = None

    def _read(self) -> tuple[Token, ...]:
        with self._path.open("rb") as file:
            status = os.fstat(file.fileno())
            raw = file.read(FILE_BYTES_MAX + 1)
        if len(raw) > FILE_BYTES_MAX:
            raise ValueError(f"it has more than {FILE_BYTES_MAX} bytes")
        tokens = tuple(Token(name, _digest(token)) for name, token in tokens_in(raw.decode()))
        self._seen = status.st_mtime_ns, status.st_size, status.st_ino
        self._settled = time.time() - status.st_mtime > SETTLED_S
        return tokens


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()


def _reason(error: OSError | ValueError) -> str:
    if isinstance(error, UnicodeDecodeError):
        return "not UTF-8"
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
