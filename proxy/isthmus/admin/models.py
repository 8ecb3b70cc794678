"""What goes over REST, besides the models of links (:mod:`isthmus_plugins.links`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Generic, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from isthmus_control.demands import Confirm, Consistency, Visibility
from isthmus_control.model import ResourceType
from isthmus_control.rules.checks import PREFIX_CHARS_MAX, REASON_CHARS_MAX
from isthmus_control.rules.overlaps import Relation
from isthmus_plugins.links import LinkStatus
from isthmus_plugins.plugin_operations import PluginOffer, PluginStatus

T = TypeVar("T")


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)


def _is_confirm(text: str | None) -> str | None:
    return None if text is None else str(Confirm.parse(text))


ConfirmText = Annotated[Annotated[str, Field(max_length=2_000)] | None, AfterValidator(_is_confirm)]
DegradeAfter = Annotated[int | None, Field(ge=0)]


class ErrorBody(_Model):
    """Every error, whatever its status."""

    error_code: int = Field(examples=[40401])
    """The HTTP status and two digits that distinguish codes of one status; 00 where ``code`` alone does."""
    code: str = Field(examples=["NOT_FOUND"])
    """A constant, for programs."""
    message: str = Field(examples=["there is no topic namespace 'orders-'"])
    """What is wrong and what to do, for people."""


class Page(_Model, Generic[T]):
    """A list. Nothing is left out."""

    items: list[T]


class Readiness(_Model):
    ready: bool
    reasons: list[str] = Field(default=[], examples=[["the control log is being read"]])
    """Why it is not."""


class Liveness(_Model):
    alive: Literal[True] = True


# --- namespaces


class NamespaceMappingView(_Model):
    """A link that a namespace is attached to."""

    link_name: str = Field(examples=["a-to-b"])
    role: str = Field(examples=["leader"])
    """The role of this namespace."""
    remote: str = Field(examples=["orders-"])
    """The prefix of the other cluster's namespace."""


class EnabledPluginView(_Model):
    """A plugin of a namespace, as the control log has it."""

    plugin: str
    settings: dict[str, Any]
    version: int
    waiting_for: list[str] = []
    """Proxies that do not act on the last change of the namespace's plugins yet."""


class DisabledPluginView(_Model):
    """A plugin that a namespace has no more, and that is not all over yet."""

    plugin: str
    waiting_for: list[str] = []
    """Proxies that may still ask it."""
    ended: bool
    """On the proxy that was asked: false while acks wait for it, or it has not stopped."""


class NamespaceView(_Model):
    """A prefix of topics, groups or principals."""

    type: ResourceType
    prefix: str = Field(examples=["orders-"])
    state: Literal["open", "reserving", "reserved"]
    """``reserving``: the reservation is decided, and not every proxy of the cluster enforces it yet."""
    waiting_for: list[str] = Field(default=[], examples=[["proxy-2"]])
    """Proxies that do not act on the current reservation yet."""
    reserved_reason: str | None = Field(default=None, examples=["follows link 'a-to-b'"])
    informational: bool
    consistency: Consistency
    """``strict``: producers without transactions, or commits of groups, wait as well while a synchronous link is
    Out-Of-Sync."""
    visibility: Visibility
    """``confirmed``: consumers of the source see nothing that a synchronous link has not confirmed."""
    degrade_after_ms: int | None
    """So long after a synchronous link got Out-Of-Sync, transactional and strict producers are acked without it. None:
    never."""
    confirm: str = Field(examples=["ALL", "ANY 1 (a-to-b, a-to-c)"])
    """Which synchronous links an ack waits for: all, or so many of these and each other one."""
    stale_reads: bool = True
    """False: consumers of topics that follow over a synchronous link wait while it is not known to be In-Sync."""
    created_ms: int = Field(examples=[1760000000000])
    plugins: list[EnabledPluginView] = []
    """In the order in which they see requests."""
    mappings: list[NamespaceMappingView] = []


class NamespaceItemView(_Model):
    """A topic, group or principal."""

    name: str = Field(examples=["orders-eu"])
    """A principal with its type, as access control has it (``User:app``)."""
    partitions: int | None = None
    """Of a topic."""
    state: Literal["creating", "following", "refused", "detached", "independent"] | None = None
    """Of a topic that follows, may not, or did."""
    link_name: str | None = None
    """Over which it follows."""


