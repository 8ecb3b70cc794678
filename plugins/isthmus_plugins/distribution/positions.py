"""How far a distributor has come: what is kept at its source and at its target, and what follows from both.

For one partition of one topic. *The target* keeps how far it was given the source's log (:class:`Given`), in one
transaction with the records: a distributor that is started again goes on there, and doubles nothing. That is gone with
the target, and so is what the target has not passed on to the leaves beside it, which nobody else would. So
*the source* keeps (:class:`Course`) which leaf was given which stretch of its log, and up to where all leaves on the
target's side have it: *settled*. Whatever is lost, the distributor goes back to there.

    stretch      1: leaf X          2: leaf Y            3: leaf X, under way
    source  |----------------------|-------------------|-----------------------------> end of the log
                 ^ settled                ^ settled         ^ settled      ^ given

======================  ===============================================================================================
the target is changed   a new stretch begins where the old target was given all; the old one settles by and by
a leaf is lost          a new stretch begins where the first that was its was settled; what came after is given again
a leaf joins            a distributor begins at the log's start; the leaf beside the new one *fills* it: everything
                        up to the log's end of that moment, whatever its flags, and live from there on
a leaf is taken out     when nobody gives it anything any more, and what it has is settled (:func:`needs`,
                        :func:`unsettled`)
the source's log is     a new stretch begins where its log ends now, and what comes there is given; what was given of
cut (unclean election)  the lost part stays with those who got it
======================  ===============================================================================================

*Settled* comes from the target, since its own distributors keep the same at their source: messages are settled once the
target has them, and all that the target's log held then is settled on its lower levels (:class:`Reports`).

The source's record is written after the target's, so it is behind: that makes duplicates after a loss, and never a gap.
Each stretch has a *term*, which never comes again, so what a target kept of an earlier stretch, or of an earlier life
of the source, is not taken for its own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final, NamedTuple, TypeAlias

from isthmus_plugins.distribution.copy_flags import ALL_LEVELS, passed_on
from isthmus_plugins.distribution.tree import Above

MARKS_MAX: Final = 1000
"""Of what is not settled yet; beyond that every other one is forgotten, and more settles at a time."""


class PositionError(Exception):
    """What source and target keep cannot both be: going on would be a guess."""


class Term(NamedTuple):
    """Which stretch. ``version``: of the tree in which the distributor began."""

    version: int
    number: int


class Given(NamedTuple):
    """Kept at the target: in this term, everything before ``position`` of the source's log was given."""

    term: Term
    position: int


class Stretch(NamedTuple):
    """A part of the source's log that one leaf is given: from ``start`` to where the next stretch starts."""

    term: Term
    leaf: str
    start: int
    settled: int
    """Before this offset, all leaves of the target's subtree have everything."""


@dataclass(frozen=True, slots=True)
class Course:
    """Kept at the source: the stretches that are not settled, the last of which is under way."""

    stretches: tuple[Stretch, ...]
    fill_until: int = 0
    """Before this offset everything is given, whatever its flags."""

    @property
    def current(self) -> Stretch:
        return self.stretches[-1]

    @property
    def settled(self) -> int:
        """Before this offset all leaves of the target's subtree have everything."""
        return self.stretches[0].settled

    @property
    def fills(self) -> bool:
        """Whether a new leaf does not have all that was there yet."""
        return self.settled < self.fill_until

    def pending(self) -> Iterator[tuple[Stretch, int | None]]:
        """The stretches that are not settled, each with its end, and the one that is under way, which has none."""
        for stretch, following in pairwise(self.stretches):
            if stretch.settled < following.start:
                yield stretch, following.start
        yield self.current, None

    def position(self, given: Given | None) -> int:
        """Where to go on. ``given``: what the current target keeps. Raises PositionError."""
        current = self.current
        if given is not None and given.term > current.term:
            raise PositionError(
                f"{current.leaf} was given messages in {given.term}, this cluster knows of {current.term} only: its "
                "own positions are older than they were; take the cluster out of the tree and add it anew"
            )
        return given.position if given is not None and given.term == current.term else current.settled

    def flags(self, offset: int, flags: int, level: int) -> int | None:
        """The flags of what is produced of a message; None: it is not passed on."""
        return ALL_LEVELS if offset < self.fill_until else passed_on(flags, level)

    def handed_over(self, leaf: str, position: int) -> Course:
        """Another target, from where the one before was given all.

        Not before that one takes nothing of it any more: its position is read after earlier producers are fenced.
        """
        following = Stretch(_next(self.current.term), leaf, position, position)
        return replace(self, stretches=(*self.stretches, following))._without_settled()

    def gone_back(self, lost: Collection[str], leaf: str) -> Course:
        """Leaves were lost, and ``leaf`` is the target now: what they were given last is given again.

        Where none of them was given anything that is not settled, this is the same course.
        """
        for stretch, _ in self.pending():
            if stretch.leaf in lost:
                again = Stretch(_next(self.current.term), leaf, stretch.start, stretch.settled)
                kept = self.stretches[: self.stretches.index(stretch)]
                return replace(self, stretches=(*kept, again))
        return self

    def cut(self, end: int) -> Course:
        """The source's log was cut: what it holds from ``end`` on now is new, whatever was given of what was there."""
        kept = tuple(
            stretch._replace(settled=min(stretch.settled, end)) for stretch in self.stretches if stretch.start < end
        )
        following = Stretch(_next(self.current.term), self.current.leaf, end, end)
        cut = replace(self, stretches=(*kept, following), fill_until=min(self.fill_until, end))
        return cut._without_settled()

    def made_anew(self, leaf: str, log_start: int) -> Course:
        """The source's topic is another one: none of its messages was given to anybody."""
        return Course((Stretch(_next(self.current.term), leaf, log_start, log_start),))

    def settle(self, term: Term, position: int) -> Course:
        """All leaves of a subtree have what one of them was given in this term before ``position``."""
        stretches = list(self.stretches)
        for number, stretch in enumerate(stretches):
            if stretch.term == term:
                end = stretches[number + 1].start if stretch is not self.current else position
                stretches[number] = stretch._replace(settled=max(stretch.settled, min(position, end)))
        return replace(self, stretches=tuple(stretches))._without_settled()

    def _without_settled(self) -> Course:
        stretches = self.stretches
        while len(stretches) > 1 and stretches[0].settled >= stretches[1].start:
            stretches = stretches[1:]
        return replace(self, stretches=stretches)


