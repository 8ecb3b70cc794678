"""``isthmus control``: the control log; here, as a file, and back into its topic when that is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from isthmus.cli import control_level
from isthmus.cli.client import Admin, UrlOption
from isthmus.cli.files import named
from isthmus.cli.output import (
    EXIT_CODES,
    CliError,
    Exit,
    Output,
    OutputOption,
    example,
    fields,
    show,
    shows_progress,
)

if TYPE_CHECKING:
    from isthmus.config import ProxyConfig
    from isthmus.control_repair import ControlRepair, Plan
    from isthmus_control.exports import Export

app = typer.Typer(
    rich_markup_mode=None,
    no_args_is_help=True,
    help="The control log, __isthmus_control: its feature level; written to a file, and brought back when its topic is "
    "lost. docs/operations.md has the steps.",
    epilog=example(
        "isthmus control upgrade --dry-run",
        "isthmus control export",
        "isthmus control repair control-log.json --config a.toml --dry-run",
    )
    + EXIT_CODES,
)

app.add_typer(control_level.app)

ConfigOption = Annotated[
    Path,
    typer.Option(
        "--config", exists=True, dir_okay=False, help="A proxy's configuration: the cluster, and how to reach it."
    ),
]
FileArgument = Annotated[Path, typer.Argument(help="What `isthmus control export` wrote.")]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Only say what would be done, and what would be lost.")]
AcceptOption = Annotated[
    bool, typer.Option("--accept-loss", help="Give up what the export (or the topic, without one) does not have.")
]


@app.command(
    epilog=example("isthmus control export", "isthmus control export --url http://127.0.0.1:28081 -o json") + EXIT_CODES
)
def export(url: UrlOption = None, output: OutputOption = Output.TABLE) -> None:
    """Have a proxy write what it remembers of the control log to a file of its machine, and print where.

    In its data directory, or a temporary one, readable by its user alone: secrets of links are in it, sealed where a
    control key is set. A proxy that still runs remembers the log when its topic is lost.
    """
    with Admin(url, output) as admin:
        written = admin.post("/v1/control/export")
    show(written, output, lambda found: fields(found.items()))


@app.command("import", epilog=example("isthmus control import control-log.json --config a.toml --dry-run") + EXIT_CODES)
def import_file(
    file: FileArgument,
    config: ConfigOption,
    dry_run: DryRunOption = False,
    accept_loss: AcceptOption = False,
    output: OutputOption = Output.TABLE,
) -> None:
    """Make a control topic that is lost again from an export, at the same offsets. Waiting proxies go on by themselves.

    Refused where the topic holds something else (`isthmus control repair`), and where anchors know of more than the
    export has, unless that is given up.
    """
    from isthmus.control_repair import Step

    _with_export(file, config, dry_run, accept_loss, output, lambda plan: plan.step is not Step.REPLACE)


@app.command(
    epilog=example(
        "isthmus control repair control-log.json --config a.toml --dry-run",
        "isthmus control repair --config a.toml --accept-loss",
    )
    + EXIT_CODES
)
def repair(
    config: ConfigOption,
    file: Annotated[Path | None, typer.Argument(help="What `isthmus control export` wrote.")] = None,
    dry_run: DryRunOption = False,
    accept_loss: AcceptOption = False,
    output: OutputOption = Output.TABLE,
) -> None:
    """Bring a control topic that lost its end back to what an export has, or accept it as it is.

    With FILE: what is missing is appended. Where other records were written in its place, the topic is deleted and made
    again from the export, which gives these up (--accept-loss). Without FILE: the topic counts as it is from then on.
    """
    if file is not None:
        _with_export(file, config, dry_run, accept_loss, output, lambda plan: True)
        return
    loaded = _loaded(config, output)

    async def work(control: ControlRepair) -> dict[str, Any]:
        known = await control.known()
        plan = await control.plan_to_accept(known)
        if not dry_run:
            _consent(plan, accept_loss, output, always=True)
            return _result(plan, True, await control.accept(known))
        return _result(plan, False)

    show(_on_cluster(loaded, output, work), output, _lines)


def _with_export(
    file: Path, config: Path, dry_run: bool, accept_loss: bool, output: Output, allowed: Callable[[Plan], bool]
) -> None:
    loaded = _loaded(config, output)
    export = _read(file, loaded, output)

    async def work(control: ControlRepair) -> dict[str, Any]:
        known = await control.known()
        plan = await control.plan(export, known)
        if not allowed(plan):
            message = "the topic holds other records than the export: see `isthmus control repair`"
            raise CliError("NOT_EMPTY", message, Exit.FAILED, output)
        if dry_run:
            return _result(plan, False)
        _consent(plan, accept_loss, output)
        progress = shows_progress(output)

        def wrote(offset: int) -> None:
            if progress:
                typer.echo(f"\rwritten up to offset {offset} of {export.end}", err=True, nl=offset == export.end)

        return _result(plan, True, await control.write(plan, export, known, wrote))

    show(_on_cluster(loaded, output, work), output, _lines)


def _loaded(config: Path, output: Output) -> ProxyConfig:
    from isthmus.config import load_config
    from isthmus.errors import ConfigurationError

    try:
        return load_config(config)
    except ConfigurationError as error:
        raise CliError("INVALID_CONFIG", str(error), Exit.FAILED, output) from None


def _read(file: Path, config: ProxyConfig, output: Output) -> Export:
    from isthmus_control.exports import MalformedExport, decode

    with named(file, output):
        content = file.read_bytes()
    try:
        return decode(content, config.cluster.control_key, config.cluster.other_control_keys)
    except MalformedExport as error:
        raise CliError("MALFORMED_EXPORT", f"{file}: {error}", Exit.USAGE, output) from None


def _consent(plan: Plan, accept_loss: bool, output: Output, always: bool = False) -> None:
    """Raise CliError where something would be given up that the operator has not given up."""
    if accept_loss or not (plan.given_up or always):
        return
    lost = "; ".join(plan.given_up) or "whatever it lost that nothing knows of"
    message = f"this gives up: {lost}. Say --accept-loss if it must be, or take an export that has more"
    raise CliError("LOSS_NOT_ACCEPTED", message, Exit.FAILED, output)


def _result(plan: Plan, done: bool, end_offset: int | None = None) -> dict[str, Any]:
    return {
        "step": plan.step.value,
        "done": done,
        "from_offset": plan.from_offset,
        "end_offset": plan.end_offset if end_offset is None else end_offset,
        "given_up": list(plan.given_up),
    }


def _lines(result: dict[str, Any]) -> Iterator[str]:
    what = {
        "nothing": "the topic has all of it",
        "make": "the topic is made, and written up to offset {end_offset}",
        "append": "offsets {from_offset} to {end_offset} are appended",
        "replace": "the topic is deleted, made again, and written up to offset {end_offset}",
        "accept": "the topic counts as it is, up to offset {end_offset}",
    }[result["step"]]
    yield ("" if result["done"] else "would be done: ") + what.format_map(result)
    for each in result["given_up"]:
        yield f"given up: {each}"


def _on_cluster(
    config: ProxyConfig, output: Output, work: Callable[[ControlRepair], Awaitable[dict[str, Any]]]
) -> dict[str, Any]:
    from isthmus.anchor_places import places_of
    from isthmus.control_repair import ControlRepair, RepairRefused
    from isthmus.errors import ConfigurationError, KafkaError, PeerFault
    from isthmus.kafka.client import ClusterClient
    from isthmus_control.replica import Halted
    from isthmus_control.signing import Signer

    async def run() -> dict[str, Any]:
        cluster = config.cluster
        servers, key = [str(server) for server in cluster.bootstrap_servers], cluster.control_key
        async with ClusterClient(servers, config.cluster.security) as client:
            signer = (
                None
                if key is None or client.cluster_id is None
                else Signer(key, client.cluster_id, cluster.other_control_keys)
            )
            return await work(ControlRepair(client, places_of(config.data.directory, client), signer))

    try:
        return asyncio.run(run())
    except ConfigurationError as error:
        raise CliError("INVALID_CONFIG", str(error), Exit.FAILED, output) from None
    except RepairRefused as error:
        raise CliError(error.code, str(error), Exit.FAILED, output) from None
    except Halted as error:
        raise CliError("UNREADABLE", f"the topic is no control log any more: {error}", Exit.FAILED, output) from None
    except KafkaError as error:
        raise CliError(error.name, str(error), Exit.FAILED, output) from None
    except PeerFault as error:
        raise CliError("NOT_REACHABLE", f"the cluster does not answer: {error}", Exit.NOT_REACHABLE, output) from None
