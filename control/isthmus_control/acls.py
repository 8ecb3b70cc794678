"""Access control bindings (KIP-11, KIP-290): values, and which of them a filter matches.

The numbers are those of the protocol (AclOperation and so on). They are kept as they are, so that a binding whose
operation is newer than this version is still copied exactly.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final, NamedTuple

ANY: Final = 1
"""In a filter: whatever type, pattern type, operation or permission."""
MATCH: Final = 2
"""In a filter, as pattern type: every pattern that applies to the resource's name."""
WILDCARD: Final = "*"
"""As the name of a literal pattern: every resource. As the name of a principal: every principal."""


class AclResource(IntEnum):
    """ResourceType."""

    TOPIC = 2
    GROUP = 3
    CLUSTER = 4
    TRANSACTIONAL_ID = 5
    DELEGATION_TOKEN = 6
    USER = 7


class Pattern(IntEnum):
    """PatternType."""

    LITERAL = 3
    PREFIXED = 4


class Permission(IntEnum):
    """AclPermissionType."""

    DENY = 2
    ALLOW = 3


_OPERATIONS: Final = {
    2: "all",
    3: "read",
    4: "write",
    5: "create",
    6: "delete",
    7: "alter",
    8: "describe",
    9: "cluster-action",
    10: "describe-configs",
    11: "alter-configs",
    12: "idempotent-write",
    13: "create-tokens",
    14: "describe-tokens",
    15: "two-phase-commit",
}


class AclBinding(NamedTuple):
    """Who may, or may not, do what with which resources, from which host."""

    resource_type: int
    resource_name: str
    pattern_type: int
    principal: str
    host: str
    operation: int
    permission: int

    def __str__(self) -> str:
        permission = "deny" if self.permission == Permission.DENY else "allow"
        pattern = " prefixed" if self.pattern_type == Pattern.PREFIXED else ""
        resource = _name(AclResource, self.resource_type)
        host = "" if self.host == WILDCARD else f" from {self.host}"
        operation = _OPERATIONS.get(self.operation, str(self.operation))
        return f"{permission} {self.principal} {operation} {resource}{pattern} {self.resource_name!r}{host}"


class AclFilter(NamedTuple):
    """Matches the bindings that agree in all that is given; None and ANY leave a field open."""

    resource_type: int = ANY
    resource_name: str | None = None
    pattern_type: int = ANY
    principal: str | None = None
    host: str | None = None
    operation: int = ANY
    permission: int = ANY


EVERY_ACL: Final = AclFilter()


def _name(kind: type[IntEnum], number: int) -> str:
    try:
        return kind(number).name.lower().replace("_", "-")
    except ValueError:
        return str(number)
