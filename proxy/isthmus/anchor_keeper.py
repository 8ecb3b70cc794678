"""Keeps anchors of the control log outside of it while a proxy runs, and looks at those that others keep.

    records applied ──> places (data directory, group of the cluster) <──> other proxies of the cluster
           │
           └─ told to linked clusters, which keep them, too, and tell them when a link connects

What an anchor says that is not in the log ends the vouching. Then this proxy still knows what was in it: it says so in
every place until the log has it again, or an operator has accepted it without.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Sequence
from typing import Final, NamedTuple, Protocol, TypeVar

from isthmus.anchor_places import AnchorPlace, PlaceUnavailable
from isthmus.control_start import Known
from isthmus.control_topic import TOPIC, ControlTopic
from isthmus.errors import ConfigurationError, PeerFault
from isthmus.kafka.client import ClusterClient
from isthmus_control.anchors import Anchor, RecentRecords, why_lost
from isthmus_control.control_state import ControlState
from isthmus_control.replica import Halted
from isthmus_plugins.clock import monotonic

log = logging.getLogger("isthmus.control_log")

T = TypeVar("T")

ROUND_S: Final = 5.0
"""So often places are looked at, and given what renewals alone added."""
ROUND_S_MIN: Final = 1.0
"""And no more often than that, whatever changes."""
RENEWALS_UNANCHORED: Final = 16
"""Records that change nothing of what anybody may count on."""
TOPIC_S: Final = 60.0
"""So often the topic's settings are looked at."""
PLACE_TIMEOUT_S: Final = 10.0
UNPROVEN: Final = "an unknown link"
"""In place of a place: who says what the log had and cannot prove it."""


class KeptLog(Protocol):
    """The log as this proxy applies it."""

    @property
    def state(self) -> ControlState: ...

    @property
    def recent(self) -> RecentRecords: ...

    @property
    def lost(self) -> bool:
        """Whether it halted because the log is lost."""

    async def applied(self, end: int) -> None:
        """Return when it has applied all below ``end``. Raises PeerFault."""

    def lose(self, halted: Halted) -> None:
        """Stop vouching."""

    def whole_again(self) -> None:
        """The log that was lost may be read again, by a new process."""


class _Told(NamedTuple):
    """What ``by``, a place or a linked cluster, says of this cluster's log."""

    anchor: Anchor
    by: str


