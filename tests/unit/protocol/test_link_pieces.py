"""Large link frames in pieces: their bytes, and what ends a connection whose peer lies about them."""

from __future__ import annotations

import pytest

from isthmus_protocol import link
from isthmus_protocol.link import FRAME_BYTES_MAX, MessageType, Splitter
from isthmus_protocol.link_pieces import (
    UNCUT_BYTES,
    UNFINISHED_BYTES_MAX,
    Reassembly,
    encode_abandoned,
    encode_piece,
)
from isthmus_protocol.wire import MalformedFrame

LEAST = UNCUT_BYTES + 1


def body_of(parts: list[bytes | memoryview] | bytes) -> memoryview:
    """The body of a PIECE frame, as it comes out of a stream of bytes."""
    splitter = Splitter()
    splitter.authenticated()
    ((kind, body),) = splitter.feed(parts if isinstance(parts, bytes) else b"".join(parts))
    assert kind is MessageType.PIECE
    return body


def piece(number: int, size: int, data: bytes) -> memoryview:
    return body_of(encode_piece(number, size, [data]))


def test_the_bytes_of_a_piece() -> None:
    assert b"".join(encode_piece(7, 100_000, [b"ab", b"c"])).hex() == (
        "0000000c"  # twelve bytes follow
        "16"  # PIECE
        "00000007"  # of the frame of this number
        "000186a0"  # which has so many, its type among them
        "616263"
    )
    assert encode_abandoned(7).hex() == "00000009" + "16" + "00000007" + "00000000"


def test_frames_whose_pieces_come_between_others() -> None:
    reassembly = Reassembly()
    append = link.encode_append_head(3, 1, 2, 4, 5, 100_000) + bytes(100_000)
    call = link.encode(MessageType.CALL, b"x" * 80_000)
    wholes = {1: append[4:], 2: call[4:]}
    came = []
    for start in range(0, 110_000, 10_000):
        for number, whole in wholes.items():
            if data := whole[start : start + 10_000]:
                came.append(reassembly.add(piece(number, len(whole), data)))
    finished = [each for each in came if each is not None]
    assert [(kind, bytes(body)) for kind, body in finished] == [
        (MessageType.CALL, call[5:]),
        (MessageType.APPEND, append[5:]),
    ]
    assert reassembly.announced_bytes == 0


def test_a_frame_whose_rest_does_not_come_is_given_back_and_its_number_may_be_used_again() -> None:
    reassembly = Reassembly()
    for _ in range(3):
        assert reassembly.add(piece(1, FRAME_BYTES_MAX, b"x")) is None
        assert reassembly.announced_bytes == FRAME_BYTES_MAX
        assert reassembly.add(body_of(encode_abandoned(1))) is None
        assert reassembly.announced_bytes == 0


@pytest.mark.parametrize(
    ("pieces", "words"),
    [
        ([memoryview(bytes(7))], "truncated"),
        ([piece(1, UNCUT_BYTES, b"x")], f"a link frame of {UNCUT_BYTES} bytes in pieces"),
        ([piece(1, FRAME_BYTES_MAX + 1, b"x")], "in pieces"),
        ([piece(1, LEAST, b"")], "a PIECE of 0 bytes"),
        ([piece(1, LEAST, bytes(LEAST + 1))], "a PIECE of"),
        ([piece(1, LEAST, b"\x12"), piece(1, LEAST, bytes(LEAST))], "where 1 of"),
        ([piece(1, LEAST, b"\x12"), piece(1, LEAST + 1, b"x")], "where 1 of"),
        ([body_of(encode_abandoned(1))], "not under way"),
        ([piece(1, LEAST, b"x"), piece(1, 0, b"x")], "with bytes"),
        ([piece(1, LEAST, b"\x63" * LEAST)], "type 99 in pieces"),
        ([piece(1, LEAST, b"\x16" * LEAST)], "type 22 in pieces"),
    ],
)
def test_pieces_that_cannot_be(pieces: list[memoryview], words: str) -> None:
    reassembly = Reassembly()
    for each in pieces[:-1]:
        assert reassembly.add(each) is None
    with pytest.raises(MalformedFrame, match=words):
        reassembly.add(pieces[-1])


def test_no_more_is_begun_than_a_peer_has_to_keep() -> None:
    reassembly = Reassembly()
    at_once = UNFINISHED_BYTES_MAX // LEAST
    for number in range(at_once):
        reassembly.add(piece(number, LEAST, b"x"))
    assert UNFINISHED_BYTES_MAX - LEAST < reassembly.announced_bytes <= UNFINISHED_BYTES_MAX
    with pytest.raises(MalformedFrame, match="is begun where others"):
        reassembly.add(piece(at_once, LEAST, b"x"))
    largest = Reassembly()
    largest.add(piece(0, FRAME_BYTES_MAX, b"x"))
    with pytest.raises(MalformedFrame, match="is begun where others"):
        largest.add(piece(1, FRAME_BYTES_MAX, b"x"))
