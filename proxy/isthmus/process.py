"""The process: starts the parts in order, serves until it has to stop, and stops them in reverse.

The order matters. The control state is read before any client is served, so that no reservation is missed; the brokers
are claimed in the control log before any port accepts, so that one proxy serves a broker; plugins start before clients
come. On SIGTERM nothing new is accepted, what was asked is answered, then the lease is given back.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import ssl
from collections.abc import Awaitable, Iterable
from importlib.metadata import entry_points, version
from itertools import chain
from typing import Any, Final, cast

import pluggy
import uvloop
from prometheus_client.core import Metric

from isthmus import logs, memory, metrics
from isthmus.admin.access import Access
from isthmus.admin.models import BrokerAddress, LeaseStatus, ProcessDescription
from isthmus.admin.server import AdminServer
from isthmus.admin.services import AdminServices
from isthmus.admin.unix_socket import UnixSocket
from isthmus.anchor_places import places_of
from isthmus.audit_topic import AuditTopic
from isthmus.cluster_access import ClusterAccess
from isthmus.config import PLUGIN_ENTRY_POINTS, ProxyConfig
from isthmus.config_tls import (
    admin_listener_tls,
    client_listener_tls,
    cluster_tls,
    link_dial_tls,
    link_listener_tls,
    session_tls,
)
from isthmus.context import Context
from isthmus.control_log import ControlLog, ControlLogHalted, ControlLogLost, LeaseSpec
from isthmus.control_topic import TOPIC as CONTROL_TOPIC
from isthmus.data_directory import DataDirectory
from isthmus.errors import ConfigurationError, PeerFault
from isthmus.front import Addresses, Front
from isthmus.kafka.client import Backoff, ClusterClient, is_transient
from isthmus.reloading import Reloads
from isthmus.sealing import Sealing
from isthmus.session.authentication import Authentication
from isthmus.session.broker_sasl import BrokerSasl
from isthmus.session.dispatch import compile_routes
from isthmus.session.listener import Gateway, Limits
from isthmus.transactions import OpenTransactions
from isthmus_control.anchors import ANCHORS_UNKNOWN
from isthmus_control.control_state import ControlState
from isthmus_control.levels import SIGNING
from isthmus_control.outcome import Rejected
from isthmus_control.sealing import Sealer
from isthmus_control.signing import Signer
from isthmus_plugins import descriptors, hookspecs
from isthmus_plugins.api import RequestHook
from isthmus_plugins.clock import monotonic
from isthmus_plugins.confirmation import AckGate
from isthmus_plugins.link_policy import LinkPolicy
from isthmus_plugins.namespace_host import NamespaceHost
from isthmus_plugins.process import CaptureAllowed, PluginContext
from isthmus_plugins.tasks import Supervision
from isthmus_protocol.cluster_ids import is_usual

log = logging.getLogger("isthmus.process")

VERSION: Final = version("isthmus")
CLAIM_RETRY_S: Final = 5.0
SASL_KNOWN_WITHIN_S: Final = 2.0
"""How long brokers may take at the start to say whether they have SASL; later, clients' requests wait for that."""
SERVED_WITHIN_S: Final = 60.0
"""How long brokers may take at the start to be known to the cluster, and then to serve the control topic: a partition
has no leader for some seconds after its only broker was started."""
LOST_RETRY_S: Final = 1.0
"""How often a control log that is lost is looked at again: an operator may have restored it."""
STOP_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)
RESERVATION_PLUGIN: Final = "reservation"


def run(config: ProxyConfig, *, new_control_log: bool = False) -> int:
    """Run a proxy until SIGTERM or SIGINT. Returns the exit code; raises ConfigurationError.

    ``new_control_log``: an operator gives up what a lost control log held.
    """
    logs.configure(config.proxy.log_style, config.proxy.log_level)
    return uvloop.run(_main(config, new_control_log))


