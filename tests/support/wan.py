"""A WAN, for tests where there can be one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import pytest

from isthmus_bench.children import ChildFailed
from isthmus_bench.wan import Wan

RTT_MS: Final = 20.0


@pytest.fixture
def wan() -> Iterator[Wan]:
    """With a round trip of RTT_MS."""
    try:
        network = Wan(RTT_MS)
    except ChildFailed as error:
        pytest.skip(str(error))
    with network:
        yield network
