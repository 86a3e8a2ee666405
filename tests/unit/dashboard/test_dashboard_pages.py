"""Pages of the dashboard: true, small, escaped, with each bound beside its figure."""

import asyncio
import html
import json
import re
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import asdict
from html.parser import HTMLParser
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import pytest

from elastic_scheduler import HarvestMode
from elastic_scheduler.capacity import policy_of
from elastic_scheduler.capacity.budget_hold import BudgetLeft
from rose.advise import DeploymentUsage, PrometheusHistory, UsageStep
from rose.advise.advice import Assumed, advice_of
from rose.advise.page import view
from rose.cli.main import COMMANDS
from rose.dashboard import Watch, advisor
from rose.dashboard.advisor import EVERY_OF_PROMETHEUS_S, EVERY_S, advised
from rose.dashboard.model import STATES
from rose.dashboard.page import (
    Cell,
    Page,
    assets,
    count,
    day,
    latency,
    message_of,
    share,
    size,
    span,
    spans,
)
from rose.dashboard.pages import PATHS, ROWS, budget, empty_in
from rose.dashboard.watch import MOST_PAGES
from rose.errors import ConfigError
from rose.scheduler.core.messages import PolicyApplied, QuotasHeard
from scripts.dashboards import dashboards
from tests.harness.dashboard_fleet import GPUS, DashboardFleet
from tests.harness.waiting import PATIENCE_S

HOSTILE = (
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "{{7*7}}{% raw %}",
    "'; DROP TABLE nodes; --",
    "javascript:alert(1)",
    "&lt;b&gt; \N{RIGHT-TO-LEFT MARK}".strip("\N{RIGHT-TO-LEFT MARK}"),
    "n" * 200,
    "page=2&state=off#x",
)
# A page of HTML, its scripts and styles come to less than 150 kB.
MOST_HTML_BYTES = 80_000


Watched = Callable[..., Awaitable[Watch]]


@pytest.fixture
def watched() -> Iterator[Watched]:
    """A function that returns the watch of a fleet which it played for some seconds."""
    watches: list[Watch] = []

    async def watched(fleet: DashboardFleet, seconds: int = 4, prometheus: str = "") -> Watch:
        watch = fleet.watch(prometheus)
        watches.append(watch)
        for _ in range(seconds):
            fleet.play()
            await watch.look()
        return watch

    yield watched
    for each in watches:
        each.close()


async def page_of(watch: Watch, path: str = "/", **query: str) -> str:
    text = await watch.page(path, query)
    assert text is not None
    return text


