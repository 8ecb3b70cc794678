"""What operators can do with links, and what they are shown: :class:`~isthmus_plugins.links.LinkOperations`.

Both ends of a link have a control log of their own. An operation is decided first where it can be refused for reasons
that only that side knows (the follower's topics, the other cluster's names), then recorded here; if the second step
fails, the first is undone, and what cannot be undone is visible as a state with its reason.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

from isthmus_control.commands import AlterLink, AlterNamespace, DeleteNamespace
from isthmus_control.control_state import ControlState
from isthmus_control.model import Link, NamespaceKey, NamespaceMapping, Reason, ResourceType, Role
from isthmus_control.origins import Ended
from isthmus_control.states import ReasonCode
from isthmus_plugins import links
from isthmus_plugins.cluster import BrokerUnavailable, KafkaRefused
from isthmus_plugins.drill_report import DrillFailover, DrillReport
from isthmus_plugins.failover_report import Failover, FailoverReport
from isthmus_plugins.links import AttachResult, LinkStatus, OperationError, TopicDecision
from isthmus_plugins.process import PluginContext
from isthmus_plugins.replication.acls import AclEnds
from isthmus_plugins.replication.follower.follower_end import FollowerEnd
from isthmus_plugins.replication.follower.own_transactions import OwnTransactions
from isthmus_plugins.replication.follower.replicas import FollowerReplicas
from isthmus_plugins.replication.follower.source_deletions import SourceDeletions
from isthmus_plugins.replication.follower.topics import FollowerTopics
from isthmus_plugins.replication.follower.transaction_verification import TransactionVerification
from isthmus_plugins.replication.groups.follower import GroupFollower
from isthmus_plugins.replication.groups.leader import GroupLeader
from isthmus_plugins.replication.in_doubt.resolution import Resolution
from isthmus_plugins.replication.in_doubt.store import TransactionStore
from isthmus_plugins.replication.leader.leader_end import LeaderEnd
from isthmus_plugins.replication.link import calls
from isthmus_plugins.replication.link.call_codec import Answering
from isthmus_plugins.replication.link.connection import LinkConnection, LinkLost, LinkRejected
from isthmus_plugins.replication.link.part import Part
from isthmus_plugins.replication.link.peers import LinkPeers
from isthmus_plugins.replication.link.shared_settings import SharedSettings
from isthmus_plugins.replication.offsets_topic.keyring import KeyringFile
from isthmus_plugins.replication.operations.acknowledging import Acknowledging
from isthmus_plugins.replication.operations.asked_reversals import AskedReversals
from isthmus_plugins.replication.operations.attaching import Attaching
from isthmus_plugins.replication.operations.commands import LinkCommands
from isthmus_plugins.replication.operations.consents import Consents
from isthmus_plugins.replication.operations.creation import LinkCreation
from isthmus_plugins.replication.operations.drills import Drills
from isthmus_plugins.replication.operations.failover import Failovers
from isthmus_plugins.replication.operations.handing_over import HandingOver
from isthmus_plugins.replication.operations.kept_settings import KeptSettings
from isthmus_plugins.replication.operations.mode import LinkModes
from isthmus_plugins.replication.operations.moving_clients import MovingClients
from isthmus_plugins.replication.operations.offsets_topics import OffsetsTopics, wanted_copy
from isthmus_plugins.replication.operations.promotion import Promotions
from isthmus_plugins.replication.operations.recovering import Recovering
from isthmus_plugins.replication.operations.rings import Rings
from isthmus_plugins.replication.operations.secret_rotation import SecretRotations
from isthmus_plugins.replication.operations.taking_over import TakingOver
from isthmus_plugins.replication.operations.topic_decisions import TopicDecisions
from isthmus_plugins.replication.operations.unconfirmed import Unconfirmed
from isthmus_plugins.replication.operations.verify import LinkVerification
from isthmus_plugins.replication.proof.background import BackgroundVerification
from isthmus_plugins.replication.status.groups import GroupStatuses
from isthmus_plugins.replication.status.left_out import LeftOutNames
from isthmus_plugins.replication.status.links import LinkStatuses
from isthmus_plugins.replication.status.source_losses import ToldSourceLosses
from isthmus_plugins.replication.status.truncations import truncation_statuses
from isthmus_plugins.replication.sync.in_sync import SyncPartitions
from isthmus_plugins.replication.sync.leases import SyncLeases

log = logging.getLogger("isthmus_plugins.replication")


class LinkService(Part):
    """Carries out operators' requests, and the other side's half of them."""

    def __init__(
        self,
        context: PluginContext,
        peers: LinkPeers,
        leader_end: LeaderEnd,
        follower_end: FollowerEnd,
        follower_topics: FollowerTopics,
        replicas: FollowerReplicas,
        source_deletions: SourceDeletions,
        verification: LinkVerification,
        transaction_verification: TransactionVerification,
        group_leader: GroupLeader,
        group_follower: GroupFollower,
        group_statuses: GroupStatuses,
        acls: AclEnds,
        sync_partitions: SyncPartitions,
        sync_leases: SyncLeases,
        store: TransactionStore,
        shared_settings: SharedSettings,
        told_losses: ToldSourceLosses,
        left_out: LeftOutNames,
        own_transactions: OwnTransactions,
        background_verification: BackgroundVerification,
        told_to_move: Callable[[NamespaceKey], int],
    ) -> None:
        """``told_to_move``: how often this proxy has told clients of a namespace to look for another cluster."""
        self._context = context
        self._follower_topics = follower_topics
        self._replicas = replicas
        self._verification = verification
        self._commands = commands = LinkCommands(context, peers)
        self.consents = Consents(context, commands, peers, self.attach)
        self._rings = Rings(context, peers)
        self.attaching = Attaching(
            context,
            commands,
            leader_end,
            follower_end,
            follower_topics,
            transaction_verification,
            group_follower,
            left_out,
            self.consents,
            own_transactions,
            self._rings,
            sync_partitions.new,
        )
        self._recovering = Recovering(context, commands, self.attaching)
        self.offsets_topics = OffsetsTopics(
            context,
            follower_end,
            follower_topics,
            KeyringFile(context.offsets_keyring_file),
            commands.call,
            commands.append,
            commands.would_append,
        )
        self.creation = LinkCreation(context, commands, peers, self.offsets_topics, self.attaching.detach_here)
        self._left_out = left_out
        self._kept_settings = KeptSettings(context)
        self._decisions = TopicDecisions(context, follower_topics, commands.call, commands.append)
        ends = Resolution(context, store)
        self._promotions = Promotions(
            context,
            commands.call,
            commands.append,
            lambda link, mapping, ended: self.attaching.detach_here(link, mapping, ended is Ended.REVERSED, ended),
            commands.enforced,
            self._compare_groups,
            ends,
            self.attaching.stopped_to_follow,
            self._promoted,
            left_out,
            replicas,
            self.consents.ask,
        )
        self._handing_over = HandingOver(
            context, commands, self.attaching, self._promotions, own_transactions, group_follower.open_commits
        )
        self._asked_reversals = AskedReversals(commands, self.consents, self._handing_over)
        self._taking_over = TakingOver(context, commands, self._promotions)
        self._moving_clients = MovingClients(context, commands, told_to_move)
        self._statuses = LinkStatuses(
            context,
            peers,
            leader_end,
            follower_end,
            follower_topics,
            replicas,
            source_deletions,
            transaction_verification,
            group_statuses,
            acls,
            sync_partitions,
            sync_leases,
            shared_settings,
            told_losses,
            left_out,
            background_verification,
            lambda: self._promotions.trouble,
            self._kept_settings.of,
            self.consents.waiting,
            self._handing_over.statuses,
            self._moving_clients.statuses,
            self._rings.found,
            lambda link_name: self._drills.status(link_name),
        )
        self._acknowledging = Acknowledging(context, commands, told_losses)
        self._rotations = SecretRotations(context, commands, peers)
        self._modes = LinkModes(
            self._statuses.of,
            leader_end.stream,
            peers.connections,
            commands.append,
            commands.would_append,
            shared_settings,
            context.clock,
        )
        self._failovers = Failovers(context, self._promotions, sync_leases, peers.state, left_out)
        self._unconfirmed = Unconfirmed(context, peers, group_leader, lambda link: self._statuses.of(link).partitions)
        self._drills = Drills(context, self._unconfirmed, self._statuses.of, self._failovers, store, ends)

    def start(self) -> None:
        self._promotions.start()
        self._handing_over.start()
        self._moving_clients.start()
        self._rings.start()
        self._drills.start()
        self._kept_settings.start()
        self.consents.start()

    async def stop(self) -> None:
        await self.consents.stop()
        await self._rings.stop()
        await self._drills.stop()
        await self._moving_clients.stop()
        await self._handing_over.stop()
        await self._promotions.stop()
        await self._kept_settings.stop()
        await self._rotations.stop()

    def control_changed(self, state: ControlState) -> None:
        self._moving_clients.control_changed(state)
        self._handing_over.control_changed(state)
        self.wake()

    def wake(self) -> None:
        self._rotations.look()

    def answers(self) -> Sequence[Answering]:
        return (
            calls.PlanAttach.by(self.attaching.on_plan_attach),
            calls.AskAttach.by(self.consents.on_ask),
            calls.Attach.by(self.attaching.on_attach),
            calls.AlterMapping.by(self.attaching.on_alter_mapping),
            calls.Detach.by(self.attaching.on_detach),
            calls.DetachCounterpart.by(self.attaching.on_detach_counterpart),
            calls.LedTopics.by(self.attaching.on_led_topics),
            calls.AttachedPairs.by(self._recovering.on_attached_pairs),
            calls.LogOrigins.by(self.attaching.on_log_origins),
            calls.LogTails.by(self.attaching.on_log_tails),
            calls.CheckAcls.by(self.attaching.on_check_acls),
            calls.CompletingTransactions.by(self.on_completing_transactions),
            calls.LogEnds.by(self.on_log_ends),
            calls.AskReverse.by(self._asked_reversals.on_ask),
            calls.Drain.by(self._taking_over.on_drain),
            calls.TakeLead.by(self._taking_over.on_take_lead),
            calls.AbandonReversal.by(self._taking_over.on_abandon),
            calls.HandedOver.by(self._handing_over.on_handed_over),
            calls.MoveClients.by(self._moving_clients.on_move_clients),
            calls.ComesFrom.by(self._rings.on_comes_from),
            calls.Unconfirmed.by(self._unconfirmed.on_asked),
            calls.TopicSettings.by(self.on_topic_settings),
            calls.ChooseOffsetsTopic.by(self.on_choose_offsets_topic),
            calls.DeleteLink.by(self.creation.on_delete_link),
            calls.AcknowledgeSourceLosses.by(self._acknowledging.on_acknowledge),
            *self._rotations.answers(),
        )

    def create_answers(self) -> Sequence[Answering]:
        """The same for a connection that was made to create a link."""
        return (
            calls.CreateLink.by(self.on_create_link),
            calls.UndoCreateLink.by(self.creation.on_undo_create_link),
        )

    # ---- links ----

    async def create(self, request: links.CreateLink) -> LinkStatus:
        """Set up both ends of a link."""
        await self.creation.create(request)
        return self.status(request.link_name)

    async def delete(self, link_name: str, local_only: bool = False) -> None:
        """Delete both ends."""
        await self.creation.delete(link_name, local_only)

    async def create_token(self, request: links.CreateToken) -> links.NewToken:
        """Make a token, with which another cluster may make one link with this one."""
        return await self.consents.create_token(request)

    def tokens(self) -> list[links.TokenStatus]:
        """Those that nobody has used yet."""
        return self.consents.tokens()

    async def delete_token(self, token_id: str) -> None:
        """Have a token be none any more."""
        await self.consents.delete_token(token_id)

    def grants(self, link_name: str) -> links.GrantsStatus:
        """What the other cluster of a link may have done here."""
        return self.consents.grants(link_name)

    async def grant(self, link_name: str, request: links.ChangeGrants) -> links.GrantsStatus:
        """Let it have more done."""
        return await self.consents.change(link_name, given=request.may, taken=[])

    async def revoke(self, link_name: str, request: links.ChangeGrants) -> links.GrantsStatus:
        """Let it have less done from now on; what is attached goes on."""
        return await self.consents.change(link_name, given=[], taken=request.may)

    async def alter(self, link_name: str, request: links.AlterLink) -> LinkStatus:
        """Change settings, and how this cluster's offsets topic is copied, at both ends."""
        self._commands.link(link_name)
        if request.config:
            await self._commands.append(AlterLink(link_name, config=request.config))
        if request.offsets_topic is not None:
            await self.offsets_topics.choose(link_name, wanted_copy(request.offsets_topic, request.offsets_groups))
        return self.status(link_name)

    async def rotate_secret(self, link_name: str) -> links.SecretRotated:
        """Give both sides of a link a new secret, while it runs."""
        return await self._rotations.rotate(link_name)

    async def set_mode(self, link_name: str, request: links.SetMode) -> links.ModeResult:
        """Let acks of this cluster's clients wait for the other one, once the link follows; or not any more."""
        return await self._modes.set(self._commands.link(link_name), request)

    async def offsets(self, link_name: str, group: str | None) -> links.OffsetsView:
        """What the copy of the other cluster's offsets topic says, as far as keys are here."""
        return await self.offsets_topics.view(self._commands.link(link_name), group)

    async def committed_offsets(self, link_name: str, group: str | None) -> links.CommittedOffsets:
        """What the link's groups have committed, at both clusters."""
        link = self._commands.link(link_name)
        try:
            found = await self._verification.groups.committed(link, self._commands.connection(link_name), group)
        except (LinkRejected, LinkLost, TimeoutError, BrokerUnavailable, KafkaRefused) as error:
            raise OperationError("UNAVAILABLE", f"committed offsets not read: {error}", 503) from error
        if group is not None and not found.groups:
            message = f"no group {group!r} is known in a consumer group namespace that is attached to {link_name!r}"
            raise OperationError("NOT_FOUND", message, 404)
        return found

    async def on_create_link(self, connection: LinkConnection, question: calls.CreateLink) -> calls.CreateLinkAnswer:
        return await self._commands.for_peer(self.creation.on_create_link(connection, question))

    async def on_choose_offsets_topic(
        self, connection: LinkConnection, question: calls.ChooseOffsetsTopic
    ) -> calls.Done:
        return await self._commands.for_peer(self.offsets_topics.on_choose(connection, question))

    async def attach(self, link_name: str, request: links.Attach) -> AttachResult:
        """Attach a pair of namespaces at both ends; the follower decides first."""
        return await self.attaching.attach(link_name, request)

    async def recover(self, link_name: str, request: links.Recover) -> links.RecoverReport:
        """Have what one cluster led before the other one was failed over follow that."""
        return await self._recovering.recover(link_name, request)

    async def alter_mapping(self, link_name: str, request: links.AlterMapping) -> LinkStatus:
        """Change what is set of a pair of namespaces, whichever end is asked."""
        await self.attaching.alter_mapping(link_name, request)
        return self.status(link_name)

    async def detach(self, link_name: str, local_prefix: str, type_: str = "topic", local_only: bool = False) -> None:
        """Detach the mapping at both ends: the leader first, so that the follower has all that was sent."""
        await self.attaching.detach(link_name, local_prefix, type_, local_only)

    # ---- status ----

    def statuses(self) -> list[LinkStatus]:
        """Every link with its partitions, but those of drills, which lead nowhere."""
        links_ = sorted(self._context.control.state.links.items())
        return [self._statuses.of(link) for _, link in links_ if link.drill is None]

    def status(self, link_name: str) -> LinkStatus:
        """One link with its partitions."""
        return self._statuses.of(self._commands.link(link_name))

    def truncations(self, link_name: str) -> list[links.TruncationStatus]:
        """The truncations of a link's topics."""
        self._commands.link(link_name)
        return truncation_statuses(self._context.control.state, link_name)

    async def acknowledge(self, link_name: str) -> links.Acknowledged:
        """Tell no more what a source lost, as far as this proxy has told it."""
        return await self._acknowledging.acknowledge(self._commands.link(link_name))

    # ---- promotion ----

    async def _promoted(self) -> None:
        """A promotion has ended: offsets could be committed until then."""
        await self._commands.enforced()
        try:
            await self._kept_settings.look()
        except (BrokerUnavailable, KafkaRefused) as error:  # it is looked again by itself
            log.warning("settings of promoted topics not read", extra={"detail": str(error)})
        await self.attaching.verification_as_agreed("promoted")

    async def _compare_groups(self, link: Link) -> list[links.GroupVerdict]:
        try:
            return await self._verification.groups.verify(link, self._commands.connection(link.name))
        except (LinkRejected, LinkLost, TimeoutError) as error:
            raise OperationError("UNAVAILABLE", f"groups not compared: {error}", 503) from error

    async def promote(
        self, link_name: str, request: links.Promote, progress: Callable[[int, int], None]
    ) -> links.PromoteReport:
        """Make drained follower namespaces writable."""
        link = self._commands.link(link_name)
        self._moving_clients.check(link_name, request.move_clients_seconds)
        move_ms = round(request.move_clients_seconds * 1000)
        return await self._promotions.promote(link, request.namespaces, request.dry_run, progress, move_ms)

    async def reverse(self, link_name: str, request: links.Reverse) -> links.ReverseReport:
        """Have the other cluster lead what this one leads, and follow it; or, asked at the follower, this one."""
        return await self._asked_reversals.reverse(link_name, request)

    async def abandon_reversal(self, link_name: str, request: links.AbandonReversal) -> LinkStatus:
        """Have this cluster lead on, or again."""
        await self._handing_over.abandon(link_name, request)
        return self.status(link_name)

    async def fail_over(
        self, link_name: str, request: Failover, progress: Callable[[int, int], None]
    ) -> FailoverReport:
        """Make follower namespaces writable without their source."""
        self._moving_clients.check(link_name, request.move_clients_seconds, without_source=True)
        return await self._failovers.fail_over(self._commands.link(link_name), request, progress)

    async def drill_failover(
        self, link_name: str, request: DrillFailover, progress: Callable[[int, int], None]
    ) -> DrillReport:
        """Say what a failover now would lose, and how long it takes on a copy."""
        return await self._drills.fail_over(self._commands.link(link_name), request, progress)

    async def release(self, clearing: AlterNamespace | DeleteNamespace) -> None:
        """End what links left open in a namespace, before a command that clears its reservation."""
        await self._commands.caught_up()  # another proxy may have detached it just now
        try:
            self._commands.would_append(clearing)
        except OperationError:
            return  # in the control log's words, to whoever appends it
        await self._failovers.release(NamespaceKey(clearing.type, clearing.prefix))

    async def on_topic_settings(
        self, connection: LinkConnection, question: calls.TopicSettings
    ) -> calls.TopicSettingsAnswer:
        """What topics of a led namespace have for the settings that a follower overrides."""
        self.consents.check_led(connection.link_name, question.prefix)
        led = await self._commands.for_peer(self.attaching.led_topics(question.prefix))
        try:
            return calls.TopicSettingsAnswer(await self._promotions.settings_of([each.topic for each in led]))
        except (BrokerUnavailable, KafkaRefused) as error:
            raise LinkRejected("READ_FAILED", str(error)) from error

    async def on_completing_transactions(
        self, connection: LinkConnection, question: calls.CompletingTransactions
    ) -> calls.CompletingTransactionsAnswer:
        """Transactions of this cluster that were decided, and whose markers may still be missing."""
        try:
            return calls.CompletingTransactionsAnswer(tuple(await self._context.cluster.completing_transactions()))
        except (BrokerUnavailable, KafkaRefused) as error:
            raise LinkRejected("READ_FAILED", str(error)) from error

    async def on_log_ends(self, connection: LinkConnection, question: calls.LogEnds) -> calls.LogEndsAnswer:
        """Where the logs of a namespace end that was led and is detached, for the follower's end that is promoted.

        The high watermark may lag behind; what is beyond it may be shown later, so the log ends count.
        """
        prefix = question.prefix
        self.consents.check_led(connection.link_name, prefix)
        mapping = NamespaceMapping(ResourceType.TOPIC, prefix, prefix, Role.LEADER, 0, 0)
        for name, truncation in self._context.control.state.truncations.items():
            if mapping.remote_name(name) is not None:  # its log is not whole
                raise LinkRejected(ReasonCode.SOURCE_TRUNCATING, truncation.describe())
        try:
            topics = (await self._context.cluster.topics()).values()
            led = [topic for topic in topics if not topic.internal and mapping.remote_name(topic.name) is not None]
            return calls.LogEndsAnswer(await self._promotions.ends_of(led))
        except (BrokerUnavailable, KafkaRefused) as error:
            raise LinkRejected("READ_FAILED", str(error)) from error

    # ---- topics ----

    async def forget_topic(self, topic: str, delete: bool = False, dry_run: bool = False) -> TopicDecision:
        """Stop following a topic whose source is gone; keep its records here, or ``delete`` them."""
        return await self._decisions.forget(topic, delete, dry_run)

    async def recreate_topic(self, topic: str, dry_run: bool = False) -> TopicDecision:
        """Lose a topic that cannot go on as it is, and follow its source's present one from the start."""
        return await self._decisions.recreate(topic, dry_run)

    async def truncate_topic(self, topic: str, dry_run: bool = False) -> TopicDecision:
        """Cut a topic that is held because its source lost records."""
        return await self._decisions.truncate(topic, dry_run)

    async def give_up_topic(self, topic: str, dry_run: bool = False) -> TopicDecision:
        """End the truncation of a topic that lost its local copy, and whose source does not refill it."""
        return await self._decisions.give_up(topic, dry_run)

    def topic_overrides(self, topic: str) -> Mapping[str, str]:
        """The settings that a local topic has instead of its source's because it follows."""
        return self._follower_topics.settings.overrides(topic)

    def topic_reason(self, topic: str) -> Reason | None:
        """Why a local topic does not go on with its source's, or does not have its settings or replicas, or still has a
        follower's settings."""
        refused = self._follower_topics.refused.get(topic)
        settings = self._follower_topics.settings.reason(topic) or self._kept_settings.reason(topic)
        return refused or settings or self._replicas.reason(topic)

    # ---- verify ----

    async def verify(self, link_name: str, progress: Callable[[int, int], None]) -> links.VerifyReport:
        """Compare both sides."""
        link = self._commands.link(link_name)
        try:
            report = await self._verification.verify(link, self._commands.connection(link_name), progress)
        except (LinkRejected, LinkLost, TimeoutError, BrokerUnavailable, KafkaRefused) as error:
            raise OperationError("UNAVAILABLE", f"not verified: {error}", 503) from error
        report.left_out = self._left_out.of(link_name)
        return report
