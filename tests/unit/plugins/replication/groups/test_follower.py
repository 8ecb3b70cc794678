"""What a followed group waits for, and why; when committed offsets are committed again."""

from __future__ import annotations

import asyncio
import random
import uuid
from typing import Any

import pytest
from support.fake_groups import RETENTION_MS
from support.group_replicas import PLACE, committed_at, in_replicas, log, status, until_at
from support.offsets import commit, deleted, group_gone, group_made
from support.replicas import LINK, Replicas
from support.seeds import seeds

from isthmus_control.commands import AlterLink, AttachNamespace, DetachNamespace
from isthmus_control.model import LinkMode, ProxyLease, Reason, ResourceType, Role
from isthmus_control.outcome import Accepted
from isthmus_control.truncations import PartitionView, Truncation, TruncationPhase
from isthmus_plugins.cluster import CommittedOffset, Refused, TopicPartition
from isthmus_plugins.replication.groups.followed_group import FIRST_RENEWAL_MAX_S, FollowedGroup, Pending, Plan
from isthmus_plugins.replication.link import calls, features
from isthmus_plugins.replication.link.connection import LinkRejected
from isthmus_plugins.replication.partitions import LinkPartition
from isthmus_protocol.offsets_log import OFFSETS_TOPIC

OTHER = ("remote-t", 1)

ANOTHER_PROXY = ProxyLease("p", "o", (), True, None, 10_000, "0", 0, 0, -1)


def followed(**has: CommittedOffset) -> FollowedGroup:
    group = FollowedGroup("link", "far-app-1", 0)
    group.found({("remote-t", int(name[1:])): each for name, each in has.items()}, False, 100.0, 1000.0)
    return group


def plan(group: FollowedGroup, ends: dict[TopicPartition, int] | None = None, now: float = 100.0) -> Plan:
    return group.plan({PLACE: 10, OTHER: 10} if ends is None else ends, {}, now)


def test_what_differs_is_committed_and_what_is_equal_is_not() -> None:
    group = followed(p1=committed_at(4, "same"))
    group.want(PLACE, committed_at(5), 90.0)
    group.want(OTHER, committed_at(4, "same"), 90.0)
    assert plan(group).commit == {PLACE: committed_at(5)}
    assert group.since == {PLACE: 90.0}
    group.committed({PLACE: committed_at(5)}, 101.0, 1000.0)
    assert group.idle
    assert not plan(group)


def test_metadata_alone_makes_a_difference() -> None:
    group = followed(p0=committed_at(3, "old"))
    group.want(PLACE, committed_at(3, "new"), 90.0)
    assert plan(group).commit == {PLACE: committed_at(3, "new")}


def test_a_commit_ahead_of_the_data_waits() -> None:
    group = followed()
    group.want(PLACE, committed_at(11), 90.0)
    assert not plan(group)
    assert group.pending[PLACE].code == "BEYOND_FOLLOWER_END"
    assert "ends at 10, the group's committed offset is 11" in group.pending[PLACE].message
    assert not group.idle
    assert plan(group, {PLACE: 11}).commit == {PLACE: committed_at(11)}
    group.committed({PLACE: committed_at(11)}, 101.0, 1000.0)
    assert group.idle


def test_a_committed_offset_that_was_left_ahead_of_the_data_is_moved_to_its_end() -> None:
    """A request of before may land when its topic has been truncated: then it is not known what it did."""
    group = followed(p0=committed_at(12, "m"), p1=committed_at(4))
    group.want(PLACE, committed_at(12, "m"), 90.0)
    group.want(OTHER, committed_at(4), 90.0)
    ends = {PLACE: 10, OTHER: 4}
    group.source_ends(PLACE, has_data=True)
    assert group.plan(ends, {}, 100.0, ends).commit == {PLACE: committed_at(10, "m")}
    group.committed({PLACE: committed_at(10, "m")}, 101.0, 1000.0)
    assert not plan(group)  # until the data is there
    assert plan(group, {PLACE: 12}).commit == {PLACE: committed_at(12, "m")}
    group.committed({PLACE: committed_at(12, "m")}, 101.0, 1000.0)
    assert group.idle
    assert group.to_check == []
    group.in_doubt(102.0)
    group.found({PLACE: committed_at(12, "m"), OTHER: committed_at(4)}, False, 102.0, 1000.0)
    assert sorted(group.to_check) == [PLACE, OTHER]
    assert not group.plan({}, {}, 103.0)
    assert group.unsure  # the ends could not be read


