"""Configurations: what they mean, what their errors tell, and that secrets stay secret."""

from __future__ import annotations

import asyncio
import base64
import pickle
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from support.certificates import Authority

from isthmus import config_check
from isthmus.config import Address, ConfigError, Problem, ProxyConfig, load_config, parse_address, parse_config
from isthmus.config_check import check
from isthmus.config_tls import client_listener_tls, cluster_tls, link_dial_tls, link_listener_tls, session_tls
from isthmus.errors import ConfigurationError
from isthmus.session.listener import Limits
from isthmus_protocol.bodies import build
from isthmus_protocol.messages import decode_request, encode_response
from isthmus_protocol.schema import ApiKey, response_type

MINIMAL = """
[cluster]
bootstrap_servers = "127.0.0.1:9092"
[client_listener]
bind = "127.0.0.1:19092"
"""


def parse(text: str, directory: Path = Path(), **environment: str) -> ProxyConfig:
    return parse_config(text, directory, environment)


def with_cluster(*lines: str) -> str:
    return MINIMAL.replace("[client_listener]", "\n".join([*lines, "[client_listener]"]))


def problems_of(text: str, directory: Path = Path(), **environment: str) -> dict[str, Problem]:
    with pytest.raises(ConfigError) as caught:
        parse(text, directory, **environment)
    return {problem.key: problem for problem in caught.value.problems}


# --- what it means


def test_a_minimal_file_has_the_documented_defaults() -> None:
    config = parse(MINIMAL)
    assert config.mode == "whole-cluster"
    assert config.cluster.bootstrap_servers == (Address("127.0.0.1", 9092),)
    assert config.link_listener is None
    assert str(config.admin_listener.bind) == "127.0.0.1:28080"
    assert config.plugins.enabled == ("reservation", "replication")
    assert (config.proxy.log_level, config.proxy.log_style) == ("info", "text")
    assert (config.proxy.drain_timeout_s, config.proxy.lease_s) == (20, 20)
    listener = config.client_listener
    assert Limits() == Limits(
        listener.connections_max,
        listener.in_flight_max,
        listener.frame_bytes_max,
        listener.sasl_frame_bytes_max,
        listener.authentication_timeout_s,
    )


def test_a_full_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "password").write_text("hunter2\n")
    (tmp_path / "token").write_text("enrol-me")
    text = """
    [proxy]
    name = "proxy-1"
    log_level = "debug"
    log_style = "json"
    drain_timeout_s = 1.5
    lease_s = 30
    [cluster]
    bootstrap_servers = "broker-1:9092, [::1]:9093"
    broker_id = 0
    security_protocol = "SASL_SSL"
    sasl_mechanism = "SCRAM-SHA-512"
    sasl_username = "isthmus"
    sasl_password_file = "password"
    ssl_cafile = "ca.pem"
    ssl_certfile = "cert.pem"
    control_key_env = "CONTROL_KEY"
    client_security_protocol = "PLAINTEXT"
    [client_listener]
    bind = "0.0.0.0:19092"
    advertised_host = "proxy-1.example.org"
    connections_max = 5
    [link]
    remotes_allowed = ["proxy-b.example.org", "[2001:db8::1]:19192"]
    [link_listener]
    bind = "[::]:19192"
    advertised = "proxy-1.example.org:443"
    enrolment_token_file = "token"
    [admin_listener]
    bind = "127.0.0.1:0"
    [plugins]
    enabled = []
    """
    config = parse(text, tmp_path, CONTROL_KEY="ab" * 32)
    assert config.mode == "sidecar"
    assert config.cluster.server_names() == "broker-1:9092,[::1]:9093"
    assert config.cluster.ssl_cafile == tmp_path / "ca.pem"
    assert config.cluster.sasl_password is not None
    assert config.cluster.sasl_password.get_secret_value() == "hunter2"
    assert config.cluster.control_key is not None
    assert config.cluster.control_key.reveal() == bytes.fromhex("ab" * 32)
    assert config.link_listener is not None
    assert config.link_listener.has_enrolment_token, "of versions before; it does nothing"
    assert config.link.remotes_allowed == ("proxy-b.example.org", "[2001:db8::1]:19192")
    assert not config.link.allow_local_links
    assert config.link_listener.advertised_at(19192) == Address("proxy-1.example.org", 443)
    assert config.proxy_name(19092) == "proxy-1"
    assert config.plugins.enabled == ()
    security = config.cluster.security
    assert (security.username, security.password(), security.uses_tls) == ("isthmus", "hunter2", True)


