"""Page of an advice: one HTML file with its plots inside, to hand on."""

from pathlib import Path

from rose.advise.advice import DeploymentAdvice, LendingAdvice
from rose.advise.usage import idle_share

WIDTH, HEIGHT = 720, 120
MOST_BARS = 180


def page_of(advice: LendingAdvice, made_at: str) -> str:
    """Return the page's text; `made_at` stands under its title."""
    import jinja2

    folder = Path(__file__).parent
    made = jinja2.Environment(loader=jinja2.FileSystemLoader(folder), autoescape=True)
    return made.get_template("advice.html").render(
        advice=advice, made_at=made_at, bars=bars, width=WIDTH, height=HEIGHT
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
