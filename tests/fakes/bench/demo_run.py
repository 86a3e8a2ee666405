"""A run that never happened: synthetic raw records; every claim holds, or a named one fails."""

import json
import math
import random
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from bench.demo.plan import (
    BLOCK_S,
    STORM_STEPS,
    ExperimentBlock,
    accept_plan,
    sharing_plan,
)
from bench.load.protocol import LoadShape, generate_segment

T0_S = 1000.0
FROZEN_STEP_S = BLOCK_S / 2
MAPS = 512
GROUPS = 8
GROUP_SIZE = 4
TURNS = 2


@dataclass
class StandInRun:
    """Knobs of the synthetic run; the defaults make every claim hold."""

    steps: int = 60
    seed: int = 0
    quickstart: bool = False
    control: str | None = None
    first_reward: float = 0.45
    last_reward: float = 0.75
    warm_start: float = 0.55
    final: float = 0.80
    gap: dict[str, float] = field(
        default_factory=lambda: {"guest": 0.003, "dedicated": 0.003, "continued": 0.004}
    )
    leased_speedup: float = 1.5
    ceiling_speedup: float = 1.6
    guest_tokens_per_s: float = 500.0
    idle_efficiency: float = 0.9
    speedup_noise: float = 0.02
    busy: float = 0.4
    ttft_ratio: float = 1.0
    tpot_ratio: float = 1.0
    slow_tail: float = 1.0
    leased_failures: float = 0.0
    rate_per_s: float = 6.0
    lost: int = 0
    duplicated: int = 0
    unstamped: int = 0
    spanning: float = 0.3
    staleness: int = 1
    digest_failures: int = 0
    probe_failures: int = 0
    forced_revocations: int = 12
    mid_turn: bool = True
    kill_signal: int | None = 9
    # The guest's leases in a run of two jobs, one after the other, with their durations.
    leases: tuple[tuple[str, float], ...] = ()
    new_engines: int = 0

    def write(self, folder: Path) -> Path:
        """Write all raw records into `folder` and return it."""
        for name, content in (_good_run() if self == StandInRun() else self.files()).items():
            (folder / name).write_bytes(content)
        return folder

    def files(self) -> dict[str, bytes]:
        """Contents by name."""
        writer = _Writer(self)
        writer.play()
        if self.leases:
            _share(writer)
        encoder = msgspec.json.Encoder()
        files = {f"{name}.jsonl": encoder.encode_lines(v) for name, v in writer.files.items()}
        settings = {"seed": self.seed, "steps": self.steps, "control": self.control}
        settings |= {"quickstart": self.quickstart, "accept": not self.quickstart}
        run = {"t0_s": T0_S, "end_s": writer.now_s + 3, "settings": settings}
        return files | {"run.json": json.dumps(run).encode()}


# Most runs hear the same arrivals.
_segment = cache(generate_segment)


@cache
def _good_run() -> dict[str, bytes]:
    """The files of a run in which everything went well: they take most of a second to make."""
    return StandInRun().files()


