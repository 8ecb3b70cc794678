"""The configuration of a proxy: a TOML file, read into frozen values.

::

    [proxy]
    name = "proxy-1"                             # default: the address that clients are given
    [cluster]
    bootstrap_servers = "broker-1:9092,broker-2:9092"
    broker_id = 1                                # sidecar of this broker; absent: all brokers of the cluster
    [client_listener]
    bind = "0.0.0.0:19092"
    advertised_host = "proxy-1.example.org"
    [link]
    remotes_allowed = ["proxy-b.example.org"]    # where links may be created to
    require_encryption = true                    # no link in the clear with proxies of older versions
    [link_listener]
    bind = "0.0.0.0:19192"
    advertised = "proxy-1.example.org:19192"
    [admin_listener]
    bind = "127.0.0.1:28080"
    unix_socket = "/run/isthmus/admin.sock"      # who may open it may do everything
    [data]
    directory = "/var/lib/isthmus"

Unknown keys and wrong types are errors. Every problem of a file is shown at once, each with its key, what was found,
what is expected and what to do (:class:`Problem`). Paths are relative to the file's directory. Secrets stand in files
or in the environment (``*_file``, ``*_env``), never in the configuration itself, and no representation of a
configuration shows them.
"""

from __future__ import annotations

import base64
import binascii
import difflib
import ipaddress
import os
import re
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated, ClassVar, Final, Literal, NamedTuple

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    PlainValidator,
    PrivateAttr,
    SecretStr,
    ValidationError,
    ValidationInfo,
)
from pydantic_core import ErrorDetails, PydanticCustomError

from isthmus.errors import ConfigurationError
from isthmus.kafka.security import SecuritySpec
from isthmus_control.sealing import KEY_BYTES, Secret
from isthmus_plugins.link_policy import is_allowance

SECRET_BYTES_MAX: Final = 64 * 1024
UNIX_SOCKET_BYTES_MAX: Final = 107
"""Of the path of a unix socket; the kernel's limit."""
PLUGIN_ENTRY_POINTS: Final = "isthmus.plugins"
_WILDCARDS: Final = frozenset({"", "0.0.0.0", "::"})
_ENVIRONMENT_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,99}")


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong with a configuration. ``key`` is the dotted path; empty for the file as a whole."""

    key: str
    found: str
    expected: str
    fix: str
    unreachable: bool = False
    """The configuration may be right and a server down."""

    def __str__(self) -> str:
        text = f"{self.key}: " if self.key else ""
        text += f"found {self.found}, expected {self.expected}" if self.expected else self.found
        return f"{text}; {self.fix}" if self.fix else text


class ConfigError(ConfigurationError):
    """The configuration cannot be used. ``problems`` has at least one; the base class shows the first."""

    def __init__(self, source: str, problems: list[Problem]) -> None:
        first = problems[0]
        super().__init__(first.key, first.found, first.fix)
        self.source = source
        self.problems = problems

    def __str__(self) -> str:
        several = len(self.problems) > 1
        head = f"{self.source}: {len(self.problems)} problems\n  " if several else f"{self.source}: "
        return head + "\n  ".join(str(problem) for problem in self.problems)


class Address(NamedTuple):
    """A host and a port. The host of an IPv6 address has no brackets."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_address(text: str, *, any_port: bool = False) -> Address:
    """``host:port`` or ``[v6]:port``. Raises ValueError. ``any_port`` allows port 0, a free port."""
    host, colon, port = text.strip().rpartition(":")
    if not colon:
        raise ValueError("it has no port")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ValueError("an IPv6 address stands in brackets")
    if not host or any(character.isspace() or character in "/,@" for character in host):
        raise ValueError("it has no valid host")
    if not (port.isascii() and port.isdigit()) or not (0 if any_port else 1) <= int(port) <= 65535:
        raise ValueError(f"{port!r} is no port from {0 if any_port else 1} to 65535")
    return Address(host, int(port))


def _wrong(expected: str, fix: str) -> PydanticCustomError:
    return PydanticCustomError("value", "{expected}", {"expected": expected, "fix": fix})


def _address_field(any_port: bool) -> Callable[[object], Address]:
    def validate(value: object) -> Address:
        example = '"127.0.0.1:9092"'
        if not isinstance(value, str):
            raise _wrong('"host:port"', f"write it as text, for instance {example}")
        try:
            return parse_address(value, any_port=any_port)
        except ValueError as error:
            raise _wrong('"host:port"', f"{error}; write for instance {example}") from None

    return validate


