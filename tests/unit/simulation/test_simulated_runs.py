"""A simulated cluster has one history a seed, obeys production's cores, and adds up."""

import json
import math
import sys
from dataclasses import replace
from functools import partial
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from simulation_cases import ENGINE, GUEST, Silence, Users, small

from executor.step_decision import Run as MayRun
from executor.step_decision import decide
from rose.errors import ConfigError
from rose.simulation import (
    Algorithm,
    Links,
    RolloutEpisode,
    RunResult,
    Scenario,
    SimulatedRun,
    UserRequest,
    carry_out,
    plots,
)
from rose.simulation.clock import EventQueue
from rose.simulation.engine import guest as guest_module
from rose.simulation.engine.batching import ModelledEngine
from rose.simulation.fleet import users as users_module
from rose.simulation.fleet.hybrid_pool import OffloadWindow
from rose.simulation.fleet.node import ModelledTransfer
from rose.simulation.fleet.trainer import ModelledTrainer, PlayedEpisode
from rose.simulation.plots import PICTURES, save_plots
from rose.simulation.policies import CONSTANTS, POLICIES, tuned, usual_value
from rose.simulation.results import (
    Percentiles,
    SloSlice,
    StepResult,
    UserLatencies,
    UseSlice,
)
from rose.simulation.run import Simulation, run_all
from rose.simulation.tables import longest_alone_s, most_gain


def run(
    scenario: Scenario, policy: str, seed: int = 0, options: dict[str, float] | None = None
) -> RunResult:
    return carry_out(SimulatedRun(scenario, policy, seed, options or {}))


@pytest.fixture(scope="module")
def results() -> dict[str, RunResult]:
    """The small cluster under every policy."""
    return {policy: run(small(), policy) for policy in POLICIES}


def test_every_policy_trains_whole_batches_of_the_same_episodes_step_by_step(
    results: dict[str, RunResult],
) -> None:
    for policy, result in results.items():
        assert [step.number for step in result.steps] == [0, 1], policy
        assert result.tokens_per_s > 0, policy
        for step in result.steps:
            assert step.trajectories == 8, policy
            parts_s = step.rollout_s + step.train_s + step.sync_s
            assert parts_s == pytest.approx(step.ended_s - step.started_s)
        assert result.steps[0].ended_s == result.steps[1].started_s
    assert len({result.steps[0].total_tokens for result in results.values()}) == 1


def test_a_seed_has_one_history_and_another_seed_another(results: dict[str, RunResult]) -> None:
    assert run(small(), "rose").to_json() == results["rose"].to_json()
    assert run(small(), "rose", seed=1).to_json() != results["rose"].to_json()


@pytest.mark.parametrize("policy", ["libra", "rose"])
def test_steps_taken_as_one_event_make_the_same_history(
    policy: str, results: dict[str, RunResult], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ModelledEngine, "_leap", lambda *_: None)
    single = run(small(), policy)
    leapt = results[policy]
    assert leapt.counts["events"] < single.counts["events"]
    alike = leapt.counts | {"events": single.counts["events"]}
    assert replace(leapt, counts=alike) == single


def test_no_policy_is_done_before_its_longest_episode_alone(
    results: dict[str, RunResult],
) -> None:
    for policy, result in results.items():
        alone = [longest_alone_s(small(), 0, step.number) for step in result.steps]
        for step, longest_s in zip(result.steps, alone, strict=True):
            assert 0 < longest_s <= step.rollout_s, policy
        assert most_gain(result.steps, alone) >= 1, policy
    # A batch that need not be whole has no longest episode.
    for changes in (
        {"algorithm": Algorithm.DAPO, "over_sampling": 1.0},
        {"max_staleness": 1},
        {"tail_batching": True},
        {"parts": True},
    ):
        assert longest_alone_s(small(**changes), 0, 0) == 0


def test_no_figure_is_other_than_finite(results: dict[str, RunResult]) -> None:
    for result in results.values():
        json.loads(result.to_json(), parse_constant=pytest.fail)
        for use in result.use:
            assert all(0 <= share <= 1.001 for share in (use.host, use.guest, use.dedicated))
    with pytest.raises(ValueError, match="not JSON compliant"):
        replace(results["rose"], tokens_per_s=math.nan).to_json()


def test_only_what_borrows_uses_cards_of_others(results: dict[str, RunResult]) -> None:
    for policy in ("fixed", "libra"):
        assert results[policy].borrowed_gpu_hours == 0
    for policy in ("paper", "rose"):
        assert results[policy].borrowed_gpu_hours > 0
        assert results[policy].steps[0].borrowed_tokens > 0


def test_no_guest_step_begins_without_the_gates_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    """With slack_share 0 a guest's step never begins while its host works."""
    verdicts = []

    def asked(view: Any, grant: Any, *rest: Any) -> Any:
        verdict = decide(view, grant, *rest)
        verdicts.append((verdict, view.state.idle))
        return verdict

    monkeypatch.setattr(guest_module, "decide", asked)
    result = run(small(users=Users(3.0)), "rose", options={"slack_share": 0.0})
    ran = [idle for verdict, idle in verdicts if isinstance(verdict, MayRun)]
    refused = [verdict for verdict, _ in verdicts if not isinstance(verdict, MayRun)]
    assert result.steps
    assert ran
    assert all(ran)
    assert {verdict.reason for verdict in refused} >= {"host_busy"}


