"""Where sources' offsets topics have lost the end that was confirmed, until that is dealt with. Without I/O.

What a source has from before such an offset is older than what this cluster's coordinators have: nobody puts it there
as if it were a later commit.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Final, NamedTuple, TypeAlias

from isthmus_control.model import ResourceType
from isthmus_control.source_losses import SourceLoss
from isthmus_control.states import ReasonCode
from isthmus_plugins.process import PluginContext
from isthmus_plugins.replication.groups.followed_group import FollowedGroup, Pending
from isthmus_plugins.replication.link import calls

SourcePartition: TypeAlias = tuple[str, int]
"""Link, and partition of its source's offsets topic."""
LOST_THERE: Final = (
    "the source lost the commit that it had acked In-Sync: what is here stays until the group commits again, or an "
    "operator decides (`isthmus link alter` with --on-source-loss cut puts it back)"
)


class Confirmed(NamedTuple):
    """Up to where a partition was confirmed, in which leader epoch of the source."""

    epoch: int
    upto: int


NOTHING: Final = Confirmed(-1, -1)


class OpenLosses:
    """What was confirmed, what leader ends have said is lost of it, and what the control log has of that."""

    def __init__(self, context: PluginContext) -> None:
        self._context = context
        self._confirmed: dict[SourcePartition, tuple[str, Confirmed]] = {}
        """With the id of the link."""
        self.said: dict[SourcePartition, calls.LostEnd] = {}
        """What is not recorded yet."""
        self.trouble: str | None = None
        """What keeps it from being dealt with."""
        self._recorded: Mapping[SourcePartition, Sequence[SourceLoss]] = {}
        self._seen: object = None

    def confirmed(self, key: SourcePartition, epoch: int, upto: int) -> None:
        """The coordinators have this, and the leader end is told; not before what was lost of before is recorded."""
        link = self._context.control.state.links.get(key[0])
        if link is not None and upto >= 0:
            self._confirmed[key] = link.link_id, Confirmed(epoch, upto)

    def forget_others(self, links: Collection[str]) -> None:
        """There are these links, and no others."""
        self._confirmed = {key: known for key, known in self._confirmed.items() if key[0] in links}

    def furthest(self, key: SourcePartition) -> Confirmed:
        """The furthest that is known to have been confirmed, by this process or one before it."""
        state = self._context.control.state
        link = state.links.get(key[0])
        if link is None:
            return NOTHING
        link_id, mine = self._confirmed.get(key, ("", NOTHING))
        claim = state.group_claim(key[0], link.link_id, key[1])
        recorded = NOTHING if claim is None else Confirmed(claim.epoch, claim.upto)
        return max(mine if link_id == link.link_id else NOTHING, recorded)

    def told(self, key: SourcePartition, lost: calls.LostEnd | None) -> None:
        """A leader end pushes a partition whole, and says what it lost of it; None: nothing."""
        if lost is None:
            self.said.pop(key, None)
        else:
            self.said[key] = lost

    def recorded(self) -> Mapping[SourcePartition, Sequence[SourceLoss]]:
        """What the control log has that is not over."""
        losses = self._context.control.state.source_losses
        if losses is not self._seen:
            self._seen, found = losses, dict[SourcePartition, list[SourceLoss]]()
            for loss in losses:
                if loss.is_open and loss.type is ResourceType.CONSUMER_GROUP:
                    found.setdefault((loss.link, loss.partition), []).append(loss)
            self._recorded = found
        return self._recorded

    def before(self, group: FollowedGroup) -> int | None:
        """Before which offset of the source's offsets topic a commit of a group is older than what was lost."""
        said = self.said.get(group.source)
        if said is not None:
            return said.from_offset
        losses = self.recorded().get(group.source, ())
        return next((loss.from_offset for loss in losses if loss.holds(group.group)), None)

    @property
    def why(self) -> Pending:
        """Why what is here stays as it is."""
        message = LOST_THERE if self.trouble is None else f"{LOST_THERE}; {self.trouble}"
        return Pending(ReasonCode.SOURCE_LOST_COMMITS, message)