def _servers(value: object) -> tuple[Address, ...]:
    expected = '"host:port" or "host:port,host:port"'
    if not isinstance(value, str):
        raise _wrong(expected, 'write one text, for instance "broker-1:9092,broker-2:9092"')
    servers = []
    for part in value.split(","):
        try:
            servers.append(parse_address(part))
        except ValueError as error:
            raise _wrong(expected, f"{part.strip()!r}: {error}") from None
    return tuple(servers)


def _path(value: object, info: ValidationInfo) -> Path:
    if not isinstance(value, str) or not value:
        raise _wrong("the path of a file", "write it as text; it is relative to the directory of the configuration")
    directory: Path = (info.context or {}).get("directory", Path())
    return directory / Path(value).expanduser()


def _environment_name(value: object) -> str:
    if not isinstance(value, str) or not _ENVIRONMENT_NAME.fullmatch(value):
        raise _wrong("the name of an environment variable", "give the variable's name, not the secret")
    return value


def _as_text(servers: tuple[Address, ...]) -> str:
    return ",".join(str(server) for server in servers)


_TEXT = PlainSerializer(str, return_type=str)
Bind = Annotated[Address, PlainValidator(_address_field(any_port=True)), _TEXT]
Advertised = Annotated[Address, PlainValidator(_address_field(any_port=False)), _TEXT]
Servers = Annotated[tuple[Address, ...], PlainValidator(_servers), PlainSerializer(_as_text, return_type=str)]
FilePath = Annotated[Path, PlainValidator(_path)]
EnvironmentName = Annotated[str, PlainValidator(_environment_name)]


class Section(BaseModel):
    """A table of the file. Its secrets are kept beside the fields, where nothing prints or dumps them."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, hide_input_in_errors=True)
    SECRETS: ClassVar[tuple[str, ...]] = ()
    _secrets: dict[str, SecretStr] = PrivateAttr(default_factory=dict)


class ProxySection(Section):
    name: str | None = Field(default=None, pattern=r"^[A-Za-z0-9._-]{1,100}$")
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_style: Literal["text", "json"] = "text"
    drain_timeout_s: float = Field(default=20.0, ge=0, le=3600)
    """How long sessions may still answer what they were asked after SIGTERM."""
    lease_s: float = Field(default=20.0, ge=1, le=120)
    """How long a proxy that is not heard counts as alive; so long a reservation may have to wait for it."""


class ClusterSection(Section):
    SECRETS: ClassVar[tuple[str, ...]] = ("sasl_password", "control_key")

    bootstrap_servers: Servers
    broker_id: int | None = Field(default=None, ge=0)
    """The broker that this proxy is a sidecar of; None: it fronts the whole cluster."""
    security_protocol: Literal["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"] = "PLAINTEXT"
    """How the proxy itself talks to the brokers; the keys below are its own identity."""
    sasl_mechanism: Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"] | None = None
    sasl_username: str | None = None
    sasl_password_file: FilePath | None = None
    sasl_password_env: EnvironmentName | None = None
    ssl_cafile: FilePath | None = None
    """Certificates to trust; None: those of the system."""
    ssl_certfile: FilePath | None = None
    ssl_keyfile: FilePath | None = None
    ssl_key_password_file: FilePath | None = None
    ssl_check_hostname: bool = True
    client_security_protocol: Literal["PLAINTEXT", "SSL"] | None = None
    """The upstream leg of clients' sessions. SASL on it is between client and broker. None: TLS where
    ``security_protocol`` has it."""
    control_key_file: FilePath | None = None
    control_key_env: EnvironmentName | None = None

    @property
    def security(self) -> SecuritySpec:
        """The proxy's own identity, for its own connections."""
        return SecuritySpec(
            security_protocol=self.security_protocol,
            sasl_mechanism=self.sasl_mechanism,
            username=self.sasl_username,
            password_file=self.sasl_password_file,
            password_env=self.sasl_password_env,
            ssl_cafile=self.ssl_cafile,
            ssl_certfile=self.ssl_certfile if self.uses_tls else None,
            ssl_keyfile=self.ssl_keyfile if self.uses_tls else None,
            ssl_key_password_file=self.ssl_key_password_file,
            ssl_check_hostname=self.ssl_check_hostname,
        )

    @property
    def session_security(self) -> SecuritySpec:
        """The upstream leg of sessions: never with the proxy's certificate, or clients would act as the proxy."""
        return SecuritySpec(
            security_protocol="SSL" if self.clients_use_tls else "PLAINTEXT",
            ssl_cafile=self.ssl_cafile,
            ssl_check_hostname=self.ssl_check_hostname,
        )

    @property
    def uses_tls(self) -> bool:
        """Whether the proxy's own connections are encrypted."""
        return self.security_protocol.endswith("SSL")

    @property
    def uses_sasl(self) -> bool:
        return self.security_protocol.startswith("SASL")

    @property
    def clients_use_tls(self) -> bool:
        """Whether the upstream leg of sessions is encrypted."""
        if self.client_security_protocol is None:
            return self.uses_tls
        return self.client_security_protocol == "SSL"

    @property
    def sasl_password(self) -> SecretStr | None:
        return self._secrets.get("sasl_password")

    @property
    def control_key(self) -> Secret | None:
        """The 32 bytes that seal secrets of links in the control log, and sign its records."""
        return next(iter(self._control_keys), None)

    @property
    def other_control_keys(self) -> tuple[Secret, ...]:
        """More of them, in lines below: what is sealed or signed with these counts, too, while the key is rotated."""
        return self._control_keys[1:]

    @property
    def _control_keys(self) -> tuple[Secret, ...]:
        text = self._secrets.get("control_key")
        return () if text is None else tuple(Secret(key) for key in _keys(text.get_secret_value()))

    def server_names(self) -> str:
        """The bootstrap servers as clients write them."""
        return _as_text(self.bootstrap_servers)


