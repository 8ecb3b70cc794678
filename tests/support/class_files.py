"""Java class files, as far as one method that returns a time is changed in them (JVM specification, chapter 4)."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Final

_SIZES: Final = {
    3: 4,
    4: 4,
    5: 8,
    6: 8,
    7: 2,
    8: 2,
    9: 4,
    10: 4,
    11: 4,
    12: 4,
    15: 3,
    16: 2,
    17: 4,
    18: 4,
    19: 2,
    20: 2,
}
"""Of constants, by their tag; 1 (Utf8) says its own."""
_UTF8: Final = 1
_LONG: Final = 5
_INVOKESTATIC: Final = 0xB8
_LRETURN: Final = 0xAD
_LDC2_W: Final = 0x14
_LADD: Final = 0x61


class ClassFile:
    """A class in whose methods something is looked for."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        (self._constants,) = struct.unpack_from(">H", data, 8)
        self._names: dict[int, str] = {}
        position, index = 10, 1
        while index < self._constants:
            tag = data[position]
            if tag == _UTF8:
                (size,) = struct.unpack_from(">H", data, position + 1)
                self._names[index] = data[position + 3 : position + 3 + size].decode()
                position += 3 + size
            else:
                position += 1 + _SIZES[tag]
            index += 2 if tag in (5, 6) else 1
        self._constants_end = position

    def _members(self) -> Iterator[tuple[str, int, int]]:
        """(name, where its attributes begin, how many) of the fields, then of the methods."""
        data = self._data
        (interfaces,) = struct.unpack_from(">H", data, self._constants_end + 6)
        position = self._constants_end + 8 + 2 * interfaces
        for _ in ("fields", "methods"):
            (members,) = struct.unpack_from(">H", data, position)
            position += 2
            for _ in range(members):
                _, name, _, attributes = struct.unpack_from(">4H", data, position)
                position += 8
                yield self._names[name], position, attributes
                for _ in range(attributes):
                    position += 6 + struct.unpack_from(">I", data, position + 2)[0]

    def later(self, method: str, by: int) -> bytes:
        """The class with a method that returns what a static one does, and so much more. Raises ValueError."""
        data = self._data
        for name, position, attributes in self._members():
            for _ in range(attributes if name == method else 0):
                attribute, size = struct.unpack_from(">HI", data, position)
                code = data[position + 14 : position + 14 + struct.unpack_from(">I", data, position + 10)[0]]
                if self._names[attribute] == "Code" and (code[0], code[3:]) == (_INVOKESTATIC, bytes([_LRETURN])):
                    more = code[:3] + struct.pack(">BHB", _LDC2_W, self._constants, _LADD) + code[3:]
                    body = struct.pack(">H", 4) + data[position + 8 : position + 10]  # two longs, and the locals
                    body += struct.pack(">I", len(more)) + more + bytes(4)  # no handlers, nothing for debuggers
                    return b"".join(
                        (
                            data[:8],
                            struct.pack(">H", self._constants + 2),
                            data[10 : self._constants_end],
                            struct.pack(">Bq", _LONG, by),
                            data[self._constants_end : position],
                            struct.pack(">HI", attribute, len(body)) + body,
                            data[position + 6 + size :],
                        )
                    )
                position += 6 + size
        raise ValueError(f"no method {method} that returns what a static one does")
