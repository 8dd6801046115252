"""Below torch 2.10 a .pt file is read with consent only, and fldiag writes safetensors, which need none."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.torch_version import TorchVersion

import fldiag
from fldiag.runs.run import Run
from fldiag.runs.trust import ALL, VARIABLE, check_trust, reads_pt, trust

ROOT = Path(__file__).parents[2]
CONFIG = {"model__name": "mlp", "rounds": 2, "clients__per_round": 2, "train__epochs": 1}


@pytest.fixture(params=["2.9.1+cpu", "2.6.0"])
def older_torch(request, monkeypatch):
    monkeypatch.setattr(torch, "__version__", TorchVersion(request.param))
    monkeypatch.setenv(VARIABLE, "")


@pytest.fixture
def weights(tmp_path):
    file = tmp_path / "net.pt"
    torch.save(torch.nn.Linear(2, 3).state_dict(), file)
    return file


@pytest.mark.parametrize("version", ["2.10.0", "2.10.1+cu128", "2.14.1", "3.0.0"])
def test_a_safe_torch_asks_for_no_consent(version, weights, monkeypatch):
    monkeypatch.setattr(torch, "__version__", TorchVersion(version))
    monkeypatch.setenv(VARIABLE, "")
    assert reads_pt()
    assert set(fldiag.load(weights).state) == {"weight", "bias"}


def test_a_file_is_refused_and_the_remedies_work(older_torch, weights, tmp_path):
    with pytest.raises(fldiag.FldiagError, match="CVE-2026-24747") as refusal:
        fldiag.load(weights)
    assert "--trust-file" in refusal.value.remedy and f"{VARIABLE}={ALL}" in refusal.value.remedy
    assert fldiag.load(weights, trust_file=True).state["weight"].shape == (3, 2)
    assert not reads_pt()  # the consent is for that file
    assert fldiag.load(weights).state["weight"].shape == (3, 2)


def test_consent_for_a_folder_is_none_for_its_neighbour(older_torch, tmp_path):
    trust(tmp_path / "mine")
    check_trust(tmp_path / "mine" / "rounds" / "0001.pt")
    for other in ("mine2/0001.pt", "0001.pt", "mine/../0001.pt"):
        with pytest.raises(fldiag.FldiagError):
            check_trust(tmp_path / other)


def test_a_link_in_a_trusted_folder_leads_to_no_trusted_file(older_torch, weights, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "net.pt").symlink_to(weights)
    trust(tmp_path / "mine")
    with pytest.raises(fldiag.FldiagError):
        fldiag.load(tmp_path / "mine" / "net.pt")


def test_a_run_is_safetensors_and_goes_on(older_torch, tmp_path, monkeypatch):
    config = fldiag.Config.load("digits", method__name="scaffold", **CONFIG)
    run = fldiag.train(config, out=tmp_path / "run")
    files = {name for name in run.index["files"] if name.startswith(("rounds/", "state/"))}
    assert {Path(name).suffix for name in files} == {".safetensors"}
    longer = fldiag.train(config.replace(rounds=3), out=tmp_path / "run", resume=True)
    assert longer.rounds == [1, 2, 3]
    assert len(fldiag.diagnose(tmp_path / "run", "drift"))
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.10.0"))
    whole = fldiag.train(config.replace(rounds=3), out=tmp_path / "whole")
    for r in whole.rounds:
        a, b = whole.checkpoint(r), Run.open(tmp_path / "run").checkpoint(r)
        assert a.path.suffix == ".pt" and b.path.suffix == ".safetensors"
        assert all(torch.equal(a.state[name], b.state[name]) for name in a.state)
        assert torch.equal(a.clients, b.clients) and a.client_ids == b.client_ids


def test_a_run_of_pt_files_goes_on_with_consent(older_torch, tmp_path, monkeypatch):
    config = fldiag.Config.load("digits", **CONFIG)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "__version__", TorchVersion("2.14.0"))
        fldiag.train(config, out=tmp_path / "run")
    with pytest.raises(fldiag.FldiagError, match=r"0002\.pt"):
        fldiag.load(tmp_path / "run").checkpoint()
    run = fldiag.load(tmp_path / "run", trust_file=True)
    assert run.checkpoint().round == 2
    longer = fldiag.train(config.replace(rounds=3), out=tmp_path / "run", resume=True)
    assert [Path(longer.round_file(r)).suffix for r in longer.rounds] == [
        ".pt",
        ".pt",
        ".safetensors",
    ]


def test_a_recorded_round_that_is_written_again_has_one_file(older_torch, tmp_path):
    config = fldiag.Config.load("digits", **CONFIG)
    run = fldiag.train(config, out=tmp_path / "run")
    checkpoint = run.checkpoint(2)
    os.environ[VARIABLE] = ALL
    run.put_checkpoint(2, checkpoint.manifest, checkpoint.state)
    run.commit()
    assert [f.name for f in sorted((tmp_path / "run" / "rounds").iterdir())] == [
        "0001.safetensors",
        "0002.pt",
    ]
    assert Run.open(tmp_path / "run").checkpoint(2).round == 2


def test_every_verb_that_reads_files_takes_the_consent(tmp_path):
    """Its help names the option; that the consent reaches the reader, one of them shows."""
    from typer.main import get_command

    from fldiag.cli.app import app

    with_option = {
        name
        for name, verb in get_command(app).commands.items()
        if any("--trust-file" in option.opts for option in verb.params)
    }
    assert {
        "spectrum",
        "forgetting",
        "diagnose",
        "check",
        "diff",
        "report",
        "convert",
        "train",
        "sweep",
    } < with_option
    assert "list" not in with_option


@pytest.mark.slow
def test_the_command_line(tmp_path):
    script = (
        "import sys, torch; from torch.torch_version import TorchVersion; torch.__version__ = TorchVersion('2.6.0')\n"
        "from fldiag.cli import main; sys.exit(main())"
    )
    environment = {k: v for k, v in os.environ.items() if k != VARIABLE}
    example = Path(__file__).parents[2] / "checkpoints" / "example" / "fedsol-digits.pt"
    words = ["spectrum", example, "--k", "1", "--samples", "20", "--out", tmp_path]

    def spectrum(*more):
        return subprocess.run(
            [sys.executable, "-c", script, *words, *more],
            env=environment,
            capture_output=True,
            text=True,
        )

    refused = spectrum()
    assert refused.returncode == 2 and "--trust-file" in refused.stderr
    assert spectrum("--trust-file").returncode == 0
