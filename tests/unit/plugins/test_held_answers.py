"""Answers to Produce that wait for synchronous links: for what, for how long, and what they say then."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple
from uuid import UUID

import pytest
from support.seeds import seeds

from isthmus_plugins import held_answers
from isthmus_plugins.api import Gate
from isthmus_plugins.cluster import TopicPartition
from isthmus_plugins.held_answers import LATE_AT_ONCE, PLACES_AT_ONCE, HeldAnswers, LargeAnswer, Wait
from isthmus_protocol import peeks, schema
from isthmus_protocol.bodies import build
from isthmus_protocol.messages import decode_response, encode_response
from isthmus_protocol.produce_answers import Place, Writes, refused_in
from isthmus_protocol.schema import ApiKey

VERSION = 9
TOPIC = b"t"
NAMES = {TOPIC: "t"}
REQUEST_TIMED_OUT, NOT_LEADER_OR_FOLLOWER, DUPLICATE_SEQUENCE = 7, 6, 46
TIMEOUT_MS = 30_000


class Link:
    """What is confirmed, as the tests say."""

    def __init__(self) -> None:
        self.ends: dict[TopicPartition, int | None] = {}
        self.epochs: dict[TopicPartition, int] = {}
        self.leaders: dict[TopicPartition, int] = {}
        self.leads_since: dict[TopicPartition, float] = {}
        self.transactional_alone = False

    def confirmed_end(self, place: TopicPartition, epoch: int, transactional: bool) -> int | None:
        if self.transactional_alone and not transactional:
            return None
        return self.ends.get(place, 0) if epoch == self.leader_epoch(place) else -1

    def leader_epoch(self, place: TopicPartition) -> int:
        return self.epochs.get(place, 0)

    def has_led(self, place: TopicPartition, broker_id: int, since: float) -> bool:
        known = self.leaders.get(place, -1)
        return (known == broker_id or -1 in (known, broker_id)) and self.leads_since.get(place, since) <= since


class Sent:
    """Whatever goes out for an answer."""

    def __init__(self, answer: bytes | Gate) -> None:
        self._answer = answer

    @property
    def frame(self) -> bytes | None:
        if isinstance(self._answer, bytes):
            return self._answer
        frame = self._answer._frame
        if frame is None or not isinstance(self._answer, LargeAnswer):
            return frame
        said = self._answer._goes_out(frame)
        assert isinstance(said, bytes)
        return said

    @property
    def results(self) -> dict[int, tuple[int, int]] | None:
        """By partition: (error code, base offset)."""
        if self.frame is None:
            return None
        _, answer = decode_response(ApiKey.PRODUCE, VERSION, self.frame)
        found: Any = answer
        return {
            each.index: (int(each.error_code), int(each.base_offset))
            for topic in found.responses
            for each in topic.partition_responses
        }


class Proxy:
    """Answers that come from a broker."""

    def __init__(self, limit_s: float | None = None, lets_go: bool = False) -> None:
        self.link = Link()
        self.now = 100.0
        self.held = HeldAnswers(self.link, lambda: self.now, "the archive", limit_s, lets_go)

    def answered(
        self, *results: tuple[int, int, int], records: int = 1, transactional: bool = False, broker_id: int = 1
    ) -> Sent:
        """(partition, error code, base offset) of a request with so many records in each partition."""
        written, frame = self._answer(results, records, transactional)
        return Sent(self.held.hold(broker_id, VERSION, written, NAMES, self.now, frame))

    def answered_in_steps(self, *results: tuple[int, int, int], records: int = 1) -> tuple[Sent, Iterator[None]]:
        """The same of an answer that is taken step by step."""
        written, frame = self._answer(results, records)
        answer = self.held.hold_many(written, self.now, frame, partial(refused_in, VERSION))
        results_read = peeks.produce_response(VERSION, frame)
        return Sent(answer), self.held.take(answer, 1, written, NAMES, self.now, results_read)

    @staticmethod
    def _answer(
        results: tuple[tuple[int, int, int], ...], records: int, transactional: bool = False
    ) -> tuple[Writes, bytes]:
        counts: dict[Place, int] = {(TOPIC, partition): records for partition, _, _ in results}
        entries = [
            {"index": partition, "error_code": code, "base_offset": offset} for partition, code, offset in results
        ]
        values = {"responses": [{"name": "t", "partition_responses": entries}]}
        frame = encode_response(build(schema.response_type(ApiKey.PRODUCE, VERSION), values), 5)
        return Writes(-1, transactional, TIMEOUT_MS, counts), frame

    def confirm(self, partition: int, end: int) -> None:
        self.link.ends["t", partition] = end
        self.held.confirmed(("t", partition))
        look_at_all(self.held)


def look_at_all(held: HeldAnswers) -> None:
    """At all that is due."""
    while held.look_at_some():
        pass


def expire_all(held: HeldAnswers, now: float) -> None:
    for _ in held.expire_some(now):
        pass


def ends_read(held: HeldAnswers, taken: list[Wait], log_end: int | None) -> None:
    for _ in held.ends_read(("t", 0), taken, log_end):
        pass
    look_at_all(held)


def test_an_answer_waits_for_the_last_of_its_records() -> None:
    proxy = Proxy()
    sent = proxy.answered((0, 0, 10), records=3)
    for end in (10, 12):
        proxy.confirm(0, end)
        assert sent.results is None
    proxy.confirm(0, 13)
    assert sent.results == {0: (0, 10)}
    assert proxy.answered((0, 0, 12)).results == {0: (0, 12)}  # of a resend, which is there already


def test_a_broker_that_leads_no_more_acks_nothing() -> None:
    """It stood still meanwhile, and acks (acks=1) as if it led; what others confirm there is not its record."""
    proxy = Proxy()
    proxy.link.leaders = {("t", 0): 2, ("t", 1): 1}
    proxy.link.ends = {("t", 0): 100, ("t", 1): 100}
    assert proxy.answered((0, 0, 10), (1, 0, 20)).results == {0: (NOT_LEADER_OR_FOLLOWER, -1), 1: (0, 20)}
    assert proxy.answered((0, 0, 10), broker_id=2).results == {0: (0, 10)}
    assert proxy.answered((0, 0, 10), broker_id=-1).results == {0: (0, 10)}, "over a bootstrap port"
    waits = proxy.answered((0, 0, 11), (1, 0, 200))
    assert waits.results is None
    proxy.confirm(1, 201)
    assert waits.results == {0: (NOT_LEADER_OR_FOLLOWER, -1), 1: (0, 200)}
    proxy.link.ends["t", 0] = None  # nobody needs to have it
    assert proxy.answered((0, 0, 10)).results == {0: (0, 10)}


def test_a_broker_that_leads_again_acks_nothing_that_it_was_asked_before() -> None:
    """Another one led meanwhile; nobody read the answer, so that it comes when the first one leads again."""
    proxy = Proxy()
    proxy.link.leaders, proxy.link.ends = {("t", 0): 1}, {("t", 0): 100}
    proxy.link.epochs["t", 0], proxy.link.leads_since["t", 0] = 3, proxy.now + 5
    assert proxy.answered((0, 0, 10)).results == {0: (NOT_LEADER_OR_FOLLOWER, -1)}
    proxy.now += 5
    assert proxy.answered((0, 0, 10)).results == {0: (0, 10)}


def test_an_answer_for_several_partitions_waits_for_all() -> None:
    proxy = Proxy()
    sent = proxy.answered((0, 0, 10), (1, 0, 20), (2, 87, -1))
    proxy.confirm(1, 21)
    assert sent.results is None
    proxy.confirm(0, 11)
    assert sent.results == {0: (0, 10), 1: (0, 20), 2: (87, -1)}


def test_what_is_refused_or_not_on_a_link_does_not_wait() -> None:
    proxy = Proxy()
    assert proxy.answered((0, 19, -1)).results == {0: (19, -1)}
    proxy.link.ends["t", 0] = None
    assert proxy.answered((0, 0, 10)).results == {0: (0, 10)}


def test_what_needs_no_confirmation_any_more_goes_out() -> None:
    proxy = Proxy()
    plain, transactional = proxy.answered((0, 0, 10)), proxy.answered((0, 0, 11), transactional=True)
    proxy.link.transactional_alone = True
    proxy.held.any_confirmed()
    look_at_all(proxy.held)
    assert plain.results == {0: (0, 10)}
    assert transactional.results is None
    proxy.confirm(0, 12)
    assert transactional.results == {0: (0, 11)}


def test_after_the_producers_timeout_the_answer_says_so() -> None:
    proxy = Proxy()
    sent = proxy.answered((0, 0, 10), (1, 0, 20))
    proxy.confirm(1, 21)
    expire_all(proxy.held, proxy.now + TIMEOUT_MS / 1000 - 1)
    assert sent.results is None
    expire_all(proxy.held, proxy.now + TIMEOUT_MS / 1000)
    assert sent.results == {0: (REQUEST_TIMED_OUT, -1), 1: (0, 20)}
    assert proxy.held.oldest(("t", 0)) == 100.0, "it is still not confirmed"
    proxy.confirm(0, 11)
    assert proxy.held.oldest(("t", 0)) is None
    assert not proxy.held.waits


def test_a_limit_is_kept_where_the_producer_would_wait_longer() -> None:
    proxy = Proxy(limit_s=2.0)
    sent = proxy.answered((0, 0, 10))
    expire_all(proxy.held, proxy.now + 1.9)
    assert sent.results is None
    expire_all(proxy.held, proxy.now + 2.0)
    assert sent.results == {0: (REQUEST_TIMED_OUT, -1)}
    assert proxy.held.unconfirmed == 0


def test_what_may_go_unconfirmed_goes_as_the_broker_answered_and_is_counted() -> None:
    proxy = Proxy(limit_s=2.0, lets_go=True)
    late, in_time = proxy.answered((0, 0, 10)), proxy.answered((1, 0, 20))
    proxy.confirm(1, 21)
    expire_all(proxy.held, proxy.now + 2.0)
    assert late.results == {0: (0, 10)}
    assert in_time.results == {1: (0, 20)}
    assert proxy.held.unconfirmed == 1


def test_a_leader_that_moved_is_asked_again() -> None:
    proxy = Proxy()
    sent = proxy.answered((0, 0, 10))
    proxy.link.epochs["t", 0] = 1
    proxy.confirm(0, 100)
    assert sent.results == {0: (NOT_LEADER_OR_FOLLOWER, -1)}


def test_a_resend_whose_place_is_not_told_waits_for_all_that_is_there() -> None:
    proxy = Proxy()
    proxy.confirm(0, 11)
    sent = proxy.answered((0, DUPLICATE_SEQUENCE, -1))
    assert proxy.held.has_unknown_ends
    taken = proxy.held.take_unknown_ends()
    later = proxy.answered((0, DUPLICATE_SEQUENCE, -1))
    ends_read(proxy.held, taken["t", 0], 15)
    proxy.confirm(0, 15)
    assert sent.results == {0: (DUPLICATE_SEQUENCE, -1)}
    assert later.results is None  # that look at the log began before it came
    taken = proxy.held.take_unknown_ends()
    ends_read(proxy.held, taken["t", 0], None)
    ends_read(proxy.held, proxy.held.take_unknown_ends()["t", 0], 15)
    assert later.results == {0: (DUPLICATE_SEQUENCE, -1)}


def test_the_oldest_that_waits_is_known() -> None:
    proxy = Proxy()
    proxy.answered((0, 0, 10))
    proxy.now += 5
    proxy.answered((0, 0, 11))
    assert proxy.held.oldest(("t", 0)) == 100.0
    # Of several links, one has the first of them, or both: it waits for the others.
    assert [proxy.held.oldest(("t", 0), beyond) for beyond in (10, 11, 12)] == [100.0, 105.0, None]
    proxy.confirm(0, 11)
    assert proxy.held.oldest(("t", 0)) == 105.0
    proxy.confirm(0, 12)
    assert proxy.held.oldest(("t", 0)) is None


def test_versions_with_topic_ids_say_which_topic_timed_out() -> None:
    topic_id = UUID(int=7)
    values = {
        "responses": [{"topic_id": topic_id, "partition_responses": [{"index": 3, "error_code": 0, "base_offset": 1}]}]
    }
    frame = encode_response(build(schema.response_type(ApiKey.PRODUCE, 13), values), 5)
    held = HeldAnswers(Link(), lambda: 0.0)
    written = Writes(-1, False, 0, {(topic_id.bytes, 3): 1})
    answer = held.hold(1, 13, written, {topic_id.bytes: "t"}, 0.0, frame)
    expire_all(held, 1.0)
    sent = Sent(answer).frame
    assert sent is not None
    _, decoded = decode_response(ApiKey.PRODUCE, 13, sent)
    found: Any = decoded
    (result,) = found.responses[0].partition_responses
    assert int(result.error_code) == REQUEST_TIMED_OUT
    assert "t-3" in result.error_message


@pytest.mark.parametrize("seed", seeds(200))
def test_no_answer_ever_goes_out_before_all_of_it_is_confirmed(seed: int) -> None:
    rng = random.Random(seed)
    proxy = Proxy()
    ends, confirmed = [0, 0], [0, 0]
    open_: list[tuple[Sent, dict[int, tuple[int, int]]]] = []
    for _ in range(rng.randint(1, 200)):
        what = rng.random()
        if what < 0.5:
            wanted: dict[int, tuple[int, int]] = {}
            records = rng.randint(1, 5)
            for partition in rng.sample((0, 1), rng.randint(1, 2)):
                wanted[partition] = ends[partition], records
                ends[partition] += records
            results = [(partition, 0, base) for partition, (base, _) in wanted.items()]
            open_.append((proxy.answered(*results, records=records, transactional=rng.random() < 0.3), wanted))
            if rng.random() < 0.3:
                rng.shuffle(open_)
        elif what < 0.9:
            partition = rng.randint(0, 1)
            confirmed[partition] = rng.randint(confirmed[partition], ends[partition])
            proxy.confirm(partition, confirmed[partition])
        else:
            expire_all(proxy.held, proxy.now)
        for sent, wanted in open_:
            whole = all(confirmed[partition] >= base + records for partition, (base, records) in wanted.items())
            assert (sent.frame is not None) == whole
    for partition in (0, 1):
        proxy.confirm(partition, ends[partition])
    assert all(sent.results is not None for sent, _ in open_)


class Open(NamedTuple):
    """An answer, and what is true of it."""

    sent: Sent
    steps: Iterator[None]
    """Of taking it, as far as that was not done."""
    ends: dict[int, int]
    """By partition: where what it acks ends."""
    began: float
    epochs: dict[int, int]
    confirmed: set[int]
    """Partitions that were confirmed at some time, by a leader of the epoch in which it was asked."""


@pytest.mark.parametrize("seed", seeds(100))
def test_an_answer_in_steps_says_of_each_partition_what_was_true(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is confirmed, late or moved between two steps: acked is what was confirmed, and all goes out once."""
    monkeypatch.setattr(held_answers, "PLACES_AT_ONCE", 2)
    monkeypatch.setattr(held_answers, "LATE_AT_ONCE", 1)
    rng = random.Random(seed)
    proxy = Proxy()
    partitions = range(6)
    ends, confirmed, epochs = [0] * 6, [0] * 6, [0] * 6
    open_: list[Open] = []
    gone: dict[int, bytes] = {}
    late: list[Iterator[None]] = []

    def check() -> None:
        for number, each in enumerate(open_):
            for partition, end in each.ends.items():
                if confirmed[partition] >= end and epochs[partition] == each.epochs[partition]:
                    each.confirmed.add(partition)
            if number in gone or (frame := each.sent.frame) is None:
                continue
            gone[number] = frame
            for partition, (code, _) in (each.sent.results or {}).items():
                assert code in (0, NOT_LEADER_OR_FOLLOWER, REQUEST_TIMED_OUT)
                assert code or partition in each.confirmed
                assert code != NOT_LEADER_OR_FOLLOWER or epochs[partition] != each.epochs[partition]
                assert code != REQUEST_TIMED_OUT or proxy.now >= each.began + TIMEOUT_MS / 1000

    def answer() -> None:
        wanted = {}
        for partition in rng.sample(partitions, rng.randint(1, 6)):
            wanted[partition] = ends[partition]
            ends[partition] += 1
        results = [(partition, 0, base) for partition, base in wanted.items()]
        sent, steps = proxy.answered_in_steps(*results) if rng.random() < 0.7 else (proxy.answered(*results), iter(()))
        lasts = {partition: base + 1 for partition, base in wanted.items()}
        open_.append(Open(sent, steps, lasts, proxy.now, {partition: epochs[partition] for partition in wanted}, set()))

    def step() -> None:
        if open_:
            next(rng.choice(open_).steps, None)

    def confirm() -> None:
        partition = rng.choice(partitions)
        confirmed[partition] = rng.randint(confirmed[partition], ends[partition])
        proxy.link.ends["t", partition] = confirmed[partition]
        if rng.random() < 0.5:
            proxy.held.confirmed(("t", partition))
        else:
            proxy.held.any_confirmed()

    def expire() -> None:
        proxy.now += rng.choice((0, 1, TIMEOUT_MS / 1000))
        late.append(proxy.held.expire_some(proxy.now))

    def move() -> None:
        partition = rng.choice(partitions)
        proxy.now += 1
        epochs[partition] += 1
        proxy.link.epochs["t", partition] = epochs[partition]
        proxy.link.leads_since["t", partition] = proxy.now
        proxy.held.confirmed(("t", partition))

    def look() -> None:
        proxy.held.look_at_some()
        if late and next(late[0], late) is late:
            late.pop(0)

    for _ in range(rng.randint(20, 200)):
        rng.choices((answer, step, confirm, expire, move, look), (4, 8, 4, 1, 1, 4))[0]()
        check()
    for each in open_:
        for _ in each.steps:
            check()
    for steps in late:
        for _ in steps:
            check()
    for partition in partitions:
        confirmed[partition] = ends[partition]
        proxy.link.ends["t", partition] = ends[partition]
    proxy.held.any_confirmed()
    look_at_all(proxy.held)
    check()
    assert [gone.get(number) for number in range(len(open_))] == [each.sent.frame for each in open_]
    assert not any(held for kinds in proxy.held._waiting.values() for held in kinds)
    expire_all(proxy.held, proxy.now)
    assert not proxy.held.waits


