"""Passes between registries with Confluent's API: what is written, who is away, what is killed anywhere."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from threading import Event
from typing import Any

import pytest
from support.confluent_registry import Answer, ConfluentRegistry, served

from isthmus.schemas.confluent import Confluent
from isthmus.schemas.contents import Contents
from isthmus.schemas.distribution import Outcome, State, Target, run
from isthmus.schemas.plan import Delete, Reason, Register, Restore, SetLevel
from isthmus.schemas.registry import Credentials
from isthmus.schemas.subjects import Format, Translation

NAMES = Translation([Format("{tenant}-{instance}-{topic}")], [Format("{tenant}-{topic}")])
ADDRESS = '{"type": "record", "name": "Address", "fields": []}'
CUSTOMER = '{"type": "record", "name": "Customer", "fields": [{"name": "home", "type": "Address"}]}'
REFERENCE = {"name": "Address", "subject": "t-main-address", "version": 1}


@pytest.fixture
def registries() -> Iterator[list[ConfluentRegistry]]:
    with served(3) as made:
        made[0].register("t-main-address", {"schema": ADDRESS})
        made[0].register("t-main-other", {"schema": '"int"'})
        made[0].register("t-main-customer", {"schema": CUSTOMER, "references": [REFERENCE]})
        made[0].register("t-main-proto", {"schema": 'syntax = "proto3";', "schemaType": "PROTOBUF"})
        made[0].put_config("t-main-customer", body={"compatibility": "FULL"})
        made[0].put_config(body={"compatibility": "NONE"})
        yield made


def sync(
    registries: list[ConfluentRegistry], write: bool = True, delete: bool = False, refuse_writes: bool = True
) -> list[Outcome]:
    with ExitStack() as stack:
        asked = [stack.enter_context(closing(Confluent(each.url, Credentials()))) for each in registries]
        targets = [Target(f"target-{n}", each, NAMES, refuse_writes) for n, each in enumerate(asked[1:], start=1)]
        return list(run(asked[0], targets, write=write, delete=delete))


def equal(primary: ConfluentRegistry, target: ConfluentRegistry) -> bool:
    wanted = json.loads(json.dumps(primary.subjects).replace("t-main-", "t-"))
    levels = {each and each.replace("t-main-", "t-"): level for each, level in primary.levels.items()}
    found = {subject: versions for subject, versions in target.subjects.items() if versions}
    return (json.loads(json.dumps(found)), target.levels) == ({s: v for s, v in wanted.items() if v}, levels)


def read(registry: ConfluentRegistry) -> Contents:
    with closing(Confluent(registry.url, Credentials())) as asked:
        return asked.contents()


def after(registry: ConfluentRegistry, path: str, happens: Callable[[], Any]) -> None:
    """Something happens once, when the first request for a path is answered."""
    answer = registry.answer

    def answered(method: str, target: str, body: Any) -> Any:
        said = answer(method, target, body)
        if target.partition("?")[0] == path:
            registry.answer = answer  # type: ignore[method-assign]
            happens()
        return said

    registry.answer = answered  # type: ignore[method-assign]


def test_all_targets_have_what_the_primary_has(registries: list[ConfluentRegistry]) -> None:
    primary, one, two = registries
    tried = sync(registries, write=False)
    assert [each.state for each in tried] == [State.BEHIND, State.BEHIND]
    assert not one.subjects
    assert one.mode == "READWRITE"
    done = sync(registries)
    assert [(each.state, each.equal, each.refuses_writes) for each in done] == [(State.IN_SYNC, 4, True)] * 2
    assert equal(primary, one)
    assert equal(primary, two)
    with pytest.raises(Answer, match="not in read-write mode"):
        one.register("t-new", {"schema": '"long"'})

    primary.register("t-main-other", {"schema": '"long"'})
    primary.delete("t-main-customer", "1")
    primary.delete_config("t-main-customer")
    steps = [type(each) for each in sync(registries)[0].done]
    assert steps == [Register, Delete, SetLevel]
    assert equal(primary, one)
    primary.register("t-main-customer", {"schema": CUSTOMER, "references": [REFERENCE]})
    primary.subjects["t-main-customer"][1]["deleted"] = False  # as an import does
    assert [type(each) for each in sync(registries)[0].done] == [Restore, Register]
    assert equal(primary, one)
    for number in ("1", "2"):
        primary.delete("t-main-customer", number)
    sync(registries)
    for number in ("1", "2"):
        primary.delete("t-main-customer", number, permanent=True)
    assert [each.for_good for each in sync(registries)[0].done if isinstance(each, Delete)] == [True, True]
    assert equal(primary, one)
    assert equal(primary, two)
    assert [each.done for each in sync(registries)] == [(), ()]


def test_a_target_may_take_writes(registries: list[ConfluentRegistry]) -> None:
    outcome, _ = sync(registries, refuse_writes=False)
    assert (outcome.refuses_writes, registries[1].mode) == (False, "READWRITE")


def test_a_pass_with_nothing_to_write_turns_the_switch_as_well(registries: list[ConfluentRegistry]) -> None:
    sync(registries)
    for mode, refuses in (("READWRITE", False), ("IMPORT", True)):  # somebody did it; a pass was killed
        registries[1].mode = mode
        assert sync(registries, write=False)[0].refuses_writes is refuses
        sync(registries)
        assert registries[1].mode == "READONLY"


def test_a_primary_that_is_away_or_empty_changes_nothing(registries: list[ConfluentRegistry]) -> None:
    primary, one, _ = registries
    sync(registries)
    before = json.dumps([one.subjects, one.levels])
    primary.stop()
    requests = one.requests
    for outcome in sync(registries, delete=True):
        assert outcome.state is State.UNKNOWN
        assert (outcome.message or "").startswith(f"PRIMARY_UNREACHABLE: no answer from {primary.url}")
    assert one.requests == requests
    primary.clear()
    primary.start()
    for delete in (False, True):
        assert [each.reason for each in sync(registries, delete=delete)[0].findings] == [Reason.PRIMARY_EMPTY]
    # Put back to an earlier state: what it lacks stays.
    primary.register("t-main-address", {"schema": ADDRESS})
    outcome = sync(registries)[0]
    assert {each.reason for each in outcome.findings} == {Reason.ONLY_AT_TARGET}
    assert json.dumps(one.subjects) == json.dumps(json.loads(before)[0])


def test_a_target_that_is_away_keeps_nobody_waiting(registries: list[ConfluentRegistry]) -> None:
    primary, one, two = registries
    one.stop()
    assert [each.state for each in sync(registries)] == [State.UNREACHABLE, State.IN_SYNC]
    assert equal(primary, two)
    one.start()
    assert [each.state for each in sync(registries)] == [State.IN_SYNC, State.IN_SYNC]
    assert equal(primary, one)


def test_a_registry_that_chooses_ids_itself_gets_one_schema_and_no_more(registries: list[ConfluentRegistry]) -> None:
    _, one, _ = registries
    one.keeps_ids = False
    one.subjects = {"somebody-s": {1: {"id": 40, "schema": '"bytes"', "deleted": False}}}
    outcome = sync(registries)[0]
    assert [each.reason for each in outcome.findings] == [Reason.ONLY_AT_TARGET, Reason.NOT_KEPT]
    assert "it has id 41, not 1" in outcome.findings[-1].message
    assert outcome.done == ()
    assert len(one.subjects) == 2


def test_an_id_that_is_taken(registries: list[ConfluentRegistry]) -> None:
    primary, one, two = registries
    one.register("elsewhere", {"schema": '"bytes"'})
    outcome, other = sync(registries)
    assert {(each.reason, each.subject) for each in outcome.findings} == {
        (Reason.ID_TAKEN, "t-address"),
        (Reason.REFERENCE_LEFT_OUT, "t-customer"),
    }
    assert one.subjects["elsewhere"][1]["schema"] == '"bytes"'
    assert other.state is State.IN_SYNC
    assert equal(primary, two)


def test_what_is_refused_takes_along_what_refers_to_it(registries: list[ConfluentRegistry]) -> None:
    _, one, _ = registries
    one.refuses = "t-address"
    outcome = sync(registries)[0]
    assert [(each.reason, each.subject) for each in outcome.findings] == [
        (Reason.REFUSED, "t-address"),
        (Reason.REFERENCE_LEFT_OUT, "t-customer"),
    ]
    assert one.subjects.keys() == {"t-other", "t-proto"}


def test_what_does_not_go_is_not_overwritten(registries: list[ConfluentRegistry]) -> None:
    """Somebody else's schema refers to it; what else there is to do goes on."""
    primary, one, _ = registries
    one.subjects["t-other"] = {1: {"id": 40, "schema": '"bytes"', "deleted": False}}
    foreign = {"name": "Other", "subject": "t-other", "version": 1}
    one.subjects["elsewhere"] = {1: {"id": 41, "schema": CUSTOMER, "references": [foreign], "deleted": False}}
    outcome = sync(registries, delete=True)[0]
    assert [(each.reason, each.subject) for each in outcome.findings] == [(Reason.REFUSED, "t-other")]
    assert one.subjects["t-other"] == {1: {"id": 40, "schema": '"bytes"', "deleted": False}}
    assert one.subjects["t-customer"].keys() == primary.subjects["t-main-customer"].keys()
    assert one.levels == {None: "NONE", "t-customer": "FULL"}


