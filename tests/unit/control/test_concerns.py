"""What records concern, and what a proxy does with those that it does not know."""

from __future__ import annotations

import json
import random
import uuid
from dataclasses import replace
from typing import Any

import pytest
from support.seeds import seeds

from isthmus_control import commands as c
from isthmus_control import replica as r
from isthmus_control.apply import SNAPSHOT_INTERVAL
from isthmus_control.codec import canonical
from isthmus_control.concerns import NAMED_MAX, Concerns, concerns_of
from isthmus_control.control_state import ControlState
from isthmus_control.model import NamespaceKey, ResourceType, Role, TopicState
from isthmus_control.outcome import Accepted, NotUnderstood, Outcome, Rejected, Rejection
from isthmus_control.rules.levels import met

TOPIC, GROUP = ResourceType.TOPIC, ResourceType.CONSUMER_GROUP
UID = str(uuid.UUID(int=7))
ORDERS = NamespaceKey(TOPIC, "orders-")


def places(*topics: str) -> tuple[c.PartitionOffset, ...]:
    return tuple(c.PartitionOffset(topic, UID, 0, 5) for topic in topics)


@pytest.mark.parametrize(
    ("body", "concerns"),
    [
        (c.CreateNamespace(TOPIC, "orders-"), Concerns((ORDERS,))),
        (c.DeleteLink("l"), Concerns((), ("l",))),
        (c.CreateLink("l", UID, "B", True), Concerns((), ("l",))),
        (c.AttachNamespace("l", TOPIC, "orders-", "b-", Role.FOLLOWER), Concerns((ORDERS,), ("l",))),
        (
            c.BeginPromotion("l", TOPIC, "orders-", {}, UID, (NamespaceKey(GROUP, "g-"),)),
            Concerns((NamespaceKey(GROUP, "g-"), ORDERS), ("l",)),
        ),
        (c.ForgetFollowerTopic("l", "t"), Concerns((NamespaceKey(TOPIC, "t"),), ("l",))),
        (c.CompactFollowerTopic("t", UID, True, 7), Concerns((NamespaceKey(TOPIC, "t"),))),
        (c.OpenProvenance("l", places("t", "u")), Concerns((), ("l",))),
        (c.CloseProvenance(places("u", "t", "t")), Concerns((NamespaceKey(TOPIC, "t"), NamespaceKey(TOPIC, "u")))),
        (c.CloseProvenance(places(*map(str, range(NAMED_MAX + 1)))), None),
        (c.RecordAcls("l", "User:a-"), Concerns((), ("l",))),
        (c.RegisterProducerIds("B"), None),
        (c.HoldBrokerConfig("n", "false", None), None),
        (c.ClaimBrokers("p", UID, (), True, None, 10_000, "1", -1), None),
        (c.RenewLease("p", UID, 5), None),
        (c.ExpireLease("p", UID, 5), None),
        (c.RaiseLevel(1), None),
        (c.Snapshot(511, "ab", "cd"), None),
    ],
    ids=lambda each: each.KIND if isinstance(each, c.Body) else "",
)
def test_what_a_command_concerns(body: c.Body, concerns: Concerns | None) -> None:
    assert concerns_of(body) == concerns


def test_envelopes_say_it_from_level_1_on() -> None:
    command = c.Command(UID, 5, "p", 3, c.AttachNamespace("l", TOPIC, "orders-", "b-", Role.FOLLOWER))
    below, above = json.loads(c.encode(command)), json.loads(c.encode(command, 1))
    assert above.pop("concerns") == {"links": ["l"], "namespaces": [["topic", "orders-"]]}
    assert above == below
    assert c.decode(c.encode(command, 1)) == command


def test_a_kind_that_may_be_ignored_is_not_remembered() -> None:
    """Those who know it and those who pass over it come to the same state, whatever becomes of a retry."""
    assert not [body for body in c.KINDS.values() if body.IGNORABLE and body.REMEMBERED]