MANY = 2_000


def gone(sents: list[Sent]) -> int:
    return sum(each.frame is not None for each in sents)


def codes(sents: list[Sent]) -> set[int]:
    return {code for each in sents for code, _ in (each.results or {}).values()}


@pytest.mark.parametrize("partitions", [1, 500])
def test_thousands_of_answers_that_are_confirmed_at_once_go_some_at_a_time(partitions: int) -> None:
    """However many partitions have them, and however often it is said before the loop has done other things."""
    proxy = Proxy()
    sents = [proxy.answered((number % partitions, 0, number)) for number in range(MANY)]
    for partition in range(partitions):
        proxy.link.ends["t", partition] = MANY
    for partition in range(partitions):
        more = proxy.held.confirmed(("t", partition))
    assert more
    assert gone(sents) == PLACES_AT_ONCE
    before = 0
    while before < gone(sents):
        before = gone(sents)
        proxy.held.look_at_some()
        assert gone(sents) - before <= PLACES_AT_ONCE
    assert gone(sents) == MANY
    assert codes(sents) == {0}
    assert not proxy.held._due


def test_thousands_of_answers_that_are_fenced_at_once_are_refused_some_at_a_time() -> None:
    proxy = Proxy()
    sents = [proxy.answered((0, 0, number)) for number in range(MANY)]
    proxy.link.epochs["t", 0] = 1
    proxy.link.ends["t", 0] = MANY
    assert proxy.held.confirmed(("t", 0))
    while True:
        before = gone(sents)
        more = proxy.held.look_at_some()
        assert gone(sents) - before <= LATE_AT_ONCE
        if not more:
            break
    assert gone(sents) == MANY
    assert codes(sents) == {NOT_LEADER_OR_FOLLOWER}


