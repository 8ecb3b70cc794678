"""Copies of offsets topics between whole ends on model clusters: forms, open transactions, keyrings, views."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from support.fake_cluster import run_simulated
from support.offsets import KeyValue, commit, deleted, offsets_batch
from support.partition_log import Partition
from support.replicas import INDEX, LINK, Replicas

from isthmus_control.commands import SetOffsetsTopic
from isthmus_control.model import OffsetsCopy, OffsetsForm, Role
from isthmus_plugins.cluster import TransactionMarkers
from isthmus_plugins.links import OffsetsView
from isthmus_plugins.replication.offsets_topic.keyring import KeyringFile
from isthmus_plugins.replication.offsets_topic.view import read_view
from isthmus_plugins.replication.partitions import LinkPartition
from isthmus_protocol.offsets_cipher import EMPTY_KEYRING, Keyring, KeyringError, parse_keyring, with_new_key
from isthmus_protocol.record_codec import decode_records
from isthmus_protocol.record_equality import batch_digest

OFFSETS = "__consumer_offsets"
COPY = f"{OFFSETS}_A"
WHOLE = OffsetsCopy(OffsetsForm.WHOLE)
ENCRYPTED = OffsetsCopy(OffsetsForm.ENCRYPTED)
REDACTED = OffsetsCopy(OffsetsForm.REDACTED, ("app-*",))


class Offsets:
    """A's offsets topic with one partition, and its copy at B."""

    def __init__(self, replicas: Replicas, ring: Path) -> None:
        self.replicas = replicas
        self.ring = ring
        replicas.a.add_topic(OFFSETS, 1, {"cleanup.policy": "compact"})

    @property
    def source(self) -> Partition:
        return self.replicas.a.partition(OFFSETS)

    @property
    def copy(self) -> Partition:
        return self.replicas.b.partition(COPY)

    def choose(self, copy: OffsetsCopy | None) -> None:
        self.replicas.controls["B"].apply(SetOffsetsTopic(LINK, Role.FOLLOWER, copy))
        self.replicas.controls["A"].apply(SetOffsetsTopic(LINK, Role.LEADER, copy))

    def write(self, *records: KeyValue) -> None:
        self.source.write(offsets_batch(self.source.end, records))

    def begin(self, producer_id: int, *records: KeyValue) -> None:
        """Write records of a transaction that stays open."""
        assert self.source.produce(offsets_batch(0, records, producer_id))[0] == 0

    def end(self, producer_id: int, committed: bool) -> None:
        assert self.source.mark(TransactionMarkers(OFFSETS, 0, producer_id, 0, committed, 0)) == 0

    async def until_copied(self, end: int | None = None) -> None:
        expected = self.source.end if end is None else end
        await self.replicas.until(
            f"the copy ends at {expected}", lambda: COPY in self.replicas.b.found and self.copy.end == expected
        )

    async def view(self, keyring: Keyring = EMPTY_KEYRING, group: str | None = None) -> OffsetsView:
        state = self.replicas.controls["B"].state
        link = state.links[LINK]
        mapping = link.offsets_topic(Role.FOLLOWER)
        assert mapping is not None
        return await read_view(self.replicas.ends["B"].context, link, mapping, keyring, group)


def on_offsets(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, work: Callable[[Offsets], Awaitable[None]], ring: str = ""
) -> None:
    path = tmp_path / "ring.json"
    if ring:
        path.write_text(ring)

    async def run() -> None:
        replicas = Replicas(random.Random(1), 1)
        replicas.keyring_file = path
        replicas.start()
        await replicas.connect()
        await work(Offsets(replicas, path))
        await replicas.stop()

    run_simulated(run())


def committed_offsets(view: OffsetsView) -> dict[tuple[str, str, int], int]:
    return {(group.group, each.topic, each.partition): each.offset for group in view.groups for each in group.offsets}