class Checked(HTMLParser):
    """Fails at what no page may have: a script of its own, a handler, a tag that is left open."""

    VOID = frozenset({"meta", "link", "input"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.regions: list[str] = []
        self.said = ""
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        assert tag not in ("img", "iframe", "object", "b", "style")
        assert tag != "script" or (given["src"] or "").startswith("/static/")
        assert not [name for name in given if name.startswith("on") or name == "style"]
        self.ids += [given["id"] or ""] if "id" in given else []
        self.links += [given["href"] or ""] if tag == "a" else []
        self.regions += [given["aria-label"] or ""] if given.get("role") == "region" else []
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        assert not (data.strip() and self.open[-1] == "script")
        # A section is called by its heading.
        self.regions += [data] if self.open and self.open[-1] == "h2" else []
        self.said += data


async def test_a_job_that_its_quota_holds_back_says_why(watched: Watched) -> None:
    fleet = DashboardFleet(quotas={"grpo": "training"})
    fleet.act(QuotasHeard(fleet.now_s, {"grpo": 0}))
    said = Checked(await page_of(await watched(fleet))).said
    assert "no guests: none of its placeholder pods runs; kubectl get pods -n training" in said


async def test_the_front_page_answers_the_eight_questions(watched: Watched) -> None:
    fleet = DashboardFleet()
    watch = await watched(fleet)
    fleet.leave(19)
    await watch.look()
    said = Checked(await page_of(watch)).said
    for title in ("Cluster", "Hosts and guests", "Budget", "Versions", "Leases", "Bytes"):
        assert title in said
    assert [state for state in STATES if f"{state} " not in said] == []
    assert "Active: what policies allow is lent" in said
    assert "Hosts over their target2 of 20, at most 0" in said
    assert re.search(r"late: \d+ ms / 500 ms", said)
    assert re.search(r"\d+\.\d GiB of \d+\.\d GiB that policies allow", said)
    assert (worth := re.search(r"used(\d+\.\d) of (\d+\.\d) GPUs' idle compute", said))
    # Guests of a node take turns on its GPUs.
    worked = (GPUS * sum(g.duty for g in row.leased_guests) for row in watch._model.nodes)
    assert float(worth[1]) == pytest.approx(sum(min(GPUS, each) for each in worked), abs=0.1)
    idle = [row.seen.advice.now.compute for row in watch._model.nodes if row.seen]
    assert float(worth[2]) == pytest.approx(GPUS * sum(filter(None, idle)), abs=0.1)
    assert "none since 2026-" in said
    assert re.search(r"\d+ newest, \d+ behind by 1", said)


@pytest.mark.parametrize("advisory", [False, True])
async def test_links_dashboards_and_commands_that_pages_name_exist(
    watched: Watched, advisory: bool
) -> None:
    watch = await watched(DashboardFleet(advisory=advisory), prometheus="http://127.0.0.1:1")
    titles = {each.title for each in dashboards()}
    asked, due = set[str](), {"/", *PATHS}
    while due:
        path = due.pop()
        asked.add(path)
        parts = urlsplit(path)
        text = await page_of(watch, parts.path, **dict(parse_qsl(parts.query)))
        page = Checked(text)
        for link in page.links:
            assert not link.startswith("#") or link[1:] in page.ids
        due |= {each for each in page.links if each.startswith("/")} - asked
        for file in re.findall(r"/static/([\w.]+)", text):
            assert file in assets()
        named = re.findall(r"Grafana dashboard ([^.;]+)[.;]", page.said)
        assert set(named) <= titles, path
        words = re.findall(r"\brose ([a-z][a-z-]+)", re.sub("[`\u201c]", " ", page.said))
        assert set(words) - {"advise"} <= set(COMMANDS), path
    assert len(asked) > 40
    assert {"/?range=7d", "/node?name=serving-0001&range=6h"} - asked == (
        {"/?range=7d"} if advisory else set()
    )


async def test_without_its_prometheus_charts_have_the_last_ten_minutes_and_a_line(
    watched: Watched,
) -> None:
    watch = await watched(DashboardFleet(3), prometheus="http://127.0.0.1:1")
    for path in ("/", "/node"):
        text = await page_of(watch, path, name="serving-0001", range="24h")
        assert "http://127.0.0.1:1 does not answer" in text
        assert text.count("the last ten minutes are shown") == 1
        assert "the last ten minutes" not in await page_of(watch, path, name="serving-0001")
    assert await watch.series({"range": "24h"}) == await watch.series({})
    assert "?range=" not in await page_of(await watched(DashboardFleet(1)))
    with pytest.raises(ConfigError, match="give http://HOST:PORT"):
        DashboardFleet(1).watch("prometheus:9090")


async def test_history_of_days_is_that_of_the_named_prometheus(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, float]] = []

    def ranged(
        self: object, query: str, start_s: float, end_s: float, step_s: float
    ) -> dict[object, dict[float, float]]:
        asked.append((query, step_s))
        if "node=" in query:  # no chart set this label
            return {}
        value = 3.0 * (1 << 30) if "kv_bytes" in query else 7.0
        return {(): {start_s: value, end_s: value}}

    monkeypatch.setattr(PrometheusHistory, "range", ranged)
    watch = await watched(DashboardFleet(3), prometheus="http://prometheus:9090")
    series = await watch.series({"range": "7d"})
    assert series is not None
    times, kv_gib, tok_s, late = series["charts"]["fleet"]  # type: ignore[index]
    assert (len(times), times[-1] - times[0]) == (240, 239 * 2_520)
    assert (kv_gib[0], kv_gib[1], kv_gib[-1], tok_s[0], late[0]) == (3.0, None, 3.0, 7.0, 7.0)
    assert {step_s for _, step_s in asked} == {2_520}
    assert all('cluster=~"prod|"' in query for query, _ in asked)
    assert len(asked) == 4
    page = await page_of(watch, "/", range="7d")
    assert "3.0 GiB" in page
    assert len(asked) == 4, "readers share an answer"
    assert (await anext(watch.messages("/", {"range": "7d"}))).count(b"[null]") == 1
    node = await watch.series({"node": "serving-0001", "range": "6h"})
    assert node is not None
    assert node["charts"]["latency"][1][0] == 7_000.0  # type: ignore[index]
    assert any('instance=~"serving\\\\-0001(:[0-9]+)?"' in query for query, _ in asked)
    assert await watch.series({"node": "nobody", "range": "6h"}) is None


async def test_in_advisory_the_first_page_has_the_figures_of_rose_advise(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Beside tests that take all cores, a process of low priority would not come to an end.
    monkeypatch.setattr(advisor, "NICE", 0)
    fleet = DashboardFleet(2, advisory=True)
    watch = await watched(fleet, 60)
    assert "figures come then" in await page_of(watch)
    for _ in range(125):
        fleet.play()
        await watch.look()
    async with asyncio.timeout(4 * PATIENCE_S):
        while "advised-sums" not in (text := await page_of(watch)):
            await asyncio.sleep(0.05)
            await watch.look()
    usages = watch._history.usages()
    assert [(each.name, each.engines) for each in usages] == [("chat-0", 1), ("chat-1", 1)]
    made = view(advice_of(usages, Assumed(ttft_s=0.5, tpot_s=0.05, unsized="8b")))
    page = Checked(text)
    for table in made.tables:
        for row in table.rows:
            assert [str(cell) for cell in row if str(cell) not in page.said] == []
    assert "nothing was lent: tokens and users' p99 with lending are simulated" in page.said
    assert "0 B of" not in page.said
    assert "chart-fleet" not in page.ids
    assert page.said.index("What lending would bring") < page.said.index("Is it on")


def test_advice_without_its_prometheus_is_by_what_hosts_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    steps = [asdict(UsageStep(60.0 * n, 2.0, 0.5, 1.0, 100.0, 20.0)) for n in range(10)]
    usage = asdict(DeploymentUsage("chat", "", 60.0, 600.0, ())) | {"moments": steps}
    down = {"url": "http://127.0.0.1:1", "usages": [usage], "s": (0.0, 0.0)}
    found = advised(down, 0.0)
    assert "does not answer" in found["lines"][0]
    assert found["lines"][1].startswith("by what hosts said")
    assert (found["tables"][0][1][0][0], found["good_s"]) == ("chat", EVERY_S)
    assert len(advised({**down, "usages": []}, 0.0)["lines"]) == 1
    known = DeploymentUsage("vllm", "Qwen3-8B", 60.0, 600.0, (UsageStep(**steps[0]),))
    monkeypatch.setattr(PrometheusHistory, "usages", lambda *_: [known])
    found = advised(down, 0.0)
    assert (found["tables"][0][1][0][0], found["good_s"]) == ("vllm", EVERY_OF_PROMETHEUS_S)


@pytest.mark.parametrize(
    ("left", "shown", "empty"),
    [
        (None, "no data", "no data"),
        (BudgetLeft(-0.33, 150, 720.0), "150 requests in 12 min: too few", "after a day of data"),
        (BudgetLeft(0.1, 5_000, 720.0), "10% by 12 min of data", "after a day of data"),
        (BudgetLeft(0.1, 5_000, 172_800.0), "10% by 2.0 d of data", "3.0 d"),
        (BudgetLeft(-0.1, 5_000, 2_592_000.0), "-10%", "now"),
    ],
)
def test_a_budget_says_how_much_data_it_is_of(
    left: BudgetLeft | None, shown: str, empty: str
) -> None:
    assert budget(left, 0.99).text == shown
    assert empty_in(left, 1.0) == empty


async def test_every_page_is_well_formed_and_names_each_cell_and_region_once(
    watched: Watched,
) -> None:
    watch = await watched(DashboardFleet())
    for path in PATHS:
        page = Checked(await page_of(watch, path, name="serving-0004"))
        assert len(set(page.ids)) == len(page.ids)
        assert all(link.startswith(("/", "#")) for link in page.links)
        assert len(set(page.regions)) == len(page.regions), path


async def test_names_from_outside_are_text_wherever_they_stand(watched: Watched) -> None:
    fleet = DashboardFleet(20, HOSTILE)
    watch = await watched(fleet)
    fleet.set_harvest(HarvestMode.HOLD, by="<b>eve</b>")
    fleet.trouble.append("<b>disk</b>")
    await watch.look()
    for path in PATHS:
        page = Checked(await page_of(watch, path))
        if path in ("/", "/nodes", "/leases"):
            assert HOSTILE[0] in page.said
        if path == "/nodes":
            links = [link for link in page.links if "/node?" in link]
            assert len(links) == 20
            assert not [link for link in links if set(link) & set("<>\"' {}")]
        assert "<b>disk</b>" in page.said
    assert "<b>eve</b>" in Checked(await page_of(watch, "/decisions")).said
    for name in HOSTILE:
        assert name in Checked(await page_of(watch, "/node", name=name)).said
    for asked in HOSTILE:
        Checked(await page_of(watch, "/nodes", q=asked, state=asked, page=asked))
        Checked(await page_of(watch, "/decisions", kind=asked, node=asked))
        Checked(await page_of(watch, "/leases", job=asked))
    assert "No node &#39;nobody&#39;" in await page_of(watch, "/node", name="nobody")


async def test_nodes_worth_a_look_come_first(watched: Watched) -> None:
    fleet = DashboardFleet()
    watch = await watched(fleet, 15)
    fleet.leave(0)
    await watch.look()
    rows = re.findall(r'id="nodes\.\d+\.([01])"[^>]*>([^<]+)<', await page_of(watch, "/nodes"))
    names = [text for column, text in rows if column == "0"]
    states = [text for column, text in rows if column == "1"]
    assert names[:2] == ["serving-0004", "serving-0014"]  # late, and they lend
    assert states[2:5] == ["silent", "silent", "away 0 s"]
    assert states[-2:] == ["advisory", "advisory"]


async def test_a_list_shows_a_part_and_leads_to_the_others(watched: Watched) -> None:
    fleet = DashboardFleet(ROWS * 2 + 5)
    watch = await watched(fleet, 1)
    first = await page_of(watch, "/nodes")
    assert f"1 to {ROWS} of {2 * ROWS + 5} nodes" in first
    assert 'href="/nodes?page=2"' in first
    last = await page_of(watch, "/nodes", page="99")
    assert f"{2 * ROWS + 1} to {2 * ROWS + 5} of {2 * ROWS + 5} nodes" in last
    for asked in ("-1", "x", "1e9", "0", "9" * 99):
        assert f"1 to {ROWS} of" in await page_of(watch, "/nodes", page=asked)
    found = await page_of(watch, "/nodes", q="serving-0007", state="advisory")
    assert "1 to 1 of 1 nodes" in found
    assert 'value="serving-0007"' in found
    assert "No node is like that." in await page_of(watch, "/nodes", q="nobody")


async def test_a_standby_says_that_it_is_one_and_names_the_leader(watched: Watched) -> None:
    fleet = DashboardFleet(3)
    watch = await watched(fleet, 1)
    fleet.stands_by = True
    await watch.look()
    for path in PATHS:
        said = Checked(await page_of(watch, path)).said
        assert "Standby: the scheduler at 10.0.0.2:7400 leads" in said
        assert "KV memory lent" not in said


@pytest.mark.parametrize(
    ("mode", "words"),
    [
        (HarvestMode.HOLD, "Held by the operator"),
        (HarvestMode.HOLD_AND_DRAIN, "Draining by the operator"),
        (HarvestMode.OFF, "Stopped by the operator"),
    ],
)
async def test_a_stop_is_on_every_page_with_who_ordered_it(
    watched: Watched, mode: HarvestMode, words: str
) -> None:
    fleet = DashboardFleet(3)
    watch = await watched(fleet, 1)
    fleet.set_harvest(mode)
    await watch.look()
    for path in PATHS:
        assert words in await page_of(watch, path)
    front = Checked(await page_of(watch)).said
    assert f"harvest set (mode {mode.value}, released 0) by operator ada, 2026-" in front


async def test_a_policy_without_a_mode_is_shown_beside_others(watched: Watched) -> None:
    fleet = DashboardFleet(3)
    fleet.act(PolicyApplied(policy_of({"name": "incident", "stopPolicy": "HoldAndDrain"})))
    watch = await watched(fleet, 1)
    assert "incidentnoneHoldAndDrain" in Checked(await page_of(watch)).said


async def test_what_nobody_said_is_never_zero(watched: Watched) -> None:
    fleet = DashboardFleet(1)
    watch = await watched(fleet, 0)
    await watch.look()
    said = Checked(await page_of(watch)).said
    assert "KV memory lent0 B of no data" in said
    assert "Guest tokensno data" in said
    nodes = await page_of(watch, "/nodes")
    assert nodes.count(">no data<") >= 4


async def test_a_page_of_a_thousand_nodes_is_small_and_so_are_its_updates(watched: Watched) -> None:
    fleet = DashboardFleet(300)  # what a page shows hangs on its rows, not on the fleet's
    watch = await watched(fleet, 2)
    for path in PATHS:
        text = await page_of(watch, path, name="serving-0004")
        assert len(text.encode()) < MOST_HTML_BYTES
    updates = watch.messages("/nodes", {})
    first = await anext(updates)
    fleet.play()
    await watch.look()
    second = await anext(updates)
    assert len(first) < 40_000
    assert len(second) < 20_000
    await updates.aclose()


async def test_readers_of_one_page_share_it_and_made_up_addresses_are_not_kept(
    watched: Watched,
) -> None:
    watch = await watched(DashboardFleet(3), 1)
    for number in range(2 * MOST_PAGES):
        assert await page_of(watch, "/nodes", q=f"nobody-{number}")
    assert len(watch._pages) == MOST_PAGES
    await watch.look()
    first = await page_of(watch)
    assert await page_of(watch) is first
    assert len(watch._pages) == 1


def page_with(*rows: tuple[str, ...], text: str = "3", at: str = "/") -> Page:
    page = Page("T", at, Cell("Active"))
    page.cell("mode", page.mode)
    page.row("f").fact("a", text, "good")
    for number, (name, *cells) in enumerate(rows):
        row = page.row(f"t.{number}", ("",) * len(cells))
        for each in cells:
            row.cell(each, name=name)
    return page


def message(page: Page, before: Page) -> dict[str, object]:
    said = message_of(page, before.cells, 0.0).decode()
    assert said.startswith("data: ")
    assert said.endswith("\n\n")
    return dict(json.loads(said.removeprefix("data: ")))


def test_an_update_has_the_cells_that_changed_and_no_others() -> None:
    before, after = page_with(("n0", "a", "b")), page_with(("n0", "a", "b"), text="4")
    said = message(after, before)
    assert said["c"] == {"f.0": ["4", "good", "", None]}
    assert said["s"] == before.structure() == after.structure()
    assert message(after, after)["c"] == {}


def test_other_rows_are_another_page_and_other_texts_are_not() -> None:
    one, other = ("n0", "a"), ("n1", "a")
    assert page_with(one).structure() != page_with(other).structure()
    assert page_with(one, other).structure() != page_with(other, one).structure()
    assert page_with(("n0", "z")).structure() == page_with(one).structure()
    assert page_with(one).structure() != page_with(one, at="/nodes").structure()


def test_a_cell_is_escaped_with_all_its_attributes() -> None:
    hostile = '"><b>'
    made = str(Cell(hostile, "bad", f"/node?name={hostile}", hostile).html("t.0"))
    assert "<b>" not in made
    assert html.unescape(made).count(hostile) == 3


@pytest.mark.parametrize(
    ("shown", "given", "texts"),
    [
        (size, (None, 0, 1023, 38 << 30, 1 << 60), "no data|0 B|1023 B|38.0 GiB|1024.0 PiB"),
        (share, (None, 0.0, 0.612), "no data|0%|61%"),
        (latency, (None, 0.0042, 0.42, 1.3), "no data|4.2 ms|420 ms|1.30 s"),
        (span, (None, 3, 119, 300, 7_560, 345_600), "no data|3 s|119 s|5 min|2.1 h|4.0 d"),
        (count, (None, 1_234_567), "no data|1 234 567"),
        (day, (0.0,), "1970-01-01 00:00:00 UTC"),
    ],
)
def test_figures_have_units(shown: Any, given: tuple[Any, ...], texts: str) -> None:
    assert list(map(shown, given)) == texts.split("|")


def test_a_bar_has_shares_of_a_hundred() -> None:
    assert spans([1.0, 3.0]) == [(0.0, 25.0), (25.0, 75.0)]
    assert spans([0.0]) == [(0.0, 0.0)]
