"""Users, certificates and an authorizer for clusters that need them."""

from __future__ import annotations

import datetime
import ipaddress
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Literal

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from pydantic import BaseModel, ConfigDict, field_validator

Mechanism = Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"]
MECHANISMS: Final[tuple[Mechanism, ...]] = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512")

BROKER_USER: Final = "broker"
"""Whom brokers and controllers log in as on listeners of their own."""

_BOTH_SIDES: Final = (ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH)
_USER: Final = re.compile(r"[A-Za-z0-9._-]+")


class Security(BaseModel):
    """What a cluster asks of its clients."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    users: Mapping[str, str] = {}
    """Name to password, for all of PLAIN, SCRAM-SHA-256 and SCRAM-SHA-512."""
    authorize: bool = False
    """Run the StandardAuthorizer: whoever is no super user may do only what an ACL allows."""
    super_users: tuple[str, ...] = ()
    client_certificates: Literal["none", "requested", "required"] = "none"
    """On SSL listeners. The principal is the common name: ``CN=alice`` is ``User:alice``."""

    @field_validator("users")
    @classmethod
    def _names(cls, users: Mapping[str, str]) -> Mapping[str, str]:
        for user, password in users.items():
            if not _USER.fullmatch(user) or user == BROKER_USER:
                raise ValueError(f"{user!r} cannot be a user's name: letters, digits, '.', '_', '-', and not broker")
            if not password or set(password) & set('",[]=\\'):
                raise ValueError(f'the password of {user}: not empty, and none of " , [ ] = \\')
        return users


def plain_jaas(users: Mapping[str, str], login: tuple[str, str] | None = None) -> str:
    """A JAAS line: who may log in with PLAIN, and as whom the broker itself does."""
    options = [f'username="{login[0]}" password="{login[1]}"'] if login else []
    options += [f'user_{user}="{password}"' for user, password in users.items()]
    return " ".join(["org.apache.kafka.common.security.plain.PlainLoginModule required", *options]) + ";"


def client_jaas(mechanism: Mechanism, user: str, password: str) -> str:
    """A client's JAAS line."""
    kind = "plain.Plain" if mechanism == "PLAIN" else "scram.Scram"
    return f'org.apache.kafka.common.security.{kind}LoginModule required username="{user}" password="{password}";'


class Authority:
    """A certificate authority in a directory: ``ca.crt``, and for each name ``name.crt``, ``name.key``, ``name.pem``.

    ``name.pem`` holds key and certificate: a key store of type PEM for Java. Keys are ECDSA P-256, not encrypted.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.ca_file = directory / "ca.crt"

    def create(self) -> None:
        """Make the authority's own key and certificate; valid for a year."""
        self.directory.mkdir(parents=True, exist_ok=True)
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "isthmus test CA")])
        certificate = (
            _builder(name, name, key.public_key(), datetime.timedelta(days=365))
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(authority=True), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .sign(key, hashes.SHA256())
        )
        self._write("ca", key, certificate)

    def issue(
        self,
        name: str,
        hosts: tuple[str, ...] = ("localhost", "127.0.0.1", "::1"),
        valid_for: datetime.timedelta = datetime.timedelta(days=365),
    ) -> Path:
        """A certificate for the common name ``name``, for servers and clients; negative ``valid_for``: expired already.

        Returns the PEM file of key and certificate.
        """
        ca_key = load_pem_private_key((self.directory / "ca.key").read_bytes(), None)
        assert isinstance(ca_key, ec.EllipticCurvePrivateKey)
        ca = x509.load_pem_x509_certificate(self.ca_file.read_bytes())
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        certificate = (
            _builder(subject, ca.subject, key.public_key(), valid_for)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(authority=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage(_BOTH_SIDES), critical=False)
            .add_extension(x509.SubjectAlternativeName([_alternative(host) for host in hosts]), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), critical=False)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .sign(ca_key, hashes.SHA256())
        )
        return self._write(name, key, certificate)

    def _write(self, name: str, key: ec.EllipticCurvePrivateKey, certificate: x509.Certificate) -> Path:
        private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        public = certificate.public_bytes(Encoding.PEM)
        both = self.directory / f"{name}.pem"
        (self.directory / f"{name}.crt").write_bytes(public)
        for path, content in ((self.directory / f"{name}.key", private), (both, private + public)):
            with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
                file.write(content)
        return both


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, valid_for: datetime.timedelta
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1) + min(valid_for, datetime.timedelta()))
        .not_valid_after(now + valid_for)
    )


def _usage(*, authority: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not authority,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=authority,
        crl_sign=authority,
        encipher_only=False,
        decipher_only=False,
    )


def _alternative(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)
