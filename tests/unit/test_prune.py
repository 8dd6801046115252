"""What goes from a run that ended, and what stays."""

import json
import re
import shutil
import subprocess

import pytest
import torch
from commands import invoke
from helpers import config
from torch import nn

import fldiag
from fldiag.errors import FldiagError
from fldiag.runs import owner, prune
from fldiag.runs.run import Run
from fldiag.training import rounds


def trained(path, **more):
    return rounds.train(config("scaffold", rounds=3, **more), out=path)


def test_clients_states_go_and_answers_stay(tmp_path):
    run = trained(tmp_path)
    before = fldiag.diagnose(run, "forgetting")
    gone = prune.thin(run)
    assert (
        gone
        and all(name.startswith("state/client") for name in gone)
        and not any((tmp_path / n).exists() for n in gone)
    )
    after = Run.open(tmp_path)
    assert after.rounds == [1, 2, 3] and fldiag.diagnose(after, "forgetting").equals(before)
    with pytest.raises(FldiagError, match="state"):
        rounds.train(config("scaffold", rounds=5), out=tmp_path, resume=True)


def test_rounds_go_but_never_the_last(tmp_path):
    run = trained(tmp_path)
    prune.thin(run, [1], state=False)
    assert Run.open(tmp_path).rounds == [1, 3] and sorted(
        p.name for p in (tmp_path / "rounds").iterdir()
    ) == ["0001.pt", "0003.pt"]
    assert rounds.train(config("scaffold", rounds=4), out=tmp_path, resume=True).rounds == [1, 3, 4]


def test_a_run_in_training_is_left_alone(tmp_path):
    def stop(event):
        if event["event"] == "round":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        rounds.train(config(rounds=3), out=tmp_path, on_event=stop)
    with pytest.raises(FldiagError, match="interrupted"):
        prune.thin(Run.open(tmp_path))
    with owner.hold(tmp_path), pytest.raises(FldiagError, match="being trained"):
        prune.remove(tmp_path)
    assert (tmp_path / "run.json").is_file()


def test_removing_a_run_leaves_what_is_not_fldiags(tmp_path):
    trained(tmp_path / "run")
    (tmp_path / "run" / "notes.txt").write_text("mine")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "kept").write_text("kept")
    (tmp_path / "run" / "latest").symlink_to(tmp_path / "elsewhere")
    prune.remove(tmp_path / "run")
    assert (tmp_path / "elsewhere" / "kept").is_file()
    assert {p.name for p in (tmp_path / "run").iterdir()} == {"notes.txt", "latest"}


# -- symbolic links inside a run


def interrupted(path):
    """A run of two stored rounds of three."""

    def stop(event):
        if event["event"] == "round" and event["round"] == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        rounds.train(config("scaffold", rounds=3), out=path, on_event=stop)


NET = nn.Linear(2, 2)


def recorder(path, **more):
    return fldiag.Recorder(
        path, NET, data=(torch.eye(2), torch.tensor([0, 1])), clients=[[0], [1]], **more
    )


def recorded(path):
    """A recording whose loop failed after a round."""
    with pytest.raises(ZeroDivisionError), recorder(path) as rec:
        rec.round(received=NET, clients={0: NET, 1: NET}, aggregated=NET)
        _ = 1 / 0


def preset(path):
    """A TOML file of the config of ``trained``."""
    file = path.parent / "scaffold.toml"
    file.write_text(
        "".join(
            f"[{name}]\n"
            + "".join(f"{k} = {json.dumps(v)}\n" for k, v in section.items() if v is not None)
            for name, section in config("scaffold").model_dump(mode="json").items()
            if isinstance(section, dict)
        )
    )
    return str(file)


def verb(*words):
    result = invoke(*words)
    if result.exit_code:
        raise FldiagError(result.stderr)


#: What writes or deletes in a run -> how the run begins, and what is done to it.
WRITERS = {
    "resume": (
        interrupted,
        lambda path: rounds.train(config("scaffold", rounds=3), out=path, resume=True),
    ),
    "longer": (
        trained,
        lambda path: rounds.train(config("scaffold", rounds=4), out=path, resume=True),
    ),
    "overwrite": (
        trained,
        lambda path: verb("train", preset(path), "--set", "rounds=1", "--out", path, "--overwrite"),
    ),
    "prune": (trained, lambda path: verb("prune", path, "--keep", "last", "--yes")),
    "prune --dry-run": (trained, lambda path: verb("prune", path, "--keep", "last", "--dry-run")),
    "thin": (trained, lambda path: prune.thin(Run.open(path))),
    "recorder": (recorded, lambda path: recorder(path, resume=True).close()),
}
LINKED = [
    "rounds",
    "metrics",
    "state",
    "rounds/0001.pt",
    "metrics/*",
    "state/*",
    "run.json",
    "partition.npz",
    "journal.jsonl",
    "diagnostics",
    ".run.json.7.tmp",
]


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """A run for every way in which one begins."""
    folder = tmp_path_factory.mktemp("begun")
    for begin in {begin for begin, _ in WRITERS.values()}:
        begin(folder / begin.__name__)
    return folder


