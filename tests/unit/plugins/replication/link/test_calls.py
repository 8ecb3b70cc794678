"""The calls of the link, byte for byte: proxies of other versions say the same."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

import pytest
from support.peers import wire_of
from support.replicas import on_replicas

from isthmus_control.acls import AclBinding
from isthmus_control.clock import Hlc, Register
from isthmus_control.commands import ToldPartition
from isthmus_control.model import (
    AckTerms,
    AgreedCut,
    HeldAt,
    LinkMode,
    LinkSettings,
    OffsetsForm,
    OnSourceDelete,
    OnSourceLoss,
    ResourceType,
    Role,
    TopicEnd,
)
from isthmus_control.origins import Ended, Origin, OriginEpoch, OriginRange
from isthmus_plugins.replication.assembly import assemble
from isthmus_plugins.replication.link import calls
from isthmus_plugins.replication.link.call_codec import MalformedCall, Question, answer_to, by_methods, question_of
from isthmus_protocol.link import VERSION_MAX, VERSION_MIN

TOPIC_ID = "de383784-26d0-b944-a286-3a7f3b5f3d86"
OTHER_ID = "91b1078e-926b-aeaf-e79a-27e68ab12c32"
SETTINGS = LinkSettings(Register(LinkMode.SYNCHRONOUS, Hlc(1795629484070, 0, "A")), {}, {})
SETTINGS_JSON = (
    '{"mode":{"value":"synchronous","written":{"wall_ms":1795629484070,"counter":0,"node":"A"}},'
    '"addresses":{},"config":{}}'
)
COPY = calls.CopyChoice(OffsetsForm.REDACTED, ("app-*",))
LED = calls.LedTopic("l-t", TOPIC_ID, 1)
ORIGINS = calls.Origins(
    ToldPartition(
        0,
        0,
        (
            OriginRange(Origin("A", TOPIC_ID), 0, 5, 1795629484070, (OriginEpoch(2, 0),), ended=Ended.DETACHED),
            OriginRange(Origin("A", OTHER_ID, "term"), 5, None, 1795629484071),
        ),
    ),
    0,
    7,
)
ORIGINS_JSON = (
    f'{{"said":{{"partition":0,"offset":0,"ranges":[{{"origin":["A","{TOPIC_ID}",""],"start_offset":0,"end_offset":5,'
    '"since_ms":1795629484070,"epochs":[[2,0]],"ended":"detached"},'
    f'{{"origin":["A","{OTHER_ID}","term"],"start_offset":5,"end_offset":null,"since_ms":1795629484071}}]}},'
    '"log_start":0,"log_end":7}'
)
PENDING = calls.Pending(5, 6, "g", "r-t", 0, 7, "m", 8)
TERMS = AckTerms(1, {"a-to-b": "B", "a-to-c": "C"}, 500)
TERMS_JSON = '{"count":1,"links":{"a-to-b":"B","a-to-c":"C"},"degrade_after_ms":500}'

# Of each question: what it and its answers look like on the wire.
CALLS: list[tuple[Question[Any], str, list[tuple[Any, str]]]] = [
    (
        calls.Topology(),
        "{}",
        [
            (
                calls.TopologyAnswer((calls.Proxy("b", "127.0.0.1:1", "all"), calls.Proxy("c", None, (1, 2)))),
                '{"proxies":[{"proxy":"b","link_address":"127.0.0.1:1","brokers":"all"},'
                '{"proxy":"c","link_address":null,"brokers":[1,2]}]}',
            )
        ],
    ),
    (
        calls.BeginSecretRotation(OTHER_ID, ""),
        f'{{"secret_id":"{OTHER_ID}","current":""}}',
        [(calls.Done(), "{}")],
    ),
    (calls.FinishSecretRotation(OTHER_ID), f'{{"secret_id":"{OTHER_ID}"}}', [(calls.Done(), "{}")]),
    (
        calls.MergeSettings(SETTINGS),
        f'{{"settings":{SETTINGS_JSON}}}',
        [(calls.MergeSettingsAnswer(SETTINGS), f'{{"settings":{SETTINGS_JSON}}}')],
    ),
    (calls.TryMergeSettings(SETTINGS), f'{{"settings":{SETTINGS_JSON},"dry_run":true}}', [(calls.Done(), "{}")]),
    (
        calls.CreateLink("a-to-b", OTHER_ID, addresses=("h:1",), producer_id_ranges={"A": 7}, offsets_topic=COPY),
        f'{{"link_name":"a-to-b","link_id":"{OTHER_ID}","addresses":["h:1"],"producer_id_ranges":{{"A":7}},'
        '"offsets_topic":{"form":"redacted","groups":["app-*"]}}',
        [
            (
                calls.CreateLinkAnswer(("h:2",), producer_id_ranges={"A": 7, "B": 8}),
                '{"addresses":["h:2"],"producer_id_ranges":{"A":7,"B":8}}',
            )
        ],
    ),
    (
        calls.CreateLink("a-to-b", OTHER_ID, producer_id_ranges={}),
        f'{{"link_name":"a-to-b","link_id":"{OTHER_ID}","addresses":[],"producer_id_ranges":{{}},"offsets_topic":null}}',
        [],
    ),
    (
        calls.UndoCreateLink("a-to-b", OTHER_ID),
        f'{{"link_name":"a-to-b","link_id":"{OTHER_ID}"}}',
        [(calls.Done(), "{}")],
    ),
    (calls.TellAnchors("x", None), '{"own":"x","heard":null}', [(calls.Done(), "{}")]),
    (calls.TellAnchors("x", "y", "ab"), '{"own":"x","heard":"y","proof":"ab"}', []),
    (calls.DeleteLink(), "{}", [(calls.Done(), "{}")]),
    (
        calls.PlanAttach(ResourceType.TOPIC, "r-", "l-", Role.FOLLOWER, topics=(LED,)),
        '{"type":"topic","local":"r-","remote":"l-","role":"follower","truncate_target":false,'
        f'"disable_transaction_verification":false,"topics":[{{"topic":"l-t","topic_id":"{TOPIC_ID}","partitions":1,'
        '"predecessors":[]}]}',
        [
            (
                calls.PlanAttachAnswer(
                    (
                        calls.PlannedTopic("r-t", "l-t", "refuse", TOPIC_ID, 3, "why"),
                        calls.PlannedTopic(
                            "r-u", "l-u", "cut", partitions=(calls.PlannedPartition(0, 1, 2, 3),), cut="2a32"
                        ),
                    ),
                    (calls.PlannedGroup("gr-1", "gl-1", 2),),
                    calls.PlannedVerification("setting", True, "disable", "what is lost"),
                ),
                f'{{"topics":[{{"topic":"r-t","source_topic":"l-t","action":"refuse","topic_id":"{TOPIC_ID}",'
                '"records_lost":3,"reason":"why"},{"topic":"r-u","source_topic":"l-u","action":"cut","topic_id":null,'
                '"records_lost":0,"reason":null,"partitions":[{"partition":0,"shared":1,"end":2,"source_end":3}],'
                '"cut":"2a32"}],"groups":[{"group":"gr-1","source_group":"gl-1",'
                '"positions_replaced":2}],"transaction_verification":{"setting":"setting","enabled":true,'
                '"action":"disable","message":"what is lost"}}',
            )
        ],
    ),
    (
        calls.PlanAttach(ResourceType.TOPIC, "r-", "l-", Role.FOLLOWER, recovers=True, hold=True, topics=()),
        '{"type":"topic","local":"r-","remote":"l-","role":"follower","truncate_target":false,'
        '"disable_transaction_verification":false,"recovers":true,"hold":true,"topics":[]}',
        [],
    ),
    (
        calls.Attach(ResourceType.TOPIC, "r-", "l-", Role.FOLLOWER, True, False, (TOPIC_ID,)),
        '{"type":"topic","local":"r-","remote":"l-","role":"follower","truncate_target":true,'
        f'"disable_transaction_verification":false,"truncate_topic_ids":["{TOPIC_ID}"]}}',
        [(calls.Done(), "{}")],
    ),
    (
        calls.Attach(ResourceType.TOPIC, "r-", "l-", Role.FOLLOWER, cuts=(AgreedCut(TOPIC_ID, "2a32"),)),
        f'{{"type":"topic","local":"r-","remote":"l-","role":"follower","cuts":[["{TOPIC_ID}","2a32",[]]]}}',
        [],
    ),
    (
        calls.Attach(ResourceType.TOPIC, "l-", "r-", Role.LEADER),
        '{"type":"topic","local":"l-","remote":"r-","role":"leader"}',
        [],
    ),
    (
        calls.Attach(ResourceType.TOPIC, "r-", "l-", Role.FOLLOWER, on_source_loss=OnSourceLoss.HOLD),
        '{"type":"topic","local":"r-","remote":"l-","role":"follower","on_source_loss":"hold"}',
        [],
    ),
    (
        calls.AskAttach(ResourceType.TOPIC, "r-", "l-", Role.FOLLOWER, True, on_source_delete=OnSourceDelete.DELETE),
        '{"type":"topic","local":"r-","remote":"l-","role":"follower","truncate_target":true,'
        '"disable_transaction_verification":false,"dry_run":false,"on_source_delete":"delete"}',
        [(calls.AskAttachAnswer(("lead:r-",)), '{"missing":["lead:r-"]}')],
    ),
    (
        calls.AlterMapping(ResourceType.TOPIC, "r-", OnSourceLoss.CUT),
        '{"type":"topic","local":"r-","on_source_loss":"cut"}',
        [(calls.Done(), "{}")],
    ),
    (
        calls.AlterMapping(ResourceType.TOPIC, "r-", on_source_delete=OnSourceDelete.DELETE),
        '{"type":"topic","local":"r-","on_source_delete":"delete"}',
        [],
    ),
    (
        calls.DeletedTopics((OTHER_ID, TOPIC_ID), "l-"),
        f'{{"topic_ids":["{OTHER_ID}","{TOPIC_ID}"],"prefix":"l-"}}',
        [(calls.DeletedTopicsAnswer((TOPIC_ID,), "log/0"), f'{{"topic_ids":["{TOPIC_ID}"],"log":"log/0"}}')],
    ),
    (
        calls.CheckAcls(ResourceType.PRINCIPAL, "User:b-app-", "User:app-", Role.FOLLOWER),
        '{"type":"principal","local":"User:b-app-","remote":"User:app-","role":"follower"}',
        [(calls.Done(), "{}")],
    ),
    (calls.Detach(ResourceType.TOPIC, "l-"), '{"type":"topic","local":"l-"}', [(calls.Done(), "{}")]),
    (
        calls.DetachCounterpart(ResourceType.TOPIC, "r-"),
        '{"type":"topic","remote":"r-"}',
        [(calls.DetachCounterpartAnswer(True), '{"detached":true}')],
    ),
    (
        calls.LedTopics("l-"),
        '{"prefix":"l-"}',
        [
            (
                calls.LedTopicsAnswer(
                    (calls.LedTopic("l-t", TOPIC_ID, 1, (calls.Predecessor(OTHER_ID, TOPIC_ID, (3,)),)),), ("l-u",)
                ),
                f'{{"topics":[{{"topic":"l-t","topic_id":"{TOPIC_ID}","partitions":1,'
                f'"predecessors":[["{OTHER_ID}","{TOPIC_ID}",[3]]]}}],"truncating":["l-u"]}}',
            )
        ],
    ),
    (
        calls.TopicSettings("l-"),
        '{"prefix":"l-"}',
        [
            (
                calls.TopicSettingsAnswer({"l-t": {"retention.ms": "5", "cleanup.policy": "delete"}}),
                '{"topics":{"l-t":{"retention.ms":"5","cleanup.policy":"delete"}}}',
            )
        ],
    ),
    (
        calls.LogEnds("l-"),
        '{"prefix":"l-"}',
        [
            (
                calls.LogEndsAnswer({"l-t": calls.TopicEnds(TOPIC_ID, (3,))}),
                f'{{"topics":{{"l-t":{{"topic_id":"{TOPIC_ID}","ends":[3]}}}}}}',
            )
        ],
    ),
    (
        calls.Drain(
            TOPIC_ID,
            (calls.AttachedPair(ResourceType.TOPIC, "r-", "l-", Role.FOLLOWER),),
            {"l-t": calls.TopicEnds(TOPIC_ID, (3,))},
            {"l-t": {"retention.ms": "5"}},
            5_000,
            False,
        ),
        f'{{"reversal_id":"{TOPIC_ID}","pairs":[["topic","r-","l-","follower"]],'
        f'"ends":{{"l-t":{{"topic_id":"{TOPIC_ID}","ends":[3]}}}},"settings":{{"l-t":{{"retention.ms":"5"}}}},'
        '"wait_ms":5000,"dry_run":false}',
        [(calls.DrainAnswer(("one", "two"), ("one",)), '{"missing":["one","two"],"not_followed":["one"]}')],
    ),
    (
        calls.Drain(TOPIC_ID, (), {}, {}, 5_000, False, HeldAt(1, 7)),
        f'{{"reversal_id":"{TOPIC_ID}","pairs":[],"ends":{{}},"settings":{{}},"wait_ms":5000,"dry_run":false,'
        '"held_at":[1,7]}',
        [],
    ),
    (
        calls.AskReverse(
            (calls.AttachedPair(ResourceType.TOPIC, "l-", "r-", Role.LEADER),), 1_000, 5_000, True, 60_000, False
        ),
        '{"pairs":[["topic","l-","r-","leader"]],"transactions_wait_ms":1000,"hold_ms":5000,'
        '"disable_transaction_verification":true,"move_clients_ms":60000,"dry_run":false}',
        [
            (
                calls.AskReverseAnswer(("one",), ("two",), ("three",), False),
                '{"refused":["one"],"missing":["two"],"transactions_open":["three"],"reversed":false}',
            )
        ],
    ),
    (
        calls.TakeLead(TOPIC_ID, (calls.AttachedPair(ResourceType.TOPIC, "r-", "l-", Role.LEADER),)),
        f'{{"reversal_id":"{TOPIC_ID}","pairs":[["topic","r-","l-","leader"]]}}',
        [(calls.Done(), "{}")],
    ),
    (
        calls.MoveClients("l-", "r-", 60_000),
        '{"prefix":"l-","to":"r-","for_ms":60000}',
        [(calls.Done(), "{}")],
    ),
    (
        calls.ComesFrom(ResourceType.TOPIC, "l-", calls.NamespaceAt("B", "r-"), 8),
        '{"type":"topic","prefix":"l-","origin":["B","r-"],"hops":8}',
        [
            (
                calls.ComesFromAnswer((calls.NamespaceAt("C", "c-"), calls.NamespaceAt("B", "r-"))),
                '{"path":[["C","c-"],["B","r-"]]}',
            ),
            (calls.ComesFromAnswer(()), '{"path":[]}'),
        ],
    ),
    (
        calls.HandedOver(TOPIC_ID),
        f'{{"reversal_id":"{TOPIC_ID}"}}',
        [(calls.HandedOverAnswer((TopicEnd("l-t", (3, 4)),)), '{"ends":[["l-t",[3,4]]]}')],
    ),
    (
        calls.AbandonReversal(TOPIC_ID, (calls.AttachedPair(ResourceType.TOPIC, "r-", "l-", Role.LEADER),)),
        f'{{"reversal_id":"{TOPIC_ID}","pairs":[["topic","r-","l-","leader"]]}}',
        [(calls.Done(), "{}")],
    ),
    (
        calls.Unconfirmed(),
        "{}",
        [
            (
                calls.UnconfirmedAnswer(
                    {"l-t": 2},
                    (
                        calls.UnconfirmedPartition("l-t", 0, 9, 7, 1500, True),
                        calls.UnconfirmedPartition("l-t", 1, None, None, message="no leader"),
                    ),
                    (calls.UnconfirmedGroup("l-g", 2, 300),),
                ),
                '{"topics":{"l-t":2},"partitions":[["l-t",0,9,7,1500,true,null],'
                '["l-t",1,null,null,null,false,"no leader"]],"groups":[["l-g",2,300,null]]}',
            )
        ],
    ),
    (
        calls.CompletingTransactions(),
        "{}",
        [(calls.CompletingTransactionsAnswer(("payments",)), '{"transactional_ids":["payments"]}')],
    ),
    (
        calls.ChooseOffsetsTopic(calls.CopyChoice(OffsetsForm.ENCRYPTED, ())),
        '{"copy":{"form":"encrypted","groups":[]}}',
        [(calls.Done(), "{}")],
    ),
    (calls.ChooseOffsetsTopic(None), '{"copy":null}', []),
    (
        calls.Acls(
            (calls.NamespaceName("topic", "b-orders-"), calls.NamespaceName("principal", "User:b-app-")),
            (AclBinding(2, "b-orders-1", 3, "User:b-app-1", "*", 3, 3),),
        ),
        '{"namespaces":[["topic","b-orders-"],["principal","User:b-app-"]],'
        '"bindings":[[2,"b-orders-1",3,"User:b-app-1","*",3,3]]}',
        [(calls.Done(), "{}")],
    ),
    (
        calls.PrepareTopics(
            (
                calls.WantedTopic("l-t", TOPIC_ID, "r-t", 1, 3),
                calls.WantedTopic(
                    "l-u",
                    TOPIC_ID,
                    "r-u",
                    2,
                    3,
                    (calls.Predecessor(OTHER_ID, TOPIC_ID, (3, 0)),),
                    {"cleanup.policy": "compact"},
                    calls.ToFill(7, (10, 11)),
                ),
            ),
            ("l-t", "l-u", "l-v"),
            ("l-v",),
        ),
        f'{{"topics":[{{"topic":"l-t","topic_id":"{TOPIC_ID}","remote_topic":"r-t","partitions":1,'
        f'"replication_factor":3}},{{"topic":"l-u","topic_id":"{TOPIC_ID}","remote_topic":"r-u","partitions":2,'
        f'"replication_factor":3,"predecessors":[["{OTHER_ID}","{TOPIC_ID}",[3,0]]],'
        '"configs":{"cleanup.policy":"compact"},"to_fill":{"since":7,"ends":[10,11]}}],'
        '"all":["l-t","l-u","l-v"],"truncating":["l-v"]}',
        [
            (
                calls.PrepareTopicsAnswer(
                    {
                        "l-t": calls.PreparedTopic(True, calls.ReadyTopic("r-t"), leaders=(1,)),
                        "l-u": calls.PreparedTopic(True, calls.ReadyTopic("r-u", 7), "CODE", "why", (1, -1)),
                        "l-v": calls.PreparedTopic(False, code="CODE", message="why"),
                    }
                ),
                '{"topics":{"l-t":{"ready":true,"remote_topic":"r-t","filling":null,"leaders":[1]},'
                '"l-u":{"ready":true,"remote_topic":"r-u","filling":7,"code":"CODE","message":"why","leaders":[1,-1]},'
                '"l-v":{"ready":false,"code":"CODE","message":"why"}}}',
            )
        ],
    ),
    (
        calls.PrepareTopics(
            (calls.WantedTopic("l-t", TOPIC_ID, "r-t", 1, 3, from_first=True),), ("l-t",), holds_new=True
        ),
        f'{{"topics":[{{"topic":"l-t","topic_id":"{TOPIC_ID}","remote_topic":"r-t","partitions":1,'
        '"replication_factor":3,"from_first":true}],"all":["l-t"],"truncating":[],"holds_new":true}',
        [(calls.PrepareTopicsAnswer(), '{"topics":{}}')],
    ),
    (
        calls.OpenStream(1, "r-t", TOPIC_ID, 0),
        f'{{"stream":1,"topic":"r-t","source_topic_id":"{TOPIC_ID}","partition":0}}',
        [
            (
                calls.OpenStreamAnswer(0, end_offset=2, last=calls.LastBatch(1, 2, "fb3b", True), epoch=5),
                '{"start_offset":0,"end_offset":2,"last":[1,2,"fb3b",true,false],"epoch":5}',
            ),
            (
                calls.OpenStreamAnswer(0, end_offset=0, epoch=-1),
                '{"start_offset":0,"end_offset":0,"last":null,"epoch":-1}',
            ),
        ],
    ),
    (
        calls.OpenStream(1, "r-t", TOPIC_ID, 0, ORIGINS),
        f'{{"stream":1,"topic":"r-t","source_topic_id":"{TOPIC_ID}","partition":0,"origins":{ORIGINS_JSON}}}',
        [],
    ),
    (calls.StreamOrigins(1, ORIGINS), f'{{"stream":1,"origins":{ORIGINS_JSON}}}', [(calls.Done(), "{}")]),
    (
        calls.AttachedPairs(),
        "{}",
        [
            (
                calls.AttachedPairsAnswer(
                    (calls.AttachedPair(ResourceType.TOPIC, "l-", "r-", Role.LEADER),),
                    (calls.NamespaceName("topic", "x-"),),
                ),
                '{"pairs":[["topic","l-","r-","leader"]],"reserved":[["topic","x-"]]}',
            )
        ],
    ),
    (
        calls.LogOrigins("l-t"),
        '{"topic":"l-t"}',
        [
            (
                calls.LogOriginsAnswer(TOPIC_ID, (ORIGINS,), False),
                f'{{"topic_id":"{TOPIC_ID}","partitions":[{ORIGINS_JSON}],"compacts":false}}',
            )
        ],
    ),
    (
        calls.LogTails("l-t", TOPIC_ID, (calls.LogTail(0, 2, 5),)),
        f'{{"topic":"l-t","topic_id":"{TOPIC_ID}","tails":[[0,2,5]]}}',
        [
            (
                calls.LogTailsAnswer((calls.LogTailFound("2a32", calls.Times(7, 8)), calls.LogTailFound("cae6"))),
                '{"tails":[{"digest":"2a32","times":[7,8]},{"digest":"cae6"}]}',
            )
        ],
    ),
    (
        calls.CloseStream(1, "CLOSED", "why"),
        '{"stream":1,"code":"CLOSED","message":"why"}',
        [(calls.CloseStreamAnswer(3), '{"end_offset":3}'), (calls.CloseStreamAnswer(), "{}")],
    ),
    (calls.DoubtDeletions(1, 4), '{"stream":1,"offset":4}', [(calls.Done(), "{}")]),
    (
        calls.EndsSeen(400, (calls.SourceEnd(1, 70, 1500),), (2, 3)),
        '{"age_ms":400,"ends":[[1,70,1500]],"unknown":[2,3]}',
        [(calls.Done(), "{}")],
    ),
    (
        calls.EndedTransactions(1, (calls.Began(4611698113055293449, 0),), 2),
        '{"stream":1,"began":[[4611698113055293449,0]],"before":2}',
        [(calls.EndedTransactionsAnswer((4611698113055293449,)), '{"ended":[4611698113055293449]}')],
    ),
    (
        calls.Digest("r-t", 0, 1, 8, "latest", 8),
        '{"topic":"r-t","partition":0,"from":1,"to":8,"level":"latest","until":8}',
        [(calls.DigestAnswer("cae6", 3, 8), '{"digest":"cae6","records":3,"to":8}')],
    ),
    (
        calls.Digest("r-t", 0, 1, 2, "contents"),
        '{"topic":"r-t","partition":0,"from":1,"to":2,"level":"contents"}',
        [],
    ),
    (
        calls.DigestsAt("r-t", 0, 1, 8, "latest", (4, 8)),
        '{"topic":"r-t","partition":0,"from":1,"to":8,"level":"latest","at":[4,8]}',
        [(calls.DigestsAtAnswer(("cae6", "2a32")), '{"digests":["cae6","2a32"]}')],
    ),
    (
        calls.TopicLimits("l-t"),
        '{"topic":"l-t"}',
        [(calls.TopicLimitsAnswer((calls.Ends(0, 3, 2),), True), '{"partitions":[[0,3,2]],"compacts":true}')],
    ),
    (
        calls.Limits("l-t", 0),
        '{"topic":"l-t","partition":0}',
        [
            (
                calls.LimitsAnswer(0, 8, 7, 9, False, TOPIC_ID, True),
                '{"log_start":0,"high_watermark":8,"last_stable_offset":7,"log_end":9,"compacts":false,'
                f'"topic_id":"{TOPIC_ID}","strict":true}}',
            )
        ],
    ),
    (
        calls.EpochEnd("l-t", 0, 0),
        '{"topic":"l-t","partition":0,"epoch":0}',
        [
            (
                calls.EpochEndAnswer(0, 8, 7, 9, False, TOPIC_ID, epoch=4, epoch_end=6),
                '{"log_start":0,"high_watermark":8,"last_stable_offset":7,"log_end":9,"compacts":false,'
                f'"topic_id":"{TOPIC_ID}","strict":false,"epoch":4,"epoch_end":6}}',
            )
        ],
    ),
    (
        calls.CountOffsets("__consumer_offsets", 0, 2),
        '{"topic":"__consumer_offsets","partition":0,"until":2}',
        [(calls.CountOffsetsAnswer(1), '{"records":1}')],
    ),
    (calls.LinkedTopics(), "{}", [(calls.LinkedTopicsAnswer({"l-t": 3}), '{"topics":{"l-t":3}}')]),
    (calls.LinkedGroups(), "{}", [(calls.LinkedGroupsAnswer(("gl-1",)), '{"groups":["gl-1"]}')]),
    (
        calls.Committed(("gl-1",)),
        '{"groups":["gl-1"]}',
        [
            (
                calls.CommittedAnswer({"gl-1": (calls.CommittedAt("l-t", 0, 2, "m"),)}),
                '{"groups":{"gl-1":[["l-t",0,2,"m"]]}}',
            )
        ],
    ),
    (
        calls.HighWatermarks((calls.PartitionName("l-t", 0),)),
        '{"partitions":[["l-t",0]]}',
        [(calls.HighWatermarksAnswer((calls.PartitionEnd("l-t", 0, 5),)), '{"partitions":[["l-t",0,5]]}')],
    ),
    (
        calls.PartitionEnds((calls.PartitionName("l-t", 0),)),
        '{"partitions":[["l-t",0]]}',
        [(calls.PartitionEndsAnswer((calls.PartitionEnd("l-t", 0, 5),)), '{"partitions":[["l-t",0,5]]}')],
    ),
    (
        calls.OffsetsForTimes("l-t", (calls.AtTime(0, 250),)),
        '{"topic":"l-t","partitions":[[0,250]]}',
        [(calls.OffsetsForTimesAnswer((calls.FoundAtTime(0, 2, 260),)), '{"partitions":[[0,2,260]]}')],
    ),
    (
        calls.GroupOffsets(
            2,
            (
                calls.OffsetsPart(
                    1,
                    3,
                    (
                        calls.CommittedOffset("g", "r-t", 0, 7, "m", 0, 3),
                        calls.CommittedOffset("g", "r-t", 1, None, "", 20, 4),
                    ),
                    gone=("h",),
                ),
            ),
            ("r-",),
        ),
        '{"partitions":2,"parts":[{"partition":1,"epoch":3,"positions":[["g","r-t",0,7,"m",0,3],'
        '["g","r-t",1,null,"",20,4]],"gone":["h"]}],"topics":["r-"]}',
        [(calls.GroupOffsetsAnswer(True), '{"holds_back":true}')],
    ),
    (
        calls.GroupOffsets(
            2,
            (
                calls.OffsetsPart(
                    1,
                    3,
                    (),
                    gone=(),
                    upto=calls.Upto(
                        9,
                        8,
                        (
                            calls.Pending(5, 6, "g", "r-t", 0, 7, "m", 8),
                            calls.Pending(5, 6, "g", "r-t", 1, None, "", 8),
                        ),
                        (calls.OpenSince(5, 8),),
                    ),
                ),
            ),
            (),
        ),
        '{"partitions":2,"parts":[{"partition":1,"epoch":3,"positions":[],"gone":[],"upto":9,"settled":8,'
        '"pending":[[5,6,"g","r-t",0,7,"m",8],[5,6,"g","r-t",1,null,"",8]],"open":[[5,8]]}],"topics":[]}',
        [],
    ),
    (
        calls.GroupOffsets(
            2,
            (
                calls.OffsetsPart(0, 0, (), whole=calls.WholePart(True, False, ("r-u",), True)),
                calls.OffsetsPart(0, 0, (), whole=calls.WholePart(False, True), upto=calls.Upto(None, 0)),
            ),
            (),
        ),
        '{"partitions":2,"parts":[{"partition":0,"epoch":0,"positions":[],"begin":true,"end":false,'
        '"held_back":["r-u"],"confirm":true},{"partition":0,"epoch":0,"positions":[],"begin":false,"end":true,'
        '"held_back":[],"confirm":false,"upto":null,"settled":0,"pending":[],"open":null}],"topics":[]}',
        [],
    ),
    (
        calls.GroupOffsets(
            2, (calls.OffsetsPart(0, 3, (), whole=calls.WholePart(True, lost=calls.LostEnd(5, 9, 2, ("gr-",)))),), ()
        ),
        '{"partitions":2,"parts":[{"partition":0,"epoch":3,"positions":[],"begin":true,"end":false,"held_back":[],'
        '"confirm":false,"lost":{"from_offset":5,"to_offset":9,"epoch":2,"strict":["gr-"]}}],"topics":[]}',
        [],
    ),
    (
        calls.ConfirmedCommits(7),
        '{"partition":7}',
        [
            (calls.ConfirmedCommitsAnswer(2, 9), '{"epoch":2,"upto":9}'),
            (calls.ConfirmedCommitsAnswer(), '{"epoch":-1,"upto":-1}'),
        ],
    ),
    (calls.GroupApplied((calls.Applied(1, 0, 5),)), '{"parts":[[1,0,5]]}', [(calls.Done(), "{}")]),
    (
        calls.GroupPending(),
        "{}",
        [
            (
                calls.GroupPendingAnswer(
                    {"g": calls.Waiting(1, 0, None, None), "h": calls.Waiting(2, 1010, "CODE", "why")}
                ),
                '{"groups":{"g":[1,0,null,null],"h":[2,1010,"CODE","why"]}}',
            )
        ],
    ),
    (calls.EndGroupOffsets(None), '{"partitions":null}', [(calls.Done(), "{}")]),
    (calls.EndGroupOffsets((1, 2)), '{"partitions":[1,2]}', []),
    (
        calls.Decide(
            (
                calls.Decision(
                    "app",
                    4,
                    3,
                    2,
                    calls.LogPlace(5, 6, 7),
                    (
                        calls.DecidedPlace("r-t", 0, 7, (calls.Earlier(1, 0, 5),)),
                        calls.DecidedPlace("__consumer_offsets", 1, 8),
                    ),
                    True,
                ),
            )
        ),
        '{"decisions":[{"id":"app","producer_id":4,"epoch":3,"data_epoch":2,"at":[5,6,7],'
        '"places":[["r-t",0,7,[[1,0,5]]],["__consumer_offsets",1,8,[]]],"again":true}]}',
        [(calls.DecideAnswer(), "{}"), (calls.DecideAnswer(("r-t",)), '{"unfollowed":["r-t"]}')],
    ),
    (
        calls.SourceLosses(
            (
                calls.SaidLoss(
                    7, "topic", "l-t", "r-t", 0, 90, 100, 10, 0, "cut", 5, "b", "what was lost", "b", "/salvage/x"
                ),
            ),
            2,
        ),
        '{"losses":[{"number":7,"type":"topic","topic":"l-t","remote_topic":"r-t","partition":0,"from_offset":90,'
        '"to_offset":100,"count":10,"groups":0,"state":"cut","found_ms":5,"found_by":"b","message":"what was lost",'
        '"salvage_proxy":"b","salvage_file":"/salvage/x"}],"left_off":2}',
        [(calls.Done(), "{}")],
    ),
    (
        calls.LeftOut(ResourceType.TOPIC, "", "b-"),
        '{"type":"topic","local":"","remote":"b-"}',
        [
            (
                calls.LeftOutAnswer((calls.LeftOutName(ResourceType.TOPIC, "_t", "why"),), 3),
                '{"names":[{"type":"topic","name":"_t","reason":"why"}],"more":3}',
            )
        ],
    ),
    (calls.AcknowledgeSourceLosses(7), '{"number":7}', [(calls.Done(), "{}")]),
    (
        calls.SyncLease((1, 2), (0,)),
        '{"streams":[1,2],"groups":[0]}',
        [
            (
                calls.SyncLeaseAnswer(
                    (1,),
                    groups_in_sync=(0,),
                    groups_of=(calls.NamespaceName("consumer-group", "gr-"), calls.NamespaceName("topic", "r-")),
                    lease_ms=1500,
                    states={2: calls.SyncSaid("Syncing")},
                ),
                '{"in_sync":[1],"in_sync_any":[],"terms":{},"groups_in_sync":[0],"groups_in_sync_any":[],'
                '"group_terms":{},"groups_of":[["consumer-group","gr-"],["topic","r-"]],"lease_ms":1500,'
                '"states":{"2":{"state":"Syncing"}}}',
            ),
            (
                calls.SyncLeaseAnswer(
                    (),
                    in_sync_any=(1,),
                    terms={1: TERMS},
                    groups_in_sync_any=(0,),
                    group_terms={0: {"gr-": TERMS}},
                    lease_ms=1500,
                    states={
                        2: calls.SyncSaid(
                            "Out-Of-Sync", 5, 6, 7, calls.AnyOfLinks(1, {"a-to-b": "B"}, 8), 9, "CODE", "why"
                        ),
                        3: calls.SyncSaid("In-Sync", any_of=calls.AnyOfLinks(1, {})),
                    },
                ),
                f'{{"in_sync":[],"in_sync_any":[1],"terms":{{"1":{TERMS_JSON}}},"groups_in_sync":[],'
                f'"groups_in_sync_any":[0],"group_terms":{{"0":{{"gr-":{TERMS_JSON}}}}},"groups_of":[],"lease_ms":1500,'
                '"states":{"2":{"state":"Out-Of-Sync","since_offset":5,"since_ms":6,"until_ms":7,"any_of":{"count":1,'
                '"links":{"a-to-b":"B"},"until_ms":8},"degraded_since_ms":9,"reason":"CODE","message":"why"},'
                '"3":{"state":"In-Sync","any_of":{"count":1,"links":{}}}}}',
            ),
        ],
    ),
]


def name_of(value: object) -> str | None:
    return type(value).__name__ if isinstance(value, Question) else None


@pytest.mark.parametrize(("question", "wire", "answers"), CALLS, ids=name_of)
def test_a_question_and_its_answers_on_the_wire(
    question: Question[Any], wire: str, answers: list[tuple[Any, str]]
) -> None:
    assert wire_of(question) == wire
    assert question_of(type(question), json.loads(wire)) == question
    for answer, answer_wire in answers:
        assert isinstance(answer, question.ANSWER)
        assert wire_of(answer) == answer_wire
        assert answer_to(question, json.loads(answer_wire)) == answer


def test_every_call_has_its_bytes_and_a_version_that_there_is() -> None:
    with_answer = {type(question) for question, _, answers in CALLS if answers}
    assert with_answer == {each for each in vars(calls).values() if is_question(each)}
    assert all(VERSION_MIN <= each.SINCE <= VERSION_MAX for each in with_answer)


def is_question(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, Question) and value is not Question


def test_the_parts_answer_every_call_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(replicas: Any) -> None:
        parts = assemble(replicas.ends["A"].context)
        answers = [each for part in parts.all for each in part.answers()]
        both = [each.question for each in (*answers, *parts.service.create_answers())]
        assert sorted(each.__name__ for each in both) == sorted(
            name for name, value in vars(calls).items() if is_question(value)
        )
        with pytest.raises(ValueError, match="two parts answer"):
            by_methods([*answers, answers[0]])

    on_replicas(monkeypatch, work)


def objects_in(wire: Any, path: tuple[Any, ...] = ()) -> list[tuple[tuple[Any, ...], Mapping[str, Any]]]:
    """All JSON objects, each with where it is."""
    found = [(path, wire)] if isinstance(wire, dict) else []
    parts = wire.items() if isinstance(wire, dict) else enumerate(wire) if isinstance(wire, list) else ()
    return found + [each for key, part in parts for each in objects_in(part, (*path, key))]


def without_settings(path: tuple[Any, ...]) -> bool:
    """What the control log's codec reads is strict, and objects by name have no fields."""
    return not {"settings", "terms", "group_terms", "said"} & set(path)


