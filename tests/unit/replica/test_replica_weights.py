from typing import Any

import pytest

from rose.replica.weights import ActivationError, Weights
from weight_transfer import WeightError, WrongBaseError

PROOFS = {"digest_ok": True, "probe_ok": True}


class FakeWeightEngine:
    """The calls that a weight change makes on AsyncLLM, in order; any of them can fail."""

    def __init__(self, fail: dict[str, Exception] | None = None, **proofs: bool) -> None:
        self.calls: list[str] = []
        self._fail = fail or {}
        self._proofs = PROOFS | proofs

    def _note(self, name: str) -> None:
        self.calls.append(name)
        if name in self._fail:
            raise self._fail[name]

    async def collective_rpc(self, method: str, args: tuple[Any, ...]) -> list[dict[str, Any]]:
        self._note(method.removeprefix("rose_weights_"))
        return [{"version": 3, "wire_bytes": 5, "stage_s": 0.1, **self._proofs}]

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        assert (mode, clear_cache) == ("keep", True)
        self._note("pause")

    async def update_weight_version(self, version: str) -> None:
        self._note(f"stamp {version}")

    async def resume_generation(self) -> None:
        self._note("resume")


async def test_a_version_is_staged_while_serving_and_stamped_under_the_pause() -> None:
    engine = FakeWeightEngine()
    weights = Weights(engine, "model")
    report = await weights.apply(["m"], "c")
    assert engine.calls == ["init", "stage", "pause", "commit", "stamp 3", "resume"]
    assert weights.version == report["version"] == 3
    assert report["pause_s"] >= 0
    await weights.apply(["m"], "c")
    assert engine.calls.count("init") == 1


@pytest.mark.parametrize("proof", ["digest_ok", "probe_ok"])
async def test_an_unproven_version_is_neither_stamped_nor_reported_as_active(proof: str) -> None:
    engine = FakeWeightEngine(**{proof: False})
    weights = Weights(engine, "model")
    assert (await weights.apply(["m"], "c"))[proof] is False
    assert engine.calls == ["init", "stage", "pause", "commit", "resume"]
    assert weights.version == 0


async def test_what_fails_before_the_pause_keeps_its_type_and_pauses_nothing() -> None:
    failure = RuntimeError("Call to collective_rpc failed: [rose:WrongBaseError] based on 7")
    engine = FakeWeightEngine({"stage": failure})
    with pytest.raises(WrongBaseError, match="based on 7"):
        await Weights(engine, "model").apply(["m"], "c")
    assert engine.calls == ["init", "stage"]


@pytest.mark.parametrize("where", ["commit", "stamp 3"])
async def test_a_commit_that_breaks_off_resumes_and_is_told_apart(where: str) -> None:
    engine = FakeWeightEngine({where: RuntimeError("worker says no")})
    weights = Weights(engine, "model")
    with pytest.raises(ActivationError, match="worker says no"):
        await weights.apply(["m"], "c")
    assert engine.calls[-1] == "resume"
    assert weights.version == 0
    assert issubclass(ActivationError, WeightError)


async def test_a_pause_that_fails_is_resumed_and_writes_nothing() -> None:
    engine = FakeWeightEngine({"pause": RuntimeError("Failed to reset KV cache")})
    with pytest.raises(WeightError, match="could not be paused") as caught:
        await Weights(engine, "model").apply(["m"], "c")
    assert engine.calls == ["init", "stage", "pause", "resume"]
    assert not isinstance(caught.value, ActivationError)
