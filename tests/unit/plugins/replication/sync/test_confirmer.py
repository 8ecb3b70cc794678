"""What holds acks over a synchronous link, and how its partition joins and leaves."""

from __future__ import annotations

import asyncio

import pytest
from support.fake_cluster import simulated_now
from support.pushing import KEY, PLACE, TOPIC, Source, on_source, produced
from support.replicas import LINK, falsely_out_of_sync

from isthmus_control.model import LinkMode, SyncState
from isthmus_plugins.cluster import BrokerUnavailable
from isthmus_plugins.replication.sync.confirmer import SyncConfirmer
from isthmus_plugins.replication.sync.expiring_leases import LEASE_MARGIN_S, LEASE_S
from isthmus_plugins.replication.sync.in_sync import JOIN_S

TIMEOUT_S = 10.0
"""How long a link may confirm nothing, unless it is set."""
NOT_CONFIRMED = 7
"""REQUEST_TIMED_OUT."""


def test_a_link_that_never_was_synchronous_holds_nothing() -> None:
    async def work(source: Source) -> None:
        assert not source.sync.active
        assert not source.sync.concerns(TOPIC)
        assert produced(source.produce()) == 0

    on_source(work)


def test_an_ack_goes_when_the_other_side_has_it_and_no_earlier() -> None:
    async def work(source: Source) -> None:
        await source.synchronous()
        assert source.sync.concerns(TOPIC)
        first, second = source.produce(), source.produce()
        await asyncio.sleep(5.0)
        assert (produced(first), produced(second)) == (None, None)
        source.confirm(source.log.end - 1)
        assert (produced(first), produced(second)) == (0, None)
        source.confirm()
        assert produced(second) == 0

    on_source(work)


def test_what_is_confirmed_under_one_leader_epoch_says_nothing_of_another() -> None:
    async def work(source: Source) -> None:
        await source.synchronous()
        end = source.log.end
        assert source.sync.confirmed_end(PLACE, 0, False) == end
        assert source.sync.confirmed_end(PLACE, 1, False) == -1
        source.stream.leader_epoch = 1
        source.confirm()
        assert source.sync.confirmed_end(PLACE, 1, False) == end

    on_source(work)


def test_what_is_confirmed_of_a_topic_says_nothing_of_the_one_that_was_made_anew_under_its_name() -> None:
    async def work(source: Source) -> None:
        await source.synchronous()
        source.stream.topic_id = another = bytes(range(16))
        source.ends.discovery.topic_ids[PLACE[0]] = another
        source.ends.pushed = None
        assert produced(source.produce()) is None, "nobody has any of the new topic"
        assert source.sync.readable_end(PLACE, committed=False) == -1
        source.ends.pushed = source.stream
        source.confirm()
        assert source.sync.confirmed_end(PLACE, 0, False) == source.log.end

    on_source(work)


def test_it_joins_when_all_acks_are_held_and_is_in_sync_when_the_other_side_has_what_was_there_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def work(source: Source) -> None:
        drained = asyncio.Event()

        async def transactions_drained(places: object) -> None:
            await drained.wait()

        source.sync.drain = transactions_drained
        source.mode(LinkMode.SYNCHRONOUS)
        source.stream.close = False
        source.confirm()
        await asyncio.sleep(2.0)
        assert source.recorded() is None, "the follower is far behind: acks would wait for it for long"
        source.stream.close = True
        await source.until("it joins", lambda: source.recorded() is not None)
        acks = [source.produce()]
        await asyncio.sleep(1.0)
        assert produced(acks[0]) is None, "from the record on acks wait"
        source.confirm()
        assert produced(acks[0]) == 0
        await asyncio.sleep(1.0)
        assert not source.in_sync(), "some write may be acked that began before all proxies held acks"
        source.log.write_values(b"by another proxy")
        drained.set()
        await asyncio.sleep(1.0)
        assert not source.in_sync()
        source.confirm()
        await source.until("In-Sync", source.in_sync)
        record = source.recorded()
        assert record is not None
        assert (record.state, record.reached) == (SyncState.IN_SYNC, True)

    on_source(work)


