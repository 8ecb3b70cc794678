"""The codes that the project knows by name are kio's, and plain integers."""

from __future__ import annotations

import pytest
from kio.schema.errors import ErrorCode

from isthmus_protocol import error_codes

CODES = {name: code for name, code in vars(error_codes).items() if name.isupper()}


@pytest.mark.parametrize("name", CODES)
def test_a_code_has_the_name_that_kafka_gives_it(name: str) -> None:
    assert CODES[name] == ErrorCode[name.lower()]
    assert type(CODES[name]) is int


def test_some_codes_as_the_protocol_has_them() -> None:
    assert error_codes.UNKNOWN_SERVER_ERROR == -1
    assert error_codes.NOT_LEADER_OR_FOLLOWER == 6
    assert error_codes.UNKNOWN_TOPIC_ID == 100
