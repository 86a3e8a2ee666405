"""A real gated replica in fp32: turns, drains and versions over its HTTP contract."""

import asyncio
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from engine_specs import GUEST, HOST
from live_replica import (
    PROMPT,
    Lines,
    Replica,
    first_logprob,
    forge,
    sampled,
    tokens_of,
    versions_of,
)
from pool import Started
from tiny_model import VOCABULARY
from vllm_versions import VERSIONS

from executor import GrantMode
from executor.freeze_reason import FreezeReason
from tests.harness.waiting import until_async

pytestmark = [
    pytest.mark.engine,
    pytest.mark.engines(HOST, GUEST, versions=VERSIONS),
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore"),
]


@pytest.fixture
async def replica(engines: list[Started]) -> AsyncIterator[Replica]:
    # Publishing blocks this process for longer than the server keeps an idle connection.
    connector = aiohttp.TCPConnector(force_close=True)
    timeout = aiohttp.ClientTimeout(total=60)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as http:
        replica = Replica(engines[1], http)
        yield replica
        replica.engine.node.reset()
        await replica.admit()


async def frozen(replica: Replica) -> None:
    """Freeze the guest; returns once it yields."""
    replica.engine.node.mode = GrantMode.FREEZE
    page = replica.engine.control

    def yields() -> bool:
        return (state := page.guest.peek()) is not None and state.gate_reason == "frozen"

    await until_async(yields, 10, "the guest yields")


async def test_a_greedy_stream_equals_the_engines_own_completion(replica: Replica) -> None:
    await replica.admit()
    body = {"model": GUEST.name, "prompt": PROMPT, "max_tokens": 48, "temperature": 0}
    body |= {"ignore_eos": True, "detokenize": False, "return_token_ids": True}
    async with replica.http.post(
        f"{replica.engine.url}/v1/completions", json=body, headers=replica.engine.headers
    ) as answer:
        expected = (await answer.json())["choices"][0]["token_ids"]
    lines = await replica.lines(PROMPT, 48)
    assert tokens_of(lines) == expected
    assert versions_of(lines) == [replica.engine.versions.version] * 48
    assert lines[-1] == {"finish_reason": "length"}
    stop = expected[20]
    stopped = await replica.lines(PROMPT, 48, stop_token_ids=[stop])
    assert tokens_of(stopped) == expected[: expected.index(stop) + 1]
    assert (stopped[-1]["token_ids"][-1], stopped[-1]["finish_reason"]) == (stop, "stop")


async def test_logprobs_are_those_of_the_distribution_that_was_sampled(replica: Replica) -> None:
    await replica.admit()
    allowed = {"allowed_token_ids": [5], "temperature": 1.0}
    only = await replica.lines(PROMPT, 4, **allowed)
    assert tokens_of(only) == [5] * 4
    assert [p for line in only for p in line.get("logprobs", [])] == [0.0] * 4
    sampling = {"temperature": 1.0, "seed": 3}
    first = await replica.lines(PROMPT, 24, **sampling)
    again = await replica.lines(PROMPT, 24, **sampling)
    assert sampled(first) == sampled(again), "a seed repeats its turn"
    assert all(p < 0 for line in first for p in line.get("logprobs", []))


async def test_a_seeds_turn_is_repeated_where_its_prompt_is_computed_in_parts(
    replica: Replica,
) -> None:
    """All at once they are more than a step computes."""
    await replica.admit()
    prompts = [[(7 * k + turn) % VOCABULARY for k in range(490)] for turn in range(6)]
    sampling = {"temperature": 1.0, "seed": 3}
    alone = [tokens_of(await replica.lines(p, 8, salt="alone", **sampling)) for p in prompts]
    turns = (replica.lines(prompt, 8, salt="together", **sampling) for prompt in prompts)
    assert [tokens_of(lines) for lines in await asyncio.gather(*turns)] == alone


async def test_a_turn_goes_on_elsewhere_as_if_it_had_never_been_revoked(replica: Replica) -> None:
    epoch = await replica.admit()
    whole = tokens_of(await replica.lines(PROMPT, 64))
    got: Lines = []
    async for line in replica.stream(PROMPT, 64):
        got.append(line)
        if len(got) == 2:
            assert await replica.call("drain", {"epoch": epoch, "reason": "host is busy"}) == (
                200,
                {"aborted": 1},
            )
    assert got[-1] == {"finish_reason": "revoked"}
    begun = tokens_of(got)
    assert 5 <= len(begun) < 64
    assert (await replica.call("generate", {"request_id": "r", "token_ids": PROMPT}))[0] == 503
    assert (await replica.call("admit", {"epoch": epoch - 1}))[0] == 409
    assert (await replica.call("drain", {"epoch": epoch - 1}))[0] == 409
    await replica.admit()
    rest = await replica.lines(PROMPT + begun, 64 - len(begun))
    assert begun + tokens_of(rest) == whole


