"""A follower that is to be promoted, and a proxy that is killed meanwhile."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final

from isthmus_control.commands import PartitionProof, RecordProofs, ReleaseLease
from isthmus_control.model import NamespaceKey, ResourceType
from isthmus_control.proofs import FoundDifference, Proof
from isthmus_plugins import links
from isthmus_plugins.cluster import BrokerUnavailable
from isthmus_plugins.process import LinkListenerSpec
from support.loopback import LoopbackAcceptor
from support.plugins import Proxy, Two, on_two

KEY: Final = NamespaceKey(ResourceType.TOPIC, "r-")


def on_following(work: Callable[[Two], Awaitable[None]], timeout_s: float = 30) -> None:
    """``l-t`` at A, with settings of its own, which ``r-t`` at B follows."""

    async def follow(two: Two) -> None:
        topic = two.clusters["A"].add_topic("l-t", configs={"retention.ms": "5", "compression.type": "gzip"})
        topic.partitions[0].write_values(b"x", b"y", b"z")
        await two.create()
        await two.connected()
        attach = links.Attach(local="l-", remote="r-", role="leader", disable_transaction_verification=True)
        await two.a.links.attach("a-to-b", attach)
        await two.until("copied", lambda: "r-t" in two.clusters["B"].found and two.clusters["B"].partition("r-t").end)
        await two.until("confirmed", lambda: [each.follower_end for each in two.a.status().partitions] == [3])
        await work(two)

    on_two(follow, timeout_s)


def differ(two: Two, topic: str = "r-t", offset: int = 1) -> str:
    """Have it recorded that both logs of a topic that follows at B differ; how that is told."""
    control = two.controls["B"]
    topic_id = control.state.follower_topics[topic].topic_id
    assert topic_id is not None
    message = f"the record at offset {offset} is another one"
    proof = Proof(equal_until=offset, at=offset, difference=FoundDifference(offset, offset + 1, 0, message))
    control.apply(RecordProofs((PartitionProof(topic, topic_id, 0, proof),)))
    return f"{topic}-0: {message}"


class Killing:
    """Makes the follower's cluster fail from the ``at``-th change on, until it is mended. ``more``: changes of the
    cluster that count, too."""

    def __init__(self, two: Two, at: int, *more: str) -> None:
        self.left = at
        self.fails = True
        for name in ("alter_topic_configs", *more):
            self._wrap(two.clusters["B"], name)
        self._wrap(two.controls["B"], "append")

    def _wrap(self, owner: Any, name: str) -> None:
        work = getattr(owner, name)

        async def step(*args: Any) -> Any:
            self.left -= 1
            if self.fails and self.left < 0:
                raise BrokerUnavailable("killed")
            return await work(*args)

        setattr(owner, name, step)


async def replaced(two: Two, killing: Killing) -> None:
    """The follower's proxy is gone, what killed it, too, and there is another one."""
    control, old = two.controls["B"], two.b
    await old.stop()
    control.unsubscribe_all()  # what it was told then, nobody hears
    killing.fails = False
    control.apply(ReleaseLease(old.context.proxy_name, old.context.incarnation))
    two.b = Proxy(two.clusters["B"], control, "b2")
    assert old.context.port is not None
    two.b.context.link_listener = LinkListenerSpec("127.0.0.1", old.context.port, None, LoopbackAcceptor)
    await two.b.start()
