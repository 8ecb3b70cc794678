"""Apicurio Registry 3, as it is through its own API; a subject is an artifact of the default group.

Clients with Confluent's wire format know schemas by their *content id*. A registration cannot choose one, an import
can: so a version is imported as a draft, read back, and enabled. Found out by trying:

- An import answers that it went well, always. A version whose content is not in the same file is not imported.
- Content that is there (another subject's, or one that is gone and not yet cleared away) is not imported again, nor a
  version with it, whether ids are to be kept or not. One that is made in the usual way has the id of its content, which
  is found by its hash; to Confluent's API its number is the next one of its subject, whatever it is called.
- The ``latest`` of a subject is the draft that was enabled last, or the last before it that is enabled. So what comes
  behind a version with a higher number is imported as disabled, and never is the latest one. Nobody can change that.
- Rules run when a draft is enabled: a level that refuses is put aside meanwhile.
- What is disabled is what Confluent's API calls softly deleted.
"""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final

from isthmus.schemas.contents import PROTOBUF, Contents, Reference, Schema, Version
from isthmus.schemas.registry import PAGE, Credentials, Refused, Rest, Unreachable, quoted

if TYPE_CHECKING:
    import httpx

KINDS: Final = ("AVRO", "JSON", "PROTOBUF")
NO_LEVEL: Final = "NONE"
"""Of a registry without rules."""
_API: Final = "/apis/registry/v3"
_CONFLUENT: Final = "/apis/ccompat/v7"
_READ_ONLY: Final = f"{_API}/admin/config/properties/apicurio.storage.read-only.enabled"
_MANIFEST: Final = {"systemName": "isthmus", "systemVersion": "3", "exportVersion": "3.0", "dbVersion": "109"}


