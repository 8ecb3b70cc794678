"""Names of subjects: formats are read in one way, and written as the target has them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.schemas.subjects import Format, FormatError, Translation, as_they_are


def translation(source: str, target: str) -> Translation:
    return Translation([Format(source)], [Format(target)])


def test_the_names_of_the_document() -> None:
    names = translation("{tenant}-{instance}-{environment}-{topic}", "{tenant}-{environment}-{topic}")
    assert names.to_target("acme-main-dev-orders-value") == "acme-dev-orders-value"
    assert names.to_target("orders") is None
    assert names.is_targets("acme-dev-orders-value")
    assert not names.is_targets("orders")


def test_a_value_in_a_format_leaves_out_all_others() -> None:
    names = translation("{tenant}-main-{topic}", "{topic}.{tenant}")
    assert names.to_target("acme-main-orders-main-value") == "orders-main-value.acme"
    assert names.to_target("acme-other-orders") is None


def test_the_first_format_that_fits_counts() -> None:
    names = Translation([Format("t-{a}"), Format("{name}")], [Format("{a}"), Format("kept.{name}")])
    assert names.to_target("t-orders") == "orders"
    assert names.to_target("com.acme.Order") == "kept.com.acme.Order"


def test_names_stay_as_they_are_where_nobody_asks_for_more() -> None:
    names = as_they_are()
    assert names.to_target(":.ctx:any\nname ") == ":.ctx:any\nname "
    assert names.is_targets("any")


@pytest.mark.parametrize(
    ("format_", "said"),
    [
        ("orders", "no variable"),
        ("", "no variable"),
        ("{a}-{a}", "twice"),
        ("{a}{b}", "nothing tells"),
        ("{A}-{b}", "lower-case"),
        ("{a}}", "lower-case"),
    ],
)
def test_what_is_no_format(format_: str, said: str) -> None:
    with pytest.raises(FormatError, match=said):
        Format(format_)


def test_formats_that_do_not_go_together() -> None:
    with pytest.raises(FormatError, match=r"\{b\}"):
        translation("{a}", "{a}-{b}")
    with pytest.raises(FormatError, match="2 formats, and the primary has 1"):
        Translation([Format("{a}")], [Format("{a}"), Format("b-{a}")])


VALUES = st.text(st.sampled_from("ab.-"), min_size=1, max_size=6)


@given(st.lists(VALUES, min_size=1, max_size=4), st.sampled_from(("-", ".", "--")))
def test_what_is_read_is_written_again(values: list[str], between: str) -> None:
    format_ = Format(between.join(f"{{v{number}}}" for number in range(len(values))))
    name = between.join(values)
    read = format_.read(name)
    plain = all(between not in each for each in values[:-1])
    if (
        plain
        and not any(one.endswith("-") for one in values[:-1])
        and not any(two.startswith("-") for two in values[1:])
    ):
        assert read == {f"v{number}": value for number, value in enumerate(values)}
    if read is not None:
        assert format_.write(read) == name
        assert not any(between in value for value in list(read.values())[:-1])
