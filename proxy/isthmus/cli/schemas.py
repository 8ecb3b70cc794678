"""``isthmus schemas``: every cluster's schema registry has what the primary one has, at the same ids."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple, NoReturn

import typer

from isthmus.cli.output import EXIT_CODES, CliError, Exit, Output, OutputOption, columns, example, show, shows_progress

if TYPE_CHECKING:
    from isthmus.schemas.distribution import Outcome, Target
    from isthmus.schemas.document import RegistrySpec
    from isthmus.schemas.plan import Step
    from isthmus.schemas.registry import Registry

app = typer.Typer(
    rich_markup_mode=None,
    no_args_is_help=True,
    help="Schemas of the primary cluster's registry, distributed to those of other clusters at the same ids.",
    epilog=example("isthmus schemas sync schemas.yaml --dry-run", "isthmus schemas sync schemas.yaml --follow")
    + EXIT_CODES,
)

FINDINGS_SHOWN: Final = 20
DocumentArgument = Annotated[Path, typer.Argument(help="Which registries there are, as YAML.", dir_okay=False)]


class Writes(StrEnum):
    ALLOW = "allow"
    REFUSE = "refuse"


@app.command(
    epilog=example(
        "isthmus schemas sync schemas.yaml --dry-run",
        "isthmus schemas sync schemas.yaml",
        "isthmus schemas sync schemas.yaml --follow --interval-s 10",
    )
    + EXIT_CODES
)
def sync(
    file: DocumentArgument,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print what would be written.")] = False,
    delete: Annotated[
        bool,
        typer.Option(
            "--delete",
            help="What a target has and the primary does not have is deleted there for good, and what is another "
            "schema there gives way. See --dry-run first.",
        ),
    ] = False,
    follow: Annotated[bool, typer.Option("--follow", help="Again and again, until it is interrupted.")] = False,
    interval_s: Annotated[
        float, typer.Option("--interval-s", min=0.1, help="With --follow: between two passes.")
    ] = 30.0,
    output: OutputOption = Output.TABLE,
) -> None:
    """Write at each target what the primary has: versions with their ids, references, levels, deletions.

    What is written is read back. What cannot be is a finding, and stays as it is: then the command exits with 1.
    A command that was killed is given again. With --follow only passes that changed something are printed, with
    -o json each in one line.
    """
    if follow and (dry_run or delete):
        raise CliError("USAGE", "--follow goes with neither --dry-run nor --delete", Exit.USAGE, output)
    with _opened(file, output) as opened:
        if follow:
            _follow(opened, interval_s, output)
        told = _pass(opened, output, write=not dry_run, delete=delete)
    show(told, output, lambda each: _lines(each, steps=True))
    raise typer.Exit(_verdict(told, behind=Exit.OK))


@app.command(
    epilog=example("isthmus schemas status schemas.yaml", "isthmus schemas status schemas.yaml -o json") + EXIT_CODES
)
def status(file: DocumentArgument, output: OutputOption = Output.TABLE) -> None:
    """Show how far each target is what the primary is; exits with 1 where one is not, with 3 where it is not known."""
    with _opened(file, output) as opened:
        told = _pass(opened, output, write=False)
    show(told, output, lambda each: _lines(each, steps=False))
    raise typer.Exit(_verdict(told, behind=Exit.FAILED))


@app.command(
    epilog=example("isthmus schemas writes schemas.yaml cluster-2 allow") + EXIT_CODES,
)
def writes(
    file: DocumentArgument,
    name: Annotated[str, typer.Argument(help="A registry of the document.")],
    what: Annotated[Writes, typer.Argument(help="What is done with clients' registrations.")],
    output: OutputOption = Output.TABLE,
) -> None:
    """Have a registry take clients' registrations, or refuse them, by its own switch.

    A target that is to be the primary takes them: then have the document say so, and run `sync` with that. As long
    as a document says that it is a target, `sync` has it refuse them.
    """
    from isthmus.schemas.registry import RegistryError

    with _opened(file, output) as opened:
        registry = opened.registries.get(name)
        if registry is None:
            known = ", ".join(opened.registries)
            raise CliError("NOT_FOUND", f"{name} is not in {file}, but {known}", Exit.FAILED, output)
        try:
            registry.refuse_writes(what is Writes.REFUSE)
            refuses = registry.refuses_writes()
        except RegistryError as error:
            raise CliError("NOT_REACHABLE", str(error), Exit.NOT_REACHABLE, output) from None
    told = {"name": name, "writes": _writes(refuses)}
    show(told, output, lambda each: [f"{each['name']}: writes are {each['writes']}"])


# ---- registries ----


class _Opened(NamedTuple):
    primary: str
    registries: dict[str, Registry]
    targets: list[Target]


@contextmanager
def _opened(file: Path, output: Output) -> Iterator[_Opened]:
    from isthmus.admin_requests import NotUsable
    from isthmus.schemas.distribution import Target
    from isthmus.schemas.document import DocumentError, read_document

    try:
        document = read_document(file.read_text(encoding="utf-8"), file.parent)
    except (OSError, UnicodeDecodeError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or "not UTF-8"
        raise CliError("FILE", f"{file} cannot be read: {reason}", Exit.USAGE, output) from None
    except DocumentError as error:
        raise CliError("INVALID_DOCUMENT", f"{file}: {error}", Exit.USAGE, output) from None
    with ExitStack() as stack:
        try:
            registries = {
                name: stack.enter_context(closing(_registry(each))) for name, each in document.registries.items()
            }
        except NotUsable as error:
            raise CliError(error.code, error.message, Exit.USAGE, output) from None
        targets = [
            Target(
                name,
                registries[name],
                document.translation(name),
                document.registries[name].writes == "refused",
            )
            for name in document.targets
        ]
        yield _Opened(document.primary, registries, targets)


def _registry(spec: RegistrySpec) -> Registry:
    from isthmus.schemas.apicurio import Apicurio
    from isthmus.schemas.confluent import Confluent

    kind = Apicurio if spec.kind == "apicurio" else Confluent
    return kind(spec.url, spec.credentials)


def _pass(opened: _Opened, output: Output, *, write: bool, delete: bool = False) -> dict[str, Any]:
    from isthmus.schemas.distribution import run

    progress = shows_progress(output)

    def said(target: str, step: Step) -> None:
        if progress:
            typer.echo(f"{target}: {_step_line(_step(step))}", err=True)

    primary = opened.registries[opened.primary]
    outcomes = list(run(primary, opened.targets, write=write, delete=delete, said=said))
    return {
        "primary": opened.primary,
        "primary_writes": _primary_writes(primary),
        "dry_run": not write,
        "targets": [_target(each, write) for each in outcomes],
    }


def _primary_writes(primary: Registry) -> str | None:
    from isthmus.schemas.registry import RegistryError

    try:
        return _writes(primary.refuses_writes())
    except RegistryError:
        return None


def _follow(opened: _Opened, interval_s: float, output: Output) -> NoReturn:
    def end(*_: object) -> NoReturn:
        raise SystemExit(0)  # what was begun is ended on the way out: a target refuses writes again

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    wait = threading.Event()
    before: Any = None
    while True:
        told = _pass(opened, output, write=True)
        state = [{**each, "steps": [], "equal": 0} for each in told["targets"]], told["primary_writes"]
        if state != before or any(each["steps"] for each in told["targets"]):
            if output is Output.JSON:
                typer.echo(json.dumps(told))
            else:
                show(told, output, lambda each: _lines(each, steps=True))
        before = state
        wait.wait(interval_s)


# ---- what is printed ----


def _writes(refused: bool) -> str:
    return "refused" if refused else "allowed"


def _target(outcome: Outcome, write: bool) -> dict[str, Any]:
    refuses = outcome.refuses_writes
    return {
        "name": outcome.name,
        "state": str(outcome.state),
        "message": outcome.message,
        "equal": outcome.equal,
        "steps": [_step(each) for each in (outcome.done if write else outcome.plan.steps)],
        "findings": [{**each._asdict(), "reason": str(each.reason)} for each in outcome.findings],
        "left_out": list(outcome.plan.left_out),
        "writes": None if refuses is None else _writes(refuses),
    }


def _step(step: Step) -> dict[str, Any]:
    from isthmus.schemas.plan import Delete, Register, Restore, SetLevel

    match step:
        case Register(subject, number, version) | Restore(subject, number, version):
            verb = "register" if isinstance(step, Register) else "restore"
            return {"step": verb, "subject": subject, "version": number, "id": version.id}
        case Delete(subject, number, for_good):
            return {"step": "delete_for_good" if for_good else "delete", "subject": subject, "version": number}
        case SetLevel(subject, level):
            return {"step": "set_level", "subject": subject, "level": level}


def _step_line(step: dict[str, Any]) -> str:
    subject = step["subject"] or "all subjects"
    match step["step"]:
        case "set_level":
            return f"level of {subject}: {step['level'] or 'none of its own'}"
        case "register" | "restore":
            return f"{step['step']} {subject} version {step['version']}, id {step['id']}"
    return f"{step['step'].replace('_', ' ')} {subject} version {step['version']}"


def _lines(told: dict[str, Any], steps: bool) -> Iterator[str]:
    if steps:
        would = "would " if told["dry_run"] else ""
        for target in told["targets"]:
            yield from (f"{target['name']}: {would}{_step_line(each)}" for each in target["steps"])
    if told["primary_writes"] == "refused":
        yield f"the primary {told['primary']} refuses writes (`isthmus schemas writes` has it take them)"
    yield from columns(
        ("TARGET", "STATE", "EQUAL", "STEPS", "FINDINGS", "LEFT_OUT", "WRITES", "REASON"),
        (
            (
                each["name"],
                each["state"],
                each["equal"],
                len(each["steps"]),
                len(each["findings"]),
                len(each["left_out"]),
                each["writes"],
                each["message"],
            )
            for each in told["targets"]
        ),
    )
    findings = [
        (target["name"], each["reason"], each["subject"], each["version"], each["message"])
        for target in told["targets"]
        for each in target["findings"]
    ]
    if findings:
        yield ""
        yield from columns(("TARGET", "FINDING", "SUBJECT", "VERSION", "WHAT"), findings[:FINDINGS_SHOWN])
        if len(findings) > FINDINGS_SHOWN:
            yield f"and {len(findings) - FINDINGS_SHOWN} more (-o json)"


def _verdict(told: dict[str, Any], behind: Exit) -> Exit:
    states = {each["state"] for each in told["targets"]}
    if states & {"Unreachable", "Unknown"}:
        return Exit.NOT_REACHABLE
    if any(each["findings"] for each in told["targets"]):
        return Exit.FAILED
    return behind if "Behind" in states else Exit.OK
