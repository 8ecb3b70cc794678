"""Forms of cluster ids, and what of them stands in names."""

from __future__ import annotations

import re
import string

import pytest

from isthmus_protocol.cluster_ids import escaped, is_usual
from isthmus_protocol.offsets_copy import COPY_PREFIX, copy_name, needs_escape

TOPIC_CHARS = string.ascii_letters + string.digits + "._-"


@pytest.mark.parametrize("cluster_id", ["5L6g3nShT-eMCtK--X86sw", "-", "a_b", "x" * 22])
def test_ids_of_kafkas_form_stay_as_they_are(cluster_id: str) -> None:
    assert is_usual(cluster_id)
    assert escaped(cluster_id, 22) == cluster_id
    assert copy_name(cluster_id) == COPY_PREFIX + cluster_id


@pytest.mark.parametrize("cluster_id", ["", "x" * 23, "a.b", "a b", "a/b", "ü", "a\n", "a\x00", "a~b", "a%2Fb"])
def test_ids_of_other_forms(cluster_id: str) -> None:
    assert not is_usual(cluster_id)
    assert re.fullmatch(r"[a-zA-Z0-9._%-]*", escaped(cluster_id, 200))


@pytest.mark.parametrize(
    ("cluster_id", "name"),
    [
        ("prod.eu", "prod.eu"),  # topics have such names
        ("x" * 230, "x" * 230),
        ("prod/eu 1", "prod.2Feu.201"),
        ("ü~", ".C3.BC.7E"),
        ("a%2Fb", "a.252Fb"),
    ],
)
def test_a_copys_name_has_an_id_as_topics_can_have_it(cluster_id: str, name: str) -> None:
    assert copy_name(cluster_id) == COPY_PREFIX + name


def test_long_ids_are_told_apart_by_a_digest() -> None:
    ids = ["x" * 231, "x" * 232, "ü" * 200, "ü" * 201]
    names = [copy_name(cluster_id) for cluster_id in ids]
    assert all(needs_escape(cluster_id) for cluster_id in ids)
    assert len(set(names)) == len(ids)
    for name in names:
        assert len(name) == 249
        assert set(name) <= set(TOPIC_CHARS)
