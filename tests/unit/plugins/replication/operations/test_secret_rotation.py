"""A link's secret is rotated while it runs, by whole proxies of two clusters, and whatever fails in between."""

from __future__ import annotations

from typing import Any

import pytest
from support.plugins import Proxy, Two, on_two

from isthmus_control import commands as c
from isthmus_plugins.links import OperationError
from isthmus_plugins.replication.link import calls, features
from isthmus_plugins.replication.link.connection import LinkConnection, LinkLost

LINK = "a-to-b"


def ids(proxy: Proxy) -> list[str]:
    return list(proxy.context.control.state.links[LINK].secrets)


def connections(proxy: Proxy) -> list[LinkConnection]:
    found: list[LinkConnection] = proxy.plugin.parts.peers.connections(LINK)
    return found


def plain(proxy: Proxy) -> dict[str, bytes]:
    link = proxy.context.control.state.links[LINK]
    return {each: proxy.context.unseal(sealed, link.link_id) for each, sealed in link.secrets.items()}


async def dialled_again(two: Two) -> None:
    for proxy in (two.a, two.b):
        for connection in connections(proxy):
            connection.close()
    await two.until("lost", lambda: not connections(two.a) and not connections(two.b))
    await two.connected()


@pytest.mark.parametrize("asks", ["a", "b"])
def test_both_sides_have_a_new_secret_and_nothing_was_disconnected(asks: str) -> None:
    async def work(two: Two) -> None:
        await two.create()
        await two.connected()
        before, created = connections(two.a), plain(two.a)[""]
        asker = two.a if asks == "a" else two.b
        for number in range(2):
            rotated = await asker.links.rotate_secret(LINK)
            assert ids(two.a) == ids(two.b) == [rotated.secret_id]
            assert plain(two.a) == plain(two.b)
            assert created not in plain(two.a).values()
            assert connections(two.a) == before, number
        await dialled_again(two)
        assert [each.secret_id for each in (*connections(two.a), *connections(two.b))] == [rotated.secret_id] * 2
        assert not two.a.status().secret_rotating

    on_two(work)


STEPS = ["the other side records it", "this side records it", "the other side ends", "this side ends"]


@pytest.mark.parametrize("done", [False, True], ids=["undone", "answer lost"])
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("asks", ["a", "b"])
def test_whatever_is_interrupted_the_link_goes_on_and_the_next_rotation_works(
    asks: str, step: str, done: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work(two: Two) -> None:
        await two.create()
        await two.connected()
        asker, asked = (two.a, two.b) if asks == "a" else (two.b, two.a)
        rotations = asker.plugin.parts.service._rotations
        append, call = rotations._commands.append, rotations._call
        place = STEPS.index(step)

        async def appended(body: c.Body) -> None:
            if isinstance(body, (c.BeginSecretRotation, c.FinishSecretRotation)[place // 2]) and place % 2:
                if done:
                    await append(body)
                raise OperationError("CONTROL_LOG_UNAVAILABLE", "killed", 503)
            await append(body)

        async def called(connection: LinkConnection, question: Any) -> None:
            if (
                isinstance(question, (calls.BeginSecretRotation, calls.FinishSecretRotation)[place // 2])
                and not place % 2
            ):
                if done:
                    await call(connection, question)
                raise OperationError("UNAVAILABLE", "killed", 503)
            await call(connection, question)

        with monkeypatch.context() as patch:
            patch.setattr(rotations._commands, "append", appended)
            patch.setattr(rotations, "_call", called)
            patch.setattr(rotations, "look", lambda: None)
            with pytest.raises(OperationError, match="killed"):
                await asker.links.rotate_secret(LINK)
            assert set(ids(asker)) & set(ids(asked))
            await dialled_again(two)
        # Another proxy of the cluster, or the same one that was started again, sees it and goes on.
        rotations.look()
        alone = step == "the other side records it" or (step == "this side records it" and not done)
        if not alone:
            await two.until("ended", lambda: ids(two.a) == ids(two.b) and len(ids(two.a)) == 1)
        await dialled_again(two)
        rotated = await asker.links.rotate_secret(LINK)
        assert ids(two.a) == ids(two.b) == [rotated.secret_id]
        assert plain(two.a) == plain(two.b)
        await dialled_again(two)

    on_two(work)


def test_a_proxy_that_has_not_read_of_the_rotation_yet_is_dialled_again() -> None:
    async def work(two: Two) -> None:
        await two.create()
        await two.connected()
        behind = two.controls["B"].state
        await two.a.links.rotate_secret(LINK)
        ahead, two.controls["B"].state = two.controls["B"].state, behind
        for connection in connections(two.a):
            connection.close()
        await two.until("told", lambda: two.a.status().reason == "AUTHENTICATION_ERROR")
        two.controls["B"].state = ahead
        await two.connected()

    on_two(work)


@pytest.mark.parametrize("older", ["version", "level"])
def test_the_other_side_must_know_how(older: str) -> None:
    async def work(two: Two) -> None:
        await two.create()
        await two.connected()
        if older == "version":
            (connection,) = connections(two.a)
            connection.peer["features"] = [each for each in features.FEATURES if each != features.ROTATED_SECRETS]
        else:
            two.controls["B"].state = two.controls["B"].state.evolve(level=3)
        with pytest.raises(OperationError, match="upgrade"):
            await two.a.links.rotate_secret(LINK)
        assert ids(two.a) == ids(two.b) == [""]
        assert not two.a.status().secret_rotating

    on_two(work)


def test_a_rotation_that_is_begun_while_the_link_is_cut_changes_nothing() -> None:
    async def work(two: Two) -> None:
        await two.create()
        await two.connected()
        (connection,) = connections(two.a)
        rotations = two.a.plugin.parts.service._rotations
        connection.close()
        with pytest.raises(OperationError, match="did not answer"):
            await rotations._call(connection, calls.BeginSecretRotation("x", ""))
        with pytest.raises(LinkLost):
            connection.begin_call(calls.FinishSecretRotation("x"))
        assert ids(two.a) == ids(two.b) == [""]

    on_two(work)
