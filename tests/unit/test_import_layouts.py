"""Folders and arrays of other programs: what is whose is read from the words in the names, or asked about."""

import numpy as np
import pytest
import torch
from torch import nn

import fldiag
from fldiag.errors import FldiagError
from fldiag.integrations import client_files
from fldiag.models import state_dict
from fldiag.runs import foreign


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


@pytest.mark.parametrize(
    ("names", "patterns"),
    [
        (["client_3_round_7.pt", "client_12_round_8.pt"], ("client_{client}_round_{round}.pt", None)),
        (["round_7_client_3.pth"], ("round_{round}_client_{client}.pth", None)),
        (["r0003_client_2.pth", "r0003_server.pth"], ("r{round}_client_{client}.pth", "r{round}_server.pth")),
        (["round-3-weights.npz", "log.txt"], (None, "round-{round}-weights.npz")),
        (["site-1/app_site-1/model_epoch_4.pt"], ("site-*/app_site-{client}/model_epoch_{round}.pt", None)),
        (["rounds/7/clients/3.pt", "rounds/7/global.pt"], ("rounds/{round}/clients/{client}.pt", "rounds/{round}/global.pt")),
        (["resnet18_round_2_epoch_5_worker3.pt"], ("resnet18_round_{round}_epoch_5_worker{client}.pt", None)),
        (["client_1.pt", "client_2.pt", "server_model.pt"], ("client_{client}.pt", "server_model.pt")),
        (["3_7.pt"], None),
        (["client_3_model_0.pt", "client_3_optim_0.pt"], None),
        (["a.pt", "b.pt"], None),
    ],
)  # fmt: skip
def test_the_word_before_a_number_decides(names, patterns):
    assert client_files.patterns_by_words(names) == patterns


@pytest.mark.parametrize(
    ("names", "advice"),
    [
        (["3_7.pt", "4_7.pt"], "which of 3 and 7 in 3_7.pt is the round? The first: --pattern '{round}_{client}.pt'"),
        (["a7.pt"], "which is 7? Of a client: --pattern 'a{client}.pt'; of a round: --global-pattern 'a{round}.pt'"),
        (["client_3_x_1.pt", "client_4_y_1.pt"], "client_{client}_"),
        (["a.pt"], "it holds a.pt"),
    ],
)  # fmt: skip
def test_what_the_words_leave_open_is_asked(names, advice):
    for name in names:
        torch.save(net().state_dict(), f"in/{name}")
    with pytest.raises(FldiagError, match="which of its files are whose is not known") as caught:
        convert()
    assert advice in caught.value.remedy


def test_a_pattern_with_the_numbers_swapped_is_refused_and_the_remedy_works():
    for t in (1, 2):
        for k in (3, 4, 5):
            torch.save(net(10 * t + k).state_dict(), f"in/client_{k}_round_{t}.pt")
    with pytest.raises(FldiagError, match="swap them") as caught:
        convert(pattern="client_{round}_round_{client}.pt")
    run, _ = convert(pattern=caught.value.remedy.split("'")[1])
    assert [run.checkpoint(r).client_ids for r in run.rounds] == [[3, 4, 5]] * 2
    with pytest.raises(FldiagError, match="where the client stands"):
        convert(pattern="c{round}/x.pt")


def test_a_client_whose_file_did_not_change_was_not_sampled():
    """Also after an interruption, and with the global models as what unsampled clients hold."""
    rng = np.random.default_rng(0)
    held, sampled = {k: net(k).state_dict() for k in range(4)}, []
    for t in range(1, 6):
        ids = sorted(rng.choice(4, 2, replace=False).tolist())
        sampled.append(ids)
        held |= {k: net(100 * t + k).state_dict() for k in ids}
        for k, weights in held.items():
            torch.save(weights, f"in/round_{t}_client_{k}.pt")
    run, notes = convert()
    assert [run.checkpoint(r).client_ids for r in run.rounds][1:] == sampled[1:]
    assert run.checkpoint(1).client_ids == [0, 1, 2, 3] and "not to have been sampled" in notes
    assert "not to have been sampled" in " ".join(run.origin["notes"])


def test_all_clients_in_every_round_of_whom_all_train_lose_nothing():
    for t in (1, 2, 3):
        for k in range(2):
            torch.save(net(10 * t + k).state_dict(), f"in/round_{t}_client_{k}.pt")
    run, notes = convert()
    assert [run.checkpoint(r).client_ids for r in run.rounds] == [[0, 1]] * 3
    assert "sampled" not in notes