class Apicurio:
    def __init__(self, url: str, credentials: Credentials, transport: httpx.BaseTransport | None = None) -> None:
        self._rest = Rest(url, credentials, transport)
        self._schemas: dict[tuple[Any, ...], Schema] = {}
        """What was read before and does not change, by all that tells an id from its like in a registry made anew."""

    def close(self) -> None:
        self._rest.close()

    # ---- what is there ----

    def contents(self) -> Contents:
        subjects: dict[str, dict[int, Version]] = {}
        schemas: dict[tuple[Any, ...], Schema] = {}
        for each in self._versions():
            if not _is_distributed(each):
                continue
            key = (each["artifactId"], each["version"], each["globalId"], each["contentId"], each["createdOn"])
            schema = schemas[key] = self._schemas.get(key) or self._schema(each)
            version = Version(each["contentId"], schema, each["state"] == "DISABLED")
            subjects.setdefault(each["artifactId"], {})[int(each["version"])] = version
        self._schemas = schemas
        levels = {subject: level for subject in subjects if (level := self.level(subject)) is not None}
        return Contents(subjects, levels, self.level(None))

    def _versions(self) -> Iterable[dict[str, Any]]:
        """All of the default group."""

        def page(offset: int) -> dict[int, dict[str, Any]]:
            query: dict[str, Any] = {
                "groupId": "default",
                "orderby": "globalId",
                "order": "asc",
                "limit": PAGE,
                "offset": offset,
            }
            return {each["globalId"]: each for each in self._rest.get(f"{_API}/search/versions", **query)["versions"]}

        return self._rest.pages(page).values()

    def _schema(self, described: dict[str, Any]) -> Schema:
        schema = self._content(described["contentId"], described["artifactType"])
        if schema is None:
            raise Unreachable(f"{self._rest.url} cannot be read: what it holds changes just now")
        return schema

    def _content(self, id_: int, kind: str) -> Schema | None:
        """What an id means, of the kind that it is taken for; it may be nobody's any more."""
        path = f"{_API}/ids/contentIds/{id_}"
        text = self._rest.find_text(path)
        if text is None:
            return None
        return Schema(kind, text, tuple(_reference(each) for each in self._rest.get(f"{path}/references", list)))

    def version(self, subject: str, number: int) -> Version | None:
        found = self._rest.find(self._path(subject, number))
        if found is None or not _is_distributed(found):
            return None
        return Version(found["contentId"], self._schema(found), found["state"] == "DISABLED")

    def level(self, subject: str | None) -> str | None:
        found = self._rest.find(f"{self._rules(subject)}/COMPATIBILITY")
        if found is not None:
            return str(found["config"])
        return NO_LEVEL if subject is None else None

    # ---- the switch ----

    def refuses_writes(self) -> bool:
        return bool(self._rest.get(_READ_ONLY)["value"] == "true")

    def refuse_writes(self, refuse: bool) -> None:
        if self.refuses_writes() != refuse:
            self._rest.send("PUT", _READ_ONLY, {"value": "true" if refuse else "false"})

    def begin_writing(self) -> None:
        self.refuse_writes(False)

    # ---- writing ----

    def register(self, subject: str, number: int, version: Version) -> None:
        path = self._path(subject, number)
        if self._rest.find(path) is None:
            there = self._content(version.id, version.schema.kind)
            if there is None:
                self._import(subject, number, version)
            elif there.meaning == version.schema.meaning:
                self._create(subject, number, there)
            else:
                raise Refused(f"id {version.id} means another schema at {self._rest.url}, though no subject names it")
        found = self._rest.find(path)
        if found is None:
            raise Refused(f"{self._rest.url} did not import it: its log says why")
        if found["contentId"] != version.id or self._schema(found).meaning != version.schema.meaning:
            raise Refused(f"{self._rest.url} has another schema there, id {found['contentId']}, state {found['state']}")
        if found["state"] != "ENABLED":
            self._enable(subject, path)

    def _import(self, subject: str, number: int, version: Version) -> None:
        """As a draft, which no client is shown; or as softly deleted, where it is not to be the latest one."""
        schema = version.schema
        has = self._has(subject)
        references = (
            None
            if not schema.references
            else json.dumps(_written(schema.references), separators=(",", ":"), ensure_ascii=False)
        )
        content = {
            "contentId": version.id,
            # As the registry makes it of its own: schemas are looked up by it.
            "contentHash": hashlib.sha256((schema.text + (references or "")).encode()).hexdigest(),
            "canonicalHash": None,  # it makes that of the type
            "artifactType": schema.kind,
            "contentType": _content_type(schema),
            "serializedReferences": references,
        }
        artifact = {"artifactId": subject, "artifactType": schema.kind}
        hidden = {
            "globalId": -1,  # its own next one
            "artifactId": subject,
            "version": str(number),
            "versionOrder": number,
            "state": "DISABLED" if has and self._is_late(subject, number) else "DRAFT",
            "contentId": version.id,
        }
        entities: list[tuple[str, dict[str, Any]]] = [("Content", content)]
        if not has:
            entities.append(("Artifact", artifact))
        entities.append(("ArtifactVersion", hidden))
        self._rest.send_bytes(
            f"{_API}/admin/import?requireEmptyRegistry=false",
            _zipped(entities, schema.text),
            {
                "content-type": "application/zip",
                "x-registry-preserve-globalid": "false",
                "x-registry-preserve-contentid": "true",
            },
        )

    def _create(self, subject: str, number: int, schema: Schema) -> None:
        """One more version with a content that is there, which the registry knows again by its hash."""
        content = {
            "content": schema.text,
            "contentType": _content_type(schema),
            "references": _written(schema.references),
        }
        made = {"version": str(number), "content": content}
        artifacts = f"{_API}/groups/default/artifacts"
        if self._has(subject):
            self._without_rules(subject, "POST", f"{artifacts}/{quoted(subject)}/versions", made)
        else:
            artifact = {"artifactId": subject, "artifactType": schema.kind, "firstVersion": made}
            self._rest.send("POST", artifacts, artifact)

    def _is_late(self, subject: str, number: int) -> bool:
        """Whether a version with a higher number was enabled before."""
        path = f"{_API}/groups/default/artifacts/{quoted(subject)}/branches/latest/versions"
        newest = self._rest.find(path, limit=1)
        known = [] if newest is None else [str(each["version"]) for each in newest["versions"]]
        return any(int(each) > number for each in known if each.isdecimal())

    def _has(self, subject: str) -> bool:
        return self._rest.find(f"{_API}/groups/default/artifacts/{quoted(subject)}") is not None

    def restore(self, subject: str, number: int, version: Version) -> None:
        self._enable(subject, self._path(subject, number))

    def _enable(self, subject: str, path: str) -> None:
        self._without_rules(subject, "PUT", f"{path}/state", {"state": "ENABLED"})

    def _without_rules(self, subject: str, method: str, path: str, body: dict[str, Any]) -> None:
        """What a level may refuse, and did not at the primary. A kill leaves a level that the next pass sets right."""
        try:
            self._rest.send(method, path, body)
        except Refused:
            level = self.level(subject)
            if level == NO_LEVEL:
                raise
            self.set_level(subject, NO_LEVEL)
            try:
                self._rest.send(method, path, body)
            finally:
                self.set_level(subject, level)

    def delete(self, subject: str, number: int, for_good: bool) -> None:
        if for_good:
            # Its own API deletes versions where that is switched on alone.
            path = f"{_CONFLUENT}/subjects/{quoted(subject)}/versions/{number}"
            self._rest.send("DELETE", path, missing=True, permanent="true")
        else:
            self._rest.send("PUT", f"{self._path(subject, number)}/state", {"state": "DISABLED"})

    def set_level(self, subject: str | None, level: str | None) -> None:
        rules = self._rules(subject)
        if level is None:
            self._rest.send("DELETE", f"{rules}/COMPATIBILITY", missing=True)
        elif self._rest.find(f"{rules}/COMPATIBILITY") is None:
            self._rest.send("POST", rules, {"ruleType": "COMPATIBILITY", "config": level})
        else:
            self._rest.send("PUT", f"{rules}/COMPATIBILITY", {"ruleType": "COMPATIBILITY", "config": level})

    def _path(self, subject: str, number: int) -> str:
        return f"{_API}/groups/default/artifacts/{quoted(subject)}/versions/{number}"

    def _rules(self, subject: str | None) -> str:
        return f"{_API}/admin/rules" if subject is None else f"{_API}/groups/default/artifacts/{quoted(subject)}/rules"


