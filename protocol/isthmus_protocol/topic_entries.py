"""Finds the entries of single topics in answers that list topics, Metadata and DescribeTopicPartitions, and takes them
out or puts others in their place. All other entries are copied as they are and never looked at: an answer may list
thousands of topics, each with all its partitions.

An entry begins with an error code and the topic's name, so it is found by searching the bytes for the name. What is
found could also stand inside another topic's name. It does not, and is the entry's own name,

- in classic versions, where the first byte of the name's size is 0, which no name has inside;
- in flexible ones where the size takes two bytes, or one that is no character of names ('-' is the least, 45);
- else where the error code in front of it is below the least size that a longer name could have, and below 45: one
  character into another name its low byte would be that name's size, further in a character.

Ids, which are random, and numbers do not look like a name of six bytes and its size by chance. Like a shorter one they
do, and for these each entry is looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from functools import cache
from typing import Final, NamedTuple

from isthmus_protocol.locate import Locator, entity_locator, locator
from isthmus_protocol.schema import EntitySpec, FieldSpec, WireType, message_spec
from isthmus_protocol.splicing import Edit, Span, edited_frame, encoded_count, encoded_string
from isthmus_protocol.wire import MalformedFrame, read_uvarint

_ERROR_CODE_BYTES: Final = 2
_LEAST_CHARACTER: Final = ord("-")
"""Of a topic's name."""
_NULL_NAME: Final = b"\x00"
"""In flexible versions."""
_STOOD_MAX: Final = 1_000
"""Places that are remembered."""
SEARCHED_BYTES_MIN: Final = 6
"""Of names that are searched for. To look at each entry takes 2 us for one, on the loop."""


class TopicEntry(NamedTuple):
    """One topic in an answer, and where it stands."""

    start: int
    end: int
    topic_id: bytes | None
    """16 bytes; None in versions without."""
    leader_epochs: list[Span | None]
    """Where those of its partitions stand; None in versions without."""


