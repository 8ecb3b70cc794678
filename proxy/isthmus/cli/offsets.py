"""``isthmus offsets``: keys of groups' offsets, and what a copy of another cluster's offsets topic says."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import typer

from isthmus.cli.client import Admin, UrlOption
from isthmus.cli.files import named
from isthmus.cli.output import EXIT_CODES, CliError, Exit, Output, OutputOption, columns, example, fields, show

app = typer.Typer(
    rich_markup_mode=None,
    no_args_is_help=True,
    help="What consumer groups have committed: at both clusters, and in copies of offsets topics; keys for those.",
    epilog=example(
        "isthmus offsets list a-to-b",
        "isthmus offsets keygen /etc/isthmus/offsets.json --group 'app-*'",
        "isthmus offsets show a-to-b --group app-1 -o json",
    )
    + EXIT_CODES,
)


@app.command(
    "list", epilog=example("isthmus offsets list a-to-b", "isthmus offsets list a-to-b --group app-1") + EXIT_CODES
)
def list_(
    name: Annotated[str, typer.Argument(help="The link's name.")],
    group: Annotated[str | None, typer.Option("--group", help="Only this group, by its local name.")] = None,
    url: UrlOption = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """List what groups have committed at both clusters, side by side, for the group namespaces of a link."""
    with Admin(url, output) as admin:
        show(admin.get(f"/v1/links/{quote(name, safe='')}/committed-offsets", group=group), output, _on_both_sides)


def _on_both_sides(view: dict[str, Any]) -> Iterator[str]:
    yield from columns(
        ("GROUP", "TOPIC", "PARTITION", "SOURCE_OFFSET", "FOLLOWER_OFFSET", "REASON"),
        (
            (
                each["group"],
                offset["topic"],
                offset["partition"],
                offset["source_offset"],
                offset["follower_offset"],
                each["message"],
            )
            for each in view["groups"]
            for offset in each["offsets"] or [dict.fromkeys(("topic", "partition", "source_offset", "follower_offset"))]
        ),
    )
    if view["groups_left_off"]:
        yield f"and {view['groups_left_off']} groups more: --group shows one"


@app.command(
    epilog=example(
        "isthmus offsets keygen /etc/isthmus/offsets.json --group 'app-*'",
        "isthmus offsets keygen /etc/isthmus/offsets.json --group billing",
    )
    + EXIT_CODES
)
def keygen(
    keyring: Annotated[Path, typer.Argument(help="The keyring: a file of keys, made if there is none.")],
    group: Annotated[
        str, typer.Option("--group", help="Whose key: a group's name, or a prefix with '*' behind it; '*' is all.")
    ],
    output: OutputOption = Output.TABLE,
) -> None:
    """Add a new current key for a group to a keyring; older keys of the group stay, to read what they encrypted.

    Proxies read the file again when it changes. The target's keyring gets the entries of those groups that it may
    read, new keys before the source's.
    """
    from isthmus_protocol.offsets_cipher import KeyringError, with_new_key

    with named(keyring, output, "read or written"):
        before = keyring.read_text(encoding="utf-8") if keyring.exists() else None
        try:
            text, key_id = with_new_key(before, group)
        except KeyringError as error:
            raise CliError("KEYRING", f"{keyring}: {error}", Exit.USAGE, output) from None
        _replace(keyring, text)
    made = {"keyring": str(keyring), "group": group, "key_id": key_id, "rotated": before is not None}
    show(made, output, lambda _: [f"key {key_id} is current for {group} in {keyring}"])


def _replace(path: Path, text: str) -> None:
    """Write a file that only its owner reads, whole or not at all."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        if path.exists():  # whoever could read it before still can, the proxy among them
            found = path.stat()
            os.chmod(beside, found.st_mode & 0o777)
            if (found.st_uid, found.st_gid) != (os.geteuid(), os.getegid()):
                os.chown(beside, found.st_uid, found.st_gid)
        os.replace(beside, path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


@app.command("show", epilog=example("isthmus offsets show a-to-b", "isthmus offsets show a-to-b -o json") + EXIT_CODES)
def show_(
    name: Annotated[str, typer.Argument(help="The link's name.")],
    group: Annotated[str | None, typer.Option("--group", help="Only this group.")] = None,
    url: UrlOption = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Show what groups committed at the other cluster, read from the copy of its offsets topic on this one.

    Of an encrypted copy those groups show whose keys are in this proxy's keyring; of the others, how much there is.
    """
    with Admin(url, output) as admin:
        show(admin.get(f"/v1/links/{quote(name, safe='')}/offsets", group=group), output, _lines)


def _lines(view: dict[str, Any]) -> Iterator[str]:
    yield from fields(
        [
            ("topic", view["topic"]),
            ("source cluster", view["source_cluster_id"]),
            ("form", view["form"]),
            ("unreadable records", f"{view['unreadable_records']} ({', '.join(view['unreadable_key_ids']) or 'none'})"),
            ("damaged records", view["damaged_records"] or None),
            ("unknown records", view["unknown_records"] or None),
        ]
    )
    if view["groups"]:
        yield ""
        yield from columns(
            ("GROUP", "KIND", "TOPIC", "PARTITION", "OFFSET", "METADATA"),
            (
                (
                    each["group"],
                    each["kind"],
                    committed["topic"],
                    committed["partition"],
                    committed["offset"],
                    committed["metadata"],
                )
                for each in view["groups"]
                for committed in each["offsets"] or [dict.fromkeys(("topic", "partition", "offset", "metadata"))]
            ),
        )
