"""Leases at the follower end: In-Sync is said no longer than the source granted it, and what was said is not forgotten.

Both ends are whole, on model clusters and a simulated clock; what the source's proxy answers is the test's.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any

import pytest
from support.fake_cluster import LoopClock, run_simulated, simulated_now
from support.replicas import LINK, LINK_ID, End, Replicas

from isthmus_control.commands import AlterLink, Body, ForgetFollowerTopic, MergeLink, PartitionClaim, RecordClaims
from isthmus_control.model import PLAIN_TERMS, AckTerms, Claim, LinkMode
from isthmus_control.outcome import Outcome
from isthmus_plugins.cluster import BrokerUnavailable
from isthmus_plugins.replication.link import calls
from isthmus_plugins.replication.link.connection import LinkRejected
from isthmus_plugins.replication.sync.leases import (
    ASK_INTERVAL_S,
    ASK_TIMEOUT_S,
    RECORD_AFTER_S,
    RECORD_INTERVAL_S,
    SyncLeases,
)

TOPIC, SOURCE = "remote-t", "local-t"
LEASE_MS = 2_000
LEASE_S = LEASE_MS / 1000
WAY_S = 0.1
"""Longer than a message takes from one end to the other."""
OTHER_ID = "00000000-0000-4000-8000-000000000001"


class Clock(LoopClock):
    """The wall clock of a machine whose time somebody sets."""

    ahead_s = 0.0

    def time(self) -> float:
        return super().time() + self.ahead_s


class Scene:
    """A link that is synchronous, a topic of two partitions with a record each, and a source that says as it likes."""

    def __init__(self) -> None:
        self.replicas = Replicas(random.Random(1), 1)
        self.clock = Clock()
        self.asked: list[float] = []
        """When the source's proxy heard each question."""
        self.answer: Callable[[calls.SyncLease], calls.SyncLeaseAnswer] = granting()
        self.takes_s = 0.0
        self.refuses: LinkRejected | None = None

    async def begin(self) -> None:
        self.replicas.start("A")
        self.start_follower()
        for partition in self.replicas.a.add_topic(SOURCE, 2).partitions:
            partition.write_values(b"x")
        self.replicas.ends["A"].instead(calls.SyncLease, self.on_sync_lease)
        await self.replicas.connect()
        await self.replicas.until("copied", self.replicas.equal)
        self.mode(LinkMode.SYNCHRONOUS)

    def start_follower(self) -> None:
        self.replicas.ends["B"] = End(self.replicas.b, self.replicas.controls["B"], clock=self.clock)

    async def on_sync_lease(self, connection: Any, question: calls.SyncLease) -> Any:
        self.asked.append(simulated_now())
        answer = self.answer(question)
        await asyncio.sleep(self.takes_s)
        if self.refuses is not None:
            raise self.refuses
        return answer

    @property
    def leases(self) -> SyncLeases:
        return self.replicas.ends["B"].sync_leases

    @property
    def topic_id(self) -> str | None:
        return self.replicas.controls["B"].state.follower_topics[TOPIC].topic_id

    def claim(self, partition: int = 0) -> Claim | None:
        return self.leases.claim(TOPIC, self.topic_id, partition)

    def mode(self, mode: LinkMode) -> None:
        """Set the link's mode at the source, and have the follower know it."""
        source, follower = self.replicas.controls["A"], self.replicas.controls["B"]
        source.apply(AlterLink(LINK, mode=mode))
        follower.apply(MergeLink(LINK, LINK_ID, source.state.links[LINK].settings))
        assert follower.state.links[LINK].mode is mode

    def in_sync(self, partition: int = 0) -> bool:
        return self.leases.in_sync(TOPIC, partition)

    async def granted(self) -> None:
        await self.replicas.until("granted", lambda: self.in_sync(0) and self.in_sync(1))

    async def run_out(self) -> None:
        """No more is granted, and what was runs out."""
        self.answer = granting(only=())
        await self.replicas.until("it runs out", lambda: not self.in_sync(0))

    def recorded(self) -> list[RecordClaims]:
        return [each for each in self.replicas.controls["B"].commands if isinstance(each, RecordClaims)]


def granting(
    lease_ms: int = LEASE_MS, only: Sequence[int] | None = None, terms: AckTerms = PLAIN_TERMS
) -> Callable[[calls.SyncLease], calls.SyncLeaseAnswer]:
    """Grants leases of all streams that are asked for, or of ``only`` the first, second..."""

    def answer(question: calls.SyncLease) -> calls.SyncLeaseAnswer:
        streams = [each for index, each in enumerate(question.streams) if only is None or index in only]
        return calls.SyncLeaseAnswer(
            () if terms.links else tuple(streams),
            in_sync_any=tuple(streams) if terms.links else (),
            terms=dict.fromkeys(streams, terms) if terms.links else {},
            lease_ms=lease_ms,
            states={each: calls.SyncSaid("Syncing") for each in question.streams if each not in streams},
        )

    return answer


