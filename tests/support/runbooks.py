"""Runbooks (``docs/runbooks``), carried out on real clusters as they stand there, step by step.

Names of the page are replaced by a test's own. While a command of one step runs something can be killed; the command is
given again then, as the page says.
"""

from __future__ import annotations

import random
import re
import shlex
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from types import TracebackType
from typing import Any, Final, NamedTuple, Self

import pytest

from isthmus_bench import ready_commands
from support.kafka import unique
from support.links import Linked, Side, until
from support.pasted import Shell, blocks_of
from support.relay import Relay

PAGES: Final = Path(__file__).parents[2] / "docs" / "runbooks"
COMMAND_S: Final = 120
KILLED_WITHIN_S: Final = 0.4
"""So long after a command has begun at most: most take a tenth of a second, one that waits for proxies longer."""
TOOL_STARTS_S: Final = 2.0
"""The same of Kafka's tools, whose Java has to start."""
CUT_S: Final = 2.0
"""So long a link is cut at most, if the command does not end before."""
WELL_S: Final = 90.0
WELL_FOR_S: Final = 1.5
READING: Final = frozenset({"describe", "list", "overlap", "show", "verify", "wait", "status"})
"""Words of commands that change nothing."""
DONE_BEFORE: Final = re.compile("ALREADY_EXISTS|NOT_FOUND")
"""What is said of something that was done already."""
GONE_THERE: Final = "there is no such link on this cluster"
"""What is said where a link was deleted at the other side, and not yet here."""
CUT_WORD: Final = re.compile(r"^--cut (\S+) ", re.MULTILINE)
"""What a dry run prints of the word that has topics cut."""
REFUSED: Final = "# refused: "
"""Behind a command that is to fail; then comes what the answer says."""


class Victim(StrEnum):
    """What dies. A proxy and a broker are those of the side that the command is given to."""

    PROXY = "proxy"
    BROKER = "broker"
    LINK = "link"


@dataclass(frozen=True)
class Kill:
    """What dies while which command runs, one that changes something: its step, and its place there, from 0."""

    what: Victim
    step: int
    command: int


class Command(NamedTuple):
    """One command of a page."""

    text: str
    """With the page's names and variables."""
    refused: str | None
    """What the refusal says; None: it is carried out."""

    @property
    def changes(self) -> bool:
        words = shlex.split(self.text)
        return self.refused is None and "--dry-run" not in words and READING.isdisjoint(words[1:3])


class Step(NamedTuple):
    """A section of a page."""

    number: int
    title: str
    blocks: tuple[str, ...]

    @property
    def commands(self) -> tuple[Command, ...]:
        """Of a page that has nothing but commands of isthmus."""
        return tuple(_command(line) for line in "".join(self.blocks).replace("\\\n", " ").splitlines())


def steps(page: str) -> list[Step]:
    """The steps of a page, which are numbered from 1."""
    text = (PAGES / f"{page}.md").read_text()
    found = []
    for number, title, body in re.findall(r"^## (\d+)\. (.*)\n((?:(?!## ).*\n?)*)", text, re.MULTILINE):
        found.append(Step(int(number), title, tuple(blocks_of(body))))
    assert [step.number for step in found] == list(range(1, text.count("\n## ") + 1)), f"{page}: steps are numbered"
    return found


def _command(line: str) -> Command:
    text, refused, words = line.partition(REFUSED)
    assert text.startswith("isthmus "), f"not a command of isthmus: {line}"
    return Command(text.strip(), words.strip() if refused else None)


def kills(page: str, of: str | None = None) -> list[Any]:
    """All cases of something that dies in a step, as values of a test's parameter: CI has one for each ``of``."""
    return [
        pytest.param(
            Kill(victim, step.number, place),
            id=f"{victim}-{step.number}.{place}",
            marks=pytest.mark.one_in_ci("stories", of=of or page),
        )
        for step in steps(page)
        for place, command in enumerate(step.commands)
        if command.changes
        for victim in Victim
    ]


