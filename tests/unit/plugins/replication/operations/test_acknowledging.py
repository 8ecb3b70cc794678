"""What a source lost is told on both sides until an operator of either acknowledges it."""

from __future__ import annotations

import pytest
from support.plugins import Two, on_two

from isthmus_control.commands import AcknowledgeSourceLosses, FoundLoss, RecordSourceLosses
from isthmus_control.model import ResourceType
from isthmus_control.source_losses import LossState, LostCommit
from isthmus_plugins import links
from isthmus_plugins.links import OperationError
from isthmus_protocol.offsets_log import OFFSETS_TOPIC

GROUP = ResourceType.CONSUMER_GROUP
GROUPS = links.Attach(
    local="gl-", remote="gr-", role="leader", type="consumer-group", disable_transaction_verification=True
)
LOSS = FoundLoss(GROUP, "gr-", OFFSETS_TOPIC, "", 7, 5, 9, 1, LossState.CUT, 1, (LostCommit("gr-1", "r-t", 0, 8, 5),))


async def found(two: Two, partition: int = 7) -> None:
    control = two.controls["B"]
    link_id = control.state.links["a-to-b"].link_id
    loss = FoundLoss(GROUP, "gr-", OFFSETS_TOPIC, "", partition, 5, 9, 1, LossState.CUT, 1, LOSS.commits)
    control.apply(RecordSourceLosses("a-to-b", link_id, (loss,)))
    number = control.state.source_losses[-1].number
    await two.until("told", lambda: number in [each.number for each in two.a.status().source_losses])


@pytest.mark.parametrize("side", ["A", "B"])
def test_either_side_acknowledges_what_it_has_told(side: str) -> None:
    async def work(two: Two) -> None:
        await two.create()
        await two.connected()
        await two.a.links.attach("a-to-b", GROUPS)
        await found(two)
        (here,), (there,) = two.b.status().source_losses, two.a.status().source_losses
        assert (here.role, there.role, here.type, here.groups) == ("follower", "leader", "consumer-group", 1)
        assert [(each.group, each.offset, each.source_offset) for each in here.commits] == [("gr-1", 8, 5)]
        proxy = two.a if side == "A" else two.b
        assert (await proxy.links.acknowledge("a-to-b")).acknowledged == 1
        await two.until("told no more", lambda: not two.a.status().source_losses and not two.b.status().source_losses)
        assert (await proxy.links.acknowledge("a-to-b")).acknowledged == 0
        await found(two, 8)
        with pytest.raises(OperationError, match="no-link"):
            await proxy.links.acknowledge("no-link")

    on_two(work)


def test_a_source_that_was_restarted_is_told_again() -> None:
    async def work(two: Two) -> None:
        await two.create()
        await two.connected()
        await two.a.links.attach("a-to-b", GROUPS)
        await found(two)
        two.a.plugin.parts.told_losses._heard.clear()
        for connection in two.b.plugin.parts.peers.connections("a-to-b"):
            connection.close()
        await two.until("told again", lambda: len(two.a.status().source_losses) == 1)

    on_two(work)


def test_what_is_acknowledged_while_nobody_is_connected_is_told_no_more() -> None:
    async def work(two: Two) -> None:
        await two.create()
        await two.connected()
        await two.a.links.attach("a-to-b", GROUPS)
        await found(two)
        for connection in two.b.plugin.parts.peers.connections("a-to-b"):
            connection.close()
        (loss,) = two.controls["B"].state.source_losses
        two.controls["B"].apply(AcknowledgeSourceLosses("a-to-b", loss.number))
        assert len(two.a.status().source_losses) == 1
        await two.until("told no more", lambda: not two.a.status().source_losses)

    on_two(work)