def read(question: Question[Any], value: Any, wire: Any) -> Any:
    return question_of(type(question), wire) if value is question else answer_to(question, wire)


VALUES = [
    (question, value, wire)
    for question, question_wire, answers in CALLS
    for value, wire in ((question, question_wire), *answers)
]


@pytest.mark.parametrize(("question", "value", "wire"), VALUES, ids=name_of)
def test_unknown_fields_are_ignored(question: Question[Any], value: Any, wire: str) -> None:
    """Of every object that has fields, and behind the places of every list by position."""
    changed = json.loads(wire)
    changed["new_field"] = {"of": ["a newer version"]}
    assert read(question, value, changed) == value


def test_unknown_fields_and_places_within_are_ignored() -> None:
    for question, value, wire in VALUES:
        changed = json.loads(wire)
        for path, each in objects_in(changed):
            if without_settings(path) and dataclasses.is_dataclass(at(value, path)):
                each["new_field"] = 1  # type: ignore[index]
        assert read(question, value, changed) == value
    decision = json.loads(next(wire for question, wire, _ in CALLS if isinstance(question, calls.Decide)))
    known = question_of(calls.Decide, decision)
    decision["decisions"][0]["places"][0].append("new")
    decision["decisions"][0]["places"][0][3][0].append(9)
    decision["decisions"][0]["at"].append(8)
    assert question_of(calls.Decide, decision) == known
    del decision["decisions"][0]["at"][2:]
    (of_before,) = question_of(calls.Decide, decision).decisions
    assert of_before.at == calls.LogPlace(5, 6, -1), "a peer of before says nothing of leader epochs"
    decision["decisions"][0]["at"].append(7)
    del decision["decisions"][0]["places"][1][3:]
    assert question_of(calls.Decide, decision) == known, "a peer of before says nothing of earlier ones"