def test_the_upstream_leg_of_sessions_never_carries_the_proxys_identity() -> None:
    config = parse(with_cluster('security_protocol = "SSL"', 'ssl_certfile = "c.pem"', 'ssl_cafile = "ca.pem"'))
    session = config.cluster.session_security
    assert (session.security_protocol, session.ssl_certfile) == ("SSL", None)
    assert session.ssl_cafile == config.cluster.security.ssl_cafile
    plain = parse(with_cluster('security_protocol = "SSL"', 'client_security_protocol = "PLAINTEXT"'))
    assert plain.cluster.session_security.security_protocol == "PLAINTEXT"
    assert parse(MINIMAL).cluster.session_security.security_protocol == "PLAINTEXT"


@pytest.mark.parametrize(
    ("bind", "base", "broker_id", "expected"),
    [
        ("127.0.0.1:19092", "", 0, "127.0.0.1:19093"),
        ("127.0.0.1:19092", "", 3, "127.0.0.1:19096"),
        ("127.0.0.1:19092", "broker_port_base = 20000", 3, "127.0.0.1:20003"),
        ("127.0.0.1:0", "", 3, "127.0.0.1:0"),
        ("127.0.0.1:0", "broker_port_base = 20000", 3, "127.0.0.1:20003"),
    ],
)
def test_each_broker_of_a_cluster_has_a_port(bind: str, base: str, broker_id: int, expected: str) -> None:
    config = parse(MINIMAL.replace("127.0.0.1:19092", bind) + base)
    assert str(config.client_listener.broker_bind(broker_id)) == expected


def test_a_broker_may_have_a_port_of_its_own_whatever_its_id_is() -> None:
    config = parse(MINIMAL + "[client_listener.broker_ports]\n1000001 = 19100\n2 = 19101")
    assert str(config.client_listener.broker_bind(1_000_001)) == "127.0.0.1:19100"
    assert str(config.client_listener.broker_bind(2)) == "127.0.0.1:19101"
    assert str(config.client_listener.broker_bind(3)) == "127.0.0.1:19096"
    with pytest.raises(ConfigError, match=r"add \[client_listener.broker_ports\] .*: 70000 = 19100"):
        config.client_listener.broker_bind(70_000)


