"""Addresses of other clusters' link listeners, as operators and peers write them."""

from __future__ import annotations

import ipaddress
import re
from typing import Final

_HOST: Final = re.compile(r"(?=.{1,253}$)[A-Za-z0-9_-]{1,63}(\.[A-Za-z0-9_-]{1,63})*\.?")


def remote_address(text: str) -> tuple[str, int] | None:
    """Host and port of ``host:port`` or ``[v6]:port``; None where it is neither."""
    host, _, port = text.rpartition(":")
    if not (port.isascii() and port.isdigit()) or not 1 <= int(port[:6]) <= 65535:
        return None
    if not host.startswith("["):
        return (host, int(port)) if _HOST.fullmatch(host) else None
    try:
        return str(ipaddress.IPv6Address(host[1:-1] if host.endswith("]") else "")), int(port)
    except ValueError:
        return None
