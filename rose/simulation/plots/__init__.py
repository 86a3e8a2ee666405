"""Plots of simulations, with matplotlib, which is an extra: `rose-rollout[simulation]`."""

from rose.simulation.plots.draw import (
    PICTURES,
    draw_fleet,
    draw_slo,
    draw_steps,
    draw_tail,
    draw_use,
    draw_what_if,
    save_fleet,
    save_plots,
    save_what_if,
)

__all__ = [
    "PICTURES",
    "draw_fleet",
    "draw_slo",
    "draw_steps",
    "draw_tail",
    "draw_use",
    "draw_what_if",
    "save_fleet",
    "save_plots",
    "save_what_if",
]
