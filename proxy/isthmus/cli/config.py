"""``isthmus config``: the profiles that commands use where nothing else says which proxy they ask."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

import typer

from isthmus.cli.output import EXIT_CODES, CliError, Exit, Output, OutputOption, columns, example, fields, show
from isthmus.cli.profiles import Profile, Profiles, read_profiles
from isthmus.cli.profiles import use as make_current

app = typer.Typer(
    rich_markup_mode=None,
    no_args_is_help=True,
    help="Profiles: the admin listeners of proxies by name, with tokens and certificates, in a TOML file of yours "
    "($ISTHMUS_CONFIG, else ~/.config/isthmus/config.toml). docs/configuration.md has an example.",
    epilog=example("isthmus config list", "isthmus config use prod-a", "isthmus --profile prod-b status") + EXIT_CODES,
)

NameArgument = Annotated[str, typer.Argument(help="The profile's name.")]


@app.callback()
def _config() -> None:
    pass


@app.command("list", epilog=example("isthmus config list", "isthmus config list -o json") + EXIT_CODES)
def list_profiles(output: OutputOption = Output.TABLE) -> None:
    """List the profiles."""
    profiles = read_profiles(output)
    show(
        [_view(profiles, name) for name in profiles.by_name],
        output,
        lambda views: columns(
            ("PROFILE", "CURRENT", "URL", "TOKEN_FILE"),
            ((each["profile"], each["current"], each["url"], each["token_file"]) for each in views),
        ),
    )


@app.command("show", epilog=example("isthmus config show", "isthmus config show prod-a -o json") + EXIT_CODES)
def show_profile(
    name: Annotated[str | None, typer.Argument(help="The profile's name; without it the current one.")] = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Show a profile: where it leads, and which files it uses. No token is printed."""
    profiles = read_profiles(output)
    chosen = name or profiles.current
    if chosen is None:
        message = f"{profiles.path} has no current profile: isthmus config use NAME"
        raise CliError("NO_SUCH_PROFILE", message, Exit.USAGE, output)
    profiles.find(chosen, output)

    def lines(view: dict[str, Any]) -> Iterator[str]:
        yield from fields((key.replace("_", " "), value) for key, value in view.items())

    show(_view(profiles, chosen), output, lines)


@app.command(epilog=example("isthmus config use prod-a", "isthmus config use prod-b -o json") + EXIT_CODES)
def use(name: NameArgument, output: OutputOption = Output.TABLE) -> None:
    """Make a profile the one that commands use, unless --url, --profile or the environment say otherwise."""
    profiles = read_profiles(output)
    make_current(profiles, name, output)
    show(_view(read_profiles(output), name), output, lambda view: [f"commands go to {view['url']} ({name})"])


def _view(profiles: Profiles, name: str) -> dict[str, Any]:
    profile: Profile = profiles.by_name[name]
    paths = {key: getattr(profile, key) for key in ("token_file", "cacert", "cert", "key")}
    return {
        "profile": name,
        "current": name == profiles.current,
        "url": profile.url,
        **{key: None if path is None else str(path) for key, path in paths.items()},
        "file": str(profiles.path),
    }