def test_nothing_is_committed_or_renewed_while_a_topic_is_truncated() -> None:
    group = followed(p0=committed_at(12))
    group.want(PLACE, committed_at(12), 90.0)
    assert not group.plan({}, {"remote-t": Pending("TRUNCATING", "it is")}, 1e9, {})
    assert group.plan({}, {}, 1e9, {PLACE: 12}).renew == {PLACE: committed_at(12)}


def test_a_commit_for_a_topic_that_does_not_follow_waits() -> None:
    group = followed()
    group.want(PLACE, committed_at(1), 90.0)
    assert not group.plan({PLACE: 10}, {"remote-t": Pending("BEYOND_FOLLOWER_END", "no")}, 100.0)
    assert group.pending[PLACE] == ("BEYOND_FOLLOWER_END", "no")
    assert not group.plan({}, {}, 100.0)
    assert "cannot be read" in group.pending[PLACE].message


def test_an_older_wait_counts_from_its_beginning() -> None:
    group = followed()
    group.want(PLACE, committed_at(11), 90.0)
    group.want(PLACE, committed_at(12), 95.0)
    assert group.since == {PLACE: 90.0}


def test_what_the_source_does_not_have_is_deleted_and_the_group_after_it() -> None:
    group = followed(p0=committed_at(3), p1=committed_at(4))
    group.want(PLACE, committed_at(3), 90.0)
    assert plan(group).delete == {OTHER}
    group.want(PLACE, None, 90.0)
    group.deleting = True
    assert plan(group).delete == {PLACE, OTHER}
    assert not plan(group).delete_group
    group.deleted({PLACE, OTHER})
    assert plan(group).delete_group


def test_a_group_with_topics_of_its_own_stays() -> None:
    group = FollowedGroup("link", "far-app-1", 0)
    group.deleting = True
    group.found({}, True, 100.0, 1000.0)
    assert not plan(group)


def test_a_committed_offset_that_is_not_known_is_left_alone() -> None:
    group = followed(p0=committed_at(3))
    group.not_known(PLACE)
    assert not plan(group)
    assert group.pending[PLACE].code == "POSITION_NOT_KNOWN"
    group.want(PLACE, committed_at(4), 90.0)
    assert plan(group).commit == {PLACE: committed_at(4)}


def test_unchanged_offsets_are_committed_again_before_they_expire() -> None:
    group = followed()
    group.want(PLACE, committed_at(3), 90.0)
    group.committed({PLACE: committed_at(3)}, 100.0, 1000.0)
    assert not plan(group, now=1099.0)
    assert plan(group, now=1100.0).renew == {PLACE: committed_at(3)}
    group.committed({PLACE: committed_at(3)}, 1100.0, 1000.0)
    assert not plan(group, now=1101.0)


@pytest.mark.parametrize("seed", seeds(30))
def test_differences_are_what_they_are_however_it_came_to_them(seed: int) -> None:
    rng = random.Random(seed)
    group, places = FollowedGroup("link", "far-app-1", 0), [("remote-t", number) for number in range(4)]
    for now in range(300):
        place, some = rng.choice(places), rng.sample(places, rng.randrange(5))
        match rng.randrange(8):
            case 0 | 1:
                group.want(place, rng.choice([None, committed_at(rng.randrange(3))]), float(now))
            case 2:
                group.found({each: committed_at(rng.randrange(3)) for each in some}, False, float(now), 50.0)
            case 3:
                group.committed({each: group.wanted[each] for each in some if each in group.wanted}, float(now), 50.0)
            case 4:
                group.deleted(some)
            case 5:
                rng.choice([group.not_known, group.forget])(place)
            case 6:
                group.silence({each: Pending("TOPICS_DIFFER", "") for each in some}, by=now)
            case 7 if not rng.randrange(4):
                group.is_not_answered()
        has = group.has or {}
        left = {*group.unknown, *group.silent}
        expected = {each for each in {*group.wanted, *has} - left if group.wanted.get(each) != has.get(each)}
        assert group.differences == expected
        if group.has is not None:
            assert group.since.keys() <= expected
            assert set(group.to_renew(now)) == {each for each, due in group.renew_at.items() if due <= now}
            assert group.due_at <= min([group.read_at, *group.renew_at.values()])


