"""The TLS contexts that a configuration asks for, made once, with errors that name the setting."""

from __future__ import annotations

import ssl
from pathlib import Path

from isthmus.config import ConfigError, Problem, ProxyConfig, unreadable
from isthmus.errors import ConfigurationError
from isthmus.kafka.security import SecuritySpec


def client_listener_tls(config: ProxyConfig) -> ssl.SSLContext | None:
    """TLS for clients, None where it is not configured. Raises :class:`ConfigError`."""
    listener = config.client_listener
    return _server_tls(
        config,
        "client_listener",
        listener.tls_certfile,
        listener.tls_keyfile,
        listener.tls_client_cafile,
        "tls_client_cafile",
    )


def link_listener_tls(config: ProxyConfig) -> ssl.SSLContext | None:
    """TLS for other clusters' proxies, None where it is not configured. Raises :class:`ConfigError`."""
    listener = config.link_listener
    if listener is None:
        return None
    return _server_tls(
        config, "link_listener", listener.tls_certfile, listener.tls_keyfile, listener.tls_cafile, "tls_cafile"
    )


def admin_listener_tls(config: ProxyConfig) -> ssl.SSLContext | None:
    """TLS of the admin listener, None where it is not configured. Raises :class:`ConfigError`.

    It lets in who has no certificate: they may ask for health.
    """
    listener = config.admin_listener
    context = _server_tls(
        config,
        "admin_listener",
        listener.tls_certfile,
        listener.tls_keyfile,
        listener.tls_client_cafile,
        "tls_client_cafile",
    )
    if context is not None and listener.tls_client_cafile is not None:
        context.verify_mode = ssl.CERT_OPTIONAL
    return context


def link_dial_tls(config: ProxyConfig) -> ssl.SSLContext | None:
    """TLS for connecting to other clusters' proxies. As above.

    What ``[link]`` says, else with the link listener's own certificate, where it has one.
    """
    listener, link = config.link_listener, config.link
    if link.tls_cafile is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        _load_ca(config, "link.tls_cafile", context, link.tls_cafile)
        if link.tls_certfile is not None:
            _load_certificate(config, "link.tls", context, link.tls_certfile, link.tls_keyfile)
        return context
    if listener is None or listener.tls_certfile is None:
        return None
    context = ssl.create_default_context()
    if listener.tls_cafile is not None:
        _load_ca(config, "link_listener.tls_cafile", context, listener.tls_cafile)
    _load_certificate(config, "link_listener.tls", context, listener.tls_certfile, listener.tls_keyfile)
    return context


def cluster_tls(config: ProxyConfig) -> ssl.SSLContext | None:
    """TLS of the proxy's own connections to brokers, None without. Raises :class:`ConfigError`."""
    return _spec_tls(config, config.cluster.security)


def session_tls(config: ProxyConfig) -> ssl.SSLContext | None:
    """TLS of the upstream leg of sessions, None without. Raises :class:`ConfigError`."""
    return _spec_tls(config, config.cluster.session_security)


def _spec_tls(config: ProxyConfig, spec: SecuritySpec) -> ssl.SSLContext | None:
    try:
        return spec.tls_context()
    except ConfigurationError as error:
        raise ConfigError(config.source, [Problem(f"cluster.{error.key}", error.problem, "", error.fix)]) from None


def _server_tls(
    config: ProxyConfig, table: str, certfile: Path | None, keyfile: Path | None, cafile: Path | None, ca_name: str
) -> ssl.SSLContext | None:
    if certfile is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    _load_certificate(config, f"{table}.tls", context, certfile, keyfile)
    if cafile is not None:
        _load_ca(config, f"{table}.{ca_name}", context, cafile)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _load_certificate(
    config: ProxyConfig, prefix: str, context: ssl.SSLContext, certfile: Path, keyfile: Path | None
) -> None:
    paths = {f"{prefix}_certfile": certfile} | ({f"{prefix}_keyfile": keyfile} if keyfile else {})
    for key, path in paths.items():
        try:
            content = path.read_bytes()
        except OSError as error:
            raise ConfigError(config.source, [unreadable(key, path, error)]) from None
        if b"-----BEGIN " not in content:
            problem = Problem(
                key, f'"{path}" without PEM in it', "a certificate or private key (PEM)", "convert it to PEM"
            )
            raise ConfigError(config.source, [problem])

    def no_password() -> str:
        # Without this, OpenSSL asks on the terminal.
        raise ConfigError(
            config.source,
            [
                Problem(
                    key, f'"{path}" with a password', "a key without one", "decrypt it: openssl pkey -in ... -out ..."
                )
            ],
        )

    try:
        context.load_cert_chain(certfile, keyfile, no_password)
    except ssl.SSLError as error:
        reason = error.reason or "it cannot be read"
        expected = "a certificate and its private key (PEM)"
        fix = "give the key that belongs to the certificate" if "MISMATCH" in reason else "check both files"
        raise ConfigError(config.source, [Problem(key, f'"{path}": {reason}', expected, fix)]) from None


def _load_ca(config: ProxyConfig, key: str, context: ssl.SSLContext, cafile: Path) -> None:
    try:
        context.load_verify_locations(cafile)
    except ssl.SSLError as error:
        found = f'"{cafile}": {error.reason or "it cannot be read"}'
        raise ConfigError(
            config.source, [Problem(key, found, "certificates (PEM)", "give a file with CA certificates")]
        ) from None
    except OSError as error:
        raise ConfigError(config.source, [unreadable(key, cafile, error)]) from None