class NamespaceContentsView(_Model):
    """A namespace, and what is in it now."""

    namespace: NamespaceView
    count: int
    empty: bool
    items: list[NamespaceItemView]
    """By name. Principals are those that access control names."""


class ClashView(_Model):
    """What is refused of two namespaces that overlap."""

    roles: str = Field(examples=["both follow"])
    links: str = Field(examples=["any links"])
    """Over which they would be attached."""
    reason: str


class NamespaceOverlapView(_Model):
    """Whether some name could be in both of two namespaces of one type."""

    type: ResourceType
    prefix: str
    other: str
    overlap: bool
    relation: Relation
    """``holds``: ``prefix`` has all names that ``other`` has; ``held``: the other way around."""
    refused: list[ClashView] = []
    """Attachments that cannot stand beside each other."""


class CreateNamespaceRequest(_Model):
    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"type": "topic", "prefix": "orders-", "reserved": True, "reason": "migration"}]
        }
    )

    type: ResourceType = ResourceType.TOPIC
    prefix: str = Field(max_length=PREFIX_CHARS_MAX)
    """The empty prefix holds every name that does not start with an underscore."""
    reserved: bool = False
    """Clients may not write what it holds."""
    reason: str | None = Field(default=None, max_length=REASON_CHARS_MAX)
    """Sent to clients whose writes are refused."""
    informational: bool = False
    """It cannot be part of a synchronous link."""
    consistency: Consistency = Consistency.AVAILABLE
    visibility: Visibility = Visibility.LOCAL
    degrade_after_ms: DegradeAfter = None
    confirm: ConfirmText = None
    stale_reads: bool = True


class PluginRequest(_Model):
    """What becomes of a plugin of a namespace. What is left out of a change stays as it is."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"settings": {"sampling": 0.1}, "position": 0}]})

    settings: dict[str, Any] | None = None
    """By the plugin's own schema (``settings_schema`` of ``/v1/plugins``)."""
    position: int | None = Field(default=None, ge=0)
    """Its place among the namespace's other plugins: 0 sees requests first."""


class PluginsView(_Model):
    offered: list[PluginOffer]
    """What namespaces can have on this proxy."""
    enabled: list[PluginStatus]
    """What is enabled, as it runs on this proxy: in the order in which requests are seen."""


class AlterNamespaceRequest(_Model):
    """What is left out stays as it is."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"reserved": False}, {"consistency": "strict"}]})

    reserved: bool | None = None
    reason: str | None = Field(default=None, max_length=REASON_CHARS_MAX)
    consistency: Consistency | None = None
    visibility: Visibility | None = None
    degrade_after_ms: DegradeAfter = None
    """0: never."""
    confirm: ConfirmText = None
    """``ALL``, or ``ANY k (link, ...)``."""
    informational: bool | None = None
    stale_reads: bool | None = None


# --- topics


class SourceEpochView(_Model):
    epoch: int
    start_offset: int


class ProvenanceView(_Model):
    """A range of offsets and the cluster that it came from."""

    source_cluster_id: str
    source_topic_id: str
    start_offset: int
    end_offset: int | None
    """Exclusive; None: it is being followed."""
    recorded_ms: int
    epochs: list[SourceEpochView] = []
    """The source's leader epochs within the range."""


class OriginView(_Model):
    """A range of offsets and the cluster that wrote it first, through any number of links."""

    cluster_id: str
    topic_id: str
    term: str | None
    """The id of the command by which that cluster began to write there; None: from before terms were recorded."""
    start_offset: int
    end_offset: int | None
    """Exclusive; None: it goes on."""
    epochs: list[SourceEpochView] = []
    """That cluster's leader epochs."""
    epochs_missing_before: int | None = None
    """Of the epochs that begin before this offset some may be missing."""
    since_ms: int
    ended: str | None = Field(default=None, examples=["failed-over"])
    via_cluster_id: str | None = None
    """The cluster that it was received from; None: it was written here."""
    assumed: bool = False
    """Only the cluster that it was received from is known, which may have had it from elsewhere."""


class TopicPartitionView(_Model):
    partition: int
    provenance: list[ProvenanceView]
    """From which cluster which range was received."""
    origins: list[OriginView] = []
    """Which cluster wrote which range first. What is between two is unknown."""


