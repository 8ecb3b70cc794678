"""A name of bootstrap servers that leads to one cluster and then to another, as DNS would have it.

Runs as a child (:mod:`isthmus_bench.children`): each line of JSON on standard input says where it leads from then on,
and is answered with an empty one. Connections that there are stay where they are.
"""

from __future__ import annotations

import asyncio
import json
import sys
from types import TracebackType
from typing import Self

from isthmus_bench.children import Child
from isthmus_bench.proxies import HOST
from isthmus_bench.relay import Client


class MovingName:
    """Listens on ``port``; nobody is to come before it leads somewhere."""

    def __init__(self) -> None:
        self._child = Child("isthmus_bench.moving_name")
        self.port = self._child.port

    def lead_to(self, host: str, port: int) -> None:
        """Whoever comes from now on is connected with that address. Raises ChildFailed."""
        self._child.ask(host=host, port=port)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._child.close()


async def _serve() -> None:
    loop = asyncio.get_running_loop()
    leads_to = (HOST, 0)
    server = await loop.create_server(lambda: Client(leads_to), HOST, 0)
    print(json.dumps({"port": server.sockets[0].getsockname()[1]}), flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        told = json.loads(line)
        leads_to = told["host"], told["port"]
        print("{}", flush=True)


if __name__ == "__main__":
    asyncio.run(_serve())
