"""Commands as records: one form, and a clear line between wrong and newer."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from isthmus_control import commands as c
from isthmus_control.acls import AclBinding
from isthmus_control.clock import Hlc, Register
from isthmus_control.codec import DERIVED, MalformedValue, canonical, from_json, parse
from isthmus_control.demands import Confirm, Consistency, Demands
from isthmus_control.grants import parse_grants
from isthmus_control.model import (
    AckTerms,
    AttachRequest,
    BrokerClaim,
    HeldAt,
    LinkMode,
    LinkSettings,
    NamespaceKey,
    OffsetsCopy,
    OffsetsForm,
    OnSourceDelete,
    OnSourceLoss,
    Reason,
    ResourceType,
    Role,
    SyncState,
    TopicEnd,
    TopicState,
)
from isthmus_control.origins import Ended, Origin, OriginEpoch, OriginRange
from isthmus_control.proofs import FoundDifference, Proof
from isthmus_control.sealing import Seal, Sealed
from isthmus_control.source_losses import LossState, LostCommit
from isthmus_control.truncations import (
    MovedOffset,
    PartitionCut,
    PartitionView,
    SalvageFile,
    Succession,
    TruncationPhase,
)

UID = str(uuid.UUID(int=7))
TOPIC = ResourceType.TOPIC
TOLD = (
    OriginRange(Origin("A", UID), 5, 7, 1_000, (OriginEpoch(3, 0),), missing_before=6, assumed=True),
    OriginRange(Origin("A", UID, UID), 7, 7, 1_000, ended=Ended.REVERSED),
    OriginRange(Origin("B", UID, UID), 7, None, 2_000, (OriginEpoch(1, 7), OriginEpoch(2, 9))),
)
AT = (c.PartitionOffset("t", UID, 0, 5), c.PartitionOffset("t", UID, 1, 6))

GRANTS = parse_grants("follow:a-,lead:consumer-group:ä,broker-settings")

BODIES: list[c.Body] = [
    c.CreateNamespace(TOPIC, "a-", True, "why", True),
    c.AlterNamespace(ResourceType.PRINCIPAL, "User:ä", False),
    c.DeleteNamespace(ResourceType.CONSUMER_GROUP, ""),
    c.CreateLink("l", UID, "B", True, ("b:1",), (), Sealed(Seal.NONE, "", "c2VjcmV0"), config={"k": "v"}),
    c.AlterLink("l", LinkMode.SYNCHRONOUS, False, (), None, None, {"k": None}),
    c.AlterLink("l"),
    c.BeginSecretRotation("l", UID, UID, "", Sealed(Seal.NONE, "", "AAAA"), True),
    c.FinishSecretRotation("l", UID, UID),
    c.AbandonSecretRotation("l", UID, UID),
    c.SealToken("ab" * 8, Sealed(Seal.AES_256_GCM, "ab12cd34", "AAAA")),
    c.SealSecret("l", UID, UID, Sealed(Seal.AES_256_GCM, "ab12cd34", "AAAA")),
    c.MergeLink(
        "l",
        UID,
        LinkSettings(
            Register(LinkMode.ASYNCHRONOUS, Hlc(1, 2, "A")),
            {"B": Register(("b:1",), Hlc(3, 0, "B"))},
            {"k": Register(None, Hlc(4, 0, "B"))},
        ),
    ),
    c.DeleteLink("l"),
    c.CreateNamespace(TOPIC, "a-", demands=Demands(Consistency.STRICT)),
    c.AlterDemands(TOPIC, "a-", Consistency.AVAILABLE),
    c.AlterDemands(TOPIC, "a-", None, None, 300_000, Confirm(1, ("l", "m"))),
    c.AttachNamespace("l", TOPIC, "a-", "b-", Role.FOLLOWER, (UID,), True, True),
    c.AttachNamespace("l", TOPIC, "a-", "b-", Role.FOLLOWER, on_source_loss=OnSourceLoss.HOLD),
    c.AlterMapping("l", TOPIC, "a-", OnSourceLoss.CUT),
    c.AlterMapping("l", TOPIC, "a-", None, OnSourceDelete.DELETE),
    c.DetachNamespace("l", TOPIC, "a-"),
    c.CreateLink("l", UID, "B", False, token="ab" * 8),
    c.CreateLink("l", UID, "B", True, ("b:1",), grants=GRANTS),
    c.CreateToken("ab" * 8, "cd" * 32, Sealed(Seal.NONE, "", "c2VjcmV0"), GRANTS, 9_000),
    c.DeleteToken("ab" * 8),
    c.ChangeGrants("l", GRANTS, GRANTS[:1]),
    c.RequestAttach("l", AttachRequest(TOPIC, "a-", "b-", Role.LEADER, True, on_source_delete=OnSourceDelete.DELETE)),
    c.RequestAttach(
        "l", AttachRequest(TOPIC, "a-", "b-", Role.FOLLOWER, True, cut="0a1b", shared_until=(("a-t", 0, 7),))
    ),
    c.WithdrawAttach("l", TOPIC, "a-", True),
    c.AttachNamespace("l", TOPIC, "a-", "b-", Role.FOLLOWER, for_peer=True),
    c.DetachNamespace("l", TOPIC, "a-", True),
    c.HoldBrokerConfig("n", "false", None),
    c.ReleaseBrokerConfig("n"),
    c.BeginPromotion("l", TOPIC, "a-", {"a-t": {"retention.ms": "1"}}, UID),
    c.BeginPromotion("l", TOPIC, "a-", {}, UID, (NamespaceKey(ResourceType.CONSUMER_GROUP, "g-"),)),
    c.BeginPromotion("l", TOPIC, "a-", {}, UID, (), True),
    c.DecidePromotion(TOPIC, "a-", UID, True),
    c.EndPromotion(TOPIC, "a-", UID),
    c.AbandonPromotion(TOPIC, "a-", UID),
    c.BeginPromotion("l", TOPIC, "a-", {}, UID, reversal=UID),
    c.AnnounceReversal("l", TOPIC, "a-", (NamespaceKey(ResourceType.CONSUMER_GROUP, "g-"),), UID, UID, 1_000, 5_000),
    c.AnnounceReversal("l", TOPIC, "a-", (), UID, UID, 0, 1, True),
    c.AnnounceReversal("l", TOPIC, "a-", (), UID, UID, 0, 1, move_clients_ms=5),
    c.BeginPromotion("l", TOPIC, "a-", {}, UID, move_clients_ms=5),
    c.MoveClients("l", TOPIC, "a-", "b-", 5),
    c.EndClientMove("l", TOPIC, "a-", 7),
    c.ApplyTree(1, "cluster-1", ("a-",), (4, 8), "{}"),
    c.LeaveTree(1),
    c.ChooseTarget(1, 4, "cluster-2"),
    c.ClaimDistributor(4, UID),
    c.HoldReversal("l", UID, UID),
    c.HandOver("l", UID, UID, (TopicEnd("a-t", (0, 7)),)),
    c.TakeBack("l", UID),
    c.EndReversal("l", UID),
    c.AbandonReversal("l", UID),
    c.AcceptReversal("l", TOPIC, "a-", (), UID, {"a-t": {"retention.ms": "1"}}),
    c.AcceptReversal("l", TOPIC, "a-", (), UID, {}, HeldAt(0, 7)),
    c.SetOffsetsTopic("l", Role.LEADER, OffsetsCopy(OffsetsForm.REDACTED, ("app-*", "one"))),
    c.SetOffsetsTopic("l", Role.FOLLOWER, None),
    c.SetFollowerTopic("l", "t", "s", UID, TopicState.REFUSED, None, Reason("CODE", "words")),
    c.SetFollowerTopic("l", "t", "s", UID, TopicState.FOLLOWING, UID, None, {"retention.ms": "5"}),
    c.CompactFollowerTopic("t", UID, True, 7),
    c.ForgetFollowerTopic("l", "t"),
    c.RecreateFollowerTopic("l", "t", UID),
    c.DeleteFollowerTopic("l", "t", UID, UID, UID),
    c.KeepFollowerTopic("l", "t", UID, UID),
    c.NoteSourceLog("l", f"{UID}/0", (c.FollowedTopic("t", UID),)),
    c.FollowerTopicDeleted("l", "t", UID),
    c.OpenProvenance("l", AT),
    c.CloseProvenance(AT),
    c.TruncateProvenance(AT),
    c.RecordSourceEpochs((c.PartitionEpoch("t", UID, 0, 3, 9),)),
    c.RecordSourceEpochs.by_topic([c.PartitionEpoch("t", UID, 0, 3, 9), c.PartitionEpoch("t", UID, 1, 4, 7)]),
    c.CloseProvenance(AT, Ended.FOLLOWS),
    c.BeginTerm((c.TopicTerms("t", UID, {0: c.TermStart(5, 3), 11: c.TermStart(0, 0)}),)),
    c.BeginTerm((c.TopicTerms("t", UID, {0: c.TermStart(5, 3)}),), Ended.FAILED_OVER),
    c.RecordLogEpochs((c.TopicEpochs("t", UID, (c.LogEpochs(0, (OriginEpoch(3, 5), OriginEpoch(4, 9))),)),)),
    c.RecordOrigins("l", (c.ToldTopic("t", UID, (c.ToldPartition(0, 5, TOLD),)),)),
    c.RecordOriginEpochs("l", (c.TopicEpochs("t", UID, (c.LogEpochs(0, (OriginEpoch(3, 5),)),)),)),
    c.DropEpochs((c.TopicOffsets("t", UID, {0: 5, 1: 6}),)),
    c.ForgetHistories((c.GoneTopic("t", UID),)),
    c.DoubtDeletions(AT),
    c.SettleDeletions(AT),
    c.RecordProofs((c.PartitionProof("t", UID, 0, Proof(9, 1, 2, 5)),)),
    c.RecordProofs((c.PartitionProof("t", UID, 0, Proof(9, 1, 2, 5, FoundDifference(9, 12, 3, "words"))),)),
    c.AcknowledgeDifferences(AT),
    c.BeginTruncation("l", "t", UID, Reason("CODE", "words"), (PartitionView(1, 5),), "1000", "p", UID),
    c.BeginTruncation(
        "l", "t", UID, Reason("CODE", "words"), (PartitionView(1, 5),), None, "p", UID, Succession(UID, UID, (7,))
    ),
    c.TakeOverTruncation("t", UID, "p", UID),
    c.AdvanceTruncation(
        "t",
        UID,
        UID,
        TruncationPhase.RESTORING,
        (PartitionCut(0, 1, 2, 3),),
        (SalvageFile(0, "p", "/x", 1),),
        UID,
        (MovedOffset("g", 0, 9, 5),),
        1,
    ),
    c.GiveUpTruncation("t", UID),
    c.StopCatchingUp("t", UID, UID, Reason("CODE", "words")),
    c.HoldUpTruncation("t", UID, UID, None),
    c.RecordSourceLosses(
        "l",
        UID,
        (
            c.FoundLoss(TOPIC, "a-", "a-t", UID, 0, 5, 9, 4, LossState.HELD),
            c.FoundLoss(
                ResourceType.CONSUMER_GROUP,
                "g-",
                "__consumer_offsets",
                "",
                7,
                5,
                9,
                1,
                LossState.CUT,
                1,
                (LostCommit("g-1", "a-t", 0, 8, None),),
                SalvageFile(7, "p", "/x", 1),
            ),
        ),
    ),
    c.ReleaseSourceLosses("a-t", UID),
    c.AcknowledgeSourceLosses("l", 7),
    c.RecordAcls("l", "User:a-", (AclBinding(2, "t", 3, "User:a-1", "*", 3, 3),), ()),
    c.RecordSync("l", UID, SyncState.IN_SYNC, (c.PartitionSync("t", UID, 0, 5), c.PartitionSync("t", UID, 1, 6))),
    c.RecordSync("l", UID, SyncState.OUT_OF_SYNC, (c.PartitionSync("t", UID, 0, 5),), Reason("CODE", "words")),
    c.DegradeSync("l", UID, (c.PartitionSync("t", UID, 0, 5),), 300_000),
    c.RecordClaims("l", UID, (c.PartitionClaim("t", UID, 0, 1_000, 5),)),
    c.RecordClaims("l", UID, (c.PartitionClaim("t", UID, 0, 1_000, 5, AckTerms(1, {"l": "B", "m": "C"}, 5_000)),)),
    c.RegisterProducerIds("B", 4),
    c.ClaimBrokers("p", UID, (BrokerClaim(1, "h", 2),), True, "h:3", 10_000, "1", -1),
    c.RenewLease("p", UID, 5),
    c.ReleaseLease("p", UID),
    c.ExpireLease("p", UID, 5),
    c.RaiseLevel(1),
    c.Snapshot(511, "ab", "cd"),
    c.AcceptLog(1_700_000_000_000),
    c.EnablePlugin(TOPIC, "a-", "capture", '{"sampling":0.5}', 2, 0),
    c.ConfigurePlugin(TOPIC, "a-", "capture", "{}", 2),
    c.DisablePlugin(TOPIC, "a-", "capture"),
]


def record(**changes: Any) -> bytes:
    raw = {"v": 1, "id": UID, "kind": "delete-link", "at_ms": 5, "by": "p", "seen": -1, "body": {"name": "l"}}
    return json.dumps({key: value for key, value in {**raw, **changes}.items() if value != "gone"}).encode()


def test_every_kind_has_an_example() -> None:
    assert {type(body) for body in BODIES} == set(c.KINDS.values())


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.KIND)
def test_round_trip(body: c.Body) -> None:
    command = c.Command(UID, 5, "p", 3, body)
    value = c.encode(command)
    assert c.decode(value) == command
    assert c.decode(memoryview(value)) == command
    assert c.encode(c.decode(value)) == value
    raw = json.loads(value)
    assert (raw["v"], raw["kind"]) == (body.VERSION, body.KIND)


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"\xff",
        b"{",
        b"[]",
        b"7",
        b"{}",
        b'{"v":NaN}',
        b'{"v":1,"v":1}',
        b"[" * 100_000,
        record(v="1"),
        record(v=True),
        record(v=0),
        record(kind=None),
        record(by="gone"),
        record(id="gone"),
        record(id="x"),
        record(id=UID.upper().replace("0", "A")),
        record(at_ms=1.5),
        record(seen="gone"),
        record(body="gone"),
        record(body={}),
        record(body={"name": 7}),
        record(by="\ud800"),
        record(kind="create-namespace", body={"type": "topic"}),
        record(kind="open-provenance", body={"link": "l", "partitions": [[]]}),
        record(kind="open-provenance", body={"link": "l", "partitions": {}}),
    ],
)
def test_what_is_no_command_is_bad(value: bytes) -> None:
    with pytest.raises(c.BadRecord):
        c.decode(value)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (record(kind="promote", id="not even a uuid"), "'promote'"),
        (record(v=2), "version 2"),
        (record(v=2, body=7), "version 2"),
        (record(extra=1), "'extra'"),
        (record(body={"name": "l", "force": True}), "'force'"),
        (record(kind="delete-namespace", body={"type": "schema", "prefix": "x"}), "'schema'"),
    ],
)
def test_what_a_newer_proxy_wrote_is_not_guessed_at(value: bytes, words: str) -> None:
    with pytest.raises(c.NewerRecord, match=words) as caught:
        c.decode(value)
    assert "'p'" in str(caught.value)


def test_secrets_are_not_in_the_repr() -> None:
    body = BODIES[3]
    assert "c2VjcmV0" not in repr(body)
    assert b"c2VjcmV0" in c.encode(c.Command(UID, 5, "p", 3, body))


@dataclass(frozen=True)
class Shape:
    pairs: Mapping[int, str]
    fixed: tuple[int, str]
    computed: int = field(default=0, metadata=DERIVED)


def test_canonical_form_has_one_order() -> None:
    assert canonical({2: "b", 1: "a"}) == canonical({1: "a", 2: "b"}) == b'[[1,"a"],[2,"b"]]'
    assert canonical({"b": 1, "a": 2}) == b'{"a":2,"b":1}'
    assert canonical({}) == b"{}"
    with pytest.raises(TypeError):
        canonical({1: 1.5})


@pytest.mark.parametrize(
    "raw",
    [
        '{"pairs": [[1]], "fixed": [1, "a"]}',
        '{"pairs": [[1, "a"], [1, "b"]], "fixed": [1, "a"]}',
        '{"pairs": {"1": "a"}, "fixed": [1, "a"]}',
        '{"pairs": {}, "fixed": [1]}',
        '{"pairs": {}, "fixed": 1}',
        '{"pairs": 1, "fixed": [1, "a"]}',
        "[]",
    ],
)
def test_shapes_are_checked(raw: str) -> None:
    with pytest.raises(MalformedValue):
        from_json(Shape, parse(raw.encode()))


def test_computed_fields_are_not_written() -> None:
    assert canonical(Shape({1: "a"}, (1, "b"), 7)) == b'{"fixed":[1,"b"],"pairs":[[1,"a"]]}'
    assert from_json(Shape, parse(b'{"fixed":[1,"b"],"pairs":[[1,"a"]]}')) == Shape({1: "a"}, (1, "b"))
