"""Calls from a replica's API process into SGLang's scheduler, and back."""

import os
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

import sys
from types import ModuleType

import rose.replica.sglang.scheduler_calls as calls_module
from rose.replica.sglang.engine import SglangEngine, SglangError, ends_of
from rose.replica.sglang.plugin import ALLOWED, biased_batch, ended_at_stop
from rose.replica.sglang.scheduler_calls import SchedulerCalls


class CalledScheduler:
    """Notes what a call does to SGLang's scheduler."""

    def __init__(self) -> None:
        self.did: list[Any] = []
        self.flushes = True
        self.ipc_channels = SimpleNamespace(send_to_tokenizer=self)
        self.said: Any = None

    def send_output(self, said: Any, asked: Any) -> None:
        self.said = said

    def pause_generation(self, asked: Any) -> None:
        self.did.append(asked.mode)

    def continue_generation(self, asked: Any) -> None:
        self.did.append("resume")

    def record_weight_version_change(self, new_version: str) -> None:
        self.did.append(new_version)

    def flush_cache(self) -> bool:
        self.did.append("flush")
        return self.flushes


class CalledWorker:
    """A weight worker that knows one method."""

    def __init__(self, scheduler: Any) -> None:
        del scheduler

    def rose_weights_load(self, pieces: int) -> dict[str, int]:
        return {"pieces": pieces}

    def rose_weights_commit(self) -> None:
        raise ValueError("[rose:ProbeError] other logits")


@pytest.fixture
def scheduler(monkeypatch: pytest.MonkeyPatch) -> CalledScheduler:
    messages = ModuleType("standin")
    for name in ("PauseGenerationReqInput", "ContinueGenerationReqInput", "DumperControlReqOutput"):
        setattr(messages, name, SimpleNamespace)
    messages.DumperControlReqInput = SimpleNamespace  # type: ignore[attr-defined]
    made = CalledScheduler()
    managers = ModuleType("standin")
    cleared = SimpleNamespace(clear=lambda: made.did.append("encoders"))
    managers.mm_schedule = SimpleNamespace(embedding_cache=cleared)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "sglang.srt.managers", managers)
    monkeypatch.setitem(sys.modules, "sglang.srt.managers.io_struct", messages)
    monkeypatch.setattr(calls_module, "_of_all_ranks", lambda _, mine: [mine])
    monkeypatch.setattr(calls_module, "SglangWeightWorker", CalledWorker)
    return made


def call(scheduler: CalledScheduler, name: str, *arguments: Any) -> Any:
    asked = SimpleNamespace(method="rose", body={"call": name, "args": list(arguments)})
    SchedulerCalls().handle(_never, scheduler, asked)
    return scheduler.said


def test_a_pause_that_forgets_retracts_and_one_that_keeps_stays(
    scheduler: CalledScheduler,
) -> None:
    assert call(scheduler, "pause", True).success
    assert call(scheduler, "pause", False).success
    assert scheduler.did == ["retract", "flush", "in_place"]


def test_prefixes_that_stay_are_an_error(scheduler: CalledScheduler) -> None:
    scheduler.flushes = False
    said = call(scheduler, "pause", True)
    assert not said.success
    assert "stayed in the cache" in said.error


