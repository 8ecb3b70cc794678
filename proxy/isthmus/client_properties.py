"""A Kafka client's properties file (``--command-config`` of Kafka's own tools), as far as it says how to connect.

``security.protocol``, ``sasl.mechanism``, user and password of ``sasl.jaas.config``, and PEM stores
(``ssl.truststore.*``, ``ssl.keystore.*``). What else begins with ``security.``, ``sasl.`` or ``ssl.`` is refused: it
was set for a reason. All other settings are of no concern here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError

from isthmus.errors import ConfigurationError
from isthmus.kafka.security import SecuritySpec

_CONCERNS: Final = ("security.", "sasl.", "ssl.")
_KNOWN: Final = frozenset(
    {
        "security.protocol",
        "sasl.mechanism",
        "sasl.jaas.config",
        "ssl.truststore.type",
        "ssl.truststore.location",
        "ssl.keystore.type",
        "ssl.keystore.location",
        "ssl.endpoint.identification.algorithm",
    }
)
_JAAS: Final = re.compile(r'\b(username|password)\s*=\s*(?:"((?:[^"\\]|\\.)*)"|([^"\s;]+))')


class PropertiesSecurity(SecuritySpec):
    """The password stands in the file's JAAS line, and is read from there when it is needed."""

    def password(self) -> str:
        assert self.password_file is not None
        return _jaas(self.password_file, _read(self.password_file))["password"]


def read_security(path: Path) -> SecuritySpec:
    """How a client with this properties file connects. Raises ConfigurationError."""
    properties = _read(path)
    for name in properties:
        if name.startswith(_CONCERNS) and name not in _KNOWN:
            known = ", ".join(sorted(_KNOWN))
            raise ConfigurationError(name, f"not supported here (in {path})", f"Supported are {known}.")
    values: dict[str, Any] = {"security_protocol": properties.get("security.protocol", "PLAINTEXT")}
    if "sasl.mechanism" in properties or "sasl.jaas.config" in properties:
        values["sasl_mechanism"] = properties.get("sasl.mechanism")
        values["username"] = _jaas(path, properties)["username"]
        values["password_file"] = path
    values["ssl_cafile"] = _pem(path, properties, "ssl.truststore")
    values["ssl_certfile"] = _pem(path, properties, "ssl.keystore")
    values["ssl_check_hostname"] = properties.get("ssl.endpoint.identification.algorithm", "https") != ""
    try:
        return PropertiesSecurity.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        raise ConfigurationError(str(path), str(first["msg"]), "Correct the file.") from None


def _pem(path: Path, properties: Mapping[str, str], store: str) -> str | None:
    location = properties.get(f"{store}.location")
    if location is not None and properties.get(f"{store}.type", "JKS").upper() != "PEM":
        raise ConfigurationError(f"{store}.type", f"not PEM (in {path})", "Set it to PEM, with a PEM file's location.")
    return location


def _jaas(path: Path, properties: Mapping[str, str]) -> dict[str, str]:
    """User and password of the JAAS line."""
    line = properties.get("sasl.jaas.config", "")
    found = {name: re.sub(r"\\(.)", r"\1", quoted) or plain for name, quoted, plain in _JAAS.findall(line)}
    if found.keys() != {"username", "password"}:
        example = 'sasl.jaas.config=... required username="me" password="secret";'
        raise ConfigurationError("sasl.jaas.config", f"has no username and password (in {path})", f"Say {example}")
    return found


def _read(path: Path) -> dict[str, str]:
    """The properties of a file in Java's format."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8"
        raise ConfigurationError(str(path), f"cannot be read ({reason})", "Check its name and owner.") from error
    properties: dict[str, str] = {}
    for line in re.sub(r"\\\r?\n[ \t]*", "", text).splitlines():
        if (line := line.strip()) and line[0] not in "#!":
            name, _, value = _split(line)
            properties[name] = re.sub(r"\\(.)", r"\1", value)
    return properties


def _split(line: str) -> tuple[str, str, str]:
    """Name, what separates, and value: the first of ``=``, ``:`` and white space counts."""
    found = re.match(r"([^=:\s]+)(\s*[=:]\s*|\s+|$)(.*)", line)
    return (found[1], found[2], found[3]) if found else (line, "", "")
