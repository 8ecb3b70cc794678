"""What is remembered of how far sources' offsets topics were confirmed."""

from __future__ import annotations

import uuid
from types import SimpleNamespace
from typing import Any

from support.command_log import CommandLog

from isthmus_control.commands import CreateLink
from isthmus_plugins.replication.groups.open_losses import NOTHING, Confirmed, OpenLosses


def test_what_was_confirmed_is_remembered_while_the_link_is_there() -> None:
    log = CommandLog("B")
    for number, name in enumerate(("one", "two"), 1):
        log.ok(CreateLink(name, str(uuid.UUID(int=number)), "A", False))
    context: Any = SimpleNamespace(control=log)
    losses = OpenLosses(context)
    for name in log.state.links:
        losses.confirmed((name, 7), 3, 100)
    losses.forget_others({"two"})
    assert losses.furthest(("one", 7)) == NOTHING
    assert losses.furthest(("two", 7)) == Confirmed(3, 100)
