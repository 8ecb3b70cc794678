"""What the capture plugin observes of connections and links, as notes for the process that makes events of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from typing import Final

from isthmus_plugins.api import Client, Close, TapNote
from isthmus_plugins.capture.notes import Kind, pack_link, told
from isthmus_plugins.observers import LinkAppended, LinkConfirmed, LinkTold

APPENDED: Final = "appended"
CONFIRMED: Final = "confirmed"
STATE: Final = "state"
_UNKNOWN: Final = -1


class ObservedConnections:
    """Open connections: also those that were there before anything is captured."""

    def __init__(self) -> None:
        self._notes: dict[int, list[TapNote]] = {}
        """By session, its note of opening and who authenticated."""
        self.told: Callable[[TapNote], object] | None = None
        """Takes a note while something is captured."""

    def __iter__(self) -> Iterator[TapNote]:
        """The notes of all open connections."""
        return chain.from_iterable(self._notes.values())

    def opened(self, client: Client) -> Close | None:
        said = f"{client.address}\0{client.listener}".encode()
        note = told(Kind.OPENED, client.session_id, said, number=client.broker_id)
        self._notes[client.session_id] = [note]
        self._note(note)
        return None

    def authenticated(self, client: Client) -> None:
        note = told(Kind.PRINCIPAL, client.session_id, (client.principal or "").encode())
        self._notes.setdefault(client.session_id, []).append(note)
        self._note(note)

    def closed(self, client: Client) -> None:
        self._notes.pop(client.session_id, None)
        self._note(told(Kind.CLOSED, client.session_id))

    def _note(self, note: TapNote) -> None:
        if self.told is not None:
            self.told(note)


class ObservedLinks:
    """What this proxy's ends of links do."""

    def __init__(self) -> None:
        self.told: Callable[[TapNote], object] | None = None
        """Takes a note while something is captured."""

    @property
    def observes_links(self) -> bool:
        return self.told is not None

    def link_appended(self, event: LinkAppended) -> None:
        self._note(
            (APPENDED, event.link, "follower", event.remote_cluster_id, event.topic, None, None),
            (
                event.partition,
                event.base_offset,
                event.end_offset,
                _UNKNOWN,
                _UNKNOWN,
                event.batches,
                event.size_bytes,
                int(event.took_s * 1e6),
                _UNKNOWN,
                _UNKNOWN,
            ),
        )

    def link_confirmed(self, event: LinkConfirmed) -> None:
        took_us = _UNKNOWN if event.took_s is None else int(event.took_s * 1e6)
        offsets = (event.base_offset, event.end_offset, _UNKNOWN, _UNKNOWN)
        self._note(
            (CONFIRMED, event.link, "leader", event.remote_cluster_id, event.topic, None, None),
            (event.partition, *offsets, _UNKNOWN, _UNKNOWN, took_us, _UNKNOWN, _UNKNOWN),
        )

    def link_told(self, event: LinkTold) -> None:
        ends = (_known(event.source_end), _known(event.follower_end))
        lag_ms = _UNKNOWN if event.lag_s is None else int(event.lag_s * 1000)
        self._note(
            (STATE, event.link, event.role, event.remote_cluster_id, event.topic, event.state, event.reason),
            (event.partition, _UNKNOWN, _UNKNOWN, *ends, _UNKNOWN, _UNKNOWN, _UNKNOWN, _known(event.lag), lag_ms),
        )

    def _note(self, texts: tuple[str | None, ...], numbers: tuple[int, ...]) -> None:
        if self.told is not None:
            self.told(told(Kind.LINK, 0, pack_link(texts, numbers)))


def _known(number: int | None) -> int:
    return _UNKNOWN if number is None else number
