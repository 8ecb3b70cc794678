"""Group offsets of both sides, compared."""

from __future__ import annotations

import pytest
from support.group_replicas import PLACE, committed_at, in_replicas, log, until_at
from support.offsets import commit, deleted
from support.replicas import LINK, Replicas

from isthmus_plugins.links import BothOffsets, CommittedOffsets, GroupOnBothSides, GroupVerdict
from isthmus_plugins.replication.comparison import groups
from isthmus_plugins.replication.link import calls
from isthmus_plugins.replication.link.connection import LinkRejected

SOURCE = ("local-t", 0)


async def verify(replicas: Replicas, end: str) -> GroupVerdict:
    """The verdict on the only group, asked of one end."""
    chosen = replicas.ends[end]
    link = replicas.controls[end].state.links[LINK]
    (verdict,) = await chosen.parts.link_verification.groups.verify(link, chosen.peers.live[0])
    return verdict


def at_source(replicas: Replicas, offset: int | None, metadata: str = "") -> None:
    """What the source's coordinator answers, and what its log has."""
    if offset is None:
        log(replicas, deleted("app-1", "local-t"))
        replicas.a.offsets["app-1"].clear()
    else:
        log(replicas, commit("app-1", "local-t", offset, metadata=metadata))
        replicas.a.offsets["app-1"] = {SOURCE: committed_at(offset, metadata), ("alien", 0): committed_at(1)}


def test_equal_from_both_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(replicas: Replicas) -> None:
        at_source(replicas, 7, "m")
        await until_at(replicas, {PLACE: committed_at(7, "m")})
        replicas.b.offsets["far-app-1"]["own", 0] = committed_at(3)
        for end, group, remote in (("A", "app-1", "far-app-1"), ("B", "far-app-1", "app-1")):
            verdict = await verify(replicas, end)
            assert verdict == GroupVerdict(group=group, remote_group=remote, equal=True, positions=1, waiting=0)

    in_replicas(monkeypatch, test)


def test_a_difference_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(replicas: Replicas) -> None:
        at_source(replicas, 7)
        await until_at(replicas, {PLACE: committed_at(7)})
        monkeypatch.setattr(replicas.ends["B"].group_follower, "_begin", lambda *_: None)  # nothing mends it now
        replicas.b.offsets["far-app-1"][PLACE] = committed_at(9, "rogue")
        verdict = await verify(replicas, "A")
        assert not verdict.equal
        assert verdict.difference == "local-t-0: the source has 7, the follower has 9 with metadata 'rogue'"
        replicas.b.offsets["far-app-1"] = {}
        verdict = await verify(replicas, "B")
        assert verdict.difference == "remote-t-0: the source has 7, the follower has none"
        at_source(replicas, None)
        replicas.b.offsets["far-app-1"] = {PLACE: committed_at(7)}
        verdict = await verify(replicas, "A")
        assert verdict.difference == "local-t-0: the source has none, the follower has 7"

    in_replicas(monkeypatch, test)


def test_what_is_ahead_of_the_data_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(replicas: Replicas) -> None:
        at_source(replicas, 11)
        for end in "AB":
            verdict = await verify(replicas, end)
            assert (verdict.equal, verdict.positions, verdict.waiting) == (True, 0, 1)

    in_replicas(monkeypatch, test)


def test_committed_offsets_are_listed_from_both_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    async def listed(replicas: Replicas, end: str, group: str | None = None) -> CommittedOffsets:
        chosen = replicas.ends[end]
        link = replicas.controls[end].state.links[LINK]
        return await chosen.parts.link_verification.groups.committed(link, chosen.peers.live[0], group)

    async def test(replicas: Replicas) -> None:
        at_source(replicas, 7)
        await until_at(replicas, {PLACE: committed_at(7)})
        at_source(replicas, 11)  # beyond the follower's data
        for end, group, remote, topic in (
            ("A", "app-1", "far-app-1", "local-t"),
            ("B", "far-app-1", "app-1", "remote-t"),
        ):
            offsets = [BothOffsets(topic=topic, partition=0, source_offset=11, follower_offset=7)]
            expected = [GroupOnBothSides(group=group, remote_group=remote, offsets=offsets)]
            assert (await listed(replicas, end)).groups == expected
            assert (await listed(replicas, end, group)).groups == expected
            assert (await listed(replicas, end, "another")).groups == []
        monkeypatch.setattr(groups, "GROUPS_LISTED_MAX", 0)
        left = await listed(replicas, "A")
        assert (left.groups, left.groups_left_off) == ([], 1)

    in_replicas(monkeypatch, test)


def test_others_are_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(replicas: Replicas) -> None:
        connection = replicas.ends["A"].peers.live[0]
        with pytest.raises(LinkRejected, match="in no namespace"):
            await connection.call(calls.Committed(("mine",)))
        with pytest.raises(LinkRejected, match="in no namespace"):
            await connection.call(calls.HighWatermarks((calls.PartitionName("mine", 0),)))

    in_replicas(monkeypatch, test)
