"""Who may make a link with this cluster, and have what attached: tokens, grants, and what waits, from either side."""

from __future__ import annotations

import asyncio
import uuid
from pathlib import Path
from typing import Any

import pytest
from support.plugins import Proxy, Two, on_two

from isthmus_control.commands import AlterNamespace, DetachNamespace, RaiseLevel
from isthmus_control.levels import CONSENT
from isthmus_control.model import Reason, ResourceType
from isthmus_control.tokens import Token
from isthmus_control.truncations import Truncation, TruncationPhase
from isthmus_plugins import links
from isthmus_plugins.link_policy import LinkPolicy
from isthmus_plugins.links import OperationError
from isthmus_plugins.replication.link import calls
from isthmus_plugins.replication.link.attempts import ADDRESSES_MAX, PAUSE_S_MAX, TokenAttempts
from isthmus_plugins.replication.link.call_codec import Question
from isthmus_plugins.replication.link.connection import LinkConnection, LinkRejected

NO_LOCAL = LinkPolicy(("127.0.0.1",))
LEADS = links.Attach(local="l-", remote="r-", role="leader")
FOLLOWS = links.Attach(local="r-", remote="l-", role="follower")


async def token(two: Two, *may: str, **more: Any) -> str:
    """One of B's; neither cluster takes links without."""
    for proxy in (two.a, two.b):
        proxy.context.link_policy = NO_LOCAL
    made = await two.b.links.create_token(links.CreateToken(may=list(may), **more))
    assert isinstance(made, links.NewToken)
    return made.token


async def linked(two: Two, *may: str, here: tuple[str, ...] = ()) -> None:
    """With what B grants A, and A B."""
    await two.create(token=await token(two, *may), may=list(here))
    await two.connected()


async def refused(two: Two, code: str, **more: Any) -> str:
    with pytest.raises(OperationError) as raised:
        await two.create("x", **more)
    assert raised.value.code == code
    return raised.value.message


def waiting(proxy: Proxy) -> list[tuple[str, str, list[str]]]:
    return [(each.local, each.asked_by, each.missing) for each in proxy.status().waiting]


def attached(two: Two) -> list[list[str]]:
    return [[each.local for each in proxy.status().mappings] for proxy in (two.a, two.b)]


# ---- tokens ----


def test_a_token_makes_one_link() -> None:
    async def work(two: Two) -> None:
        right = await token(two, "lead:r-")
        assert "link token create" in await refused(two, "AUTHENTICATION_ERROR")
        assert "somebody chose it" in await refused(two, "INVALID_TOKEN", token="Winter2026!")
        await two.create(token=right, may=["follow:l-"])
        await two.connected()
        assert (two.a.links.grants("a-to-b").may, two.b.links.grants("a-to-b").may) == (["follow:l-"], ["lead:r-"])
        assert two.b.links.tokens() == []
        assert "used already" in await refused(two, "AUTHENTICATION_ERROR", token=right)

    on_two(work)


def test_a_token_that_expired_or_is_of_another_cluster_is_none(caplog: pytest.LogCaptureFixture) -> None:
    async def work(two: Two) -> None:
        late = await token(two, expires_seconds=1)
        await asyncio.sleep(2)
        assert "has expired" in await refused(two, "AUTHENTICATION_ERROR", token=late)
        # The next one of this address waits, whatever it shows.
        right = await token(two)
        assert "try again in" in await refused(two, "TOO_MANY_ATTEMPTS", token=right)
        for _ in range(20):
            await refused(two, "TOO_MANY_ATTEMPTS", token=Token.new().text)
        lines = [each for each in caplog.records if each.message == "link connections rejected"]
        codes = [each.__dict__["code"] for each in lines]
        assert codes == ["AUTHENTICATION_ERROR", "TOO_MANY_ATTEMPTS"], "a line a minute for each address and cause"

    on_two(work)


def test_who_holds_a_tokens_id_alone_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(two: Two) -> None:
        known = Token.parse(await token(two))
        guess = Token.new()
        token_id = known.token_id
        monkeypatch.setattr(Token, "token_id", token_id)
        assert "does not hold the token" in await refused(two, "AUTHENTICATION_ERROR", token=guess.text)
        assert len(two.b.links.tokens()) == 1, "it is as good as before"

    on_two(work)