def moved(path, name, outside):
    """Move a file or folder of a run elsewhere and leave a link to it; where there is none, link to one that is made."""
    outside.mkdir()
    link = next(iter(sorted(path.glob(name))), path / name.replace("*", "new"))
    target = outside / link.name
    if link.exists():
        link.rename(target)
    elif link.suffix:
        target.write_text("precious")
    else:
        target.mkdir()
        (target / "0001.pt").write_text("precious")
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(target)
    return link


def content(folder):
    return {
        file.relative_to(folder): (file.read_bytes(), file.stat().st_mtime_ns)
        for file in folder.rglob("*")
        if file.is_file()
    }


@pytest.mark.parametrize("name", LINKED)
@pytest.mark.parametrize("writer", WRITERS)
def test_nothing_is_written_or_deleted_through_a_link_inside_a_run(begun, tmp_path, writer, name):
    begin, act = WRITERS[writer]
    shutil.copytree(begun / begin.__name__, tmp_path / "run")
    link = moved(tmp_path / "run", name, tmp_path / "outside")
    before, inside = content(tmp_path / "outside"), content(tmp_path / "run")
    with pytest.raises(
        FldiagError, match=f"{re.escape(link.name)} is a symbolic link inside a run"
    ):
        act(tmp_path / "run")
    assert (
        content(tmp_path / "outside") == before
        and content(tmp_path / "run") == inside
        and link.is_symlink()
    )


@pytest.mark.parametrize(
    "edit",
    [
        lambda i: i["state"].update({"clients-00000001": "latest/x"}),
        lambda i: i.update(metrics="latest/x"),
    ],
)
def test_a_run_cannot_say_that_other_files_are_its_own(begun, tmp_path, edit):
    run = Run.open(shutil.copytree(begun / "trained", tmp_path / "run"))
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "x").write_text("precious")
    (tmp_path / "run" / "latest").symlink_to(tmp_path / "outside")
    edit(run.index)
    run.index["files"]["latest/x"] = "0" * 64
    run.commit()
    for act in (
        lambda: prune.thin(Run.open(run.path)),
        lambda: rounds.train(config("scaffold", rounds=4), out=run.path, resume=True),
    ):
        with pytest.raises(FldiagError, match="latest/x"):
            act()
    assert (tmp_path / "outside" / "x").read_text() == "precious"


@pytest.mark.parametrize("writer", WRITERS)
def test_a_run_folder_may_be_reached_through_links_and_a_copy_without_links_is_fine(
    begun, tmp_path, writer
):
    begin, act = WRITERS[writer]
    shutil.copytree(begun / begin.__name__, tmp_path / "scratch" / "run")
    (tmp_path / "data").symlink_to(tmp_path / "scratch")
    (tmp_path / "link").symlink_to(tmp_path / "data" / "run")
    moved(tmp_path / "scratch" / "run", "rounds", tmp_path / "outside")
    with pytest.raises(FldiagError, match="cp -rL RUN COPY"):
        act(tmp_path / "link")
    subprocess.run(["cp", "-rL", tmp_path / "link", tmp_path / "scratch" / "copy"], check=True)
    (tmp_path / "link").unlink()
    (tmp_path / "link").symlink_to(tmp_path / "data" / "copy")
    act(tmp_path / "link")


def test_answers_are_not_written_through_a_link(begun, tmp_path):
    run, outside = shutil.copytree(begun / "trained", tmp_path / "run"), tmp_path / "outside"
    (outside / "diagnostics").mkdir(parents=True)
    (run / "diagnostics").symlink_to(outside / "diagnostics")
    for words in (
        ["forgetting", run],
        ["partition", run],
        ["report", run],
    ):
        with pytest.raises(FldiagError, match="is a symbolic link inside a run"):
            verb(*words)
    assert not content(outside)
    verb("forgetting", run, "--format", "png", "--out", tmp_path / "elsewhere")
    (run / "diagnostics").unlink()
    (run / "diagnostics").mkdir()
    (run / "diagnostics" / "cache").symlink_to(outside / "diagnostics")
    with pytest.raises(FldiagError, match="cache is a symbolic link inside a run"):
        verb("forgetting", run)
    assert not content(outside)
