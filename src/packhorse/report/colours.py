"""The colour of each kind of task and cause of memory, the same in every picture.

Hues follow what a task waits for: blues and orange compute, green updates, purples and reds move
bytes. Kinds that lie side by side also differ in lightness.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

_GREY: Final = "#8b949e"

_KIND_COLOURS: Final[Mapping[str, str]] = {
    "forward": "#3b7dd8",
    "recompute": "#93bdf2",
    "backward": "#e07b39",
    "input_grad": "#d65a5a",
    "weight_grad": "#8fb83c",
    "norm": "#d9b32f",
    "update": "#2f9e6e",
    "disk_read": "#8e6bbf",
    "disk_write": "#cf4f7f",
    "copy_in": "#4fa9b0",
    "copy_out": "#a56a43",
    "send": "#b58ad6",
    "receive": "#5b5fc7",
    "all_reduce": "#8e6bbf",
    "import": "#8e6bbf",
    "export": "#cf4f7f",
}

_CAUSE_COLOURS: Final[Mapping[str, str]] = {
    "parameters": "#3b7dd8",
    "gradients": "#e07b39",
    "optimizer": "#2f9e6e",
    "activations": "#93bdf2",
    "logits": "#d9b32f",
    "buffers": "#4fa9b0",
    "workspace": "#8e6bbf",
    "heap": "#b58ad6",
    "copy": "#4fa9b0",
    "slots": "#a56a43",
    "base": _GREY,
}


def colour_of(name: str) -> str:
    """Give the colour of a kind of task or of a cause of memory."""
    return _KIND_COLOURS.get(name) or _CAUSE_COLOURS.get(name) or _GREY


def ink_on(colour: str) -> str:
    """Give the text colour, black or white, that reads better on a colour (WCAG 2 luminance)."""
    red, green, blue = (_linear(int(colour[at : at + 2], 16) / 255) for at in (1, 3, 5))
    luminance = 0.2126 * red + 0.7152 * green + 0.0722 * blue
    return "#ffffff" if luminance < 0.25 else "#14171c"


def fade(colour: str, share: float) -> str:
    """Mix a colour with white: none of it for a share of 0, white alone for 1."""
    channels = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return "#" + "".join(f"{round(each + (255 - each) * share):02x}" for each in channels)


def _linear(channel: float) -> float:
    return channel / 12.92 if channel <= 0.04045 else ((channel + 0.055) / 1.055) ** 2.4
