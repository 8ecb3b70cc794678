"""What a source says of its topics that are not there any more."""

from __future__ import annotations

import asyncio
import random
import uuid
from dataclasses import replace
from typing import Any

import pytest
from support.fake_cluster import FakeCluster, FakeContext, FakeControl, run_simulated
from support.peers import CalledAtOnce

from isthmus_control.anchors import Anchor
from isthmus_control.commands import AttachNamespace, ClaimBrokers, CreateLink, DetachNamespace
from isthmus_control.levels import with_known_level
from isthmus_control.model import BrokerClaim, ResourceType, Role
from isthmus_control.outcome import Accepted
from isthmus_control.truncations import Succession
from isthmus_plugins.replication.leader.deleted_topics import DeletedTopics
from isthmus_plugins.replication.link import calls
from isthmus_plugins.replication.link.connection import LinkRejected

GONE, NEXT, LINK_ID = (str(uuid.UUID(int=number, version=4)) for number in (1, 2, 3))
LEASE_S = 4.0


class Source:
    def __init__(self) -> None:
        rng = random.Random(1)
        self.cluster, self.control = FakeCluster(rng), FakeControl("A", rng)
        self.context: Any = FakeContext(self.cluster, self.control)
        claim = (BrokerClaim(1, "h", 1),)
        lease = ClaimBrokers("p", self.context.incarnation, claim, True, None, 4_000, with_known_level("0"), -1)
        self.control.apply(lease)
        self.control.anchors.known = Anchor("A", NEXT, 7, 1, 0, "")
        attached = AttachNamespace("a-to-b", ResourceType.TOPIC, "l-", "r-", Role.LEADER, create_missing=True)
        for body in (CreateLink("a-to-b", LINK_ID, "B", False), attached):
            assert isinstance(self.control.apply(body), Accepted)
        self.peer = CalledAtOnce("a-to-b", DeletedTopics(self.context).answers())
        self.there = str(uuid.UUID(bytes=self.cluster.add_topic("t").topic_id))

    async def says(self, *topic_ids: str) -> tuple[str, ...]:
        answer = await self.peer.call(calls.DeletedTopics(topic_ids, "l-"))
        assert answer.log == f"{NEXT}/7"
        return answer.topic_ids


def test_what_is_no_topic_id_is_refused() -> None:
    async def work() -> None:
        with pytest.raises(LinkRejected, match="'not-one' is no topic id"):
            await Source().says(GONE, "not-one")

    run_simulated(work())


def test_what_is_gone_for_a_lease_was_deleted() -> None:
    async def work() -> None:
        source = Source()
        assert await source.says(source.there, GONE) == ()
        await asyncio.sleep(LEASE_S / 2)
        assert await source.says(source.there, GONE) == ()
        await asyncio.sleep(LEASE_S)
        assert await source.says(source.there, GONE) == (GONE,)
        assert await source.says(source.there) == ()
        assert await source.says(GONE) == (GONE,)
        await asyncio.sleep(10 * LEASE_S)
        assert await source.says(GONE) == (), "what nobody has asked for begins anew"
        source.cluster.found["t"].topic_id = uuid.UUID(GONE).bytes
        await asyncio.sleep(LEASE_S)
        assert await source.says(GONE) == (), "it is there"
        del source.cluster.found["t"]
        await asyncio.sleep(LEASE_S)
        assert await source.says(GONE) == ()

    run_simulated(work())


@pytest.mark.parametrize("which", ["succeeded", "truncated"])
def test_what_was_made_anew_was_not_deleted(which: str) -> None:
    async def work() -> None:
        source = Source()
        await source.says(GONE)
        await asyncio.sleep(2 * LEASE_S)
        state = source.control.state
        if which == "succeeded":
            state = state.evolve(successions={"u": (Succession(GONE, NEXT, (0,)),)})
        else:
            state = state.evolve(past_truncations=(truncation(),))
        source.control.state = state
        assert await source.says(GONE) == ()

    run_simulated(work())


def truncation() -> Any:
    """One that is over, of the topic that is gone."""

    class Past:
        topic_id = GONE

    return Past()


def test_of_what_it_does_not_lead_it_says_nothing() -> None:
    """Also where the target does not know yet that it was detached."""

    async def work() -> None:
        source = Source()
        await source.says(GONE)
        await asyncio.sleep(2 * LEASE_S)
        assert await source.says(GONE) == (GONE,)
        with pytest.raises(LinkRejected, match="leads no topics"):
            await source.peer.call(calls.DeletedTopics((GONE,), "m-"))
        source.control.apply(DetachNamespace("a-to-b", ResourceType.TOPIC, "l-"))
        with pytest.raises(LinkRejected, match="leads no topics"):
            await source.says(GONE)

    run_simulated(work())


def test_without_a_lease_nothing_is_said() -> None:
    async def work() -> None:
        source = Source()
        await source.says(GONE)
        await asyncio.sleep(2 * LEASE_S)
        lease = source.control.state.proxies["p"]
        source.control.state = source.control.state.evolve(proxies={"p": replace(lease, incarnation="another")})
        with pytest.raises(LinkRejected, match="no lease"):
            await source.says(GONE)
        source.context.lease_deadline = 0.0
        with pytest.raises(LinkRejected, match="no lease"):
            await source.says(GONE)

    run_simulated(work())
