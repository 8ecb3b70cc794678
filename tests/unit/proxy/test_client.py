"""The client in Python: what it asks a listener, what it makes of the answers, and the example in its documentation."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest
from pydantic import BaseModel
from support.admin import RunningAdmin

from isthmus import client
from isthmus.client import (
    AdminClient,
    AdminError,
    AlterLink,
    AlterNamespaceRequest,
    ChangeGrants,
    CreateNamespaceRequest,
    CreateToken,
    DrillFailover,
    Failover,
    NamespaceRef,
    NotReachable,
    NotUsable,
    Promote,
    SetMode,
)
from isthmus_plugins.links import OperationError

DOCUMENT = Path(__file__).parents[3] / "docs" / "operations.md"


@pytest.fixture
def listener() -> Iterator[RunningAdmin]:
    with RunningAdmin() as running:
        yield running


@pytest.fixture
def admin(listener: RunningAdmin) -> Iterator[AdminClient]:
    with AdminClient(listener.url) as admin:
        yield admin


def test_namespaces(admin: AdminClient) -> None:
    made = admin.create_namespace(CreateNamespaceRequest(prefix="orders-"))
    assert (made.prefix, made.state) == ("orders-", "open")
    assert [each.prefix for each in admin.namespaces()] == ["orders-"]
    with pytest.raises(AdminError, match="acks cannot go without a link after 5 ms"):
        admin.alter_namespace("orders-", AlterNamespaceRequest(degrade_after_ms=5))
    assert admin.namespace("orders-") == made
    assert (admin.namespace_contents("orders-").empty, admin.namespace_contents("orders-").namespace) == (True, made)
    assert admin.namespace_overlap("orders-", "orders-eu-").overlap
    admin.delete_namespace("orders-", wait=False)  # there are no proxies
    with pytest.raises(AdminError) as refused:
        admin.namespace("orders-")
    assert (refused.value.code, refused.value.error_code) == ("NOT_FOUND", 40401)


def test_links(admin: AdminClient, listener: RunningAdmin) -> None:
    (link,) = admin.links()
    assert link == admin.link("a-to-b") == admin.wait_for_link("a-to-b", "Following", 1)
    admin.alter_link("a-to-b", AlterLink(config={"x": "1", "y": None}))
    (altered,) = listener.links.altered
    assert altered.config == {"x": "1", "y": None}
    assert admin.set_mode("a-to-b", SetMode(mode="synchronous")).mode == "synchronous"
    with pytest.raises(AdminError, match="link a-to-b is In-Sync: not within 0 s; it is Following") as late:
        admin.wait_for_link("a-to-b", "In-Sync", 0)
    assert late.value.code == "NOT_IN_TIME"
    admin.detach("a-to-b", "orders-")
    admin.delete_link("a-to-b", local_only=True)
    assert admin.links() == []


def test_consent(admin: AdminClient, listener: RunningAdmin) -> None:
    made = admin.create_token(CreateToken(may=["lead:orders-"], expires_seconds=60))
    assert (made.may, made.token) == (["lead:orders-"], "isthmus")
    assert [each.token_id for each in admin.tokens()] == [made.token_id]
    admin.delete_token(made.token_id)
    assert ("delete token", made.token_id) in listener.links.calls
    assert admin.grant("a-to-b", ChangeGrants(may=["follow:x-"])).may == ["lead:orders-", "follow:x-"]
    assert admin.revoke("a-to-b", ChangeGrants(may=["follow:x-"])) == admin.grants("a-to-b")
    assert admin.rotate_secret("a-to-b").link_name == "a-to-b"


def test_what_takes_its_time(admin: AdminClient, listener: RunningAdmin) -> None:
    assert admin.verify("a-to-b").equal
    wanted = [NamespaceRef(local="orders-")]
    assert admin.promote("a-to-b", Promote(namespaces=wanted, dry_run=True)).dry_run
    assert admin.fail_over("a-to-b", Failover(namespaces=wanted, dry_run=True)).dry_run
    assert admin.drill_failover("a-to-b", DrillFailover(namespaces=wanted)).lost.records == 2
    listener.links.verify_error = OperationError("LINK_NOT_CONNECTED", "the peer is away", 503)
    with pytest.raises(AdminError) as failed:
        admin.verify("a-to-b")
    assert failed.value.code == "LINK_NOT_CONNECTED"
    assert admin.topics() == []
    assert admin.status().cluster_id == "cluster-a"


def test_what_it_is_given_and_what_does_not_answer(tmp_path: Path) -> None:
    with pytest.raises(NotUsable, match="cannot be read"):
        AdminClient(token_file=tmp_path / "none")
    with AdminClient("ftp://127.0.0.1") as admin, pytest.raises(NotUsable, match="is not the URL"):
        admin.status()
    with AdminClient("http://127.0.0.1:9") as admin, pytest.raises(NotReachable):
        admin.status()


def test_an_answer_of_another_version_is_no_guess() -> None:
    class Known(BaseModel):
        model_config = {"extra": "forbid"}
        a: int

    with pytest.raises(AdminError, match="'b' as this version does not know it") as other:
        client._read(Known, {"a": 1, "b": 2})
    assert other.value.code == "VERSION_MISMATCH"


def test_the_example_runs(listener: RunningAdmin) -> None:
    """As it stands in the documentation and in the module, but for the listeners."""
    (example,) = re.findall(r"```python\n(from isthmus\.client.*?)```", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL)
    assert client.__doc__ is not None
    assert all(line.strip() in client.__doc__ for line in example.splitlines())
    listener.links.links.clear()
    printed = StringIO()
    for address in ('"https://proxy-b.example.org:28080", token_file="b.token"', '"unix:/run/isthmus/admin.sock"'):
        assert address in example
        example = example.replace(address, repr(listener.url))
    with redirect_stdout(printed):
        exec(example, {})
    assert printed.getvalue() == "True\n"
    assert [(each.link_name, each.token) for each in listener.links.created] == [("a-to-b", "isthmus")]
    assert [each.local for each in listener.links.attached] == ["orders-"]