def _by_number(value: object) -> object:
    """A table by numbers: all keys of TOML are text."""
    if not isinstance(value, dict):
        return value
    return {int(key) if isinstance(key, str) and key.isdecimal() else key: each for key, each in value.items()}


BrokerPorts = Annotated[dict[int, Annotated[int, Field(ge=1, le=65535)]], BeforeValidator(_by_number)]


class ClientListenerSection(Section):
    bind: Bind
    """Sidecar: the broker's port. Whole cluster: the port to bootstrap from. Port 0 takes a free one."""
    advertised_host: str | None = Field(default=None, min_length=1)
    """Where clients are to connect to; None: the host of ``bind``."""
    broker_port_base: int | None = Field(default=None, ge=1, le=65535)
    broker_ports: BrokerPorts = Field(default_factory=dict)
    """By node id: ports of brokers that are not at the base plus their id."""
    tls_certfile: FilePath | None = None
    tls_keyfile: FilePath | None = None
    tls_client_cafile: FilePath | None = None
    """Clients must show a certificate that one of these signed."""
    connections_max: int = Field(default=10_000, ge=1)
    in_flight_max: int = Field(default=1_000, ge=1)
    frame_bytes_max: int = Field(default=100 * 1024 * 1024, ge=1024, le=2**31 - 1)
    sasl_frame_bytes_max: int = Field(default=512 * 1024, ge=1024, le=2**31 - 1)
    """Of clients that have not authenticated; a broker's ``sasl.server.max.receive.size``."""
    authentication_timeout_s: float = Field(default=30.0, gt=0, le=3600)
    """How long a client may take to authenticate over SASL."""
    connections_per_address_max: int | None = Field(default=None, ge=1)
    """Of one client's address; None: as many as of all."""
    request_elements_max: int = Field(default=20_000, ge=1_000)
    """Elements in arrays of one request that plugins look into."""
    queued_bytes_max: int = Field(default=256 * 1024 * 1024, ge=1024)
    """Of all requests that are kept until they are whole; a broker's ``queued.max.request.bytes``."""
    frame_timeout_s: float = Field(default=60.0, gt=0, le=3600)
    """How long one of them may take to be whole."""

    @property
    def advertised(self) -> str:
        """The host that clients are given."""
        return self.advertised_host or self.bind.host

    def broker_bind(self, broker_id: int) -> Address:
        """Where broker ``broker_id`` is served in whole-cluster mode.

        At its port of ``broker_ports``, else at ``broker_port_base + broker_id``. The base is the bootstrap port plus
        one if not set, so that broker 0 comes right behind the bootstrap port. Where the bootstrap port is a free one,
        so is this. Raises :class:`ConfigError` where the sum is no port.
        """
        if broker_id in self.broker_ports:
            return Address(self.bind.host, self.broker_ports[broker_id])
        if self.broker_port_base is None and self.bind.port == 0:
            return Address(self.bind.host, 0)
        port = (self.broker_port_base or self.bind.port + 1) + broker_id
        if port > 65535:
            fix = f"add [client_listener.broker_ports] with a port of its own: {broker_id} = 19100"
            if broker_id < 65535:
                fix = f"choose a base of at most {65535 - broker_id}, or {fix}"
            problem = Problem(
                "client_listener.broker_port_base", f"port {port} for broker {broker_id}", "65535 or less", fix
            )
            raise ConfigError("configuration", [problem])
        return Address(self.bind.host, port)


