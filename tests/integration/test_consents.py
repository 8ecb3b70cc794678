"""Tokens and grants on real brokers: who makes a link, what either side attaches alone, what waits, what goes on."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from support.kafka import unique
from support.links import Side, until, whole

from isthmus_bench.kafka import KafkaCluster
from isthmus_bench.proxies import ProxyFailed, ProxyProcess

pytestmark = [pytest.mark.brokers, pytest.mark.one_in_ci("stories", of="consents and encryption")]

NO_LOCAL = {"allow_local_links": False}


class Two(NamedTuple):
    """A and B, which take links from who shows a token."""

    a: Side
    b: Side
    directory: Path

    def token(self, *options: str) -> tuple[str, str]:
        """One of B's, as options of ``link create``."""
        made = self.b.proxy.cli("link", "token", "create", *options)
        file = self.directory / f"{made['token_id']}.token"
        file.write_text(made["token"] + "\n")
        return "--token-file", str(file)

    def create(self, *options: str) -> str:
        name = unique("consented")
        self.a.proxy.cli("link", "create", name, "--remote", self.b.proxy.link_address, *options)
        until("it is up", lambda: self.b.proxy.get(f"/v1/links/{name}")["state"] == "Following")
        return name

    def refused(self, *options: str) -> str:
        with pytest.raises(ProxyFailed) as raised:
            self.create(*options)
        return str(raised.value)


def attach(side: Side, link: str, local: str, role: str, *more: str) -> Any:
    names = "--local", local, "--remote", local
    return side.proxy.cli("link", "attach", link, *names, "--role", role, *more)


def waiting(side: Side, link: str) -> list[tuple[str, str, list[str]]]:
    found = side.proxy.get(f"/v1/links/{link}")["waiting"]
    return [(each["local"], each["asked_by"], each["missing"]) for each in found]


def mapped(side: Side, link: str) -> list[str]:
    return [each["local"] for each in side.proxy.get(f"/v1/links/{link}")["mappings"]]


def configured(proxy: ProxyProcess, **link: Any) -> None:
    """Have a proxy go on with other settings of ``[link]``."""
    proxy.stop()
    proxy.tables["link"].update(link)
    proxy.start()


@pytest.fixture
def two(kafka_pair: tuple[KafkaCluster, KafkaCluster], tmp_path: Path) -> Iterator[Two]:
    a, b = kafka_pair
    with whole(a, link=NO_LOCAL) as from_a, whole(b, link=NO_LOCAL) as to_b:
        yield Two(Side(a, [from_a]), Side(b, [to_b]), tmp_path)


def test_links_of_before_keep_what_they_have_and_then_tokens_make_them(
    kafka_pair: tuple[KafkaCluster, KafkaCluster], tmp_path: Path
) -> None:
    """On clusters of its own: a level is never lowered."""
    with (
        KafkaCluster(name="consents-a") as a,
        KafkaCluster(name="consents-b") as b,
        whole(a, link={**NO_LOCAL, "remotes_allowed": []}) as from_a,
        whole(b) as to_b,
    ):
        two = Two(Side(a, [from_a]), Side(b, [to_b]), tmp_path)
        assert "link.remotes_allowed" in two.refused()
        configured(from_a, remotes_allowed=[to_b.link_address])
        with pytest.raises(ProxyFailed, match="control upgrade"):
            two.token()
        old = two.create()
        attach(two.a, old, "old-", "leader")
        assert two.a.proxy.get(f"/v1/links/{old}/grants")["enforced"] is False
        two.a.create_topic("old-t")
        for side in (two.a, two.b):
            assert side.proxy.cli("control", "upgrade")["after"] >= 4
        assert two.a.proxy.cli("link", "grants", old)["attached"] == ["follow:old-"]
        assert two.b.proxy.cli("link", "grants", old)["attached"] == ["lead:old-"]
        assert attach(two.a, old, "more-", "leader")["missing_grants"] == ["lead:more-"]
        two.a.produce("old-t", [b"still copied"])
        until("copied", lambda: two.b.end("old-t") == 1)
        two.a.proxy.cli("link", "detach", old, "--local", "old-")
        until("detached", lambda: mapped(two.b, old) == [])
        assert attach(two.a, old, "old-", "leader")["missing_grants"] == [], "what that side let go"
        # From B's machine links came without a token; no more once that is not allowed.
        configured(to_b, allow_local_links=False)
        assert "AUTHENTICATION_ERROR" in two.refused()
        right = two.token("--may", "lead:new-")
        new = two.create(*right)
        assert attach(two.a, new, "new-", "leader")["missing_grants"] == []
        assert "used already" in two.refused(*right)


