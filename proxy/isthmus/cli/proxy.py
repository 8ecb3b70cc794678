"""``isthmus proxy``: run a proxy, or check its configuration."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from isthmus.cli.output import EXIT_CODES, CliError, Exit, Output, OutputOption, example, show

if TYPE_CHECKING:
    from isthmus.config import Problem

app = typer.Typer(rich_markup_mode=None)


@app.command(epilog=example("isthmus proxy --config a.toml", "isthmus proxy --config a.toml --check") + EXIT_CODES)
def proxy(
    config: Annotated[
        Path, typer.Option("--config", exists=True, dir_okay=False, help="The configuration, a TOML file.")
    ],
    check: Annotated[
        bool,
        typer.Option("--check", help="Only say whether it would work: keys, files, certificates, bootstrap servers."),
    ] = False,
    new_control_log: Annotated[
        bool,
        typer.Option(
            "--new-control-log",
            help="The control topic is lost, or its end: give up what it held (reservations, links), and go on with "
            "what is there. For one start of one proxy. `isthmus control import` and `repair` bring it back.",
        ),
    ] = False,
    output: OutputOption = Output.TABLE,
) -> None:
    """Run a proxy in the foreground, until SIGTERM or SIGINT drains it."""
    from isthmus.config import ConfigError, load_config
    from isthmus.errors import ConfigurationError

    try:
        loaded = load_config(config)
        if not check:
            from isthmus.process import run

            raise typer.Exit(run(loaded, new_control_log=new_control_log))
    except ConfigurationError as error:
        if check and isinstance(error, ConfigError):
            _report(config, error.problems, output)
        raise CliError("INVALID_CONFIG", str(error), Exit.FAILED, output) from None

    import asyncio

    from isthmus.config_check import check as check_config

    _report(config, asyncio.run(check_config(loaded)), output)


def _report(config: Path, problems: list[Problem], output: Output) -> None:
    """Print the verdict of a check and end the command."""
    verdict = {
        "valid": not problems,
        "problems": [
            {"key": each.key, "found": each.found, "expected": each.expected, "fix": each.fix} for each in problems
        ],
    }

    def lines(_: Any) -> list[str]:
        if not problems:
            return [f"{config}: valid, and every bootstrap server answers"]
        return [f"{config}: {len(problems)} problem{'s' if len(problems) > 1 else ''}", *(f"  {p}" for p in problems)]

    show(verdict, output, lines)
    if problems:
        raise typer.Exit(Exit.NOT_REACHABLE if all(each.unreachable for each in problems) else Exit.FAILED)
    raise typer.Exit(Exit.OK)
