"""A second run of a job on a running node: its base comes by an update, no engine starts anew."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from node_bench import AllCorruptPublisher, Bench, tensors

from rose.addresses import free_port


@pytest.fixture
async def bench(tmp_path: Path, standins: None) -> AsyncIterator[Bench]:
    bench = Bench(tmp_path, "dedicated")
    await bench.start()
    async with bench.running():
        yield bench
    await bench.close()


@pytest.mark.parametrize("served", [0, 2])
async def test_a_run_with_a_root_of_its_own_begins_at_the_next_version_in_the_running_engine(
    bench: Bench, served: int
) -> None:
    for version in range(1, served + 1):
        await bench.publish(version)
    await bench.until("caught up", lambda row: row.healthy and row.policy_version == served)
    await bench.publisher.close()
    anew = AllCorruptPublisher("job", bench.address, bench.folder / "anew", free_port(), bench.key)
    begun = await anew.start()
    assert (begun.latest, begun.resumed) == (served, None)
    await anew.publish_anew(served + 1, tensors(40))
    await bench.until("anew", lambda row: row.healthy and row.policy_version == served + 1)
    last = bench.calls("apply")[-1]
    assert (last["steps"], last["based"], last["job"]) == ([served + 1], True, "job")
    await anew.publish(served + 2, served + 1, tensors(40), tensors(41))
    await bench.until("further", lambda row: row.healthy and row.policy_version == served + 2)
    assert bench.calls("apply")[-1]["based"] is False
    assert len(bench.calls("start")) == 1
    await anew.close()
