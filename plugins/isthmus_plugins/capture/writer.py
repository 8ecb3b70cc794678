"""The process that reads notes of traffic from a pipe, and writes sealed files of events: ``python -m`` this.

It ends with its standard input, that is with the proxy. What it cannot write (a full disk) it drops and counts. Once a
second it says on its standard output how much it has written and dropped, and which topic ids it has no name for.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import Any, Final

from isthmus_control.model import ResourceType, contains
from isthmus_plugins.capture.blocks import LINKS, REQUESTS, Layout
from isthmus_plugins.capture.events import Common, Event
from isthmus_plugins.capture.files import BlockFiles, Bounds, Counts, seal_left_over
from isthmus_plugins.capture.kafka_topic import CLIENT_ID, KafkaTopic
from isthmus_plugins.capture.notes import Kind, Note, unpack, unpack_link
from isthmus_plugins.capture.observed import STATE
from isthmus_plugins.capture.pairing import Pairing
from isthmus_plugins.capture.sampling import is_chosen, is_in
from isthmus_plugins.clock import monotonic

READ_BYTES: Final = 1024 * 1024
GIVE_WAY_NOTES: Final = 8
"""After so many notes, some 30 microseconds, whoever else wants the core gets it: a kernel that preempts lazily
(Linux 6.12 and later) interrupts nobody in mid-computation before the next tick, not even a task of the idle class."""
REPORT_S: Final = 1.0
IDLE_S: Final = 0.25
"""Without notes, how often is looked at what is to be written."""
UNNAMED_S: Final = 5.0
"""How long events wait for the name of a topic of which they have the id."""
UNNAMED_AT_ONCE: Final = 1000
"""Of so many topic ids a report asks for the names: it is one line, which has a bound where it is read."""
NAMES_MAX: Final = 50_000
"""Names of topics by their ids that are kept."""
UNNAMED_MAX: Final = 50_000
"""More of them are not kept: somebody makes them up."""
OUTPUTS_MAX: Final = 10_000
"""Topics and groups of which is known where their events go."""
_NOT_OF_SESSIONS: Final = frozenset(map(int, (Kind.SETTINGS, Kind.TOPIC, Kind.LINK)))
HASHED: Final = frozenset(("client_id", "principal", "client_address"))


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is captured of one namespace."""

    type: ResourceType
    prefix: str
    directory: str
    """A name for its files, below the directory of all."""
    sampling: float
    hash_clients: bool
    salt: str
    roll_bytes: int
    roll_s: float
    keep_bytes: int
    files: bool = True
    kafka_servers: str = ""
    kafka_topic: str = ""
    kafka_client_file: str = ""

    @property
    def kafka(self) -> tuple[str, str, str]:
        return self.kafka_servers, self.kafka_topic, self.kafka_client_file

    def holds(self, topic: str | None, group: str | None) -> bool:
        """Whether what names these belongs here."""
        name = topic if self.type is ResourceType.TOPIC else group
        if name is None:
            return not self.prefix and topic is None and group is None
        return contains(self.type, self.prefix, name)


@lru_cache(OUTPUTS_MAX)
def hashed(common: Common, salt: str) -> Common:
    """The same without the names of who sent it."""
    key = salt.encode()[:64]
    texts = {name: text for name in HASHED if (text := getattr(common, name)) is not None}
    hashes: Any = {name: blake2b(text.encode(), key=key, digest_size=8).hexdigest() for name, text in texts.items()}
    return common._replace(**hashes)


