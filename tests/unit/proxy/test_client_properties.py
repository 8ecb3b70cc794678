"""Properties files of Kafka's clients: how they connect, and what is refused of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from isthmus.client_properties import read_security
from isthmus.errors import ConfigurationError


def test_nothing_that_matters_is_plain(tmp_path: Path) -> None:
    found = read_security(_file(tmp_path, "# a comment\nacks = all\n\nlinger.ms: 5\n"))
    assert (found.security_protocol, found.sasl_mechanism, found.ssl_cafile) == ("PLAINTEXT", None, None)


def test_sasl_and_pem_stores(tmp_path: Path) -> None:
    path = _file(
        tmp_path,
        "security.protocol=SASL_SSL\nsasl.mechanism=SCRAM-SHA-512\n"
        "sasl.jaas.config=org.apache.kafka.common.security.scram.ScramLoginModule required \\\n"
        '    username="me" password="se cret;";\n'
        "ssl.truststore.type=PEM\nssl.truststore.location=/etc/ca.pem\n"
        "ssl.keystore.type=PEM\nssl.keystore.location=/etc/me.pem\n"
        "ssl.endpoint.identification.algorithm=\n",
    )
    found = read_security(path)
    assert (found.security_protocol, found.sasl_mechanism) == ("SASL_SSL", "SCRAM-SHA-512")
    assert (found.username, found.password()) == ("me", "se cret;")
    assert (found.ssl_cafile, found.ssl_certfile) == (Path("/etc/ca.pem"), Path("/etc/me.pem"))
    assert not found.ssl_check_hostname
    assert "cret" not in repr(found)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("ssl.key.password=x", "ssl.key.password"),
        ("sasl.oauthbearer.token.endpoint.url=x", "not supported"),
        ("ssl.truststore.location=/etc/ca.jks\nsecurity.protocol=SSL", "PEM"),
        ("sasl.mechanism=PLAIN\nsecurity.protocol=SASL_SSL", "sasl.jaas.config"),
        ("security.protocol=SOON", "security_protocol|Input should be"),
    ],
)
def test_what_is_not_understood_is_refused(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        read_security(_file(tmp_path, text))


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="No such file"):
        read_security(tmp_path / "absent")


def _file(directory: Path, text: str) -> Path:
    path = directory / "client.properties"
    path.write_text(text)
    return path
