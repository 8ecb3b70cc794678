"""The mode of a link: who may make it synchronous, and when (``docs/adr/0006``)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final

from isthmus_control.commands import AlterLink, Body
from isthmus_control.control_state import ControlState
from isthmus_control.model import SYNC_CONFIRM_TIMEOUT, Link, LinkMode, ResourceType, Role
from isthmus_control.states import WAITING, LinkState, PartitionState, ReasonCode
from isthmus_plugins.links import LinkStatus, ModeResult, OperationError, SetMode
from isthmus_plugins.process import Clock
from isthmus_plugins.replication.leader.stream import LeaderStream
from isthmus_plugins.replication.link import calls, features
from isthmus_plugins.replication.link.connection import LinkConnection, LinkLost, LinkRejected
from isthmus_plugins.replication.link.shared_settings import SharedSettings
from isthmus_plugins.replication.partitions import LinkPartition

NOT_FOLLOWING: Final = "NOT_FOLLOWING"


class LinkModes:
    """``append`` records a command, ``would_append`` tries one: the state after it. Both raise OperationError."""

    def __init__(
        self,
        status: Callable[[Link], LinkStatus],
        stream: Callable[[LinkPartition], LeaderStream | None],
        connections: Callable[[str], list[LinkConnection]],
        append: Callable[[Body], Awaitable[None]],
        would_append: Callable[[Body], ControlState],
        shared_settings: SharedSettings,
        clock: Clock,
    ) -> None:
        self._clock = clock
        self._status = status
        self._stream = stream
        self._connections = connections
        self._shared_settings = shared_settings
        self._append = append
        self._would_append = would_append

    async def set(self, link: Link, request: SetMode) -> ModeResult:
        """Set the mode. Raises OperationError where the link is not fit for it."""
        mode, timeout_ms = LinkMode(request.mode), request.confirm_timeout_ms
        config = None if timeout_ms is None else {SYNC_CONFIRM_TIMEOUT: str(timeout_ms)}
        command = AlterLink(link.name, mode=mode, config=config)
        after = self._would_append(command)
        if mode is LinkMode.SYNCHRONOUS and link.mode is not mode:
            self._check_follows(link)
            await self._check_peers(link)
            await self._check_shared_settings(link, after)
        if not request.dry_run:
            await self._append(command)
        return ModeResult(
            link_name=link.name,
            former_mode=link.mode.value,
            mode=mode.value,
            sync_confirm_timeout_ms=link.sync_confirm_timeout_ms if timeout_ms is None else timeout_ms,
            dry_run=request.dry_run,
        )

    def _check_follows(self, link: Link) -> None:
        if not any(each.type is ResourceType.TOPIC and each.role is Role.LEADER for each in link.mappings):
            raise OperationError(
                "CONFLICT",
                f"this cluster leads no topics over link {link.name!r}: set the mode at the cluster that does, "
                "with a topic namespace attached",
            )
        status = self._status(link)
        if status.state != LinkState.FOLLOWING and not self._is_close(link, status):
            lags = [each.partition_mirror_lag for each in status.partitions if each.partition_mirror_lag is not None]
            why = f" ({status.message or status.reason})" if status.reason else ""
            raise OperationError(
                NOT_FOLLOWING,
                f"link {link.name!r} is {status.state}{why}, {sum(lags)} offsets behind: wait until it is "
                f"{LinkState.FOLLOWING} (`isthmus link describe {link.name}`), then set the mode again",
            )
        waiting = [each for each in status.partitions if each.state in WAITING]
        if waiting:
            first = waiting[0]
            raise OperationError(
                NOT_FOLLOWING,
                f"{len(waiting)} partitions of link {link.name!r} do not follow, the first is {first.topic}-"
                f"{first.partition}, {first.state}: {first.message or first.reason}. Mend that first",
            )

    def _is_close(self, link: Link, status: LinkStatus) -> bool:
        """Whether the link would follow, but for records that have just come: under load there are always some."""
        if status.state != LinkState.CATCHING_UP:
            return False
        leading = [each for each in link.mappings if each.type is ResourceType.TOPIC and each.role is Role.LEADER]
        now = self._clock.monotonic()
        for each in status.partitions:
            if each.role != "leader" or each.state != PartitionState.CATCHING_UP:
                continue
            if not any(mapping.holds(each.topic) for mapping in leading):
                continue  # the copy of an offsets topic: it is not synchronous
            stream = self._stream(LinkPartition(link.name, each.topic, each.partition))
            if stream is None or not stream.is_close(now):
                return False
        return True

    async def _check_peers(self, link: Link) -> None:
        """Every proxy of the other cluster is connected, and takes leases: it must know what it may claim."""
        connections = self._connections(link.name)
        if not connections:
            raise OperationError("UNAVAILABLE", f"link {link.name!r} was disconnected just now", 503)
        old = sorted(
            str(each.peer.get("proxy"))
            for each in connections
            if not each.peer_features.issuperset(features.SYNC_FEATURES)
        )
        if old:
            raise OperationError(
                ReasonCode.PEER_VERSION_UNSUPPORTED,
                f"the other cluster's proxy {', '.join(old)} does not know synchronous links: upgrade it",
            )
        try:
            answer = await connections[0].call(calls.Topology())
        except (LinkRejected, LinkLost, TimeoutError) as error:
            raise OperationError("UNAVAILABLE", f"the other cluster did not answer: {error}", 503) from error
        missing = {each.proxy for each in answer.proxies}
        missing -= {str(each.peer.get("proxy")) for each in connections}
        if missing:
            raise OperationError(
                NOT_FOLLOWING,
                f"link {link.name!r} has no connection to the other cluster's proxy {', '.join(sorted(missing))}: "
                "nobody knows whether it takes part. Start it, or wait until its lease is over",
            )

    async def _check_shared_settings(self, link: Link, after: ControlState) -> None:
        """The other cluster would take the mode: it takes hold when both control logs have it."""
        try:
            await self._shared_settings.check(link, after.links[link.name].settings)
        except LinkRejected as error:
            raise OperationError(error.code, error.message) from error
        except (LinkLost, TimeoutError) as error:
            raise OperationError("UNAVAILABLE", f"the other cluster did not answer: {error}", 503) from error