@pytest.mark.parametrize(
    ("ports", "problem"),
    [
        ("1 = 19092", "another port than bind"),
        ("1 = 19100\n2 = 19100", "a port for each"),
        ("1 = 70000", "65535"),
        ("one = 19100", "broker_ports.one"),
    ],
)
def test_ports_of_brokers_that_cannot_be(ports: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        parse(MINIMAL + "[client_listener.broker_ports]\n" + ports)


def test_a_broker_whose_port_would_be_too_high_is_an_error() -> None:
    config = parse(MINIMAL + "broker_port_base = 65000")
    with pytest.raises(ConfigError, match=r"client_listener.broker_port_base: found port 66000 for broker 1000"):
        config.client_listener.broker_bind(1000)


def test_a_proxy_is_named_after_the_address_that_clients_are_told() -> None:
    assert parse(MINIMAL).proxy_name(19092) == "127.0.0.1-19092"
    assert parse(MINIMAL + 'advertised_host = "p.example.org"').proxy_name(5) == "p.example.org-5"


def test_the_file_is_named_in_errors_and_paths_are_relative_to_it(tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    file.write_text(MINIMAL + 'tls_certfile = "certs/a.pem"')
    config = load_config(file)
    assert config.client_listener.tls_certfile == tmp_path / "certs" / "a.pem"
    assert config.model_dump()["client_listener"]["bind"] == "127.0.0.1:19092"
    assert config.source == str(file)
    file.write_text("[cluster]\nbootstrap_servers = broker\n")
    with pytest.raises(ConfigError, match=r"a.toml: this is not TOML: .*line 2"):
        load_config(file)
    with pytest.raises(ConfigurationError, match=r"none.toml: the file cannot be read: No such file"):
        load_config(tmp_path / "none.toml")


def test_a_configuration_does_not_change() -> None:
    config = parse(MINIMAL)
    with pytest.raises(ValueError, match="frozen"):
        config.client_listener.connections_max = 5  # type: ignore[misc]


# --- what errors tell


def test_every_problem_is_told_at_once() -> None:
    text = """
    [proxy]
    log_stle = "text"
    log_level = "Inof"
    drain_timeout_s = "5"
    [cluster]
    bootstrap_server = "localhost:9092"
    broker_id = "1"
    [client_listner]
    bind = "127.0.0.1:1"
    """
    found = problems_of(text)
    assert set(found) == {
        "proxy.log_stle",
        "proxy.log_level",
        "proxy.drain_timeout_s",
        "cluster.bootstrap_server",
        "cluster.bootstrap_servers",
        "cluster.broker_id",
        "client_listner",
        "client_listener",
    }
    assert found["proxy.log_stle"].fix == "did you mean proxy.log_style?"
    assert found["proxy.log_level"].fix == 'did you mean "info"?'
    assert found["cluster.bootstrap_server"].fix == "did you mean cluster.bootstrap_servers?"
    assert found["client_listner"].fix == "did you mean client_listener?"
    assert found["client_listener"].fix == 'add a table [client_listener] with bind = "127.0.0.1:19092"'
    assert str(found["proxy.drain_timeout_s"]) == (
        'proxy.drain_timeout_s: found "5", expected a number; write it without quotes'
    )


@pytest.mark.parametrize(
    ("line", "key", "expected", "fix"),
    [
        ('connections_max = "5"', "connections_max", "a whole number", "without quotes"),
        ("connections_max = 5.5", "connections_max", "a whole number", "without quotes"),
        ("connections_max = true", "connections_max", "a whole number", "without quotes"),
        ("in_flight_max = 0", "in_flight_max", "a number of at least 1", "change the value"),
        ("broker_port_base = 70000", "broker_port_base", "a number of at most 65535", "change the value"),
        ("advertised_host = 5", "advertised_host", "text", "quotes"),
        ('advertised_host = "h:19092"', "advertised_host", "a host without a port", "remove what is not the host"),
        ("tls_certfile = 5", "tls_certfile", "the path of a file", "relative to the directory"),
        ('tls_keyfile = "k"', "tls_certfile", "the path of a certificate", "add tls_certfile"),
        ('tls_client_cafile = "k"', "tls_certfile", "the path of a certificate", "or remove tls_client_cafile"),
        ('broker_id = 1\nadvertised_host = "h"', "broker_id", "", "did you mean cluster.broker_id?"),
        ("zzz = 1", "zzz", "", "known keys here: bind, advertised_host"),
    ],
)
def test_a_wrong_value_names_its_key_and_the_fix(line: str, key: str, expected: str, fix: str) -> None:
    problem = problems_of(MINIMAL + line)[f"client_listener.{key}"]
    assert expected in problem.expected
    assert fix in problem.fix


@pytest.mark.parametrize(
    ("bind", "reason"),
    [
        ("localhost", "it has no port"),
        ("localhost:", "is no port"),
        ("localhost:99999", "is no port from 0 to 65535"),
        ("localhost:-1", "is no port"),
        (":9092", "it has no valid host"),
        ("::1:9092", "stands in brackets"),
        ("http://a:80", "stands in brackets"),
        ("a b:80", "it has no valid host"),
    ],
)
def test_addresses_are_checked(bind: str, reason: str) -> None:
    problem = problems_of(MINIMAL.replace("127.0.0.1:19092", bind))["client_listener.bind"]
    assert problem.found == f'"{bind}"'
    assert reason in problem.fix
    with pytest.raises(ValueError, match=reason):
        parse_address(bind, any_port=True)


def test_only_listeners_take_any_free_port() -> None:
    servers = problems_of(MINIMAL.replace("127.0.0.1:9092", "a:9092,b:0"))["cluster.bootstrap_servers"]
    assert servers.fix == "'b:0': '0' is no port from 1 to 65535"


@pytest.mark.parametrize(
    ("lines", "key", "fix"),
    [
        (['security_protocol = "SASL_SSL"'], "sasl_mechanism", "add sasl_mechanism"),
        (['security_protocol = "SASL_SSL"'], "sasl_password_file", "sasl_password_file or sasl_password_env"),
        (['security_protocol = "sasl_ssl"'], "security_protocol", 'did you mean "SASL_SSL"?'),
        (['sasl_username = "u"'], "sasl_username", 'set security_protocol = "SASL_SSL"'),
        (['ssl_cafile = "ca.pem"'], "ssl_cafile", 'set security_protocol = "SSL"'),
        (['security_protocol = "SSL"', 'ssl_keyfile = "k"'], "ssl_certfile", "add ssl_certfile"),
        (['client_security_protocol = "SSL"', 'ssl_certfile = "k"'], "ssl_certfile", "remove the key"),
    ],
)
def test_security_settings_must_belong_together(lines: list[str], key: str, fix: str) -> None:
    assert fix in problems_of(with_cluster(*lines))[f"cluster.{key}"].fix


def test_listeners_must_not_collide_and_wildcards_need_an_address_to_tell() -> None:
    text = MINIMAL.replace("127.0.0.1:19092", "0.0.0.0:19092") + (
        '[link_listener]\nbind = "[::]:19192"\n[admin_listener]\nbind = "0.0.0.0:19092"\n'
    )
    found = problems_of(text)
    assert set(found) == {"client_listener.advertised_host", "link_listener.advertised", "admin_listener.bind"}
    assert found["admin_listener.bind"].expected == "another address than client_listener.bind"


@pytest.mark.parametrize(
    ("lines", "key", "fix"),
    [
        (['tls_client_cafile = "ca.pem"'], "tls_certfile", "add tls_certfile"),
        (['tls_keyfile = "k.pem"'], "tls_certfile", "add tls_certfile"),
        (['tls_operators = ["ops"]'], "tls_operators", "add tls_client_cafile"),
        (
            [
                'tls_certfile = "c"',
                'tls_client_cafile = "ca"',
                'tls_operators = ["ops"]',
                'viewer_token_file = "t"',
            ],
            "tls_operators",
            "tokens say who is an operator",
        ),
        (
            ["loopback_without_authentication = true", 'operator_token_file = "t"'],
            "loopback_without_authentication",
            "remove one",
        ),
        (
            ['bind = "0.0.0.0:28080"', "loopback_without_authentication = true"],
            "loopback_without_authentication",
            "bind 127.0.0.1",
        ),
        ([f'unix_socket = "/{"x" * 120}"'], "unix_socket", "shorter path"),
        (['unix_socket_mode = "0666"'], "unix_socket_mode", "did you mean"),
        (['hosts = ["a:1"]'], "hosts.0", "such as a port"),
    ],
)
def test_who_may_use_the_admin_listener_is_said_without_contradiction(lines: list[str], key: str, fix: str) -> None:
    found = problems_of(MINIMAL + "\n".join(["[admin_listener]", *lines]))
    assert list(found) == [f"admin_listener.{key}"]
    assert fix in found[f"admin_listener.{key}"].fix


def test_a_sidecar_has_one_port() -> None:
    found = problems_of(with_cluster("broker_id = 1") + "broker_port_base = 20000")
    assert "remove cluster.broker_id" in found["client_listener.broker_port_base"].fix


def test_plugins_must_be_installed_and_named_once() -> None:
    found = problems_of(MINIMAL + '[plugins]\nenabled = ["replicaton", "reservation", "reservation"]')
    assert found["plugins.enabled.0"].fix == 'did you mean "replication"?'
    assert found["plugins.enabled.2"].expected == "each plugin once"
    assert problems_of(MINIMAL + '[plugins]\nenabled = "replication"')["plugins.enabled"].expected == "a list"


# --- secrets


def test_secrets_in_the_file_itself_are_refused_and_not_repeated() -> None:
    with pytest.raises(ConfigError) as caught:
        parse(with_cluster('sasl_password = "hunter2"', "control_key_env = 'hunter2 hunter2'"))
    text = f"{caught.value} {caught.value!r} {caught.value.__dict__}"
    assert caught.value.__suppress_context__  # pydantic's own error is in no traceback
    assert "use sasl_password_file or sasl_password_env" in text
    assert "give the variable's name, not the secret" in text
    assert "hunter2" not in text


def test_no_form_of_a_configuration_shows_a_secret(tmp_path: Path) -> None:
    config = parse(
        with_cluster('control_key_env = "KEY"') + '[link_listener]\nbind = "127.0.0.1:1"\n',
        tmp_path,
        KEY="ab" * 32,
    )
    assert config.link_listener is not None
    shown = [repr(config), str(config), config.model_dump_json(), str(dict(config)), str(config.cluster.__dict__)]
    shown += [repr(config.link_listener._secrets), repr(config.cluster._secrets), repr(config.cluster.control_key)]
    for text in shown:
        assert "hunter2" not in text
        assert "abab" not in text
    with pytest.raises(TypeError):
        pickle.dumps(config.cluster.control_key)


@pytest.mark.parametrize("written", ["00ff" * 16, base64.b64encode(bytes.fromhex("00ff" * 16)).decode() + "\n"])
def test_a_control_key_is_hexadecimal_or_base64(written: str, tmp_path: Path) -> None:
    (tmp_path / "key").write_text(written)
    key = parse(with_cluster('control_key_file = "key"'), tmp_path).cluster.control_key
    assert key is not None
    assert key.reveal() == bytes.fromhex("00ff" * 16)


@pytest.mark.parametrize(
    ("written", "found"),
    [("abcd", "2 bytes"), ("secret!!", "neither hexadecimal nor base64"), ("", "an empty file"), ("\xff", "not UTF-8")],
)
def test_a_wrong_control_key_is_described_and_not_shown(written: str, found: str, tmp_path: Path) -> None:
    (tmp_path / "key").write_bytes(written.encode("latin-1"))
    problem = problems_of(with_cluster('control_key_file = "key"'), tmp_path)["cluster.control_key_file"]
    assert found in problem.found
    assert "secret!!" not in str(problem)


def test_secrets_that_are_not_there_name_their_key() -> None:
    found = problems_of(with_cluster('control_key_env = "NO_KEY"'))
    assert found["cluster.control_key_env"].fix == "set NO_KEY for the proxy's process"
    found = problems_of(with_cluster('control_key_file = "/nonexistent/key"'))
    assert "No such file" in found["cluster.control_key_file"].found
    both = with_cluster('control_key_env = "A"', 'control_key_file = "b"')
    assert problems_of(both)["cluster.control_key_env"].fix == "remove one"


def test_where_links_may_be_created_to_is_checked() -> None:
    found = problems_of(with_cluster() + '[link]\nremotes_allowed = ["b.example.org", "h:1", "http://b/", "h:99999"]\n')
    assert set(found) == {"link.remotes_allowed.2", "link.remotes_allowed.3"}
    assert "proxy-b.example.org:19192" in found["link.remotes_allowed.2"].fix


# --- certificates


def test_certificates_are_loaded(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    authority.issue("proxy")
    text = (
        with_cluster('security_protocol = "SSL"', 'ssl_cafile = "ca.pem"', 'ssl_certfile = "proxy.pem"')
        .replace('ssl_certfile = "proxy.pem"', 'ssl_certfile = "proxy.pem"\nssl_keyfile = "proxy.key"')
        .strip()
    )
    text += '\ntls_certfile = "proxy.pem"\ntls_keyfile = "proxy.key"\ntls_client_cafile = "ca.pem"\n'
    text += '[link_listener]\nbind = "127.0.0.1:1"\ntls_certfile = "proxy.pem"\ntls_keyfile = "proxy.key"\n'
    config = parse(text, tmp_path)
    clients, links, dial = client_listener_tls(config), link_listener_tls(config), link_dial_tls(config)
    assert clients is not None
    assert links is not None
    assert dial is not None
    assert (clients.verify_mode, links.verify_mode) == (ssl.CERT_REQUIRED, ssl.CERT_NONE)
    assert dial.verify_mode == ssl.CERT_REQUIRED
    assert cluster_tls(config) is not None
    assert session_tls(config) is not None
    plain = parse(MINIMAL)
    made = [make(plain) for make in (client_listener_tls, link_listener_tls, link_dial_tls, cluster_tls, session_tls)]
    assert made == [None] * 5


def test_a_proxy_without_a_link_listener_dials_over_tls_and_trusts_whom_it_is_told_to(tmp_path: Path) -> None:
    Authority(tmp_path).issue("proxy")
    text = MINIMAL + '[link]\ntls_cafile = "ca.pem"\n'
    dial = link_dial_tls(parse(text, tmp_path))
    assert dial is not None
    assert (dial.verify_mode, dial.check_hostname, len(dial.get_ca_certs())) == (ssl.CERT_REQUIRED, True, 1)
    assert link_dial_tls(parse(text + 'tls_certfile = "proxy.pem"\ntls_keyfile = "proxy.key"\n', tmp_path)) is not None
    for alone, key in (("tls_keyfile", "link.tls_certfile"), ("tls_certfile", "link.tls_cafile")):
        with pytest.raises(ConfigError, match=rf"{key}: .*nothing beside {alone}"):
            parse(MINIMAL + f'[link]\n{alone} = "proxy.pem"\n', tmp_path)


@pytest.mark.parametrize(
    ("certfile", "keyfile", "key", "found"),
    [
        ("none.pem", "a.key", "tls_certfile", "No such file"),
        ("a.pem", "none.key", "tls_keyfile", "No such file"),
        ("a.pem", "b.key", "tls_keyfile", "MISMATCH"),
        ("a.pem", "locked.key", "tls_keyfile", "with a password"),
        ("junk.pem", "a.key", "tls_certfile", "without PEM"),
    ],
)
def test_unusable_certificates_name_the_key(certfile: str, keyfile: str, key: str, found: str, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    for name in ("a", "b"):
        authority.issue(name)
    authority.issue("locked", b"hunter2")
    (tmp_path / "junk.pem").write_text("junk")
    config = parse(MINIMAL + f'tls_certfile = "{certfile}"\ntls_keyfile = "{keyfile}"', tmp_path)
    (problem,) = asyncio.run(check(config))
    assert problem.key == f"client_listener.{key}"
    assert found in problem.found


def test_unusable_authorities_name_the_key(tmp_path: Path) -> None:
    Authority(tmp_path).issue("a")
    text = MINIMAL + 'tls_certfile = "a.pem"\ntls_keyfile = "a.key"\ntls_client_cafile = "none.pem"'
    with pytest.raises(ConfigError, match=r"client_listener.tls_client_cafile: .*No such file"):
        client_listener_tls(parse(text, tmp_path))
    (tmp_path / "none.pem").write_text("junk")
    with pytest.raises(ConfigError, match=r"client_listener.tls_client_cafile: .*expected certificates"):
        client_listener_tls(parse(text, tmp_path))
    ssl_text = with_cluster('security_protocol = "SSL"', 'ssl_cafile = "nowhere.pem"')
    with pytest.raises(ConfigError, match=r"cluster.ssl_cafile: .*nowhere.pem"):
        cluster_tls(parse(ssl_text, tmp_path))


# --- bootstrap servers


@asynccontextmanager
async def broker(node_id: int = 1, tls: ssl.SSLContext | None = None) -> AsyncIterator[int]:
    """The first words of a Kafka broker: API versions, metadata, and a refusal of every SASL mechanism."""
    answers = {
        ApiKey.API_VERSIONS: {
            "api_keys": [
                {"api_key": ApiKey.API_VERSIONS, "min_version": 0, "max_version": 3},
                {"api_key": ApiKey.METADATA, "min_version": 1, "max_version": 8},
                {"api_key": ApiKey.SASL_HANDSHAKE, "min_version": 1, "max_version": 1},
            ]
        },
        ApiKey.METADATA: {"brokers": [{"node_id": node_id, "host": "127.0.0.1", "port": 1}]},
        ApiKey.SASL_HANDSHAKE: {"error_code": 33, "mechanisms": ["GSSAPI"]},
    }

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                size = await reader.readexactly(4)
                if int.from_bytes(size) > 1 << 20:
                    break
                head, _ = decode_request(size + await reader.readexactly(int.from_bytes(size)))
                if head.api_key == ApiKey.API_VERSIONS and head.version > 3:
                    answer = encode_response(build(response_type(18, 0), {"error_code": 35}), head.correlation_id)
                else:
                    kind = response_type(head.api_key, head.version)
                    answer = encode_response(build(kind, answers[ApiKey(head.api_key)]), head.correlation_id)
                writer.write(answer)
        except (OSError, asyncio.IncompleteReadError):
            pass
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=tls)
    async with server:
        yield server.sockets[0].getsockname()[1]


def check_against(lines: tuple[str, ...], directory: Path = Path(), tls: ssl.SSLContext | None = None) -> list[Problem]:
    async def run() -> list[Problem]:
        async with broker(tls=tls) as port:
            text = with_cluster(*lines).replace('"127.0.0.1:9092"', f'"127.0.0.1:{port}"')
            return await check(parse(text, directory, PASSWORD="hunter2"))

    return asyncio.run(run())


def test_a_broker_that_answers_is_enough() -> None:
    assert check_against(()) == []
    assert check_against(("broker_id = 1",)) == []


def test_an_unknown_broker_id_names_those_that_there_are() -> None:
    (problem,) = check_against(("broker_id = 7",))
    assert (problem.key, problem.found, problem.expected) == ("cluster.broker_id", "7", "a broker of the cluster (1)")
    assert not problem.unreachable


def test_a_refused_identity_is_a_problem_of_the_identity() -> None:
    sasl = ('sasl_mechanism = "PLAIN"', 'sasl_username = "u"', 'sasl_password_env = "PASSWORD"')
    (problem,) = check_against(('security_protocol = "SASL_PLAINTEXT"', *sasl))
    assert problem.key == "cluster.sasl_username"
    assert "GSSAPI" in problem.found
    assert "hunter2" not in str(problem)


def test_tls_on_one_side_only_is_recognised(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(*authority.issue("broker"))
    (plain,) = check_against((), tls=server)
    assert (plain.key, plain.unreachable) == ("cluster.bootstrap_servers", True)
    assert "security_protocol" in plain.fix
    (encrypted,) = check_against(('security_protocol = "SSL"',))
    assert encrypted.unreachable
    assert "security_protocol" in encrypted.fix
    assert check_against(('security_protocol = "SSL"', 'ssl_cafile = "ca.pem"'), tmp_path, server) == []
    (distrusted,) = check_against(('security_protocol = "SSL"',), tmp_path, server)
    assert "its certificate is not accepted" in distrusted.found
    assert "ssl_cafile" in distrusted.fix


def test_servers_that_do_not_answer_are_each_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config_check, "CONNECT_TIMEOUT_S", 0.3)

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    async def run() -> list[Problem]:
        server = await asyncio.start_server(silent, "127.0.0.1", 0)
        async with server:
            mute = server.sockets[0].getsockname()[1]
            async with broker() as port:
                closed = await asyncio.start_server(silent, "127.0.0.1", 0)
                free = closed.sockets[0].getsockname()[1]
                closed.close()
                servers = f"127.0.0.1:{port},127.0.0.1:{mute},127.0.0.1:{free}"
                text = MINIMAL.replace('bootstrap_servers = "127.0.0.1:9092"', f'bootstrap_servers = "{servers}"')
                return await check(parse(text))

    mute, refused = asyncio.run(run())
    assert "no answer in 0.3 s" in mute.found
    assert "Connection refused" in refused.found
    assert {mute.key, refused.key} == {"cluster.bootstrap_servers"}
    assert mute.unreachable
    assert refused.unreachable
