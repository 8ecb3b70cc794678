"""How this process identifies itself to brokers, and checks them: TLS, SASL and client certificates.

The settings are named after those of Kafka's clients (security.protocol, sasl.mechanism, ssl.*). The same spec serves
the proxy's own client and the upstream leg of sessions, which uses the TLS part only: there, SASL is the client's.
Secrets come from a file or the environment when they are needed, so a new one is picked up at the next connection; they
are in no field, and so in no repr, log or dump.
"""

from __future__ import annotations

import os
import ssl
from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from isthmus.errors import ConfigurationError


class SecuritySpec(BaseModel):
    """Frozen; the same spec is shared by all connections of a cluster."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    security_protocol: Literal["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"] = "PLAINTEXT"
    sasl_mechanism: Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"] | None = None
    username: str | None = None
    password_file: Path | None = Field(default=None, description="a file that holds the password alone")
    password_env: str | None = Field(default=None, description="the environment variable that holds the password")
    ssl_cafile: Path | None = Field(default=None, description="PEM; the system's authorities if it is not set")
    ssl_certfile: Path | None = Field(default=None, description="PEM; our certificate and its chain, for mTLS")
    ssl_keyfile: Path | None = Field(default=None, description="PEM; its key, if it is not in ssl_certfile")
    ssl_key_password_file: Path | None = None
    ssl_check_hostname: bool = True

    @property
    def uses_tls(self) -> bool:
        return self.security_protocol in ("SSL", "SASL_SSL")

    @property
    def uses_sasl(self) -> bool:
        return self.security_protocol in ("SASL_PLAINTEXT", "SASL_SSL")

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if self.uses_sasl:
            if self.sasl_mechanism is None:
                raise ValueError(
                    f"{self.security_protocol} needs sasl_mechanism: PLAIN, SCRAM-SHA-256 or SCRAM-SHA-512"
                )
            if self.username is None or (self.password_file is None) == (self.password_env is None):
                raise ValueError(f"{self.security_protocol} needs username, and one of password_file and password_env")
        elif self.sasl_mechanism is not None:
            raise ValueError("sasl_mechanism is set: set security_protocol to SASL_SSL or SASL_PLAINTEXT, or remove it")
        if self.ssl_certfile is not None and not self.uses_tls:
            raise ValueError("ssl_certfile is set: set security_protocol to SSL or SASL_SSL, or remove it")
        if self.ssl_keyfile is not None and self.ssl_certfile is None:
            raise ValueError("ssl_keyfile is set: set ssl_certfile to the certificate that belongs to it")
        return self

    def password(self) -> str:
        """Read the password now. Raises ConfigurationError."""
        if self.password_env is not None:
            value = os.environ.get(self.password_env)
            if value is None:
                raise ConfigurationError(
                    "password_env", f"the environment has no {self.password_env}", "Set it, or use password_file."
                )
            return value
        if self.password_file is None:
            raise ConfigurationError("password_file", "not set", "Set it to a file that holds the password.")
        return _read_secret("password_file", self.password_file)

    def tls_context(self) -> ssl.SSLContext | None:
        """A client's TLS context, None without TLS. Reads the files now; raises ConfigurationError."""
        if not self.uses_tls:
            return None
        try:
            context = ssl.create_default_context(
                ssl.Purpose.SERVER_AUTH, cafile=None if self.ssl_cafile is None else str(self.ssl_cafile)
            )
        except (OSError, ssl.SSLError) as error:
            raise ConfigurationError(
                "ssl_cafile",
                f"{self.ssl_cafile} holds no certificates that can be read ({_reason(error)})",
                "Set it to a PEM file with the authorities that sign the brokers' certificates.",
            ) from error
        context.check_hostname = self.ssl_check_hostname
        if self.ssl_certfile is not None:
            key_password = self.ssl_key_password_file
            try:
                context.load_cert_chain(
                    self.ssl_certfile,
                    self.ssl_keyfile,
                    # Without an answer here, OpenSSL would ask on the terminal.
                    lambda: "" if key_password is None else _read_secret("ssl_key_password_file", key_password),
                )
            except (OSError, ssl.SSLError, ValueError) as error:
                raise ConfigurationError(
                    "ssl_certfile",
                    f"{self.ssl_certfile} and its key cannot be used ({_reason(error)})",
                    "Set ssl_certfile and ssl_keyfile to PEM files that belong together.",
                ) from error
        return context


def _read_secret(key: str, path: Path) -> str:
    try:
        return path.read_text().rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(
            key, f"{path} cannot be read ({_reason(error)})", "Check its name and owner."
        ) from error


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or getattr(error, "reason", None) or type(error).__name__
