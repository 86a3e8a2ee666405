"""Models that are not generative: routed, asked again where a replica died, refused by name."""

import pytest
from standin_engines import StandInSglang
from test_attached_engines import attached

from tests.fakes.replica import StandInReplica
from tests.unit.gateway.gateway_cases import begin, calling, entry, failing_over, serving, until
from tests.unit.gateway.wire_cases import VLLM, ask, vllm_body

POOLING = "/pooling"
ALL = (POOLING, "/score", "/classify")
BODY = {"model": "rose-policy", "input": "abc", "task": "classify"}


@pytest.mark.parametrize("path", ALL)
async def test_an_input_is_handed_to_a_replica_and_its_answer_back(path: str) -> None:
    async with serving(StandInReplica(pools=ALL), "own-0") as (replica, gw, session):
        asked = {**BODY, "timeout_s": 20.0, "session_id": "s", "request_id": "r", "priority": 3}
        status, answer, _ = await ask(session, path, asked)
        assert gw.status().live_turns == {"own-0": 0}
    assert (status, answer["model"], answer["data"][0]["data"]) == (200, "rose-policy", [3])
    assert replica.requests == [{"input": "abc", "task": "classify", "job": None}]


@pytest.mark.parametrize("fault", ["breaks", "drains", "dies"])
async def test_a_call_whose_replica_fails_is_asked_of_another(fault: str) -> None:
    async with StandInReplica(pools=ALL) as first, StandInReplica(pools=ALL) as second:
        first.break_after = 20 if fault == "breaks" else None
        first.draining = fault == "drains"
        rows = entry(first, "guest-0", prefill_tok_s=1e9), entry(second, "own-0")
        if fault == "dies":
            first.kill()
        async with calling(*rows) as (_, session):
            status, answer, _ = await ask(session, POOLING, BODY)
    assert (status, answer["data"][0]["data"]) == (200, [3])
    assert len(second.requests) == 1


async def test_a_lease_that_ends_under_a_call_moves_it_at_once() -> None:
    replicas = StandInReplica(pools=ALL), StandInReplica(pools=ALL)
    async with failing_over(*replicas) as (first, second, gw, session):
        first.hang_after = 0
        call = begin(session, BODY, POOLING)
        await until(lambda: bool(first.requests))
        gw.set_table((entry(first, "guest-0", leased=False), entry(second, "own-0")))
        assert (await call)[0] == 200


async def test_every_wait_has_an_end() -> None:
    async with serving(StandInReplica(pools=ALL), "own-0", max_attempts=2) as (
        replica,
        gw,
        session,
    ):
        replica.hang_after = 0
        late, answer, _ = await ask(session, POOLING, {**BODY, "timeout_s": 0.1})
        assert gw.status().live_turns == {"own-0": 0}
        replica.hang_after, replica.break_after = None, 20
        broken, said, _ = await ask(session, POOLING, BODY)
    assert (late, broken) == (504, 503)
    assert "/pooling had no answer after 0.1 s" in answer["error"]["message"]
    assert "2 replicas failed /pooling" in said["error"]["message"]


async def test_replicas_that_cannot_are_named() -> None:
    async with (
        serving(name="own-0") as (_, _, generative),
        StandInSglang() as engine,
        attached(engine.url) as (_, sglang),
    ):
        status, answer, _ = await ask(generative, "/score", BODY)
        stock, said, _ = await ask(sglang, "/score", BODY)
    assert (status, stock) == (400, 400)
    assert "own-0 serves no model for it" in answer["error"]["message"]
    assert "SGLang" in said["error"]["message"]


async def test_a_model_of_another_name_is_not_found() -> None:
    async with calling() as (_, session):
        assert (await ask(session, POOLING, {**BODY, "model": "other"}))[0] == 404


async def test_what_the_engine_refuses_is_the_callers_to_correct() -> None:
    async with serving(StandInReplica(pools=ALL), "own-0") as (replica, _, session):
        replica.bad_request = True
        status, answer, _ = await ask(session, POOLING, BODY)
    assert status == 400
    assert "own-0 refuses /pooling" in answer["error"]["message"]
    assert "too long" in answer["error"]["message"]
    assert len(replica.requests) == 1


async def test_the_job_selects_the_reward_model() -> None:
    replicas = StandInReplica(), StandInReplica(pools=ALL)
    async with failing_over(*replicas) as (policy, reward, gw, session):
        rows = entry(policy, "own-0", job="grpo"), entry(reward, "own-1", job="reward")
        gw.set_table(rows, ("grpo", "reward"))
        status, _, _ = await ask(session, POOLING, {**BODY, "job": "reward"})
        turn, _, _ = await ask(session, VLLM, vllm_body(2, job="grpo"))
        none, _, _ = await ask(session, POOLING, BODY)
        wrong, answer, _ = await ask(session, POOLING, {**BODY, "job": "grpo"})
        await ask(session, POOLING, {**BODY, "job": "reward", "cache_salt": "a/b"})
    assert (status, turn, none, wrong) == (200, 200, 400, 400)
    asked, salted = reward.requests
    assert asked["job"] == "reward"
    # vLLM takes at most 128 characters, and no slash.
    assert asked["cache_salt"] != salted["cache_salt"]
    assert all(each["cache_salt"].isalnum() for each in (asked, salted))
    assert "own-0" in answer["error"]["message"]
