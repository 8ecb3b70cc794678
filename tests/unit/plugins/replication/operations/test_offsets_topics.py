"""Operators choose the form of the copy of an offsets topic, at both ends."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.offsets import commit, offsets_batch
from support.plugins import Two, on_two

from isthmus_control.commands import SetOffsetsTopic
from isthmus_control.levels import ESCAPED_IDS
from isthmus_control.model import OffsetsForm, Role
from isthmus_control.outcome import Outcome
from isthmus_plugins import links
from isthmus_plugins.cluster import BrokerUnavailable
from isthmus_plugins.links import OperationError
from isthmus_protocol.offsets_cipher import with_new_key

OFFSETS, COPY = "__consumer_offsets", "__consumer_offsets_A"


def alter(form: links.OffsetsTopicForm, *groups: str) -> links.AlterLink:
    return links.AlterLink(offsets_topic=form, offsets_groups=list(groups))


def chosen(two: Two) -> list[tuple[str, str, list[str]]]:
    return [(each.role, each.form, each.groups) for side in (two.a, two.b) for each in side.status().offsets_topics]


def write(two: Two, *groups: str) -> None:
    partition = two.clusters["A"].partition(OFFSETS)
    partition.write(offsets_batch(partition.end, [commit(group, "t", 7) for group in groups]))


def test_a_copy_is_chosen_with_the_link_altered_shown_verified_and_ended() -> None:
    async def work(two: Two) -> None:
        two.clusters["A"].add_topic(OFFSETS, 1, {"cleanup.policy": "compact"})
        await two.create(offsets_topic="redacted", offsets_groups=["app-*", "app-*"])
        await two.connected()
        assert chosen(two) == [("leader", "redacted", ["app-*"]), ("follower", "redacted", ["app-*"])]
        write(two, "app-1", "other")
        await two.until(
            "copied", lambda: COPY in two.clusters["B"].found and two.clusters["B"].partition(COPY).end == 2
        )
        view = await two.b.links.offsets("a-to-b", None)
        assert [(group.group, group.offsets[0].offset) for group in view.groups] == [("app-1", 7)]
        for side in (two.a, two.b):
            report = await side.links.verify("a-to-b", lambda done, total: None)
            assert report.equal
            (verdict,) = report.partitions
            assert verdict.note == (
                "redacted: not compared record by record; latest records of the groups that are copied: 1 at the "
                "source, 1 in the copy"
            )
        status = await two.a.links.alter("a-to-b", alter("whole"))
        assert [each.form for each in status.offsets_topics] == ["whole"]
        write(two, "other")
        await two.until("the rest", lambda: two.clusters["B"].partition(COPY).end == 3)
        assert len((await two.b.links.offsets("a-to-b", None)).groups) == 2
        await two.a.links.alter("a-to-b", alter("off"))
        assert chosen(two) == []
        assert two.controls["B"].state.histories[COPY].open_range(0) is None
        with pytest.raises(OperationError, match="brings no offsets topic here"):
            await two.b.links.offsets("a-to-b", None)

    on_two(work)


def test_a_copy_that_lacks_records_is_not_equal() -> None:
    async def work(two: Two) -> None:
        two.clusters["A"].add_topic(OFFSETS, 1, {"cleanup.policy": "compact"})
        await two.create(offsets_topic="redacted", offsets_groups=["app-*"])
        write(two, "app-1", "app-2")
        await two.until(
            "copied", lambda: COPY in two.clusters["B"].found and two.clusters["B"].partition(COPY).end == 2
        )
        two.clusters["B"].partition(COPY).clean({1})
        report = await two.a.links.verify("a-to-b", lambda done, total: None)
        assert not report.equal
        assert report.partitions[0].difference is not None
        assert "the copy has 1 latest records" in report.partitions[0].difference

    on_two(work)


def test_what_makes_no_sense_is_refused_at_once(tmp_path: Path) -> None:
    async def work(two: Two) -> None:
        for form, groups in (("redacted", []), ("whole", ["a"]), ("off", ["a"]), ("redacted", ["a*b"])):
            with pytest.raises(OperationError) as raised:
                await two.create(offsets_topic=form, offsets_groups=groups)
            assert raised.value.http_status == 422
        assert not two.controls["A"].state.links
        await two.create()
        await two.connected()
        with pytest.raises(OperationError, match="there is no link"):
            await two.a.links.alter("nope", alter("whole"))
        with pytest.raises(OperationError, match="no keyring is configured") as raised:
            await two.a.links.alter("a-to-b", alter("encrypted"))
        assert raised.value.code == "KEYRING_UNUSABLE"
        assert chosen(two) == []

    on_two(work)


def test_keys_are_needed_where_records_are_encrypted_and_where_they_are_read(tmp_path: Path) -> None:
    ring = tmp_path / "ring.json"
    ring.write_text(with_new_key(None, "app-*")[0])

    async def work(two: Two) -> None:
        two.clusters["A"].add_topic(OFFSETS, 1, {"cleanup.policy": "compact"})
        await two.create()
        await two.connected()
        two.a.links.offsets_topics._keyring_file._path = ring
        await two.a.links.alter("a-to-b", alter("encrypted"))
        assert chosen(two) == [("leader", OffsetsForm.ENCRYPTED, []), ("follower", OffsetsForm.ENCRYPTED, [])]
        with pytest.raises(OperationError, match="no keyring is configured"):
            await two.b.links.offsets("a-to-b", None)

    on_two(work)


def test_a_half_that_failed_is_healed_by_choosing_again() -> None:
    async def work(two: Two) -> None:
        await two.create()
        await two.connected()
        append = two.controls["A"].append

        async def failing(body: object) -> Outcome:
            if isinstance(body, SetOffsetsTopic):
                raise BrokerUnavailable("the control log does not answer")
            raise AssertionError(body)

        two.controls["A"].append = failing  # type: ignore[method-assign,assignment]
        with pytest.raises(OperationError, match="does not answer"):
            await two.a.links.alter("a-to-b", alter("whole"))
        two.controls["A"].append = append  # type: ignore[method-assign]
        link = two.controls["B"].state.links["a-to-b"]
        assert link.offsets_topic(Role.FOLLOWER) is not None  # the follower's end is there first
        await two.a.links.alter("a-to-b", alter("off"))
        assert chosen(two) == []
        await two.a.links.alter("a-to-b", alter("whole"))
        assert len(chosen(two)) == 2

    on_two(work)


def test_a_deleted_link_ends_the_copy() -> None:
    async def work(two: Two) -> None:
        two.clusters["A"].add_topic(OFFSETS, 1, {"cleanup.policy": "compact"})
        await two.create(offsets_topic="whole")
        await two.connected()
        write(two, "app-1")
        await two.until(
            "copied", lambda: COPY in two.clusters["B"].found and two.clusters["B"].partition(COPY).end == 1
        )
        await two.a.links.delete("a-to-b")
        assert not two.controls["A"].state.links
        assert not two.controls["B"].state.links
        assert two.controls["B"].state.follower_topics[COPY].state == "detached"
        assert two.controls["B"].state.histories[COPY].open_range(0) is None

    on_two(work)


def test_an_id_that_no_topic_can_have_in_its_name_needs_a_feature_level_at_both_ends() -> None:
    async def work(two: Two) -> None:
        two.clusters["A"].add_topic(OFFSETS, 1, {"cleanup.policy": "compact"})
        await two.create()
        await two.connected()
        for control in two.controls.values():
            before, control.state = control.state, control.state.evolve(level=ESCAPED_IDS - 1)
            asked = two.a.links.alter("a-to-b", alter("whole")), two.create("another", offsets_topic="whole")
            for each in asked:
                with pytest.raises(OperationError, match="'eu/1' in its name, and to escape it needs") as raised:
                    await each
                assert raised.value.code == "CONFLICT"
                assert repr(before.cluster_id) in raised.value.message
            control.state = control.state.evolve(level=before.level)
        await two.a.links.alter("a-to-b", alter("whole"))
        write(two, "app-1")
        await two.until("copied", lambda: f"{OFFSETS}_eu.2F1" in two.clusters["B"].found)

    on_two(work, ids={"A": "eu/1"})
