"""Error answers for requests that the proxy refuses, whole or in part.

The caller decides for each *part* of a request: a partition, topic, resource, group, ACL, or the request itself where
it has no parts. Refused parts are taken out; what remains is forwarded, and :meth:`Refused.merge` adds the refused
entries to the broker's answer at their places in the request's order (CreateAcls and DeleteAcls are matched by position
alone). One table says for each API which arrays of the request answer to which arrays of the response; all else follows
from the message schemas. Refusing is rare, so this decodes and encodes with kio's classes, and clarity goes first.

What a broker does is done here, too:

- **Produce with acks=0** has no answer: a broker appends what it can and closes the connection (``Refused.close``).
- **AddPartitionsToTxn** is all or nothing for a transaction: if a partition fails, nothing is added, and the others are
  answered with OPERATION_NOT_ATTEMPTED.
- **AlterUserScramCredentials** is answered for each user, whatever is asked of that user.
- **ListOffsets** of older versions has another code where offsets are not available: :func:`offset_not_available`.
- **Metadata** needs the broker's answer (addresses, controller) even if each topic is refused: it is never answered
  from here alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any, Final, NamedTuple
from uuid import UUID

from kio.serial._introspect import EntityTupleField, classify_field

from isthmus_protocol import schema
from isthmus_protocol.bodies import blank, error_code
from isthmus_protocol.error_codes import LEADER_NOT_AVAILABLE, OFFSET_NOT_AVAILABLE, OPERATION_NOT_ATTEMPTED
from isthmus_protocol.messages import RequestHead, RequestPayload, ResponsePayload, encode_response
from isthmus_protocol.schema import ApiKey

_WITHOUT_TOPICS: Final = frozenset(
    {ApiKey.DELETE_GROUPS, ApiKey.CREATE_ACLS, ApiKey.DELETE_ACLS, ApiKey.ALTER_CLIENT_QUOTAS}
)
_KNOWS_NOT_AVAILABLE: Final = 5
"""Of ListOffsets."""
RESOURCE_TYPE_TOPIC: Final = 2
"""``resource_type`` of a topic in AlterConfigs and IncrementalAlterConfigs (ConfigResource.Type)."""


class Part(NamedTuple):
    """What a decision is about. Fields that the API or version does not have are None."""

    api_key: int
    topic: str | None
    """The topic's name; for config requests, the resource's name if it is a topic."""
    topic_id: UUID | None
    partition: int | None
    item: Any
    """The part as kio has it: a partition, topic, resource or ACL entry, a name or index, or the whole request."""
    within: tuple[Any, ...]
    """The request's entities around it, outermost first: the topic, before that the marker or transaction."""


class Refusal(NamedTuple):
    """A Kafka error code, and a message for the versions that carry one."""

    code: int
    message: str | None = None


Decide = Callable[[Part], Refusal | None]
Merge = Callable[[ResponsePayload], ResponsePayload]


@dataclass(frozen=True, slots=True)
class Refused:
    """What to do with a request of which something was refused.

    Either ``answer`` is the whole answer frame, or ``remaining`` is to be encoded and forwarded and its decoded answer
    given to ``merge``. With ``close`` there is no answer at all (Produce with acks=0): forward ``remaining`` if it is
    not None, then close the client's connection.
    """

    parts: tuple[tuple[Part, Refusal], ...]
    """The parts that the caller refused, in request order (for logs and metrics)."""
    answer: bytes | None = None
    remaining: RequestPayload | None = None
    close: bool = False
    _merge: Merge | None = field(default=None, repr=False)

    def merge(self, response: ResponsePayload) -> ResponsePayload:
        """The broker's answer to ``remaining``, with the refused parts added."""
        return response if self._merge is None else self._merge(response)


class _Level(NamedTuple):
    """One nesting level: an array of the request, and the array of the response that answers it."""

    asked: str
    answered: str
    ids: tuple[tuple[str, str], ...] = (("name", "name"), ("topic_id", "topic_id"))
    """Fields that identify an item, (in the request, in the response); an empty name is the item itself. Those that a
    version does not have are left out, and any one that agrees is a match. Empty: matched by position."""
    all_or_nothing: bool = False
    """A refusal inside one item fails everything in it."""


class _Shape(NamedTuple):
    levels: tuple[_Level, ...]
    code: str = "error_code"
    """The error code's field in an entry of the innermost response array."""
    defaults: Mapping[str, Any] = MappingProxyType({})
    """Values of an error entry where the schema's default is not what a broker sends."""
    all_or_nothing: bool = False
    """A refusal anywhere fails the whole request."""
    always_forward: bool = False
    """The answer needs the broker, even if nothing remains of the request."""


