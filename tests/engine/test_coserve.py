"""A real host and a real guest on one control page: published, gated, frozen, orphaned."""

import http.client
import json
import logging
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from tiny_model import save_tiny_model
from vllm_versions import VERSIONS, run_by

from executor import ControlPage, GateLimits, Grant, GrantMode, GuestState, LatencyRecord
from rose.engines import EngineRole, EngineSpec, process_spec
from rose.ports import free_port

pytestmark = [pytest.mark.engine, pytest.mark.timeout(420)]

log = logging.getLogger(__name__)
START_S = 240.0
ORPHAN_S = 2.0
GRANT = Grant(GrantMode.RUN, token_budget=512, max_sequences=16, epoch=1, reason="leased")


class Granter(threading.Thread):
    """Stands in for the node daemon: rewrites one grant at 50 Hz, or stays silent."""

    def __init__(self, page: ControlPage) -> None:
        super().__init__(daemon=True)
        self._page = page
        self.mode: GrantMode | None = GrantMode.FREEZE
        self.ttl_s = 0.5
        self.slack_share = 0.0
        self._ended = threading.Event()

    def run(self) -> None:
        while not self._ended.is_set():
            if self.mode is not None:
                now_ns = time.monotonic_ns()
                self._page.grant.write(
                    replace(
                        GRANT,
                        mode=self.mode,
                        slack_share=self.slack_share,
                        heartbeat_ns=now_ns,
                        expiry_ns=now_ns + int(self.ttl_s * 1e9),
                    )
                )
            time.sleep(0.02)

    def stop(self) -> None:
        self._ended.set()
        self.join()


@dataclass
class Engine:
    name: str
    port: int
    process: subprocess.Popen[bytes]
    log: Path

    def complete(
        self, request_id: str, max_tokens: int, timeout_s: float = 60, shift: int = 0
    ) -> dict[str, object]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout_s)
        body = {
            "model": self.name,
            "prompt": [(i * 7 + shift) % 96 for i in range(40)],
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "detokenize": False,
            "return_token_ids": True,
        }
        headers = {"Content-Type": "application/json", "X-Request-Id": request_id}
        try:
            connection.request("POST", "/v1/completions", json.dumps(body), headers)
            response = connection.getresponse()
            answer = json.loads(response.read())
        finally:
            connection.close()
        assert response.status == 200, answer
        return answer

    def healthy(self) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=2)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except OSError:
            return False
        finally:
            connection.close()

    def wait_ready(self, deadline_s: float) -> None:
        while time.monotonic() < deadline_s:
            assert self.process.poll() is None, self.log.read_text()[-4000:]
            if self.healthy():
                return
            time.sleep(0.5)
        raise AssertionError(f"not ready in time: {self.log.read_text()[-4000:]}")

    def stop(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGTERM)
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(20)


@dataclass
class Pair:
    page: ControlPage
    granter: Granter
    host: Engine
    guest: Engine

    def guest_state(self) -> GuestState:
        """A guest behind everybody else may lose its core in the middle of a write."""
        deadline_s = time.monotonic() + 5.0
        while (state := self.page.guest.peek()) is None:
            assert time.monotonic() < deadline_s
            time.sleep(0.001)
        return state


