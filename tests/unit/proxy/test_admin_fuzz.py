"""Whatever is asked of the admin listener, nobody gets a 500: requests made from its own OpenAPI document, and worse.

schemathesis makes what the document allows, and what it forbids in every other way; a generator of our own knows names
that exist, so that requests come further, and bodies that are no JSON.

Behind it are a whole replication plugin with a link to another cluster, and the real rules of the control log, on model
clusters. All of that is there, so nothing answers 503 either but what would ask somebody who is not.
"""

from __future__ import annotations

import json
import os
from typing import Any, Final, NamedTuple
from urllib.parse import quote

import httpx
import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st
from support.admin import MemoryLog, ModelLog, access, make_services
from support.plugins import Two, on_two
from support.seeds import examples

from isthmus.admin import create_app
from isthmus.admin.access import Peer
from isthmus.admin.audit import Audit
from isthmus.admin.guard import Guard
from isthmus.admin.operations import Operations
from isthmus_control.commands import CreateNamespace
from isthmus_control.model import ResourceType
from isthmus_plugins.capture import plugin as capture
from isthmus_plugins.link_policy import remote_address
from isthmus_plugins.namespace_host import NamespaceHost

EXAMPLES: Final = examples(int(os.environ.get("ISTHMUS_FUZZ_EXAMPLES", "25")))
KNOWN_TEXTS: Final = ("a-to-b", "orders-", "app-", "orders-eu", "capture", "", "127.0.0.1:1", "ALL", "ANY 1 (a-to-b)")
ODD_TEXTS: Final = (
    "\x00",
    "a\nb",
    "..",
    "a/b",
    "é",
    "𐀀",
    "﷽" * 50,
    "x" * 2_000,
    "h:²",
    "a..b:1",
    "[::1",
    "h:99999",
    "h:-1",
    "%00",
    "' OR 1=1",
    "${x}",
)
ODD_BODIES: Final = (
    b"",
    b"{",
    b"null",
    b"[" * 20_000,
    b'{"a":' * 5_000,
    b'{"prefix": NaN}',
    b'{"prefix": "\\ud800"}',
    b'{"settings": {"sampling": Infinity}}',
    b'{"settings": {"\\udfff": 1}}',
    b'{"settings": {"sampling": 0.5}}',
    b'{"settings": {"sampling": 1e999}}',
    b'{"prefix": "a", "prefix": "b"}',
    b'{"prefix": ' + b"9" * 10_000 + b"}",
    b'{"settings": ' + b'{"a":' * 450 + b"1" + b"}" * 451,
    b'{"settings": {"a": ' + b"[" * 300 + b"]" * 300 + b"}}",
    b'"\xff\xfe"',
    b"\x00\x01",
)


class Asked(NamedTuple):
    method: str
    path: str
    """With the query."""
    body: bytes | None

    def __repr__(self) -> str:
        return f"{self.method} {self.path[:150]} {(self.body or b'')[:150]!r}"


def document() -> dict[str, Any]:
    return create_app(make_services(MemoryLog())).openapi()


DOCUMENT: Final = document()
ANY_TEXT: Final = st.one_of(st.sampled_from(KNOWN_TEXTS), st.sampled_from(ODD_TEXTS), st.text(max_size=20))
ANY_NUMBER: Final = st.one_of(st.integers(), st.sampled_from([-1, 0, 1, 2**31, 2**63, 2**64, 10**30, 0.5, 1e308]))
ANY_JSON: Final = st.recursive(
    st.one_of(st.none(), st.booleans(), ANY_NUMBER, ANY_TEXT),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(ANY_TEXT, inner, max_size=3)),
    max_leaves=6,
)


def values(schema: dict[str, Any]) -> st.SearchStrategy[Any]:
    """What a schema allows, and now and then something else."""
    if "$ref" in schema:
        return st.deferred(lambda: values(DOCUMENT["components"]["schemas"][schema["$ref"].rpartition("/")[2]]))
    if "anyOf" in schema:
        return st.one_of([values(each) for each in schema["anyOf"]])
    if "const" in schema or "enum" in schema:
        return _mostly(st.sampled_from(schema.get("enum") or [schema["const"]]))
    kind = schema.get("type")
    if kind == "object" and "properties" in schema:
        required = schema.get("required", [])
        known = {name: values(each) for name, each in schema["properties"].items()}
        return _mostly(
            st.fixed_dictionaries(
                {name: known[name] for name in required},
                optional={name: each for name, each in known.items() if name not in required},
            )
        )
    if kind == "object":
        inner = schema.get("additionalProperties")
        return _mostly(st.dictionaries(ANY_TEXT, values(inner) if isinstance(inner, dict) else ANY_JSON, max_size=3))
    if kind == "array":
        return _mostly(st.lists(values(schema["items"]), max_size=3))
    simple = {
        "string": ANY_TEXT,
        "integer": _bounded(schema),
        "number": _bounded(schema),
        "boolean": st.booleans(),
        "null": st.none(),
    }
    return _mostly(simple[kind]) if kind in simple else ANY_JSON


def _bounded(schema: dict[str, Any]) -> st.SearchStrategy[Any]:
    return st.one_of(st.integers(schema.get("minimum"), schema.get("maximum")), ANY_NUMBER)


