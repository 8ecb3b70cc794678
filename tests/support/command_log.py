"""The command log of one cluster, applied as it is written: what unit tests of its rules begin with."""

from __future__ import annotations

import uuid
from dataclasses import replace
from typing import Any

from isthmus_control import commands as c
from isthmus_control.apply import apply
from isthmus_control.control_state import ControlState
from isthmus_control.outcome import Accepted, Outcome


class CommandLog:
    """Commands of ``proxy-1``; each is read back as it was made."""

    def __init__(self, cluster_id: str = "A") -> None:
        self.state = ControlState(cluster_id)

    @property
    def at_ms(self) -> int:
        """When the next command is made."""
        return 1_000

    def do(self, body: c.Body, **envelope: Any) -> Outcome:
        command = c.Command(str(uuid.uuid4()), self.at_ms, "proxy-1", self.state.applied_offset, body)
        command = replace(command, **envelope)
        assert c.decode(c.encode(command, self.state.level)) == command
        self.state, outcome = apply(self.state, self.state.applied_offset + 1, command)
        return outcome

    def ok(self, body: c.Body, **envelope: Any) -> tuple[Any, ...]:
        outcome = self.do(body, **envelope)
        assert isinstance(outcome, Accepted), outcome
        return outcome.changes