def test_it_is_in_sync_from_when_that_is_recorded() -> None:
    """And not from when the proxy that recorded it hears of it: status said Out-Of-Sync in between."""

    async def work(source: Source) -> None:
        append, shown = source.control.append, []

        async def slow(body: object) -> object:
            outcome = await append(body)
            for _ in range(10):
                shown.append((source.recorded(), source.sync.partitions.sync_of(KEY).state))
                await asyncio.sleep(0.1)
            return outcome

        source.control.append = slow  # type: ignore[method-assign]
        await source.synchronous()
        await asyncio.sleep(2.0)
        states = {(record.reached, state) for record, state in shown if record is not None}
        assert states == {(False, "Syncing"), (True, "In-Sync")}

    on_source(work)


def test_it_does_not_join_while_the_other_cluster_does_not_know_of_the_mode() -> None:
    async def work(source: Source) -> None:
        source.agrees = False
        source.mode(LinkMode.SYNCHRONOUS)
        source.confirm()
        await asyncio.sleep(20.0)
        assert source.recorded() is None
        source.agrees = True
        await source.until("In-Sync", source.in_sync)

    on_source(work)


def test_one_that_does_not_get_level_gives_up_and_acks_go() -> None:
    """No partition that only tries to join holds acks for long."""

    async def work(source: Source) -> None:
        source.log.write_values(b"before")
        source.mode(LinkMode.SYNCHRONOUS)
        await source.until("it joins", lambda: source.recorded() is not None)
        ack = source.produce()
        waited = await source.until("the ack", lambda: produced(ack) is not None)
        assert produced(ack) == 0
        assert waited < JOIN_S + LEASE_S + LEASE_MARGIN_S + 1.0
        assert not source.in_sync()
        status = source.sync.partitions.sync_of(KEY)
        assert (status.state, source.recorded()) == ("Syncing", None), "it never was In-Sync"
        assert status.message == "the follower did not catch up within 3 s while acks were held"

    on_source(work)


def test_it_leaves_when_confirmations_stay_out_and_acks_go_after_the_last_lease() -> None:
    async def work(source: Source) -> None:
        await source.synchronous()
        await asyncio.sleep(5.0)
        plain, transactional = source.produce(), source.produce(transactional=True)
        wrote_at = leased_at = simulated_now()
        while await source.lease():
            leased_at = simulated_now()
            await asyncio.sleep(0.05)
        assert leased_at - wrote_at < TIMEOUT_S - LEASE_S, "what may leave soon is promised no longer"
        await source.until("the ack", lambda: produced(plain) is not None)
        assert produced(plain) == 0
        assert TIMEOUT_S < simulated_now() - wrote_at < TIMEOUT_S + 1.0
        assert simulated_now() > leased_at + LEASE_S
        record = source.recorded()
        assert record is not None
        assert (record.state, source.in_sync()) == (SyncState.OUT_OF_SYNC, False)
        assert record.reason is not None
        assert "nothing was confirmed for" in record.reason.message
        await asyncio.sleep(5.0)
        assert produced(transactional) is None, "consumers of the other side read what is committed"
        source.confirm()
        assert produced(transactional) == 0
        await source.until("In-Sync again", source.in_sync)

    on_source(work)