class Watching:
    """Asks both sides again and again in which state the link is."""

    def __init__(self, link: Linked) -> None:
        self.seen: set[str] = set()
        """Outside of :meth:`looking_away`."""
        self.meanwhile: set[str] = set()
        """In it."""
        self.told: list[str] = []
        """What was said of each of these states when it was seen first."""
        self._link = link
        self._away = False
        self._failed: Exception | None = None
        self._stop = threading.Event()
        self._looks = threading.Lock()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        until("it looks", lambda: self.seen)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join(30)
        if error is None and self._failed is not None:
            raise self._failed

    @contextmanager
    def looking_away(self) -> Iterator[None]:
        """What is seen until the block ends is apart, and a side may not answer."""
        with self._looks:
            self._away = True
        try:
            yield
        finally:
            with self._looks:
                self._away = False

    def _watch(self) -> None:
        while not self._stop.is_set():
            with self._looks:
                try:
                    links = [side.link(self._link.name) for side in (self._link.a, self._link.b)]
                except Exception as error:
                    if self._away:
                        continue
                    self._failed = error
                    return
                for each in links:
                    self._note(each)
            time.sleep(0.005)  # others want to look away, too

    def _note(self, link: Mapping[str, Any]) -> None:
        """A link is as one side tells it."""
        state, seen = str(link["state"]), self.meanwhile if self._away else self.seen
        if state not in seen:
            seen.add(state)
            parts = [each for each in link["partitions"] if each["state"] == state]
            self.told.append(f"{state}, {link['reason']} {link['message']}, at {link['local_cluster_id']}: {parts}")


class InOrder:
    """A page whose steps are carried out. All have been, in their order, when the block ends."""

    def __init__(self, page: str) -> None:
        self._steps = steps(page)
        self._next = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            assert self._next == len(self._steps), f"not carried out: {self._steps[self._next].title}"

    def _begin(self, title: str) -> Step:
        step = self._steps[self._next]
        assert step.title == title, f"the next step is {step.title!r}"
        self._next += 1
        return step


class PastedRunbook(InOrder):
    """A page whose blocks are pasted into one shell."""

    def __init__(self, page: str, shell: Shell) -> None:
        super().__init__(page)
        self._shell = shell

    def step(self, title: str) -> str:
        """Carry out the next step, whose title this is; what it printed. Raises AssertionError."""
        return "".join([self._shell.paste(block) for block in self._begin(title).blocks])


