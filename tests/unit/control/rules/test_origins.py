"""What the control log accepts of origins, and how their records look."""

from __future__ import annotations

import json
import uuid
from dataclasses import replace
from typing import Any

import pytest

from isthmus_control import commands as c
from isthmus_control.apply import apply
from isthmus_control.codec import canonical, from_json, parse
from isthmus_control.control_state import ControlState
from isthmus_control.levels import ORIGINS, level_of
from isthmus_control.model import Reason, ResourceType, Role, TopicState
from isthmus_control.origins import Ended, Origin, OriginEpoch, OriginRange, from_offset, joined, with_epoch
from isthmus_control.outcome import Accepted, Outcome, ProvenanceChanged, Rejected, Rejection
from isthmus_control.truncations import PartitionCut, PartitionView, SalvageFile, TruncationPhase

TOPIC = ResourceType.TOPIC
P = TruncationPhase
X, Y, NEW = (str(uuid.UUID(int=number)) for number in (1, 2, 3))
T1, T2 = (str(uuid.UUID(int=number, version=4)) for number in (8, 9))


class Log:
    """The control log of B, where ``t`` with id X follows A's topic Y; ``led`` is there as well."""

    def __init__(self, level: int = ORIGINS) -> None:
        self.state = ControlState("B", level=level)
        self.ok(c.CreateLink("ab", NEW, "A", True, ("a:1",)))
        self.ok(c.AttachNamespace("ab", TOPIC, "t", "t", Role.FOLLOWER, create_missing=True))
        self.follow()

    def follow(self) -> None:
        self.ok(c.SetFollowerTopic("ab", "t", "t", Y, TopicState.FOLLOWING, X))

    def do(self, body: c.Body, seen: int | None = None, id: str | None = None) -> Outcome:
        offset = self.state.applied_offset + 1
        seen = self.state.applied_offset if seen is None else seen
        command = c.Command(id or str(uuid.UUID(int=offset + 99, version=4)), 1_000 + offset, "p", seen, body)
        assert c.decode(c.encode(command, self.state.level)) == command
        self.state, outcome = apply(self.state, offset, command)
        assert from_json(ControlState, parse(canonical(self.state)), "s") == self.state
        return outcome

    def ok(self, body: c.Body, **more: Any) -> tuple[Any, ...]:
        outcome = self.do(body, **more)
        assert isinstance(outcome, Accepted), outcome
        return outcome.changes

    def refused(self, body: c.Body, code: Rejection, *words: str, **more: Any) -> None:
        before = self.state.origins
        outcome = self.do(body, **more)
        assert isinstance(outcome, Rejected), outcome
        assert outcome.code is code, outcome
        for word in words:
            assert word in outcome.message
        assert self.state.origins is before

    def ranges(self, topic: str = "t", topic_id: str = X) -> list[tuple[str, str, int, int | None]]:
        return [
            (each.origin.cluster_id, each.origin.term, each.start_offset, each.end_offset)
            for each in self.state.origins_of(topic, topic_id, 0).ranges
        ]

    def epochs(self, topic: str = "t") -> list[list[tuple[int, int]]]:
        return [[(*epoch,) for epoch in each.epochs] for each in self.state.origins_of(topic, X, 0).ranges]


def begin(offset: int, topic: str = "led", topic_id: str = X, epoch: int = 3, **more: Any) -> c.BeginTerm:
    return c.BeginTerm((c.TopicTerms(topic, topic_id, {0: c.TermStart(offset, epoch)}),), **more)


def epochs(*found: tuple[int, int], topic: str = "led") -> c.RecordLogEpochs:
    entry = c.LogEpochs(0, tuple(OriginEpoch(*each) for each in found))
    return c.RecordLogEpochs((c.TopicEpochs(topic, X, (entry,)),))


