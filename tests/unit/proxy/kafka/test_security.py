"""Security settings: what must be set together, where secrets come from, and that they are not shown."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Any

import pytest

from isthmus.errors import ConfigurationError
from isthmus.kafka.security import SecuritySpec


def sasl(**values: Any) -> SecuritySpec:
    return SecuritySpec(security_protocol="SASL_SSL", sasl_mechanism="PLAIN", username="alice", **values)


def test_plaintext_needs_nothing() -> None:
    spec = SecuritySpec()
    assert (spec.uses_tls, spec.uses_sasl, spec.tls_context()) == (False, False, None)
    assert spec == SecuritySpec()
    assert hash(spec) == hash(SecuritySpec())


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"security_protocol": "SASL_SSL"}, "needs sasl_mechanism"),
        ({"security_protocol": "SASL_SSL", "sasl_mechanism": "PLAIN"}, "needs username"),
        ({"security_protocol": "SASL_SSL", "sasl_mechanism": "PLAIN", "username": "a"}, "one of password_file"),
        ({"security_protocol": "SASL_SSL", "sasl_mechanism": "GSSAPI"}, "sasl_mechanism"),
        ({"sasl_mechanism": "PLAIN"}, "set security_protocol to SASL_SSL"),
        ({"ssl_certfile": "c"}, "set security_protocol to SSL"),
        ({"security_protocol": "SSL", "ssl_keyfile": "k"}, "set ssl_certfile"),
        ({"password": "hunter2"}, "password"),
    ],
)
def test_what_does_not_fit_together(values: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        SecuritySpec(**values)


def test_both_sources_of_a_password_are_one_too_many() -> None:
    with pytest.raises(ValueError, match="one of password_file and password_env"):
        sasl(password_file=Path("f"), password_env="E")


def test_the_password_comes_from_a_file_or_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "password"
    file.write_text(" hunter2 \n")
    spec = sasl(password_file=file)
    assert spec.password() == " hunter2 "
    file.write_text("renewed")
    assert spec.password() == "renewed"
    monkeypatch.setenv("ISTHMUS_PASSWORD", "from env")
    by_env = sasl(password_env="ISTHMUS_PASSWORD")
    assert by_env.password() == "from env"
    for shown in (repr(spec), str(spec), spec.model_dump_json(), repr(by_env), by_env.model_dump_json()):
        assert "renewed" not in shown
        assert "from env" not in shown


def test_missing_secrets_name_the_key_and_the_fix(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="cannot be read") as caught:
        sasl(password_file=tmp_path / "none").password()
    assert caught.value.key == "password_file"
    assert caught.value.fix
    with pytest.raises(ConfigurationError, match="the environment has no ISTHMUS_NOT_SET") as caught:
        sasl(password_env="ISTHMUS_NOT_SET").password()
    assert caught.value.key == "password_env"


def test_files_that_are_no_certificates_are_named(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.pem"
    wrong.write_text("nothing here")
    for cafile in (wrong, tmp_path / "none.pem"):
        with pytest.raises(ConfigurationError) as caught:
            SecuritySpec(security_protocol="SSL", ssl_cafile=cafile).tls_context()
        assert caught.value.key == "ssl_cafile"
        assert str(cafile) in str(caught.value)
    with pytest.raises(ConfigurationError) as caught:
        SecuritySpec(security_protocol="SSL", ssl_certfile=wrong).tls_context()
    assert caught.value.key == "ssl_certfile"


def test_certificates_are_checked_unless_told_otherwise() -> None:
    strict = SecuritySpec(security_protocol="SSL").tls_context()
    assert strict is not None
    assert (strict.check_hostname, strict.verify_mode) == (True, ssl.CERT_REQUIRED)
    loose = SecuritySpec(security_protocol="SSL", ssl_check_hostname=False).tls_context()
    assert loose is not None
    assert (loose.check_hostname, loose.verify_mode) == (False, ssl.CERT_REQUIRED)
