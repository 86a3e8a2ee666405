"""The control that drops a token leaves a turn that only its logprobs give away."""

from bench.demo.faulty_trainer import without_the_token_at_the_seam
from rose.client import Turn

MOVED = Turn(
    request_id="r",
    token_ids=(10, 11, 12, 13, 14),
    logprobs=(-0.0, -0.1, -0.2, -0.3, -0.4),
    versions=((4, 0, 2), (5, 2, 5)),
    segments=(("guest", "guest", 0, 3), ("dedicated", "dedicated", 3, 5)),
    finish_reason="stop",
    attempts=2,
)


def test_the_last_token_before_the_move_is_gone_and_every_span_still_fits() -> None:
    turn = without_the_token_at_the_seam(MOVED)
    assert turn.token_ids == (10, 11, 13, 14)
    assert turn.logprobs == (-0.0, -0.1, -0.3, -0.4)
    assert turn.versions == ((4, 0, 2), (5, 2, 4))
    assert turn.segments == (("guest", "guest", 0, 2), ("dedicated", "dedicated", 2, 4))


def test_a_turn_that_never_moved_is_left_alone() -> None:
    whole = without_the_token_at_the_seam(without_the_token_at_the_seam(MOVED))
    assert whole.token_ids == (10, 13, 14)
    still = Turn("r", (1,), (-1.0,), ((0, 0, 1),), (("d", "dedicated", 0, 1),), "stop", 1)
    assert without_the_token_at_the_seam(still) is still
