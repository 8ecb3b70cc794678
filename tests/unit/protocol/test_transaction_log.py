"""The transaction log's records; what real brokers write is compared in tests/integration/test_transaction_log.py."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.transaction_state import state_batch, state_key, state_value

from isthmus_protocol.records import whole_header
from isthmus_protocol.transaction_log import (
    Change,
    Transaction,
    TransactionLog,
    TransactionState,
    UnknownRecord,
    decode_key,
    decode_value,
)
from isthmus_protocol.wire import MalformedFrame

PLACES = (("orders-ö", 3), ("orders-ö", 0), ("__consumer_offsets", 49))
DECIDED = Transaction(4_000_000_007, 12, TransactionState.PREPARE_COMMIT, PLACES)


def take(log: TransactionLog, offset: int, *records: tuple[bytes, bytes | None]) -> list[Change]:
    batch = state_batch(offset, records)
    return log.take(batch, whole_header(batch))


@pytest.mark.parametrize("version", [0, 1])
@pytest.mark.parametrize("state", TransactionState)
@pytest.mark.parametrize("places", [PLACES, ()])
def test_states_of_both_versions(version: int, state: TransactionState, places: tuple[tuple[str, int], ...]) -> None:
    transaction = Transaction(7, 32767, state, places, 2 if version == 1 else 0)
    assert decode_key(state_key("app-ö")) == "app-ö"
    assert decode_value(state_value(transaction, version)) == transaction


def test_no_partitions_may_be_null() -> None:
    plain = state_value(DECIDED._replace(partitions=()), 0)
    null = plain.replace(struct.pack(">bi", 2, 0), struct.pack(">bi", 2, -1), 1)
    assert null != plain
    assert decode_value(null) == DECIDED._replace(partitions=())
    flexible = state_value(DECIDED._replace(partitions=()), 1)
    assert decode_value(flexible.replace(b"\x02\x01", b"\x02\x00", 1)) == DECIDED._replace(partitions=())


def test_the_decision_may_have_raised_the_epoch() -> None:
    assert DECIDED.data_epoch == 12
    assert DECIDED._replace(client_version=1).data_epoch == 12
    assert DECIDED._replace(client_version=2).data_epoch == 11


@pytest.mark.parametrize("version", [0, 1])
def test_what_is_cut_or_longer_is_not_taken(version: int) -> None:
    value = state_value(DECIDED, version)
    for end in range(len(value)):
        with pytest.raises((MalformedFrame, UnknownRecord)):
            decode_value(value[:end])
    with pytest.raises(MalformedFrame):
        decode_value(value + b"\x00")
    with pytest.raises(MalformedFrame):
        decode_key(state_key("app") + b"\x00")


@given(st.binary(max_size=80))
def test_any_bytes(data: bytes) -> None:
    for decode in (decode_key, decode_value):
        try:
            decode(data)
        except (MalformedFrame, UnknownRecord):
            pass


def test_what_is_newer_is_reported_and_not_guessed() -> None:
    log = TransactionLog()
    newer = struct.pack(">h", 2) + state_value(DECIDED)[2:]
    another = state_value(DECIDED._replace(state=TransactionState.EMPTY, partitions=())).replace(
        struct.pack(">ib", 60_000, 0), struct.pack(">ib", 60_000, 9)
    )
    changes = take(log, 5, (state_key("a"), newer), (state_key("b"), another), (b"\x00\x01\x00\x01x", b"?"))
    assert changes == [Change("a", None, 5, 0), Change("b", None, 6, 0)]
    assert log.unreadable == {
        "a": "transaction of version 2, at offset 5",
        "b": "transaction in state 9, at offset 6",
    }
    assert log.unknown == {"key of version 1": 7}
    take(log, 8, (state_key("a"), state_value(DECIDED)), (state_key("b"), None))
    assert not log.unreadable
    assert log.latest == {"a": DECIDED}


def test_what_it_adds_up_to() -> None:
    log = TransactionLog()
    ongoing = DECIDED._replace(state=TransactionState.ONGOING)
    done = DECIDED._replace(state=TransactionState.COMPLETE_COMMIT, partitions=())
    assert take(log, 0, (state_key("a"), state_value(ongoing, 0)), (state_key("a"), state_value(DECIDED, 0))) == [
        Change("a", ongoing, 0, 0),
        Change("a", DECIDED, 1, 0),
    ]
    assert log.latest == {"a": DECIDED}
    assert take(log, 9, (state_key("b"), state_value(done)), (state_key("a"), None)) == [
        Change("b", done, 9, 0),
        Change("a", None, 10, 0),
    ]
    assert log.latest == {"b": done}