_INDEXES: Final = ("partition_index", "index", "partition")
"""What a partition's number is called in requests."""
_BY_INDEX: Final = (("partition_index", "partition_index"),)
_BARE_INDEX: Final = (("", "partition_index"),)
_TOPICS_AND_PARTITIONS: Final = (_Level("topics", "topics"), _Level("partitions", "partitions", _BY_INDEX))
_CONFIGS: Final = _Shape(
    (_Level("resources", "responses", (("resource_name", "resource_name"),)),),
    # The type is part of the identity, too: see _identities.
)

_SHAPES: Final[Mapping[int, tuple[tuple[int, _Shape], ...]]] = MappingProxyType(
    # API -> (first version, shape), rising
    {
        ApiKey.PRODUCE: (
            (
                0,
                _Shape(
                    (
                        _Level("topic_data", "responses"),
                        _Level("partition_data", "partition_responses", (("index", "index"),)),
                    ),
                    defaults={"base_offset": -1},
                ),
            ),
        ),
        ApiKey.FETCH: (
            (
                0,
                _Shape(
                    (
                        _Level("topics", "responses", (("topic", "topic"), ("topic_id", "topic_id"))),
                        _Level("partitions", "partitions", (("partition", "partition_index"),)),
                    ),
                    defaults={"high_watermark": -1, "records": b""},  # librdkafka takes null for a protocol error
                ),
            ),
        ),
        ApiKey.SHARE_FETCH: (
            (
                0,
                _Shape(
                    (
                        _Level("topics", "responses", (("topic_id", "topic_id"),)),
                        _Level("partitions", "partitions", _BY_INDEX),
                    ),
                ),
            ),
        ),
        ApiKey.OFFSET_FOR_LEADER_EPOCH: (
            (
                0,
                _Shape(
                    (
                        _Level("topics", "topics", (("topic", "topic"),)),
                        _Level("partitions", "partitions", (("partition", "partition"),)),
                    ),
                ),
            ),
        ),
        ApiKey.LIST_OFFSETS: ((0, _Shape(_TOPICS_AND_PARTITIONS)),),
        ApiKey.METADATA: ((0, _Shape((_Level("topics", "topics"),), always_forward=True)),),
        ApiKey.OFFSET_COMMIT: ((0, _Shape(_TOPICS_AND_PARTITIONS)),),
        ApiKey.TXN_OFFSET_COMMIT: ((0, _Shape(_TOPICS_AND_PARTITIONS)),),
        ApiKey.OFFSET_DELETE: ((0, _Shape(_TOPICS_AND_PARTITIONS)),),
        ApiKey.DELETE_RECORDS: ((0, _Shape(_TOPICS_AND_PARTITIONS, defaults={"low_watermark": -1})),),
        ApiKey.CREATE_TOPICS: ((0, _Shape((_Level("topics", "topics"),))),),
        ApiKey.CREATE_PARTITIONS: ((0, _Shape((_Level("topics", "results"),))),),
        ApiKey.DELETE_TOPICS: (
            (0, _Shape((_Level("topic_names", "responses", (("", "name"),)),))),
            (6, _Shape((_Level("topics", "responses"),))),
        ),
        ApiKey.ADD_PARTITIONS_TO_TXN: (
            (
                0,
                _Shape(
                    (
                        _Level("v3_and_below_topics", "results_by_topic_v3_and_below"),
                        _Level("partitions", "results_by_partition", _BARE_INDEX),
                    ),
                    code="partition_error_code",
                    all_or_nothing=True,
                ),
            ),
            (
                4,
                _Shape(
                    (
                        _Level(
                            "transactions",
                            "results_by_transaction",
                            (("transactional_id", "transactional_id"),),
                            all_or_nothing=True,
                        ),
                        _Level("topics", "topic_results"),
                        _Level("partitions", "results_by_partition", _BARE_INDEX),
                    ),
                    code="partition_error_code",
                ),
            ),
        ),
        ApiKey.WRITE_TXN_MARKERS: (
            (
                0,
                _Shape(
                    (
                        _Level("markers", "markers", (("producer_id", "producer_id"),)),
                        _Level("topics", "topics"),
                        _Level("partition_indexes", "partitions", _BARE_INDEX),
                    )
                ),
            ),
        ),
        ApiKey.ALTER_CONFIGS: ((0, _CONFIGS),),
        ApiKey.INCREMENTAL_ALTER_CONFIGS: ((0, _CONFIGS),),
        ApiKey.DELETE_GROUPS: ((0, _Shape((_Level("groups_names", "results", (("", "group_id"),)),))),),
        ApiKey.CREATE_ACLS: ((0, _Shape((_Level("creations", "results", ()),))),),
        ApiKey.DELETE_ACLS: ((0, _Shape((_Level("filters", "filter_results", ()),))),),
        ApiKey.ALTER_CLIENT_QUOTAS: ((0, _Shape((_Level("entries", "entries", (("entity", "entity"),)),))),),
    }
)


