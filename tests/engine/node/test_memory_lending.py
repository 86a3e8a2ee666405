"""A real host that lends, with a real guest at work in what is lent: memory moves, users wait for
nobody. The tests build on one another; they leave no guest."""

import http.client
import json
import logging
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from mmap import PAGESIZE
from pathlib import Path
from typing import NamedTuple

import pytest
from kill_bench import GUEST, HostLoad, KillBench
from tiny_model import VOCABULARY

from executor import HostState
from executor.grant_controller import OVERDUE_NS
from rose.node.guest.guest_record import running_guests
from tests.harness.waiting import until

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

log = logging.getLogger(__name__)
MIB = 1 << 20
KV_BYTES = 192 * MIB
BASE_BYTES = 32 * MIB
RESERVE = 0.2
# A second of calm, and a fifth of a gibibyte in calls of 32 MiB.
LENT_WITHIN_S = 20.0
BURST, PROMPT, OUTPUT = 110, 440, 60
# After its daemon's death a guest ends the step that it is in, and begins none.
FREEZE_S = 0.25
# Delay that two shared cores may cause.
LATE_S = 0.5
READS = 20


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KillBench]:
    bench = KillBench(
        tmp_path_factory.mktemp("lend"),
        orphan_s=600.0,
        host={
            "dtype": "float32",
            "kv_bytes": KV_BYTES,
            "extra_env": {"ROSE_HOST_LEVEL": "lend", "ROSE_HOST_RESERVE": str(RESERVE)},
            "extra_args": ("--skip-tokenizer-init", "--no-enable-prefix-caching"),
        },
        guest={"kv_bytes": KV_BYTES, "kv_base_bytes": BASE_BYTES},
    )
    try:
        bench.start()
        yield bench
    finally:
        bench.close()


def host(bench: KillBench) -> HostState:
    return bench.page.host.peek() or HostState()


def host_resident(bench: KillBench) -> int:
    """Bytes of the host's KV memory that are in memory, as the kernel counts them.

    It was advised to be huge, or not to be where it was returned, so the kernel keeps account of it
    by itself: in neighbouring pieces, which make up a run of its size. The file is not read in one
    go: a piece that is cut meanwhile may be counted in part, and then the run has another size.
    """
    core = bench.engine_core(bench.host.pid)
    for _ in range(READS):
        resident = _resident_of_a_run(Path(f"/proc/{core}/smaps").read_text())
        if resident is not None:
            return resident
    raise AssertionError("no mapping of that size")


def _resident_of_a_run(smaps: str) -> int | None:
    size = resident = end = 0
    for area in _advised(smaps):
        if area.start != end:
            if 0 <= KV_BYTES - size <= 2 * PAGESIZE:
                return resident
            size = resident = 0
        size, resident, end = size + area.stop - area.start, resident + area.resident, area.stop
    return resident if 0 <= KV_BYTES - size <= 2 * PAGESIZE else None


class Area(NamedTuple):
    start: int
    stop: int
    resident: int


def _advised(smaps: str) -> Iterator[Area]:
    """Mappings of which somebody said whether they are to be of huge pages."""
    start = stop = resident = 0
    for line in smaps.splitlines():
        words = line.split()
        if words[0].endswith(":"):
            if words[0] == "Rss:":
                resident = int(words[1]) << 10
            elif words[0] == "VmFlags:" and {"hg", "nh"} & set(words):
                yield Area(start, stop, resident)
        else:
            start, stop = (int(part, 16) for part in words[0].split("-"))


def lends_all(bench: KillBench) -> bool:
    """Return an idle host's lendable bytes: all but the reserve and the kept granule."""
    state = host(bench)
    return state.idle and state.granules_lent >= (1 - RESERVE) * state.granules_total - 2


def burst(bench: KillBench) -> list[float]:
    """More requests at once than the reserve holds; the seconds each took. All must succeed."""

    def ask(number: int) -> float:
        rng = random.Random(number)
        body = {
            "model": "host",
            "prompt": [rng.randrange(VOCABULARY) for _ in range(PROMPT)],
            "max_tokens": OUTPUT,
            "ignore_eos": True,
            "detokenize": False,
            "return_token_ids": True,
        }
        began_s = time.monotonic()
        connection = http.client.HTTPConnection("127.0.0.1", bench.host_port, timeout=120)
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        response = connection.getresponse()
        answer = json.loads(response.read())
        connection.close()
        assert response.status == 200, answer
        assert len(answer["choices"][0]["token_ids"]) == OUTPUT, answer
        return time.monotonic() - began_s

    with ThreadPoolExecutor(BURST) as users:
        return sorted(users.map(ask, range(BURST)))