def _mostly(usual: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.integers(0, 15).flatmap(lambda lot: ANY_JSON if lot == 0 else usual)


@st.composite
def asked_by_us(draw: st.DrawFn) -> Asked:
    """A request to one of the document's operations."""
    path = draw(st.sampled_from(sorted(DOCUMENT["paths"])))
    method = draw(st.sampled_from(sorted(DOCUMENT["paths"][path])))
    operation = DOCUMENT["paths"][path][method]
    query = []
    for parameter in operation.get("parameters", ()):
        value = draw(values(parameter["schema"]))
        text = quote(value if isinstance(value, str) else json.dumps(value), safe="")
        if parameter["in"] == "path":
            path = path.replace(f"{{{parameter['name']}}}", text)
        elif parameter["required"] or draw(st.booleans()):
            query.append(f"{parameter['name']}={text}")
    body = None
    if "requestBody" in operation:
        schema = operation["requestBody"]["content"]["application/json"]["schema"]
        body = draw(st.one_of(values(schema).map(lambda each: json.dumps(each).encode()), st.sampled_from(ODD_BODIES)))
    return Asked(method.upper(), f"{path}?{'&'.join(query)}", body)


def asked_by_schemathesis() -> st.SearchStrategy[Asked]:
    """The same, and as little is right of half of them as the document leaves room for."""
    schema = schemathesis.openapi.from_dict(DOCUMENT)
    return st.one_of([schema.as_strategy(generation_mode=mode) for mode in schemathesis.GenerationMode]).map(_asked)


def _asked(case: schemathesis.Case) -> Asked:
    sent = requests.Request(**case.as_transport_kwargs(base_url="http://localhost")).prepare()
    assert sent.method is not None
    content = sent.body.encode() if isinstance(sent.body, str) else sent.body
    return Asked(sent.method, sent.path_url, content)


def ask_all(asked: list[Asked]) -> list[httpx.Response]:
    """Ask one listener all of it, in this order."""
    answers: list[httpx.Response] = []

    async def work(two: Two) -> None:
        await two.create()
        await two.connected()
        two.clusters["A"].add_topic("orders-eu")
        services = make_services(MemoryLog())
        services.control = ModelLog(two.controls["A"])
        services.links, services.export = two.a.links, lambda: None
        context: Any = two.a.context
        services.plugins = NamespaceHost(context, {"capture": capture.isthmus_namespace_plugin()}, lambda: None)
        services.plugins.start()
        for prefix in ("orders-", "app-"):
            two.controls["A"].apply(CreateNamespace(ResourceType.TOPIC, prefix))
        operations = Operations(services.supervision)
        audit = Audit(create_app(services, operations), services, operations)
        guarded = Guard(audit, access())

        async def app(scope: Any, receive: Any, send: Any) -> None:
            scope["state"] = {"peer": Peer("127.0.0.1")}
            await guarded(scope, receive, send)

        transport = httpx.ASGITransport(app)  # raises what would be a 500
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            for each in asked:
                headers = {} if each.body is None else {"content-type": "application/json"}
                answers.append(
                    await client.request(each.method, each.path, content=each.body, headers=headers, timeout=600)
                )
        await operations.close()
        await audit.close()
        await services.plugins.stop()

    on_two(work, timeout_s=36_000)
    return answers


def body(path: str, value: Any, method: str = "POST") -> Asked:
    return Asked(method, path, value if isinstance(value, bytes) else json.dumps(value).encode())


@pytest.mark.timeout(300 + 2 * EXAMPLES)
@settings(
    max_examples=EXAMPLES,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=(Phase.explicit, Phase.reuse, Phase.generate),  # the request that failed is in the message
)
@given(st.lists(asked_by_us(), min_size=20, max_size=30))
@example([body("/v1/links", {"link_name": "x", "remote": remote}) for remote in ODD_TEXTS])
@example([body("/v1/namespaces", each) for each in ODD_BODIES])
@example([body("/v1/namespaces", {"prefix": "a", "confirm": None})])
@example([body("/v1/namespaces/topic/plugins/capture?prefix=app-&wait=false", each) for each in ODD_BODIES])
def test_no_request_is_an_internal_error(asked: list[Asked]) -> None:
    check(asked)


@pytest.mark.timeout(300 + 2 * EXAMPLES)
@settings(
    max_examples=max(1, EXAMPLES // 5),
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=(Phase.reuse, Phase.generate),
)
@given(st.lists(asked_by_schemathesis(), min_size=20, max_size=30))
def test_no_request_of_schemathesis_is_an_internal_error(asked: list[Asked]) -> None:
    check(asked)


def check(asked: list[Asked]) -> None:
    """Ask all of it: errors are as the document has them, and 503 says that somebody who is asked is not there."""
    for each, answer in zip(asked, ask_all(asked), strict=True):
        assert answer.status_code < 500 or (
            answer.status_code in (503, 504) and answer.json()["code"] == "BOOTSTRAP_TCP_CONNECTION_FAILED_ERROR"
        ), (each, answer.text)
        if answer.status_code >= 400:
            assert set(answer.json()) == {"error_code", "code", "message"}, (each, answer.text)


def test_odd_addresses_of_links_are_refused_before_names_are_looked_up() -> None:
    """The model's loop looks up none."""

    for odd in ODD_TEXTS:
        assert remote_address(odd) is None
    assert remote_address("proxy-b.example.org:19192") == ("proxy-b.example.org", 19192)
    assert remote_address("[::1]:19192") == ("::1", 19192)
