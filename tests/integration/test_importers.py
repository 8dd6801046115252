"""Files that other programs wrote: NVFlare 2.9.0, FedLab 1.3.0 and Flower 1.42 write them here."""

import sys

import numpy as np
import pytest
import torch
from torch import nn

import fldiag


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))


@pytest.fixture(autouse=True)
def model(tmp_path, monkeypatch):
    (tmp_path / "theirs.py").write_text(
        "from torch import nn\ndef net(): return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("theirs", None)


def test_nvflare_saves_the_global_model(tmp_path):
    module = pytest.importorskip("nvflare.app_opt.pt.model_persistence_format_manager")
    manager = module.PTModelPersistenceFormatManager(
        net(3).state_dict(), default_train_conf={"train": {"model": "Net"}}
    )
    torch.save(manager.to_persistence_dict(), tmp_path / "FL_global_model.pt")
    table = fldiag.diagnose(
        tmp_path / "FL_global_model.pt", "spectrum", k=1, model=net(), data="digits"
    )
    torch.save(net(3).state_dict(), tmp_path / "plain.pt")
    plain = fldiag.diagnose(tmp_path / "plain.pt", "spectrum", k=1, model=net(), data="digits")
    assert table["value"].tolist() == plain["value"].tolist()


def test_fedlab_serializes_a_vector(tmp_path):
    tool = pytest.importorskip("fedlab.utils.serialization").SerializationTool
    torch.save(tool.serialize_model(net(3)), tmp_path / "round_1.pt")
    state = fldiag.load(tmp_path / "round_1.pt", model=net()).state
    assert list(state) == ["arr_0"]


def test_flower_saves_arrays_by_round(tmp_path):
    common = pytest.importorskip("flwr.common")
    for t in (1, 2):
        parameters = common.ndarrays_to_parameters(
            [v.numpy() for v in net(t).state_dict().values()]
        )
        np.savez(tmp_path / f"round-{t}-weights.npz", *common.parameters_to_ndarrays(parameters))
    run = fldiag.convert(
        tmp_path,
        tmp_path / "run",
        global_pattern="round-{round}-weights.npz",
        model="theirs:net",
        data="digits",
    )
    assert run.rounds == [1, 2] and set(run.metrics["metric"]) >= {"accuracy", "loss"}
    assert torch.equal(run.checkpoint(2).state["1.weight"], net(2).state_dict()["1.weight"])
    # as a strategy saves that takes the result for arrays: pairs of Parameters and metrics
    np.savez(tmp_path / "round-3-weights.npz", *np.array([parameters, {}], dtype=object))
    with pytest.raises(fldiag.FldiagError, match=r"cannot be read as weights"):
        fldiag.load(tmp_path / "round-3-weights.npz")
