"""Captured events as records of a Kafka topic, for what reads them as they come.

A record is one event: its key is the proxy's name, its value a JSON object with ``format`` (1), ``type`` (request or
link), what the blocks of files say of their source, and the fields of ``blocks`` by their names; what is not known is
left out. Records of one proxy are in one partition, in the order in which events were complete. The producer is
idempotent, and what it cannot write in time is dropped and counted, so no event is there twice.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import sys
import threading
import zlib
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from aiokafka import AIOKafkaProducer
from aiokafka.errors import KafkaError

from isthmus_plugins.capture.blocks import LINKS, REQUESTS, Layout

FORMAT: Final = 1
CLIENT_ID: Final = "isthmus-capture"
"""Events of this client are not captured: they would make more of themselves."""
WAITING_MAX: Final = 100_000
"""So many events wait for the brokers; what comes beyond is dropped."""
RETRY_S: Final = 1.0
CLOSE_S: Final = 5.0
BATCH_BYTES: Final = 256 * 1024
TYPES: Final = {REQUESTS: "request", LINKS: "link"}
SERVERS: Final = "bootstrap_servers"
_CLIENT_SETTINGS: Final = {
    "bootstrap.servers": SERVERS,
    "security.protocol": "security_protocol",
    "sasl.mechanism": "sasl_mechanism",
    "sasl.username": "sasl_plain_username",
    "sasl.password": "sasl_plain_password",
}
_FILES: Final = ("ssl.ca.location", "ssl.certificate.location", "ssl.key.location")
FILE_BYTES_MAX: Final = 64 * 1024


class ClientFileError(ValueError):
    """The file with client settings cannot be used. The message tells nothing that stands in it: who names the file may
    not be one who may read it."""


def client_settings(path: str) -> dict[str, Any]:
    """A client's settings from a properties file, as :class:`AIOKafkaProducer` takes them. Raises ClientFileError."""
    if not path:
        return {}
    said: dict[str, str] = {}
    for number, line in enumerate(_lines(path), 1):
        name, given, value = line.partition("=")
        if given and not line.startswith("#"):
            if name.strip() not in (*_CLIENT_SETTINGS, *_FILES):
                known = ", ".join(sorted((*_CLIENT_SETTINGS, *_FILES)))
                raise ClientFileError(f"{path}: line {number} has none of the settings that are known: {known}")
            said[name.strip()] = value.strip()
    authorities, certificate, key = (said.pop(name, None) for name in _FILES)
    settings: dict[str, Any] = {_CLIENT_SETTINGS[name]: value for name, value in said.items()}
    if "SSL" in settings.get("security_protocol", ""):
        try:
            settings["ssl_context"] = context = ssl.create_default_context(cafile=authorities)
            if certificate is not None:
                context.load_cert_chain(certificate, key)
        except OSError as error:
            raise ClientFileError(f"{path}: its certificates cannot be read: {error}") from error
    return settings


def _lines(path: str) -> list[str]:
    """Raises ClientFileError."""
    try:
        if not Path(path).is_file():
            raise ClientFileError(f"{path}: No such file")
        with Path(path).open("rb") as file:
            text = file.read(FILE_BYTES_MAX + 1).decode()
    except OSError as error:
        raise ClientFileError(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError:
        raise ClientFileError(f"{path}: not UTF-8") from None
    if len(text) > FILE_BYTES_MAX:
        raise ClientFileError(f"{path}: more than {FILE_BYTES_MAX} bytes")
    return [line.strip() for line in text.splitlines()]


class KafkaTopic:
    """One topic. Its connections live in a thread of their own."""

    def __init__(self, servers: str, topic: str, client_file: str, proxy: str) -> None:
        """``servers``: empty where the file names them."""
        self._servers = servers
        self._topic = topic
        self._client_file = client_file
        self._key = proxy.encode()
        self.sent = 0
        self.dropped = 0
        self._new: list[bytes] = []
        self._waiting: deque[bytes] = deque()
        self._loop = asyncio.new_event_loop()
        self._woken = asyncio.Event()
        self._closing = False
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._run(),), name=f"to-{topic}")
        self._thread.daemon = True
        self._thread.start()

    # ---- the writer's thread ----

    def add(self, layout: Layout, source: Mapping[str, Any], values: tuple[Any, ...]) -> None:
        """Add an event: the values of the layout's fields, texts as they are."""
        known = {
            name: value
            for (name, _), value in zip(layout.fields, values, strict=True)
            if value is not None and value != -1
        }
        event = {"format": FORMAT, "type": TYPES[layout], **source, **known}
        self._new.append(json.dumps(event, separators=(",", ":")).encode())

    def flush(self) -> None:
        """Hand over what there is."""
        new, self._new = self._new, []
        if not new:
            return
        if len(self._waiting) + len(new) > WAITING_MAX:
            self.dropped += len(new)
            return
        self._waiting.extend(new)
        self._loop.call_soon_threadsafe(self._woken.set)

    def close(self) -> None:
        """Write what waits, as far as that goes in time."""
        self.flush()
        self._closing = True
        self._loop.call_soon_threadsafe(self._woken.set)
        self._thread.join(CLOSE_S)
        self.dropped += len(self._waiting)
        self._waiting.clear()

    # ---- its own thread ----

    async def _run(self) -> None:
        while not self._closing:
            try:
                await self._write_for_ever()
            except (KafkaError, ClientFileError, OSError) as error:
                print(f"capture: topic {self._topic}: {error!r}", file=sys.stderr, flush=True)
                await asyncio.sleep(RETRY_S)

    async def _write_for_ever(self) -> None:
        client = client_settings(self._client_file)
        if self._servers:
            client[SERVERS] = self._servers
        producer = AIOKafkaProducer(
            client_id=CLIENT_ID,
            enable_idempotence=True,
            compression_type="lz4",
            max_batch_size=BATCH_BYTES,
            **client,
        )
        try:
            await producer.start()
            partitions = await producer.partitions_for(self._topic)
            partition = sorted(partitions)[zlib.crc32(self._key) % len(partitions)]
            while self._waiting or not self._closing:
                self._woken.clear()
                if not self._waiting:
                    await self._woken.wait()
                    continue
                batch = producer.create_batch()
                taken = 0
                while self._waiting and batch.append(key=self._key, value=self._waiting[0], timestamp=None) is not None:
                    self._waiting.popleft()
                    taken += 1
                if not taken:  # larger than any batch
                    self._waiting.popleft()
                    self.dropped += 1
                    continue
                batch.close()
                try:
                    await (await producer.send_batch(batch, self._topic, partition=partition))
                except BaseException:  # it may be there: once more might be twice
                    self.dropped += taken
                    raise
                self.sent += taken
        finally:
            await producer.stop()
