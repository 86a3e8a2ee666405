"""Promises of each engine as a guest: gate, budgets, freeze, drain, memory.

One real engine for the module, its host and its node stand-ins; greedy, in fp32.
"""

import asyncio
import time
from collections.abc import AsyncIterator

import aiohttp
import numpy as np
import pytest
import pytest_asyncio
from contract_engines import ContractEngine
from guest_rig import KV_BYTES, Rig, client_of, gathered, started
from live_replica import PROMPT, Lines, Replica, sampled, tokens_of, versions_of
from tiny_model import VOCABULARY

from elastic_scheduler import ReplicaKind
from executor import FreezeReason, GrantMode
from rose.client import RolloutClient, Sampling
from rose.contract.gateway import GENERATE
from rose.gateway import Gateway, GatewaySettings, StaticReplica
from rose.process.procfs import group_bytes
from tests.harness.waiting import until_async

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.asyncio(loop_scope="module"),
]

TURN = 96
MIB = 1 << 20
# In fp32 an engine's logprobs differ from transformers' by a hundredth of that.
LOGPROB_GAP = 0.01


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rig(
    contract_engine: ContractEngine, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Rig]:
    async with started(contract_engine, tmp_path_factory.mktemp("guest")) as rig:
        yield rig


@pytest_asyncio.fixture(loop_scope="module")
async def replica(rig: Rig) -> AsyncIterator[Replica]:
    async with client_of(rig) as replica:
        yield replica


@pytest.mark.promise("guest.warm")
async def test_it_is_warm_before_its_first_lease(rig: Rig, replica: Replica) -> None:
    _, state = await replica.call("state")
    assert state["warm"] is True
    assert state["tokens_total"] == rig.state.tokens_total == 0
    assert rig.state.step_seq > 0
    assert rig.state.kv_used == 0, "it left no prefix"


@pytest.mark.promise("guest.gate")
async def test_without_leave_no_step_begins(rig: Rig, replica: Replica) -> None:
    await rig.host_runs(2)
    await rig.said(lambda state: not state.in_step, "no step is under way")
    before = rig.state.step_seq
    turn = asyncio.create_task(replica.lines(PROMPT, 8))
    await rig.said(lambda state: state.gate_reason == "host_busy", "it says why it waits")
    assert rig.state.step_seq == before
    rig.node.host_running = 0
    assert len(tokens_of(await turn)) == 8


