"""The document of ``isthmus schemas``: which registries there are, and what subjects are called in each.

::

    primary: cluster-1
    registries:
      cluster-1:
        kind: apicurio                       # or confluent
        url: http://registry-1:8080
        subjects: "{tenant}-{instance}-{environment}-{topic}"
      cluster-2:
        kind: confluent
        url: https://registry-2:8081
        subjects: "{tenant}-{environment}-{topic}"
        user: isthmus
        password_file: registry-2.password

Every problem is shown at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Final, Literal

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from isthmus.schemas.registry import Credentials
from isthmus.schemas.subjects import UNCHANGED, Format, FormatError, Translation

_Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,100}$")]
DOCUMENT_BYTES_MAX: Final = 256 * 1024


class DocumentError(Exception):
    """One line for each problem."""


def _as_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


class RegistrySpec(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Literal["apicurio", "confluent"]
    url: str = Field(pattern=r"^https?://[^/?#@]+(/[^?#]*)?$")
    subjects: Annotated[list[str], BeforeValidator(_as_list), Field(min_length=1, max_length=100)] = [UNCHANGED]
    """The n-th format of one registry and the n-th of another belong together."""
    writes: Literal["refused", "allowed"] = "refused"
    """By clients, where it is a target."""
    user: str | None = None
    password_file: Path | None = None
    token_file: Path | None = None
    cacert: Path | None = None
    cert: Path | None = None
    key: Path | None = None

    @property
    def credentials(self) -> Credentials:
        return Credentials(self.user, self.password_file, self.token_file, self.cacert, self.cert, self.key)

    def problems(self) -> Iterator[str]:
        if (self.user is None) != (self.password_file is None):
            yield "user and password_file go together"
        if self.user is not None and self.token_file is not None:
            yield "there is a user and a token_file: keep one of them"
        if self.key is not None and self.cert is None:
            yield "key is that of cert, which is missing"


class Document(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    primary: _Name
    registries: dict[_Name, RegistrySpec] = Field(min_length=2, max_length=256)

    @property
    def targets(self) -> list[str]:
        return [name for name in self.registries if name != self.primary]

    def translation(self, target: str) -> Translation:
        """Raises FormatError."""
        source, there = (self.registries[name].subjects for name in (self.primary, target))
        return Translation([Format(each) for each in source], [Format(each) for each in there])


def read_document(text: str, directory: Path = Path()) -> Document:
    """``directory``: where files are that it names. Raises DocumentError."""
    if len(text.encode()) > DOCUMENT_BYTES_MAX:
        raise DocumentError(f"the document is larger than {DOCUMENT_BYTES_MAX} bytes")
    try:
        content = yaml.safe_load(text)
        document = Document.model_validate(content)
    except yaml.YAMLError as error:
        raise DocumentError(str(error)) from None
    except ValidationError as error:
        lines = (f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors(include_url=False))
        raise DocumentError("\n".join(lines)) from None
    if problems := list(_problems(document)):
        raise DocumentError("\n".join(problems))
    return document.model_copy(
        update={"registries": {name: _placed(each, directory) for name, each in document.registries.items()}}
    )


def _problems(document: Document) -> Iterator[str]:
    if document.primary not in document.registries:
        known = ", ".join(document.registries)
        yield f"primary: {document.primary} is not one of the registries ({known})"
        return
    urls: dict[str, str] = {}
    for name, each in document.registries.items():
        yield from (f"registries.{name}: {problem}" for problem in each.problems())
        url = each.url.rstrip("/").lower()
        if url in urls:
            yield f"registries {urls[url]} and {name} have one url: each is one registry"
        urls[url] = name
    for name in [document.primary, *document.targets]:
        try:
            document.translation(name)
        except FormatError as error:
            yield f"registries.{name}.subjects: {error}"
            if name == document.primary:
                return


def _placed(spec: RegistrySpec, directory: Path) -> RegistrySpec:
    named = {name: getattr(spec, name) for name in ("password_file", "token_file", "cacert", "cert", "key")}
    return spec.model_copy(update={name: directory / path for name, path in named.items() if path is not None})
