"""What the command line shows on a terminal."""

import io

from fldiag.cli.app import Console
from fldiag.results.table import progress_bar


class Terminal(io.StringIO):
    def isatty(self):
        return True


def last_shown(*calls, monkeypatch, seconds=90.0):
    """The bar as it stands after calls of the callback that are so far apart."""
    now = [0.0]
    monkeypatch.setattr("rich.console.monotonic", lambda: now[0])
    monkeypatch.setattr("sys.stderr", terminal := Terminal())
    with Console().progress("landscape") as show:
        for done, total in calls:
            show(done, total, "points")
            now[0] += seconds
    return terminal.getvalue()


def test_the_time_remaining_is_shown_from_the_first_finished_part_on(monkeypatch):
    assert "-:--:--" in last_shown((0, 5), monkeypatch=monkeypatch)
    assert "0:06:00" in last_shown((0, 5), (1, 5), monkeypatch=monkeypatch)


def test_what_was_finished_before_does_not_count(monkeypatch):
    shown = last_shown((60, 100), (61, 100), monkeypatch=monkeypatch)
    assert "61/100" in shown and "0:58:30" in shown


def test_a_stage_with_another_total_is_timed_anew(monkeypatch):
    shown = last_shown((0, 3), (3, 3), (0, 10), (1, 10), monkeypatch=monkeypatch)
    assert "1/10" in shown and "0:13:30" in shown


def test_no_bar_elsewhere_than_on_a_terminal(capfd):
    with progress_bar("training") as show:
        show(1, 2, "round 1")
    assert capfd.readouterr() == ("", "")
