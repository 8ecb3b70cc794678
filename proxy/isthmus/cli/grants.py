"""``isthmus link token``, ``grant``, ``grants``, ``revoke``: what the other cluster of a link may have done here."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Any, Final

import typer

from isthmus.cli.client import Admin, UrlOption
from isthmus.cli.failover_lines import moment
from isthmus.cli.output import (
    EXIT_CODES,
    CliError,
    Exit,
    Output,
    OutputOption,
    columns,
    example,
    prefix_cell,
    show,
)

app = typer.Typer()
token_app = typer.Typer(
    rich_markup_mode=None,
    no_args_is_help=True,
    help="Tokens: handed to the operator of another cluster, who makes one link with this one by it.",
    epilog=example("isthmus link token create --may follow:orders-,lead:orders- --expires 1h") + EXIT_CODES,
)
app.add_typer(token_app, name="token")

_MAY: Final = (
    "follow:PREFIX: it may follow topics here. lead:PREFIX: topics here are reserved, and follow it. replace:PREFIX: "
    "what they hold may be cut for that. With consumer-group: or principal: before the prefix, of those. Several "
    "with commas between them, or several times."
)
MayOption = Annotated[
    list[str] | None, typer.Option("--may", help=f"What the other cluster may have done here. {_MAY}")
]
BrokerSettingsOption = Annotated[
    bool,
    typer.Option("--broker-settings", help="Settings of the brokers here may be changed so that they follow."),
]
NameArgument = Annotated[str, typer.Argument(help="The link's name.")]
_EXPIRES: Final = re.compile(r"([1-9][0-9]{0,6})([smhd])")
_SECONDS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


def grants_of(may: list[str] | None, broker_settings: bool, output: Output) -> list[str]:
    """What the options name, as REST has it."""
    from isthmus_control.grants import BROKER_SETTINGS, parse_grants

    try:
        named = [str(grant) for text in may or () for grant in parse_grants(text)]
    except ValueError as error:
        raise CliError("USAGE", f"--may {error}", Exit.USAGE, output) from None
    return [*dict.fromkeys(named), *([str(BROKER_SETTINGS)] if broker_settings else [])]


@token_app.command(
    "create",
    epilog=example(
        "isthmus link token create --may follow:orders-,lead:orders-,replace:orders- --broker-settings --expires 1h",
        "isthmus link token create --may lead:orders-,lead:consumer-group:app- > b.token",
    )
    + EXIT_CODES,
)
def create_token(
    may: MayOption = None,
    broker_settings: BrokerSettingsOption = False,
    expires: Annotated[str, typer.Option("--expires", help="For how long: 90s, 30m, 1h, 7d.")] = "1h",
    url: UrlOption = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Make a token, and print it, this once: whoever has it makes one link with this cluster, before it expires.

    What it grants is what the other cluster may have attached here by itself; all else waits for `isthmus link grant`.
    """
    found = _EXPIRES.fullmatch(expires)
    if found is None:
        raise CliError("USAGE", f"--expires {expires!r} is no time: 90s, 30m, 1h, 7d", Exit.USAGE, output)
    seconds = int(found[1]) * _SECONDS[found[2]]
    body = {"may": grants_of(may, broker_settings, output), "expires_seconds": seconds}
    with Admin(url, output) as admin:
        made = admin.post("/v1/link-tokens", body)
        show(made, output, lambda token: [token["token"]])
    if output is Output.TABLE:
        granted = ", ".join(made["may"]) or "nothing: all that is to be attached waits for isthmus link grant"
        typer.echo(f"token {made['token_id']}, until {moment(made['expires_ms'])}; it grants {granted}", err=True)


@token_app.command("list", epilog=example("isthmus link token list") + EXIT_CODES)
def list_tokens(url: UrlOption = None, output: OutputOption = Output.TABLE) -> None:
    """List the tokens that nobody has used yet."""
    with Admin(url, output) as admin:
        show(admin.get("/v1/link-tokens")["items"], output, _token_lines)


