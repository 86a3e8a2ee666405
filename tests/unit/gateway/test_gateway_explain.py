"""Every placement can be asked why, over HTTP and from the command line."""

import asyncio

import aiohttp
import pytest
from gateway_cases import base_url, entry, gateway_with

from rose.cli.cluster.explain import explain
from rose.errors import ConfigError, RefusedError, UnavailableError
from tests.fakes.replica import StandInReplica


async def test_a_trajectory_can_be_asked_why() -> None:
    async with StandInReplica() as one, StandInReplica() as two:
        rows = entry(one, "guest-0"), entry(two, "own-0")
        async with gateway_with(*rows) as gateway, aiohttp.ClientSession() as http:
            for turn in ("q1", "q2"):
                body = {
                    "token_ids": [1, 2],
                    "request_id": turn,
                    "sampling_params": {"max_tokens": 4},
                }
                url = f"{base_url(gateway)}/inference/v1/generate"
                headers = {"X-Session-ID": "episode/1"}
                async with http.post(url, json=body, headers=headers) as reply:
                    assert reply.status == 200
            async with http.get(f"{base_url(gateway)}/rose/v1/explain/episode%2F1") as reply:
                told = await reply.json()
            assert [each["request_id"] for each in told["decisions"]] == ["q1", "q2"]
            first, second = told["decisions"]
            assert second["replica"] == first["replica"]
            assert {name for name, _ in first["weighed"]} == {"guest-0", "own-0"}
            assert second["why"] == "holds the prefix"
            assert 0 <= second["age_s"] < 60
            found = await asyncio.to_thread(explain, base_url(gateway), "episode/1")
            lines = [str(line) for line in found.lines]
            assert len(lines) == 2
            assert f"q2  -> {first['replica']}: holds the prefix" in lines[1]
            with pytest.raises(RefusedError, match="remembers no choice for 'unheard'"):
                await asyncio.to_thread(explain, base_url(gateway), "unheard")


def test_a_gateway_that_is_not_there_is_one_line() -> None:
    with pytest.raises(UnavailableError, match="no gateway answers"):
        explain("http://127.0.0.1:1", "x")
    with pytest.raises(ConfigError, match="write http"):
        explain("file:///etc", "x")
