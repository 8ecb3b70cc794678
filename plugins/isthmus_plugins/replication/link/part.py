"""What the assembly asks of each part of replication, and what stands where parts are not joined yet."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NoReturn

from prometheus_client.core import Metric

from isthmus_control.control_state import ControlState
from isthmus_plugins.api import RequestHook
from isthmus_plugins.replication.link.call_codec import Answering
from isthmus_plugins.replication.link.connection import LinkConnection


class Part:
    """One part of replication. By default it does nothing, answers no call of a peer and has nothing to show.

    Parts start, and are notified, in the order of the assembly. They stop in the reverse one.
    """

    def start(self) -> None:
        """Begin what goes on in the background."""

    async def stop(self) -> None:
        """End that."""

    def control_changed(self, state: ControlState) -> None:
        """The control state is another one; called once before :meth:`start`, too. Wakes whoever does not say more."""
        self.wake()

    def wake(self) -> None:
        """Links, connections or topics may be others."""

    def connection_lost(self, connection: LinkConnection) -> None:
        """Nothing more will come of a connection."""

    def hooks(self) -> Sequence[RequestHook]:
        """What of clients' requests the part wants to see."""
        return ()

    def answers(self) -> Sequence[Answering]:
        """What the part answers of peers' calls. Read once, at the end of the assembly."""
        return ()

    def metrics(self) -> Iterable[Metric]:
        """What the part shows beside the states of links."""
        return ()


class NotJoined(RuntimeError):
    """A part was to ask another one, and nobody has joined them: a bug of the assembly."""


def not_joined(*_: object) -> NoReturn:
    """Stands in place of another part's function until the assembly has joined the two."""
    raise NotJoined("two parts of replication are not joined: isthmus_plugins/replication/assembly.py does that")


def check_joined(parts: Iterable[object]) -> None:
    """Raise :class:`NotJoined` where a part still has :func:`not_joined`, naming it."""
    for part in parts:
        for name, value in vars(part).items():
            if value is not_joined:
                raise NotJoined(f"{type(part).__name__}.{name} is joined to nothing")
