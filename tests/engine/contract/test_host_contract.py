"""Promises of every host, by real engines: stock, published, on a bad page, and unseen."""

import json
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import pytest
from contract_engines import ContractEngine
from contract_stage import HostStage, StartedEngine, host_stage

from executor import (
    ControlPage,
    GrantController,
    GrantMode,
    GuardConfig,
    HostState,
    LatencyRecord,
)
from executor.grant_controller import Observation, Write
from rose.addresses import free_port
from rose.engines import EngineRole
from tests.harness.waiting import until
from weight_transfer import SigningKey

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

TTFT_S, TPOT_S = 0.5, 0.15
TRIES = 5
KV_BYTES = 24 << 20
LENDING = {
    "ROSE_HOST_LEVEL": "lend",
    "ROSE_HOST_RESERVE": "0.2",
    "ROSE_HOST_PREFIX_COLD_S": "0.2",
}
PROMPTS = [[(i * 7 + shift) % 90 for i in range(24 + shift)] for shift in range(8)]
BURST = [[(i * 5 + 11 * shift) % 90 for i in range(120)] for shift in range(16)]


@dataclass
class Hosts:
    """`unseen` is on the page of `host`, with a target that it cannot read."""

    page: ControlPage
    stage: HostStage
    stock: StartedEngine
    host: StartedEngine
    bad: StartedEngine
    unseen: StartedEngine

    @property
    def state(self) -> HostState:
        state = self.page.host.read()
        assert state is not None
        return state

    def idle(self) -> None:
        until(lambda: self.state.idle, 20.0, "the host says that it is idle")


@pytest.fixture(scope="module")
def hosts(
    contract_engine: ContractEngine, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Hosts]:
    folder = tmp_path_factory.mktemp("contract")
    bad = folder / "bad"
    bad.write_text("not a page")
    bad.chmod(0o600)
    page = ControlPage.create(folder / "page")
    sizes = {"kv_bytes": KV_BYTES, "ttft_target_s": TTFT_S, "tpot_target_s": TPOT_S}
    with page, host_stage(contract_engine, folder) as stage:
        stock = stage.start("stock", EngineRole.STOCK, **sizes)
        host = stage.start(
            "host", EngineRole.HOST, control_page=page.path, extra_env=LENDING, **sizes
        )
        stock.wait()
        host.wait()
        # The seat is taken: who comes now finds no place.
        wrong = {"ROSE_SLO_TTFT_S": "0,5"}
        lost = stage.start("bad", EngineRole.HOST, control_page=bad, **sizes)
        unseen = stage.start(
            "unseen", EngineRole.HOST, control_page=page.path, extra_env=wrong, **sizes
        )
        lost.wait()
        unseen.wait()
        yield Hosts(page, stage, stock, host, lost, unseen)


def granted(page: ControlPage) -> GrantMode:
    """Return the grant that a node's guard would write now."""
    now_ns = time.monotonic_ns()
    seen = Observation(page.host_view(), lease_epoch=1)
    first, *_ = GrantController(GuardConfig(512, 64)).step(seen, now_ns)
    assert isinstance(first, Write)
    return first.grant.mode


@pytest.mark.promise("host.second")
def test_an_engine_that_serves_unseen_keeps_guests_away(hosts: Hosts) -> None:
    view = hosts.page.host_view()
    assert view.seated
    assert view.vetoed
    assert granted(hosts.page) is GrantMode.FREEZE


@pytest.mark.promise("host.refuses")
def test_what_it_cannot_be_a_host_with_is_one_line_and_it_serves_on(hosts: Hosts) -> None:
    said = [line for line in hosts.unseen.said.splitlines() if "serves on without ROSE" in line]
    assert len(said) == 1
    assert "ROSE_SLO_TTFT_S is '0,5'; give seconds" in said[0]
    expected = hosts.stock.complete(PROMPTS[0], 12, "stock").tokens
    assert hosts.unseen.complete(PROMPTS[0], 12, "unseen").tokens == expected