class LinkSection(Section):
    """Links, whoever dials."""

    remotes_allowed: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Where links may be created to from here: ``host:port`` of a link listener, or ``host`` with any port."""
    allow_local_links: bool = False
    """Who comes from a loopback address of this machine may create a link without a token, and is granted all."""
    require_encryption: bool = False
    """Whether connections that neither TLS nor their ends encrypt are refused: those with proxies of older versions."""
    tls_cafile: FilePath | None = None
    """Who signs the certificates of the link listeners that this proxy dials: they have TLS. None: as
    ``[link_listener]`` has it."""
    tls_certfile: FilePath | None = None
    """What this proxy shows them, where they ask for a certificate."""
    tls_keyfile: FilePath | None = None


class LinkListenerSection(Section):
    bind: Bind
    advertised: Advertised | None = None
    """Where proxies of other clusters reach this one; None: ``bind``."""
    tls_certfile: FilePath | None = None
    tls_keyfile: FilePath | None = None
    tls_cafile: FilePath | None = None
    """Who signs the certificates of the other clusters' proxies."""
    enrolment_token_file: FilePath | None = None
    enrolment_token_env: EnvironmentName | None = None
    """Of versions before :mod:`isthmus_control.tokens`. Nothing is read of them, and ``status`` says so."""

    @property
    def has_enrolment_token(self) -> bool:
        """Whether the configuration has what is not used any more."""
        return self.enrolment_token_file is not None or self.enrolment_token_env is not None

    def advertised_at(self, port: int) -> Address:
        """The advertised address, given the port in use."""
        return self.advertised or Address(self.bind.host, port)


class AdminListenerSection(Section):
    bind: Bind = Address("127.0.0.1", 28080)
    """REST, metrics, health. Without one of the keys below, it answers nobody anything but ``/health``."""
    hosts: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """More names by which it is reached. Its addresses, ``localhost`` and the advertised hosts are known."""
    unix_socket: FilePath | None = None
    """A socket beside ``bind``; who may open it is an operator."""
    unix_socket_mode: Literal["0600", "0660"] = "0600"
    operator_token_file: FilePath | None = None
    """Who shows a token of it may do everything; read again whenever it changes, as the next one."""
    viewer_token_file: FilePath | None = None
    """Who shows a token of it may read."""
    tls_certfile: FilePath | None = None
    tls_keyfile: FilePath | None = None
    tls_client_cafile: FilePath | None = None
    """Who signs the certificates of clients. Beside token files both are needed, and the token says who it is."""
    tls_operators: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Names (common or alternative ones) in client certificates of operators; others are viewers."""
    loopback_without_authentication: bool = False
    """Whoever reaches a loopback address of this machine is an operator."""
    metrics_without_authentication: bool = False


class DataSection(Section):
    directory: FilePath | None = None
    """Where the proxy keeps files: what is cut from follower topics that diverged. None: such topics stay as they are,
    and say so."""
    warn_bytes: int = Field(default=10 * 1024**3, ge=0)
    """Status warns where its files take more."""


class CaptureSection(Section):
    files_directory: FilePath | None = None
    """Where files of clients are that settings of captures may name (``kafka_client_file``). None: nowhere."""
    servers_allowed: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """host:port of brokers that settings of captures may name (``kafka_servers``)."""


class ReplicationSection(Section):
    offsets_keyring_file: FilePath | None = None
    """Keys of groups' offsets (``isthmus offsets keygen``), read again whenever it changes: on the source those to
    encrypt with, on the target those of the groups that it may read."""
    partition_metrics: bool = True
    """Whether metrics have series for each partition of a link. Where there are many thousands, links' own will do."""


class DistributionSection(Section):
    clients_directory: FilePath | None = None
    """Where ``NAME.properties`` says, for each other cluster of the tree, how this proxy connects to its brokers. None:
    without TLS and authentication."""


class PluginsSection(Section):
    enabled: Annotated[tuple[str, ...], Field(strict=False)] = ("reservation", "replication")
    """Names of the entry point group ``isthmus.plugins``, in the order in which their hooks are called."""