def wrote(term: str, start: int, end: int | None, *found: tuple[int, int], cluster: str = "A") -> OriginRange:
    return OriginRange(Origin(cluster, Y, term), start, end, 5, tuple(OriginEpoch(*each) for each in found))


def told(offset: int, *ranges: OriginRange, topic: str = "t", topic_id: str = X) -> c.RecordOrigins:
    return c.RecordOrigins("ab", (c.ToldTopic(topic, topic_id, (c.ToldPartition(0, offset, ranges),)),))


def place(offset: int, topic: str = "t", topic_id: str = X) -> tuple[c.PartitionOffset, ...]:
    return (c.PartitionOffset(topic, topic_id, 0, offset),)


# --- what this cluster writes


def test_a_term_is_the_id_of_its_command() -> None:
    log = Log()
    (change,) = log.ok(begin(0), id=T1)
    assert change == ProvenanceChanged("led", X, (0,))
    assert log.ranges("led") == [("B", T1, 0, None)]
    assert log.ok(begin(0)) == (), "its term goes on"
    assert log.ok(begin(70)) == ()
    assert log.state.origins_of("led", NEW, 0).ranges == (), "another topic of that name"
    log.ok(begin(0, topic_id=NEW), id=T2)
    assert log.state.origins_of("led", X, 0).ranges == ()


def test_what_was_there_before_has_no_term() -> None:
    log = Log()
    log.ok(begin(50), id=T1)
    assert log.ranges("led") == [("B", "", 0, 50), ("B", T1, 50, None)]
    log.ok(c.AcceptLog(7))
    assert log.ranges("led") == [], "a log that was lost may have said else"
    log.ok(begin(60), id=T2)
    assert log.ranges("led") == [("B", "", 0, 60), ("B", T2, 60, None)]
    assert log.state.origins_of("led", X, 0).ranges[0].assumed


def test_a_term_begins_where_the_log_ends() -> None:
    log = Log()
    log.ok(begin(50), id=T1)
    log.refused(begin(40), Rejection.CONFLICT, "led-0", "truncate it to 40")
    log.refused(begin(-1), Rejection.INVALID)
    log.refused(c.BeginTerm(()), Rejection.INVALID)
    log.refused(begin(0, "t"), Rejection.CONFLICT, "'t' follows link 'ab'")
    assert log.ok(c.TruncateProvenance(place(40, "led"))) == (ProvenanceChanged("led", X, (0,)),)
    assert log.ranges("led") == [("B", "", 0, 40)]
    log.ok(begin(40), id=T2)
    assert log.ranges("led") == [("B", "", 0, 40), ("B", T2, 40, None)]


def test_a_cut_ends_a_term_also_in_the_middle() -> None:
    log = Log()
    log.ok(begin(0), id=T1)
    log.ok(epochs((3, 0), (4, 30)))
    log.ok(c.TruncateProvenance(place(20, "led")))
    (left,) = log.state.origins_of("led", X, 0).ranges
    assert (left.end_offset, left.epochs, left.ended) == (20, ((3, 0),), Ended.CUT)
    log.ok(begin(20), id=T2)
    assert log.ranges("led") == [("B", T1, 0, 20), ("B", T2, 20, None)]


def test_epochs_of_the_own_log() -> None:
    log = Log()
    log.ok(begin(0), id=T1)
    log.ok(epochs((3, 0)))
    assert log.ok(epochs((3, 0))) == log.ok(epochs((3, 25))) == (), "it began before"
    log.ok(epochs((4, 30), (5, 60)))
    assert log.epochs("led") == [[(3, 0), (4, 30), (5, 60)]]
    log.ok(epochs((6, 20)))
    assert log.epochs("led") == [[(3, 0), (6, 20)]], "an unclean election: what 4 and 5 wrote is gone"
    log.refused(epochs((5, 40)), Rejection.CONFLICT, "epoch 5", "epoch 6")
    log.refused(epochs((-1, 40)), Rejection.INVALID)
    log.refused(epochs((7, 0), topic="t"), Rejection.CONFLICT, "not written here")
    log.ok(begin(50, "other"), id=T2)
    log.ok(epochs((1, 0), (1, 50), topic="other"))
    assert log.epochs("other") == [[(1, 0)], [(1, 50)]], "also of what was written before terms"
    log.ok(epochs((2, 30), topic="other"))
    assert log.epochs("other") == [[(1, 0), (2, 30)], []], "what came behind in epoch 1 is gone, too"