def _next(term: Term) -> Term:
    return term._replace(number=term.number + 1)


Ends: TypeAlias = Mapping[int, int]
"""Of the partitions of a topic at another leaf that are given one of ours, by number: where their logs go on."""


class Reports:
    """What of a stretch is settled, by what its leaf reports.

    In memory: a distributor that starts begins with one mark, where it goes on and where the target's logs end.
    """

    def __init__(self) -> None:
        self._marks: deque[tuple[int, Ends]] = deque()

    def given(self, position: int, target_ends: Ends) -> None:
        """What stands before ``position`` is in the target's logs, before ``target_ends``."""
        self.ends_at(target_ends)
        if self._marks and self._marks[-1] == (position, target_ends):
            return
        self._marks.append((position, target_ends))
        if len(self._marks) > MARKS_MAX:
            self._marks = deque(list(self._marks)[1::2])

    def ends_at(self, target_ends: Ends) -> None:
        """Where the target's logs end now. One that went on behind that has lost what it was given last."""
        if self._marks and any(target_ends.get(each, end) < end for each, end in self._marks[-1][1].items()):
            self._marks = deque(
                (position, {each: min(end, target_ends.get(each, end)) for each, end in ends.items()})
                for position, ends in self._marks
            )

    def settled(self, below: Ends | None) -> int | None:
        """What is settled since; None: nothing more.

        ``below``: up to where all that the target's logs hold is settled on its lower levels, read after these marks;
        None: it has none.
        """
        position = None
        while self._marks and (below is None or _reach(below, self._marks[0][1])):
            position, _ = self._marks.popleft()
        return position


def _reach(below: Ends, ends: Ends) -> bool:
    return all(below.get(each, -1) >= end for each, end in ends.items())


# ---- the tree changes ----


def begun(version: int, leaf: str, log_start: int, fill_until: int = 0) -> Course:
    """The course of a level that is new in a version of the tree: all of the log is given, from its start on.

    ``fill_until``: where the log ends, if the leaf on the other side is new. Not before all other levels of this leaf
    are at that version: what others take for settled without the new leaf, as they know of none, is before that end.
    """
    return Course((Stretch(Term(version, 0), leaf, log_start, log_start),), fill_until)


def carried(course: Course, beside: Collection[str], target: str) -> Course:
    """The course of a level in another version of its tree. ``beside``: the leaves on its other side there.

    A leaf that is gone and was given what is not settled was lost: it is given to ``target``, if it was the last one.
    """
    lost = {stretch.leaf for stretch in course.stretches} - {*beside}
    current = course.current.leaf
    return course.gone_back(lost, target if current in lost else current)


def needs(course: Course, above: Above, leaf: str) -> str | None:
    """Why a leaf cannot be taken out yet as far as another one's course at a level goes; None: it can."""
    if leaf not in above.beside or len(above.beside) == 1:
        return None
    if course.current.leaf == leaf:
        return f"writes to it at level {above.level}: choose another target"
    if any(stretch.leaf == leaf for stretch, _ in course.pending()):
        return f"gave it what is not settled yet at level {above.level}"
    return None


def unsettled(course: Course, level: int, log_end: int) -> str | None:
    """Why a leaf cannot be taken out yet as far as its own course at a level goes; None: it can."""
    if course.settled >= log_end:
        return None
    return f"its log ends at {log_end}, and is settled up to {course.settled} at level {level}"
