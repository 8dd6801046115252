"""Every registered method trains, is finite, and does the same again, also after an interruption. None is named."""

import pytest
import torch

import fldiag
from fldiag import registry

SMALL = {
    "data__name": f"{__name__}:data",
    "rounds": 3,
    "clients__total": 4,
    "clients__per_round": 3,
    "partition": {"kind": "iid"},
    "train": {"epochs": 1, "batch_size": 4, "lr": 0.05},
}
#: What a method may need beyond a perceptron: public inputs, or a residual net on images. The first that it takes is taken.
WORLDS = (
    {"data__public": None, "model": {"name": "mlp", "hidden": (5,)}},
    {"data__public": "holdout:8", "model": {"name": "mlp", "hidden": (5,)}},
    {"data__public": None, "model": {"name": "small_resnet"}},
)


def data():
    """What a config calls test_every_method:data: 40 images of ten classes."""
    x = torch.randn(40, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    return (x, torch.arange(40) % 10) * 2


def train(name, out, **how):
    for world in WORLDS:
        try:
            config = fldiag.Config.load("digits", method__name=name, **SMALL, **world)
            return fldiag.train(config, out=out, **how)
        except fldiag.FldiagError as error:
            refusal = error
    raise refusal


def bits(run):
    """All that is stored of a run."""
    stored = [run.checkpoint(r) for r in run.rounds]
    return [t for s in stored for t in (*s.state.values(), s.clients, s.received)]


@pytest.mark.parametrize("name", registry.method.names())
def test_trains_and_goes_on_after_an_interruption_bit_for_bit(name, tmp_path):
    events = []
    whole = train(name, tmp_path / "whole", on_event=events.append)
    assert whole.done == 3 and whole.status == "finished"
    assert all(torch.isfinite(t).all() for t in bits(whole) if t.is_floating_point())
    first = whole.checkpoint(1)
    assert first.clients.shape[0] == 3 and not torch.equal(first.clients[0], first.received)
    assert not torch.equal(first.clients[0], first.clients[1])

    seen = []

    def stop(event):
        seen.append(event)
        if len(seen) == len(events) // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(name, tmp_path / "cut", on_event=stop)
    assert 0 < fldiag.load(tmp_path / "cut").done < 3
    cut = train(name, tmp_path / "cut", resume=True)
    pairs = zip(bits(whole), bits(cut), strict=True)
    assert cut.done == 3 and all(torch.equal(a, b) for a, b in pairs)
    tables = [run.metrics.drop(columns="run") for run in (whole, cut)]
    assert tables[0].equals(tables[1]) and len(tables[0])