def test_a_whole_copy_is_equal_batch_by_batch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    async def work(offsets: Offsets) -> None:
        offsets.write(commit("app-1", "t", 5), commit("other", "t", 6))
        offsets.choose(WHOLE)
        await offsets.until_copied()
        offsets.write(commit("app-1", "t", 7))
        await offsets.until_copied()
        theirs = [batch_digest(data, INDEX["A"]) for data in offsets.source.log]
        assert [batch_digest(data, INDEX["B"]) for data in offsets.copy.log] == theirs
        configs = offsets.replicas.b.found[COPY].configs
        assert configs["cleanup.policy"] == "compact,delete"
        assert committed_offsets(await offsets.view()) == {("app-1", "t", 0): 7, ("other", "t", 0): 6}
        assert committed_offsets(await offsets.view(group="other")) == {("other", "t", 0): 6}

    on_offsets(monkeypatch, tmp_path, work)


def test_what_is_open_waits_and_what_was_aborted_never_leaves(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    async def work(offsets: Offsets) -> None:
        offsets.choose(WHOLE)
        offsets.write(commit("app-1", "t", 1))
        await offsets.until_copied()
        for producer_id, committed in ((7, False), (8, True)):
            before = offsets.source.end
            offsets.begin(producer_id, commit("app-1", "t", producer_id, metadata="open"))
            offsets.write(commit("app-2", "t", producer_id))
            await asyncio.sleep(1)
            assert offsets.copy.end == before
            offsets.end(producer_id, committed)
            await offsets.until_copied()
            assert committed_offsets(await offsets.view())["app-1", "t", 0] == (8 if committed else 1)
        values = [record.value for data in offsets.copy.log for record in decode_records(data)]
        assert sum(b"open" in (value or b"") for value in values) == 1

    on_offsets(monkeypatch, tmp_path, work)


def test_a_redacted_copy_has_the_offsets_and_the_chosen_groups(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    async def work(offsets: Offsets) -> None:
        offsets.choose(REDACTED)
        for offset in range(20):
            offsets.write(commit("secret", "hidden", offset), commit("app-1", "t", offset), commit("secret", "u", 1))
            offsets.write(commit("secret", "hidden", offset))
        await offsets.until_copied()
        assert committed_offsets(await offsets.view()) == {("app-1", "t", 0): 19}
        assert b"secret" not in b"".join(bytes(data) for data in offsets.copy.log)
        kept = [record for data in offsets.source.log for record in decode_records(data) if b"app-1" in record.key]
        copied = [record for data in offsets.copy.log for record in decode_records(data) if b"app-1" in record.key]
        assert copied == kept

    on_offsets(monkeypatch, tmp_path, work)


def test_an_encrypted_copy_survives_cuts_and_opens_with_its_keys(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    text, _ = with_new_key(None, "app-*")
    text, billing_id = with_new_key(text, "billing")

    async def work(offsets: Offsets) -> None:
        offsets.choose(ENCRYPTED)
        for offset in range(30):
            offsets.write(commit("app-1", "t", offset), commit("billing", "t", offset), commit("none", "t", offset))
            if offset % 7 == 0:
                await offsets.replicas.connect()
        await offsets.until_copied()
        everything = await offsets.view(parse_keyring(text))
        assert committed_offsets(everything) == {("app-1", "t", 0): 29, ("billing", "t", 0): 29}
        some = json.loads(text)
        del some["groups"]["billing"]
        view = await offsets.view(parse_keyring(json.dumps(some)))
        assert committed_offsets(view) == {("app-1", "t", 0): 29}
        assert (view.unreadable_records, view.unreadable_key_ids) == (1, [billing_id])
        blind = await offsets.view()
        assert (blind.groups, blind.unreadable_records, blind.damaged_records) == ([], 2, 0)
        raw = b"".join(bytes(data) for data in offsets.copy.log)
        assert not any(name in raw for name in (b"app-1", b"billing", b"none"))

    on_offsets(monkeypatch, tmp_path, work, text)


def test_deletions_count_across_rotation(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    text, _ = with_new_key(None, "app-*")

    async def work(offsets: Offsets) -> None:
        offsets.choose(ENCRYPTED)
        offsets.write(commit("app-1", "t", 1), commit("app-1", "u", 1))
        await offsets.until_copied()
        rotated, _ = with_new_key(text, "app-*")
        offsets.ring.write_text(rotated)
        offsets.write(deleted("app-1", "t"), commit("app-1", "u", 2))
        await offsets.until_copied()
        assert committed_offsets(await offsets.view(parse_keyring(rotated))) == {("app-1", "u", 0): 2}
        assert committed_offsets(await offsets.view(parse_keyring(text))) == {
            ("app-1", "t", 0): 1,
            ("app-1", "u", 0): 1,
        }
        (last,) = (data for data in offsets.copy.log[-1:])
        assert all(record.value is not None for record in decode_records(last))

    on_offsets(monkeypatch, tmp_path, work, text)


def test_without_a_keyring_nothing_leaves_and_status_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    text, _ = with_new_key(None, "app-*")

    async def work(offsets: Offsets) -> None:
        offsets.choose(ENCRYPTED)
        offsets.write(commit("app-1", "t", 1))
        leader = offsets.replicas.ends["A"].leader
        await offsets.replicas.until("it stops", lambda: any(each.code for each in leader.stopped.values()))
        (stopped,) = leader.stopped.values()
        assert stopped.code == "KEYRING_UNUSABLE"
        assert offsets.copy.end == 0
        offsets.ring.write_text(text)
        await offsets.until_copied()
        assert committed_offsets(await offsets.view(parse_keyring(text))) == {("app-1", "t", 0): 1}

    on_offsets(monkeypatch, tmp_path, work)


def test_another_form_holds_from_then_on_and_off_ends_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    async def work(offsets: Offsets) -> None:
        offsets.choose(WHOLE)
        offsets.write(commit("other", "t", 1))
        await offsets.until_copied()
        offsets.choose(REDACTED)
        key = LinkPartition(LINK, OFFSETS, 0)

        def has_form() -> bool:
            stream = offsets.replicas.ends["A"].leader.stream(key)
            return stream is not None and stream.copy == REDACTED

        await offsets.replicas.until("the stream has the form", has_form)
        offsets.write(commit("other", "t", 2), commit("app-1", "t", 2))
        await offsets.until_copied()
        assert committed_offsets(await offsets.view()) == {("other", "t", 0): 1, ("app-1", "t", 0): 2}
        offsets.choose(None)
        end = offsets.copy.end
        leader = offsets.replicas.ends["A"].leader
        await offsets.replicas.until("the stream ends", lambda: not leader.discovery.led)
        offsets.write(commit("app-1", "t", 3))
        offsets.choose(WHOLE)
        await offsets.replicas.until("it goes on", lambda: offsets.copy.end > end)

    on_offsets(monkeypatch, tmp_path, work)


# --- the keyring file


def test_a_keyring_file_is_read_again_when_it_changes(tmp_path: Path) -> None:
    path = tmp_path / "ring.json"
    file = KeyringFile(path)
    with pytest.raises(KeyringError, match="cannot be read"):
        file.keyring()
    text, _ = with_new_key(None, "app-*")
    path.write_text(text)
    first = file.keyring()
    assert file.keyring() is first
    path.write_text("{")
    for _ in range(2):
        with pytest.raises(KeyringError, match="not JSON") as caught:
            file.keyring()
        assert str(path) in str(caught.value)
    path.write_text(with_new_key(text, "app-*")[0])
    assert file.keyring() is not first
    path.write_bytes(b"\xff")
    with pytest.raises(KeyringError, match="UTF-8"):
        file.keyring()


def test_no_keyring_is_configured() -> None:
    file: Any = KeyringFile(None)
    assert not file.configured
    with pytest.raises(KeyringError, match="offsets_keyring_file"):
        file.keyring()
