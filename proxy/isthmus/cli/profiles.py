"""Profiles: admin listeners by name, in a TOML file of the user's.

::

    current = "prod-a"                     # `isthmus config use` writes this line

    [profiles.prod-a]
    url = "https://proxy-a.example.org:28080"
    token_file = "prod-a.token"
    cacert = "ca.pem"
    cert = "me.pem"
    key = "me.key"

Paths are relative to the file's directory. It is ``$ISTHMUS_CONFIG``, else ``isthmus/config.toml`` in
``$XDG_CONFIG_HOME`` or ``~/.config``.
"""

from __future__ import annotations

import os
import re
import tempfile
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from isthmus.cli.files import why
from isthmus.cli.output import CliError, Exit, Output

_NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,100}")
"""What TOML takes as a key without quotes."""
_CURRENT_LINE: Final = re.compile(r"^[ \t]*current[ \t]*=.*$", re.MULTILINE)
_PATHS: Final = ("token_file", "cacert", "cert", "key")
_KEYS: Final = ("url", *_PATHS)


@dataclass(frozen=True, slots=True)
class Profile:
    """How one admin listener is reached."""

    url: str
    token_file: Path | None = None
    cacert: Path | None = None
    cert: Path | None = None
    key: Path | None = None


@dataclass(frozen=True, slots=True)
class Profiles:
    """What the file has. One that is not there has nothing."""

    path: Path
    current: str | None = None
    by_name: Mapping[str, Profile] = field(default_factory=dict)

    def find(self, name: str, output: Output) -> Profile:
        """The profile of that name. Raises CliError."""
        if name not in self.by_name:
            known = ", ".join(sorted(self.by_name)) or "none"
            raise CliError("NO_SUCH_PROFILE", f"{self.path} has no profile {name!r}: {known}", Exit.USAGE, output)
        return self.by_name[name]


def profiles_path() -> Path:
    if chosen := os.environ.get("ISTHMUS_CONFIG"):
        return Path(chosen)
    home = os.environ.get("XDG_CONFIG_HOME")
    return (Path(home) if home else Path.home() / ".config") / "isthmus" / "config.toml"


def read_profiles(output: Output) -> Profiles:
    """Read the file. Raises CliError where it is there and cannot be used."""
    path = profiles_path()
    try:
        return _parsed(path, path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return Profiles(path)
    except (OSError, ValueError) as error:
        raise CliError("PROFILES", f"{path} cannot be used: {why(error)}", Exit.USAGE, output) from None


def use(profiles: Profiles, name: str, output: Output) -> None:
    """Make a profile the current one. The rest of the file stays as it is. Raises CliError."""
    profiles.find(name, output)
    path, line = profiles.path, f'current = "{name}"'
    try:
        text = path.read_text(encoding="utf-8")
        head, table, rest = _at_first_table(text)
        changed, found = _CURRENT_LINE.subn(line, head, count=1)
        text = changed + table + rest if found else f"{line}\n{text}"
        if _parsed(path, text).current != name:
            raise ValueError(f"write {line} at its beginning by hand")
        _replace(path.resolve(), text)
    except (OSError, ValueError) as error:
        raise CliError("PROFILES", f"{path} cannot be changed: {why(error)}", Exit.FAILED, output) from None


def _parsed(path: Path, text: str) -> Profiles:
    """Raises ValueError."""
    tables = tomllib.loads(text)
    current, named = tables.pop("current", None), tables.pop("profiles", {})
    if tables:
        raise ValueError(f"it has {next(iter(tables))!r}, and may have current and profiles")
    if not isinstance(named, dict) or not (current is None or isinstance(current, str)):
        raise ValueError('current is text, and profiles are tables: [profiles.NAME], url = "http://..."')
    found = {name: _profile(path.parent, name, settings) for name, settings in named.items()}
    return Profiles(path, current, found)


def _profile(directory: Path, name: str, settings: Any) -> Profile:
    if not _NAME.fullmatch(name):
        raise ValueError(f"the profile {name!r} has not 1 to 100 letters, digits, _ and - as its name")
    if not isinstance(settings, dict) or not all(isinstance(each, str) for each in settings.values()):
        raise ValueError(f"profile {name!r} is to be a table of texts")
    if unknown := [key for key in settings if key not in _KEYS]:
        raise ValueError(f"profile {name!r} has {unknown[0]!r}, and may have {', '.join(_KEYS)}")
    if "url" not in settings:
        raise ValueError(f"profile {name!r} has no url")
    paths = {key: directory / Path(settings[key]).expanduser() for key in _PATHS if key in settings}
    return Profile(settings["url"], **paths)


def _at_first_table(text: str) -> tuple[str, str, str]:
    """What stands before the first table's head, and the rest."""
    match = re.search(r"^[ \t]*\[", text, re.MULTILINE)
    at = len(text) if match is None else match.start()
    return text[:at], text[at : at + 1], text[at + 1 :]


def _replace(path: Path, text: str) -> None:
    """Write a file anew, whole or not at all."""
    mode = path.stat().st_mode & 0o777
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=path.parent, prefix=path.name, delete=False) as made:
        try:
            made.write(text)
            made.flush()
            os.fchmod(made.fileno(), mode)
            os.replace(made.name, path)
        except OSError:
            Path(made.name).unlink(missing_ok=True)
            raise
