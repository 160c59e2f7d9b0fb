"""Texts of a picture: inside it, and none over another."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from itertools import combinations

SVG = "{http://www.w3.org/2000/svg}"


def assert_texts_are_apart(picture, picture_width):
    root = ET.fromstring(picture)
    height = float(root.attrib["height"])
    boxes = []
    for element in root.iter(f"{SVG}text"):
        size = 15 if "title" in element.attrib.get("class", "") else 11
        # Wider than any common sans-serif face draws it.
        width = len(element.text) * 6.2 * size / 11
        shift = {"middle": width / 2, "end": width}.get(element.attrib.get("text-anchor"), 0)
        left, base = float(element.attrib["x"]) - shift, float(element.attrib["y"])
        boxes.append((left, base - size * 0.8, left + width, base + size * 0.2, element.text))
    for left, top, right, bottom, text in boxes:
        assert left >= 0, text
        assert right <= picture_width, text
        assert top >= 0, text
        assert bottom <= height, text
    for one, other in combinations(boxes, 2):
        apart = one[2] <= other[0] or other[2] <= one[0] or one[3] <= other[1] or other[3] <= one[1]
        assert apart, (one[4], other[4])