def test_what_was_refused_is_not_deleted(registries: list[ConfluentRegistry]) -> None:
    primary, one, _ = registries
    primary.delete("t-main-proto", "1")
    primary.delete("t-main-other", "1")
    one.refuses = "t-proto"
    outcome = sync(registries)[0]
    assert [(each.reason, each.subject) for each in outcome.findings] == [(Reason.REFUSED, "t-proto")]
    assert one.subjects["t-other"][1]["deleted"]
    assert one.levels == {None: "NONE", "t-customer": "FULL"}


def test_what_is_registered_between_two_requests_is_live(registries: list[ConfluentRegistry]) -> None:
    primary, _, _ = registries
    after(primary, "/subjects/t-main-other/versions", lambda: primary.register("t-main-other", {"schema": '"long"'}))
    found = read(primary).subjects["t-main-other"]
    assert primary.subjects["t-main-other"].keys() == {1, 2}
    assert not any(each.deleted for each in found.values())


@pytest.mark.parametrize("has_pages", [True, False])
def test_subjects_are_read_in_pages(registries: list[ConfluentRegistry], has_pages: bool) -> None:
    primary, one, _ = registries
    primary.shows, primary.has_pages = 2, has_pages
    assert read(primary).subjects.keys() == primary.subjects.keys()
    assert not read(one).subjects


