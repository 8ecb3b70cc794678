"""``isthmus tree`` and its routes, with the real rules behind them: what is printed, and how commands end."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from support.admin import RunningAdmin
from support.fake_trees import Member, context, members
from typer.testing import CliRunner

from isthmus.cli.root import app
from isthmus_control.commands import ClaimDistributor, RaiseLevel
from isthmus_control.levels import TREES
from isthmus_control.model import Reason
from isthmus_plugins.cluster import BrokerUnavailable
from isthmus_plugins.distribution.group_times import GroupTime
from isthmus_plugins.distribution.positions import Course, Stretch, Term
from isthmus_plugins.distributor.operations import Operations
from isthmus_protocol.offsets_log import OffsetKey

WIDE = {"COLUMNS": "300"}


@pytest.fixture
def admin() -> Iterator[RunningAdmin]:
    with RunningAdmin() as running:
        yield running


@pytest.fixture
def clusters() -> dict[str, Member]:
    """Of the tree; a topic has another number of partitions at one of them."""
    found = members(["c1", "c2", "c3", "c4"])
    for name, partitions in (("c1", 2), ("c2", 2), ("c3", 3)):
        found[name].add_topic("t-1", partitions)
    return found


@pytest.fixture
def distributors(admin: RunningAdmin, clusters: dict[str, Member]) -> dict[int, Any]:
    """Those that the proxy runs; it has the plugin."""
    running: dict[int, Any] = {}
    admin.call(admin.log.apply, RaiseLevel(TREES))
    admin.services.trees = Operations(context(clusters["c1"], clusters, admin.log), lambda: running)
    return running


@pytest.fixture
def file(tmp_path: Path) -> Path:
    clusters = {name: {"cluster_id": f"id-{name}", "bootstrap_servers": "h:1"} for name in ("c1", "c2", "c3")}
    document = {"version": 1, "topics": ["t-"], "clusters": clusters, "tree": ["c1", ["c2", "c3"]]}
    path = tmp_path / "tree.yaml"
    path.write_text(json.dumps(document))
    return path


def run(admin: RunningAdmin, *arguments: str) -> Any:
    return CliRunner().invoke(app, ["tree", *arguments, "--url", admin.url], env=WIDE, prog_name="isthmus")


def lines(result: Any, exit_code: int = 0) -> list[str]:
    assert result.exit_code == exit_code, result.output
    return [" ".join(line.split()) for line in result.stdout.splitlines()]


def test_a_proxy_without_the_plugin_says_so(admin: RunningAdmin, file: Path) -> None:
    for arguments in (["show"], ["apply", str(file)], ["target", "c1", "8", "c3"], ["document"], ["leave"]):
        result = run(admin, *arguments)
        assert result.exit_code == 1
        assert "[plugins] enabled is to have distribution (NOT_FOUND)" in result.stderr


def test_a_tree_is_applied_shown_and_left(admin: RunningAdmin, distributors: dict[int, Any], file: Path) -> None:
    tried = lines(run(admin, "apply", str(file), "--dry-run"))
    assert tried[0] == "tree version 1: 3 clusters, header isthmus-copy-flags"
    assert "c1 8 10000000 11111111 c2 c3" in tried
    assert tried[-2:] == [
        "topic t-1: 2 partitions here, 3 at c3: messages go by their keys",
        "c1 would be at version 1, and distributes t-*",
    ]
    assert lines(run(admin, "apply", str(file)))[-1] == "c1 is at version 1, and distributes t-*"
    assert lines(run(admin, "apply", str(file)))[-1] == "c1 is at version 1 already, and distributes t-*"
    shown = lines(run(admin, "show"), 1)
    assert shown[:4] == ["tree version 1", "this cluster c1", "topics t-*", "exactly once yes"]
    assert shown[-1] == "8 c2 - Unclaimed 0 0 0 0 -"

    incarnation = admin.log.state.proxies["proxy-1"].incarnation
    admin.call(admin.log.apply, ClaimDistributor(8, incarnation))
    assert lines(run(admin, "show"))[-1] == "8 c2 proxy-1 Elsewhere 0 0 0 0 -"
    place, other = ("t-1", 0), ("t-2", 0)
    course = Course((Stretch(Term(1, 0), "c2", 0, 3),))
    distributors[8] = SimpleNamespace(
        waits=None,
        given=SimpleNamespace(total=lambda: 9),
        refused=1,
        lost=2,
        courses={place: course, other: course},
        positions={place: 5},
        ends={place: 8},
        left_out={other: Reason("TOPIC_MISSING", "c2 has no topic t-2")},
        told={},
        by_key={"t-1": 3},
        fill=(0, 0),
    )
    result = run(admin, "show")
    assert lines(result, 1)[-6:] == [
        "8 c2 proxy-1 Distributing 9 3 1 2 -",
        "",
        "t-1: messages go by their keys at level 8, c2 has 3 partitions",
        "",
        "LEVEL PARTITION POSITION SETTLED LAG REASON",
        "8 t-2-0 - 3 - c2 has no topic t-2",
    ]
    assert "8 t-1-0 5 3 3 -" in lines(run(admin, "show", "--all"), 1)
    distributors[8].positions[other] = 7
    missing = distributors[8].left_out.pop(other)
    distributors[8].told[other] = Reason("MESSAGES_LOST", "retention has taken offsets 5 to 6")
    assert "8 t-2-0 7 3 - retention has taken offsets 5 to 6" in lines(run(admin, "show"))
    distributors[8].left_out[other] = Reason("TARGET_REFUSES_RECORDS", "c2 refuses offset 7")
    assert "8 t-2-0 7 3 - c2 refuses offset 7" in lines(run(admin, "show"), 1)
    distributors[8].left_out[other] = missing
    del distributors[8].positions[other]
    assert lines(run(admin, "target", "c1", "8", "c3", "--give-up", "--dry-run")) == [
        "level 8 would write to c3",
        "2 offsets would be given again, if the target of before does not answer: they are not settled",
    ]
    assert admin.log.state.tree is not None
    assert admin.log.state.tree.chosen == {}
    chosen = lines(run(admin, "target", "c1", "8", "c3", "--give-up"))
    assert "8 c3 proxy-1 Distributing 9 3 1 2 -" in chosen
    assert admin.log.state.tree is not None
    assert (admin.log.state.tree.chosen, admin.log.state.tree.given_up) == ({8: "c3"}, (8,))
    distributors[8].courses[place] = Course(course.stretches, fill_until=8)
    distributors[8].fill = (3, 8)
    filling = lines(run(admin, "show"), 1)
    assert "c3 is new: it was filled with 5 of 8 offsets (62%)" in filling
    assert "8 c3 proxy-1 Filling 9 3 1 2 -" in filling
    status = json.loads(run(admin, "show", "-o", "json").stdout)["distributors"][0]
    assert (status["fill_left"], status["fill_total"], status["partitions"][0]["fill_until"]) == (3, 8, 8)
    written = yaml.safe_load(run(admin, "document").stdout)
    assert written == json.loads(run(admin, "document", "-o", "json").stdout)
    assert (written["version"], written["tree"]["level"]) == (1, 8)
    assert lines(run(admin, "leave", "--dry-run")) == ["would leave the tree"]
    assert lines(run(admin, "leave")) == ["left the tree"]
    assert admin.log.state.tree is None
    refused = run(admin, "leave")
    assert (refused.exit_code, "in no tree" in refused.stderr) == (1, True)


def test_what_keeps_a_version_or_a_cluster_back_is_said(
    admin: RunningAdmin, distributors: dict[int, Any], clusters: dict[str, Member], file: Path
) -> None:
    assert lines(run(admin, "apply", str(file)))[-1] == "c1 is at version 1, and distributes t-*"
    document = json.loads(file.read_text())
    document["clusters"]["c4"] = {"cluster_id": "id-c4", "bootstrap_servers": "h:1"}
    document |= {"version": 2, "tree": [["c1", "c4"], ["c2", "c3"]]}
    file.write_text(json.dumps(document))
    clusters["c4"].add_topic("t-1").partitions[0].end = 3
    tried = lines(run(admin, "apply", str(file), "--dry-run"), 1)
    assert "c4 would be new: c1 fills it with all that it has, from retention on" in tried
    at = tried.index("c4 is new, and not empty: t-1-0 has offsets 0 to 2")
    assert tried[at + 1] == "so tree apply at c4 is refused: delete these topics there, or see --own-messages"
    assert "not yet: c1 has not begun version 1 at level 8: apply it there, and see that it can" in tried
    refused = run(admin, "apply", str(file))
    assert (refused.exit_code, "(CONFLICT)" in refused.stderr) == (1, True)
    clusters["c1"].found["t-1"].partitions[1].end = 7
    assert lines(run(admin, "leave", "--dry-run"), 1) == [
        "others lack what is here: t-1-1: level 8 does not distribute it",
        "would leave the tree",
    ]
    refused = run(admin, "leave", "-o", "json")
    assert (refused.exit_code, json.loads(refused.stderr)["code"]) == (1, "CONFLICT")
    assert lines(run(admin, "leave", "--give-up"))[-1] == "left the tree"


def test_topics_that_are_made_are_said(
    admin: RunningAdmin, distributors: dict[int, Any], clusters: dict[str, Member], file: Path
) -> None:
    clusters["c2"].add_topic("t-2", 2, {"retention.ms": "1000"})
    clusters["c3"].is_up = False
    tried = lines(run(admin, "apply", str(file), "--dry-run"))
    assert "topic t-2 would be made as at c2: partitions 2, replicas 1, retention.ms=1000" in tried
    assert "c3 does not say which topics it has: cluster c3 is not reached: no broker answers" in tried
    clusters["c1"].policy = lambda topic, name, value: None if name != "retention.ms" else "longer"
    made = lines(run(admin, "apply", str(file)))
    assert "topic t-2 is made as at c2: partitions 2, replicas 1" in made
    assert any(line.startswith("topic t-2 is made without retention.ms: ") for line in made)
    assert "t-2" in clusters["c1"].found


def test_offsets_of_groups_are_shown_and_put_back(
    admin: RunningAdmin, distributors: dict[int, Any], clusters: dict[str, Member], file: Path
) -> None:
    assert not distributors
    went_back: list[str] = []

    async def go_back(group: str) -> list[OffsetKey]:
        went_back.append(group)
        if group == "not-read-yet":
            raise BrokerUnavailable("not all read yet")
        return [] if group == "unknown" else [key]

    key = OffsetKey("bills-1", "t-1", 0)
    said = GroupTime(1000, 900, "c2", "", 8)
    reason = Reason("WENT_ON", "the group has gone on here")
    running: Any = SimpleNamespace(
        waits=None,
        warning=None,
        distributor=SimpleNamespace(lag=lambda: (1500, "c2"), sent=3),
        committer=SimpleNamespace(set=4, go_back=go_back),
        waiting=[(key, said, reason)],
    )
    runs: list[Any] = [None]
    own = context(clusters["c1"], clusters, admin.log)
    admin.services.trees = Operations(own, dict, lambda: runs[0])
    run(admin, "apply", str(file))
    assert "offsets of groups" not in run(admin, "show").stdout
    refused = run(admin, "go-back", "bills-1")
    assert (refused.exit_code, "`groups` in the tree's file (INVALID)" in refused.stderr) == (1, True)

    document = json.loads(file.read_text()) | {"version": 2, "groups": ["bills-"], "margin_ms": 2500}
    document["margins_ms"] = {"bills-": 500}
    file.write_text(json.dumps(document))
    run(admin, "apply", str(file))
    assert "state Unclaimed" in lines(run(admin, "show"), 1)
    incarnation = admin.log.state.proxies["proxy-1"].incarnation
    admin.call(admin.log.apply, ClaimDistributor(8, incarnation))
    assert "state Elsewhere" in lines(run(admin, "show"))
    refused = run(admin, "go-back", "bills-1")
    assert (refused.exit_code, "ask that one (CONFLICT)" in refused.stderr) == (1, True)

    runs[0] = running
    shown = lines(run(admin, "show"))
    assert shown[-12:] == [
        "offsets of groups bills-*",
        "state Distributing",
        "reason -",
        "proxy proxy-1",
        "margin 2.5 s",
        "margin of bills-* 0.5 s",
        "lag 1.5 s",
        "sent 3",
        "set 4",
        "",
        "GROUP PARTITION OF WAITS FOR",
        "bills-1 t-1-0 c2 the group has gone on here",
    ]
    running.warning = Reason("MARGIN_BELOW_LAG", "messages of c2 may come late")
    assert "reason messages of c2 may come late" in lines(run(admin, "show"), 1)
    running.warning, running.waits = None, Reason("SOURCE_UNAVAILABLE", "no broker answers")
    assert "state Waiting" in lines(run(admin, "show"), 1)
    assert run(admin, "go-back", "bills-1").exit_code == 0
    refused = run(admin, "go-back", "unknown")
    assert (refused.exit_code, "no other cluster has said" in refused.stderr) == (1, True)
    refused = run(admin, "go-back", "not-read-yet")
    assert (refused.exit_code, "not all read yet (NOT_AVAILABLE)" in refused.stderr) == (1, True)
    assert went_back == ["bills-1", "unknown", "not-read-yet"]


def test_what_is_wrong_is_said(admin: RunningAdmin, distributors: dict[int, Any], file: Path, tmp_path: Path) -> None:
    missing = run(admin, "apply", str(tmp_path / "no-such-file"))
    assert (missing.exit_code, "cannot be read: No such file" in missing.stderr) == (2, True)
    file.write_text("version: 1\nversion: 2\n")
    result = run(admin, "apply", str(file))
    assert (result.exit_code, "line 1, column 1: version stands twice" in result.stderr) == (1, True)
    result = run(admin, "show")
    assert (result.exit_code, "isthmus tree apply FILE (NOT_FOUND)" in result.stderr) == (1, True)
    assert not distributors
