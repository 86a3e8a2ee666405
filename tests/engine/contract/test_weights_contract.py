"""Promises of each engine about its versions: proofs, stamps, KV of older ones.

One real dedicated replica for the module; greedy, in fp32, so that a version's tokens are known.
"""

import asyncio
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from contract_engines import ContractEngine
from guest_rig import Rig, client_of, started
from live_replica import PROMPT, Lines, Replica, forge, tokens_of, versions_of

from rose.engines import EngineRole

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.asyncio(loop_scope="module"),
]

TURN = 400


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rig(
    contract_engine: ContractEngine, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Rig]:
    folder = tmp_path_factory.mktemp("weights")
    async with started(contract_engine, folder, EngineRole.DEDICATED) as rig:
        yield rig


@pytest_asyncio.fixture(loop_scope="module")
async def replica(rig: Rig) -> AsyncIterator[Replica]:
    async with client_of(rig) as replica:
        await replica.prepared()
        yield replica


async def spanning(replica: Replica, how: str, published: list[dict[str, str]]) -> Lines:
    """A turn during which versions come into force."""
    lines: Lines = []
    updates: list[asyncio.Task[dict[str, Any]]] = []
    async for line in replica.stream(PROMPT, TURN):
        lines.append(line)
        if published and len(lines) >= 3 and all(update.done() for update in updates):
            body = published.pop(0) | {"on_update": how}
            updates.append(asyncio.create_task(replica.apply(body)))
    await asyncio.gather(*updates)
    return lines


@pytest.mark.promise("weights.update")
async def test_a_version_computes_what_a_fresh_load_computes(rig: Rig, replica: Replica) -> None:
    before = tokens_of(await replica.lines(PROMPT, 40))
    report = await replica.apply(replica.publish(1))
    assert report["version"] == rig.versions.version == 1
    assert report["changed_elements"] > 0
    assert report["probe_max_abs_diff"] == 0.0
    assert (await replica.call("state"))[1]["policy_version"] == 1
    after = await replica.lines(PROMPT, 40)
    assert tokens_of(after) != before
    assert versions_of(after) == [1] * 40


@pytest.mark.promise("weights.stamps")
async def test_a_turn_goes_on_under_the_new_version_with_fresh_kv(
    rig: Rig, replica: Replica
) -> None:
    first = rig.versions.version
    lines = await spanning(replica, "recompute", [replica.publish(seed) for seed in (2, 3)])
    tokens, versions = tokens_of(lines), versions_of(lines)
    assert sorted(set(versions)) == [first, first + 1, first + 2]
    assert [b - a for a, b in pairwise(versions) if a != b] == [1, 1]
    assert not [line for line in lines if "oldest_version" in line]
    switch = versions.index(first + 2)
    fresh = await replica.lines(PROMPT + tokens[:switch], TURN - switch, salt="nothing cached")
    assert tokens_of(fresh) == tokens[switch:]
    assert tokens_of(await replica.lines(PROMPT, 40)) == tokens_of(
        await replica.lines(PROMPT, 40, salt="nothing cached either")
    )


@pytest.mark.promise("weights.keep")
async def test_kept_kv_is_told_and_not_found_by_turns_that_begin_later(
    rig: Rig, replica: Replica
) -> None:
    kept: Lines = []
    for seed in range(10, 14):
        first = rig.versions.version
        lines = await spanning(replica, "keep", [replica.publish(seed)])
        kept = [line for line in lines if line.get("version") == first + 1]
        if kept:  # On a busy machine the turn may have ended before the version was in force.
            break
    assert kept
    assert all(line["oldest_version"] == first for line in kept)
    assert tokens_of(await replica.lines(PROMPT, 40)) == tokens_of(
        await replica.lines(PROMPT, 40, salt="nothing cached at all")
    )


@pytest.mark.promise("weights.finish-old")
async def test_turns_end_under_the_version_that_they_began_with(rig: Rig, replica: Replica) -> None:
    first = rig.versions.version
    lines = await spanning(replica, "finish_old", [replica.publish(5)])
    assert set(versions_of(lines)) == {first}
    assert (await replica.call("state"))[1]["policy_version"] == first + 1


@pytest.mark.promise("weights.wrong-base")
async def test_a_version_of_another_base_changes_nothing(rig: Rig, replica: Replica) -> None:
    before = tokens_of(await replica.lines(PROMPT, 24))
    status, said = await replica.call("weights/apply", rig.versions.paths(1))
    assert (status, said["error"]["type"]) == (409, "wrong_base")
    assert tokens_of(await replica.lines(PROMPT, 24)) == before


@pytest.mark.promise("weights.forged")
async def test_a_version_of_somebody_else_is_refused(rig: Rig, replica: Replica) -> None:
    good = replica.publish(7)
    forged = good | {"manifest": str(forge(Path(good["manifest"])))}
    status, said = await replica.call("weights/apply", forged)
    assert (status, said["error"]["type"]) == (422, "bad_version")
    assert (await replica.apply(good))["version"] == rig.versions.version


@pytest.mark.promise("weights.audit")
async def test_every_live_weight_is_its_versions(rig: Rig, replica: Replica) -> None:
    status, report = await replica.call("weights/audit", {})
    assert status == 200, report
    assert (report["version"], report["flipped"]) == (rig.versions.version, [])
    assert report["weights"] >= sum(t.bits.size for t in rig.versions.base.values())
