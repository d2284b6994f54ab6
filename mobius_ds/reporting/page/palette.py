"""Colours of everything a comparison draws, on paper and on screen, told apart by the colour-blind too.

They are Okabe and Ito's, with two more that keep apart from them. Colour never speaks alone: lines have a dash and a
marker, areas a pattern. Patterns are named as Plotly and Matplotlib both do, dashes and markers as Plotly does.
"""

from typing import Dict, NamedTuple

ORANGE, SKY, GREEN, YELLOW, BLUE, VERMILION, PURPLE = \
    "#E69F00", "#56B4E9", "#009E73", "#F0E442", "#0072B2", "#D55E00", "#CC79A7"
GREY, BROWN = "#999999", "#7F5F3F"


class Line(NamedTuple):
    """How a curve is drawn."""

    colour: str
    dash: str
    marker: str


class Fill(NamedTuple):
    """How an area is filled."""

    colour: str
    pattern: str


LINES: Dict[str, Line] = {
    "zero3": Line(VERMILION, "solid", "circle"), "mobius": Line(BLUE, "dash", "square"),
    "zero3-defaults": Line(ORANGE, "dot", "diamond"), "pipeline": Line(GREEN, "dashdot", "cross"),
    "zero2": Line(PURPLE, "longdash", "x"), "ddp": Line(GREY, "longdashdot", "triangle-up"),
    "mobius (simulated)": Line(SKY, "dot", "hexagon"),
}  # yapf: disable
"""By arm, so that an arm looks the same in all pictures of all reports."""

FILLS: Dict[str, Fill] = {
    "forward": Fill(GREEN, ""), "backward": Fill(PURPLE, "/"), "recompute": Fill(YELLOW, "\\"), "update": Fill(BROWN, "x"),
    "compute": Fill(GREEN, ""), "busy": Fill(GREEN, "|"),
    "parameters_in": Fill(BLUE, ""), "gradients_out": Fill(VERMILION, "/"), "activations_in": Fill(SKY, "\\"),
    "activations_out": Fill(ORANGE, "x"), "other": Fill(GREY, "."),
    "transfers": Fill(VERMILION, "/"), "weights": Fill(BLUE, ""), "activations": Fill(SKY, "\\"),
    "inputs": Fill(YELLOW, "+"), "outgoing": Fill(ORANGE, "x"), "runtime": Fill(BROWN, "-"),
    "nothing to do": Fill(GREY, "."),
}  # yapf: disable
"""By what is drawn: a category of bytes, a kind of compute, or what a GPU computes or waits for."""


def line_of(arm: str) -> Line:
    """The curve of an arm."""
    return LINES.get(arm, Line(GREY, "solid", "star"))


def fill_of(what: str) -> Fill:
    """The area of ``what``; what has no fill of its own is drawn as other."""
    return FILLS.get(what, FILLS["other"])
