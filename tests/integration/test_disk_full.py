"""A target whose disk is full: nothing is lost, it shows, and it goes on when there is space and the broker is back."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.kafka import Clusters
from support.links import linked, until

from isthmus_bench.kafka import KafkaCluster

pytestmark = pytest.mark.brokers
SMALL, LARGE = "48m", "512m"
PARTITIONS = 3
VALUE = bytes(range(256)) * 40
RECORDS = 3000
"""Of each partition: together well more than the small disk holds."""


class Disk:
    """A file system in memory, of a size that can be changed."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def mount(self, *options: str) -> bool:
        return subprocess.run(["mount", *options, str(self.path)], check=False, capture_output=True).returncode == 0

    def grow(self) -> None:
        assert self.mount("-o", f"remount,size={LARGE}")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    made = Disk(tmp_path / "disk")
    made.path.mkdir()
    if not made.mount("-t", "tmpfs", "-o", f"size={SMALL}", "tmpfs"):
        pytest.skip("file systems cannot be mounted here")
    yield made
    subprocess.run(["umount", "--lazy", str(made.path)], check=True)


@pytest.mark.one_in_ci("stories", of="faults of records")
def test_a_full_disk_of_the_target(disk: Disk, kafka: KafkaCluster, kafka_cluster: Clusters) -> None:
    full = kafka_cluster(name="full", directory=disk.path / "cluster")
    with linked(kafka, full) as link:
        link.attach()
        source, target = link.names("full")
        link.a.create_topic(source, PARTITIONS, direct=True)
        for partition in range(PARTITIONS):
            link.a.produce(source, [b"before"], partition, direct=True)
            link.wait_end(target, 1, partition)
        link.wait_following()
        for partition in range(PARTITIONS):
            values = [b"%d " % number + VALUE for number in range(RECORDS)]
            link.a.produce(source, values, partition, direct=True, enable_idempotence=partition == 1)
        until("the broker has no disk any more", lambda: not full.alive(1), 120)

        def shows() -> bool:
            behind = [each for each in link.a.partitions(link.name, source) if each["partition_mirror_lag"]]
            reasons = {each["reason"] for each in link.b.partitions(link.name, target)}
            return bool(behind) and all(each["state"] != "Following" for each in behind) and any(reasons)

        until("it shows", shows, 60)
        link.a.produce(source, [b"meanwhile"], direct=True)
        disk.grow()
        full.start_broker(1)
        for partition in range(PARTITIONS):
            link.wait_end(target, RECORDS + (2 if partition == 0 else 1), partition, timeout_s=120)
        link.wait_following()
        verdicts = [each for each in link.verify()["partitions"] if each["topic"] == source]
        assert len(verdicts) == PARTITIONS
        assert all(each["equal"] for each in verdicts), verdicts