def test_the_own_writing_is_closed_when_the_cluster_follows() -> None:
    log = Log()
    log.ok(begin(0), id=T1)
    log.ok(epochs((3, 0), (4, 30)))
    log.refused(c.CloseProvenance(place(5, "none")), Rejection.NOT_FOUND)
    (change,) = log.ok(c.CloseProvenance(place(30, "led"), Ended.FOLLOWS))
    assert change == ProvenanceChanged("led", X, (0,))
    (closed,) = log.state.origins_of("led", X, 0).ranges
    assert (closed.end_offset, closed.epochs, closed.ended) == (30, ((3, 0),), Ended.FOLLOWS)
    assert log.ok(c.CloseProvenance(place(30, "led"), Ended.FOLLOWS)) == ()
    log.ok(begin(30), id=T2)
    assert log.ranges("led") == [("B", T1, 0, 30), ("B", T2, 30, None)]
    log.refused(c.CloseProvenance(place(20, "led"), Ended.FOLLOWS), Rejection.CONFLICT, "truncate it to 20")


# --- what it follows


def test_what_the_source_says_is_kept_as_it_is_told() -> None:
    log = Log()
    log.ok(told(0, wrote("", 0, 40, (0, 0)), wrote(T1, 40, None, (0, 40), (1, 60))))
    assert log.ranges() == [("A", "", 0, 40), ("A", T1, 40, None)]
    assert {each.via for each in log.state.origins_of("t", X, 0).ranges} == {"A"}
    assert log.ok(told(0, wrote("", 0, 40, (0, 0)), wrote(T1, 40, None, (0, 40), (1, 60)))) == ()
    log.ok(told(50, wrote(T1, 50, None, (0, 40), (2, 55))))
    assert log.epochs() == [[(0, 0)], [(0, 40), (2, 55)]], "what it said of what comes there goes"
    log.ok(told(70, wrote(T1, 70, 80, (2, 55)), wrote(T2, 80, None, (0, 80), cluster="C")))
    assert log.ranges() == [("A", "", 0, 40), ("A", T1, 40, 80), ("C", T2, 80, None)]
    log.ok(c.OpenProvenance("ab", place(0)))
    changes = log.ok(c.CloseProvenance(place(75), Ended.FAILED_OVER))
    assert changes == (ProvenanceChanged("t", X, (0,)),), "said once"
    assert log.ranges() == [("A", "", 0, 40), ("A", T1, 40, 75)], "what never came was never there"
    assert log.state.provenance("t", 0)[0].end_offset == 75
    log.ok(c.DetachNamespace("ab", TOPIC, "t"))
    log.ok(begin(75, "t"), id=T1)
    assert log.ranges()[-1] == ("B", T1, 75, None)


def test_what_was_told_is_closed_also_if_its_history_was_never_opened() -> None:
    log = Log()
    log.ok(told(0, wrote(T1, 0, None)))
    log.ok(c.OpenProvenance("ab", place(0)))
    log.ok(c.CloseProvenance(place(0)))
    log.ok(c.TruncateProvenance(place(0)))
    assert log.state.histories["t"].partitions[0] == ()
    log.ok(told(0, wrote(T1, 0, None)))
    log.ok(c.CloseProvenance(place(9), Ended.FAILED_OVER))
    assert log.ranges() == [("A", T1, 0, 9)]


