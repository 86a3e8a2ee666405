"""A soak's verdict: what it fails for, and what it does not blame the gateway for."""

from bench.soak import SoakSeen, checks, growth


def phase(**seen: object) -> SoakSeen:
    values = {"turns": 10, "took_s": 1.0, "rss_mib": [60.0] * 20, "descriptors": [9] * 20}
    return SoakSeen(**{**values, **seen})  # type: ignore[arg-type]


def failed(mixed: SoakSeen, storm: SoakSeen | None = None) -> list[str]:
    return [
        each.name
        for each in checks(mixed, storm or SoakSeen())
        if each.decisive and each.verdict == "FAILS"
    ]


def test_a_long_step_of_the_loop_fails_on_any_machine() -> None:
    assert failed(phase(loop_busy_s=0.11, loop_lag_s=0.2, waited=0.5)) == [
        "longest step of its event loop, s"
    ]


def test_a_pause_fails_where_nobody_else_had_the_processor() -> None:
    assert failed(phase(loop_busy_s=0.05, loop_lag_s=0.2, waited=0.01)) == [
        "longest pause of its event loop, s"
    ]
    assert not failed(phase(loop_busy_s=0.05, loop_lag_s=0.2, waited=0.3))


def test_a_storm_is_judged_by_itself() -> None:
    storm = phase(turns=2_000, loop_busy_s=0.3, rss_mib=[301.0])
    assert failed(phase(), storm) == [
        "2000 time-outs/s: longest step of its event loop, s",
        "2000 time-outs/s: memory, MiB",
    ]


def test_memory_that_grows_to_the_end_is_growth_and_a_start_is_not() -> None:
    assert growth([*range(100)], 10) > 40
    assert growth([*range(50), *[50] * 50], 10) == 0