class Log:
    """A log with a link ``l`` that ``orders-`` leads to another cluster, and a replica of it."""

    def __init__(self) -> None:
        self.records: list[bytes] = []
        self.replica = r.Replica(ControlState("A"))
        self.do(c.CreateLink("l", UID, "B", True, ("b:9192",)))
        self.do(c.AttachNamespace("l", TOPIC, "orders-", "b-", Role.LEADER, create_missing=True))
        self.do(c.CreateNamespace(TOPIC, "free-"))

    @property
    def state(self) -> ControlState:
        return self.replica.state

    def do(self, body: c.Body) -> Outcome | NotUnderstood:
        offset = len(self.records)
        return self.write(c.encode(c.Command(str(uuid.uuid4()), 1, "p", offset - 1, body), 1))

    def newer(self, **envelope: Any) -> Outcome | NotUnderstood:
        """A record of a kind that this version does not know."""
        raw = {"v": 1, "id": str(uuid.uuid4()), "kind": "freeze", "at_ms": 5, "by": "new", "seen": -1, "body": {}}
        return self.write(json.dumps({**raw, **envelope}).encode())

    def write(self, value: bytes) -> Outcome | NotUnderstood:
        self.records.append(value)
        return self.replica.feed(len(self.records) - 1, value).outcome

    def fill(self, until: int) -> None:
        while len(self.records) <= until:
            self.do(c.RenewLease("nobody", UID, -1))


def about(*prefixes: str, links: tuple[str, ...] = ()) -> dict[str, Any]:
    return {"namespaces": [["topic", prefix] for prefix in prefixes], "links": list(links)}


def test_one_that_may_be_ignored_is_passed_over_and_states_stay_equal() -> None:
    log = Log()
    before = log.state
    outcome = log.newer(ignorable=True)
    assert isinstance(outcome, NotUnderstood)
    assert "proxy 'new' wrote a command 'freeze', which this version does not know (offset 3)" in outcome.message
    assert log.state == before.evolve(applied_offset=3)
    log.fill(SNAPSHOT_INTERVAL)
    assert log.replica.due_state is not None


@pytest.mark.parametrize(
    ("concerns", "refused", "stopped"),
    [
        (about("orders-"), "orders-1", True),
        (about("orders-eu"), "orders-eu", True),
        (about("free-"), "free-1", False),
        (about(links=("l",)), "orders-1", True),
    ],
)
def test_one_that_may_not_be_refuses_what_it_concerns_only(
    concerns: dict[str, Any], refused: str, stopped: bool
) -> None:
    log = Log()
    lookup = log.state.lookup
    assert isinstance(log.newer(concerns=concerns), NotUnderstood)
    assert log.replica.halted is None
    assert log.state.lookup is not lookup
    reservation = log.state.lookup.topic_reservation(refused)
    assert reservation is not None
    assert reservation.beyond
    assert "upgrade this proxy" in reservation.reason
    assert log.state.lookup.topic_reservation("other") is None
    assert bool(log.state.lookup.stopped) is stopped
    # All else goes on, and is judged as by everybody.
    assert isinstance(log.do(c.CreateNamespace(TOPIC, "other-", True)), Accepted)
    assert log.state.lookup.topic_reservation("other-1") is not None


def test_what_touches_it_is_beyond_this_version_too() -> None:
    log = Log()
    log.newer(concerns=about("free-"))
    outcome = log.do(c.AttachNamespace("l", TOPIC, "free-", "c-", Role.LEADER))
    assert isinstance(outcome, Rejected)
    assert outcome.code is Rejection.NOT_SUPPORTED
    assert "upgrade this proxy" in outcome.message
    # Others may have accepted it: nobody knows here what the link does now.
    assert set(log.state.lookup.stopped) == {"l"}
    assert log.state.lookup.topic_reservation("orders-1") is not None
    kept = log.state.beyond
    log.do(c.AlterNamespace(TOPIC, "free-", True))
    log.newer(concerns=about("free-"))
    assert log.state.beyond == kept


def test_a_state_that_is_not_whole_is_neither_written_nor_compared() -> None:
    log = Log()
    log.fill(SNAPSHOT_INTERVAL - 1)
    assert log.replica.due_state is not None
    whole = r.take(log.state)
    log.newer(concerns=about("free-"))
    log.fill(2 * SNAPSHOT_INTERVAL)
    due = log.replica.due_state
    assert due is not None
    assert due.applied_offset == SNAPSHOT_INTERVAL - 1  # of before, which is whole
    assert b"beyond" not in canonical(log.state)
    newer = json.loads(canonical(log.state.evolve(applied_offset=2 * SNAPSHOT_INTERVAL - 1, beyond=())))
    newer["frozen"] = ["free-"]
    data = json.dumps(newer).encode()
    another = replace(
        r.take(replace(log.state, applied_offset=2 * SNAPSHOT_INTERVAL - 1)), digest=r.digest(data), state=packed(data)
    )
    assert isinstance(log.do(another), Accepted)

    # A start passes over what it cannot read, and comes to the same from what stands before.
    with pytest.raises(r.Halted, match="'frozen'") as caught:
        r.load(another, "A")
    assert caught.value.reason == r.NEWER_VERSION
    again = r.Replica(r.load(whole, "A"))
    for offset in range(again.next_offset, len(log.records)):
        again.feed(offset, log.records[offset])
    assert again.state == log.state


