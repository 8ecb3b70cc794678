"""A plugin that looks at each Produce request and wants nothing: what a hook costs, and what it costs nobody else."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from isthmus_plugins.api import Request, RequestHook, Verdict
from isthmus_plugins.hookspecs import hookimpl
from isthmus_protocol.schema import ApiKey

NAME = "produce-hook"


class ProduceHook:
    @hookimpl
    def isthmus_request_hooks(self) -> Sequence[RequestHook]:
        return (RequestHook(ApiKey.PRODUCE, _look),)


def _look(request: Request) -> Verdict:
    request.leave = None  # it wants to see the next one, too
    return None


plugin = ProduceHook()


def install(site: Path) -> Path:
    """Make it known to a process that has this directory among its paths."""
    about = site / "isthmus_produce_hook-1.0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: isthmus-produce-hook\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(f"[isthmus.plugins]\n{NAME} = {__name__}:plugin\n")
    return site