class ProxyConfig(Section):
    """The whole configuration of a proxy."""

    proxy: ProxySection = Field(default_factory=ProxySection)
    cluster: ClusterSection
    client_listener: ClientListenerSection
    link: LinkSection = Field(default_factory=LinkSection)
    link_listener: LinkListenerSection | None = None
    """None: other clusters cannot connect to this proxy; it can still connect to them."""
    admin_listener: AdminListenerSection = Field(default_factory=AdminListenerSection)
    data: DataSection = Field(default_factory=DataSection)
    capture: CaptureSection = Field(default_factory=CaptureSection)
    replication: ReplicationSection = Field(default_factory=ReplicationSection)
    distribution: DistributionSection = Field(default_factory=DistributionSection)
    plugins: PluginsSection = Field(default_factory=PluginsSection)
    _source: str = PrivateAttr("configuration")

    @property
    def source(self) -> str:
        """The file that this was read from, for messages."""
        return self._source

    @property
    def mode(self) -> Literal["sidecar", "whole-cluster"]:
        return "whole-cluster" if self.cluster.broker_id is None else "sidecar"

    def proxy_name(self, client_port: int) -> str:
        """The configured name, or one made of the address that clients get; ``client_port`` is the port in use."""
        return self.proxy.name or re.sub(r"[^A-Za-z0-9._-]+", "-", f"{self.client_listener.advertised}-{client_port}")


def load_config(path: Path | str, environment: Mapping[str, str] | None = None) -> ProxyConfig:
    """Read a configuration and its secrets. Raises :class:`ConfigError` with everything that is wrong."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        problem = Problem("", f"the file cannot be read: {reason}", "", "give the path of a TOML file")
        raise ConfigError(str(path), [problem]) from None
    return parse_config(text, path.parent, environment, str(path))


def parse_config(
    text: str, directory: Path, environment: Mapping[str, str] | None = None, source: str = "configuration"
) -> ProxyConfig:
    """As :func:`load_config`, from the file's text. ``directory`` is what paths are relative to."""
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(source, [Problem("", f"this is not TOML: {error}", "", "correct the line")]) from None
    try:
        config = ProxyConfig.model_validate(tables, context={"directory": directory})
    except ValidationError as error:
        raise ConfigError(source, [_problem(details) for details in error.errors(include_url=False)]) from None
    config._source = source
    problems = [*_rules(config), *_read_secrets(config, os.environ if environment is None else environment)]
    if problems:
        raise ConfigError(source, problems)
    return config


# --- What pydantic found, in our words


def _problem(details: ErrorDetails) -> Problem:
    location = [str(part) for part in details["loc"]]
    key = ".".join(location)
    kind, context, value = details["type"], details.get("ctx", {}), details["input"]
    section = _section_at(location[:-1])
    name = location[-1] if location else ""
    if kind == "extra_forbidden":
        return Problem(key, "unknown key", "", _fix_unknown(section, location[:-1], name))
    if kind == "missing":
        example = _EXAMPLES.get(key)
        return Problem(key, "nothing", "a value", f"add {example}" if example else "add it")
    if kind in ("model_type", "model_attributes_type"):
        return Problem(key, _shown(section, name, value), "a table", f"write its keys below [{key}]")
    found = _shown(section, name, value)
    if kind == "value":
        return Problem(key, found, context["expected"], context["fix"])
    if kind == "literal_error":
        choices = re.findall(r"'([^']*)'", context["expected"])
        close = difflib.get_close_matches(str(value).lower(), [choice.lower() for choice in choices], 1)
        matched = next((choice for choice in choices if close and choice.lower() == close[0]), None)
        fix = f'did you mean "{matched}"?' if matched else "choose one of them"
        return Problem(key, found, " or ".join(f'"{choice}"' for choice in choices), fix)
    if kind == "string_pattern_mismatch":
        return Problem(key, found, "1 to 100 letters, digits and . _ -", "choose another name")
    expected = _EXPECTED.get(kind, "")
    if not expected:
        bounds = ", ".join(f"{_BOUNDS[bound]} {limit}" for bound, limit in context.items() if bound in _BOUNDS)
        expected = f"a number {bounds}" if bounds else details["msg"]
    return Problem(key, found, expected, _FIXES.get(kind, "change the value"))


