"""What a cluster says of where its followed namespaces come from, as far as it knows by itself."""

from __future__ import annotations

import asyncio
import random
import uuid
from typing import Any

import pytest
from support.fake_cluster import FakeCluster, FakeContext, FakeControl

from isthmus_control.commands import AttachNamespace, CreateLink
from isthmus_control.model import ResourceType, Role
from isthmus_control.outcome import Accepted
from isthmus_plugins.replication.link import calls
from isthmus_plugins.replication.link.calls import NamespaceAt
from isthmus_plugins.replication.link.peers import LinkPeers
from isthmus_plugins.replication.operations.rings import HOPS_MAX, Rings

TOPIC, GROUP = ResourceType.TOPIC, ResourceType.CONSUMER_GROUP


@pytest.mark.parametrize(
    ("kind", "prefix", "origin", "path"),
    [
        (TOPIC, "b-", ("A", "a-"), [("A", "a-")]),
        (TOPIC, "b-x-", ("A", "a-"), [("A", "a-x-")]),
        (TOPIC, "b-x-", ("A", "a-x-y-"), [("A", "a-x-")]),
        (TOPIC, "", ("A", "a-"), [("A", "a-")]),
        (TOPIC, "b-x-", ("A", "a-y-"), []),
        (TOPIC, "b-", ("A", "other-"), []),
        (TOPIC, "b-", ("C", "a-"), []),
        (TOPIC, "led-", ("A", "led-"), []),
        (TOPIC, "other-", ("A", "a-"), []),
        (GROUP, "b-", ("A", "a-"), []),
    ],
)
def test_a_namespace_comes_from_another_one_that_shares_names_with_it(
    kind: ResourceType, prefix: str, origin: tuple[str, str], path: list[tuple[str, str]]
) -> None:
    rng = random.Random(1)
    control = FakeControl("B", rng)
    context: Any = FakeContext(FakeCluster(rng, [1]), control)
    for body in (
        CreateLink("l", str(uuid.UUID(int=1, version=4)), "A", True, ("a:1",)),
        AttachNamespace("l", TOPIC, "b-", "a-", Role.FOLLOWER, create_missing=True),
        AttachNamespace("l", TOPIC, "led-", "led-", Role.LEADER, create_missing=True),
    ):
        assert isinstance(control.apply(body), Accepted)
    rings = Rings(context, LinkPeers(context))
    nobody: Any = None
    question = calls.ComesFrom(kind, prefix, NamespaceAt(*origin), HOPS_MAX)
    answer = asyncio.run(rings.on_comes_from(nobody, question))
    assert [*answer.path] == path