@pytest.mark.promise("host.bad-page")
def test_without_a_good_page_it_is_the_stock_engine(hosts: Hosts) -> None:
    expected = hosts.stock.burst(PROMPTS, 24, "stock")
    assert hosts.bad.burst(PROMPTS, 24, "bad") == expected
    said = [line for line in hosts.bad.said.splitlines() if "serves on without ROSE" in line]
    assert len(said) == 1
    assert "is not a control page" in said[0]


@pytest.mark.promise("host.beats")
def test_an_idle_host_is_believed_for_as_long_as_it_lives(hosts: Hosts) -> None:
    hosts.unseen.kill()
    hosts.idle()
    for _ in range(8):
        time.sleep(0.25)
        now_ns = time.monotonic_ns()
        assert hosts.page.host_view().doubt(now_ns) is None
    assert granted(hosts.page) is GrantMode.RUN


def watched(hosts: Hosts, tokens: int) -> list[HostState]:
    """Each state of the page while one request runs."""
    seen = [hosts.state]
    asking = threading.Thread(target=hosts.host.complete, args=(PROMPTS[3], tokens, "watched"))
    asking.start()
    while asking.is_alive():
        state = hosts.page.host.peek()
        if state is not None and state != seen[-1]:
            seen.append(state)
        time.sleep(0.0005)
    asking.join()
    return seen[1:]


@pytest.mark.promise("host.busy")
def test_it_is_busy_before_its_first_step(hosts: Hosts) -> None:
    # The observer may miss some steps on a busy machine, but not each time.
    told_from: list[int] = []
    told_to: list[int] = []
    for _ in range(TRIES):
        hosts.idle()
        before = hosts.state.step_seq
        busy = [state for state in watched(hosts, 40) if not state.idle]
        assert all(state.running + state.waiting == 1 for state in busy)
        told_from += [state.step_seq - before for state in busy[:1]]
        told_to += [state.step_seq - before for state in busy[-1:]]
        if told_from and min(told_from) <= 1 and max(told_to) >= 30:
            break
    assert min(told_from) <= 1, "it is told before the step, or with it"
    assert max(told_to) >= 30


@pytest.mark.promise("host.idle")
def test_it_is_idle_once_its_last_request_is_done(hosts: Hosts) -> None:
    hosts.idle()
    before = hosts.state
    during = watched(hosts, 40)
    first = next(at for at, state in enumerate(during) if not state.idle)
    last = max(at for at, state in enumerate(during) if not state.idle)
    assert not any(state.idle for state in during[first:last])
    hosts.idle()
    after = hosts.state
    assert after.busy_ns > before.busy_ns
    assert after.queued_prefill_tokens == 0
    assert after.earliest_prefill_deadline_ns == after.earliest_decode_deadline_ns == 0
    assert granted(hosts.page) is GrantMode.RUN


@pytest.mark.promise("host.deadlines")
def test_it_says_when_its_next_tokens_are_due(hosts: Hosts) -> None:
    during = watched(hosts, 40)
    first = [state for state in during if state.earliest_prefill_deadline_ns]
    later = [state for state in during if state.earliest_decode_deadline_ns]
    assert first
    assert later
    for state in first:
        assert state.queued_prefill_tokens > 0
        assert state.earliest_prefill_deadline_ns - state.heartbeat_ns <= TTFT_S * 1e9
    for state in later:
        assert state.earliest_decode_deadline_ns - state.heartbeat_ns <= TPOT_S * 1e9


@pytest.mark.promise("host.latencies")
def test_each_finished_request_is_told_under_its_clients_id(hosts: Hosts) -> None:
    cursor = hosts.page.latency.cursor
    took_s = {}
    for name in ("load-1-0001", "5d0f1c9e-0a52-4f6e-9d6a-0123456789ab"):
        began_s = time.monotonic()
        hosts.host.complete(PROMPTS[5], 20, name)
        took_s[name] = time.monotonic() - began_s
    found: dict[str, LatencyRecord] = {}

    def arrived() -> bool:
        found.update({r.request_id: r for r in hosts.page.latency.drain(cursor).records})
        return took_s.keys() <= found.keys()

    until(arrived, 10.0, f"records of {list(took_s)}")
    for name, client_s in took_s.items():
        record = found[name]
        assert (record.prompt_tokens, record.output_tokens) == (len(PROMPTS[5]), 20)
        assert 0 < record.ttft_ns < record.e2e_ns <= client_s * 1e9
        assert record.tpot_ns == pytest.approx((record.e2e_ns - record.ttft_ns) / 19, rel=0.01)


