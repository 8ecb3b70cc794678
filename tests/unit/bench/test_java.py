"""Which Java is taken, and whom it trusts."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from isthmus_bench.kafka.errors import EmbeddedKafkaError
from isthmus_bench.kafka.java import Java, choose_java, find_java, trust_options
from isthmus_bench.kafka.security import Authority


def fake_java(home: Path, banner: str, status: int = 0) -> Path:
    """A program that says it is some Java."""
    executable = home / "bin" / "java"
    executable.parent.mkdir(parents=True)
    executable.write_text(f"#!/bin/sh\necho '{banner}' >&2\nexit {status}\n")
    executable.chmod(0o755)
    return executable


@pytest.fixture
def old(tmp_path: Path) -> Path:
    return fake_java(tmp_path / "old", 'java version "1.8.0_402"')


@pytest.fixture
def new(tmp_path: Path) -> Path:
    return fake_java(tmp_path / "new", 'openjdk version "21.0.2" 2024-01-16')


@pytest.fixture
def newest(tmp_path: Path) -> Path:
    return fake_java(tmp_path / "newest", 'openjdk version "25" 2025-09-16')


def test_java_home_comes_first(new: Path, newest: Path) -> None:
    java = choose_java({"JAVA_HOME": str(newest.parent.parent), "PATH": str(new.parent)}, None)
    assert (java.executable, java.major, java.bundled) == (newest, 25, False)


def test_an_old_java_home_gives_way_to_the_path(old: Path, new: Path) -> None:
    java = choose_java({"JAVA_HOME": str(old.parent.parent), "PATH": str(new.parent)}, None)
    assert (java.executable, java.major) == (new, 21)


def test_without_a_java_that_will_do_the_packaged_one_is_taken(old: Path, newest: Path) -> None:
    java = choose_java({"JAVA_HOME": "/nowhere", "PATH": str(old.parent)}, newest)
    assert (java.executable, java.bundled) == (newest, True)


def test_without_any_the_error_says_what_was_found_and_what_to_install(old: Path, tmp_path: Path) -> None:
    broken = fake_java(tmp_path / "broken", "no Java here", status=1)
    with pytest.raises(EmbeddedKafkaError) as failure:
        choose_java({"JAVA_HOME": str(broken.parent.parent), "PATH": str(old.parent)}, None)
    message = str(failure.value)
    assert f"{broken} does not run" in message
    assert f"{old} is Java 8" in message
    assert "Java 17" in message
    assert "pip install 'isthmus[embedded]'" in message


def test_two_builds_differ(new: Path, newest: Path) -> None:
    assert choose_java({"PATH": str(new.parent)}, None).build != choose_java({"PATH": str(newest.parent)}, None).build


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    authority = Authority(tmp_path / "ca")
    authority.create()
    path = tmp_path / "bundle.pem"
    path.write_text(authority.ca_file.read_text() + "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n")
    return path


def test_the_systems_certificates_become_a_store_that_java_reads(bundle: Path, tmp_path: Path) -> None:
    java = find_java()
    keytool = java.home / "bin" / "keytool"
    if not keytool.exists():
        pytest.skip("this Java has no keytool")
    options = trust_options(java, tmp_path, {"SSL_CERT_FILE": str(bundle)})
    settings = dict(option.removeprefix("-D").split("=", 1) for option in options)
    listed = subprocess.run(
        [
            *(keytool, "-list", "-keystore", settings["javax.net.ssl.trustStore"]),
            *("-storepass", settings["javax.net.ssl.trustStorePassword"], "-storetype", "PKCS12"),
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "trustedCertEntry" in listed.stdout  # and the entry that is no certificate is left out
    assert "1 entry" in listed.stdout


def test_a_java_of_the_system_keeps_its_own_certificates() -> None:
    assert trust_options(Java(Path("/usr/bin/java"), 17, "x", bundled=False), Path("/nowhere"), {}) == []


def test_a_trust_store_chosen_by_hand_stays(bundle: Path) -> None:
    java = Java(Path("/usr/bin/java"), 17, "x", bundled=True)
    environment = {"SSL_CERT_FILE": str(bundle), "JAVA_TOOL_OPTIONS": "-Djavax.net.ssl.trustStore=/mine"}
    assert trust_options(java, Path("/nowhere"), environment) == []
