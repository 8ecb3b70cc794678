"""What is to be written at a target for it to have what the primary has, and what cannot be.

=================================  =====================================================================
at the primary, at the target      what is done
=================================  =====================================================================
a version, none                    ``Register``, if its id is free there; referenced schemas go first
live, softly deleted               ``Restore``
softly deleted, live               ``Delete``, softly
gone, softly deleted               ``Delete``, for good
gone, live                         nothing: ONLY_AT_TARGET
a version, another one             the target's gives way if it is softly deleted there, else VERSION_DIFFERS
=================================  =====================================================================

So a version goes for good only after it was seen softly deleted, which the target itself keeps in mind: a primary that
is empty, or was put back to an earlier state, takes nothing from anybody. Nor does anything go for good as long as a
finding says that the target holds what is not the primary's: it may be the wrong registry.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, NamedTuple

from isthmus.schemas.contents import Contents, Meaning, Place, Reference, Schema, Version
from isthmus.schemas.subjects import Translation


class Reason(StrEnum):
    """Why something is not as it is at the primary."""

    PRIMARY_EMPTY = "PRIMARY_EMPTY"
    ID_TAKEN = "ID_TAKEN"
    OTHER_ID = "OTHER_ID"
    VERSION_DIFFERS = "VERSION_DIFFERS"
    ONLY_AT_TARGET = "ONLY_AT_TARGET"
    SUBJECTS_COLLIDE = "SUBJECTS_COLLIDE"
    REFERENCE_LEFT_OUT = "REFERENCE_LEFT_OUT"
    DELETION_WAITS = "DELETION_WAITS"
    REFUSED = "REFUSED"
    NOT_KEPT = "NOT_KEPT"


FOREIGN: Final = frozenset({Reason.ID_TAKEN, Reason.OTHER_ID, Reason.VERSION_DIFFERS, Reason.ONLY_AT_TARGET})
"""The target holds what is not the primary's, or not any more."""


class Finding(NamedTuple):
    reason: Reason
    subject: str | None
    """As the target calls it."""
    version: int | None
    message: str


@dataclass(frozen=True, slots=True)
class Register:
    """Write a version, with its number and its id. Its references are there."""

    subject: str
    number: int
    version: Version


@dataclass(frozen=True, slots=True)
class Restore:
    """Have a version that is softly deleted be live again."""

    subject: str
    number: int
    version: Version


@dataclass(frozen=True, slots=True)
class Delete:
    subject: str
    number: int
    for_good: bool
    """A version that is softly deleted by then; else one that is live, softly."""


@dataclass(frozen=True, slots=True)
class SetLevel:
    """``subject``: None: the level of all that have none of their own. ``level``: None: none of its own."""

    subject: str | None
    level: str | None


Step = Register | Restore | Delete | SetLevel


@dataclass(frozen=True)
class Plan:
    steps: tuple[Step, ...] = ()
    findings: tuple[Finding, ...] = ()
    equal: int = 0
    """Versions that are as they are to be."""
    left_out: tuple[str, ...] = ()
    """The primary's subjects that no format takes."""


def planned(primary: Contents, target: Contents, names: Translation, delete: bool = False) -> Plan:
    """``delete``: what the target has alone gives way, and what is another schema there: an operator's word."""
    wanted = _wanted(primary, names)
    if not any(wanted.contents.subjects.values()):
        if any(versions and _is_primarys(subject, names, wanted) for subject, versions in target.subjects.items()):
            what = "no schemas that a format takes" if any(primary.subjects.values()) else "no schemas"
            message = f"the primary has {what}, and the target has some: nothing is written, nothing is deleted"
            findings = (Finding(Reason.PRIMARY_EMPTY, None, None, message), *wanted.findings)
            return Plan(findings=findings, left_out=wanted.left_out)
        if not any(primary.subjects.values()):
            return Plan()
    work = _compared(wanted, target, names, _Deletions(softly_deleted=True, live=delete))
    if work.going and not delete and any(each.reason in FOREIGN for each in work.findings):
        work = _compared(wanted, target, names, _Deletions(softly_deleted=False, live=False))
    return work.plan()


# ---- the primary's contents as the target is to have them ----


@dataclass
class _Wanted:
    contents: Contents
    findings: list[Finding]
    left_out: tuple[str, ...]
    collided: frozenset[str]
    """Subjects of the target that two of the primary's would be."""