def at(value: Any, path: tuple[Any, ...]) -> Any:
    """What stands at a place of the wire; None where that is not the value's own place."""
    for key in path:
        if isinstance(value, Mapping):
            value = value.get(key, value.get(int(key) if str(key).isdecimal() else key))
        elif isinstance(value, tuple) and isinstance(key, int):
            value = value[key]
        else:
            value = getattr(value, str(key), None)
    return value


def required(shape: type[Any]) -> list[str]:
    return [
        field.metadata.get("name", field.name)
        for field in dataclasses.fields(shape)
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    ]


@pytest.mark.parametrize(("question", "value", "wire"), VALUES, ids=name_of)
def test_what_is_missing_or_of_another_kind_is_refused_by_name(question: Question[Any], value: Any, wire: str) -> None:
    whose = question.METHOD
    for name in required(type(value)):
        changed = json.loads(wire)
        del changed[name]
        with pytest.raises(MalformedCall, match=f"{whose}.*{name} is missing"):
            read(question, value, changed)
    for name in json.loads(wire):
        changed = json.loads(wire) | {name: 1.5}
        with pytest.raises(MalformedCall, match=rf"{whose}.*\b{name} (is|LinkSettings)"):
            read(question, value, changed)
    with pytest.raises(MalformedCall, match=f"{whose}.* is not an object"):
        read(question, value, [])


