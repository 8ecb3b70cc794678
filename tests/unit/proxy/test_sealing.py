"""Secrets of links are sealed with the key that all proxies of a cluster have, once they have it, and not before."""

from __future__ import annotations

import asyncio
import random
import time
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from support import control_cluster
from support.control_cluster import Client, ControlCluster

from isthmus import sealing
from isthmus.control_log import ControlLog, LeaseSpec
from isthmus.sealing import Sealing
from isthmus_control import commands as c
from isthmus_control.levels import KEY_ROTATION
from isthmus_control.model import BrokerClaim
from isthmus_control.outcome import Accepted
from isthmus_control.sealing import Sealer, Secret
from isthmus_control.signing import Signer
from isthmus_plugins.tasks import Supervision

LINK, LINK_ID, SECRET = "a-to-b", str(uuid.UUID(int=1)), Secret(b"the link's secret")
OLD, NEW = Secret(b"o" * 32), Secret(b"n" * 32)
ANOTHER = Secret(b"x" * 32)


class Calm(random.Random):
    """No answer of the model is lost."""

    def random(self) -> float:
        return 0.5


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_cluster, "LATENCY_S", 0.0001)
    monkeypatch.setattr(sealing, "RETRY_S", 0.01)


@asynccontextmanager
async def proxy(cluster: ControlCluster, broker: int, *keys: Secret) -> AsyncIterator[ControlLog]:
    """A proxy with these control keys, and a lease."""
    client: Any = Client(cluster)
    signer = Signer(keys[0], "A", keys[1:]) if keys else None
    log = ControlLog(client, f"p{broker}", supervision=Supervision(), signer=signer)
    await log.start()
    sealing = Sealing(log, Sealer(keys[0] if keys else None, keys[1:]), Supervision())
    sealing.start()
    try:
        assert isinstance(await log.claim(LeaseSpec((BrokerClaim(broker, "h", 9),), version="1")), Accepted)
        yield log
    finally:
        await sealing.stop()
        await log.close(release=True)


async def until(what: Callable[[], object]) -> None:
    async with asyncio.timeout(20):
        while not what():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def key_of(log: ControlLog) -> str:
    sealed = log.state.links[LINK].secret
    assert sealed is not None
    return sealed.key_id


async def with_link(cluster: ControlCluster, *keys: Secret) -> None:
    """A log with a link, whose secret a proxy with these keys recorded."""
    async with proxy(cluster, 1, *keys) as log:
        sealed = Sealer(keys[0] if keys else None).seal(SECRET, LINK_ID)
        assert isinstance(await log.append(c.CreateLink(LINK, LINK_ID, "B", dials=False, secret=sealed)), Accepted)
        assert isinstance(await log.append(c.RaiseLevel(KEY_ROTATION)), Accepted)


@pytest.mark.parametrize("before", [(), (OLD,)], ids=["none", "old"])
def test_a_secret_is_sealed_once_every_proxy_has_the_key_first(before: tuple[Secret, ...]) -> None:
    async def work() -> None:
        cluster = ControlCluster(Calm(1))
        await with_link(cluster, *before)
        async with proxy(cluster, 1, NEW, *before), proxy(cluster, 2, NEW, *before) as two:
            await until(lambda: key_of(two) == Sealer(NEW).key_id)
            sealed = two.state.links[LINK].secret
            assert sealed is not None
            assert Sealer(NEW).open(sealed, LINK_ID) == SECRET

    asyncio.run(work())


def test_a_token_is_sealed_anew_and_can_be_used_without_the_key_of_before() -> None:
    async def work() -> None:
        cluster, token_id, key = ControlCluster(Calm(1)), "ab" * 8, Secret(b"the acceptor's key")
        await with_link(cluster, OLD)
        async with proxy(cluster, 1, OLD) as one:
            sealed = Sealer(OLD).seal(key, token_id)
            made = c.CreateToken(token_id, "cd" * 16, sealed, (), int(time.time() * 1000) + 3_600_000)
            assert isinstance(await one.append(made), Accepted)
        async with proxy(cluster, 1, NEW, OLD) as one:
            await until(lambda: one.state.link_tokens[token_id].acceptor_key.key_id == Sealer(NEW).key_id)
            assert Sealer(NEW).open(one.state.link_tokens[token_id].acceptor_key, token_id) == key

    asyncio.run(work())


def test_while_a_proxy_lacks_the_key_nothing_is_sealed_with_it() -> None:
    async def work() -> None:
        cluster = ControlCluster(Calm(1))
        await with_link(cluster, OLD)
        async with proxy(cluster, 2, OLD), proxy(cluster, 1, NEW, OLD) as one:
            await asyncio.sleep(0.2)
            assert key_of(one) == Sealer(OLD).key_id
        async with proxy(cluster, 1, NEW, OLD) as one:
            await until(lambda: key_of(one) == Sealer(NEW).key_id)

    asyncio.run(work())


def test_what_no_key_opens_stays_and_is_told(caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        cluster = ControlCluster(Calm(1))
        await with_link(cluster, OLD)
        async with proxy(cluster, 1, ANOTHER) as one:
            await until(lambda: "secret not sealed" in caplog.text)
            assert key_of(one) == Sealer(OLD).key_id

    asyncio.run(work())
