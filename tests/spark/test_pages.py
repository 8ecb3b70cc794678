"""The pages of reports in a real browser: all is inside, drawn, and within reach, on a wide screen and on a phone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from pyspark.sql import SparkSession
from support.browser import Browser, browser, opened
from support.captured import event, link_event, links_file, produced, requests_file, told

from isthmus_bench.captured import generate
from isthmus_spark.all_reports import make_all
from isthmus_spark.audit.page import audit_report

pytestmark = pytest.mark.brokers  # a JVM as well

TOPIC: Final = "pay-" + "a-very-long-name." * 14
CLIENT: Final = "client-" + "of-some-team." * 9
"""As long as Kafka lets them be, or people have them."""
ROUND_TRIP_US: Final = 5000
PLOTS: Final = {
    "latency": 4,
    "rejections": 0,
    "hot": 0,
    "exactly-once": 0,
    "lag-and-states": 3,
    "sync": 3,
    "audit": 1,
    "index": 0,
}
TABLES: Final = {
    "latency": 4,
    "rejections": 1,
    "hot": 1,
    "exactly-once": 1,
    "lag-and-states": 4,
    "sync": 6,
    "audit": 2,
    "index": 1,
}


def captured(directory: Path) -> None:
    """Traffic in which each job finds something, some of it with long names."""
    generate(directory, 4000, 1, True, lambda _: None)
    long: dict[str, Any] = {"topic": TOPIC, "client_id": CLIENT, "namespace": TOPIC[:200]}
    requests = [produced(n, n, 100, n / 10, **long, gate_us=ROUND_TRIP_US, correlation_id=n) for n in range(300)]
    requests += [produced(n, n, 1, n / 10, **{**long, "client_id": f"small-{CLIENT}"}) for n in range(120)]
    requests += [event(0, **long, broker_us=-1, response_bytes=60, error_code=42, client_address="[2001:db8::1]:9")]
    requests_file(directory / "topic=long" / "1-p-00000000.capture", *requests)
    links: list[dict[str, Any]] = []
    for name, topic in (("a-to-b", "pay-t"), (f"link-{CLIENT}", TOPIC)):
        known = {"link": name, "topic": topic}
        links += [told("Following", 0, **known)]
        cut = {**known, "reason": "CONNECTION_LOST: the connection to the other cluster's proxy was lost"}
        links += [told("Disconnected", n, lag=len(name) * n, lag_ms=1000 * n, **cut) for n in range(5, 20)]
        links += [told("Catching Up", 20, lag=300, lag_ms=900, **known), told("Following", 22, **known)]
        for n in range(30):
            links += [link_event("appended", n, role="follower", took_us=500, **known)]
            links += [link_event("confirmed", n, cluster="c", took_us=500 + ROUND_TRIP_US, **known)]
    links_file(directory / "topic=long" / "1-p-00000000.links", *links)


def audited() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Partitions, findings."""
    partitions = [
        {"left_topic": topic, "right_topic": f"A.{topic}", "partition": 0, "state": "different", "compared_from": 0}
        | {"compared_to": 10**9, "left_records": 10**9, "right_records": 10**9 - 1, "lag": 12_345, "buckets": 15_259}
        | {"differing_buckets": 1}
        for topic in ("pay-t", TOPIC)
    ]
    finding = {"finding": "value differs", "left_topic": TOPIC, "right_topic": f"A.{TOPIC}", "partition": 0}
    offsets = {"first_offset": 7, "last_offset": 7, "records": 1, "left_offset": None, "right_offset": None}
    return partitions, [{**finding, "group_id": None, **offsets}]


