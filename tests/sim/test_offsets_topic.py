"""A seeded simulation of copies of an offsets topic: transactions, cuts, kills, moving leaders, rotated keys.

After every step, each offset of the copy that has a record has that record of the source, and whatever of the source is
to leave and stands before the copy's end is there; nothing else ever is. In the end the copy is complete.
"""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest
from support.fake_cluster import run_simulated
from support.offsets import KeyValue, commit, deleted, group_gone, group_made, offsets_batch
from support.replicas import LINK, Replicas
from support.seeds import quarters

from isthmus_control.commands import SetOffsetsTopic
from isthmus_control.model import OffsetsCopy, OffsetsForm, Role
from isthmus_plugins.cluster import TransactionMarkers
from isthmus_protocol.group_names import GroupPatterns
from isthmus_protocol.offsets_cipher import parse_keyring, with_new_key
from isthmus_protocol.producer_ids import is_links_own
from isthmus_protocol.record_codec import decode_records

SEEDS = 8
STEPS = 80
OFFSETS, COPY = "__consumer_offsets", "__consumer_offsets_A"
LEAVING = ("app-*", "billing")
GROUPS = ("app-1", "app-2", "billing", "hidden", "hidden-2")
FORMS = {
    "whole": OffsetsCopy(OffsetsForm.WHOLE),
    "redacted": OffsetsCopy(OffsetsForm.REDACTED, LEAVING),
    "encrypted": OffsetsCopy(OffsetsForm.ENCRYPTED),
}


class Storm:
    """What happens to an offsets topic and its copy, and what the copy may have."""

    def __init__(self, replicas: Replicas, copy: OffsetsCopy, ring: Path) -> None:
        self.replicas = replicas
        self.random = replicas.random
        self.copy = copy
        self.ring = ring
        for pattern in LEAVING:
            self._new_key(pattern)
        self.source = replicas.a.add_topic(OFFSETS, 2, {"cleanup.policy": "compact"}).partitions
        self.leaving: list[dict[int, KeyValue]] = [{} for _ in self.source]
        """By partition and offset: what is to be in the copy."""
        self.open: dict[int, tuple[int, dict[int, KeyValue]]] = {}
        """By producer id: the partition and records of an open transaction."""
        self.producer_ids = 0

    def _new_key(self, pattern: str) -> None:
        text, _ = with_new_key(self.ring.read_text() if self.ring.exists() else None, pattern)
        self.ring.write_text(text)

    def _records(self) -> list[tuple[str, KeyValue]]:
        found = []
        for _ in range(self.random.randint(1, 4)):
            group, topic = self.random.choice(GROUPS), self.random.choice("tu")
            made = (
                commit(group, topic, self.random.randrange(100), metadata="m" * self.random.randrange(9)),
                deleted(group, topic),
                group_made(group),
                group_gone(group),
            )
            found.append((group, self.random.choices(made, (6, 1, 2, 1))[0]))
        return found

    def _chosen(self, start: int, records: list[tuple[str, KeyValue]]) -> dict[int, KeyValue]:
        chosen = GroupPatterns(("*",) if self.copy.form is OffsetsForm.WHOLE else LEAVING)
        return {start + index: record for index, (group, record) in enumerate(records) if group in chosen}

    def write(self) -> None:
        index = self.random.randrange(len(self.source))
        records = self._records()
        self.leaving[index] |= self._chosen(self.source[index].end, records)
        self.source[index].write(offsets_batch(self.source[index].end, [record for _, record in records]))

    def begin(self) -> None:
        index, records = self.random.randrange(len(self.source)), self._records()
        self.producer_ids += 1
        self.open[self.producer_ids] = index, self._chosen(self.source[index].end, records)
        batch = offsets_batch(0, [record for _, record in records], self.producer_ids)
        assert self.source[index].produce(batch)[0] == 0

    def end(self) -> None:
        if not self.open:
            return
        producer_id = self.random.choice(list(self.open))
        index, records = self.open.pop(producer_id)
        committed = self.random.random() < 0.5
        if committed:
            self.leaving[index] |= records
        assert self.source[index].mark(TransactionMarkers(OFFSETS, index, producer_id, 0, committed, 0)) == 0

    def rotate(self) -> None:
        self._new_key(self.random.choice(LEAVING))

    def move_leader(self) -> None:
        cluster = self.random.choice((self.replicas.a, self.replicas.b))
        for name in (OFFSETS, COPY):
            if name in cluster.found:
                self.random.choice(cluster.found[name].partitions).move(self.random.choice(cluster.brokers))

    def trouble(self) -> None:
        for each in (self.replicas.a, self.replicas.b, *self.replicas.controls.values()):
            each.trouble = self.random.choice((0.0, 0.05, 0.3))

    async def cut(self) -> None:
        self.write()
        self.replicas.cut()
        await asyncio.sleep(self.random.choice((0.0, 0.1, 3.0)))
        await self.replicas.connect()

    async def kill(self) -> None:
        which = self.random.choice(("A", "B", "AB"))
        await self.replicas.stop(which)
        await asyncio.sleep(self.random.choice((0.0, 0.3, 5.0)))
        self.replicas.start(which)
        await self.replicas.connect()

    async def blow(self) -> None:
        actions = (self.write, self.begin, self.end, self.rotate, self.move_leader, self.trouble, self.cut, self.kill)
        for _ in range(STEPS):
            await asyncio.sleep(self.random.choice((0.001, 0.01, 0.1, 1.0)))
            done = self.random.choices(actions, (40, 8, 8, 2, 4, 5, 5, 3))[0]()
            if done is not None:
                await done
            self.check()

    def check(self) -> None:
        keyring = parse_keyring(self.ring.read_text())
        if COPY not in self.replicas.b.found:
            return
        for index, partition in enumerate(self.replicas.b.found[COPY].partitions):
            found: dict[int, KeyValue] = {}
            for header, data in zip(partition.headers, partition.log, strict=True):
                if header.is_control or (header.is_transactional and is_links_own(header.producer_id)):
                    continue
                for record in decode_records(data):
                    plain = keyring.decrypt(record)
                    assert plain is not None
                    assert plain.key is not None
                    found[plain.offset] = plain.key, plain.value
            expected = {offset: record for offset, record in self.leaving[index].items() if offset < partition.end}
            assert found == expected, f"partition {index}, which ends at {partition.end}"

    def complete(self) -> bool:
        copies = self.replicas.b.found[COPY].partitions if COPY in self.replicas.b.found else []
        return [each.end for each in copies] == [each.end for each in self.source]


async def simulate(seed: int, copy: OffsetsCopy, ring: Path) -> None:
    replicas = Replicas(random.Random(seed))
    replicas.keyring_file = ring
    storm = Storm(replicas, copy, ring)
    for name, role in (("B", Role.FOLLOWER), ("A", Role.LEADER)):
        replicas.controls[name].apply(SetOffsetsTopic(LINK, role, copy))
    replicas.start()
    await replicas.connect()
    await storm.blow()
    for each in (replicas.a, replicas.b, *replicas.controls.values()):
        each.trouble = 0.0
    while storm.open:
        storm.end()
    await replicas.connect()
    await replicas.until("the copy is complete", storm.complete)
    storm.check()
    await replicas.stop()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("seed", quarters(range(SEEDS)))
def test_a_copy_has_what_may_leave_and_nothing_else(
    seed: int, form: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run_simulated(simulate(seed, FORMS[form], tmp_path / "ring.json"))
