"""Dual slack."""

from slo import NO_DEADLINE, Slack, decode_deadline_ns, dual_slack, prefill_deadline_ns


def test_both_slacks_follow_their_formulas() -> None:
    slack = dual_slack(
        prefill_deadline_ns=prefill_deadline_ns(1_000, 500),
        decode_deadline_ns=decode_deadline_ns(1_200, 150),
        now_ns=1_250,
        predicted_prefill_ns=50,
        predicted_decode_ns=20,
    )
    assert slack == Slack(prefill_ns=200, decode_ns=80)
    assert slack.tightest_ns == 80


def test_lateness_is_negative_slack_and_nothing_waiting_is_none() -> None:
    late = dual_slack(
        prefill_deadline_ns=NO_DEADLINE,
        decode_deadline_ns=100,
        now_ns=150,
        predicted_prefill_ns=0,
        predicted_decode_ns=0,
    )
    assert late == Slack(None, -50)
    assert late.tightest_ns == -50
    assert Slack(None, None).tightest_ns is None
