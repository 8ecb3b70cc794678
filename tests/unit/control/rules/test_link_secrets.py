"""Two secrets of a link, one after the other: whatever order two logs take their steps in, they have one in common."""

from __future__ import annotations

import random
import uuid
from collections.abc import Iterator
from dataclasses import replace

import pytest
from support.command_log import CommandLog

from isthmus_control import commands as c
from isthmus_control.codec import canonical
from isthmus_control.levels import SECRET_ROTATION
from isthmus_control.model import Link
from isthmus_control.outcome import Outcome, Rejected, Rejection
from isthmus_control.sealing import Seal, Sealed, Sealer, Secret

LINK, LINK_ID = "a-to-b", str(uuid.UUID(int=1))
IDS = [str(uuid.UUID(int=number)) for number in (7, 8)]
FIRST = Sealed(Seal.NONE, "", "Zmlyc3Q=")


def secret(secret_id: str) -> Sealed:
    return Sealed(Seal.NONE, "", f"{uuid.UUID(secret_id).int:04d}")


def begin(secret_id: str, current: str = "", asked: bool = False) -> c.BeginSecretRotation:
    return c.BeginSecretRotation(LINK, LINK_ID, secret_id, current, secret(secret_id), asked)


def finish(secret_id: str) -> c.FinishSecretRotation:
    return c.FinishSecretRotation(LINK, LINK_ID, secret_id)


def abandon(secret_id: str) -> c.AbandonSecretRotation:
    return c.AbandonSecretRotation(LINK, LINK_ID, secret_id)


class Side:
    """The control log of one cluster."""

    def __init__(self, level: int = SECRET_ROTATION) -> None:
        self.log = CommandLog()
        self.log.ok(c.RaiseLevel(level))
        self.log.ok(c.CreateLink(LINK, LINK_ID, "B", dials=False, secret=FIRST))

    @property
    def link(self) -> Link:
        return self.log.state.links[LINK]

    @property
    def ids(self) -> list[str]:
        return list(self.link.secrets)

    def refuses(self, body: c.Body, code: Rejection) -> str:
        outcome: Outcome = self.log.do(body)
        assert isinstance(outcome, Rejected), outcome
        assert outcome.code is code
        return outcome.message


def test_a_link_without_rotations_stands_in_the_log_as_before() -> None:
    side = Side()
    assert b"secret_id" not in canonical(side.log.state)
    assert b"next_secret" not in canonical(side.log.state)
    assert side.link.secrets == {"": FIRST}


@pytest.mark.parametrize("body", [begin(IDS[0]), finish(IDS[0]), abandon(IDS[0])])
def test_it_needs_the_feature_level(body: c.Body) -> None:
    assert "feature level 4" in Side(SECRET_ROTATION - 1).refuses(body, Rejection.NOT_SUPPORTED)


def test_both_count_until_it_is_finished() -> None:
    side = Side()
    side.log.ok(begin(IDS[0]))
    assert side.link.secrets == {"": FIRST, IDS[0]: secret(IDS[0])}
    assert side.log.ok(begin(IDS[0])) == ()
    side.log.ok(finish(IDS[0]))
    assert side.link.secrets == {IDS[0]: secret(IDS[0])}
    assert side.log.ok(finish(IDS[0])) == ()
    side.log.ok(begin(IDS[1], current=IDS[0]))
    side.log.ok(abandon(IDS[1]))
    assert side.ids == [IDS[0]]
    assert side.log.ok(abandon(IDS[1])) == ()


def test_what_was_never_begun_is_not_finished() -> None:
    side = Side()
    assert "rotate it again" in side.refuses(finish(IDS[0]), Rejection.NOT_FOUND)
    side.log.ok(begin(IDS[0]))
    side.refuses(finish(IDS[1]), Rejection.NOT_FOUND)
    side.refuses(begin(IDS[1]), Rejection.CONFLICT)
    side.refuses(begin(IDS[1], current=IDS[1], asked=True), Rejection.CONFLICT)
    side.refuses(replace(begin(IDS[1]), link_id=str(uuid.UUID(int=2))), Rejection.CONFLICT)
    side.refuses(replace(begin(IDS[0]), secret_id="x", asked=True), Rejection.INVALID)


