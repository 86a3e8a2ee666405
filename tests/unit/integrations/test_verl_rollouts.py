"""Turns of verl's agent loops against a gateway's HTTP surface, without Ray and without verl."""

import asyncio
import base64
import io
from collections.abc import AsyncIterator, Callable
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from rose.client import Sampling, Turn, VersionNotServed
from rose.errors import ConfigError, RefusedError
from rose.integrations.verl import rollout_turns
from rose.integrations.verl.configuration import fixed_seed, overlaid, refuse_unfit
from rose.integrations.verl.rollout_turns import RolloutTurns, TokenSessions
from rose.integrations.verl.turns import Lengths, PolicySteps, output_of, turn_sampling
from tests.fakes.gateway import StandInGateway, until
from tests.harness.policies import trainer_environment, trainer_settings
from tests.harness.vision_model import picture

LENGTHS = Lengths(prompt=64, response=8, model=None)
Made = Callable[..., RolloutTurns]


@pytest.fixture
async def gateway() -> AsyncIterator[StandInGateway]:
    async with StandInGateway(version=4) as gateway:
        yield gateway


@pytest.fixture
async def turns(gateway: StandInGateway, tmp_path: Path) -> AsyncIterator[Made]:
    made: list[RolloutTurns] = []

    def make(**options: Any) -> RolloutTurns:
        settings = trainer_settings(tmp_path, job="job", gateway=gateway.url)
        made.append(RolloutTurns(settings, LENGTHS, lag=1, **options))
        return made[-1]

    yield make
    for each in made:
        await each.close()


async def test_a_turn_comes_back_in_verls_words(turns: Made, gateway: StandInGateway) -> None:
    mine = turns()
    mine.published(4, 12)
    mine.published(5, 13)
    output = await mine.generate([3, 4], {"temperature": 1.0, "repetition_penalty": 1.0}, "a")
    assert output["token_ids"] == list(range(5, 13))
    assert output["extra_fields"]["min_global_steps"] == 12
    asked = gateway.asked[0]
    assert (asked["request_id"], asked["job"], asked["min_version"]) == ("a/0", "job", 4)


async def test_experts_are_asked_for_where_verl_replays_them(
    turns: Made, gateway: StandInGateway
) -> None:
    assert (await turns().generate([3, 4], {}, "a"))["routed_experts"] is None
    await turns(replays_routes=True).generate([3, 4], {}, "b")
    assert [bool(asked.get("routed_experts")) for asked in gateway.asked] == [False, True]
    experts, file = np.arange(8, dtype=np.uint8).reshape(2, 2, 2), io.BytesIO()
    np.save(file, experts)
    turn = Turn("a", (5,), (-0.5,), (), (), "length", 1, npy=file.getvalue())
    assert (output_of(turn, PolicySteps(1))["routed_experts"] == experts).all()


async def test_full_determinism_asks_for_deterministic_turns_with_verls_seeds(
    turns: Made, gateway: StandInGateway
) -> None:
    rollout = SimpleNamespace(full_determinism=True, seed=42)
    refuse_unfit(rollout, SimpleNamespace())
    assert fixed_seed(SimpleNamespace(seed=42), 1) is None
    mine = turns(seed=fixed_seed(rollout, 1))
    await mine.generate([3, 4], {}, "a")
    await mine.generate([3, 4], {"seed": 7}, "b")
    await turns().generate([3, 4], {}, "c")
    asked = [each["sampling_params"] for each in gateway.asked]
    found = [(each.get("seed"), each.get("deterministic", False)) for each in asked]
    assert found == [(43, True), (7, True), (None, False)]


def test_experts_of_turns_that_verl_ends_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    rollout, model = SimpleNamespace(enable_rollout_routing_replay=True), SimpleNamespace()
    refuse_unfit(rollout, model)
    monkeypatch.setenv("ROSE_VERL_ABORT", "1")
    with pytest.raises(RefusedError, match="enable_rollout_routing_replay"):
        refuse_unfit(rollout, model)


async def test_the_turns_of_a_trajectory_share_a_session(
    turns: Made, gateway: StandInGateway
) -> None:
    mine = turns()
    prompt = [3, 4]
    for turn in range(3):
        output = await mine.generate(prompt, {}, f"t{turn}")
        prompt = [*prompt, *output["token_ids"], 40]
    await mine.generate([3, 4], {}, "another")
    first, *rest = gateway.sessions
    assert first
    assert rest == [first, first, rest[-1]]
    assert rest[-1] != first


async def test_a_turn_whose_version_no_replica_has_yet_is_asked_for_again(
    turns: Made, gateway: StandInGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rollout_turns, "PAUSE_S", 0.0)
    gateway.refuse_with, gateway.refusals = (409, {}), 2
    output = await turns().generate([3, 4], {}, "a")
    assert output["token_ids"] == list(range(5, 13))
    assert [asked["request_id"] for asked in gateway.asked] == ["a/0", "a/1", "a/2"]