class Runbook(InOrder):
    """A page about links.

    ``names``: what stands in place of the page's names, by their beginnings, links' among them. ``kill``: None, nothing
    dies. ``well``: the states in which links are at both sides once what died is back; or what asks that, where it is
    not as simple. ``third``: C, where the page has one.
    """

    def __init__(
        self,
        page: str,
        link: Linked,
        relay: Relay,
        names: Mapping[str, str],
        kill: Kill | None,
        well: Set[str] | Callable[[], bool],
        watching: Watching | None = None,
        third: Side | None = None,
    ) -> None:
        super().__init__(page)
        self._link = link
        self._relay = relay
        self._names = {"a-to-b": link.name, **names}
        self._kill = kill
        self._well = well
        self._watching = watching
        self._third = third
        self._cut_word = ""
        """What the last dry run printed."""
        self._random = random.Random()
        """Of when something dies: another moment each time."""

    def step(self, title: str) -> str:
        """Carry out the next step, whose title this is; what its commands printed. Raises AssertionError."""
        step = self._begin(title)
        said = []
        for place, command in enumerate(step.commands):
            if self._kill is not None and (self._kill.step, self._kill.command) == (step.number, place):
                said.append(self._killed_under(command))
            else:
                done = self._run(command)
                told = f"{command.text}: exit {done.returncode}\n{done.stdout}\n{done.stderr}"
                assert (done.returncode != 0) == (command.refused is not None), told
                assert command.refused is None or command.refused in done.stderr, told
                said.append(done.stdout)
            if printed := CUT_WORD.findall(said[-1]):
                self._cut_word = printed[-1]
        return "".join(said)

    def leave_out(self, title: str) -> None:
        """Go on behind the next step, whose title this is: the page has it for another case than the test's."""
        self._begin(title)

    def _run(self, command: Command) -> subprocess.CompletedProcess[str]:
        """One command of the page, to its end."""
        return ready_commands.run(self._words(command)[1:], COMMAND_S)

    def _words(self, command: Command) -> list[str]:
        link = self._link
        known = {
            "$A": link.a.proxy.url,
            "$B": link.b.proxy.url,
            "$CLIENTS_A": link.a.bootstrap,
            "$CLIENTS_B": link.b.bootstrap,
            "$LINK_B": self._relay.address,
            "$CUT": self._cut_word,
        }
        if (third := self._third) is not None:
            known |= {"$C": third.proxy.url, "$CLIENTS_C": third.bootstrap, "$LINK_C": third.proxy.link_address}
        longest_first = sorted(self._names, key=len, reverse=True)
        names = re.compile(rf"(?<![\w-])(?:{'|'.join(map(re.escape, longest_first))})")
        return [
            known.get(word) or names.sub(lambda found: self._names[found[0]], word)
            for word in shlex.split(command.text)
        ]

    def _side(self, command: Command) -> Side:
        """Which side a command is given to."""
        if self._third is not None and re.search(r'"\$(CLIENTS_)?C"', command.text):
            return self._third
        return self._link.b if re.search(r'"\$(CLIENTS_)?B"', command.text) else self._link.a

    def _killed_under(self, command: Command) -> str:
        """Give a command, have something die under it, and give it again until it is done."""
        with self._watching.looking_away() if self._watching is not None else _nothing():
            first = threading.Thread(target=self._run, args=(command,), daemon=True)
            first.start()
            starts_s = TOOL_STARTS_S if " cluster tool " in command.text else 0.0
            time.sleep(starts_s + self._random.uniform(0.0, KILLED_WITHIN_S))
            self._die(self._side(command), first)
            first.join(COMMAND_S)
            said: str = until("it is done when it is given again", lambda: self._given_again(command), WELL_S)
            self._wait_well()
        return said

    def _die(self, side: Side, command: threading.Thread) -> None:
        """Kill, and start again."""
        assert self._kill is not None
        match self._kill.what:
            case Victim.PROXY:
                side.proxy.kill()
                side.proxy.start()
            case Victim.BROKER:
                broker_id = side.kafka.broker_ids[0]
                side.kafka.kill(broker_id)
                side.kafka.start_broker(broker_id)
            case Victim.LINK:
                self._relay.cut(refuse=True)
                command.join(CUT_S)
                self._relay.mend()

    def _given_again(self, command: Command) -> str:
        """What it said, when it is done. Raises AssertionError."""
        done = self._run(command)
        if GONE_THERE in done.stderr:
            done = self._run(command._replace(text=f"{command.text} --local-only"))
        told = f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
        assert done.returncode == 0 or DONE_BEFORE.search(done.stderr), told
        return told

    def _wait_well(self) -> None:
        """A link may look well before it is told that its connection was lost, or has its streams again."""
        since = time.monotonic()

        def stays_well() -> bool:
            nonlocal since
            if not self._is_well():
                since = time.monotonic()
            return time.monotonic() - since > WELL_FOR_S

        until("the links are well again", stays_well, WELL_S)

    def _is_well(self) -> bool:
        """Whether each link of the page that a side has is well there."""
        if not isinstance(self._well, Set):
            return self._well()
        names = set(self._names.values())
        links = [each for side in (self._link.a, self._link.b) for each in side.proxy.get("/v1/links")["items"]]
        return {each["state"] for each in links if each["link_name"] in names} <= self._well


@contextmanager
def _nothing() -> Iterator[None]:
    yield


@contextmanager
def another_link(pair: Linked, relay: Relay, mode: str = "asynchronous") -> Iterator[Linked]:
    """A link of a test's own between the pair's clusters, which has a topic; Following, or In-Sync."""
    link = Linked(pair.a, pair.b, unique("link"))
    link.a.proxy.cli("link", "create", link.name, "--remote", relay.address)
    link.attach()
    source, target = link.names("stays")
    link.a.create_topic(source)
    link.a.produce(source, [b"before"])
    link.wait_end(target, 1)
    link.wait_following()
    try:
        if mode == "synchronous":
            until("accepted", lambda: link.a.proxy.cli("link", "set-mode", link.name, mode))
            until("In-Sync", lambda: {side.link(link.name)["state"] for side in (link.a, link.b)} == {"In-Sync"})
        yield link
    finally:
        delete_link(link, link.name)


def delete_link(pair: Linked, name: str) -> None:
    """If it is there still: after a failure the clusters, which are shared, are without it."""
    if name in {each["link_name"] for each in pair.a.proxy.get("/v1/links")["items"]}:
        pair.a.proxy.cli("link", "delete", name)
