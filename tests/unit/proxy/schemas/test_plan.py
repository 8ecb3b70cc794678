"""What is written at a target, and what is not: single differences, and histories of registries by chance."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.schemas import ModelPrimary, ModelRegistry

from isthmus.schemas.contents import Contents, Reference, Schema, Version
from isthmus.schemas.plan import Delete, Plan, Reason, Register, Restore, SetLevel, planned
from isthmus.schemas.subjects import Format, Translation, as_they_are

NAMES = Translation([Format("{tenant}-{instance}-{topic}")], [Format("{tenant}-{topic}")])


def avro(name: str, *references: Reference) -> Schema:
    return Schema("AVRO", f'{{"type": "record", "name": "{name}", "fields": []}}', references)


A = Version(7, avro("A"))
B = Version(8, avro("B"))
DELETED = Version(7, avro("A"), deleted=True)


def contents(**subjects: Version) -> Contents:
    return Contents({subject: {1: version} for subject, version in subjects.items()})


def reasons(plan: Plan) -> list[tuple[Reason, str | None]]:
    return [(each.reason, each.subject) for each in plan.findings]


@pytest.mark.parametrize(
    ("primary", "target", "steps", "found"),
    [
        (A, None, [Register("s", 1, A)], []),
        (A, A, [], []),
        (DELETED, None, [Register("s", 1, DELETED), Delete("s", 1, for_good=False)], []),
        (DELETED, A, [Delete("s", 1, for_good=False)], []),
        (A, DELETED, [Restore("s", 1, A)], []),
        (None, DELETED, [Delete("s", 1, for_good=True)], []),
        (None, A, [], [(Reason.ONLY_AT_TARGET, "s")]),
        (A, B, [], [(Reason.VERSION_DIFFERS, "s")]),
        (B, DELETED, [Delete("s", 1, for_good=True), Register("s", 1, B)], []),
    ],
)
def test_one_version(primary: Version | None, target: Version | None, steps: list[object], found: list[object]) -> None:
    other = Version(1, avro("Other"))
    sides = [{"o": {1: other}} | ({} if each is None else {"s": {1: each}}) for each in (primary, target)]
    plan = planned(Contents(sides[0]), Contents(sides[1]), as_they_are())
    assert list(plan.steps) == steps
    assert reasons(plan) == found


def test_subjects_and_references_have_the_target_s_names() -> None:
    refers = Version(9, avro("C", Reference("A", "acme-main-a-value", 1)))
    primary = Contents(
        {"acme-main-a-value": {1: A}, "acme-main-c-value": {3: refers}, "elsewhere": {1: B}},
        {"acme-main-c-value": "FULL", "elsewhere": "NONE"},
        "BACKWARD",
    )
    plan = planned(primary, Contents(default_level="NONE"), NAMES)
    there = Version(9, avro("C", Reference("A", "acme-a-value", 1)))
    assert plan.steps == (
        Register("acme-a-value", 1, A),
        Register("acme-c-value", 3, there),
        SetLevel(None, "BACKWARD"),
        SetLevel("acme-c-value", "FULL"),
    )
    assert plan.left_out == ("elsewhere",)
    assert not plan.findings


def test_what_is_referred_to_comes_first_and_goes_last() -> None:
    refers = Version(9, avro("C", Reference("z", "z", 1)))
    primary = Contents({"a": {1: refers}, "z": {1: A}, "o": {1: B}})
    assert [step.subject for step in planned(primary, Contents(), as_they_are()).steps] == ["z", "a", "o"]
    gone = Contents({"a": {1: Version(9, refers.schema, True)}, "z": {1: DELETED}, "o": {1: B}})
    assert planned(contents(o=B), gone, as_they_are()).steps == (Delete("a", 1, True), Delete("z", 1, True))


def test_an_id_that_means_another_schema_is_not_touched() -> None:
    refers = Version(9, avro("C", Reference("A", "s", 1)))
    plan = planned(
        contents(s=A, c=refers), contents(other=Version(7, avro("X"))), Translation([Format("{s}")], [Format("{s}")])
    )
    assert plan.steps == ()
    assert set(reasons(plan)) == {
        (Reason.ONLY_AT_TARGET, "other"),
        (Reason.ID_TAKEN, "s"),
        (Reason.REFERENCE_LEFT_OUT, "c"),
    }


def test_one_schema_does_not_get_a_second_id() -> None:
    plan = planned(contents(s=A), contents(s2=Version(12, A.schema)), as_they_are())
    assert (Reason.OTHER_ID, "s") in reasons(plan)
    assert plan.steps == ()


def test_spaces_and_the_order_of_keys_do_not_matter() -> None:
    other = Version(7, Schema("AVRO", '{"fields":[],"name":"A","type":"record"}'))
    assert planned(contents(s=A), contents(s=other), as_they_are()) == Plan(equal=1)
    proto = Version(7, Schema("PROTOBUF", 'syntax = "proto3";\n'))
    assert planned(contents(s=proto), contents(s=other), as_they_are()).findings


def test_two_subjects_that_would_be_one_are_not_written() -> None:
    plan = planned(contents(**{"t-main-a": A, "t-test-a": B}), contents(**{"t-a": A}), NAMES)
    assert plan.steps == ()
    assert reasons(plan) == [(Reason.SUBJECTS_COLLIDE, "t-a")]


def test_a_reference_to_what_is_not_distributed() -> None:
    refers = Version(9, avro("C", Reference("A", "elsewhere", 1)))
    plan = planned(contents(**{"elsewhere": A, "t-main-c": refers}), Contents(), NAMES)
    assert reasons(plan) == [(Reason.REFERENCE_LEFT_OUT, "t-c")]
    assert "version 1 of elsewhere" in plan.findings[0].message


def test_an_empty_primary_takes_nothing_away() -> None:
    for target in (contents(s=A), contents(s=DELETED)):
        for delete in (False, True):
            plan = planned(Contents({"s": {}}, default_level="FULL"), target, as_they_are(), delete)
            assert plan.steps == ()
            assert reasons(plan) == [(Reason.PRIMARY_EMPTY, None)]


def test_formats_that_take_nothing_take_nothing_away() -> None:
    """As after a slip of the pen in the primary's."""
    for target in (contents(**{"t-a": A}), contents(**{"t-a": DELETED})):
        for delete in (False, True):
            plan = planned(contents(a=A, b=B), target, NAMES, delete)
            assert (plan.steps, plan.left_out) == ((), ("a", "b"))
            assert reasons(plan) == [(Reason.PRIMARY_EMPTY, None)]
    plan = planned(contents(a=A), contents(own=B), NAMES)
    assert (plan.findings, plan.left_out) == ((), ("a",))