def offset_not_available(version: int) -> int:
    """The code for a partition of a ListOffsets whose offsets are not available for a moment (KIP-207).

    Who asks in a version below 5 may not know the one that says so: aiokafka ends with an unknown error. So brokers
    answer with another one, which clients try again as well.
    """
    return OFFSET_NOT_AVAILABLE if version >= _KNOWS_NOT_AVAILABLE else LEADER_NOT_AVAILABLE


def refuse(head: RequestHead, request: RequestPayload, decide: Decide) -> Refused | None:
    """Ask ``decide`` about each part of ``request``; None if it refuses nothing, and the frame goes on as it is.

    APIs without a shape in the table (JoinGroup, ConsumerGroupHeartbeat, EndTxn, InitProducerId, ...) are one part, the
    whole request, and answered by the error code at the top of their response. Raises ValueError for an API whose
    response has none.
    """
    response_type = schema.response_type(head.api_key, head.version)
    if head.api_key == ApiKey.ALTER_USER_SCRAM_CREDENTIALS:
        return _refuse_users(head, request, response_type, decide)
    shape = _shape(head.api_key, head.version)
    if shape is None:
        return _refuse_whole(head, request, response_type, decide)

    refused: list[tuple[Part, Refusal]] = []

    def noted(part: Part) -> Refusal | None:
        refusal = decide(part)
        if refusal is None:
            return None
        if head.api_key == ApiKey.LIST_OFFSETS and refusal.code == OFFSET_NOT_AVAILABLE:
            refusal = refusal._replace(code=offset_not_available(head.version))
        refused.append((part, refusal))
        return refusal

    split = _Splitter(head, shape)
    kept, nodes = split.items(request, response_type, 0, (), noted, shape.all_or_nothing)
    if not refused:
        return None

    def merge(response: ResponsePayload) -> ResponsePayload:
        array = shape.levels[0].answered
        return replace(response, **{array: _merged(shape, nodes, response, 0, shape.always_forward)})

    remaining = replace(request, **{shape.levels[0].asked: kept}) if kept or shape.always_forward else None
    parts = tuple(refused)
    if head.api_key == ApiKey.PRODUCE and request.acks == 0:  # type: ignore[union-attr]
        return Refused(parts, remaining=remaining, close=True)
    if remaining is not None:
        return Refused(parts, remaining=remaining, _merge=merge)
    answer = merge(blank(response_type, {}))
    return Refused(parts, answer=encode_response(answer, head.correlation_id))


def parts_of(head: RequestHead, request: RequestPayload) -> Iterator[Part]:
    """The parts that :func:`refuse` would ask about, in its order."""
    shape = _shape(head.api_key, head.version)
    if head.api_key == ApiKey.ALTER_USER_SCRAM_CREDENTIALS:
        yield from _changes_of_users(head, request)
    elif shape is None:
        yield Part(head.api_key, None, None, None, request, ())
    else:
        yield from _parts(head.api_key, shape, request, 0, ())


def topic_arrays(api_key: int, version: int) -> tuple[str, ...]:
    """The arrays of a request down to those with topics, and further ones; empty where the table has none."""
    shape = None if api_key in _WITHOUT_TOPICS else _shape(api_key, version)
    return () if shape is None else tuple(level.asked for level in shape.levels)


def refuse_all(head: RequestHead, request: RequestPayload, refusal: Refusal) -> Refused | None:
    """Refuse every part for the same reason; None if the request has no parts."""
    return refuse(head, request, lambda part: refusal)


def _shape(api_key: int, version: int) -> _Shape | None:
    found = None
    for first_version, shape in _SHAPES.get(api_key, ()):
        if version >= first_version:
            found = shape
    return found


def _refuse_whole(
    head: RequestHead, request: RequestPayload, response_type: type[ResponsePayload], decide: Decide
) -> Refused | None:
    part = Part(head.api_key, None, None, None, request, ())
    refusal = decide(part)
    if refusal is None:
        return None
    names = {field.name for field in fields(response_type)}
    if "error_code" not in names:
        raise ValueError(f"no way to refuse {response_type.__name__} v{head.version} as a whole")
    values = _error_values(names, "error_code", refusal)
    if head.api_key == ApiKey.JOIN_GROUP:
        values["member_id"] = request.member_id  # type: ignore[union-attr]  # a broker returns it
    answer = blank(response_type, values)
    return Refused(((part, refusal),), answer=encode_response(answer, head.correlation_id))


