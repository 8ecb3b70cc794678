"""What is secret in settings and requests, by the names of fields: hidden in the audit, and from viewers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any, Final

HIDDEN: Final = "(hidden)"
_SECRET: Final = re.compile(r"token|secret|passw|salt|credential|private|jaas", re.IGNORECASE)

hides: ContextVar[bool] = ContextVar("hides", default=False)
"""Whether the request that is being answered is a viewer's."""


def settings_for_who_asks(settings: dict[str, Any]) -> dict[str, Any]:
    """A plugin's settings as the one may see them whose request is being answered."""
    visible: dict[str, Any] = shown(settings) if hides.get() else settings
    return visible


def shown(value: Any) -> Any:
    """Without what is secret in it, by the names of fields."""
    if isinstance(value, Mapping):
        return {
            str(name): HIDDEN if _SECRET.search(str(name)) and each is not None else shown(each)
            for name, each in value.items()
        }
    return [shown(each) for each in value] if isinstance(value, list | tuple) else value
