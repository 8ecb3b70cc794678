"""The proxy's listeners and sessions without the rest of the process: no control log, no client of its own, no admin.

So it runs before anything, a broker of canned answers too, and what it costs is the path of a request alone. The
reservation plugin is the real one, over an empty control state; ``isthmus proxy`` is what the other benchmarks run.
"""

from __future__ import annotations

import argparse
import ssl
import time
from types import SimpleNamespace
from typing import Any

from isthmus.session.dispatch import compile_routes
from isthmus.session.endpoint import Endpoint
from isthmus.session.listener import Gateway, Limits, Listener
from isthmus_bench import produce_hook
from isthmus_bench.children import serve, server_tls
from isthmus_control.control_state import ControlState
from isthmus_plugins import descriptors
from isthmus_plugins.api import RequestHook
from isthmus_plugins.reservation import ReservationPlugin
from isthmus_plugins.tasks import Supervision


def reservation_hooks() -> list[RequestHook]:
    """The hooks of a reservation plugin that reserves nothing, and knows every topic's name."""
    context: Any = SimpleNamespace(
        control=SimpleNamespace(state=ControlState("bench"), subscribe=lambda changed: None),
        internal_topic_ids=frozenset(),
        lease_deadline=float("inf"),
        clock=time,
        supervision=Supervision(),
        known_topic_name=lambda topic_id: topic_id.hex(),
    )
    plugin = ReservationPlugin()
    plugin.isthmus_start(context)
    return list(plugin.isthmus_request_hooks())


async def start(target: Endpoint, hooks: list[RequestHook], tls: ssl.SSLContext | None) -> int:
    """Listen on a free port, which is returned."""
    descriptors.raise_limit()
    port = 0

    def address(node_id: int, host: bytes, broker_port: int) -> tuple[bytes, int]:
        return b"127.0.0.1", port

    gateway = Gateway(compile_routes(hooks, address), Limits(), Supervision())
    listener = Listener(gateway, 1, Endpoint("127.0.0.1", 0), lambda: [target], tls)
    await listener.start()
    await listener.accept()
    port = listener.bind.port
    return port


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("target", help="host:port of the broker")
    parser.add_argument("--certificate")
    parser.add_argument("--plugins", action="store_true", help="the default plugins")
    parser.add_argument("--hook", action="store_true", help="a hook on Produce that wants nothing")
    chosen = parser.parse_args()
    host, _, port = chosen.target.rpartition(":")
    hooks = reservation_hooks() if chosen.plugins else []
    hooks += produce_hook.plugin.isthmus_request_hooks() if chosen.hook else ()
    serve(lambda: start(Endpoint(host, int(port)), hooks, server_tls(chosen.certificate)))


if __name__ == "__main__":
    main()