def test_nothing_goes_for_good_where_the_target_has_something_of_its_own() -> None:
    target = contents(gone=DELETED, alone=Version(9, avro("C")))
    plan = planned(contents(o=B), target, as_they_are())
    assert plan.steps == (Register("o", 1, B),)
    assert set(reasons(plan)) == {(Reason.ONLY_AT_TARGET, "alone"), (Reason.DELETION_WAITS, "gone")}


def test_what_went_for_good_is_in_nobody_s_way() -> None:
    """The primary has another schema at its number, which cannot come, and knows its schema by another id by now."""
    refers = Version(8, avro("C", Reference("A", "elsewhere", 1)))
    primary = Contents({"p-a": {1: Version(9, A.schema)}, "p-b": {1: refers}, "elsewhere": {1: B}})
    plan = planned(primary, contents(b=DELETED), Translation([Format("p-{a}")], [Format("{a}")]))
    assert plan.steps == (Delete("b", 1, for_good=True), Register("a", 1, Version(9, A.schema)))
    assert reasons(plan) == [(Reason.REFERENCE_LEFT_OUT, "b")]


def test_what_refers_to_what_is_not_distributed_any_more_stays() -> None:
    refers = Version(8, avro("C", Reference("B", "elsewhere", 1)), deleted=True)
    primary = Contents({"p-a": {1: A}, "p-c": {1: refers}, "elsewhere": {1: B}})
    there = Version(8, avro("C", Reference("B", "as-it-was-called", 1)), deleted=True)
    plan = planned(primary, contents(a=A, c=there), Translation([Format("p-{a}")], [Format("{a}")]))
    assert plan.steps == ()
    assert reasons(plan) == [(Reason.REFERENCE_LEFT_OUT, "c")]


def test_an_operator_s_word_has_it_give_way() -> None:
    target = contents(gone=DELETED, alone=Version(9, avro("C")), o=Version(8, avro("D")))
    plan = planned(contents(o=B), target, as_they_are(), delete=True)
    assert not plan.findings
    assert plan.steps[-1] == Register("o", 1, B)
    registry = ModelRegistry()
    registry.subjects = {subject: dict(versions) for subject, versions in target.subjects.items()}
    for step in plan.steps:
        registry.take(step)
    assert registry.contents().subjects == contents(o=B).subjects


@settings(deadline=None)
@given(st.integers(0, 2**32))
def test_a_target_becomes_like_its_primary_whatever_happens_meanwhile(seed: int) -> None:
    """Steps are cut off anywhere, as by a kill; each of them is such as a registry takes."""
    chance = random.Random(seed)
    names = Translation([Format("p-{a}")], [Format("{a}")])
    primary, target = ModelPrimary(chance, ["p-a", "p-b", "p-c", "elsewhere"]), ModelRegistry()
    for _ in range(30):
        for _ in range(chance.randrange(4)):
            primary.something()
        plan = planned(primary.contents(), target.contents(), names)
        before = target.contents()
        for step in plan.steps[: chance.randrange(len(plan.steps) + 1)]:
            target.take(step)
        for place, version in before.places():
            now = target.contents().at(place)
            assert version.deleted or now is not None, "a version that was live went for good"
    last = planned(primary.contents(), target.contents(), names)
    for step in last.steps:
        target.take(step)
    again = planned(primary.contents(), target.contents(), names)
    assert again.steps == ()
    if Reason.PRIMARY_EMPTY in {each.reason for each in again.findings}:
        assert not any(subject.startswith("p-") for (subject, _), _ in primary.contents().places())
        return
    # Two registries differ where a version went for good before it was softly deleted at the target, and by nothing
    # else; what refers to what is not distributed is left out.
    if {each.reason for each in again.findings} - {Reason.REFERENCE_LEFT_OUT}:
        live = {(f"p-{subject}", number) for (subject, number), each in target.contents().places() if not each.deleted}
        assert primary.removed & live
        return
    left = {(each.subject, each.version) for each in again.findings}
    expected = {
        (subject.removeprefix("p-"), number): (version.id, version.deleted, version.schema.text)
        for (subject, number), version in primary.contents().places()
        if subject.startswith("p-") and (subject.removeprefix("p-"), number) not in left
    }
    found = {place: (each.id, each.deleted, each.schema.text) for place, each in target.contents().places()}
    assert found == expected
    if primary.versions():
        assert target.default_level == primary.default_level
        levels = {subject: level for subject, level in target.levels.items() if target.subjects.get(subject)}
        assert levels == {
            subject.removeprefix("p-"): level
            for subject, level in primary.levels.items()
            if target.subjects.get(subject.removeprefix("p-"))
        }
