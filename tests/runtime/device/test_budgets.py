"""A budget of device memory: kept, by more stages if need be, or refused on every rank."""

import re
from typing import Any

import pytest
import torch

from mobius_ds.inputs.units import GIB
from tests.ranks import run_ranks
from tests.runtime.jobs import initialize, language_model
from tests.runtime.ranks.endings import endings, one_step, settings, train


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_budget_too_small_for_a_layer_is_one_error_on_every_rank(tmp_path, ranks):
    ended = endings(tmp_path, ranks, one_step, {"device_memory_gb": 1e-6, "layers_per_stage": None})
    for end in ended:
        assert end.kind == "InfeasiblePlan" and end.text == ended[0].text
        assert re.search(r"needs \d+\.\d\d KiB", end.text) and "the budget is 1.05 KiB" in end.text
        assert "device_memory_gb" in end.text and "stage " in end.text


def budgeted() -> Any:
    torch.manual_seed(0)
    budget = 36_000
    ample = initialize(language_model(), settings(layers_per_stage=None))
    expected = train(ample, 2)
    fewest = ample.pipeline.plan.stages
    ample.destroy()
    tight = initialize(language_model(), settings(layers_per_stage=None, device_memory_gb=budget / GIB))
    losses = train(tight, 2)
    result = fewest, tight.pipeline.plan.stages, tight.peak_device_bytes() <= budget, losses == expected
    tight.destroy()
    return result


def test_a_middling_budget_makes_more_stages_and_changes_no_number():
    [(fewest, stages, within, same)] = run_ranks(1, budgeted)
    assert fewest == 2 < stages <= 6
    assert within and same
