"""MACs of the control log's records: what counts with a key, and what a proxy without it does."""

from __future__ import annotations

import json
import uuid
from typing import Any

import pytest

from isthmus_control import commands as c
from isthmus_control import replica as r
from isthmus_control.apply import SNAPSHOT_INTERVAL
from isthmus_control.control_state import ControlState
from isthmus_control.model import ResourceType
from isthmus_control.outcome import Accepted, NotUnderstood, Outcome, Rejected, Rejection
from isthmus_control.sealing import Secret
from isthmus_control.signing import Signer, key_needed

KEY = Secret(bytes(range(32)))
SIGNER = Signer(KEY, "A")
OTHER = Signer(Secret(b"x" * 32), "A")
UID = str(uuid.UUID(int=7))
TOPIC = ResourceType.TOPIC


def command(body: c.Body, seen: int = -1, **more: Any) -> c.Command:
    return c.Command(str(uuid.uuid4()), 1, "p", seen, body, **more)


class Log:
    """A log whose first record has it signed."""

    def __init__(self, signer: Signer | None = SIGNER) -> None:
        self.records: list[bytes | None] = []
        self.replica = r.Replica(ControlState("A"), signer)

    def write(self, value: bytes | None) -> Outcome | NotUnderstood:
        self.records.append(value)
        return self.replica.feed(len(self.records) - 1, value).outcome

    def do(self, body: c.Body, signer: Signer | None = SIGNER) -> Outcome | NotUnderstood:
        return self.write(c.encode(command(body, len(self.records) - 1), 2, signer))

    def sign(self) -> Outcome | NotUnderstood:
        return self.write(c.encode(command(c.RaiseLevel(2, SIGNER.key_id))))


def namespace(prefix: str = "a-") -> c.CreateNamespace:
    return c.CreateNamespace(TOPIC, prefix, True)


def test_a_record_with_its_mac_is_read_as_without() -> None:
    made = command(namespace(), 3, prefix=c.Prefix(5, "ab" * 16))
    plain, signed = c.encode(made, 2), c.encode(made, 2, SIGNER)
    assert c.decode(plain) == c.decode(signed) == c.decode(signed, SIGNER) == made
    envelope = json.loads(signed)
    assert len(envelope.pop("mac")) == 32
    assert envelope == json.loads(plain)
    assert envelope["prefix"] == {"generation": 5, "digest": "ab" * 16}
    assert c.encode(c.decode(signed), 2, SIGNER) == signed


def test_below_level_2_records_are_what_they_were() -> None:
    made = command(namespace(), 3, prefix=c.Prefix(5, "ab"))
    for level in (0, 1):
        envelope = json.loads(c.encode(made, level))
        assert not envelope.keys() & {"prefix", "mac"}


@pytest.mark.parametrize("name", ["at_ms", "by", "id", "kind", "seen", "v", "body", "prefix", "concerns", "mac"])
def test_nothing_of_a_signed_record_may_be_changed(name: str) -> None:
    envelope = json.loads(c.encode(command(namespace(), 3, prefix=c.Prefix(5, "ab")), 2, SIGNER))
    assert SIGNER.signed(envelope)
    changed = {**envelope, name: "0" * 32}
    left_out = {key: value for key, value in envelope.items() if key != name}
    added = {**envelope, "more": 1}
    for wrong in (changed, left_out, added):
        assert not SIGNER.signed(wrong)
        with pytest.raises(c.UnsignedRecord, match=rf"no MAC of the control key {SIGNER.key_id}"):
            c.decode(json.dumps(wrong).encode(), SIGNER)


def test_a_mac_is_of_one_key_and_one_cluster() -> None:
    value = c.encode(command(namespace()), 2, SIGNER)
    assert Signer(KEY, "A").signed(json.loads(value))
    assert not Signer(KEY, "B").signed(json.loads(value))
    assert not OTHER.signed(json.loads(value))
    assert Signer(KEY, "B").key_id == SIGNER.key_id != OTHER.key_id
    for mac in (None, 5, "", "\u00e9" * 32, "0" * 32):
        assert not SIGNER.signed({**json.loads(value), "mac": mac})