def test_a_holder_tells_nothing_to_who_did_not_make_the_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """An acceptor that knows the token's public half, and no more, ends with nothing."""

    async def work(two: Two) -> None:
        right = await token(two)
        unseal = two.b.context.unseal
        two.b.context.unseal = lambda sealed, purpose: bytes(32) if len(purpose) == 16 else unseal(sealed, purpose)
        assert "not of the cluster that made the token" in await refused(two, "AUTHENTICATION_ERROR", token=right)
        assert not two.controls["A"].state.links

    on_two(work)


def test_a_peer_that_does_not_know_tokens_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(two: Two) -> None:
        right = await token(two)
        peers = two.b.plugin.parts.peers
        known = peers._identity
        monkeypatch.setattr(peers, "_identity", lambda: {**known(), "features": []})
        assert "upgrade it" in await refused(two, "UNSUPPORTED_VERSION", token=right)

    on_two(work)


def test_what_this_side_refuses_uses_up_no_token() -> None:
    async def work(two: Two) -> None:
        right = await token(two, "lead:r-")
        assert "no grant" in await refused(two, "INVALID_REQUEST", token=right, may=["l-"])
        await refused(two, "INVALID", token=right, may=["replace:principal:User:a"])
        assert "lead:__consumer_offsets" in await refused(two, "NOT_GRANTED", token=right, offsets_topic="whole")
        await two.create(token=right)
        await two.connected()

    on_two(work)


def test_below_the_level_links_are_made_on_one_machine_alone() -> None:
    async def work(two: Two) -> None:
        for control in two.controls.values():
            control.state = control.state.evolve(level=CONSENT - 1)
        two.b.context.link_policy = NO_LOCAL
        with pytest.raises(OperationError, match="isthmus control upgrade"):
            await two.b.links.create_token(links.CreateToken())
        await refused(two, "AUTHENTICATION_ERROR")
        two.b.context.link_policy = LinkPolicy(allow_local_links=True)
        await two.create()
        await two.connected()
        await two.b.links.attach("a-to-b", FOLLOWS)
        assert not two.a.links.grants("a-to-b").enforced
        assert attached(two) == [["l-"], ["r-"]]

    on_two(work)


def test_links_are_created_to_what_the_configuration_names(caplog: pytest.LogCaptureFixture) -> None:
    async def work(two: Two) -> None:
        two.a.context.link_policy = LinkPolicy(("127.0.0.1:1", "b.example.org", "[::1]"))
        assert "link.remotes_allowed" in await refused(two, "REMOTE_NOT_ALLOWED")
        assert not two.a.context.link_policy.may_reach("127.0.0.1", 2)
        for allowed in (("127.0.0.1", 1), ("B.example.org.", 7), ("::1", 9)):
            assert two.a.context.link_policy.may_reach(*allowed)
        # What is behind a port is not told to who asks.
        message = await refused(two, "BOOTSTRAP_TCP_CONNECTION_FAILED_ERROR", remote="127.0.0.1:1")
        assert "refused" not in message.lower()
        assert "listens" not in message
        assert any("nobody listens" in str(getattr(each, "detail", "")) for each in caplog.records)

    on_two(work)


def test_attempts_are_slowed_down_and_forgotten_in_bounds() -> None:
    class Clock:
        now = 0.0

        def monotonic(self) -> float:
            return self.now

        def time(self) -> float:
            return self.now

    clock = Clock()
    attempts = TokenAttempts(clock)
    pauses = []
    for _ in range(9):
        attempts.failed("10.0.0.1")
        pauses.append(attempts.pause_s("10.0.0.1"))
    assert pauses == [1, 2, 4, 8, 16, 32, PAUSE_S_MAX, PAUSE_S_MAX, PAUSE_S_MAX]
    assert attempts.pause_s("10.0.0.2") == 0
    clock.now += PAUSE_S_MAX
    assert attempts.pause_s("10.0.0.1") == 0
    attempts.succeeded("10.0.0.1")
    attempts.failed("10.0.0.1")
    assert attempts.pause_s("10.0.0.1") == 1
    # A customer's addresses of IPv6 are one, and thousands of addresses are one after a while.
    attempts.failed("2001:db8::1")
    assert attempts.pause_s("2001:db8::2") == 1
    for number in range(2 * ADDRESSES_MAX):
        attempts.failed(f"10.{number >> 8}.{number & 255}.7")
    assert len(attempts._failures) <= ADDRESSES_MAX + 1
    assert attempts.pause_s("10.250.250.250") > 0


# ---- grants ----