def test_who_is_asked_takes_the_next_one_in_the_place_of_one_that_was_given_up() -> None:
    side = Side()
    side.log.ok(begin(IDS[0], asked=True))
    side.log.ok(begin(IDS[1], asked=True))
    assert side.ids == ["", IDS[1]]


def test_what_one_side_asked_the_other_one_for_is_not_given_up_for_what_that_asks() -> None:
    """The other one may have dropped the old secret for it by now."""
    side = Side()
    side.log.ok(begin(IDS[0]))
    assert "being rotated already" in side.refuses(begin(IDS[1], asked=True), Rejection.CONFLICT)
    side.log.ok(begin(IDS[1], current=IDS[0], asked=True))
    assert side.ids == IDS


def test_who_is_asked_ends_the_rotation_that_the_other_side_has_ended() -> None:
    side = Side()
    side.log.ok(begin(IDS[0], asked=True))
    side.log.ok(begin(IDS[1], current=IDS[0], asked=True))
    assert side.ids == IDS


def test_a_secret_is_sealed_while_it_counts() -> None:
    side, sealer = Side(), Sealer(Secret(b"k" * 32))
    sealed = sealer.seal(Secret(b"first"), LINK_ID)
    side.log.ok(c.SealSecret(LINK, LINK_ID, "", sealed))
    assert side.link.secret == sealed
    side.log.ok(begin(IDS[0]))
    side.log.ok(c.SealSecret(LINK, LINK_ID, IDS[0], sealed))
    assert side.link.secrets == {"": sealed, IDS[0]: sealed}
    side.log.ok(finish(IDS[0]))
    assert side.log.ok(c.SealSecret(LINK, LINK_ID, "", FIRST)) == ()
    assert side.link.secrets == {IDS[0]: sealed}


def end_it(here: Side, there: Side, secret_id: str) -> None:
    for _ in Rotation(here, there, "")._finish(here, there, secret_id):
        pass


class Rotation:
    """An operator at one side, step by step, as ``operations/secret_rotation.py`` takes them; it may end anywhere."""

    def __init__(self, here: Side, there: Side, secret_id: str) -> None:
        self.steps = self._steps(here, there, secret_id)

    def _steps(self, here: Side, there: Side, secret_id: str) -> Iterator[None]:
        link = here.link
        yield
        if link.next_secret is not None:
            yield from self._finish(here, there, link.next_secret.secret_id)
            return
        if isinstance(there.log.do(begin(secret_id, link.secret_id, asked=True)), Rejected):
            return
        yield
        if isinstance(here.log.do(begin(secret_id, link.secret_id)), Rejected):
            return
        yield
        yield from self._finish(here, there, secret_id)

    def _finish(self, here: Side, there: Side, secret_id: str) -> Iterator[None]:
        outcome = there.log.do(finish(secret_id))
        yield
        if isinstance(outcome, Rejected):
            assert outcome.code is Rejection.NOT_FOUND
            here.log.do(abandon(secret_id))
        else:
            here.log.do(finish(secret_id))


@pytest.mark.parametrize("sides", ["aa", "ab"])
def test_in_whichever_order_two_operators_steps_come_and_wherever_they_end(sides: str) -> None:
    """Two rotations at once, each given up after some step, and later ones that end what they left."""
    rng = random.Random(sides)
    for _ in range(300):
        logs = {"a": Side(), "b": Side()}
        rotations = [
            Rotation(logs[side], logs["b" if side == "a" else "a"], each) for side, each in zip(sides, IDS, strict=True)
        ]
        order = [0] * rng.randint(0, 5) + [1] * rng.randint(0, 5)
        rng.shuffle(order)
        for which in order:
            next(rotations[which].steps, None)
            assert set(logs["a"].ids) & set(logs["b"].ids), order
        for side, other in (("a", "b"), ("b", "a")):  # who asked goes on by itself
            asked = logs[side].link.next_secret
            if asked is not None and not asked.asked:
                end_it(logs[side], logs[other], asked.secret_id)
                assert set(logs["a"].ids) & set(logs["b"].ids), order
        for number in range(9, 12):
            for _ in Rotation(logs["a"], logs["b"], str(uuid.UUID(int=number))).steps:
                assert set(logs["a"].ids) & set(logs["b"].ids), order
        assert logs["a"].ids == logs["b"].ids, order
        assert len(logs["a"].ids) == 1
