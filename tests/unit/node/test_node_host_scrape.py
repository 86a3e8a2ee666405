"""A host without the plugin is watched through /metrics, cautiously."""

import asyncio
from collections.abc import Iterator

import aiohttp
import pytest
from aiohttp import web

from rose.node.host import STALE_S, HostScrape, watch
from tests.harness.waiting import PATIENCE_S


def page(ttft: tuple[int, int, int], tpot: tuple[int, int, int], running: int = 0) -> str:
    """Cumulative counts at 0.25 s, 0.5 s and in all (TTFT); 0.1, 0.15 and in all (TPOT)."""

    def histogram(name: str, bounds: tuple[str, ...], counts: tuple[int, ...]) -> Iterator[str]:
        yield f"# TYPE {name} histogram"
        for bound, count in zip(bounds, counts, strict=True):
            yield f'{name}_bucket{{le="{bound}",model_name="m"}} {count}'
        yield f'{name}_sum{{model_name="m"}} {counts[-1] * 0.1}'
        yield f'{name}_count{{model_name="m"}} {counts[-1]}'

    return "\n".join(
        [
            *histogram("vllm:time_to_first_token_seconds", ("0.25", "0.5", "+Inf"), ttft),
            *histogram("vllm:request_time_per_output_token_seconds", ("0.1", "0.15", "+Inf"), tpot),
            "# TYPE vllm:num_requests_running gauge",
            f'vllm:num_requests_running{{model_name="m"}} {running}',
            "# TYPE vllm:num_requests_waiting gauge",
            'vllm:num_requests_waiting{model_name="m"} 0',
            "",
        ]
    )


def test_requests_before_the_first_scrape_are_nobodys_and_each_miss_counts() -> None:
    scrape = HostScrape(0.5, 0.15)
    scrape.take(page((0, 0, 9), (0, 0, 9)), 0.0)
    assert (scrape.good, scrape.bad) == (0, 0)
    scrape.take(page((8, 8, 19), (7, 8, 19)), 1.0)
    assert (scrape.good, scrape.bad) == (6, 4), "2 missed TTFT, 2 TPOT: 4 requests at worst"
    scrape.take(page((8, 8, 22), (7, 8, 22)), 2.0)
    assert (scrape.good, scrape.bad) == (6, 7), "3 missed both: 3 requests at most"


def test_a_target_between_two_buckets_is_judged_by_the_lower_one() -> None:
    scrape = HostScrape(0.4, 1.0)
    scrape.take(page((0, 0, 0), (0, 0, 0)), 0.0)
    scrape.take(page((3, 10, 10), (10, 10, 10)), 1.0)
    assert (scrape.good, scrape.bad) == (3, 7)


def test_a_host_that_was_restarted_counts_anew() -> None:
    scrape = HostScrape(0.5, 0.15)
    scrape.take(page((90, 90, 90), (90, 90, 90)), 0.0)
    scrape.take(page((5, 5, 5), (5, 5, 5)), 1.0)
    assert (scrape.good, scrape.bad) == (5, 0)


def test_the_busy_share_is_that_of_scrapes_which_found_work_and_old_ones_say_nothing() -> None:
    scrape = HostScrape(0.5, 0.15)
    assert scrape.busy_share(0.0) is None
    for second in range(10):
        scrape.take(page((0, 0, 0), (0, 0, 0), running=2 * (second < 3)), float(second))
    assert scrape.busy_share(9.0) == pytest.approx(0.3)
    assert scrape.running(9.0) == (0, 0)
    assert scrape.summary(9.0).window_requests == 0
    assert scrape.busy_share(9.0 + STALE_S) is None
    assert scrape.running(9.0 + STALE_S) is None


def test_what_is_no_exposition_is_a_line_and_counts_nothing() -> None:
    scrape = HostScrape(0.5, 0.15)
    scrape.take("<html>", 0.0)
    assert "no known engine" in scrape.trouble
    scrape.take(page((0, 0, 0), (0, 0, 0)), 1.0)
    assert not scrape.trouble


async def test_a_host_is_asked_again_after_it_did_not_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rose.node.host.EVERY_S", 0.01)
    asked = 0

    async def metrics(_: web.Request) -> web.Response:
        nonlocal asked
        asked += 1
        if asked == 1:
            return web.Response(status=503)
        return web.Response(text=page((asked, asked, asked), (asked, asked, asked)))

    app = web.Application()
    app.router.add_get("/metrics", metrics)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    scrape = HostScrape(0.5, 0.15)
    async with aiohttp.ClientSession() as http:
        watching = asyncio.create_task(watch(f"http://127.0.0.1:{port}/metrics", scrape, http))
        async with asyncio.timeout(PATIENCE_S):
            while not scrape.good:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        watching.cancel()
    await runner.cleanup()
    assert not scrape.bad
