"""Puts the proxies' addresses in the place of the brokers' in responses, by splicing bytes.

Where addresses stand, found in the schemas (a test fails when a new version brings another place):

==========================  =========================================================================================
Metadata, DescribeCluster   an array of brokers
FindCoordinator             the answer itself before v4, an array of coordinators since
Produce v10+, Fetch v16+    node endpoints in a tagged field (KIP-951)
ShareFetch, ShareAcknowl.   node endpoints in an array
DescribeQuorum v2+          the controllers' listeners: no client of a broker needs them, they are left out
DescribeConfigs             values of a broker's listeners and controllers: null and sensitive, as passwords are
==========================  =========================================================================================

``AddressMap`` says which address a client shall see for a broker; None means that no proxy fronts it. Such a broker's
entry is dropped, and its FindCoordinator answer becomes COORDINATOR_NOT_AVAILABLE, which clients retry. DescribeCluster
may list controllers (KIP-919), which have no proxies either: all of them are dropped.

Fetch and ShareFetch responses can be huge. ``NodeEndpointsStream`` passes their chunks on as they come and keeps only
the message's end back, where the node endpoints are. By then the size prefix is gone to the client, so the end must
keep its length: what is too short is filled up with a tagged field that no client knows (and so skips, KIP-482); where
the new addresses do not fit, the node endpoints are left out, and the client refreshes its metadata as before KIP-951.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Final

from isthmus_protocol.error_codes import COORDINATOR_NOT_AVAILABLE
from isthmus_protocol.locate import EntityLocator, Skimmer, Want, entity_locator, locator, response_skimmer
from isthmus_protocol.schema import ApiKey, EntitySpec, FieldSpec, message_spec
from isthmus_protocol.splicing import Edit, Span, edited, edited_frame, encoded_count, encoded_string
from isthmus_protocol.wire import VARINT_BYTES_MAX, Frame, MalformedFrame, read_uvarint, write_uvarint

AddressMap = Callable[[int, bytes, int], tuple[bytes, int] | None]
"""``(node id, host, port)`` of a broker -> the host and port that clients shall see, None where no proxy fronts it."""

Rewriter = Callable[[AddressMap, bytes], bytes]
"""A whole response frame -> the frame for the client, the same object where nothing changes. Raises MalformedFrame, or
NeedMore where it was not whole."""

TAIL_BYTES_MAX: Final = 1 << 20
"""The most that is kept back of a streamed response. Real node endpoints are at most some hundred entries."""

_ENDPOINT_TYPE_BROKER: Final = 1

_BROKER_ARRAYS: Final = {ApiKey.METADATA: "brokers", ApiKey.DESCRIBE_CLUSTER: "brokers"}
_STREAMED: Final = frozenset({ApiKey.FETCH, ApiKey.SHARE_FETCH})
_WITH_ADDRESSES: Final = frozenset(
    {
        *_BROKER_ARRAYS,
        *_STREAMED,
        ApiKey.FIND_COORDINATOR,
        ApiKey.PRODUCE,
        ApiKey.SHARE_ACKNOWLEDGE,
        ApiKey.DESCRIBE_QUORUM,
        ApiKey.DESCRIBE_CONFIGS,
    }
)
"""The others' schemas are not even loaded: all of them take over a second at the start."""
_NODE_ENDPOINTS: Final = "node_endpoints"
_RESOURCE_TYPE_BROKER: Final = 4
_ADDRESS_SETTINGS: Final = frozenset(
    {b"listeners", b"advertised.listeners", b"controller.quorum.voters", b"controller.quorum.bootstrap.servers"}
)
"""Broker settings whose values are addresses."""


@cache
def rewriter(api_key: int, version: int) -> Rewriter | None:
    """What rewrites the addresses in an API's response, ``(address map, whole frame) -> frame``; None: it has none."""
    if api_key not in _WITH_ADDRESSES:
        return None
    spec = message_spec(api_key, version, "response")
    if api_key in _BROKER_ARRAYS:
        return _array_rewriter(api_key, version, spec, _field(spec, _BROKER_ARRAYS[ApiKey(api_key)]))
    if api_key == ApiKey.FIND_COORDINATOR:
        return _coordinator_rewriter(version, spec)
    if api_key == ApiKey.DESCRIBE_QUORUM and _has(spec, "nodes"):
        return _quorum_rewriter(version, spec)
    if api_key == ApiKey.DESCRIBE_CONFIGS:
        return _configs_rewriter(version, spec)
    if _has(spec, _NODE_ENDPOINTS):
        field = _field(spec, _NODE_ENDPOINTS)
        if field.tag is None:
            return _array_rewriter(api_key, version, spec, field)
        return _tagged_rewriter(api_key, version, field)
    return None


