"""The hooks. This file is the whole contract between the proxy and its plugins.

A plugin is an object whose methods implement some of these hooks (:data:`hookimpl`). It is found through the entry
point group ``isthmus.plugins`` and enabled by its name in the configuration (``[plugins] enabled``), in that order.

Two kinds of hooks, never mixed:

* *fast path*: what :func:`isthmus_request_hooks` returns is called for each request of the APIs it names, between two
  reads of a socket. It must not block and not await. It costs nothing for APIs that nobody names.
* *process*: everything else. Called seldom; those documented as awaitable may return an awaitable.

A hook that raises fails closed: the connection (fast path) or the start of the process ends, with the reason logged.

Commands of a plugin's own are no hook, since there is no process when they start: an entry point of the group
``isthmus.commands`` that names a ``typer.Typer`` makes its name one of ``isthmus``'s commands.
"""

from __future__ import annotations

from collections.abc import Awaitable, Iterable, Sequence
from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from prometheus_client.core import Metric

    from isthmus_plugins.api import RequestHook
    from isthmus_plugins.confirmation import Confirmer
    from isthmus_plugins.link_operations import LinkOperations
    from isthmus_plugins.namespace_plugins import NamespacePlugin
    from isthmus_plugins.observers import ConnectionObserver, LinkObserver
    from isthmus_plugins.process import PluginContext
    from isthmus_plugins.trees import TreeOperations

PROJECT = "isthmus"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def isthmus_start(context: PluginContext) -> Awaitable[None] | None:
    """The process has its cluster and its control state; no client is served yet. Awaited, in plugin order."""


@hookspec
def isthmus_stop() -> Awaitable[None] | None:
    """No client is served any more. Awaited, in reverse plugin order."""


@hookspec
def isthmus_request_hooks() -> Sequence[RequestHook]:  # type: ignore[empty-body]
    """Which requests this plugin looks at. Asked once, after :func:`isthmus_start`; called on the fast path."""


@hookspec
def isthmus_confirmers() -> Sequence[Confirmer]:  # type: ignore[empty-body]
    """Conditions for acks of Produce: ``confirmation.py`` has the contract. Asked once, after :func:`isthmus_start`."""


@hookspec
def isthmus_namespace_plugin() -> NamespacePlugin:  # type: ignore[empty-body]
    """What operators can enable for namespaces at run time: ``namespace_plugins.py`` has the contract. Asked once,
    after :func:`isthmus_start`."""


@hookspec
def isthmus_connection_observers() -> Sequence[ConnectionObserver]:  # type: ignore[empty-body]
    """Who is notified of clients' connections: ``observers.py`` has the contract. Asked once, after
    :func:`isthmus_start`."""


@hookspec
def isthmus_link_observers() -> Sequence[LinkObserver]:  # type: ignore[empty-body]
    """Who is notified of what this proxy's ends of links do: ``observers.py`` has the contract. Asked once, after
    :func:`isthmus_start`."""


@hookspec
def isthmus_metrics() -> Iterable[Metric]:  # type: ignore[empty-body]
    """Prometheus metric families of the plugin, made at each scrape. Names start with ``isthmus_``."""


@hookspec(firstresult=True)
def isthmus_link_operations() -> LinkOperations | None:
    """What operators can do with links. The first plugin that answers serves ``/v1/links``."""


@hookspec(firstresult=True)
def isthmus_tree_operations() -> TreeOperations | None:
    """What operators can do with the tree of clusters. The first plugin that answers serves ``/v1/tree``."""
