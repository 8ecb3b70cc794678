"""What the control log accepts of the tree that a cluster is a leaf of, and of who distributes for it (docs/adr/0033).

It knows of the tree's document what concerns this cluster alone: which topics, and which levels. What else is in it,
and whether it may follow the version before, the proxy checks that an operator asks.

A proxy distributes for a level once it has claimed that here, and as long as its lease stands in the log: then any
other one may claim it. Nobody writes because of a claim: positions are fenced by the clusters that keep them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

from isthmus_control import commands as c
from isthmus_control.codec import MalformedValue, parse
from isthmus_control.control_state import ControlState
from isthmus_control.model import DistributionTree, NamespaceMapping, ResourceType, overlap
from isthmus_control.outcome import DistributorClaimed, Refuse, Rejection, TreeChanged, require
from isthmus_control.rules.checks import LINK_NAME, Result, check_prefix, put

DOCUMENT_BYTES_MAX: Final = 256 * 1024
PREFIXES_MAX: Final = 1_000
LEVELS_MAX: Final = 63


def check_not_distributed(state: ControlState, mapping: NamespaceMapping) -> None:
    """Refuse to attach topics to a link that a tree distributes."""
    if state.tree is None or mapping.type is not ResourceType.TOPIC:
        return
    distributed = next((each for each in state.tree.prefixes if overlap(each, mapping.local_prefix)), None)
    require(
        distributed is None,
        Rejection.CONFLICT,
        f"topics {distributed!r} are distributed over a tree, and {mapping.local_prefix!r} overlaps them: what comes "
        f"over a link has the source's offsets, and nobody else writes there. Take them out of the tree first",
    )


def _apply_tree(state: ControlState, offset: int, command: c.Command, body: c.ApplyTree) -> Result:
    tree, before = _checked(body), state.tree
    if before is not None and before.version == tree.version:
        same = replace(before, chosen={}, given_up=()) == tree
        require(same, Rejection.CONFLICT, f"version {tree.version} of the tree is another one here: write the next one")
        return state, ()
    require(
        before is None or tree.version == before.version + 1,
        Rejection.CONFLICT,
        f"version {tree.version} cannot follow {before.version}" if before is not None else "",
    )
    for link in (state.links[name] for name in sorted(state.links)):
        for mapping in link.mappings:
            for prefix in tree.prefixes if mapping.type is ResourceType.TOPIC else ():
                require(
                    not overlap(prefix, mapping.local_prefix),
                    Rejection.CONFLICT,
                    f"the {mapping.local} is attached to link {link.name!r}, and topics {prefix!r} overlap it: what "
                    f"comes over a link has the source's offsets, and nobody else writes there. Detach it first",
                )
    if before is not None:
        chosen = {level: leaf for level, leaf in before.chosen.items() if level in tree.levels}
        tree = replace(tree, chosen=chosen, given_up=tuple(each for each in before.given_up if each in tree.levels))
    distributors = {level: each for level, each in state.distributors.items() if level in tree.levels}
    return state.evolve(tree=tree, distributors=distributors), (TreeChanged(before, tree),)


def _checked(body: c.ApplyTree) -> DistributionTree:
    require(body.version >= 1, Rejection.INVALID, f"there is no version {body.version} of a tree")
    require(LINK_NAME.match(body.leaf), Rejection.INVALID, f"{body.leaf!r} is no name of a cluster")
    require(0 < len(body.prefixes) <= PREFIXES_MAX, Rejection.INVALID, f"a tree has 1 to {PREFIXES_MAX} sets of topics")
    for number, prefix in enumerate(body.prefixes):
        check_prefix(ResourceType.TOPIC, prefix)
        twice = next((each for each in body.prefixes[:number] if overlap(each, prefix)), None)
        require(twice is None, Rejection.INVALID, f"topics {twice!r} and {prefix!r} overlap: keep the shorter one")
    levels = body.levels
    require(
        levels and sorted(set(levels)) == list(levels) and levels[0] >= 1 and levels[-1] <= LEVELS_MAX,
        Rejection.INVALID,
        f"the levels above a leaf are numbers from 1 to {LEVELS_MAX}, rising",
    )
    size = len(body.document.encode())
    require(size <= DOCUMENT_BYTES_MAX, Rejection.INVALID, f"a tree of {size} bytes, more than {DOCUMENT_BYTES_MAX}")
    try:
        document = parse(body.document.encode())
    except MalformedValue:
        document = None
    require(type(document) is dict, Rejection.INVALID, "the tree is no JSON object")
    return DistributionTree(body.version, body.leaf, body.prefixes, body.levels, body.document)


def _tree(state: ControlState) -> DistributionTree:
    if state.tree is None:
        raise Refuse(Rejection.NOT_FOUND, "this cluster is in no tree")
    return state.tree


def _leave_tree(state: ControlState, offset: int, command: c.Command, body: c.LeaveTree) -> Result:
    before = _tree(state)
    require(
        before.version == body.version,
        Rejection.CONFLICT,
        f"the tree has version {before.version} meanwhile, not {body.version}",
    )
    return state.evolve(tree=None, distributors={}), (TreeChanged(before, None),)


def _level(tree: DistributionTree, level: int) -> int:
    levels = ", ".join(map(str, tree.levels))
    require(level in tree.levels, Rejection.NOT_FOUND, f"{tree.leaf} has no level {level} in its tree; it has {levels}")
    return level


def _choose_target(state: ControlState, offset: int, command: c.Command, body: c.ChooseTarget) -> Result:
    before = _tree(state)
    require(
        before.version == body.version,
        Rejection.CONFLICT,
        f"the tree has version {before.version} meanwhile, not {body.version}",
    )
    chosen = {level: leaf for level, leaf in before.chosen.items() if level != _level(before, body.level)}
    if body.leaf is not None:
        require(LINK_NAME.match(body.leaf), Rejection.INVALID, f"{body.leaf!r} is no name of a cluster")
        chosen = put(chosen, body.level, body.leaf)
    given_up = {*before.given_up} - {body.level} | ({body.level} if body.give_up else set())
    after = replace(before, chosen=chosen, given_up=tuple(sorted(given_up)))
    return (state, ()) if after == before else (state.evolve(tree=after), (TreeChanged(before, after),))


def _claim_distributor(state: ControlState, offset: int, command: c.Command, body: c.ClaimDistributor) -> Result:
    level = _level(_tree(state), body.level)
    holders = {lease.incarnation: lease.name for lease in state.proxies.values()}
    require(
        body.incarnation in holders,
        Rejection.LEASE_LOST,
        "only a proxy whose lease stands in the log distributes",
    )
    before = state.distributors.get(level)
    if before == body.incarnation:
        return state, ()
    require(
        before not in holders,
        Rejection.CONFLICT,
        f"proxy {holders.get(before or '')!r} distributes for level {level}",
    )
    return (
        state.evolve(distributors=put(state.distributors, level, body.incarnation)),
        (DistributorClaimed(level, body.incarnation),),
    )


TREE_HANDLERS: Mapping[type[c.Body], Callable[[ControlState, int, c.Command, Any], Result]] = {
    c.ApplyTree: _apply_tree,
    c.LeaveTree: _leave_tree,
    c.ChooseTarget: _choose_target,
    c.ClaimDistributor: _claim_distributor,
}
