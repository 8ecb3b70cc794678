"""Three clusters that follow each other in turn: what they record of their logs is true, and no more than true.

Of each cluster there are a log of one partition, whose records are told apart, and the control state, changed by
commands alone. Operators attach, detach, fail over and reverse at random; leaders' brokers have elections, unclean ones
too; logs are cleaned and expire; links are cut. What proxies do goes in steps, and at any of them a proxy may die; what
stands in a control log stays. What they record comes from the functions that proxies call
(:mod:`isthmus_plugins.replication.link.histories`).

The simulation knows the truth: which record stands where.
"""

from __future__ import annotations

import random
import uuid
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import combinations

import pytest
from support.seeds import seeds

from isthmus_control import commands as c
from isthmus_control.apply import apply
from isthmus_control.codec import canonical, from_json, parse
from isthmus_control.control_state import ControlState
from isthmus_control.grants import EVERYTHING
from isthmus_control.levels import KNOWN_LEVEL, with_known_level
from isthmus_control.model import (
    BrokerClaim,
    Reason,
    ResourceType,
    Reversal,
    ReversalStep,
    Role,
    TopicEnd,
    TopicState,
)
from isthmus_control.origins import Ended, Origin
from isthmus_control.outcome import Accepted, Outcome
from isthmus_control.shared_prefix import PartitionLog, SharedPrefix, shared_prefix
from isthmus_control.truncations import PartitionCut, PartitionView, SalvageFile, TruncationPhase
from isthmus_plugins.replication.link import histories

STEPS = 260
TOPIC = "t"
NAMES = "ABC"
P = TruncationPhase
WHY = Reason("TARGET_WRITTEN_BY_OTHERS", "the logs have parted")

Operation = Iterator[None]


@dataclass
class Record:
    """A record of a log, by a name of its own; 0: nobody knows any more. ``epoch``: of the batch here.

    ``gone``: cleaned, or expired; ``never``: it was that at the source already.
    """

    name: int
    epoch: int
    gone: bool = False
    never: bool = False


