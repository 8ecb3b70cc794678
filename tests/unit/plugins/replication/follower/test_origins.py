"""What a source says of its records is recorded before they come, and known to all who push them on."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from support.replicas import LINK, LINK_ID, Replicas, on_replicas

from isthmus_control.commands import AttachNamespace, CreateLink, RecordOriginEpochs, RecordOrigins
from isthmus_control.grants import EVERYTHING
from isthmus_control.model import ResourceType, Role
from isthmus_control.states import ReasonCode

SECOND = "b-to-c"


def pushed_on(replicas: Replicas) -> None:
    """B's topics are led to another cluster, too."""
    link_id = LINK_ID.replace("7", "8")
    control = replicas.controls["B"]
    control.apply(CreateLink(SECOND, link_id, "C", True, ("127.0.0.1:1",), grants=EVERYTHING))
    control.apply(AttachNamespace(SECOND, ResourceType.TOPIC, "remote-", "last-", Role.LEADER))


@pytest.mark.parametrize("relays", [True, False])
def test_what_is_pushed_on_comes_when_all_proxies_know_where_it_is_from(
    relays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work(replicas: Replicas) -> None:
        control: Any = replicas.controls["B"]
        if relays:
            pushed_on(replicas)
        source = replicas.a.add_topic("local-t").partitions[0]
        source.write_values(b"first")
        await replicas.until("copied", replicas.equal)
        known, asked = asyncio.Event(), list[int]()

        async def enforced(offset: int) -> None:
            asked.append(offset)
            await known.wait()

        control.enforced = enforced
        source.move(3 - source.leader)
        source.write_values(b"of another epoch")
        await asyncio.sleep(5)
        assert replicas.equal() is not relays
        recorded = control.state.origins["remote-t"].partitions[0]
        assert set(asked) == ({recorded.at_offset} if relays else set())
        assert [each.epoch for each in recorded.ranges[-1].epochs] == [1], "it is recorded"
        known.set()
        await replicas.until("copied", replicas.equal)

    on_replicas(monkeypatch, work, brokers=2)


def test_an_epoch_more_is_recorded_in_few_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(replicas: Replicas) -> None:
        source = replicas.a.add_topic("local-t").partitions[0]
        source.write_values(b"first")
        await replicas.until("copied", replicas.equal)
        for _ in range(3):
            source.move(3 - source.leader)
            source.write_values(b"of another epoch")
            await replicas.until("copied", replicas.equal)
        bodies = (RecordOrigins, RecordOriginEpochs)
        recorded = [type(each) for each in replicas.controls["B"].commands if isinstance(each, bodies)]
        assert recorded == [RecordOrigins] + [RecordOriginEpochs] * 3

    on_replicas(monkeypatch, work, brokers=2)


def test_a_log_that_is_not_its_sources_any_more_is_diverged_and_says_from_where_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By what is recorded, before anything is compared."""

    async def work(replicas: Replicas) -> None:
        source = replicas.a.add_topic("local-t").partitions[0]
        await replicas.until("a term begins", lambda: "local-t" in replicas.controls["A"].state.origins)
        for value in (b"kept", b"lost"):
            source.write_values(value)
        await replicas.until("copied", replicas.equal)
        await replicas.stop("A")
        replicas.a.lose_ends(1, lambda each: 1 if each is source else 0)
        source.write_values(b"another")
        replicas.start("A")
        await replicas.connect()
        told: list[tuple[str, str | None, str | None]] = []

        def parted() -> bool:
            told.extend(
                (str(each.state), each.reason, each.message)
                for name in "AB"
                for each in replicas.ends[name].parts.service.status(LINK).partitions
                if "recorded" in (each.message or "")
            )
            return len(told) > 1

        await replicas.until("told at both ends", parted)
        for state, reason, message in told:
            assert (state, reason) == ("Diverged", ReasonCode.UNEXPECTED_TRUNCATION)
            assert "ends at 2, is not the source's from offset 1 on" in (message or "")

    on_replicas(monkeypatch, work)
