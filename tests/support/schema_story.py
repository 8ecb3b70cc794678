"""The story of schemas that are distributed from one Apicurio Registry to another one, step by step."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing
from typing import Any, Final, NamedTuple

import httpx

from isthmus.schemas.apicurio import Apicurio
from isthmus.schemas.confluent import Confluent
from isthmus.schemas.contents import Contents
from isthmus.schemas.distribution import Outcome, State, Target, run
from isthmus.schemas.plan import Delete, Reason, Register, Restore, SetLevel
from isthmus.schemas.registry import Credentials, quoted
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
        response = self.ask("POST", f"/subjects/{quoted(subject)}/versions", json=_body(schema, kind, references))
        assert response.is_success, response.text
        return int(response.json()["id"])

    def look_up(self, subject: str, schema: str, kind: str = "AVRO", **references: tuple[str, int]) -> int | None:
        """As a producer that does not register: the id of a schema of its own."""
        response = self.ask("POST", f"/subjects/{quoted(subject)}", json=_body(schema, kind, references))
        return int(response.json()["id"]) if response.is_success else None

    def delete(self, subject: str, version: int, permanent: bool = False) -> None:
        query = {"permanent": "true"} if permanent else {}
        response = self.ask("DELETE", f"/subjects/{quoted(subject)}/versions/{version}", params=query)
        assert response.is_success, response.text

    def set_level(self, subject: str, level: str) -> None:
        response = self.ask("PUT", f"/config/{subject}", json={"compatibility": level})
        assert response.is_success, response.text

    def latest(self, subject: str) -> int | None:
        response = self.ask("GET", f"/subjects/{quoted(subject)}/versions/latest")
        return int(response.json()["version"]) if response.is_success else None

    def known(self, id_: int) -> Known:
        """As a consumer that has met the id in a record."""
        return self._known(f"/schemas/ids/{id_}")

    def _known(self, path: str) -> Known:
        response = self.ask("GET", path)
        assert response.is_success, response.text
        found = response.json()
        references = {
            each["name"]: self._known(f"/subjects/{quoted(each['subject'])}/versions/{each['version']}")
            for each in found.get("references") or ()
        }
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
    assert json.loads(known.text) == json.loads(CUSTOMER)
    assert json.loads(known.references["acme.Address"].text) == json.loads(ADDRESS)
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


class Message(NamedTuple):
    """A value, and what its application has built in: a schema that it does not register."""

    topic: str
    schema: Known
    references: dict[str, tuple[str, int]]
    """As they are registered: topics and numbers of versions."""
    value: dict[str, Any]

    def record(self, clients: Clients, format_: str) -> bytes:
        """As a producer makes it that asks a registry for the id, where subjects have this format."""
        subject = format_.format(self.topic)
        references = {name: (format_.format(topic), number) for name, (topic, number) in self.references.items()}
        id_ = clients.look_up(subject, self.schema.text, self.schema.kind, **references)
        assert id_ is not None, subject
        return encode(id_, self.schema, self.value)


_ADDRESS: Final = {"acme.Address": Known("AVRO", ADDRESS)}
MESSAGES: Final = (
    Message(
        "customer",
        Known("AVRO", CUSTOMER, _ADDRESS),
        {"acme_Address": ("address", 1)},
        {"home": {"street": "Überall"}},
    ),
    Message(
        "customer",
        Known("AVRO", CUSTOMER_2, _ADDRESS),
        {"acme_Address": ("address", 1)},
        {"home": {"street": ""}, "age": -77},
    ),
    Message(
        "house",
        Known("JSON", HOUSE, {"street.json": Known("JSON", STREET)}),
        {"street_json": ("street", 1)},
        {"street": {"name": "here"}},
    ),
    Message(
        "bill",
        Known("PROTOBUF", BILL, {"money.proto": Known("PROTOBUF", MONEY)}),
        {"money_proto": ("money", 1)},
        {"sum": {"cents": 4_200_000_000}},
    ),
)
"""Of each kind, with references."""


def records_are_read_at_both_sides(story: Story) -> None:
    """In Confluent's wire format: producers of either side, which ask their registry for the id of what they have, and
    consumers of either side, which know nothing but the id. Behind ``everything_becomes_equal``."""
    formats = {"primary": "t-main-dev-{}-value", "target": "t-dev-{}-value"}
    for message in MESSAGES:
        value = message.value
        records = {side: message.record(story.clients[side], format_) for side, format_ in formats.items()}
        assert records["primary"] == records["target"]
        for consumer in story.clients.values():
            assert [decode(record, consumer.known) for record in records.values()] == [value, value]


def names_and_references_as_they_come(story: Story) -> None:
    """Names that URLs have to quote, and references in an order that nobody would give them."""
    clients, target = story.clients["primary"], story.clients["target"]
    before = story.target.contents().subjects
    names = {each: f"t-main-dev-{each}/a b?#+-value" for each in ("z", "a", "both", "same")}
    for each in ("z", "a"):
        clients.register(
            names[each], json.dumps({"type": "record", "name": each.upper(), "namespace": "acme", "fields": []})
        )
    fields = [{"name": "first", "type": "acme.A"}, {"name": "second", "type": "acme.Z"}]
    schema = json.dumps({"type": "record", "name": "Both", "namespace": "acme", "fields": fields})
    references = {"acme_Z": (names["z"], 1), "acme_A": (names["a"], 1)}
    ids = {clients.register(names[each], schema, **references) for each in ("both", "same")}
    outcome = story.sync()
    assert (outcome.state, len(outcome.done)) == (State.IN_SYNC, 4), outcome.findings
    story.equal()
    there = {each: names[each].replace("-main", "") for each in names}
    referred = {"acme_Z": (there["z"], 1), "acme_A": (there["a"], 1)}
    assert {target.look_up(there[each], schema, **referred) for each in ("both", "same")} == ids
    assert target.latest(there["both"]) == 1
    for permanent in (False, True):
        for each in ("both", "same", "z", "a"):
            clients.delete(names[each], 1, permanent)
        assert story.sync().state is State.IN_SYNC
        story.equal()
    assert story.target.contents().subjects == before


def passes_that_end_anywhere(story: Story, transport: Callable[[int, bool], httpx.BaseTransport], url: str) -> None:
    """Killed before a write, or when one was taken and the answer is not read; the next pass makes it whole."""
    clients, target = story.clients["primary"], story.clients["target"]
    for answered in (False, True):
        for writes in range(60):
            subject = f"t-main-dev-cut-{answered}-{writes}"
            fields = [{"name": "home", "type": "acme.Address"}, {"name": f"n{writes}", "type": "int"}]
            schema = json.dumps({"type": "record", "name": "Cut", "namespace": "acme", "fields": fields})
            address = ("t-main-dev-address-value", 1)
            for each in ("", "-same"):
                clients.register(f"{subject}{each}", schema, acme_Address=address)
            clients.set_level(subject, "NONE")
            clients.register(subject, ADDRESS)
            clients.set_level(subject, "FULL")
            clients.delete(f"{subject}-same", 1)
            if writes:
                former = f"t-main-dev-cut-{answered}-{writes - 1}"
                clients.delete(former, 2)
                clients.delete(f"{former}-same", 1, permanent=True)
                clients.register(f"{former}-same", ADDRESS)
            with closing(Apicurio(url, Credentials(), transport(writes, answered))) as dying:
                (outcome,) = run(story.primary, [Target("target", dying, NAMES)], write=True)
            again = story.sync()
            assert again.state is State.IN_SYNC, (writes, answered, again.findings)
            story.equal()
            assert target.latest(NAMES.to_target(subject) or "") == 2
            if outcome.state is State.IN_SYNC:
                break
        else:
            raise AssertionError("a pass takes more writes than that")


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
    assert target.latest("t-dev-customer-value") == 3


def a_version_comes_behind_a_later_one(story: Story) -> None:
    """As where its id was taken at first: it is not the latest one for that."""
    clients, target = story.clients["primary"], story.clients["target"]
    for kind in ("string", "int", "float"):
        clients.register("t-main-dev-late-value", f'"{kind}"')
        clients.set_level("t-main-dev-late-value", "NONE")
    versions = story.primary.contents().subjects["t-main-dev-late-value"]
    story.target.begin_writing()
    for number in (1, 3, 2):
        story.target.register("t-dev-late-value", number, versions[number])
    assert story.sync().state is State.IN_SYNC
    story.equal()
    assert target.latest("t-dev-late-value") == 3
    for permanent in (False, True):
        for number in (3, 2, 1):
            clients.delete("t-main-dev-late-value", number, permanent)
        story.sync()
