"""What operators ask of links, and what they are answered: the admin listener's interface to a replication plugin.

Field names are those that users of neighbouring systems know (``link_name``, ``partition_mirror_lag`` ...); the states
are the specification's. All models go over REST as they are, so they are also the schema of ``isthmus status -o json``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from isthmus_control.bounds import (
    MOVE_CLIENTS_MS_MAX,
    REVERSAL_HOLD_MS,
    REVERSAL_HOLD_MS_MAX,
    REVERSAL_TRANSACTIONS_WAIT_MS,
    REVERSAL_TRANSACTIONS_WAIT_MS_MAX,
    SYNC_CONFIRM_TIMEOUT_MS,
    SYNC_CONFIRM_TIMEOUT_MS_MAX,
    SYNC_CONFIRM_TIMEOUT_MS_MIN,
)
from isthmus_control.commands import AttachNamespace
from isthmus_control.model import AttachRequest, NamespaceMapping, OnSourceDelete, OnSourceLoss, ResourceType, Role


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)


class OperationError(Exception):
    """An operator's request cannot be carried out. ``code`` is a constant, ``message`` says what to do.

    ``http_status`` follows REST: 404 not found, 409 conflicts with what there is, 422 not valid, 503 not now.
    """

    def __init__(self, code: str, message: str, http_status: int = 409) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.http_status = http_status


Grants = Annotated[
    list[Annotated[str, Field(max_length=400)]], Field(max_length=1000, examples=[["follow:orders-", "lead:orders-"]])
]
"""``follow:PREFIX``, ``lead:PREFIX``, ``replace:PREFIX`` of topics, ``follow:TYPE:PREFIX`` and ``lead:TYPE:PREFIX`` of
consumer groups and principals, ``broker-settings``."""


MoveClientsSeconds = Annotated[
    float,
    Field(
        ge=0,
        le=MOVE_CLIENTS_MS_MAX / 1000,
        description="for how long clients that are at the cluster which led before are told to ask their bootstrap "
        "servers again; 0: they are not",
    ),
]


class CreateToken(_Model):
    """What who makes a link with the token may have done here, and until when a link can be made with it."""

    may: Grants = []
    expires_seconds: int = Field(default=3600, ge=1, le=30 * 86_400)


class TokenStatus(_Model):
    """A token that nobody has used yet."""

    token_id: str
    may: list[str]
    created_ms: int
    expires_ms: int


class NewToken(TokenStatus):
    token: str = Field(repr=False)
    """Secret, and shown this once."""


class ChangeGrants(_Model):
    may: Grants = Field(min_length=1, description="what the other cluster of the link may have done here")


class GrantsStatus(_Model):
    """What the other cluster of a link may have done here."""

    link_name: str
    enforced: bool
    """False: the control log's feature level is too low, and it may have done anything."""
    may: list[str]
    attached: list[str]
    """What came with pairs that this side attached, or had when grants began: until it detaches them."""
    waiting: list[WaitingMapping]


class WaitingMapping(_Model):
    """A pair of namespaces that is to be attached, and waits for an operator's grant."""

    type: str
    local: str
    remote: str
    role: str
    """Of the local namespace."""
    asked_by: Literal["this cluster", "the other cluster"]
    asked_ms: int
    missing: list[str]
    """What the asked cluster has not granted."""
    reason: str = "NOT_GRANTED"
    message: str


OffsetsTopicForm = Literal["off", "whole", "redacted", "encrypted"]


class CreateLink(_Model):
    link_name: str = Field(pattern=r"^[A-Za-z0-9._-]{1,100}$")
    remote: str = Field(description="host:port of a link listener of the other cluster")
    token: str | None = Field(
        default=None, repr=False, description="what `POST /v1/link-tokens` answered at the other cluster"
    )
    may: Grants = Field(default=[], description="what the other cluster may have done here")
    offsets_topic: OffsetsTopicForm = Field(default="off", description="how this cluster's offsets topic is copied")
    offsets_groups: list[str] = Field(
        default=[], description="of a redacted copy: names of groups, or prefixes with '*' behind them"
    )


