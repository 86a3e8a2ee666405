"""Adapters as a replica's versions: turns have one from begin to end, move, or give way."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.v1.engine import FinishReason

from rose.replica.admission import Admission
from rose.replica.control import GuestControl
from rose.replica.endpoint import GenerateApp
from rose.replica.engine_update import WeightUpdater
from rose.replica.turns import Turns
from rose.replica.vllm import VllmEngine
from tests.fakes.asgi_client import AsgiExchange, exchange, settle
from tests.fakes.async_llm import FakeAsyncLLM
from weight_transfer import AdapterError, OnUpdate, ProbeError, WeightError

PATH = "/rose/v1/generate"
BODY = {"request_id": "r", "token_ids": [1, 2, 3], "sampling": {"max_tokens": 8}, "job": "a"}
PROOFS = {"digest_ok": True, "probe_ok": True}
NUMBERS = {"apply_s": 0.1, "probe_s": 0.1, "probe_max_abs_diff": 0.0}


class AdaptedLLM(FakeAsyncLLM):
    """Ranks with slots for adapters; `coming` is (job, version) of the next update."""

    def __init__(self, adapters: int) -> None:
        super().__init__()
        self.vllm_config.lora_config = SimpleNamespace(max_loras=adapters + 1)
        self.coming = ("a", 1)
        self.loras: list[str | None] = []
        self.slots: list[str] = []
        self.calls: list[str] = []
        self.proofs: dict[str, Any] = PROOFS
        self.bad = ""
        self._attempt = ""
        self.engine_core = self

    async def add_request(self, *args: Any, lora_request: Any = None, **options: Any) -> Any:
        name = None if lora_request is None else lora_request.lora_name
        assert name is None or name in self.slots, "the adapter is in its slot"
        self.loras.append(name)
        return await super().add_request(*args, **options)

    async def collective_rpc(self, method: str, args: tuple[Any, ...]) -> list[Any]:
        name = method.removeprefix("rose_weights_")
        self.calls.append(name)
        job, version = self.coming
        if name == "decode":
            self._attempt = args[2]
        elif name == "load" and self.bad:
            raise RuntimeError(f"[rose:AdapterError] {self.bad}")
        elif name == "commit":
            self.slots.append(self._attempt)
            assert len(self.slots) < self.vllm_config.lora_config.max_loras
        elif name == "rose_adapters_drop":
            self.slots = [each for each in self.slots if each not in args[0]]
        report = {"version": version, **NUMBERS, **self.proofs}
        return [{"done": True, "job": job, "wire_bytes": 5, "stage_s": 0.1, **report}]


class AdaptedReplica:
    """A replica's turns and its updater, over AdaptedLLM."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, adapters: int = 2) -> None:
        monkeypatch.setenv("ROSE_WEIGHTS_DIR", "/nowhere")
        monkeypatch.setenv("ROSE_UNSIGNED", "1")
        self.llm = AdaptedLLM(adapters)
        engine = VllmEngine(self.llm)
        self.admission = Admission()
        self.admission.admit(1)
        self.app = GenerateApp(self.admission)
        self.turns = self.app.turns = Turns(engine)
        self.updater = self.app.weights = WeightUpdater(
            engine, self.turns, self.admission, GuestControl()
        )

    async def begin(self, **changes: Any) -> AsgiExchange:
        begun = exchange(self.app, PATH, BODY | changes)
        await settle()
        return begun

    async def step(self, finish: FinishReason | None = None) -> None:
        self.llm.step(finish)
        await settle()

    async def update(
        self, job: str, version: int, how: OnUpdate = OnUpdate.RECOMPUTE
    ) -> dict[str, Any]:
        self.llm.coming = (job, version)
        report = await self.updater.apply([], "", how)
        await settle()
        return report


@pytest.fixture
def replica(monkeypatch: pytest.MonkeyPatch) -> AdaptedReplica:
    return AdaptedReplica(monkeypatch)


def stamps(begun: AsgiExchange) -> list[int]:
    return [line["version"] for line in begun.lines for _ in line.get("token_ids", [])]


async def test_a_running_turn_goes_on_under_the_new_adapter(replica: AdaptedReplica) -> None:
    begun = await replica.begin()
    await replica.step()
    await replica.step()
    report = await replica.update("a", 1)
    assert (report["pause_s"], report["version"]) == (0.0, 1)
    assert "pause" not in replica.llm.calls
    first, second = replica.llm.prompts
    assert second["prompt_token_ids"] == [*first["prompt_token_ids"], 0, 1]
    assert replica.llm.parameters[1].max_tokens == 6
    assert replica.turns.tokens_total == 2
    await replica.step()
    await replica.update("a", 2)
    await replica.step(FinishReason.STOP)
    await begun.done()
    assert stamps(begun) == [0, 0, 1, 2]
    assert begun.lines[-1]["finish_reason"] == "stop"
    assert replica.llm.loras[0] is None
    assert len(set(replica.llm.loras)) == 3, "each version has a name of its own"
    assert replica.turns.tokens_total == 4


