"""What operators are shown of plugins: the schema of ``/v1/plugins`` and of ``isthmus plugin list -o json``."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from isthmus_control.model import ResourceType


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)


class PluginOffer(_Model):
    """A plugin that namespaces can have on this proxy."""

    plugin: str
    about: str
    types: list[ResourceType]
    """Of which namespaces."""
    version: int
    """Of its settings."""
    policy: Literal["closed", "open"]
    """What becomes of a request of which it fails: refused, or as if the plugin were not there."""
    settings_schema: dict[str, Any]


class PluginStatus(_Model):
    """A plugin that is enabled for a namespace, as it runs on this proxy."""

    plugin: str
    type: ResourceType
    prefix: str
    settings: dict[str, Any]
    version: int
    policy: Literal["closed", "open"]
    state: Literal["running", "starting", "failed"]
    """``failed``: what it would look at is refused on this proxy."""
    reason: str | None = None
    failures: int = 0
    """Of this plugin in all namespaces, since the process started."""
