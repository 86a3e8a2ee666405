"""An advice as tables, and as a page: one HTML file with its plots inside, to hand on."""

from pathlib import Path

from rose.advise.advice import DeploymentAdvice, LendingAdvice
from rose.advise.usage import idle_share
from rose.command_line.output import Table, View

WIDTH, HEIGHT = 720, 120
MOST_BARS = 180


def page_of(advice: LendingAdvice, made_at: str) -> str:
    """Return the page's text; `made_at` stands under its title."""
    import jinja2

    folder = Path(__file__).parent
    made = jinja2.Environment(loader=jinja2.FileSystemLoader(folder), autoescape=True)
    return made.get_template("advice.html").render(
        advice=advice, made_at=made_at, bars=bars, count=_count, width=WIDTH, height=HEIGHT
    )


def bars(each: DeploymentAdvice) -> list[tuple[float, float, float, str]]:
    """Return bars of the idle share over the history: x, y, height, and its text."""
    moments = each.usage.moments
    size = max(1, -(-len(moments) // MOST_BARS))
    groups = [moments[at : at + size] for at in range(0, len(moments), size)]
    found = []
    for number, group in enumerate(groups):
        idle = idle_share(group)
        high = idle * HEIGHT
        x = WIDTH * number / len(groups)
        hours = (group[0].at_s - moments[0].at_s) / 3_600
        found.append((x, HEIGHT - high, high, f"after {hours:.1f} h: {idle:.0%} idle"))
    return found


def view(advice: LendingAdvice) -> View:
    """Return the advice as three tables: figures, users' latencies with and without lending, and
    how sure both are.
    """
    figures = [_row(each) for each in advice.deployments]
    if len(figures) > 1:
        money = "" if advice.money_a_day is None else f"{advice.money_a_day:,.0f}"
        total = (f"{advice.gpus:.1f}", "", f"{advice.idle_gpu_hours_a_day:.1f}")
        figures.append(
            ("all", *total, _count(advice.tokens_a_day), f"{advice.saved_a_day:.1f}", money)
        )
    columns = ("DEPLOYMENT", "GPUS", "IDLE", "IDLE GPU-H/DAY", "TOKENS/DAY", "GPU-H SAVED/DAY")
    users = [
        (each.usage.name, *row)
        for each in advice.deployments
        if each.answer
        for row in _users(each)
    ]
    lines = ("nothing was lent: tokens and users' p99 with lending are simulated",)
    sure = [(each.usage.name, line) for each in advice.deployments for line in _doubts(each)]
    return View(
        advice.plain(),
        lines,
        (
            Table(
                (*columns, "MONEY/DAY"),
                tuple(figures),
                right=frozenset((*columns[1:], "MONEY/DAY")),
            ),
            Table(
                ("DEPLOYMENT", "USERS' P99", "MEASURED", "ALONE", "LENDING"),
                tuple(users),
                right=frozenset(("MEASURED", "ALONE", "LENDING")),
            ),
            Table(("DEPLOYMENT", "HOW SURE"), tuple(sure)),
        ),
    )


def _row(each: DeploymentAdvice) -> tuple[str, ...]:
    tokens = _count(each.answer.harvested_tokens_a_day) if each.answer else ""
    saved = f"{each.saved_a_day:.1f}" if each.answer else ""
    money = "" if each.money_a_day is None else f"{each.money_a_day:,.0f}"
    idle = f"{each.idle_gpu_hours_a_day:.1f}"
    return each.usage.name, f"{each.gpus:.1f}", f"{each.idle:.0%}", idle, tokens, saved, money


def _users(each: DeploymentAdvice) -> list[tuple[str, str, str, str]]:
    answer, usage = each.answer, each.usage
    assert answer is not None
    ttft = "" if usage.ttft_p99_s is None else f"{usage.ttft_p99_s:.3f} s"
    tpot = "" if usage.tpot_p99_s is None else f"{1e3 * usage.tpot_p99_s:.1f} ms"
    alone, lending = answer.alone, answer.lending
    return [
        ("TTFT", ttft, f"{alone.ttft_s.p99:.3f} s", f"{lending.ttft_s.p99:.3f} s"),
        ("TPOT", tpot, f"{1e3 * alone.tpot_s.p99:.1f} ms", f"{1e3 * lending.tpot_s.p99:.1f} ms"),
    ]


def _doubts(each: DeploymentAdvice) -> tuple[str, ...]:
    return (*each.sure, *([f"not simulated: {each.trouble}"] if each.trouble else []))


def _count(number: float) -> str:
    """Return a large number for people, as 474 thousand."""
    for size, unit in ((1e9, "billion"), (1e6, "million"), (1e3, "thousand")):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:.3g}"
