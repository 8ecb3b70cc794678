"""Bounds and defaults of settings that the control log, the REST resources and the command line all check or name."""

from __future__ import annotations

from typing import Final

SYNC_CONFIRM_TIMEOUT_MS: Final = 10_000
"""``sync.confirm.timeout.ms`` where it was never set."""
SYNC_CONFIRM_TIMEOUT_MS_MIN: Final = 2_000
"""Shorter, and the lease of those that are In-Sync would not fit in."""
SYNC_CONFIRM_TIMEOUT_MS_MAX: Final = 9_999_999
REVERSAL_TRANSACTIONS_WAIT_MS: Final = 1_000
"""How long a reversal lets open transactions end by themselves, where nothing else is said."""
REVERSAL_TRANSACTIONS_WAIT_MS_MAX: Final = 900_000
"""As long as brokers let a transaction be open, by default."""
REVERSAL_HOLD_MS: Final = 5_000
"""How long it has clients' writes wait at most, where nothing else is said."""
REVERSAL_HOLD_MS_MAX: Final = 60_000
"""Clients give up a request sooner."""
MOVE_CLIENTS_MS_MAX: Final = 86_400_000
"""How long clients may be told to look for the cluster that leads now."""

VERIFY_EVERY: Final = "verify.every.ms"
"""The setting of a link: in which time both whole logs of what follows are compared again, or :data:`VERIFY_OFF`."""
VERIFY_OFF: Final = "off"
VERIFY_EVERY_MS: Final = 7 * 86_400_000
"""``verify.every.ms`` where it was never set."""
VERIFY_EVERY_MS_MIN: Final = 1_000
VERIFY_EVERY_MS_MAX: Final = 365 * 86_400_000
