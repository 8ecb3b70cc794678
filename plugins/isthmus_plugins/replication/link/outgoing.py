"""What waits to be written to a link's connection, and what of it goes next.

A frame that is written has all behind it wait, so little is written ahead of what the line takes, and what waits is
chosen late: each stream's records, and everything else (*control*: calls, answers, confirmations), wait in a *lane* of
their own, in order. Small control frames go first. Large frames go in pieces, and lanes take turns, a piece or some
small frames at a time.

So records may come later than control frames that were sent after them, and no record comes sooner than what was sent
before it *in order* (:attr:`~isthmus_plugins.replication.link.call_codec.Question.IN_ORDER`). To a peer that does not
know pieces all goes whole, and as it was sent.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final, TypeAlias

from isthmus_protocol import link, link_pieces
from isthmus_protocol.link_pieces import PIECE_BYTES, UNFINISHED_BYTES_MAX

Part: TypeAlias = bytes | memoryview
NUMBERS: Final = 2**32
CONTROL_BYTES: Final = 32 * 1024 * 1024
"""Of what a peer keeps of unfinished frames, for a control frame: it may have to go before all else. No larger one is
cut."""


class _Frame:
    """One frame that waits, or what is left of it."""

    __slots__ = ("gives_back", "in_order", "left", "number", "parts", "size", "whole")

    def __init__(
        self, parts: Sequence[Part], size: int, whole: bool = True, in_order: bool = False, gives_back: int = 0
    ) -> None:
        self.parts = deque(parts)
        self.size = size
        self.whole = whole
        """Whether it goes in one piece."""
        self.left = size
        """Bytes that are not written."""
        self.in_order = in_order
        self.gives_back = gives_back
        """Bytes that the peer does not have to keep any more when this is written."""
        self.number: int | None = None
        """As pieces have it, once the first is written."""

    def cut(self, count: int) -> list[Part]:
        """Take so many bytes off its front, copying nothing."""
        taken: list[Part] = []
        self.left -= count
        while count:
            part = self.parts[0]
            if len(part) <= count:
                taken.append(self.parts.popleft())
            else:
                view = memoryview(part)
                taken.append(view[:count])
                self.parts[0] = view[count:]
            count -= len(taken[-1])
        return taken


class _Lane:
    """Frames that go one after the other: those of one stream, or (None) control."""

    __slots__ = ("frames", "has_turn", "stream")

    def __init__(self, stream: int | None) -> None:
        self.stream = stream
        self.frames: deque[_Frame] = deque()
        self.has_turn = False


class Outgoing:
    """Frames that wait, in the lanes of one connection."""

    __slots__ = ("_control", "_in_order", "_number", "_streams", "_turns", "_unfinished_bytes", "cuts", "queued_bytes")

    def __init__(self) -> None:
        self.cuts = False
        """Whether the peer takes pieces."""
        self.queued_bytes = 0
        self._control = _Lane(None)
        self._in_order = 0
        """How many control frames wait before which no record goes that was sent after them."""
        self._streams: dict[int, _Lane] = {}
        self._turns: deque[_Lane] = deque()
        """Lanes with frames, in the order of their turns; empty ones among them are passed over."""
        self._number = 0
        self._unfinished_bytes = 0
        """Sizes of the frames of streams that the peer has in part."""

    def __bool__(self) -> bool:
        return self.queued_bytes > 0

    def put(self, parts: Sequence[Part], size: int, in_order: bool = False) -> None:
        """Add one frame of ``size`` bytes in all."""
        stream = link.stream_of(parts[0]) if self.cuts else None
        whole = size <= PIECE_BYTES or not self.cuts
        if stream is None:
            lane, whole = self._control, whole or size > CONTROL_BYTES
        else:
            lane = self._streams.get(stream) or self._streams.setdefault(stream, _Lane(stream))
        self._add(lane, _Frame(parts, size, whole, in_order))
        self._in_order += in_order

    def take(self) -> list[Part]:
        """What is to be written next: a piece, or some small frames; nothing if nothing waits."""
        if not self.queued_bytes:
            return []
        control = self._control
        if control.frames and (self._in_order or control.frames[0].whole):
            return self._next_of(control)
        lane = self._whose_turn()
        taken = self._next_of(lane)
        if lane.frames:
            self._give_turn(lane)
        elif lane.stream is not None:
            del self._streams[lane.stream]
        return taken

    def drop(self, stream: int) -> None:
        """Forget what waits of a stream that has ended; what the peer has of a frame in part, it gives back."""
        lane = self._streams.pop(stream, None)
        if lane is None:
            return
        self.queued_bytes -= sum(frame.left for frame in lane.frames)
        begun = lane.frames[0]
        lane.frames.clear()
        if begun.number is not None:
            rest = link_pieces.encode_abandoned(begun.number)
            self._add(self._control, _Frame((rest,), len(rest), gives_back=begun.size - link_pieces.SIZE_BYTES))

    def _add(self, lane: _Lane, frame: _Frame) -> None:
        lane.frames.append(frame)
        self.queued_bytes += frame.size
        if not lane.has_turn:
            self._give_turn(lane)

    def _give_turn(self, lane: _Lane) -> None:
        lane.has_turn = True
        self._turns.append(lane)

    def _whose_turn(self) -> _Lane:
        """The first lane of which something may go. Large frames are begun as far as the peer can keep them."""
        passed: list[_Lane] = []
        while True:
            lane = self._turns.popleft()
            if not lane.frames:
                lane.has_turn = False
                continue
            frame = lane.frames[0]
            free = UNFINISHED_BYTES_MAX - CONTROL_BYTES - self._unfinished_bytes
            if frame.whole or frame.number is not None or lane.stream is None or frame.size <= free:
                break
            passed.append(lane)
        self._turns.extendleft(reversed(passed))
        lane.has_turn = False
        return lane

    def _next_of(self, lane: _Lane) -> list[Part]:
        if not lane.frames[0].whole:
            return self._piece(lane)
        taken: list[Part] = []
        size = 0
        while lane.frames and size < PIECE_BYTES and lane.frames[0].whole:
            frame = lane.frames.popleft()
            taken += frame.parts
            size += frame.size
            self._in_order -= frame.in_order
            self._unfinished_bytes -= frame.gives_back
        self.queued_bytes -= size
        return taken

    def _piece(self, lane: _Lane) -> list[Part]:
        frame = lane.frames[0]
        whole = frame.size - link_pieces.SIZE_BYTES
        if frame.number is None:
            frame.number = self._number = (self._number + 1) % NUMBERS
            frame.cut(link_pieces.SIZE_BYTES)
            self.queued_bytes -= link_pieces.SIZE_BYTES
            self._unfinished_bytes += whole if lane.stream is not None else 0
        count = min(PIECE_BYTES, frame.left)
        taken = link_pieces.encode_piece(frame.number, whole, frame.cut(count))
        self.queued_bytes -= count
        if not frame.left:
            lane.frames.popleft()
            self._in_order -= frame.in_order
            self._unfinished_bytes -= whole if lane.stream is not None else 0
        return taken