def _changes_of_users(head: RequestHead, request: Any) -> Iterator[Part]:
    for item in (*request.deletions, *request.upsertions):
        yield Part(head.api_key, None, None, None, item, ())


def _refuse_users(
    head: RequestHead, request: Any, response_type: type[ResponsePayload], decide: Decide
) -> Refused | None:
    """AlterUserScramCredentials asks in two arrays and is answered in one, an entry for each user.

    So a user of whom one change is refused has the others refused, too.
    """
    parts = list(_changes_of_users(head, request))
    refused = tuple((part, refusal) for part in parts if (refusal := decide(part)) is not None)
    if not refused:
        return None
    reasons = {part.item.name: refusal for part, refusal in reversed(refused)}
    entry_type = _item_type(response_type, "results")
    names = {field.name for field in fields(entry_type)}

    def merge(response: Any) -> Any:
        answered = {entry.user: entry for entry in response.results}
        for user, refusal in reasons.items():
            answered[user] = blank(entry_type, {"user": user, **_error_values(names, "error_code", refusal)})
        users = dict.fromkeys(part.item.name for part in parts)
        return replace(response, results=tuple(answered[user] for user in users if user in answered))

    deletions, upsertions = (
        tuple(item for item in asked if item.name not in reasons) for asked in (request.deletions, request.upsertions)
    )
    if not deletions and not upsertions:
        return Refused(refused, answer=encode_response(merge(blank(response_type, {})), head.correlation_id))
    return Refused(refused, remaining=replace(request, deletions=deletions, upsertions=upsertions), _merge=merge)


# --- Taking the request apart ---


class _Node(NamedTuple):
    """One item of the request, for the merge: refused (``entry``), forwarded in part (both), or forwarded (neither)."""

    ids: tuple[Any, ...]
    entry: Any = None
    """The entry to answer with; with ``children``, an empty one, should the broker leave the item out."""
    children: tuple[_Node, ...] | None = None


class _Splitter(NamedTuple):
    head: RequestHead
    shape: _Shape

    def items(
        self,
        around: Any,
        answer_type: Any,
        depth: int,
        within: tuple[Any, ...],
        decide: Decide,
        all_or_nothing: bool,
    ) -> tuple[tuple[Any, ...], tuple[_Node, ...]]:
        """The items of ``around`` that remain, and a node for each item of it.

        ``answer_type`` is the class in the response that answers to ``around``.
        """
        if all_or_nothing:
            decide = self._all_or_nothing(around, depth, within, decide)
        level = self.shape.levels[depth]
        entry_type = _item_type(answer_type, level.answered)
        innermost = depth == len(self.shape.levels) - 1
        kept: list[Any] = []
        nodes: list[_Node] = []
        for item in getattr(around, level.asked) or ():
            ids = _identities(level, item, 0)
            if innermost:
                refusal = decide(_part(self.head.api_key, item, within))
                if refusal is None:
                    kept.append(item)
                    nodes.append(_Node(ids))
                else:
                    nodes.append(_Node(ids, self._entry(level, entry_type, item, refusal)))
                continue
            inner = self.shape.levels[depth + 1]
            kept_inside, children = self.items(
                item, entry_type, depth + 1, (*within, item), decide, level.all_or_nothing
            )
            if all(child.entry is None for child in children):
                kept.append(item)
                nodes.append(_Node(ids))
                continue
            echoed = _echoed(level, entry_type, item)
            if kept_inside:
                kept.append(replace(item, **{inner.asked: kept_inside}))
                nodes.append(_Node(ids, blank(entry_type, echoed), children))
            else:
                entries = tuple(child.entry for child in children)
                nodes.append(_Node(ids, blank(entry_type, {**echoed, inner.answered: entries})))
        return tuple(kept), tuple(nodes)

    def _all_or_nothing(self, around: Any, depth: int, within: tuple[Any, ...], decide: Decide) -> Decide:
        parts = _parts(self.head.api_key, self.shape, around, depth, within)
        decisions = [decide(part) for part in parts]
        if any(decision is not None for decision in decisions):
            decisions = [decision or Refusal(OPERATION_NOT_ATTEMPTED) for decision in decisions]
        in_order = iter(decisions)
        return lambda part: next(in_order)

    def _entry(self, level: _Level, entry_type: Any, item: Any, refusal: Refusal) -> Any:
        names = {field.name for field in fields(entry_type)}
        values = {name: value for name, value in self.shape.defaults.items() if name in names}
        values.update(_echoed(level, entry_type, item))
        values.update(_error_values(names, self.shape.code, refusal))
        return blank(entry_type, values)


