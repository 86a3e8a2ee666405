import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from rose.replica.admission import Admission
from rose.replica.control import GuestControl
from rose.replica.engine_update import ActivationError, EngineCallError, WeightUpdater
from rose.replica.turns import Turns
from rose.replica.vllm import VllmEngine
from tests.harness.waiting import PATIENCE_S, until_async
from weight_transfer import OnUpdate, WeightError, WrongBaseError
from weight_transfer.apply.shared_segment import ranks_folder

PROOFS = {"digest_ok": True, "probe_ok": True}
REPORT = {"version": 3, "apply_s": 0.1, "probe_s": 0.2, "probe_max_abs_diff": 0.0}
LOADED = ["decode", "load"]


class FakeWeightEngine:
    """The calls that a weight change makes on AsyncLLM, in order; any of them can fail."""

    def __init__(
        self, fail: dict[str, Exception] | None = None, ranks: int = 1, **proofs: bool
    ) -> None:
        self.calls: list[str] = []
        self.arguments: list[tuple[str, tuple[Any, ...]]] = []
        self.cleared: list[bool] = []
        self.answers: dict[str, list[dict[str, Any]]] = {}
        self.vllm_config = SimpleNamespace()
        self.renderer = self.engine_core = self
        self._fail = fail or {}
        self._proofs = PROOFS | proofs
        self._ranks = ranks

    def _note(self, name: str) -> None:
        self.calls.append(name)
        if name in self._fail:
            raise self._fail[name]

    async def collective_rpc(self, method: str, args: tuple[Any, ...]) -> list[Any]:
        name = method.removeprefix("rose_weights_")
        self.arguments.append((name, args))
        self._note(name)
        if self.answers.get(name):
            return [self.answers[name].pop(0)]
        own = {"done": True, "wire_bytes": 5, "stage_s": 0.1, **REPORT, **self._proofs}
        return [own] + [own | PROOFS] * (self._ranks - 1)

    async def clear_mm_cache_async(self) -> None:
        """Nothing is there to clear."""

    async def pause_scheduler_async(self, *, mode: str, clear_cache: bool) -> None:
        assert mode == "keep"
        self.cleared.append(clear_cache)
        self._note("pause")

    async def update_weight_version(self, version: str) -> None:
        self._note(f"stamp {version}")

    async def resume_generation(self) -> None:
        self._note("resume")


def made(
    engine: FakeWeightEngine,
    finish_old_s: float = 20.0,
    turns: Turns | None = None,
    admission: Admission | None = None,
) -> WeightUpdater:
    turns = turns or Turns(VllmEngine(engine))
    admission = admission or Admission()
    return WeightUpdater(
        VllmEngine(engine, "model"), turns, admission, GuestControl(), finish_old_s
    )


