"""What goes from a run that ended, and what stays."""

import pytest
from helpers import config

import fldiag
from fldiag.checkpoint import owner, prune
from fldiag.checkpoint.run import Run
from fldiag.errors import FldiagError
from fldiag.training import rounds


def trained(path, **more):
    return rounds.train(config("scaffold", rounds=3, **more), out=path)


def test_clients_states_go_and_answers_stay(tmp_path):
    run = trained(tmp_path)
    before = fldiag.diagnose(run, "forgetting")
    gone = prune.thin(run)
    assert gone and all(name.startswith("state/client") for name in gone) and not any((tmp_path / n).exists() for n in gone)
    after = Run.open(tmp_path)
    assert after.rounds == [1, 2, 3] and fldiag.diagnose(after, "forgetting").equals(before)
    with pytest.raises(FldiagError, match="state"):
        rounds.train(config("scaffold", rounds=5), out=tmp_path, resume=True)


def test_rounds_go_but_never_the_last(tmp_path):
    run = trained(tmp_path)
    prune.thin(run, [1], state=False)
    assert Run.open(tmp_path).rounds == [1, 3] and sorted(p.name for p in (tmp_path / "rounds").iterdir()) == ["0001.pt", "0003.pt"]
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
    (tmp_path / "run" / "diagnostics").symlink_to(tmp_path / "elsewhere")
    prune.remove(tmp_path / "run")
    assert (tmp_path / "elsewhere" / "kept").is_file()
    assert {p.name for p in (tmp_path / "run").iterdir()} == {"notes.txt", "diagnostics"}
