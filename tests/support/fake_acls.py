"""The access control bindings of a model cluster."""

from __future__ import annotations

from collections.abc import Collection

from isthmus_control.acls import EVERY_ACL, AclBinding, AclFilter
from isthmus_plugins.cluster import KafkaRefused


class FakeAcls:
    """What :class:`~isthmus_plugins.api.ClusterApi` has for bindings.

    As on a real cluster, a change is seen a moment after it was taken.
    """

    def __init__(self) -> None:
        self.bindings: frozenset[AclBinding] = frozenset()
        self.acl_changes: list[tuple[str, AclBinding]] = []
        """What was asked for, in that order."""
        self.acls_refused: KafkaRefused | None = None
        self._seen: frozenset[AclBinding] = frozenset()

    async def _request(self) -> None:
        raise NotImplementedError

    async def acls(self, matching: AclFilter = EVERY_ACL) -> frozenset[AclBinding]:
        """All of them."""
        assert matching == EVERY_ACL
        await self._request()
        self._authorize()
        seen, self._seen = self._seen, self.bindings
        return seen

    async def create_acls(self, bindings: Collection[AclBinding]) -> None:
        await self._request()
        self._authorize()
        self.acl_changes += [("create", binding) for binding in sorted(bindings)]
        self.bindings |= frozenset(bindings)

    async def delete_acls(self, bindings: Collection[AclBinding]) -> None:
        await self._request()
        self._authorize()
        self.acl_changes += [("delete", binding) for binding in sorted(bindings)]
        self.bindings -= frozenset(bindings)

    def set_acls(self, *bindings: AclBinding) -> None:
        """Somebody makes these all there are, and everybody sees it."""
        self.bindings = self._seen = frozenset(bindings)

    def _authorize(self) -> None:
        if self.acls_refused is not None:
            raise self.acls_refused
