"""``isthmus link``: pairs of clusters, and the namespaces that they replicate."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from isthmus.cli import grants
from isthmus.cli.client import Admin, UrlOption
from isthmus.cli.failover_lines import failed_over, heard, left_out_of, logs_differ, moment, of_topics
from isthmus.cli.files import named
from isthmus.cli.grants import BrokerSettingsOption, MayOption, waiting_lines
from isthmus.cli.left_out_lines import left_out_lines
from isthmus.cli.namespace import TypeOption
from isthmus.cli.operation import follow
from isthmus.cli.output import (
    EXIT_CODES,
    CliError,
    Exit,
    Output,
    OutputOption,
    columns,
    example,
    fields,
    prefix_cell,
    show,
)
from isthmus_control.bounds import (
    SYNC_CONFIRM_TIMEOUT_MS,
    SYNC_CONFIRM_TIMEOUT_MS_MAX,
    SYNC_CONFIRM_TIMEOUT_MS_MIN,
    VERIFY_EVERY,
    VERIFY_OFF,
)

app = typer.Typer(
    rich_markup_mode=None,
    no_args_is_help=True,
    help="Links between clusters, and the pairs of namespaces attached to them.",
    epilog=example(
        "isthmus link create a-to-b --remote 127.0.0.1:29292 --token-file b.token",
        "isthmus link attach a-to-b --local orders- --remote orders- --role leader",
    )
    + EXIT_CODES,
)

app.add_typer(grants.app)

NameArgument = Annotated[str, typer.Argument(help="The link's name.")]
LocalOption = Annotated[str, typer.Option("--local", help='Prefix of the local namespace; "" is the empty one.')]
OffsetsTopicOption = Annotated[
    Literal["off", "whole", "redacted", "encrypted"],
    typer.Option(
        "--offsets-topic",
        help="How this cluster's __consumer_offsets is copied: whole, redacted to --offsets-group, or encrypted with "
        "the keys of replication.offsets_keyring_file.",
    ),
]
MoveClientsOption = Annotated[
    str | None,
    typer.Option(
        "--move-clients",
        help="For how long clients that are at the cluster which led before are told to ask their bootstrap servers "
        "again, once the other one leads: 90s, 30m, 12h.",
    ),
]
OffsetsGroupOption = Annotated[
    list[str] | None,
    typer.Option(
        "--offsets-group",
        help="A group of a redacted copy, or a prefix with '*' behind it; several times for several.",
    ),
]
OnSourceLossOption = Annotated[
    Literal["cut", "hold"] | None,
    typer.Option(
        "--on-source-loss",
        help="What becomes of what the source acked In-Sync and then lost (power, an unclean election): the follower "
        "is cut to the source's log, or nothing is until an operator decides. Without it: as it is; at first hold "
        "where the source's namespace is strict, else cut.",
    ),
]
OnSourceDeleteOption = Annotated[
    Literal["keep", "delete"] | None,
    typer.Option(
        "--on-source-delete",
        help="What becomes of a topic whose source's topic is deleted: it keeps its records until an operator decides "
        "(isthmus topic forget), or it is deleted as well. Without it: as it is, at first keep.",
    ),
]
LocalOnlyOption = Annotated[
    bool, typer.Option("--local-only", help="Only this end, where the other cluster cannot be reached.")
]


@app.command(
    epilog=example(
        "isthmus link create a-to-b --remote 127.0.0.1:29292 --token-file b.token",
        "isthmus link create a-to-b --remote 127.0.0.1:29292 --token-file b.token --may follow:orders-,lead:orders-",
        "isthmus link create a-to-b --remote 127.0.0.1:29292 --offsets-topic redacted --offsets-group 'app-*'",
    )
    + EXIT_CODES
)
def create(
    name: NameArgument,
    remote: Annotated[str, typer.Option("--remote", help="host:port of a link listener of the other cluster.")],
    token_file: Annotated[
        Path | None,
        typer.Option(
            "--token-file",
            help="File with what `isthmus link token create` printed at the other cluster; - is standard input.",
        ),
    ] = None,
    may: MayOption = None,
    broker_settings: BrokerSettingsOption = False,
    offsets_topic: OffsetsTopicOption = "off",
    offsets_group: OffsetsGroupOption = None,
    url: UrlOption = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Create a link, both ends of it: here and at the cluster whose link listener --remote is.

    The token says what this cluster may have attached there, --may and --broker-settings what that one may here.
    """
    body: dict[str, Any] = {
        "link_name": name,
        "remote": remote,
        "offsets_topic": offsets_topic,
        "offsets_groups": offsets_group or [],
    }
    may_here = grants.grants_of(may, broker_settings, output)
    if may_here:  # versions before it take no such field
        body["may"] = may_here
    if token_file is not None:
        body["token"] = _token(token_file, output)
    with Admin(url, output) as admin:
        show(admin.post("/v1/links", body), output, _described)