class AnchorKeeper:
    """One proxy's anchors: of its own cluster's log, and of those of linked clusters."""

    def __init__(
        self, places: Sequence[AnchorPlace], client: ClusterClient, topic: ControlTopic, kept: KeptLog
    ) -> None:
        self._places = places
        self._client = client
        self._topic = topic
        self._log = kept
        self._wake = asyncio.Event()
        self._changed_at = -1
        self._kept: dict[tuple[str, str], Anchor] = {}
        """By place and cluster: what stands there."""
        self._heard: dict[str, Anchor] = {}
        self._proven: dict[str, tuple[Anchor, str]] = {}
        self._looked_at = monotonic()
        self._told: dict[str, _Told] = {}
        """What is to be compared, by who said it."""
        self._missing: _Told | None = None
        """What the log does not have, once that is known."""
        self.troubles: dict[str, str] = {}
        """By place: why it cannot be used now; of the topic itself, what makes it unfit."""

    # --- What is known

    @property
    def cluster_id(self) -> str:
        return self._client.cluster_id or ""

    def own(self) -> Anchor | None:
        """How far this proxy has applied its cluster's log."""
        return self._log.recent.anchor(self.cluster_id, str(self._topic.topic_id), self._log.state.generation)

    def proof(self, anchor: Anchor) -> str | None:
        """What proves to this cluster, when it has lost its log, that it told an anchor; None without control key."""
        signer = self._topic.signer
        return None if signer is None else signer.prove(anchor.encode())

    def heard_of(self, cluster_id: str) -> Anchor | None:
        """How far a linked cluster's log had been, as it said last."""
        return self._heard.get(cluster_id)

    def proven_of(self, cluster_id: str) -> tuple[Anchor, str] | None:
        """The same as it came with a proof, and that. Kept in memory alone: another one comes every few seconds."""
        return self._proven.get(cluster_id)

    async def known(self) -> Known:
        """What the places have of this cluster's log."""
        found: list[tuple[str, Anchor]] = []
        unavailable: list[PlaceUnavailable] = []
        for place in self._places:
            try:
                anchor = await self._ask(place, place.read(self.cluster_id))
            except PlaceUnavailable as error:
                unavailable.append(error)
                continue
            if anchor is not None:
                self._kept[place.name, self.cluster_id] = anchor
                found.append((place.name, anchor))
        return Known(tuple(found), tuple(unavailable))

    # --- What comes

    def wake(self) -> None:
        """Look at the places now."""
        self._wake.set()

    def changed(self, offset: int) -> None:
        """The record at ``offset`` is one that somebody counts on."""
        self._changed_at = offset
        self._wake.set()

    def hear(self, anchor: Anchor, proof: str | None = None) -> None:
        """A linked cluster says how far its log is."""
        before = self._heard.get(anchor.cluster_id)
        if before is None or anchor.age > before.age:
            self._heard[anchor.cluster_id] = anchor
        if proof is not None:
            self._proven[anchor.cluster_id] = anchor, proof

    def told(self, anchor: Anchor, by: str) -> None:
        """A linked cluster says how far this cluster's log had been."""
        self._take(_Told(anchor, by))

    def _take(self, told: _Told) -> None:
        if told.anchor.cluster_id == self.cluster_id and not self._log.lost and told.anchor != self.own():
            self._told[told.by] = told
            self._wake.set()

    def claimed(self, anchor: Anchor, proof: str | None, by: str) -> None:
        """The same of one whose link is not known here.

        A cluster without its log has no secret of a link left, but its control key: with it this cluster knows an
        anchor of its own again. Else anybody who reaches the link listener could invent one.
        """
        if self._log.state.links_created or self._log.state.generation or anchor.cluster_id != self.cluster_id:
            return
        signer = self._topic.signer
        if signer is not None and proof is not None and signer.proves(anchor.encode(), proof):
            self._take(_Told(anchor, by))
        elif not self._log.lost:
            self._trouble(
                UNPROVEN,
                "a proxy that connected says that it is linked with this cluster and that the control log had more, "
                "which it cannot prove: if that is so, isthmus control repair says what to do; else it is a stranger",
            )

    # --- Rounds

    async def keep(self) -> None:
        """Go on for ever."""
        while True:
            if self._log.lost:
                await self._insist()
            else:
                await self._round()
                await self._look_at_topic()
            await asyncio.sleep(ROUND_S_MIN)
            try:
                async with asyncio.timeout(ROUND_S):
                    await self._wake.wait()
            except TimeoutError:
                pass
            self._wake.clear()

    async def _round(self) -> None:
        told, self._told = self._told, {}
        for each in told.values():
            if await self._fits(each) is False:
                return
        for place in self._places:
            own = self.own()
            if own is not None and not await self._keep_in(place, own):
                return
            for cluster_id in {link.remote_cluster_id for link in self._log.state.links.values()}:
                await self._keep_heard(place, cluster_id)

    async def _look_at_topic(self) -> None:
        """Somebody may have given it another retention, or made it again, since it was found."""
        now = monotonic()
        if now - self._looked_at < TOPIC_S:
            return
        self._looked_at = now
        try:
            await ControlTopic(self._client, self._topic.signer).find()
        except ConfigurationError as error:
            self._trouble(TOPIC, str(error))
        except PeerFault:
            pass  # whoever reads it says so
        else:
            self._trouble(TOPIC, "")

    async def _keep_in(self, place: AnchorPlace, own: Anchor) -> bool:
        """False: what stands there is not in the log."""
        try:
            there = await self._ask(place, place.read(self.cluster_id))
            if there is not None and there != self._kept.get((place.name, self.cluster_id)):
                fits = await self._fits(_Told(there, place.name))
                if not fits:
                    return fits is None  # it stays there until it is compared
                self._kept[place.name, self.cluster_id] = there
            # Another proxy of the cluster may be ahead.
            if there is None or (own.age > there.age and self._says_more(own, there)):
                await self._write(place, own)
        except PlaceUnavailable:
            pass
        return True

    def _says_more(self, own: Anchor, there: Anchor) -> bool:
        return (
            own.generation > there.generation
            or self._changed_at > there.offset
            or own.offset - there.offset >= RENEWALS_UNANCHORED
        )

    async def _keep_heard(self, place: AnchorPlace, cluster_id: str) -> None:
        """Keep what a linked cluster said, where that is more than what is kept."""
        try:
            there = self._kept.get((place.name, cluster_id))
            heard = self._heard.get(cluster_id)
            if there is None or (heard is not None and heard.age > there.age):
                there = await self._ask(place, place.read(cluster_id))
            if there is not None:
                self._kept[place.name, cluster_id] = there
                self.hear(there)
            if heard is not None and (
                there is None
                or heard.generation > there.generation
                or (heard.generation == there.generation and heard.offset - there.offset >= RENEWALS_UNANCHORED)
            ):
                await self._write(place, heard)
        except PlaceUnavailable:
            pass

    async def _fits(self, told: _Told) -> bool | None:
        """Whether the log has what an anchor says; else nothing is vouched for any more. None: not known now."""
        anchor, state, recent = told.anchor, self._log.state, self._log.recent
        if anchor.generation < state.generation:
            return True
        mine = anchor.generation == state.generation and anchor.topic_id == str(self._topic.topic_id)
        if mine and recent.digest_at(anchor.offset) == anchor.digest:
            return True  # it says nothing that was not read here, too
        try:
            await self._log.applied(await self._topic.end())
            facts = await self._topic.facts(anchor, self._log.state.generation, recent)
            lost = why_lost(anchor, facts, told.by)
        except Halted as halted:
            lost = halted
        except PeerFault as error:
            log.warning("control anchor not compared", extra={"place": told.by, "error": str(error)})
            self._told.setdefault(told.by, told)
            return None
        if lost is None:
            return True
        self._missing = told
        self._log.lose(lost)
        return False

    # --- When the log is lost

    async def _insist(self) -> None:
        """Tell the others what the log had, until it has it again, or an operator has accepted it without."""
        own = self.own()
        wanted = [_Told(own, "this proxy")] if own is not None else []
        wanted += [self._missing] if self._missing is not None else []
        missing = wanted
        try:
            missing, forked = await self._look_for(wanted)
            if not missing and forked is None:
                self._log.whole_again()
                return
        except (Halted, PeerFault) as error:
            log.warning("control log is lost still", extra={"topic": TOPIC, "error": str(error)})
        for told in missing[-1:]:
            await self.insist(told.anchor)

    async def _look_for(self, wanted: list[_Told]) -> tuple[list[_Told], Halted | None]:
        """What the log does not have of what it is to have; why it is another one than its writers had applied."""
        topic = ControlTopic(self._client, self._topic.signer)
        if not await topic.find():
            return wanted, None
        read = await topic.load()
        missing = []
        for told in wanted:
            facts = await topic.facts(told.anchor, read.replica.state.generation, read.recent)
            if why_lost(told.anchor, facts, told.by) is not None:
                missing.append(told)
        return missing, read.forked

    async def insist(self, anchor: Anchor) -> None:
        """Say in every place what the log does not have: others may vouch for it still, who do not know that."""
        for place in self._places:
            try:
                there = await self._ask(place, place.read(self.cluster_id))
                if there is None or (there.generation <= anchor.generation and there != anchor):
                    await self._write(place, anchor)
            except PlaceUnavailable:
                pass

    # --- Places

    async def _write(self, place: AnchorPlace, anchor: Anchor) -> None:
        await self._ask(place, place.write(anchor))
        self._kept[place.name, anchor.cluster_id] = anchor

    async def _ask(self, place: AnchorPlace, request: Awaitable[T]) -> T:
        """What a place answers; its trouble is logged when it begins, and when it is over. Raises PlaceUnavailable."""
        try:
            try:
                async with asyncio.timeout(PLACE_TIMEOUT_S):
                    answer = await request
            except TimeoutError:
                raise PlaceUnavailable(f"{place.name} does not answer") from None
        except PlaceUnavailable as error:
            self._trouble(place.name, f"anchors of the control log are not kept: {error}")
            raise
        self._trouble(place.name, "")
        return answer

    def _trouble(self, where: str, what: str) -> None:
        if what and self.troubles.get(where) != what:
            self.troubles[where] = what
            log.warning("control log not safe", extra={"place": where, "error": what})
        elif not what and self.troubles.pop(where, None) is not None:
            log.info("control log safe again", extra={"place": where})