def _is_distributed(described: dict[str, Any]) -> bool:
    """Drafts are nobody's yet; other types and versions that are no numbers cannot be had by Confluent's API."""
    return (
        described["state"] != "DRAFT" and described["artifactType"] in KINDS and str(described["version"]).isdecimal()
    )


def _reference(described: dict[str, Any]) -> Reference:
    group, version = described.get("groupId") or "default", str(described.get("version"))
    subject = described["artifactId"] if group == "default" else f"{group}/{described['artifactId']}"
    return Reference(described["name"], subject, int(version) if version.isdecimal() else 0)


def _written(references: tuple[Reference, ...]) -> list[dict[str, Any]]:
    """In the order of names that the registry writes: it is part of the hash."""
    return [
        {"groupId": None, "artifactId": each.subject, "version": str(each.version), "name": each.name}
        for each in references
    ]


def _content_type(schema: Schema) -> str:
    return "application/x-protobuf" if schema.kind == PROTOBUF else "application/json"


def _zipped(entities: list[tuple[str, dict[str, Any]]], text: str) -> bytes:
    common = {"groupId": None, "owner": "", "createdOn": 1, "modifiedBy": "", "modifiedOn": 1}
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        # Names in the order of their digits, and no time of day: the same is the same file.
        archive.writestr(zipfile.ZipInfo("0.Manifest.json"), json.dumps(_MANIFEST))
        for place, (kind, entity) in enumerate(entities, start=1):
            known = entity if kind == "Content" else {**common, **entity}
            archive.writestr(zipfile.ZipInfo(f"{place}.{kind}.json"), json.dumps(known))
            if kind == "Content":
                archive.writestr(zipfile.ZipInfo(f"{place}.{kind}.data"), text)
    return made.getvalue()
