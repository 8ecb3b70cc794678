"""The control key becomes another one: proxies that have both read and write on, those with one of them fail closed."""

from __future__ import annotations

import uuid

import pytest

from isthmus_control import commands as c
from isthmus_control import replica as replicas
from isthmus_control.control_state import ControlState
from isthmus_control.levels import KEY_ROTATION
from isthmus_control.model import ResourceType
from isthmus_control.outcome import Accepted, Rejected, Rejection
from isthmus_control.replica import CONTROL_KEY, Halted, Replica
from isthmus_control.sealing import Seal, Sealer, SealingError, Secret
from isthmus_control.signing import Signer, key_needed

OLD, NEW = Secret(b"o" * 32), Secret(b"n" * 32)
BOTH, ONLY_OLD, ONLY_NEW = Signer(NEW, "A", [OLD]), Signer(OLD, "A"), Signer(NEW, "A")


class Log:
    """The records of a control log, as proxies that have both keys write them."""

    def __init__(self) -> None:
        self.replica = Replica(ControlState("A"), BOTH)
        self.values: list[bytes] = []

    def put(self, body: c.Body, signer: Signer | None = None) -> object:
        state = self.replica.state
        chosen = signer or BOTH.of(state.key_id)
        command = c.Command(str(uuid.uuid4()), 1_000 + len(self.values), "p", state.applied_offset, body)
        value = c.encode(command, state.level, chosen)
        self.values.append(value)
        return self.replica.feed(len(self.values) - 1, value).outcome


def rotated() -> Log:
    log = Log()
    assert isinstance(log.put(c.RaiseLevel(KEY_ROTATION, ONLY_OLD.key_id)), Accepted)
    assert isinstance(log.put(c.CreateNamespace(ResourceType.TOPIC, "before-")), Accepted)
    assert isinstance(log.put(c.RaiseLevel(KEY_ROTATION, ONLY_NEW.key_id)), Accepted)
    assert isinstance(log.put(c.CreateNamespace(ResourceType.TOPIC, "after-")), Accepted)
    return log


def test_records_are_signed_with_the_new_key_from_some_record_on() -> None:
    log = rotated()
    assert log.replica.state.key_id == ONLY_NEW.key_id
    outcome = log.put(c.CreateNamespace(ResourceType.TOPIC, "late-"), ONLY_OLD)
    assert isinstance(outcome, Rejected)
    assert outcome.code is Rejection.UNSIGNED


@pytest.mark.parametrize(("signer", "at"), [(ONLY_OLD, 2), (ONLY_NEW, 0), (None, 0)])
def test_who_has_one_of_them_stops_at_the_record_that_needs_the_other(signer: Signer | None, at: int) -> None:
    log, replica = rotated(), Replica(ControlState("A"), signer)
    for offset, value in enumerate(log.values[:at]):
        replica.feed(offset, value)
    with pytest.raises(Halted) as raised:
        replica.feed(at, log.values[at])
    assert raised.value.reason == CONTROL_KEY
    assert f"(offset {at})" in str(raised.value)


def test_the_key_is_not_changed_before_the_feature_level() -> None:
    log = Log()
    log.put(c.RaiseLevel(KEY_ROTATION - 1, ONLY_OLD.key_id))
    outcome = log.put(c.RaiseLevel(KEY_ROTATION - 1, ONLY_NEW.key_id))
    assert isinstance(outcome, Rejected)
    assert "that is not changed" in outcome.message
    assert isinstance(log.put(c.RaiseLevel(KEY_ROTATION, ONLY_NEW.key_id)), Accepted)


@pytest.mark.parametrize("signer", [BOTH, ONLY_OLD, ONLY_NEW])
def test_a_record_is_signed_with_one_of_the_keys_that_a_proxy_has(signer: Signer) -> None:
    log = rotated()
    expected = {BOTH: [True] * 3, ONLY_OLD: [True, True, False], ONLY_NEW: [False, False, True]}[signer]
    assert [replicas.is_signed(value, signer) for value in log.values[1:]] == expected


def test_which_keys_are_needed_is_said_without_them() -> None:
    assert key_needed(ONLY_OLD.key_id, BOTH) is None
    message = key_needed("00000000", BOTH) or ""
    assert BOTH.key_id in message
    assert ONLY_OLD.key_id in message


def test_what_was_sealed_with_the_old_key_opens_and_is_sealed_with_the_new_one() -> None:
    old, both = Sealer(OLD), Sealer(NEW, [OLD])
    sealed = old.seal(Secret(b"secret"), "link")
    assert both.open(sealed, "link") == Secret(b"secret")
    again = both.seal(both.open(sealed, "link"), "link")
    assert (again.seal, again.key_id) == (Seal.AES_256_GCM, Sealer(NEW).key_id)
    assert Sealer(NEW).open(again, "link") == Secret(b"secret")
    with pytest.raises(SealingError, match="sealed with key"):
        old.open(again, "link")
    with pytest.raises(SealingError, match="belongs elsewhere"):
        both.open(sealed, "another link")