@app.command(
    epilog=example(
        "isthmus link alter a-to-b --offsets-topic encrypted",
        "isthmus link alter a-to-b --offsets-topic redacted --offsets-group 'app-*' --offsets-group billing",
        "isthmus link alter a-to-b --offsets-topic off",
        "isthmus link alter a-to-b --config sync.confirm.timeout.ms=5000",
        "isthmus link alter a-to-b --verify-every 1d",
        "isthmus link alter a-to-b --config follower.replication.factor=3 --config follower.min.insync.replicas=2",
        "isthmus link alter a-to-b --local orders- --on-source-loss hold",
        "isthmus link alter a-to-b --local tests- --on-source-delete delete",
    )
    + EXIT_CODES
)
def alter(
    name: NameArgument,
    offsets_topic: OffsetsTopicOption | None = None,
    offsets_group: OffsetsGroupOption = None,
    config: Annotated[
        list[str] | None,
        typer.Option("--config", help="NAME=VALUE of a setting of both ends, NAME= to remove it; several times."),
    ] = None,
    verify_every: Annotated[
        str | None,
        typer.Option(
            "--verify-every",
            help="In which time both whole logs of what follows are compared again, in the background: 30m, 12h, 7d "
            "(where it was never set), or off; a setting of both ends.",
        ),
    ] = None,
    local: Annotated[
        str | None,
        typer.Option("--local", help="The local namespace that --on-source-loss or --on-source-delete is set of."),
    ] = None,
    type: TypeOption = "topic",
    on_source_loss: OnSourceLossOption = None,
    on_source_delete: OnSourceDeleteOption = None,
    url: UrlOption = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Change a link's settings, or how this cluster's offsets topic is copied; what was copied stays as it is.

    With --local, and --on-source-loss or --on-source-delete: what is set of one pair of namespaces, whichever end is
    asked.
    """
    of_pair = {"on_source_loss": on_source_loss, "on_source_delete": on_source_delete}
    wanted = {name: value for name, value in of_pair.items() if value is not None}
    if verify_every is not None:
        config = [*(config or ()), f"{VERIFY_EVERY}={_time_ms(verify_every, output)}"]
    if local is not None or wanted:
        if local is None or not wanted or offsets_topic is not None or offsets_group or config:
            why = "--local and --on-source-loss or --on-source-delete go together, and alone"
            raise CliError("USAGE", why, Exit.USAGE, output)
        chosen = {"local": local, "type": type, **wanted}
        with Admin(url, output) as admin:
            show(admin.patch(f"/v1/links/{_path(name)}/mappings", chosen), output, _described)
        return
    settings = [each.partition("=") for each in config or ()]
    if not all(equals for _, equals, _ in settings) or (offsets_topic is None and (offsets_group or not settings)):
        what = "say what to change: --offsets-topic, --verify-every, --config NAME=VALUE"
        raise CliError("USAGE", what, Exit.USAGE, output)
    body = {
        "offsets_topic": offsets_topic,
        "offsets_groups": offsets_group or [],
        "config": {setting: value or None for setting, _, value in settings},
    }
    with Admin(url, output) as admin:
        show(admin.patch(f"/v1/links/{_path(name)}", body), output, _described)


@app.command(
    "set-mode",
    epilog=example(
        "isthmus link set-mode a-to-b synchronous --dry-run",
        "isthmus link set-mode a-to-b synchronous --confirm-timeout-ms 5000",
        "isthmus link set-mode a-to-b asynchronous",
    )
    + EXIT_CODES,
)
def set_mode(
    name: NameArgument,
    mode: Annotated[Literal["asynchronous", "synchronous"], typer.Argument(help="The mode from now on.")],
    confirm_timeout_ms: Annotated[
        int | None,
        typer.Option(
            "--confirm-timeout-ms",
            min=SYNC_CONFIRM_TIMEOUT_MS_MIN,
            max=SYNC_CONFIRM_TIMEOUT_MS_MAX,
            help="How long an ack may wait for the other cluster until the partition is Out-Of-Sync "
            f"(sync.confirm.timeout.ms; {SYNC_CONFIRM_TIMEOUT_MS} where it was never set).",
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Change nothing, say whether it would be refused, and why.")
    ] = False,
    url: UrlOption = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Set when clients of this cluster are acked: before or after the other cluster has what they wrote.

    Synchronous is refused unless the link is Following and this cluster leads all topics on it; each partition gets
    In-Sync by itself then. Asynchronous is immediate.
    """
    body = {"mode": mode, "confirm_timeout_ms": confirm_timeout_ms, "dry_run": dry_run}
    with Admin(url, output) as admin:
        show(admin.post(f"/v1/links/{_path(name)}/mode", body), output, _mode_lines)


@app.command("list", epilog=example("isthmus link list") + EXIT_CODES)
def list_(url: UrlOption = None, output: OutputOption = Output.TABLE) -> None:
    """List links with their states and lag."""
    with Admin(url, output) as admin:
        show(admin.get("/v1/links")["items"], output, link_lines)


@app.command(epilog=example("isthmus link describe a-to-b -o json") + EXIT_CODES)
def describe(name: NameArgument, url: UrlOption = None, output: OutputOption = Output.TABLE) -> None:
    """Describe a link: its mappings, and the state and lag of each partition."""
    with Admin(url, output) as admin:
        show(admin.get(f"/v1/links/{_path(name)}"), output, _described)


@app.command(epilog=example("isthmus link wait a-to-b Following", "isthmus link wait a-to-b In-Sync") + EXIT_CODES)
def wait(
    name: NameArgument,
    state: Annotated[
        Literal["Following", "In-Sync"],
        typer.Argument(help="Following: each partition has what its source has. In-Sync: acks wait until it does."),
    ],
    timeout_s: Annotated[float, typer.Option("--timeout-s", min=0, help="How long to wait at most.")] = 60.0,
    url: UrlOption = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Wait until a link has a state; exits with 1 if it does not get there in time, and says what it is instead."""
    with Admin(url, output) as admin:

        def look() -> tuple[Any, str | None]:
            seen = admin.get(f"/v1/links/{_path(name)}")
            why = seen["message"] or seen["reason"]
            return seen, None if seen["state"] == state else f"it is {seen['state']}" + (f" ({why})" if why else "")

        seen = admin.wait_for(f"link {name} is {state}", look, timeout_s)
        show(seen, output, lambda link: [f"link {link['link_name']} is {link['state']}"])


@app.command(epilog=example("isthmus link delete a-to-b", "isthmus link delete a-to-b --local-only") + EXIT_CODES)
def delete(
    name: NameArgument,
    local_only: LocalOnlyOption = False,
    url: UrlOption = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Delete a link, both ends of it. Namespaces that followed stay reserved."""
    with Admin(url, output) as admin:
        admin.delete(f"/v1/links/{_path(name)}", local_only=local_only)
        show({"link_name": name, "deleted": True}, output, lambda _: [f"link {name} deleted"])


@app.command(
    epilog=example(
        "isthmus link attach a-to-b --local orders- --remote orders- --role leader",
        "isthmus link attach a-to-b --local orders- --remote orders- --role leader --truncate-target --dry-run",
        "isthmus link attach a-to-b --local orders- --remote orders- --role follower --cut 1f2e3d4c5b6a",
        "isthmus link attach a-to-b --type principal --local User:app- --remote User:app- --role leader",
        "isthmus link attach a-to-b --local orders- --remote orders- --role leader --disable-transaction-verification",
        "isthmus link attach a-to-b --type consumer-group --local app- --remote app- --role leader",
        "isthmus link attach a-to-b --local orders- --remote orders- --role leader --on-source-loss hold",
        "isthmus link attach a-to-b --local tests- --remote tests- --role leader --on-source-delete delete",
    )
    + EXIT_CODES
)
def attach(
    name: NameArgument,
    local: LocalOption,
    remote: Annotated[str, typer.Option("--remote", help="Prefix of the other cluster's namespace.")],
    role: Annotated[Literal["leader", "follower"], typer.Option("--role", help="The role of the local namespace.")],
    type: TypeOption = "topic",
    truncate_target: Annotated[
        bool,
        typer.Option("--truncate-target", help="Empty topics of the follower namespace that hold other records."),
    ] = False,
    cut: Annotated[
        str | None,
        typer.Option(
            "--cut",
            help="Salvage and cut what topics of the follower namespace hold and their sources do not: what --dry-run "
            "printed, which is another word as soon as a log has changed.",
        ),
    ] = None,
    shared_until: Annotated[
        Path | None,
        typer.Option(
            "--shared-until",
            help="A file with lines of TOPIC PARTITION OFFSET, of the follower: its records are the source's up to "
            "there. Counts where nobody has recorded it, and is your own responsibility.",
        ),
    ] = None,
    disable_transaction_verification: Annotated[
        bool,
        typer.Option(
            "--disable-transaction-verification",
            help="Switch transaction.partition.verification.enable (KIP-890) off on the follower's brokers while this "
            "is attached: transactions and group offsets cannot be copied with it.",
        ),
    ] = False,
    on_source_loss: OnSourceLossOption = None,
    on_source_delete: OnSourceDeleteOption = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Change nothing, print what would happen and what would be lost.")
    ] = False,
    url: UrlOption = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Attach a pair of namespaces to a link; the follower becomes reserved.

    What the other cluster has not granted waits until its operator does (`isthmus link grant` there), and is attached
    by itself then; `isthmus link describe` shows it, `isthmus link detach` ends that.
    """
    body = {
        "local": local,
        "remote": remote,
        "role": role,
        "type": type,
        "truncate_target": truncate_target,
        "disable_transaction_verification": disable_transaction_verification,
        "dry_run": dry_run,
    }
    if on_source_loss is not None:  # versions before it take no such field
        body["on_source_loss"] = on_source_loss
    if on_source_delete is not None:
        body["on_source_delete"] = on_source_delete
    if cut is not None:
        body["cut"] = cut
    if shared_until is not None:
        body["shared_until"] = _offsets_in(shared_until, output)
    with Admin(url, output) as admin:
        show(admin.post(f"/v1/links/{_path(name)}/mappings", body), output, _attached)


@app.command(epilog=example("isthmus link detach a-to-b --local orders-") + EXIT_CODES)
def detach(
    name: NameArgument,
    local: LocalOption,
    type: TypeOption = "topic",
    local_only: LocalOnlyOption = False,
    url: UrlOption = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Detach a pair of namespaces. A follower stays reserved."""
    with Admin(url, output) as admin:
        admin.delete(f"/v1/links/{_path(name)}/mappings", local=local, type=type, local_only=local_only)
        result = {"link_name": name, "local": local, "type": type, "detached": True}
        show(result, output, lambda _: [f"{type} namespace {prefix_cell(local)} detached from {name}"])


@app.command(
    epilog=example(
        "isthmus link promote a-to-b --local orders- --dry-run",
        "isthmus link promote a-to-b --local orders- --local-group app-",
    )
    + EXIT_CODES
)
def promote(
    name: NameArgument,
    local: Annotated[list[str] | None, typer.Option("--local", help="Prefix of a local topic namespace.")] = None,
    local_group: Annotated[
        list[str] | None, typer.Option("--local-group", help="Prefix of a local consumer group namespace.")
    ] = None,
    move_clients: MoveClientsOption = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Change nothing, print what is missing and what would be ended.")
    ] = False,
    url: UrlOption = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Make follower namespaces writable here, once they have all of the source: stop the writers there first.

    They are detached, transactions that are open in them are aborted, their topics get the source's settings, and the
    reservation is cleared, in this order. What was begun is finished by itself, whatever is killed in between.
    """
    namespaces = [
        *({"type": "topic", "local": prefix} for prefix in local or ()),
        *({"type": "consumer-group", "local": prefix} for prefix in local_group or ()),
    ]
    if not namespaces:
        raise CliError("USAGE", "name at least one namespace with --local or --local-group", Exit.USAGE, output)
    body = {"namespaces": namespaces, "dry_run": dry_run, **_moving(move_clients, output)}
    with Admin(url, output) as admin:
        operation = admin.post(f"/v1/links/{_path(name)}/promote", body)
        report = follow(admin, operation, f"promoting over {name}", output, cancel=False)
    show(report, output, _promoted)


@app.command(
    epilog=example(
        "isthmus link recover a-to-b --dry-run",
        "isthmus link recover a-to-b --local orders- --local-group app-",
    )
    + EXIT_CODES
)
def recover(
    name: NameArgument,
    local: Annotated[list[str] | None, typer.Option("--local", help="Prefix of a local topic namespace.")] = None,
    local_group: Annotated[
        list[str] | None, typer.Option("--local-group", help="Prefix of a local consumer group namespace.")
    ] = None,
    disable_transaction_verification: Annotated[
        bool,
        typer.Option(
            "--disable-transaction-verification",
            help="As of attach: on the brokers of the old source, which follows now.",
        ),
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Change nothing, print what the old source would lose."),
    ] = False,
    url: UrlOption = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Have the old source follow, after a failover, the cluster that took over: on either side.

    Without --local and --local-group: all that one cluster of the link leads and the other one does not follow. What
    the old source's topics hold alone goes to salvage files of its proxies and is cut (`isthmus salvage`); what both
    have is not copied again. What was begun is gone on with when the command is given again.
    """
    body = {
        "namespaces": [
            *({"type": "topic", "local": prefix} for prefix in local or ()),
            *({"type": "consumer-group", "local": prefix} for prefix in local_group or ()),
        ],
        "disable_transaction_verification": disable_transaction_verification,
        "dry_run": dry_run,
    }
    with Admin(url, output) as admin:
        show(admin.post(f"/v1/links/{_path(name)}/recover", body), output, _recovered)


@app.command(
    epilog=example(
        "isthmus link reverse a-to-b --local orders- --local-group app- --dry-run",
        "isthmus link reverse a-to-b --local orders- --local-group app- --move-clients 10m",
        "isthmus link reverse a-to-b --local orders- --here",
        "isthmus link reverse a-to-b --abandon",
    )
    + EXIT_CODES
)
def reverse(
    name: NameArgument,
    local: Annotated[
        list[str] | None, typer.Option("--local", "--namespace", help="Prefix of a local topic namespace.")
    ] = None,
    local_group: Annotated[
        list[str] | None, typer.Option("--local-group", "--group", help="Prefix of a local consumer group namespace.")
    ] = None,
    here: Annotated[
        bool, typer.Option("--here", help="Have this cluster lead, which follows: the other one is asked.")
    ] = False,
    transactions_wait: Annotated[
        float | None,
        typer.Option("--transactions-wait", help="Seconds that open transactions may take to end by themselves: 1."),
    ] = None,
    hold: Annotated[
        float | None, typer.Option("--hold", help="Seconds that writes wait at most, then it is taken back: 5.")
    ] = None,
    disable_transaction_verification: Annotated[
        bool,
        typer.Option(
            "--disable-transaction-verification",
            help="As of attach: on the brokers of the cluster that leads, once that follows.",
        ),
    ] = False,
    abandon: Annotated[
        bool, typer.Option("--abandon", help="Have this cluster lead on what is being reversed, or again.")
    ] = False,
    yes: Annotated[
        bool,
        typer.Option("--yes", help="With --abandon: the other cluster cannot be asked, and does not lead for certain."),
    ] = False,
    move_clients: MoveClientsOption = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Change nothing, print what is missing and what is open.")
    ] = False,
    url: UrlOption = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Have the other cluster lead what this one leads, with nothing lost, and follow it from there on.

    With --here the other way round, asked at the cluster that follows; the other one has to have granted that
    (`isthmus link grant` there: lead:PREFIX). Clients' writes wait at the cluster that leads while the other one gets
    the last of it, and go on there if that takes too long. A synchronous link is synchronous the other way after it.
    Clients stay connected there; --move-clients has those that know of that ask their bootstrap servers again.
    """
    namespaces = [
        *({"type": "topic", "local": prefix} for prefix in local or ()),
        *({"type": "consumer-group", "local": prefix} for prefix in local_group or ()),
    ]
    if abandon:
        if namespaces or dry_run or here or move_clients:
            raise CliError("USAGE", "--abandon goes with --yes alone", Exit.USAGE, output)
        with Admin(url, output) as admin:
            status = admin.post(f"/v1/links/{_path(name)}/reverse/abandon", {"although_unreachable": yes})
        show(status, output, lambda link: [f"this cluster leads what was being reversed over {link['link_name']}"])
        return
    if not namespaces:
        raise CliError("USAGE", "name at least one namespace with --local or --local-group", Exit.USAGE, output)
    if yes:
        raise CliError("USAGE", "--yes goes with --abandon", Exit.USAGE, output)
    body = {
        "namespaces": namespaces,
        "here": here,
        "disable_transaction_verification": disable_transaction_verification,
        "dry_run": dry_run,
    }
    body |= {} if transactions_wait is None else {"transactions_wait_seconds": transactions_wait}
    body |= {} if hold is None else {"hold_seconds": hold}
    body |= _moving(move_clients, output)
    with Admin(url, output) as admin:
        operation = admin.post(f"/v1/links/{_path(name)}/reverse", body)
        report = follow(admin, operation, f"reversing over {name}", output, cancel=False)
    show(report, output, _reversed)


@app.command(
    epilog=example(
        "isthmus link failover a-to-b --dry-run",
        "isthmus link failover a-to-b",
        "isthmus link failover a-to-b --local orders- --local-group app- -o json",
    )
    + EXIT_CODES
)
def failover(
    name: NameArgument,
    local: Annotated[list[str] | None, typer.Option("--local", help="Prefix of a local topic namespace.")] = None,
    local_group: Annotated[
        list[str] | None, typer.Option("--local-group", help="Prefix of a local consumer group namespace.")
    ] = None,
    yes: Annotated[
        bool, typer.Option("--yes", help="Go on although the other cluster is connected, and could be promoted from.")
    ] = False,
    move_clients: MoveClientsOption = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Change nothing, print what an ack meant and what would be ended.")
    ] = False,
    url: UrlOption = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Make what follows over a link writable here without its source, which is dead or out of reach.

    Without --local and --local-group: all that follows. They are detached, transactions that are open end as the source
    had decided, or are aborted, topics get the source's settings, and the reservation is cleared. Prints, of each
    partition, until when an ack meant that the record is here. What was begun is finished by itself, whatever is killed
    in between.
    """
    namespaces = [
        *({"type": "topic", "local": prefix} for prefix in local or ()),
        *({"type": "consumer-group", "local": prefix} for prefix in local_group or ()),
    ]
    body = {
        "namespaces": namespaces,
        "although_reachable": yes,
        "dry_run": dry_run,
        **_moving(move_clients, output),
    }
    with Admin(url, output) as admin:
        operation = admin.post(f"/v1/links/{_path(name)}/failover", body)
        report = follow(admin, operation, f"failing over {name}", output, cancel=False)
    show(report, output, failed_over)


@app.command(epilog=example("isthmus link acknowledge a-to-b") + EXIT_CODES)
def acknowledge(name: NameArgument, url: UrlOption = None, output: OutputOption = Output.TABLE) -> None:
    """End the telling of what a source lost although it had acked it In-Sync, at both clusters, and of what differs.

    It shows in `isthmus link describe` until then. What is held stays held until it is decided. What both clusters were
    found to hold differently is told again when it is compared again; acknowledge it at the follower's side.
    """
    with Admin(url, output) as admin:
        result = admin.post(f"/v1/links/{_path(name)}/acknowledge")
        show(result, output, _acknowledged)


@app.command(epilog=example("isthmus link rotate-secret a-to-b") + EXIT_CODES)
def rotate_secret(name: NameArgument, url: UrlOption = None, output: OutputOption = Output.TABLE) -> None:
    """Give both sides of a link a new secret while it runs.

    Nothing is disconnected. Whatever is killed in between, the link goes on: the old secret counts until both sides
    have the new one. Run it again then, at either side, to have it ended.
    """
    with Admin(url, output) as admin:
        result = admin.post(f"/v1/links/{_path(name)}/rotate-secret")
        show(
            result,
            output,
            lambda done: [f"link {done['link_name']} has a new secret at both sides ({done['secret_id']})"],
        )


@app.command(epilog=example("isthmus link truncations a-to-b", "isthmus link truncations a-to-b -o json") + EXIT_CODES)
def truncations(name: NameArgument, url: UrlOption = None, output: OutputOption = Output.TABLE) -> None:
    """List truncations of follower topics that diverged: what was cut, where it is kept, which groups were moved."""
    with Admin(url, output) as admin:
        show(admin.get(f"/v1/links/{_path(name)}/truncations")["items"], output, _truncation_lines)


def _truncation_lines(truncations: list[dict[str, Any]]) -> Iterator[str]:
    yield from columns(
        ("TOPIC", "PHASE", "PARTITION", "CUT_AT", "CUT_MESSAGES", "GROUPS_MOVED", "SALVAGE_FILE", "REASON"),
        (
            (
                each["topic"],
                each["phase"],
                cut["partition"],
                cut["offset_truncated_to"],
                cut["messages_truncated"],
                each["groups_moved"],
                None if cut["salvage_file"] is None else f"{cut['salvage_proxy']}:{cut['salvage_file']}",
                each["trouble_message"] or each["message"],
            )
            for each in truncations
            for cut in [cut for cut in each["partitions"] if cut["messages_truncated"]] or [_NO_CUT]
        ),
    )


_NO_CUT: dict[str, Any] = {
    "partition": None,
    "offset_truncated_to": None,
    "messages_truncated": None,
    "salvage_proxy": None,
    "salvage_file": None,
}


def _path(name: str) -> str:
    from urllib.parse import quote

    return quote(name, safe="")


def _token(file: Path, output: Output) -> str:
    with named(file, output):
        text = sys.stdin.read() if str(file) == "-" else file.read_text(encoding="utf-8")
    token = text.strip()
    if not token:
        raise CliError("FILE", f"{file} is empty", Exit.USAGE, output)
    return token


def link_lines(links: list[dict[str, Any]]) -> list[str]:
    """A table of links."""
    return columns(
        ("LINK", "STATE", "MODE", "REMOTE", "HEARD", "MAPPINGS", "PARTITIONS", "LAG", "LAG_SECONDS", "REASON"),
        (
            (
                link["link_name"],
                link["state"],
                link["mode"],
                link["remote"],
                heard(link),
                [f"{prefix_cell(m['local'])}:{prefix_cell(m['remote'])} ({m['role']})" for m in link["mappings"]],
                len(link["partitions"]),
                _sum(each["partition_mirror_lag"] for each in link["partitions"]),
                _max(each["lag_seconds"] for each in link["partitions"]),
                link["reason"],
            )
            for link in links
        ),
    )


def partition_lines(partitions: list[dict[str, Any]]) -> list[str]:
    """A table of a link's partitions, with what acks mean where some link is synchronous."""
    sync = ("ACKS", "ACKS_SINCE") if any(each["sync"] for each in partitions) else ()
    equal = ("EQUAL_UNTIL",) if any(each.get("equal_until") is not None for each in partitions) else ()
    ends = ("SOURCE_END", "FOLLOWER_END", "LAG", "LAG_SECONDS")
    return columns(
        ("TOPIC", "PARTITION", "ROLE", "STATE", *ends, *equal, *sync, "REASON"),
        (
            (
                each["topic"],
                each["partition"],
                each["role"],
                each["state"],
                each["source_end"],
                each["follower_end"],
                *_lag(each),
                *((each.get("equal_until"),) if equal else ()),
                *(_acks(each["sync"]) if sync else ()),
                each["message"] or each["reason"],
            )
            for each in partitions
        ),
    )


def loss_lines(links: list[dict[str, Any]]) -> Iterator[str]:
    """What sources lost although they had acked it In-Sync, if that is not acknowledged."""
    if not any(link["source_losses"] for link in links):
        return
    yield ""
    yield "lost by a source after it was acked In-Sync (`isthmus link acknowledge LINK` ends this):"
    yield from columns(
        ("LINK", "ROLE", "TOPIC", "PARTITION", "FROM", "TO", "COUNT", "GROUPS", "STATE", "FOUND", "SALVAGE_FILE"),
        (
            (
                link["link_name"],
                each["role"],
                each["topic"],
                each["partition"],
                each["from_offset"],
                each["to_offset"],
                each["count"],
                each["groups"] or None,
                each["state"],
                moment(each["found_ms"]),
                None if each["salvage_file"] is None else f"{each['salvage_proxy']}:{each['salvage_file']}",
            )
            for link in links
            for each in link["source_losses"]
        ),
    )
    for link in links:
        if link["source_losses_left_off"]:
            yield f"and {link['source_losses_left_off']} older ones of {link['link_name']}"


def _lag(partition: dict[str, Any]) -> tuple[int | str | None, float | None]:
    unknown_s = partition["lag_unknown_seconds"]
    return (
        f"unknown for {unknown_s:.0f} s" if unknown_s is not None else partition["partition_mirror_lag"],
        partition["lag_seconds"],
    )


def _acks(sync: dict[str, Any] | None) -> tuple[str | None, str | None]:
    """What acks of a partition mean, and from which offset and since when on."""
    if sync is None:
        return None, None
    known = []
    if sync["since_ms"] is not None:
        known.append(f"offset {sync['since_offset']}, {moment(sync['since_ms'])}")
    if sync["until_ms"] is not None:
        known.append(f"In-Sync until {moment(sync['until_ms'])}")
    if sync["degraded_since_ms"] is not None:
        known.append(f"degraded {moment(sync['degraded_since_ms'])}")
    if sync["any_of"] is not None:
        known.append(f"ANY {sync['any_of']['count']} ({', '.join(sorted(sync['any_of']['links']))})")
    return sync["state"], "; ".join(known) or None


def _mode_lines(result: dict[str, Any]) -> Iterator[str]:
    verb = "would be" if result["dry_run"] else "is"
    yield f"link {result['link_name']} {verb} {result['mode']} (it was {result['former_mode']})"
    if result["mode"] == "synchronous":
        yield f"an ack waits {result['sync_confirm_timeout_ms']} ms at most until its partition is Out-Of-Sync"


def group_lines(groups: list[dict[str, Any]]) -> list[str]:
    """A table of a link's consumer groups."""
    return columns(
        ("GROUP", "REMOTE_GROUP", "ROLE", "STATE", "POSITIONS", "PENDING", "PENDING_SECONDS", "NOT_MAPPED", "REASON"),
        (
            (
                each["group"],
                each["remote_group"],
                each["role"],
                each["state"],
                each["positions"],
                each["pending"],
                each["pending_seconds"],
                each["unmapped_topics"],
                each["message"] or each["reason"],
            )
            for each in groups
        ),
    )


def _sum(values: Iterator[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _max(values: Iterator[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)


def _acknowledged(done: dict[str, Any]) -> Iterator[str]:
    yield f"{done['acknowledged']} losses and differences of link {done['link_name']} acknowledged"


def _time_ms(said: str, output: Output) -> str:
    """A time as people write it, in milliseconds as settings have it; or ``off``."""
    if said == VERIFY_OFF:
        return said
    return str(_seconds(said, output, f", or {VERIFY_OFF}") * 1_000)


def _seconds(said: str, output: Output, else_: str = "") -> int:
    """A time as people write it."""
    found = re.fullmatch(r"([1-9][0-9]{0,8})([smhd])", said)
    if found is None:
        raise CliError("USAGE", f"{said!r} is no time: 90s, 30m, 12h, 7d{else_}", Exit.USAGE, output)
    return int(found[1]) * {"s": 1, "m": 60, "h": 3_600, "d": 86_400}[found[2]]


def _moving(move_clients: str | None, output: Output) -> dict[str, int]:
    """What is asked for by --move-clients."""
    return {} if move_clients is None else {"move_clients_seconds": _seconds(move_clients, output)}


def _verified(link: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """How old the last comparisons of what follows are."""
    every_s, age_s = link.get("verify_every_seconds"), link.get("verified_seconds")
    follows = [each for each in link["partitions"] if each["role"] == "follower"]
    if every_s is None or not follows:
        return
    differing = sum(each.get("differs_at") is not None for each in follows)
    age = "not all of it yet" if age_s is None else f"all of it in the last {_time(age_s)}"
    late = ", which is late" if age_s is not None and age_s > every_s else ""
    told = f", {differing} partitions differ" if differing else ""
    yield "verified", f"{age}{late} (wanted: every {_time(every_s)}){told}"


def _time(seconds: float) -> str:
    """A time for people, in its largest unit."""
    for unit, size in (("d", 86_400), ("h", 3_600), ("m", 60)):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s"


def _described(link: dict[str, Any]) -> Iterator[str]:
    yield from fields(
        [
            ("link", link["link_name"]),
            ("id", link["link_id"]),
            ("state", link["state"]),
            ("reason", link["message"] or link["reason"]),
            ("mode", link["mode"]),
            *(
                [("ack waits at most", f"{link['sync_confirm_timeout_ms']} ms (sync.confirm.timeout.ms)")]
                if link["mode"] == "synchronous"
                else []
            ),
            *(("setting", f"{name}={value}") for name, value in sorted(link["config"].items())),
            ("local cluster", link["local_cluster_id"]),
            ("remote cluster", link["remote_cluster_id"]),
            ("remote", link["remote"]),
            ("peer heard", heard(link)),
            ("encryption", link["encryption"]),
            *_verified(link),
            *([("secret", "is being rotated: isthmus link rotate-secret ends it")] if link["secret_rotating"] else []),
            *(("mapping", _mapping(each)) for each in link["mappings"]),
            *(("promoting", prefix_cell(prefix)) for prefix in link["promoting"]),
            *(("reversing", _reversal(each)) for each in link.get("reversals", ())),
            *(("moving clients", _client_move(each)) for each in link.get("client_moves", ())),
            *((("drill", _drill(drill)),) if (drill := link.get("drill")) else ()),
            *_verification_fields(link["transaction_verification"]),
            *(
                ("offsets topic", f"{o['topic']} ({o['role']}), {o['form']}{_of_groups(o['groups'])}")
                for o in link["offsets_topics"]
            ),
            *(("warning", text) for text in (*link["group_warnings"], *link["settings_kept"])),
        ]
    )
    yield from waiting_lines(link.get("waiting", []))
    yield from loss_lines([link])
    yield from left_out_lines(link["left_out"], link["left_out_more"])
    for acls in link["acls"]:
        yield ""
        yield from _acl_lines(acls)
    if link["partitions"]:
        yield ""
        yield from partition_lines(link["partitions"])
    if link["groups"]:
        yield ""
        yield from group_lines(link["groups"])


def _reversal(reversal: dict[str, Any]) -> str:
    named = ", ".join(prefix_cell(each["local"]) for each in reversal["namespaces"])
    return f"{named} {reversal['step']} since {moment(reversal['begun_ms'])}: waits for {reversal['waits_for']}"


def _drill(drill: dict[str, Any]) -> str:
    used = "a failover is tried on it" if drill["in_use"] else "left over, is being deleted"
    return f"copy {drill['copy_name']} since {moment(drill['begun_ms'])}: {drill['message'] or used}"


def _client_move(move: dict[str, Any]) -> str:
    of, left_s = prefix_cell(move["local"]), move["left_seconds"]
    if move["clients_of"] == "remote":
        return f"{of}, of the other cluster, {left_s:g} s are left: waits for {move['waits_for']}"
    return f"{of}, {left_s:g} s are left; this proxy has told clients {move['told']} times"


def _mapping(mapping: dict[str, Any]) -> str:
    local, remote = prefix_cell(mapping["local"]), prefix_cell(mapping["remote"])
    why = mapping["message"] or mapping["reason"]
    state = f"{mapping['state']} ({why})" if why else mapping["state"]
    setting = f", on source loss {mapping['on_source_loss']}" if mapping["on_source_loss"] else ""
    setting += f", on source delete {mapping['on_source_delete']}" if mapping["on_source_delete"] else ""
    return f"{mapping['type']} {local} ({mapping['role']}), remote {remote}{setting}: {state}"


def _promoted(report: dict[str, Any]) -> Iterator[str]:
    yield from columns(
        ("TYPE", "LOCAL", "REMOTE", "TOPICS", "TRANSACTIONS_OPEN", "ENDED", "PROMOTED"),
        (
            (
                each["type"],
                prefix_cell(each["local"]),
                prefix_cell(each["remote"]),
                len(each["topics"]),
                each["transactions_open"],
                each["transactions_ended"],
                each["promoted"],
            )
            for each in report["namespaces"]
        ),
    )
    missing = [reason for each in report["namespaces"] for reason in each["missing"]]
    if missing:
        yield ""
        yield "not drained:"
        yield from missing
    if differ := logs_differ(report):
        yield ""
        yield f"not what the source has; to promote it as it is here, isthmus link acknowledge {report['link_name']}:"
        yield from differ
    yield from of_topics(report)
    yield from left_out_of(report)
    if lacking := dict.fromkeys(grant for each in report["namespaces"] for grant in each["missing_grants"]):
        yield ""
        yield f"before the other cluster can follow these in turn, its operator grants {', '.join(lacking)}"
        yield f"there: isthmus link grant {report['link_name']} --may {','.join(lacking)}"


def _verification_fields(status: dict[str, Any] | None) -> Iterator[tuple[str, Any]]:
    if status is None:
        return
    enabled = status["enabled"]
    state = "not known yet" if enabled is None else "on" if enabled else "off"
    if status["disabled_by_link"]:
        former = status["former"]
        state += f", held off by links (before: {'not set' if former is None else former})"
    yield "transaction verification", state
    if status["message"]:
        yield "warning", status["message"]


def _acl_lines(acls: dict[str, Any]) -> Iterator[str]:
    why = acls["message"] or acls["reason"]
    yield f"acls ({acls['role']}): {acls['state']}, {acls['bindings']} bindings" + (f", {why}" if why else "")
    if acls["not_mapped"]:
        yield from columns(("NOT_MAPPED", "REASON"), ((each["binding"], each["reason"]) for each in acls["not_mapped"]))


def _of_groups(groups: list[str]) -> str:
    return f": {', '.join(groups)}" if groups else ""


def _offsets_in(file: Path, output: Output) -> list[dict[str, Any]]:
    """What an operator says is shared. Raises CliError."""
    with named(file, output):
        lines = [line.split() for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    try:
        return [{"topic": topic, "partition": int(index), "offset": int(offset)} for topic, index, offset in lines]
    except ValueError as error:
        raise CliError(
            "USAGE", f"{file} has no lines of TOPIC PARTITION OFFSET: {error}", Exit.USAGE, output
        ) from error


def _reversed(report: dict[str, Any]) -> Iterator[str]:
    named = ", ".join(prefix_cell(each["local"]) for each in report["namespaces"])
    verb = "would be led" if report["dry_run"] else "is led"
    if report.get("led_here"):
        yield f"{named} {verb} here, and followed by the other cluster of {report['link_name']}"
    else:
        yield f"{named} {verb} by the other cluster of {report['link_name']}, and followed here"
    for heading, lines in (
        ("it cannot be reversed as it is:", report["refused"]),
        ("missing there, while clients write:", report["missing"]),
        ("open, and aborted if it does not end in time:", report["transactions_open"]),
    ):
        if lines and report["dry_run"]:
            yield ""
            yield heading
            yield from lines


def _recovered(report: dict[str, Any]) -> Iterator[str]:
    for number, each in enumerate(report["namespaces"]):
        if number:
            yield ""
        yield from _attached(each)


def _parted(result: dict[str, Any]) -> Iterator[str]:
    """Where topics part from their sources, and what goes on either side. Versions before it do not say."""
    parted = [topic for topic in result["topics"] if topic.get("partitions")]
    if not parted:
        return
    yield ""
    yield from columns(
        ("TOPIC", "PARTITION", "SHARED", "END", "SOURCE_END", "FIRST", "LAST", "SOURCE_FIRST", "SOURCE_LAST"),
        (
            (
                *(topic["topic"], each["partition"], each["shared"] if each["unknown"] is None else "unknown"),
                *(each["end"], each["source_end"]),
                *(
                    None if each[name] is None else moment(each[name])
                    for name in ("first_ms", "last_ms", "source_first_ms", "source_last_ms")
                ),
            )
            for topic in parted
            for each in topic["partitions"]
        ),
    )
    moved = sorted({group for topic in parted for group in topic["groups_moved"] or ()})
    if moved:
        yield f"committed offsets beyond SHARED, which would be moved there: {', '.join(moved)}"
    if result.get("cut") is not None and any(topic["action"] == "refuse" for topic in parted):
        yield f"--cut {result['cut']} salvages and cuts what is beyond SHARED here; the source's comes in its place"


def _attached(result: dict[str, Any]) -> Iterator[str]:
    verb = "would be attached" if result["dry_run"] else "attached"
    local, remote = prefix_cell(result["local"]), prefix_cell(result["remote"])
    lacking = result.get("missing_grants")  # versions before it have no such field
    if lacking:
        waits = "would wait" if result["dry_run"] else "waits"
        yield f"{local} ({result['role']}) {waits}: the other cluster has not granted {', '.join(lacking)}"
        yield "its operator does that by isthmus link grant, and sees what waits in isthmus link grants"
        return
    yield f"{local} ({result['role']}) {verb} to {result['link_name']}, remote {remote}"
    verification = result["transaction_verification"]
    if verification and verification["message"]:
        yield ""
        done = {"disable": "would be switched off" if result["dry_run"] else "switched off", "refuse": "must be off"}
        action = done.get(verification["action"])
        yield f"note: {verification['message']}." if action is None else f"{verification['setting']}: {action}"
        if action is not None:
            yield f"{verification['message']}."
        yield 'See docs/operations.md, "Transactions and the target\'s check of them".'
    if result["topics"]:
        yield ""
        yield from columns(
            ("TOPIC", "SOURCE_TOPIC", "ACTION", "RECORDS_LOST", "REASON"),
            (
                (t["topic"], t["source_topic"], t["action"], t["records_lost"], t["reason"] or t["settings_refused"])
                for t in result["topics"]
            ),
        )
    yield from _parted(result)
    if result["groups"]:
        yield ""
        yield from columns(
            ("GROUP", "SOURCE_GROUP", "POSITIONS_REPLACED"),
            ((each["group"], each["source_group"], each["positions_replaced"]) for each in result["groups"]),
        )
    yield from left_out_lines(result["left_out"])
