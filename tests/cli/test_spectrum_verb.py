"""``fldiag spectrum`` and ``fldiag landscape`` on a user's own network: what is estimated, frozen, zero or too large."""

import json
from pathlib import Path

import pandas as pd
import pytest
import torch
from commands import invoke, run
from safetensors.torch import load_file

EXAMPLE = Path(__file__).parents[2] / "checkpoints" / "example" / "fedsol-digits.pt"
MODULE = """
import torch
from torch import nn

def net():
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3))

def frozen():
    module = net()
    module[0].requires_grad_(False)
    return module

def flat():
    class Flat(nn.Sequential):
        def forward(self, x):
            return 0 * super().forward(x)
    return Flat(nn.Flatten(), nn.Linear(16, 3))

def normed():
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 3))

def load():
    g = torch.Generator().manual_seed(0)
    x, y = torch.randn(40, 1, 4, 4, generator=g), torch.arange(40) % 3
    return x, y, x[:20], y[:20]
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    """Runs a verb on checkpoints of ``own:NAME``, each with another seed."""
    monkeypatch.chdir(tmp_path)
    name = f"own_{tmp_path.name.replace('-', '_')}"  # a module is imported once a process
    (tmp_path / f"{name}.py").write_text(MODULE)
    scope: dict = {}
    exec(MODULE, scope)

    def run(verb, model, *arguments, count=1, code=0):
        files = []
        for seed in range(count):
            torch.manual_seed(seed)
            module = scope[model]()
            for b in [b for b in module.buffers() if b.is_floating_point()]:
                b.uniform_(0.5, 2)
            torch.save(module.state_dict(), tmp_path / f"w{seed}.pt")
            files.append(str(tmp_path / f"w{seed}.pt"))
        result = invoke(
            verb,
            *files,
            "--model",
            f"{name}:{model}",
            "--data",
            f"{name}:load",
            "--device",
            "cpu",
            *arguments,
        )
        assert result.exit_code == code, (result.output, result.exception)
        return result

    return run


def table(result):
    path = result.stdout.strip().splitlines()[-1]
    return pd.read_csv(path.removesuffix(".png") + ".csv")


@pytest.mark.parametrize("products, reached", [(8, False), (200, True)])
def test_the_trace_of_a_net_without_closed_form_says_how_far_it_is_off(own, products, reached):
    result = own("spectrum", "net", "--k", 1, "--trace", "--max-products", products)
    row = table(result).query("metric == 'trace' and layer.isna()").iloc[0]
    assert bool(row.converged) == reached
    assert ("not every trace reached" in result.stderr) != reached


def test_eigenvectors_are_a_file_beside_the_table(own):
    result = own("spectrum", "net", "--k", 2, "--params", "4.*", "--save-vectors")
    paths = [Path(line) for line in result.stdout.splitlines() if line.endswith(".safetensors")]
    tensors = load_file(paths[0])
    assert {name: tuple(t.shape) for name, t in tensors.items()} == {
        "4.weight": (2, 3, 16),
        "4.bias": (2, 3),
    }
    about = json.loads(Path(result.stdout.splitlines()[-1]).with_suffix(".json").read_text())
    assert paths[0].name in about["pictures"]
    assert not list(paths[0].parent.glob("cache/*.safetensors"))
    again = own("spectrum", "net", "--k", 2, "--params", "4.*", "--save-vectors")
    assert again.stdout.splitlines()[-5:] == result.stdout.splitlines()[-5:]
    refused = own("spectrum", "net", "--save-vectors", count=2, code=2)
    assert "one checkpoint at a time" in refused.stderr


@pytest.mark.parametrize("verb, more", [("spectrum", ["--k", 1]), ("landscape", [])])
@pytest.mark.slow
def test_frozen_parameters_are_said_to_count(own, verb, more):
    assert "40 frozen parameters count as weights" in own(verb, "frozen", *more).stderr
    assert "frozen parameters" not in own(verb, "net", *more).stderr
    assert "count as constants" in own(verb, "frozen", "--trainable", *more).stderr


@pytest.mark.slow
def test_each_point_of_a_plane_has_its_own_statistics(own):
    result = own("landscape", "normed", "--directions", "plane", count=3)
    points = table(result).query("metric == 'point'")
    alone = [float(table(own("spectrum", "normed", "--k", 1, count=1)).value[0])]
    assert points.value.iloc[0] == pytest.approx(alone[0], rel=1e-6)


LANGUAGE = """
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

TOKENS = torch.arange(40).reshape(8, 5) * 7 % 6
MASK = torch.arange(5) < torch.tensor([5, 3, 4, 1, 5, 2, 5, 4])[:, None]


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = torch.nn.Embedding(6, 3), torch.nn.Linear(3, 6)

    def forward(self, tokens):
        return self.head(self.table(tokens).tanh())


def words():
    return {"tokens": TOKENS, "mask": MASK}


def batches():
    return DataLoader(TensorDataset(TOKENS, TOKENS.flip(1).masked_fill(~MASK, -100)), batch_size=3)


def masked(z, batch):
    each = cross_entropy(z.transpose(1, 2), batch["tokens"].flip(1), reduction="none")
    return (each * batch["mask"]).sum(), batch["mask"].sum()
"""


@pytest.mark.slow
def test_tokens_masks_and_sums_from_the_command_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "language.py").write_text(LANGUAGE)
    names: dict = {}
    exec(LANGUAGE, names)
    net = names["Net"]()
    torch.save({"_orig_mod." + k: v for k, v in net.state_dict().items()}, "net.pt")
    left = int(names["MASK"].sum())
    expected = float(names["masked"](net(names["TOKENS"]), names["words"]())[0].detach()) / left
    for more, value, told in (
        (
            ("--data", "language:words", "--loss", "language:masked"),
            expected,
            "the loss is the mean over what it counts",
        ),
        (("--data", "language:batches"), expected, "the loss is cross entropy"),
    ):
        result = run("spectrum", "net.pt", "--model", "language:Net", "--k", "1", "--json", *more)
        assert json.loads(result.stdout)["rows"][0]["value"] == pytest.approx(value, rel=1e-5)
        assert told in result.stdout + result.stderr
    assert (
        "no loss of its own"
        in run(
            "spectrum", "net.pt", "--model", "language:Net", "--data", "language:words", code=1
        ).stderr
    )


@pytest.mark.slow
def test_another_loss(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_loss.py").write_text(
        "from torch.nn.functional import cross_entropy\n\n\n"
        "def double(outputs, y):\n    return 2 * cross_entropy(outputs, y)\n"
    )
    first, second = (
        json.loads(
            run("spectrum", EXAMPLE, "--k", "1", "--samples", "100", "--json", *more).stdout
        )["rows"]
        for more in ((), ("--loss", "own_loss:double"))
    )
    for one, other in zip(first, second, strict=True):
        if one["metric"] in ("loss", "eigenvalue"):
            assert other["value"] == pytest.approx(2 * one["value"], rel=1e-3)
    assert "cross_entropy" in run("spectrum", EXAMPLE, "--loss", "crossentropy", code=2).stderr
    assert "cannot import nowhere" in run("spectrum", EXAMPLE, "--loss", "nowhere:f", code=2).stderr