@token_app.command("delete", epilog=example("isthmus link token delete 0b5d9a0e7c1e4e0c") + EXIT_CODES)
def delete_token(
    token_id: Annotated[str, typer.Argument(help="The id of the token, as `isthmus link token list` has it.")],
    url: UrlOption = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Have a token that nobody has used be none any more."""
    with Admin(url, output) as admin:
        admin.delete(f"/v1/link-tokens/{_path(token_id)}")
        show({"token_id": token_id, "deleted": True}, output, lambda _: [f"token {token_id} deleted"])


@app.command(epilog=example("isthmus link grants a-to-b", "isthmus link grants a-to-b -o json") + EXIT_CODES)
def grants(name: NameArgument, url: UrlOption = None, output: OutputOption = Output.TABLE) -> None:
    """List what the other cluster of a link may have done here, and what waits."""
    with Admin(url, output) as admin:
        show(admin.get(f"/v1/links/{_path(name)}/grants"), output, _grant_lines)


@app.command(
    epilog=example(
        "isthmus link grant a-to-b --may lead:orders-",
        "isthmus link grant a-to-b --may follow:consumer-group:app- --broker-settings",
    )
    + EXIT_CODES
)
def grant(
    name: NameArgument,
    may: MayOption = None,
    broker_settings: BrokerSettingsOption = False,
    url: UrlOption = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Let the other cluster of a link have more done here; what waits for that is attached within some seconds."""
    _change("grants", name, may, broker_settings, url, output)


@app.command(epilog=example("isthmus link revoke a-to-b --may lead:orders-") + EXIT_CODES)
def revoke(
    name: NameArgument,
    may: MayOption = None,
    broker_settings: BrokerSettingsOption = False,
    url: UrlOption = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Let the other cluster of a link have less done here, from now on.

    What is attached goes on: `isthmus link detach` ends that.
    """
    _change("grants/revoke", name, may, broker_settings, url, output)


def _change(
    what: str, name: str, may: list[str] | None, broker_settings: bool, url: str | None, output: Output
) -> None:
    named = grants_of(may, broker_settings, output)
    if not named:
        raise CliError("USAGE", "say what: --may, --broker-settings", Exit.USAGE, output)
    with Admin(url, output) as admin:
        show(admin.post(f"/v1/links/{_path(name)}/{what}", {"may": named}), output, _grant_lines)


def waiting_lines(waiting: list[dict[str, Any]], link_name: str | None = None) -> Iterator[str]:
    """What is to be attached to a link and waits, if anything does; with its name, where there may be several."""
    if not waiting:
        return
    yield ""
    yield f"not attached{'' if link_name is None else f' to {link_name}'}, waits for an operator:"
    yield from columns(
        ("TYPE", "LOCAL", "ROLE", "REMOTE", "ASKED_BY", "SINCE", "MISSING", "REASON"),
        (
            (
                each["type"],
                prefix_cell(each["local"]),
                each["role"],
                prefix_cell(each["remote"]),
                each["asked_by"],
                moment(each["asked_ms"]),
                each["missing"],
                each["message"],
            )
            for each in waiting
        ),
    )


def _grant_lines(found: dict[str, Any]) -> Iterator[str]:
    if not found["enforced"]:
        yield "not enforced: the control log's feature level is too low (isthmus control upgrade)"
    rows = [(each, "granted") for each in found["may"]]
    rows += [(each, "with what is or was attached, until this side detaches it") for each in found["attached"]]
    yield from columns(("GRANT", "WHY"), rows)
    yield from waiting_lines(found["waiting"])


def _token_lines(tokens: list[dict[str, Any]]) -> list[str]:
    return columns(
        ("TOKEN", "CREATED", "EXPIRES", "GRANTS"),
        ((each["token_id"], moment(each["created_ms"]), moment(each["expires_ms"]), each["may"]) for each in tokens),
    )


def _path(name: str) -> str:
    from urllib.parse import quote

    return quote(name, safe="")