async def test_no_stop_is_sampled_before_min_tokens(replica: Replica) -> None:
    await replica.admit()
    first = tokens_of(await replica.lines(PROMPT, 1))[0]
    stops = {"stop_token_ids": [first]}
    assert tokens_of(await replica.lines(PROMPT, 40, **stops)) == [first]
    later = await replica.lines(PROMPT, 40, **stops, min_tokens=20)
    assert len(tokens_of(later)) >= 20
    assert first not in tokens_of(later)[:20]


async def test_a_stop_outside_the_vocabulary_does_not_end_the_engine(replica: Replica) -> None:
    await replica.admit()
    sampling = {"max_tokens": 8, "min_tokens": 4, "stop_token_ids": [VOCABULARY]}
    body = {"request_id": "r", "token_ids": PROMPT, "sampling": sampling}
    status, answer = await replica.call("generate", body)
    assert status == 400
    assert str(VOCABULARY) in answer["error"]["message"]
    assert len(tokens_of(await replica.lines(PROMPT, 8))) == 8


async def test_a_frozen_guest_is_drained_at_once(replica: Replica) -> None:
    epoch = await replica.admit()
    stream = replica.stream(PROMPT, 400)
    first = await anext(stream)
    await frozen(replica)
    # The call would wait for as long as the guest is frozen.
    async with asyncio.timeout(30):
        status, answer = await replica.call("drain", {"epoch": epoch, "reason": "revoked"})
        rest = [line async for line in stream]
    assert (status, answer) == (200, {"aborted": 1})
    assert rest[-1] == {"finish_reason": "revoked"}
    assert len(tokens_of([first, *rest])) < 400


async def test_a_client_that_leaves_ends_its_turn(replica: Replica) -> None:
    await replica.admit()
    stream = replica.stream(PROMPT, 400)
    await anext(stream)
    assert (await replica.call("state"))[1]["running"] == 1
    await stream.aclose()
    for _ in range(200):
        state = (await replica.call("state"))[1]
        if not state["running"]:
            break
        await asyncio.sleep(0.01)
    assert not state["running"]


async def test_versions_switch_within_a_turn_and_old_caches_are_not_used(
    replica: Replica,
) -> None:
    await replica.admit()
    await replica.prepared()
    published = [replica.publish(seed) for seed in (1, 2)]
    lines: Lines = []
    updates: list[asyncio.Task[dict[str, Any]]] = []
    async for line in replica.stream(PROMPT, 400):
        lines.append(line)
        if published and len(lines) >= 3 and all(update.done() for update in updates):
            updates.append(asyncio.create_task(replica.apply(published.pop(0))))
    reports = await asyncio.gather(*updates)
    last = replica.engine.versions.version
    assert [report["version"] for report in reports] == [last - 1, last]
    tokens, versions = tokens_of(lines), versions_of(lines)
    assert len(tokens) == 400
    assert sorted(set(versions)) == [last - 2, last - 1, last]
    assert [b - a for a, b in pairwise(versions) if a != b] == [1, 1]
    assert (await replica.call("state"))[1]["policy_version"] == last
    said = replica.engine.control.guest.peek()
    assert said is not None
    assert said.policy_version == last, "its page tells it too"
    # Fresh KV of the newest weights gives the same tokens that the running turn went on with.
    switch = versions.index(last)
    fresh = await replica.lines(PROMPT + tokens[:switch], 400 - switch, salt="nothing cached")
    assert tokens_of(fresh) == tokens[switch:]
    assert tokens_of(await replica.lines(PROMPT, 40)) == tokens_of(
        await replica.lines(PROMPT, 40, salt="nothing cached either")
    )


