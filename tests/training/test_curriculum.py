"""LayerSkip's schedules: the paper's formulas, worked out by hand for four layers."""

from __future__ import annotations

from typing import Any

import pytest

from ee_models.training.curriculum import (
    Curriculum,
    dropout_rates,
    dropout_scale,
    exit_loss_scales,
    exit_weights,
    layers_on,
)
from ee_models.training.settings import LayerSkipSettings

close = pytest.approx


def test_layer_dropout_rises_exponentially_to_its_maximum_at_the_last_layer() -> None:
    assert dropout_rates(4, 0.1, 1.0) == close([0.0, 0.0259921, 0.0587401, 0.1], abs=1e-7)
    assert dropout_rates(4, 0.2, 0.5) == close([0.0, 0.0259921, 0.0587401, 0.1], abs=1e-7)
    assert dropout_rates(4, 0.0, 1.0) == [0.0] * 4
    assert dropout_rates(3, 1.0, 1.0) == close([0.0, 0.4142136, 1.0], abs=1e-7)


def test_dropout_of_a_model_from_scratch_rises_over_the_run() -> None:
    assert [dropout_scale("exponential", step, 5) for step in range(5)] == close(
        [0.0, 0.1892071, 0.4142136, 0.6817928, 1.0], abs=1e-7
    )
    assert [dropout_scale("constant", step, 5) for step in range(5)] == [1.0] * 5


def test_losses_count_by_the_sum_of_the_layers_below_and_the_last_layer_most() -> None:
    assert exit_loss_scales(4, 0.2) == close([0.0, 0.2, 0.6, 3.6])  # 0.2 * (0, 0+1, 0+1+2), 3 + 0.2 * (0+1+2)
    assert exit_loss_scales(4, 1.0) == close([0.0, 1.0, 3.0, 6.0])
    assert exit_loss_scales(4, 0.0) == [0.0, 0.0, 0.0, 3.0]
    assert exit_loss_scales(2, 0.5) == close([0.0, 1.0])


@pytest.mark.parametrize(
    ("on", "expected"),
    [
        ([0, 1, 2, 3], {1: 0.0454545, 2: 0.1363636, 3: 0.8181818}),  # of 4.4
        ([0, 2, 3], {2: 0.1428571, 3: 0.8571429}),  # of 4.2
        ([1, 3], {1: 0.0526316, 3: 0.9473684}),  # of 3.8
        ([0, 3], {3: 1.0}),
        ([3], {3: 1.0}),
    ],
)
def test_weights_are_normalised_over_the_exits_that_are_on(on: list[int], expected: dict[int, float]) -> None:
    weights = exit_weights(exit_loss_scales(4, 0.2), on)
    assert weights == close(expected, abs=1e-7)
    assert sum(weights.values()) == close(1.0)


def steps(curriculum: Any, num_layers: int, rotation: int, num_steps: int) -> list[list[int]]:
    return [layers_on(curriculum, num_layers, rotation, step, num_steps) for step in range(num_steps)]


def test_the_rotational_curriculum_shifts_by_one_layer_each_step() -> None:
    assert steps("rotational", 4, 2, 4) == [[0, 2, 3], [1, 3], [0, 2, 3], [1, 3]]
    assert steps("rotational", 7, 3, 4) == [[0, 3, 6], [1, 4, 6], [2, 5, 6], [0, 3, 6]]
    assert steps("rotational", 4, 1, 2) == [[0, 1, 2, 3]] * 2
    # R above L: in some steps only the last layer learns.
    assert steps("rotational", 4, 6, 7) == [[0, 3], [1, 3], [2, 3], [3], [3], [3], [0, 3]]


def test_the_gradual_curriculum_goes_down_one_layer_per_share_of_the_steps() -> None:
    # Every 16 / (2 * 4) = 2 steps.
    assert steps("gradual", 4, 8, 16) == [
        [3],
        [3],
        [2, 3],
        [2, 3],
        [1, 2, 3],
        [1, 2, 3],
        *[[0, 1, 2, 3]] * 10,
    ]
    assert steps("gradual", 4, 8, 3) == [[3], [1, 2, 3], [0, 1, 2, 3]]  # every 3/8 steps
    assert steps("gradual", 2, 8, 6) == [[1], [1], *[[0, 1]] * 4]  # every 1.5 steps


def test_all_exits_are_on_without_a_curriculum() -> None:
    assert steps("all", 4, 8, 2) == [[0, 1, 2, 3]] * 2


def test_one_layer_and_one_step_are_no_special_case_for_callers() -> None:
    assert dropout_rates(1, 0.5, 1.0) == [0.0]
    assert dropout_scale("exponential", 0, 1) == 0.0
    assert exit_loss_scales(1, 0.3) == [1.0]
    curricula: tuple[Curriculum, ...] = ("rotational", "gradual", "all")
    for curriculum in curricula:
        assert steps(curriculum, 1, 8, 1) == [[0]]
        assert LayerSkipSettings(curriculum=curriculum).exit_weights(1, 0, 1) == {0: 1.0}


def test_settings_are_put_together_as_the_recipe_says() -> None:
    settings = LayerSkipSettings(
        dropout_max=0.1, exit_loss_scale=0.2, rotation=2, dropout_schedule="exponential"
    )
    assert settings.dropout_rates(4, 2, 5) == close([0.0, 0.0107662, 0.0243310, 0.0414214], abs=1e-7)
    assert settings.exit_weights(4, 1, 5) == close({1: 0.0526316, 3: 0.9473684}, abs=1e-7)
