"""A file with a client's settings, which whoever may enable capture names."""

from __future__ import annotations

from pathlib import Path

import pytest

from isthmus_plugins.capture.kafka_topic import FILE_BYTES_MAX, ClientFileError, client_settings

SECRET = "kD9go58E3q0V2rJx1mB7uYp4tLwZaHcS6nQfXiKoGeU="


def test_settings_are_read(tmp_path: Path) -> None:
    file = tmp_path / "client.properties"
    file.write_text("# comment=1\nsecurity.protocol = SASL_PLAINTEXT\n\nsasl.password=a=b\n")
    assert client_settings(str(file)) == {"security_protocol": "SASL_PLAINTEXT", "sasl_plain_password": "a=b"}
    assert client_settings("") == {}


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (SECRET.encode(), "line 1"),
        (b"\n\nx\n" + SECRET.encode() + b"\n", "line 4"),
        (b"\xff" + SECRET.encode(), "not UTF-8"),
        (b"#" * (FILE_BYTES_MAX + 1) + SECRET.encode(), "more than"),
    ],
)
def test_what_stands_in_another_file_is_not_told(tmp_path: Path, content: bytes, told: str) -> None:
    file = tmp_path / "control.key"
    file.write_bytes(content)
    with pytest.raises(ClientFileError, match=told) as refused:
        client_settings(str(file))
    assert SECRET[:8] not in str(refused.value)


def test_what_is_no_file_is_not_read(tmp_path: Path) -> None:
    """It may have no end."""
    for path in (tmp_path, tmp_path / "none", Path("/dev/zero")):
        with pytest.raises(ClientFileError, match="No such file"):
            client_settings(str(path))
