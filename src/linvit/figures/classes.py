"""How the classes of a detector or segmenter are drawn on photographs: each in a colour of its own, with its name."""

import math
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFilter, ImageFont
from torch import Tensor

Colour = tuple[int, int, int]
Place = tuple[float, float, float, float]  # left, top, right, bottom

LEAST_TEXT, TEXT_PER_PIXEL = 11, 0.016  # readable on a thumbnail, and on a photograph that is shown smaller than it is
STEPS = (0.7548776662, 0.5698402910)  # the powers of 1 / 1.3247…, which spread points evenly over a square
# Oklab, where distance is what eyes see: to the cones' responses, and from them to linear RGB.
CONES = np.array(
    [[1, 0.3963377774, 0.2158037573], [1, -0.1055613458, -0.0638541728], [1, -0.0894841775, -1.2914855480]]
)
TO_RGB = np.array(
    [
        [4.0767416621, -3.3077115913, 0.2309699292],
        [-1.2684380046, 2.6097574011, -0.3413193965],
        [-0.0041960863, -0.7034186147, 1.7076147010],
    ]
)


def class_colour(index: int) -> Colour:
    """The colour of a class: always the same, and far from those of the classes around it."""
    hue, lightness = 2 * math.pi * (index * STEPS[0] % 1), 0.45 + 0.4 * (index * STEPS[1] % 1)
    seen = np.array([lightness, 0.16 * math.cos(hue), 0.16 * math.sin(hue)])
    linear = (TO_RGB @ (CONES @ seen) ** 3).clip(0, 1)
    red, green, blue = np.where(linear > 0.0031308, 1.055 * linear ** (1 / 2.4) - 0.055, 12.92 * linear) * 255
    return round(red), round(green), round(blue)


def ink_on(colour: Colour) -> str:
    """Black or white, whichever stands out."""
    red, green, blue = ((value / 255) ** 2.2 for value in colour)
    return "black" if 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.2 else "white"


def as_picture(image: Any) -> Image.Image:
    """A copy to draw on, of a picture or of bytes `(3, height, width)`."""
    if isinstance(image, Tensor):
        image = Image.fromarray(image.permute(1, 2, 0).cpu().numpy())
    return image.convert("RGB").copy()


def text_size(picture: Image.Image) -> int:
    return max(LEAST_TEXT, round(TEXT_PER_PIXEL * max(picture.size)))


def paint(picture: Image.Image, mask: np.ndarray, colour: Colour, strength: float, edge: int) -> Image.Image:
    """The picture with a veil of colour over a mask, and the mask's edge drawn."""
    whole = Image.fromarray(mask.astype(np.uint8) * 255)
    padded = Image.new("L", (whole.width + 2 * edge, whole.height + 2 * edge), 255)  # the picture's end is no edge
    padded.paste(whole, (edge, edge))
    inner = np.asarray(padded.filter(ImageFilter.MinFilter(2 * edge + 1)))[edge:-edge, edge:-edge] > 0
    veil = np.where(mask, np.where(inner, strength, 1.0), 0.0)
    return Image.composite(
        Image.new("RGB", picture.size, colour), picture, Image.fromarray((veil * 255).astype(np.uint8))
    )


class Chips:
    """Names on patches of their colour, all of one height."""

    def __init__(self, size: int) -> None:
        self.font = ImageFont.load_default(size=size)
        self.pad = max(2, size // 5)
        self.height = size + 2 * self.pad

    def width(self, text: str) -> float:
        return math.ceil(self.font.getlength(text)) + 2 * self.pad

    def draw(self, draw: ImageDraw.ImageDraw, left: float, top: float, text: str, colour: Colour) -> None:
        draw.rectangle((left, top, left + self.width(text) - 1, top + self.height - 1), fill=colour)
        middle = (left + self.pad, top + self.height / 2)
        draw.text(middle, text, fill=ink_on(colour), font=self.font, anchor="lm")
