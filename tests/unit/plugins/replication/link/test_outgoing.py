"""What of a connection's waiting frames goes next."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from support.seeds import seeds

from isthmus_plugins.replication.link.outgoing import CONTROL_BYTES, Outgoing
from isthmus_protocol import link
from isthmus_protocol.link import FRAME_BYTES_MAX, MessageType
from isthmus_protocol.link_pieces import PIECE_BYTES, SIZE_BYTES, UNFINISHED_BYTES_MAX, Reassembly

MIB = 1024 * 1024


class Line:
    """An end that sends, and what the other end makes of it."""

    def __init__(self, cuts: bool = True) -> None:
        self.outgoing = Outgoing()
        self.outgoing.cuts = cuts
        self._splitter = link.Splitter()
        self._splitter.authenticated()
        self.reassembly = Reassembly()
        self.most_announced = 0

    def append(self, stream: int, size: int, number: int = 0) -> None:
        head = link.encode_append_head(stream, number, 0, 0, 0, size)
        self.outgoing.put((head, bytes(size)), len(head) + size)

    def call(self, number: int, size: int = 0, in_order: bool = False) -> None:
        frame = link.encode_json(MessageType.CALL, {"id": number, "params": "x" * size})
        self.outgoing.put((frame,), len(frame), in_order)

    def step(self) -> list[tuple[str, int, int]]:
        """Write once; the frames that are complete with that: (append, stream, number), or (call, its id, 0)."""
        whole = []
        for kind, body in self._splitter.feed(b"".join(self.outgoing.take())):
            frame = self.reassembly.add(body) if kind is MessageType.PIECE else (kind, body)
            self.most_announced = max(self.most_announced, self.reassembly.announced_bytes)
            if frame is not None:
                whole.append(self._named(*frame))
        return whole

    def taken(self) -> Iterator[tuple[str, int, int] | None]:
        """Write all, step by step; None: nothing is complete."""
        while self.outgoing:
            yield from self.step() or [None]

    @staticmethod
    def _named(kind: MessageType, body: memoryview) -> tuple[str, int, int]:
        if kind is MessageType.APPEND:
            append = link.decode_append(body)
            return "append", append.stream, append.from_offset
        return "call", link.decode_json(body)["id"], 0

    def frames(self) -> list[tuple[str, int, int]]:
        return [frame for frame in self.taken() if frame is not None]


def test_small_frames_are_not_held_up_by_a_large_one() -> None:
    line = Line()
    line.append(1, 60 * MIB)
    writing = line.taken()
    assert [next(writing) for _ in range(5)] == [None] * 5
    line.append(2, 100)
    line.call(1)
    assert next(writing) == ("call", 1, 0)
    assert ("append", 2, 0) in (next(writing), next(writing))
    assert list(writing)[-1] == ("append", 1, 0)


def test_to_a_peer_that_does_not_know_pieces_all_goes_as_it_was_sent() -> None:
    line = Line(cuts=False)
    line.append(1, 10 * MIB)
    line.append(2, 100)
    line.call(1)
    assert line.frames() == [("append", 1, 0), ("append", 2, 0), ("call", 1, 0)]
    assert line.most_announced == 0


def test_frames_of_a_piece_are_whole_and_larger_ones_are_not() -> None:
    line = Line()
    head = len(link.encode_append_head(1, 0, 0, 0, 0, 0))
    line.append(1, PIECE_BYTES - head)
    assert line.frames() == [("append", 1, 0)]
    assert line.most_announced == 0
    line.append(1, PIECE_BYTES - head + SIZE_BYTES + 1)
    assert line.frames() == [("append", 1, 0)]
    assert line.most_announced == PIECE_BYTES + 1, "it takes two pieces"


def test_large_streams_take_turns() -> None:
    line = Line()
    for stream in (1, 2, 3):
        line.append(stream, 2 * MIB)
        line.append(stream, 100, number=1)
    order = list(line.taken())
    done = [frame for frame in order if frame is not None]
    assert done[:3] == [("append", stream, 0) for stream in (1, 2, 3)], "none is done before the others nearly are"
    assert order.index(("append", 1, 0)) > 3 * (2 * MIB // PIECE_BYTES - 1)
    assert sorted(done[3:]) == [("append", stream, 1) for stream in (1, 2, 3)]


@pytest.mark.parametrize("size", [10, MIB])
def test_nothing_goes_before_what_is_sent_in_order(size: int) -> None:
    """Markers must not come before the decisions that they carry out."""
    line = Line()
    line.append(1, MIB)
    line.call(1, size=2 * MIB)
    writing = line.taken()
    for _ in range(4):
        next(writing)
    line.call(2, size, in_order=True)
    line.append(2, 50)
    frames = [frame for frame in writing if frame is not None]
    assert frames.index(("call", 2, 0)) < frames.index(("append", 2, 0))
    assert frames.index(("call", 1, 0)) < frames.index(("call", 2, 0))


def test_a_large_call_holds_up_no_records_and_calls_stay_in_order() -> None:
    line = Line()
    line.call(1, size=5 * MIB)
    writing = line.taken()
    assert next(writing) is None
    line.call(2)
    line.append(1, 50)
    frames = [frame for frame in writing if frame is not None]
    assert frames == [("append", 1, 0), ("call", 1, 0), ("call", 2, 0)]


def test_no_more_is_begun_than_the_peer_keeps_and_the_rest_has_its_turn() -> None:
    line = Line()
    for stream in range(3):
        line.append(stream, FRAME_BYTES_MAX - 100)
    line.append(3, MIB)
    frames = line.frames()
    assert frames == [("append", 3, 0), ("append", 0, 0), ("append", 1, 0), ("append", 2, 0)]
    assert line.most_announced <= UNFINISHED_BYTES_MAX


def test_a_call_that_goes_before_all_else_has_its_own_of_what_the_peer_keeps() -> None:
    line = Line()
    for stream in range(30):
        line.append(stream, 10 * MIB)
    writing = line.taken()
    for _ in range(30):
        next(writing)
    line.call(1, size=CONTROL_BYTES - 100, in_order=True)
    line.append(99, 50)
    line.call(2, size=CONTROL_BYTES)
    frames = [frame for frame in writing if frame is not None]
    assert frames[0] == ("call", 1, 0)
    assert frames[1] == ("call", 2, 0), "too large to be cut"
    assert len(frames) == 33
    assert UNFINISHED_BYTES_MAX - 11 * MIB < line.most_announced <= UNFINISHED_BYTES_MAX


def test_a_stream_that_has_ended_is_sent_no_more_and_what_the_peer_has_of_it_is_given_back() -> None:
    line = Line()
    for stream in (1, 2):
        line.append(stream, FRAME_BYTES_MAX - 100)
    line.append(1, 50, number=1)
    writing = line.taken()
    for _ in range(3):
        next(writing)
    line.outgoing.drop(1)
    line.outgoing.drop(7)
    frames = [frame for frame in writing if frame is not None]
    assert frames == [("append", 2, 0)]
    assert (line.reassembly.announced_bytes, line.outgoing.queued_bytes) == (0, 0)
    assert line.most_announced <= UNFINISHED_BYTES_MAX


@pytest.mark.parametrize("seed", seeds(20))
def test_each_lane_is_in_order_and_nothing_is_lost(seed: int) -> None:
    rng = random.Random(seed)
    line = Line()
    sent: list[tuple[str, int, int]] = []
    frames: list[tuple[str, int, int]] = []
    ordered: list[int] = []
    for number in range(300):
        size = rng.choice((10, 1000, PIECE_BYTES, 3 * PIECE_BYTES))
        if rng.random() < 0.3:
            in_order = rng.random() < 0.3
            line.call(number, size, in_order)
            sent.append(("call", number, 0))
            if in_order:
                ordered.append(number)
        else:
            stream = rng.randrange(5)
            line.append(stream, size, number)
            sent.append(("append", stream, number))
        if rng.random() < 0.7:
            frames += line.step()
    frames += line.frames()
    assert sorted(frames) == sorted(sent)
    for stream in range(5):
        lane = [frame for frame in frames if frame[:2] == ("append", stream)]
        assert lane == sorted(lane)
    calls = [frame for frame in frames if frame[0] == "call"]
    assert calls == sorted(calls)
    for number in ordered:
        at = frames.index(("call", number, 0))
        assert all(kind == "call" or later < number for kind, _, later in frames[:at])
    assert line.reassembly.announced_bytes == 0
