"""Settings of the source's topics: read in rounds, decoded where they changed, taken over by the follower."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any

from support.fake_cluster import FakeCluster, FakeContext, FakeControl, run_simulated
from support.replicas import Replicas

from isthmus_plugins.cluster import KafkaRefused
from isthmus_plugins.replication.leader.source_settings import BUCKET_TOPICS, SourceConfigs
from isthmus_plugins.replication.logs.topic_settings import OVERRIDES


class Counting(FakeCluster):
    """Counts answers that were decoded."""

    asked = 0
    decoded = 0

    async def effective_configs(self, topics: Any, known: Any = None) -> Any:
        self.asked += 1
        answer = await super().effective_configs(topics, known)
        self.decoded += answer[1] is not None
        return answer


def watching(work: Callable[[Counting, SourceConfigs, list[int]], Awaitable[None]]) -> None:
    async def run() -> None:
        rng = random.Random(1)
        cluster = Counting(rng)
        context: Any = FakeContext(cluster, FakeControl("A", rng))
        changes: list[int] = []
        configs = SourceConfigs(context, lambda: changes.append(1))
        configs.start()
        try:
            await work(cluster, configs, changes)
        finally:
            await configs.stop()

    run_simulated(run())


def test_only_what_changed_is_decoded() -> None:
    async def work(cluster: Counting, configs: SourceConfigs, changes: list[int]) -> None:
        for number in range(3 * BUCKET_TOPICS):
            cluster.add_topic(f"t{number}")
        topics = await cluster.topics()
        configs.watch(topics.values())
        assert configs.of(topics["t0"]) is None
        await asyncio.sleep(5)
        first = configs.of(topics["t0"])
        assert first is not None
        assert cluster.decoded == len(changes) == 3
        asked = cluster.asked
        await asyncio.sleep(10)
        assert cluster.decoded == 3
        assert 30 <= cluster.asked - asked <= 3 * 10 / 0.8  # a request each for three buckets, in rounds of 0.8 s
        cluster.found["t7"].configs["segment.bytes"] = "14"
        await asyncio.sleep(1)
        changed = configs.of(topics["t7"])
        assert changed is not None
        assert changed["segment.bytes"] == "14"
        assert cluster.decoded == 4
        assert configs.of(topics["t0"]) is first

    watching(work)


def test_topics_that_come_go_and_come_again() -> None:
    async def work(cluster: Counting, configs: SourceConfigs, changes: list[int]) -> None:
        cluster.add_topic("t", configs={"segment.bytes": "14"})
        old = (await cluster.topics())["t"]
        configs.watch([old])
        await asyncio.sleep(2)
        assert configs.of(old) is not None
        await cluster.delete_topic("t")
        cluster.add_topic("t", configs={"segment.bytes": "14"})
        new = (await cluster.topics())["t"]
        configs.watch([new])
        assert configs.of(new) is None
        await asyncio.sleep(2)
        assert configs.of(old) is None
        assert configs.of(new) is not None
        configs.watch(())
        assert configs.of(new) is None
        await asyncio.sleep(2)
        asked = cluster.asked
        await asyncio.sleep(5)
        assert cluster.asked == asked

    watching(work)


# ---- at the follower ----


def following(work: Callable[[Replicas], Awaitable[None]], **settings: str) -> None:
    async def run() -> None:
        replicas = Replicas(random.Random(2))
        replicas.a.add_topic("local-t", 2, settings)
        replicas.start()
        await replicas.connect()
        try:
            await replicas.until("it is there", lambda: "remote-t" in replicas.b.found)
            await work(replicas)
        finally:
            await replicas.stop()

    run_simulated(run())


def test_a_change_reaches_the_follower_within_two_seconds() -> None:
    async def work(replicas: Replicas) -> None:
        ours, theirs = replicas.b.found["remote-t"].configs, replicas.a.found["local-t"].configs
        assert ours["max.message.bytes"] == "7"
        await asyncio.sleep(5)
        for value in ("8", "9"):
            theirs["max.message.bytes"] = value
            await replicas.until("set", lambda value=value: ours.get("max.message.bytes") == value, 2.0)
        del theirs["max.message.bytes"]
        await replicas.until("removed", lambda: "max.message.bytes" not in ours, 2.0)
        theirs["retention.ms"] = "1"
        theirs["compression.type"] = "gzip"
        await asyncio.sleep(3)
        assert {name: ours[name] for name in OVERRIDES if name in ours} == {
            name: value for name, value in OVERRIDES.items() if name in replicas.b.defaults
        }

    following(work, **{"max.message.bytes": "7"})


def test_a_change_of_the_followers_own_is_mended_when_the_link_comes_up() -> None:
    async def work(replicas: Replicas) -> None:
        ours = replicas.b.found["remote-t"].configs
        await replicas.stop()
        ours["retention.ms"] = "1"
        ours["max.message.bytes"] = "9"
        replicas.start()
        await replicas.connect()
        await replicas.until(
            "mended", lambda: ours.get("retention.ms") == "-1" and "max.message.bytes" not in ours, 5.0
        )

    following(work)


def test_settings_that_the_target_refuses_show_and_records_go_on() -> None:
    async def work(replicas: Replicas) -> None:
        alter = replicas.b.alter_topic_configs

        async def refuse(topic: str, configs: Any, validate_only: bool = False) -> None:
            raise KafkaRefused(44, "POLICY_VIOLATION", "not so many bytes")

        replicas.b.alter_topic_configs = refuse  # type: ignore[method-assign]
        replicas.a.found["local-t"].configs["max.message.bytes"] = "9"
        refused = replicas.ends["B"].parts.follower_topics.settings.refused
        await replicas.until("refused", lambda: "remote-t" in refused)
        assert refused["remote-t"].code == "TARGET_REFUSES_SETTINGS"
        assert "not so many bytes" in refused["remote-t"].message
        discovery = replicas.ends["A"].leader.discovery
        await replicas.until("A knows", lambda: all(told is not None and told.code for told in discovery.led.values()))
        replicas.a.partition("local-t").write_values(b"x")
        await replicas.until("copied", replicas.equal)
        replicas.b.alter_topic_configs = alter  # type: ignore[method-assign]
        await replicas.until("taken over", lambda: "remote-t" not in refused, 10.0)
        assert replicas.b.found["remote-t"].configs["max.message.bytes"] == "9"

    following(work)


def compaction(work: Callable[[Replicas], Awaitable[None]]) -> None:
    """A follower that has all of a compacted source, with two partitions."""

    async def filled(replicas: Replicas) -> None:
        for partition in replicas.a.found["local-t"].partitions:
            partition.write_values(b"v", keys=[b"k"])
        await replicas.until("filled", replicas.equal)
        await work(replicas)

    following(filled, **{"cleanup.policy": "compact"})


def policy(replicas: Replicas) -> str:
    return replicas.b.found["remote-t"].configs["cleanup.policy"]


def test_a_follower_is_compacted_when_every_partition_was_filled() -> None:
    async def work(replicas: Replicas) -> None:
        settings = replicas.ends["B"].parts.follower_topics.settings
        await replicas.until("compacted", lambda: policy(replicas) == "compact,delete", 10.0)
        assert settings.overrides("remote-t")["cleanup.policy"] == "compact,delete"
        (record,) = replicas.controls["B"].state.follower_topics.values()
        assert record.compacts
        assert record.cleaned
        replicas.a.found["local-t"].configs["cleanup.policy"] = "delete"
        await replicas.until("not compacted", lambda: policy(replicas) == "delete", 3.0)
        assert settings.overrides("remote-t")["cleanup.policy"] == "delete"

    compaction(work)


def test_one_that_lacks_records_is_not_compacted() -> None:
    async def work(replicas: Replicas) -> None:
        target = replicas.b.partition("remote-t", 1)
        produce = target.produce
        target.produce = lambda data: (19, -1)  # type: ignore[method-assign]
        replicas.a.partition("local-t", 1).write_values(b"w", keys=[b"k"])
        await asyncio.sleep(30)
        assert policy(replicas) == "delete"
        target.produce = produce  # type: ignore[method-assign]
        await replicas.until("compacted", lambda: policy(replicas) == "compact,delete", 30.0)

    following(work, **{"cleanup.policy": "compact"})


def test_what_is_decided_does_not_flap_when_connections_and_proxies_go() -> None:
    async def work(replicas: Replicas) -> None:
        await replicas.until("compacted", lambda: policy(replicas) == "compact,delete", 10.0)
        altered: list[Any] = []
        alter = replicas.b.alter_topic_configs

        async def watched(topic: str, configs: Any, validate_only: bool = False) -> None:
            altered.append(configs)
            await alter(topic, configs)

        replicas.b.alter_topic_configs = watched  # type: ignore[method-assign]
        for which in ("A", "B", "AB"):
            await replicas.stop(which)
            replicas.a.partition("local-t").write_values(b"w", keys=[b"k"])
            replicas.start(which)
            await replicas.connect()
            await replicas.until("equal", replicas.equal)
            await asyncio.sleep(10)
        assert altered == []
        assert policy(replicas) == "compact,delete"

    compaction(work)


def test_records_without_a_key_are_copied_before_it_is_compacted_again() -> None:
    async def work(replicas: Replicas) -> None:
        await replicas.until("compacted", lambda: policy(replicas) == "compact,delete", 10.0)
        await replicas.stop("B")
        replicas.a.partition("local-t").write_values(b"no key", b"neither")  # it was not compacted for a moment
        replicas.a.partition("local-t").write_values(b"v", keys=[b"k"])
        other = replicas.b.partition("remote-t", 1)
        produce = other.produce
        other.produce = lambda data: (19, -1)  # type: ignore[method-assign]
        replicas.a.partition("local-t", 1).write_values(b"w", keys=[b"k"])
        replicas.start("B")
        await replicas.connect()
        await replicas.until("it is copied", lambda: replicas.b.partition("remote-t").end == 4)
        assert policy(replicas) == "delete"
        waiting = replicas.ends["B"].parts.follower_topics.settings.waiting
        await replicas.until("it shows", lambda: "remote-t" in waiting, 10.0)
        assert waiting["remote-t"].code == "NOT_COMPACTED_YET"
        other.produce = produce  # type: ignore[method-assign]
        await replicas.until("compacted again", lambda: policy(replicas) == "compact,delete", 15.0)
        await replicas.until("it shows no more", lambda: "remote-t" not in waiting, 10.0)

    compaction(work)


def test_a_target_that_refuses_the_policy_shows_and_goes_on() -> None:
    async def work(replicas: Replicas) -> None:
        await replicas.until("compacted", lambda: policy(replicas) == "compact,delete", 10.0)
        alter = replicas.b.alter_topic_configs

        async def refuse(topic: str, configs: Any, validate_only: bool = False) -> None:
            raise KafkaRefused(29, "TOPIC_AUTHORIZATION_FAILED", "")

        replicas.b.alter_topic_configs = refuse  # type: ignore[method-assign]
        replicas.a.partition("local-t").write_values(b"no key")

        def reason() -> Any:
            return next(each.reason for each in replicas.ends["B"].follower.streams() if each.partition == 0)

        await replicas.until("it shows", lambda: reason() is not None and reason().code == "TARGET_REFUSES_SETTINGS")
        assert "cleanup.policy=delete" in reason().message
        replicas.b.alter_topic_configs = alter  # type: ignore[method-assign]
        await replicas.until("it goes on", replicas.equal, 20.0)

    compaction(work)
