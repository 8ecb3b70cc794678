"""What is shown of the partitions of a synchronous link."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from support.replicas import LINK, Replicas

from isthmus_control.clock import Hlc, Register
from isthmus_control.model import LinkMode
from isthmus_control.states import PartitionState, ReasonCode
from isthmus_plugins.links import PartitionStatus, SyncStatus
from isthmus_plugins.replication.link import reasons
from isthmus_plugins.replication.sync.status import note_led

NOT_CONFIRMED = SyncStatus(state="Out-Of-Sync", reason=ReasonCode.TIMEOUT_ERROR, message="nothing was confirmed")


@pytest.mark.parametrize(
    ("reason", "shown"),
    [
        (None, ReasonCode.TIMEOUT_ERROR),
        (ReasonCode.TARGET_LACKS_REPLICAS, ReasonCode.TIMEOUT_ERROR),
        (ReasonCode.TARGET_REFUSES_RECORDS, ReasonCode.TARGET_REFUSES_RECORDS),
        (ReasonCode.DECISION_NOT_STORED, ReasonCode.DECISION_NOT_STORED),
        (reasons.BROKER_UNAVAILABLE, reasons.BROKER_UNAVAILABLE),
    ],
)
def test_why_a_partition_stands_still_is_shown_before_what_came_of_it(reason: str | None, shown: str) -> None:
    link = Replicas(random.Random(1), 1).controls["A"].state.links[LINK]
    settings = replace(link.settings, mode=Register(LinkMode.SYNCHRONOUS, Hlc(1, 0, "A")))
    status = PartitionStatus(
        topic="local-t",
        remote_topic="remote-t",
        partition=0,
        role="leader",
        state=PartitionState.CATCHING_UP,
        reason=reason,
        message=reason,
    )
    note_led(replace(link, settings=settings), lambda key: NOT_CONFIRMED, [status])
    assert (status.state, status.reason, status.sync) == (PartitionState.OUT_OF_SYNC, shown, NOT_CONFIRMED)
