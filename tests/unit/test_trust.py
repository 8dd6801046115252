"""Files are not trusted: edited ones are named, code they mention is not run, damaged caches are no caches."""

import json
import shutil
import unicodedata

import pytest
import torch
from commands import invoke
from helpers import config
from torch import nn

import fldiag
from fldiag import FldiagError
from fldiag.runs.index import write_index
from fldiag.runs.run import Run
from fldiag.training import rounds


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    return rounds.train(config(rounds=2), out=tmp_path_factory.mktemp("trust") / "run")


@pytest.fixture
def run(kept, tmp_path):
    shutil.copytree(kept.path, tmp_path / "run")
    return Run.open(tmp_path / "run")


def test_an_edited_checkpoint_of_a_run_is_refused_by_path_too(run):
    file = run.path / "rounds" / "0001.pt"
    content = torch.load(file, weights_only=True)
    next(iter(content["model"].values())).add_(1)
    torch.save(content, file)
    with pytest.raises(FldiagError, match="sha256 differs"):
        fldiag.load(file)
    shutil.copy(file, run.path.parent / "copied.pt")
    assert fldiag.load(run.path.parent / "copied.pt").round == 1


def test_partition_does_not_run_code_that_a_run_names(run, tmp_path, monkeypatch):

    monkeypatch.chdir(tmp_path)
    (tmp_path / "evil.py").write_text("open('exploded', 'w')\n")
    index = json.loads((run.path / "run.json").read_text())
    index["config"]["data"]["name"] = "evil:f"
    write_index(run.path, index)
    result = invoke("partition", run.path)
    assert (
        result.exit_code == 1
        and "does not import it" in result.stderr
        and not (tmp_path / "exploded").exists()
    )


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("config", None),
        ("config", {"rounds": -1}),
        ("hash", 3),
        ("state", []),
        ("status", None),
        ("provenance", "x"),
        ("files", []),
        ("done", "many"),
    ],
)
def test_edited_run_index(run, key, value):
    index = json.loads((run.path / "run.json").read_text())
    index[key] = value
    write_index(run.path, index)
    with pytest.raises(FldiagError, match=r"run\.json"):
        _ = Run.open(run.path).config


@pytest.mark.parametrize(
    "edit",
    [
        lambda m: m["config"].update(data=3),
        lambda m: m["config"].update(model=[]),
        lambda m: m.update(provenance="x"),
        lambda m: m["method"].pop("name"),
        lambda m: m.update(classes=-1),
        lambda m: m.update(shape=["a"]),
        lambda m: m.update(clients=["x"]),
    ],
)
def test_edited_manifest(run, edit, tmp_path):
    content = torch.load(run.path / "rounds" / "0002.pt", weights_only=True)
    manifest = json.loads(content["manifest"])
    edit(manifest)
    torch.save({**content, "manifest": json.dumps(manifest)}, tmp_path / "edited.pt")
    with pytest.raises(FldiagError, match="manifest"):
        fldiag.load(tmp_path / "edited.pt")


def test_resume_on_other_data_or_another_partition_is_refused(tmp_path):
    chosen = config(rounds=2)

    def stop(event):
        if event["event"] == "round":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        rounds.train(chosen, out=tmp_path / "r", on_event=stop)
    index = json.loads((tmp_path / "r" / "run.json").read_text())
    index["provenance"]["data"] = "0" * 16
    write_index(tmp_path / "r", index)
    with pytest.raises(FldiagError, match="is not the one"):
        rounds.train(chosen, out=tmp_path / "r", resume=True)


def test_a_damaged_cache_is_computed_again(run, tmp_path):
    first = fldiag.diagnose(run, "spectrum", k=1, cache=tmp_path / "cache")
    (file,) = (tmp_path / "cache").glob("*.parquet")
    file.write_bytes(b"PAR1 damaged")
    again = fldiag.diagnose(run, "spectrum", k=1, cache=tmp_path / "cache")
    assert first.equals(again) and file.stat().st_size > 100


def test_the_cache_tells_losses_apart(tmp_path):
    net, data = (
        nn.Linear(3, 1),
        (torch.randn(9, 3, generator=torch.Generator().manual_seed(0)), torch.zeros(9, 1)),
    )
    problems = [
        fldiag.Problem(net, loss, data)
        for loss in (
            lambda z, y: (z - y).square().mean(),
            lambda z, y: (3 * (z - y)).square().mean(),
        )
    ]
    tops = [
        fldiag.diagnose(p, "spectrum", k=1, cache=tmp_path)["value"].dropna().tolist()
        for p in problems
    ]
    assert tops[1][1] == pytest.approx(9 * tops[0][1], rel=1e-3)


#: What a folder can be called: a terminal's commands, writing from right to left, a bell, two lines, markup.
HOSTILE = "r\x1b[31m\u202e\x07\x9b1m\n<script>alert(1)<!--&'\"]]>"


def test_a_name_commands_no_terminal_and_breaks_no_file(kept, tmp_path):

    folder = tmp_path / HOSTILE
    shutil.copytree(kept.path, folder)
    words = [
        ["runs", tmp_path],
        [
            "check",
            folder,
            "--fail-if",
            "accuracy < 1%",
            "--out",
            tmp_path,
        ],
        ["prune", folder, "--dry-run"],
        ["check", f"{folder}no"],
        ["report", folder, "--out", tmp_path],
    ]
    for one in words:
        found = invoke(*one)
        assert found.exit_code == (2 if one[1] == f"{folder}no" else 0), found.output
        shown = found.output.replace("\n", "")
        assert shown.isprintable() and "unexpected" not in shown, shown
    assert "error: " in found.output or len(list(tmp_path.glob("report*.html"))) == 1
    for file in tmp_path.glob("*.*"):
        text = file.read_text("utf-8") if file.suffix in (".csv", ".json", ".html") else ""
        assert not [c for c in text if c != "\n" and unicodedata.category(c) in ("Cc", "Cs")]
        assert "<script>alert(1)<" not in text or file.suffix in (".csv", ".json")


def test_a_name_that_is_no_text_is_refused(kept, tmp_path):
    folder = tmp_path / b"r\xff".decode("utf-8", "surrogateescape")
    shutil.copytree(kept.path, folder)
    for path in (folder, folder / "rounds" / "0001.pt"):
        with pytest.raises(FldiagError, match="not UTF-8; rename"):
            fldiag.load(path)


def test_infinite_options_are_refused():
    with pytest.raises(FldiagError, match="rho"):
        config("fedsol", {"rho": float("inf")})


def test_examples_given_directly_take_no_slice(run):
    checkpoint = fldiag.load(
        run.path / "rounds" / "0002.pt", data=(torch.randn(8, 4), torch.arange(8) % 3)
    )
    assert len(fldiag.diagnose(checkpoint, "spectrum", k=1)) == 3
    with pytest.raises(FldiagError, match="examples themselves"):
        fldiag.diagnose(checkpoint, "spectrum", k=1, samples=5)