@pytest.fixture(scope="module")
def pages(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Their directory."""
    directory = tmp_path_factory.mktemp("pages")
    captured(directory / "capture")
    made = [page.stem for page, _ in make_all(spark, directory / "capture", directory / "reports")]
    assert made == [name for name in PLOTS if name != "audit"]
    partitions, findings = audited()
    about = {"left": "east-1.kafka.example.com:9092,east-2.kafka.example.com:9092", "right": "west:9092"}
    page = audit_report(partitions, findings, {"positions": 3, "waiting": 1}, about)
    page.write(directory / "reports" / "audit.html")
    return directory / "reports"


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("browser") / "profile") as started:
        yield started


OUTSIDE: Final = """
(() => {
  const scrolls = (each) => getComputedStyle(each).overflowX === 'auto';
  const within = (each) => each.parentElement !== null && (scrolls(each.parentElement) || within(each.parentElement));
  const place = (each) => each.getBoundingClientRect();
  return [...document.body.querySelectorAll('*')]
    .filter((each) => !within(each) && (place(each).left < -0.5 || place(each).right > innerWidth + 0.5))
    .map((each) => `${each.tagName} ${each.textContent.slice(0, 40)}`)
    .concat(document.documentElement.scrollWidth > innerWidth ? ['the page scrolls sideways'] : []);
})()
"""
"""Elements that are not within the page's width, and not in one that can be scrolled."""
PLOTTED: Final = """
[...document.querySelectorAll('svg')].map((svg) => {
  const frame = svg.getBoundingClientRect();
  const shapes = [...svg.querySelectorAll('rect, polyline')].map((each) => each.getBoundingClientRect());
  const cut = [...svg.querySelectorAll('*')].filter((each) => each.tagName !== 'title').filter((each) => {
    const place = each.getBoundingClientRect();
    return place.left < frame.left - 1 || place.right > frame.right + 1
        || place.top < frame.top - 1 || place.bottom > frame.bottom + 1;
  });
  const letters = [...svg.querySelectorAll('text')].map((each) => each.getBoundingClientRect().height);
  return {
    area: frame.width * frame.height,
    drawn: shapes.filter((each) => each.width * Math.max(each.height, 1) > 0).length,
    cut: cut.map((each) => each.textContent),
    smallest: Math.min(...letters),
  };
})
"""
TABLED: Final = """
[...document.querySelectorAll('table')].map((table) => {
  const box = table.parentElement;
  box.scrollLeft = 1e6;
  const last = table.rows[0].cells[table.rows[0].cells.length - 1].getBoundingClientRect();
  const seen = last.width > 0 && last.right <= box.getBoundingClientRect().right + 1;
  box.scrollLeft = 0;
  const first = table.rows[0].cells[0].getBoundingClientRect();
  const scrolls = box.scrollWidth <= box.clientWidth || getComputedStyle(box).overflowX === 'auto';
  return seen && scrolls && first.left >= box.getBoundingClientRect().left - 1 && table.tBodies[0].rows.length > 0;
})
"""
"""Whether the first and the last column can be brought into sight."""


@pytest.mark.parametrize("width", [1200, 400])
@pytest.mark.parametrize("name", PLOTS)
def test_a_page_is_whole_and_within_reach(name: str, width: int, pages: Path, chromium: Browser) -> None:
    url = (pages / f"{name}.html").as_uri()
    with opened(chromium, url, width) as page:
        assert page.requested == [url], "all is inside"
        assert page.errors == []
        assert page.evaluate("innerWidth") == width
        assert page.evaluate("document.querySelector('h1').innerText.length") > 0
        assert page.evaluate(OUTSIDE) == []
        plots = page.evaluate(PLOTTED)
        assert len(plots) == PLOTS[name]
        for plot in plots:
            assert plot["area"] > 200 * 20
            assert plot["drawn"] > 0
            assert plot["cut"] == []
            assert plot["smallest"] > 9, "letters can be read"
        assert page.evaluate(TABLED) == [True] * TABLES[name]


def test_the_index_leads_to_the_other_pages(pages: Path, chromium: Browser) -> None:
    with opened(chromium, (pages / "index.html").as_uri(), 1200) as page:
        leads_to = page.evaluate("[...document.links].map((each) => each.href)")
    assert leads_to == [(pages / f"{name}.html").as_uri() for name in PLOTS if name not in ("audit", "index")]


def test_what_is_wrong_with_a_page_is_seen(tmp_path: Path, chromium: Browser) -> None:
    wide = '<p style="width: 2000px">wide</p>'
    cut = '<svg viewBox="0 0 100 20" width="500"><text x="80" y="10">cut off</text></svg>'
    table = "<div style='overflow: hidden; width: 50px'><table><tr><td>first<td>last out of sight</table></div>"
    script = "<script>console.error('planted'); missing()</script>"
    (tmp_path / "bad.html").write_text(f"<!doctype html>{wide}{cut}{table}<img src='other.png'>{script}")
    with opened(chromium, (tmp_path / "bad.html").as_uri(), 400) as page:
        assert [Path(url).name for url in page.requested] == ["bad.html", "other.png"]
        assert [any(each in error for error in page.errors) for each in ("planted", "missing")] == [True, True]
        outside = page.evaluate(OUTSIDE)
        assert "P wide" in outside
        [plot] = page.evaluate(PLOTTED)
        assert (plot["drawn"], plot["cut"]) == (0, ["cut off"])
        assert page.evaluate(TABLED) == [False]
        assert page.evaluate("innerWidth") > 400, "it does not say that it is made for phones"
