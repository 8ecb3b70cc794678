"""Whether brokers' listeners have SASL: what their answers mean, and when they are asked again."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from typing import Any

import pytest
from support.scripted_broker import Peer, ScriptedBroker
from support.sessions import run, until

from isthmus.kafka.security import SecuritySpec
from isthmus.session import broker_sasl
from isthmus.session.broker_sasl import BrokerSasl
from isthmus.session.endpoint import Endpoint
from isthmus_bench.kafka import ports
from isthmus_plugins.tasks import Supervision
from isthmus_protocol.error_codes import ILLEGAL_SASL_STATE, INVALID_REQUEST, UNSUPPORTED_SASL_MECHANISM
from isthmus_protocol.messages import RequestHead
from isthmus_protocol.schema import ApiKey

HOST = "127.0.0.1"


@contextlib.asynccontextmanager
async def asking() -> AsyncIterator[BrokerSasl]:
    supervision = Supervision()
    sasl = BrokerSasl(SecuritySpec(), None, supervision)
    try:
        yield sasl
    finally:
        await sasl.close()
    assert not supervision.failures


@pytest.mark.parametrize(
    ("answer", "required"),
    [
        ({"error_code": 0, "mechanisms": ["PLAIN"]}, True),
        ({"error_code": UNSUPPORTED_SASL_MECHANISM, "mechanisms": ["GSSAPI"]}, True),
        ({"error_code": ILLEGAL_SASL_STATE, "mechanisms": []}, False),
        ({"error_code": INVALID_REQUEST, "mechanisms": []}, None),
    ],
    ids=["accepted", "another mechanism", "no SASL", "something else"],
)
def test_what_an_answer_means(answer: dict[str, Any], required: bool | None) -> None:
    async def main() -> None:
        async with ScriptedBroker() as broker, asking() as sasl:
            broker.answers(ApiKey.SASL_HANDSHAKE, answer)
            target = Endpoint(broker.host, broker.port)
            assert sasl.required(target) is None
            await sasl.ask([target], 1 if required is None else 10)
            assert sasl.required(target) is required
            assert (broker.connections == 1) is (required is not None), "one connection, which stays"
            warnings = list(sasl.warnings())
            assert len(warnings) == (required is None)
            assert all("INVALID_REQUEST" in each for each in warnings)

    run(main())


def test_a_broker_is_asked_for_a_mechanism_that_it_has() -> None:
    """It closes the connection after another one, and logs that somebody failed to authenticate."""

    async def main() -> None:
        async with ScriptedBroker() as broker, asking() as sasl:

            async def answered(peer: Peer, head: RequestHead, request: Any) -> None:
                has = request.mechanism == "SCRAM-SHA-512"
                code = 0 if has else UNSUPPORTED_SASL_MECHANISM
                peer.send(peer.answer(head, {"error_code": code, "mechanisms": ["SCRAM-SHA-512", "GSSAPI"]}))
                if not has:
                    peer.close()

            broker.on(ApiKey.SASL_HANDSHAKE, answered)
            target = Endpoint(broker.host, broker.port)
            await sasl.ask([target], 10)
            while len(broker.seen(ApiKey.SASL_HANDSHAKE)) < 2:
                assert sasl.required(target) is True
                await asyncio.sleep(0.01)
            await asyncio.sleep(1)
            asked = [each.mechanism for each in broker.seen(ApiKey.SASL_HANDSHAKE)]
            assert asked == ["PLAIN", "SCRAM-SHA-512"]

    run(main())


def test_who_waits_is_told_soon_after_the_broker_is_there(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        (port,) = ports.pick_run(HOST, 1)
        try:
            async with asking() as sasl:
                target = Endpoint(HOST, port)
                told: list[bool] = []
                sasl.expect(target, told.append)
                sasl.expect(target, told.append)  # it is told once
                gone: list[bool] = []
                sasl.expect(target, gone.append)
                sasl.expect_no_more(target, gone.append)
                await asyncio.sleep(1)
                assert sasl.required(target) is None
                broker = ScriptedBroker()
                broker.port = port
                broker.answers(ApiKey.SASL_HANDSHAKE, {"error_code": ILLEGAL_SASL_STATE})
                async with broker:
                    async with asyncio.timeout(1):
                        await until(lambda: bool(told))
                    assert (told, gone) == ([False], [])
                warnings = [each for each in caplog.records if each.levelno == logging.WARNING]
                assert len(warnings) == 1, "that it is not there is said once"
        finally:
            ports.release((port,))

    run(main())


@pytest.mark.parametrize("required", [True, False])
def test_a_broker_that_has_answered_is_asked_now_and_then(monkeypatch: pytest.MonkeyPatch, required: bool) -> None:
    """What it was known of stays meanwhile. One in the middle of an exchange is asked on another connection."""
    monkeypatch.setattr(broker_sasl, "CHECK_S", 0.05)

    async def main() -> None:
        async with ScriptedBroker() as broker, asking() as sasl:
            broker.answers(ApiKey.SASL_HANDSHAKE, {"error_code": 0 if required else ILLEGAL_SASL_STATE})
            target = Endpoint(broker.host, broker.port)
            await sasl.ask([target], 10)
            while len(broker.seen(ApiKey.SASL_HANDSHAKE)) < 3:
                assert sasl.required(target) is required
                await asyncio.sleep(0)
            assert broker.connections == (3 if required else 1)

    run(main())


def test_a_broker_that_went_without_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broker_sasl, "CHECK_S", 0.05)
    monkeypatch.setattr(broker_sasl, "ANSWER_S", 0.2)

    async def main() -> None:
        async with ScriptedBroker() as broker, asking() as sasl:
            broker.answers(ApiKey.SASL_HANDSHAKE, {"error_code": ILLEGAL_SASL_STATE})
            target = Endpoint(broker.host, broker.port)
            await sasl.ask([target], 10)

            async def silent(peer: Peer, head: RequestHead, request: Any) -> None:
                pass

            broker.on(ApiKey.SASL_HANDSHAKE, silent)
            await until(lambda: sasl.required(target) is None)

    run(main())


def test_a_broker_that_is_gone_for_good_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broker_sasl, "FORGOTTEN_S", 0.3)

    async def main() -> None:
        async with asking() as sasl:
            async with ScriptedBroker() as broker:
                broker.answers(ApiKey.SASL_HANDSHAKE, {"error_code": 0, "mechanisms": ["PLAIN"]})
                target = Endpoint(broker.host, broker.port)
                await sasl.ask([target], 10)
            assert sasl.required(target) is True
            await until(lambda: not sasl._listeners)
            assert sasl.required(target) is None, "and asked anew when a client comes for it"

    run(main())
