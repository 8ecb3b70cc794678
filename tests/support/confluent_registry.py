"""A schema registry with Confluent's API, as its documentation has it: modes, numbers and ids of one's own, two steps
of deletion.

None can be had as a package: this one stands for it, over real HTTP. It checks no compatibility.
"""

from __future__ import annotations

import json
import math
import re
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit


class Answer(Exception):
    def __init__(self, status: int, code: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.body = {"error_code": code, "message": message}


class ConfluentRegistry:
    """Served while it is entered."""

    def __init__(self, keeps_ids: bool = True) -> None:
        self.keeps_ids = keeps_ids
        """Some relatives take an id and a number, and choose their own."""
        self.has_pages = True
        """Some relatives say all that they have, whatever is asked."""
        self.shows = 1000
        """So many subjects, with one request."""
        self.refuses: str | None = None
        """A subject that it finds fault with."""
        self.clear()
        self.mode = "READWRITE"
        self.requests = 0
        self.writes_left: float = math.inf
        """How many writes it takes until it goes down; half a write is one whose answer is lost."""
        self._down = False
        self.url = ""
        self._port = 0
        self._server: _Server | None = None

    def clear(self) -> None:
        """As one that was started anew with nothing behind it."""
        self.subjects: dict[str, dict[int, dict[str, Any]]] = {}
        self.levels: dict[str | None, str] = {None: "BACKWARD"}

    # ---- serving ----

    def start(self) -> None:
        self._server = _Server(("127.0.0.1", self._port), _handler(self))
        self._port = self._server.server_address[1]
        self.url = f"http://127.0.0.1:{self._port}"
        self._thread = Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()

    def stop(self) -> None:
        """Nothing listens there until it is started again; what it holds stays."""
        if self._server is None:
            return
        self._server.shutdown()
        self._thread.join()
        for connection in self._server.connections:  # clients keep theirs
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self._server.server_close()
        self._server = None

    def answer(self, method: str, target: str, body: Any) -> Any:
        self.requests += 1
        if method != "GET":
            self._down = self._down or self.writes_left <= 0
            self.writes_left -= 1
        if not self._down:
            answer = self._answer(method, target, body)
            self._down = method != "GET" and self.writes_left == -0.5
        if self._down:
            raise Answer(503, 50301, "down")
        return answer

    def revive(self) -> None:
        self._down, self.writes_left = False, math.inf

    def _answer(self, method: str, target: str, body: Any) -> Any:
        parts = urlsplit(target)
        query = {name: json.loads(values[0]) for name, values in parse_qs(parts.query).items()}
        given = {} if body is None else {"body": body}
        for pattern, handler in _ROUTES[method]:
            if (found := re.fullmatch(pattern, parts.path)) is not None:
                return handler(self, *map(unquote, found.groups()), **given, **query)
        raise Answer(404, 404, "HTTP 404 Not Found")

    # ---- what is there ----

    def get_subjects(self, deleted: bool = False, offset: int = 0, limit: int | None = None) -> list[str]:
        found = [subject for subject in self.subjects if self._numbers(subject, deleted)]
        if not self.has_pages:
            return found
        return found[offset:][: self.shows if limit is None else min(limit, self.shows)]

    def get_versions(self, subject: str, deleted: bool = False) -> list[int]:
        if not (numbers := self._numbers(subject, deleted)):
            raise Answer(404, 40401, f"Subject '{subject}' not found.")
        return numbers

    def get_version(self, subject: str, number: str, deleted: bool = False) -> dict[str, Any]:
        numbers = self.get_versions(subject, deleted)
        chosen = numbers[-1] if number == "latest" else int(number)
        if chosen not in numbers:
            raise Answer(404, 40402, f"Version {number} not found.")
        found = {name: value for name, value in self.subjects[subject][chosen].items() if name != "deleted"}
        return {"subject": subject, "version": chosen, **found}

    def get_schema(self, id_: str) -> dict[str, Any]:
        for versions in self.subjects.values():
            for version in versions.values():
                if version["id"] == int(id_):
                    return {"schema": version["schema"]}
        raise Answer(404, 40403, "Schema not found")

    def look_up(self, subject: str, body: dict[str, Any]) -> dict[str, Any]:
        for number in self.get_versions(subject):
            if _same(self.subjects[subject][number], body):
                return self.get_version(subject, str(number))
        raise Answer(404, 40403, "Schema not found")

    def _numbers(self, subject: str, deleted: bool) -> list[int]:
        versions = self.subjects.get(subject, {})
        return sorted(number for number, each in versions.items() if deleted or not each["deleted"])

    # ---- writing ----

    def register(self, subject: str, body: dict[str, Any]) -> dict[str, int]:
        if subject == self.refuses:
            raise Answer(422, 42201, "Invalid schema")
        chosen = body.get("id")
        if chosen is not None and self.mode != "IMPORT":
            raise Answer(422, 42205, f"Subject {subject} is not in import mode")
        if chosen is None and self.mode != "READWRITE":
            raise Answer(422, 42205, f"Subject {subject} is not in read-write mode")
        for reference in body.get("references", ()):
            if reference["version"] not in self._numbers(reference["subject"], True):
                raise Answer(422, 42201, f"No schema reference found for subject {reference['subject']}")
        versions = self.subjects.setdefault(subject, {})
        known = {each["id"]: each for others in self.subjects.values() for each in others.values()}
        if chosen is None or not self.keeps_ids:
            for each in versions.values():
                if _same(each, body) and not each["deleted"]:
                    return {"id": each["id"]}
            same = [id_ for id_, each in known.items() if _same(each, body)]
            id_, number = min(same, default=max(known, default=0) + 1), max(versions, default=0) + 1
        else:
            id_, number = chosen, body["version"]
            if id_ in known and not _same(known[id_], body):
                raise Answer(422, 42205, f"Overwrite new schema with id {id_} is not permitted.")
        kind = {} if body.get("schemaType", "AVRO") == "AVRO" else {"schemaType": body["schemaType"]}
        references = {"references": body["references"]} if body.get("references") else {}
        versions[number] = {"id": id_, "schema": body["schema"], **kind, **references, "deleted": False}
        return {"id": id_}

    def delete(self, subject: str, number: str, permanent: bool = False) -> int:
        self._check_writable()
        chosen = int(number)
        if chosen not in self.get_versions(subject, True):
            raise Answer(404, 40402, f"Version {number} not found.")
        version = self.subjects[subject][chosen]
        place = {"subject": subject, "version": chosen}
        for versions in self.subjects.values():
            for each in versions.values():
                kept = permanent or not each["deleted"]
                if kept and any(place.items() <= reference.items() for reference in each.get("references", ())):
                    raise Answer(422, 42206, f"One or more references exist to the schema {place}")
        if permanent and not version["deleted"]:
            raise Answer(404, 40407, f"Subject '{subject}' Version {number} was not deleted first")
        if not permanent and version["deleted"]:
            raise Answer(404, 40406, f"Subject '{subject}' Version {number} was soft deleted")
        version["deleted"] = True
        if permanent:
            del self.subjects[subject][chosen]
        return chosen

    def get_config(self, subject: str | None = None) -> dict[str, str]:
        if subject not in self.levels:
            raise Answer(404, 40408, f"Subject '{subject}' does not have subject-level compatibility configured")
        return {"compatibilityLevel": self.levels[subject]}

    def put_config(self, subject: str | None = None, *, body: dict[str, str]) -> dict[str, str]:
        self._check_writable()
        self.levels[subject] = body["compatibility"]
        return body

    def delete_config(self, subject: str) -> dict[str, str]:
        self._check_writable()
        return {"compatibilityLevel": self.levels.pop(subject)}

    def get_mode(self) -> dict[str, str]:
        return {"mode": self.mode}

    def put_mode(self, *, body: dict[str, str], force: bool = False) -> dict[str, str]:
        if body["mode"] == "IMPORT" and self.subjects and not force:
            raise Answer(422, 42205, "Cannot import since found existing subjects")
        self.mode = body["mode"]
        return body

    def _check_writable(self) -> None:
        if self.mode == "READONLY":
            raise Answer(422, 42205, "Subject is in read-only mode")


_ROUTES: dict[str, list[tuple[str, Callable[..., Any]]]] = {
    "GET": [
        ("/subjects", ConfluentRegistry.get_subjects),
        ("/subjects/([^/]+)/versions", ConfluentRegistry.get_versions),
        ("/subjects/([^/]+)/versions/([^/]+)", ConfluentRegistry.get_version),
        ("/schemas/ids/([0-9]+)", ConfluentRegistry.get_schema),
        ("/config", ConfluentRegistry.get_config),
        ("/config/([^/]+)", ConfluentRegistry.get_config),
        ("/mode", ConfluentRegistry.get_mode),
    ],
    "POST": [
        ("/subjects/([^/]+)", ConfluentRegistry.look_up),
        ("/subjects/([^/]+)/versions", ConfluentRegistry.register),
    ],
    "PUT": [
        ("/config", ConfluentRegistry.put_config),
        ("/config/([^/]+)", ConfluentRegistry.put_config),
        ("/mode", ConfluentRegistry.put_mode),
    ],
    "DELETE": [
        ("/subjects/([^/]+)/versions/([0-9]+)", ConfluentRegistry.delete),
        ("/config/([^/]+)", ConfluentRegistry.delete_config),
    ],
}


class _Server(ThreadingHTTPServer):
    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.connections: list[Any] = []

    def process_request(self, request: Any, client_address: Any) -> None:
        self.connections.append(request)
        super().process_request(request, client_address)


def _same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return _meaning(one) == _meaning(other)


def _meaning(schema: dict[str, Any]) -> tuple[Any, ...]:
    references = [tuple(each.values()) for each in schema.get("references", ())]
    return schema["schema"], schema.get("schemaType", "AVRO"), sorted(references)


def _handler(registry: ConfluentRegistry) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        wbufsize = -1  # head and body in one packet: the second would wait for an acknowledgement

        def handle_one(self) -> None:
            length = int(self.headers.get("content-length") or 0)
            body = json.loads(self.rfile.read(length)) if length else None
            try:
                status, answer = 200, registry.answer(self.command, self.path, body)
            except Answer as error:
                status, answer = error.status, error.body
            content = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("content-type", "application/vnd.schemaregistry.v1+json")
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = do_PUT = do_DELETE = handle_one

        def log_message(self, format: str, *args: Any) -> None:
            pass

    return Handler


@contextmanager
def served(count: int, **options: Any) -> Iterator[list[ConfluentRegistry]]:
    made = [ConfluentRegistry(**options) for _ in range(count)]
    for each in made:
        each.start()
    try:
        yield made
    finally:
        for each in made:
            each.stop()
