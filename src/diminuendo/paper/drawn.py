"""Digits drawn from fonts and bent at random: public images of the same kind as handwritten ones.

They cost no privacy and need no download: the fonts come with matplotlib. Each image takes a digit
of a random font; it is sheared, turned, stretched and bent by a smooth random field, and its
strokes get a random width. How much it is bent was set by one published fact: a linear classifier
of handwritten digits errs in about 8 of 100 (LeCun et al. 1998).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage

from diminuendo import _extras
from diminuendo.paper.digits import Digits, Pixels

TRAIN, TEST = 20_000, 4_000
SIDE = 28
_HEIGHT = 20
"""Pixels of a digit's height, before it is bent."""
_GLYPH = 96
_FONTS = (
    "DejaVuSans",
    "DejaVuSans-Bold",
    "DejaVuSans-Oblique",
    "DejaVuSansMono",
    "DejaVuSansMono-Oblique",
    "DejaVuSerif",
    "DejaVuSerif-Italic",
    "STIXGeneral",
    "STIXGeneralItalic",
    "STIXGeneralBolIta",
    "cmr10",
    "cmss10",
    "cmti10",
    "cmtt10",
)
_TURN, _SHEAR, _STRETCH, _BENT = 0.12, 0.22, 0.2, 1.2
"""Standard deviations: radians, pixels a pixel, of the logarithm of the width, pixels."""
_SMOOTH = 5.0
_WIDTHS = 1.0, 2.2
"""Half the width of a stroke, in pixels."""

_Numbers = NDArray[np.float64]


@dataclass(frozen=True)
class _Glyph:
    """A digit of a font: the signed distance from its edge, and where it is in that picture."""

    distance: _Numbers
    centre: _Numbers
    scale: float

    @classmethod
    def of(cls, inside: NDArray[np.bool_]) -> _Glyph:
        edge = ndimage.distance_transform_edt
        rows, columns = np.nonzero(inside)
        ends = np.array([[rows.min(), rows.max()], [columns.min(), columns.max()]])
        return cls(
            np.asarray(edge(inside) - edge(~inside), dtype=np.float64),
            ends.mean(axis=1),
            float(np.ptp(ends[0])) / _HEIGHT,
        )

    def bent(self, chance: np.random.Generator) -> Pixels:
        """An image of it, another one each time."""
        turn, slant = chance.normal(0, _TURN), chance.normal(0.1, _SHEAR)
        tall, wide = np.exp(chance.normal([0.0, 0.1], [0.06, _STRETCH]))
        turned = np.array([[np.cos(turn), -np.sin(turn)], [np.sin(turn), np.cos(turn)]])
        map_ = np.array([[1 / tall, 0.0], [slant, 1 / wide]]) @ turned
        noise = chance.normal(size=(2, SIDE, SIDE))
        field = ndimage.gaussian_filter(noise, (0, _SMOOTH, _SMOOTH))
        field *= _BENT / field.std()
        places = np.mgrid[:SIDE, :SIDE] - (SIDE - 1) / 2 + field
        where = (map_ @ places.reshape(2, -1)) * self.scale + self.centre[:, None]
        distance = ndimage.map_coordinates(self.distance, where, order=1, mode="nearest")
        width = chance.uniform(*_WIDTHS) - self.distance.max() / self.scale
        grey = np.clip(distance / self.scale + width + 0.5, 0, 1)
        return np.asarray(255 * grey, dtype=np.uint8)


def description(train: int = TRAIN, test: int = TEST) -> str:
    """What `drawn` gives, in words."""
    return (
        f"digits drawn from {len(_FONTS)} fonts and bent at random: {train:,} to draw from, "
        f"{test:,} for testing"
    )


@cache
def drawn(train: int = TRAIN, test: int = TEST, *, seed: int = 1) -> Digits:
    """So many images to draw from and to test on; the same ones for the same seed."""
    glyphs = _glyphs()
    chance = np.random.default_rng(seed)
    labels = chance.integers(0, 10, train + test)
    fonts = chance.integers(0, len(glyphs), train + test)
    images = np.stack([glyphs[f][d].bent(chance) for f, d in zip(fonts, labels, strict=True)])
    own = labels.astype(np.uint8)
    return Digits(
        images[:train], own[:train], images[train:], own[train:], description(train, test)
    )


def _glyphs() -> list[list[_Glyph]]:
    """The ten digits of every font."""
    with _extras.needed("matplotlib", extra="plots", purpose="Drawing digits from its fonts"):
        import matplotlib
    with _extras.needed("PIL", extra="plots", purpose="Drawing digits from fonts"):
        from PIL import Image, ImageDraw, ImageFont
    folder = Path(matplotlib.get_data_path()) / "fonts" / "ttf"

    def glyph(font: ImageFont.FreeTypeFont, digit: int) -> _Glyph:
        image = Image.new("L", (_GLYPH, _GLYPH), 0)
        middle = _GLYPH / 2, _GLYPH / 2
        ImageDraw.Draw(image).text(middle, str(digit), fill=255, font=font, anchor="mm")
        return _Glyph.of(np.asarray(image) > 127)

    loaded = [ImageFont.truetype(str(folder / f"{name}.ttf"), 72) for name in _FONTS]
    return [[glyph(font, digit) for digit in range(10)] for font in loaded]
