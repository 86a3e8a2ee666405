"""The raw records of a bench that never ran: the tests choose what each arm does to the host."""

import json
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.coserve.plan import ArmCell, PlanBlock, make_events, make_rounds
from executor.step_log import StepLog

NS = 1e9
IDLE_TOK_S = 1_000.0


@dataclass
class StandInBench:
    """Knobs; the defaults give a ROSE that nobody notices, and a naive guest that harms."""

    out: Path
    rounds: int = 4
    block_s: float = 14.0
    rate_per_s: float = 15.0
    busy: float = 0.6
    slowdown: dict[str, float] = field(default_factory=lambda: {"naive": 1.6})
    wrong_tokens: dict[str, int] = field(default_factory=dict)
    preemptions: dict[str, int] = field(default_factory=dict)
    guest_share_of_idle: float = 0.92
    guest_share_lent: float = 0.75
    guest_step_s: float = 0.006
    held_arm: str = ""

    def write(self) -> Path:
        self.out.mkdir(parents=True, exist_ok=True)
        cell = ArmCell(self.busy, "poisson", self.rate_per_s)
        blocks = make_rounds([cell], [self.rounds], self.block_s, 6.0, seed=0)
        blocks += make_events(cell, 1, 30.0)
        self._host = StepLog(self.out / "steps-host-1.bin", 200_000, lambda: 0)
        self._cpu_ns = 0
        self._guest = StepLog(self.out / "steps-guest-1.bin", 200_000, lambda: self._cpu_ns)
        records: dict[str, list[Any]] = {
            "blocks": [],
            "client_requests": [],
            "host_latency": [],
            "guest": [],
        }
        now_s = 1_000.0
        for number, block in enumerate(blocks):
            self._block(records, number, block, now_s)
            now_s += block.duration_s + 3.0
        for name, lines in records.items():
            text = "".join(json.dumps(line) + "\n" for line in lines)
            (self.out / f"{name}.jsonl").write_text(text)
        event = {"t_s": 1.0, "source": "bench", "event": "guest_kill", "block": 3, "took_s": 0.1}
        (self.out / "events.jsonl").write_text(json.dumps(event) + "\n")
        (self.out / "run.json").write_text(json.dumps(self._run()))
        return self.out

    def _run(self) -> dict[str, Any]:
        return {
            "seed": 0,
            "quick": False,
            "settings": {"window_s": 2.0},
            "machine": {},
            "capacity_rps": 4 * self.rate_per_s,
            "calibrations": [],
            "ttft_target_s": 0.2,
            "tpot_target_s": 0.05,
            "targets_from": "given",
        }

    def _block(
        self, records: dict[str, list[Any]], number: int, block: PlanBlock, at_s: float
    ) -> None:
        arm = block.arm
        tokens = self._guest_steps(block, at_s)
        end_s = at_s + block.duration_s
        start = {"host_busy_ns": 0, "host_preemptions": 0, "guest_tokens": 0, "naive_tokens": 0}
        key = "naive_tokens" if arm.guest == "naive" else "guest_tokens"
        end = start | {key: tokens, "host_preemptions": self.preemptions.get(arm.name, 0)}
        cell = block.cell
        records["blocks"].append(
            {
                "block": number,
                "arm": arm.name,
                "round": block.round,
                "segment": block.segment,
                "busy_target": cell.busy_target if cell else None,
                "traffic": cell.traffic if cell else None,
                "rate_per_s": cell.rate_per_s if cell else None,
                "policy": arm.policy,
                "slack_share": arm.slack_share,
                "isolation": "none",
                "start_s": at_s,
                "end_s": end_s,
                "start": start,
                "end": end,
            }
        )
        records["guest"].append(self._sample(block, at_s))
        if cell:
            self._requests(records, number, block, at_s)

    def _sample(self, block: PlanBlock, at_s: float) -> dict[str, Any]:
        pressed = block.arm.policy == "paper"
        zeros = ("running", "tokens_total", "step_seq", "yielded_ns", "host_busy_ns")
        reason = "no_lease" if block.arm.name == self.held_arm else "ok"
        sample = {"t_s": at_s + 1, "mode": "throttle" if pressed else "run", "reason": reason}
        kv = {"kv_bytes": 1 << 20 if pressed else 4 << 20, "host_running": 0, "host_kv": 0.5}
        return sample | dict.fromkeys(zeros, 0) | kv

    def _requests(
        self, records: dict[str, list[Any]], number: int, block: PlanBlock, at_s: float
    ) -> None:
        name = block.arm.name
        rng = random.Random(f"arrivals/{block.segment}")
        noise = random.Random(f"noise/{number}")
        slow = self.slowdown.get(name, 1.0)
        offset_s, index = 0.0, 0
        while (offset_s := offset_s + rng.expovariate(self.rate_per_s)) < block.duration_s:
            ttft_s = 0.020 * rng.uniform(0.8, 1.4) * slow * noise.uniform(0.99, 1.01)
            tpot_s = 0.008 * rng.uniform(0.9, 1.1) * slow * noise.uniform(0.99, 1.01)
            arrival_s = at_s + offset_s
            request = {
                "request_id": f"b{number}n{index}",
                "block": number,
                "arm": name,
                "segment": block.segment,
                "offset_s": round(offset_s, 6),
                "arrival_s": arrival_s,
                "ttft_s": ttft_s + 0.002,
                "e2e_s": ttft_s + 8 * tpot_s,
                "output_tokens": 8,
                "status": "ok",
                "output_digest": f"{block.segment}/{index}/"
                + ("x" if index < self.wrong_tokens.get(name, 0) else ""),
            }
            records["client_requests"].append(request)
            records["host_latency"].append(
                {
                    "request_id": request["request_id"],
                    "finished_s": arrival_s + ttft_s + 8 * tpot_s,
                    "ttft_s": ttft_s,
                    "tpot_s": tpot_s,
                    "e2e_s": ttft_s + 8 * tpot_s,
                    "prompt_tokens": 30,
                    "output_tokens": 8,
                }
            )
            at_ns = round(arrival_s * NS)
            self._host.arrival(at_ns - 1_000_000, at_ns, 30)
            index += 1
        for k in range(int(block.duration_s * 10)):
            begin_ns = round((at_s + k / 10) * NS)
            self._host.step(begin_ns, begin_ns + round(0.1 * self.busy * NS), 8, 4)

    def _guest_steps(self, block: PlanBlock, at_s: float) -> int:
        """One step every 100 ms that sampled whatever the arm's share comes to."""
        if block.arm.guest == "none":
            return 0
        share = 1.0
        if block.cell:
            share = (1 - self.busy) * self.guest_share_of_idle
            if block.arm.slack_share:
                share = 0.75 * self.guest_share_lent
        a_step = round(IDLE_TOK_S * share / 10)
        steps = int(block.duration_s * 10)
        for k in range(steps if block.arm.guest == "rose" else 0):
            begin_ns = round((at_s + k / 10 + 0.1 * self.busy) * NS)
            self._guest.begin()
            self._cpu_ns += round(self.guest_step_s * NS)
            self._guest.step(begin_ns, begin_ns + round(self.guest_step_s * NS), 16, 16, a_step)
        return a_step * steps
