"""The tree document: YAML that names clusters, and how they stand in the tree.

::

    version: 1
    topics: [orders-]                          # prefixes of those that are distributed
    groups: [billing-]                         # prefixes of those whose committed offsets are; none by default
    margin_ms: 60000                           # of committed offsets; this by default
    margins_ms: {billing-: 600000}             # those of some prefixes of groups
    header: isthmus-copy-flags                 # of records; this by default, the same in all versions
    exactly_once: true                         # over each hop; this by default
    clusters:                                  # brokers, as proxies of the other clusters reach them
      cluster-1: {cluster_id: 5L6g3nShT-eMCtK--X86sw, bootstrap_servers: "a-1:9092,a-2:9092"}
      cluster-2: {cluster_id: 0q7dTzCfSBWTe6jbdoOBWA, bootstrap_servers: "b-1:9092"}
      cluster-3: {cluster_id: vPeOCWypqUOSepEvx0cbog, bootstrap_servers: "c-1:9092"}
    tree: [[cluster-1, cluster-2], cluster-3]  # or, with levels: {level: 3, sides: [{level: 1, sides: [...]}, ...]}
    targets:
      cluster-3: {3: cluster-2}                # of its distributor of level 3; one of the other side by default
    names:                                     # what topics are called, see `names`; the same everywhere by default
      cluster-1: "{tenant}-prod-{topic}"       # and so for each cluster
    added:                                     # written by `tree document`: who fills clusters that came last
      cluster-3: {by: cluster-1, version: 2}

Levels that are not written are those of the version before. New subtrees get numbers with room between them and below,
since each cluster that is added later needs a level of its own, below those above it. Every problem is shown at once.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Annotated, Any, Final, NamedTuple

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from isthmus_plugins.distribution.copy_flags import HEADER_NAME, LEVELS_MAX
from isthmus_plugins.distribution.names import Names, Pattern
from isthmus_plugins.distribution.names import problems as wrong_names
from isthmus_plugins.distribution.targets import Targets, target_of, wrong_targets
from isthmus_plugins.distribution.times import MARGIN_MS
from isthmus_plugins.distribution.tree import Added, Change, Node, Subtree, Tree, TreeError, change

DOCUMENT_BYTES_MAX: Final = 256 * 1024
CLUSTERS_MAX: Final = 256
STEP: Final = 4
"""Between the levels of subtrees that stand in each other, where there is room for it."""

_Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,100}$")]
_Level = Annotated[
    int, BeforeValidator(lambda key: int(key) if str(key).isdecimal() else key), Field(ge=1, le=LEVELS_MAX)
]
"""A key of an object, so in JSON it is text."""
_Prefix = Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{0,249}$")]
_GroupPrefix = Annotated[str, Field(max_length=249)]
_Margin = Annotated[int, Field(ge=1, le=7 * 24 * 3_600_000)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, hide_input_in_errors=True)


class Cluster(_Section):
    cluster_id: str = Field(min_length=1, max_length=100)
    bootstrap_servers: str = Field(min_length=1)
    """host:port of brokers, not of proxies: these take no flags from anybody."""

    @property
    def servers(self) -> list[str]:
        return [each.strip() for each in self.bootstrap_servers.split(",")]


class _Added(_Section):
    by: _Name
    version: int = Field(ge=2, le=2**31 - 1)


class _Document(_Section):
    version: int = Field(ge=1, le=2**31 - 1)
    topics: list[_Prefix] = Field(min_length=1, max_length=1_000)
    header: str = Field(default=HEADER_NAME, min_length=1, max_length=200)
    exactly_once: bool = True
    groups: list[_GroupPrefix] = Field(default_factory=list, max_length=1_000)
    margin_ms: _Margin = MARGIN_MS
    margins_ms: dict[_GroupPrefix, _Margin] = Field(default_factory=dict)
    clusters: dict[_Name, Cluster] = Field(max_length=CLUSTERS_MAX)
    tree: Any
    targets: dict[_Name, dict[_Level, _Name]] = Field(default_factory=dict)
    added: dict[_Name, _Added] = Field(default_factory=dict)
    names: dict[_Name, Annotated[str, Field(max_length=1_000)]] = Field(default_factory=dict)


class Began(NamedTuple):
    """Since when a leaf has a level. What is kept of it from versions before is of an earlier life."""

    version: int
    """0: for as long as anything is kept."""
    fills: bool
    """Whether the leaf on the other side was new then, and gets all that was there."""


@dataclass(frozen=True)
class TreeDocument:
    tree: Tree
    topics: tuple[str, ...]
    clusters: Mapping[str, Cluster]
    targets: Targets
    exactly_once: bool = True
    groups: tuple[str, ...] = ()
    """Prefixes of those whose committed offsets are distributed."""
    margin_ms: int = MARGIN_MS
    added: Mapping[str, Added] = field(default_factory=dict)
    """Leaves that came in the last version in which leaves came or went."""
    margins_ms: Mapping[str, int] = field(default_factory=dict)
    """By prefix of groups, where that is another one."""
    names: Names | None = None
    """What topics are called at each cluster; None: the same everywhere."""

    def fits(self, leaf: str, topic: str) -> bool:
        """Whether a topic of a cluster, of those that are distributed by their prefix, has a name for others."""
        return self.names is None or self.names.fits(leaf, topic)

    def has(self, leaf: str, topic: str) -> bool:
        """Whether a topic is one of the tree's. ``leaf``: whose name for it that is."""
        return topic.startswith(self.topics) and self.fits(leaf, topic)

    def shared_name(self, leaf: str, topic: str) -> str | None:
        """What all clusters write for a topic of one of them; None: it has no name for others."""
        return topic if self.names is None else self.names.shared(topic, leaf)

    def own_name(self, leaf: str, shared: str) -> str | None:
        """What a cluster calls a topic for which all write that; None: nothing."""
        return shared if self.names is None else self.names.own(shared, leaf)

    def margin_of(self, group: str) -> int:
        """How much earlier than what it has read a group that is distributed goes on elsewhere, in milliseconds."""
        own = (margin for prefix, margin in self.margins_ms.items() if group.startswith(prefix))
        return next(own, self.margin_ms)

    @property
    def least_margin_ms(self) -> int:
        """Of all groups that are distributed."""
        return min((self.margins_ms.get(prefix, self.margin_ms) for prefix in self.groups), default=self.margin_ms)

    @cached_property
    def digest(self) -> str:
        """Of what clusters have to agree upon in a version: eight hexadecimal digits."""
        agreed = [self.tree.header, _written(self.tree.root), *([names] if (names := names_written(self)) else [])]
        drawn = json.dumps(agreed, sort_keys=True)
        return hashlib.sha256(drawn.encode()).hexdigest()[:8]

    def began(self, leaf: str, level: int) -> Began:
        if leaf in self.added:
            return Began(self.added[leaf].version, fills=False)
        for new, added in self.added.items():
            if added.by == leaf and level == self.tree.level_between(leaf, new):
                return Began(added.version, fills=True)
        return Began(0, fills=False)

    def target(self, leaf: str, level: int, chosen: str | None = None) -> str:
        """Where a distributor is to write. ``chosen``: by an operator, since."""
        wanted = {} if chosen is None else {(leaf, level): chosen}
        found = target_of(self.tree, leaf, level, wanted, current=self.targets.get((leaf, level)))
        assert found is not None  # nothing is unusable
        return found

    def leaf_of(self, cluster_id: str) -> str | None:
        """What a cluster is called in the tree; None: it is not in it."""
        return next((name for name, each in self.clusters.items() if each.cluster_id == cluster_id), None)


