"""A real gated replica in fp32 whose versions are LoRA adapters, over its HTTP contract."""

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from engine_specs import ADAPTED
from live_replica import PROMPT, Lines, Replica, sampled, tokens_of, versions_of
from pool import Started

from tests.harness.adapters import adapter_of, merged_tokens, moved, settings_of
from weight_transfer import ChunkStore, OnUpdate, TensorBits, VersionPublisher

pytestmark = [
    pytest.mark.engine,
    pytest.mark.engines(ADAPTED, spends=True),
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore"),
]


@pytest.fixture
async def replica(engines: list[Started]) -> AsyncIterator[Replica]:
    engines[0].spend("it holds adapters, which do not go back to version 0")
    connector = aiohttp.TCPConnector(force_close=True)
    timeout = aiohttp.ClientTimeout(total=60)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as http:
        replica = Replica(engines[0], http)
        await replica.admit()
        await replica.prepared()
        yield replica


def begin(replica: Replica, tensors: dict[str, TensorBits]) -> dict[str, str]:
    """Publish a base of the adapter as the next version; returns the body that applies it."""
    versions = replica.engine.versions
    versions.publisher.adapter = settings_of(versions.base)
    version = versions.version + 1
    versions.publisher.publish_base(version, tensors)
    versions.version, versions.active = version, tensors
    manifest = versions.store.manifest_path(version, base=True)
    return versions.paths(version) | {"manifest": str(manifest)}


async def during(replica: Replica, paths: dict[str, Any]) -> tuple[Lines, dict[str, Any]]:
    """Apply a version in the middle of a turn; returns the turn's lines and the report."""
    lines: Lines = []
    report: asyncio.Task[dict[str, Any]] | None = None
    async for line in replica.stream(PROMPT, 320):
        lines.append(line)
        if len(lines) == 5:
            report = asyncio.create_task(replica.apply(paths))
    assert report is not None
    return lines, await report


async def test_adapters_are_versions_of_a_guest(replica: Replica) -> None:
    versions = replica.engine.versions
    model = replica.engine.spec.model_dir
    plain = tokens_of(await replica.lines(PROMPT, 32))

    # The first version comes while a turn runs, which goes on under it at its next token.
    first = adapter_of(versions.base, seed=1)
    lines, report = await during(replica, begin(replica, first))
    assert report["pause_s"] == 0.0
    stamps = versions_of(lines)
    assert (len(stamps), stamps[0], stamps[-1]) == (320, 0, 1)
    assert stamps == sorted(stamps)
    begun = stamps.count(0)
    tokens = tokens_of(lines)
    assert tokens[:32][:begun] == plain[:begun]
    rest = merged_tokens(model, first, PROMPT + tokens[:begun], 32)
    assert tokens[begun : begun + 32] == rest, "KV is computed anew, with the adapter"

    # A greedy turn is the one of the model with the adapter's weights added.
    assert tokens_of(await replica.lines(PROMPT, 32)) == merged_tokens(model, first, PROMPT, 32)

    # The second one is what changed; a turn that may end under the first one does.
    second = moved(first, seed=2)
    began_s = time.monotonic()
    paths = versions.next(second) | {"on_update": str(OnUpdate.FINISH_OLD)}
    lines, report = await during(replica, paths)
    assert time.monotonic() - began_s < 30
    assert versions_of(lines) == [1] * 320
    assert report["wire_bytes"] < sum(t.bits.nbytes for t in first.values()) / 4
    after = await replica.lines(PROMPT, 32)
    assert versions_of(after) == [2] * 32
    assert tokens_of(after) == merged_tokens(model, second, PROMPT, 32)

    # One that counts its output cannot go on elsewhere: it ends where it is, or gives way.
    third, fourth = (moved(second, seed=seed) for seed in (3, 4))
    counting = asyncio.create_task(replica.lines(PROMPT, 400, frequency_penalty=0.1))
    await asyncio.sleep(0.2)
    await replica.apply(versions.next(third))
    await replica.apply(versions.next(fourth))
    lines = await counting
    assert set(versions_of(lines)) == {2}
    assert lines[-1]["finish_reason"] in ("revoked", "length")
    after = await replica.lines(PROMPT, 32)
    assert versions_of(after) == [4] * 32
    assert tokens_of(after) == merged_tokens(model, fourth, PROMPT, 32)

    state = (await replica.call("state"))[1]
    assert (state["policy_version"], state["job"], state["proven"]) == (4, "test", True)
    audit = (await replica.call("weights/audit", {}))[1]
    assert (audit["flipped"], audit["version"]) == ([], 4), "the base is what it was"


async def test_what_does_not_fit_is_refused_and_turns_go_on(replica: Replica) -> None:
    versions = replica.engine.versions
    before = sampled(await replica.lines(PROMPT, 8))
    versions.publisher.adapter = settings_of(versions.base, r=16)
    versions.publisher.publish_base(50, adapter_of(versions.base, seed=5, r=16))
    manifest = versions.store.manifest_path(50, base=True)
    body = versions.paths(50) | {"manifest": str(manifest)}
    status, said = await replica.call("weights/apply", body)
    assert (status, said["error"]["type"]) == (422, "unfit_adapter")
    assert said["error"]["message"] == "r is 16, and this replica's lora.max_rank 8"
    keep = body | {"on_update": "keep"}
    status, said = await replica.call("weights/apply", keep)
    assert (status, said["error"]["type"]) == (422, "unfit_adapter")
    assert sampled(await replica.lines(PROMPT, 8)) == before


async def test_two_jobs_lease_it_together_and_one_lease_ends(replica: Replica) -> None:
    versions, model = replica.engine.versions, replica.engine.spec.model_dir
    epochs = {}
    for offer, job in enumerate(("test", "other")):
        epochs[job] = next(replica.engine.epochs)
        lease = {"epoch": epochs[job], "job": job, "latest": 0, "offer": offer}
        assert (await replica.call("admit", lease))[0] == 200
    mine, theirs = (adapter_of(versions.base, seed=seed) for seed in (7, 8))
    await replica.apply(begin(replica, mine))
    store = ChunkStore(versions.folder / "other")
    publisher = VersionPublisher(store, job="other", trainer="test", key=versions.key)
    publisher.adapter = settings_of(versions.base)
    publisher.publish_base(1, theirs)
    manifest, chunks = store.manifest_path(1, base=True), store.chunks_dir
    await replica.apply({"manifest": str(manifest), "chunks": str(chunks)})
    turns = (replica.lines(PROMPT, 32, job=job) for job in epochs)
    for tensors, lines in zip((mine, theirs), await asyncio.gather(*turns), strict=True):
        assert tokens_of(lines) == merged_tokens(model, tensors, PROMPT, 32)
    state = (await replica.call("state"))[1]
    assert state["adapters"] == {"test": versions.version, "other": 1}

    running = asyncio.create_task(replica.lines(PROMPT, 200, job="other"))
    drained = await replica.call("drain", {"epoch": epochs["test"], "reason": "revoked"})
    assert drained == (200, {"aborted": 0})
    body = {"request_id": "late", "token_ids": PROMPT, "job": "test"}
    assert (await replica.call("generate", body))[0] == 503
    lines = await running
    assert (versions_of(lines), lines[-1]["finish_reason"]) == ([1] * 200, "length")
