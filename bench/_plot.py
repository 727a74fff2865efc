"""A line chart as a PNG, with nothing but numpy and zlib: both axes logarithmic, one line a series."""

from __future__ import annotations

import itertools
import math
import struct
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

WIDTH, HEIGHT, MARGIN, LEGEND = 900, 520, 70, 18
COLOURS = ((31, 119, 180), (214, 39, 40), (44, 160, 44), (148, 103, 189), (255, 127, 14), (23, 190, 207))
SCALE = 2  # of the font's three by five points

# Five rows of three points each, as octal digits from top to bottom.
_GLYPHS = (
    "0:75557 1:26227 2:71747 3:71717 4:55711 5:74717 6:74757 7:71111 8:75757 9:75717 "
    "a:75755 b:65656 c:74447 d:65556 e:74647 f:74644 g:74557 h:55755 i:72227 j:11157 k:55655 l:44447 m:57755 "
    "n:65555 o:75557 p:75744 q:75571 r:65655 s:74717 t:72222 u:55557 v:55552 w:55775 x:55255 y:55222 z:71247 "
    ".:00002 ,:00022 /:11244 -:00700 (:12221 ):42224"
)
_FONT = {glyph[0]: glyph[2:] for glyph in _GLYPHS.split()} | {" ": "00000"}


def chart(path: Path, title: str, x: Sequence[float], x_label: str, series: Mapping[str, Sequence[float]]) -> None:
    """Write the chart; every series has one positive value for each `x`."""
    image = np.full((HEIGHT, WIDTH, 3), 255, np.uint8)
    values = [v for of in series.values() for v in of]
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)) + 1e-9)
    bottom, top, right = HEIGHT - MARGIN, MARGIN + LEGEND * len(series), WIDTH - MARGIN

    def across(value: float) -> int:
        span = math.log(x[-1] / x[0]) or 1
        return round(MARGIN + math.log(value / x[0]) / span * (right - MARGIN - 40)) + 20

    def up(value: float) -> int:
        return round(bottom - (math.log10(value) - low) / max(1, high - low) * (bottom - top))

    _text(image, 10, 10, title)
    for decade in range(low, high + 1):
        image[up(10**decade), MARGIN:right] = 210
        _text(image, 8, up(10**decade) - 5, f"{10**decade:g}")
    for value in x:
        image[top:bottom, across(value)] = 235
        _text(image, across(value) - 8, bottom + 8, f"{value:g}x")
    _text(image, MARGIN, bottom + 28, x_label)
    for number, (name, of) in enumerate(series.items()):
        colour = COLOURS[number % len(COLOURS)]
        _text(image, MARGIN, 32 + LEGEND * number, name, colour)
        points = [(across(at), up(value)) for at, value in zip(x, of, strict=True)]
        for (x0, y0), (x1, y1) in itertools.pairwise(points):
            steps = max(abs(x1 - x0), abs(y1 - y0), 1)
            columns, rows = (np.linspace(a, b, steps + 1).round().astype(int) for a, b in ((x0, x1), (y0, y1)))
            for shift in (0, 1):
                image[rows + shift, columns] = colour
        for (column, row), value in zip(points, of, strict=True):
            image[row - 3 : row + 4, column - 3 : column + 4] = colour
            _text(image, column + 6, row - 14, f"{value:.3g}", colour)
    path.write_bytes(_png(image))


def _text(image: Any, column: int, row: int, text: str, colour: tuple[int, int, int] = (0, 0, 0)) -> None:
    for at, character in enumerate(text.lower()):
        glyph = [[int(digit) >> shift & 1 for shift in (2, 1, 0)] for digit in _FONT.get(character, _FONT["-"])]
        large = np.kron(np.array(glyph), np.ones((SCALE, SCALE), int)).astype(bool)
        left = column + at * 4 * SCALE
        part = image[row : row + large.shape[0], left : left + large.shape[1]]
        part[large[: part.shape[0], : part.shape[1]]] = colour


def _png(image: Any) -> bytes:
    height, width, _ = image.shape
    rows = np.concatenate([np.zeros((height, 1), np.uint8), image.reshape(height, -1)], axis=1)

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = chunk(b"IHDR", head), chunk(b"IDAT", zlib.compress(rows.tobytes())), chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)