class TopicView(_Model):
    """A local topic that follows, may not, or did; or that is led, where it is asked for by its name."""

    topic: str = Field(examples=["orders-eu"])
    link_name: str | None
    """None: no link knows the topic any more, and its history is kept."""
    source_topic: str | None
    state: Literal["creating", "following", "refused", "detached", "led", "independent"]
    reason: str | None = Field(default=None, examples=["TOPIC_NOT_EMPTY"])
    message: str | None = None
    topic_id: str | None
    source_topic_id: str | None
    recorded_ms: int | None
    overrides: dict[str, str] = Field(default={}, examples=[{"retention.ms": "-1"}])
    """Settings that it has instead of its source's while it follows; shown by `GET /v1/topics/{name}` alone."""
    partitions: list[TopicPartitionView] = []


class ForgetTopicRequest(_Model):
    delete: bool = False
    """Delete the topic and its records, too."""
    dry_run: bool = False
    """Change nothing, say what would be lost."""


class RecreateTopicRequest(_Model):
    dry_run: bool = False
    """Change nothing, say what would be lost."""


# --- the process and its cluster


class BrokerAddress(_Model):
    """A broker that a proxy fronts."""

    broker_id: int
    address: str = Field(examples=["proxy-1.example.org:19093"])
    """What clients connect to."""
    broker: str | None = Field(default=None, examples=["broker-1:9092"])
    """The broker's own address, where this proxy knows it."""


class LeaseStatus(_Model):
    vouching: bool
    """Whether this proxy has a lease and serves writes."""
    reason: str | None = None
    """Why it does not vouch."""
    remaining_seconds: float | None = None


class ControlExportView(_Model):
    """A file on the proxy's machine with the control log as the proxy remembers it."""

    path: str = Field(examples=["/var/lib/isthmus/control-log-0b5d9a0e-7c1e-4e0c-9a43-1f4b7d9f2f11-1200.json"])
    cluster_id: str
    topic_id: str
    generation: int
    first_offset: int
    """Records from there on are in it, behind a snapshot."""
    end_offset: int


class ProcessDescription(_Model):
    """What the process says of itself."""

    mode: Literal["sidecar", "whole-cluster"]
    bootstrap: str | None = Field(examples=["proxy-1.example.org:19092"])
    """Where clients bootstrap."""
    link_address: str | None = Field(examples=["proxy-1.example.org:19192"])
    """Where proxies of other clusters reach this one."""
    brokers: list[BrokerAddress]
    lease: LeaseStatus
    plugins: list[str]
    warnings: list[str] = []
    """What an operator should know, such as that secrets in the control log are not sealed."""


class ConnectionCounts(_Model):
    open: int
    opened: int
    """Since the start."""
    closed: dict[str, int]
    """Since the start, by cause."""


class LimitsView(_Model):
    connections_max: int
    in_flight_max: int
    frame_bytes_max: int
    file_descriptors_open: int
    file_descriptors_max: int


class ProxyView(_Model):
    """A proxy of the cluster, by its lease in the control log."""

    name: str = Field(examples=["proxy-1"])
    this: bool
    """It is the one that answers."""
    state: Literal["active", "superseded"]
    """``superseded``: a newer process took the name; reservations wait for it until its lease is out."""
    incarnation: str
    version: str
    known_level: int
    """The highest feature level of the control log that it knows; 0 of versions before there were any."""
    brokers: list[BrokerAddress]
    all_brokers: bool
    link_address: str | None
    lease_ms: int
    enforced_offset: int
    """Up to here it enforces the control log."""


class HeldConfigView(_Model):
    """A cluster-wide broker setting that links hold, as the operator agreed when attaching."""

    name: str = Field(examples=["transaction.partition.verification.enable"])
    value: str = Field(examples=["false"])
    former: str | None
    """What is restored at the last detach; None: it was not set."""


class StatusView(_Model):
    """One proxy and what it knows of its cluster."""

    name: str
    version: str
    cluster_id: str | None
    ready: bool
    reasons: list[str]
    """Why it is not ready."""
    started_ms: int
    uptime_seconds: float
    process: ProcessDescription
    control_log_offset: int | None
    connections: ConnectionCounts | None
    limits: LimitsView | None
    namespaces: list[NamespaceView]
    held_configs: list[HeldConfigView]
    links: list[LinkStatus]
    proxies: list[ProxyView]