def test_what_a_stranger_writes_does_not_count() -> None:
    log = Log()
    log.do(namespace(), None)
    assert isinstance(log.sign(), Accepted)
    while len(log.records) <= SNAPSHOT_INTERVAL + 5:
        log.do(c.RenewLease("nobody", UID, -1))
    before = log.replica.state
    newer = json.loads(c.encode(command(namespace("b-")), 2))
    strangers = [
        c.encode(command(c.DeleteNamespace(TOPIC, "a-"))),
        c.encode(command(c.DeleteNamespace(TOPIC, "a-"), 3, prefix=c.Prefix(9, "ab")), 2),
        c.encode(command(c.DeleteNamespace(TOPIC, "a-")), 2, OTHER),
        c.encode(command(c.RaiseLevel(9))),
        c.encode(command(c.AcceptLog(9))),
        json.dumps({**newer, "kind": "freeze"}).encode(),
        json.dumps({**newer, "v": 99}).encode(),
    ]
    for number, value in enumerate(strangers, 1):
        outcome = log.write(value)
        assert isinstance(outcome, Rejected)
        assert outcome.code is Rejection.UNSIGNED
        assert "whoever wrote it (it says 'p') does not have the key" in outcome.message
        assert log.replica.state == before.evolve(applied_offset=log.replica.state.applied_offset)
        assert log.replica.unsigned.count == number
        assert f"offset {len(log.records) - 1}" in log.replica.unsigned.last
    # Junk, and records without a value (an import writes them), are nobody's command.
    for junk in (b"junk", None):
        outcome = log.write(junk)
        assert isinstance(outcome, Rejected)
        assert outcome.code is Rejection.MALFORMED
    assert log.replica.unsigned.count == len(strangers)
    assert isinstance(log.do(c.DeleteNamespace(TOPIC, "a-")), Accepted)


def test_what_was_on_its_way_when_signing_began_is_nobodys_fault() -> None:
    log = Log()
    log.sign()
    made = command(namespace())
    outcome = log.write(c.encode(made, 1))
    assert isinstance(outcome, Rejected)
    assert log.replica.unsigned.count == 0
    assert isinstance(log.write(c.encode(made, 2, SIGNER)), Accepted), "it is written again, and counts once"


@pytest.mark.parametrize("signer", [None, OTHER])
def test_a_proxy_without_the_key_follows_no_further_and_says_which_it_needs(signer: Signer | None) -> None:
    log = Log(signer)
    with pytest.raises(r.Halted, match=f"signed with the control key of id {SIGNER.key_id}") as caught:
        log.sign()
    assert caught.value.reason == r.CONTROL_KEY
    has = "none is configured" if signer is None else f"has id {OTHER.key_id}"
    assert has in str(caught.value)
    assert "set cluster.control_key_file" in str(caught.value)
    state = ControlState("A", applied_offset=SNAPSHOT_INTERVAL - 1, level=2, key_id=SIGNER.key_id)
    assert r.load(r.take(state), "A", SIGNER) == state
    with pytest.raises(r.Halted) as caught:
        r.load(r.take(state), "A", signer)
    assert caught.value.reason == r.CONTROL_KEY
    assert key_needed("", signer) is None
    assert key_needed(SIGNER.key_id, SIGNER) is None


def test_newer_records_of_those_who_have_the_key_are_treated_as_ever() -> None:
    log = Log()
    log.sign()
    later = json.loads(c.encode(command(namespace("b-")), 2))
    later["kind"] = "freeze"
    later["mac"] = SIGNER.mac(later)
    assert r.is_signed(json.dumps(later).encode(), SIGNER)
    assert isinstance(log.write(json.dumps(later).encode()), NotUnderstood)
    assert log.replica.state.lookup.topic_reservation("b-1") is not None


def test_a_snapshot_is_looked_for_by_its_mac() -> None:
    state = ControlState("A", applied_offset=SNAPSHOT_INTERVAL - 1)
    made = command(r.take(state), SNAPSHOT_INTERVAL)
    plain, signed = c.encode(made), c.encode(made, 2, SIGNER)
    at = SNAPSHOT_INTERVAL + 1
    assert r.snapshot_in(at, plain) == r.snapshot_in(at, signed) == made.body
    assert r.snapshot_in(at, signed, SIGNER) == made.body
    assert r.snapshot_in(at, plain, SIGNER) is None
    assert r.snapshot_in(at, signed, OTHER) is None
    assert [r.is_signed(value, SIGNER) for value in (plain, signed, b'{"mac":1}', None)] == [False, True, False, False]
