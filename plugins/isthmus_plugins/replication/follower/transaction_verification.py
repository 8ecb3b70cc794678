"""The target's transaction verification (KIP-890): switched off with the operator's consent, and on again at the end.

Brokers with ``transaction.partition.verification.enable`` take transactional records, and offsets of transactions, only
of producers that their own coordinator knows. Copied ones come from another cluster's coordinator, so a follower can
have them only where the setting is off. It is cluster-wide, and protects other producers of the target, so it is the
operator's to give up: a consent that stands on a mapping (``link attach --disable-transaction-verification``).

While some mapping stands with that consent, the setting is held at ``false``; what it was set to before is recorded in
the control log first, restored when no such mapping is left, and forgotten after. Every proxy brings that about, again
and again, so that it does not matter which of them dies when.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Final

from isthmus_control.commands import HoldBrokerConfig, ReleaseBrokerConfig
from isthmus_control.control_state import ControlState
from isthmus_control.directions import followed
from isthmus_control.model import TRANSACTION_VERIFICATION, ResourceType
from isthmus_control.outcome import Rejected
from isthmus_control.states import ReasonCode
from isthmus_plugins.cluster import BrokerUnavailable, KafkaRefused
from isthmus_plugins.links import TransactionVerificationPlan, TransactionVerificationStatus
from isthmus_plugins.process import PluginContext
from isthmus_plugins.replication.link import reasons
from isthmus_plugins.replication.link.part import Part
from isthmus_plugins.tasks import Tasks

log = logging.getLogger("isthmus_plugins.replication")

CONSENT: Final = "--disable-transaction-verification"
OFF: Final = "false"
CHECK_INTERVAL_S: Final = 15.0
"""How often the brokers are asked, where a namespace follows: somebody else may change the setting."""
RETRY_DELAY_S: Final = 1.0
EFFECTIVE_WAIT_S: Final = 10.0
"""How long brokers may take to act on a change of the setting."""
EFFECTIVE_POLL_S: Final = 0.05
LOST: Final = (
    f"with {TRANSACTION_VERIFICATION}=false the target's own transactional producers of before KIP-890 part 2 (clients "
    "older than Kafka 4.0) lose the brokers' protection from transactions that hang after a late request"
)
ASK: Final = f"set {TRANSACTION_VERIFICATION}=false on the target yourself, or agree to it with link attach {CONSENT}"


class TransactionVerification(Part):
    """What this cluster's brokers do with transactions that they do not know, and what the operator agreed to."""

    def __init__(self, context: PluginContext) -> None:
        self._context = context
        self._clock = context.clock
        self._tasks = Tasks("transaction-verification", context.supervision)
        self._wake = asyncio.Event()
        self._lock = asyncio.Lock()
        self._seen: tuple[object, object] = (None, None)
        self.enabled: bool | None = None
        """Whether some broker verifies, as last read; None: not known yet."""
        self.trouble: str | None = None
        """Why the setting is not as it should be."""

    def start(self) -> None:
        self._tasks.keep("hold", self._hold_for_ever)

    async def stop(self) -> None:
        await self._tasks.close()

    def control_changed(self, state: ControlState) -> None:
        seen = (state.links, state.held_configs)
        if seen[0] is not self._seen[0] or seen[1] is not self._seen[1]:
            self._seen = seen
            self._wake.set()

    def objection(self) -> tuple[ReasonCode, str] | None:
        """Why no transactional record can be appended here; None if it can, or if that is not known yet."""
        if not self.enabled:
            return None
        if self._context.control.state.disables_transaction_verification:
            why = self.trouble or "the brokers are still to act on it"
            message = f"{TRANSACTION_VERIFICATION} is to be switched off on the target, and is not: {why}"
        else:
            message = f"the target's brokers verify transactions, and take none of another cluster: {ASK}"
        return ReasonCode.TRANSACTION_VERIFICATION_ENABLED, message

    # ---- attaching ----

    async def plan(self, kind: ResourceType, consent: bool) -> TransactionVerificationPlan:
        """What attaching a follower namespace means for the setting. Raises BrokerUnavailable, KafkaRefused."""
        enabled = await self._read()
        held = TRANSACTION_VERIFICATION in self._context.control.state.held_configs
        plan = TransactionVerificationPlan(setting=TRANSACTION_VERIFICATION, enabled=enabled, action="none")
        if consent and (enabled or held):
            # Without the right to change it the operator had better know before anything follows.
            try:
                await self._context.cluster.alter_cluster_config(TRANSACTION_VERIFICATION, OFF, validate_only=True)
            except KafkaRefused as error:
                raise KafkaRefused(error.error_code, error.error_name, _refused(error)) from error
            plan.action = "disable"
            plan.message = f"{LOST}; it is restored when the last namespace that needs it is detached"
        elif not consent and (enabled or held) and kind is ResourceType.CONSUMER_GROUP:
            plan.action = "refuse"
            plan.message = (
                f"while the follower's brokers have {TRANSACTION_VERIFICATION} on, offsets of groups cannot be copied "
                f"there: {ASK}"
            )
        elif not consent and (enabled or held) and kind is ResourceType.TOPIC:
            plan.message = (
                "only of interest where producers use transactions (transactional.id): the follower's brokers take no "
                f"copies of those while {TRANSACTION_VERIFICATION} is on, and a partition that gets one stops there. "
                f"Without such producers there is nothing to do; with them {ASK}"
            )
        return plan

    def status(self) -> TransactionVerificationStatus:
        state = self._context.control.state
        held = state.held_configs.get(TRANSACTION_VERIFICATION)
        return TransactionVerificationStatus(
            setting=TRANSACTION_VERIFICATION,
            enabled=self.enabled,
            disabled_by_link=held is not None,
            former=held.former if held is not None else None,
            message=self.trouble or (LOST if held is not None else None),
        )

    # ---- bringing it about ----

    async def _hold_for_ever(self) -> None:
        while True:
            self._wake.clear()
            delay = CHECK_INTERVAL_S
            if self._concerned() and self._clock.monotonic() < self._context.lease_deadline:
                try:
                    await self.reconcile()
                except (BrokerUnavailable, KafkaRefused):
                    delay = RETRY_DELAY_S
            elif self._concerned():
                delay = RETRY_DELAY_S
            try:
                async with asyncio.timeout(delay):
                    await self._wake.wait()
            except TimeoutError:
                pass

    def _concerned(self) -> bool:
        state = self._context.control.state
        return bool(state.held_configs) or any(followed(link) for link in state.links.values())

    async def reconcile(self) -> None:
        """Make the setting what the mappings ask for, as far as it is ours. Raises BrokerUnavailable, KafkaRefused."""
        async with self._lock:
            try:
                await self._reconcile()
            except (BrokerUnavailable, KafkaRefused) as error:
                self._note(_refused(error) if isinstance(error, KafkaRefused) else str(error))
                raise
            self._note(None)

    def _note(self, trouble: str | None) -> None:
        if trouble is not None and trouble != self.trouble:
            log.warning("transaction verification not as agreed", extra={"detail": trouble})
        self.trouble = trouble

    async def _reconcile(self) -> None:
        cluster, state = self._context.cluster, self._context.control.state
        held = state.held_configs.get(TRANSACTION_VERIFICATION)
        if state.disables_transaction_verification:
            if held is None:
                former = await cluster.cluster_config(TRANSACTION_VERIFICATION)
                await self._append(HoldBrokerConfig(TRANSACTION_VERIFICATION, OFF, former))
            if await self._read():
                await cluster.alter_cluster_config(TRANSACTION_VERIFICATION, OFF)
                await self._effective()
                log.info("transaction verification switched off", extra={"setting": TRANSACTION_VERIFICATION})
        elif held is not None:
            await cluster.alter_cluster_config(TRANSACTION_VERIFICATION, held.former)
            await self._restored(held.former)  # else what is held next would have our value as the former one
            await self._append(ReleaseBrokerConfig(TRANSACTION_VERIFICATION))
            log.info(
                "transaction verification restored",
                extra={"setting": TRANSACTION_VERIFICATION, "detail": f"to {held.former or 'not set'}"},
            )
            await self._read()
        else:
            await self._read()

    async def _append(self, body: HoldBrokerConfig | ReleaseBrokerConfig) -> None:
        outcome = await self._context.control.append(body)
        if isinstance(outcome, Rejected):  # the mappings changed meanwhile
            raise BrokerUnavailable(outcome.message)

    async def _read(self) -> bool:
        """Whether some broker verifies now."""
        values = await self._context.cluster.broker_configs(TRANSACTION_VERIFICATION)
        self.enabled = any(value == "true" for value in values.values())
        return self.enabled

    async def _restored(self, former: str | None) -> None:
        """Return when the brokers report what was restored."""

        async def other() -> bool:
            return await self._context.cluster.cluster_config(TRANSACTION_VERIFICATION) != former

        await self._while(other, f"{TRANSACTION_VERIFICATION} was restored, and the brokers do not tell so")

    async def _effective(self) -> None:
        """Return when every broker acts on the setting."""
        await self._while(
            self._read,
            f"{TRANSACTION_VERIFICATION} is set cluster-wide, and some broker still verifies: it has a value "
            "of its own, which goes before",
        )

    async def _while(self, pending: Callable[[], Awaitable[bool]], objection: str) -> None:
        """Return when a change has reached the brokers. Raises BrokerUnavailable."""
        deadline = self._clock.monotonic() + EFFECTIVE_WAIT_S
        while await pending():
            if self._clock.monotonic() > deadline:
                raise BrokerUnavailable(objection)
            await asyncio.sleep(EFFECTIVE_POLL_S)


def _refused(error: KafkaRefused) -> str:
    why = reasons.refused(error, "AlterConfigs and DescribeConfigs", "the cluster")
    return f"the brokers refuse the setting {TRANSACTION_VERIFICATION}: {why}"