def test_what_is_fenced_between_two_steps_is_not_acked() -> None:
    proxy = Proxy()
    sents = [proxy.answered((0, 0, number)) for number in range(MANY)]
    proxy.link.ends["t", 0] = MANY
    assert proxy.held.confirmed(("t", 0))
    acked = gone(sents)
    proxy.link.epochs["t", 0] = 1
    look_at_all(proxy.held)
    assert gone(sents) == MANY
    assert codes(sents[:acked]) == {0}
    assert codes(sents[acked:]) == {NOT_LEADER_OR_FOLLOWER}


def test_what_has_lapsed_is_not_acked_whatever_is_confirmed_between_two_steps() -> None:
    proxy = Proxy()
    sents = [proxy.answered((number % 3, 0, number)) for number in range(MANY)]
    steps = proxy.held.lapse()
    assert not gone(sents)
    next(steps)
    assert gone(sents) == LATE_AT_ONCE
    proxy.link.ends |= {("t", partition): MANY for partition in range(3)}
    proxy.held.any_confirmed()
    while True:
        before = gone(sents)
        if not proxy.held.look_at_some():
            break
        assert gone(sents) - before <= LATE_AT_ONCE
    for _ in steps:
        pass
    assert gone(sents) == MANY
    assert codes(sents) == {REQUEST_TIMED_OUT}
    assert not proxy.held.waits


def test_the_end_of_a_log_is_told_to_thousands_of_answers_some_at_a_time() -> None:
    proxy = Proxy()
    sents = [proxy.answered((0, 0, -1)) for _ in range(MANY)]
    waits = proxy.held.take_unknown_ends()["t", 0]
    proxy.link.ends["t", 0] = 10
    told = [len(proxy.held._waiting["t", 0][0]) for _ in proxy.held.ends_read(("t", 0), waits, 10)]
    assert told == [500, 1_000, 1_500]
    look_at_all(proxy.held)
    assert gone(sents) == MANY
