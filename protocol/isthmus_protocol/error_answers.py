"""Why a request is not served as asked, and the Kafka error that says so: the one place where causes become codes.

Clients act on these codes, so they are the same everywhere:

=============================  =================================================  =====================================
cause                          code                                               because
=============================  =================================================  =====================================
``READ_ONLY``                  INVALID_REQUEST                                    not retriable: the callback fails now
``RESERVED``                   POLICY_VIOLATION                                   made for it
``REPLICATED_GROUP``           TOPIC_AUTHORIZATION_FAILED, for each partition     typed in clients; they go on consuming
``NOT_REPLICATED``             NOT_ENOUGH_REPLICAS (nothing was appended);        retriable, producers stay exact
                               for coordinators COORDINATOR_LOAD_IN_PROGRESS
``NOT_CONFIRMED``              REQUEST_TIMED_OUT (appended, not confirmed);       retriable; a coordinator's timeout is
                               for coordinators COORDINATOR_LOAD_IN_PROGRESS      fatal to a Java transaction
``FENCED``                     NOT_LEADER_OR_FOLLOWER                             retriable, and metadata is read again
``NOT_READY``                  OFFSET_NOT_AVAILABLE                               retriable, the consumer waits
``INTERNAL_TOPIC``             TOPIC_AUTHORIZATION_FAILED                         as for any topic that is not one's own
``UNSUPPORTED``                UNSUPPORTED_VERSION                                the peer can do otherwise
``BUG``                        UNKNOWN_SERVER_ERROR                               ours; details are in the log alone
=============================  =================================================  =====================================
"""

from __future__ import annotations

from enum import Enum
from typing import Final

from isthmus_protocol.bodies import error_code
from isthmus_protocol.error_codes import (
    COORDINATOR_LOAD_IN_PROGRESS,
    INVALID_REQUEST,
    NOT_ENOUGH_REPLICAS,
    NOT_LEADER_OR_FOLLOWER,
    OFFSET_NOT_AVAILABLE,
    POLICY_VIOLATION,
    REQUEST_TIMED_OUT,
    TOPIC_AUTHORIZATION_FAILED,
    UNKNOWN_SERVER_ERROR,
    UNSUPPORTED_VERSION,
)
from isthmus_protocol.messages import build_response, encode_response
from isthmus_protocol.refusals import Refusal
from isthmus_protocol.schema import ApiKey, message_spec


class Cause(Enum):
    """Why a request is not served. The value names it in metrics and logs."""

    READ_ONLY = "read-only"
    """Produce (and what appends like it) to a reserved or following topic."""
    RESERVED = "reserved"
    """Topics of a reserved namespace created, deleted or altered."""
    REPLICATED_GROUP = "replicated-group"
    """An offset commit in a group that follows another cluster's."""
    NOT_REPLICATED = "not-replicated"
    """A synchronous namespace is out of sync; nothing was appended."""
    NOT_CONFIRMED = "not-confirmed"
    """Appended here; the other side did not confirm within the request's time."""
    FENCED = "fenced"
    """A planned reversal holds writes back."""
    NOT_READY = "not-ready"
    """The follower is still syncing, or is being truncated."""
    INTERNAL_TOPIC = "internal-topic"
    """A client touches the proxy's own topics."""
    UNSUPPORTED = "unsupported"
    BUG = "bug"


COORDINATOR_APIS: Final = frozenset(
    {ApiKey.OFFSET_COMMIT, ApiKey.TXN_OFFSET_COMMIT, ApiKey.ADD_PARTITIONS_TO_TXN, ApiKey.END_TXN}
)
"""Answered by a coordinator: clients treat a timeout there as a reason to look for another one, or as fatal."""

_CODES: Final = {
    Cause.READ_ONLY: INVALID_REQUEST,
    Cause.RESERVED: POLICY_VIOLATION,
    Cause.REPLICATED_GROUP: TOPIC_AUTHORIZATION_FAILED,
    Cause.NOT_REPLICATED: NOT_ENOUGH_REPLICAS,
    Cause.NOT_CONFIRMED: REQUEST_TIMED_OUT,
    Cause.FENCED: NOT_LEADER_OR_FOLLOWER,
    Cause.NOT_READY: OFFSET_NOT_AVAILABLE,
    Cause.INTERNAL_TOPIC: TOPIC_AUTHORIZATION_FAILED,
    Cause.UNSUPPORTED: UNSUPPORTED_VERSION,
    Cause.BUG: UNKNOWN_SERVER_ERROR,
}

_COORDINATOR_CODES: Final = {
    Cause.NOT_REPLICATED: COORDINATOR_LOAD_IN_PROGRESS,
    Cause.NOT_CONFIRMED: COORDINATOR_LOAD_IN_PROGRESS,
}

_MESSAGES: Final = {
    Cause.READ_ONLY: "{subject} is read-only: {reason}. Write to it on the cluster that leads it.",
    Cause.RESERVED: "{subject} cannot be changed here: {reason}. Do it on the cluster that leads it.",
    Cause.REPLICATED_GROUP: "offsets of {subject} are replicated and not committed here: {reason}.",
    Cause.NOT_REPLICATED: "{subject} is not in sync with its follower, so nothing was written: {reason}.",
    Cause.NOT_CONFIRMED: "{subject} was written here and not confirmed by its follower in time: {reason}.",
    Cause.FENCED: "{subject} changes its leading cluster: {reason}. Try again.",
    Cause.NOT_READY: "{subject} is not complete here yet: {reason}. Try again.",
    Cause.INTERNAL_TOPIC: "{subject} belongs to the proxy: {reason}.",
    Cause.UNSUPPORTED: "{subject} is not supported: {reason}.",
    Cause.BUG: "the proxy failed to serve {subject}; its log says why.",
}


def error_answer(cause: Cause, api_key: int, subject: str, reason: str = "") -> Refusal:
    """The code and message for ``cause`` in an answer of ``api_key``.

    ``subject`` is what the request was about ("topic orders-eu"); ``reason`` names namespace and link ("namespace
    'orders-' follows cluster B over link a-to-b").
    """
    code = _CODES[cause]
    if api_key in COORDINATOR_APIS:
        code = _COORDINATOR_CODES.get(cause, code)
    return Refusal(code, _MESSAGES[cause].format(subject=subject, reason=reason))


TAKEN_AS_PASSING: Final = frozenset({ApiKey.METADATA, ApiKey.FETCH, ApiKey.SHARE_FETCH, ApiKey.SHARE_ACKNOWLEDGE})
"""Clients do not end by what an answer to these says as a whole: they ask again, or take what is in it for all."""


def refused_as_a_whole(api_key: int, version: int, correlation_id: int, code: int) -> bytes | None:
    """An answer frame that refuses all of a request by one code, and names nothing of it; None: there is no such."""
    if api_key in TAKEN_AS_PASSING:
        return None
    if all(field.name != "error_code" for field in message_spec(api_key, version, "response").fields):
        return None
    return encode_response(build_response(api_key, version, {"error_code": error_code(code)}), correlation_id)
