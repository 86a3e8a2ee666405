"""Style of all pictures of benchmarks and of the demo."""

INK, ALARM = "#22313f", "#c0392b"
DPI = 130
STYLE = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.edgecolor": "#8a949e",
    "axes.labelcolor": INK,
    "grid.color": "#e6e9ec",
    "font.size": 9,
    "legend.frameon": False,
    "text.color": INK,
    "figure.constrained_layout.use": True,
}
GRID = STYLE | {"axes.grid": True}