class AlterLink(_Model):
    """What is not named stays as it is."""

    offsets_topic: OffsetsTopicForm | None = Field(
        default=None, description="how this cluster's offsets topic is copied from now on"
    )
    offsets_groups: list[str] = Field(
        default=[], description="of a redacted copy: names of groups, or prefixes with '*' behind them"
    )
    config: dict[str, str | None] = Field(default={}, description="settings of both ends by name; null removes one")

    @model_validator(mode="after")
    def _says_what(self) -> AlterLink:
        if self.offsets_topic is None and (self.offsets_groups or not self.config):
            raise ValueError("say what to change: offsets_topic, config")
        return self


Mode = Literal["asynchronous", "synchronous"]


class SetMode(_Model):
    mode: Mode = Field(description="when clients of this cluster are acked: before or after the other one has a record")
    confirm_timeout_ms: int | None = Field(
        default=None,
        ge=SYNC_CONFIRM_TIMEOUT_MS_MIN,
        le=SYNC_CONFIRM_TIMEOUT_MS_MAX,
        description="how long an ack may wait for the other cluster until the partition is Out-Of-Sync "
        "(sync.confirm.timeout.ms); unset: as it is",
    )
    dry_run: bool = Field(default=False, description="change nothing, say whether it would be refused")


class ModeResult(_Model):
    """What setting a link's mode did, or (``dry_run``) would do."""

    link_name: str
    former_mode: Mode
    mode: Mode
    sync_confirm_timeout_ms: int
    dry_run: bool


class SharedUntil(_Model):
    """Up to where a partition of the follower's topic is its source's, as an operator says."""

    topic: str = Field(description="at the follower")
    partition: int = Field(ge=0)
    offset: int = Field(ge=0)


class Attach(_Model):
    local: str = Field(description="prefix of the local namespace")
    remote: str = Field(description="prefix of the remote namespace")
    role: Literal["leader", "follower"] = Field(description="the role of the local namespace")
    type: Literal["topic", "consumer-group", "principal"] = "topic"
    truncate_target: bool = Field(
        default=False,
        description="topics of the follower namespace that hold other records now are emptied to follow",
    )
    on_source_loss: Literal["cut", "hold"] | None = Field(
        default=None,
        description="what becomes of what the source lost although it had acked it In-Sync: the follower is cut to the "
        "source's log, or nothing is until an operator decides; unset: as it is, at first hold where the source's "
        "namespace is strict, else cut",
    )
    on_source_delete: Literal["keep", "delete"] | None = Field(
        default=None,
        description="what becomes of a topic whose source's topic is deleted: it keeps its records until an operator "
        "decides, or it is deleted as well; unset: as it is, at first keep",
    )
    disable_transaction_verification: bool = Field(
        default=False,
        description="the follower's brokers go without transaction.partition.verification.enable while this is "
        "attached, so that transactions and group offsets can be copied",
    )
    cut: str | None = Field(
        default=None,
        description="topics of the follower namespace are cut to what they share with the source's, as a dry run said; "
        "its `cut`, which is another one as soon as a log has changed",
    )
    shared_until: list[SharedUntil] = Field(
        default=[],
        description="what is shared where nobody has recorded it, by the operator's own responsibility; records before "
        "these offsets are compared",
    )
    dry_run: bool = Field(default=False, description="change nothing, say what would happen and what would be lost")

    def command(self, link_name: str) -> AttachNamespace:
        """What is recorded at the asked cluster, but for the topics that are emptied or cut.

        What becomes of the follower is recorded at its end.
        """
        follows = self.role == "follower" and self.type != "principal"
        return AttachNamespace(
            link_name,
            ResourceType(self.type),
            self.local,
            self.remote,
            Role(self.role),
            create_missing=True,
            disable_transaction_verification=follows and self.disable_transaction_verification,
            on_source_loss=self.loss if follows else None,
            on_source_delete=self.deletion if follows else None,
        )

    def waiting(self) -> AttachRequest:
        """What is recorded at the asked cluster while the pair waits for the other one's grant."""
        return AttachRequest(
            ResourceType(self.type),
            self.local,
            self.remote,
            Role(self.role),
            asked_here=True,
            truncate_target=self.truncate_target,
            disable_transaction_verification=self.disable_transaction_verification,
            on_source_loss=self.loss,
            on_source_delete=self.deletion,
            cut=self.cut,
            shared_until=tuple((each.topic, each.partition, each.offset) for each in self.shared_until),
        )

    @classmethod
    def again(cls, request: AttachRequest) -> Self:
        """The operator's request that waited."""
        return cls(
            local=request.local_prefix,
            remote=request.remote_prefix,
            role=request.role.value,
            type=request.type.value,
            truncate_target=request.truncate_target,
            disable_transaction_verification=request.disable_transaction_verification,
            on_source_loss=None if request.on_source_loss is None else request.on_source_loss.value,
            on_source_delete=None if request.on_source_delete is None else request.on_source_delete.value,
            cut=request.cut,
            shared_until=[
                SharedUntil(topic=topic, partition=partition, offset=offset)
                for topic, partition, offset in request.shared_until
            ],
        )

    @property
    def loss(self) -> OnSourceLoss | None:
        return None if self.on_source_loss is None else OnSourceLoss(self.on_source_loss)

    @property
    def deletion(self) -> OnSourceDelete | None:
        return None if self.on_source_delete is None else OnSourceDelete(self.on_source_delete)


