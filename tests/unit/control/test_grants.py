"""How grants are written, and what they cover."""

from __future__ import annotations

import pytest

from isthmus_control.grants import BROKER_SETTINGS, EVERYTHING, covers, needed, parse_grant, parse_grants
from isthmus_control.model import Grant, ResourceType, Right, Role

GROUP, PRINCIPAL, TOPIC = ResourceType.CONSUMER_GROUP, ResourceType.PRINCIPAL, ResourceType.TOPIC


@pytest.mark.parametrize(
    ("text", "grant"),
    [
        ("follow:orders-", Grant(Right.FOLLOW, TOPIC, "orders-")),
        ("lead:", Grant(Right.LEAD, TOPIC, "")),
        ("lead:consumer-group:app-", Grant(Right.LEAD, GROUP, "app-")),
        ("lead:consumer-group:a:b,c", Grant(Right.LEAD, GROUP, "a:b,c")),
        ("follow:principal:User:app-", Grant(Right.FOLLOW, PRINCIPAL, "User:app-")),
        ("replace:orders-", Grant(Right.REPLACE, TOPIC, "orders-")),
        ("broker-settings", BROKER_SETTINGS),
    ],
)
def test_a_grant_is_read_as_it_is_written(text: str, grant: Grant) -> None:
    assert parse_grant(text) == grant
    assert str(grant) == text
    assert parse_grants(f"lead:x,{text},follow:y") == (parse_grant("lead:x"), grant, parse_grant("follow:y"))


@pytest.mark.parametrize("text", ["", "orders-", "lead", "write:orders-", "broker-settings:", "broker-settings:x"])
def test_what_is_no_grant_says_what_one_is(text: str) -> None:
    with pytest.raises(ValueError, match="follow:PREFIX"):
        parse_grants(text)


def test_a_prefix_covers_what_begins_with_it() -> None:
    grant = parse_grant("lead:orders-")
    for wanted, covered in {
        "lead:orders-": True,
        "lead:orders-eu": True,
        "lead:orders": False,
        "lead:": False,
        "follow:orders-": False,
        "replace:orders-": False,
        "lead:consumer-group:orders-": False,
    }.items():
        assert covers(grant, parse_grant(wanted)) is covered, wanted
    assert covers(parse_grant("lead:"), parse_grant("lead:x"))
    assert not covers(parse_grant("lead:"), parse_grant("lead:_x")), "the empty prefix holds nothing of these"
    assert not covers(parse_grant("lead:"), parse_grant("lead:__consumer_offsets"))


def test_everything_is_all_that_can_be_asked_for() -> None:
    for kind in ResourceType:
        for role in Role:
            for prefix in ("", "x", *(() if kind is PRINCIPAL else ("_x",))):
                wanted = needed(kind, prefix, role, replaces=True, disable_transaction_verification=True)
                assert all(any(covers(grant, each) for grant in EVERYTHING) for each in wanted)