async def test_a_version_that_never_comes_ends_the_wait(
    turns: Made, gateway: StandInGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Longer than what the trainer waits for anything.
    monkeypatch.setattr(rollout_turns, "PAUSE_S", 1_000.0)
    gateway.refuse_with = (409, {})
    with pytest.raises(VersionNotServed):
        await turns().generate([3, 4], {}, "a")
    assert len(gateway.asked) == 1


async def test_an_abort_ends_no_turn_unless_it_is_to(turns: Made, gateway: StandInGateway) -> None:
    mine = turns()
    gateway.delay_s = 0.01
    running = asyncio.create_task(mine.generate([3], {}, "a"))
    await until(lambda: bool(gateway.asked))
    assert mine.abort() == 0
    assert (await running)["stop_reason"] == "completed"


async def test_an_aborted_turn_hands_out_what_it_has_and_the_next_waits(
    turns: Made, gateway: StandInGateway
) -> None:
    mine = turns(ends_turns=True)
    mine.published(4, 1)
    whole = await mine.generate([3], {}, "whole")
    assert whole["stop_reason"] == "completed"
    gateway.delay_s = 0.02
    running = asyncio.create_task(mine.generate([3], {}, "a"))
    await until(lambda: any(len(part.tokens) > 1 for part in mine._running.values()))
    assert mine.abort() == 1
    aborted = await running
    assert aborted["stop_reason"] == "aborted"
    assert 1 < len(aborted["token_ids"]) == len(aborted["log_probs"]) < 8
    assert aborted["token_ids"] == whole["token_ids"][: len(aborted["token_ids"])]
    assert aborted["extra_fields"]["global_steps"] == 1
    gateway.delay_s = 0.0
    later = asyncio.create_task(mine.generate([3, *aborted["token_ids"]], {}, "b"))
    await asyncio.sleep(0)
    assert len(gateway.asked) == 2
    assert mine.abort(rejects=True) == 0
    rejected = await mine.generate([3], {}, "late")
    assert (rejected["stop_reason"], rejected["token_ids"]) == ("aborted", [])
    mine.resume()
    assert (await later)["stop_reason"] == "completed"
    assert gateway.sessions[-1] == gateway.sessions[-2]


async def test_a_caller_that_is_cancelled_is_told_so(turns: Made, gateway: StandInGateway) -> None:
    mine = turns(ends_turns=True)
    gateway.delay_s = 30.0
    running = asyncio.create_task(mine.generate([3], {}, "a"))
    await until(lambda: bool(gateway.asked))
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


async def test_images_are_sent_once_as_they_are(turns: Made, gateway: StandInGateway) -> None:
    mine, image = turns(), Image.open(io.BytesIO(picture(1)))
    for name in "ab":
        await mine.generate([3], {}, name, image_data=[image])
    first, second = (list(asked["images"]) for asked in gateway.asked)
    (sent,) = map(base64.b64decode, first)
    assert Image.open(io.BytesIO(sent)).tobytes() == image.tobytes()
    assert second == [{"sha256": sha256(sent).hexdigest()}]


async def test_what_is_no_image_is_refused_by_name(turns: Made) -> None:
    for refused in ({"image_data": ["a.png"]}, {"video_data": [1]}, {"audio_data": [1]}):
        with pytest.raises(RefusedError, match=next(iter(refused))):
            await turns().generate([3], {}, "a", **refused)
    assert (await turns().generate([3], {}, "b", image_data=None))["token_ids"]


def test_what_verl_cannot_have_here_is_refused_by_name_before_anything_starts() -> None:
    def asked(backend: str = "naive", quantization: str | None = None, **model: object) -> None:
        whole = {"lora_rank": 0, "lora": {}, "lora_adapter_path": None}
        sync = SimpleNamespace(backend=backend)
        rollout = SimpleNamespace(quantization=quantization, checkpoint_engine=sync)
        refuse_unfit(rollout, SimpleNamespace(**whole | model))

    asked()
    asked("rose")
    asked("rose", lora_rank=32, lora={"merge": True})
    for adapter in ({"lora_rank": 32}, {"lora": {"rank": 32}}, {"lora_adapter_path": "saved"}):
        asked(**adapter)
        with pytest.raises(RefusedError, match="backend=rose with LoRA"):
            asked("rose", **adapter)
    with pytest.raises(RefusedError, match="quantization"):
        asked(quantization="fp8")


def test_verls_configuration_goes_before_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in trainer_environment(tmp_path).items():
        monkeypatch.setenv(name, value)
    assert overlaid({}).job == "grpo"
    assert overlaid({"job": "mine", "max_staleness": 3}).job == "mine"
    assert overlaid({"max_staleness": 3}).max_staleness == 3
    with pytest.raises(ConfigError, match="no setting 'jobb'"):
        overlaid({"jobb": "x"})


# ---- sessions by their tokens ----

Tokens = st.lists(st.integers(0, 3), max_size=70)


def test_a_turn_that_goes_on_keeps_its_session() -> None:
    found = TokenSessions()
    for turns in range(1, 40):
        prompt = [5] * 3
        session = found.session_of(prompt)
        for _ in range(turns):
            found.ended(session, prompt)
            prompt = [*prompt, 7, turns]
            assert found.session_of(prompt) == session


def test_samples_of_one_prompt_are_apart() -> None:
    found = TokenSessions()
    prompt = [1] * 32
    sessions = [found.session_of(prompt) for _ in range(4)]
    assert len(set(sessions)) == 4
    for k, session in enumerate(sessions):
        found.ended(session, [*prompt, 10 + k])
    for k, session in enumerate(sessions):
        assert found.session_of([*prompt, 10 + k, 2, 3]) == session
    assert found.session_of([*prompt, 99]) not in sessions


@given(st.lists(Tokens, min_size=1, max_size=6), Tokens)
def test_the_longest_end_that_the_prompt_begins_with_is_its_trajectory(
    ends: list[list[int]], prompt: list[int]
) -> None:
    found = TokenSessions()
    for index, tokens in enumerate(ends):
        found.ended(str(index), tokens)
    fits = [tokens for tokens in ends if prompt[: len(tokens)] == tokens]
    session = found.session_of(prompt)
    if fits:
        assert ends[int(session)] == max(fits, key=len)
    else:
        assert len(session) == 32


def test_the_oldest_ends_are_forgotten() -> None:
    found = TokenSessions(most=8)
    for index in range(20):
        found.ended(str(index), [index] * 20)
    kept = [k for k in range(20) if found.session_of([k] * 20) == str(k)]
    assert kept == list(range(12, 20))


# ---- one turn in words of verl ----


TURN_LENGTHS = Lengths(prompt=100, response=32, model=None)
# Parameters that verl's agent loop sends with every turn.
USUAL = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True}


