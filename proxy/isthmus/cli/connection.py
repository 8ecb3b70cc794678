"""Which admin listener a command asks, and what it shows there."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass, replace
from pathlib import Path

from isthmus.admin_requests import DEFAULT_URL
from isthmus.cli.output import Output
from isthmus.cli.profiles import Profile, read_profiles


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
