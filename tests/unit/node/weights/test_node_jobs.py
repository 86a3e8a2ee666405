"""A node that is leased to another job: an update through a base, else a new engine, no mix."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from node_bench import AllCorruptPublisher, NodeBench, tensors

from rose.addresses import free_port
from rose.node.replica import same_architecture
from rose.rpc import rose_pb2 as pb
from rose.weight_distribution import PublisherSettings
from weight_transfer import SigningKey

OTHER = "other"


class JobsBench(NodeBench):
    """Two jobs and one replica; the second one's publisher starts when a test wants it."""

    def __init__(self, folder: Path, kind: str, **replica: object) -> None:
        large = folder / "m-large"
        large.mkdir()
        (large / "config.json").write_text('{"hidden_size": 8}')
        for name in ("tokenizer.json", "model.safetensors"):
            (large / name).write_text("{}")
        super().__init__(folder, kind, models={"m-large": str(large)}, **replica)
        self.others: list[AllCorruptPublisher] = []

    async def register(self, model: str = "") -> AllCorruptPublisher:
        folder = self.folder / "published-other"
        settings = PublisherSettings(model=model)
        other = AllCorruptPublisher(
            OTHER, self.address, folder, free_port(), self.key, settings=settings
        )
        self.others.append(other)
        await other.start()
        return other

    async def hand_over(self) -> pb.Replica:
        """The first job has version 1 here and ends: what it held is leased to the other one."""
        first = await self.until("the first job's", lambda row: row.job == "job" and row.healthy)
        assert (first.held_job, first.policy_version) == ("job", 1)
        await self.publisher.end_job()
        return first


BENCH = {"bench": JobsBench, "kind": "dedicated", "runs": True}


@pytest.fixture
async def jobs(bench: JobsBench) -> AsyncIterator[JobsBench]:
    """A bench whose replica is at version 1 of the first job."""
    await bench.publish(1)
    await bench.until("caught up", lambda row: row.healthy and row.policy_version == 1)
    yield bench
    for other in bench.others:
        await other.close()


def is_others(row: pb.Replica) -> bool:
    return row.job == OTHER and row.held_job == OTHER and row.healthy


async def test_another_jobs_weights_come_as_a_base_into_the_running_engine(
    jobs: JobsBench,
) -> None:
    other = await jobs.register()
    await other.publish_base(0, tensors(0))
    await other.publish(1, 0, tensors(0), tensors(5))
    await jobs.hand_over()
    row = await jobs.until("the other's", is_others)
    assert row.policy_version == 1
    [start] = jobs.calls("start")
    assert start["model"] == "model"
    last = jobs.calls("apply")[-1]
    assert (last["job"], last["steps"], last["based"]) == (OTHER, [0, 1], True)
    assert last["on_update"] == "recompute"
    assert [call["job"] for call in jobs.calls("admit")] == ["job", OTHER]


async def test_without_a_base_the_engine_starts_anew_and_keeps_its_lease(jobs: JobsBench) -> None:
    other = await jobs.register()
    await other.publish(1, 0, tensors(0), tensors(5))
    first = await jobs.hand_over()
    row = await jobs.until("the other's", is_others)
    assert row.lease_epoch == first.lease_epoch + 1
    assert not jobs.noted("lease_taken_back")
    assert len(jobs.calls("start")) == 2
    last = jobs.calls("apply")[-1]
    assert (last["job"], last["steps"], last["based"]) == (OTHER, [1], False)


@pytest.mark.parametrize(
    ("bench", "starts"), [(BENCH, 2), (BENCH | {"lora": {}}, 1)], indirect=["bench"]
)
async def test_a_job_that_has_published_nothing_gets_the_model_itself(
    jobs: JobsBench, starts: int
) -> None:
    await jobs.register()
    await jobs.hand_over()
    row = await jobs.until("the other's", lambda row: row.job == OTHER and row.healthy)
    assert (row.held_job, row.policy_version) == ("", 0)
    assert len(jobs.calls("start")) == starts, "the base of adapters is the model"
    assert jobs.calls("admit")[-1]["latest"] == 0


