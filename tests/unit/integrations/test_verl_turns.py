"""One turn between verl and ROSE: what is sampled, what is refused, which steps an answer is of."""

import pytest

from rose.client import Sampling, Turn
from rose.errors import RefusedError
from rose.integrations.verl.turns import Lengths, PolicySteps, output_of, turn_sampling

LENGTHS = Lengths(prompt=100, response=32, model=None)
# Parameters that verl's agent loop sends with every turn.
USUAL = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True}


def turn(*versions: tuple[int, int, int], segments: int = 1) -> Turn:
    end = versions[-1][2] if versions else 0
    spans = tuple(("r", "dedicated", k, k + 1) for k in range(segments))
    return Turn("id", tuple(range(end)), (-0.5,) * end, versions, spans, "stop", 1)


def test_neutral_parameters_leave_the_policys_distribution_as_it_is() -> None:
    assert turn_sampling(USUAL, LENGTHS, 10) == Sampling(max_tokens=32)
    neutral = {"frequency_penalty": 0, "presence_penalty": 0.0, "min_p": 0.0, "n": 1, "stop": []}
    assert turn_sampling(USUAL | neutral, LENGTHS, 10) == Sampling(max_tokens=32)


def test_parameters_are_carried_over() -> None:
    given = {"temperature": 0.0, "top_p": 0.9, "top_k": 5, "seed": 3, "stop_token_ids": [7]}
    given |= {"min_p": 0.1, "repetition_penalty": 1.1, "ignore_eos": True}
    wanted = Sampling(
        temperature=0.0,
        top_p=0.9,
        top_k=5,
        max_tokens=4,
        seed=3,
        stop_token_ids=(7,),
        min_p=0.1,
        repetition_penalty=1.1,
        ignore_eos=True,
    )
    assert turn_sampling(given | {"max_new_tokens": 4}, LENGTHS, 10) == wanted
    assert turn_sampling(given | {"max_tokens": 4}, LENGTHS, 10) == wanted


@pytest.mark.parametrize(
    ("name", "value"),
    [("stop", ["\n"]), ("n", 2), ("logit_bias", {3: 1.0}), ("prompt_logprobs", 1), ("beam", True)],
)
def test_what_would_change_the_distribution_unseen_is_refused_by_name(
    name: str, value: object
) -> None:
    with pytest.raises(RefusedError, match=name):
        turn_sampling({**USUAL, name: value}, LENGTHS, 10)


def test_a_turn_gets_no_more_tokens_than_the_trajectory_has_left() -> None:
    assert LENGTHS.budget(10, None) == 32
    assert LENGTHS.budget(120, None) == 12
    assert LENGTHS.budget(140, None) == 1
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
