"""The story of schemas that are distributed from one Apicurio Registry to another one, step by step."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Final

import httpx

from isthmus.schemas.apicurio import Apicurio
from isthmus.schemas.confluent import Confluent
from isthmus.schemas.contents import Contents
from isthmus.schemas.distribution import Outcome, State, Target, run
from isthmus.schemas.plan import Delete, Reason, Register, Restore, SetLevel
from isthmus.schemas.registry import Credentials
from isthmus.schemas.subjects import Format, Translation
from support.wire_format import Known, decode, encode

NAMES: Final = Translation(
    [Format("{tenant}-{instance}-{environment}-{topic}")], [Format("{tenant}-{environment}-{topic}")]
)
CLIENTS: Final = "/apis/ccompat/v7"

ADDRESS: Final = json.dumps(
    {"type": "record", "name": "Address", "namespace": "acme", "fields": [{"name": "street", "type": "string"}]}
)
CUSTOMER: Final = json.dumps(
    {"type": "record", "name": "Customer", "namespace": "acme", "fields": [{"name": "home", "type": "acme.Address"}]}
)
CUSTOMER_2: Final = json.dumps(
    {
        "type": "record",
        "name": "Customer",
        "namespace": "acme",
        "fields": [{"name": "home", "type": "acme.Address"}, {"name": "age", "type": "int", "default": 0}],
    }
)
CUSTOMER_3: Final = json.dumps(
    {"type": "record", "name": "Customer", "namespace": "acme", "fields": [{"name": "other", "type": "long"}]}
)
STREET: Final = json.dumps({"type": "object", "title": "Straße", "properties": {"name": {"type": "string"}}})
HOUSE: Final = json.dumps({"type": "object", "properties": {"street": {"$ref": "street.json"}}})
MONEY: Final = 'syntax = "proto3";\npackage acme;\nmessage Money { int64 cents = 1; }\n'
BILL: Final = 'syntax = "proto3";\nimport "money.proto";\npackage acme;\nmessage Bill { Money sum = 1; } // für alles\n'


class Clients:
    """What applications say to a registry, by Confluent's API."""

    def __init__(self, url: str, transport: httpx.BaseTransport | None = None) -> None:
        self._client = httpx.Client(base_url=url + CLIENTS, transport=transport, trust_env=False, timeout=60)

    def close(self) -> None:
        self._client.close()

    def ask(self, method: str, path: str, **arguments: Any) -> httpx.Response:
        return self._client.request(method, path, **arguments)

    def register(self, subject: str, schema: str, kind: str = "AVRO", **references: tuple[str, int]) -> int:
        response = self.ask("POST", f"/subjects/{subject}/versions", json=_body(schema, kind, references))
        assert response.is_success, response.text
        return int(response.json()["id"])

    def look_up(self, subject: str, schema: str, kind: str = "AVRO", **references: tuple[str, int]) -> int | None:
        """As a producer that does not register: the id of a schema of its own."""
        response = self.ask("POST", f"/subjects/{subject}", json=_body(schema, kind, references))
        return int(response.json()["id"]) if response.is_success else None

    def delete(self, subject: str, version: int, permanent: bool = False) -> None:
        query = {"permanent": "true"} if permanent else {}
        response = self.ask("DELETE", f"/subjects/{subject}/versions/{version}", params=query)
        assert response.is_success, response.text

    def set_level(self, subject: str, level: str) -> None:
        response = self.ask("PUT", f"/config/{subject}", json={"compatibility": level})
        assert response.is_success, response.text

    def latest(self, subject: str) -> int | None:
        response = self.ask("GET", f"/subjects/{subject}/versions/latest")
        return int(response.json()["version"]) if response.is_success else None

    def known(self, id_: int) -> Known:
        """As a consumer that has met the id in a record."""
        found = self.ask("GET", f"/schemas/ids/{id_}").json()
        references = [
            self.ask("GET", f"/subjects/{each['subject']}/versions/{each['version']}").json()["schema"]
            for each in found.get("references") or ()
        ]
        return Known(found.get("schemaType") or "AVRO", found["schema"], references)


def _body(schema: str, kind: str, references: dict[str, tuple[str, int]]) -> dict[str, Any]:
    """``references``: names have _ for dots in front of their last part: Python's keywords."""
    written = [
        {"name": name.replace("_", "."), "subject": subject, "version": version}
        for name, (subject, version) in references.items()
    ]
    return {"schema": schema, "schemaType": kind, **({"references": written} if written else {})}


Transports = Callable[[str], httpx.BaseTransport | None]


