"""Whether brokers' listeners have SASL: asked of each listener, over connections like those of clients' sessions.

A broker without SASL answers SaslHandshake with ILLEGAL_SASL_STATE, and one with SASL begins an exchange, or says which
mechanisms it has. The connection that was asked stays: as long as it does, nobody has restarted the listener, so the
answer holds. When it is lost, the broker is asked again; and now and then, since a machine may go without a word.

What lets clients do more holds only while the connection stands; what restricts them, until the broker says otherwise.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
from collections.abc import Callable, Iterable
from typing import Final

from isthmus.errors import KafkaError, PeerFault
from isthmus.kafka.broker_connection import BrokerConnection
from isthmus.kafka.security import SecuritySpec
from isthmus.session.endpoint import Endpoint
from isthmus_plugins.tasks import Supervision, Tasks
from isthmus_protocol.error_codes import ILLEGAL_SASL_STATE, UNSUPPORTED_SASL_MECHANISM
from isthmus_protocol.schema import ApiKey

log = logging.getLogger("isthmus.broker-sasl")

ANSWER_S: Final = 10.0
"""How long a broker may take, with connecting."""
CHECK_S: Final = 60.0
"""How often a broker is asked again that has answered."""
AGAIN_MIN_S: Final = 0.1
"""After a failure, and after a connection is lost, also where a client waits for the answer."""
AGAIN_S: Final = 0.5
"""Where no client waits; twice as long each time."""
AGAIN_MAX_S: Final = 5.0
"""For a broker that is not there, or that closes the connection whenever it is asked."""
FORGOTTEN_S: Final = 300.0
"""A listener that has not answered for so long, and that no client has come for, is asked no more."""


class BrokerSasl:
    """What is known of each listener that clients' connections are forwarded to."""

    def __init__(self, security: SecuritySpec, tls: ssl.SSLContext | None, supervision: Supervision) -> None:
        """``security`` and ``tls`` are those of sessions' connections to brokers."""
        self._security = security
        self.tls = tls
        self._listeners: dict[Endpoint, _Listener] = {}
        self._tasks = Tasks("broker-sasl", supervision)

    def required(self, target: Endpoint) -> bool | None:
        """Whether clients of this listener must authenticate over SASL; None: not known yet, it is being asked."""
        return self._asked(target).required

    def expect(self, target: Endpoint, told: Callable[[bool], None]) -> None:
        """Have this called when it is known."""
        self._asked(target).expect(told)

    def expect_no_more(self, target: Endpoint, told: Callable[[bool], None]) -> None:
        if (listener := self._listeners.get(target)) is not None:
            listener.waiting.discard(told)

    async def ask(self, targets: Iterable[Endpoint], timeout_s: float) -> None:
        """Return when it is known of all, or after so long."""
        waits = []
        for target in set(targets):
            if self.required(target) is None:
                known = asyncio.Event()
                self.expect(target, lambda _, known=known: known.set())  # type: ignore[misc]
                waits.append(known)
        try:
            async with asyncio.timeout(timeout_s):
                for known in waits:
                    await known.wait()
        except TimeoutError:
            log.warning("brokers do not say whether they have SASL", extra={"waited_s": timeout_s})

    def warnings(self) -> Iterable[str]:
        """For operators: the brokers of which it is not known, and why."""
        for target, listener in self._listeners.items():
            if listener.required is None and listener.trouble:
                yield f"{target} does not say whether it has SASL, so its clients wait: {listener.trouble}"

    async def close(self) -> None:
        await self._tasks.close()

    def _asked(self, target: Endpoint) -> _Listener:
        listener = self._listeners.get(target)
        if listener is None:
            listener = self._listeners[target] = _Listener()
            self._tasks.keep(f"ask-{target}", lambda: self._watch(target, listener))
        return listener

    async def _watch(self, target: Endpoint, listener: _Listener) -> None:
        """Ask, and ask again when the connection is lost."""
        loop = asyncio.get_running_loop()
        again_s, answered_at = AGAIN_S, loop.time()
        while True:
            began = loop.time()
            try:
                await self._ask(target, listener)
                answered_at, listener.trouble = loop.time(), ""
            except PeerFault as error:
                if str(error) != listener.trouble:
                    listener.trouble = str(error)
                    extra = {"broker": str(target), "detail": listener.trouble}
                    log.warning("broker not asked whether it has SASL", extra=extra)
            if loop.time() - answered_at > FORGOTTEN_S and not listener.waiting:
                del self._listeners[target]
                return
            again_s = AGAIN_S if loop.time() - began > AGAIN_MAX_S else min(2 * again_s, AGAIN_MAX_S)
            await asyncio.sleep(AGAIN_MIN_S)
            await listener.wanted_within(again_s - AGAIN_MIN_S)

    async def _ask(self, target: Endpoint, listener: _Listener) -> None:
        """Ask on a new connection, and return when that is of no more use. Raises PeerFault: there was no answer."""
        lost = asyncio.Event()
        connection = await BrokerConnection.connect(
            target.host, target.port, self._security, timeout=ANSWER_S, tls_context=self.tls
        )
        connection.on_lost = lambda _: lost.set()
        try:
            while not lost.is_set():
                answer = await connection.call(
                    ApiKey.SASL_HANDSHAKE, {"mechanism": listener.mechanism}, timeout=ANSWER_S
                )
                if answer.error_code not in (0, ILLEGAL_SASL_STATE, UNSUPPORTED_SASL_MECHANISM):
                    raise KafkaError(answer.error_code, f"{target} answers SaslHandshake")
                if answer.mechanisms:  # the next time one that it has: brokers log those that they have not
                    listener.mechanism = answer.mechanisms[0]
                listener.tell(answer.error_code != ILLEGAL_SASL_STATE)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(CHECK_S):
                        await lost.wait()
                if listener.required:  # in the middle of an exchange: it can't be asked once more
                    return
        finally:
            listener.lost()
            connection.abort()


class _Listener:
    """What is known of one."""

    def __init__(self) -> None:
        self.required: bool | None = None
        self.trouble = ""
        """Why it was not answered the last time."""
        self.mechanism = "PLAIN"
        """What is asked for."""
        self.waiting: set[Callable[[bool], None]] = set()
        self._wanted = asyncio.Event()

    def expect(self, told: Callable[[bool], None]) -> None:
        self.waiting.add(told)
        self._wanted.set()

    def tell(self, required: bool) -> None:
        self.required = required
        waiting, self.waiting = self.waiting, set()
        self._wanted.clear()
        for told in waiting:
            told(required)

    def lost(self) -> None:
        """The connection that was asked is gone."""
        if not self.required:
            self.required = None

    async def wanted_within(self, timeout_s: float) -> None:
        """Return when somebody waits, or after so long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._wanted.wait()