_EXAMPLES: Final = {
    "cluster": 'a table [cluster] with bootstrap_servers = "broker-1:9092"',
    "cluster.bootstrap_servers": 'bootstrap_servers = "broker-1:9092" below [cluster]',
    "client_listener": 'a table [client_listener] with bind = "127.0.0.1:19092"',
    "client_listener.bind": 'bind = "127.0.0.1:19092" below [client_listener]',
    "link_listener.bind": 'bind = "127.0.0.1:19192" below [link_listener]',
}
_EXPECTED: Final = {
    "string_type": "text",
    "string_too_short": "text",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "tuple_type": "a list",
}
_FIXES: Final = {
    "string_type": 'put it in quotes: "..."',
    "int_type": "write it without quotes",
    "float_type": "write it without quotes",
    "bool_type": "write true or false without quotes",
    "tuple_type": 'write it in brackets: ["...", "..."]',
}
_BOUNDS: Final = {"ge": "of at least", "le": "of at most", "gt": "above", "lt": "below"}


def _section_at(location: list[str]) -> type[BaseModel]:
    """The model of a table; the file's own where there is no such table."""
    sections: dict[str, type[BaseModel]] = {
        "proxy": ProxySection,
        "cluster": ClusterSection,
        "client_listener": ClientListenerSection,
        "link": LinkSection,
        "link_listener": LinkListenerSection,
        "admin_listener": AdminListenerSection,
        "data": DataSection,
        "capture": CaptureSection,
        "replication": ReplicationSection,
        "plugins": PluginsSection,
    }
    return sections.get(location[0], ProxyConfig) if location else ProxyConfig


def _secret_names(section: type[BaseModel]) -> tuple[str, ...]:
    return section.SECRETS if issubclass(section, Section) else ()


def _fix_unknown(section: type[BaseModel], path: list[str], name: str) -> str:
    if name in _secret_names(section):
        return f"secrets stand in a file or in the environment: use {name}_file or {name}_env"
    known = list(section.model_fields)
    for other in ProxyConfig.model_fields:
        if name in _section_at([other]).model_fields and other not in path:
            return f"did you mean {other}.{name}?"
    if close := difflib.get_close_matches(name, known, 1, 0.6):
        return f"did you mean {'.'.join([*path, close[0]])}?"
    return f"known {'keys' if path else 'tables'} here: {', '.join(known)}"


def _shown(section: type[BaseModel], name: str, value: object) -> str:
    """What was found, without what may be a secret that was put in the wrong place."""
    if any(name.startswith(secret) for secret in _secret_names(section)):
        return f"a value of type {type(value).__name__}"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, dict):
        return "a table"
    return repr(value)


# --- Rules that span keys


def _rules(config: ProxyConfig) -> Iterator[Problem]:
    yield from _cluster_rules(config.cluster)
    yield from _listener_rules(config)
    yield from _admin_rules(config.admin_listener)
    for position, remote in enumerate(config.link.remotes_allowed):
        if not is_allowance(remote):
            fix = 'write it as "proxy-b.example.org:19192", or without a port'
            yield Problem(f"link.remotes_allowed.{position}", f'"{remote}"', "host:port, or a host", fix)
    installed = sorted({entry.name for entry in entry_points(group=PLUGIN_ENTRY_POINTS)})
    for position, name in enumerate(config.plugins.enabled):
        key = f"plugins.enabled.{position}"
        if name in config.plugins.enabled[:position]:
            yield Problem(key, f'"{name}"', "each plugin once", "remove it")
        elif name not in installed:
            close = difflib.get_close_matches(name, installed, 1)
            fix = f'did you mean "{close[0]}"?' if close else "install the distribution that has it"
            yield Problem(key, f'"{name}"', f"an installed plugin ({', '.join(installed)})", fix)


def _cluster_rules(cluster: ClusterSection) -> Iterator[Problem]:
    sasl = {
        "sasl_mechanism": cluster.sasl_mechanism,
        "sasl_username": cluster.sasl_username,
        "sasl_password_file": cluster.sasl_password_file or cluster.sasl_password_env,
    }
    if cluster.uses_sasl:
        for name, value in sasl.items():
            if value is None:
                also = " or sasl_password_env" if name == "sasl_password_file" else ""
                fix = f"add {name}{also} below [cluster]"
                yield Problem(f"cluster.{name}", "nothing", f"a value for {cluster.security_protocol}", fix)
    else:
        for name, value in sasl.items():
            if value is not None:
                fix = 'set security_protocol = "SASL_SSL" or "SASL_PLAINTEXT", or remove the key'
                yield Problem(f"cluster.{name}", "a value", f"none for {cluster.security_protocol}", fix)
    for name in ("ssl_cafile", "ssl_certfile", "ssl_keyfile", "ssl_key_password_file"):
        needed = cluster.uses_tls or (name == "ssl_cafile" and cluster.clients_use_tls)
        if getattr(cluster, name) is not None and not needed:
            fix = 'set security_protocol = "SSL" or "SASL_SSL", or remove the key'
            yield Problem(f"cluster.{name}", "a value", f"none for {cluster.security_protocol}", fix)
    if cluster.ssl_keyfile and not cluster.ssl_certfile:
        yield _certificate_missing("cluster", "ssl_certfile", "ssl_keyfile")


