"""The topics and groups that a request names, for every API that names any: found without decoding it.

Which requests name topics, and where, follows from the table of ``refusals``; this compiles one locator for each
version. Results are bytes as in ``peeks``: a topic is its name, or its id where the version has ids alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, Final

from isthmus_protocol import peeks
from isthmus_protocol.locate import Want, locator
from isthmus_protocol.refusals import topic_arrays
from isthmus_protocol.schema import ApiKey, EntitySpec, message_spec
from isthmus_protocol.wire import Frame

Topics = Callable[[Frame], tuple[list[bytes], list[bytes]]]
"""(Names, ids) in a frame, or a prefix of it that has them. Raises NeedMore, MalformedFrame."""
Groups = Callable[[Frame], list[bytes]]

_CONFIG_APIS: Final = (ApiKey.DESCRIBE_CONFIGS, ApiKey.ALTER_CONFIGS, ApiKey.INCREMENTAL_ALTER_CONFIGS)
_TOPIC: Final = 2
_GROUP: Final = 32
"""``resource_type`` in requests about configurations."""
_NO_ID: Final = bytes(16)


@cache
def topics_in(api_key: int, version: int) -> Topics | None:
    """What finds the topics in a request; None for an API whose requests name none."""
    if api_key in _CONFIG_APIS:
        return lambda frame: (_configured(api_key, version, frame, _TOPIC), [])
    spec = message_spec(api_key, version, "request")
    wanted = _wanted(spec, topic_arrays(api_key, version) or ("topics",))
    if wanted is None:
        return None
    want, depth, has_names, has_ids = wanted
    find = locator(api_key, version, "request", (want,))

    def topics(frame: Frame) -> tuple[list[bytes], list[bytes]]:
        names, ids = [], []
        for entry in _entries(find(frame), depth):
            name, topic_id = entry if has_names and has_ids else (entry, None) if has_names else (None, entry)
            if name:
                names.append(name)
            elif topic_id and topic_id != _NO_ID:
                ids.append(topic_id)
        return names, ids

    return topics


@cache
def groups_in(api_key: int, version: int) -> Groups | None:
    """What finds the groups in a request; None for an API whose requests name none."""
    if api_key in _CONFIG_APIS:
        return lambda frame: _configured(api_key, version, frame, _GROUP)
    if api_key == ApiKey.OFFSET_FETCH:
        return lambda frame: peeks.offset_fetch_groups(version, frame)
    for field in message_spec(api_key, version, "request").fields:
        if field.name in ("group_id", "groups_names", "groups", "group_ids"):
            want: Want = field.name if field.entity is None else (field.name, ("group_id",))
            find = locator(api_key, version, "request", (want,))
            return lambda frame: [each for each in _listed(find(frame)) if each]
    return None


def _listed(found: Any) -> list[bytes]:
    return [found] if isinstance(found, bytes) else list(found or ())


def _configured(api_key: int, version: int, frame: Frame, wanted: int) -> list[bytes]:
    find = locator(api_key, version, "request", (("resources", ("resource_type", "resource_name")),))
    return [name for kind, name in find(frame) or () if kind == wanted]


def _wanted(spec: EntitySpec, path: tuple[str, ...], depth: int = 0) -> tuple[Want, int, bool, bool] | None:
    """Down the arrays of a path to the entries with a topic's name or id: what to locate, how many arrays are around
    their array, and whether they have names, and ids."""
    field = next((field for field in spec.fields if path and field.name == path[0]), None)
    if field is None:
        return None
    if field.entity is None:
        return field.name, depth, True, False  # bare names
    fields = {inner.name for inner in field.entity.fields}
    name = next((each for each in ("name", "topic", "topic_name") if each in fields), None)
    ids = ("topic_id",) if "topic_id" in fields else ()
    known = ((name,) if name else ()) + ids
    if known:
        return (field.name, known), depth, name is not None, bool(ids)
    inner = _wanted(field.entity, path[1:], depth + 1)
    return None if inner is None else ((field.name, (inner[0],)), *inner[1:])


def _entries(found: Any, depth: int) -> Iterator[Any]:
    for each in found or ():
        if depth:
            yield from _entries(each, depth - 1)
        else:
            yield each