def test_clients_that_hold_what_was_received_were_not_sampled():
    """As PFLlib: the global model is sent to all, and some of them train."""
    torch.save(net(0).state_dict(), "in/server_model_0.pt")
    received = net(0).state_dict()
    for t in (1, 2):
        for k in range(3):
            weights = received if k == t else net(10 * t + k).state_dict()
            torch.save(weights, f"in/client_{k}_model_{t}.pt")
        received = net(50 + t).state_dict()
        torch.save(received, f"in/server_model_{t}.pt")
    run, notes = convert()
    assert "named as PFLlib names them" in notes
    assert [run.checkpoint(r).client_ids for r in run.rounds if r] == [[0, 2], [0, 1]]


def test_a_client_without_weights_has_not_trained_yet():
    """As fluke-fl 0.8.1 saves it: ``modopt`` holds model and optimiser, the model None until the client took part."""
    for t in (0, 1):
        torch.save({"model": net(t).state_dict()}, f"in/r000{t}_server.pth")
        for k in range(3):
            model = net(10 * t + k).state_dict() if k < 1 + t else None
            content = {"modopt": {"model": model, "optimizer": None}, "index": k, "last_round": t}
            torch.save(content, f"in/r000{t}_client_{k}.pth")
    run, notes = convert()
    assert [run.checkpoint(r).client_ids for r in run.rounds] == [
        [0],
        [0, 1],
    ] and "left out" not in notes
    assert foreign.is_vacant({"a": {"model": None}}) and not foreign.is_vacant({"epoch": None})


def parameters(seed):
    return torch.cat([p.detach().reshape(-1) for p in net(seed).parameters()]).numpy()


@pytest.mark.parametrize("form", ["one round", "rounds", "files"])
def test_all_clients_in_one_array(form):
    rows = np.stack([[parameters(10 * t + k) for k in range(3)] for t in range(2)])
    options = {}
    if form == "one round":
        np.savez("in.npz", rows[0])
        source, rounds = "in.npz", [1]
    elif form == "rounds":
        np.save("in.npy", rows)
        source, rounds = "in.npy", [1, 2]
    else:
        for t in range(2):
            np.save(f"in/round_{t + 1}.npy", rows[t])
        source, rounds, options = "in", [1, 2], {"pattern": "round_{round}.npy"}
    run, _ = convert(source, **options)
    assert run.rounds == rounds
    for r in rounds:
        assert np.array_equal(run.checkpoint(r).clients.numpy(), rows[r - 1])


@pytest.mark.parametrize("shape", [(5,), (2, 2, 2, 2), (3, 7)])
def test_an_array_of_another_shape_is_refused(shape):
    np.save("in.npy", np.zeros(shape, np.float32))
    with pytest.raises(FldiagError, match=r"not \[clients, parameters\]|do not fit the model"):
        convert("in.npy")


def test_a_run_of_global_models_alone():
    for t in range(4):
        np.savez(f"in/round-{t}-weights.npz", *[v.numpy() for v in net(t).state_dict().values()])
    run, notes = convert()
    assert run.rounds == [0, 1, 2, 3] and "global models alone" in notes
    assert torch.equal(run.checkpoint(2).state["2.weight"], net(2).state_dict()["2.weight"])
    run = fldiag.load("out", model=net(), data=(torch.randn(9, 4), torch.arange(9) % 2))
    assert "eigenvalue" in set(fldiag.diagnose(run, "spectrum", k=1)["metric"])
    with pytest.raises(FldiagError, match="of global models alone"):
        fldiag.diagnose(run, "forgetting")


# -- arrays and files


def test_arrays_go_by_the_order_of_the_state_dict_or_of_the_parameters():
    module = net(1)
    own = {n: v.clone() for n, v in module.state_dict().items()}

    def named(arrays):
        return {f"arr_{i}": torch.as_tensor(a) for i, a in enumerate(arrays)}

    for arrays in (own.values(), [p.detach() for p in module.parameters()], [parameters(1)]):
        state = state_dict.in_order(named(arrays), net(2))
        assert torch.equal(state["2.weight"], own["2.weight"]) and state.keys() == own.keys()
    whole = torch.cat([v.reshape(-1).float() for v in own.values()])
    assert torch.equal(
        state_dict.in_order(named([whole]), net(2))["1.running_var"], own["1.running_var"]
    )
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