@pytest.mark.parametrize("asking", ["a", "b"])
def test_inside_its_grants_either_side_attaches_alone(asking: str) -> None:
    async def work(two: Two) -> None:
        two.clusters["A"].add_topic("l-t").partitions[0].write_values(b"x")
        await linked(two, *(("lead:r-",) if asking == "a" else ()), here=("follow:l-",) if asking == "b" else ())
        proxy, request = (two.a, LEADS) if asking == "a" else (two.b, FOLLOWS)
        planned = await proxy.links.attach("a-to-b", request.model_copy(update={"dry_run": True}))
        assert (planned.missing_grants, [each.topic for each in planned.topics]) == ([], ["r-t"])
        await proxy.links.attach("a-to-b", request)
        assert attached(two) == [["l-"], ["r-"]]
        await two.until("copied", lambda: two.b.status().state == "Following" and two.b.status().partitions)

    on_two(work)


@pytest.mark.parametrize("asking", ["a", "b"])
def test_outside_of_them_it_waits_at_both_sides_until_the_other_operator_grants_it(asking: str) -> None:
    async def work(two: Two) -> None:
        two.clusters["A"].add_topic("l-t").partitions[0].write_values(b"x")
        await linked(two, "lead:other-", here=("follow:other-",))
        asks, asked = (two.a, two.b) if asking == "a" else (two.b, two.a)
        request, right = (LEADS, "lead:r-") if asking == "a" else (FOLLOWS, "follow:l-")
        local, remote = request.local, request.remote
        planned = await asks.links.attach("a-to-b", request.model_copy(update={"dry_run": True}))
        assert planned.missing_grants == [right]
        assert waiting(two.a) == waiting(two.b) == [], "a dry run changes nothing"
        done = await asks.links.attach("a-to-b", request)
        assert done.missing_grants == [right]
        assert attached(two) == [[], []]
        assert waiting(asks) == [(local, "this cluster", [right])]
        assert waiting(asked) == [(remote, "the other cluster", [right])]
        for proxy in (two.a, two.b):
            assert proxy.status().reason == "NOT_GRANTED"
            assert f"isthmus link grant a-to-b --may '{right}'" in (proxy.status().message or "")
        assert asked.links.grants("a-to-b").waiting
        await asked.links.grant("a-to-b", links.ChangeGrants(may=[right]))
        await two.until("attached", lambda: attached(two) == [["l-"], ["r-"]])
        await two.until("nothing waits", lambda: not waiting(two.a) and not waiting(two.b))
        assert two.a.status().reason is None

    on_two(work)


def test_what_waits_is_withdrawn_from_either_side() -> None:
    async def work(two: Two) -> None:
        await linked(two)
        for proxy, local in ((two.a, "l-"), (two.b, "r-")):
            await two.a.links.attach("a-to-b", LEADS)
            assert waiting(two.a)
            await proxy.links.detach("a-to-b", local)
            assert waiting(two.a) == waiting(two.b) == []
        # What this side withdrew while the other was away goes there as well.
        await two.a.links.attach("a-to-b", LEADS)
        await two.a.links.detach("a-to-b", "l-", local_only=True)
        assert waiting(two.b)
        await two.b.links.detach("a-to-b", "r-")
        assert waiting(two.b) == []

    on_two(work)


def test_operators_who_ask_for_the_same_pair_agree() -> None:
    async def work(two: Two) -> None:
        await linked(two)
        await two.a.links.attach("a-to-b", LEADS)
        await two.b.links.attach("a-to-b", FOLLOWS)
        assert attached(two) == [["l-"], ["r-"]]
        assert waiting(two.a) == waiting(two.b) == []

    on_two(work)


def test_what_is_cut_or_set_for_it_is_granted_on_its_own() -> None:
    async def work(two: Two) -> None:
        two.clusters["A"].add_topic("l-t").partitions[0].write_values(b"x")
        two.clusters["B"].add_topic("r-t").partitions[0].write_values(b"another")
        await linked(two, "lead:r-")
        request = LEADS.model_copy(update={"truncate_target": True, "disable_transaction_verification": True})
        planned = await two.a.links.attach("a-to-b", request.model_copy(update={"dry_run": True}))
        assert planned.missing_grants == ["replace:r-", "broker-settings"]
        await two.a.links.attach("a-to-b", request)
        assert waiting(two.b) == [("r-", "the other cluster", ["replace:r-", "broker-settings"])]
        await two.b.links.grant("a-to-b", links.ChangeGrants(may=["replace:r-", "broker-settings"]))
        await two.until("attached", lambda: attached(two) == [["l-"], ["r-"]])

    on_two(work)