def test_no_subject_is_passed_over_when_another_one_goes(registries: list[ConfluentRegistry]) -> None:
    """All behind it are at earlier places then: the next page would begin too late."""
    primary, _, _ = registries
    primary.shows = 2

    def goes() -> None:
        for permanent in (False, True):
            primary.delete("t-main-other", "1", permanent=permanent)

    after(primary, "/subjects", goes)
    assert read(primary).subjects.keys() == {"t-main-address", "t-main-customer", "t-main-proto"}


def test_a_target_that_hangs_keeps_no_other_one_waiting(registries: list[ConfluentRegistry]) -> None:
    _, one, two = registries
    other_one_is_written, waited = Event(), []
    after(one, "/subjects", lambda: waited.append(other_one_is_written.wait(30)))
    after(two, "/subjects/t-customer/versions", other_one_is_written.set)
    outcomes = sync(registries)
    assert waited == [True]
    assert [(each.name, each.state) for each in outcomes] == [
        ("target-1", State.IN_SYNC),
        ("target-2", State.IN_SYNC),
    ]


def test_a_pass_that_has_ended_takes_no_further_step(registries: list[ConfluentRegistry]) -> None:
    """The registry refuses clients' writes then, and the next pass goes on."""
    primary, one, _ = registries
    ended = Event()
    with closing(Confluent(primary.url, Credentials())) as source, closing(Confluent(one.url, Credentials())) as asked:
        targets = [Target("target", asked, NAMES)]
        (outcome,) = run(source, targets, write=True, said=lambda *_: ended.set(), ended=ended)
    assert (outcome.state, len(outcome.done)) == (State.BEHIND, 1)
    assert (len(one.subjects), one.mode) == (1, "READONLY")
    assert [each.state for each in sync(registries)] == [State.IN_SYNC] * 2
    assert equal(primary, one)


