"""The same with real processes and SIGKILL: publisher, relay and receiver die in turn."""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from cluster_cases import CHUNKS, received, tensors

from tests.harness.processes import Forked
from tests.harness.waiting import PATIENCE_S, until
from weight_transfer import ChunkStore
from weight_transfer.fetch.relay_order import order

HERE = Path(__file__).parent


class Processes:
    """An origin and two members; each is started anew on its folder after a kill."""

    def __init__(self, folder: Path, port: Callable[[], int]) -> None:
        self._folder = folder
        self.urls = {name: f"http://127.0.0.1:{port()}" for name in ("origin", "a", "b")}
        self._running: dict[str, Forked] = {}

    def start(self, name: str) -> None:
        members = [self.urls["a"], self.urls["b"]]
        words = [str(self._folder / name), self.urls[name]]
        if name == "origin":
            words = ["origin", *words]
        else:
            words = ["member", *words, self.urls["origin"], *members]
        self._running[name] = Forked(str(HERE / "crash_process.py"), *words, stdout=True)
        self.heard(name, "up")

    def heard(self, name: str, what: str) -> None:
        stdout = self._running[name].stdout
        assert stdout
        assert stdout.readline().strip() == what

    def kill(self, name: str) -> None:
        self._running.pop(name).end()

    def end(self) -> None:
        for name in list(self._running):
            self.kill(name)

    def store(self, name: str) -> ChunkStore:
        return ChunkStore(self._folder / name)

    def whole(self) -> set[str]:
        return {path.name for n in "ab" for path in self.store(n).chunks_dir.iterdir()}

    def until_whole(self, chunks: int) -> None:
        until(lambda: len(self.whole()) >= chunks, PATIENCE_S, f"{chunks} whole chunks")


@pytest.fixture
def processes(tmp_path: Path, unused_tcp_port_factory: Callable[[], int]) -> Iterator[Processes]:
    processes = Processes(tmp_path, unused_tcp_port_factory)
    yield processes
    processes.end()


def test_killed_in_turn_all_end_bit_exact(processes: Processes) -> None:
    for name in ("origin", "a", "b"):
        processes.start(name)
    processes.until_whole(1)
    processes.kill("origin")
    processes.start("origin")
    processes.until_whole(2)
    names = {processes.urls[name]: name for name in "ab"}
    last = processes.store("origin").get_manifest(1).chunks[-1]
    relay, receiver = (names[url] for url in order(names, last.id))
    for victim in (relay, receiver):
        before = {path.name for path in processes.store(victim).chunks_dir.iterdir()}
        processes.kill(victim)
        assert all(processes.store(victim).sound(name) for name in before)
        processes.start(victim)
    for name in "ab":
        processes.heard(name, "whole")
    for name in "ab":
        store = processes.store(name)
        assert len(store.get_manifest(1).chunks) == CHUNKS
        assert np.array_equal(received(store).bits, tensors(1)["w"].bits)
