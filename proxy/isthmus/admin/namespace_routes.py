"""The routes that say what is in a namespace, and whether two of them overlap."""

from __future__ import annotations

from typing import Annotated

from fastapi import FastAPI, Query

from isthmus.admin import problems, views
from isthmus.admin.control import Prefix, control_of, namespace_of
from isthmus.admin.models import ClashView, NamespaceContentsView, NamespaceItemView, NamespaceOverlapView
from isthmus.admin.services import AdminServices
from isthmus_control.control_state import ControlState
from isthmus_control.model import Namespace, ResourceType
from isthmus_control.rules.checks import PREFIX_CHARS_MAX
from isthmus_control.rules.overlaps import CLASHES, Relation, relation
from isthmus_plugins.cluster import BrokerUnavailable, ClusterApi, KafkaRefused
from isthmus_plugins.links import OperationError


def install(app: FastAPI, services: AdminServices) -> None:
    """Add the routes."""

    @app.get("/v1/namespaces/{type}/contents", tags=["namespaces"], summary="Show what is in a namespace")
    async def namespace_contents(type: ResourceType, prefix: Prefix) -> NamespaceContentsView:
        """Asks the cluster, as this proxy's own user: what that may not describe is not there."""
        control = control_of(services)
        namespace = namespace_of(control, type, prefix)
        if services.cluster is None:
            raise problems.not_ready("the cluster's client")
        try:
            items = await _items(services.cluster, control.state, namespace)
        except (BrokerUnavailable, KafkaRefused) as error:
            raise OperationError("UNAVAILABLE", f"what the cluster has is not read: {error}", 503) from error
        return NamespaceContentsView(
            namespace=views.namespace_view(control, namespace), count=len(items), empty=not items, items=items
        )

    @app.get("/v1/namespaces/{type}/overlap", tags=["namespaces"], summary="Say whether two namespaces overlap")
    async def namespace_overlap(
        type: ResourceType,
        prefix: Prefix,
        other: Annotated[str, Query(max_length=PREFIX_CHARS_MAX, description="the other prefix, of the same type")],
    ) -> NamespaceOverlapView:
        """Prefixes alone count: there need not be such namespaces."""
        found = relation(prefix, other)
        clashes = CLASHES if found is not Relation.NONE else ()
        return NamespaceOverlapView(
            type=type,
            prefix=prefix,
            other=other,
            overlap=found is not Relation.NONE,
            relation=found,
            refused=[ClashView(roles=each.roles, links=each.links, reason=each.reason) for each in clashes],
        )


async def _items(cluster: ClusterApi, state: ControlState, namespace: Namespace) -> list[NamespaceItemView]:
    """What the namespace holds, by name. Raises BrokerUnavailable, KafkaRefused."""
    if namespace.type is ResourceType.CONSUMER_GROUP:
        return [NamespaceItemView(name=name) for name in sorted(await cluster.groups()) if name in namespace]
    if namespace.type is ResourceType.PRINCIPAL:
        principals = {binding.principal for binding in await cluster.acls()}
        return [NamespaceItemView(name=name) for name in sorted(principals) if name in namespace]
    topics = await cluster.topics()
    followers = state.follower_topics
    return [
        NamespaceItemView(
            name=name,
            partitions=len(topic.partitions),
            state=followers[name].state.value if name in followers else None,
            link_name=followers[name].link if name in followers else None,
        )
        for name, topic in sorted(topics.items())
        if name in namespace
    ]
