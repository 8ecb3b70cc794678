"""A link's bytes cut into frames, however they come."""

from __future__ import annotations

import random

import pytest
from support.seeds import seeds

from isthmus_protocol import link
from isthmus_protocol.link import HANDSHAKE_BYTES_MAX, HEAD, MessageType, Splitter
from isthmus_protocol.wire import MalformedFrame


@pytest.mark.parametrize("seed", seeds(20))
def test_frames_are_the_same_in_whatever_chunks_they_come(seed: int) -> None:
    rng = random.Random(seed)
    frames = [
        (rng.choice(list(MessageType)), rng.randbytes(rng.choice((0, 1, 5, 100, 5000))))
        for _ in range(rng.randint(1, 30))
    ]
    data = b"".join(link.encode(kind, body) for kind, body in frames)
    splitter = Splitter()
    found = []
    while data:
        size = rng.choice((1, 2, 4, 5, 6, 100, 10_000))
        found += [(kind, bytes(body)) for kind, body in splitter.feed(data[:size])]
        data = data[size:]
    assert found == frames


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (HEAD.pack(0, 1), "a link frame of 0 bytes"),
        (HEAD.pack(HANDSHAKE_BYTES_MAX + 1, 1), "a link frame of"),
        (HEAD.pack(3, 99) + b"xx", "unknown type 99"),
    ],
)
@pytest.mark.parametrize("chunk", [1, 6, 100])
def test_what_is_no_frame(data: bytes, message: str, chunk: int) -> None:
    splitter = Splitter()

    def feed() -> None:
        for start in range(0, len(data), chunk):
            list(splitter.feed(data[start : start + chunk]))

    with pytest.raises(MalformedFrame, match=message):
        feed()


def test_a_stream_is_known_by_the_head_of_its_records() -> None:
    assert link.stream_of(link.encode_append_head(7, 1, 2, 3, 4, 5)) == 7
    assert link.stream_of(link.encode_appended(7, 1)) is None
    assert link.stream_of(link.encode(MessageType.HEARTBEAT, b"")) is None
