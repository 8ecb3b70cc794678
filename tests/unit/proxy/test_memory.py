"""What of a process's memory is moved into huge pages."""

from __future__ import annotations

from isthmus.memory import HUGE_PAGE_BYTES, _own_ranges

MAPS = """\
00400000-0041f000 r--p 00000000 fe:00 12 /usr/bin/python3.11
0041f000-00c00000 r-xp 0001f000 fe:00 12 /usr/bin/python3.11
00c00000-01000000 rw-p 00800000 fe:00 12 /usr/bin/python3.11
01100000-01f00000 rw-p 00000000 00:00 0 [heap]
7f0000000000-7f0000100000 rw-p 00000000 00:00 0
7f0000200000-7f0000600000 rw-p 00000000 00:00 0
7f0000700000-7f0000900000 ---p 00000000 00:00 0
7ffe00000000-7ffe00021000 rw-p 00000000 00:00 0 [stack]
"""


def test_whole_huge_pages_that_are_writable_and_in_no_file() -> None:
    assert list(_own_ranges(MAPS)) == [(0x01200000, 0x01E00000), (0x7F0000200000, 0x7F0000600000)]
    assert all(address % HUGE_PAGE_BYTES == 0 for each in _own_ranges(MAPS) for address in each)
