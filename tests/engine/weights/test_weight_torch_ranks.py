"""Real ranks: `fully_shard` and DTensors over gloo, each process publishing its own shard."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from torch import nn

from weight_transfer import (
    ChunkStore,
    Manifest,
    Receiver,
    ShardError,
    SigningKey,
    read_safetensors,
    tensor_bits,
)
from weight_transfer.publish.version_publisher import VersionPublisher
from weight_transfer.torch import ShardedPublisher

pytestmark = [pytest.mark.engine, pytest.mark.starts_others, pytest.mark.timeout(300)]
KEY = SigningKey.from_hex("09" * 32)


class Crews:
    """Ranks on the loopback device, a few processes at a time."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("torch_rank_main.py")), str(root)],
            env=os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            process_group=0,
        )

    def run(self, ranks: int, *scenarios: str, dies: tuple[int, ...] = ()) -> None:
        """Run `ranks` processes; all must end well but those that die."""
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(f"{ranks} {' '.join(scenarios)}\n")
        self._process.stdin.flush()
        codes = json.loads(self._process.stdout.readline())
        said = [(self._root / f"{ranks}-{rank}.log").read_text()[-1500:] for rank in range(ranks)]
        assert codes == [9 if rank in dies else 0 for rank in range(ranks)], "\n".join(said)

    def end(self) -> None:
        """All of its group, where something hangs."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()


def received(folder: Path, versions: int, *, stores: int = 0) -> list[Manifest]:
    """Follow the versions from the dense old state dict, each bit-exact with the gathered one."""
    own = [ChunkStore(folder / f"rank-{rank}") for rank in range(stores)]
    first = own[0] if own else ChunkStore(folder)
    receiver = Receiver(read_safetensors(folder / "0.safetensors"))
    manifests = [first.get_manifest(version) for version in range(1, versions + 1)]
    bases = [first.get_manifest(version, base=True) for version in first.bases()]

    def chunks(manifest: Manifest) -> dict[str, bytes]:
        found = {}
        for ref in manifest.chunks:
            url = "" if ref.origin is None else manifest.origins[ref.origin]
            store = own[int(url.removeprefix("rank-"))] if url else first
            found[ref.id] = store.get(ref.id)
        return found

    for manifest in manifests:
        receiver.commit(receiver.decode(manifest, chunks(manifest), KEY.verify_key, 1.0))
        assert_equal(receiver, folder / f"{manifest.version}.safetensors")
    for base in bases:
        joiner = Receiver(read_safetensors(folder / "0.safetensors"))
        joiner.commit(joiner.decode(base, chunks(base), KEY.verify_key, 1.0))
        assert_equal(joiner, folder / f"{base.version}.safetensors")
    assert len(manifests) == versions
    return manifests


def assert_equal(receiver: Receiver, path: Path) -> None:
    wanted = read_safetensors(path)
    assert receiver.tensors.keys() == wanted.keys()
    for name, tensor in wanted.items():
        np.testing.assert_array_equal(receiver.tensors[name].bits, tensor.bits, name)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All that four ranks publish, until one dies; then what two ranks do in their place."""
    root = tmp_path_factory.mktemp("ranks")
    crews = Crews(root)
    try:
        crews.run(4, "fsdp", "hsdp", "fsdp_tp", "dtensors", "faults", "death", dies=(3,))
        assert ChunkStore(root / "death").versions() == ()
        crews.run(2, "restart", "pair")
    finally:
        crews.end()
    return root


def test_fsdp_ranks_publish_from_stores_of_their_own(root: Path) -> None:
    sharded = received(root / "fsdp", 2, stores=4)
    assert {"rank-1", "rank-2", "rank-3"} == set(sharded[0].origins)
    assert {t.dtype for t in sharded[0].tensors} == {"bfloat16", "int64"}
    own = ChunkStore(root / "fsdp" / "rank-2")
    assert own.versions() == (1, 2)
    assert own.get_manifest(2) == sharded[1]
    received(root / "pair", 2)


def test_of_replicas_one_publishes(root: Path) -> None:
    received(root / "hsdp", 2)


def test_fsdp_over_tensor_parallelism_arrives(root: Path) -> None:
    split = received(root / "fsdp_tp", 2)
    assert any(chunk.columns for manifest in split for chunk in manifest.chunks)


def test_every_pair_of_placements_arrives(root: Path) -> None:
    received(root / "dtensors", 2)


def test_after_a_full_disk_and_a_wrong_version_the_next_publish_works(root: Path) -> None:
    received(root / "faults", 1)


def test_after_a_dead_rank_other_ranks_publish_on_the_old_version(root: Path) -> None:
    received(root / "death", 1)


def test_a_plain_module_is_one_rank_that_owns_all(tmp_path: Path) -> None:
    model = nn.Linear(5, 3).bfloat16()
    state = model.state_dict()
    receiver = Receiver({name: tensor_bits(name, tensor) for name, tensor in state.items()})
    store = ChunkStore(tmp_path)
    publisher = ShardedPublisher(store, state, VersionPublisher(store, "job", "trainer", KEY))
    for parameter in model.parameters():
        parameter.data.mul_(1.5)
    manifest = publisher.publish(1, model.state_dict())
    chunks = {chunk.id: store.get(chunk.id) for chunk in manifest.chunks}
    receiver.commit(receiver.decode(manifest, chunks, KEY.verify_key, 1.0))
    for name, tensor in model.state_dict().items():
        np.testing.assert_array_equal(receiver.tensors[name].bits, tensor_bits(name, tensor).bits)
    with pytest.raises(ShardError, match="does not follow 1"):
        publisher.publish(1, model.state_dict())
    with pytest.raises(ShardError, match="is not bfloat16 any more"):
        publisher.publish(2, model.float().state_dict())
    with pytest.raises(ShardError, match="give it a VersionPublisher"):
        ShardedPublisher(store, state)