def test_a_word_to_cut_waits_with_what_it_was_given_for(tmp_path: Path) -> None:
    async def work(two: Two) -> None:
        two.b.context.data_directory = tmp_path  # for what is cut
        source = two.clusters["A"].add_topic("l-t").partitions[0]
        source.write_values(b"x")
        await linked(two, "lead:r-")
        await two.a.links.attach("a-to-b", LEADS)
        await two.until("copied", lambda: "r-t" in two.clusters["B"].found and two.clusters["B"].partition("r-t").end)
        await two.b.links.detach("a-to-b", "r-")
        await two.b.links.release(AlterNamespace(ResourceType.TOPIC, "r-", reserved=False))
        two.clusters["B"].partition("r-t").write_values(b"B's own")
        planned = await two.a.links.attach("a-to-b", LEADS.model_copy(update={"dry_run": True}))
        assert [each.action for each in planned.topics] == ["refuse"]
        agreed = LEADS.model_copy(update={"cut": planned.cut})
        assert (await two.a.links.attach("a-to-b", agreed)).missing_grants == ["replace:r-"]
        assert waiting(two.b) == [("r-", "the other cluster", ["replace:r-"])]
        await two.b.links.grant("a-to-b", links.ChangeGrants(may=["replace:r-"]))
        await two.until("attached", lambda: attached(two) == [["l-"], ["r-"]])
        (mapping,) = two.controls["B"].state.links["a-to-b"].mappings
        assert [each.token for each in mapping.cuts] == [planned.topics[0].cut]

    on_two(work)


def test_what_an_operator_says_is_shared_waits_too() -> None:
    async def work(two: Two) -> None:
        await linked(two)
        said = links.SharedUntil(topic="r-t", partition=0, offset=7)
        for word in ("before", "after"):
            asked = LEADS.model_copy(update={"cut": word, "shared_until": [said]})
            await two.a.links.attach("a-to-b", asked)
            (waits,) = two.controls["A"].state.links["a-to-b"].waiting
            assert (waits.cut, waits.shared_until) == (word, (("r-t", 0, 7),)), "of what was asked last"
        (there,) = two.controls["B"].state.links["a-to-b"].waiting
        assert (there.cut, there.truncate_target) == (None, True)
        assert there.shared_until == (), "nothing of that is the asked side's"

    on_two(work)


def test_revoked_what_is_attached_goes_on_and_nothing_comes() -> None:
    async def work(two: Two) -> None:
        await linked(two, "lead:r-")
        await two.a.links.attach("a-to-b", LEADS)
        found = await two.b.links.revoke("a-to-b", links.ChangeGrants(may=["lead:r-"]))
        assert (found.may, found.attached) == ([], ["lead:r-"])
        assert attached(two) == [["l-"], ["r-"]]
        await two.b.links.detach("a-to-b", "r-")
        await two.a.links.attach("a-to-b", LEADS)
        assert attached(two) == [[], []]
        assert waiting(two.b) == [("r-", "the other cluster", ["lead:r-"])]
        with pytest.raises(OperationError, match="has no grant"):
            await two.b.links.revoke("a-to-b", links.ChangeGrants(may=["lead:r-"]))

    on_two(work)


def test_links_of_before_keep_what_they_have_attached_and_nothing_more() -> None:
    async def work(two: Two) -> None:
        for control in two.controls.values():
            control.state = control.state.evolve(level=CONSENT - 1)
        await two.create()
        await two.connected()
        await two.a.links.attach("a-to-b", LEADS)
        for control in two.controls.values():
            control.apply(RaiseLevel(CONSENT))
        assert two.a.links.grants("a-to-b").attached == ["follow:l-"]
        assert two.b.links.grants("a-to-b").attached == ["lead:r-"]
        more = links.Attach(local="l2-", remote="r2-", role="leader")
        assert (await two.a.links.attach("a-to-b", more)).missing_grants == ["lead:r2-"]
        assert (await two.a.links.attach("a-to-b", LEADS)).missing_grants == []

    on_two(work)


