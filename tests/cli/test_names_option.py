"""``--names``: what tables and pictures call the targets."""

from pathlib import Path

import commands
import pytest
from commands import run
from matplotlib.text import Text

import fldiag
from fldiag.errors import FldiagError

FOLDER = Path(__file__).parents[2] / "checkpoints" / "example"
EXAMPLES = [FOLDER / "fedsol-digits.pt", FOLDER / "fedavg-digits.pt"]


def test_the_names_stand_in_the_table_and_the_picture(tmp_path):
    result = run(
        "spectrum",
        *EXAMPLES,
        "--names",
        "Ours, FedAvg",
        "--samples",
        "50",
        "--k",
        "1",
        "--format",
        "png",
        "--out",
        tmp_path,
    )
    table = commands.table(commands.last(result))
    assert list(dict.fromkeys(table["run"])) == ["Ours", "FedAvg"]
    texts = {text.get_text() for text in fldiag.draw(table, name="spectrum").findobj(Text)}
    assert {"Ours", "FedAvg"} <= texts


@pytest.mark.parametrize(
    ("names", "message"),
    [("A", "1 names for 2 targets"), ("A,A", "one name twice"), ("A,", "empty name")],
)
def test_names_that_name_nothing(names, message):
    with pytest.raises(FldiagError, match=message):
        fldiag.diagnose([str(e) for e in EXAMPLES], "spectrum", names=names)