def _listener_rules(config: ProxyConfig) -> Iterator[Problem]:
    clients, links = config.client_listener, config.link_listener
    if clients.bind.host in _WILDCARDS and clients.advertised_host is None:
        fix = "add it: the host name or address that clients can connect to"
        found = f"nothing beside bind = {str(clients.bind)!r}"
        yield Problem("client_listener.advertised_host", found, "a host", fix)
    if clients.advertised_host is not None and (
        clients.advertised_host in _WILDCARDS or re.search(r"[\s/,@\[\]]|:\d+$", clients.advertised_host)
    ):
        fix = "remove what is not the host; the port is that of the listener"
        yield Problem("client_listener.advertised_host", f'"{clients.advertised_host}"', "a host without a port", fix)
    if config.cluster.broker_id is not None and clients.broker_port_base is not None:
        fix = "remove it, or remove cluster.broker_id to front all brokers"
        yield Problem("client_listener.broker_port_base", "a value", "none for the sidecar of one broker", fix)
    if config.cluster.broker_id is not None and clients.broker_ports:
        fix = "remove it, or remove cluster.broker_id to front all brokers"
        yield Problem("client_listener.broker_ports", "a table", "none for the sidecar of one broker", fix)
    for port in sorted({port for port in clients.broker_ports.values() if port == clients.bind.port}):
        yield Problem("client_listener.broker_ports", str(port), "another port than bind", "choose another port")
    if twice := sorted(port for port, count in Counter(clients.broker_ports.values()).items() if count > 1):
        yield Problem(
            "client_listener.broker_ports", f"port {twice[0]} twice", "a port for each", "choose another port"
        )
    for name in ("tls_keyfile", "tls_client_cafile"):
        if getattr(clients, name) is not None and clients.tls_certfile is None:
            yield _certificate_missing("client_listener", "tls_certfile", name)
    binds = {"client_listener.bind": clients.bind, "admin_listener.bind": config.admin_listener.bind}
    if links is not None:
        binds["link_listener.bind"] = links.bind
        if links.bind.host in _WILDCARDS and links.advertised is None:
            fix = "add it: the address at which the other cluster's proxies reach this one"
            yield Problem("link_listener.advertised", f"nothing beside bind = {str(links.bind)!r}", '"host:port"', fix)
        for name in ("tls_keyfile", "tls_cafile"):
            if getattr(links, name) is not None and links.tls_certfile is None:
                yield _certificate_missing("link_listener", "tls_certfile", name)
    if config.link.tls_keyfile is not None and config.link.tls_certfile is None:
        yield _certificate_missing("link", "tls_certfile", "tls_keyfile")
    if config.link.tls_certfile is not None and config.link.tls_cafile is None:
        fix = "add tls_cafile below [link], or remove tls_certfile"
        yield Problem("link.tls_cafile", "nothing beside tls_certfile", "the path of certificates (PEM)", fix)
    seen: dict[Address, str] = {}
    for key, bind in binds.items():
        if bind.port and bind in seen:
            yield Problem(key, f'"{bind}"', f"another address than {seen[bind]}", "choose another port")
        seen.setdefault(bind, key)


