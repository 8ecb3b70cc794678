"""What operators can have done with links: the interface of the plugin that makes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from isthmus_control.commands import AlterNamespace, DeleteNamespace
from isthmus_control.model import Reason
from isthmus_plugins.drill_report import DrillFailover, DrillReport
from isthmus_plugins.failover_report import Failover, FailoverReport
from isthmus_plugins.links import (
    AbandonReversal,
    Acknowledged,
    AlterLink,
    AlterMapping,
    Attach,
    AttachResult,
    ChangeGrants,
    CommittedOffsets,
    CreateLink,
    CreateToken,
    GrantsStatus,
    LinkStatus,
    ModeResult,
    NewToken,
    OffsetsView,
    Promote,
    PromoteReport,
    Recover,
    RecoverReport,
    Reverse,
    ReverseReport,
    SecretRotated,
    SetMode,
    TokenStatus,
    TopicDecision,
    TruncationStatus,
    VerifyReport,
)


class LinkOperations(Protocol):
    """What a replication plugin offers to operators. Every method raises :class:`OperationError`."""

    async def create(self, request: CreateLink) -> LinkStatus:
        """Set up both ends of a link."""

    async def create_token(self, request: CreateToken) -> NewToken:
        """Make a token, with which another cluster may make one link with this one."""

    def tokens(self) -> list[TokenStatus]:
        """Those that nobody has used yet."""

    async def delete_token(self, token_id: str) -> None:
        """Have a token be none any more."""

    def grants(self, link_name: str) -> GrantsStatus:
        """What the other cluster of a link may have done here."""

    async def grant(self, link_name: str, request: ChangeGrants) -> GrantsStatus:
        """Let it have more done."""

    async def revoke(self, link_name: str, request: ChangeGrants) -> GrantsStatus:
        """Let it have less done from now on; what is attached goes on."""

    async def alter(self, link_name: str, request: AlterLink) -> LinkStatus:
        """Change settings, and how this cluster's offsets topic is copied, at both ends."""

    async def rotate_secret(self, link_name: str) -> SecretRotated:
        """Give both sides a new secret while the link runs; go on with a rotation that was left unfinished."""

    async def set_mode(self, link_name: str, request: SetMode) -> ModeResult:
        """Let acks of this cluster's clients wait for the other one, once the link follows; or not any more."""

    async def offsets(self, link_name: str, group: str | None) -> OffsetsView:
        """What the copy of the other cluster's offsets topic says (``group``: of this one), as far as keys are here."""

    async def committed_offsets(self, link_name: str, group: str | None) -> CommittedOffsets:
        """What the link's groups (``group``: this one) have committed, at both clusters."""

    async def delete(self, link_name: str, local_only: bool = False) -> None:
        """Delete both ends (``local_only``: this one, where the peer cannot be reached). Namespaces stay reserved."""

    async def attach(self, link_name: str, request: Attach) -> AttachResult:
        """Attach a pair of namespaces at both ends."""

    async def alter_mapping(self, link_name: str, request: AlterMapping) -> LinkStatus:
        """Change what is set of a pair of namespaces, whichever end is asked."""

    async def detach(self, link_name: str, local_prefix: str, type_: str = "topic", local_only: bool = False) -> None:
        """Detach the mapping of the local namespace at both ends. It stays reserved."""

    def statuses(self) -> list[LinkStatus]:
        """Every link with its partitions."""

    def status(self, link_name: str) -> LinkStatus:
        """One link with its partitions."""

    async def recover(self, link_name: str, request: Recover) -> RecoverReport:
        """Have what one cluster led before the other one was failed over follow that, cut to where both part."""

    async def reverse(self, link_name: str, request: Reverse) -> ReverseReport:
        """Have the other cluster lead what this one leads, while clients' writes wait, and follow it."""

    async def abandon_reversal(self, link_name: str, request: AbandonReversal) -> LinkStatus:
        """Have this cluster lead on what is being reversed, or again."""

    async def promote(self, link_name: str, request: Promote, progress: Callable[[int, int], None]) -> PromoteReport:
        """Make drained follower namespaces writable; ``progress`` is called with (namespaces done, in all)."""

    async def fail_over(
        self, link_name: str, request: Failover, progress: Callable[[int, int], None]
    ) -> FailoverReport:
        """Make follower namespaces writable without their source."""

    async def drill_failover(
        self, link_name: str, request: DrillFailover, progress: Callable[[int, int], None]
    ) -> DrillReport:
        """Say what failing over now would lose; what follows stays as it is."""

    async def release(self, clearing: AlterNamespace | DeleteNamespace) -> None:
        """End what links left open in a namespace, before a command that clears its reservation.

        Where links did, its reservation is cleared with that. Nothing is done where the command would be refused.
        """

    async def forget_topic(self, topic: str, delete: bool = False, dry_run: bool = False) -> TopicDecision:
        """Stop following a topic whose source is gone; keep its records here, or ``delete`` them."""

    async def recreate_topic(self, topic: str, dry_run: bool = False) -> TopicDecision:
        """Lose a topic that cannot go on as it is, and follow its source's present one from the start."""

    async def give_up_topic(self, topic: str, dry_run: bool = False) -> TopicDecision:
        """End the truncation of a topic that lost its local copy and does not get it from the source: it is shorter."""

    async def truncate_topic(self, topic: str, dry_run: bool = False) -> TopicDecision:
        """Cut a topic to its source's log that is held because the source lost what it had acked In-Sync."""

    async def acknowledge(self, link_name: str) -> Acknowledged:
        """Tell no more what a source lost, as far as this proxy has told it."""

    def topic_overrides(self, topic: str) -> Mapping[str, str]:
        """The settings that a local topic has instead of its source's because it follows."""

    def topic_reason(self, topic: str) -> Reason | None:
        """Why a local topic does not have its source's settings or replicas, or, promoted, a follower's settings."""

    def truncations(self, link_name: str) -> list[TruncationStatus]:
        """The truncations of a link's follower topics, those under way first, then the last ones, newest first."""

    async def verify(self, link_name: str, progress: Callable[[int, int], None]) -> VerifyReport:
        """Compare both sides, record by record; ``progress`` is called with (offsets compared, offsets in all)."""