class Recover(_Model):
    """What one cluster of a link led before the other one was failed over, and is to follow from now on."""

    namespaces: list[NamespaceRef] = Field(
        default=[], description="of this cluster; none: all that either cluster led and the other one does not follow"
    )
    disable_transaction_verification: bool = Field(
        default=False, description="as of an attached pair: the follower's brokers go without it"
    )
    dry_run: bool = Field(default=False, description="change nothing, say what would happen and what would be lost")


class AlterMapping(_Model):
    """What is set of a pair of namespaces that is attached; what the operator agreed to stays as it is."""

    local: str = Field(description="prefix of the local namespace")
    type: Literal["topic", "consumer-group"] = "topic"
    on_source_loss: Literal["cut", "hold"] | None = Field(
        default=None,
        description="what becomes of what the source lost although it had acked it In-Sync; cut: of what is held, too",
    )
    on_source_delete: Literal["keep", "delete"] | None = Field(
        default=None,
        description="what becomes of a topic whose source's topic is deleted, or was and has been kept until now",
    )

    @model_validator(mode="after")
    def _something(self) -> Self:
        if self.on_source_loss is None and self.on_source_delete is None:
            raise ValueError("say what is to be set: on_source_loss, on_source_delete")
        return self


class PartitionPlan(_Model):
    """What one partition has in common with its source's, and what goes on either side if it follows the other one.

    Beyond ``shared`` the follower's log has ``end - shared`` offsets, the source's ``source_end - shared``; timestamps
    (Unix ms) are those of the first and the last batch there.
    """

    partition: int
    shared: int
    end: int
    source_end: int
    unknown: str | None = None
    """Why nobody knows whether they are the same beyond ``shared``."""
    first_ms: int | None = None
    last_ms: int | None = None
    source_first_ms: int | None = None
    source_last_ms: int | None = None


class TopicPlan(_Model):
    """What attaching would do with one topic of the follower namespace.

    ``cut``: it keeps what its log shares with the source's, and what comes behind goes to salvage files.
    """

    topic: str
    source_topic: str
    action: Literal["create", "follow", "cut", "truncate", "refuse"]
    topic_id: str | None = None
    """Of the topic that is there."""
    records_lost: int = 0
    reason: str | None = None
    settings_refused: str | None = None
    """In a dry run: which of its source's settings the brokers would refuse. It follows without them."""
    partitions: list[PartitionPlan] | None = None
    """Of a topic that holds what is not known to be the source's."""
    groups_moved: list[str] | None = None
    """Groups that have committed offsets beyond ``shared``, which are moved there when it is cut."""
    cut: str | None = None
    """What the operator agrees to who has it cut; None: it cannot be."""


class TransactionVerificationPlan(_Model):
    """What attaching would do with the follower's brokers' check of transactions (KIP-890)."""

    setting: str
    enabled: bool
    """Whether some broker verifies now."""
    action: Literal["none", "disable", "refuse"]
    """``refuse``: what is to be attached cannot be copied with it, and the consent to switch it off is missing."""
    message: str | None = None
    """What is lost, or what to do."""


class GroupPlan(_Model):
    """A group of the follower namespace that is there already."""

    group: str
    source_group: str
    positions_replaced: int
    """Committed offsets in topics of the link: they become what the source's group has, or go."""


class LeftOutName(_Model):
    """A topic or consumer group that a namespace's prefix covers, and that its link does not replicate."""

    type: Literal["topic", "consumer-group"]
    name: str
    """At the source."""
    reason: str


