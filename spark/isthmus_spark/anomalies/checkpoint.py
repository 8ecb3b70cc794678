"""The directory of a query's checkpoint, on any file system that Spark knows: whose it is, and how far it came."""

from __future__ import annotations

import json
import uuid
from typing import Any, Final

from pyspark.sql import SparkSession

IDENTITY: Final = "isthmus.json"
VERSION: Final = 1
"""Of rules' state: one of another version cannot be gone on with."""


class CheckpointError(Exception):
    """The directory cannot be used for this; says what to do."""


class Checkpoint:
    """``about``: what the query reads and writes, which cannot change while its checkpoint lives."""

    def __init__(self, spark: SparkSession, directory: str, about: dict[str, Any]) -> None:
        """Raises CheckpointError."""
        jvm: Any = spark._jvm
        self._jvm = jvm
        self._path = jvm.org.apache.hadoop.fs.Path(directory)
        self._files = self._path.getFileSystem(spark._jsparkSession.sessionState().newHadoopConf())
        self.directory = directory
        wanted = {"job": "anomalies", "version": VERSION, **about}
        known = self._identity()
        if known is None:
            known = {**wanted, "query": f"isthmus-anomalies-{uuid.uuid4()}"}
            self._write(IDENTITY, json.dumps(known))
        different = [name for name, value in wanted.items() if known.get(name) != value]
        if different:
            differences = ", ".join(f"{name} {known.get(name)!r} (now: {wanted[name]!r})" for name in different)
            raise CheckpointError(f"the checkpoint in {directory} is one of {differences}: name a new directory")
        self.query: str = known["query"]
        """Its name for ever, and its transactional id."""

    def last_planned(self) -> tuple[int, int] | None:
        """The newest batch that was planned, and when (ms). It may have been done, or not."""
        batches = [int(name) for name in self._names("offsets") if name.isdecimal()]
        if not batches:
            return None
        metadata = json.loads(self._read(f"offsets/{max(batches)}").split("\n")[1])
        return max(batches), int(metadata["batchTimestampMs"])

    def _identity(self) -> dict[str, Any] | None:
        names = self._names("")
        if not names:
            return None
        if IDENTITY not in names:
            raise CheckpointError(f"{self.directory} is not empty, and no checkpoint of this job: name a new directory")
        try:
            known = json.loads(self._read(IDENTITY))
        except ValueError:
            known = None
        if not isinstance(known, dict) or "query" not in known:
            raise CheckpointError(f"{self.directory}/{IDENTITY} cannot be read: name a new directory")
        return known

    def _names(self, folder: str) -> list[str]:
        path = self._at(folder) if folder else self._path
        if not self._files.exists(path):
            return []
        # Names of temporary files begin with a dot.
        names = (status.getPath().getName() for status in self._files.listStatus(path))
        return [name for name in names if not name.startswith(".")]

    def _at(self, name: str) -> Any:
        return self._jvm.org.apache.hadoop.fs.Path(self._path, name)

    def _read(self, name: str) -> str:
        stream = self._files.open(self._at(name))
        try:
            return bytes(stream.readAllBytes()).decode()
        finally:
            stream.close()

    def _write(self, name: str, text: str) -> None:
        """Whole or not at all."""
        temporary = self._at(f".{name}.{uuid.uuid4()}")
        stream = self._files.create(temporary)
        stream.write(text.encode())
        stream.close()
        if not self._files.rename(temporary, self._at(name)):
            raise CheckpointError(f"{self.directory}/{name} cannot be written")
