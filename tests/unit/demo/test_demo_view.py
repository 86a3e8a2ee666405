import io
from dataclasses import replace

from rich.console import Console

from bench.demo.view import (
    HostFigures,
    JobView,
    LiveView,
    PlainView,
    TrainingProgress,
    ViewState,
    open_view,
    plain_line,
    render,
    sparkline,
)

TRAINING = ViewState(
    stage="training",
    elapsed_s=75,
    step=3,
    running=True,
    arm="leased",
    rewards=(0.4, 0.5, 0.6),
    tokens_per_s={"guest-0": 310.0, "dedicated-0": 640.0},
    host=HostFigures(0.02, 0.25, 0.008, 0.01, 0.2, 0.05, 120, 0),
    guest_mode="RUN",
    guest_reason="host idle",
    revocations=2,
    version=3,
    wire_bytes=2_700_000,
    full_bytes=3_900_000,
    memory_bytes=4 * 2**30,
)


def drawn(state: ViewState, width: int = 100) -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    console.print(render(state))
    output = console.file
    assert isinstance(output, io.StringIO)
    return output.getvalue()


def test_the_page_shows_what_the_run_is_doing() -> None:
    page = drawn(TRAINING)
    for text in (
        "training",
        "3   leased",
        "0.60",
        "dedicated-0 640   guest-0 310",
        "p95  250.0 ms   target 200 ms",
        "RUN  host idle",
        "2 revocations",
        "v3   2.7 MB sent of 3.9 MB",
        "4.0 GiB",
        "1:15",
    ):
        assert text in page


def test_the_page_fits_a_narrow_terminal() -> None:
    assert all(len(line) <= 80 for line in drawn(TRAINING, width=80).splitlines())


def test_slow_parts_show_how_far_they_are() -> None:
    page = drawn(ViewState("starting", progress=[TrainingProgress("host", 12, 40)]))
    assert "host" in page
    assert "12/40 s" in page


def test_a_sparkline_keeps_the_latest_values_and_stays_in_range() -> None:
    assert sparkline([0.0, 0.5, 1.0]) == "▁▅█"
    assert sparkline([-1.0, 2.0]) == "▁█"
    assert len(sparkline([0.5] * 100)) == 48


def test_without_a_terminal_each_stage_and_step_is_one_line() -> None:
    stream = io.StringIO()
    with open_view(stream) as view:
        assert isinstance(view, PlainView)
        view.show(ViewState("starting"))
        for _ in range(3):
            view.show(TRAINING)
    lines = stream.getvalue().splitlines()
    assert len(lines) == 2
    assert "step 3 leased reward=0.60" in lines[1]
    assert "\x1b" not in stream.getvalue()


def test_on_a_terminal_the_page_is_redrawn_and_left_standing() -> None:
    stream = io.StringIO()
    with LiveView(Console(file=stream, force_terminal=True, width=100)) as view:
        view.show(ViewState("starting"))
        view.show(TRAINING)
    assert "3   " in stream.getvalue()


SHARED = replace(
    TRAINING,
    jobs=(
        JobView("frozen-lake-1", (0.4, 0.5), 4, 0.52, has_guest=True),
        JobView("frozen-lake-2", (0.3,), 3, 0.48),
    ),
)


def test_several_jobs_have_a_line_each_for_learning_and_for_their_part_of_the_guest() -> None:
    page = drawn(SHARED)
    for text in ("job 1", "v4  0.50", "52% of the guest's time   has it now", "job 2", "48% of"):
        assert text in page
    assert "frozen-lake-1=v4,52% frozen-lake-2=v3,48%" in plain_line(SHARED)
    assert all(len(line) <= 80 for line in drawn(SHARED, width=80).splitlines())