class Output:
    """Where the events of one namespace go."""

    def __init__(self, wanted: Wanted, root: Path, source: Mapping[str, Any], counts: Counts) -> None:
        self._root = root
        self._counts = counts
        self._source = {**source, "namespace": wanted.prefix, "namespace_type": wanted.type.value}
        self._files: dict[Layout, BlockFiles] = {}
        self._topic: KafkaTopic | None = None
        self.wanted = wanted
        self._follow(None)

    def follow(self, wanted: Wanted) -> None:
        """Other settings."""
        before, self.wanted = self.wanted, wanted
        self._follow(before)

    def _follow(self, before: Wanted | None) -> None:
        wanted = self.wanted
        bounds = Bounds(wanted.roll_bytes, wanted.roll_s, wanted.keep_bytes)
        if not wanted.files:
            self._seal_files()
        elif not self._files:
            directory = self._root / wanted.directory
            self._files = {
                layout: BlockFiles(directory, self._source, layout, bounds, self._counts)
                for layout in (REQUESTS, LINKS)
            }
        for files in self._files.values():
            files.bounds = bounds
        if before is None or before.kafka != wanted.kafka:
            self._close_topic()
            if wanted.kafka_topic:
                self._topic = KafkaTopic(*wanted.kafka, str(self._source["proxy"]))

    def add(self, event: Event, wall_us: int) -> None:
        """``wall_us``: the wall clock less the monotonic one."""
        at, *numbers, common = event
        if self.wanted.hash_clients:
            common = hashed(common, self.wanted.salt)
        self._put(REQUESTS, (int(at * 1e6) + wall_us, *numbers), common)

    def add_link(self, own: tuple[int, ...], common: tuple[Any, ...]) -> None:
        self._put(LINKS, own, common)

    def _put(self, layout: Layout, own: tuple[int, ...], common: tuple[Any, ...]) -> None:
        if self._topic is not None:
            self._topic.add(layout, self._source, (*own, *common))
        if self._files:
            self._files[layout].add(own, common)

    def tend(self, now: float) -> None:
        """Write and seal what has waited for long enough."""
        for files in self._files.values():
            files.tend(now)
        if self._topic is not None:
            self._topic.flush()

    def _seal_files(self) -> None:
        for files in self._files.values():
            files.seal()
        self._files = {}

    def end(self) -> None:
        self._seal_files()
        self._close_topic()

    def _close_topic(self) -> None:
        topic, self._topic = self._topic, None
        if topic is not None:
            topic.close()
            self._counts.sent += topic.sent
            self._counts.dropped += topic.dropped

    @property
    def topic_counts(self) -> tuple[int, int]:
        """Events that were sent to its topic, and dropped, and are not in the counts yet."""
        return (0, 0) if self._topic is None else (self._topic.sent, self._topic.dropped)