class _Writer:
    """Plays the plan on a clock of its own."""

    def __init__(self, run: StandInRun) -> None:
        self.run = run
        self.rng = random.Random(run.seed)
        self.now_s = T0_S + 60
        self.step = 0
        self.tokens = {"guest-0": 0, "dedicated-0": 0}
        self.busy_ns = 0
        names = "client_requests host_latency turns steps trajectories blocks activations events"
        self.files: dict[str, list[Any]] = {
            name: [] for name in (*names.split(), "guest", "memory")
        }

    def play(self) -> None:
        self._evaluate("warm_start", self.run.warm_start)
        plan = sharing_plan() if self.run.leases else accept_plan(self.run.seed, self.run.steps)
        for block in plan:
            self._block(block)
        self._evaluate("final", self.run.final)
        self._spoil_trajectories()
        self._guest_and_memory()

    def _evaluate(self, which: str, success: float) -> None:
        count = round(success * MAPS)
        crossed = "1" * count + "0" * (MAPS - count)
        self._event("trainer", "eval", which=which, success=count / MAPS, n=MAPS, crossed=crossed)

    def _event(self, source: str, event: str, t_s: float | None = None, **extra: Any) -> None:
        t_s = self.now_s if t_s is None else t_s
        self.files["events"].append({"t_s": t_s, "source": source, "event": event, **extra})

    def _stats(self) -> dict[str, Any]:
        elapsed_s = self.now_s - T0_S
        return {
            "steps": self.step,
            "tokens": dict(self.tokens),
            "host_busy_ns": self.busy_ns,
            "cpu_s": {"host": 0.4 * elapsed_s, "guest": 0.5 * elapsed_s, "trainer": elapsed_s},
        }

    def _block(self, block: ExperimentBlock) -> None:
        speedup = {"leased": self.run.leased_speedup, "ceiling": self.run.ceiling_speedup}
        start_s, before = self.now_s, self._stats()
        until = self.step + STORM_STEPS if block.revocations else block.until_step
        while self.now_s < start_s + block.seconds or self.step < until:
            noise = 1 + self.rng.uniform(-1, 1) * self.run.speedup_noise
            step_s = FROZEN_STEP_S / speedup.get(block.arm, 1.0) * noise
            self._step(block, step_s)
        if block.revocations:
            self._storm(start_s)
        if block.segment is not None:
            self.busy_ns += int((self.now_s - start_s) * self.run.busy * 1e9)
            self._requests(block, start_s)
        self.files["blocks"].append(
            {"block": block.block, "pair": block.pair, "arm": block.arm, "segment": block.segment}
            | {"start_s": start_s, "end_s": self.now_s}
            | {"start_stats": before, "end_stats": self._stats()}
        )

    def _step(self, block: ExperimentBlock, step_s: float) -> None:
        progress = self.step / max(1, self.run.steps - 1)
        solved = self.run.first_reward + progress * (self.run.last_reward - self.run.first_reward)
        start_s = self.now_s
        before = sum(self.tokens.values())
        rewards = [
            self._trajectory(f"g{group}", member, solved, block, start_s, step_s)
            for group in range(GROUPS)
            for member in range(GROUP_SIZE)
        ]
        self.now_s += step_s
        version = self.step + 1
        self.files["steps"].append(
            {"step": self.step, "start_s": start_s, "end_s": self.now_s}
            | {"reward_mean": sum(rewards) / len(rewards), "reward_n": len(rewards)}
            | {"tokens": sum(self.tokens.values()) - before, "trajectories": len(rewards)}
            | {"spanning": 0, "clip_fraction": 0.01, "grad_norm": 0.7, "version": version}
            | {"density": 0.9 - 0.5 * progress, "full_bytes": 1_300_000}
            | {"wire_bytes": int(1_100_000 - 400_000 * progress), "publish_s": 0.1, "train_s": 1.2}
        )
        for kind in ("guest", "dedicated"):
            self._activation(kind, version)
        self.step += 1

    def _activation(self, kind: str, version: int) -> None:
        guest = kind == "guest"
        self.files["activations"].append(
            {"t_s": self.now_s, "replica": f"{kind}-0", "kind": kind, "version": version}
            | {"digest_ok": not (guest and version <= self.run.digest_failures)}
            | {"probe_ok": not (guest and version <= self.run.probe_failures)}
            | {"probe_max_abs_diff": 0.0, "pause_s": 0.01, "apply_s": 0.02}
            | {"wire_bytes": 1000, "changed": 10}
        )

    def _trajectory(
        self,
        group: str,
        member: int,
        solved: float,
        block: ExperimentBlock,
        start_s: float,
        step_s: float,
    ) -> float:
        name = f"t{self.step}-{group}-{member}"
        reward = float(self.rng.random() < solved)
        spans = self.step > 0 and self.rng.random() < self.run.spanning
        oldest = max(0, self.step - self.run.staleness) if spans else self.step
        moved = spans and block.arm == "leased" and self.rng.random() < 0.1
        for turn in range(TURNS):
            self._turn(name, group, turn, block, oldest, moved and turn == 1, start_s, step_s)
        self.files["trajectories"].append(
            {"trajectory": name, "group": group, "step": self.step, "start_s": start_s}
            | {"end_s": start_s + step_s, "turns": TURNS, "reward": reward}
            | {"versions": sorted({oldest, self.step}), "delivered": 1, "revoked_mid_turn": moved}
        )
        return reward

    def _turn(
        self,
        name: str,
        group: str,
        turn: int,
        block: ExperimentBlock,
        version: int,
        moved: bool,
        start_s: float,
        step_s: float,
    ) -> None:
        tokens = self.rng.randint(10, 14)
        lent = block.arm != "frozen" and self.rng.random() < 0.4
        kind = "guest" if lent or moved else "dedicated"
        segments: list[list[Any]] = [[f"{kind}-0", kind, 0, tokens]]
        if moved:
            segments = [["guest-0", "guest", 0, 5], ["dedicated-0", "continued", 5, tokens]]
        for replica, _, start, end in segments:
            self.tokens[replica] += end - start
        begin_s = start_s + step_s * (turn + 0.9 * self.rng.random()) / TURNS
        gap = {k: [self.run.gap[k] * (end - a), end - a] for _, k, a, end in segments}
        self.files["turns"].append(
            {"request_id": f"{name}.{turn}", "trajectory": name, "group": group}
            | {"step": self.step, "turn": turn, "start_s": begin_s, "end_s": begin_s + 0.2}
            | {"prompt_tokens": 20, "output_tokens": tokens, "versions": [[version, 0, tokens]]}
            | {"segments": segments, "attempts": len(segments), "finish_reason": "stop"}
            | {"gap": gap, "unstamped": 0}
        )

    def _storm(self, start_s: float) -> None:
        gap_s = (self.now_s - start_s) / (self.run.forced_revocations + 2)
        for index in range(self.run.forced_revocations):
            t_s = start_s + gap_s * (index + 1)
            self._event("demo", "forced_revocation", t_s, replica="guest-0")
            if self.run.mid_turn:
                turn = dict(self.files["turns"][-1], start_s=t_s - 0.1, end_s=t_s + 0.1)
                turn |= {"attempts": 2, "request_id": f"storm.{index}"}
                self.files["turns"].append(turn)
        if self.run.kill_signal is not None:
            self._event("demo", "guest_killed", self.now_s - 0.2, signal=self.run.kill_signal)

    def _requests(self, block: ExperimentBlock, start_s: float) -> None:
        segment = block.segment or 0
        shape = LoadShape(mean_rate_per_s=self.run.rate_per_s, segment_s=60)
        for index, arrival in enumerate(_segment(shape, self.run.seed, segment)):
            if start_s + arrival.offset_s >= self.now_s:
                return
            # The same arrival takes about as long in both arms, whatever the arm does to it.
            own = random.Random(f"{segment}/{index}")
            jitter = 1 + self.rng.uniform(-0.02, 0.02)
            lateness = own.gauss(0, 0.5)
            ttft_s = 0.02 * math.exp(lateness) * jitter
            tpot_s = 0.008 * math.exp(own.gauss(0, 0.1)) * jitter
            tail = lateness > 0.6
            failed = False
            if block.arm == "leased":
                ttft_s *= self.run.ttft_ratio * (self.run.slow_tail if tail else 1)
                tpot_s *= self.run.tpot_ratio
                failed = self.rng.random() < self.run.leased_failures
            name = f"b{block.block}s{segment}n{index}"
            e2e_s = ttft_s + tpot_s * (arrival.output_tokens - 1)
            self.files["client_requests"].append(
                {"request_id": name, "block": block.block, "arm": block.arm, "segment": segment}
                | {"offset_s": arrival.offset_s, "arrival_s": start_s + arrival.offset_s}
                | {"ttft_s": None if failed else ttft_s + 0.002, "e2e_s": e2e_s + 0.003}
                | {"output_tokens": 0 if failed else arrival.output_tokens}
                | {"status": "timeout" if failed else "ok"}
            )
            if not failed:
                self.files["host_latency"].append(
                    {"request_id": f"cmpl-{name}-0-1a2b3c4d", "ttft_s": ttft_s, "tpot_s": tpot_s}
                    | {"finished_s": start_s + arrival.offset_s + e2e_s, "e2e_s": e2e_s}
                    | {"prompt_tokens": arrival.prompt_tokens}
                    | {"output_tokens": arrival.output_tokens}
                )

    def _spoil_trajectories(self) -> None:
        found = self.files["trajectories"]
        for trajectory in found[: self.run.lost]:
            trajectory["delivered"] = 0
        for trajectory in found[-self.run.duplicated :] if self.run.duplicated else []:
            trajectory["delivered"] = 2
        for turn in self.files["turns"][: self.run.unstamped]:
            turn["versions"] = [[v, a, b - 1] for v, a, b in turn["versions"]]
        delivered = len(found) - self.run.lost
        self._event(
            "trainer",
            "done",
            started=len(found),
            delivered=delivered,
            lost=self.run.lost,
            duplicated=self.run.duplicated,
        )

    def _guest_and_memory(self) -> None:
        yielded_ns = busy_ns = 0
        tokens = 0.0
        for tenth in range(int((self.now_s - T0_S) * 10)):
            t_s = T0_S + tenth / 10
            arm = next(
                (b["arm"] for b in self.files["blocks"] if b["start_s"] <= t_s < b["end_s"]), "none"
            )
            lent = (1 - self.run.busy) * self.run.idle_efficiency
            awake = {"none": 0.0, "frozen": 0.0, "ceiling": 1.0}.get(arm, lent)
            noise = 1 + self.rng.uniform(-1, 1) * self.run.speedup_noise
            # Alone it is fast: every other second it waits for turns.
            short = arm == "ceiling" and tenth % 20 >= 10
            tokens += self.run.guest_tokens_per_s / 10 * awake * noise * (0.1 if short else 1.0)
            yielded_ns += int(1e8 * (1 - awake))
            busy_ns += int(1e8 * self.run.busy * (arm not in ("none", "ceiling")))
            self.files["guest"].append(
                {"t_s": t_s, "mode": "FREEZE" if arm == "frozen" else "RUN", "reason": arm}
                | {
                    "running": 8 if short else 30,
                    "tokens_total": int(tokens),
                    "step_seq": tenth,
                    "host_running": 1,
                    "kv_bytes": 0,
                    "host_kv": 0.5,
                }
                | {"yielded_ns": yielded_ns, "host_busy_ns": busy_ns}
            )
        for second in range(int(self.now_s - T0_S)):
            sizes = {"host": 900_000_000, "guest": 880_000_000 + second * 1_000_000}
            self.files["memory"].append({"t_s": T0_S + second, "bytes": sizes})


