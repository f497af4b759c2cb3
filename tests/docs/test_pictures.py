"""The committed pictures of the documentation are what the library draws today."""

import re
import xml.etree.ElementTree as ET

import pytest

from docs.img import draw

# Inner references are made of hashes of coordinates, which differ by a hair between releases.
REFERENCES = re.compile(r'(id|href|clip-path)="[^"]*"')
NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e-?\d+)?")
POINTS = 1.5


@pytest.mark.parametrize("name", draw.PICTURES)
def test_a_picture_is_what_would_be_drawn_today(name):
    committed = REFERENCES.sub("", (draw.FOLDER / f"{name}.svg").read_text(encoding="utf-8"))
    today = REFERENCES.sub("", draw.drawn(name))
    cure = f"run `python docs/img/draw.py {name}`"
    assert NUMBER.sub("#", committed) == NUMBER.sub("#", today), cure
    pairs = zip(NUMBER.findall(committed), NUMBER.findall(today), strict=True)
    assert max(abs(float(a) - float(b)) for a, b in pairs) < POINTS, cure


def test_no_picture_is_left_over():
    assert {path.stem for path in draw.FOLDER.glob("*.svg")} == set(draw.PICTURES)


@pytest.mark.parametrize("name", draw.PICTURES)
def test_a_picture_has_a_white_ground_and_fits_a_phone(name):
    root = ET.parse(draw.FOLDER / f"{name}.svg").getroot()
    assert float(root.attrib["width"].removesuffix("pt")) < 250  # 333 of its 390 pixels
    ground = next(e for e in root.iter() if e.tag.endswith("path") and "fill" in str(e.attrib))
    assert "#ffffff" in ground.attrib["style"]