def test_committed_offsets_that_were_found_are_renewed_soon() -> None:
    group = followed(p0=committed_at(3))
    group.want(PLACE, committed_at(3), 90.0)
    assert plan(group, now=100.0 + FIRST_RENEWAL_MAX_S).renew == {PLACE: committed_at(3)}


# ---- with a coordinator ----


def reason_at_leader(replicas: Replicas) -> str | None:
    found = status(replicas, "A")
    return None if found is None else found.reason


def test_a_deletion_waits_while_members_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(replicas: Replicas) -> None:
        replicas.b.subscriptions["far-app-1"] = {"remote-t"}
        log(replicas, deleted("app-1", "local-t"), group_gone("app-1"))
        await replicas.until("it waits", lambda: status(replicas).reason == "MEMBERS_SUBSCRIBED")
        assert (status(replicas).state, status(replicas).pending) == ("Catching Up", 1)
        await replicas.until("the leader knows", lambda: reason_at_leader(replicas) == "MEMBERS_SUBSCRIBED", 5)
        assert (status(replicas, "A").group, status(replicas, "A").positions) == ("app-1", 0)
        assert replicas.b.offsets["far-app-1"] == {PLACE: committed_at(5)}
        replicas.b.subscriptions.clear()
        await replicas.until("the group is gone", lambda: "far-app-1" not in replicas.b.offsets)
        await replicas.until("and forgotten", lambda: status(replicas) is None)

    in_replicas(monkeypatch, test)


