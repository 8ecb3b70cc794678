"""The process that reads notes of traffic from a pipe, and writes sealed files of events: ``python -m`` this.

It ends with its standard input, that is with the proxy. What it cannot write (a full disk) it drops and counts. Once a
second it says on its standard output how much it has written and dropped, and which topic ids it has no name for.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import random
import select
import sys
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from time import monotonic, time
from typing import Any, BinaryIO, Final

from isthmus_control.model import ResourceType, contains
from isthmus_plugins.capture.blocks import FIELDS, TEXTS, Block, whole_blocks
from isthmus_plugins.capture.notes import Kind, Note, unpack
from isthmus_plugins.capture.pairing import Event, Pairing

READ_BYTES: Final = 1024 * 1024
BLOCK_ROWS: Final = 16_384
BLOCK_S: Final = 1.0
"""An event is on the disk after this time."""
REPORT_S: Final = 1.0
IDLE_S: Final = 0.25
"""Without notes, how often is looked at what is to be written."""
UNNAMED_S: Final = 5.0
"""How long events wait for the name of a topic of which they have the id."""
HASHED: Final = frozenset(("client_id", "principal", "client_address"))
_TEXTS_AT: Final = tuple((name, at) for at, (name, _) in enumerate(FIELDS) if name in TEXTS)
OPEN: Final = ".open"
SEALED: Final = ".capture"


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

    def __contains__(self, event: Event) -> bool:
        name = event.topic if self.type is ResourceType.TOPIC else event.group_id
        if name is None:
            return not self.prefix and event.topic is None and event.group_id is None
        return contains(self.type, self.prefix, str(name))


@dataclass(slots=True)
class Counts:
    events: int = 0
    dropped: int = 0
    """Events that could not be written."""
    bytes: int = 0
    files: int = 0
    unpaired: int = 0


@dataclass(slots=True)
class Output:
    """The files of one namespace."""

    wanted: Wanted
    root: Path
    source: Mapping[str, Any]
    counts: Counts
    block: Block = field(init=False)
    file: BinaryIO | None = None
    path: Path = Path()
    begun_at: float = 0.0
    block_at: float = 0.0
    size: int = 0

    def __post_init__(self) -> None:
        self.source = {**self.source, "namespace": self.wanted.prefix, "namespace_type": self.wanted.type.value}
        self.block = Block(self.source)

    def add(self, event: Event, wall_us: int) -> None:
        block, values = self.block, list(event)
        if not len(block):
            self.block_at = monotonic()
        values[0] = wall_us
        for name, at in _TEXTS_AT:
            text = event[at]
            if text is not None and self.wanted.hash_clients and name in HASHED:
                text = self._hashed(str(text))
            values[at] = block.text(name, text)
        block.add(values)
        if len(block) >= BLOCK_ROWS:
            self.write()

    def _hashed(self, text: str) -> str:
        return blake2b(text.encode(), key=self.wanted.salt.encode()[:64], digest_size=8).hexdigest()

    def write(self) -> None:
        """Write what there is. What cannot be written is dropped."""
        block, self.block = self.block, Block(self.source)
        if not len(block):
            return
        data = block.sealed()
        before = self.size
        try:
            if self.file is None:
                self._begin()
            assert self.file is not None
            self.file.write(data)
            self.size += len(data)
            self.counts.events += len(block)
            self.counts.bytes += len(data)
        except OSError as error:
            self.counts.dropped += len(block)
            if self.file is not None:  # half a block at the end would hide those behind it
                self.file.truncate(before)
                self.file.seek(before)
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                print(f"capture: {error}", file=sys.stderr, flush=True)

    def _begin(self) -> None:
        directory = self.root / self.wanted.directory
        directory.mkdir(parents=True, exist_ok=True)
        self.path = directory / f"{int(time() * 1000)}-{self.source['proxy']}-{random.getrandbits(32):08x}{OPEN}"
        self.file = self.path.open("xb", buffering=0)
        self.begun_at, self.size = monotonic(), 0

    def tend(self, now: float) -> None:
        """Write and seal what has waited for long enough."""
        if len(self.block) and now > self.block_at + BLOCK_S:
            self.write()
        old = now > self.begun_at + self.wanted.roll_s
        if self.file is not None and self.size and (old or self.size >= self.wanted.roll_bytes):
            self.seal()

    def seal(self) -> None:
        """End the file."""
        self.write()
        file, self.file = self.file, None
        if file is None:
            return
        try:
            os.fsync(file.fileno())
            file.close()
            seal(self.path, self.size)
            self.counts.files += 1
            self._make_room()
        except OSError as error:
            print(f"capture: {self.path} not sealed: {error}", file=sys.stderr, flush=True)

    def _make_room(self) -> None:
        """Delete the oldest sealed files beyond what is to be kept."""
        files = sorted(self.path.parent.glob(f"*{SEALED}"))
        sizes = [file.stat().st_size for file in files]
        total = sum(sizes)
        for file, size in zip(files[:-1], sizes, strict=False):
            if total <= self.wanted.keep_bytes:
                break
            file.unlink()
            total -= size


def seal(path: Path, size: int) -> None:
    """Give a file its last name; one without events goes."""
    if size:
        path.rename(path.with_suffix(SEALED))
    else:
        path.unlink()


def seal_left_over(root: Path, proxy: str) -> None:
    """Seal what a process before this one left open, as far as its blocks are whole."""
    for path in root.glob(f"*/*-{proxy}-*{OPEN}"):
        data = path.read_bytes()
        end = max((end for end, _, _ in whole_blocks(data)), default=0)
        os.truncate(path, end)
        seal(path, end)


class Writer:
    """All outputs."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._source: Mapping[str, Any] = {}
        self._outputs: dict[str, Output] = {}
        self._names: dict[bytes, str] = {}
        self._unnamed: dict[bytes, float] = {}
        self._waiting: list[tuple[float, Event]] = []
        self._pairing = Pairing(self._names.get)
        self._wall_us = 0
        """Wall clock less monotonic clock."""
        self.counts = Counts()

    def take(self, note: Note) -> None:
        if note.kind == Kind.SETTINGS:
            self._configure(json.loads(note.first))
            return
        if note.kind == Kind.TOPIC:
            topic_id, name = note.first[:16], note.first[16:].decode("utf-8", "replace")
            self._names[topic_id] = name
            self._unnamed.pop(topic_id, None)
            self._look_again(monotonic())
            return
        for event in self._pairing.take(note):
            if isinstance(event.topic, bytes):
                self._unnamed.setdefault(event.topic, monotonic())
                self._waiting.append((monotonic(), event))
            else:
                self._put(event)

    def _configure(self, said: dict[str, Any]) -> None:
        if not self._source:
            self._source = said["source"]
            seal_left_over(self._root, str(said["source"]["proxy"]))
        self._wall_us = (said["wall_ns"] - said["monotonic_ns"]) // 1000
        wanted = [Wanted(ResourceType(each.pop("type")), **each) for each in said["namespaces"]]
        for name in [name for name in self._outputs if all(each.directory != name for each in wanted)]:
            self._outputs.pop(name).seal()
        # The narrowest namespace that holds something has its events.
        outputs: dict[str, Output] = {}
        for each in sorted(wanted, key=lambda each: -len(each.prefix)):
            output = self._outputs.get(each.directory)
            if output is None:
                output = Output(each, self._root, self._source, self.counts)
            output.wanted = each
            outputs[each.directory] = output
        self._outputs = outputs

    def _put(self, event: Event) -> None:
        for output in self._outputs.values():
            if event in output.wanted:
                if _chosen(event, output.wanted.sampling):
                    output.add(event, event.time_ns // 1000 + self._wall_us)
                return

    def _look_again(self, now: float) -> None:
        """Events that waited for names."""
        waiting, self._waiting = self._waiting, []
        for since, event in waiting:
            assert isinstance(event.topic, bytes)
            name = self._names.get(event.topic)
            if name is None and now < since + UNNAMED_S:
                self._waiting.append((since, event))
            else:
                self._put(event._replace(topic=name or event.topic.hex()))

    def tend(self, now: float) -> None:
        if self._waiting and now > self._waiting[0][0] + UNNAMED_S:
            self._look_again(now)
        for output in self._outputs.values():
            output.tend(now)

    def report(self) -> dict[str, Any]:
        self.counts.unpaired = self._pairing.unpaired
        unnamed, self._unnamed = list(self._unnamed), {}
        return {
            "events": self.counts.events,
            "dropped": self.counts.dropped,
            "bytes": self.counts.bytes,
            "files": self.counts.files,
            "unpaired": self.counts.unpaired,
            "unnamed": [topic_id.hex() for topic_id in unnamed],
        }

    def end(self) -> None:
        self._look_again(float("inf"))
        for output in self._outputs.values():
            output.seal()


def _chosen(event: Event, sampling: float) -> bool:
    """Whole requests are chosen or not, by a number that any proxy would come to."""
    if sampling >= 1:
        return True
    number = zlib.crc32(b"%d %d %d" % (event.session, event.correlation_id, event.time_ns))
    return number < sampling * 2**32


def write(notes: Iterable[bytes], root: Path, report: Any) -> None:
    """Read chunks of notes until they end. ``report``: called with what was written, about once a second."""
    writer = Writer(root)
    rest = b""
    reported = 0.0
    for chunk in notes:
        data = rest + chunk if rest else chunk
        taken = 0
        for end, note in unpack(data):
            writer.take(note)
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