class AttachResult(_Model):
    link_name: str
    local: str
    remote: str
    role: str
    dry_run: bool
    topics: list[TopicPlan] = []
    transaction_verification: TransactionVerificationPlan | None = None
    groups: list[GroupPlan] = []
    left_out: list[LeftOutName] = []
    """By all that the link has attached then."""
    cut: str | None = None
    """What the operator agrees to who has the topics cut that hold what their sources have not."""
    missing_grants: list[str] = []
    """What the other cluster has not granted for that: then nothing else is known of what it would do, and, but for a
    dry run, the pair waits until it is."""


class RecoverReport(_Model):
    """Of each pair: what attaching it did, or (``dry_run``) would do. The follower's end is the old source's."""

    link_name: str
    dry_run: bool
    namespaces: list[AttachResult]


class MappingStatus(_Model):
    type: str
    local: str
    remote: str
    role: str
    disable_transaction_verification: bool = False
    """Of a follower: the consent stands."""
    on_source_loss: str | None = None
    """Of a follower: cut or hold. None: hold where the source's namespace is strict, else cut."""
    on_source_delete: str | None = None
    """Of a follower of topics: keep or delete. None: keep."""
    state: str
    """That of the worst partition, group or binding of the namespace; which of them are worse on their own is named."""
    reason: str | None = None
    message: str | None = None

    @classmethod
    def of(cls, mapping: NamespaceMapping, state: str, reason: str | None, message: str | None) -> MappingStatus:
        """What is attached, and the state of what it holds."""
        return cls(
            type=mapping.type.value,
            local=mapping.local_prefix,
            remote=mapping.remote_prefix,
            role=mapping.role.value,
            disable_transaction_verification=mapping.disable_transaction_verification,
            on_source_loss=None if mapping.on_source_loss is None else mapping.on_source_loss.value,
            on_source_delete=None if mapping.on_source_delete is None else mapping.on_source_delete.value,
            state=state,
            reason=reason,
            message=message,
        )


class TransactionVerificationStatus(_Model):
    """The check of transactions by this cluster's brokers, where it follows."""

    setting: str
    enabled: bool | None
    """Whether some broker verifies; None: not known yet."""
    disabled_by_link: bool
    """It is held off with the operator's consent, and restored at the last detach."""
    former: str | None
    """What will be restored: the cluster-wide dynamic value; None: there was none."""
    message: str | None = None
    """What protection is missing, or why the setting is not as agreed."""


class TopicDecision(_Model):
    """What an operator's decision about one follower topic does, or (``dry_run``) would do."""

    topic: str
    link_name: str
    source_topic: str
    source: Literal["deleted", "created again", "unchanged", "not reached"]
    """What became of the topic that was followed."""
    action: Literal["forget", "delete", "recreate", "give up", "truncate"]
    dry_run: bool
    records_lost: int
    """At most; offsets, where the log was compacted."""
    message: str
    """What comes of it."""


class NamespaceRef(_Model):
    """A local namespace."""

    type: Literal["topic", "consumer-group", "principal"] = "topic"
    local: str = Field(description="its prefix")


class Promote(_Model):
    """Namespaces of one link that are to be promoted together."""

    namespaces: list[NamespaceRef] = Field(min_length=1)
    move_clients_seconds: MoveClientsSeconds = 0
    dry_run: bool = Field(default=False, description="change nothing, say what is missing and what would be ended")


class PromotedNamespace(_Model):
    type: str
    local: str
    remote: str
    begun: bool = False
    """It was begun before, and goes on."""
    topics: list[str] = []
    missing: list[str] = []
    """What the follower does not have of the source."""
    logs_differ: list[str] = []
    """Partitions of which the follower is known to hold something else than the source, and nobody has acknowledged it:
    not promoted until somebody has, failed over all the same."""
    transactions_open: int = 0
    """Transactions without an end in the follower's logs, counted in each partition: they are ended."""
    transactions_decided: int = 0
    """Of these, those that the source had decided to commit: they are committed, the others are aborted."""
    transactions_ended: int = 0
    transactions_committed: int = 0
    """Of these."""
    left_out: list[LeftOutName] = []
    """What the link did not replicate of it, as the source said last."""
    settings_refused: list[str] = []
    """Of each topic the settings of the source that the brokers here refuse, or (a dry run) would refuse: it keeps a
    follower's, and is promoted all the same."""
    replicas_lacking: list[str] = []
    """Topics, the proxies' own among them, that have fewer replicas than they are to have: a broker that goes down may
    stop those who write them."""
    missing_grants: list[str] = []
    """What the other cluster has to grant before it can follow this namespace, to go back some day."""
    promoted: bool = False


