"""What the admin listener speaks for."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from prometheus_client import CollectorRegistry

from isthmus.admin.models import ProcessDescription
from isthmus_plugins.clock import monotonic

if TYPE_CHECKING:
    from isthmus.session.listener import Gateway
    from isthmus_control.commands import Body
    from isthmus_control.control_state import ControlState
    from isthmus_control.exports import Export
    from isthmus_control.leases import LeaseView
    from isthmus_control.outcome import Outcome
    from isthmus_control.replica import Unsigned
    from isthmus_plugins.cluster import ClusterApi
    from isthmus_plugins.link_operations import LinkOperations
    from isthmus_plugins.namespace_host import NamespaceHost
    from isthmus_plugins.tasks import Supervision
    from isthmus_plugins.trees import TreeOperations


class AuditPort(Protocol):
    """Where audit lines go beside the log."""

    def put(self, line: Mapping[str, Any], /) -> None:
        """Have a line kept."""

    async def read(self, limit: int, /) -> list[Mapping[str, Any]]:
        """The last lines, the oldest first. Raises PeerFault."""


class ControlLogPort(Protocol):
    """The part of the control log that operators' requests need."""

    @property
    def state(self) -> ControlState: ...

    @property
    def leases(self) -> LeaseView:
        """Who enforces what, judged on this proxy's monotonic clock."""

    @property
    def key_id(self) -> str:
        """The id of this proxy's control key; empty: it has none."""

    @property
    def unsigned(self) -> Unsigned:
        """The records that did not count since they were not written with the control key."""

    def append(self, body: Body, /) -> Awaitable[Outcome]:
        """Write the command and say what came of it; ``state`` has it then. Raises PeerFault."""

    def enforced(self, offset: int, /) -> Awaitable[object]:
        """Return when every proxy with an unexpired lease enforces the log up to ``offset``."""


@dataclass(slots=True)
class AdminServices:
    """The process, part by part. A part that is not up yet is None: what needs it answers 503.

    The process makes one of these at its start, serves it, and fills it in.
    """

    name: str
    """The proxy's name in leases, logs and ``status``."""
    describe: Callable[[], ProcessDescription]
    not_ready: Callable[[], list[str]]
    """Why clients should not be sent here yet, or any more. Empty: ready."""
    registry: CollectorRegistry
    supervision: Supervision
    version: str = "0"
    data_directory: Path | None = None
    sealing_key_id: str = ""
    """Of the key that secrets of links are sealed with; empty: there is none."""
    audit: AuditPort | None = None
    """None: the log alone has them."""
    control: ControlLogPort | None = None
    export: Callable[[], Export | None] | None = None
    """What the process remembers of the control log; None of a log that is empty."""
    cluster: ClusterApi | None = None
    gateway: Gateway | None = None
    links: LinkOperations | None = None
    """None, once the process is up: no plugin offers links."""
    trees: TreeOperations | None = None
    """None, once the process is up: no plugin offers trees."""
    plugins: NamespaceHost | None = None
    started: float = field(default_factory=monotonic)
    started_ms: int = field(default_factory=lambda: int(time.time() * 1000))