def test_a_guest_that_wakes_late_makes_less() -> None:
    idle_only = {"slack_share": 0.0}
    made = {}
    for wake_s in (0.0, 0.2):
        scenario = small(users=Users(4.0), guest=replace(GUEST, wake_s=wake_s), steps=1)
        made[wake_s] = run(scenario, "paper", options=idle_only).borrowed_gpu_hours
    assert made[0.2] < made[0.0]


def test_users_wait_longer_for_more_slack() -> None:
    scenario = small(users=Users(4.0, burst=10), until_s=20, steps=20)
    none = run(scenario, "fixed").users
    all_ = run(scenario, "rose", options={"slack_share": 1.0}).users
    assert none is not None
    assert all_ is not None
    assert all_.tpot_s.mean > none.tpot_s.mean
    assert none.requests > 20


def test_memory_of_a_card_is_never_used_twice() -> None:
    """Memory that the host can use and pages of its guest are no more than there is."""
    lent: list[int] = []
    simulated = Simulation._sample

    def sampled(self: Simulation) -> None:
        simulated(self)
        for host, guest in zip(self.hosts, self.guests, strict=True):
            assert guest.borrowed_bytes() <= host.lent_bytes()
            own = host._granules.count - host.lent
            assert host.kv.units <= own * host.granule_units
            assert host.kv.used <= host.kv.units
            lent.append(host.lent)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Simulation, "_sample", sampled)
        run(replace(small(users=Users(4.0, 20)), slice_s=0.1), "rose")
    assert max(lent) > 0


def test_a_guest_gives_memory_back_and_its_turns_go_on() -> None:
    tight = replace(ENGINE, kv_tokens=6_000)
    guest = replace(GUEST, kv_base_tokens=1_000, granule_tokens=256)
    scenario = small(guest=guest, users=Users(3.0, 12), replicas=1)
    pool = scenario.cluster.serving
    assert pool is not None
    cluster = replace(scenario.cluster, serving=replace(pool, engine=tight))
    result = run(replace(scenario, cluster=cluster), "paper")
    assert result.counts["guest_shrinks"] > 0
    assert all(step.trajectories == 8 for step in result.steps)


def test_tokens_are_never_older_than_the_trainer_allows() -> None:
    synchronous = run(small(steps=4), "rose")
    stale = run(small(steps=4, max_staleness=1), "rose")
    assert {step.oldest for step in synchronous.steps} == {0}
    assert {step.oldest for step in stale.steps} <= {0, 1}
    assert stale.steps[-1].ended_s < synchronous.steps[-1].ended_s


def test_rounds_of_the_tail_train_whole_batches_under_every_policy() -> None:
    result = run(small(tail_batching=True, steps=3, groups=4), "rose")
    assert [step.trajectories for step in result.steps] == [16, 16, 16]
    plain, tails = (run(small(steps=1), "fixed", options={"tail_batching": x}) for x in (0.0, 1.0))
    assert plain.counts["buffer_deferred"] == 0
    assert min(tails.counts["buffer_deferred"], result.counts["buffer_deferred"]) > 0


def test_a_trainer_that_takes_parts_trains_while_the_slowest_groups_roll_out() -> None:
    whole, parts = (
        run(small(parts=parts, train_s_per_token=2e-3), "rose") for parts in (False, True)
    )
    for before, step in zip(whole.steps, parts.steps, strict=True):
        assert step.total_tokens == before.total_tokens
        assert 0 < step.train_s < 0.9 * before.train_s
    # Cards that train cannot roll out, nor a batch be trained on from which groups are dropped.
    dapo = {"algorithm": Algorithm.DAPO, "over_sampling": 1.0}
    for policy, other in (("libra", {}), ("rose", dapo)):
        same = [run(small(steps=1, parts=parts, **other), policy).steps for parts in (False, True)]
        assert same[0] == same[1]


def test_a_dapo_trainer_drops_groups_that_teach_nothing() -> None:
    trained: list[RolloutEpisode] = []
    take = ModelledTrainer._take

    async def noted(self: ModelledTrainer) -> tuple[list[PlayedEpisode], int, bool]:
        episodes, version, last = await take(self)
        trained.extend(each.trajectory for each in episodes)
        return episodes, version, last

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ModelledTrainer, "_take", noted)
        result = run(small(algorithm=Algorithm.DAPO, over_sampling=1.0), "fixed")
    assert result.counts["groups_filtered"] > 0
    assert all(step.trajectories == 8 for step in result.steps)
    assert {each.score for each in trained} == {0.0, 1.0}