@pytest.mark.promise("host.exact")
def test_it_generates_what_the_stock_engine_does(hosts: Hosts) -> None:
    for number in range(2):
        expected = hosts.stock.burst(PROMPTS, 32, f"stock-{number}")
        assert hosts.host.burst(PROMPTS, 32, f"host-{number}") == expected


@pytest.mark.promise("host.lends")
def test_idle_memory_goes_out_and_comes_back_for_who_needs_it(hosts: Hosts) -> None:
    until(lambda: hosts.state.granules_lent > 0, 20.0, "it lends")
    until(lambda: hosts.state.bytes_lent > KV_BYTES // 4, 20.0, "pages are measured to be gone")
    before = hosts.state.granules_lent
    expected = hosts.stock.burst(BURST, 100, "stock-burst")
    least = [before]
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(0.002):
            state = hosts.page.host.peek()
            if state is not None:
                least.append(state.granules_lent)

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        assert hosts.host.burst(BURST, 100, "host-burst") == expected
    finally:
        ended.set()
        watching.join()
    assert min(least) < before, "it took some back"
    numbers = count()

    def lends_again() -> bool:
        # An idle vLLM runs no code: what grew cold meanwhile goes out after its next request.
        hosts.host.complete(PROMPTS[0], 2, f"late-{next(numbers)}")
        return hosts.state.granules_lent >= before

    until(lends_again, 30.0, "it lends again", every_s=0.3)


@pytest.mark.promise("host.node")
def test_a_node_daemon_reads_its_page(hosts: Hosts, tmp_path: Path) -> None:
    metrics = free_port()
    config = {
        "node": "contract",
        "scheduler": f"127.0.0.1:{free_port()}",
        "run_dir": str(tmp_path / "run"),
        "log_dir": str(tmp_path / "logs"),
        "verify_key": SigningKey.generate().verify_key.hex,
        "host": {"page": str(hosts.page.path), "engine": hosts.host.engine.kind.value},
        "replicas": [],
        "metrics_port": metrics,
    }
    file = tmp_path / "node.json"
    file.write_text(json.dumps(config))
    with (tmp_path / "node.log").open("wb") as log:
        daemon = subprocess.Popen(
            [sys.executable, "-m", "rose.cli", "node", "--config", str(file)],
            stdout=log,
            stderr=log,
        )
    try:

        def scraped() -> str:
            assert daemon.poll() is None, (tmp_path / "node.log").read_text()
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{metrics}/metrics") as answer:
                    return str(answer.read().decode())
            except OSError:
                return ""

        until(lambda: "rose_" in scraped(), 30.0, "it measures", every_s=0.2)
        hosts.host.burst(PROMPTS, 16, "read")
        until(lambda: requests(scraped()) >= len(PROMPTS), 10.0, "it read them", every_s=0.2)
    finally:
        daemon.terminate()
        daemon.wait(20)


def requests(metrics: str) -> float:
    """Return the host's requests that the daemon counted."""
    counted = [
        float(line.split()[-1])
        for line in metrics.splitlines()
        if line.startswith("rose_host_requests_total")
    ]
    return sum(counted)


@pytest.mark.promise("host.leaves")
def test_it_is_no_host_once_its_process_has_ended(hosts: Hosts) -> None:
    assert hosts.page.host_view().seated
    hosts.host.kill()
    until(lambda: not hosts.page.host_view().seated, 5.0, "the seat is free")
    assert granted(hosts.page) is GrantMode.FREEZE