def _parts(api_key: int, shape: _Shape, around: Any, depth: int, within: tuple[Any, ...]) -> Iterator[Part]:
    for item in getattr(around, shape.levels[depth].asked) or ():
        if depth == len(shape.levels) - 1:
            yield _part(api_key, item, within)
        else:
            yield from _parts(api_key, shape, item, depth + 1, (*within, item))


def _part(api_key: int, item: Any, within: tuple[Any, ...]) -> Part:
    topic = topic_id = partition = None
    if api_key in (ApiKey.ALTER_CONFIGS, ApiKey.INCREMENTAL_ALTER_CONFIGS):
        topic = item.resource_name if item.resource_type == RESOURCE_TYPE_TOPIC else None
    elif api_key == ApiKey.DELETE_TOPICS and isinstance(item, str):
        topic = item
    elif api_key not in _WITHOUT_TOPICS:
        holder = within[-1] if within else item
        topic = getattr(holder, "name", None) or getattr(holder, "topic", None)
        topic_id = getattr(holder, "topic_id", None)
        if within:
            partition = item if isinstance(item, int) else next(getattr(item, n) for n in _INDEXES if hasattr(item, n))
    return Part(api_key, topic, topic_id, partition, item, within)


# --- Putting the answer together ---


def _merged(shape: _Shape, nodes: Sequence[_Node], around: Any, depth: int, only_asked: bool) -> tuple[Any, ...]:
    """The entries of the response's array in ``around``, with the refused ones at their places.

    Entries that answer to no item (a broker that joins a topic asked for twice, say) stay, at the end, unless
    ``only_asked``: Metadata v0 for no topics is Metadata for all.
    """
    level = shape.levels[depth]
    left = list(getattr(around, level.answered) or ())
    entries: list[Any] = []
    for node in nodes:
        if node.children is None:
            answer = node.entry if node.entry is not None else _take(level, node.ids, left)
        else:
            answer = _take(level, node.ids, left) or node.entry
            inner = shape.levels[depth + 1].answered
            answer = replace(answer, **{inner: _merged(shape, node.children, answer, depth + 1, only_asked)})
        if answer is not None:
            entries.append(answer)
    return tuple(entries) if only_asked else (*entries, *left)


def _take(level: _Level, ids: tuple[Any, ...], left: list[Any]) -> Any:
    for index, entry in enumerate(left):
        answered = _identities(level, entry, 1)
        # A topic asked for by name is answered with name and id, and so is one asked for by id.
        if not level.ids or any(
            mine is not None and mine == theirs for mine, theirs in zip(ids, answered, strict=True)
        ):
            return left.pop(index)
    return None


def _identities(level: _Level, item: Any, side: int) -> tuple[Any, ...]:
    """The values by which an item of the request (side 0) or response (side 1) is known; None where it has none."""
    values = []
    for names in level.ids:
        name = names[side]
        value = item if name == "" else getattr(item, name, None)
        if name == "resource_name":
            value = (item.resource_type, value)
        elif name == "entity":  # of a quota: the request's and the response's classes differ
            value = tuple((each.entity_type, each.entity_name) for each in item.entity)
        values.append(value)
    return tuple(values)


def _echoed(level: _Level, entry_type: Any, item: Any) -> dict[str, Any]:
    """The identity of a request's item as fields of the response's entry."""
    names = {field.name for field in fields(entry_type)}
    values = {
        answered: item if asked == "" else getattr(item, asked, None)
        for asked, answered in level.ids
        if answered in names
    }
    if "resource_type" in names and "resource_name" in values:
        values["resource_type"] = item.resource_type
    if "entity" in values:
        kind = _item_type(entry_type, "entity")
        values["entity"] = tuple(
            kind(entity_type=each.entity_type, entity_name=each.entity_name) for each in item.entity
        )
    return values


def _error_values(names: set[str], code: str, refusal: Refusal) -> dict[str, Any]:
    values: dict[str, Any] = {code: error_code(refusal.code)}
    if "error_message" in names:
        values["error_message"] = refusal.message
    return values


def _item_type(answer_type: Any, array: str) -> Any:
    (found,) = (field for field in fields(answer_type) if field.name == array)
    kind = classify_field(found)
    assert isinstance(kind, EntityTupleField)
    return kind.type_