async def _main(config: ProxyConfig, new_control_log: bool) -> int:
    process = Process(config, new_control_log=new_control_log)
    loop = asyncio.get_running_loop()
    stopping = asyncio.Event()
    # Not by the loop's handlers: a loop gives them back when it closes, and one more signal would then end by itself a
    # process that ends well.
    for number in STOP_SIGNALS:
        signal.signal(number, lambda *_: loop.call_soon_threadsafe(stopping.set))
    signal.signal(signal.SIGHUP, lambda *_: loop.call_soon_threadsafe(process.reloads.ask))
    starting = loop.create_task(process.start(), name="process/start")
    stop = loop.create_task(stopping.wait(), name="process/signal")
    try:
        await asyncio.wait((starting, stop), return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            starting.result()
            memory.leave_out_what_is_there()
            must_stop = loop.create_task(process.must_stop.wait(), name="process/must-stop")
            await asyncio.wait((stop, must_stop), return_when=asyncio.FIRST_COMPLETED)
            must_stop.cancel()
    finally:
        starting.cancel()
        stop.cancel()
        await asyncio.wait((starting,))
        await process.stop()
        for number in (*STOP_SIGNALS, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
    return 1 if process.must_stop.is_set() else 0


class Process:
    """All parts of one proxy."""

    def __init__(self, config: ProxyConfig, *, new_control_log: bool = False) -> None:
        self.config = config
        self._new_control_log = new_control_log
        self._waits = ""
        """What the start waits for: brokers, or, where the control log is lost, an operator's decision."""
        self.must_stop = asyncio.Event()
        """A newer process took this one's name: it must stop."""
        self._plugins: list[tuple[str, object]] = []
        self._started: list[object] = []
        self._ack_gates: list[AckGate] = []
        self._request_hooks: list[RequestHook] = []
        self._namespace_host: NamespaceHost | None = None
        self._ready = False
        self._stopping = False
        self._client: ClusterClient | None = None
        self._control_log: ControlLog | None = None
        self._context: Context | None = None
        self._sealing: Sealing | None = None
        self._front: Front | None = None
        self._gateway: Gateway | None = None
        self._broker_sasl: BrokerSasl | None = None
        self._supervision = Supervision()
        data = config.data
        self._data = None if data.directory is None else DataDirectory(data.directory, data.warn_bytes)
        self._source = metrics.MetricsSource(self._supervision, plugin_metrics=self._plugin_metrics)
        self._audit = AuditTopic(self._supervision)
        self._source.audit = self._audit
        self._services = AdminServices(
            name=config.proxy.name or "",
            describe=self.describe,
            not_ready=self._not_ready,
            registry=metrics.make_registry(self._source),
            supervision=self._supervision,
            version=VERSION,
            data_directory=config.data.directory,
            audit=self._audit,
        )
        self.reloads = Reloads(self._supervision)
        """Of files that may change while it runs."""
        self._source.reloads = self.reloads.counts
        self._admin_access, self._admin = self._admin_listener()
        self._source.admin_refused = self._admin.guard.refused
        self._hooks = pluggy.PluginManager(hookspecs.PROJECT)
        self._hooks.add_hookspecs(hookspecs)

    def _admin_listener(self) -> tuple[Access, AdminServer]:
        """Raises ConfigurationError."""
        admin = self.config.admin_listener
        links = self.config.link_listener
        advertised = None if links is None or links.advertised is None else links.advertised.host
        hosts = [self.config.client_listener.advertised, *([] if advertised is None else [advertised])]
        access = Access(admin, hosts)
        local = None if admin.unix_socket is None else UnixSocket(admin.unix_socket, int(admin.unix_socket_mode, 8))
        tls = admin_listener_tls(self.config)
        return access, AdminServer(self._services, *admin.bind, access, tls=tls, unix_socket=local)

    # ---- start ----

    async def start(self) -> None:
        """Start everything. Raises ConfigurationError."""
        config = self.config
        descriptor_limit, connections = descriptors.raise_limit(), descriptors.clients_max()
        listener = config.client_listener
        if connections < listener.connections_max:
            extra = {"limit": descriptor_limit, "connections": connections}
            log.warning("file descriptors limit connections", extra=extra)
        limits = Limits(
            min(listener.connections_max, connections),
            listener.in_flight_max,
            listener.frame_bytes_max,
            listener.sasl_frame_bytes_max,
            listener.authentication_timeout_s,
            listener.request_elements_max,
            listener.queued_bytes_max,
            listener.frame_timeout_s,
            listener.connections_per_address_max,
        )
        self._load_plugins()
        try:
            await self._admin.start()
        except OSError as error:
            local = error.filename is not None
            raise ConfigurationError(
                "admin_listener.unix_socket" if local else "admin_listener.bind",
                f"{error.filename if local else config.admin_listener.bind} cannot be bound: {error.strerror}",
                "Choose another.",
            ) from error
        for warning in self._admin_access.warnings():
            log.warning("admin listener", extra={"detail": warning})
        client = self._client = ClusterClient(
            [str(server) for server in config.cluster.bootstrap_servers], config.cluster.security
        )
        try:
            await client.start()
        except PeerFault as error:
            raise ConfigurationError(
                "cluster.bootstrap_servers",
                f"no broker answers: {error}",
                "Start the cluster, or correct the addresses.",
            ) from error
        assert client.cluster_id is not None
        addresses = Addresses(config.client_listener.advertised)
        upstream_tls = session_tls(config)
        sasl = self._broker_sasl = BrokerSasl(config.cluster.session_security, upstream_tls, self._supervision)
        gateway = self._gateway = Gateway(compile_routes((), addresses), limits, self._supervision, upstream_tls, sasl)
        gateway.tasks.keep("descriptors", descriptors.watch)
        if self._data is not None:
            gateway.tasks.keep("data", self._data.watch)
        self._transactions = OpenTransactions(client)
        front = self._front = Front(config, client, gateway, addresses, client_listener_tls(config), self._supervision)
        await self._broker_known(client)
        await front.bind()
        name = self._services.name = config.proxy_name(front.bootstrap.port)
        control_key, other_keys = config.cluster.control_key, config.cluster.other_control_keys
        control_log = self._control_log = ControlLog(
            client,
            name,
            supervision=self._supervision,
            fence=self._fence,
            on_failure=self._must_stop,
            places=places_of(config.data.directory, client),
            signer=None if control_key is None else Signer(control_key, client.cluster_id, other_keys),
        )
        try:
            await self._start_control_log(control_log)
        except ControlLogHalted as error:
            raise ConfigurationError(
                f"topic {CONTROL_TOPIC}",
                f"this proxy may not follow the control log: {error}",
                "It serves nobody until that is mended.",
            ) from error
        except PeerFault as error:
            raise ConfigurationError(
                "cluster.bootstrap_servers",
                f"the control topic {CONTROL_TOPIC} cannot be used: {error}",
                "See that the brokers are up, and that the proxy's own identity may describe and alter the cluster and "
                "create, describe, read and write that topic.",
            ) from error
        sealer = Sealer(control_key, other_keys)
        self._services.sealing_key_id = sealer.key_id
        context = self._context = Context(
            name,
            client.cluster_id,
            ClusterAccess(client),
            control_log,
            front,
            gateway,
            sealer,
            config.link_listener,
            link_listener_tls(config),
            link_dial_tls(config),
            LinkPolicy(config.link.remotes_allowed, config.link.allow_local_links, config.link.require_encryption),
            config.data.directory,
            config.replication.offsets_keyring_file,
            CaptureAllowed(config.capture.files_directory, frozenset(config.capture.servers_allowed)),
            config.distribution.clients_directory,
            config.replication.partition_metrics,
            self._supervision,
        )
        if RESERVATION_PLUGIN in config.plugins.enabled:
            gateway.vouches_until = lambda: control_log.lease_deadline
        addresses.follow(control_log.state)
        control_log.subscribe(addresses.follow)
        for _, plugin in self._plugins:
            await _awaited(self._call(plugin, "isthmus_start", context=context))
            self._started.append(plugin)
        authentication = Authentication(gateway.authenticated)
        gateway.connection_observers = (authentication,)
        self._request_hooks.extend(authentication.hooks())
        for _, plugin in self._plugins:
            gateway.connection_observers += tuple(self._call(plugin, "isthmus_connection_observers") or ())
            context.link_observers.add(self._call(plugin, "isthmus_link_observers") or ())
            self._request_hooks.extend(self._call(plugin, "isthmus_request_hooks") or ())
        for _, plugin in self._plugins:
            for confirmer in self._call(plugin, "isthmus_confirmers") or ():
                gate = AckGate(cast(PluginContext, context), confirmer)
                gate.start()
                self._ack_gates.append(gate)
                self._request_hooks.append(gate.hook())
        offered = {name: self._call(plugin, "isthmus_namespace_plugin") for name, plugin in self._plugins}
        namespaced = {name: plugin for name, plugin in offered.items() if plugin is not None}
        host = NamespaceHost(cast(PluginContext, context), namespaced, lambda: self._set_routes(addresses))
        self._namespace_host = host
        host.start()
        self._set_routes(addresses)
        await self._claim()
        front.on_change = self._brokers_changed
        await sasl.ask(front.targets, SASL_KNOWN_WITHIN_S)
        await front.serve()
        self._audit.start(client, context.hide_topic)
        self._keep_files(front, gateway, sasl, context)
        self.reloads.start()
        self._sealing = Sealing(control_log, sealer, self._supervision)
        self._sealing.start()
        self._services.control = control_log
        self._services.cluster = context.cluster
        self._services.export = control_log.export
        self._services.gateway = gateway
        self._services.links = self._hooks.hook.isthmus_link_operations()
        self._services.trees = self._hooks.hook.isthmus_tree_operations()
        self._services.plugins = self._namespace_host
        self._source.gateway = gateway
        self._source.data = self._data
        self._source.throttled_s = client.throttled_s
        self._source.ack_gates = lambda: [*self._ack_gates, *host.gates]
        self._source.plugin_failures = host.failures
        self._source.control_state = lambda: control_log.state
        self._source.lease = self._lease
        self._source.unsigned = lambda: control_log.unsigned
        self._ready = True
        log.info(
            "proxy ready",
            extra={
                "proxy": name,
                "cluster": client.cluster_id,
                "bootstrap": str(front.bootstrap),
                "link": context.link_address,
                "admin": f"{self._admin.host}:{self._admin.port}",
                "file_descriptors": descriptor_limit,
            },
        )

    def _keep_files(self, front: Front, gateway: Gateway, sasl: BrokerSasl, context: Context) -> None:
        """Have certificates and tokens in files used as they change."""
        config, keep = self.config, self.reloads.keep
        clients, links, link, admin, cluster = (
            config.client_listener,
            config.link_listener,
            config.link,
            config.admin_listener,
            config.cluster,
        )
        client = self._client
        assert client is not None

        def use_session_tls(tls: ssl.SSLContext | None) -> None:
            gateway.upstream_ssl = sasl.tls = tls

        def use_cluster_tls(tls: ssl.SSLContext | None) -> None:
            client.tls_context = tls

        files = [clients.tls_certfile, clients.tls_keyfile, clients.tls_client_cafile]
        keep("client_listener.tls", files, lambda: client_listener_tls(config), front.use_tls)
        files = [admin.tls_certfile, admin.tls_keyfile, admin.tls_client_cafile]
        keep("admin_listener.tls", files, lambda: admin_listener_tls(config), self._admin.use_tls)
        keep("cluster.ssl_cafile", [cluster.ssl_cafile], lambda: session_tls(config), use_session_tls)
        files = [cluster.ssl_cafile, cluster.ssl_certfile, cluster.ssl_keyfile, cluster.ssl_key_password_file]
        keep("cluster.ssl", files, lambda: cluster_tls(config), use_cluster_tls)
        keep("cluster.sasl_password_file", [cluster.sasl_password_file], cluster.security.password, lambda _: None)
        dialled = [link.tls_cafile, link.tls_certfile, link.tls_keyfile]
        if links is not None:
            files = [links.tls_certfile, links.tls_keyfile, links.tls_cafile]
            keep("link_listener.tls", files, lambda: link_listener_tls(config), context.use_link_tls)
            dialled += files
        keep("link.tls", dialled, lambda: link_dial_tls(config), context.use_link_dial_tls)

    async def _broker_known(self, client: ClusterClient) -> None:
        """Have a sidecar wait for a while until the cluster knows its broker, which may have started a moment ago."""
        broker_id = self.config.cluster.broker_id
        deadline, backoff = monotonic() + SERVED_WITHIN_S, Backoff()
        while broker_id is not None and broker_id not in client.brokers and monotonic() <= deadline:
            known = ", ".join(map(str, sorted(client.brokers)))
            if self._says_that_it_waits(f"the cluster has no broker {broker_id} yet, but {known or 'none'}"):
                log.warning("broker waited for", extra={"broker": broker_id, "known": known})
            await asyncio.sleep(backoff.next_s())
            try:
                await client.refresh(())
            except PeerFault as error:
                log.warning("brokers not read", extra={"detail": str(error)})
        self._waits = ""

    def _says_that_it_waits(self, reason: str) -> bool:
        """Have this told where readiness is asked for; whether it is another reason than before."""
        before, self._waits = self._waits, reason
        return before != reason

    async def _start_control_log(self, control_log: ControlLog) -> None:
        """Read the control log. Where it is lost, wait until it is restored; where brokers do not serve it, for a
        while, since they may have started a moment ago. Raises ConfigurationError, PeerFault."""
        deadline, backoff = monotonic() + SERVED_WITHIN_S, Backoff()
        while True:
            try:
                await control_log.start(accept_loss=self._new_control_log)
            except ControlLogLost as lost:
                if self._says_that_it_waits(str(lost)):
                    level = logging.WARNING if lost.reason == ANCHORS_UNKNOWN else logging.ERROR
                    log.log(level, "control log lost", extra={"reason": lost.reason, "error": str(lost)})
                await asyncio.sleep(LOST_RETRY_S)
                deadline = monotonic() + SERVED_WITHIN_S
            except PeerFault as error:
                if not is_transient(error) or monotonic() > deadline:
                    raise
                if self._says_that_it_waits(f"the brokers do not serve the control topic {CONTROL_TOPIC} yet: {error}"):
                    log.warning("control log waited for", extra={"topic": CONTROL_TOPIC, "error": str(error)})
                await asyncio.sleep(backoff.next_s())
            else:
                self._waits = ""
                return

    def _set_routes(self, addresses: Addresses) -> None:
        assert self._gateway is not None
        host = self._namespace_host
        hooks = [*self._request_hooks, *(host.hooks() if host is not None else ())]
        self._gateway.set_routes(compile_routes(hooks, addresses))

    def _load_plugins(self) -> None:
        """Find the enabled plugins by their entry points. Raises ConfigurationError."""
        known = {entry.name: entry for entry in entry_points(group=PLUGIN_ENTRY_POINTS)}
        for name in self.config.plugins.enabled:
            if name not in known:
                raise ConfigurationError(
                    "plugins.enabled", f"there is no plugin {name!r}", f"Installed are: {', '.join(sorted(known))}."
                )
            plugin = known[name].load()
            self._hooks.register(plugin, name)
            self._plugins.append((name, plugin))

    def _call(self, plugin: object, hook: str, **arguments: Any) -> Any:
        """One plugin's implementation of a hook, None where it has none."""
        others = [other for _, other in self._plugins if other is not plugin]
        results = self._hooks.subset_hook_caller(hook, others)(**arguments)
        return results[0] if results else None

    async def _claim(self) -> None:
        """Claim the brokers. Raises ConfigurationError: another proxy fronts one of them."""
        assert self._control_log is not None
        assert self._front is not None
        assert self._context is not None
        lease = LeaseSpec(
            brokers=self._front.claims(),
            all_brokers=self._front.brokers is None,
            link_address=self._context.link_address,
            lease_ms=int(self.config.proxy.lease_s * 1000),
            version=VERSION,
        )
        try:
            outcome = await self._control_log.claim(lease)
        except PeerFault as error:
            raise ConfigurationError(
                "cluster.bootstrap_servers",
                f"the brokers cannot be claimed in the control topic {CONTROL_TOPIC}: {error}",
                "See that its partition has a leader and enough in-sync replicas, then start the proxy again.",
            ) from error
        if isinstance(outcome, Rejected):
            raise ConfigurationError(
                "cluster.broker_id" if self.config.cluster.broker_id is not None else "cluster.bootstrap_servers",
                outcome.message,
                "One proxy fronts a broker: stop the other one, or give this one its name ([proxy] name) to take over.",
            )

    def _brokers_changed(self) -> None:
        assert self._gateway is not None
        self._gateway.tasks.keep("claim", self._claim_until_done)

    async def _claim_until_done(self) -> None:
        """Claim brokers that came while the proxy runs. Another proxy may front them: then it is tried again."""
        while True:
            try:
                await self._claim()
            except ConfigurationError as error:
                log.warning("brokers not claimed", extra={"error": str(error)})
                await asyncio.sleep(CLAIM_RETRY_S)
            else:
                return

    async def _fence(self) -> None:
        """Return when no client's write to what is reserved now can land any more.

        Never, in a process without the plugin that enforces reservations: it vouches for none, and whoever reserves is
        shown that this proxy is waited for.
        """
        assert self._gateway is not None
        assert self._control_log is not None
        if RESERVATION_PLUGIN not in self.config.plugins.enabled:
            await asyncio.Event().wait()
        await self._gateway.fence()
        await self._transactions.ended(self._control_log.state)

    def _must_stop(self, error: Exception) -> None:
        log.error("proxy must stop", extra={"proxy": self._services.name, "error": str(error)})
        self.must_stop.set()

    # ---- stop ----

    async def stop(self) -> None:
        """Stop everything that was started."""
        self._stopping = True
        log.info("proxy stopping", extra={"proxy": self._services.name})
        drained = True
        if self._front is not None:
            await self._front.stop()
        if self._gateway is not None:
            drained = await self._gateway.drain(self.config.proxy.drain_timeout_s)
        if self._broker_sasl is not None:
            await self._broker_sasl.close()
        if self._namespace_host is not None:
            await self._namespace_host.stop()
        for gate in self._ack_gates:
            await gate.stop()
        for plugin in reversed(self._started):
            try:
                await _awaited(self._call(plugin, "isthmus_stop"))
            except Exception as error:
                log.exception("plugin not stopped", extra={"error": repr(error)})
        await self._audit.stop()
        await self.reloads.stop()
        if self._sealing is not None:
            await self._sealing.stop()
        if self._control_log is not None:
            # A write that the broker has not answered may still land: the others wait for the lease to run out then.
            await self._control_log.close(release=drained)
        if self._client is not None:
            await self._client.close()
        await self._admin.stop()

    # ---- what is shown ----

    def _plugin_metrics(self) -> Iterable[Metric]:
        return chain.from_iterable(self._hooks.hook.isthmus_metrics() if self._ready else ())

    def _not_ready(self) -> list[str]:
        if self._stopping:
            return ["the proxy is stopping"]
        if not self._ready:
            return [self._waits or "the proxy is starting"]
        lease = self._lease()
        reasons = [] if lease.vouching else [lease.reason or "no lease"]
        if self._front is not None:
            reasons += [f"broker {number} is not served: {why}" for number, why in sorted(self._front.unserved.items())]
        if (short := descriptors.shortage()) is not None:
            reasons.append(short)
        return reasons + [each.describe(monotonic()) for each in self._supervision.failing]

    def _lease(self) -> metrics.LeaseView:
        control_log = self._control_log
        if control_log is None or self._waits:
            return metrics.LeaseView(False, None, self._waits or "the control log is not read yet")
        remaining = control_log.lease_deadline - monotonic()
        if remaining > 0:
            return metrics.LeaseView(True, remaining)
        reason = str(control_log.halted) if control_log.halted is not None else "the lease has run out"
        if control_log.halted is None and control_log.trouble:
            reason += f", and the control topic {CONTROL_TOPIC} cannot be read: {control_log.trouble}"
        return metrics.LeaseView(False, None, reason)

    def describe(self) -> ProcessDescription:
        """What the process says of itself."""
        front, context = self._front, self._context
        lease = self._lease()
        warnings = list(self._admin_access.warnings())
        links = self.config.link_listener
        if links is not None and links.has_enrolment_token:
            warnings.append(
                "link_listener.enrolment_token_file and ..._env are of versions before and do nothing: links are made "
                "with tokens (isthmus link token create); remove the key"
            )
        if self._audit.trouble is not None:
            warnings.append(f"{self._audit.waiting} audit lines are in the log alone so far: {self._audit.trouble}")
        control_log = self._control_log if self._ready else None  # before, it may not be started: it has no state
        if self.config.cluster.control_key is None and control_log is not None and control_log.state.links:
            warnings.append(
                "secrets of links are not sealed in the control log: set cluster.control_key_file on all proxies"
            )
        if control_log is not None:
            warnings += [each.message for each in control_log.state.beyond]
            warnings += control_log.anchors.troubles.values()
            warnings += _cluster_id_warnings(control_log.state)
            warnings += _signing_warnings(control_log)
        if self._broker_sasl is not None:
            warnings += self._broker_sasl.warnings()
        warnings += self.reloads.warnings()
        if self._context is not None and (throttled := self._context.cluster.throttled()) is not None:
            warnings.append(throttled)
        if self._data is not None and (large := self._data.warning()) is not None:
            warnings.append(large)
        return ProcessDescription(
            mode=self.config.mode,
            bootstrap=str(front.bootstrap) if front is not None and front.claims() else None,
            link_address=context.link_address if context is not None else None,
            brokers=[
                BrokerAddress(broker_id=claim.broker_id, address=f"{claim.host}:{claim.port}")
                for claim in (front.claims() if front is not None else ())
            ],
            lease=LeaseStatus(vouching=lease.vouching, reason=lease.reason, remaining_seconds=lease.remaining_s),
            plugins=[name for name, _ in self._plugins],
            warnings=warnings,
        )


def _cluster_id_warnings(state: ControlState) -> Iterable[str]:
    linked = {link.remote_cluster_id: f"cluster of link {name}" for name, link in sorted(state.links.items())}
    for cluster_id, whose in {state.cluster_id: "this cluster", **linked}.items():
        if not is_usual(cluster_id):
            yield (
                f"the id of {whose}, {cluster_id!r}, is not of the form that Kafka gives ids, at most 22 of a-z, A-Z, "
                "0-9, _ and -: brokers and proxies take it, other tools may not"
            )


def _signing_warnings(control_log: ControlLog) -> Iterable[str]:
    state, unsigned = control_log.state, control_log.unsigned
    if state.level >= SIGNING and control_log.key_id and not state.key_id:
        yield "records of the control log are not signed: isthmus control upgrade, once all proxies have the key"
    if state.key_id and control_log.key_id not in ("", state.key_id):
        yield (
            f"records of the control log are signed with the key {state.key_id}, and the first one here is "
            f"{control_log.key_id}: isthmus control upgrade, once it is the first on all proxies"
        )
    if unsigned.count:
        others = f", and {unsigned.count - 1} before it" if unsigned.count > 1 else ""
        yield f"somebody without the control key writes to {CONTROL_TOPIC}: {unsigned.last}{others}"


async def _awaited(result: Awaitable[None] | None) -> None:
    if result is not None:
        await result