def test_a_peer_is_told_of_no_topics_that_it_may_not_follow_and_plans_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever leaves out to ask first, as another implementation may."""

    async def work(two: Two) -> None:
        two.clusters["A"].add_topic("secret-t").partitions[0].write_values(b"x")
        two.clusters["B"].add_topic("prod-t").partitions[0].write_values(b"x")
        await linked(two)

        async def nothing(*_: Any) -> tuple[str, ...]:
            return ()

        for proxy in (two.a, two.b):
            monkeypatch.setattr(proxy.plugin.parts.service.consents, "ask", nothing)
        cases = (
            (two.b, links.Attach(local="mine-", remote="secret-", role="follower")),
            (two.a, links.Attach(local="mine-", remote="prod-", role="leader", truncate_target=True)),
            (two.a, links.Attach(local="User:a", remote="User:b", role="leader", type="principal")),
            (two.a, links.Attach(local="g-", remote="g-", role="leader", type="consumer-group")),
            (
                two.b,
                links.Attach(
                    local="g-",
                    remote="g-",
                    role="follower",
                    type="consumer-group",
                    disable_transaction_verification=True,
                ),
            ),
        )
        for proxy, request in cases:
            with pytest.raises(OperationError) as raised:
                await proxy.links.attach("a-to-b", request)
            assert raised.value.code == "NOT_GRANTED"
        assert attached(two) == [[], []]
        connection = two.b.plugin.parts.peers.connections("a-to-b")[0]
        asked: tuple[Question[Any], ...] = (
            calls.LedTopics(""),
            calls.LogEnds(""),
            calls.TopicSettings("secret-"),
            calls.LeftOut(ResourceType.TOPIC, "secret-", "_"),
            calls.LeftOut(ResourceType.CONSUMER_GROUP, "", "_"),
        )
        for question in asked:
            with pytest.raises(LinkRejected) as rejected:
                await connection.call(question)
            assert rejected.value.code == "NOT_GRANTED"
        with pytest.raises(OperationError, match="__consumer_offsets"):
            await two.a.links.alter("a-to-b", links.AlterLink(offsets_topic="whole"))
        assert not two.controls["B"].state.links["a-to-b"].offsets_topics

    on_two(work)


def test_a_peer_is_told_what_is_truncated_of_its_own_alone() -> None:
    async def work(two: Two) -> None:
        await linked(two, here=("follow:l-",))
        control = two.controls["A"]
        phase = TruncationPhase.REFILLING
        control.state = control.state.evolve(
            truncations={
                name: Truncation("x", name, str(uuid.uuid4()), Reason("", ""), (), None, "p", "", 0, phase, 0)
                for name in ("l-t", "secret-t")
            }
        )
        answer = await two.b.plugin.parts.peers.connections("a-to-b")[0].call(calls.LedTopics("l-"))
        control.state = control.state.evolve(truncations={})
        assert answer.truncating == ("l-t",)

    on_two(work)


def test_a_promotion_says_what_going_back_takes() -> None:
    async def work(two: Two) -> None:
        await linked(two, "lead:r-", here=("follow:l-",))
        await two.a.links.attach("a-to-b", LEADS)
        wanted = links.Promote(namespaces=[links.NamespaceRef(local="r-")], dry_run=True)

        async def lacks() -> list[str]:
            report = await two.b.links.promote("a-to-b", wanted, lambda done, of: None)
            return report.namespaces[0].missing_grants

        assert await lacks() == ["lead:l-"]
        assert not two.a.status().waiting
        await two.a.links.grant("a-to-b", links.ChangeGrants(may=["lead:l-"]))
        assert await lacks() == []

    on_two(work)


def test_a_link_that_was_made_is_connected() -> None:
    async def work(two: Two) -> None:
        await two.create(token=await token(two))
        assert two.a.plugin.parts.peers.connections("a-to-b")

    on_two(work)


def test_a_pair_that_the_other_side_let_go_it_may_take_up_again() -> None:
    """As a promotion does that is abandoned."""

    async def work(two: Two) -> None:
        await linked(two, here=("follow:l-",))
        await two.b.links.attach("a-to-b", FOLLOWS)
        await two.a.links.revoke("a-to-b", links.ChangeGrants(may=["follow:l-"]))
        await two.b.links.detach("a-to-b", "r-")
        await two.b.links.attach("a-to-b", FOLLOWS)
        assert attached(two) == [["l-"], ["r-"]]
        two.controls["A"].apply(DetachNamespace("a-to-b", ResourceType.TOPIC, "l-"))
        assert two.a.links.grants("a-to-b").attached == []

    on_two(work)


def test_odd_tokens_are_one_closed_connection() -> None:
    async def work(two: Two) -> None:
        for odd in ([], {}, 7, "x" * 10_000, None):
            hello = {"purpose": "create-link", "link_id": "x", "token": odd}
            host, port = two.b.address.rsplit(":", 1)
            context: Any = two.a.context
            two.b.context.link_policy = NO_LOCAL
            with pytest.raises(Exception, match="token"):
                await LinkConnection.dial(
                    host,
                    int(port),
                    clock=context.clock,
                    supervision=context.supervision,
                    hello=hello,
                    secret=b"",
                    identity={},
                )

    on_two(work)