@pytest.mark.promise("guest.tokens")
async def test_a_small_budget_makes_small_steps_of_the_same_tokens(
    rig: Rig, replica: Replica
) -> None:
    whole = await replica.lines(PROMPT, 24, salt="whole")
    await rig.grants(token_budget=16)
    before = rig.state.step_seq
    cut = await replica.lines(PROMPT, 24, salt="cut")
    chunks = -(-len(PROMPT) // 16)
    assert rig.state.step_seq - before >= chunks + 23, "a prompt's chunks are steps of their own"
    assert tokens_of(cut) == tokens_of(whole)


@pytest.mark.promise("guest.tokens")
async def test_more_turns_than_tokens_of_a_step_end_all_the_same(
    rig: Rig, replica: Replica
) -> None:
    expected = await gathered(replica, 6, 24)
    await rig.grants(token_budget=4)
    assert await gathered(replica, 6, 24, salt="few tokens") == expected


@pytest.mark.promise("guest.sequences")
async def test_no_more_sequences_than_granted(rig: Rig, replica: Replica) -> None:
    await rig.grants(max_sequences=2)
    turns = asyncio.create_task(gathered(replica, 6, TURN))
    seen = set()
    while not turns.done():
        seen.add(rig.state.running)
        await asyncio.sleep(0.002)
    assert max(seen) == 2
    assert all(len(tokens) == TURN for tokens in await turns)


@pytest.mark.promise("guest.freeze")
async def test_a_frozen_guest_goes_on_where_it_was(rig: Rig, replica: Replica) -> None:
    whole = await gathered(replica, 4, TURN)
    turns = asyncio.create_task(gathered(replica, 4, TURN, salt="again"))
    for step in range(10):
        await rig.said(lambda state: state.in_step, "it works")
        await rig.freeze()
        before = rig.state.step_seq
        await rig.said(lambda state: not state.in_step, f"the step of freeze {step} ends")
        assert rig.state.step_seq == before, "none began after it yielded"
        rig.node.mode = GrantMode.RUN
        if turns.done():
            break
    assert await turns == whole


@pytest.mark.promise("guest.drain")
async def test_a_revoked_turn_goes_on_elsewhere_as_if_nothing_had_been(
    rig: Rig, replica: Replica
) -> None:
    whole = tokens_of(await replica.lines(PROMPT, 400))
    got: list[int] = []
    for revocation in range(10):
        epoch = await replica.admit()
        lines: Lines = []
        async for line in replica.stream(PROMPT + got, 400 - len(got)):
            lines.append(line)
            if len(lines) == 3:
                if revocation % 2:
                    await rig.freeze()
                async with asyncio.timeout(10):
                    said = await replica.call("drain", {"epoch": epoch, "reason": "host"})
                assert said == (200, {"aborted": 1})
        assert lines[-1] == {"finish_reason": "revoked"}
        got += tokens_of(lines)
        rig.node.mode = GrantMode.RUN
    await replica.admit()
    rest = await replica.lines(PROMPT + got, 400 - len(got))
    assert got + tokens_of(rest) == whole


@pytest.mark.promise("guest.drain")
async def test_what_was_revoked_gives_its_memory_back_though_nothing_runs(
    rig: Rig, replica: Replica
) -> None:
    epoch = await replica.admit()
    turns = asyncio.create_task(gathered(replica, 4, 400))
    await rig.said(lambda state: state.running == 4, "all run")
    await rig.freeze()
    assert await replica.call("drain", {"epoch": epoch}) == (200, {"aborted": 4})
    await turns
    await rig.said(lambda state: not (state.running or state.waiting), "nobody is left")
    assert rig.state.gate_reason == "frozen"


@pytest.mark.promise("guest.priority")
async def test_a_lower_number_runs_first(rig: Rig, replica: Replica) -> None:
    await rig.grants(max_sequences=1, mode=GrantMode.FREEZE)
    ended: list[int] = []

    async def turn(priority: int) -> None:
        body = {
            "request_id": f"p{priority}",
            "token_ids": PROMPT,
            "sampling": {"temperature": 0.0, "max_tokens": 8},
            "priority": priority,
        }
        url = f"{rig.url}/rose/v1/generate"
        async with replica.http.post(url, json=body) as answer:
            await answer.read()
        ended.append(priority)

    turns = [asyncio.create_task(turn(priority)) for priority in (5, 9, 1)]
    await rig.said(lambda state: state.waiting == 3, "all wait")
    rig.node.mode = GrantMode.RUN
    await asyncio.gather(*turns)
    assert ended == [1, 5, 9]


@pytest.mark.promise("guest.stop")
async def test_turns_are_sampled_as_they_ask(replica: Replica) -> None:
    whole = tokens_of(await replica.lines(PROMPT, 48))
    stop = whole[20]
    stopped = await replica.lines(PROMPT, 48, stop_token_ids=[stop])
    assert tokens_of(stopped) == whole[: whole.index(stop) + 1]
    assert (stopped[-1]["token_ids"][-1], stopped[-1]["finish_reason"]) == (stop, "stop")
    only = await replica.lines(PROMPT, 4, allowed_token_ids=[5], temperature=1.0)
    assert tokens_of(only) == [5] * 4
    assert [p for _, p in sampled(only)] == [0.0] * 4
    some = await replica.lines(PROMPT, 24, allowed_token_ids=[3, 5, 8], temperature=1.0)
    assert set(tokens_of(some)) <= {3, 5, 8}
    assert all(p < 0 for _, p in sampled(await replica.lines(PROMPT, 24, temperature=1.0)))


@pytest.mark.promise("guest.likely")
async def test_likely_tokens_are_the_models_own_through_a_gateway_and_a_drain(
    rig: Rig, replica: Replica
) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    most, tokens = 20, 300
    row = StaticReplica(rig.spec.name, ReplicaKind.GUEST, rig.url, 16)
    async with (
        Gateway(GatewaySettings(port=0, replicas=(row,))) as gateway,
        RolloutClient(f"http://127.0.0.1:{gateway.port}") as client,
        aiohttp.ClientSession(f"http://127.0.0.1:{gateway.port}") as http,
    ):
        await until_async(lambda: gateway.status().usable == 1, 30, "the replica is found", 0.05)
        asked = Sampling(temperature=0.0, ignore_eos=True, max_tokens=tokens, logprobs=most)
        running = asyncio.create_task(client.generate(PROMPT, asked))
        made = gateway.stats.tokens
        await until_async(lambda: made[rig.spec.name] > 40, 30, "it has tokens", 0.005)
        assert (await replica.call("drain", {"epoch": next(rig.epochs)}))[0] == 200
        await replica.admit()
        turn = await running
        params = {"max_tokens": 1, "temperature": 0.0, "logprobs": 0, "prompt_logprobs": most}
        # SGLang names the vocabulary's last token otherwise.
        whole = [*PROMPT, *turn.token_ids, VOCABULARY - 1]
        body = {"token_ids": whole, "sampling_params": params}
        async with http.post(GENERATE, json=body) as response:
            answer = await response.json()
            assert response.status == 200, answer
    assert turn.attempts > 1
    assert turn.top_logprobs is not None
    ids, logprobs = turn.top_logprobs.token_ids, turn.top_logprobs.logprobs
    assert ids.shape == logprobs.shape == (tokens, most)
    assert (ids[:, 0] == turn.token_ids).all(), "the likeliest token is the greedy one"
    model = AutoModelForCausalLM.from_pretrained(rig.spec.model_dir, dtype="float32").eval()
    with torch.no_grad():
        own = model(torch.tensor([whole])).logits[0].log_softmax(-1).numpy()
    at = np.arange(len(PROMPT) - 1, len(PROMPT) + tokens - 1)[:, None]
    assert logprobs == pytest.approx(own[at, ids], abs=LOGPROB_GAP)
    assert logprobs[:, -1] == pytest.approx(np.sort(own[at[:, 0]])[:, -most], abs=LOGPROB_GAP)
    first, *places = answer["prompt_logprobs"]
    assert (first, len(places)) == (None, len(whole) - 1)
    for place, (token, others) in enumerate(zip(whole[1:], places, strict=True)):
        found = {int(name): each["logprob"] for name, each in others.items()}
        assert next(iter(found)) == token
        assert len(found) in (most, most + 1)
        assert [*found.values()] == pytest.approx(own[place, [*found]].tolist(), abs=LOGPROB_GAP)


@pytest.mark.promise("guest.balloon")
async def test_memory_comes_back_measured_and_no_turn_loses_a_token(
    rig: Rig, replica: Replica
) -> None:
    expected = await gathered(replica, 6, TURN)
    turns = asyncio.create_task(gathered(replica, 6, TURN, salt="ballooned"))
    await rig.said(lambda state: state.running == 6, "all run")
    before = group_bytes(rig.process.process.pid)
    whole = rig.state.granules_mapped
    took = []
    for _ in range(3):
        began_s = time.perf_counter()
        rig.node.kv_granule_cap = 2
        await rig.said(lambda state: state.granules_mapped == 2, "the rest went back")
        took.append(time.perf_counter() - began_s)
        rig.node.kv_granule_cap = 0
        await rig.said(lambda state: state.granules_mapped == whole, "it has all of it again")
    rig.node.kv_granule_cap = 2
    await rig.said(lambda state: state.granules_mapped == 2, "the rest went back")
    assert rig.state.bytes_mapped <= KV_BYTES // 4
    assert await turns == expected
    assert before is not None
    gone = lambda: before - (group_bytes(rig.process.process.pid) or 0)  # noqa: E731
    await until_async(lambda: gone() >= KV_BYTES * 0.6, 20, "its processes are smaller")


@pytest.mark.promise("guest.balloon")
async def test_a_turn_larger_than_what_is_left_is_handed_back(rig: Rig, replica: Replica) -> None:
    got: Lines = []
    async for line in replica.stream(PROMPT, 400):
        got.append(line)
        if len(got) == 3:
            rig.node.kv_granule_cap = 1
    # A granule may have room for a whole turn of this model.
    assert got[-1]["finish_reason"] in ("abort", "length")
    assert tokens_of(got)


@pytest.mark.promise("guest.idle-memory")
async def test_an_idle_guest_gives_memory_back(rig: Rig, replica: Replica) -> None:
    await replica.lines(PROMPT, 4)
    await rig.said(lambda state: not (state.running or state.waiting), "it is idle")
    whole = rig.state.granules_mapped
    rig.node.kv_granule_cap = 1
    await rig.said(lambda state: state.granules_mapped == 1, "all but the least went back")
    rig.node.kv_granule_cap = 0
    await replica.lines(PROMPT, 4)
    await rig.said(lambda state: state.granules_mapped == whole, "and came again")


@pytest.mark.promise("guest.orphan")
async def test_nobodys_guest_ends_itself(
    contract_engine: ContractEngine, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("orphan")
    async with started(contract_engine, folder, extra_env={"ROSE_ORPHAN_S": "1.5"}) as rig:
        rig.node.silence()
        await until_async(
            lambda: rig.process.process.returncode is not None, 60, "it ends by itself"
        )


@pytest.mark.promise("weights.stamps")
async def test_tokens_of_the_model_as_it_was_started_say_so(replica: Replica) -> None:
    lines = await replica.lines(PROMPT, 8)
    assert versions_of(lines) == [0] * 8


@pytest.mark.promise("weights.frozen")
async def test_a_frozen_guest_takes_a_version(rig: Rig, replica: Replica) -> None:
    await replica.prepared()
    stream = replica.stream(PROMPT, 400)
    begun = await anext(stream)
    # One that has nothing to do asks for no leave. Weights are loaded while no job has leased it.
    rig.node.reason = FreezeReason.NO_LEASE
    await rig.freeze()
    report = await replica.apply(replica.publish(6))
    await until_async(
        lambda: rig.state.policy_version == report["version"], 10.0, "its page tells it too"
    )
    assert report["version"] == rig.versions.version
    rig.node.mode = GrantMode.RUN
    lines = [begun, *[line async for line in stream]]
    assert len(tokens_of(lines)) == 400
    assert versions_of(lines)[-1] == rig.versions.version