def stream_rewriter(api_key: int, version: int) -> Callable[[AddressMap, int], NodeEndpointsStream] | None:
    """For responses that may be too large to keep, ``(address map, frame length) -> NodeEndpointsStream``; or None."""
    if api_key not in _STREAMED or not _has(message_spec(api_key, version, "response"), _NODE_ENDPOINTS):
        return None
    return partial(NodeEndpointsStream, api_key, version)


class NodeEndpointsStream:
    """Rewrites the node endpoints of one Fetch or ShareFetch response that comes in chunks, and keeps its length.

        walking ──the end of the message is found──> keeping its bytes back ──all there──> rewritten, done

    ``length`` is the frame's length with its size prefix.
    """

    __slots__ = ("_addresses", "_keeping", "_left", "_skim", "_skip", "_tail", "_walk")

    def __init__(self, api_key: int, version: int, addresses: AddressMap, length: int) -> None:
        self._skim, self._tail = _stream_parts(api_key, version)
        self._addresses = addresses
        self._left = length
        self._skip = 0
        """Bytes to pass on before the next byte that matters."""
        self._walk: Skimmer | None = None
        self._keeping: bytearray | None = None
        """The message's end as far as it has come; None while walking."""

    def feed(self, chunk: bytes) -> bytes:
        """Take the frame's next bytes, at most to its end. Returns what to send on: most often the chunk itself.

        What is not returned is kept back until the frame is complete. Raises MalformedFrame where the bytes are no such
        response or its end is longer than TAIL_BYTES_MAX: the client's connection must be closed, since part of the
        frame has been sent. Raises ValueError where the chunk reaches into the next frame.
        """
        size = len(chunk)
        self._left -= size
        if self._left < 0:
            raise ValueError("The chunk reaches into the next frame")
        position = self._skip
        if position < size and self._keeping is None:
            position = self._walk_on(chunk, position, size)
        if position >= size:
            self._skip = position - size
            return chunk
        assert self._keeping is not None
        self._skip = 0
        if not self._keeping and not self._left:
            here = chunk[position:]
            tail = self._tail.rewrite(here, self._addresses)
            return chunk if tail is here else chunk[:position] + tail
        self._keeping += chunk[position:]
        passed = chunk[:position]
        return passed if self._left else passed + self._tail.rewrite(bytes(self._keeping), self._addresses)

    def pass_on(self) -> int:
        """How many bytes come next that need no look: the caller sends these on and does not ``feed`` them."""
        count, self._skip = self._skip, 0
        self._left -= count
        return count

    def _walk_on(self, chunk: bytes, position: int, size: int) -> int:
        """Walk through a chunk. Returns where to go on (behind the chunk), or where the tail starts (anywhere)."""
        try:
            if self._walk is None:
                self._walk = self._skim(chunk, position, size)
                position = next(self._walk)
            else:
                position = self._walk.send((chunk, position, size))
        except StopIteration as stop:
            position = stop.value
            self._keeping = bytearray()
            if size + self._left - position > TAIL_BYTES_MAX:
                raise MalformedFrame(f"A response has more than {TAIL_BYTES_MAX} bytes behind its topics") from None
        if position >= size + self._left:
            raise MalformedFrame("A response ends before its last field")
        return position


@cache
def _stream_parts(api_key: int, version: int) -> tuple[Callable[[Frame, int, int], Skimmer], _Tail]:
    spec = message_spec(api_key, version, "response")
    field = _field(spec, _NODE_ENDPOINTS)
    assert field.tag is not None or spec.fields[-1] is field, "Something else follows the node endpoints"
    until = "@tags" if field.tag is not None else field.name
    return response_skimmer(api_key, version, until), _Tail(field)


# Endpoints: structs of a node id, a host and a port.

_Found = tuple[Span, list[tuple[Span, int, bytes, Span, int, Span]]]
"""The array, and of each struct in it: itself, node id, host, the host's place, port, the port's place."""


class _Endpoints:
    """The array of endpoints in one field of a response."""

    def __init__(self, field: FieldSpec, flexible: bool) -> None:
        assert field.entity is not None
        assert field.is_array
        names = [inner.name for inner in field.entity.fields]
        node_id = "broker_id" if "broker_id" in names else "node_id"
        self.wants: tuple[Want, ...] = (
            f"{field.name}@",
            (field.name, ("@", node_id, "host", "host@", "port", "port@")),
        )
        self.flexible = flexible
        self.port_bytes = _field(field.entity, "port").size

    def edits(self, found: _Found, addresses: AddressMap) -> list[Edit]:
        """What must change, in order of position. ``found`` is what ``wants`` gave."""
        (array_start, _), endpoints = found
        edits: list[Edit] = []
        dropped = 0
        for (start, end), node_id, host, host_span, port, port_span in endpoints:
            address = addresses(node_id, host, port)
            if address is None:
                edits.append((start, end, b""))
                dropped += 1
            elif address != (host, port):
                edits.append((*host_span, encoded_string(address[0], self.flexible)))
                edits.append((*port_span, address[1].to_bytes(self.port_bytes, "big", signed=self.port_bytes == 4)))
        if dropped:
            edits.insert(0, (array_start, endpoints[0][0][0], encoded_count(len(endpoints) - dropped, self.flexible)))
        return edits


