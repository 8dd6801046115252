"""The statements of analyses/is_it_flatter.py: their signs, ratios and intervals, on planted numbers."""

import math

import pandas as pd
import pytest
from helpers import analysis

study = analysis("is_it_flatter")

#: Two-sided 95 % quantile of t with two degrees of freedom.
T2 = 4.302652729749464
FEDAVG = {10: (2.0, 10.0), 20: (1.8, 20.0), 40: (1.6, 40.0)}


def planted():
    """FedAvg, and FedSAM with half its λ₁ but for e^-0.1, 1, e^0.1; one client each, a hundred times as sharp."""
    rows = []

    def add(method, seed, round, client=None, **numbers):
        about = {"method": method, "seed": seed, "round": round, "client": client}
        rows.extend({**about, "measure": m, "value": v} for m, v in numbers.items())

    for seed in study.SEEDS:
        for round, (loss, curvature) in FEDAVG.items():
            add("fedavg", seed, round, loss=loss, lambda_1=curvature, accuracy=0.4)
        curvature = 20.0 * math.exp(0.1 * (seed - 1))
        add("fedsam", seed, 40, loss=1.7, lambda_1=curvature, accuracy=0.38 - 0.01 * seed)
        add("fedavg", seed, 40, client=3, lambda_1=4000.0)
        add("fedsam", seed, 40, client=3, lambda_1=2000.0)
    return pd.DataFrame(rows)


def compared(measure, *pair):
    line = study.compare(study.final_numbers(planted()), measure, *pair)
    return [line[key] for key in ("value", "low", "high")], line["verdict"]


def test_a_flatter_method_is_below_one_and_a_swap_turns_the_ratio_round():
    half = T2 * 0.1 / math.sqrt(3)
    ends = [0.5, 0.5 * math.exp(-half), 0.5 * math.exp(half)]
    assert compared("lambda_1", "fedsam", "fedavg") == (pytest.approx(ends), "lower")
    swapped = [2, 1 / ends[2], 1 / ends[1]]
    assert compared("lambda_1", "fedavg", "fedsam") == (pytest.approx(swapped), "higher")


def test_accuracies_are_subtracted_and_an_interval_that_holds_0_is_open():
    half = T2 * 0.01 / math.sqrt(3)
    ends = [-0.03, -0.03 - half, -0.03 + half]
    assert compared("accuracy", "fedsam", "fedavg") == (pytest.approx(ends), "lower")
    assert study.interval([-0.1, 0.1, 0.2])["verdict"] == "open"


def test_numbers_of_clients_and_of_earlier_rounds_are_no_part_of_the_final_models():
    table = study.final_numbers(planted())
    assert table.loc[("fedavg", 0), "lambda_1"] == 40
    assert table.loc[("fedavg", 0), "clients_lambda_1"] == 4000


def test_at_equal_loss_the_logarithm_is_interpolated_between_rounds_of_fedavg():
    ratio = study.at_equal_loss(planted(), "lambda_1", "fedsam")  # at 1.7 FedAvg has sqrt(20 * 40)
    assert ratio["value"] == pytest.approx(20 / math.sqrt(800))
    outside = planted()
    outside.loc[(outside["method"] == "fedsam") & (outside["measure"] == "loss"), "value"] = 1.5
    assert study.at_equal_loss(outside, "lambda_1", "fedsam") is None


@pytest.mark.parametrize(
    ("loss", "log"),
    [
        (1.75, 3.75),  # passed twice: the later pair, not the rounds whose losses are nearest
        (1.95, 1.25),
        (1.4, None),
    ],
)
def test_only_neighbouring_rounds_are_interpolated(loss, log):
    losses = pd.Series([2.0, 1.8, 1.6, 1.8])
    crossing = study.latest_crossing(losses, pd.Series([1.0, 2, 3, 4]), loss)
    assert crossing == (log and pytest.approx(log))
