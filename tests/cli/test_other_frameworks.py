"""The commands of docs/frameworks.md, on files laid out as those programs write them."""

import json
import re
import shlex
from collections import OrderedDict
from pathlib import Path

import commands
import numpy as np
import pytest
import torch

from fldiag.runs.run import Run

PAGE = Path(__file__).parents[2] / "docs" / "frameworks.md"
THEIRS = (
    *("--pattern", "client_{client}_model_{round}.pt"),
    *("--global-pattern", "server_model_{round}.pt"),
    *("--model", "mymodel:net"),
)


def net(seed=0):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))


@pytest.fixture
def place(tmp_path, monkeypatch):
    (tmp_path / "mymodel.py").write_text(
        "import torch.nn as nn\ndef net(): return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for folder in ("models/digits", "items", "out", "app_server"):
        Path(folder).mkdir(parents=True)
    return tmp_path


def pfllib(whole=False):
    """Two rounds of three clients, 0 to 2 in the first and 0, 2 in the second."""
    for i, clients in enumerate([(0, 1, 2), (0, 2)]):
        for k in (*clients, None):
            model = net(10 * i + (9 if k is None else k))
            name = f"server_model_{i}.pt" if k is None else f"client_{k}_model_{i}.pt"
            torch.save(model if whole else model.state_dict(), f"items/{name}")


@pytest.mark.slow
def test_the_page_is_run(place):
    pfllib()
    Path("partition.json").write_text(
        json.dumps({k: np.arange(k, 1500, 3).tolist() for k in range(3)})
    )
    torch.save(
        net().state_dict(), "models/digits/FedAvg_server.pt"
    )  # after the two lines that the page gives
    torch.save(
        OrderedDict((n, p.data.clone()) for n, p in net().named_parameters()), "out/digits_2_net.pt"
    )
    torch.save(
        OrderedDict(
            model=net().state_dict(),
            meta_props={"start_round": 0, "total_rounds": 2},
            train_conf={"train": {"model": "Net"}},
        ),
        "app_server/FL_global_model.pt",
    )
    lines = [
        line
        for block in re.findall(r"```sh\n(.*?)```", PAGE.read_text(), re.S)
        for line in block.splitlines()
    ]
    assert len(lines) == 5
    values = []
    for line in lines:
        _, *arguments = shlex.split(line)
        result = commands.run(*arguments)
        if arguments[0] == "spectrum":
            values.append(
                commands.table(commands.last(result).with_suffix(".png"))["value"].tolist()
            )
    assert values[0] and values[0] == values[1] == values[2]  # one model in three containers
    run = Run.open("runs/pfllib")
    assert (
        run.rounds == [1, 2]
        and run.checkpoint(1).client_ids == [0, 1, 2]
        and run.checkpoint(2).client_ids == [0, 2]
    )
    second = run.checkpoint(2)
    assert torch.equal(second.state["1.weight"], net(19).state_dict()["1.weight"])
    assert torch.equal(
        second.received, torch.cat([p.detach().reshape(-1) for p in net(9).parameters()])
    )


def test_whole_modules_are_refused_and_the_lines_of_the_page_mend_them(place):
    pfllib(whole=True)
    said = " ".join(commands.run("convert", "items", "run", *THEIRS, code=1).output.split())
    assert "nothing in it was executed" in said
    lines = re.search(r"```python\n(.*?)```", PAGE.read_text(), re.S)[1]
    for file in Path("items").glob("*.pt"):
        exec(lines.replace('"FedAvg_server.pt"', repr(str(file))), {"torch": torch})
    commands.run("convert", "items", "again", *THEIRS)
    assert Run.open("again").rounds == [1, 2]
