"""Makes the parts of replication and joins them: the one place that knows all of them.

The plugin and the simulations call the same :func:`assemble`; they differ in who brings connections (``peers_of``).
What a part needs of one that is made later is joined at the end, and is an error before (``link.part``): nothing passes
because somebody forgot to join it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from isthmus_control.control_state import ControlState
from isthmus_plugins.process import PluginContext
from isthmus_plugins.replication.acls import AclEnds
from isthmus_plugins.replication.client_views.cleanup_policies import CleanupPolicies
from isthmus_plugins.replication.client_views.client_moves import ClientMoves
from isthmus_plugins.replication.client_views.leader_epochs import LeaderEpochs
from isthmus_plugins.replication.client_views.moved_members import MovedMembers
from isthmus_plugins.replication.client_views.moved_producers import MovedProducers
from isthmus_plugins.replication.client_views.stale_reads import StaleReads
from isthmus_plugins.replication.client_views.syncing_topics import SyncingTopics
from isthmus_plugins.replication.client_views.time_offsets import TimeOffsets
from isthmus_plugins.replication.client_views.topic_id_aliases import TopicIdAliases
from isthmus_plugins.replication.client_views.truncating_topics import TruncatingTopics
from isthmus_plugins.replication.comparison.digests import Verification
from isthmus_plugins.replication.follower.follower_end import FollowerEnd
from isthmus_plugins.replication.follower.own_transactions import OwnTransactions
from isthmus_plugins.replication.follower.replicas import FollowerReplicas
from isthmus_plugins.replication.follower.source_deletions import SourceDeletions
from isthmus_plugins.replication.follower.topics import FollowerTopics
from isthmus_plugins.replication.follower.transaction_verification import TransactionVerification
from isthmus_plugins.replication.groups.follower import GroupFollower
from isthmus_plugins.replication.groups.leader import GroupLeader
from isthmus_plugins.replication.in_doubt.store import TransactionStore
from isthmus_plugins.replication.in_doubt.sweep import TransactionSweep
from isthmus_plugins.replication.leader.deleted_topics import DeletedTopics
from isthmus_plugins.replication.leader.history_upkeep import HistoryUpkeep
from isthmus_plugins.replication.leader.leader_end import LeaderEnd
from isthmus_plugins.replication.link import calls
from isthmus_plugins.replication.link.call_codec import Question, by_methods
from isthmus_plugins.replication.link.connection import LinkConnection, Receiver
from isthmus_plugins.replication.link.control_anchors import ControlAnchors
from isthmus_plugins.replication.link.part import Part, check_joined
from isthmus_plugins.replication.link.peers import LinkPeers
from isthmus_plugins.replication.link.shared_settings import SharedSettings
from isthmus_plugins.replication.operations.service import LinkService
from isthmus_plugins.replication.operations.verify import LinkVerification
from isthmus_plugins.replication.proof.background import BackgroundVerification
from isthmus_plugins.replication.status.groups import GroupStatuses
from isthmus_plugins.replication.status.left_out import LeftOutNames
from isthmus_plugins.replication.status.observing import LinkObserving
from isthmus_plugins.replication.status.source_losses import ToldSourceLosses
from isthmus_plugins.replication.sync.confirmer import SyncConfirmer
from isthmus_plugins.replication.sync.leases import SyncLeases
from isthmus_plugins.replication.traffic import Traffic
from isthmus_plugins.replication.transactions.decisions import Decisions
from isthmus_plugins.replication.truncation.common_log import CommonLog
from isthmus_plugins.replication.truncation.missed_deletions import MissedDeletions
from isthmus_plugins.replication.truncation.runs import Truncations
from isthmus_plugins.replication.truncation.steps import TruncationSteps


@dataclass(frozen=True)
class Parts:
    """All parts of one proxy's replication, joined."""

    context: PluginContext
    store: TransactionStore
    sweep: TransactionSweep
    traffic: Traffic
    follower_end: FollowerEnd
    group_follower: GroupFollower
    peers: LinkPeers
    control_anchors: ControlAnchors
    replicas: FollowerReplicas
    own_transactions: OwnTransactions
    follower_topics: FollowerTopics
    source_deletions: SourceDeletions
    deleted_topics: DeletedTopics
    history_upkeep: HistoryUpkeep
    digests: Verification
    link_verification: LinkVerification
    common_log: CommonLog
    transaction_verification: TransactionVerification
    leader_end: LeaderEnd
    shared_settings: SharedSettings
    group_leader: GroupLeader
    sync: SyncConfirmer
    sync_leases: SyncLeases
    decisions: Decisions
    topic_id_aliases: TopicIdAliases
    truncating_topics: TruncatingTopics
    syncing_topics: SyncingTopics
    stale_reads: StaleReads
    leader_epochs: LeaderEpochs
    cleanup_policies: CleanupPolicies
    time_offsets: TimeOffsets
    moved_producers: MovedProducers
    client_moves: ClientMoves
    moved_members: MovedMembers
    truncations: Truncations
    missed_deletions: MissedDeletions
    background_verification: BackgroundVerification
    acls: AclEnds
    group_statuses: GroupStatuses
    told_losses: ToldSourceLosses
    left_out: LeftOutNames
    service: LinkService
    observing: LinkObserving

    @property
    def all(self) -> list[Part]:
        """In the order in which they start. Those that call over links end before the connections do, and those that
        take what comes over them after."""
        return [part for part in vars(self).values() if isinstance(part, Part)]

    def start(self) -> None:
        """Begin; whatever the control state says from now on counts."""
        self.context.control.subscribe(self.control_changed)
        self.control_changed(self.context.control.state)
        for part in self.all:
            part.start()

    async def stop(self) -> None:
        for part in reversed(self.all):
            await part.stop()

    def control_changed(self, state: ControlState) -> None:
        for part in self.all:
            part.control_changed(state)

    def wake(self) -> None:
        """Connections are others."""
        for part in self.all:
            part.wake()


