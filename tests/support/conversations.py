"""Conversations over HTTP that were recorded with a real server, and are had again without one.

A story that talks to servers over ``transports`` runs with real ones in ``--suite stories``, where ISTHMUS_RECORD=1
writes down what was said, and in CI with what was written down: each request has to be the next one of the record.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
from pathlib import Path
from typing import Any

import httpx


class Recording:
    """What is said to some servers, by name, in the order of requests."""

    def __init__(self) -> None:
        self.exchanges: list[dict[str, Any]] = []

    def transport(self, name: str, url: str) -> httpx.BaseTransport:
        return _Recorder(self, name, url)

    def save(self, path: Path) -> None:
        path.parent.mkdir(exist_ok=True)
        lines = "\n".join(json.dumps(each, sort_keys=True) for each in self.exchanges)
        path.write_bytes(gzip.compress(lines.encode(), mtime=0))


class _Recorder(httpx.BaseTransport):
    def __init__(self, recording: Recording, name: str, url: str) -> None:
        self._recording = recording
        self._name = name
        self._url = httpx.URL(url)
        self._real = httpx.HTTPTransport()

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        asked = _asked(self._name, request)
        target = request.url.copy_with(scheme=self._url.scheme, host=self._url.host, port=self._url.port)
        headers = [(key, value) for key, value in request.headers.items() if key.lower() != "host"]
        response = self._real.handle_request(
            httpx.Request(request.method, target, headers=headers, content=request.read())
        )
        body = response.read()
        kind = response.headers.get("content-type", "")
        self._recording.exchanges.append(
            asked | {"status": response.status_code, "type": kind, "body": base64.b64encode(body).decode()}
        )
        return httpx.Response(response.status_code, headers={"content-type": kind}, content=body)

    def close(self) -> None:
        self._real.close()


class Replay:
    def __init__(self, path: Path) -> None:
        self._left = [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]

    def transport(self, name: str) -> httpx.BaseTransport:
        return httpx.MockTransport(lambda request: self._answer(name, request))

    def _answer(self, name: str, request: httpx.Request) -> httpx.Response:
        asked = _asked(name, request)
        assert self._left, f"nothing more was said in the record, and this is asked: {asked}"
        said = self._left.pop(0)
        recorded = {key: said[key] for key in asked}
        assert asked == recorded, "it is not what was asked in the record: record it anew if this is right"
        return httpx.Response(
            said["status"], headers={"content-type": said["type"]}, content=base64.b64decode(said["body"])
        )

    def end(self) -> None:
        assert not self._left, f"{len(self._left)} requests of the record were not made"


def _asked(name: str, request: httpx.Request) -> dict[str, Any]:
    content = request.read()
    text = hashlib.sha256(content).hexdigest() if content[:2] == b"PK" else content.decode()
    return {"to": name, "method": request.method, "path": request.url.raw_path.decode(), "asked": text}
