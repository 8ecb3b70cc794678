"""What no client sends: real traffic with something done to it, and what is none. Seeded; no I/O.

Frames are whole messages, of Kafka or of a link (four bytes that say how many follow), or requests of HTTP.
"""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

SIZE: Final = struct.Struct(">I")
BYTE_BY_BYTE_MAX: Final = 200
"""Of what is sent in fragments of one byte, so many are; the rest follows at once."""
HELD_S_MAX: Final = 4.0
"""How long a connection stays open behind what was sent."""
NUMBERS: Final = (
    *(number.to_bytes(1, "big") for number in (0, 1, 0x7F, 0x80, 0xFF)),
    *(number.to_bytes(2, "big") for number in (0, 1, 0x7FFF, 0x8000, 0xFFFF)),
    *(number.to_bytes(4, "big") for number in (0, 1, 0xFFFF, 1 << 20, 100 << 20, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF)),
    *(number.to_bytes(8, "big") for number in (0, (1 << 63) - 1, 1 << 63, (1 << 64) - 1)),
    b"\xff\xff\xff\xff\x07",
    b"\xff\xff\xff\xff\x0f",
    b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01",
    b"\x80\x80\x80\x80\x80\x80\x80\x80\x80\x80",
)
"""Lengths and counts: of fixed sizes, and as varints."""
TLS_HELLO: Final = bytes.fromhex("16030100c8010000c40303") + bytes(range(32)) + bytes(157)
FOREIGN: Final = (
    b"GET / HTTP/1.1\r\nHost: example.org\r\n\r\n",
    b"POST /v1/links HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nfffffffffffffff\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    TLS_HELLO,
    b"\x16\x03\x01",
    b"SSH-2.0-OpenSSH_9.6\r\n",
    b"\x00\x00\x00\x12\x00\x12\x00\x03\x00\x00\x00\x01\x00\x01a\x00\x01a\x01a\x00",
    b"\x00\x00\x00\x03\x01{}",
    b"\x00" * 64,
    b"\xff" * 64,
    b"\r\n" * 40,
)
"""What speaks another protocol, or none: to each listener, the others' are among it."""

_DEEP: Final = "(deep)"
ODD_VALUES: Final = (
    *(None, True, -1, 2**31, 2**63, 10**400, 1.5, float("inf"), "", "x" * 50_000, "\ud800", "\x00", _DEEP),
    *([], {}, [[]], {"a": 1}, [None] * 5_000, {str(each): each for each in range(2_000)}),
)
"""Of another type, out of range, or too many."""

Refit = Callable[[bytes], bytes]
"""Has a frame say its own size again."""


class Sent(NamedTuple):
    """What one connection sends."""

    chunks: tuple[bytes, ...]
    """With other work of the loop between them."""
    held_s: float
    """How long the connection stays open then, unless it is closed before."""
    resets: bool = False
    """Whether it is reset in the end, in place of closed."""


def frames_of(data: bytes) -> list[bytes]:
    """The whole frames at the start of what a connection sent, of Kafka or of a link."""
    found, position = [], 0
    while len(data) - position >= SIZE.size:
        end = position + SIZE.size + SIZE.unpack_from(data, position)[0]
        if end > len(data):
            break
        found.append(data[position:end])
        position = end
    return found


def refit(frame: bytes) -> bytes:
    """Of a frame of Kafka or a link."""
    return SIZE.pack(max(0, len(frame) - SIZE.size)) + frame[SIZE.size :]


def requests_of(data: bytes) -> list[bytes]:
    """The whole requests at the start of what a connection sent, of HTTP."""
    found, position = [], 0
    while (body := data.find(b"\r\n\r\n", position) + 4) > 3:
        end = body + _content_length(data[position:body])
        found.append(data[position:end])
        position = end
    return found


def refit_request(request: bytes) -> bytes:
    """Of a request of HTTP."""
    head, blank, body = request.partition(b"\r\n\r\n")
    length = b"content-length: %d" % len(body)
    lines = [length if line.lower().startswith(b"content-length:") else line for line in head.split(b"\r\n")]
    return b"\r\n".join(lines) + blank + body


def _content_length(head: bytes) -> int:
    for line in head.split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            return int(value)
    return 0


