"""Files and directories that an operator names."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from isthmus.cli.output import CliError, Exit, Output


@contextmanager
def named(path: Path, output: Output, use: str = "read") -> Iterator[None]:
    """Raises CliError where the system refuses what is done with it, or what is to be text is none."""
    try:
        yield
    except (OSError, UnicodeDecodeError) as error:
        raise CliError("FILE", f"{path} cannot be {use}: {why(error)}", Exit.USAGE, output) from None


def why(error: OSError | ValueError) -> str:
    """What is wrong with a file, or what is in it, without the file's name."""
    if isinstance(error, UnicodeDecodeError):
        return "not UTF-8"
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
