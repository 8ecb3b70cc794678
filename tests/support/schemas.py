"""Schema registries as they are modelled: what becomes of one by a step, and by those who register schemas."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable

from isthmus.schemas.contents import Contents, Place, Reference, Schema, Version
from isthmus.schemas.plan import Delete, Register, Restore, SetLevel, Step


class ModelRegistry:
    """A registry that refuses what real ones refuse: what another version refers to does not go, live versions do not
    go for good, and what a schema refers to is there when it comes."""

    def __init__(self) -> None:
        self.subjects: dict[str, dict[int, Version]] = {}
        self.levels: dict[str, str] = {}
        self.default_level: str | None = "BACKWARD"

    def contents(self) -> Contents:
        subjects = {subject: dict(versions) for subject, versions in self.subjects.items() if versions}
        return Contents(subjects, dict(self.levels), self.default_level)

    def take(self, step: Step) -> None:
        match step:
            case Register(subject, number, version):
                versions = self.subjects.setdefault(subject, {})
                assert number not in versions, f"{subject} {number} would be overwritten"
                for other in self.versions():
                    assert (other.id == version.id) <= (other.schema.meaning == version.schema.meaning), (
                        "an id is taken"
                    )
                for reference in version.schema.references:
                    assert self.contents().at((reference.subject, reference.version)), f"{reference} is not there"
                versions[number] = Version(version.id, version.schema)
            case Restore(subject, number, version):
                assert self.subjects[subject][number] == Version(version.id, version.schema, deleted=True)
                self.subjects[subject][number] = version
            case Delete(subject, number, for_good):
                there = self.subjects[subject][number]
                assert there.deleted == for_good, "a live version would go for good, or one goes softly twice"
                if for_good:
                    assert not self.referring((subject, number)), f"{subject} {number} is referred to"
                    del self.subjects[subject][number]
                else:
                    self.subjects[subject][number] = Version(there.id, there.schema, deleted=True)
            case SetLevel(None, level):
                self.default_level = level
            case SetLevel(subject, None):
                del self.levels[str(subject)]
            case SetLevel(subject, level):
                self.levels[str(subject)] = str(level)

    def versions(self) -> Iterable[Version]:
        return [version for _, version in self.contents().places()]

    def referring(self, place: Place) -> list[Place]:
        return [
            at
            for at, version in self.contents().places()
            if any((each.subject, each.version) == place for each in version.schema.references)
        ]


class ModelPrimary(ModelRegistry):
    """One that schemas are registered at, by chance."""

    def __init__(self, chance: random.Random, subjects: list[str]) -> None:
        super().__init__()
        self._chance = chance
        self._names = subjects
        self._next_id = 1
        self.removed: set[Place] = set()
        """What ever went for good."""

    def something(self) -> None:
        self._chance.choice([self.register, self.register, self.hide, self.remove, self.restore, self.set_level])()

    def register(self) -> None:
        subject = self._chance.choice(self._names)
        live = [place for place, version in self.contents().places() if not version.deleted]
        chosen = self._chance.sample(live, k=min(len(live), self._chance.choice((0, 0, 1, 2))))
        references = tuple(Reference(f"r{number}", *place) for number, place in enumerate(chosen))
        schema = Schema("AVRO", json.dumps({"name": self._chance.randrange(12)}), references)
        ids = {version.schema.meaning: version.id for version in self.versions()}
        if schema.meaning not in ids:
            self._next_id += 1
        versions = self.subjects.setdefault(subject, {})
        if any(version.schema.meaning == schema.meaning for version in versions.values()):
            return
        # The number of a newest version that went for good is used again.
        versions[max(versions, default=0) + 1] = Version(ids.get(schema.meaning, self._next_id), schema)

    def hide(self) -> None:
        if place := self._any(deleted=False):
            self.take(Delete(*place, for_good=False))

    def restore(self) -> None:
        if place := self._any(deleted=True):
            version = self.contents().at(place)
            assert version is not None
            self.take(Restore(*place, Version(version.id, version.schema)))

    def remove(self) -> None:
        place = self._any(deleted=True)
        if place is not None and not self.referring(place):
            self.take(Delete(*place, for_good=True))
            self.removed.add(place)

    def set_level(self) -> None:
        subject = self._chance.choice([None, *self._names])
        level = self._chance.choice(["NONE", "FULL", "BACKWARD_TRANSITIVE"])
        if subject is None:
            self.default_level = level
        elif self.subjects.get(subject):
            if self._chance.random() < 0.3:
                self.levels.pop(subject, None)
            else:
                self.levels[subject] = level

    def _any(self, deleted: bool) -> Place | None:
        places = [place for place, version in self.contents().places() if version.deleted == deleted]
        return self._chance.choice(places) if places else None
