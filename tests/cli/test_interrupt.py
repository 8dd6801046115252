"""Ctrl-C at any moment of the start, from the first lines of fldiag on: one error, no traceback, nothing half begun."""

import itertools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fldiag.cli import interrupt
from fldiag.cli.app import working
from fldiag.cli.console import Console, errors
from fldiag.runs.run import Run

ROOT = Path(__file__).parents[2]
SCRIPT = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # also where tests run in the background
print("up", flush=True)
sys.argv = ["fldiag", "train", "digits", "--set", "rounds=10000", "--out", sys.argv[1]]
from fldiag.cli import main
main()
"""

#: What is said before the error where the run has begun: what it stores, and how long it will take.
NOTICES = "the last round holds the sampled clients' weights", "about "


@pytest.mark.slow
@pytest.mark.parametrize("after", [*(0.2 + 0.23 * i for i in range(14)), 6], ids="{:.2f}".format)
def test_ctrl_c_while_it_starts(after, tmp_path):
    child = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "run")],
        cwd=tmp_path,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert child.stdout.readline() == "up\n"
    time.sleep(after)
    child.send_signal(signal.SIGINT)
    _, said = child.communicate()
    error = list(itertools.dropwhile(lambda line: line.startswith(NOTICES), said.splitlines()))
    assert child.returncode == 1 and error[0].startswith("error: stopped"), said
    assert all(line.startswith("  → ") for line in error[1:]), said
    assert not (tmp_path / "run" / "owner.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize("executor", ["processes:2", "dask"])
def test_ctrl_c_while_workers_train(executor, tmp_path):
    """A terminal sends it to the workers, too."""
    words = SCRIPT.replace(
        '"--out", sys.argv[1]', f'"--out", sys.argv[1], "--executor", "{executor}"'
    )
    child = subprocess.Popen(
        [sys.executable, "-c", words, str(tmp_path / "run")],
        cwd=tmp_path,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    while not list(tmp_path.glob("run/rounds/*.pt")) and child.poll() is None:
        time.sleep(0.2)
    os.killpg(child.pid, signal.SIGINT)
    _, said = child.communicate(timeout=100)
    assert (
        child.returncode == 1
        and "stopped; everything up to the last checkpoint is kept" in said
        and "Traceback" not in said
    )
    assert (
        Run.open(tmp_path / "run").status == "unfinished"
        and not (tmp_path / "run" / "owner.json").exists()
    )


def test_a_console_ends_the_time_in_which_ctrl_c_stops_at_once():
    default = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with interrupt.stops_at_once():
            assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler
            Console()
            assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        with interrupt.stops_at_once():  # another package's verb may have no console
            handlers = working(lambda context: [signal.getsignal(signal.SIGINT)])(None)
            assert handlers == [signal.default_int_handler]
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # somebody else's
        with interrupt.stops_at_once():
            Console()
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, default)


def test_an_import_that_ctrl_c_cut_short_is_stopped_too(capsys):
    """pybind11 makes an ImportError of the KeyboardInterrupt."""
    with pytest.raises(SystemExit) as ended, errors(debug=False):
        raise ImportError("initialization failed") from KeyboardInterrupt()
    assert ended.value.code == 1 and capsys.readouterr().err.startswith("error: stopped")