def read_document(text: str, before: Tree | None = None) -> TreeDocument:
    """A tree document. ``before``: the version that it is to follow, which it may leave levels to.

    Raises TreeError. Whether the tree may follow is :func:`~isthmus_plugins.distribution.tree.change`'s to say.
    """
    document = _parsed(text)
    reader = _Reader(document.clusters)
    drawn = reader.side(document.tree, "tree")
    if drawn is None or reader.problems:
        raise TreeError(reader.problems)
    if isinstance(drawn, str):
        raise TreeError([f"tree: {drawn} alone is no tree: name two clusters"])
    if left := [name for name in document.clusters if name not in reader.places]:
        raise TreeError(
            [f"cluster {name} is not in the tree: put it beside another one, or out of `clusters`" for name in left]
        )
    patterns = {leaf: Pattern(text) for leaf, text in document.names.items()}
    names = Names(patterns) if patterns else None
    if problems := [
        *_overlapping("topics", document.topics),
        *_overlapping("groups", document.groups),
        *_wrong_margins(document),
        *_twice(document.clusters),
        *(wrong_names(names, document.clusters, document.topics) if names is not None else ()),
    ]:
        raise TreeError(problems)
    if before is None and document.version > 1 and (left := list(_without_level(drawn))):
        raise TreeError(
            [
                f"{left[0]}: this cluster has no version of the tree before {document.version}, so its levels cannot "
                "be those of before: apply what `isthmus tree document` prints where it was applied, or write `level`"
            ]
        )
    numbering = _Numbering(before, step=min(STEP, LEVELS_MAX // drawn.height))
    root = numbering.subtree(drawn, LEVELS_MAX + 1)
    if numbering.problems:
        raise TreeError(numbering.problems)
    tree = Tree(document.version, root, document.header)
    targets = {(leaf, level): target for leaf, of in document.targets.items() for level, target in of.items()}
    if problems := list(wrong_targets(tree, targets)):
        raise TreeError(problems)
    added = {leaf: Added(each.by, each.version) for leaf, each in document.added.items()}
    if problems := list(_wrong_added(tree, added)):
        raise TreeError(problems)
    return TreeDocument(
        tree,
        tuple(document.topics),
        document.clusters,
        targets,
        document.exactly_once,
        tuple(document.groups),
        document.margin_ms,
        added,
        document.margins_ms,
        names,
    )


def _wrong_margins(document: _Document) -> Iterator[str]:
    known = ", ".join(document.groups) or "empty"
    for prefix in document.margins_ms.keys() - {*document.groups}:
        yield f"margins_ms.{prefix}: it is none of `groups` ({known}): a margin is that of a prefix as it stands there"


def _without_level(drawn: _Drawn) -> Iterator[str]:
    if drawn.level is None:
        yield drawn.place
    for side in drawn.sides:
        if not isinstance(side, str):
            yield from _without_level(side)


def _wrong_added(tree: Tree, added: Mapping[str, Added]) -> Iterator[str]:
    for leaf, (by, version) in added.items():
        if leaf not in tree.leaves or tree.above(leaf)[0].beside != (by,) or version > tree.version or by in added:
            yield f"added.{leaf}: {by} cannot have filled it: leave `added` to `isthmus tree document`"


def following(before: TreeDocument, after: TreeDocument, filling: Collection[str] = ()) -> tuple[TreeDocument, Change]:
    """The next version of a tree, with what it leaves to the one before; and what it changes. Raises TreeError.

    ``filling``: leaves that do not have all yet. Targets stay what they are by default, and a new leaf is nobody's but
    of the one that fills it. The same version again gets the same, whoever writes it.
    """
    renamed = list(_renamed(before, after))
    if after.tree.version == before.tree.version:
        if renamed:
            raise TreeError(renamed)
        same = replace(after, targets={**before.targets, **after.targets}, added=before.added)
        return same, Change({}, ())
    changed = change(before.tree, after.tree, filling)
    problems = renamed + [
        f"clusters.{name}: it is cluster {before.clusters[name].cluster_id}, and stays that"
        for name, cluster in after.clusters.items()
        if name in before.clusters and cluster.cluster_id != before.clusters[name].cluster_id
    ]
    left = {leaf: each for leaf, each in before.added.items() if leaf in filling and leaf in after.tree.leaves}
    for leaf, (by, _) in left.items():
        if by not in after.tree.leaves:
            problems.append(f"{leaf} does not have all yet: wait until {by} has filled it, or take both out")
        elif changed.added:
            problems.append(f"{leaf} is being filled: wait until it has all before {', '.join(changed.added)} comes")
    added = before.added
    if changed.added or changed.removed:
        added = {**left, **{leaf: Added(by, after.tree.version) for leaf, by in changed.added.items()}}
    unusable = {*changed.added, *left}
    targets = dict(after.targets)
    for leaf in after.tree.leaves:
        for above in after.tree.above(leaf):
            place = leaf, above.level
            if len(above.beside) == 1:
                continue
            if targets.get(place) in unusable:
                problems.append(
                    f"targets.{leaf}.{above.level}: {targets[place]} does not have all yet: choose it later"
                )
            was = None
            if leaf in before.tree.leaves and any(each.level == above.level for each in before.tree.above(leaf)):
                was = before.target(leaf, above.level)
            found = target_of(after.tree, leaf, above.level, targets, current=was, unusable=unusable)
            if found is not None:
                targets[place] = found
    if problems:
        raise TreeError(problems)
    return replace(after, targets=targets, added=added), changed


def _renamed(before: TreeDocument, after: TreeDocument) -> Iterator[str]:
    """Clusters that stay and would call topics otherwise: positions are kept by names, and those would be others."""
    was, now = (names_written(each) for each in (before, after))
    version = before.tree.version
    if bool(was) != bool(now):
        has = "has" if was else "has no"
        yield f"names: version {version} {has} names, and so have all that follow: positions are kept by topics' names"
        return
    for leaf, pattern in now.items():
        if was.get(leaf, pattern) != pattern:
            yield (
                f"names.{leaf}: it is {was[leaf]!r} in version {version}, and stays that, as positions are kept by "
                f"topics' names: {leaf} gets others by being taken out, and coming back as a new cluster"
            )


def _overlapping(of: str, prefixes: list[str]) -> Iterator[str]:
    for number, prefix in enumerate(prefixes):
        for other in prefixes[:number]:
            if prefix.startswith(other) or other.startswith(prefix):
                yield f"{of}: {other!r} and {prefix!r} overlap: keep the shorter one"


def _twice(clusters: Mapping[str, Cluster]) -> Iterator[str]:
    names: dict[str, str] = {}
    for name, cluster in clusters.items():
        if cluster.cluster_id in names:
            yield f"clusters {names[cluster.cluster_id]} and {name} have one cluster_id: a cluster is a leaf once"
        names[cluster.cluster_id] = name


# ---- YAML ----


class _Loader(yaml.SafeLoader):
    """Refuses keys that stand twice, of which YAML keeps the last one, and aliases."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        parser: Any = self  # its stubs lack types
        event = parser.peek_event()
        if parser.check_event(yaml.AliasEvent):
            raise yaml.composer.ComposerError(
                None,
                None,
                f"the alias *{event.anchor} would have a subtree stand twice, or in itself, which is a loop: each "
                "cluster is a leaf once, so write it where it stands",
                event.start_mark,
            )
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        counted = Counter(key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode))
        if twice := [key for key, count in counted.items() if count > 1]:
            raise yaml.constructor.ConstructorError(
                None, None, f"{twice[0]} stands twice: keep one of them", node.start_mark
            )
        return super().construct_mapping(node, deep)


def _parsed(text: str) -> _Document:
    if len(text.encode()) > DOCUMENT_BYTES_MAX:
        raise TreeError([f"the document is larger than {DOCUMENT_BYTES_MAX} bytes"])
    try:
        content = yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        where = getattr(error, "problem_mark", None)
        place = f"line {where.line + 1}, column {where.column + 1}: " if where is not None else ""
        raise TreeError([f"{place}{getattr(error, 'problem', None) or error}"]) from None
    except ValueError as error:  # of a date or number that is none
        raise TreeError([str(error)]) from None
    except RecursionError:
        raise TreeError([f"the tree is nested too deep: {LEVELS_MAX} levels have a bit"]) from None
    if not isinstance(content, dict):
        raise TreeError(["the document has no keys: it needs `version`, `clusters` and `tree`"])
    try:
        return _Document.model_validate(content)
    except ValidationError as error:
        raise TreeError(
            [f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors(include_url=False)]
        ) from None


# ---- the tree as it is written ----


class _Drawn(NamedTuple):
    """A subtree whose level may not be known yet."""

    place: str
    level: int | None
    sides: tuple[_Drawn | str, _Drawn | str]
    height: int
    """How many subtrees stand in each other from here on."""


class _Wrong(Exception):
    """A side of the tree cannot be."""


class _Reader:
    def __init__(self, clusters: Mapping[str, Cluster]) -> None:
        self.problems: list[str] = []
        self.places: dict[str, str] = {}
        """By cluster: where it is a leaf."""
        self._clusters = clusters

    def side(self, value: Any, place: str, depth: int = 0) -> _Drawn | str | None:
        """None where something is wrong. ``depth``: in how many subtrees it stands."""
        try:
            return self._leaf(value, place) if isinstance(value, str) else self._subtree(value, place, depth)
        except _Wrong as wrong:
            self.problems.append(f"{place}: {wrong}")
            return None

    def _leaf(self, name: str, place: str) -> str:
        if name not in self._clusters:
            known = ", ".join(self._clusters)
            raise _Wrong(f"cluster {name} is unknown: correct the name, or add it to `clusters` ({known})")
        if name in self.places:
            raise _Wrong(f"cluster {name} is a leaf at {self.places[name]} already: take one out")
        self.places[name] = place
        return name

    def _subtree(self, value: Any, place: str, depth: int) -> _Drawn | None:
        level, sides = None, value
        if isinstance(value, dict):
            if unknown := [key for key in value if key not in ("level", "sides")]:
                raise _Wrong(f"{unknown[0]} is not known: a subtree has `level` and `sides`")
            level, sides = value.get("level"), value.get("sides")
            if level is not None and (type(level) is not int or not 1 <= level <= LEVELS_MAX):
                raise _Wrong(f"level {level!r}: levels are numbers from 1 to {LEVELS_MAX}")
        if not isinstance(sides, list):
            raise _Wrong(
                f"{str(sides)[:60]} is neither the name of a cluster (in quotes) nor a subtree: [one side, another one]"
            )
        if len(sides) != 2:
            advice = _SIDES_ADVICE.get(len(sides), "put two of them into a subtree of their own")
            raise _Wrong(f"a subtree has two sides, this one has {len(sides)}: {advice}")
        if depth == LEVELS_MAX:
            raise _Wrong(f"too many levels: more than {LEVELS_MAX} above each other; balance the tree more")
        left, right = (self.side(each, f"{place}[{number}]", depth + 1) for number, each in enumerate(sides))
        if left is None or right is None:
            return None
        height = 1 + max(0 if isinstance(each, str) else each.height for each in (left, right))
        return _Drawn(place, level, (left, right), height)


_SIDES_ADVICE: Final = {0: "name two clusters, or take it out", 1: "write the side itself, without a subtree around it"}


class _Numbering:
    """Gives levels to subtrees: what is written, what the version before has, a number with room around it."""

    def __init__(self, before: Tree | None, step: int) -> None:
        self.problems: list[str] = []
        self._before = before
        self._step = step

    def subtree(self, drawn: _Drawn, upper: int) -> Subtree:
        """``upper``: the level of the subtree that it stands in."""
        level = drawn.level if drawn.level is not None else self._level(drawn, upper)
        if not 1 <= level < upper:
            if upper == 1:
                self.problems.append(
                    f"{drawn.place}: there is no level below 1 for another subtree: add the cluster elsewhere"
                )
            else:
                self.problems.append(
                    f"{drawn.place}: level {level} stands in level {upper}: levels get lower towards the clusters; "
                    f"write `level: N` with N below {upper}"
                )
        left, right = drawn.sides
        return Subtree(level, (self._node(left, level), self._node(right, level)))

    def _node(self, drawn: _Drawn | str, upper: int) -> Node:
        return drawn if isinstance(drawn, str) else self.subtree(drawn, upper)

    def _level(self, drawn: _Drawn, upper: int) -> int:
        if self._before is None:
            return drawn.height * self._step
        left, right = ([leaf for leaf in _drawn_leaves(side) if leaf in self._before.leaves] for side in drawn.sides)
        if left and right:
            return self._before.level_between(left[0], right[0])
        return upper // 2


def _drawn_leaves(drawn: _Drawn | str) -> Iterator[str]:
    if isinstance(drawn, str):
        yield drawn
    else:
        for side in drawn.sides:
            yield from _drawn_leaves(side)


def written(document: TreeDocument) -> dict[str, Any]:
    """The document with all its levels, which reads as the same."""
    targets: dict[str, dict[int, str]] = {}
    for (leaf, level), target in document.targets.items():
        targets.setdefault(leaf, {})[level] = target
    added = {leaf: each._asdict() for leaf, each in document.added.items()}
    return {
        "version": document.tree.version,
        "topics": list(document.topics),
        "header": document.tree.header,
        "exactly_once": document.exactly_once,
        "clusters": {name: cluster.model_dump() for name, cluster in document.clusters.items()},
        "tree": _written(document.tree.root),
        "targets": targets,
        **_offsets_written(document),
        **({"added": added} if added else {}),
        **({"names": names} if (names := names_written(document)) else {}),
    }


def names_written(document: TreeDocument) -> dict[str, str]:
    """Empty where topics are called the same everywhere."""
    return {} if document.names is None else {leaf: each.text for leaf, each in document.names.patterns.items()}


def _offsets_written(document: TreeDocument) -> dict[str, Any]:
    """Left out where it is the default: what was applied before there was any reads the same."""
    written: dict[str, Any] = {"groups": list(document.groups)} if document.groups else {}
    if document.margin_ms != MARGIN_MS:
        written["margin_ms"] = document.margin_ms
    return {**written, "margins_ms": dict(document.margins_ms)} if document.margins_ms else written


def _written(node: Node) -> Any:
    if isinstance(node, str):
        return node
    return {"level": node.level, "sides": [_written(side) for side in node.sides]}