async def test_turns_end_under_their_own_adapter_until_its_slot_is_needed(
    replica: AdaptedReplica,
) -> None:
    await replica.update("a", 1)
    begun = await replica.begin()
    counting = await replica.begin(
        request_id="c", sampling={"max_tokens": 8, "frequency_penalty": 0.5}
    )
    await replica.step()
    await replica.update("a", 2, OnUpdate.FINISH_OLD)
    await replica.step()
    assert (stamps(begun), len(replica.llm.slots)) == ([1, 1], 2)
    # The third version needs the slot of the first.
    await replica.update("a", 3)
    await begun.done()
    await counting.done()
    assert [stamps(each) for each in (begun, counting)] == [[1, 1], [1, 1]]
    assert begun.lines[-1]["finish_reason"] == counting.lines[-1]["finish_reason"] == "revoked"
    assert len(replica.llm.slots) == 2


async def test_a_turn_whose_output_counts_ends_where_it_is(replica: AdaptedReplica) -> None:
    counting = await replica.begin(sampling={"max_tokens": 8, "presence_penalty": 0.5})
    await replica.step()
    await replica.update("a", 1)
    await replica.step(FinishReason.STOP)
    await counting.done()
    assert stamps(counting) == [0, 0]


async def test_two_jobs_have_their_adapters_side_by_side(replica: AdaptedReplica) -> None:
    await replica.update("a", 7)
    await replica.update("b", 3)
    turns = [await replica.begin(request_id=job, job=job) for job in "ab"]
    unnamed, stranger = await replica.begin(job=""), await replica.begin(job="c")
    await replica.step(FinishReason.STOP)
    for each in turns:
        await each.done()
    assert [stamps(each) for each in turns] == [[7], [3]]
    assert replica.llm.loras == replica.llm.slots
    for each in (unnamed, stranger):
        await each.done()
        assert each.status == 503
    # A third job takes the place of the one that is not leased.
    replica.admission.admit(2, "b")
    await replica.update("b", 4)
    assert sorted(replica.turns.adapters) == ["b"]


async def test_leases_of_two_jobs_are_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    replica = AdaptedReplica(monkeypatch, adapters=3)
    admission = replica.admission
    admission.admit(2, "a", 7)
    admission.admit(5, "b", 0, offer=1)
    await replica.update("a", 7)
    # The second job has no version yet, so its turns begin with the base.
    turns = {job: await replica.begin(request_id=job, job=job) for job in ("a", "b", "", "c")}
    await replica.step()
    assert {job: stamps(each) for job, each in turns.items()} == {
        "a": [7],
        "b": [0],
        "": [],
        "c": [],
    }
    with pytest.raises(WeightError, match="leased to a, b"):
        await replica.update("c", 1)
    await replica.update("b", 1)
    await replica.step()
    # The end of one lease ends its turns alone.
    admission.close(2, "revoked")
    assert await replica.turns.revoke_all(but=admission.jobs) == 1
    late = await replica.begin(request_id="late", job="a")
    await replica.step(FinishReason.STOP)
    for each in (*turns.values(), late):
        await each.done()
    assert [stamps(turns[job]) for job in "ab"] == [[7, 7], [0, 1, 1]]
    assert [turns[job].lines[-1]["finish_reason"] for job in "ab"] == ["revoked", "stop"]
    assert [each.status for each in (turns[""], turns["c"], late)] == [503] * 3
    # A version on its way when the lease ended is taken, and no turn begins with it.
    await replica.update("a", 8)
    # The next job's turns wait for its version, and its adapter takes no other job's newest.
    admission.admit(3, "c", 4)
    early = await replica.begin(request_id="early", job="c")
    await replica.update("c", 4)
    await replica.update("c", 5)
    await replica.update("b", 2)
    assert {job: each.version for job, each in replica.turns.adapters.items()} == {"b": 2, "c": 5}
    await early.done()
    assert early.status == 503


@pytest.mark.parametrize("what", ["unfit", "unproven", "keep"])
async def test_a_version_that_is_refused_changes_nothing(
    replica: AdaptedReplica, what: str
) -> None:
    await replica.update("a", 1)
    begun = await replica.begin()
    await replica.step()
    slots = [*replica.llm.slots]
    how = OnUpdate.KEEP if what == "keep" else OnUpdate.RECOMPUTE
    replica.llm.bad = "r is 16" if what == "unfit" else ""
    replica.llm.proofs = PROOFS | {"probe_ok": what != "unproven"}
    kind: type[WeightError] = ProbeError if what == "unproven" else AdapterError
    with pytest.raises(kind):
        await replica.update("a", 2, how)
    assert (replica.llm.slots, replica.updater.version) == (slots, 1)
    assert not replica.admission.quarantined
    replica.llm.bad, replica.llm.proofs = "", PROOFS
    await replica.step(FinishReason.STOP)
    await begun.done()
    assert stamps(begun) == [1, 1]


async def test_a_turn_that_is_just_starting_moves_or_gives_way_too(
    replica: AdaptedReplica,
) -> None:
    replica.llm.adding.clear()
    begun = await replica.begin()
    update = asyncio.create_task(replica.update("a", 1))
    await settle()
    replica.llm.adding.set()
    await update
    await settle()
    await replica.step(FinishReason.STOP)
    await begun.done()
    assert stamps(begun) == [1]
    assert [each is None for each in replica.llm.loras] == [True, False]