def _admin_rules(admin: AdminListenerSection) -> Iterator[Problem]:
    table = "admin_listener"
    for name in ("tls_keyfile", "tls_client_cafile"):
        if getattr(admin, name) is not None and admin.tls_certfile is None:
            yield _certificate_missing(table, "tls_certfile", name)
    ways = [name for name in ("operator_token_file", "viewer_token_file", "tls_client_cafile") if getattr(admin, name)]
    if admin.tls_operators and admin.tls_client_cafile is None:
        fix = "add tls_client_cafile: who signs the certificates of clients"
        yield Problem(f"{table}.tls_operators", "names", "none without tls_client_cafile", fix)
    elif admin.tls_operators and len(ways) > 1:
        fix = "remove it: tokens say who is an operator, certificates who may show one"
        yield Problem(f"{table}.tls_operators", "names", "none beside a token file", fix)
    if admin.loopback_without_authentication:
        key = f"{table}.loopback_without_authentication"
        if not is_loopback(admin.bind.host):
            fix = "bind 127.0.0.1, or set operator_token_file or tls_client_cafile in its place"
            yield Problem(key, f'true beside bind = "{admin.bind}"', "a loopback address to bind", fix)
        if ways:
            yield Problem(key, f"true beside {ways[0]}", "one of them", "remove one")
    if admin.unix_socket is not None and len(os.fsencode(admin.unix_socket)) > UNIX_SOCKET_BYTES_MAX:
        fix = "choose a shorter path, such as /run/isthmus/admin.sock"
        found = f"{len(os.fsencode(admin.unix_socket))} bytes"
        yield Problem(f"{table}.unix_socket", found, f"a path of {UNIX_SOCKET_BYTES_MAX} bytes at most", fix)
    for position, host in enumerate(admin.hosts):
        if not re.fullmatch(r"[A-Za-z0-9._-]+", host):
            fix = "remove what is not the name, such as a port"
            yield Problem(f"{table}.hosts.{position}", f'"{host}"', "a host name", fix)


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches what is bound to ``host``."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def _certificate_missing(section: str, name: str, beside: str) -> Problem:
    fix = f"add {name} below [{section}], or remove {beside}"
    return Problem(f"{section}.{name}", f"nothing beside {beside}", "the path of a certificate (PEM)", fix)


# --- Secrets


def _read_secrets(config: ProxyConfig, environment: Mapping[str, str]) -> Iterator[Problem]:
    for table in ProxyConfig.model_fields:
        section = getattr(config, table)
        if not isinstance(section, Section):
            continue
        for name in section.SECRETS:
            path: Path | None = getattr(section, f"{name}_file")
            variable: str | None = getattr(section, f"{name}_env")
            key = f"{table}.{name}_{'env' if path is None else 'file'}"
            if path is not None and variable is not None:
                yield Problem(f"{table}.{name}_env", f"a value beside {name}_file", "one of them", "remove one")
                continue
            if path is not None:
                secret = _read_secret_file(key, path)
            elif variable is not None:
                secret = _read_variable(key, variable, environment)
            else:
                continue
            if isinstance(secret, str) and name == "control_key":
                try:
                    _keys(secret)
                except ValueError as error:
                    expected = f"{KEY_BYTES} bytes as hexadecimal digits or base64"
                    secret = Problem(key, str(error), expected, f"make one with: openssl rand -hex {KEY_BYTES}")
            if isinstance(secret, Problem):
                yield secret
            else:
                section._secrets[name] = SecretStr(secret)


def _read_secret_file(key: str, path: Path) -> str | Problem:
    try:
        with path.open("rb") as file:
            raw = file.read(SECRET_BYTES_MAX + 1)
    except OSError as error:
        return unreadable(key, path, error)
    if len(raw) > SECRET_BYTES_MAX:
        return Problem(key, f"a file of more than {SECRET_BYTES_MAX} bytes", "a secret", "give another file")
    try:
        secret = raw.decode().rstrip("\r\n")
    except UnicodeDecodeError:
        return Problem(key, "a file that is not UTF-8 text", "a secret", "give another file")
    return secret or Problem(key, "an empty file", "a secret in it", "write the secret to the file")


def _read_variable(key: str, variable: str, environment: Mapping[str, str]) -> str | Problem:
    secret = environment.get(variable)
    if not secret:
        found = f"that the environment variable is {'not set' if secret is None else 'empty'}"
        return Problem(key, found, "a secret in it", f"set {variable} for the proxy's process")
    return secret


def _keys(text: str) -> list[bytes]:
    """The keys in ``text``, one in a line. Raises ValueError, whose message does not show any."""
    return [_key_bytes(line) for line in text.splitlines() if line.strip()] or [_key_bytes(text)]


def _key_bytes(text: str) -> bytes:
    """The key in ``text``. Raises ValueError, whose message does not show the key."""
    text = text.strip()
    try:
        raw = bytes.fromhex(text)
    except ValueError:
        try:
            raw = base64.b64decode(text, validate=True)
        except (binascii.Error, ValueError):
            raise ValueError("neither hexadecimal nor base64") from None
    if len(raw) != KEY_BYTES:
        raise ValueError(f"{len(raw)} bytes")
    return raw


# --- Files and servers


def unreadable(key: str, path: Path, error: OSError) -> Problem:
    return Problem(
        key, f'"{path}": {error.strerror or error}', "a readable file", "correct the path or its permissions"
    )
