"""Local-only, FedBABU, Per-FedAvg: what they train, held to other runs, closed forms and PyTorch's own optimiser."""

import pytest
import torch
from helpers import (
    PLAIN,
    Recorded,
    classification,
    config,
    federation,
    final,
    play,
    seeded,
)
from torch import nn

from fldiag.runs.run import Run
from fldiag.training import train

UNEQUAL = (20, 13, 7)


class Normed(nn.Module):
    """Batch-norm with running statistics, features and a head."""

    def __init__(self, features=6, classes=3):
        super().__init__()
        self.body, self.norm, self.fc = (
            nn.Linear(features, 5),
            nn.BatchNorm1d(5),
            nn.Linear(5, classes),
        )

    def features(self, x):
        return torch.relu(self.norm(self.body(x)))

    def forward(self, x):
        return self.fc(self.features(x))


def normed(seed=0):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Normed()


# -- local-only


def test_local_only_keeps_batch_norm_statistics_with_the_client():
    module = normed()
    made = federation(config("local_only", batch_size=5), (classification(UNEQUAL)), module=module)
    initial = {n: b.clone() for n, b in made.buffers.items()}
    play(made, 2)
    data, parts = classification(UNEQUAL)
    schedule = seeded(0, 3, 3, 2, 5)
    for i in range(3):
        one = federation(
            config("fedavg", total=1, batch_size=5),
            (data, [parts[i]]),
            module=module,
            schedule=Recorded(
                [[0]] * 2, [{0: schedule.batches(t, i, len(parts[i]))} for t in range(2)]
            ),
        )
        play(one, 2)
        assert torch.equal(made.clients[i]["own"], one.w)
        for name, b in one.buffers.items():
            assert torch.equal(made.clients[i][f"own/{name}"], b)
    assert all(torch.equal(made.buffers[n], b) for n, b in initial.items())
    assert not torch.equal(
        made.clients[0]["own/norm.running_mean"], made.clients[1]["own/norm.running_mean"]
    )


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
    assert cut.state_of.keys() == other.state_of.keys() != set()
    assert all(
        torch.equal(cut.states.get(i)["own"], other.states.get(i)["own"]) for i in other.state_of
    )


@pytest.mark.parametrize("name", ["fedavg_ft", "knnper"])
def test_training_before_the_fine_tuning_is_fedavg(name):
    data = classification(UNEQUAL)
    assert torch.equal(final(config(name, **PLAIN), data), final(config("fedavg", **PLAIN), data))


def test_training_before_the_fine_tuning_is_fedsol():
    data = classification(UNEQUAL)
    options = {"rho": 0.7, "part": "full", "strength": "fixed", "loss": "l2"}
    assert torch.equal(
        final(config("fedsol_ft", options), data), final(config("fedsol", options), data)
    )
