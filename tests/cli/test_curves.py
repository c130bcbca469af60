from __future__ import annotations

import math
import re
from xml.etree import ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinkex.cli.curves import loss_curve

SVG = "{http://www.w3.org/2000/svg}"


def drawn(image: str, kind: str) -> list[tuple[float, float]]:
    """The points of the path of a class."""
    paths = [
        path.get("d", "")
        for path in ET.fromstring(image).iter(f"{SVG}path")
        if path.get("class") == kind
    ]
    return [
        (float(x), float(y)) for path in paths for x, y in re.findall(r"([\d.]+),([\d.]+)", path)
    ]


def written(image: str) -> list[str]:
    return [text.text or "" for text in ET.fromstring(image).iter(f"{SVG}text")]


def test_each_loss_is_a_point_from_left_to_right_and_lower_is_further_down() -> None:
    points = drawn(loss_curve([3.0, 2.0, 1.0, 0.5], title="t"), "line")
    assert len(points) == 4
    assert points == sorted(points)  # both coordinates grow


def test_the_axes_have_round_numbers_that_hold_the_curve() -> None:
    labels = written(loss_curve([3.1, 2.0, 0.2], title="A run"))
    assert "A run" in labels
    assert {"0", "0.5", "1", "3", "3.5", "loss", "step"} <= set(labels)


def test_a_narrow_range_is_not_squeezed_against_zero() -> None:
    labels = written(loss_curve([2.04, 2.02, 2.0], title="t"))
    assert "0" not in labels
    assert "2.04" in labels


@pytest.mark.parametrize("losses", [[1.5], [math.nan, 1.5, math.nan]])
def test_a_value_by_itself_is_a_dot(losses: list[float]) -> None:
    image = loss_curve(losses, title="t")
    assert len(drawn(image, "line")) == 1
    assert len(list(ET.fromstring(image).iter(f"{SVG}circle"))) == 1


def test_non_finite_losses_are_gaps_and_are_counted() -> None:
    image = loss_curve([3.0, 2.5, math.nan, 2.0, math.inf, 1.0, 0.5], title="t")
    line = ET.fromstring(image).find(f"{SVG}path[@class='line']")
    assert line is not None
    assert line.get("d", "").count("M") == 3
    assert len(drawn(image, "line")) == 5
    assert "2 of 7 not finite" in written(image)


@pytest.mark.parametrize("losses", [[], [math.nan], [math.nan, math.inf]])
def test_with_nothing_to_draw_there_are_still_axes(losses: list[float]) -> None:
    image = loss_curve(losses, title="t")
    assert drawn(image, "line") == []
    assert {"loss", "step"} <= set(written(image))


def test_a_long_curve_is_smoothed_and_smoothing_shifts_nothing() -> None:
    straight = [100.0 - step for step in range(48)]
    image = loss_curve(straight, title="t")
    assert drawn(image, "smooth") == drawn(image, "line")
    assert drawn(loss_curve(straight[:19], title="t"), "smooth") == []


def test_smoothing_leaves_gaps_and_is_not_swallowed_by_them() -> None:
    losses = [1.0] * 30
    losses[10] = math.nan
    assert len(drawn(loss_curve(losses, title="t"), "smooth")) == 29


def test_a_title_may_hold_anything() -> None:
    assert 'a < b & "c"   d' in written(loss_curve([1.0], title='a < b & "c" \x00 d'))


def test_there_are_colours_for_light_and_for_dark() -> None:
    image = loss_curve([1.0, 0.5], title="t")
    assert 'fill="#ffffff"' in image
    assert "prefers-color-scheme: dark" in image


@given(st.lists(st.floats(), max_size=40))
def test_any_losses_make_an_image_with_every_point_inside(losses: list[float]) -> None:
    image = loss_curve(losses, title="t")
    points = drawn(image, "line")
    assert len(points) == sum(abs(loss) < 1e30 for loss in losses)
    assert all(0 <= x <= 720 and 0 <= y <= 400 for x, y in points)
