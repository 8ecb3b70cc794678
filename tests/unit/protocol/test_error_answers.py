"""The codes that clients are told: a copy of the table in the design, so that a change is a decision."""

from __future__ import annotations

import pytest

from isthmus_protocol.error_answers import COORDINATOR_APIS, Cause, error_answer
from isthmus_protocol.schema import ApiKey


@pytest.mark.parametrize(
    ("cause", "api_key", "code"),
    [
        (Cause.READ_ONLY, ApiKey.PRODUCE, 42),
        (Cause.RESERVED, ApiKey.CREATE_TOPICS, 44),
        (Cause.RESERVED, ApiKey.INCREMENTAL_ALTER_CONFIGS, 44),
        (Cause.REPLICATED_GROUP, ApiKey.OFFSET_COMMIT, 29),
        (Cause.NOT_REPLICATED, ApiKey.PRODUCE, 19),
        (Cause.NOT_CONFIRMED, ApiKey.PRODUCE, 7),
        (Cause.NOT_REPLICATED, ApiKey.OFFSET_COMMIT, 14),
        (Cause.NOT_CONFIRMED, ApiKey.OFFSET_COMMIT, 14),
        (Cause.NOT_CONFIRMED, ApiKey.TXN_OFFSET_COMMIT, 14),
        (Cause.NOT_CONFIRMED, ApiKey.ADD_PARTITIONS_TO_TXN, 14),
        (Cause.NOT_CONFIRMED, ApiKey.END_TXN, 14),
        (Cause.NOT_REPLICATED, ApiKey.END_TXN, 14),
        (Cause.FENCED, ApiKey.PRODUCE, 6),
        (Cause.NOT_READY, ApiKey.FETCH, 78),
    ],
)
def test_codes(cause: Cause, api_key: ApiKey, code: int) -> None:
    assert error_answer(cause, api_key, "topic t").code == code


def test_no_coordinator_is_told_of_a_timeout() -> None:
    """REQUEST_TIMED_OUT there is fatal to a Java transaction, and sends consumers to look for another coordinator."""
    for cause in Cause:
        for api_key in COORDINATOR_APIS:
            assert error_answer(cause, api_key, "group g").code not in (7, 15, 16)


@pytest.mark.parametrize("cause", Cause)
def test_messages_name_subject_and_reason(cause: Cause) -> None:
    answer = error_answer(cause, ApiKey.PRODUCE, "topic orders-eu", "namespace 'orders-' follows B over link a-to-b")
    assert answer.message is not None
    assert "topic orders-eu" in answer.message
    assert "a-to-b" in answer.message or cause is Cause.BUG
