"""Slows down who shows tokens that are none: each failure has the next one of its address wait longer."""

from __future__ import annotations

import ipaddress
from typing import Final

from isthmus_plugins.process import Clock

PAUSE_S: Final = 1.0
"""After the first failure; twice as long after each other one."""
PAUSE_S_MAX: Final = 60.0
FORGOTTEN_S: Final = 600.0
"""So long after its last failure an address has none."""
ADDRESSES_MAX: Final = 1_000
"""More at a time share one place: whoever fails from thousands of addresses is one to us."""
OTHERS: Final = ""


class TokenAttempts:
    """By address (of IPv6 its /64, which is one customer's), how often it failed, and when last."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._failures: dict[str, tuple[int, float]] = {}

    def pause_s(self, address: str) -> float:
        """How long nothing that comes from there is looked at; 0: it is."""
        failures, last = self._failures.get(self._place(address), (0, 0.0))
        if not failures:
            return 0.0
        pause = min(PAUSE_S_MAX, PAUSE_S * 2.0 ** min(failures - 1, 10))
        return max(0.0, last + pause - self._clock.monotonic())

    def failed(self, address: str) -> None:
        """A token was shown from there that is none."""
        now = self._clock.monotonic()
        if len(self._failures) >= ADDRESSES_MAX:
            self._failures = {name: found for name, found in self._failures.items() if now - found[1] < FORGOTTEN_S}
        place = self._place(address)
        failures, last = self._failures.get(place, (0, now))
        self._failures[place] = (failures + 1 if now - last < FORGOTTEN_S else 1), now

    def succeeded(self, address: str) -> None:
        """A right one was."""
        self._failures.pop(self._place(address), None)

    def _place(self, address: str) -> str:
        name = place_of(address)
        return name if name in self._failures or len(self._failures) < ADDRESSES_MAX else OTHERS


def place_of(address: str) -> str:
    """What of a peer's address is one place."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return address
    if isinstance(parsed, ipaddress.IPv6Address) and parsed.ipv4_mapped is None:
        return str(ipaddress.ip_network((parsed, 64), strict=False))
    return str(parsed)