# --- the control log


class SealedSecret(_Model):
    """A secret of a link, as it stands in the control log."""

    link_name: str
    secret_id: str | None
    """Of the rotation that made it; None: it is the one that the link was created with."""
    key_id: str | None = Field(examples=["ab12cd34"])
    """The id of the key that it is sealed with; None: it is not sealed."""


class ControlView(_Model):
    """The control log, as this proxy has it."""

    offset: int
    """Up to here this proxy has applied it."""
    level: int
    """Its feature level: what proxies may write in it."""
    known_level: int
    """The highest that this proxy knows."""
    behind: list[str] = Field(examples=[["proxy-2"]])
    """Proxies with a lease that do not know that."""
    key_id: str | None = Field(default=None, examples=["ab12cd34"])
    """The id of the control key that records are signed with; None: they are not signed."""
    own_key_id: str | None = Field(default=None, examples=["ab12cd34"])
    """The id of this proxy's control key; None: it has none."""
    without_key: list[str] = []
    """Proxies with a lease that do not have that key."""
    unsigned_records: int = 0
    """Records that did not count since they were not written with the control key, as far as this proxy has read."""
    own_sealing_key_id: str | None = Field(default=None, examples=["ab12cd34"])
    """The id of the key that this proxy seals secrets with, which is derived in another way; None: it has none."""
    secrets: list[SealedSecret] = []
    """The secrets of links."""
    not_understood: list[str] = []
    """What newer proxies wrote that this one does not know: it leaves alone what that concerns."""


class ControlUpgradeRequest(_Model):
    to: int | None = Field(default=None, ge=1)
    """The feature level; None: the highest that the proxy knows."""
    dry_run: bool = False
    """Change nothing, say what would happen."""


class ControlUpgradeView(_Model):
    before: int
    """The feature level before."""
    after: int
    """And now, or, in a dry run, then."""
    brings: list[str] = Field(examples=[["records say what they concern"]])
    """What the raised levels bring."""
    key_id: str | None = Field(default=None, examples=["ab12cd34"])
    """The id of the control key that records are signed with now, or then; None: they are not signed."""
    signs: bool = False
    """That is new: records were not signed before."""
    dry_run: bool


# --- operations


class ErrorSummary(_Model):
    code: str
    message: str


class OperationView(_Model):
    """Work that goes on behind a request."""

    id: str
    kind: str = Field(examples=["verify"])
    target: str = Field(examples=["a-to-b"])
    state: Literal["running", "done", "failed"]
    done: int = Field(examples=[1500])
    total: int | None = Field(examples=[100000])
    """None: not known yet."""
    started_ms: int
    seconds: float
    result: Annotated[dict[str, Any] | None, Field(default=None)]
    """Of ``verify``: a VerifyReport; of ``promote``: a PromoteReport; of ``failover``: a FailoverReport; of
    ``reverse``: a ReverseReport; of ``drill``: a DrillReport."""
    error: ErrorSummary | None = None


# --- audit


class AuditView(_Model):
    """One change, or its end. Lines of newer proxies may have more than is shown."""

    model_config = ConfigDict(extra="ignore")

    change: str
    """The same in all lines of one change: an operation has one when it starts, one when it ends."""
    at_ms: int
    proxy: str = Field(examples=["proxy-1"])
    who: str = Field(examples=["alice"])
    peer: str = Field(examples=["10.0.0.7"])
    action: str = Field(examples=["PATCH /v1/namespaces/topic"])
    asked: Any = None
    """The request's fields, without secrets."""
    outcome: str = Field(examples=["done"])
    """``done``, ``started``, ``refused``, ``failed``, or ``unknown`` where the proxy stopped meanwhile."""
    code: str | None = None
    """Of the error."""
    before: Any = None
    after: Any = None
    """What is another of the namespace, link or topic than before."""

    @classmethod
    def of(cls, line: Mapping[str, Any]) -> AuditView | None:
        """A line as it was stored; None: somebody else wrote it, and it is none."""
        try:
            return cls.model_validate(line)
        except ValidationError:
            return None
