"""Folders of other programs: clients' files, global models alone, and arrays without names."""

import numpy as np
import pytest
import torch
from torch import nn

import fldiag
from fldiag.errors import FldiagError
from fldiag.models import state_dict


def net(seed=0):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))


@pytest.fixture(autouse=True)
def theirs(tmp_path, monkeypatch):
    (tmp_path / "import_layouts_net.py").write_text(
        "from torch import nn\n"
        "def net(): return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in").mkdir()


def convert(source="in", **options):
    notes = []
    options = {"model": "import_layouts_net:net", **options}
    run = fldiag.convert(
        source, "out", on_event=lambda e: notes.append(e.get("text", "")), **options
    )
    return run, " ".join(notes)


def test_what_is_whose_is_said():
    torch.save(net().state_dict(), "in/client_3_round_1.pt")
    with pytest.raises(FldiagError, match="which of its files are whose is not known") as caught:
        convert()
    assert "--pattern 'round_{round}/client_{client}.pt'" in caught.value.remedy
    with pytest.raises(FldiagError, match="where the client stands"):
        convert(pattern="c{round}/x.pt")


def test_a_run_of_global_models_alone():
    for t in range(4):
        np.savez(f"in/round-{t}-weights.npz", *[v.numpy() for v in net(t).state_dict().values()])
    run, notes = convert(global_pattern="round-{round}-weights.npz")
    assert run.rounds == [0, 1, 2, 3] and "global models alone" in notes
    assert torch.equal(run.checkpoint(2).state["2.weight"], net(2).state_dict()["2.weight"])
    run = fldiag.load("out", model=net(), data=(torch.randn(9, 4), torch.arange(9) % 2))
    assert "eigenvalue" in set(fldiag.diagnose(run, "spectrum", k=1)["metric"])
    with pytest.raises(FldiagError, match="of global models alone"):
        fldiag.diagnose(run, "forgetting")


def test_arrays_go_by_the_order_of_the_state_dict():
    module = net(1)
    own = {n: v.clone() for n, v in module.state_dict().items()}

    def named(arrays):
        return {f"arr_{i}": torch.as_tensor(a) for i, a in enumerate(arrays)}

    for arrays in (own.values(), [v.numpy() for v in own.values()]):
        state = state_dict.in_order(named(arrays), net(2))
        assert torch.equal(state["2.weight"], own["2.weight"]) and state.keys() == own.keys()
    swapped = [own["0.bias"], own["0.weight"], *list(own.values())[2:]]
    with pytest.raises(FldiagError, match=r"\[3\] where 0.weight is \[3, 4\]"):
        state_dict.in_order(named(swapped), module)


def test_a_conversion_that_fails_in_its_first_round_leaves_nothing_in_the_way():
    torch.save(net().state_dict(), "in/global_0.pt")
    torch.save(net(1).state_dict(), "in/global_1.pt")
    torch.save(nn.Linear(4, 2).state_dict(), "in/round_1_client_0.pt")
    patterns = {
        "pattern": "round_{round}_client_{client}.pt",
        "global_pattern": "global_{round}.pt",
    }
    with pytest.raises(FldiagError, match="does not fit the model"):
        convert(**patterns)
    torch.save(net(2).state_dict(), "in/round_1_client_0.pt")
    run, _ = convert(**patterns, seed=7)  # another recipe: refused, were the folder a run still
    assert run.rounds == [0, 1]
