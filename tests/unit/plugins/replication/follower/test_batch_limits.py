"""Batches that are larger than the source's limits, which were lowered after they were written."""

from __future__ import annotations

from support.plugins import Two, on_two
from support.promoting import KEY

from isthmus_plugins import links
from isthmus_plugins.links import NamespaceRef, Promote

LARGE = 5000
LIMITS = {"max.message.bytes": "1000", "segment.bytes": "2000"}


def test_they_are_copied_and_what_they_need_is_shown_and_given_back() -> None:
    async def work(two: Two) -> None:
        target = two.clusters["B"]
        target.enforces_limits = True
        for cluster in two.clusters.values():
            cluster.defaults["segment.bytes"] = "1073741824"
        topic = two.clusters["A"].add_topic("l-t", configs=dict(LIMITS))
        topic.partitions[0].write_values(b"x")
        topic.partitions[0].write_values(b"x" * LARGE)
        topic.partitions[0].write_values(b"x")
        await two.create()
        await two.connected()
        await two.a.links.attach("a-to-b", links.Attach(local="l-", remote="r-", role="leader"))
        await two.until("copied", lambda: "r-t" in target.found and target.partition("r-t").end == 3)
        needed = {"max.message.bytes": "8192", "segment.bytes": "8192"}
        ours = target.found["r-t"].configs
        assert needed.items() <= ours.items()
        assert needed.items() <= two.b.links.topic_overrides("r-t").items()
        topic.configs["retention.ms"] = "77"  # settings go on to follow, and these stay
        settings = two.controls["B"].state.follower_topics
        await two.until("told", lambda: two.controls["B"].state.follower_topics["r-t"].settings["retention.ms"] == "77")
        assert needed.items() <= ours.items(), settings
        request = Promote(namespaces=[NamespaceRef(local="r-")])
        assert (await two.b.links.promote("a-to-b", request, lambda done, total: None)).namespaces[0].promoted
        assert not two.controls["B"].state.namespaces[KEY].reserved
        assert LIMITS.items() <= ours.items()

    on_two(work)