def test_borrowed_cards_are_whole_and_go_back_when_users_need_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(users_module, "STABLE_S", 5.0)
    monkeypatch.setattr(users_module, "SYNC_S", 1.0)
    late = tuple(UserRequest(30.0 + at / 10, 800, 20) for at in range(120))
    scenario = small(users=Silence(late), until_s=50, steps=100, train_s=2.0)
    busy = run(scenario, "spot", options={"instance_s": 2.0})
    assert busy.borrowed_gpu_hours > 0
    assert busy.counts["revoked"] > 0
    assert busy.counts["turns_failed"] == 0
    assert busy.users is not None
    assert busy.users.requests > 100


def test_training_waits_for_hybrid_cards_only_to_change_sides() -> None:
    result = run(small(groups=8, samples=8, steps=3), "libra")
    assert result.steps[-1].trajectories == 64
    window = OffloadWindow()
    first_s = window.window_s
    window.step(first_s + 1)
    assert window.window_s > first_s
    window.step(1.0)
    window.step(1.0)
    assert window.window_s < first_s


def test_each_object_crosses_the_slow_link_once() -> None:
    queue = EventQueue()
    links = Links(slow_bytes_s=1e9, near_bytes_s=1e10, latency_s=0.0)
    transfer = ModelledTransfer(queue, links, 10**10)
    transfer.publish(1, 0, 10**9)
    first_s = transfer.fetch_s(0, 1, far=True)
    assert first_s == pytest.approx(1.0)
    assert transfer.fetch_s(0, 1, far=True) == pytest.approx(1.0)
    assert transfer.slow_bytes == 10**9
    assert transfer.fetch_s(0, 1, far=False) == pytest.approx(0.1)
    for version in range(2, 40):
        transfer.publish(version, version - 1, 10**9)
    # A replica that is far behind takes a base instead of every delta.
    assert transfer.fetch_s(0, 39, far=False) < 3.0


def test_constants_are_as_they_were_after_a_run() -> None:
    import elastic_scheduler.routing.router as router

    before = router.STICKY_MARGIN
    with tuned({"sticky_margin": 0.9}):
        assert router.STICKY_MARGIN == 0.9
    assert before == router.STICKY_MARGIN
    assert all(usual_value(name) >= 0 for name in CONSTANTS)


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="did you mean 'rose'"):
        run(small(), "rosé")
    with pytest.raises(ConfigError, match="did you mean 'slack_share'"):
        run(small(), "rose", options={"slack_shar": 1.0})
    with pytest.raises(ConfigError, match="no serving pool"):
        run(small(hosts=0), "rose")
    with pytest.raises(ValueError, match="nothing rolls out"):
        small(hosts=0, replicas=0)


def asked() -> list[SimulatedRun]:
    return [SimulatedRun(small(steps=1), policy, 2) for policy in ("fixed", "rose")]


def test_ray_runs_them_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for Ray, whose tasks run when they are waited for."""
    began: list[Any] = []
    ray = SimpleNamespace(
        __spec__=ModuleSpec("ray", None),
        is_initialized=lambda: False,
        init=lambda address, log_to_driver: began.append(address),
        remote=lambda **_: lambda call: SimpleNamespace(remote=lambda *args: partial(call, *args)),
        get=lambda waiting: waiting(),
        shutdown=lambda: began.append("over"),
    )
    monkeypatch.setitem(sys.modules, "ray", ray)
    assert list(run_all(asked(), ray_address="local")) == [carry_out(each) for each in asked()]
    assert began == [None, "over"]


def test_ray_that_is_not_installed_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="Ray is not installed"):
        list(run_all(asked(), ray_address="local"))


@pytest.mark.nightly
def test_processes_give_what_one_process_gives() -> None:
    assert list(run_all(asked(), workers=2)) == [carry_out(each) for each in asked()]


NONE = Percentiles(0, 0.0, 0.0, 0.0, 0.0, 0.0)
SOME = Percentiles(9, 2.0, 1.0, 3.0, 4.0, 5.0)
EMPTY = RunResult("s", "rose", 0, 0.0, (), 0.0, 0.0, NONE, NONE, None, (), 0.0, 0.0, 0.0)
FULL = RunResult(
    "s", "fixed", 0, 60.0, (StepResult(0, 0.0, 50.0, 30.0, 15.0, 5.0, 8, 100, 0, 200, 0),),
    4.0, 72.0, SOME, SOME,
    UserLatencies(40, 39, SOME, SOME, (SloSlice(0.0, 25, 25), SloSlice(10.0, 15, 14))),
    (UseSlice(0.0, 0.5, 0.0, 0.9, 0.0), UseSlice(10.0, 0.4, 0.0, 0.8, 1.0)), 0.6, 0.0, 0.0,
)  # fmt: skip


def test_every_picture_is_drawn_also_of_a_run_that_did_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(plots, "DPI", 20)
    paths = save_plots([FULL, EMPTY], tmp_path / "plots")
    assert {path.name for path in paths} == set(PICTURES)
    assert all(path.stat().st_size > 500 for path in paths)


def test_without_matplotlib_one_line_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"rose-rollout\[simulation\]"):
        save_plots([FULL], tmp_path)