def test_terms_in_which_nothing_was_written_are_kept() -> None:
    log = Log()
    log.ok(told(0, wrote(T1, 0, None)))
    log.ok(c.DetachNamespace("ab", TOPIC, "t"))
    log.ok(c.CloseProvenance(place(30), Ended.FAILED_OVER))
    log.ok(begin(30, "t"), id=T2)
    log.ok(c.CloseProvenance(place(30), Ended.FOLLOWS))
    log.ok(c.AttachNamespace("ab", TOPIC, "t", "t", Role.FOLLOWER))
    log.follow()
    log.ok(told(30, wrote(NEW, 30, None)))
    assert log.ranges() == [("A", T1, 0, 30), ("B", T2, 30, 30), ("A", NEW, 30, None)]
    log.ok(told(30, wrote(NEW, 30, None, (4, 30))))
    assert log.ranges() == [("A", T1, 0, 30), ("B", T2, 30, 30), ("A", NEW, 30, None)]


@pytest.mark.parametrize(
    ("body", "code", "words"),
    [
        (told(5), Rejection.INVALID, "says nothing"),
        (told(5, wrote(T1, 0, None)), Rejection.INVALID, "begins at 0, not 5"),
        (told(-5, wrote(T1, -5, None)), Rejection.INVALID, "begins at"),
        (told(0, wrote(T1, 0, 5), wrote(T2, 6, None)), Rejection.INVALID, "follow each other"),
        (told(0, wrote(T1, 0, None), wrote(T2, 6, None)), Rejection.INVALID, "follow each other"),
        (told(5, wrote(T1, 5, 3)), Rejection.INVALID, "ends at 3"),
        (told(0, wrote(T1, 0, None, (2, 5), (1, 8))), Rejection.INVALID, "out of order"),
        (told(0, wrote(T1, 0, None, (1, 8), (2, 5))), Rejection.INVALID, "out of order"),
        (told(0, wrote(T1, 0, 8, (1, 8))), Rejection.INVALID, "out of order"),
        (told(0, wrote(T1, 0, None), topic="led"), Rejection.CONFLICT, "does not follow"),
        (told(0, wrote(T1, 0, None), topic_id=NEW), Rejection.CONFLICT, "not"),
    ],
)
def test_nonsense_of_a_source_is_refused(body: c.Body, code: Rejection, words: str) -> None:
    Log().refused(body, code, words)


def test_who_was_late_does_not_replace_what_it_did_not_see() -> None:
    """Another proxy leads the partition's link by now, and has recorded more."""
    log = Log()
    log.ok(told(0, wrote(T1, 0, None)))
    seen = log.state.applied_offset
    log.ok(told(50, wrote(T1, 50, 60), wrote(T2, 60, None)))
    log.refused(told(40, wrote(T1, 40, None)), Rejection.CONFLICT, "recorded anew", seen=seen)
    log.refused(c.TruncateProvenance(place(40)), Rejection.CONFLICT, "recorded anew", seen=seen)
    log.ok(told(40, wrote(T1, 40, None)))


# --- from before


def test_below_its_level_nothing_of_it_is_recorded() -> None:
    log = Log(ORIGINS - 1)
    log.ok(c.OpenProvenance("ab", place(0)))
    for body in (begin(0), epochs((1, 0)), told(0, wrote(T1, 0, None)), c.ForgetHistories((c.GoneTopic("led", X),))):
        log.refused(body, Rejection.NOT_SUPPORTED, "isthmus control upgrade")
    log.refused(c.CloseProvenance(place(5), Ended.FOLLOWS), Rejection.NOT_SUPPORTED)
    assert level_of(c.CloseProvenance(place(5))) == 0
    log.ok(c.CloseProvenance(place(5)))
    log.ok(c.TruncateProvenance(place(3)))
    assert log.state.origins == {}
    assert log.ranges() == [("A", "", 0, 3)], "its direct source is assumed"
    assert log.state.origins_of("t", X, 0).ranges[0].assumed