@pytest.mark.parametrize(
    ("question", "wire", "words"),
    [
        (calls.Decide, {"decisions": [{"id": "app"}]}, "decide.decisions[0].producer_id is missing"),
        (calls.OpenStream, {"stream": True}, "open_stream.stream is not a whole number"),
        (calls.Committed, {"groups": ["a", None]}, "committed.groups[1] is not text"),
        (calls.HighWatermarks, {"partitions": [["t"]]}, "high_watermarks.partitions[0] is not a list of 2"),
        (calls.HighWatermarks, {"partitions": [["t", "0"]]}, "high_watermarks.partitions[0][1] is not a whole number"),
        (calls.Detach, {"type": "cluster", "local": ""}, "detach.type is none of topic, consumer-group, principal"),
        (
            calls.CreateLink,
            {"link_name": "", "link_id": "", "producer_id_ranges": {"A": ""}},
            "_ranges.A is not",
        ),
        (calls.MergeSettings, {"settings": {}}, "merge_settings.settings is not understood"),
        (calls.EndGroupOffsets, {"partitions": {}}, "end_group_offsets.partitions is not a list"),
    ],
)
def test_where_something_is_wrong_is_said(question: type[Question[Any]], wire: Any, words: str) -> None:
    with pytest.raises(MalformedCall) as raised:
        question_of(question, wire)
    assert words in str(raised.value)