class Story:
    """``urls``: of ``primary`` and ``target``; ``transports``: how each of them is reached."""

    def __init__(self, urls: dict[str, str], transports: Transports) -> None:
        nobody = Credentials()
        self.clients = {name: Clients(url, transports(name)) for name, url in urls.items()}
        self.primary = Apicurio(urls["primary"], nobody, transports("primary"))
        self.target = Apicurio(urls["target"], nobody, transports("target"))
        self.primary_by_confluent = Confluent(urls["primary"] + CLIENTS, nobody, transports("primary"))
        self.target_by_confluent = Confluent(urls["target"] + CLIENTS, nobody, transports("target"))

    def close(self) -> None:
        others = (self.primary_by_confluent, self.target_by_confluent)
        for each in (*self.clients.values(), self.primary, self.target, *others):
            each.close()

    def sync(self, *, write: bool = True, delete: bool = False) -> Outcome:
        (outcome,) = run(self.primary, [Target("target", self.target, NAMES)], write=write, delete=delete)
        return outcome

    def equal(self) -> Contents:
        """Both hold the same, by the target's names."""
        primary, target = self.primary.contents(), self.target.contents()
        assert target.default_level == primary.default_level
        assert target.levels == {NAMES.to_target(subject): level for subject, level in primary.levels.items()}
        there = {NAMES.to_target(subject): versions for subject, versions in primary.subjects.items()}
        assert target.subjects.keys() == there.keys()
        for place, version in target.places():
            wanted = there[place[0]][place[1]]
            assert (version.id, version.deleted, version.schema.text) == (wanted.id, wanted.deleted, wanted.schema.text)
            assert [each.subject for each in version.schema.references] == [
                NAMES.to_target(each.subject) for each in wanted.schema.references
            ]
        return target


def everything_becomes_equal(story: Story) -> None:
    """Kinds of schemas with references, levels, soft and hard deletes, each by a pass."""
    clients, target = story.clients["primary"], story.clients["target"]
    address = clients.register("t-main-dev-address-value", ADDRESS)
    customer = clients.register("t-main-dev-customer-value", CUSTOMER, acme_Address=("t-main-dev-address-value", 1))
    clients.register("t-main-dev-street-value", STREET, "JSON")
    clients.register("t-main-dev-house-value", HOUSE, "JSON", street_json=("t-main-dev-street-value", 1))
    clients.register("t-main-dev-money-value", MONEY, "PROTOBUF")
    clients.register("t-main-dev-bill-value", BILL, "PROTOBUF", money_proto=("t-main-dev-money-value", 1))
    # One schema, two subjects, one id.
    assert clients.register("t-main-dev-other-key", ADDRESS) == address
    same = clients.register("t-main-dev-other-value", CUSTOMER, acme_Address=("t-main-dev-address-value", 1))
    assert same == customer
    tried = story.sync(write=False)
    assert (tried.state, len(tried.plan.steps), tried.done) == (State.BEHIND, 8, ())
    assert not story.target.contents().subjects
    first = story.sync()
    assert (first.state, len(first.done), first.equal, first.refuses_writes) == (State.IN_SYNC, 8, 8, True)
    story.equal()
    # Clients of the target find what they know, and cannot register anything.
    assert target.look_up("t-dev-customer-value", CUSTOMER, acme_Address=("t-dev-address-value", 1)) == customer
    assert target.look_up("t-dev-bill-value", BILL, "PROTOBUF", money_proto=("t-dev-money-value", 1)) is not None
    known = target.known(customer)
    assert (json.loads(known.text), *map(json.loads, known.references)) == (json.loads(CUSTOMER), json.loads(ADDRESS))
    refused = target.ask("POST", "/subjects/t-dev-new-value/versions", json={"schema": '"string"'})
    assert (refused.status_code, "read-only" in refused.text) == (409, True)
    assert story.sync().done == ()

    clients.register("t-main-dev-customer-value", CUSTOMER_2, acme_Address=("t-main-dev-address-value", 1))
    clients.set_level("t-main-dev-customer-value", "NONE")
    clients.register("t-main-dev-customer-value", CUSTOMER_3)
    clients.set_level("t-main-dev-customer-value", "FULL")
    clients.set_level("", "BACKWARD")
    done = story.sync().done
    assert [type(each) for each in done] == [Register, Register, SetLevel, SetLevel]
    story.equal()
    assert target.latest("t-dev-customer-value") == 3

    clients.delete("t-main-dev-customer-value", 3)
    clients.delete("t-main-dev-other-key", 1)
    done = story.sync().done
    assert {(each.subject, each.for_good) for each in done if isinstance(each, Delete)} == {
        ("t-dev-customer-value", False),
        ("t-dev-other-key", False),
    }
    assert story.equal().subjects["t-dev-customer-value"][3].deleted
    assert target.latest("t-dev-customer-value") == 2
    assert target.latest("t-dev-other-key") is None

    # The number of a newest version that goes for good is used again.
    clients.delete("t-main-dev-customer-value", 3, permanent=True)
    clients.delete("t-main-dev-other-key", 1, permanent=True)
    clients.set_level("t-main-dev-customer-value", "NONE")
    clients.register("t-main-dev-customer-value", '"long"')
    outcome = story.sync()
    assert outcome.state is State.IN_SYNC
    assert [type(each) for each in outcome.done] == [Delete, Delete, Register, SetLevel]
    assert story.equal().subjects["t-dev-customer-value"].keys() == {1, 2, 3}


