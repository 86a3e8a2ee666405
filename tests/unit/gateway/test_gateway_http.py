import socket
from typing import Any

import pytest

from rose.client import (
    GatewayUnavailable,
    RequestRefused,
    Retry,
    RolloutClient,
    Sampling,
    VersionNotServed,
)
from rose.main.gateway import main
from tests.fakes.replica import StandInReplica
from tests.unit.gateway.gateway_cases import (
    base_url,
    begin,
    calling,
    entry,
    failing_over,
    serving,
    until,
)
from tests.unit.gateway.wire_cases import VLLM, ask, get, vllm_body

BODY = vllm_body(3, request_id="r")


async def test_what_a_replica_refuses_as_wrong_is_not_tried_elsewhere() -> None:
    async with failing_over() as (one, two, _, session):
        one.bad_request = two.bad_request = True
        status, _, _ = await ask(session, VLLM, BODY)
    assert status == 400
    assert len(one.requests) + len(two.requests) == 1


@pytest.mark.parametrize(
    ("path", "fields", "status"),
    [
        (VLLM, {"token_ids": [1] * 5_000}, 413),
        (VLLM, {"token_ids": [1] * 9}, 400),
        (VLLM, {"model": "other"}, 404),
        ("/nowhere", {}, 404),
        (VLLM, {"min_version": 4}, 409),
        (VLLM, {"exact_version": 2}, 409),
        (VLLM, {"exact_version": 3}, 200),
    ],
)
async def test_what_no_replica_can_answer_has_a_status(
    path: str, fields: dict[str, Any], status: int
) -> None:
    settings = {"max_body_bytes": 4_096, "version_wait_s": 0.05}
    async with serving(StandInReplica(3), row={"kv_tokens": 8}, **settings) as (_, _, session):
        got, answer, _ = await ask(session, path, {**BODY, **fields})
    assert (got, "error" in answer) == (status, status != 200)


async def test_a_full_queue_is_429_with_retry_after() -> None:
    async with calling(max_waiting=1) as (gw, session):
        first = begin(session, BODY)
        await until(lambda: gw.status().waiting > 0)
        status, _, headers = await ask(session, VLLM, {**BODY, "request_id": "r2"})
        first.cancel()
    assert (status, headers["Retry-After"]) == (429, "1")


async def test_waiting_ends_with_503() -> None:
    async with calling(queue_wait_s=0.05) as (_, session):
        status, _, headers = await ask(session, VLLM, BODY)
    assert (status, headers["Retry-After"]) == (503, "1")


async def test_stats_metrics_health_and_models() -> None:
    async with serving() as (_, _, session):
        await ask(session, VLLM, BODY)
        stats, text = await get(session, "/rose/v1/stats"), await get(session, "/metrics")
        health, models = await get(session, "/health"), await get(session, "/v1/models")
    assert stats["tokens"] == {"guest-0": 3}
    assert stats["live_turns"] == {"guest-0": 0}
    assert [stats[k] for k in ("turns", "attempts", "continuations", "waiting")] == [1, 1, 0, 0]
    assert 'rose_gateway_tokens_total{replica="guest-0"} 3' in text
    for line in text.splitlines():
        if line.startswith("# TYPE "):
            assert f"# HELP {line.split()[2]} " in text, "each metric says what it is"
    assert health == {
        "status": "ok",
        "troubles": [],
        "log_dropped": 0,
        "replicas": 1,
        "unversioned": {},
    }
    assert models["data"][0]["id"] == "rose-policy"


async def test_a_replica_that_is_gone_leaves_no_series() -> None:
    async with failing_over() as (gone, stays, gw, session):
        gw.set_table((entry(gone, "guest-0"),))
        await ask(session, VLLM, BODY)
        gw.set_table((entry(stays, "guest-1"),))
        await ask(session, VLLM, BODY | {"request_id": "another"})
        text, stats = await get(session, "/metrics"), await get(session, "/rose/v1/stats")
    assert 'rose_gateway_tokens_total{replica="guest-1"} 3' in text
    assert 'replica="guest-0"' not in text
    assert set(stats["tokens"]) == {"guest-0", "guest-1"}, "sums of a run need all of them"


async def test_events_tell_of_continuations_and_lost_replicas(tmp_path: Any) -> None:
    async with failing_over(log_dir=tmp_path) as (guest, own, gw, session):
        guest.revoke_after = 1
        await ask(session, VLLM, BODY)
        gw.set_table((entry(own, "own-0"),))
    text = (tmp_path / "events-gateway.jsonl").read_text()
    assert '"event":"continuation"' in text
    assert '"event":"replica_lost","replica":"guest-0"' in text


async def test_the_client_raises_typed_errors() -> None:
    fast = Retry(tries=6, first_s=0.001, max_s=0.002)
    sampling = Sampling(max_tokens=3)
    async with (
        serving(version_wait_s=0.02) as (replica, gw, _),
        RolloutClient(base_url(gw)) as client,
    ):
        with pytest.raises(VersionNotServed, match="version 7"):
            await client.generate([1], sampling, request_id="a", session_id="s", min_version=7)
        with pytest.raises(RequestRefused, match="token_ids is empty"):
            await client.generate([], sampling, request_id="b", session_id="s")
        replica.break_after = 0
    async with RolloutClient(base_url(gw), retry=fast) as client:
        with pytest.raises(GatewayUnavailable, match="6 tries"):
            await client.generate([1], sampling, request_id="c", session_id="s")


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["--port", "x", "--scheduler", "a:1"],
        ["--port", "0"],
        ["--port", "0", "--scheduler", "a:1", "--replica", "a=guest=http://h:1"],
        ["--port", "0", "--replica", "a=spare=http://h:1"],
        ["--port", "0", "--replica", "a=guest=ftp://h:1"],
        ["--port", "0", "--scheduler", "a:1", "--stall-s", "0"],
        ["--port", "99999", "--scheduler", "a:1"],
    ],
)
def test_wrong_options_are_one_line_and_exit_code_2(argv: Any, capsys: Any) -> None:
    assert main(argv) == 2
    error = capsys.readouterr().err
    assert error.startswith("rose gateway: ")
    assert error.count("\n") == 1


def test_a_busy_port_is_one_line_and_exit_code_2(capsys: Any) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main(["--port", str(port), "--scheduler", "127.0.0.1:1"]) == 2
    assert "is in use" in capsys.readouterr().err
