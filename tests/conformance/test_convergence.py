"""Every registered method learns the digits with the preset of that name as it is, as well as the committed table says."""

import json
from pathlib import Path

import pandas as pd
import pytest

from fldiag import registry
from fldiag.config import Config
from fldiag.training import train

FILE = Path(__file__).parents[2] / "figures" / "methods" / "digits.csv"
TABLE = pd.read_csv(FILE).set_index("method")
ABOUT = json.loads(FILE.with_suffix(".json").read_text("utf-8"))
SEEDS = 3


def test_every_method_is_in_the_table():
    assert set(TABLE.index) == set(registry.method.names()) and ABOUT["seeds"] == SEEDS


@pytest.mark.convergence
@pytest.mark.parametrize("name", registry.method.names())
def test_learns_with_the_default_preset(name, tmp_path):
    row = TABLE.loc[name]
    kind, metric = (
        ("accuracy", "accuracy") if pd.notna(row["accuracy"]) else ("personal", "personal_accuracy")
    )
    found = []
    for seed in range(SEEDS):
        config = Config.load(
            "digits",
            method__name=name,
            seed=seed,
            checkpoint__every=100,
            checkpoint__clients="none",
        )
        assert config.rounds == ABOUT["rounds"]
        run = train.train(config, out=tmp_path / str(seed))
        assert run.status == "finished"
        frame = run.metrics
        rows = frame[
            (frame["metric"] == metric)
            & (frame["scope"] == "global")
            & (frame["round"] == config.rounds)
        ]
        found.append(float(rows["value"].iloc[-1]))
    mean = sum(found) / SEEDS
    assert abs(mean - row[kind]) <= max(0.03, 2 * row[f"{kind}_std"]), (found, row[kind])
    if name == "fedavg":
        assert mean >= row[kind] - 0.01