class PromoteReport(_Model):
    link_name: str
    dry_run: bool
    drained: bool
    """Nothing is missing."""
    namespaces: list[PromotedNamespace]


class Reverse(_Model):
    """Namespaces that this cluster leads, and the other one is to lead, or (``here``) the other way round: all
    together."""

    namespaces: list[NamespaceRef] = Field(min_length=1, description="of this cluster: topics and consumer groups")
    here: bool = Field(
        default=False, description="this cluster follows, and is to lead: the other one is asked, and has to grant it"
    )
    transactions_wait_seconds: float = Field(
        default=REVERSAL_TRANSACTIONS_WAIT_MS / 1000,
        ge=0,
        le=REVERSAL_TRANSACTIONS_WAIT_MS_MAX / 1000,
        description="how long open transactions may take to end by themselves, before they are aborted",
    )
    hold_seconds: float = Field(
        default=REVERSAL_HOLD_MS / 1000,
        gt=0,
        le=REVERSAL_HOLD_MS_MAX / 1000,
        description="how long writes wait at most; then all is taken back",
    )
    disable_transaction_verification: bool = Field(
        default=False,
        description="as of an attached pair: the brokers of the cluster that led go without it, once that follows",
    )
    move_clients_seconds: MoveClientsSeconds = 0
    dry_run: bool = Field(default=False, description="change nothing, say what is missing and what is open")


class AbandonReversal(_Model):
    """What is being reversed over a link is led by this cluster on, or again."""

    although_unreachable: bool = Field(
        default=False,
        description="the other cluster cannot be asked, and it is known that it does not lead: else both would",
    )


class ReverseReport(_Model):
    link_name: str
    dry_run: bool
    namespaces: list[NamespaceRef]
    refused: list[str] = []
    """Why it cannot be reversed as it is."""
    missing: list[str] = []
    """What the other cluster did not have yet when it was looked at, while clients write."""
    transactions_open: list[str] = []
    """What was open then."""
    reversed: bool = False
    """Who followed leads, and who led follows."""
    led_here: bool = False
    """This cluster is the one that followed."""


class ReversalStatus(_Model):
    """A reversal that is under way."""

    reversal_id: str
    namespaces: list[NamespaceRef]
    step: str
    """announced, held, handed-over; drained at the other cluster, once it has all."""
    begun_ms: int
    waits_for: str


class ClientMoveStatus(_Model):
    """Clients of a topic namespace that are told to ask their bootstrap servers again: another cluster leads it now."""

    local: str
    remote: str
    clients_of: Literal["local", "remote"]
    """Which cluster's: remote until the other cluster tells its clients."""
    left_seconds: float
    """For how long still."""
    told: int | None = None
    """How often this proxy has told clients since it was started; None: it is not this cluster that tells."""
    waits_for: str | None = None


class DrillStatus(_Model):
    """A copy of what follows over a link, on which a failover is tried (`isthmus drill failover`)."""

    copy_name: str
    """Of the link that it follows over, which leads nowhere; its topics and groups are called so, with more behind."""
    begun_ms: int
    in_use: bool
    """False: it is left over, and is being deleted."""
    message: str | None = None
    """Why it is not deleted yet."""


class AnyOf(_Model):
    """An ack means that so many of these clusters have the record."""

    count: int
    links: dict[str, str]
    """By the link's name at the source: the id of its target cluster."""
    until_ms: int | None = None
    """At the target: that is true of whatever the source acked before this moment of the target's clock."""


