"""The state machine: ``apply(state, offset, command)``.

Every proxy of a cluster applies the same commands in the same order, so this is a pure function of its arguments: no
clock, no I/O, no randomness, no order of a set. A command is accepted with its changes or rejected with a code and a
message, and every proxy comes to the same answer in the same words. The caller of the admin interface gets the answer
that the log gave; for a dry run apply the command to the current state and drop the new one.

Rules of namespaces and links (KIP-986, "User Interface"):

- A namespace follows at most one link, overlap counted: no local name may be in two follower namespaces.
- On one link a local name has one remote name: the local prefixes of its leader mappings do not overlap, nor do the
  remote ones towards one cluster, over all links to it.
- What comes from a cluster does not go back to it: a follower and a leader mapping whose local namespaces overlap are
  refused on one link, and on two links to one cluster where the remote ones overlap too (it would go round for ever).
- Following reserves; detaching and deleting links leaves reserved what was. An attached namespace is not deleted.
- Topics that are distributed over a tree are attached to no link (:mod:`isthmus_control.rules.trees`).
- A link is asynchronous until it is altered; one that is synchronous has no informational namespace, and its topics go
  from the cluster that made it synchronous to the other one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from isthmus_control import commands as c
from isthmus_control.concerns import Beyond
from isthmus_control.control_state import ControlState
from isthmus_control.outcome import (
    Accepted,
    Duplicate,
    Outcome,
    Refuse,
    Rejected,
    Rejection,
    SnapshotTaken,
    require,
)
from isthmus_control.rules.acls import ACL_HANDLERS
from isthmus_control.rules.checks import AT_MS_MAX, Result
from isthmus_control.rules.claims import CLAIM_HANDLERS
from isthmus_control.rules.client_moves import CLIENT_MOVE_HANDLERS
from isthmus_control.rules.deletions import DELETION_HANDLERS
from isthmus_control.rules.demands import DEMAND_HANDLERS
from isthmus_control.rules.follower_topics import FOLLOWER_TOPIC_HANDLERS
from isthmus_control.rules.grants import GRANT_HANDLERS
from isthmus_control.rules.levels import LEVEL_HANDLERS, check_allowed, check_known
from isthmus_control.rules.link_secrets import LINK_SECRET_HANDLERS
from isthmus_control.rules.links import LINK_HANDLERS
from isthmus_control.rules.namespaces import NAMESPACE_HANDLERS
from isthmus_control.rules.offsets_topics import OFFSETS_HANDLERS
from isthmus_control.rules.origins import ORIGIN_HANDLERS, origins_in_doubt
from isthmus_control.rules.plugins import PLUGIN_HANDLERS
from isthmus_control.rules.promotions import PROMOTION_HANDLERS
from isthmus_control.rules.proofs import PROOF_HANDLERS
from isthmus_control.rules.provenance import PROVENANCE_HANDLERS
from isthmus_control.rules.proxies import PROXY_HANDLERS
from isthmus_control.rules.reversals import REVERSAL_HANDLERS
from isthmus_control.rules.source_deletions import SOURCE_DELETION_HANDLERS
from isthmus_control.rules.source_losses import SOURCE_LOSS_HANDLERS
from isthmus_control.rules.sync import SYNC_HANDLERS
from isthmus_control.rules.trees import TREE_HANDLERS
from isthmus_control.rules.truncations import TRUNCATION_HANDLERS

REMEMBERED_COMMANDS = 1024
"""How many command ids are remembered. A retry gives up long before so many others were accepted."""
SNAPSHOT_INTERVAL = 512
"""A snapshot is due at an offset that is one less than a multiple of this."""


def apply(state: ControlState, offset: int, command: c.Command) -> tuple[ControlState, Outcome]:
    """The state after ``command``, the record at ``offset``, and what came of it.

    The new state's ``applied_offset`` is ``offset`` whatever the outcome. ``offset`` must be beyond the last one.
    """
    if offset <= state.applied_offset:
        raise ValueError(f"offset {offset} was applied already, the state is at {state.applied_offset}")
    body = command.body
    remembered = body.REMEMBERED
    if remembered:
        if command.id in state.recent_ids:
            first = state.recent_offsets[state.recent_ids.index(command.id)]
            return state.evolve(applied_offset=offset), Duplicate(first)
        if command.seen < state.forgotten_offset:
            message = "the command was made too long ago to know whether it counted; make it again"
            return state.evolve(applied_offset=offset), Rejected(Rejection.STALE, message)
    if state.key_id and (stale := _copied(state, offset, command)) is not None:
        return state.evolve(applied_offset=offset), Rejected(Rejection.STALE, stale)
    outcome: Outcome
    try:
        if not 0 <= command.at_ms < AT_MS_MAX:
            raise Refuse(Rejection.INVALID, f"the time {command.at_ms} is not one")
        if command.seen >= offset:
            raise Refuse(Rejection.INVALID, "the command says it has seen what comes after it")
        check_allowed(state, body)
        check_known(state, body)
        new, changes = _HANDLERS[type(body)](state, offset, command, body)
        outcome = Accepted(changes)
    except Refuse as refused:
        new, outcome = state, Rejected(refused.code, str(refused))
    return _remember(new, offset, command.id if remembered else None), outcome


def unknown(state: ControlState, beyond: Beyond, command_id: str) -> ControlState:
    """The state after a record that this version does not know and may not pass over: such kinds are remembered."""
    if command_id in state.recent_ids:
        return state.evolve(applied_offset=beyond.offset)
    return _remember(keep_beyond(state, beyond), beyond.offset, command_id)


def keep_beyond(state: ControlState, beyond: Beyond) -> ControlState:
    """Leave alone what a record concerns from now on."""
    known = {name for each in state.beyond for name in (*each.concerns.namespaces, *each.concerns.links)}
    if known.issuperset((*beyond.concerns.namespaces, *beyond.concerns.links)):
        return state
    return state.evolve(beyond=(*state.beyond, beyond))


def reject(state: ControlState, offset: int, code: Rejection, message: str) -> tuple[ControlState, Rejected]:
    """The state after a record that is no command at all, or whose writer may make none."""
    return state.evolve(applied_offset=offset), Rejected(code, message)


def _copied(state: ControlState, offset: int, command: c.Command) -> str | None:
    """Why a signed record may be a copy of one that stood elsewhere, which who does not have the key can append."""
    if command.prefix is not None and command.prefix.generation < state.generation:
        return "the command was made before an operator accepted the log as it is; make it again"
    if not command.body.REMEMBERED and offset - command.seen > REMEMBERED_COMMANDS:
        return "the command was made too long ago: it may be a copy of one that counted; make it again"
    return None


def _remember(state: ControlState, offset: int, command_id: str | None) -> ControlState:
    if command_id is None:
        return state.evolve(applied_offset=offset)
    ids, offsets = state.recent_ids, state.recent_offsets
    forgotten = state.forgotten_offset
    if len(ids) >= REMEMBERED_COMMANDS:
        # A command whose maker had applied this offset cannot be the one that stands here.
        forgotten = offsets[0]
        ids, offsets = ids[1:], offsets[1:]
    return state.evolve(
        applied_offset=offset,
        recent_ids=(*ids, command_id),
        recent_offsets=(*offsets, offset),
        forgotten_offset=forgotten,
    )


def _snapshot(state: ControlState, offset: int, command: c.Command, body: c.Snapshot) -> Result:
    # What is in it is compared by the reader (isthmus_control.replica), which still has the state of that offset.
    require(
        0 <= body.as_of < offset and (body.as_of + 1) % SNAPSHOT_INTERVAL == 0,
        Rejection.INVALID,
        f"no snapshot is due at offset {body.as_of}",
    )
    if body.as_of <= state.snapshot_offset:
        return state, ()  # another proxy was faster
    return state.evolve(snapshot_offset=body.as_of), (SnapshotTaken(body.as_of),)


def _accept_log(state: ControlState, offset: int, command: c.Command, body: c.AcceptLog) -> Result:
    require(
        body.generation > state.generation,
        Rejection.CONFLICT,
        f"the log was accepted meanwhile, in generation {state.generation}",
    )
    return origins_in_doubt(state, offset).evolve(generation=body.generation), ()


_HANDLERS: Mapping[type[c.Body], Callable[[ControlState, int, c.Command, Any], Result]] = {
    **NAMESPACE_HANDLERS,
    **LINK_HANDLERS,
    **GRANT_HANDLERS,
    **LINK_SECRET_HANDLERS,
    **OFFSETS_HANDLERS,
    **FOLLOWER_TOPIC_HANDLERS,
    **PROVENANCE_HANDLERS,
    **ORIGIN_HANDLERS,
    **DEMAND_HANDLERS,
    **PLUGIN_HANDLERS,
    **DELETION_HANDLERS,
    **TRUNCATION_HANDLERS,
    **SOURCE_LOSS_HANDLERS,
    **PROOF_HANDLERS,
    **SOURCE_DELETION_HANDLERS,
    **PROMOTION_HANDLERS,
    **REVERSAL_HANDLERS,
    **CLIENT_MOVE_HANDLERS,
    **TREE_HANDLERS,
    **ACL_HANDLERS,
    **SYNC_HANDLERS,
    **CLAIM_HANDLERS,
    **PROXY_HANDLERS,
    **LEVEL_HANDLERS,
    c.Snapshot: _snapshot,
    c.AcceptLog: _accept_log,
}