def records_are_read_at_both_sides(story: Story) -> None:
    """In Confluent's wire format: producers of either side, which ask their registry for the id of what they have, and
    consumers of either side, which know nothing but the id. Behind ``everything_becomes_equal``."""
    produced: tuple[tuple[str, str, str, dict[str, tuple[str, int]], dict[str, Any]], ...] = (
        ("customer", CUSTOMER, "AVRO", {"acme_Address": ("address", 1)}, {"home": {"street": "Überall"}}),
        ("customer", CUSTOMER_2, "AVRO", {"acme_Address": ("address", 1)}, {"home": {"street": ""}, "age": -77}),
        ("house", HOUSE, "JSON", {"street_json": ("street", 1)}, {"street": {"name": "here"}}),
        ("money", MONEY, "PROTOBUF", {}, {"cents": 4_200_000_000}),
    )
    formats = {"primary": "t-main-dev-{}-value", "target": "t-dev-{}-value"}
    for topic, text, kind, references, value in produced:
        records = {}
        for side, format_ in formats.items():
            named = {name: (format_.format(subject), number) for name, (subject, number) in references.items()}
            id_ = story.clients[side].look_up(format_.format(topic), text, kind, **named)
            assert id_ is not None, (side, topic)
            records[side] = encode(id_, Known(kind, text, [ADDRESS] if kind == "AVRO" else []), value)
        assert records["primary"] == records["target"]
        for consumer in story.clients.values():
            assert [decode(record, consumer.known) for record in records.values()] == [value, value]


def what_is_not_the_primary_s_stays(story: Story) -> None:
    """Conflicts are told, and nothing is overwritten or deleted; behind ``everything_becomes_equal``."""
    clients, target = story.clients["primary"], story.clients["target"]
    before = story.target.contents()
    # Deleted softly and for good between two passes: nobody has seen it softly deleted.
    clients.delete("t-main-dev-house-value", 1)
    clients.delete("t-main-dev-house-value", 1, permanent=True)
    outcome = story.sync()
    assert (outcome.state, [each.reason for each in outcome.findings]) == (State.DIFFERS, [Reason.ONLY_AT_TARGET])
    # Somebody has registered at the target, whose switch was off, what has the primary's next id there.
    story.target.refuse_writes(False)
    taken = target.register("t-dev-foreign-value", '"bytes"')
    same = clients.register("t-main-dev-new-value", '"double"')
    clients.delete("t-main-dev-bill-value", 1)
    assert taken == same
    outcome = story.sync()
    assert {(each.reason, each.subject) for each in outcome.findings} == {
        (Reason.ONLY_AT_TARGET, "t-dev-house-value"),
        (Reason.ONLY_AT_TARGET, "t-dev-foreign-value"),
        (Reason.ID_TAKEN, "t-dev-new-value"),
    }
    assert outcome.refuses_writes
    clients.delete("t-main-dev-bill-value", 1, permanent=True)
    outcome = story.sync()
    assert (Reason.DELETION_WAITS, "t-dev-bill-value") in {(each.reason, each.subject) for each in outcome.findings}
    now = story.target.contents()
    for place, version in before.places():
        assert now.at(place) is not None, place
        assert now.at(place) == version or place[0] == "t-dev-bill-value"
    # An operator's word. The registry keeps what an id meant for up to an hour.
    outcome = story.sync(delete=True)
    assert [(each.reason, each.subject) for each in outcome.findings] == [(Reason.REFUSED, "t-dev-new-value")]
    left = {subject.removeprefix("t-dev-") for subject in story.target.contents().subjects}
    assert left == {"address-value", "customer-value", "other-value", "street-value", "money-value"}


def read_by_the_other_api(story: Story) -> None:
    """Both registries read as one with Confluent's API is; that one does not say whose level is whose."""
    for registry, other in ((story.primary, story.primary_by_confluent), (story.target, story.target_by_confluent)):
        by_its_own, by_confluent = registry.contents(), other.contents()
        found, wanted = dict(by_confluent.places()), dict(by_its_own.places())
        assert found.keys() == wanted.keys()
        assert all(version.is_like(wanted[place]) for place, version in found.items())
        assert {place: version.deleted for place, version in found.items()} == {
            place: version.deleted for place, version in wanted.items()
        }
        assert by_confluent.default_level == by_its_own.default_level


def restored(story: Story) -> None:
    """A version that is live again at the primary."""
    clients, target = story.clients["primary"], story.clients["target"]
    clients.delete("t-main-dev-customer-value", 2)
    story.sync()
    assert target.latest("t-dev-customer-value") == 3
    story.primary.restore(
        "t-main-dev-customer-value", 2, story.primary.contents().subjects["t-main-dev-customer-value"][2]
    )
    assert [type(each) for each in story.sync().done] == [Restore]