@dataclass
class Cluster:
    """A cluster, with one topic of one partition."""

    name: str
    uids: random.Random
    state: ControlState = field(init=False)
    topic_id: str = field(init=False)
    owner: str = field(init=False)
    log: list[Record] = field(default_factory=list)
    log_start: int = 0
    epoch: int = 0
    cleaned: bool = False
    brokers_say: bool = False
    """Where epochs began, whatever was cleaned."""
    stream: Stream | None = None

    def __post_init__(self) -> None:
        self.state = ControlState(self.name)
        self.topic_id, self.owner = self.uid(), self.uid()
        self.ok(c.RaiseLevel(KNOWN_LEVEL))
        self.ok(c.CreateNamespace(ResourceType.TOPIC, TOPIC))
        claim = (BrokerClaim(1, "h", 1),)
        self.ok(c.ClaimBrokers("p", self.owner, claim, True, None, 10_000, with_known_level("1"), -1))

    def uid(self) -> str:
        return str(uuid.UUID(int=self.uids.getrandbits(128), version=4))

    @property
    def end(self) -> int:
        return len(self.log)

    def accepts(self, body: c.Body) -> bool:
        return isinstance(self.do(body), Accepted)

    def role(self, other: Cluster) -> Role | None:
        """In the pair that is attached to the link with another cluster."""
        mapping = self.state.links[self.link_to(other)].mapping(ResourceType.TOPIC, TOPIC)
        return None if mapping is None else mapping.role

    @property
    def topic(self) -> tuple[str, str]:
        return TOPIC, self.topic_id

    @property
    def known(self) -> histories.PartitionOrigins:
        return self.state.origins_of(*self.topic, 0)

    @property
    def reserved(self) -> bool:
        return self.state.namespaces[next(iter(self.state.namespaces))].reserved

    @property
    def leader(self) -> str | None:
        """The cluster that this one follows."""
        record = self.state.follower_topics.get(TOPIC)
        if record is None or record.state is not TopicState.FOLLOWING or record.topic_id != self.topic_id:
            return None
        return self.state.links[record.link].remote_cluster_id

    def do(self, body: c.Body) -> Outcome:
        offset = self.state.applied_offset + 1
        command = c.Command(self.uid(), 1_000 + offset, "p", offset - 1, body)
        assert c.decode(c.encode(command, self.state.level)) == command
        self.state, outcome = apply(self.state, offset, command)
        return outcome

    def ok(self, body: c.Body) -> None:
        outcome = self.do(body)
        assert isinstance(outcome, Accepted), (self.name, body, outcome)

    def link_to(self, other: Cluster) -> str:
        return "-".join(sorted((self.name, other.name)))

    def place(self, offset: int) -> tuple[c.PartitionOffset, ...]:
        return (c.PartitionOffset(TOPIC, self.topic_id, 0, offset),)

    # --- what its proxies record

    def epochs_of_log(self) -> list[histories.EpochSeen]:
        """What brokers say, or what reading the log finds: the epochs of batches that are there."""
        found: dict[int, histories.EpochSeen] = {}
        for offset in range(self.log_start, self.end):
            epoch = self.log[offset].epoch
            if self.brokers_say or not self.log[offset].gone:
                first = found[epoch].start_offset if epoch in found else offset
                found[epoch] = histories.EpochSeen(epoch, first, offset + 1)
        return list(found.values())

    def record_epochs(self) -> Operation:
        """Before its log is told or compared: what it wrote itself is recorded up to its end."""
        for _ in range(10):
            log = self.log_start, self.end
            found = self.epochs_of_log()
            due = histories.log_epochs(
                self.known, self.name, self.topic_id, 0, found, log, self.cleaned and not self.brokers_say
            )
            if isinstance(due, histories.LostBefore):
                for body in histories.to_mend(self.state, self.topic, 0, due, self.epoch):
                    self.ok(body)
                    yield
            elif due is None:
                break
            else:
                self.ok(c.RecordLogEpochs((c.TopicEpochs(TOPIC, self.topic_id, (due,)),)))
                yield
        else:
            raise AssertionError("the epochs of a log are recorded some time")
        if self.leader is None and histories.ends_beyond(self.known.ranges, self.end):
            self.ok(c.TruncateProvenance(self.place(self.end)))
            yield

    def begin_term(self, ended: Ended) -> Operation:
        for body in histories.to_lead(self.state, {self.topic: {0: c.TermStart(self.end, self.epoch)}}, ended):
            self.ok(body)
            yield

    def close(self, ended: Ended) -> Operation:
        for body in histories.to_close(self.state, {self.topic: {0: self.end}}, ended):
            self.ok(body)
            yield

    def compared(self) -> PartitionLog:
        return histories.to_compare(self.state, self.name, self.topic, 0, self.log_start, self.end)

    def seen_now(self) -> PartitionLog:
        """The same as if its proxies had just looked, for a check that changes nothing."""
        before = self.state
        for _ in self.record_epochs():
            pass
        seen, self.state = self.compared(), before
        return seen


@dataclass
class Stream:
    """A follower's stream: to which log it goes, and what it was told of the source's list."""

    source: Cluster
    source_topic_id: str
    topic_id: str
    told_at: int


