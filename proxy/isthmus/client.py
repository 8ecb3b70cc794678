"""Links, namespaces and topics from Python: what KIP-986 gives Kafka's AdminClient, here over REST.

One object asks one proxy of a cluster; any proxy knows all of the cluster. What goes in and comes out are the models of
REST, by the same names::

    from isthmus.client import AdminClient, Attach, CreateLink, CreateToken

    with AdminClient("https://proxy-b.example.org:28080", token_file="b.token") as admin:
        token = admin.create_token(CreateToken(may=["lead:orders-"])).token

    with AdminClient("unix:/run/isthmus/admin.sock") as admin:
        admin.create_link(CreateLink(link_name="a-to-b", remote="proxy-b.example.org:29292", token=token))
        admin.attach("a-to-b", Attach(local="orders-", remote="orders-", role="leader"))
        admin.wait_for_link("a-to-b", "Following", timeout_s=60)
        print(admin.verify("a-to-b").equal)

What is refused raises :class:`AdminError` with REST's ``code``; what cannot be reached, :class:`NotReachable`. What has
no method here is asked by path (``get``, ``post``, ``patch``, ``delete``), as the command line does.
"""

from __future__ import annotations

from typing import Any, TypeVar
from urllib.parse import quote

from pydantic import BaseModel, ValidationError

from isthmus.admin.models import (
    AlterNamespaceRequest,
    CreateNamespaceRequest,
    NamespaceContentsView,
    NamespaceOverlapView,
    NamespaceView,
    StatusView,
    TopicView,
)
from isthmus.admin_requests import DEFAULT_URL, AdminError, AdminRequests, NotReachable, NotUsable
from isthmus_control.model import ResourceType
from isthmus_plugins.drill_report import DrillFailover, DrillReport
from isthmus_plugins.failover_report import Failover, FailoverReport
from isthmus_plugins.links import (
    AlterLink,
    Attach,
    AttachResult,
    ChangeGrants,
    CreateLink,
    CreateToken,
    GrantsStatus,
    LinkStatus,
    ModeResult,
    NamespaceRef,
    NewToken,
    Promote,
    PromoteReport,
    SecretRotated,
    SetMode,
    TokenStatus,
    VerifyReport,
)

__all__ = (
    "DEFAULT_URL",
    "AdminClient",
    "AdminError",
    "AlterLink",
    "AlterNamespaceRequest",
    "Attach",
    "ChangeGrants",
    "CreateLink",
    "CreateNamespaceRequest",
    "CreateToken",
    "DrillFailover",
    "Failover",
    "NamespaceRef",
    "NotReachable",
    "NotUsable",
    "Promote",
    "ResourceType",
    "SetMode",
)

M = TypeVar("M", bound=BaseModel)


