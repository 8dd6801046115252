"""Folders that other programs wrote, as runs: fluke-fl 0.8.1, NVFlare 2.9.0, FedLab 1.3.0 and Flower 1.42 write them here."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import fldiag
from fldiag import data


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


def test_fluke_saves_every_client_in_every_round(tmp_path):
    fluke = pytest.importorskip("fluke")
    from fluke.algorithms.fedavg import FedAVG
    from fluke.data import DataContainer, DataSplitter
    from fluke.evaluation import ClassificationEval

    digits = data.load("digits")
    x, y = digits.batch(torch.arange(len(digits.train_y))).float(), digits.train_y
    splitter = DataSplitter(
        DataContainer(x, y, digits.normalise(digits.test_x), digits.test_y, 10), client_split=0.1
    )
    env = fluke.FlukeENV()
    env.set_seed(1)
    env.set_save_options(str(tmp_path / "saved"), 1, False)
    env.set_evaluator(ClassificationEval(1, 10))
    algorithm = FedAVG(
        6,
        splitter,
        fluke.DDict(
            model=net(),
            client=fluke.DDict(
                batch_size=50,
                local_epochs=1,
                loss="CrossEntropyLoss",
                optimizer=fluke.DDict(name="SGD", lr=0.1),
                scheduler=fluke.DDict(name="StepLR", gamma=1, step_size=1),
            ),
            server=fluke.DDict(weighted=True),
        ),
    )
    sampled = []
    choose = algorithm.server.get_eligible_clients

    def chosen(share):
        clients = choose(share)
        sampled.append(sorted(client.index for client in clients))
        return clients

    algorithm.server.get_eligible_clients = chosen
    algorithm.run(4, 0.5)
    folder = next(tmp_path.glob("saved_*"))
    run = fldiag.convert(folder, tmp_path / "run", model="theirs:net")
    assert run.rounds == [1, 2, 3, 4]
    assert [run.checkpoint(r).client_ids for r in run.rounds] == sampled
    last = run.checkpoint(4)
    assert torch.equal(last.state["1.weight"], algorithm.server.model.state_dict()["1.weight"])
    assert torch.allclose(
        last.clients.mean(0), torch.cat([p.flatten() for p in last.state.values()]), atol=1e-5
    )


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
    rows = np.stack([tool.serialize_model(net(k)).numpy() for k in range(3)])
    np.save(tmp_path / "clients.npy", rows)
    run = fldiag.convert(tmp_path / "clients.npy", tmp_path / "run", model="theirs:net")
    assert np.array_equal(run.checkpoint(1).clients.numpy(), rows)


def test_flower_saves_arrays_by_round(tmp_path):
    common = pytest.importorskip("flwr.common")
    for t in (1, 2):
        parameters = common.ndarrays_to_parameters(
            [v.numpy() for v in net(t).state_dict().values()]
        )
        np.savez(tmp_path / f"round-{t}-weights.npz", *common.parameters_to_ndarrays(parameters))
    run = fldiag.convert(tmp_path, tmp_path / "run", model="theirs:net", data="digits")
    assert run.rounds == [1, 2] and set(run.metrics["metric"]) >= {"accuracy", "loss"}
    assert torch.equal(run.checkpoint(2).state["1.weight"], net(2).state_dict()["1.weight"])
    # as a strategy saves that takes the result for arrays: pairs of Parameters and metrics
    np.savez(tmp_path / "round-3-weights.npz", *np.array([parameters, {}], dtype=object))
    with pytest.raises(fldiag.FldiagError, match=r"not numbers.*parameters_to_ndarrays"):
        fldiag.load(tmp_path / "round-3-weights.npz")


def test_a_json_beside_the_files_is_no_file_of_weights(tmp_path):
    for k in range(2):
        torch.save(net(k).state_dict(), tmp_path / f"r0000_client_{k}.pth")
    Path(tmp_path / "federation.json").write_text(json.dumps({"rounds": 1}))
    assert fldiag.convert(tmp_path, tmp_path / "run", model="theirs:net").rounds == [1]
