"""``isthmus bench spark``: what it fits and judges, by hand; and that it runs, on few rows."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from isthmus_bench import spark_report
from isthmus_bench.spark_scale import Figure, Line, NoRoom, Plan, Report, lines_of, run, verdicts_of


def figures(*seconds: float, cores: int = 2) -> list[Figure]:
    return [Figure(10 ** (6 + at), cores, each, 2 * each, 3, 1.0) for at, each in enumerate(seconds)]


def wall(*seconds: float) -> Line:
    return lines_of(2, figures(*seconds))[0]


def test_a_line_is_fitted_by_ratios() -> None:
    line = wall(2.0, 11.0, 101.0)
    assert (line.begins_s, line.per_million_s, line.farthest) == pytest.approx((1.0, 1.0, 0.0), abs=1e-9)
    assert wall(2.0, 20.0, 400.0).farthest > 0.2
    assert wall(2.0).per_million_s == pytest.approx(2.0)
    cpu = lines_of(2, figures(2.0, 11.0, 101.0))[1]
    assert (cpu.time, cpu.per_million_s) == ("CPU", pytest.approx(2.0))


def test_targets() -> None:
    def judged(*seconds: float, cores: int = 2) -> list[bool | None]:
        measured = figures(*seconds, cores=cores)
        return [each.met for each in verdicts_of(measured, lines_of(cores, measured)[:1])]

    assert judged(2.0, 11.0, 101.0) == [True, True]  # 0.99 M/s
    assert judged(3.0, 30.0, 300.0) == [False, True]
    assert judged(1.0, 8.0, 160.0) == [True, False]
    assert judged(1.0, 8.0) == [True, None]
    assert judged(2.0, 11.0, 101.0, cores=1) == [None, True]


def test_a_page_has_a_line_for_each_number_of_cores() -> None:
    measured = [*figures(3.0, 21.0, 201.0, cores=1), *figures(2.0, 11.0, 101.0)]
    lines = [*lines_of(1, measured), *lines_of(2, measured)]
    machine = {"cores": "2", "processor": "x", "Python": "3.11"}
    page = spark_report.page(Report(machine, measured, lines, verdicts_of(measured, lines)))
    assert page.count("<polyline") == 4
    assert "100,000,000" in page
    assert "local[1]" in page


def test_no_room(tmp_path: Path) -> None:
    with pytest.raises(NoRoom, match="GB are needed"):
        run(Plan(rows=(10**12,), directory=tmp_path), lambda _: None)
    assert not list(tmp_path.iterdir())


@pytest.mark.one_in_ci("stories", of="commands of jobs")
@pytest.mark.brokers  # a JVM as well
def test_the_command_measures(tmp_path: Path) -> None:
    page = tmp_path / "scale.html"
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    command = [sys.executable, "-m", "isthmus", "bench", "spark", "--quick", "--cores", "2", "--rows", "3000"]
    command += ["--in", str(scratch), "--report", str(page), "-o", "json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    [figure] = json.loads(done.stdout)["figures"]
    assert (figure["rows"], figure["cores"], figure["runs"]) == (3000, 2, 1)
    assert figure["cpu_s"] > 0
    assert "<svg" in page.read_text()
    assert not list(scratch.iterdir())
