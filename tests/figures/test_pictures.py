"""What is drawn, by its numbers: the data that matplotlib is handed."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from PIL import Image

from linvit.errors import LinvitError
from linvit.figures import attention, style
from linvit.figures.attention import drawing, look
from linvit.figures.attention.basis import Basis
from linvit.figures.attention.choosing import Query
from linvit.figures.attention.comparing import compare_maps
from linvit.figures.attention.features import compare_features, draw_features
from linvit.figures.kernels import over_angle, over_product, plot_kernels
from linvit.figures.pareto import Panel, ParetoPoint, plot_pareto
from linvit.figures.photographs import View, decoded, read_photograph, view
from tests.figures.test_attention import small_vit

SIZE = (48, 80)


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """The figures that were saved."""
    kept: list[Figure] = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *a, **k: (kept.append(self), save(self, *a, **k))[0])
    return kept


def photograph(seed: int = 0) -> View:
    pixels = np.random.default_rng(seed).integers(0, 256, (60, 200, 3), dtype=np.uint8)
    return view(Image.fromarray(pixels), f"noise{seed}", SIZE)


def images_in(figure: Any) -> list[np.ndarray]:
    return [np.asarray(image.get_array()) for axis in figure.axes for image in axis.images]


def test_a_photograph_is_seen_in_the_middle() -> None:
    seen = photograph()
    assert seen.box == (50.0, 0.0, 150.0, 60.0) and seen.size == SIZE
    assert seen.to_input(50, 0) == (0, 0) and seen.to_input(100, 30) == (40, 24)
    with pytest.raises(LinvitError, match=r"20,10 is outside of what the model sees of noise0: x from 50 to 150"):
        seen.to_input(20, 10)
    given = seen.input(small_vit())
    pixel = (np.asarray(seen.picture)[5, 7, 1] / 255 - 0.456) / 0.224
    assert given.shape == (1, 3, *SIZE) and float(given[0, 1, 5, 7]) == pytest.approx(pixel, rel=1e-5)


def test_hostile_images(tmp_path: Path) -> None:
    (tmp_path / "text.jpg").write_text("no image at all")
    for path, words in (
        (tmp_path / "text.jpg", "cannot read image"),
        (tmp_path, "is a folder"),
        (tmp_path / "x", "no image"),
    ):
        with pytest.raises(LinvitError, match=words):
            read_photograph(path)
    with pytest.raises(LinvitError, match="cannot read image sent"):
        decoded(b"\x89PNG\r\n\x1a\n", "sent")
    assert view(Image.new("RGB", (1, 1)), "dot", SIZE).size == SIZE


def test_maps_are_drawn_as_they_are(drawn: list[Figure], tmp_path: Path) -> None:
    models, views = {"softmax": small_vit(), "stella": small_vit(plan="stella")}, [photograph(0), photograph(1)]
    found = compare_maps(models, views, Query(at=(100, 30)), ["0", "1"])
    drawing.draw_maps(found.rows, found.numbers, tmp_path / "maps.png")
    shown = images_in(drawn[0])
    assert len(shown) == 4 * (1 + 2 * 2)  # a photograph, and of each model the photograph and the map over it
    seen = look(models["stella"], views[1].input(models["stella"]))
    layer = seen.layer(1)
    expected = layer.picture(layer.row(layer.at(40, 24, SIZE)).mean(0))
    np.testing.assert_allclose(shown[-1], expected.numpy(), rtol=1e-6)
    assert found.rows[3].label == "noise1\nlayer 1" and found.rows[3].mark == (40.0, 24.0)
    lines = {line.get_label(): line for axis in drawn[0].subfigs[1].axes for line in axis.lines}
    numbers = [row.as_dict() for row in found.numbers["stella"]]
    assert list(lines["stella"].get_ydata()) == [row["total_variation"] for row in numbers]
    assert [row["mechanism"] for row in numbers] == ["stella", "stella"]
    assert found.numbers["softmax"][0].distance is None


def test_heads_tokens_and_rollout() -> None:
    model, seen = small_vit(), [photograph()]
    alone = {"softmax": model}
    heads = compare_maps(alone, seen, None, head="all").rows
    assert [row.label for row in heads] == [f"noise0\nlayer 1\nhead {i}" for i in range(2)] and heads[0].mark is None
    layer = look(model, seen[0].input(model)).layer(1)
    torch.testing.assert_close(heads[1].maps["softmax"], layer.picture(layer.row(0))[1])
    pooled = compare_maps(alone, seen, Query(pooled=True))
    assert pooled.query == "mean of all queries"
    torch.testing.assert_close(pooled.rows[0].maps["softmax"], layer.picture(layer.pooled().mean(0)))
    rolled = compare_maps(alone, seen, None, ["1"], rollout=True).rows[0].maps["softmax"]
    whole = attention.look(model, seen[0].input(model))
    expected = whole.layer(1).picture(whole.rollout(whole.layer(1), whole.layer(1).one(0)))
    torch.testing.assert_close(rolled, expected)
    with pytest.raises(LinvitError, match="there is no head 2: the layer has 0 to 1"):
        compare_maps(alone, seen, None, head="2")


def test_peaks_and_negative_weights() -> None:
    values, brightest, peak = drawing.shown_map(torch.tensor([[1.0, -2.0], [3.0, 0.0]]))
    assert values.tolist() == [[1, 0], [3, 0]] and peak == 3.0 and 2.9 < brightest <= 3.0
    assert drawing.shown_map(torch.zeros(2, 2))[1:] == (1.0, 0.0)


def test_features_share_the_first_models_basis(drawn: list[Figure], tmp_path: Path) -> None:
    models = {"softmax": small_vit(), "stella": small_vit(plan="stella")}
    found = compare_features(models, [photograph(0), photograph(1)])
    draw_features(found, tmp_path / "features.svg")
    assert found.layer == "blocks.1.attn" and found.similarity["softmax"] == pytest.approx(1.0)
    assert -1 <= found.similarity["stella"] < 1
    features = []
    for seen in (photograph(0), photograph(1)):
        kept: dict[str, torch.Tensor] = {}
        hook = models["softmax"].blocks[1].register_forward_hook(lambda m, a, out, kept=kept: kept.update(out=out))
        models["softmax"](seen.input(models["softmax"]))
        hook.remove()
        features.append(kept["out"][0, 2:].detach())
    whole = torch.cat(features)
    centred = whole - whole.mean(0)
    _, directions = torch.linalg.eigh(centred.double().T @ centred.double())
    along = (centred @ directions.float().flip(1)[:, :3]).abs()
    mine = ((whole - Basis.of(whole).mean) @ Basis.of(whole).components).abs()
    torch.testing.assert_close(mine, along, rtol=1e-3, atol=1e-3)
    colours = images_in(drawn[0])[1]
    assert colours.shape == (3, 5, 3) and 0 <= colours.min() < colours.max() <= 1
    np.testing.assert_allclose(colours.reshape(15, 3), Basis.of(whole).colours(features[0]).numpy(), atol=1e-5)
    cosine = torch.cosine_similarity(features[0], features[0][7][None], dim=1)
    np.testing.assert_allclose(images_in(drawn[0])[2].flatten(), cosine.numpy(), atol=1e-5)


def test_kernels_are_what_the_papers_print(drawn: list[Figure], tmp_path: Path) -> None:
    angle = {curve.name: curve for curve in over_angle(64)}
    theta = np.radians(angle["softmax"].x)
    np.testing.assert_allclose(angle["angular, exact"].mean, 1 - theta / math.pi, atol=1e-3)
    linear = 0.5 + np.cos(theta) / math.pi
    np.testing.assert_allclose(angle["angular, linear (castling)"].mean, linear / linear[0], rtol=1e-6)
    np.testing.assert_allclose(angle["softmax"].mean, np.exp(8 * (np.cos(theta) - 1)), rtol=1e-6)
    arc_cosine = (np.sin(theta) + (math.pi - theta) * np.cos(theta)) / math.pi  # the mean of ReLU's, Cho and Saul
    np.testing.assert_allclose(angle["ReLU linear"].mean, arc_cosine, atol=0.03)
    product = {curve.name.partition(":")[0]: curve for curve in over_product(16)}
    x = product["softmax"].x
    np.testing.assert_allclose(product["Taylor 1"].mean, 1 + x, atol=1e-9)
    np.testing.assert_allclose(product["Taylor 2"].mean, 1 + x + x**2 / 2, atol=1e-6)
    np.testing.assert_allclose(product["ReLU"].mean, np.maximum(x, 0), atol=1e-9)
    plot_kernels(tmp_path / "kernels.pdf", over_angle(16), over_product(16), 16)
    line = drawn[0].axes[1].lines[2]
    assert line.get_label().startswith("Taylor 2") and line.get_ydata()[0] == pytest.approx(2.5)


def test_a_front_is_joined(drawn: list[Figure], tmp_path: Path) -> None:
    points = [
        ParetoPoint("softmax", 1.0, 70.0, 69.0, 71.0, True),
        ParetoPoint("stella", 1.5, 68.0, front=True),
        ParetoPoint("qt", 0.8, 66.0),
    ]
    plot_pareto([Panel("one", "speed", "top-1, %", points)], tmp_path / "pareto.png")
    (axis,) = drawn[0].axes
    assert [list(map(float, axis.lines[0].get_data()[i])) for i in (0, 1)] == [[1.0, 1.5], [70.0, 68.0]]
    assert [text.get_text() for text in axis.get_legend().get_texts()] == ["softmax ◂", "stella ◂", "qt"]
    with pytest.raises(LinvitError, match="no finished runs"):
        plot_pareto([], tmp_path / "none.png")


def test_lines_of_one_plot_are_told_apart() -> None:
    looks = [(style.line(place)["color"], style.line(place)["marker"]) for place in range(36)]
    assert len(set(looks)) == 36
