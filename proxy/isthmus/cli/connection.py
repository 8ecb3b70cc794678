"""Which admin listener a command asks, and what it shows there."""

from __future__ import annotations

import ssl
from contextvars import ContextVar
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from isthmus.cli.output import CliError, Exit, Output
from isthmus.cli.profiles import Profile, read_profiles

DEFAULT_URL: Final = "http://127.0.0.1:28080"
UNIX_SCHEME: Final = "unix:"


@dataclass(frozen=True, slots=True)
class Shown:
    """The options of ``isthmus`` itself, before the command's name. What is None was not given."""

    profile: str | None = None
    token_file: Path | None = None
    cacert: Path | None = None
    cert: Path | None = None
    key: Path | None = None


shown: ContextVar[Shown] = ContextVar("shown")


def chosen(url: str | None, output: Output) -> Profile:
    """What to connect to. ``url``: what the command was given. Raises CliError.

    A current profile counts where neither a URL nor a profile is named: its token goes to no other URL by itself.
    """
    options = shown.get()
    profile = Profile(url or DEFAULT_URL)
    if options.profile is not None:
        profile = read_profiles(output).find(options.profile, output)
        profile = replace(profile, url=url or profile.url)
    elif url is None and (profiles := read_profiles(output)).current is not None:
        profile = profiles.find(profiles.current, output)
    given = {key: getattr(options, key) for key in ("token_file", "cacert", "cert", "key")}
    return replace(profile, **{key: path for key, path in given.items() if path is not None})


def token_of(path: Path, output: Output) -> str:
    """The first token in a file: that of its first line, behind a name if there is one. Raises CliError."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise CliError("FILE", f"the token file {path} cannot be read: {reason}", Exit.USAGE, output) from None
    for line in lines:
        if words := line.partition("#")[0].split():
            if not words[-1].isascii() or not words[-1].isprintable():
                break
            return words[-1]
    raise CliError("FILE", f"there is no token in {path}", Exit.USAGE, output)


def tls_of(profile: Profile, output: Output) -> ssl.SSLContext:
    """TLS with the profile's certificates, or the system's. Raises CliError."""
    try:
        context = ssl.create_default_context(cafile=None if profile.cacert is None else str(profile.cacert))
        if profile.cert is not None:
            context.load_cert_chain(profile.cert, profile.key)
    except OSError as error:  # an SSLError is one, too
        files = ", ".join(str(path) for path in (profile.cacert, profile.cert, profile.key) if path is not None)
        reason = error.reason if isinstance(error, ssl.SSLError) else error.strerror
        raise CliError("FILE", f"{files} cannot be used: {reason}", Exit.USAGE, output) from None
    return context
