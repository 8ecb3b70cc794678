"""What can go wrong, in three types: the peer's fault, our bug, a configuration error.

They differ in who must act. A :class:`PeerFault` is logged with the peer's address and ends, at worst, its connection.
A :class:`ConfigurationError` ends the process (or refuses the change) with the key and the fix. An :class:`OurBug` is
logged with a traceback and counted; whatever hit it fails closed.

What clients are answered is decided in one place, too: ``error_answer`` turns a :class:`Cause` into a Kafka error code
and message. It lives in the protocol component, because plugins answer clients as well and know nothing of this one.
"""

from __future__ import annotations

from isthmus_protocol.bodies import error_code
from isthmus_protocol.error_answers import Cause, error_answer

__all__ = (
    "AuthenticationFailed",
    "Cause",
    "ConfigurationError",
    "ConnectionLost",
    "IsthmusError",
    "KafkaError",
    "OurBug",
    "PeerFault",
    "RequestTimedOut",
    "UnsupportedVersion",
    "error_answer",
)


class IsthmusError(Exception):
    """Base of the three types below."""


class OurBug(IsthmusError):
    """Something that cannot happen has. Never caught to go on as if nothing were."""


class ConfigurationError(IsthmusError):
    """A setting is wrong. ``key`` is its full name, ``problem`` what is wrong with it, ``fix`` what to do."""

    def __init__(self, key: str, problem: str, fix: str) -> None:
        super().__init__(f"{key}: {problem}. {fix}")
        self.key = key
        self.problem = problem
        self.fix = fix


class PeerFault(IsthmusError):
    """A broker, client or other proxy did what it should not, or nothing at all."""


class ConnectionLost(PeerFault):
    """No connection, or no more. Whether an unanswered request was carried out is unknown."""


class RequestTimedOut(PeerFault):
    """No answer in time. Whether the request was (or will be) carried out is unknown; the connection is closed."""


class AuthenticationFailed(PeerFault):
    """The broker refused our credentials, or did not prove that it knows them. Trying again does not help."""


class UnsupportedVersion(PeerFault):
    """The broker has no version of an API that this proxy has, too."""


class KafkaError(PeerFault):
    """An error code in a broker's answer."""

    def __init__(self, code: int, message: str | None = None) -> None:
        known = error_code(code)
        self.code = int(known)
        self.name = known.name.upper()
        """The protocol's name, such as NOT_LEADER_OR_FOLLOWER."""
        self.message = message
        self.retriable: bool = known.retriable
        """Whether the protocol calls it worth a retry."""
        super().__init__(f"{self.name} ({self.code})" + (f": {message}" if message else ""))