async def test_kept_kv_is_told_and_never_found_by_turns_of_the_new_version(
    replica: Replica,
) -> None:
    await replica.admit()
    stream = replica.stream(PROMPT, 400)
    lines = [await anext(stream)]
    # Frozen, the turn cannot end before the update.
    await frozen(replica)
    replica.engine.node.reason = FreezeReason.NO_LEASE
    await replica.apply(replica.publish(seed=80) | {"on_update": "keep"})
    replica.engine.node.mode = GrantMode.RUN
    lines += [line async for line in stream]
    last = replica.engine.versions.version
    stamps = [(line["version"], line.get("oldest_version")) for line in lines[:-1]]
    assert set(stamps) == {(last - 1, None), (last, last - 1)}
    tokens, switch = tokens_of(lines), versions_of(lines).index(last)
    fresh = await replica.lines(PROMPT + tokens[:switch], 400 - switch, salt="nothing cached")
    after = [line for line in lines if line.get("version") == last]
    assert first_logprob(after) != first_logprob(fresh), "its KV was kept"
    again, apart = await replica.lines(PROMPT, 40), await replica.lines(PROMPT, 40, salt="apart")
    assert sampled(again) == sampled(apart), "the old prefix is not found"
    assert all("oldest_version" not in line for line in again)


async def test_turns_in_flight_finish_under_the_old_version_when_a_job_asks_for_it(
    replica: Replica,
) -> None:
    await replica.admit()
    paths = replica.publish(seed=81) | {"on_update": "finish_old"}
    last = replica.engine.versions.version
    lines: Lines = []
    update: asyncio.Task[dict[str, Any]] | None = None
    during: asyncio.Task[Lines] | None = None
    async for line in replica.stream(PROMPT, 300):
        lines.append(line)
        if update is None:
            update = asyncio.create_task(replica.apply(paths))
        if during is None and len(tokens_of(lines)) >= 250:
            during = asyncio.create_task(replica.lines(PROMPT, 8))
    assert update is not None
    assert during is not None
    report = await update
    assert report["finished_old"] is True
    assert versions_of(lines) == [last - 1] * 300
    assert versions_of(await during) == [last] * 8, "what is new waits for the new version"


async def test_an_audit_reads_every_live_weight_while_turns_run(replica: Replica) -> None:
    await replica.admit()
    turn = asyncio.create_task(replica.lines(PROMPT, 100))
    status, report = await replica.call("weights/audit", {})
    assert (status, report["flipped"], report["unjudged"]) == (200, [], [])
    assert report["version"] == replica.engine.versions.version
    assert report["weights"] == sum(t.bits.size for t in replica.engine.versions.active.values())
    assert len(tokens_of(await turn)) == 100


async def test_a_guest_without_a_lease_still_takes_a_version(replica: Replica) -> None:
    epoch = await replica.admit()
    stream = replica.stream(PROMPT, 400)
    lines = [await anext(stream)]
    await frozen(replica)
    published = replica.publish(seed=90)
    status, answer = await replica.call("weights/apply", published)
    assert (status, answer["error"]["type"]) == (503, "host_busy"), "it is frozen for a reason"
    replica.engine.node.reason = FreezeReason.NO_LEASE
    await replica.apply(published)
    replica.engine.node.mode = GrantMode.RUN
    async for line in stream:
        lines.append(line)
        if replica.engine.versions.version in versions_of(lines[-1:]):
            await replica.call("drain", {"epoch": epoch})
    last = replica.engine.versions.version
    assert sorted(set(versions_of(lines))) == [last - 1, last]
    assert lines[-1] == {"finish_reason": "revoked"}


async def test_a_version_of_other_weights_is_refused_and_changes_nothing(
    replica: Replica,
) -> None:
    await replica.admit()
    before = tokens_of(await replica.lines(PROMPT, 32))
    versions, active = replica.engine.versions, replica.engine.versions.version
    versions.publisher.publish(90, 89, versions.active, versions.active)
    status, answer = await replica.call("weights/apply", versions.paths(90))
    assert (status, answer["error"]["type"]) == (409, "wrong_base")
    versions.publisher.publish(91, active, versions.active, versions.changed(seed=91))
    paths = versions.paths(91)
    forged = forge(Path(paths["manifest"]))
    status, answer = await replica.call("weights/apply", paths | {"manifest": str(forged)})
    assert (status, answer["error"]["type"]) == (422, "bad_version"), answer
    lines = await replica.lines(PROMPT, 32)
    assert tokens_of(lines) == before
    assert versions_of(lines) == [active] * 32


async def test_the_first_weights_come_back_as_a_later_version(replica: Replica) -> None:
    await replica.admit()
    versions = replica.engine.versions
    assert versions.active is not versions.base
    changed = tokens_of(await replica.lines(PROMPT, 32))
    await replica.apply(versions.next(versions.base))
    assert tokens_of(await replica.lines(PROMPT, 32)) != changed
    status, report = await replica.call("weights/audit", {})
    assert (status, report["flipped"], report["version"]) == (200, [], versions.version)