def start_engine(role: EngineRole, folder: Path, page: Path, python: str | None) -> Engine:
    port = free_port()
    log = folder / f"{role}.log"
    how = run_by(python, folder)
    how["extra_env"] = {"ROSE_POLICY_VERSION": "7", **how.get("extra_env", {})}
    spec = EngineSpec(
        name=role.value,
        role=role,
        model_dir=folder / "model",
        port=port,
        log=log,
        control_page=page,
        orphan_s=ORPHAN_S,
        extra_args=("--skip-tokenizer-init", "--generation-config=vllm"),
        **how,
    )
    command = process_spec(spec)
    with log.open("wb") as sink:
        process = subprocess.Popen(
            command.argv,
            env={**os.environ, **command.env},
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return Engine(role.value, port, process, log)


@pytest.fixture(scope="module", params=VERSIONS)
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("coserve")
    save_tiny_model(folder / "model", dtype="bfloat16", eos_token_id=1)
    path = folder / "page"
    page = ControlPage.create(path)
    granter = Granter(page)
    granter.start()
    host = start_engine(EngineRole.HOST, folder, path, request.param)
    guest = start_engine(EngineRole.GUEST, folder, path, request.param)
    try:
        deadline_s = time.monotonic() + START_S
        host.wait_ready(deadline_s)
        guest.wait_ready(deadline_s)
        yield Pair(page, granter, host, guest)
    finally:
        host.stop()
        guest.stop()
        granter.stop()
        page.close()


def eventually(check: Callable[[], object], within_s: float, what: str) -> None:
    deadline_s = time.monotonic() + within_s
    while not check():
        assert time.monotonic() < deadline_s, f"not within {within_s} s: {what}"
        time.sleep(0.002)


def test_host_section_follows_the_host_and_ends_idle(pair: Pair) -> None:
    before = pair.page.host.read()
    assert before is not None, "the host publishes itself before its first request"
    assert before.idle
    busy_seen = 0
    asking = threading.Thread(target=pair.host.complete, args=("watched", 60))
    asking.start()
    while asking.is_alive():
        state = pair.page.host.peek()
        if state is not None and not state.idle:
            busy_seen += 1
            assert state.running + state.waiting >= 1
        time.sleep(0.001)
    after = pair.page.host.read()
    assert busy_seen > 5
    assert after is not None
    assert after.idle
    assert after.step_seq >= before.step_seq + 60
    assert after.busy_ns > before.busy_ns
    assert after.queued_prefill_tokens == 0
    assert after.earliest_prefill_deadline_ns == after.earliest_decode_deadline_ns == 0
    assert after.kv_total > 0


def test_latencies_arrive_under_the_clients_request_id(pair: Pair) -> None:
    cursor = pair.page.latency.total
    sent_s: dict[str, float] = {}
    for name in ("load-1-0001", "5d0f1c9e-0a52-4f6e-9d6a-0123456789ab"):
        began_s = time.monotonic()
        pair.host.complete(name, 20)
        sent_s[name] = time.monotonic() - began_s
    records: dict[str, LatencyRecord] = {}

    def all_arrived() -> bool:
        records.update({r.request_id: r for r in pair.page.latency.drain(cursor).records})
        return sent_s.keys() <= records.keys()

    eventually(all_arrived, 2.0, f"records of {list(sent_s)}, have {list(records)}")
    for name, client_e2e_s in sent_s.items():
        record = records[name]
        assert (record.prompt_tokens, record.output_tokens) == (40, 20)
        assert 0 < record.ttft_ns < record.e2e_ns <= client_e2e_s * 1e9
        assert record.tpot_ns == pytest.approx((record.e2e_ns - record.ttft_ns) / 19, rel=0.01)


def test_no_token_while_frozen_and_on_it_goes_after(pair: Pair) -> None:
    pair.granter.mode = GrantMode.FREEZE
    time.sleep(0.1)
    before = pair.guest_state()
    answers: list[dict[str, object]] = []
    asking = threading.Thread(target=lambda: answers.append(pair.guest.complete("frozen", 30)))
    asking.start()
    eventually(lambda: pair.guest_state().waiting == 1, 5.0, "the request waits in the guest")
    time.sleep(1.0)
    frozen = pair.guest_state()
    assert frozen.gate_reason == "frozen"
    assert (frozen.tokens_total, frozen.step_seq) == (before.tokens_total, before.step_seq)
    assert frozen.yielded_ns - before.yielded_ns > 0.8e9
    assert time.monotonic_ns() - frozen.heartbeat_ns < 0.2e9
    assert frozen.policy_version == 7
    pair.granter.mode = GrantMode.RUN
    asking.join(20)
    assert answers, "the guest goes on once it may run"
    assert pair.guest_state().tokens_total == before.tokens_total + 30


def test_guest_aborts_go_through_while_frozen(pair: Pair) -> None:
    pair.granter.mode = GrantMode.FREEZE
    time.sleep(0.1)
    with pytest.raises(TimeoutError):
        pair.guest.complete("given-up", 30, timeout_s=0.5)
    eventually(lambda: pair.guest_state().waiting == 0, 5.0, "the client that left is gone")
    pair.granter.mode = GrantMode.RUN


def guest_tokens_while_host_is_busy(pair: Pair, slack_share: float) -> int:
    pair.granter.mode, pair.granter.slack_share = GrantMode.RUN, slack_share
    time.sleep(0.1)
    begun = last = pair.guest_state().tokens_total
    serving = threading.Thread(target=pair.host.complete, args=("serving", 450))
    serving.start()
    eventually(lambda: (host := pair.page.host.peek()) and not host.idle, 5.0, "the host serves")
    rolling = threading.Thread(target=pair.guest.complete, args=("rolling", 100))
    rolling.start()
    while serving.is_alive():
        tokens = pair.guest_state().tokens_total
        host = pair.page.host.peek()
        if host is not None and not host.idle:
            last = tokens
        time.sleep(0.001)
    serving.join()
    rolling.join(20)
    assert not rolling.is_alive()
    pair.granter.slack_share = 0.0
    return last - begun


def test_a_busy_host_lends_its_slack_only_when_told_to(pair: Pair) -> None:
    assert guest_tokens_while_host_is_busy(pair, slack_share=0.0) == 0
    lent = guest_tokens_while_host_is_busy(pair, slack_share=1.0)
    log.info("%d of 100 guest tokens came while the host was busy", lent)
    assert lent > 20


@pytest.mark.parametrize(("ttl_s", "reason"), [(0.2, "grant_expired"), (0.5, "heartbeat_stale")])
def test_silence_freezes_within_one_step_and_a_grant_revives(
    pair: Pair, ttl_s: float, reason: str
) -> None:
    waits_ms, longest_step_ms = [], 0.0
    pair.granter.ttl_s = ttl_s
    for trial in range(4):
        pair.granter.mode = GrantMode.RUN
        time.sleep(0.1)
        yielded_before_ns = pair.guest_state().yielded_ns
        asking = threading.Thread(
            target=pair.guest.complete, args=(f"silent-{trial}", 450), kwargs={"shift": trial}
        )
        asking.start()
        eventually(lambda: pair.guest_state().running == 1, 5.0, "the guest runs")
        pair.granter.mode = None
        time.sleep(0.05)
        grant = pair.page.grant.read()
        assert grant is not None
        due_ns = min(grant.expiry_ns, grant.heartbeat_ns + GateLimits().grant_stale_ns)
        eventually(lambda: pair.guest_state().gate_reason != "ok", 2.0, "the guest yields")
        time.sleep(0.1)
        state = pair.guest_state()
        tokens = state.tokens_total
        time.sleep(0.2)
        state = pair.guest_state()
        assert state.tokens_total == tokens, "silence lets no token through"
        first_yield_ns = state.heartbeat_ns - (state.yielded_ns - yielded_before_ns)
        waits_ms.append(round((first_yield_ns - due_ns) / 1e6, 1))
        longest_step_ms = max(longest_step_ms, state.last_step_ns / 1e6)
        pair.granter.mode = GrantMode.RUN
        asking.join(30)
        assert not asking.is_alive()
    log.info("%s: step %.1f ms, first yield late by %s ms", reason, longest_step_ms, waits_ms)
    assert min(waits_ms) >= 0
    # One step, and what a shared core may keep a process waiting.
    assert max(waits_ms) < longest_step_ms + 50


def test_an_orphaned_guest_ends_itself_and_the_host_serves_on(pair: Pair) -> None:
    pair.granter.mode = None
    began_s = time.monotonic()
    pair.guest.process.wait(ORPHAN_S + 20)
    took_s = time.monotonic() - began_s
    log.info("orphaned guest gone in %.1f s, exit %s", took_s, pair.guest.process.returncode)
    assert "guest ends itself: orphaned" in pair.guest.log.read_text()
    assert pair.host.complete("still-there", 5)["choices"]
