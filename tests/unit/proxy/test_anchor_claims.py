"""Who may say of a cluster that knows no link what its control log had: who has proof of it, and no stranger."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from isthmus.anchor_keeper import UNPROVEN, AnchorKeeper
from isthmus_control.anchors import Anchor
from isthmus_control.control_state import ControlState
from isthmus_control.sealing import Secret
from isthmus_control.signing import Signer

TOPIC_ID = "11111111-1111-4111-8111-111111111111"
OWN = Anchor("B", TOPIC_ID, 0, 20, 7, "cd")
KEY, OTHER = Signer(Secret(bytes(32)), "B"), Signer(Secret(b"1" * 32), "B")


def keeper(signer: Signer | None, state: ControlState | None = None) -> AnchorKeeper:
    """Of cluster B, whose log is empty."""
    log: Any = SimpleNamespace(
        state=state or ControlState("B"), lost=False, recent=SimpleNamespace(anchor=lambda *_: None)
    )
    topic: Any = SimpleNamespace(signer=signer, topic_id=TOPIC_ID)
    client: Any = SimpleNamespace(cluster_id="B")
    return AnchorKeeper([], client, topic, log)


def test_what_this_cluster_told_itself_counts() -> None:
    proof = keeper(KEY).proof(OWN)
    lost = keeper(KEY)
    lost.claimed(OWN, proof, "a peer")
    assert [told.anchor for told in lost._told.values()] == [OWN]
    assert not lost.troubles


@pytest.mark.parametrize(
    ("signer", "proof"),
    [
        (KEY, None),
        (KEY, ""),
        (KEY, "é"),
        (KEY, OTHER.prove(OWN.encode())),
        (KEY, KEY.prove(Anchor("B", TOPIC_ID, 0, 21, 7, "cd").encode())),
        (KEY, Signer(Secret(bytes(32)), "A").prove(OWN.encode())),
        (None, None),
        (None, KEY.prove(OWN.encode())),
    ],
)
def test_what_a_stranger_invents_ends_nothing_and_is_told(signer: Signer | None, proof: str | None) -> None:
    asked = keeper(signer)
    asked.claimed(OWN, proof, "a stranger")
    assert not asked._told
    assert "a stranger" in asked.troubles[UNPROVEN]


@pytest.mark.parametrize("state", [ControlState("B", links_created=1), ControlState("B", generation=1)])
def test_a_cluster_that_knows_of_links_is_told_over_them_alone(state: ControlState) -> None:
    asked = keeper(KEY, state)
    asked.claimed(OWN, KEY.prove(OWN.encode()), "a peer")
    assert not asked._told
    assert not asked.troubles


def test_a_proof_is_kept_with_the_anchor_that_it_came_with() -> None:
    heard = keeper(KEY)
    of_a = Anchor("A", TOPIC_ID, 0, 5, 1, "ab")
    later = Anchor("A", TOPIC_ID, 0, 9, 1, "ab")
    heard.hear(of_a, "proof")
    heard.hear(later)
    assert heard.heard_of("A") == later
    assert heard.proven_of("A") == (of_a, "proof")
