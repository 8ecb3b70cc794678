"""One pushed partition: what is on its way, what the follower is known to have, and how old what it lacks is."""

from __future__ import annotations

from typing import Any

import pytest
from support.replicas import LINK

from isthmus_control.model import OffsetsCopy, OffsetsForm
from isthmus_plugins.replication.leader.stream import (
    CLOSE_MS,
    IN_FLIGHT_BYTES_MAX,
    IN_FLIGHT_BYTES_MIN,
    PARTITION_BYTES_MAX,
    PEER_IN_FLIGHT_BYTES_MAX,
    SEEN_INTERVAL_S,
    SHARE_BYTES,
    STABLES_MAX,
    Flow,
    Lane,
    LeaderStream,
    Wait,
)
from isthmus_plugins.replication.partitions import LinkPartition

EPOCH = 5


class Connection:
    writable = True


class Clock:
    now = 100.0

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now


def a_stream(flow: Flow | None = None, end: int = 10, **more: Any) -> LeaderStream:
    """A stream of a follower whose log ends at ``end``."""
    connection: Any = Connection()
    key = LinkPartition(LINK, "t", 0)
    stream = LeaderStream(key, bytes(16), "r", 1, EPOCH, connection, 1, flow or Flow(), Clock(), **more)
    stream.opened(end)
    return stream


# ---- bytes on their way ----


def test_bytes_in_flight_are_limited_by_stream_and_by_connection() -> None:
    flow = Flow()
    one, other = a_stream(flow), a_stream(flow)
    one.sent(11, IN_FLIGHT_BYTES_MIN)
    assert one.wait is Wait.PEER
    assert other.wait is None
    one.confirmed(11)
    assert one.wait is None
    assert (one.in_flight_bytes, flow.in_flight_bytes) == (0, 0)
    other.sent(11, SHARE_BYTES)
    one.sent(12, PEER_IN_FLIGHT_BYTES_MAX)
    assert other.wait is Wait.PEER
    one.closed()
    assert other.wait is None
    other.connection.writable = False  # type: ignore[misc]
    assert other.wait is Wait.PEER


def test_a_stream_has_its_share_whatever_others_have_on_their_way() -> None:
    """Clients may wait for its acks, and a large batch takes seconds over a thin line."""
    flow = Flow()
    large, small = a_stream(flow), a_stream(flow)
    assert small.wanted().bytes_max == PARTITION_BYTES_MAX
    large.sent(11, PEER_IN_FLIGHT_BYTES_MAX)
    large.connection.writable = small.connection.writable = False  # type: ignore[misc]
    assert (large.wait, small.wait) == (Wait.PEER, None)
    assert small.wanted().bytes_max == SHARE_BYTES
    small.sent(11, SHARE_BYTES)
    assert small.wait is Wait.PEER
    small.confirmed(11)
    assert small.wait is None


@pytest.mark.parametrize(
    ("round_trip_s", "most"), [(0.0, IN_FLIGHT_BYTES_MIN), (0.02, 3 << 20), (0.1, 11 << 20), (1.0, IN_FLIGHT_BYTES_MAX)]
)
def test_more_is_in_flight_to_a_peer_that_is_far_away(round_trip_s: float, most: int) -> None:
    stream = a_stream(Flow(round_trip_s))
    stream.sent(11, int(0.97 * most))
    assert stream.wait is None
    stream.sent(12, int(0.04 * most))
    assert stream.wait is Wait.PEER


def test_a_stream_that_ends_leaves_nothing_on_its_way_whatever_is_confirmed_after() -> None:
    flow = Flow()
    one, other = a_stream(flow), a_stream(flow)
    one.sent(11, 300)
    one.sent(12, 500)
    other.sent(11, 7)
    one.confirmed(11)
    one.closed()
    assert flow.in_flight_bytes == 7
    one.confirmed(12)  # was under way when the stream ended
    assert (one.in_flight_bytes, flow.in_flight_bytes) == (0, 7)


def test_what_is_confirmed_in_part_is_on_its_way_still() -> None:
    stream = a_stream()
    stream.sent(20, 300)
    stream.confirmed(19)
    assert (stream.acked, stream.in_flight_bytes) == (19, 300)


def test_a_stream_has_one_reason_to_wait() -> None:
    stream = a_stream()
    stream.blocked = lambda: None
    waits = [stream.wait]
    for begin in ("seeking", "doubting", "undecided"):
        setattr(stream, begin, True)
        waits.append(stream.wait)
    stream.sent(11, IN_FLIGHT_BYTES_MAX)
    waits.append(stream.wait)
    assert waits == [Wait.END, Wait.LOG_START, Wait.DELETIONS, Wait.DECISION, Wait.PEER]


def test_the_logs_start_ends_what_waited_for_it() -> None:
    stream = a_stream()
    stream.blocked = lambda: None
    assert stream.wait is Wait.END
    stream.seeking = True
    stream.seek(50)  # the source's log starts there now
    assert stream.wait is None
    assert (stream.wanted().offset, stream.read_from) == (50, 10), "the follower hears of the gap"


# ---- what is read next ----


def test_every_read_names_the_leader_epoch_and_is_the_same_until_something_was_sent() -> None:
    stream = a_stream()
    first = stream.wanted()
    assert (first.offset, first.leader_epoch) == (10, EPOCH)
    assert stream.wanted() is first, "a fetch session would begin anew"
    stream.sent(12, 1)
    assert (stream.wanted().offset, stream.wanted().leader_epoch) == (12, EPOCH)


