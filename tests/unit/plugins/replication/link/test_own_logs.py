"""First terms, recorded of many partitions together: by ends that may have been read a while ago."""

from __future__ import annotations

import asyncio
import random
import uuid

import pytest
from support.fake_cluster import run_simulated
from support.replicas import LINK, Replicas

from isthmus_control.commands import BeginTerm, Body, SetFollowerTopic, TermStart, TopicTerms
from isthmus_control.model import TopicState
from isthmus_control.outcome import Accepted
from isthmus_plugins.replication.link.own_logs import Begun, OwnLogs
from isthmus_plugins.tasks import Tasks

ID, OTHER = (str(uuid.UUID(int=number, version=4)) for number in (1, 2))
TOPIC = "remote-t"
LATER = TermStart(70, 4)


@pytest.mark.parametrize(
    ("before", "begun"),
    [
        (None, [0, 1]),
        (BeginTerm((TopicTerms(TOPIC, ID, {0: LATER}),)), [1]),
        (BeginTerm((TopicTerms(TOPIC, OTHER, {0: LATER}),)), []),
        (SetFollowerTopic(LINK, TOPIC, "local-t", OTHER, TopicState.CREATING), []),
    ],
    ids=["nothing", "by another proxy", "of the topic that has the name now", "it is to follow"],
)
def test_what_was_recorded_since_says_more(before: Body | None, begun: list[int]) -> None:
    async def run() -> None:
        replicas = Replicas(random.Random(1))
        replicas.start("B")
        context, control = replicas.ends["B"].context, replicas.controls["B"]
        tasks = Tasks("test", context.supervision)
        own = OwnLogs(context, tasks)
        if before is not None:
            assert isinstance(control.apply(before), Accepted)
        known = len(control.commands)
        old = (Begun(TOPIC, ID, each, TermStart(50, 3), only_if_new=True) for each in (0, 1))
        await asyncio.gather(*map(own.begin_term, old))
        found = [each for each in control.commands[known:] if isinstance(each, BeginTerm)]
        assert [(each.topic, sorted(each.starts)) for body in found for each in body.topics] == (
            [(TOPIC, begun)] if begun else []
        )
        assert len(control.commands) - known <= 1, "nothing is cut"
        await tasks.close()
        await replicas.stop("B")

    run_simulated(run())
