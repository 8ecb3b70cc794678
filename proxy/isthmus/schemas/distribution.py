"""One pass: the primary is read, then each target is read, compared, written and read back.

Nothing is kept between passes: what is to be done is always what two registries differ in. So a pass may be killed
anywhere and given again, and two at once do the same.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import StrEnum
from threading import Event
from typing import Final

from isthmus.schemas.contents import Contents, Place, Version
from isthmus.schemas.plan import Delete, Finding, Plan, Reason, Register, Restore, SetLevel, Step, planned
from isthmus.schemas.registry import Refused, Registry, Unreachable
from isthmus.schemas.subjects import Translation

PRIMARY_UNREACHABLE: Final = "PRIMARY_UNREACHABLE"
NOTHING: Final = Plan()


class State(StrEnum):
    IN_SYNC = "In-Sync"
    BEHIND = "Behind"
    """There are steps to take."""
    DIFFERS = "Differs"
    """There are findings, which nothing is done about."""
    UNREACHABLE = "Unreachable"
    UNKNOWN = "Unknown"
    """The primary could not be read."""


@dataclass(frozen=True)
class Target:
    name: str
    registry: Registry
    names: Translation
    refuse_writes: bool = True


@dataclass(frozen=True)
class Outcome:
    """Of one target in one pass."""

    name: str
    state: State
    plan: Plan = NOTHING
    done: tuple[Step, ...] = ()
    findings: tuple[Finding, ...] = ()
    """The plan's, and what came up while it was carried out."""
    refuses_writes: bool | None = None
    message: str | None = None
    """Why it is Unreachable or Unknown."""

    @property
    def equal(self) -> int:
        """Versions that are as they are to be, by now."""
        come = {(each.subject, each.number) for each in self.done if not isinstance(each, SetLevel)}
        gone = {(each.subject, each.number) for each in self.done if isinstance(each, Delete) and each.for_good}
        again = {(each.subject, each.number) for each in self.done if isinstance(each, Register)}
        return self.plan.equal + len(come - (gone - again))


Said = Callable[[str, Step], None]
"""Takes the target and a step that is done; called by the threads of all targets."""


def run(
    primary: Registry,
    targets: Sequence[Target],
    *,
    write: bool,
    delete: bool = False,
    said: Said = lambda *_: None,
    ended: Event | None = None,
) -> Iterator[Outcome]:
    """A pass: all targets at once, each in a thread, in the order in which they are given.

    Without ``write`` it only says what it would do. Once it has ``ended``, as when nobody waits for it any more, no
    further step is taken.
    """
    try:
        contents = primary.contents()
    except (Refused, Unreachable) as error:
        for target in targets:
            yield Outcome(target.name, State.UNKNOWN, message=f"{PRIMARY_UNREACHABLE}: {error}")
        return
    ended = Event() if ended is None else ended

    def outcome(target: Target) -> Outcome:
        try:
            return _one(contents, target, write, delete, said, ended)
        except (Refused, Unreachable) as error:
            return Outcome(target.name, State.UNREACHABLE, message=str(error))

    with ThreadPoolExecutor(max_workers=max(len(targets), 1)) as threads:
        try:
            yield from threads.map(outcome, targets)
        finally:
            ended.set()


def _one(primary: Contents, target: Target, write: bool, delete: bool, said: Said, ended: Event) -> Outcome:
    registry = target.registry
    plan = planned(primary, registry.contents(), target.names, delete)
    if not write:
        state = State.BEHIND if plan.steps else State.DIFFERS if plan.findings else State.IN_SYNC
        return Outcome(target.name, state, plan, (), plan.findings, registry.refuses_writes())
    done, findings = _Writing(target, said, ended).carry_out(plan.steps)
    registry.refuse_writes(target.refuse_writes)  # also where nothing was to be written: a pass may have been killed
    found = (*plan.findings, *findings)
    cut = ended.is_set() and len(done) < len(plan.steps)
    state = State.DIFFERS if found else State.BEHIND if cut else State.IN_SYNC
    return Outcome(target.name, state, plan, tuple(done), found, registry.refuses_writes())


class _Writing:
    def __init__(self, target: Target, said: Said, ended: Event) -> None:
        self._registry = target.registry
        self._target = target
        self._said = said
        self._ended = ended
        self._done: list[Step] = []
        self._findings: list[Finding] = []
        self._failed: set[Place] = set()

    def carry_out(self, steps: Sequence[Step]) -> tuple[list[Step], list[Finding]]:
        """What was done, and what came up. Raises Unreachable: nobody knows how far it went, the next pass will."""
        if not steps:
            return [], []
        try:
            self._registry.begin_writing()
            for step in steps:
                if self._ended.is_set() or not self._take(step):
                    break
        finally:
            with contextlib.suppress(Unreachable, Refused):  # the next pass does it, and says why it cannot
                self._registry.refuse_writes(self._target.refuse_writes)
        return self._done, self._findings

    def _take(self, step: Step) -> bool:
        """Whether to go on: not where the registry does not keep what it was given."""
        if not isinstance(step, SetLevel) and (step.subject, step.number) in self._failed:
            return True  # what was to go is still there, and some registries would overwrite it
        if isinstance(step, Register) and (missing := self._missing(step)) is not None:
            return self._failed_at(step, Reason.REFERENCE_LEFT_OUT, missing)
        try:
            self._write(step)
        except Refused as error:
            return self._failed_at(step, Reason.REFUSED, str(error))
        if (wrong := self._read_back(step)) is not None:
            self._failed_at(step, Reason.NOT_KEPT, f"{wrong}: nothing more is written")
            return False
        self._done.append(step)
        self._said(self._target.name, step)
        return True

    def _missing(self, step: Register) -> str | None:
        for each in step.version.schema.references:
            if (each.subject, each.version) in self._failed:
                return f"it refers to version {each.version} of {each.subject}, which could not be written"
        return None

    def _failed_at(self, step: Step, reason: Reason, message: str) -> bool:
        number = None if isinstance(step, SetLevel) else step.number
        if step.subject is not None and number is not None:
            self._failed.add((step.subject, number))
        self._findings.append(Finding(reason, step.subject, number, message))
        return True

    def _write(self, step: Step) -> None:
        match step:
            case Register(subject, number, version):
                self._registry.register(subject, number, version)
            case Restore(subject, number, version):
                self._registry.restore(subject, number, version)
            case Delete(subject, number, for_good):
                self._registry.delete(subject, number, for_good)
            case SetLevel(subject, level):
                self._registry.set_level(subject, level)

    def _read_back(self, step: Step) -> str | None:
        """What is not as it was written."""
        if isinstance(step, SetLevel):
            level = self._registry.level(step.subject)
            return None if level == step.level else f"the level is {level}, not {step.level}"
        there = self._registry.version(step.subject, step.number)
        if isinstance(step, Delete):
            gone = there is None if step.for_good else there is not None and there.deleted
            return None if gone else "it is still there"
        if there is None:
            return "it is not there"
        if not there.is_like(step.version):
            return _difference(there, step.version)
        return "it is softly deleted" if there.deleted else None


def _difference(there: Version, wanted: Version) -> str:
    if there.id != wanted.id:
        return f"it has id {there.id}, not {wanted.id}"
    return f"id {there.id} has another text or other references"