def _wanted(primary: Contents, names: Translation) -> _Wanted:
    called: dict[str, str] = {}
    sources: dict[str, list[str]] = {}
    for subject in primary.subjects:
        name = names.to_target(subject)
        if name is not None:
            called[subject] = name
            sources.setdefault(name, []).append(subject)
    findings = []
    for name, subjects in sources.items():
        if len(subjects) > 1:
            message = f"{' and '.join(sorted(subjects))} of the primary would both be {name}: none is written"
            findings.append(Finding(Reason.SUBJECTS_COLLIDE, name, None, message))
    collided = frozenset(name for name, subjects in sources.items() if len(subjects) > 1)
    clear = {subject: name for subject, name in called.items() if name not in collided}
    versions: dict[str, dict[int, Version]] = {}
    for subject, name in clear.items():
        versions[name] = {
            number: Version(version.id, _renamed(version.schema, clear), version.deleted)
            for number, version in primary.subjects[subject].items()
        }
    levels = {clear[subject]: level for subject, level in primary.levels.items() if subject in clear}
    left_out = tuple(sorted(primary.subjects.keys() - called.keys()))
    return _Wanted(Contents(versions, levels, primary.default_level), findings, left_out, collided)


def _renamed(schema: Schema, names: Mapping[str, str]) -> Schema:
    """A reference to what is not distributed keeps the primary's name, behind what no name has."""
    if not schema.references:
        return schema
    return Schema(
        schema.kind,
        schema.text,
        tuple(
            Reference(each.name, names.get(each.subject, f"{_NOT_DISTRIBUTED}{each.subject}"), each.version)
            for each in schema.references
        ),
    )


_NOT_DISTRIBUTED: Final = "\0"


def in_order_of_references(contents: Contents) -> list[Place]:
    """All places, each behind those that its schema refers to and those with lower numbers of its subject."""
    ordered: dict[Place, None] = {}
    for start, _ in sorted(contents.places(), key=lambda each: each[0]):
        begun: set[Place] = set()
        stack = [start]
        while stack:
            place = stack[-1]
            missing = [] if place in begun else [each for each in _before(contents, place) if each not in ordered]
            begun.add(place)
            if missing:
                stack += missing
            else:
                ordered[stack.pop()] = None
    return list(ordered)


def _before(contents: Contents, place: Place) -> Iterator[Place]:
    version = contents.at(place)
    assert version is not None
    for reference in version.schema.references:
        if contents.at((reference.subject, reference.version)) is not None:
            yield reference.subject, reference.version
    lower = [number for number in contents.subjects[place[0]] if number < place[1]]
    if lower:
        yield place[0], max(lower)


# ---- differences ----


class _Deletions(NamedTuple):
    """What may go for good."""

    softly_deleted: bool
    live: bool

    def allow(self, version: Version) -> bool:
        return self.softly_deleted if version.deleted else self.live


def _is_primarys(subject: str, names: Translation, wanted: _Wanted) -> bool:
    """Whether a subject of the target is the primary's to have, or not to have."""
    return names.is_targets(subject) and subject not in wanted.collided


def _compared(wanted: _Wanted, target: Contents, names: Translation, deletions: _Deletions) -> _Work:
    work = _Work(wanted, target, deletions)
    for place, version in target.places():
        there = wanted.contents.at(place)
        # What has the same id is the same, and differs in what it refers to where that is not distributed any more.
        gone = there is None or (version.deleted and version.id != there.id)
        if gone and _is_primarys(place[0], names, wanted):
            work.meet_alone(place, version)
    for place in work.order:
        work.meet(place)
    return work


