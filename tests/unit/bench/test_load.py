"""Loads: arrivals have the rate and the shape that is asked for, and a failed request counts."""

import json
import statistics
import time
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from bench.load.generator import CompletionBody, complete
from bench.load.protocol import LoadShape, generate_segment, rescale_trace
from rose.azure_trace import TracedRequest


def test_a_replayed_segment_is_identical_bursty_and_within_its_limits() -> None:
    shape = LoadShape(mean_rate_per_s=5, segment_s=3600)
    arrivals = generate_segment(shape, 1, 0)
    assert arrivals == generate_segment(shape, 1, 0) != generate_segment(shape, 1, 1)
    offsets = [arrival.offset_s for arrival in arrivals]
    assert offsets == sorted(offsets)
    assert all(8 <= a.prompt_tokens <= 96 and 4 <= a.output_tokens <= 16 for a in arrivals)
    assert len(arrivals) / 3600 == pytest.approx(5, rel=0.1)
    per_second = [0] * 3600
    for offset_s in offsets:
        per_second[min(3599, int(offset_s))] += 1
    # A Poisson load has an index of dispersion of 1.
    assert statistics.variance(per_second) / statistics.mean(per_second) > 3


def test_a_rescaled_trace_has_the_target_rate_and_lengths_the_host_can_serve() -> None:
    trace = [TracedRequest(k * k * 0.01, 100 + 70 * k, 10 + k) for k in range(200)]
    rescaled = rescale_trace(trace, LoadShape(mean_rate_per_s=8))
    assert len(rescaled) / rescaled[-1].offset_s == pytest.approx(8)
    assert all(8 <= a.prompt_tokens <= 96 and 4 <= a.output_tokens <= 16 for a in rescaled)
    assert rescaled[150].offset_s / rescaled[75].offset_s == pytest.approx(4, rel=1e-3)


@pytest.mark.parametrize(
    ("fault", "status"),
    [("", "ok"), ("busy", "http_503"), ("short", "broken"), ("cut", "client_")],
)
async def test_whatever_a_host_does_wrong_is_the_status_of_the_request(
    fault: str, status: str
) -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        asked: dict[str, Any] = await request.json()
        if fault == "busy":
            return web.json_response({}, status=503)
        response = web.StreamResponse()
        await response.prepare(request)
        sent = 2 if fault == "short" else asked["max_tokens"]
        await response.write(b'data: {"choices":[{"token_ids":[7]}],"usage":null}\n\n' * sent)
        if fault == "cut":
            assert request.transport is not None
            request.transport.abort()
            return response
        usage = json.dumps({"choices": [], "usage": {"completion_tokens": sent}})
        await response.write(f"data: {usage}\n\ndata: [DONE]\n\n".encode())
        return response

    app = web.Application()
    app.router.add_post("/v1/completions", answer)
    async with TestServer(app) as server, aiohttp.ClientSession() as http:
        body = CompletionBody("host", [1, 2], 6, return_token_ids=True)
        due_s = time.monotonic() - 0.5
        found = await complete(http, str(server.make_url("/v1/completions")), body, "r", due_s)
    assert found.status.startswith(status)
    assert found.e2e_s > 0.5, "times count from when the request was due"
    assert (found.output_digest is not None) == (not fault)
