"""What this version writes in a control log below a new level is what the version before writes, and understands."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from typing import Any

import pytest
from support.upgrades import FROM, FROM_LEVEL
from support.versions import environment_of

from isthmus_control import commands as c
from isthmus_control.codec import canonical
from isthmus_control.control_state import ControlState
from isthmus_control.levels import KNOWN_LEVEL, with_known_level
from isthmus_control.model import BrokerClaim, ResourceType, Role
from isthmus_control.replica import Replica

pytestmark = [pytest.mark.suite("upgrade"), pytest.mark.timeout(60)]

READER = """
import json, sys
from isthmus_control.codec import canonical
from isthmus_control.commands import decode
from isthmus_control.control_state import ControlState
from isthmus_control.replica import Halted, Replica
replica = Replica(ControlState("A"))
said = []
for offset, line in enumerate(sys.stdin.buffer.read().splitlines()):
    try:
        said.append(type(replica.feed(offset, line).outcome).__name__)
    except Halted as halted:
        said.append(str(halted))
        break
print(json.dumps([said, canonical(replica.state).decode()]))
"""


def read_by_the_version_before(records: list[bytes]) -> tuple[list[str], str]:
    """What came of each record, and the state then."""
    done = subprocess.run(
        [sys.executable, "-c", READER],
        input=b"\n".join(records),
        env={**os.environ, **environment_of(FROM)},
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    said, state = json.loads(done.stdout)
    return said, state


class Log:
    def __init__(self) -> None:
        self.records: list[bytes] = []
        self.replica = Replica(ControlState("A"))

    def write(self, body: c.Body) -> Any:
        offset = len(self.records)
        command = c.Command(str(uuid.uuid4()), 1_000 + offset, "p", offset - 1, body)
        self.records.append(c.encode(command))
        return self.replica.feed(offset, self.records[-1]).outcome


def test_both_versions_come_to_the_same_state() -> None:
    log = Log()
    broker = (BrokerClaim(1, "h", 9),)
    name, link_id, incarnation = "a-to-b", str(uuid.uuid4()), str(uuid.uuid4())
    bodies = [
        c.ClaimBrokers("p", incarnation, broker, False, "h:1", 10_000, with_known_level("1.2"), -1),
        c.CreateNamespace(ResourceType.TOPIC, "orders-", True, "a move"),
        c.CreateLink(name, link_id, "B", True, ("b:9192",)),
        c.AttachNamespace(name, ResourceType.TOPIC, "in-", "out-", Role.FOLLOWER, create_missing=True),
        c.RegisterProducerIds("B"),
        c.RenewLease("p", incarnation, 3),
    ]
    outcomes = [type(log.write(body)).__name__ for body in bodies]
    assert outcomes == ["Accepted"] * len(bodies)
    assert read_by_the_version_before(log.records) == (outcomes, canonical(log.replica.state).decode())


def test_the_version_before_stops_where_the_level_is_raised_and_says_why() -> None:
    log = Log()
    log.write(c.CreateNamespace(ResourceType.TOPIC, "orders-"))
    log.write(c.RaiseLevel(FROM_LEVEL))
    log.write(c.RaiseLevel(KNOWN_LEVEL))
    said, _ = read_by_the_version_before(log.records)
    assert said[:-1] == ["Accepted"] * 2
    known = f"feature level {KNOWN_LEVEL}, and this version knows {FROM_LEVEL} at most: upgrade this proxy (offset 2)"
    assert known in said[-1]
