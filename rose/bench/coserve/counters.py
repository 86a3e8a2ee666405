"""Reading engines' own counters at the edges of a block."""

import re

import aiohttp

from executor import ControlPage
from rose.bench.coserve.records import Counters
from rose.errors import UnavailableError

_SAMPLE = r"^vllm:{name}(?:\{{[^}}]*\}})? ([0-9.eE+]+)$"


def metric(text: str, name: str) -> float:
    """Sum over a counter's or gauge's samples in Prometheus' text format; 0 without any."""
    pattern = re.compile(_SAMPLE.format(name=re.escape(name)), re.MULTILINE)
    return sum(float(value) for value in pattern.findall(text))


async def scrape(session: aiohttp.ClientSession, url: str) -> str:
    """The text of an engine's /metrics; UnavailableError when it does not answer."""
    try:
        async with session.get(f"{url}/metrics") as response:
            return await response.text()
    except (aiohttp.ClientError, TimeoutError) as error:
        raise UnavailableError(f"{url}/metrics does not answer: {error!r}") from error


async def read_counters(
    session: aiohttp.ClientSession, page: ControlPage, host_url: str, naive_url: str
) -> Counters:
    """All of them. The page last: it costs nothing, so it is read closest to the moment."""
    naive = await scrape(session, naive_url)
    host = await scrape(session, host_url)
    host_state, guest_state = page.host.peek(), page.guest.peek()
    return Counters(
        host_busy_ns=host_state.busy_ns if host_state else 0,
        host_preemptions=round(metric(host, "num_preemptions_total")),
        guest_tokens=guest_state.tokens_total if guest_state else 0,
        naive_tokens=round(metric(naive, "generation_tokens_total")),
    )
