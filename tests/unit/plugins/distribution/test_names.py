"""Names of topics that differ by cluster: read in one way, translated one to one, and meant alike by prefixes."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from isthmus_plugins.distribution.names import NAME_MAX, Names, Pattern, problems


def names(patterns: Mapping[str, str]) -> Names:
    return Names({leaf: Pattern(text) for leaf, text in patterns.items()})


def refused(patterns: Mapping[str, str], *prefixes: str, clusters: tuple[str, ...] = ("a", "b")) -> list[str]:
    return list(problems(names(patterns), clusters, prefixes or ("",)))


def test_the_names_of_the_document() -> None:
    """[tenant|instance|environment]-topic on one cluster, [tenant|environment]-topic on another, of one instance."""
    both = {"a": "{tenant}-main-{environment}-{topic}", "b": "{tenant}-{environment}-{topic}"}
    assert refused(both, "acme-", "globex-") == []
    of = names(both)
    assert of.translated("acme-main-dev-orders", "a", "b") == "acme-dev-orders"
    assert of.translated("acme-dev-orders-main", "b", "a") == "acme-main-dev-orders-main"
    assert of.translated("acme-other-dev-orders", "a", "b") is None
    assert not of.fits("a", "acme-orders")
    assert of.shared("acme-main-dev-orders", "a") == "environment=dev/tenant=acme/topic=orders"
    assert of.own("environment=dev/tenant=acme/topic=orders", "b") == "acme-dev-orders"


def test_a_name_that_would_be_too_long_or_a_cluster_s_own_is_none() -> None:
    of = names({"a": "{topic}", "b": "x-{topic}", "c": "_{topic}"})
    longest = "t" * NAME_MAX
    assert of.fits("a", longest)
    assert of.translated(longest, "a", "b") is None
    assert of.translated("_t", "a", "c") is None  # __t
    for own in ("__consumer_offsets", "__isthmus_tree_times", ".", ".."):
        assert not of.fits("a", own)


@pytest.mark.parametrize("shared", ["", "orders", "topic=", "topic=a/b=c", "topic=a/topic=b/b=c", "topic=é", "topic"])
def test_what_no_cluster_has_written_is_no_name(shared: str) -> None:
    for pattern in ("{topic}", "{b}-{topic}"):
        assert names({"a": pattern}).own(shared, "a") is None


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        ("orders", "no {topic}"),
        ("{tenant}-x", "no {topic}"),
        ("{topic}-{a}-{a}", "{a} stands twice"),
        ("{a}{topic}", "nothing tells where {a} ends"),
        ("{topic}x-{a}", "nothing tells where {topic} ends"),
        ("{topic}x", "nothing tells where {topic} ends"),
        ("{Topic}-{topic}", "lower-case"),
        ("{topic}}", "lower-case"),
        ("a/{topic}", "letters, digits"),
        ("__{topic}", "begin with __"),
    ],
)
def test_what_is_no_pattern(pattern: str, said: str) -> None:
    first, *_ = refused({"a": pattern, "b": pattern})
    assert first.startswith("names.a: ")
    assert said in " ".join(refused({"a": pattern, "b": pattern}))


def test_patterns_that_do_not_go_together() -> None:
    assert refused({"a": "{topic}"}) == [
        "names has none of b: write what topics are called there, as for the other clusters"
    ]
    assert refused({"a": "{topic}", "b": "{topic}", "c": "{topic}"}) == [
        "names.c: there is no such cluster: correct it, or take it out"
    ]
    assert refused({"a": "{tenant}-{topic}", "b": "{topic}"}) == [
        "names.b: it has no {tenant}, which a has, so names could not be translated back: write the field there, or "
        "its value in the place of the field at a"
    ]


@pytest.mark.parametrize(
    ("first", "second", "prefixes", "fits"),
    [
        ("{tenant}-{topic}", "{tenant}-prod-{topic}", ["acme-"], True),
        ("{tenant}-{topic}", "{tenant}-prod-{topic}", ["acme"], True),
        ("{tenant}-{topic}", "{tenant}-prod-{topic}", ["acme-p"], False),
        ("{tenant}-{topic}", "{topic}-{tenant}", ["acme-"], False),
        ("{tenant}-{topic}", "{topic}-{tenant}", [""], True),
        ("p-{topic}", "q-{topic}", ["p-", "q-"], True),
        ("p-{topic}", "q-{topic}", ["p-"], False),
        ("p-{topic}", "q-{topic}", ["p-a", "q-a"], True),
        ("p-{topic}", "q-{topic}", ["p-a", "q-b"], False),
        ("{topic}-x", "{topic}.y", ["orders"], True),
        ("{topic}-x", "{topic}.y", ["orders-"], False),
        ("{topic}-x", "{topic}-x", ["orders-"], True),
        ("{topic}", "{topic}", ["orders-"], True),
        ("{a}-{b}-{topic}", "{b}-{a}-{topic}", ["x-y-"], False),
        ("{a}-{b}-{topic}", "{a}.{b}.{topic}", ["x-y-", "x.y."], True),
    ],
)
def test_prefixes_mean_the_same_topics_everywhere(first: str, second: str, prefixes: list[str], fits: bool) -> None:
    said = refused({"a": first, "b": second}, *prefixes)
    assert (said == []) == fits
    if not fits:
        assert said[0].startswith("topics: ")


def test_a_prefix_that_fits_nowhere() -> None:
    assert refused({"a": "p-{topic}", "b": "p-{topic}"}, "p-", "q") == [
        "topics: 'q': no name that fits begins so at any cluster: correct it, or take it out"
    ]


# ---- whatever the patterns are ----

FIELDS = ("topic", "a", "b")
VALUE = st.text("ab1", min_size=1, max_size=3)
ANY = st.text("ab._-", min_size=1, max_size=6)


@st.composite
def patterns(draw: st.DrawFn) -> str:
    """One that can be: the fields in any order, constants between them."""
    fields = draw(st.permutations(FIELDS))
    text = draw(st.text("ab.-", max_size=3))
    for number, field in enumerate(fields):
        is_last = number == len(fields) - 1
        behind = draw(st.sampled_from("._-")) + draw(st.text("ab.-_", max_size=2))
        text += f"{{{field}}}" + ("" if is_last and draw(st.booleans()) else behind)
    assume(not text.startswith("__"))
    return text


@given(patterns(), patterns(), VALUE, VALUE, ANY)
def test_names_are_translated_one_to_one(first: str, second: str, a: str, b: str, topic: str) -> None:
    of = names({"a": first, "b": second})
    assert refused({"a": first, "b": second}) == []
    values = {"a": a, "b": b, "topic": topic}
    name = of.patterns["a"].write(values)
    there = of.patterns["b"].write(values)
    assume(name is not None)
    assert name is not None
    assert of.patterns["a"].read(name) == values
    assert of.translated(name, "a", "b") == there
    shared = of.shared(name, "a")
    assert shared is not None
    assert "/" in shared
    assert of.own(shared, "a") == name
    assert of.own(shared, "b") == there
    if there is not None:
        assert of.translated(there, "b", "a") == name
        assert of.shared(there, "b") == shared


@given(patterns(), st.text("ab1._-", min_size=1, max_size=12))
def test_a_name_that_fits_is_what_its_values_write(pattern: str, name: str) -> None:
    found = Pattern(pattern)
    values = found.read(name)
    assert values is None or found.write(values) == name


@given(patterns(), patterns(), st.lists(st.text("ab._-", max_size=5), min_size=1, max_size=3), VALUE, VALUE, ANY)
def test_prefixes_are_refused_or_a_name_has_one_where_its_translation_has(
    first: str, second: str, prefixes: list[str], a: str, b: str, topic: str
) -> None:
    both = {"a": first, "b": second}
    if not refused(both, *prefixes):
        _check_alike(both, prefixes, {"a": a, "b": b, "topic": topic})


@given(patterns(), st.data(), VALUE, VALUE, ANY)
def test_prefixes_of_names_with_other_constants(first: str, data: st.DataObject, a: str, b: str, topic: str) -> None:
    """Of one pattern, so that many are accepted, and of a name, so that some begin so."""
    heads = data.draw(st.sampled_from((("", ""), ("p-", "q-"), ("p", "p."))))
    both = {leaf: head + first for leaf, head in zip("ab", heads, strict=True)}
    assume(not any(each.startswith("__") for each in both.values()))
    values = {"a": a, "b": b, "topic": topic}
    written = [Pattern(each).write(values) for each in both.values()]
    assume(None not in written)
    length = data.draw(st.integers(0, 8))
    prefixes = [head + (name or "")[len(head) :][:length] for head, name in zip(heads, written, strict=True)]
    assume(refused(both, *prefixes) == [])
    other = data.draw(st.fixed_dictionaries({"a": VALUE, "b": VALUE, "topic": ANY}))
    for each in (values, other, {**values, "topic": other["topic"]}, {**values, "a": other["a"]}):
        _check_alike(both, prefixes, each)


def _check_alike(patterns_: Mapping[str, str], prefixes: list[str], values: Mapping[str, str]) -> None:
    one, other = (Pattern(each).write(values) for each in patterns_.values())
    if one is not None and other is not None:
        assert one.startswith(tuple(prefixes)) == other.startswith(tuple(prefixes)), (one, other)