def test_what_was_followed_before_its_level_becomes_what_the_source_says() -> None:
    log = Log(ORIGINS - 1)
    log.ok(c.OpenProvenance("ab", place(0)))
    log.ok(c.RecordSourceEpochs((c.PartitionEpoch("t", X, 0, 4, 0), c.PartitionEpoch("t", X, 0, 6, 20))))
    log.ok(c.RaiseLevel(ORIGINS))
    assert log.ranges() == [("A", "", 0, None)]
    assert log.epochs() == [[(4, 0), (6, 20)]]
    log.ok(told(0, wrote(T1, 0, 30, (1, 0), cluster="C"), wrote(T2, 30, None, (6, 30))))
    assert log.ranges() == [("C", T1, 0, 30), ("A", T2, 30, None)]


def test_a_promotion_from_before_its_level_goes_on_in_a_term() -> None:
    log = Log(ORIGINS - 1)
    log.ok(c.OpenProvenance("ab", place(0)))
    log.ok(c.CloseProvenance(place(40)))
    log.ok(c.DetachNamespace("ab", TOPIC, "t"))
    log.ok(c.RaiseLevel(ORIGINS))
    log.ok(begin(55, "t"), id=T1)
    assert log.ranges() == [("A", "", 0, 40), ("B", "", 40, 55), ("B", T1, 55, None)]
    assert [each.assumed for each in log.state.origins_of("t", X, 0).ranges] == [True, False, False]


# --- what becomes of topics


def truncate(log: Log, cut: int, end: int) -> None:
    owner = str(uuid.UUID(int=77, version=4))
    view = (PartitionView(1, 0),)
    log.ok(c.BeginTruncation("ab", "t", X, Reason("CODE", "words"), view, None, "p", owner))
    ways: list[tuple[TruncationPhase, dict[str, Any]]] = [
        (P.SALVAGING, {"cuts": (PartitionCut(0, 0, cut, end),)}),
        (P.SPOOLING, {"salvaged": (SalvageFile(0, "p", "/x", 1),)}),
        (P.RECREATING, {}),
        (P.REFILLING, {"new_topic_id": NEW}),
        (P.RESTORING, {}),
        (P.CLEANING, {}),
        (P.DONE, {}),
    ]
    for phase, more in ways:
        log.ok(c.AdvanceTruncation("t", X, owner, phase, **more))


def test_a_topic_that_was_made_anew_has_what_was_left() -> None:
    log = Log()
    log.ok(told(0, wrote(T1, 0, 40), wrote(T2, 40, None, (0, 40), (1, 60))))
    truncate(log, 50, 90)
    assert log.ranges() == []
    assert log.ranges(topic_id=NEW) == [("A", T1, 0, 40), ("A", T2, 40, 50)]
    log.ok(told(50, wrote(T2, 50, None, (0, 40), (2, 50)), topic_id=NEW))
    assert log.ranges(topic_id=NEW) == [("A", T1, 0, 40), ("A", T2, 40, None)]


def test_a_topic_that_is_gone_is_forgotten() -> None:
    log = Log()
    log.ok(begin(0), id=T1)
    log.ok(told(0, wrote(T1, 0, None)))
    log.refused(c.ForgetHistories((c.GoneTopic("t", X),)), Rejection.CONFLICT, "link 'ab'")
    log.refused(c.ForgetHistories(()), Rejection.INVALID)
    assert log.ok(c.ForgetHistories((c.GoneTopic("led", NEW), c.GoneTopic("none", X)))) == ()
    (change,) = log.ok(c.ForgetHistories((c.GoneTopic("led", X),)))
    assert change == ProvenanceChanged("led", X, (0,))
    assert set(log.state.origins) == {"t"}
    log.ok(c.DetachNamespace("ab", TOPIC, "t"))
    log.ok(c.ForgetHistories((c.GoneTopic("t", X),)))
    assert (log.state.origins, log.state.histories) == ({}, {})