class SyncStatus(_Model):
    """What an ack for a partition of a synchronous link means: as the source's control log has it, or, at the target,
    as far as it is known there."""

    state: Literal["Syncing", "In-Sync", "Out-Of-Sync", "Unknown"]
    """In-Sync: acks wait until both clusters have the record. Syncing: not yet. Out-Of-Sync: not any more. Unknown, at
    the target alone: nothing was heard of it for too long."""
    from_first: bool = False
    """In-Sync, and so new that no lease was granted to the target yet: acks waited from its first record on."""
    since_offset: int | None = None
    """From this offset on; both clusters have what is below it. None: Syncing, nothing is recorded, or not known."""
    since_ms: int | None = None
    until_ms: int | None = None
    """At the target: whatever the source acked before this moment of the target's clock is here. None: not known."""
    any_of: AnyOf | None = None
    """In place of all synchronous links, where the namespaces ask for some of several."""
    degraded_since_ms: int | None = None
    """Out-Of-Sync for so long that transactional and strict producers are acked without it, too, since then."""
    reason: str | None = None
    message: str | None = None
    """Why it is Out-Of-Sync, or Unknown."""


@dataclass(slots=True, kw_only=True)  # thousands are made at once
class PartitionStatus:
    """One partition of a link, as this proxy knows it."""

    __pydantic_config__ = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    topic: str
    """The local name."""
    remote_topic: str
    partition: int
    role: Literal["leader", "follower"]
    state: str
    reason: str | None = None
    """Constant that says why, where the state alone does not."""
    message: str | None = None
    source_end: int | None = None
    """The source's high watermark, exclusive."""
    follower_end: int | None = None
    """The follower's log end, exclusive."""
    partition_mirror_lag: int | None = None
    """Offsets that the follower lacks."""
    lag_seconds: float | None = None
    """Age of the oldest record that the follower lacks."""
    lag_unknown_seconds: float | None = None
    """Since when the lag is not known, at the follower: the link is cut, or the source's logs cannot be read. None: it
    is known, or was not yet."""
    equal_until: int | None = None
    """At the follower: all before it was equal when it was compared last, as both brokers hold it; None: it was not
    compared yet."""
    verified_seconds: float | None = None
    """Age of the last pass over both whole logs; None: there was none."""
    differs_at: int | None = None
    """Where both logs were found to differ, until they are equal again or that is acknowledged."""
    verify_trouble: str | None = None
    """Why it could not be compared last."""
    offset_truncated_to: int | None = None
    """Where the follower's log was cut last, because it was not the source's any more."""
    messages_truncated: int | None = None
    """Offsets that were cut then; what they held is in a salvage file."""
    sync: SyncStatus | None = None
    """None: the link is asynchronous, or the partition is in no namespace."""


class GroupStatus(_Model):
    """One consumer group of a link, as this proxy knows it."""

    group: str
    """The local name."""
    remote_group: str
    role: Literal["leader", "follower"]
    state: str
    """Following: the follower's coordinator has all of it. Catching Up: something is pending that passes by itself."""
    reason: str | None = None
    message: str | None = None
    positions: int
    """Committed offsets, in the topics of the link."""
    pending: int = 0
    """Of these, and of deletions, how many the follower's coordinator does not have yet."""
    pending_seconds: float | None = None
    """Age of the oldest of them."""
    sync: SyncStatus | None = None
    """What an ack for a commit of the group means; None: the link is asynchronous here, or the group follows."""
    unmapped_topics: list[str] = []
    """Topics in which the group has committed offsets and that no namespace of the link holds: those are not
    replicated."""


class AclNotMapped(_Model):
    """An access control binding of the source that the follower does not get."""

    binding: str = Field(examples=["allow User:app-1 read topic 'other'"])
    reason: str


class AclStatus(_Model):
    """The access control bindings of a link's principal namespaces, as the proxy knows them that looks after them."""

    role: str
    """The role of this cluster's namespaces."""
    state: str
    """Following: the follower had all of them after the last push. Stopped: a cluster refuses (``message``)."""
    reason: str | None = None
    message: str | None = None
    bindings: int
    """Bindings that the follower should have; at the follower, those that the link made."""
    not_mapped: list[AclNotMapped] = []
    """Of the namespaces' principals, and left out. Known at the leader alone."""


class OffsetsTopicStatus(_Model):
    """An offsets topic and its copy at the other cluster (KIP-986)."""

    role: Literal["leader", "follower"]
    form: Literal["whole", "redacted", "encrypted"]
    groups: list[str] = []
    """Of a redacted copy: whose records it has."""
    topic: str
    """The local name."""
    remote_topic: str