@dataclass
class Watch:
    """Memory of host and guest, sampled all the time; times are seconds."""

    bench: KillBench
    resident_most: int = 0
    taken_back_s: float = 0.0
    beyond_s: float = 0.0
    _ended: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> "Watch":
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        lent, beyond_since_s = host(self.bench).granules_lent, None
        while not self._ended.wait(0.02):
            now_s, state, guest = time.monotonic(), host(self.bench), self.bench.guest()
            self.resident_most = max(self.resident_most, host_resident(self.bench))
            if lent and not state.granules_lent and not self.taken_back_s:
                self.taken_back_s = now_s
            if guest.bytes_mapped > BASE_BYTES + state.bytes_lent:
                beyond_since_s = beyond_since_s or now_s
                self.beyond_s = max(self.beyond_s, now_s - beyond_since_s)
            else:
                beyond_since_s = None


def test_an_idle_hosts_resident_memory_falls_by_what_it_says_it_lent(bench: KillBench) -> None:
    bench.at_work()
    bench.host_load.stop()
    assert bench.host_load.failures == []
    with Watch(bench) as watch:
        burst(bench)
    lent_s = until(lambda: lends_all(bench), LENT_WITHIN_S, "the idle host lends")
    fell = watch.resident_most - host_resident(bench)
    lent = host(bench).bytes_lent
    log.info(
        "host: %d of %d MiB lent, its resident memory fell by %d MiB, %.2f s after its last answer",
        *(lent // MIB, KV_BYTES // MIB, fell // MIB, lent_s),
    )
    assert watch.taken_back_s, "the burst needed all of it"
    assert (1 - RESERVE) * KV_BYTES - 8 * MIB < lent <= (1 - RESERVE) * KV_BYTES
    assert abs(KV_BYTES - host_resident(bench) - lent) < MIB, "what it says is what is gone"
    assert fell > 0.5 * lent


def test_the_guest_works_in_lent_memory_and_leaves_it_when_the_host_needs_it(
    bench: KillBench,
) -> None:
    until(lambda: lends_all(bench), LENT_WITHIN_S, "the idle host lends")
    until(lambda: bench.guest().bytes_mapped > 2 * BASE_BYTES, 20, "the guest borrows")
    borrowed = bench.guest().bytes_mapped
    with Watch(bench) as watch:
        latencies = burst(bench)
    assert watch.taken_back_s
    log.info(
        "the guest had borrowed %d MiB and held more than was lent for %.0f ms at most;"
        " the host's burst took %.2f s",
        *((borrowed - BASE_BYTES) // MIB, watch.beyond_s * 1e3, latencies[-1]),
    )
    assert watch.beyond_s < OVERDUE_NS / 1e9
    assert bench.noted("reclaim_begun") == [], "the ladder is for those who do not give"


def test_a_stopped_guest_and_a_stopped_daemon_keep_the_host_from_nothing(
    bench: KillBench,
) -> None:
    until(lambda: lends_all(bench), LENT_WITHIN_S, "the idle host lends")
    until(lambda: bench.guest().bytes_mapped > 2 * BASE_BYTES, 20, "the guest borrows")
    group = running_guests(bench.run_dir)[GUEST].identity.pid
    os.killpg(group, signal.SIGSTOP)
    bench.daemons[-1].send_signal(signal.SIGSTOP)
    kept = bench.guest().bytes_mapped
    try:
        latencies = burst(bench)
        state = bench.guest()
        assert state.bytes_mapped == kept > 2 * BASE_BYTES, "nobody gave anything back meanwhile"
        again = burst(bench)
        load = HostLoad(bench.host_port)
        load.start()
        until(lambda: len(load.latencies_s) > 5, 60, "the host serves its users")
        load.stop()
        assert load.failures == []
    finally:
        os.killpg(group, signal.SIGCONT)
        bench.daemons[-1].send_signal(signal.SIGCONT)
    log.info(
        "guest and daemon stopped: %d requests in %.1f s, again in %.1f s, all answered",
        *(len(latencies), latencies[-1], again[-1]),
    )
    assert host(bench).granules_total > 0, "it still lends"
    text = (bench.folder / "host.log").read_text()
    assert "KV memory is not lent" not in text


def test_a_killed_daemons_guest_freezes_and_killed_too_it_leaves_nothing(bench: KillBench) -> None:
    group = bench.at_work()
    held = bench.resident_bytes(group)
    bench.daemons[-1].kill()
    frozen_s = bench.last_step_after(time.monotonic_ns(), watch_s=1.5)
    step_s = bench.guest().last_step_ns / 1e9
    log.info("frozen %.0f ms after, a step takes %.0f ms", frozen_s * 1e3, step_s * 1e3)
    assert frozen_s <= FREEZE_S + step_s + LATE_S
    os.kill(group, signal.SIGKILL)  # The API process: the core would live on for good.
    gone_s = bench.gone(group, 10.0)
    log.info("%.1f GiB are back %.2f s after both were killed", held / 2**30, gone_s)
    assert bench.resident_bytes(group) == 0
    assert running_guests(bench.run_dir) == {}
    assert burst(bench), "the host serves on"