class Writer:
    """All outputs."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._source: Mapping[str, Any] = {}
        self._outputs: dict[str, Output] = {}
        self._output_of = lru_cache(OUTPUTS_MAX)(self._find_output)
        self._names: dict[bytes, str] = {}
        self._unnamed: dict[bytes, float] = {}
        self._waiting: list[tuple[float, Event]] = []
        self._pairing = Pairing(self._names.get)
        self._wall_us = 0
        """Wall clock less monotonic clock."""
        self.counts = Counts()

    def take(self, notes: Iterable[Note]) -> None:
        paired = self._pairing.take
        for number, note in enumerate(notes):
            if note.kind in _NOT_OF_SESSIONS:
                self._learn(note)
            else:
                for event in paired(note):
                    self._put(event)
            if number % GIVE_WAY_NOTES == 0:
                os.sched_yield()

    def _learn(self, note: Note) -> None:
        if note.kind == Kind.SETTINGS:
            self._configure(json.loads(note.said))
        elif note.kind == Kind.TOPIC:
            topic_id, name = note.said[:16], note.said[16:].decode("utf-8", "replace")
            if len(self._names) >= NAMES_MAX:  # of topics that there were: what is asked for again is told again
                self._names.clear()
            self._names[topic_id] = name
            self._unnamed.pop(topic_id, None)
            self._look_again(monotonic())
        else:
            self._put_link(note)

    def _configure(self, said: dict[str, Any]) -> None:
        if not self._source:
            self._source = said["source"]
            seal_left_over(self._root, str(said["source"]["proxy"]))
        self._wall_us = (said["wall_ns"] - said["monotonic_ns"]) // 1000
        wanted = [Wanted(ResourceType(each.pop("type")), **each) for each in said["namespaces"]]
        for name in [name for name in self._outputs if all(each.directory != name for each in wanted)]:
            self._outputs.pop(name).end()
        # The narrowest namespace that holds something has its events.
        outputs: dict[str, Output] = {}
        for each in sorted(wanted, key=lambda each: -len(each.prefix)):
            output = self._outputs.get(each.directory)
            if output is None:
                output = Output(each, self._root, self._source, self.counts)
            else:
                output.follow(each)
            outputs[each.directory] = output
        self._outputs = outputs
        self._output_of.cache_clear()

    def _put(self, event: Event) -> None:
        common = event.common
        if common.client_id == CLIENT_ID:
            return
        topic = common.topic
        if isinstance(topic, bytes):
            if len(self._unnamed) < UNNAMED_MAX:
                self._unnamed.setdefault(topic, monotonic())
            self._waiting.append((monotonic(), event))
            return
        output = self._output_of(topic, common.group_id)
        if output is None:
            return
        if is_chosen(output.wanted.sampling, common.session, event.correlation_id, event.at):
            output.add(event, self._wall_us)

    def _find_output(self, topic: str | None, group: str | None) -> Output | None:
        return next((each for each in self._outputs.values() if each.wanted.holds(topic, group)), None)

    def _put_link(self, note: Note) -> None:
        """What a link does with a topic belongs to the narrowest namespace that holds it, the rest to the widest."""
        texts, numbers = unpack_link(note.said)
        kind, _, _, _, topic, _, _ = texts
        outputs = [each for each in self._outputs.values() if each.wanted.type is ResourceType.TOPIC]
        if topic is not None:
            outputs = [each for each in outputs if contains(ResourceType.TOPIC, each.wanted.prefix, topic)][:1]
        for output in outputs[-1:]:
            if kind == STATE or is_in(output.wanted.sampling, b"%d %d" % (int(note.at * 1e9), numbers[1])):
                output.add_link((int(note.at * 1e6) + self._wall_us, *numbers[1:]), (*texts, numbers[0]))

    def _look_again(self, now: float) -> None:
        """Events that waited for names."""
        waiting, self._waiting = self._waiting, []
        for since, event in waiting:
            topic = event.common.topic
            assert isinstance(topic, bytes)
            name = self._names.get(topic)
            if name is None and now < since + UNNAMED_S:
                self._waiting.append((since, event))
            else:
                self._put(event._replace(common=event.common._replace(topic=name or topic.hex())))

    def tend(self, now: float) -> None:
        if self._waiting and now > self._waiting[0][0] + UNNAMED_S:
            self._look_again(now)
        for output in self._outputs.values():
            output.tend(now)

    def report(self) -> dict[str, Any]:
        self.counts.unpaired = self._pairing.unpaired
        unnamed = list(islice(self._unnamed, UNNAMED_AT_ONCE))
        for topic_id in unnamed:
            del self._unnamed[topic_id]
        topics = [each.topic_counts for each in self._outputs.values()]
        return {
            "events": self.counts.events,
            "sent": self.counts.sent + sum(sent for sent, _ in topics),
            "dropped": self.counts.dropped + sum(dropped for _, dropped in topics),
            "bytes": self.counts.bytes,
            "files": self.counts.files,
            "unpaired": self.counts.unpaired,
            "unnamed": [topic_id.hex() for topic_id in unnamed],
        }

    def end(self) -> None:
        self._look_again(float("inf"))
        for output in self._outputs.values():
            output.end()


def write(notes: Iterable[bytes], root: Path, report: Any) -> None:
    """Read chunks of notes until they end. ``report``: called with what was written, about once a second."""
    writer = Writer(root)
    rest = b""
    reported = 0.0
    for chunk in notes:
        data = rest + chunk if rest else chunk
        taken = 0
        for end, together in unpack(data):
            writer.take(together)
            taken = end
        rest = data[taken:]
        now = monotonic()
        writer.tend(now)
        if now > reported + REPORT_S:
            reported = now
            report(writer.report())
    writer.end()
    report(writer.report())


def main() -> None:
    with contextlib.suppress(OSError):  # it runs when nobody else wants to, so that no session waits for it
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    root = Path(sys.argv[1])

    def chunks() -> Iterable[bytes]:
        while True:
            ready, _, _ = select.select([0], [], [], IDLE_S)
            chunk = os.read(0, READ_BYTES) if ready else b""
            if ready and not chunk:
                return
            yield chunk

    def report(counts: dict[str, Any]) -> None:
        try:
            print(json.dumps(counts), flush=True)
        except BrokenPipeError:  # the proxy is gone: what is here is sealed all the same
            sys.stdout = open(os.devnull, "w")  # noqa: SIM115

    write(chunks(), root, report)


if __name__ == "__main__":
    main()