class GroupOffset(_Model):
    """An offset that a group committed at the source."""

    topic: str
    partition: int
    offset: int
    metadata: str
    committed_ms: int


class GroupOffsets(_Model):
    """A consumer group, as a copy of its cluster's offsets topic has it."""

    group: str
    kind: str | None
    """classic, consumer, share, streams; None where the copy has committed offsets and nothing else."""
    offsets: list[GroupOffset]
    unreadable_offsets: int = 0
    """Committed offsets whose newest commit is of a version that is not known here."""


class OffsetsView(_Model):
    """What a copy of the other cluster's offsets topic says."""

    link_name: str
    topic: str
    source_cluster_id: str
    form: Literal["whole", "redacted", "encrypted"]
    groups: list[GroupOffsets]
    unreadable_records: int
    """Records (the latest of their keys) of groups whose key is not in this proxy's keyring."""
    unreadable_key_ids: list[str]
    """The keys that are missing for those."""
    damaged_records: int
    """Records that do not open with the key that they name."""
    unknown_records: int
    """Kinds of records that a newer broker wrote."""


class BothOffsets(_Model):
    """What a group has committed in one partition, as the coordinators of both clusters have it."""

    topic: str
    """The local name."""
    partition: int
    source_offset: int | None
    """None: nothing."""
    follower_offset: int | None


class GroupOnBothSides(_Model):
    """A consumer group of a link, with what it has committed in the link's topics."""

    group: str
    """The local name."""
    remote_group: str
    offsets: list[BothOffsets] = []
    message: str | None = None
    """Why that is not known."""


class CommittedOffsets(_Model):
    """What groups of a link have committed, at both clusters, as they say at this moment."""

    link_name: str
    groups: list[GroupOnBothSides]
    groups_left_off: int = 0
    """So many more there are: name one to see it."""


class LostGroupOffset(_Model):
    """A committed offset that the target has, and what the source has in its place."""

    group: str
    topic: str
    partition: int
    offset: int
    source_offset: int | None
    """None: nothing."""


class SourceLossStatus(_Model):
    """What a source lost of one partition although it had acked it In-Sync; told until it is acknowledged."""

    number: int
    role: Literal["leader", "follower"]
    """Follower: this cluster has what the other one lost. Leader: this one lost it, and the other one said so."""
    type: Literal["topic", "consumer-group"]
    """Records, or committed offsets of groups."""
    topic: str
    """The local name; of groups the source's offsets topic."""
    remote_topic: str
    partition: int
    from_offset: int
    to_offset: int
    """Exclusive. Both are offsets of the log that lost its end: of groups, of the offsets topic's."""
    count: int
    """Records, markers among them, or committed offsets."""
    groups: int = 0
    """Whose they are."""
    state: Literal["held", "cutting", "cut", "kept"]
    """Held: the target keeps it until an operator decides. Cut: it is in the salvage file. Kept: it follows no more."""
    found_ms: int
    found_by: str
    """A proxy of the target."""
    salvage_proxy: str | None = None
    salvage_file: str | None = None
    message: str
    commits: list[LostGroupOffset] = []
    """The first of them; at the target alone."""


class Acknowledged(_Model):
    """What is told no more."""

    link_name: str
    acknowledged: int


class SecretRotated(_Model):
    link_name: str
    secret_id: str
    """Both sides have it, and no other one."""


