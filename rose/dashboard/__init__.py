"""The web dashboard of a scheduler: what runs, what it costs hosts, and why not more.

    core ──observed──► Look ──► History (rings) ─┐
    audit records ──► Journal (the newest) ──────┴► Model ──► templates ──► Page ──► HTML
                                                                             └─► /events (SSE)

The loop of the scheduler takes the look alone; all else is done in one thread beside it. A page is
tables of cells. The stream sends the cells whose texts changed, and a page whose rows are other
ones asks for itself anew: what is shown is rendered in one place, and works without scripts.
It reads, and changes nothing.
"""

from rose.dashboard.server import (
    DashboardServer,
    DashboardSettings,
    add_dashboard_options,
    taken_dashboard,
)
from rose.dashboard.watch import LeaderInfo, Watch

__all__ = [
    "DashboardServer",
    "DashboardSettings",
    "LeaderInfo",
    "Watch",
    "add_dashboard_options",
    "taken_dashboard",
]