def test_acks_wait_for_as_long_as_it_cannot_be_recorded_that_a_link_is_out_of_sync(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def work(source: Source) -> None:
        await source.synchronous()
        append = source.control.append

        async def unavailable(body: object) -> None:
            raise BrokerUnavailable("the control log does not answer")

        monkeypatch.setattr(source.control, "append", unavailable)
        ack = source.produce()
        await asyncio.sleep(4 * TIMEOUT_S)
        assert produced(ack) is None
        monkeypatch.setattr(source.control, "append", append)
        await source.until("the ack", lambda: produced(ack) is not None, 5.0)
        assert produced(ack) == 0

    on_source(work)


def test_a_producer_that_waits_no_longer_is_answered_that_it_is_not_confirmed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(source: Source) -> None:
        await source.synchronous()

        async def unavailable(body: object) -> None:
            raise BrokerUnavailable("the control log does not answer")

        monkeypatch.setattr(source.control, "append", unavailable)
        ack = source.produce()
        await source.until("it is answered", lambda: produced(ack) is not None, 90.0)
        assert produced(ack) == NOT_CONFIRMED

    on_source(work)


def test_a_follower_that_lost_what_it_confirmed_is_in_sync_no_more() -> None:
    async def work(source: Source) -> None:
        source.log.write_values(b"a", b"b")
        await source.synchronous()
        source.confirm(1)
        assert await source.until("it leaves", lambda: not source.in_sync(), 5.0) < 1.0
        assert not await source.lease()
        await source.until("recorded", lambda: _is_out(source), 5.0)
        record = source.recorded()
        assert record is not None
        assert record.reason is not None
        assert record.reason.message.endswith("the follower has lost what it confirmed: it ends at 1 of 2")

    on_source(work)


def _is_out(source: Source) -> bool:
    record = source.recorded()
    return record is not None and record.state is SyncState.OUT_OF_SYNC


def test_one_that_is_to_leave_does_so_when_no_lease_runs_any_more() -> None:
    async def work(source: Source) -> None:
        await source.synchronous()
        partitions = source.sync.partitions
        assert await source.lease()
        leased_at = simulated_now()
        assert not partitions.lose(KEY, "a decision is missing"), "it is recorded In-Sync, and leases say so"
        assert not await source.lease()
        await source.until("recorded", lambda: partitions.lose(KEY, "another reason"))
        assert simulated_now() > leased_at + LEASE_S
        record = source.recorded()
        assert record is not None
        assert record.reason is not None
        assert record.reason.message == f"{TOPIC}-0: a decision is missing"

    on_source(work)


def test_leases_of_a_link_that_is_synchronous_no_more_hold_acks_until_they_have_run_out() -> None:
    async def work(source: Source) -> None:
        await source.synchronous()
        await asyncio.sleep(5.0)
        assert await source.lease()
        leased_at = simulated_now()
        source.mode(LinkMode.ASYNCHRONOUS)
        assert not await source.lease()
        ack = source.produce()
        assert produced(ack) is None
        await source.until("the ack", lambda: produced(ack) is not None)
        assert produced(ack) == 0
        assert LEASE_S < simulated_now() - leased_at < LEASE_S + LEASE_MARGIN_S + 0.5
        assert not source.sync.active

    on_source(work)


def test_leases_of_the_process_before_hold_acks_although_nothing_is_recorded() -> None:
    async def work(source: Source) -> None:
        source.mode(LinkMode.SYNCHRONOUS)
        source.mode(LinkMode.ASYNCHRONOUS)
        after = SyncConfirmer(source.context, source.ends, source.groups, lambda link_name: True)
        after.control_changed(source.control.state)
        after.start()
        assert after.concerns(TOPIC)
        assert after.confirmed_end(PLACE, 0, False) == -1
        await asyncio.sleep(LEASE_S + LEASE_MARGIN_S - 0.1)
        assert after.confirmed_end(PLACE, 0, False) == -1
        await asyncio.sleep(0.5)
        assert after.confirmed_end(PLACE, 0, False) is None, "by then they have run out"
        assert not after.concerns(TOPIC)
        await after.stop()

    on_source(work)


def test_what_another_proxy_records_ends_this_ones_leases_before_acks_go() -> None:
    """Whoever believes to lead a partition, and does not any more, knows nothing of the leases that run."""

    async def work(source: Source) -> None:
        await source.synchronous()
        await asyncio.sleep(5.0)
        assert await source.lease()
        leased_at = simulated_now()
        ack = source.produce()
        falsely_out_of_sync(source.control, LINK, *PLACE)
        assert not source.in_sync()
        assert produced(ack) is None
        await source.until("the ack", lambda: produced(ack) is not None)
        assert simulated_now() > leased_at + LEASE_S

    on_source(work)
