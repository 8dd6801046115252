"""Methods of clients' own models: what they send, and what they train before the fine-tuning."""

import pytest
import torch
from helpers import classification, config, final

from fldiag.runs.run import Run
from fldiag.training import train


def test_local_only_sends_nothing_and_goes_on_after_an_interruption(tmp_path):
    chosen = config("local_only", rounds=3, total=5, per_round=2)
    whole = train.train(chosen, out=tmp_path / "whole")
    traffic = whole.metrics[whole.metrics["metric"].isin(["uplink", "downlink"])]
    assert len(traffic) == 6 and (traffic["value"] == 0).all()

    def stop(event):
        if event.get("round") == 2 and event["event"] == "round":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train.train(chosen, out=tmp_path / "cut", on_event=stop)
    cut = train.train(chosen, out=tmp_path / "cut", resume=True)
    other = Run.open(tmp_path / "whole")
    clients = {i for i in other.state_of if i >= 0}
    assert clients == {i for i in cut.state_of if i >= 0} != set()
    assert all(torch.equal(cut.states.get(i)["own"], other.states.get(i)["own"]) for i in clients)


FEDSOL = {"rho": 0.7, "part": "full", "strength": "fixed", "loss": "l2"}


@pytest.mark.parametrize(
    ("name", "before", "options"),
    [("fedavg_ft", "fedavg", {}), ("knnper", "fedavg", {}), ("fedsol_ft", "fedsol", FEDSOL)],
)
def test_training_before_the_fine_tuning(name, before, options):
    data = classification((20, 13, 7))
    assert torch.equal(*(final(config(n, options), data) for n in (name, before)))