def test_epochs_that_nothing_is_compared_with_any_more_are_dropped() -> None:
    log = Log()
    log.ok(begin(0), id=T1)
    log.ok(epochs((3, 0), (4, 30), (5, 60)))
    before = log.state.origins_of("led", X, 0).at_offset
    log.ok(c.DropEpochs((c.TopicOffsets("led", X, {0: 45}),)))
    assert log.epochs("led") == [[(4, 30), (5, 60)]]
    assert log.state.origins_of("led", X, 0).at_offset == before, "nobody has to be told anew"
    assert log.ok(c.DropEpochs((c.TopicOffsets("led", X, {0: 45}), c.TopicOffsets("none", X, {0: 45})))) == ()


def later(*found: tuple[int, int], topic: str = "t", topic_id: str = X) -> c.RecordOriginEpochs:
    entry = c.LogEpochs(0, tuple(OriginEpoch(*each) for each in found))
    return c.RecordOriginEpochs("ab", (c.TopicEpochs(topic, topic_id, (entry,)),))


def test_later_epochs_of_what_is_received_are_recorded_alone() -> None:
    log, same = Log(), Log()
    for each in (log, same):
        each.ok(told(0, wrote(T1, 0, 40, (0, 0)), wrote(T2, 40, None, (0, 40))))
    (change,) = log.ok(later((1, 60), (3, 60)))
    assert change == ProvenanceChanged("t", X, (0,))
    same.ok(told(60, wrote(T2, 60, None, (0, 40), (1, 60), (3, 60))))
    known = log.state.origins_of("t", X, 0)
    assert known == same.state.origins_of("t", X, 0)
    assert log.epochs() == [[(0, 0)], [(0, 40), (1, 60), (3, 60)]]
    for wrong in (later((3, 70)), later((2, 70)), later((4, 50)), later((5, 80), (4, 90))):
        log.refused(wrong, Rejection.INVALID, "out of order")
    log.refused(later((4, 80)), Rejection.CONFLICT, "recorded anew", seen=known.at_offset - 1)
    log.refused(later((4, 80), topic="led"), Rejection.CONFLICT, "does not follow")
    log.refused(later((4, 80), topic_id=NEW), Rejection.CONFLICT, "has the id")
    log.ok(c.TruncateProvenance(place(50)))
    log.refused(later((4, 80)), Rejection.CONFLICT, "has not said")


def test_of_what_is_assumed_or_comes_from_elsewhere_epochs_are_not_recorded_alone() -> None:
    log = Log()
    log.refused(later((4, 0)), Rejection.CONFLICT, "has not said")
    log.ok(c.OpenProvenance("ab", place(0)))
    log.refused(later((4, 0)), Rejection.CONFLICT, "has not said")
    log.ok(told(0, wrote(T1, 0, None)))
    log.ok(c.CreateLink("cb", T1, "C", True, ("c:1",)))
    body = replace(later((4, 0)), link="cb")
    log.refused(body, Rejection.CONFLICT, "does not follow link 'cb'")


def test_the_direct_sources_epochs_are_written_shorter_from_this_level_on() -> None:
    log, same = Log(), Log()
    entries = c.PartitionEpoch("t", X, 0, 4, 0), c.PartitionEpoch("t", X, 0, 6, 20)
    short = c.RecordSourceEpochs.by_topic(entries)
    assert short.entries == list(entries)
    for each, body in ((log, short), (same, c.RecordSourceEpochs(entries))):
        each.ok(c.OpenProvenance("ab", place(0)))
        each.ok(body)
    assert log.state.histories == same.state.histories
    before = Log(level=ORIGINS - 1)
    before.ok(c.OpenProvenance("ab", place(0)))
    before.refused(short, Rejection.NOT_SUPPORTED)
    before.ok(c.RecordSourceEpochs(entries))
    log.refused(c.RecordSourceEpochs((), ()), Rejection.INVALID)