def test_an_offsets_topic_is_in_the_read_that_leaves_out_what_is_undecided_whatever_else_it_is() -> None:
    copy = OffsetsCopy(OffsetsForm.WHOLE)
    assert a_stream().lane is Lane.BUSY, "a stream that begins has something to send"
    for committed in (False, True):
        for busy in (False, True):
            stream, of_offsets = a_stream(), a_stream(copy=copy)
            stream.read_committed = of_offsets.read_committed = committed
            stream.busy = of_offsets.busy = busy
            assert of_offsets.lane is Lane.OFFSETS
            assert stream.lane is (Lane.READ_COMMITTED if committed else Lane.BUSY if busy else Lane.IDLE)


# ---- what the follower has ----


def test_an_older_confirmation_takes_nothing_back() -> None:
    stream = a_stream()
    stream.saw_end(30, 100.0)
    stream.confirmed(30)
    stream.confirmed(20)
    assert (stream.acked, stream.lag) == (30, 0)


def test_transactions_have_ended_for_the_follower_when_it_has_all_that_the_source_had_then() -> None:
    stream = a_stream()
    assert stream.stable == -1
    assert not stream.saw_stable(20, 15)  # their markers are before 20, and the follower ends at 10
    stream.confirmed(19)
    assert stream.stable == -1
    stream.confirmed(20)
    assert stream.stable == 15
    assert stream.saw_stable(20, 18), "it is known at once: the follower has all of it"
    assert not stream.saw_stable(20, 17)
    assert stream.stable == 18, "what has ended does not open again"


def test_of_many_reads_some_are_forgotten_and_none_counts_too_early() -> None:
    stream = a_stream(end=0)
    reads = [(2 * number, number) for number in range(1, 4 * STABLES_MAX)]
    for high_watermark, last_stable in reads:
        assert not stream.saw_stable(high_watermark, last_stable)
    for acked in range(reads[-1][0] + 1):
        stream.confirmed(acked)
        known = max((last_stable for high_watermark, last_stable in reads if high_watermark <= acked), default=-1)
        assert stream.stable <= known
        if acked <= 2 * STABLES_MAX:
            assert stream.stable == known
    assert stream.stable == reads[-1][1], "the latest counts"


def test_when_something_was_sent_is_known_until_it_is_confirmed() -> None:
    stream = a_stream()
    clock: Any = stream._clock
    assert stream.sent_at(10) is None
    stream.sent(12, 1)
    clock.now = 101.0
    stream.sent(14, 1)
    assert stream.sent_at(11) is None, "nothing of it is there"
    assert stream.sent_at(12) == stream.sent_at(14) == 100.0
    stream.confirmed(12)
    assert stream.sent_at(14) == 101.0


# ---- the age of what it lacks ----


def test_a_follower_is_close_when_it_has_had_all_and_lacks_what_is_young() -> None:
    stream = a_stream()
    assert not stream.is_close(100.0)  # nobody has looked
    stream.saw_end(1_000, 100.0)
    assert stream.age_ms(100.0) == 0
    assert not stream.is_close(100.0)  # nobody knows how old that is
    stream.confirmed(1_000)
    assert stream.is_close(100.0)
    stream.saw_end(1_010, 101.0)
    assert stream.is_close(101.0 + CLOSE_MS / 1000)
    assert not stream.is_close(101.1 + CLOSE_MS / 1000)
    stream.confirmed(1_010)
    assert stream.is_close(102.0)
    empty = a_stream()
    empty.saw_end(0, 100.0)
    assert empty.is_close(100.0)


def test_age_is_that_of_the_oldest_record_that_is_missing() -> None:
    stream = a_stream()
    stream.saw_end(10, 100.0)
    stream.saw_end(20, 100.0)
    stream.saw_end(30, 105.0)
    assert stream.lag == 20
    assert stream.age_ms(106.0) == 6000
    stream.confirmed(15)
    assert stream.age_ms(106.0) == 6000
    stream.confirmed(20)
    assert stream.age_ms(106.0) == 1000
    stream.confirmed(30)
    assert (stream.lag, stream.age_ms(200.0)) == (0, 0)


def test_what_was_seen_takes_little_memory() -> None:
    stream = a_stream()
    for number in range(10_000):
        stream.saw_end(20 + number, 100.0 + number / 1000)
    assert len(stream._seen) <= 10 / SEEN_INTERVAL_S + 1
    assert stream.age_ms(110.0) == 10_000


def test_what_the_stream_before_saw_is_as_old_as_it_was_then() -> None:
    stream = a_stream()
    stream.lacking_since = 40.0
    stream.saw_end(20, 100.0)
    assert stream.age_ms(100.0) == 60_000
    stream.saw_end(30, 101.0)
    stream.confirmed(20)
    assert stream.age_ms(101.0) == 0, "that came after"
    assert a_stream().age_ms(100.0) == 0


def test_a_source_that_shows_less_than_before_makes_nothing_younger() -> None:
    stream = a_stream()
    stream.saw_end(20, 100.0)
    stream.saw_end(15, 101.0)  # a new leader's high watermark may lag for a moment
    assert stream.lag == 10
    stream.saw_end(20, 102.0)
    assert (stream.source_end, stream.lag, stream.age_ms(102.0)) == (20, 10, 2_000)