def test_one_that_goes_while_it_is_read_is_none(registries: list[ConfluentRegistry]) -> None:
    primary, _, _ = registries
    after(primary, "/subjects", lambda: primary.subjects.pop("t-main-other"))
    assert read(primary).subjects.keys() == {"t-main-address", "t-main-customer", "t-main-proto"}


@pytest.mark.parametrize(
    ("path", "answers"),
    [
        ("/subjects/t-main-other/versions", Answer(404, 404, "HTTP 404 Not Found")),
        ("/subjects/t-main-other/versions", Answer(429, 42901, "Too many requests")),
        ("/subjects/t-main-other/versions", Answer(302, 0, "Log in")),
        ("/subjects", {"state": "up"}),
        ("/subjects/t-main-other/versions/1", {"state": "up"}),
    ],
    ids=["a path unknown to it", "too many requests", "sent elsewhere", "no list", "no version"],
)
def test_what_is_no_answer_of_a_registry_says_nothing_of_what_is_there(
    registries: list[ConfluentRegistry], path: str, answers: Any
) -> None:
    """As of what stands in front of it. The others are distributed to, or stay as they are."""
    primary, one, two = registries
    sync(registries)
    before = json.dumps(one.subjects)
    answer = primary.answer

    def answered(method: str, target: str, body: Any) -> Any:
        if target.partition("?")[0] != path:
            return answer(method, target, body)
        if isinstance(answers, Answer):
            raise answers
        return answers

    primary.answer = answered  # type: ignore[method-assign]
    assert [each.state for each in sync(registries)] == [State.UNKNOWN, State.UNKNOWN]
    assert json.dumps(one.subjects) == before
    first, second = sync([two, primary, one], write=False)
    assert first.state is State.UNREACHABLE
    assert second.state is not State.UNREACHABLE


def test_a_target_that_has_had_enough_is_asked_no_more(registries: list[ConfluentRegistry]) -> None:
    primary, one, two = registries
    answer, writes = one.answer, []

    def answered(method: str, target: str, body: Any) -> Any:
        if method == "POST":
            writes.append(target)
            raise Answer(429, 42901, "Too many requests")
        return answer(method, target, body)

    one.answer = answered  # type: ignore[method-assign]
    assert [each.state for each in sync(registries)] == [State.UNREACHABLE, State.IN_SYNC]
    assert (len(writes), one.mode) == (1, "READONLY")
    assert equal(primary, two)


def test_a_subject_may_have_settings_and_no_level(registries: list[ConfluentRegistry]) -> None:
    primary, _, _ = registries
    answer = primary.answer
    primary.answer = lambda method, target, body: (  # type: ignore[method-assign]
        {"normalize": True} if target == "/config/t-main-other" else answer(method, target, body)
    )
    assert read(primary).levels == {"t-main-customer": "FULL"}


@pytest.mark.parametrize("answered", [True, False], ids=["before a write", "in a write"])
def test_whenever_a_pass_ends_the_next_one_goes_on(registries: list[ConfluentRegistry], answered: bool) -> None:
    """The target goes down at each write of a pass that registers, deletes in both ways, and sets levels."""
    primary, one, two = registries
    sync([primary, two])
    primary.delete("t-main-other", "1")
    sync([primary, two])
    began = json.dumps([two.subjects, list(two.levels.items())])
    primary.delete("t-main-other", "1", permanent=True)
    primary.register("t-main-other", {"schema": '"float"'})
    primary.delete("t-main-proto", "1")
    primary.put_config("t-main-customer", body={"compatibility": "FORWARD"})
    for writes in range(20):
        subjects, levels = json.loads(began)
        one.subjects = {name: {int(n): each for n, each in versions.items()} for name, versions in subjects.items()}
        one.levels, one.mode = dict(levels), "READONLY"
        one.writes_left = writes if answered else writes + 0.5
        outcome = sync([primary, one])[0]
        one.revive()
        assert one.mode != "READWRITE"
        assert sync([primary, one])[0].state is State.IN_SYNC
        assert equal(primary, one)
        assert one.mode == "READONLY"
        if outcome.state is State.IN_SYNC:
            assert writes >= 6
            return
    pytest.fail("a pass takes more writes than that")
