"""The demo's experiment: its blocks, drills, processes and comparisons."""