@pytest.fixture(autouse=True)
def weights_dir(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROSE_WEIGHTS_DIR", "/run/weights")
    monkeypatch.setenv("ROSE_UNSIGNED", "1")


async def test_without_a_folder_of_its_own_a_replica_takes_no_version(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("ROSE_WEIGHTS_DIR")
    engine = FakeWeightEngine()
    with pytest.raises(WeightError, match="ROSE_WEIGHTS_DIR is not set"):
        await made(engine).apply(["m"], "c")
    assert engine.calls == []


async def test_without_a_key_a_replica_takes_weights_only_where_it_was_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("ROSE_UNSIGNED")
    engine = FakeWeightEngine()
    with pytest.raises(WeightError, match="ROSE_VERIFY_KEY is not set"):
        await made(engine).apply(["m"], "c")
    assert engine.calls == []
    monkeypatch.setenv("ROSE_VERIFY_KEY", "ab" * 32)
    await made(engine).apply(["m"], "c")
    assert "commit" in engine.calls


async def test_a_version_is_staged_while_serving_and_stamped_under_the_pause() -> None:
    engine = FakeWeightEngine()
    weights = made(engine)
    report = await weights.apply(["m"], "c")
    assert engine.calls == ["init", *LOADED, "pause", "commit", "stamp 3", "resume", "settle"]
    assert weights.version == report["version"] == 3
    assert report["pause_s"] >= 0
    await weights.apply(["m"], "c")
    assert engine.calls.count("init") == 1


@pytest.mark.parametrize("proof", ["digest_ok", "probe_ok"])
@pytest.mark.parametrize("ranks", [1, 2])
async def test_an_unproven_version_is_neither_stamped_nor_reported_as_active(
    proof: str, ranks: int
) -> None:
    engine = FakeWeightEngine(ranks=ranks, **{proof: False})
    turns = Turns(VllmEngine(engine))
    weights = made(engine, turns=turns)
    with pytest.raises(ActivationError, match=f"'{proof}': False"):
        await weights.apply(["m"], "c")
    assert engine.calls == ["init", *LOADED, "pause", "commit"]
    assert weights.version == 0
    assert turns.ages.current == 0


@pytest.mark.parametrize("step", LOADED)
async def test_what_fails_before_the_pause_keeps_its_type_and_pauses_nothing(step: str) -> None:
    failure = RuntimeError("Call to collective_rpc failed: [rose:WrongBaseError] based on 7")
    engine = FakeWeightEngine({step: failure})
    with pytest.raises(WrongBaseError, match="based on 7"):
        await made(engine).apply(["m"], "c")
    assert engine.calls == ["init", *LOADED[: LOADED.index(step) + 1]]


async def test_a_pause_that_fails_is_resumed_and_writes_nothing() -> None:
    engine = FakeWeightEngine({"pause": RuntimeError("Failed to reset KV cache")})
    with pytest.raises(WeightError, match="could not be paused") as caught:
        await made(engine).apply(["m"], "c")
    assert engine.calls == ["init", *LOADED, "pause", "resume"]
    assert not isinstance(caught.value, ActivationError)


async def test_several_ranks_are_told_where_to_meet_anew_at_every_try() -> None:
    places = []
    for ranks in (1, 2, 2):
        engine = FakeWeightEngine(ranks=ranks)
        engine.vllm_config.parallel_config = SimpleNamespace(world_size=ranks)
        await made(engine).apply(["m"], "c")
        (_, arguments), *_ = engine.arguments
        places.append(arguments[3])
    assert places[0] is None, "a rank without others has nobody to meet"
    assert len(set(places)) == 3
    assert Path(places[1]).parent == Path(places[2]).parent == ranks_folder()


async def test_patience_with_a_busy_host_is_spent_over_all_pieces_of_a_version(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    left: list[float] = []

    async def wait_host_idle(patience_s: float) -> None:
        left.append(patience_s)
        await asyncio.sleep(0.02)

    monkeypatch.setattr("rose.replica.engine_update.STAGE_PATIENCE_S", 60.0)
    engine = FakeWeightEngine()
    engine.answers["load"] = [{"done": False, "piece_s": 0.0}] * 2
    weights = made(engine)
    monkeypatch.setattr(weights._control, "wait_host_idle", wait_host_idle)
    await weights.apply(["m"], "c")
    first, second, third, _ = left
    assert first == 60.0 > second > third > 0.0


async def test_every_decode_is_an_attempt_of_its_own_and_is_asked_for_by_its_name() -> None:
    engine = FakeWeightEngine()
    weights = made(engine)
    for _ in range(2):
        engine.answers["decode"] = [{"done": False}]
        await weights.apply(["m"], "c")
    asked = [arguments for name, arguments in engine.arguments if name == "decode"]
    assert asked[0] == asked[1] != asked[2] == asked[3]
    assert [manifests for manifests, _, _ in asked] == [["m"]] * 4


async def test_decoding_and_loading_go_on_until_all_of_it_is_done() -> None:
    engine = FakeWeightEngine()
    engine.answers["decode"] = [{"done": False}, {"done": True}]
    engine.answers["load"] = [{"done": False, "piece_s": 0.0}] * 2
    await made(engine).apply(["m"], "c")
    assert engine.calls[1:7] == [*["decode"] * 2, *["load"] * 3, "pause"]


@pytest.mark.parametrize("how", OnUpdate)
async def test_only_keep_leaves_the_caches_and_notes_that_kv_is_older(how: OnUpdate) -> None:
    engine = FakeWeightEngine()
    turns = Turns(VllmEngine(engine))
    weights = made(engine, turns=turns)
    report = await weights.apply(["m"], "c", how)
    keeps = how is OnUpdate.KEEP
    assert engine.cleared == [not keeps]
    assert turns.ages.oldest(0, 3) == (0 if keeps else 3)
    assert report["finished_old"] is (how is OnUpdate.FINISH_OLD)


@pytest.mark.parametrize("ends", [True, False])
async def test_finish_old_waits_for_turns_in_flight_within_its_bound(ends: bool) -> None:
    engine = FakeWeightEngine()
    turns = Turns(VllmEngine(engine))
    weights = made(engine, 20.0 if ends else 0.5, turns)
    turn = turns.open(SimpleNamespace(images=()))
    turn.begun = True
    applying = asyncio.create_task(weights.apply(["m"], "c", OnUpdate.FINISH_OLD))
    await until_async(lambda: turns.hold._holders, PATIENCE_S, "new turns are held back")
    assert "pause" not in engine.calls
    held = asyncio.create_task(turns.hold.passed(lambda: False))
    await asyncio.sleep(0)
    assert not held.done(), "what is new begins under the new version"
    if ends:
        turn.ended = True
        turns._left.set()
    report = await asyncio.wait_for(applying, PATIENCE_S)
    assert report["finished_old"] is ends
    assert engine.cleared == [True]
    await asyncio.wait_for(held, PATIENCE_S)


def of_job(engine: FakeWeightEngine, job: str) -> None:
    """Make the next loaded version one of that job."""
    engine.answers["load"] = [{"done": True, "wire_bytes": 5, "stage_s": 0.1, **REPORT, "job": job}]


async def test_weights_of_a_job_that_lost_its_lease_are_not_written() -> None:
    engine = FakeWeightEngine()
    admission = Admission()
    weights = made(engine, admission=admission)
    admission.admit(1, "a")
    of_job(engine, "b")
    with pytest.raises(WeightError, match="leased to a: no weights of b"):
        await weights.apply(["m"], "c")
    assert engine.calls == ["init", *LOADED]
    assert weights.job == ""
    of_job(engine, "a")
    await weights.apply(["m"], "c")
    assert weights.job == "a"


@pytest.mark.parametrize("held", ["", "a"])
async def test_no_turn_outlives_the_weights_of_its_job(held: str) -> None:
    engine = FakeWeightEngine()
    turns = Turns(VllmEngine(engine))
    weights = made(engine, turns=turns)
    weights.job = held
    old, new, unnamed = (turns.open(SimpleNamespace(job=job, images=())) for job in ("a", "b", ""))
    serves: list[bool] = []

    async def pausing(*, mode: str, clear_cache: bool) -> None:
        del mode, clear_cache
        serves.extend([weights.serves("a"), weights.serves("b")])

    engine.pause_scheduler_async = pausing  # type: ignore[method-assign]
    of_job(engine, "b")
    await weights.apply(["m"], "c")
    assert (old.revoked, new.revoked, unnamed.revoked) == (True, False, False)
    assert serves == [False, True], "no turn of the old job begins once the change has begun"
    assert not weights.serves("a")


async def test_a_change_of_job_that_could_not_begin_leaves_the_old_job_served() -> None:
    engine = FakeWeightEngine({"pause": RuntimeError("Failed to reset KV cache")})
    weights = made(engine)
    weights.job = "a"
    of_job(engine, "b")
    with pytest.raises(WeightError, match="could not be paused"):
        await weights.apply(["m"], "c")
    assert weights.serves("a")
    assert not weights.serves("b")


async def test_preparing_early_is_for_engines_that_can_and_may_fail() -> None:
    engine = FakeWeightEngine({"init": RuntimeError("no KV cache yet")})
    weights = made(engine)
    weights.start()
    await asyncio.sleep(0)
    assert engine.calls == []
    engine.vllm_config.parallel_config = SimpleNamespace(worker_extension_cls="a.Worker")
    weights.start()
    await asyncio.sleep(0.01)
    assert engine.calls == ["init"]
    with pytest.raises(EngineCallError, match="no KV cache"):
        await weights.apply(["m"], "c")


def piece(version: int, total: int, *, done: bool) -> dict[str, Any]:
    return {"done": done, "version": version, "parts": [["w", (0, 4, 1), 4, total]]}


@pytest.mark.parametrize(("total", "flipped"), [(7, []), (8, ["w"])])
async def test_an_audit_judges_what_it_read_and_begins_anew_after_a_change(
    total: int, flipped: list[str]
) -> None:
    engine = FakeWeightEngine()
    engine.answers["audit"] = [piece(2, 0, done=False), piece(3, 0, done=False)]
    engine.answers["audit"].append(piece(3, total, done=True))
    engine.answers["digests"] = [{"version": 3, "digests": {"w": 7}, "elements": {"w": 4}}]
    report = await made(engine).audit()
    assert (report["version"], report["flipped"], report["weights"]) == (3, flipped, 4)


async def test_an_audit_gives_up_when_versions_change_all_the_time() -> None:
    engine = FakeWeightEngine()
    pieces = [piece(version, 0, done=False) for version in range(6)]
    engine.answers["audit"] = pieces
    with pytest.raises(WeightError, match="ask again"):
        await made(engine).audit()