def _array_rewriter(api_key: int, version: int, spec: EntitySpec, field: FieldSpec) -> Rewriter:
    endpoints = _Endpoints(field, spec.flexible)
    locate = locator(api_key, version, "response", (*endpoints.wants, "endpoint_type"))

    def rewrite(addresses: AddressMap, frame: bytes) -> bytes:
        span, found, endpoint_type = locate(frame)
        if endpoint_type not in (None, _ENDPOINT_TYPE_BROKER):
            addresses = _no_address
        edits = endpoints.edits((span, found), addresses)
        return edited_frame(frame, edits) if edits else frame

    return rewrite


def _tagged_rewriter(api_key: int, version: int, field: FieldSpec) -> Rewriter:
    locate = locator(api_key, version, "response", ("@tags",))
    tail = _Tail(field)

    def rewrite(addresses: AddressMap, frame: bytes) -> bytes:
        start, end = locate(frame)
        section = frame[start:end]
        changed = tail.rewrite_section(section, addresses)
        return frame if changed is section else edited_frame(frame, [(start, end, changed)])

    return rewrite


def _coordinator_rewriter(version: int, spec: EntitySpec) -> Rewriter:
    wants: tuple[Want, ...] = ("node_id", "node_id@", "host", "host@", "port", "port@", "error_code@")
    in_array = _has(spec, "coordinators")
    locate = locator(ApiKey.FIND_COORDINATOR, version, "response", (("coordinators", wants),) if in_array else wants)
    no_host = encoded_string(b"", spec.flexible)

    def rewrite(addresses: AddressMap, frame: bytes) -> bytes:
        found = locate(frame)
        edits: list[Edit] = []
        for node_id, node_id_span, host, host_span, port, port_span, error_span in found if in_array else (found,):
            if not host and node_id < 0:
                continue  # An error already.
            address = addresses(node_id, host, port)
            if address is None:
                edits.append((*error_span, COORDINATOR_NOT_AVAILABLE.to_bytes(2, "big")))
                edits.append((*node_id_span, _MINUS_ONE))
                edits.append((*host_span, no_host))
                edits.append((*port_span, _MINUS_ONE))
            elif address != (host, port):
                edits.append((*host_span, encoded_string(address[0], spec.flexible)))
                edits.append((*port_span, address[1].to_bytes(4, "big", signed=True)))
        edits.sort()
        return edited_frame(frame, edits) if edits else frame

    return rewrite


_MINUS_ONE: Final = b"\xff\xff\xff\xff"


def _quorum_rewriter(version: int, spec: EntitySpec) -> Rewriter:
    locate = locator(ApiKey.DESCRIBE_QUORUM, version, "response", (("nodes", ("listeners@",)),))
    assert spec.flexible
    none = write_uvarint(1)

    def rewrite(_: AddressMap, frame: bytes) -> bytes:
        edits = [(start, end, none) for start, end in locate(frame) if frame[start:end] != none]
        return edited_frame(frame, edits) if edits else frame

    return rewrite


def _configs_rewriter(version: int, spec: EntitySpec) -> Rewriter:
    config: tuple[Want, ...] = ("name", "value@", "is_sensitive@", ("synonyms", ("value@",)))
    wants: tuple[Want, ...] = (("results", ("resource_type", ("configs", config))),)
    locate = locator(ApiKey.DESCRIBE_CONFIGS, version, "response", wants)
    null, true = b"\x00" if spec.flexible else b"\xff\xff", b"\x01"

    def rewrite(_: AddressMap, frame: bytes) -> bytes:
        edits: list[Edit] = []
        for resource_type, configs in locate(frame):
            if resource_type != _RESOURCE_TYPE_BROKER:
                continue
            for name, value_span, sensitive_span, synonyms in configs:
                if name in _ADDRESS_SETTINGS:
                    edits += [(*value_span, null), (*sensitive_span, true)]
                    edits += [(*span, null) for span in synonyms or ()]
        return edited_frame(frame, edits) if edits else frame

    return rewrite


def _no_address(_node_id: int, _host: bytes, _port: int) -> None:
    return None


