"""A peer whose other end is called at once, over no wire: what is asked and answered goes through JSON all the same."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from isthmus_plugins.replication.link.call_codec import A, Answering, Question, answer_to, by_methods, to_wire


def wire_of(value: Any) -> str:
    """A question or an answer as the link carries it."""
    return json.dumps(to_wire(value), separators=(",", ":"))


class CalledAtOnce:
    """In the place of a link's connection."""

    def __init__(self, link_name: str, answers: Iterable[Answering]) -> None:
        self.link_name = link_name
        self.peer_features = frozenset[str]()
        self.asked: list[Question[Any]] = []
        self._answers = by_methods(answers)

    async def call(self, question: Question[A], timeout_s: float = 0) -> A:
        self.asked.append(question)
        answering, asked = self._answers[question.METHOD].read(json.loads(wire_of(question)))
        return answer_to(question, json.loads(wire_of(await answering.handler(self, asked))))
