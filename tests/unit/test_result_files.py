"""Tables, texts and pictures on disk: whole or not at all, and a csv that was changed is refused."""

import hashlib
import json
import os

import pandas as pd
import pytest

from fldiag.errors import FldiagError
from fldiag.results import files
from fldiag.results.table import table

FRAME = table(
    [{"metric": "loss", "value": 1 / 3, "round": 2}, {"metric": "note", "layer": 'a,b "c"\nd'}]
)


def test_a_table_and_what_it_is(tmp_path):
    written = files.write_table(FRAME, tmp_path / "new" / "lr-0.1", {"seed": 3, "where": tmp_path})
    assert [f.name for f in written] == ["lr-0.1.json", "lr-0.1.csv"] and all(
        f.is_file() for f in written
    )
    about, content = files.read_json(written[0]), written[1].read_bytes()
    assert json.loads(written[0].read_text("utf-8"))["digest"] == files.json_digest(about)
    assert about == {
        **json.loads(json.dumps(files.provenance())),
        "seed": 3,
        "where": str(tmp_path),
        "table": {"file": "lr-0.1.csv", "sha256": hashlib.sha256(content).hexdigest()},
    }
    again = pd.read_csv(written[1])
    assert (
        again["value"][0] == 0.333333333
        and again["layer"][1] == 'a,b "c"\nd'
        and list(again.columns) == list(FRAME.columns)
    )
    assert files.read_csv_bytes(written[1], about) == content


def test_an_edited_source_file_is_other_code(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "ROOT", tmp_path)
    (tmp_path / "results").mkdir()
    digests = set()
    for name, text in [("a", "x = 1"), ("a", "x = 2"), ("results/b", "x = 2")]:
        (tmp_path / f"{name}.py").write_text(text)
        digests.add(files.sources.__wrapped__())
    assert len(digests) == 3


def test_the_same_table_gives_the_same_bytes(tmp_path):
    first = [f.read_bytes() for f in files.write_table(FRAME, tmp_path / "a", {"seed": 1})]
    assert [f.read_bytes() for f in files.write_table(FRAME, tmp_path / "a", {"seed": 1})] == first


def test_a_csv_that_was_changed_is_refused(tmp_path):
    csv = files.write_table(FRAME, tmp_path / "a", {})[1]
    good, about = csv.read_bytes(), files.read_json(csv.with_suffix(".json"))
    for place in range(len(good)):
        csv.write_bytes(good[:place] + bytes([good[place] ^ 0x01]) + good[place + 1 :])
        with pytest.raises(FldiagError, match=r"a\.csv is not the table that was written"):
            files.read_csv_bytes(csv, about)


def test_a_write_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    files.write_text(tmp_path / "a.txt", "old")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    for write in (
        lambda: files.write_text(tmp_path / "a.txt", "new"),
        lambda: files.write_bytes(tmp_path / "a.txt", b"new"),
    ):
        with pytest.raises(FldiagError, match="No space left"):
            write()
    assert [(f.name, f.read_text()) for f in tmp_path.iterdir()] == [("a.txt", "old")]


@pytest.mark.parametrize(
    "text", ["=1+1", "+1", "-a", "@sum", "\tx", "'=1", "'", "plain", "", "a=b", "-1.5"]
)
def test_text_of_a_csv_is_no_formula_and_is_read_back(text):
    frame = pd.DataFrame({"run": [text, "b"], "value": [-1.5, float("nan")]})
    content = files.csv_text(frame)
    cell = content.splitlines()[1].strip('"')
    assert not cell.startswith(("=", "+", "-", "@", "\t")) and ",-1.5" in content
    back = files.read_csv(
        content.encode(), dtype={"run": str}, keep_default_na=False, na_values={"value": [""]}
    )
    pd.testing.assert_frame_equal(back, frame)
