"""A trajectory's next turn is found by its tokens alone, and no other is taken for it."""

from hypothesis import given
from hypothesis import strategies as st

from rose.integrations.verl.trajectories import Trajectories

Tokens = st.lists(st.integers(0, 3), max_size=70)


def test_a_turn_that_goes_on_keeps_its_session() -> None:
    found = Trajectories()
    for turns in range(1, 40):
        prompt = [5] * 3
        session = found.session_of(prompt)
        for _ in range(turns):
            found.ended(session, prompt)
            prompt = [*prompt, 7, turns]
            assert found.session_of(prompt) == session


def test_samples_of_one_prompt_are_apart() -> None:
    found = Trajectories()
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
    found = Trajectories()
    for index, tokens in enumerate(ends):
        found.ended(str(index), tokens)
    fits = [tokens for tokens in ends if prompt[: len(tokens)] == tokens]
    session = found.session_of(prompt)
    if fits:
        assert ends[int(session)] == max(fits, key=len)
    else:
        assert len(session) == 32


def test_the_oldest_ends_are_forgotten() -> None:
    found = Trajectories(most=8)
    for index in range(20):
        found.ended(str(index), [index] * 20)
    kept = [k for k in range(20) if found.session_of([k] * 20) == str(k)]
    assert kept == list(range(12, 20))