@dataclass
class World:
    random: random.Random
    clusters: dict[str, Cluster] = field(init=False)
    records: int = 0
    operations: list[Operation] = field(default_factory=list)
    apart: set[frozenset[str]] = field(default_factory=set)
    salvaged: set[int] = field(default_factory=set)
    lost: set[int] = field(default_factory=set)
    """Of unclean elections."""
    acked: dict[int, set[str]] = field(default_factory=dict)
    """By record that was acked In-Sync, which clusters had it."""
    leads: set[str] = field(default_factory=lambda: {"A"})
    """Where clients write by what operators have said."""
    independent: set[str] = field(default_factory=set)
    """Of these, where an operator had it whatever others do: a failover, or a detach and what was reserved cleared."""
    handed: dict[str, bool] = field(default_factory=dict)
    """By reversal that was handed over: whether who led was one of these."""
    seen: Counter[str] = field(default_factory=Counter)
    compared: int = 0

    def __post_init__(self) -> None:
        uids = random.Random(self.random.getrandbits(64))
        brokers_say = self.random.random() < 0.5
        self.clusters = {name: Cluster(name, uids, brokers_say=brokers_say) for name in NAMES}
        for one, other in combinations(self.clusters.values(), 2):
            link_id = one.uid()
            for here, there in ((one, other), (other, one)):
                made = c.CreateLink(here.link_to(there), link_id, there.name, here is one, ("h:1",), grants=EVERYTHING)
                here.ok(made)
        for each in "BC":  # they are there for others, until an operator says else
            self.clusters[each].ok(c.AlterNamespace(ResourceType.TOPIC, TOPIC, True))

    def pick(self) -> Cluster:
        return self.random.choice(list(self.clusters.values()))

    def reach(self, one: Cluster, other: Cluster) -> bool:
        return frozenset((one.name, other.name)) not in self.apart

    def follows(self, one: Cluster, other: Cluster) -> bool:
        """Also by way of a third one."""
        sources: list[str] = []
        while one.leader is not None and one.leader not in sources:
            sources.append(one.leader)
            one = self.clusters[one.leader]
        return other.name in sources

    # --- what becomes of logs

    def write(self, cluster: Cluster) -> None:
        if cluster.reserved:
            return
        writers = {each.name for each in self.clusters.values() if not each.reserved}
        assert writers <= self.leads
        assert len(writers - self.independent) <= 1, f"two lead: {writers}, {self.independent}"
        for _ in range(self.random.randint(1, 6)):
            self.records += 1
            cluster.log.append(Record(self.records, cluster.epoch))
        for follower in self.clusters.values():
            if follower.stream is not None and follower.stream.source is cluster and self.random.random() < 0.3:
                while self.push(follower):
                    pass
                if follower.end == cluster.end:
                    self.acked[self.records] = {cluster.name, follower.name}

    def elect(self, cluster: Cluster, unclean: bool) -> None:
        cluster.epoch += 1
        if unclean and cluster.end > cluster.log_start:
            kept = max(cluster.log_start, cluster.end - self.random.randint(1, 8))
            self.lost |= {each.name for each in cluster.log[kept:]}
            del cluster.log[kept:]
            if cluster.stream is not None:
                cluster.stream = None
            for each in self.clusters.values():
                if each.stream is not None and each.stream.source is cluster:
                    each.stream = None
            self.seen["unclean"] += 1

    def clean(self, cluster: Cluster) -> None:
        for record in cluster.log[cluster.log_start : max(cluster.end - 3, cluster.log_start)]:
            if self.random.random() < 0.5:
                record.gone = cluster.cleaned = True

    def expire(self, cluster: Cluster) -> None:
        if cluster.leader is None:
            cluster.log_start = min(cluster.end, cluster.log_start + self.random.randint(1, 10))
            for record in cluster.log[: cluster.log_start]:
                record.gone = True

    # --- links

    def push(self, follower: Cluster) -> bool:
        """One batch of a stream, as far as nothing has to be recorded before; whether there was one."""
        stream = follower.stream
        if stream is None:
            return False
        source = stream.source
        if (
            source.topic_id != stream.source_topic_id
            or follower.topic_id != stream.topic_id
            or follower.leader != source.name
            or not self.reach(source, follower)
            or TOPIC in source.state.truncations
            or TOPIC in follower.state.truncations
        ):
            follower.stream = None
            return False
        offset = follower.end
        if offset >= source.end:
            return False
        if source.log_start > offset:
            follower.log += [Record(0, follower.epoch, True, True) for _ in range(source.log_start - offset)]
        follower.log_start = max(follower.log_start, min(source.log_start, follower.end))
        offset = follower.end
        if offset >= source.end:
            return False
        record = source.log[offset]
        if not record.gone:
            due = histories.epoch_due(source.known, source.name, source.topic_id, offset, record.epoch)
            if due is not None or source.known.at_offset != stream.told_at:
                follower.stream = None  # the source says it anew
                return False
        follower.log.append(Record(record.name, follower.epoch, record.gone, record.gone))
        follower.cleaned |= record.gone
        return True

    def open_stream(self, follower: Cluster) -> Operation:
        source = self.clusters.get(follower.leader or "")
        if source is None or follower.stream is not None or not self.reach(source, follower):
            return
        if TOPIC in source.state.truncations or TOPIC in follower.state.truncations:
            return
        if source.leader is None and source.known.open_range is None and not source.reserved:
            yield from source.begin_term(Ended.PROMOTED)
        yield from source.record_epochs()
        if follower.leader != source.name or TOPIC in source.state.truncations:
            return
        stream = Stream(source, source.topic_id, follower.topic_id, source.known.at_offset)
        said = histories.told(source.known, 0, 0)
        record = follower.state.follower_topics[TOPIC]
        if said is None:
            return
        if self.truth(follower, source) < min(follower.end, source.end) or follower.end > source.end:
            # Whatever is recorded: the batches that stand last, or their epochs, are not the same.
            yield from self.align(follower, source)
            return
        due = histories.to_follow(
            follower.known,
            Origin(source.name, source.topic_id),
            said,
            (follower.log_start, follower.end),
            (source.log_start, source.end),
        )
        if isinstance(due, histories.Parted):
            yield from self.align(follower, source)
            return
        if due is not None:
            whole = c.RecordOrigins(record.link, (c.ToldTopic(TOPIC, follower.topic_id, (due,)),))
            later = histories.later_epochs(follower.known, Origin(source.name, source.topic_id), due)
            before, outcome = follower.state, follower.do(whole)
            if not isinstance(outcome, Accepted):
                return
            if later is not None:  # in few bytes it says the same
                said, follower.state = follower.known.ranges, before
                follower.ok(c.RecordOriginEpochs(record.link, (c.TopicEpochs(TOPIC, follower.topic_id, (later,)),)))
                assert follower.known.ranges == said
                self.seen["later epochs"] += 1
            yield
        if source.known.at_offset == stream.told_at and follower.topic_id == stream.topic_id:
            follower.stream = stream

    def align(self, follower: Cluster, source: Cluster) -> Operation:
        """Cut the follower's log to what it shares with its source's: what is known says where, else the records do."""
        found = shared_prefix(follower.compared(), source.compared())
        truth = self.truth(follower, source)
        self.check_shared(found, truth, follower, source)
        cut = truth if found.unknown is not None else found.offset
        if cut >= follower.end:
            return
        self.seen["cut"] += 1
        if cut < follower.log_start:
            yield from self.replace(follower, source)
        else:
            yield from self.truncate(follower, source, cut)

    def replace(self, follower: Cluster, source: Cluster) -> Operation:
        """Nothing that the follower still has is its source's: its topic is made anew, empty."""
        link = follower.link_to(source)
        body = c.RecreateFollowerTopic(link, TOPIC, follower.topic_id)
        if follower.leader != source.name or not isinstance(follower.do(body), Accepted):
            return
        self.salvaged |= {each.name for each in follower.log}
        follower.topic_id, follower.log, follower.log_start = follower.uid(), [], 0
        follower.epoch, follower.cleaned = 0, False
        body = c.SetFollowerTopic(link, TOPIC, TOPIC, source.topic_id, TopicState.FOLLOWING, follower.topic_id)
        follower.ok(body)
        follower.ok(c.OpenProvenance(link, follower.place(0)))
        yield

    def truncate(self, follower: Cluster, source: Cluster, cut: int) -> Operation:
        record = follower.state.follower_topics.get(TOPIC)
        if record is None or record.state is not TopicState.FOLLOWING:
            return
        old, link = follower.topic_id, follower.link_to(source)
        view = (PartitionView(1, follower.epoch),)
        begun = follower.do(c.BeginTruncation(link, TOPIC, old, WHY, view, None, "p", follower.owner))
        if not isinstance(begun, Accepted):
            return
        yield
        cuts = (PartitionCut(0, follower.log_start, min(cut, follower.end), follower.end),)
        yield from self.carry_on(follower, cuts)

    def carry_on(self, follower: Cluster, cuts: tuple[PartitionCut, ...] = ()) -> Operation:
        """What is left of a truncation, by any proxy."""
        while (under_way := follower.state.truncations.get(TOPIC)) is not None:
            phase, more = under_way.phase, {}
            if phase is P.COMPARING:
                if not cuts or cuts[0].log_end != follower.end or cuts[0].offset > follower.end:
                    source = self.clusters[follower.state.links[under_way.link].remote_cluster_id]
                    cut = max(self.truth(follower, source), follower.log_start)
                    cuts = (PartitionCut(0, follower.log_start, cut, follower.end),)
                if not cuts[0].records:
                    to, more = P.CANCELLING, {"cuts": cuts}
                else:
                    to, more = P.SALVAGING, {"cuts": cuts}
            elif phase is P.SALVAGING:
                cut = under_way.cuts[0].offset
                self.salvaged |= {each.name for each in follower.log[cut:]}
                to, more = P.SPOOLING, {"salvaged": (SalvageFile(0, "p", "/x", 1),)}
            elif phase is P.SPOOLING:
                to = P.RECREATING
            elif phase is P.RECREATING:
                if follower.topic_id == under_way.topic_id:
                    follower.topic_id, follower.epoch, follower.cleaned = follower.uid(), 0, True
                    del follower.log[under_way.cuts[0].offset :]
                    follower.log = [replace(each, epoch=0) for each in follower.log]
                    yield
                to, more = P.REFILLING, {"new_topic_id": follower.topic_id}
            else:
                to = {P.REFILLING: P.RESTORING, P.RESTORING: P.CLEANING}.get(phase, P.DONE)
            follower.ok(c.AdvanceTruncation(TOPIC, under_way.topic_id, follower.owner, to, **more))
            yield

    # --- operators

    def attach(self, leader: Cluster, follower: Cluster) -> Operation:
        """As ``isthmus link attach``: nothing is cut where it is not known what is shared."""
        if not self.reach(leader, follower) or TOPIC in follower.state.truncations or self.follows(leader, follower):
            return
        link = leader.link_to(follower)
        sides = ((follower, Role.FOLLOWER), (leader, Role.LEADER))
        for cluster, role in sides:
            body = c.AttachNamespace(link, ResourceType.TOPIC, TOPIC, TOPIC, role)
            if not isinstance(cluster.do(body), Accepted):
                yield from self.detach(leader, follower)
                return
            self.leads.discard(follower.name)
            self.independent.discard(follower.name)
            yield
        yield from self.begin_to_follow(leader, follower)

    def begin_to_follow(self, leader: Cluster, follower: Cluster) -> Operation:
        """The follower's topic follows, once the two logs have been compared, and cut where they part."""
        mapping = follower.state.links[leader.link_to(follower)].mapping(ResourceType.TOPIC, TOPIC)
        if follower.leader is not None or mapping is None or mapping.role is not Role.FOLLOWER:
            return
        if leader.role(follower) is not Role.LEADER:
            return  # it may have been handed over, and not be led yet
        if TOPIC in leader.state.truncations or TOPIC in follower.state.truncations:
            return
        yield from follower.record_epochs()
        if leader.leader is None and not leader.reserved:
            yield from leader.begin_term(Ended.PROMOTED)
        yield from leader.record_epochs()
        yield from follower.close(Ended.FOLLOWS)
        if TOPIC in leader.state.truncations or TOPIC in follower.state.truncations or follower.leader is not None:
            return
        found = shared_prefix(follower.compared(), leader.seen_now())
        self.check_shared(found, self.truth(follower, leader), follower, leader)
        if found.unknown is not None and self.random.random() < 0.5:
            self.seen["refused"] += 1
            yield from self.detach(leader, follower)
            return
        link = leader.link_to(follower)
        body = c.SetFollowerTopic(link, TOPIC, TOPIC, leader.topic_id, TopicState.FOLLOWING, follower.topic_id)
        for each in (body, c.OpenProvenance(link, follower.place(follower.end))):
            if not isinstance(follower.do(each), Accepted):
                return
            yield
        yield from self.open_stream(follower)

    def detach(self, leader: Cluster, follower: Cluster, ended: Ended = Ended.DETACHED) -> Operation:
        """Each side by itself, if need be."""
        link = leader.link_to(follower)
        mapping = follower.state.links[link].mapping(ResourceType.TOPIC, TOPIC)
        if mapping is not None and mapping.role is Role.FOLLOWER:
            if not isinstance(follower.do(c.DetachNamespace(link, ResourceType.TOPIC, TOPIC)), Accepted):
                return
            follower.stream = None
            yield
        yield from self.close(follower, ended)
        mapping = leader.state.links[link].mapping(ResourceType.TOPIC, TOPIC)
        if self.reach(leader, follower) and mapping is not None and mapping.role is Role.LEADER:
            leader.do(c.DetachNamespace(link, ResourceType.TOPIC, TOPIC))
            yield

    def close(self, cluster: Cluster, ended: Ended) -> Operation:
        """What a follower that follows no more records."""
        goes_on = cluster.known.open_range
        if cluster.leader is None and TOPIC not in cluster.state.truncations and goes_on is not None and goes_on.via:
            yield from cluster.close(ended)

    def fail_over(self, cluster: Cluster, ended: Ended = Ended.FAILED_OVER) -> Operation:
        """The operator has it written, whatever others do."""
        if cluster.state.promotions or any(each.at_leader for each in cluster.state.reversals.values()):
            return  # the log refuses it
        for link in cluster.state.links.values():
            if any(each.role is Role.FOLLOWER for each in link.mappings):
                yield from self.detach(self.clusters[link.remote_cluster_id], cluster, ended)
        yield from self.carry_on(cluster)
        yield from self.close(cluster, ended)
        if cluster.state.lookup.following(ResourceType.TOPIC, TOPIC) is not None or not cluster.reserved:
            return
        yield from cluster.begin_term(ended)
        if TOPIC not in cluster.state.truncations and cluster.leader is None:
            open_range = cluster.known.open_range
            if open_range is None or open_range.via:
                return
            if cluster.state.promotions:
                return
            cluster.ok(c.AlterNamespace(ResourceType.TOPIC, TOPIC, False))
            self.leads.add(cluster.name)
            if ended is not Ended.REVERSED:
                self.independent.add(cluster.name)
                self.seen["failed over"] += 1

    def reverse(self, leader: Cluster, follower: Cluster) -> Operation:
        """Step by step: nothing is written until the follower has all, and leads."""
        if follower.leader != leader.name or leader.leader is not None or leader.reserved:
            return
        if not leader.accepts(c.AlterNamespace(ResourceType.TOPIC, TOPIC, True)):
            return
        self.leads.discard(leader.name)
        independent = leader.name in self.independent
        self.independent.discard(leader.name)
        yield
        for _ in range(30):
            if not self.push(follower):
                yield from self.open_stream(follower)
            if follower.end == leader.end:
                break
        if follower.end != leader.end or follower.leader != leader.name:
            leader.ok(c.AlterNamespace(ResourceType.TOPIC, TOPIC, False))
            self.leads.add(leader.name)
            self.independent |= {leader.name} if independent else set()
            return
        yield from self.detach(leader, follower, Ended.REVERSED)
        if follower.leader is not None or leader.state.links[leader.link_to(follower)].mappings:
            return
        yield from self.fail_over(follower, Ended.REVERSED)
        self.independent |= {follower.name} if independent and not follower.reserved else set()
        if not follower.reserved:
            self.seen["reversed"] += 1
        yield from self.attach(follower, leader)

    def hand_over(self, leader: Cluster, follower: Cluster) -> Operation:
        """By one command (``isthmus link reverse``): one record of the leader's log decides."""
        link, reversal, owner = leader.link_to(follower), leader.uid(), leader.owner
        what = link, ResourceType.TOPIC, TOPIC, ()
        if follower.leader != leader.name or not self.reach(leader, follower):
            return
        if not leader.accepts(c.AnnounceReversal(*what, reversal, owner, 0, 5_000)):
            return
        yield
        if not leader.accepts(c.HoldReversal(link, reversal, owner)):
            return
        yield
        for _ in range(30):
            if not self.push(follower):
                yield from self.open_stream(follower)
            if follower.end == leader.end:
                break
        has_all = self.reach(leader, follower) and follower.end == leader.end and follower.leader == leader.name
        if has_all and follower.accepts(c.AcceptReversal(*what, reversal, {})):
            yield
            independent = leader.name in self.independent
            if leader.accepts(c.HandOver(link, reversal, owner, (TopicEnd(TOPIC, (leader.end,)),))):
                self.handed[reversal] = independent
                self.leads.discard(leader.name)
                self.independent.discard(leader.name)
                self.seen["handed over"] += 1
                yield
        yield from self.look_after(leader)

    def look_after(self, cluster: Cluster) -> Operation:
        """What any proxy does of reversals that nobody carries out any more, and at the other cluster."""
        for reversal in list(cluster.state.reversals.values()):
            other = self.clusters[cluster.state.links[reversal.link].remote_cluster_id]
            if reversal.at_leader:
                self.seen["taken back"] += cluster.accepts(c.TakeBack(reversal.link, reversal.reversal_id))
                yield
            elif reversal.step is ReversalStep.HANDED_OVER and self.reach(cluster, other):
                yield from self.take_lead(cluster, other, reversal)
        yield from self.lead(cluster)

    def take_lead(self, leader: Cluster, follower: Cluster, reversal: Reversal) -> Operation:
        """The other cluster is told, asks back, and leads."""
        handed = reversal.reversal_id
        if handed in follower.state.reversals and follower.end == reversal.ends[0].ends[0]:
            yield  # the answer is on its way
            body = c.BeginPromotion(reversal.link, ResourceType.TOPIC, TOPIC, {}, follower.owner, reversal=handed)
            follower.do(body)
            yield
        yield from self.lead(follower)
        if self.reach(leader, follower) and follower.role(leader) is Role.LEADER:
            leader.do(c.EndReversal(reversal.link, handed))
            yield

    def lead(self, cluster: Cluster) -> Operation:
        """Go on with a promotion that was begun in a reversal."""
        for promotion in list(cluster.state.promotions.values()):
            leader = self.clusters[cluster.state.links[promotion.link].remote_cluster_id]
            if cluster.role(leader) is Role.FOLLOWER:
                cluster.ok(c.DetachNamespace(promotion.link, ResourceType.TOPIC, TOPIC, for_peer=True))
                cluster.stream = None
                yield
            yield from cluster.close(Ended.REVERSED)
            yield from cluster.begin_term(Ended.REVERSED)
            open_range = cluster.known.open_range
            if open_range is None or open_range.via or not cluster.state.promotions:
                return
            cluster.ok(c.EndPromotion(ResourceType.TOPIC, TOPIC, cluster.owner))
            self.leads.add(cluster.name)
            self.independent |= {cluster.name} if self.handed[promotion.reversal] else set()
            self.seen["reversed at once"] += 1
            yield

    def abandon(self, cluster: Cluster) -> Operation:
        """An operator's word that the other cluster does not lead, nor will, which is asked where it can be."""
        for reversal in list(cluster.state.reversals.values()):
            other = self.clusters[cluster.state.links[reversal.link].remote_cluster_id]
            body = c.AbandonReversal(reversal.link, reversal.reversal_id)
            leads = other.role(cluster) is Role.LEADER or bool(other.state.promotions)
            if reversal.step is not ReversalStep.HANDED_OVER or leads:
                continue
            if self.reach(cluster, other):
                if not other.accepts(body):
                    continue
                yield
            if cluster.accepts(body):
                self.leads.add(cluster.name)
                self.independent |= {cluster.name} if self.handed[reversal.reversal_id] else set()
                self.seen["abandoned"] += 1
                yield

    # --- what holds

    def truth(self, one: Cluster, other: Cluster, certain: bool = False) -> int:
        """Up to where two logs hold the same, of what both of them may have still. ``certain``: not beyond records of
        which one of them never had more than the offset."""
        end = min(one.end, other.end)
        for offset in range(max(one.log_start, other.log_start), end):
            left, right = one.log[offset], other.log[offset]
            if certain and (left.never or right.never):
                return offset
            if left.name != right.name and left.name and right.name:
                return offset
        return end

    def check_shared(self, found: SharedPrefix, truth: int, one: Cluster, other: Cluster) -> None:
        self.compared += 1
        assert found.offset <= truth, (found, truth, one.name, other.name, one.known, other.known)
        if found.unknown is None and (one.brokers_say or not (one.cleaned or other.cleaned)):
            start = max(one.log_start, other.log_start)
            least = self.truth(one, other, certain=True)
            assert found.offset >= least or found.offset < start, (found, least, one.known, other.known)
            self.seen["exact"] += 1
        self.seen["unknown" if found.unknown is not None else "known"] += 1

    def check(self) -> None:
        seen = {name: each.seen_now() for name, each in self.clusters.items()}
        for one, other in combinations(NAMES, 2):
            found = shared_prefix(seen[one], seen[other])
            assert found.offset == shared_prefix(seen[other], seen[one]).offset, "it does not matter who asks"
            self.check_shared(
                found, self.truth(self.clusters[one], self.clusters[other]), self.clusters[one], self.clusters[other]
            )
        there = {record.name for each in self.clusters.values() for record in each.log}
        gone = self.acked.keys() - there - self.salvaged - self.lost
        assert not gone, f"acked and lost: {gone}"

    # --- events

    def begin(self) -> Operation:
        one, other = self.random.sample(list(self.clusters.values()), 2)
        led = [each for each in self.clusters.values() if each.leader is not None]
        event = self.random.random()
        if event < 0.4:
            return self.attach(one, other)
        if event < 0.5:
            return self.detach(one, other)
        if event < 0.65:
            return self.fail_over(one)
        if event < 0.95 and led:
            other = self.random.choice(led)
            leader = self.clusters[str(other.leader)]
            return self.reverse(leader, other) if event < 0.7 else self.hand_over(leader, other)
        return self.abandon(one)

    def tend(self) -> None:
        """What proxies do by themselves, beginning again where one died."""
        for cluster in self.clusters.values():
            if cluster.state.reversals or cluster.state.promotions:
                self.operations.append(self.look_after(cluster))
            if TOPIC in cluster.state.truncations:
                self.operations.append(self.carry_on(cluster))
            elif cluster.leader is not None and cluster.stream is None:
                self.operations.append(self.open_stream(cluster))
            elif cluster.leader is None:
                followed = cluster.state.lookup.following(ResourceType.TOPIC, TOPIC)
                if followed is not None:
                    leader = self.clusters[followed.link.remote_cluster_id]
                    self.operations.append(self.begin_to_follow(leader, cluster))
                else:
                    self.operations.append(self.close(cluster, Ended.DETACHED))

    def step(self) -> None:
        event = self.random.random()
        if event < 0.2:
            self.write(self.pick())
        elif event < 0.45:
            follower = self.pick()
            for _ in range(self.random.randint(1, 6)):
                self.push(follower)
        elif event < 0.5:
            self.elect(self.pick(), unclean=False)
        elif event < 0.52:
            self.elect(self.pick(), unclean=True)
        elif event < 0.54:
            self.clean(self.pick())
        elif event < 0.56:
            self.expire(self.pick())
        elif event < 0.60:
            pair = frozenset(each.name for each in self.random.sample(list(self.clusters.values()), 2))
            self.apart.symmetric_difference_update({pair})
        elif event < 0.66 and not self.operations:
            self.operations.append(self.begin())
        elif not self.operations:
            self.tend()
        if self.operations:
            operation = self.random.choice(self.operations)
            if self.random.random() < 0.05:
                self.operations.remove(operation)  # its proxy died
                self.seen["died"] += 1
            else:
                for _ in range(self.random.randint(1, 4)):
                    if next(operation, self) is self:
                        self.operations.remove(operation)
                        break


def run(seed: int) -> World:
    world = World(random.Random(seed))
    for number in range(STEPS):
        world.step()
        if number % 5 == 0:
            world.check()
    return world


@pytest.mark.parametrize("seed", seeds(20))
def test_what_is_recorded_is_true(seed: int) -> None:
    world = run(seed)
    for cluster in world.clusters.values():
        assert from_json(ControlState, parse(canonical(cluster.state)), "s") == cluster.state
