"""Bounds and defaults of settings that the control log, the REST resources and the command line all check or name."""

from __future__ import annotations

from typing import Final

SYNC_CONFIRM_TIMEOUT_MS: Final = 10_000
"""``sync.confirm.timeout.ms`` where it was never set."""
SYNC_CONFIRM_TIMEOUT_MS_MIN: Final = 2_000
"""Shorter, and the lease of those that are In-Sync would not fit in."""
SYNC_CONFIRM_TIMEOUT_MS_MAX: Final = 9_999_999
