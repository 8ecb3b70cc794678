"""Why something is not distributed."""

from __future__ import annotations

from isthmus_control.model import Reason


class Waits(Exception):
    """A distributor cannot go on now; it tries again."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.reason = Reason(code, message)


SOURCE_UNAVAILABLE = "SOURCE_UNAVAILABLE"
TARGET_UNREACHABLE = "TARGET_UNREACHABLE"
TARGET_IS_ANOTHER_CLUSTER = "TARGET_IS_ANOTHER_CLUSTER"
TARGET_AT_ANOTHER_VERSION = "TARGET_AT_ANOTHER_VERSION"
LEVELS_AT_ANOTHER_VERSION = "LEVELS_AT_ANOTHER_VERSION"
TARGET_LACKS_MESSAGES = "TARGET_LACKS_MESSAGES"
FORMER_TARGET_UNREACHABLE = "FORMER_TARGET_UNREACHABLE"
TOPIC_MISSING = "TOPIC_MISSING"
POSITIONS_CONTRADICT = "POSITIONS_CONTRADICT"
TAKEN_OVER = "TAKEN_OVER"
MALFORMED_BATCH = "MALFORMED_BATCH"
FLAGS_REFUSED = "FLAGS_REFUSED"
MESSAGES_LOST = "MESSAGES_LOST"