def on_synchronous(work: Callable[[Scene], Awaitable[None]]) -> None:
    async def run() -> None:
        scene = Scene()
        await scene.begin()
        await work(scene)
        await scene.replicas.stop()

    run_simulated(run())


@pytest.fixture(autouse=True)
def no_task_failed(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    yield
    assert not [record.getMessage() for record in caplog.get_records("call") if record.levelno >= logging.ERROR]


# ---- how long ----


def test_a_lease_counts_from_when_it_was_asked_for_however_long_the_answer_takes() -> None:
    async def work(scene: Scene) -> None:
        scene.takes_s = 1.2
        await scene.granted()
        scene.answer = granting(only=())
        (asked_at,) = scene.asked
        await asyncio.sleep(asked_at + LEASE_S - WAY_S - simulated_now())
        assert scene.in_sync()
        await asyncio.sleep(WAY_S)
        assert not scene.in_sync(), "the source takes it to end when it asked, plus the lease"
        claim = scene.claim()
        assert claim is not None
        assert abs(claim.until_ms / 1000 - scene.clock.time()) < WAY_S, "and so does what people are told"

    on_synchronous(work)


def test_an_answer_that_comes_after_its_lease_ended_makes_nothing_in_sync() -> None:
    async def work(scene: Scene) -> None:
        scene.answer, scene.takes_s = granting(lease_ms=500), 0.6
        for _ in range(100):
            await asyncio.sleep(0.05)
            assert not scene.in_sync()
        assert len(scene.asked) > 3

    on_synchronous(work)


def test_a_later_answer_with_a_shorter_lease_takes_nothing_back() -> None:
    """What acks mean until then was promised."""

    async def work(scene: Scene) -> None:
        terms = AckTerms(1, {LINK: "B", "a-to-c": "C"})
        scene.answer = granting(lease_ms=6_000, terms=terms)
        await scene.granted()
        scene.answer = granting(lease_ms=100)
        await asyncio.sleep(3)
        lease = scene.leases.lease(TOPIC, scene.topic_id, 0)
        assert lease is not None
        assert lease.terms == terms
        assert scene.in_sync()
        assert (claim := scene.claim()) is not None
        assert claim.terms == terms

    on_synchronous(work)


def malformed(scene: Scene) -> None:
    """A peer of a version that says something else."""
    scene.answer = lambda question: calls.Done()  # type: ignore[assignment, return-value]


def cut(scene: Scene) -> None:
    scene.replicas.cut()


def silent(scene: Scene) -> None:
    scene.takes_s = 1e6


def refused(scene: Scene) -> None:
    scene.refuses = LinkRejected("SOME_ERROR", "no")


@pytest.mark.parametrize("trouble", [cut, silent, refused, malformed])
def test_trouble_on_the_way_grants_nothing_and_what_was_granted_is_recorded_when_it_ran_out(
    trouble: Callable[[Scene], None], caplog: pytest.LogCaptureFixture
) -> None:
    async def work(scene: Scene) -> None:
        await scene.granted()
        trouble(scene)
        asked = len(scene.asked)
        await asyncio.sleep(LEASE_S + WAY_S)
        assert not scene.in_sync()
        claim = scene.claim()
        assert claim is not None
        assert claim.end == 1
        assert abs(claim.until_ms / 1000 - (scene.clock.time() - WAY_S)) < ASK_INTERVAL_S + WAY_S
        await scene.replicas.until("recorded", lambda: scene.replicas.controls["B"].state.claims, 2)
        assert scene.replicas.controls["B"].state.claim(TOPIC, scene.topic_id, 0) == claim
        await asyncio.sleep(60)
        assert len(scene.recorded()) == 1, "once"
        assert scene.claim() == claim
        assert (len(scene.asked) > asked) == (trouble is not cut), "it is asked for as long as there is a connection"
        assert ("lease not understood" in caplog.messages) == (trouble is malformed)

    on_synchronous(work)


def test_a_source_that_is_silent_is_asked_one_question_at_a_time() -> None:
    async def work(scene: Scene) -> None:
        silent(scene)
        await asyncio.sleep(30)
        assert len(scene.asked) <= 30 / ASK_TIMEOUT_S + 1

    on_synchronous(work)


def test_leases_of_what_nobody_asked_for_are_none() -> None:
    async def work(scene: Scene) -> None:
        def more(question: calls.SyncLease) -> calls.SyncLeaseAnswer:
            return calls.SyncLeaseAnswer(
                (*question.streams, 999),
                groups_in_sync=(5,),
                lease_ms=LEASE_MS,
                states={998: calls.SyncSaid("Syncing")},
            )

        scene.answer = more
        await scene.granted()
        assert scene.leases.groups.lease(LINK, 5) is None
        assert len(scene.asked) >= 1

    on_synchronous(work)


def test_what_the_source_says_of_a_partition_without_a_lease_is_kept_with_its_time() -> None:
    async def work(scene: Scene) -> None:
        scene.answer = granting(only=(1,))
        await scene.replicas.until("one", lambda: scene.in_sync(0) or scene.in_sync(1))
        await asyncio.sleep(LEASE_S)
        without = 0 if scene.in_sync(1) else 1
        assert not scene.in_sync(without)
        lease = scene.leases.lease(TOPIC, scene.topic_id, without)
        assert lease is not None
        assert lease.reported is not None
        assert lease.reported.state == "Syncing"
        assert simulated_now() - lease.reported_at < 2 * ASK_INTERVAL_S
        assert scene.claim(without) is None

    on_synchronous(work)


def test_over_an_asynchronous_link_nothing_is_asked_for() -> None:
    async def work(scene: Scene) -> None:
        await scene.granted()
        scene.mode(LinkMode.ASYNCHRONOUS)
        await asyncio.sleep(ASK_INTERVAL_S + WAY_S)
        asked = len(scene.asked)
        await asyncio.sleep(30)
        assert len(scene.asked) == asked
        assert not scene.in_sync()
        scene.mode(LinkMode.SYNCHRONOUS)
        await scene.granted()

    on_synchronous(work)


def test_a_lease_that_was_asked_for_before_the_mode_changed_shows_consumers_nothing() -> None:
    """They may read what was In-Sync since the link is synchronous; what was granted before is about another time."""

    async def work(scene: Scene) -> None:
        scene.takes_s = 1.0
        await scene.replicas.until("asked", lambda: scene.asked)
        scene.answer = granting(only=())
        scene.mode(LinkMode.ASYNCHRONOUS)
        scene.mode(LinkMode.SYNCHRONOUS)
        await asyncio.sleep(5)
        assert LINK not in scene.replicas.controls["B"].state.sync_records
        scene.answer = granting()
        await scene.replicas.until("reached", lambda: LINK in scene.replicas.controls["B"].state.sync_records)

    on_synchronous(work)


# ---- recording ----


def test_a_lease_that_is_renewed_in_time_is_not_recorded() -> None:
    async def work(scene: Scene) -> None:
        await scene.granted()
        for _ in range(10):  # with gaps that are short
            scene.answer = granting(only=())
            await asyncio.sleep(LEASE_S + WAY_S)
            assert not scene.in_sync()
            scene.answer = granting()
            await scene.granted()
        assert not scene.recorded()

    on_synchronous(work)


def test_a_connection_that_comes_and_goes_fills_no_control_log() -> None:
    async def work(scene: Scene) -> None:
        began = simulated_now()
        for _ in range(20):
            scene.answer = granting(lease_ms=500)
            await scene.granted()
            await scene.run_out()
            await asyncio.sleep(RECORD_AFTER_S + 2 * ASK_INTERVAL_S)
        assert 2 <= len(scene.recorded()) <= (simulated_now() - began) / RECORD_INTERVAL_S + 1
        latest = scene.claim()
        assert latest is not None
        await asyncio.sleep(RECORD_INTERVAL_S + 1)
        assert scene.replicas.controls["B"].state.claim(TOPIC, scene.topic_id, 0) == latest, "the last one, too"

    on_synchronous(work)


def test_another_process_says_what_was_recorded_and_that_nothing_is_in_sync() -> None:
    async def work(scene: Scene) -> None:
        await scene.granted()
        scene.replicas.cut()
        await scene.replicas.until("recorded", scene.recorded)
        claim = scene.claim()
        await scene.replicas.stop("B")
        scene.start_follower()
        assert not scene.in_sync()
        assert claim is not None
        assert scene.claim() == claim
        assert scene.leases.lease(TOPIC, scene.topic_id, 0) is None

    on_synchronous(work)


def test_what_the_control_log_did_not_take_is_recorded_when_it_does() -> None:
    async def work(scene: Scene) -> None:
        await scene.granted()
        control: Any = scene.replicas.controls["B"]
        append, tried = control.append, []

        async def failing(body: Body) -> Outcome:
            if isinstance(body, RecordClaims):
                tried.append(simulated_now())
                if len(tried) < 3:
                    raise BrokerUnavailable("the control log does not answer")
            outcome: Outcome = await append(body)
            return outcome

        control.append = failing
        scene.replicas.cut()
        await scene.replicas.until("recorded", scene.recorded)
        assert control.state.claim(TOPIC, scene.topic_id, 0) == scene.claim()
        assert tried[1] - tried[0] > RECORD_INTERVAL_S
        assert len(control.state.claims) == 2

    on_synchronous(work)


def test_the_later_of_what_is_known_and_what_was_recorded_counts() -> None:
    async def work(scene: Scene) -> None:
        await scene.granted()
        await scene.run_out()
        own, topic_id = scene.claim(), scene.topic_id
        assert own is not None
        assert topic_id is not None
        for difference_ms in (-1_000, 1_000):  # as another proxy of this cluster had it
            other = PartitionClaim(TOPIC, topic_id, 0, own.until_ms + difference_ms, 1, AckTerms(degrade_after_ms=7))
            scene.replicas.controls["B"].apply(RecordClaims(LINK, LINK_ID, (other,)))
            claim = scene.claim()
            assert claim is not None
            assert claim.until_ms == own.until_ms + max(difference_ms, 0)
            assert claim.terms.degrade_after_ms == (7 if difference_ms > 0 else 0)
        await asyncio.sleep(RECORD_INTERVAL_S)
        recorded = scene.replicas.controls["B"].state.claim(TOPIC, topic_id, 0)
        assert recorded is not None
        assert recorded.until_ms == own.until_ms + 1_000

    on_synchronous(work)


def test_a_time_that_the_clock_has_not_reached_is_claimed_by_nobody() -> None:
    """Somebody sets it back: what acks meant until an hour from now, nobody knows."""

    async def work(scene: Scene) -> None:
        await scene.granted()
        scene.clock.ahead_s = -3600.0
        await scene.run_out()
        assert scene.claim() is None
        await asyncio.sleep(30)
        assert not scene.recorded()
        scene.answer = granting()
        await scene.granted()
        await scene.run_out()
        claim = scene.claim()
        assert claim is None or claim.until_ms <= scene.clock.time() * 1000

    on_synchronous(work)


def test_what_runs_out_when_no_link_is_synchronous_any_more_is_recorded_all_the_same() -> None:
    """A failover may come after, and find another process here: what was acked until then is here still."""

    async def work(scene: Scene) -> None:
        await scene.granted()
        scene.mode(LinkMode.ASYNCHRONOUS)
        claim = scene.claim()
        assert claim is not None
        await scene.replicas.until("recorded", scene.recorded, LEASE_S + RECORD_AFTER_S + 2 * ASK_INTERVAL_S)
        assert scene.replicas.controls["B"].state.claim(TOPIC, scene.topic_id, 0) == claim
        await asyncio.sleep(60)
        assert len(scene.recorded()) == 1

    on_synchronous(work)


def test_of_a_topic_that_is_another_one_nothing_is_claimed() -> None:
    async def work(scene: Scene) -> None:
        await scene.granted()
        assert scene.claim() is not None
        assert scene.leases.lease(TOPIC, OTHER_ID, 0) is None
        assert scene.leases.claim(TOPIC, OTHER_ID, 0) is None

    on_synchronous(work)


def test_of_a_topic_that_follows_no_more_nothing_is_recorded() -> None:
    async def work(scene: Scene) -> None:
        await scene.granted()
        scene.replicas.cut()
        scene.replicas.controls["B"].apply(ForgetFollowerTopic(LINK, TOPIC))
        await asyncio.sleep(LEASE_S + RECORD_AFTER_S + RECORD_INTERVAL_S)
        assert not scene.recorded()

    on_synchronous(work)


def test_that_all_is_here_is_known_since_the_last_gap_alone() -> None:
    async def work(scene: Scene) -> None:
        def since() -> float | None:
            assert scene.topic_id is not None
            return scene.leases.has_all_since(TOPIC, scene.topic_id, 0)

        assert since() is None
        await scene.granted()
        first = since()
        assert first is not None
        await asyncio.sleep(3 * LEASE_S)
        assert since() == first
        await scene.run_out()
        assert since() is None
        scene.answer = granting()
        await scene.granted()
        second = since()
        assert second is not None
        assert first + 3 * LEASE_S < second <= simulated_now()
        scene.answer = granting(terms=AckTerms(1, {"other": "C"}, 0))
        await scene.replicas.until("some cluster of several has it", lambda: since() is None)
        assert scene.in_sync()
        scene.answer = granting()
        await scene.replicas.until("it is here again", lambda: since() is not None)
        third = since()
        assert third is not None
        assert third > second

    on_synchronous(work)