class LinkStatus(_Model):
    link_name: str
    link_id: str
    local_cluster_id: str
    remote_cluster_id: str
    remote: list[str]
    dials: bool
    mode: str
    """Of acks of the source's clients."""
    sync_confirm_timeout_ms: int = SYNC_CONFIRM_TIMEOUT_MS
    """How long an ack of a synchronous link may wait until its partition is Out-Of-Sync."""
    config: dict[str, str] = {}
    """The settings of both ends that were set."""
    verify_every_seconds: float | None = None
    """In which time both whole logs of what follows are compared again; None: they are not."""
    verified_seconds: float | None = None
    """Age of the oldest pass over both whole logs of a partition that follows here, as far as this proxy knows; None:
    there is one without."""
    state: str
    reason: str | None = None
    message: str | None = None
    encryption: Literal["tls", "frames", "none"] | None = None
    """What protects this proxy's connections of the link, the least protected of them; None: there is none now."""
    secret_rotating: bool = False
    """Whether the link has two secrets, of which the other cluster may have one alone: rotate it again."""
    last_heard_seconds: float | None = None
    """Time since the peer cluster was last heard; None: never, since this proxy started."""
    mappings: list[MappingStatus] = []
    waiting: list[WaitingMapping] = []
    """Pairs that are to be attached, and wait for an operator's grant."""
    transaction_verification: TransactionVerificationStatus | None = None
    """None: this cluster follows nothing over the link."""
    promoting: list[str] = []
    """Prefixes of namespaces whose promotion has begun."""
    reversals: list[ReversalStatus] = []
    client_moves: list[ClientMoveStatus] = []
    drill: DrillStatus | None = None
    acls: list[AclStatus] = []
    offsets_topics: list[OffsetsTopicStatus] = []
    partitions: list[PartitionStatus] = []
    groups: list[GroupStatus] = []
    group_warnings: list[str] = []
    """What keeps this proxy from knowing all that groups have committed."""
    settings_kept: list[str] = []
    """Settings that topics which followed have still as followers do, since the brokers refused the source's."""
    left_out: list[LeftOutName] = []
    """What a led namespace's prefix covers at the source, and is not replicated."""
    left_out_more: int = 0
    """So many more there are."""
    source_losses: list[SourceLossStatus] = []
    """What a source lost although it had acked it In-Sync, until `isthmus link acknowledge`."""
    source_losses_left_off: int = 0
    """So many more there were."""


class TruncatedPartition(_Model):
    """What a truncation cuts from one partition."""

    partition: int
    offset_truncated_to: int
    """Up to here, exclusive, the log is the source's."""
    messages_truncated: int
    """Offsets beyond."""
    salvage_proxy: str | None = None
    salvage_file: str | None = None
    """Where what was cut is kept: a file on the machine of ``salvage_proxy``."""


class MovedGroupPosition(_Model):
    """A consumer group's committed offset that was beyond the cut."""

    group: str
    partition: int
    offset: int
    moved_to: int


class TruncationStatus(_Model):
    """A truncation of a follower topic, under way or over."""

    topic: str
    topic_id: str
    """Before it was made anew."""
    new_topic_id: str | None = None
    phase: str
    reason: str
    message: str
    """What was found."""
    trouble: str | None = None
    """Constant that says what keeps the phase from its end."""
    trouble_message: str | None = None
    proxy: str
    """Who carries it out."""
    began_ms: int
    phase_ms: int
    """Since when it is in its phase."""
    messages_truncated: int
    partitions: list[TruncatedPartition] = []
    groups_moved: int = 0
    moved_positions: list[MovedGroupPosition] = []
    """The first of them."""
    positions_lost: bool = False
    """The committed offsets of groups were lost with the local copy of the topic."""
    groups_lost: int = 0
    """So many groups had some."""
    given_up: bool = False
    """The operator went on without what was lost."""
    refills_failed: int = 0
    """How often the new topic did not become what was spooled, and was made anew once more."""
    refill_failure: str | None = None
    """What was wrong the last time."""


class PartitionVerdict(_Model):
    """What verification found out about one partition."""

    topic: str
    remote_topic: str
    partition: int
    equal: bool
    compared_from: int
    compared_to: int
    """Exclusive: up to here both sides are equal, or the first difference stands here."""
    records: int
    source_end: int
    follower_end: int
    difference: str | None = None
    """What differs at ``compared_to``, or why nothing was compared."""
    note: str | None = None
    """In which other way it was compared: a copy of an offsets topic that is redacted or encrypted is counted."""


class GroupVerdict(_Model):
    """What verification found out about one consumer group."""

    group: str
    remote_group: str
    equal: bool
    positions: int
    """Committed offsets that are equal."""
    waiting: int
    """Committed offsets that are ahead of the follower's data: they are committed there when it comes."""
    difference: str | None = None
    """The first committed offset that differs, or why nothing was compared."""


class VerifyReport(_Model):
    link_name: str
    equal: bool
    """True only if every partition of every mapping was compared and is equal up to the snapshot, and every group."""
    records: int
    seconds: float
    partitions: list[PartitionVerdict]
    groups: list[GroupVerdict] = []
    left_out: list[LeftOutName] = []
    """What the link does not replicate, and was not compared."""
    message: str | None = None
    """That nothing was compared: it is not equal then, and not different."""