def turn(*versions: tuple[int, int, int], segments: int = 1) -> Turn:
    end = versions[-1][2] if versions else 0
    spans = tuple(("r", "dedicated", k, k + 1) for k in range(segments))
    return Turn("id", tuple(range(end)), (-0.5,) * end, versions, spans, "stop", 1)


def test_neutral_parameters_leave_the_policys_distribution_as_it_is() -> None:
    assert turn_sampling(USUAL, TURN_LENGTHS, 10) == Sampling(max_tokens=32)
    neutral = {"frequency_penalty": 0, "presence_penalty": 0.0, "min_p": 0.0, "n": 1, "stop": []}
    assert turn_sampling(USUAL | neutral, TURN_LENGTHS, 10) == Sampling(max_tokens=32)


def test_parameters_are_carried_over() -> None:
    given = {"temperature": 0.0, "top_p": 0.9, "top_k": 5, "seed": 3}
    given |= {"min_p": 0.1, "repetition_penalty": 1.1, "ignore_eos": True}
    wanted = Sampling(**given, max_tokens=4, stop_token_ids=(7,))  # type: ignore[arg-type]
    for name in ("max_new_tokens", "max_tokens"):
        asked = given | {"stop_token_ids": [7], name: 4}
        assert turn_sampling(asked, TURN_LENGTHS, 10) == wanted


@pytest.mark.parametrize(
    ("name", "value"),
    [("stop", ["\n"]), ("n", 2), ("logit_bias", {3: 1.0}), ("prompt_logprobs", 1), ("beam", True)],
)
def test_what_would_change_the_distribution_unseen_is_refused_by_name(
    name: str, value: object
) -> None:
    with pytest.raises(RefusedError, match=name):
        turn_sampling({**USUAL, name: value}, TURN_LENGTHS, 10)


def test_a_turn_gets_no_more_tokens_than_the_trajectory_has_left() -> None:
    assert TURN_LENGTHS.budget(10, None) == 32
    assert TURN_LENGTHS.budget(120, None) == 12
    assert TURN_LENGTHS.budget(140, None) == 1
    assert Lengths(100, 32, 64).budget(60, 50) == 4
    with pytest.raises(RefusedError, match="max_model_len"):
        Lengths(100, 32, 64).budget(64, None)


def test_an_answer_says_which_steps_sampled_it() -> None:
    steps = PolicySteps(lag=1)
    steps.told(7, 0)
    steps.told(8, 2)
    fields = output_of(turn((7, 0, 3), (8, 3, 5), segments=2), steps)
    assert fields["extra_fields"] == {
        "global_steps": 0,
        "min_global_steps": 0,
        "max_global_steps": 2,
    }
    assert fields["token_ids"] == [0, 1, 2, 3, 4]
    assert fields["log_probs"] == [-0.5] * 5
    assert (fields["stop_reason"], fields["num_preempted"]) == ("completed", 1)


def test_turns_may_lag_and_never_behind_the_runs_own_first_version() -> None:
    steps = PolicySteps(lag=2)
    assert steps.least is None
    steps.told(41, 10)
    assert steps.least == 41
    for version in (42, 43, 44):
        steps.told(version, version - 31)
    assert steps.least == 42
    steps.lag = 0
    assert steps.least == 44


def test_a_version_that_was_not_told_counts_as_the_one_before() -> None:
    steps = PolicySteps(lag=0)
    assert steps.step_of(5) == 0
    steps.told(5, 3)
    steps.told(9, 4)
    assert [steps.step_of(version) for version in (4, 5, 6, 9, 12)] == [3, 3, 3, 4, 4]
