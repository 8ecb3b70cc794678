"""To which brokers captured events may go, and as whom: what the process's configuration allows settings to say.

Who may enable capture is not always one who may read files of the proxies' machines, or send what these hold elsewhere.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from isthmus_plugins.capture.kafka_topic import SERVERS, ClientFileError, client_settings
from isthmus_plugins.process import CaptureAllowed


class KafkaClient(NamedTuple):
    """A client of the brokers that have a topic."""

    servers: str
    """host:port, separated by commas; empty: those that the file names."""
    file: str
    """Its settings; empty: none."""


class NotAllowed(ValueError):
    """The configuration of this proxy does not allow it. The message says what to do."""


def kafka_client(servers: str, file: str, allowed: CaptureAllowed) -> KafkaClient:
    """The client that a namespace's settings ask for. Raises NotAllowed, ClientFileError."""
    path = "" if not file else str(_file_of(file, allowed.files_directory))
    named = client_settings(path).get(SERVERS, "")
    unknown = [each for each in _addresses(servers) if each not in allowed.servers]
    if unknown:
        raise NotAllowed(
            f"kafka_servers has {unknown[0]}, which is not in [capture] servers_allowed of this proxy's configuration: "
            "add it there, or have a kafka_client_file name the brokers (bootstrap.servers)"
        )
    if not servers and not named:
        raise ClientFileError(f"{file}: it names no brokers (bootstrap.servers), and neither does kafka_servers")
    return KafkaClient(servers, path)


def _file_of(name: str, directory: Path | None) -> Path:
    """A file below the directory of such files, wherever links lead."""
    if directory is None:
        raise NotAllowed(
            "kafka_client_file is read below the directory that [capture] files_directory in the proxy's configuration "
            "names, and this proxy's names none"
        )
    path = Path(directory, name).resolve()
    if not path.is_relative_to(directory.resolve()):
        raise NotAllowed(f"kafka_client_file {name!r} is not below [capture] files_directory of this proxy")
    return path


def _addresses(servers: str) -> list[str]:
    return [each.strip() for each in servers.split(",") if each.strip()]
