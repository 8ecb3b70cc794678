"""Linked clusters keep each other's anchors, and tell them: at once, again, and to one that knows no link any more."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from support.plugins import Two, on_two

from isthmus_control.anchors import Anchor
from isthmus_control.control_state import ControlState
from isthmus_plugins.replication.link import calls, control_anchors, features

TOPIC_ID = "11111111-1111-4111-8111-111111111111"
OF_A = Anchor("A", TOPIC_ID, 0, 10, 7, "ab")
OF_B = Anchor("B", TOPIC_ID.replace("1", "2"), 0, 20, 7, "cd")


def test_each_side_hears_how_far_the_other_ones_log_is() -> None:
    async def scenario(two: Two) -> None:
        a, b = two.controls["A"].anchors, two.controls["B"].anchors
        a.known, b.known = OF_A, OF_B
        await two.create()
        await two.connected()
        await two.until("told", lambda: a.heard.get("B") == OF_B and b.heard.get("A") == OF_A)
        # Then it goes on.
        a.known = replace(OF_A, offset=99)
        await two.until("told again", lambda: b.heard["A"].offset == 99, control_anchors.INTERVAL_S + 1)
        told = (a.known, "cluster B over link a-to-b")
        await two.until("told what was heard", lambda: told in a.was_told, control_anchors.INTERVAL_S + 1)

    on_two(scenario)


def test_it_is_told_as_soon_as_the_link_connects() -> None:
    """Before the first interval is over: what was heard before may be what the other side lost."""

    async def scenario(two: Two) -> None:
        two.controls["B"].anchors.heard["A"] = OF_A
        await two.create()
        began = asyncio.get_running_loop().time()
        await two.until("told", lambda: bool(two.controls["A"].anchors.was_told))
        assert asyncio.get_running_loop().time() - began < 1
        assert two.controls["A"].anchors.was_told[0][0] == OF_A

    on_two(scenario)


def test_a_cluster_that_knows_no_link_any_more_is_told_when_it_is_dialled() -> None:
    async def scenario(two: Two) -> None:
        await two.create()
        await two.connected()
        two.controls["B"].anchors.known = OF_B
        await two.until("heard", lambda: "B" in two.controls["A"].anchors.proven, control_anchors.INTERVAL_S + 1)
        control = two.controls["B"]
        control.state = ControlState("B")
        for subscriber in control._subscribers:
            subscriber(control.state)
        await two.until("dialled", lambda: bool(control.anchors.was_claimed))
        anchor, proof, by = control.anchors.was_claimed[0]
        assert (anchor, proof) == (OF_B, "by B: 20"), "which the cluster knows to be its own"
        assert "of a link that this cluster does not know" in by
        assert two.a.status().reason == "PEER_HAS_NO_SUCH_LINK"

    on_two(scenario)


@pytest.mark.parametrize("text", ["junk", OF_B.encode()])
def test_what_is_not_of_the_peer_is_not_kept(text: str) -> None:
    """A peer speaks for its own cluster alone; a newer version's anchor is none that could be compared."""

    async def scenario(two: Two) -> None:
        await two.create()
        await two.connected()
        ends: Any = two.a.plugin.parts.peers.connections("a-to-b")[0]
        heard = two.controls["B"].anchors.heard
        assert await ends.call(calls.TellAnchors(own=text)) == calls.Done()
        assert heard == {}
        assert await ends.call(calls.TellAnchors(own=OF_A.encode())) == calls.Done()
        assert heard == {"A": OF_A}

    on_two(scenario)


def test_older_peers_are_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    older = tuple(each for each in features.FEATURES if each != features.CONTROL_ANCHORS)
    monkeypatch.setattr(features, "FEATURES", older)

    async def scenario(two: Two) -> None:
        two.controls["A"].anchors.known = OF_A
        await two.create()
        await two.connected()
        await asyncio.sleep(2 * control_anchors.INTERVAL_S)
        assert two.controls["B"].anchors.heard == {}

    on_two(scenario)