class AdminClient(AdminRequests):
    """Asks one proxy. Methods return when what they change is done; those that only read change nothing."""

    # ---- this cluster ----

    def status(self) -> StatusView:
        """The proxy that is asked, and what it knows of its cluster."""
        return _read(StatusView, self.get("/v1/status"))

    # ---- namespaces ----

    def namespaces(self, type: ResourceType | None = None) -> list[NamespaceView]:
        return _items(NamespaceView, self.get("/v1/namespaces", type=type and type.value))

    def namespace(self, prefix: str, type: ResourceType = ResourceType.TOPIC) -> NamespaceView:
        return _read(NamespaceView, self.get(f"/v1/namespaces/{type.value}", prefix=prefix))

    def namespace_contents(self, prefix: str, type: ResourceType = ResourceType.TOPIC) -> NamespaceContentsView:
        """What is in it now, as the proxy's own user may see."""
        return _read(NamespaceContentsView, self.get(f"/v1/namespaces/{type.value}/contents", prefix=prefix))

    def namespace_overlap(
        self, prefix: str, other: str, type: ResourceType = ResourceType.TOPIC
    ) -> NamespaceOverlapView:
        """Whether some name could be in both; there need not be such namespaces."""
        answer = self.get(f"/v1/namespaces/{type.value}/overlap", prefix=prefix, other=other)
        return _read(NamespaceOverlapView, answer)

    def create_namespace(self, wanted: CreateNamespaceRequest) -> NamespaceView:
        """A reserved one is enforced by every proxy of the cluster when this returns."""
        return _read(NamespaceView, self.post("/v1/namespaces", _body(wanted)))

    def alter_namespace(
        self, prefix: str, wanted: AlterNamespaceRequest, type: ResourceType = ResourceType.TOPIC
    ) -> NamespaceView:
        answer = self.patch(f"/v1/namespaces/{type.value}", _body(wanted), prefix=prefix)
        return _read(NamespaceView, answer)

    def delete_namespace(self, prefix: str, type: ResourceType = ResourceType.TOPIC, wait: bool = True) -> None:
        """``wait``: until every proxy of the cluster acts on it."""
        self.delete(f"/v1/namespaces/{type.value}", prefix=prefix, wait=wait)

    # ---- links ----

    def links(self) -> list[LinkStatus]:
        return _items(LinkStatus, self.get("/v1/links"))

    def link(self, name: str) -> LinkStatus:
        """The link with its partitions and groups, as this proxy knows them."""
        return _read(LinkStatus, self.get(_link(name)))

    def create_link(self, wanted: CreateLink) -> LinkStatus:
        """Both ends of it."""
        return _read(LinkStatus, self.post("/v1/links", _body(wanted)))

    def alter_link(self, name: str, wanted: AlterLink) -> LinkStatus:
        return _read(LinkStatus, self.patch(_link(name), _body(wanted)))

    def set_mode(self, name: str, wanted: SetMode) -> ModeResult:
        return _read(ModeResult, self.post(f"{_link(name)}/mode", _body(wanted)))

    def delete_link(self, name: str, *, local_only: bool = False) -> None:
        """``local_only``: this end, where the other cluster cannot be reached."""
        self.delete(_link(name), local_only=local_only)

    def rotate_secret(self, name: str) -> SecretRotated:
        """Give both sides of a link a new secret; nothing is disconnected."""
        return _read(SecretRotated, self.post(f"{_link(name)}/rotate-secret"))

    def attach(self, name: str, wanted: Attach) -> AttachResult:
        """What the other cluster has not granted (``missing_grants``) waits for its operator."""
        return _read(AttachResult, self.post(f"{_link(name)}/mappings", _body(wanted)))

    def detach(
        self, name: str, local: str, type: ResourceType = ResourceType.TOPIC, *, local_only: bool = False
    ) -> None:
        self.delete(f"{_link(name)}/mappings", local=local, type=type.value, local_only=local_only)

    def wait_for_link(self, name: str, state: str, timeout_s: float) -> LinkStatus:
        """Wait until a link is in a state (``Following``, ``In-Sync``). Raises AdminError after ``timeout_s``."""

        def look() -> tuple[LinkStatus, str | None]:
            found = self.link(name)
            return found, None if found.state == state else f"it is {found.state}: {found.message or found.reason}"

        found: LinkStatus = self.wait_for(f"link {name} is {state}", look, timeout_s)
        return found

    # ---- consent ----

    def tokens(self) -> list[TokenStatus]:
        """Those that nobody has used."""
        return _items(TokenStatus, self.get("/v1/link-tokens"))

    def create_token(self, wanted: CreateToken) -> NewToken:
        """Another cluster makes one link with this one by it. It is told this once."""
        return _read(NewToken, self.post("/v1/link-tokens", _body(wanted)))

    def delete_token(self, token_id: str) -> None:
        self.delete(f"/v1/link-tokens/{quote(token_id, safe='')}")

    def grants(self, name: str) -> GrantsStatus:
        """What the other cluster of a link may have done here, and what waits for that."""
        return _read(GrantsStatus, self.get(f"{_link(name)}/grants"))

    def grant(self, name: str, wanted: ChangeGrants) -> GrantsStatus:
        return _read(GrantsStatus, self.post(f"{_link(name)}/grants", _body(wanted)))

    def revoke(self, name: str, wanted: ChangeGrants) -> GrantsStatus:
        """From now on. What is attached goes on until it is detached."""
        return _read(GrantsStatus, self.post(f"{_link(name)}/grants/revoke", _body(wanted)))

    # ---- what takes its time ----

    def verify(self, name: str) -> VerifyReport:
        """Compare both sides of a link, record by record."""
        return _read(VerifyReport, self._result_of(self.post(f"{_link(name)}/verify")))

    def promote(self, name: str, wanted: Promote) -> PromoteReport:
        """Make follower namespaces writable that have all of their source."""
        return _read(PromoteReport, self._result_of(self.post(f"{_link(name)}/promote", _body(wanted))))

    def fail_over(self, name: str, wanted: Failover) -> FailoverReport:
        """Make follower namespaces writable without their source."""
        return _read(FailoverReport, self._result_of(self.post(f"{_link(name)}/failover", _body(wanted))))

    def drill_failover(self, name: str, wanted: DrillFailover) -> DrillReport:
        """Say what failing over now would lose; what follows stays as it is."""
        return _read(DrillReport, self._result_of(self.post(f"{_link(name)}/drill/failover", _body(wanted))))

    def _result_of(self, operation: dict[str, Any]) -> Any:
        """What an operation comes to. Raises AdminError where it fails. An interrupted wait leaves it going on."""
        *_, last = self.progress(operation)
        if last["state"] == "failed":
            raise AdminError(last["error"]["code"], last["error"]["message"])
        return last["result"]

    # ---- topics that follow ----

    def topics(self) -> list[TopicView]:
        """With their provenance, and why one of them is refused."""
        return _items(TopicView, self.get("/v1/topics"))


def _link(name: str) -> str:
    return f"/v1/links/{quote(name, safe='')}"


def _body(wanted: BaseModel) -> dict[str, Any]:
    """What was said of it: what was not is the proxy's to fill in, which may be of another version."""
    return wanted.model_dump(mode="json", exclude_unset=True)


def _items(model: type[M], answer: Any) -> list[M]:
    return [_read(model, each) for each in answer["items"]]


def _read(model: type[M], answer: Any) -> M:
    """Raises AdminError: it is of a proxy of another version, and not what this one knows."""
    try:
        return model.model_validate(answer)
    except ValidationError as error:
        where = ".".join(map(str, error.errors()[0]["loc"]))
        message = f"the proxy's answer has {where!r} as this version does not know it: use the isthmus of its version"
        raise AdminError("VERSION_MISMATCH", message) from None