def test_a_version_is_told_to_the_stamps_and_to_sglang_and_outputs_of_encoders_are_forgotten(
    scheduler: CalledScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROSE_POLICY_VERSION", "0")
    call(scheduler, "activate", 7)
    assert (os.environ["ROSE_POLICY_VERSION"], scheduler.did) == ("7", ["encoders", "7"])


def test_methods_of_the_weight_worker_are_called_by_name(scheduler: CalledScheduler) -> None:
    said = call(scheduler, "rose_weights_load", 2)
    assert said.response == [{"answer": {"pieces": 2}}]


def test_an_error_goes_back_with_its_name(scheduler: CalledScheduler) -> None:
    said = call(scheduler, "rose_weights_commit")
    assert not said.success
    assert "[rose:ProbeError] other logits" in said.error


@pytest.mark.parametrize("name", ["__class__", "event_loop_normal", "handle"])
def test_nothing_else_can_be_called(scheduler: CalledScheduler, name: str) -> None:
    assert "has no call" in call(scheduler, name).error


def test_sglangs_own_use_of_the_way_is_left_alone(scheduler: CalledScheduler) -> None:
    seen: list[Any] = []
    asked = SimpleNamespace(method="get", body={})
    SchedulerCalls().handle(lambda *given: seen.append(given), scheduler, asked)
    assert seen == [(scheduler, asked)]


async def test_answers_of_all_ranks_come_back_and_a_failure_raises(
    scheduler: CalledScheduler,
) -> None:
    answers = [
        SimpleNamespace(success=True, response=[{"answer": 1}, {"answer": 2}], error=""),
        SimpleNamespace(success=False, response=[], error="[rose:ProbeError] no"),
    ]

    async def control(asked: Any) -> list[Any]:
        assert asked.body == {"call": "wake", "args": []}
        return [answers.pop(0)]

    engine = SglangEngine(_manager(dumper_control=control), _arguments(), 100)
    assert await engine.call_all("wake") == [1, 2]
    with pytest.raises(SglangError, match="ProbeError"):
        await engine.call_all("wake")


def test_ends_are_the_models_and_its_tokenizers_inside_the_vocabulary(tmp_path: Any) -> None:
    assert ends_of(_manager(), str(tmp_path)) == (3, 9)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [4, 9, 99]}')
    assert ends_of(_manager(), str(tmp_path)) == (4, 9)


def test_tokens_that_are_not_allowed_are_never_sampled() -> None:
    import torch

    free = SimpleNamespace(sampling_params=SimpleNamespace(custom_params=None))
    bound = SimpleNamespace(sampling_params=SimpleNamespace(custom_params={ALLOWED: [1, 3, 99]}))
    batch = SimpleNamespace(reqs=[free, bound], device="cpu")
    info = biased_batch(lambda *_: SimpleNamespace(logit_bias=None), None, batch, 5)
    assert info.logit_bias[0].tolist() == [0.0] * 5
    assert torch.isinf(info.logit_bias[1]).tolist() == [True, False, True, False, True]
    untouched = SimpleNamespace(reqs=[free], device="cpu")
    said = biased_batch(lambda *_: SimpleNamespace(logit_bias=None), None, untouched, 5)
    assert said.logit_bias is None


@pytest.mark.parametrize(
    ("new", "ended", "length"), [([4], False, None), ([7], True, 3), ([4, 7, 5], True, 2)]
)
def test_a_turn_that_ignores_the_models_ends_ends_at_its_own_stops(
    new: list[int], ended: bool, length: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds = ModuleType("standin")
    kinds.FINISH_MATCHED_TOKEN = SimpleNamespace  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "sglang.srt.managers.schedule_batch", kinds)
    request = SimpleNamespace(
        sampling_params=SimpleNamespace(ignore_eos=True, stop_token_ids={7, 9}),
        output_ids=[1, 2, 3][: 3 - len(new)] + new,
        finished_reason=None,
        finished_len=None,
    )
    assert ended_at_stop(_never, request, new) is ended
    assert request.finished_len == length
    assert (request.finished_reason is not None) is ended


def test_any_other_turns_ends_are_sglangs_business() -> None:
    asked = SimpleNamespace(ignore_eos=True, stop_token_ids=None)
    request = SimpleNamespace(sampling_params=asked)
    assert ended_at_stop(lambda *given: given == (request, [1]), request, [1])


def _arguments(**given: Any) -> Any:
    known = {"model_path": "model", "chunked_prefill_size": 64, "max_running_requests": 8}
    return SimpleNamespace(**{**known, "tp_size": 1, **given})


def _manager(**given: Any) -> Any:
    config = SimpleNamespace(vocab_size=10, hf_eos_token_id={3})
    tokenizer = SimpleNamespace(eos_token_id=9)
    return SimpleNamespace(model_config=config, tokenizer=tokenizer, context_len=64, **given)


def _never(*_: Any) -> None:
    raise AssertionError("this is no call of SGLang's")
