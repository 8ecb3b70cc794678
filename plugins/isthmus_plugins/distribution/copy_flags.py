"""Copy flags: the header of a record that says on which levels it was passed on (document 000).

Eight bytes, big endian, with a bit for each level. Level *n* has bit *n*, counted from 1, and its mask has the lower
bits as well. A distributor passes on what has no bit of its mask, with its own bit set. Since levels get lower towards
the leaves, the lowest bit says by which level a copy has come, and distributors of lower levels alone go on with it.
"""

from __future__ import annotations

from typing import Final

LEVELS_MAX: Final = 63
"""The sign of a Java long is no flag."""
FLAGS_BYTES: Final = 8
HEADER_NAME: Final = "isthmus-copy-flags"
"""By default; the tree document may name another."""
ALL_LEVELS: Final = (1 << LEVELS_MAX) - 1
"""What a new leaf is filled with: nobody passes it on."""


class FlagsError(ValueError):
    """The header of a message cannot be read. The message is not passed on, and the reason is shown."""


def bit(level: int) -> int:
    return 1 << (level - 1)


def mask(level: int) -> int:
    """The level's own bit and all lower ones."""
    return (1 << level) - 1


def passed_on(flags: int, level: int) -> int | None:
    """The flags of what the distributor of a level produces of a message; None: it produces nothing."""
    return None if flags & mask(level) else flags | bit(level)


def read_flags(content: bytes | None) -> int:
    """The flags that a header's value holds. Raises FlagsError for one of another length; an absent header is 0."""
    if content is None or len(content) != FLAGS_BYTES:
        found = "null" if content is None else f"{len(content)} bytes"
        raise FlagsError(
            f"copy flags are {FLAGS_BYTES} bytes, there are {found}: whatever wrote them is no distributor"
        )
    return int.from_bytes(content, "big")


def write_flags(flags: int) -> bytes:
    return flags.to_bytes(FLAGS_BYTES, "big")


def digits(flags: int, width: int) -> str:
    """As document 000 prints them: ``0101``."""
    return f"{flags:0{width}b}"