def assemble(context: PluginContext, peers_of: Callable[[PluginContext], LinkPeers] = LinkPeers) -> Parts:
    """Make all parts and join them. Raises NotJoined for what is not."""
    peers = peers_of(context)
    digests = Verification(context)
    link_verification = LinkVerification(context, digests)
    replicas = FollowerReplicas(context)
    own_transactions = OwnTransactions(context)
    follower_topics = FollowerTopics(context, replicas, own_transactions)
    source_deletions = SourceDeletions(context, peers, follower_topics)
    deleted_topics = DeletedTopics(context)
    traffic = Traffic()
    follower_end = FollowerEnd(context, traffic)
    store = TransactionStore(context, follower_end.decided)
    group_follower = GroupFollower(context, store, own_transactions)
    transaction_verification = TransactionVerification(context)
    common_log = CommonLog(context, digests)
    leader_end = LeaderEnd(context, peers, digests, traffic)
    shared_settings = SharedSettings(context, peers.connections)
    group_leader = GroupLeader(context, peers)
    sync = SyncConfirmer(context, leader_end, group_leader, shared_settings.agreed)
    decisions = Decisions(context, leader_end, group_leader, peers, sync.links, sync.partitions, sync.requirements)
    syncing_topics = SyncingTopics(context)
    stale_reads = StaleReads(context)

    def reached(link_name: str, partitions: list[tuple[str, str, int]]) -> None:
        syncing_topics.reached(link_name, partitions)
        stale_reads.granted(partitions)

    sync_leases = SyncLeases(context, follower_end, group_follower, store, reached)
    stale_reads.has_all_since = sync_leases.has_all_since
    acls = AclEnds(context, peers)
    group_statuses = GroupStatuses(context, group_leader, group_follower, sync.partitions.sync_of)
    truncation_steps = TruncationSteps(
        context, peers, follower_end, digests, common_log, follower_topics, own_transactions
    )
    truncations = Truncations(context, peers, follower_end, follower_topics, truncation_steps)
    background_verification = BackgroundVerification(context, follower_end, digests)
    told_losses = ToldSourceLosses(context, peers)
    left_out = LeftOutNames(context, peers)
    client_moves = ClientMoves(context)
    service = LinkService(
        context,
        peers,
        leader_end,
        follower_end,
        follower_topics,
        replicas,
        source_deletions,
        link_verification,
        transaction_verification,
        group_leader,
        group_follower,
        group_statuses,
        acls,
        sync.partitions,
        sync_leases,
        store,
        shared_settings,
        told_losses,
        left_out,
        own_transactions,
        background_verification,
        client_moves.told,
    )
    parts = Parts(
        context=context,
        store=store,
        sweep=TransactionSweep(context, store, group_follower.confirmations.stable_offset),
        traffic=traffic,
        follower_end=follower_end,
        group_follower=group_follower,
        peers=peers,
        control_anchors=ControlAnchors(context, peers),
        replicas=replicas,
        own_transactions=own_transactions,
        follower_topics=follower_topics,
        source_deletions=source_deletions,
        deleted_topics=deleted_topics,
        history_upkeep=HistoryUpkeep(context, deleted_topics),
        digests=digests,
        link_verification=link_verification,
        common_log=common_log,
        transaction_verification=transaction_verification,
        leader_end=leader_end,
        shared_settings=shared_settings,
        group_leader=group_leader,
        sync=sync,
        sync_leases=sync_leases,
        decisions=decisions,
        topic_id_aliases=TopicIdAliases(),
        truncating_topics=TruncatingTopics(),
        syncing_topics=syncing_topics,
        stale_reads=stale_reads,
        leader_epochs=LeaderEpochs(),
        cleanup_policies=CleanupPolicies(),
        time_offsets=TimeOffsets(context, peers),
        moved_producers=MovedProducers(context),
        client_moves=client_moves,
        moved_members=MovedMembers(context),
        truncations=truncations,
        missed_deletions=MissedDeletions(context, peers, follower_end, common_log, truncations.begin),
        background_verification=background_verification,
        acls=acls,
        group_statuses=group_statuses,
        told_losses=told_losses,
        left_out=left_out,
        service=service,
        observing=LinkObserving(context.link_observers, service.statuses, context.clock, context.supervision),
    )
    follower_end.on_limits_raised = follower_topics.settings.raised
    follower_end.awaits = store.awaits
    follower_end.on_stored = group_follower.data_came
    leader_end.on_confirmed = sync.on_stream
    leader_end.on_gone = sync.on_gone
    leader_end.holds_from_first = sync.partitions.holds_from_first
    follower_topics.may_land = follower_end.may_land
    leader_end.may_pass = decisions.markers.may_pass
    group_leader.on_confirmed = sync.on_confirmed
    group_leader.may_pass = decisions.markers.may_pass_of_groups
    sync.drain = decisions.tail.drain
    sync.on_more = decisions.on_more
    answers = by_methods(each for part in parts.all for each in part.answers())
    peers.serve(answers, by_methods(service.create_answers()), _Receiver(parts), parts.wake)
    check_joined(parts.all)
    return parts


class _Receiver(Receiver):
    """Gives what a connection delivers to the parts that it is for."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._store = parts.store
        self.on_append = parts.follower_end.on_append  # type: ignore[method-assign]
        self.on_appended = parts.leader_end.on_appended  # type: ignore[method-assign]
        self.on_stopped = parts.leader_end.on_stopped  # type: ignore[method-assign]
        self.on_writable = parts.leader_end.on_writable  # type: ignore[method-assign]

    def on_call(self, connection: LinkConnection, question: Question[Any]) -> None:
        if isinstance(question, calls.Decide):
            self._store.announced(connection, question)

    def on_lost(self, connection: LinkConnection) -> None:
        for part in self._parts.all:
            part.connection_lost(connection)
