"""Confluent's Schema Registry and its relatives, as far as they have modes.

In IMPORT mode a registration has an id and a number of its own choosing, and one without is refused: so a registry is
in that mode while it is written, and READONLY at all other times. That much is as Confluent documents it: it was only
tried against a server of the tests that does as the documentation has it, and for reading against Apicurio's API.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from isthmus.schemas.contents import Contents, Reference, Schema, Version
from isthmus.schemas.registry import PAGE, Credentials, Refused, Rest, quoted

if TYPE_CHECKING:
    import httpx

READ_WRITE: Final = "READWRITE"
READ_ONLY: Final = "READONLY"
IMPORT: Final = "IMPORT"


class Confluent:
    def __init__(self, url: str, credentials: Credentials, transport: httpx.BaseTransport | None = None) -> None:
        self._rest = Rest(url, credentials, transport)

    def close(self) -> None:
        self._rest.close()

    # ---- what is there ----

    def contents(self) -> Contents:
        subjects: dict[str, dict[int, Version]] = {}
        levels: dict[str, str] = {}
        for subject in self._subjects():
            path = f"/subjects/{quoted(subject)}/versions"
            numbers = self._rest.find(path, list, deleted="true") or []
            # Behind the others: what is registered meanwhile would seem to be softly deleted.
            live = self._rest.find(path, list) or []
            for number in numbers:
                found = self._rest.find(f"{path}/{number}", deleted="true")
                if found is not None:  # else it has gone just now
                    subjects.setdefault(subject, {})[number] = _version(found, number not in live)
            level = self.level(subject)
            if level is not None:
                levels[subject] = level
        return Contents(subjects, levels, self.level(None))

    def _subjects(self) -> list[str]:
        """Also those of which all is softly deleted. Some show a thousand, unless they are asked for more."""

        def page(offset: int) -> dict[str, None]:
            return dict.fromkeys(self._rest.get("/subjects", list, deleted="true", offset=offset, limit=PAGE))

        return list(self._rest.pages(page))

    def version(self, subject: str, number: int) -> Version | None:
        path = f"/subjects/{quoted(subject)}/versions/{number}"
        live = self._rest.find(path)
        found = live if live is not None else self._rest.find(path, deleted="true")
        return None if found is None else _version(found, live is None)

    def level(self, subject: str | None) -> str | None:
        found = self._rest.find(_config(subject))
        return None if found is None else found.get("compatibilityLevel")  # it may have settings of other kinds alone

    # ---- the switch ----

    def refuses_writes(self) -> bool:
        return self._mode() != READ_WRITE

    def refuse_writes(self, refuse: bool) -> None:
        self._set_mode(READ_ONLY if refuse else READ_WRITE)

    def begin_writing(self) -> None:
        self._set_mode(IMPORT)
        if (mode := self._mode()) != IMPORT:
            raise Refused(f"{self._rest.url} was to be in mode IMPORT, and is in {mode}")

    def _mode(self) -> str:
        return str(self._rest.get("/mode")["mode"])

    def _set_mode(self, mode: str) -> None:
        if self._mode() != mode:
            # By force: IMPORT is for empty registries else.
            self._rest.send("PUT", "/mode", {"mode": mode}, force="true")

    # ---- writing ----

    def register(self, subject: str, number: int, version: Version) -> None:
        body: dict[str, Any] = {"id": version.id, "version": number, "schema": version.schema.text}
        body["schemaType"] = version.schema.kind
        if version.schema.references:
            body["references"] = [each._asdict() for each in version.schema.references]
        self._rest.send("POST", f"/subjects/{quoted(subject)}/versions", body)

    def restore(self, subject: str, number: int, version: Version) -> None:
        self.register(subject, number, version)

    def delete(self, subject: str, number: int, for_good: bool) -> None:
        query = {"permanent": "true"} if for_good else {}
        self._rest.send("DELETE", f"/subjects/{quoted(subject)}/versions/{number}", missing=True, **query)

    def set_level(self, subject: str | None, level: str | None) -> None:
        if level is None:
            self._rest.send("DELETE", _config(subject), missing=True)
        else:
            self._rest.send("PUT", _config(subject), {"compatibility": level})


def _config(subject: str | None) -> str:
    return "/config" if subject is None else f"/config/{quoted(subject)}"


def _version(found: dict[str, Any], deleted: bool) -> Version:
    references = [Reference(each["name"], each["subject"], each["version"]) for each in found.get("references") or ()]
    return Version(found["id"], Schema(found.get("schemaType", "AVRO"), found["schema"], tuple(references)), deleted)