HANDOVER_S = 0.2


def _share(writer: _Writer) -> None:
    """Make it the run of two jobs that have the same names for everything, and one guest."""
    files = writer.files
    for turn in files["turns"]:
        turn["segments"] = [
            ["guest-0", "guest" if kind == "dedicated" else kind, start, end]
            for _, kind, start, end in turn["segments"]
        ]
        turn["gap"] = {k.replace("dedicated", "guest"): gap for k, gap in turn["gap"].items()}
    jobs = sorted({job for job, _ in writer.run.leases})
    for name in ("turns", "steps", "trajectories"):
        files[name] = [{"job": job, **row} for job in jobs for row in files[name]]
    [done] = [event for event in files["events"] if event["event"] == "done"]
    others = [event for event in files["events"] if event["event"] not in ("done", "eval")]
    files["events"] = [*others, *({**done, "job": job} for job in jobs)]
    at_s = float(files["blocks"][0]["start_s"])
    for epoch, (job, seconds) in enumerate(writer.run.leases, 1):
        lease = {"replica": "guest-0", "epoch": epoch, "job": job}
        writer._event("scheduler", "lease_granted", at_s, kind="guest", **lease)
        if epoch > 1:
            took = {"switch": "job", "took_s": 2.0}
            writer._event("scheduler", "first_token", at_s + 2.0, **lease, **took)
        at_s += seconds
        writer._event("scheduler", "lease_released", at_s, reason="drained", **lease)
        at_s += HANDOVER_S
    for _ in range(writer.run.new_engines):
        writer._event("node", "engine_switched", replica="guest-0")