def test_a_token_once_a_wrong_one_and_one_that_expired(two: Two) -> None:
    for side in (two.a, two.b):
        side.proxy.cli("control", "upgrade")
    assert "AUTHENTICATION_ERROR" in two.refused(), "from this machine, too"
    right = two.token("--may", "lead:x-")
    name = two.create(*right)
    assert "used already" in two.refused(*right)
    chosen = two.directory / "chosen"
    chosen.write_text("Winter2026!\n")
    assert "somebody chose it" in two.refused("--token-file", str(chosen))
    late = two.token("--expires", "1s")
    time.sleep(2)
    until("it may be tried again", lambda: "TOO_MANY" not in (said := two.refused(*late)) and "has expired" in said)
    for log in (two.a.proxy.log, two.b.proxy.log):
        assert "isthmus-token-" not in log
    rejected = [line for line in two.b.proxy.log.splitlines() if "link connections rejected" in line]
    assert any("AUTHENTICATION_ERROR" in line for line in rejected)
    two.a.proxy.cli("link", "delete", name)


def test_either_side_attaches_inside_of_its_grants_and_waits_outside(two: Two) -> None:
    for side in (two.a, two.b):
        side.proxy.cli("control", "upgrade")
    ours, theirs, outside = (f"{unique(name)}-" for name in ("ours", "theirs", "outside"))
    grants = ("--may", f"lead:{ours}")
    name = two.create(*two.token(*grants), "--may", f"follow:{theirs}")
    for prefix in (ours, theirs, outside):
        two.a.create_topic(prefix + "t")
        two.a.produce(prefix + "t", [b"x"])
    planned = attach(two.a, name, ours, "leader", "--dry-run")
    assert (planned["missing_grants"], len(planned["topics"])) == ([], 1)
    assert attach(two.a, name, ours, "leader")["missing_grants"] == []
    assert attach(two.b, name, theirs, "follower")["missing_grants"] == []
    for prefix in (ours, theirs):
        until(f"{prefix} is copied", lambda prefix=prefix: two.b.end(prefix + "t") == 1)

    # Each side asks for what the other has not granted.
    for asks, asked, role, right in ((two.a, two.b, "leader", "lead"), (two.b, two.a, "follower", "follow")):
        needed = [f"{right}:{outside}"]
        assert attach(asks, name, outside, role, "--dry-run")["missing_grants"] == needed
        assert waiting(two.a, name) == waiting(two.b, name) == []
        assert attach(asks, name, outside, role)["missing_grants"] == needed
        assert waiting(asks, name) == [(outside, "this cluster", needed)]
        assert waiting(asked, name) == [(outside, "the other cluster", needed)]
        assert asked.proxy.get(f"/v1/links/{name}")["reason"] == "NOT_GRANTED"
        assert outside not in mapped(two.a, name) + mapped(two.b, name)
        # A proxy that is killed goes on with it.
        asks.proxy.kill()
        asks.proxy.start()
        asked.proxy.cli("link", "grant", name, "--may", needed[0])
        until("attached", lambda: outside in mapped(two.a, name) and outside in mapped(two.b, name))
        until("copied", lambda: two.b.end(outside + "t") == 1)
        until("nothing waits", lambda: waiting(two.a, name) == waiting(two.b, name) == [])
        # Revoked, it goes on until it is detached.
        assert asked.proxy.cli("link", "revoke", name, "--may", needed[0])["attached"]
        assert outside in mapped(asked, name)
        asked.proxy.cli("link", "detach", name, "--local", outside)
        assert attach(asks, name, outside, role)["missing_grants"] == needed
        asks.proxy.cli("link", "detach", name, "--local", outside)
        assert waiting(two.a, name) == waiting(two.b, name) == []
    two.a.proxy.cli("link", "delete", name)


def test_what_is_cut_and_set_at_the_brokers_takes_grants_of_its_own(two: Two) -> None:
    for side in (two.a, two.b):
        side.proxy.cli("control", "upgrade")
    prefix = f"{unique('cut')}-"
    name = two.create(*two.token("--may", f"lead:{prefix}"))
    two.a.create_topic(prefix + "t")
    two.b.create_topic(prefix + "t")
    two.b.produce(prefix + "t", [b"another", b"record"])
    options = "--truncate-target", "--disable-transaction-verification"
    needed = [f"replace:{prefix}", "broker-settings"]
    assert attach(two.a, name, prefix, "leader", *options, "--dry-run")["missing_grants"] == needed
    assert attach(two.a, name, prefix, "leader", *options)["missing_grants"] == needed
    assert two.b.end(prefix + "t") == 2
    two.b.proxy.cli("link", "grant", name, "--may", needed[0], "--broker-settings")
    until("attached and cut", lambda: prefix in mapped(two.a, name) and two.b.end(prefix + "t") == 0)
    two.a.proxy.cli("link", "delete", name)