class TopicEntries:
    """Finds topics in the answers of one API in one version. Positions are those in the frame, which is whole.

    All methods raise MalformedFrame where the bytes are no such answer.
    """

    def __init__(self, api_key: int, version: int) -> None:
        spec = message_spec(api_key, version, "response")
        index, topics = _topics_of(spec)
        assert topics.entity is not None
        names = [field.name for field in topics.entity.fields]
        assert names[:2] == ["error_code", "name"], f"{spec.name} v{version} has other topics"
        self._flexible = spec.flexible
        self._ids_alone = spec.flexible and "topic_id" in names and topics.entity.fields[1].nullable
        self._before: Locator = locator(api_key, version, "response", (f"{spec.fields[index - 1].name}@",))
        behind = spec.fields[index + 1 :]
        self._behind: Locator | None = None
        if any(field.wire is not WireType.FIXED for field in behind):
            self._behind = locator(api_key, version, "response", (f"{behind[0].name}@",))
        self._entry = entity_locator(topics.entity, ("@", "topic_id", ("partitions", ("leader_epoch@",))))
        self._name = entity_locator(topics.entity, ("name", "@"))
        self._stood: dict[bytes, int] = {}
        """Where the bytes of a name stood last: brokers list topics in the same order as long as these are the same."""

    def named(self, frame: bytes, names: Iterable[bytes]) -> dict[bytes, TopicEntry]:
        """The entries of the topics with these names, of those that there are."""
        found, short = {}, set()
        for name in names:
            if len(name) < SEARCHED_BYTES_MIN:
                short.add(name)
            elif (entry := self._entry_of(frame, encoded_string(name, self._flexible), len(name))) is not None:
                found[name] = entry
        return found | self._walked(frame, short) if short else found

    def without_name(self, frame: bytes, topic_id: bytes) -> TopicEntry | None:
        """The entry of an id without a name, as an answer to who asked by that id has where there is no such topic."""
        return self._entry_of(frame, _NULL_NAME + topic_id, 0) if self._ids_alone else None

    def beginning_with(self, frame: bytes, prefix: bytes) -> list[TopicEntry]:
        """The entries of all topics whose names begin with ``prefix``, of :data:`SEARCHED_BYTES_MIN` or more."""
        end = self._end(frame)
        found = []
        at = frame.find(prefix, self._array(frame), end)
        while at >= 0:
            size_at = self._size_before(frame, at)
            if size_at is not None and self._is_name(frame, size_at, len(prefix)):
                found.append(self._at(frame, size_at - _ERROR_CODE_BYTES))
                at = found[-1].end - len(prefix)
            at = frame.find(prefix, at + len(prefix), end)
        return found

    def all_of(self, frame: bytes) -> Iterator[bytes]:
        """Each entry of an answer, as bytes."""
        count, position = self._count(frame, self._array(frame))
        for _ in range(count):
            entry = self._at(frame, position)
            yield frame[entry.start : entry.end]
            position = entry.end

    def only(self, frame: bytes, wanted: Callable[[bytes], bool]) -> bytes:
        """The answer with those entries alone that are ``wanted``; it is asked once of each, in their order."""
        array = self._array(frame)
        count, start = self._count(frame, array)
        kept, position = [], start
        for _ in range(count):
            _, (begin, position) = self._name(frame, position, len(frame))
            if wanted(entry := frame[begin:position]):
                kept.append(entry)
        if len(kept) == count:
            return frame
        return edited_frame(frame, [(array, position, encoded_count(len(kept), self._flexible) + b"".join(kept))])

    def spliced(self, frame: bytes, changed: Iterable[tuple[TopicEntry, bytes]], added: Sequence[bytes] = ()) -> bytes:
        """The answer with other bytes in the place of some entries, none to take one out, and with ``added`` ones."""
        edits: list[Edit] = sorted((entry.start, entry.end, instead) for entry, instead in changed)
        more = len(added) - sum(not instead for _, _, instead in edits)
        if more or added:
            start = self._array(frame)
            count, behind = self._count(frame, start)
            edits.insert(0, (start, behind, encoded_count(count + more, self._flexible) + b"".join(added)))
        return edited_frame(frame, edits) if edits else frame

    # ---- where entries are ----

    def _array(self, frame: bytes) -> int:
        """Where the topics begin, with their count."""
        return int(self._before(frame)[1])

    def _end(self, frame: bytes) -> int:
        """Behind which no topics are, but maybe a name."""
        return len(frame) if self._behind is None else int(self._behind(frame)[0])

    def _count(self, frame: bytes, position: int) -> tuple[int, int]:
        if not self._flexible:
            return max(0, int.from_bytes(frame[position : position + 4], "big", signed=True)), position + 4
        try:
            count, position = read_uvarint(frame, position)
        except IndexError:
            raise MalformedFrame("An answer ends before its topics") from None
        return max(0, count - 1), position

    def _walked(self, frame: bytes, names: Set[bytes]) -> dict[bytes, TopicEntry]:
        """As :meth:`named`, by looking at all entries."""
        found = {}
        count, position = self._count(frame, self._array(frame))
        for _ in range(count):
            name, (start, position) = self._name(frame, position, len(frame))
            if name in names:
                found[name] = self._at(frame, start)
        return found

    def _entry_of(self, frame: bytes, known: bytes, name_size: int) -> TopicEntry | None:
        """The entry that has ``known`` behind its error code."""
        array, end = self._array(frame), self._end(frame)
        at = self._stood.get(known, -1)
        if at < array or at >= end or not frame.startswith(known, at) or not self._is_name(frame, at, name_size):
            at = frame.find(known, array, end)
            while at >= 0 and not self._is_name(frame, at, name_size):
                at = frame.find(known, at + 1, end)
            if at < 0:
                return None
            if len(self._stood) >= _STOOD_MAX:
                self._stood.clear()
            self._stood[known] = at
        return self._at(frame, at - _ERROR_CODE_BYTES)

    def _size_before(self, frame: bytes, text: int) -> int | None:
        """Where the size of a string begins whose text begins at ``text``; None: none can."""
        if not self._flexible:
            return text - 2 if frame[text - 2] == 0 else None
        return text - 2 if frame[text - 1] == 1 else text - 1

    def _is_name(self, frame: bytes, size_at: int, name_size: int) -> bool:
        """Whether a size that stands here is that of a topic's name, of which ``name_size`` bytes are as they must be.

        See above.
        """
        size = frame[size_at]
        if not self._flexible or size < _LEAST_CHARACTER or size > 127:
            return True
        return frame[size_at - 2] == 0 and frame[size_at - 1] < min(_LEAST_CHARACTER, name_size + 2)

    def _at(self, frame: bytes, start: int) -> TopicEntry:
        (start, end), topic_id, leader_epochs = self._entry(frame, start, len(frame))
        return TopicEntry(start, end, topic_id, leader_epochs)


@cache
def topic_entries(api_key: int, version: int) -> TopicEntries:
    """What finds topics in an API's answers of a version."""
    return TopicEntries(api_key, version)


def _topics_of(spec: EntitySpec) -> tuple[int, FieldSpec]:
    return next((index, field) for index, field in enumerate(spec.fields) if field.name == "topics")