class _Work:
    def __init__(self, wanted: _Wanted, target: Contents, deletions: _Deletions) -> None:
        self.order = in_order_of_references(wanted.contents)
        self.coming: list[Register | Restore] = []
        self.hiding: set[Place] = set()
        """To be deleted softly, and to stay so."""
        self.going: dict[Place, Version] = {}
        """To be deleted for good; something else may come in its place."""
        self.findings = list(wanted.findings)
        self.equal = 0
        self._wanted = wanted
        self._target = target
        self._deletions = deletions
        self._missing: set[Place] = set()
        self._by_id: defaultdict[int, dict[Place, Meaning]] = defaultdict(dict)
        self._by_meaning: defaultdict[Meaning, dict[Place, int]] = defaultdict(dict)
        """What the target has, and is to get."""
        self._wanted_ids: defaultdict[Meaning, set[int]] = defaultdict(set)
        for place, version in target.places():
            self._note(place, version)
        for _, version in wanted.contents.places():
            self._wanted_ids[version.schema.meaning].add(version.id)

    def _note(self, place: Place, version: Version) -> None:
        self._by_id[version.id][place] = version.schema.meaning
        self._by_meaning[version.schema.meaning][place] = version.id

    def _forget(self, place: Place, version: Version) -> None:
        self.going[place] = version
        del self._by_id[version.id][place]
        del self._by_meaning[version.schema.meaning][place]

    def meet(self, place: Place) -> None:
        """A version of the primary. What it refers to was met before."""
        version = self._wanted.contents.at(place)
        there = self._target.at(place) if place not in self.going else None
        assert version is not None
        if there is not None and there.is_like(version):
            if version.deleted == there.deleted:
                self.equal += 1
            elif version.deleted:
                self.hiding.add(place)
            else:
                self.coming.append(Restore(*place, version))
            return
        if place in self._missing:
            return  # what is there in its place waits
        if there is not None and not self._deletions.allow(there):
            if there.deleted:
                self._leave(Reason.DELETION_WAITS, place, _WAITS)
            else:
                self._leave(Reason.VERSION_DIFFERS, place, _differs(there, version))
        elif self._can_come(place, version):
            if there is not None:
                self._forget(place, there)
            self.coming.append(Register(*place, version))
            self._note(place, version)
            if version.deleted:
                self.hiding.add(place)

    def meet_alone(self, place: Place, version: Version) -> None:
        """A version that the target has, and the primary has not, or not any more. Before all that is to come: its id
        may be free by then."""
        if self._deletions.allow(version):
            self._forget(place, version)
        elif version.deleted:
            self._leave(Reason.DELETION_WAITS, place, _WAITS)
        else:
            message = (
                f"the primary does not have it (id {version.id} here), and was not seen to delete it softly before"
            )
            self._leave(Reason.ONLY_AT_TARGET, place, message)

    def _can_come(self, place: Place, version: Version) -> bool:
        for reference in version.schema.references:
            at = reference.subject, reference.version
            if self._wanted.contents.at(at) is None or at in self._missing:
                name = reference.subject.removeprefix(_NOT_DISTRIBUTED)
                message = f"it refers to version {reference.version} of {name}, which is not distributed"
                return self._leave(Reason.REFERENCE_LEFT_OUT, place, message)
        meaning = version.schema.meaning
        if any(other != meaning for at, other in self._by_id[version.id].items() if at != place):
            message = f"id {version.id} means another schema at the target: nothing is overwritten"
            return self._leave(Reason.ID_TAKEN, place, message)
        others = {other for at, other in self._by_meaning[meaning].items() if at != place} - self._wanted_ids[meaning]
        if others:
            message = f"the target knows this schema by id {min(others)}, the primary by id {version.id}"
            return self._leave(Reason.OTHER_ID, place, message)
        return True

    def _leave(self, reason: Reason, place: Place, message: str) -> bool:
        self._missing.add(place)
        self.findings.append(Finding(reason, *place, message))
        return False

    def plan(self) -> Plan:
        steps: list[Step] = []
        # What refers goes before what is referred to, and comes behind it.
        for place in reversed(in_order_of_references(self._target)):
            if place in self.going:
                if not self.going[place].deleted:
                    steps.append(Delete(*place, for_good=False))
                steps.append(Delete(*place, for_good=True))
        steps += self.coming
        steps += [Delete(*place, for_good=False) for place in reversed(self.order) if place in self.hiding]
        steps += self._levels()
        return Plan(tuple(steps), tuple(self.findings), self.equal, self._wanted.left_out)

    def _levels(self) -> Iterator[SetLevel]:
        wanted, target = self._wanted.contents, self._target
        if wanted.default_level is not None and wanted.default_level != target.default_level:
            yield SetLevel(None, wanted.default_level)
        there = {each.subject for each in self.coming} | target.subjects.keys()
        for subject in sorted(wanted.subjects):
            level = wanted.levels.get(subject)
            if subject in there and level != target.levels.get(subject):
                yield SetLevel(subject, level)


_WAITS: Final = "it is deleted for good when nothing else at the target is other than at the primary"


def _differs(there: Version, version: Version) -> str:
    if there.id == version.id:
        return f"another schema has id {version.id} there: nothing is overwritten"
    return f"id {there.id} there, id {version.id} at the primary: nothing is overwritten"
