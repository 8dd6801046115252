"""The states of clients on disk: what a dict in memory would hold, within twice its size, and no damage goes unnoticed."""

import random

import pytest
import torch
from helpers import config, play
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from fldiag.errors import FldiagError
from fldiag.runs.client_states import ClientStates
from fldiag.runs.run import Run
from fldiag.training import rounds
from fldiag.training.server import Federation
from fldiag.training.setup import Setup


def state(chance):
    return {
        "c": torch.randn(5, generator=chance),
        "seen": torch.randint(9, (), generator=chance),
        "half": torch.randn(2, 3, generator=chance).bfloat16(),
    }


def same(one, other):
    return one.keys() == other.keys() and all(
        torch.equal(one[k], other[k]) and one[k].dtype == other[k].dtype for k in other
    )


@pytest.fixture
def run(tmp_path):
    return Run.create(tmp_path, config(), b"parts", {"seed": 0})


def rows_on_disk(run):
    return sum(len(load_file(file)["ids"]) for file in (run.path / "state").glob("clients-*"))


def test_as_a_dict_over_many_rounds_and_restarts(run):
    chance, who, expected = torch.Generator().manual_seed(0), random.Random(0), {}
    for t in range(1, 60):
        new = {i: state(chance) for i in who.sample(range(40 if t % 3 else 4), 4)}
        expected |= new
        run.states.update(new)
        if t % 2:  # rounds that are not stored write their rows, too
            run.put_clients()
            continue
        run.put_state(t, {"w": torch.zeros(1)})
        run.append()
        assert rows_on_disk(run) <= 2 * len(expected) + 4
        assert {f"state/{f.name}" for f in (run.path / "state").iterdir()} == set(
            run.index["state"].values()
        )
        if t % 10 == 0:
            run = Run.open(run.path)
    assert list(run.states) == sorted(expected) and len(run.states) == len(expected)
    assert all(same(run.states[i], expected[i]) for i in expected)
    assert 1000 not in run.states and run.states.get(1000) is None


def test_a_round_reads_and_writes_rows_of_its_own_number(run, monkeypatch):
    """Whatever the number of clients: at most a few times those that are new."""
    chance, who = torch.Generator().manual_seed(0), random.Random(0)
    moved = []
    read = ClientStates._read
    monkeypatch.setattr(
        ClientStates,
        "_read",
        lambda self, name, ids: moved.append(len(ids)) or read(self, name, ids),
    )
    for total in (10, 300):
        most = 0
        for _ in range(150):
            moved.clear()
            run.states.update({i: state(chance) for i in who.sample(range(total), 10)})
            run.put_clients()
            most = max(most, sum(moved))
        assert most <= 40, total


def test_a_damaged_row_is_an_error(run):
    """Also one that the file's own checksum of a later version would allow: the file is listed as it is now."""
    chance = torch.Generator().manual_seed(0)
    run.states.update({i: state(chance) for i in range(3)})
    run.put_state(1, {"w": torch.zeros(1)})
    run.commit()
    (file,) = (run.path / "state").glob("clients-*")
    content = bytearray(file.read_bytes())
    with safe_open(file, "pt") as f:
        value = f.get_tensor("of/c")[1].numpy().tobytes()
    content[content.index(value)] ^= 1
    file.write_bytes(content)
    with pytest.raises(FldiagError, match="client 1's state"):
        run.states[1]
    assert run.states[0].keys() == run.states[2].keys()
    with pytest.raises(FldiagError, match="not the file this run wrote"):
        _ = Run.open(run.path).states


def test_rows_that_changed_places_are_an_error(run):
    chance = torch.Generator().manual_seed(0)
    run.states.update({i: state(chance) for i in range(3)})
    run.put_clients()
    (file,) = (run.path / "state").glob("clients-*")
    content = load_file(file)
    save_file({k: v if k == "ids" else v[[1, 0, 2]].clone() for k, v in content.items()}, file)
    with pytest.raises(FldiagError, match="client 0's state"):
        run.states[0]


@pytest.mark.parametrize(
    "how",
    [
        lambda f: f.write_bytes(f.read_bytes()[:-9]),
        lambda f: f.unlink(),
        lambda f: f.write_bytes(b""),
    ],
)
def test_a_segment_that_is_no_more_what_it_was(run, how):
    run.states.update({0: {"c": torch.zeros(4)}})
    run.put_clients()
    (file,) = (run.path / "state").glob("clients-*")
    how(file)
    with pytest.raises(FldiagError, match="cannot be read"):
        run.states[0]


@pytest.mark.parametrize("method", ["scaffold", "moon", "feddyn"])
def test_training_from_disk_is_training_from_memory(method, tmp_path, monkeypatch):
    monkeypatch.setattr(rounds, "HELD", 1000)  # bytes, less than a state
    chosen = config(method, total=7, per_round=3, rounds=6, epochs=1, checkpoint={"every": 4})
    run = rounds.train(chosen, out=tmp_path)
    memory = Federation(Setup(chosen))
    play(memory, 6)
    assert torch.equal(run.server_state["w"], memory.w)
    assert run.states.keys() == memory.clients.keys()
    assert all(same(run.states[i], memory.clients[i]) for i in memory.clients)