def test_what_older_peers_leave_out_has_its_meaning() -> None:
    part = {"partition": 0, "epoch": 0, "positions": []}
    assert question_of(calls.GroupOffsets, {"partitions": 1, "parts": [part]}) == calls.GroupOffsets(
        1, (calls.OffsetsPart(0, 0, ()),)
    )
    whole = calls.OffsetsPart(0, 0, (), whole=calls.WholePart(True))
    assert question_of(calls.GroupOffsets, {"partitions": 1, "parts": [part | {"begin": True}]}).parts == (whole,)
    opened = answer_to(calls.OpenStream(1, "t", "", 0), {"end_offset": 3, "last": [1, 3, "aa", False], "epoch": 0})
    assert opened == calls.OpenStreamAnswer(None, end_offset=3, last=calls.LastBatch(1, 3, "aa", False), epoch=0)
    lease = answer_to(calls.SyncLease(()), {"in_sync": [1], "lease_ms": 5})
    assert lease == calls.SyncLeaseAnswer((1,), lease_ms=5)


def test_of_two_questions_of_one_method_the_field_tells_which_it_is() -> None:
    async def nobody(connection: Any, question: Any) -> Any:
        raise AssertionError

    answers = by_methods(each.by(nobody) for each in vars(calls).values() if is_question(each))
    for question, wire, _ in CALLS:
        assert answers[question.METHOD].read(json.loads(wire))[1] == question
