"""The root of the command line: which commands there are, and how an error ends one."""

from __future__ import annotations

import importlib
from importlib.metadata import EntryPoint, entry_points, version
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from typer.core import TyperGroup
from typer.main import get_command

from isthmus.cli.connection import Shown, shown
from isthmus.cli.output import EXIT_CODES, CliError, example

COMMAND_ENTRY_POINTS: Final = "isthmus.commands"
OWN: Final = {
    "proxy": "isthmus.cli.proxy",
    "namespace": "isthmus.cli.namespace",
    "link": "isthmus.cli.link",
    "drill": "isthmus.cli.drill",
    "topic": "isthmus.cli.topic",
    "plugin": "isthmus.cli.plugin",
    "offsets": "isthmus.cli.offsets",
    "tree": "isthmus.cli.tree",
    "schemas": "isthmus.cli.schemas",
    "status": "isthmus.cli.status",
    "verify": "isthmus.cli.verify",
    "salvage": "isthmus.cli.salvage",
    "control": "isthmus.cli.control",
    "config": "isthmus.cli.config",
    "audit": "isthmus.cli.audit",
}
"""Modules with an ``app``."""
ORDER: Final = (
    *(
        "demo",
        "cluster",
        "proxy",
        "namespace",
        "link",
        "drill",
        "topic",
        "plugin",
        "offsets",
        "tree",
        "schemas",
        "status",
        "verify",
        "salvage",
        "control",
        "audit",
        "config",
        "spark",
        "bench",
    ),
)
"""In which help lists them; others follow by name."""


class Root(TyperGroup):
    """Loads commands by name, and turns :class:`CliError` into a message and an exit code."""

    def list_commands(self, ctx: Any) -> list[str]:
        names = {*OWN, *_mounted()}
        return [name for name in ORDER if name in names] + sorted(names.difference(ORDER))

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in self.commands:
            loaded = self._load(cmd_name)
            if loaded is None:
                return None
            self.commands[cmd_name] = loaded
        return self.commands[cmd_name]

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and args[0] not in self.commands:
            # The suggestions for a mistyped name come from the commands that are loaded.
            known = self.list_commands(ctx)
            if args[0] not in known:
                for name in known:
                    self.get_command(ctx, name)
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except CliError as error:
            error.show()
            raise typer.Exit(error.exit_code) from None

    def _load(self, name: str) -> Any:
        if name in OWN:
            return _command(name, importlib.import_module(OWN[name]).app)
        entry = _mounted().get(name)
        if entry is None:
            return None
        try:
            return _command(name, entry.load())
        except Exception as error:  # whatever another distribution's import may raise
            return _unavailable(name, entry, error)


def _mounted() -> dict[str, EntryPoint]:
    return {entry.name: entry for entry in entry_points(group=COMMAND_ENTRY_POINTS)}


def _command(name: str, what: Any) -> Any:
    """``what`` as the command ``name``. Raises TypeError."""
    if not isinstance(what, typer.Typer):
        if not callable(what) or isinstance(what, type):
            raise TypeError(f"{what!r} is neither a typer.Typer nor a function")
        function, what = what, typer.Typer()
        what.command(name)(function)
    command = get_command(what)
    command.name = name
    # Completion is installed for the whole of `isthmus`.
    command.params = [each for each in command.params if each.name not in ("install_completion", "show_completion")]
    return command


def _unavailable(name: str, entry: EntryPoint, error: Exception) -> Any:
    """A command in the place of one that cannot be loaded: it says so, and the others work."""
    distribution = entry.dist.name if entry.dist else "the distribution"
    if isinstance(error, ModuleNotFoundError):
        message = f"isthmus {name} needs the module {error.name!r}, which is not installed (wanted by {distribution})"
    else:
        message = f"isthmus {name} cannot be loaded from {entry.value} ({distribution}): {error!r}"
    stub = typer.Typer()

    @stub.command(
        name,
        help=f"Not available here: {message}.",
        short_help="(not available here: see --help)",
        context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
    )
    def unavailable() -> None:
        raise CliError("NOT_INSTALLED", message)

    return _command(name, stub)


app = typer.Typer(
    name="isthmus",
    cls=Root,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=example(
        "isthmus status --url http://127.0.0.1:28080",
        "isthmus --token-file operator.token --cacert ca.pem status --url https://proxy-a.example.org:28080",
        "isthmus verify a-to-b -o json",
    )
    + EXIT_CODES,
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(version("isthmus"))
        raise typer.Exit


def _file(name: str, help_: str) -> Any:
    return typer.Option(f"--{name}", envvar=f"ISTHMUS_{name.upper().replace('-', '_')}", dir_okay=False, help=help_)


@app.callback()
def _root(
    profile: Annotated[
        str | None,
        typer.Option("--profile", envvar="ISTHMUS_PROFILE", help="The profile to use (`isthmus config list`)."),
    ] = None,
    token_file: Annotated[Path | None, _file("token-file", "A file with a token of the admin listener.")] = None,
    cacert: Annotated[Path | None, _file("cacert", "Who signs its certificate (PEM); else the system's.")] = None,
    cert: Annotated[Path | None, _file("cert", "A client certificate to show to it (PEM).")] = None,
    key: Annotated[Path | None, _file("key", "The client certificate's private key (PEM).")] = None,
    show_version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Exact replication between unmodified Kafka clusters (KIP-986), by proxies beside their brokers."""
    shown.set(Shown(profile, token_file, cacert, cert, key))