# --- records


def test_how_records_look() -> None:
    """What a log holds once stays readable for ever."""

    def body(command: c.Body) -> Any:
        return json.loads(c.encode(c.Command(T1, 5, "p", 3, command), ORIGINS))["body"]

    assert body(begin(5)) == {
        "ended": "promoted",
        "topics": [{"starts": [[0, [5, 3]]], "topic": "led", "topic_id": X}],
    }
    assert body(epochs((3, 5), (4, 9))) == {
        "topics": [{"partitions": [{"epochs": [[3, 5], [4, 9]], "partition": 0}], "topic": "led", "topic_id": X}]
    }
    assert body(told(5, wrote(T1, 5, 7), wrote(T2, 7, None, (1, 7))))["topics"][0]["partitions"] == [
        {
            "offset": 5,
            "partition": 0,
            "ranges": [
                {"end_offset": 7, "origin": ["A", Y, T1], "since_ms": 5, "start_offset": 5},
                {"end_offset": None, "epochs": [[1, 7]], "origin": ["A", Y, T2], "since_ms": 5, "start_offset": 7},
            ],
        }
    ]
    assert body(later((3, 5), (4, 9))) == {
        "link": "ab",
        "topics": [{"partitions": [{"epochs": [[3, 5], [4, 9]], "partition": 0}], "topic": "t", "topic_id": X}],
    }
    assert body(c.RecordSourceEpochs.by_topic([c.PartitionEpoch("t", X, 0, 4, 9)])) == {
        "epochs": [],
        "topics": [{"partitions": [{"epochs": [[4, 9]], "partition": 0}], "topic": "t", "topic_id": X}],
    }
    assert body(c.RecordSourceEpochs((c.PartitionEpoch("t", X, 0, 4, 9),))) == {
        "epochs": [{"epoch": 4, "partition": 0, "start_offset": 9, "topic": "t", "topic_id": X}]
    }
    assert body(c.CloseProvenance(place(5))) == {
        "partitions": [{"offset": 5, "partition": 0, "topic": "t", "topic_id": X}]
    }
    assert body(c.CloseProvenance(place(5), Ended.FOLLOWS))["ended"] == "follows"


def test_what_they_concern_is_said() -> None:
    envelope = json.loads(c.encode(c.Command(T1, 5, "p", 3, begin(5)), ORIGINS))
    assert envelope["concerns"]["namespaces"] == [["topic", "led"]]


# --- lists


def test_lists_are_joined_where_the_same_writing_goes_on() -> None:
    first, second = wrote(T1, 0, 40, (0, 0)), wrote(T1, 40, None, (0, 0), (1, 50))
    assert joined((first,), (second,)) == (wrote(T1, 0, None, (0, 0), (1, 50)),)
    other = wrote(T2, 40, None, (0, 40))
    assert joined((first,), (other,)) == (first, other)
    assert joined((), (other,)) == (other,)
    assert from_offset((first, other), 20) == (wrote(T1, 20, 40, (0, 0)), other)
    assert from_offset((first, other), 60) == (wrote(T2, 60, None, (0, 40)),)


def test_an_epoch_may_be_seen_late() -> None:
    known = (OriginEpoch(1, 0), OriginEpoch(4, 40))
    assert with_epoch(known, OriginEpoch(2, 20)) == (OriginEpoch(1, 0), OriginEpoch(2, 20), OriginEpoch(4, 40))
    assert with_epoch(known, OriginEpoch(4, 30)) == (OriginEpoch(1, 0), OriginEpoch(4, 30))
    for wrong in (OriginEpoch(2, 50), OriginEpoch(3, 40), OriginEpoch(0, 20)):
        with pytest.raises(ValueError, match="does not go with"):
            with_epoch(known, wrong)