async def test_another_model_is_another_engine(jobs: JobsBench) -> None:
    other = await jobs.register("m-large")
    await other.publish(1, 0, tensors(0), tensors(5))
    first = await jobs.hand_over()
    row = await jobs.until("the other's", is_others)
    assert (row.model, row.lease_epoch) == ("m-large", first.lease_epoch + 1)
    assert [call["model"] for call in jobs.calls("start")] == ["model", "m-large"]


async def test_a_replica_follows_its_own_job_whatever_others_publish(jobs: JobsBench) -> None:
    other = await jobs.register()
    for version in (1, 2, 3):
        await other.publish(version, version - 1, tensors(version - 1), tensors(version))
    await jobs.publish(2)
    await jobs.until("caught up", lambda row: row.policy_version == 2 and row.healthy)
    assert {call["job"] for call in jobs.calls("apply")} == {"job"}


SHARED = {"max_rank": 8, "max_adapters": 3, "jobs": 2}


@pytest.mark.parametrize("bench", [{"kind": "dedicated", "lora": SHARED}], indirect=True)
@pytest.mark.usefixtures("standins")
async def test_two_jobs_lease_one_engine_each_by_an_offer_of_its_own(bench: NodeBench) -> None:
    own = SigningKey.generate()
    bench.settings["job_keys"] = {OTHER: own.verify_key.hex}
    other = AllCorruptPublisher(OTHER, bench.address, bench.folder / "other", free_port(), own)
    await other.start()

    async def rows() -> dict[str, pb.Replica]:
        found = (await bench.stub.Snapshot(pb.SnapshotRequest())).replicas
        return {row.job: row for row in found if row.leased and row.healthy}

    async def at_versions(**wanted: int) -> dict[str, pb.Replica]:
        async def held() -> dict[str, pb.Replica] | None:
            now = await rows()
            same = {job: row.policy_version for job, row in now.items()} == wanted
            return now if same and all(r.held_job in ("", j) for j, r in now.items()) else None

        return await bench.awaited(f"at {wanted}", held)

    async with bench.running():
        first = await at_versions(job=0, other=0)
        assert {row.id for row in first.values()} == {"r0", "r0+1"}
        assert len({row.url for row in first.values()}) == 1
        assert {row.max_sequences for row in first.values()} == {32}
        await bench.publisher.publish_anew(1, tensors(1))
        await other.publish_anew(1, tensors(5))
        await at_versions(job=1, other=1)
        await bench.publisher.end_job()
        await bench.awaited("ended", lambda: _drained(bench))
        [drain] = bench.calls("drain")
        [mine] = (call for call in bench.calls("admit") if call["job"] == "job")
        assert (drain["offer"], drain["epoch"]) == (mine["offer"], mine["epoch"])
        now = (await rows())[OTHER]
        assert now.lease_epoch == first[OTHER].lease_epoch
    assert len(bench.calls("start")) == 1
    await other.close()


async def _drained(bench: NodeBench) -> bool | None:
    return bool(bench.calls("drain")) or None


def test_models_of_one_architecture_differ_in_their_weights_alone(tmp_path: Path) -> None:
    said = {
        "one": '{"hidden_size": 8, "torch_dtype": "bfloat16", "_name_or_path": "a"}',
        "two": '{"_name_or_path": "b", "hidden_size": 8}',
        "large": '{"hidden_size": 16}',
    }
    folders = {name: tmp_path / name for name in (*said, "none")}
    for name, folder in folders.items():
        folder.mkdir()
        if name in said:
            (folder / "config.json").write_text(said[name])
    assert same_architecture(folders["one"], folders["two"])
    assert not same_architecture(folders["one"], folders["large"])
    assert not same_architecture(folders["one"], folders["none"])


# ---- a second run of a job ----


@pytest.mark.parametrize("bench", [{"kind": "dedicated", "runs": True}], indirect=True)
@pytest.mark.parametrize("served", [0, 2])
async def test_a_run_with_a_root_of_its_own_begins_at_the_next_version_in_the_running_engine(
    bench: NodeBench, served: int
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
