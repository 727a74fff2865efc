"""A line chart as a PNG: both axes logarithmic, one line a series, each point with its value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.figure import Figure

INCHES, DPI = (9.0, 5.4), 100
LABEL_POINTS_MIN = 13  # between two values at the same place


def chart(
    path: Path, title: str, x: Sequence[float], x_label: str, y_label: str, series: Mapping[str, Sequence[float]]
) -> None:
    """Write the chart; every series has one positive value for each `x`, which is given in multiples of the first."""
    figure = Figure(figsize=INCHES, dpi=DPI, layout="constrained")
    axes = figure.subplots()
    axes.set(title=title, xlabel=x_label, ylabel=y_label, xscale="log", yscale="log")
    axes.set_xticks(x, [f"{value:g}x" for value in x])
    axes.minorticks_off()
    axes.yaxis.set_major_formatter("{x:g}")
    axes.grid(color="#dddddd")
    axes.margins(x=0.08, y=0.18)
    drawn = {name: axes.plot(x, values, marker="o", label=name)[0] for name, values in series.items()}
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    figure.draw_without_rendering()  # the places of points are known from here on
    points_a_pixel = 72 / DPI
    for at, value in enumerate(x):
        lowest_free = float("-inf")
        for name in sorted(series, key=lambda name: series[name][at]):
            y = series[name][at]
            place = axes.transData.transform((value, y))[1] * points_a_pixel
            lowest_free = max(place - 4, lowest_free + LABEL_POINTS_MIN)
            offset = (9, lowest_free - place)
            color = drawn[name].get_color()
            label = axes.annotate(f"{y:.3g}", (value, y), offset, textcoords="offset points", color=color, va="bottom")
            label.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 0.5})
    figure.savefig(path)