# The end of a response with node endpoints: these in an array before the tagged fields, or in one of the tagged fields.


class _Tail:
    """The end of a flexible response, from its node endpoints or, where they are tagged, its tagged fields on."""

    def __init__(self, field: FieldSpec) -> None:
        self._tag = field.tag
        self._endpoints = _Endpoints(field, flexible=True)
        alone = EntitySpec(field.name, flexible=True, fields=(field,), tagged=())
        self._locate: EntityLocator = entity_locator(alone, self._endpoints.wants)

    def rewrite(self, tail: bytes, addresses: AddressMap) -> bytes:
        """The same number of bytes, with other addresses or none. The same object where nothing changes."""
        if self._tag is None:
            found: _Found = self._locate(tail, 0, len(tail))
            tags = _split_section(tail, found[0][1])
            edits = self._endpoints.edits(found, addresses)
            if not edits:
                return tail
            array = edited(tail[: found[0][1]], edits)
            filled = _filled(array, tags, len(tail)) or _filled(
                encoded_count(0, self._endpoints.flexible), tags, len(tail)
            )
        else:
            if tail == _NO_TAGS:
                return tail
            tags = _split_section(tail, 0)
            changed = self._rewrite_tags(tags, addresses)
            if changed is None:
                return tail
            others = [(tag, data) for tag, data in tags if tag != self._tag]
            filled = _filled(b"", changed, len(tail)) or _filled(b"", others, len(tail))
        if filled is None:  # Left out, they make room enough; so somebody uses the filling's tags.
            raise MalformedFrame("A response has unknown tagged fields, and addresses that must not pass")
        return filled

    def rewrite_section(self, section: bytes, addresses: AddressMap) -> bytes:
        """The section of tagged fields with other addresses, at any length. The same object where nothing changes."""
        if section == _NO_TAGS:
            return section
        changed = self._rewrite_tags(_split_section(section, 0), addresses)
        return section if changed is None else _join_section(changed)

    def _rewrite_tags(self, tags: list[_TaggedField], addresses: AddressMap) -> list[_TaggedField] | None:
        """None where nothing changes."""
        changed = False
        rewritten: list[_TaggedField] = []
        for tag, data in tags:
            new_data = data
            if tag == self._tag:
                found: _Found = self._locate(data, 0, len(data))
                if found[0][1] != len(data):
                    raise MalformedFrame("The node endpoints do not fill their tagged field")
                edits = self._endpoints.edits(found, addresses)
                if edits:
                    new_data = edited(data, edits)
                    changed = True
            rewritten.append((tag, new_data))
        return rewritten if changed else None


_TaggedField = tuple[int, bytes]
"""Tag and data."""

_NO_TAGS: Final = b"\x00"

_FILLING_TAGS: Final = (100, 10_000)
"""Tags of the filling, far above those that Kafka uses: a varint of one byte and one of two, so that any length from
two bytes on can be had."""


def _split_section(data: bytes, position: int) -> list[_TaggedField]:
    """The tagged fields from a position to the end of the data."""
    tags: list[_TaggedField] = []
    try:
        count, position = read_uvarint(data, position)
        for _ in range(count):
            tag, position = read_uvarint(data, position)
            size, position = read_uvarint(data, position)
            tags.append((tag, data[position : position + size]))
            position += size
    except IndexError:
        position = len(data) + 1
    if position != len(data):
        raise MalformedFrame("The tagged fields do not end where the response does")
    return tags


def _join_section(tags: list[_TaggedField]) -> bytes:
    parts = [write_uvarint(len(tags))]
    for tag, data in sorted(tags):
        parts += (write_uvarint(tag), write_uvarint(len(data)), data)
    return b"".join(parts)


def _filled(head: bytes, tags: list[_TaggedField], length: int) -> bytes | None:
    """The head and the tagged fields, filled up to a length. None where they are too long, or shorter by one byte."""
    plain = head + _join_section(tags)
    if len(plain) == length:
        return plain
    used = {tag for tag, _ in tags}
    for filling in _FILLING_TAGS:
        if filling in used:
            continue
        missing = length - len(head) - len(_join_section([*tags, (filling, b"")]))
        for longer_varint in range(VARINT_BYTES_MAX):  # The size's varint grows with the size.
            size = missing - longer_varint
            if size >= 0 and len(write_uvarint(size)) == 1 + longer_varint:
                return head + _join_section([*tags, (filling, bytes(size))])
    return None


def _has(spec: EntitySpec, name: str) -> bool:
    return any(field.name == name for field in (*spec.fields, *spec.tagged))


def _field(spec: EntitySpec, name: str) -> FieldSpec:
    return next(field for field in (*spec.fields, *spec.tagged) if field.name == name)