def packed(data: bytes) -> str:
    import base64
    import zlib

    return base64.b64encode(zlib.compress(data)).decode()


@pytest.mark.parametrize(
    "envelope",
    [
        {},
        {"concerns": None},
        {"concerns": {}},
        {"concerns": {"namespaces": [["schema", "x"]]}},
        {"concerns": {"clusters": ["B"]}},
        {"concerns": "all"},
        {"ignorable": "yes"},
    ],
)
def test_one_that_does_not_say_concerns_everything(envelope: dict[str, Any]) -> None:
    log = Log()
    with pytest.raises(r.Halted, match="upgrade this proxy") as caught:
        log.newer(**envelope)
    assert caught.value.reason == r.NEWER_VERSION


def test_a_newer_version_or_field_of_a_known_kind_is_treated_alike() -> None:
    log = Log()
    body = {"type": "topic", "prefix": "free-", "reserved": True, "frozen": True}
    assert isinstance(log.newer(kind="alter-namespace", body=body, concerns=about("free-")), NotUnderstood)
    assert isinstance(log.newer(kind="delete-namespace", v=9, concerns=about("free-")), NotUnderstood)
    assert isinstance(log.newer(later=1, concerns=about("free-")), NotUnderstood)
    assert log.state.lookup.topic_reservation("free-1") is not None


PREFIXES = ("", "a", "ab", "b", "c")
LINKS = {"l": "B", "m": "C"}


def random_body(rng: random.Random) -> c.Body:
    link, prefix, kind = rng.choice(list(LINKS)), rng.choice(PREFIXES), rng.choice((TOPIC, GROUP))
    topic = rng.choice(("a1", "ab1", "b1", "c1"))
    return rng.choice(
        (
            c.CreateNamespace(kind, prefix, rng.random() < 0.5),
            c.AlterNamespace(kind, prefix, rng.random() < 0.5),
            c.DeleteNamespace(kind, prefix),
            c.CreateLink(link, str(uuid.UUID(int=rng.getrandbits(128), version=4)), LINKS[link], True, ("b:9192",)),
            c.AlterLink(link, config={"k": str(rng.random())}),
            c.DeleteLink(link),
            c.AttachNamespace(link, kind, prefix, prefix, rng.choice(list(Role)), create_missing=True),
            c.DetachNamespace(link, kind, prefix),
            c.SetFollowerTopic(link, topic, topic, UID, TopicState.FOLLOWING, UID),
            c.ForgetFollowerTopic(link, topic),
            c.RegisterProducerIds(LINKS[link]),
        )
    )


@pytest.mark.parametrize("seed", seeds(40))
def test_of_all_else_every_version_knows_the_same(seed: int) -> None:
    """One replica knows every record, the other one does not know some of them."""
    rng = random.Random(seed)
    newer, older = r.Replica(ControlState("A")), r.Replica(ControlState("A"))
    hidden_from = rng.randrange(60)
    for offset in range(120):
        body = random_body(rng)
        value = c.encode(
            c.Command(str(uuid.UUID(int=rng.getrandbits(128), version=4)), offset, "p", offset - 1, body), 1
        )
        known = newer.feed(offset, value).outcome
        hidden = offset >= hidden_from and concerns_of(body) is not None and rng.random() < 0.05
        if hidden:
            value = value.replace(b'"kind":"', b'"kind":"later-')
        outcome = older.feed(offset, value).outcome
        if met(older.state, body) is None:
            assert outcome == known
        assert older.state.applied_offset == offset
        compare(newer.state, older.state)


def compare(newer: ControlState, older: ControlState) -> None:
    """All that is not beyond the older one is the same, and what a client may write to is open at the newer one."""
    for name in newer.links.keys() | older.links.keys():
        if name not in older.lookup.stopped:
            assert newer.links.get(name) == older.links.get(name)
    for key in newer.namespaces.keys() | older.namespaces.keys():
        if older.lookup.beyond(key.type, key.prefix or "x") is None:
            assert newer.namespaces.get(key) == older.namespaces.get(key)
    for topic in ("a1", "ab1", "b1", "c1", "x"):
        if older.lookup.topic_reservation(topic) is None:
            assert newer.lookup.topic_reservation(topic) is None
    assert newer.producer_id_ranges == older.producer_id_ranges
