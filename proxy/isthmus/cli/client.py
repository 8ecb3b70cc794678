"""The admin listener, as a command asks it."""

from __future__ import annotations

from types import TracebackType
from typing import Annotated

import typer

from isthmus.admin_requests import DEFAULT_URL, AdminError, AdminRequests, NotReachable, NotUsable
from isthmus.cli.connection import chosen
from isthmus.cli.output import CliError, Exit, Output

UrlOption = Annotated[
    str | None,
    typer.Option(
        "--url",
        envvar="ISTHMUS_URL",
        help="The proxy's admin listener: http://..., https://... or unix:PATH. Else the current profile's "
        f"(`isthmus config`), else {DEFAULT_URL}.",
    ),
]


class Admin(AdminRequests):
    """One command's connection to an admin listener: what fails inside ``with`` ends the command as a CliError."""

    def __init__(self, url: str | None, output: Output) -> None:
        """``url``: None where the command was given none."""
        self.output = output
        profile = chosen(url, output)
        try:
            super().__init__(
                profile.url,
                token_file=profile.token_file,
                cacert=profile.cacert,
                cert=profile.cert,
                key=profile.key,
            )
        except AdminError as error:
            raise self._shown(error) from None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        super().__exit__(kind, error, tb)
        if isinstance(error, AdminError):
            raise self._shown(error) from None

    def error(self, code: str, message: str) -> CliError:
        """An error in the form that the command's output asks for."""
        return CliError(code, message, Exit.FAILED, self.output)

    def _shown(self, error: AdminError) -> CliError:
        exit_code = Exit.FAILED
        if isinstance(error, NotReachable):
            exit_code = Exit.NOT_REACHABLE
        elif isinstance(error, NotUsable):
            exit_code = Exit.USAGE
        return CliError(error.code, error.message, exit_code, self.output, error.error_code)
