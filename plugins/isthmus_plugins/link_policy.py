"""What a process's configuration allows of links (``[link]``), whoever asks over the admin listener or a link."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from typing import Final

_HOST: Final = re.compile(r"(?=.{1,253}$)[A-Za-z0-9_-]{1,63}(\.[A-Za-z0-9_-]{1,63})*\.?")


@dataclass(frozen=True, slots=True)
class LinkPolicy:
    """``remotes_allowed``: ``host:port``, or ``host`` with any port, to which links may be created from here.

    ``allow_local_links``: who comes from a loopback address may create a link here without a token, and each side
    grants the other all there is. ``require_encryption``: no connection of a link goes on in the clear.
    """

    remotes_allowed: tuple[str, ...] = ()
    allow_local_links: bool = False
    require_encryption: bool = False

    def may_reach(self, host: str, port: int) -> bool:
        """Whether a link may be created to this address."""
        return any(
            (name, number) in ((_same(host), port), (_same(host), None))
            for name, number in map(_allowed, self.remotes_allowed)
        )


def remote_address(text: str) -> tuple[str, int] | None:
    """Host and port of ``host:port`` or ``[v6]:port``; None where it is neither."""
    host, _, port = text.rpartition(":")
    if not (port.isascii() and port.isdigit()) or not 1 <= int(port[:6]) <= 65535:
        return None
    found = _host(host)
    return None if found is None else (found, int(port))


def is_allowance(text: str) -> bool:
    """Whether a text may stand in ``remotes_allowed``."""
    return remote_address(text) is not None or _host(text) is not None


def is_loopback(address: str) -> bool:
    """Whether a peer's address is of this machine."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def _allowed(text: str) -> tuple[str, int | None]:
    found = remote_address(text)
    return (_same(_host(text) or text), None) if found is None else (_same(found[0]), found[1])


def _same(host: str) -> str:
    """One form of a name's many."""
    return host.rstrip(".").lower()


def _host(text: str) -> str | None:
    if not text.startswith("["):
        return text if _HOST.fullmatch(text) else None
    try:
        return str(ipaddress.IPv6Address(text[1:-1] if text.endswith("]") else ""))
    except ValueError:
        return None
