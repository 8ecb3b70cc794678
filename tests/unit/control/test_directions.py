"""What a link moves, and which way."""

from __future__ import annotations

import uuid

from support.command_log import CommandLog

from isthmus_control import commands as c
from isthmus_control.directions import followed, pushed, pushed_topics
from isthmus_control.model import OffsetsCopy, OffsetsForm, ResourceType, Role

TOPIC, GROUP = ResourceType.TOPIC, ResourceType.CONSUMER_GROUP


def test_what_leads_is_pushed_and_what_follows_is_taken() -> None:
    log = CommandLog("A")
    log.ok(c.CreateLink("a-to-b", str(uuid.uuid4()), "B", True, ("b:9192",)))
    log.ok(c.AttachNamespace("a-to-b", TOPIC, "orders-", "far-orders-", Role.LEADER, create_missing=True))
    log.ok(c.AttachNamespace("a-to-b", GROUP, "billing-", "far-billing-", Role.LEADER, create_missing=True))
    log.ok(c.AttachNamespace("a-to-b", TOPIC, "stock-", "far-stock-", Role.FOLLOWER, create_missing=True))
    log.ok(c.SetOffsetsTopic("a-to-b", Role.LEADER, OffsetsCopy(OffsetsForm.WHOLE)))
    link = log.state.links["a-to-b"]
    assert [each.local_prefix for each in pushed(link)] == ["orders-", "billing-"]
    assert [each.local_prefix for each in pushed(link, GROUP)] == ["billing-"]
    assert [each.local_prefix for each in followed(link)] == ["stock-"]
    assert followed(link, GROUP) == ()
    assert [each.local_prefix for each in pushed_topics(link)] == ["orders-", "__consumer_offsets"]