class Mutations:
    """Makes, out of what connections really sent, what no other does."""

    def __init__(self, seed: int, recorded: Sequence[Sequence[bytes]], refitted: Refit = refit) -> None:
        """``recorded``: by connection, the frames that were sent over it; none is empty."""
        self.random = random.Random(seed)
        self._recorded = [list(frames) for frames in recorded]
        self._refit = refitted

    def real(self) -> Sent:
        """What a connection sent, as it was."""
        return Sent((b"".join(self.random.choice(self._recorded)),), 0.2)

    def odd(self, kept: Callable[[Sequence[bytes]], int] = lambda frames: 0) -> Sent:
        """Something else. ``kept``: how many frames at the start of a connection's stay as they are."""
        frames = self.random.choice(self._recorded)
        count = kept(frames)
        first, rest = b"".join(frames[:count]), frames[count:]
        data = b"".join(self.frames(rest))
        held_s = self.random.choice((0.0, 0.05, 0.5, self.random.uniform(0.5, HELD_S_MAX)))
        if self.random.random() < 0.15:
            data = self.foreign()
        elif self.random.random() < 0.15:  # half a frame, left open
            data = data[: self.random.randrange(len(data) + 1)]
            held_s = self.random.uniform(0.5, HELD_S_MAX)
        return Sent(tuple(self._chunks(first + data)), held_s, self.random.random() < 0.3)

    def foreign(self) -> bytes:
        """What speaks another protocol, or none."""
        return self.random.choice((*FOREIGN, self.random.randbytes(self.random.randrange(1, 2_000))))

    def frames(self, frames: Sequence[bytes]) -> list[bytes]:
        """Some frames, one at least of them changed, or in another order."""
        found = list(frames)
        if len(found) > 1 and self.random.random() < 0.3:
            self.random.shuffle(found)
        if found and self.random.random() < 0.2:
            found.insert(self.random.randrange(len(found) + 1), self.random.choice(found))
        if len(found) > 2 and self.random.random() < 0.5:  # what comes early ends most connections
            begin = self.random.randrange(len(found) - 1)
            found = found[begin : begin + self.random.randrange(1, 4)]
        for _ in range(self.random.choice((1, 1, 1, 2, 5))):
            if found:
                at = self.random.randrange(len(found))
                found[at] = self.frame(found[at])
        return found

    def frame(self, frame: bytes) -> bytes:
        """A frame with something done to it; mostly one that says its own size."""
        changed = self.random.choice((self._flipped, self._spans, self._cut, self._numbers, self._numbers))(frame)
        return self._refit(changed) if self.random.random() < 0.7 else changed

    def inside(self, told: Any) -> bytes:
        """Valid JSON like this, with something in it that nobody says, or without something."""
        for _ in range(self.random.choice((1, 1, 2, 4))):
            told = self._odd(told)
        depth = self.random.choice((100, 700, 12_000))
        deep = self.random.choice((b"[" * depth + b"]" * depth, b'{"a":' * depth + b"1" + b"}" * depth))
        said = json.dumps(told).encode()
        return said.replace(json.dumps(_DEEP).encode(), deep).replace(b"Infinity", b"1e999")

    def _odd(self, value: Any) -> Any:
        if isinstance(value, dict) and value and self.random.random() < 0.9:
            name = self.random.choice(list(value))
            if self.random.random() < 0.2:
                return {each: value[each] for each in value if each != name}
            return {**value, name: self._odd(value[name])}
        if isinstance(value, list) and value and self.random.random() < 0.7:
            at = self.random.randrange(len(value))
            return [*value[:at], self._odd(value[at]), *value[at + 1 :]]
        return self.random.choice(ODD_VALUES)

    def _flipped(self, frame: bytes) -> bytes:
        changed = bytearray(frame)
        for _ in range(self.random.choice((1, 1, 2, 8))):
            if changed:
                changed[self.random.randrange(len(changed))] ^= 1 << self.random.randrange(8)
        return bytes(changed)

    def _spans(self, frame: bytes) -> bytes:
        """A part of it doubled, or left out."""
        begin, end = sorted(self.random.randrange(len(frame) + 1) for _ in range(2))
        times = self.random.choice((0, 0, 2, 2, 40 if end - begin < 500 else 2))
        return frame[:begin] + frame[begin:end] * times + frame[end:]

    def _cut(self, frame: bytes) -> bytes:
        return frame[: self.random.randrange(len(frame) + 1)]

    def _numbers(self, frame: bytes) -> bytes:
        """Extremes in the place of what may be lengths and counts; those in front are more often one."""
        number = self.random.choice(NUMBERS)
        at = self.random.randrange(min(len(frame), self.random.choice((4, 40, 400, 1 << 20))) + 1)
        replaced = self.random.choice((1, len(number)))
        return frame[:at] + number + frame[at + replaced :]

    def _chunks(self, data: bytes) -> list[bytes]:
        kind = self.random.random()
        if kind < 0.1:
            return [*(data[at : at + 1] for at in range(min(len(data), BYTE_BY_BYTE_MAX))), data[BYTE_BY_BYTE_MAX:]]
        if kind < 0.4:
            cuts = sorted(self.random.randrange(len(data) + 1) for _ in range(3))
            return [data[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(data)], strict=True)]
        return [data]