def test_renewals_say_how_long_where_a_group_has_no_members(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(replicas: Replicas) -> None:
        replicas.b.renewed.clear()
        (group,) = replicas.ends["B"].group_follower.groups(LINK)
        group.committed({PLACE: committed_at(5)}, 0.0, 0.0)
        await replicas.until("renewed", lambda: replicas.b.renewed, 60)
        assert replicas.b.renewed == [("far-app-1", PLACE, RETENTION_MS)]
        replicas.b.subscriptions["far-app-1"] = {"remote-t"}
        group.committed({PLACE: committed_at(5)}, 0.0, 0.0)
        await replicas.until("renewed again", lambda: len(replicas.b.renewed) == 2, 60)
        assert replicas.b.renewed[1] == ("far-app-1", PLACE, None)

    in_replicas(monkeypatch, test)


@pytest.mark.parametrize(
    ("code", "name", "reason", "state"),
    [
        (16, "NOT_COORDINATOR", "COORDINATOR_NOT_AVAILABLE", "Catching Up"),
        (15, "COORDINATOR_NOT_AVAILABLE", "TRANSACTION_VERIFICATION_ENABLED", "Stopped"),
        (12, "OFFSET_METADATA_TOO_LARGE", "TARGET_REFUSES_OFFSETS", "Stopped"),
    ],
)
def test_refused_commits_are_shown_and_tried_again(
    code: int, name: str, reason: str, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(replicas: Replicas) -> None:
        taken = replicas.b.commit_offsets

        async def refuse(group: str, offsets: Any, retention_ms: int | None = None) -> Any:
            return dict.fromkeys(offsets, Refused(code, name))

        monkeypatch.setattr(replicas.b, "commit_offsets", refuse)
        log(replicas, commit("app-1", "local-t", 6))
        await replicas.until("it is shown", lambda: status(replicas).reason == reason)
        assert status(replicas).state == state
        assert name in status(replicas).message
        assert 0 <= status(replicas).pending_seconds < 5
        monkeypatch.setattr(replicas.b, "commit_offsets", taken)
        await until_at(replicas, {PLACE: committed_at(6)}, 20)
        assert status(replicas).state == "Following"

    in_replicas(monkeypatch, test)


def test_a_leader_that_was_overtaken_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(replicas: Replicas) -> None:
        follower = replicas.ends["B"].group_follower
        connection = replicas.ends["B"].peers.live[0]

        def part(
            epoch: int, whole: calls.WholePart | None = None, group: str = "far-app-1", partition: int = 0
        ) -> calls.GroupOffsets:
            told = calls.CommittedOffset(group, "remote-t", 0, 1, "", 0)
            return calls.GroupOffsets(2, (calls.OffsetsPart(partition, epoch, (told,), whole=whole),))

        whole = calls.WholePart(begin=True, end=True)
        await follower.group_offsets(connection, part(7, whole))
        with pytest.raises(LinkRejected, match="epoch 7"):
            await follower.group_offsets(connection, part(6, whole))
        with pytest.raises(LinkRejected, match="not told from its start"):
            await follower.group_offsets(connection, part(8))
        with pytest.raises(LinkRejected, match="consumer-group mine does not follow"):
            await follower.group_offsets(connection, part(0, calls.WholePart(begin=True), "mine", 1))

    in_replicas(monkeypatch, test)


def test_a_commit_whose_data_is_known_to_be_here_goes_out_before_the_call_is_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Clients of synchronous links wait for it: nothing is asked of the cluster first, and nothing else done."""

    async def test(replicas: Replicas) -> None:
        follower, taken = replicas.ends["B"].group_follower, replicas.b.commit_offsets
        connection = replicas.ends["B"].peers.live[0]
        begun: list[int] = []
        under_way: list[asyncio.Future[Any]] = []

        async def noted(group: str, offsets: Any, retention_ms: int | None = None) -> Any:
            begun.extend(each.offset for each in offsets.values())
            return await taken(group, offsets, retention_ms)

        async def tell(offset: int) -> list[int]:
            begun.clear()
            told = calls.CommittedOffset("far-app-1", "remote-t", 0, offset, "", 0)
            part = calls.OffsetsPart(0, replicas.a.partition(OFFSETS_TOPIC).leader_epoch, (told,))
            telling = follower.group_offsets(connection, calls.GroupOffsets(1, (part,)))
            under_way.append(asyncio.ensure_future(telling))  # noqa: TID251
            for _ in range(2):  # the call, and what it begins
                await asyncio.sleep(0)
            assert not under_way[-1].done()
            return list(begun)

        monkeypatch.setattr(replicas.b, "commit_offsets", noted)
        follower.data_came(PLACE, 10)
        assert await tell(10) == [10]
        assert await tell(8) == []  # one at a time
        await asyncio.gather(*under_way)
        await until_at(replicas, {PLACE: committed_at(8)})
        assert await tell(11) == []  # whether that is here it does not know
        assert status(replicas).reason is None
        await replicas.until("it waits", lambda: status(replicas).reason == "BEYOND_FOLLOWER_END")

    in_replicas(monkeypatch, test)


def test_nothing_is_committed_without_a_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(replicas: Replicas) -> None:
        log(replicas, commit("app-1", "local-t", 11))
        await replicas.until("it waits", lambda: status(replicas).pending == 1)
        replicas.ends["B"].context.lease_deadline = 0.0
        log(replicas, commit("app-1", "local-t", 6))
        await asyncio.sleep(5)
        assert replicas.b.offsets["far-app-1"] == {PLACE: committed_at(5)}
        replicas.ends["B"].context.lease_deadline = float("inf")
        await until_at(replicas, {PLACE: committed_at(6)})

    in_replicas(monkeypatch, test)


def test_a_detached_group_is_left_when_nothing_is_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(replicas: Replicas) -> None:
        follower = replicas.ends["B"].group_follower
        taken = replicas.b.commit_offsets
        begun = asyncio.Event()

        async def slow(*arguments: Any) -> Any:
            begun.set()
            await asyncio.sleep(3)
            return await taken(*arguments)

        monkeypatch.setattr(replicas.b, "commit_offsets", slow)
        log(replicas, commit("app-1", "local-t", 6))
        await begun.wait()
        replicas.controls["B"].apply(DetachNamespace(LINK, ResourceType.CONSUMER_GROUP, "far-app-"))
        assert replicas.b.offsets["far-app-1"] == {PLACE: committed_at(5)}
        await follower.left()
        assert replicas.b.offsets["far-app-1"] == {PLACE: committed_at(6)}
        log(replicas, commit("app-1", "local-t", 7))
        await asyncio.sleep(5)
        assert replicas.b.offsets["far-app-1"] == {PLACE: committed_at(6)}
        assert list(follower.groups(LINK)) == []

    in_replicas(monkeypatch, test)


def test_committed_offsets_stay_while_the_topics_are_attached_at_one_end_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ends are not attached and detached at once: what is not told meanwhile is not gone."""

    async def test(replicas: Replicas) -> None:
        control, topic = replicas.controls["A"], ResourceType.TOPIC
        control.apply(DetachNamespace(LINK, topic, "local-"))
        await asyncio.sleep(5)
        assert replicas.b.offsets["far-app-1"] == {PLACE: committed_at(5)}
        assert status(replicas).reason == "TOPICS_DIFFER"
        assert "remote-t follows over link" in status(replicas).message
        control.apply(AttachNamespace(LINK, topic, "local-", "remote-", Role.LEADER))
        log(replicas, commit("app-1", "local-t", 6))
        await until_at(replicas, {PLACE: committed_at(6)})

    in_replicas(monkeypatch, test)


def test_what_was_planned_before_a_truncation_is_not_committed_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(replicas: Replicas) -> None:
        control = replicas.controls["B"]
        follower = replicas.ends["B"].group_follower
        reason, views = Reason("TARGET_WRITTEN_BY_OTHERS", "somebody wrote"), (PartitionView(1, 0),)
        phase = TruncationPhase.COMPARING
        begun = Truncation(LINK, "remote-t", "old", reason, views, None, "p", "o", 0, phase, 0)
        follower._limit = asyncio.Semaphore(0)
        log(replicas, commit("app-1", "local-t", 10))
        await replicas.until("it is planned", lambda: any(group.busy for group in follower.groups(LINK)))
        control.state = control.state.evolve(truncations={"remote-t": begun})
        follower.control_changed(control.state)
        replicas.b.partition("remote-t").end = 7
        follower._limit.release()
        await asyncio.sleep(3)
        assert replicas.b.offsets["far-app-1"] == {PLACE: committed_at(5)}
        assert status(replicas).reason == "TRUNCATING"
        assert "is being truncated" in status(replicas).message
        replicas.b.offsets["far-app-1"] = {PLACE: committed_at(9)}  # a late one
        control.state = control.state.evolve(truncations={})
        follower.control_changed(control.state)
        await until_at(replicas, {PLACE: committed_at(7)})
        replicas.b.partition("remote-t").end = 10
        await until_at(replicas, {PLACE: committed_at(10)})

    in_replicas(monkeypatch, test)


def attach_others(replicas: Replicas, *ends: str) -> None:
    """Another pair of topic namespaces, at some ends."""
    topic = ResourceType.TOPIC
    for name, local, remote, role in (("A", "lo-", "re-", Role.LEADER), ("B", "re-", "lo-", Role.FOLLOWER)):
        if name in ends:
            attach = AttachNamespace(LINK, topic, local, remote, role, create_missing=True)
            assert isinstance(replicas.controls[name].apply(attach), Accepted)


@pytest.mark.parametrize("first", ["A", "B"])
def test_topics_that_one_end_alone_has_attached_keep_nothing_else(monkeypatch: pytest.MonkeyPatch, first: str) -> None:
    async def test(replicas: Replicas) -> None:
        replicas.a.add_topic("lo-u").partitions[0].write_values(*[b"x"] * 10)
        attach_others(replicas, first)
        replicas.b.offsets["far-app-1"]["re-u", 0] = committed_at(2)
        log(replicas, commit("app-1", "lo-u", 4), commit("app-1", "local-t", 6))
        stays = {("re-u", 0): committed_at(2)}
        await until_at(replicas, {PLACE: committed_at(6), **stays})
        await replicas.until("it shows", lambda: status(replicas).reason == "TOPICS_DIFFER", 15)
        assert "re-u" in status(replicas).message
        assert status(replicas).state == "Catching Up"
        log(replicas, deleted("app-1", "local-t"))
        await until_at(replicas, stays)
        attach_others(replicas, "A" if first == "B" else "B")
        await until_at(replicas, {("re-u", 0): committed_at(4)}, 20)
        await replicas.until("it is gone", lambda: status(replicas).state == "Following", 15)

    in_replicas(monkeypatch, test)


def test_a_topic_that_is_made_anew_at_the_source_keeps_no_other_from_being_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def test(replicas: Replicas) -> None:
        other = ("remote-u", 0)
        replicas.a.add_topic("local-u").partitions[0].write_values(*[b"x"] * 10)
        log(replicas, commit("app-1", "local-u", 3))
        await until_at(replicas, {PLACE: committed_at(5), other: committed_at(3)})
        control = replicas.controls["A"]
        reason, views = Reason("TARGET_WRITTEN_BY_OTHERS", "somebody wrote"), (PartitionView(1, 0),)
        begun = Truncation(
            "l", "local-t", str(uuid.UUID(int=1)), reason, views, None, "p", "o", 0, TruncationPhase.RECREATING, 0
        )
        # Another proxy is at it, whose lease may still run.
        control.state = control.state.evolve(truncations={"local-t": begun}, superseded={"o": ANOTHER_PROXY})
        log(replicas, deleted("app-1", "local-t"))
        replicas.cut()
        await replicas.connect()  # all is told again
        log(replicas, commit("app-1", "local-u", 4))
        await until_at(replicas, {PLACE: committed_at(5), other: committed_at(4)})
        await replicas.until("it shows", lambda: status(replicas).reason == "SOURCE_TRUNCATING", 15)
        control.state = control.state.evolve(truncations={})
        replicas.ends["A"].group_leader.wake()
        await until_at(replicas, {other: committed_at(4)})  # what was deleted there, too
        assert status(replicas).state == "Following"

    in_replicas(monkeypatch, test)


def test_what_has_not_been_told_whole_deletes_nothing() -> None:
    group = followed(p0=committed_at(3), p1=committed_at(4))
    group.want(PLACE, committed_at(3), 90.0)
    assert not group.plan({}, {}, 100.0, {}, whole=False)
    assert plan(group).delete == {OTHER}


def test_committed_offsets_stay_while_their_topic_is_made_anew_at_the_source(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes them with it, and gets them back."""

    async def test(replicas: Replicas) -> None:
        control = replicas.controls["A"]
        reason, views = Reason("TARGET_WRITTEN_BY_OTHERS", "somebody wrote"), (PartitionView(1, 0),)
        begun = Truncation(
            "l", "local-t", str(uuid.UUID(int=1)), reason, views, None, "p", "o", 0, TruncationPhase.RECREATING, 0
        )
        # Another proxy is at it, whose lease may still run.
        control.state = control.state.evolve(truncations={"local-t": begun}, superseded={"o": ANOTHER_PROXY})
        log(replicas, deleted("app-1", "local-t"))
        await asyncio.sleep(5)
        replicas.cut()
        await replicas.connect()  # all is told again
        await asyncio.sleep(5)
        assert replicas.b.offsets["far-app-1"] == {PLACE: committed_at(5)}
        log(replicas, commit("app-1", "local-t", 4))
        await asyncio.sleep(1)
        control.state = control.state.evolve(truncations={})
        replicas.ends["A"].group_leader.wake()
        await until_at(replicas, {PLACE: committed_at(4)})

    in_replicas(monkeypatch, test)


def test_what_the_leader_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(replicas: Replicas) -> None:
        log(replicas, commit("app-1", "alien", 3), (commit("app-1", "local-t", 0)[0], b"\x00\x09" + bytes(20)))
        await replicas.until("it is shown", lambda: status(replicas, "A").state == "Stopped")
        led = status(replicas, "A")
        assert (led.group, led.remote_group, led.role) == ("app-1", "far-app-1", "leader")
        assert led.unmapped_topics == ["alien"]
        assert led.positions == 1
        assert "offset commit of version 9" in led.message
        await replicas.until("the follower knows", lambda: status(replicas).reason == "POSITION_NOT_KNOWN")
        assert replicas.b.offsets["far-app-1"] == {PLACE: committed_at(5)}
        log(replicas, commit("app-1", "local-t", 7))
        await until_at(replicas, {PLACE: committed_at(7)})
        assert status(replicas).state == "Following"
        await replicas.until("the leader, too", lambda: status(replicas, "A").state == "Following", 5)

    in_replicas(monkeypatch, test)


def test_the_leader_end_knows_what_is_pending(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(replicas: Replicas) -> None:
        log(replicas, commit("app-1", "local-t", 12))
        await replicas.until("it knows", lambda: "committed offset is 12" in (status(replicas, "A").message or ""), 5)
        led = status(replicas, "A")
        assert (led.state, led.reason, led.pending) == ("Catching Up", "BEYOND_FOLLOWER_END", 1)
        assert led.pending_seconds > 0
        replicas.a.partition("local-t").write_values(b"x", b"y")
        await replicas.until("it is done", lambda: status(replicas, "A").state == "Following", 5)
        assert status(replicas, "A").pending == 0

    in_replicas(monkeypatch, test)


def test_a_commit_beyond_the_sources_log_is_as_the_source_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(replicas: Replicas) -> None:
        log(replicas, group_made("app-2"), commit("app-1", "local-t", 1000), commit("app-2", "local-t", 7))
        await until_at(replicas, {PLACE: committed_at(1000)}, 3)
        assert replicas.b.offsets["far-app-2"] == {PLACE: committed_at(7)}
        await replicas.until("nothing waits", lambda: status(replicas, "A").state == "Following", 3)
        seen = []
        real = replicas.b.commit_offsets

        async def noted(group: str, offsets: Any, retention_ms: int | None = None) -> Any:
            if retention_ms is None:  # else it is renewed as it is, which may be due at any time
                seen.append(offsets)
            return await real(group, offsets, retention_ms)

        monkeypatch.setattr(replicas.b, "commit_offsets", noted)
        await replicas.stop("B")
        replicas.start("B")
        await replicas.connect()
        await replicas.until("it follows again", lambda: getattr(status(replicas), "state", None) == "Following")
        await asyncio.sleep(3)
        assert not seen, "it is there already, and stays"

    in_replicas(monkeypatch, test)


def test_negative_offsets_are_as_the_source_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients reset groups with -1 and -2, and brokers keep that."""

    async def test(replicas: Replicas) -> None:
        for offset in (-1, -2, 3, -1):
            log(replicas, commit("app-1", "local-t", offset))
            await until_at(replicas, {PLACE: committed_at(offset)}, 3)
        await replicas.until("nothing waits", lambda: status(replicas, "A").state == "Following", 3)

    in_replicas(monkeypatch, test)


def test_negative_offsets_are_not_known_to_a_peer_of_before(monkeypatch: pytest.MonkeyPatch) -> None:
    older = tuple(each for each in features.FEATURES if each != features.NEGATIVE_OFFSETS)
    monkeypatch.setattr("support.replicas.FEATURES", older)

    async def test(replicas: Replicas) -> None:
        log(replicas, commit("app-1", "local-t", -2))
        await replicas.until("it is told", lambda: status(replicas).reason == "POSITION_NOT_KNOWN")
        assert replicas.b.offsets["far-app-1"] == {PLACE: committed_at(5)}

    in_replicas(monkeypatch, test)


def test_a_source_of_before_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    older = tuple(each for each in features.FEATURES if each != features.PARTITION_ENDS)
    monkeypatch.setattr("support.replicas.FEATURES", older)

    async def test(replicas: Replicas) -> None:
        log(replicas, commit("app-1", "local-t", 1000))
        await asyncio.sleep(10)
        assert status(replicas).reason == "BEYOND_FOLLOWER_END"
        assert replicas.b.offsets["far-app-1"] == {PLACE: committed_at(5)}

    in_replicas(monkeypatch, test)


def test_records_that_are_not_known_are_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(replicas: Replicas) -> None:
        statuses = replicas.ends["A"].parts.group_statuses
        assert statuses.warnings(replicas.controls["A"].state.links[LINK]) == []
        log(replicas, (b"\x00\x63", b"?"))
        await replicas.until("it is told", lambda: statuses.warnings(replicas.controls["A"].state.links[LINK]))
        (warning,) = statuses.warnings(replicas.controls["A"].state.links[LINK])
        assert warning.startswith("__consumer_offsets-0 has records of type 99, the last at offset 2")
        assert statuses.warnings(replicas.controls["B"].state.links[LINK]) == []

    in_replicas(monkeypatch, test)


def test_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(replicas: Replicas) -> None:
        log(replicas, commit("app-1", "local-t", 99))
        await replicas.until("it waits", lambda: status(replicas).pending == 1)
        families = replicas.ends["B"].parts.group_statuses.metrics()
        values = {
            (sample.name, sample.labels.get("reason")): sample.value for family in families for sample in family.samples
        }
        assert values["isthmus_link_groups", "BEYOND_FOLLOWER_END"] == 1
        assert values["isthmus_link_group_offsets_pending", None] == 1
        assert values["isthmus_link_group_offsets_pending_seconds", None] > 0
        assert values["isthmus_link_group_offsets_committed_total", None] == 1

    in_replicas(monkeypatch, test)


class Reading:
    """The first answer about a group is held back, until it is released; what is asked meanwhile waits, too."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, replicas: Replicas, group: str) -> None:
        self.begun, self.release = asyncio.Event(), asyncio.Event()
        self._group, self._read = group, replicas.b.committed_offsets
        monkeypatch.setattr(replicas.b, "committed_offsets", self._committed_offsets)

    async def _committed_offsets(self, groups: Any) -> Any:
        if self.begun.is_set():
            await self.release.wait()
            return await self._read(groups)
        found = await self._read(groups)
        if self._group in groups:
            self.begun.set()
            await self.release.wait()
        return found


async def told_anew_while_it_is_read(replicas: Replicas, reading: Reading) -> None:
    """A group that only the target has is read; meanwhile the link is lost, and the source tells of a group by its
    name."""
    replicas.b.offsets["far-app-2"] = {("own", 0): committed_at(1)}
    await asyncio.wait_for(reading.begun.wait(), 30)
    replicas.cut()
    log(replicas, commit("app-2", "local-t", 4))
    await replicas.connect()
    follower = replicas.ends["B"].group_follower
    await replicas.until("it is told", lambda: any(each.wanted for each in follower.groups(LINK)))


def test_what_was_read_of_a_group_says_nothing_of_the_one_that_was_told_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def test(replicas: Replicas) -> None:
        reading = Reading(monkeypatch, replicas, "far-app-2")
        await told_anew_while_it_is_read(replicas, reading)
        reading.release.set()
        await replicas.until("it is there", lambda: replicas.b.offsets["far-app-2"].get(PLACE) == committed_at(4))

    in_replicas(monkeypatch, test)


def test_no_commit_is_confirmed_by_what_was_read_before_it_was_told(monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(*_: Any) -> None:
        await asyncio.Event().wait()

    async def test(replicas: Replicas) -> None:
        replicas.controls["A"].apply(AlterLink(LINK, mode=LinkMode.SYNCHRONOUS))
        key = LinkPartition(LINK, OFFSETS_TOPIC, 0)
        leader = replicas.ends["A"].group_leader
        await replicas.until("it is pushed", lambda: leader.place(key))
        reading = Reading(monkeypatch, replicas, "far-app-2")
        monkeypatch.setattr(replicas.b, "commit_offsets", never)
        await told_anew_while_it_is_read(replicas, reading)
        reading.release.set()
        await asyncio.sleep(30)  # of the simulated clock
        pushed = leader.place(key)
        assert pushed is None or pushed.acked < replicas.a.partition(OFFSETS_TOPIC).end
        assert PLACE not in replicas.b.offsets["far-app-2"]

    in_replicas(monkeypatch, test)
