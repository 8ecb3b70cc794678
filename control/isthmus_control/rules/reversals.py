"""What the control log accepts of a reversal: what this cluster leads over a link, the other one is to lead.

Each cluster has a log of its own, and the reversal's id is the same in both. Which of them leads, the log of the one
that led decides, by the first of two records:

    announced --> held --> handed over --> (the other one leads: ended)
        '----------'----> taken back           '--> abandoned

- *Held*: the namespaces are reserved, so nobody writes, and what that means is enforced as of any reservation.
- *Handed over*: the pairs are turned in the same command: this cluster follows, and stays reserved. It never leads
  again by itself.
- *Taken back*: the reservations of the hold are gone. Any proxy may record that, as long as it is not handed over: who
  carries the reversal out may be dead, and is rejected when it is not.
- *Abandoned*: an operator's word that the other cluster does not lead, nor will. That one records it first, where it
  can be asked: then it cannot lead by this reversal whatever it hears later, since that takes its own record of it.

The other cluster records that it has all (*drained*), before it is handed over; it leads by a promotion that names the
reversal (:mod:`isthmus_control.rules.promotions`). Of one that was taken back that may be recorded at any time still:
it takes the place of none that was held later. No rule here asks what time it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

from isthmus_control import commands as c
from isthmus_control.bounds import REVERSAL_HOLD_MS_MAX, REVERSAL_TRANSACTIONS_WAIT_MS_MAX
from isthmus_control.control_state import ControlState
from isthmus_control.model import (
    HeldAt,
    NamespaceKey,
    ResourceType,
    Reversal,
    ReversalStep,
    Role,
    TopicState,
    contains,
)
from isthmus_control.outcome import Change, NamespaceChanged, Refuse, Rejection, ReversalChanged, require
from isthmus_control.rules import grants
from isthmus_control.rules.checks import ENTRIES_MAX, Result, check_uuid, drop, link_named, put
from isthmus_control.rules.client_moves import check_time, told, told_no_more
from isthmus_control.rules.links import turn
from isthmus_control.rules.namespaces import reserve

REVERSED: Final = (ResourceType.TOPIC, ResourceType.CONSUMER_GROUP)
"""What may be reversed, in the order in which it is looked at: committed offsets are about topics."""


def _announce(state: ControlState, offset: int, command: c.Command, body: c.AnnounceReversal) -> Result:
    check_uuid(body.reversal_id, "the reversal's id")
    check_uuid(body.owner, "the owner")
    require(
        0 <= body.transactions_wait_ms <= REVERSAL_TRANSACTIONS_WAIT_MS_MAX,
        Rejection.INVALID,
        f"open transactions are waited for 0 to {REVERSAL_TRANSACTIONS_WAIT_MS_MAX} ms",
    )
    require(
        0 < body.hold_ms <= REVERSAL_HOLD_MS_MAX,
        Rejection.INVALID,
        f"writes are held for 1 to {REVERSAL_HOLD_MS_MAX} ms",
    )
    check_time(body.move_clients_ms)
    link = link_named(state, body.link)
    keys = _in_order(NamespaceKey(body.type, body.prefix), *body.more)
    known = state.reversals.get(body.reversal_id)
    if known is not None:
        require(known.keys == keys and known.at_leader, Rejection.CONFLICT, "there is another reversal of that id")
        return state, ()
    for key in keys:
        _check_free(state, key)
        mapping = link.mapping(*key)
        if mapping is None or mapping.role is not Role.LEADER:
            raise Refuse(Rejection.NOT_FOUND, f"the {key} is not led over link {body.link!r} here")
        require(
            not state.namespaces[key].reserved,
            Rejection.CONFLICT,
            f"the {key} is reserved: clear that first, it is held as long as it takes",
        )
    reversal = Reversal(
        body.reversal_id,
        body.link,
        keys,
        ReversalStep.ANNOUNCED,
        body.owner,
        command.at_ms,
        offset,
        body.transactions_wait_ms,
        body.hold_ms,
        body.disable_transaction_verification,
        move_clients_ms=body.move_clients_ms,
    )
    _turned(state, offset, command, reversal)  # what would be refused when it is handed over is refused now
    return _with(state, reversal)


def _in_order(*keys: NamespaceKey) -> tuple[NamespaceKey, ...]:
    for key in keys:
        require(key.type in REVERSED, Rejection.INVALID, f"the {key} is not reversed: topics and groups are")
    return tuple(sorted(dict.fromkeys(keys), key=lambda key: REVERSED.index(key.type)))


def _check_free(state: ControlState, key: NamespaceKey) -> None:
    require(key not in state.promotions, Rejection.CONFLICT, f"the {key} is being promoted: wait for that")
    require(state.reversal_of(key) is None, Rejection.CONFLICT, f"the {key} is being reversed already")


def _hold(state: ControlState, offset: int, command: c.Command, body: c.HoldReversal) -> Result:
    before = _under_way(state, body)
    require(before.owner == body.owner, Rejection.CONFLICT, "another proxy carries the reversal out")
    if before.step is ReversalStep.HELD:
        return state, ()
    reason = f"is being handed over to cluster {link_named(state, body.link).remote_cluster_id} over link {body.link!r}"
    changes: list[Change] = []
    for key in before.keys:
        namespace = state.namespaces[key]
        after = reserve(namespace, offset, reason)
        state = state.evolve(namespaces=put(state.namespaces, key, after))
        changes.append(NamespaceChanged(namespace, after))
    held_at = HeldAt(state.generation, offset)
    state, more = _with(state, replace(before, step=ReversalStep.HELD, step_offset=offset, held_at=held_at))
    return state, (*changes, *more)


def _hand_over(state: ControlState, offset: int, command: c.Command, body: c.HandOver) -> Result:
    before = _under_way(state, body)
    require(before.owner == body.owner, Rejection.CONFLICT, "another proxy carries the reversal out")
    require(before.step is ReversalStep.HELD, Rejection.CONFLICT, "what is handed over is held before")
    partitions = sum(len(each.ends) for each in body.ends)
    require(partitions <= ENTRIES_MAX, Rejection.INVALID, f"more than {ENTRIES_MAX} partitions")
    state, turned = _turned(state, offset, command, before)
    changes = list(turned)
    for key in before.keys:
        state, over = told_no_more(state, key, there=True)  # it is the other one that leads
        changes += over
    after = replace(before, step=ReversalStep.HANDED_OVER, step_offset=offset, ends=body.ends)
    state, more = _with(state, after)
    return state, (*changes, *more)


def _take_back(state: ControlState, offset: int, command: c.Command, body: c.TakeBack) -> Result:
    before = _under_way(state, body)
    changes: list[Change] = []
    if before.step is ReversalStep.HELD:
        state, changes = _opened(state, before)
    state, more = _without(state, before)
    return state, (*changes, *more)


def _end(state: ControlState, offset: int, command: c.Command, body: c.EndReversal) -> Result:
    before = state.reversals.get(body.reversal_id)
    if before is None:
        return state, ()
    require(
        before.step is ReversalStep.HANDED_OVER,
        Rejection.CONFLICT,
        f"the {before.keys[0]} is not handed over: nobody else leads it",
    )
    changes: list[Change] = []
    link, for_ms = link_named(state, before.link), before.move_clients_ms
    for mapping in (link.mapping(*key) for key in before.keys):
        if mapping is not None:
            to = mapping.remote_prefix
            state, more = told(state, offset, command, link.name, mapping.local, to, for_ms, there=False)
            changes += more
    state, gone = _without(state, before)
    return state, (*changes, *gone)


def _abandon(state: ControlState, offset: int, command: c.Command, body: c.AbandonReversal) -> Result:
    leading = next((each for each in state.promotions.values() if each.reversal == body.reversal_id), None)
    require(
        leading is None, Rejection.CONFLICT, f"the {leading.key if leading else ''} was handed over to this cluster"
    )
    before = state.reversals.get(body.reversal_id)
    if before is None:
        return state, ()  # it never had all, or it leads no more than it did
    require(not before.at_leader, Rejection.CONFLICT, f"the {before.keys[0]} is not handed over: it can be taken back")
    if before.step is ReversalStep.DRAINED:
        return _without(state, before)
    for topic, record in sorted(state.follower_topics.items()):
        follows = record.link == before.link and record.state in (TopicState.FOLLOWING, TopicState.CREATING)
        require(
            not follows or not any(contains(*key, topic) for key in before.keys if key.type is ResourceType.TOPIC),
            Rejection.CONFLICT,
            f"topic {topic!r} follows the other cluster's, which leads",
        )
    changes: list[Change] = []
    for key in before.keys:
        state, more = turn(state, offset, command, before.link, key)
        changes += more
    state, opened = _opened(state, before)
    state, gone = _without(state, before)
    return state, (*changes, *opened, *gone)


def _accept(state: ControlState, offset: int, command: c.Command, body: c.AcceptReversal) -> Result:
    check_uuid(body.reversal_id, "the reversal's id")
    link = link_named(state, body.link)
    keys = _in_order(NamespaceKey(body.type, body.prefix), *body.more)
    known = state.reversals.get(body.reversal_id)
    if known is not None:
        require(
            known.keys == keys and known.step is ReversalStep.DRAINED,
            Rejection.CONFLICT,
            "there is another reversal of that id",
        )
        return state, ()
    changes: tuple[Change, ...] = ()
    for key in keys:
        before = state.reversal_of(key)
        if before is not None and before.step is ReversalStep.DRAINED:
            require(
                before.held_at is None or body.held_at is None or before.held_at < body.held_at,
                Rejection.CONFLICT,
                f"a later reversal of the {key} is recorded: this one was taken back",
            )
            state, more = _without(state, before)  # that one was taken back
            changes += more
        _check_free(state, key)
        mapping = link.mapping(*key)
        if mapping is None or mapping.role is not Role.FOLLOWER:
            raise Refuse(Rejection.NOT_FOUND, f"the {key} does not follow over link {body.link!r}")
        cut = next((topic for topic in sorted(state.truncations) if mapping.holds(topic)), None)
        require(
            key.type is not ResourceType.TOPIC or cut is None,
            Rejection.CONFLICT,
            f"topic {cut!r} is being truncated: wait for that",
        )
        wanted = c.AttachNamespace(link.name, *key, mapping.remote_prefix, Role.LEADER, for_peer=True)
        grants.check_attach(link, wanted)
    step = ReversalStep.DRAINED
    reversal = Reversal(
        body.reversal_id,
        body.link,
        keys,
        step,
        "",
        command.at_ms,
        offset,
        settings=dict(body.settings),
        held_at=body.held_at,
    )
    state, begun = _with(state, reversal)
    return state, (*changes, *begun)


# --- what these share


def _under_way(state: ControlState, body: c.HoldReversal | c.HandOver | c.TakeBack) -> Reversal:
    """What is neither handed over nor taken back. Raises Refuse."""
    found = state.reversals.get(body.reversal_id)
    if found is None or found.link != body.link:
        raise Refuse(Rejection.NOT_FOUND, f"there is no reversal {body.reversal_id}: it was taken back, or has ended")
    require(found.at_leader, Rejection.CONFLICT, f"the {found.keys[0]} was handed over already")
    return found


def _turned(state: ControlState, offset: int, command: c.Command, reversal: Reversal) -> Result:
    """The state in which what this cluster led follows. Raises Refuse."""
    changes: list[Change] = []
    for key in reversal.keys:
        disable = reversal.disable_transaction_verification
        state, more = turn(state, offset, command, reversal.link, key, disable_transaction_verification=disable)
        changes += more
    return state, tuple(changes)


def _opened(state: ControlState, reversal: Reversal) -> tuple[ControlState, list[Change]]:
    """The state in which clients write again."""
    changes: list[Change] = []
    for key in reversal.keys:
        namespace = state.namespaces[key]
        after = replace(namespace, reserved=False, reserved_reason=None, reserved_at_offset=None)
        state = state.evolve(namespaces=put(state.namespaces, key, after))
        changes.append(NamespaceChanged(namespace, after))
    return state, changes


def _with(state: ControlState, reversal: Reversal) -> Result:
    before = state.reversals.get(reversal.reversal_id)
    reversals = put(state.reversals, reversal.reversal_id, reversal)
    return state.evolve(reversals=reversals), (ReversalChanged(before, reversal),)


def _without(state: ControlState, reversal: Reversal) -> Result:
    reversals = drop(state.reversals, reversal.reversal_id)
    return state.evolve(reversals=reversals), (ReversalChanged(reversal, None),)


REVERSAL_HANDLERS: Mapping[type[c.Body], Callable[[ControlState, int, c.Command, Any], Result]] = {
    c.AnnounceReversal: _announce,
    c.HoldReversal: _hold,
    c.HandOver: _hand_over,
    c.TakeBack: _take_back,
    c.EndReversal: _end,
    c.AbandonReversal: _abandon,
    c.AcceptReversal: _accept,
}
