"""Which levels a proxy may claim: those that nobody has whose lease stands in the control log."""

from __future__ import annotations

import uuid
from typing import Any

from support.command_log import CommandLog

from isthmus_control import commands as c
from isthmus_control.levels import TREES
from isthmus_control.model import BrokerClaim
from isthmus_plugins.distributor.claims import free

ONE, OTHER = (str(uuid.UUID(int=number)) for number in (2, 3))


def lease(name: str, incarnation: str, broker: int) -> c.ClaimBrokers:
    return c.ClaimBrokers(name, incarnation, (BrokerClaim(broker, "h", 1),), False, None, 10_000, "1+level.6", -1)


def test_levels_are_free_until_claimed_and_when_the_lease_is_gone() -> None:
    log: Any = CommandLog()
    log.ok(c.RaiseLevel(TREES))
    log.ok(lease("one", ONE, 1))
    assert free(log.state, ONE) == [], "there is no tree"
    log.ok(c.ApplyTree(1, "c1", ("t-",), (4, 8), "{}"))
    assert free(log.state, ONE) == [4, 8]
    assert free(log.state, OTHER) == [], "it has no lease"
    log.ok(lease("other", OTHER, 2))
    log.ok(c.ClaimDistributor(4, ONE))
    assert (free(log.state, ONE), free(log.state, OTHER)) == ([8], [8])
    log.ok(c.ClaimDistributor(8, OTHER))
    assert free(log.state, ONE) == []
    log.ok(c.ExpireLease("other", OTHER, log.state.proxies["other"].renewed_at_offset))
    assert (free(log.state, ONE), free(log.state, OTHER)) == ([8], [])
