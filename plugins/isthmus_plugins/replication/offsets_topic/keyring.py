"""The keyring file of this side: keys of groups' offsets, read again whenever the file changes."""

from __future__ import annotations

from pathlib import Path

from isthmus_protocol.offsets_cipher import Keyring, KeyringError, parse_keyring


class KeyringFile:
    """``path`` None: no file is configured."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._stamp: tuple[int, int, int] | None = None
        self._read: Keyring | KeyringError | None = None

    @property
    def configured(self) -> bool:
        return self._path is not None

    def keyring(self) -> Keyring:
        """The keyring as the file has it now. Raises KeyringError, also where there is no file."""
        if self._path is None:
            raise KeyringError("no keyring is configured: set replication.offsets_keyring_file on every proxy")
        try:
            found = self._path.stat()
            # A file that is replaced has another inode, even where size and time stay.
            stamp = (found.st_mtime_ns, found.st_size, found.st_ino)
            if stamp != self._stamp or self._read is None:
                self._read = self._parsed(self._path.read_text(encoding="utf-8"))
                self._stamp = stamp
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
            raise KeyringError(f"the keyring {self._path} cannot be read: {reason}") from None
        if isinstance(self._read, KeyringError):
            raise self._read
        return self._read

    def _parsed(self, text: str) -> Keyring | KeyringError:
        try:
            return parse_keyring(text)
        except KeyringError as error:
            return KeyringError(f"the keyring {self._path} cannot be used: {error}")
