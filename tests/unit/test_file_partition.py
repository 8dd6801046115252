"""``partition.kind = "file"``: anybody's partition, checked, and part of what a run is."""

import json

import numpy as np
import pytest
from commands import run as typed
from helpers import config
from hypothesis import given, settings
from hypothesis import strategies as st

import fldiag
from fldiag import Config, FldiagError, identity
from fldiag.config_files import partition_digest, read_partition
from fldiag.data import partition
from fldiag.training import rounds
from fldiag.training.setup import Setup

#: Iris has 120 training examples.
EXAMPLES = 120
THREE = {"0": [0, 1, 2, 60], "1": [5, 4, 3], "2": [100, 101, 102, 103, 104, 105, 106, 107, 108]}


def write(path, content):
    path.write_text(json.dumps(content))
    return path


def of_file(path, total=3, **more):
    tree = config(total=total, **more).model_dump()
    tree["partition"] = {"kind": "file", "path": str(path)}
    return Config(**tree)


parts_of_clients = st.lists(
    st.lists(st.integers(0, EXAMPLES - 1), min_size=1, max_size=9, unique=True),
    min_size=1,
    max_size=6,
)


@settings(max_examples=25, deadline=None)
@given(parts=parts_of_clients)
def test_every_form_is_the_same_partition(tmp_path_factory, parts):
    folder = tmp_path_factory.mktemp("partitions")
    write(folder / "list.json", parts)
    write(folder / "dict.json", {str(k): part for k, part in reversed(list(enumerate(parts)))})
    np.savez(folder / "names.npz", **{str(k): np.array(p, np.int32) for k, p in enumerate(parts)})
    np.savez(folder / "order.npz", *map(np.array, parts))
    partition.save(folder / "partition.npz", [np.sort(part) for part in parts])
    expected = [sorted(part) for part in parts]
    digests = set()
    for file in folder.iterdir():
        digests.add(digest := partition_digest(read_partition(file)))
        back = partition.from_file(str(file), digest, len(parts), EXAMPLES)
        assert [part.tolist() for part in back] == expected
        assert all(part.dtype == np.int64 for part in back)
    assert len(digests) == 1
    other = [*parts[:-1], [*parts[-1], (set(range(EXAMPLES)) - set(parts[-1])).pop()]]
    assert partition_digest(read_partition(write(folder / "other.json", other))) not in digests


@pytest.mark.parametrize(
    ("content", "total", "words"),
    [
        ({**THREE, "2": [100, 120]}, 3, ["client 2 has example 120", "120 training", "0 to 119"]),
        ({**THREE, "1": [3, 4, 3]}, 3, ["client 1 has example 3 twice", "once"]),
        ({**THREE, "1": []}, 3, ["client 1 has no examples", "leave it out"]),
        (THREE, 4, ["has no client 3", "clients.total = 4", "set clients.total = 3"]),
        (THREE, 2, ["has client 2", "clients.total = 2", "set clients.total = 3"]),
        (
            {"1": [0], "2": [1], "3": [2]},
            3,
            ["has client 3", "number its clients from 0 to 2"],
        ),
        ({"0": [0], "2": [1]}, 2, ["has client 2", "number its clients from 0 to 1"]),
        ({"a": [0], "b": [1], "c": [2]}, 3, ["client 'a' is not a number", "0, 1, 2"]),
        ({"00": [0], "1": [1], "2": [2]}, 3, ["client '00' is not a number"]),
        ({"0": [0.5]}, 1, ["client 0 has float64", "whole numbers"]),
        ({"0": [-1]}, 1, ["client 0 has int64", "whole numbers from 0"]),
        ({}, 1, ["names no client"]),
        ("text", 1, ["is not a partition"]),
    ],
)
def test_what_does_not_fit_is_one_error_with_a_remedy(tmp_path, content, total, words):
    file = write(tmp_path / "p.json", content)
    with pytest.raises(FldiagError) as caught:
        Setup(of_file(file, total))
    assert caught.value.remedy and all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"kind": "file"}, "set partition.path"),
        ({"kind": "file", "path": "no.json"}, "no.json is not there"),
        ({"kind": "file", "path": "."}, "not the folder of a run"),
        ({"kind": "file", "path": "no.json", "alpha": 0.1}, "alpha has no meaning"),
        ({"kind": "iid", "path": "no.json"}, "path has no meaning"),
    ],
)
def test_sections_that_are_refused(tmp_path, monkeypatch, section, words):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FldiagError, match=words):
        fldiag.config.build({"partition": section})


def test_public_examples_are_refused(tmp_path):
    everything = write(tmp_path / "all.json", np.arange(EXAMPLES).reshape(3, -1).tolist())
    with pytest.raises(
        FldiagError, match=r"client \d has example \d+, which data.public = holdout"
    ):
        Setup(of_file(everything, public="holdout:9"))


def test_overlaps_and_examples_of_nobody_are_said(tmp_path):
    file = write(tmp_path / "p.json", {**THREE, "1": [0, 1, 7]})
    remarks = Setup(of_file(file)).remarks
    assert [text for text in remarks if text.startswith("partition:")] == [
        "partition: 2 of 120 training examples belong to several clients",
        "partition: 106 of 120 training examples belong to no client",
    ]


def test_the_content_is_the_identity_and_the_place_is_not(tmp_path):
    first = of_file(write(tmp_path / "a.json", THREE))
    same = of_file(write(tmp_path / "b.json", {k: v[::-1] for k, v in THREE.items()}))
    other = of_file(write(tmp_path / "c.json", {**THREE, "1": [5, 4]}))
    assert first.hash == same.hash != other.hash
    assert first.replace(partition__path=other.partition.path).hash == other.hash
    assert first.replace(rounds=9).partition == first.partition
    recipes = [identity.recipe(c.model_dump(mode="json")) for c in (first, same, other)]
    assert recipes[0] == recipes[1] != recipes[2]
    stored = first.model_dump(mode="json")
    (tmp_path / "a.json").unlink()
    assert Config.from_stored(stored).hash == first.hash  # a stored config is not read anew


def test_a_run_keeps_its_partition_and_a_changed_file_is_noticed(tmp_path):
    file = write(tmp_path / "p.json", THREE)
    first = of_file(file)
    run = rounds.train(first, out=tmp_path / "run")
    parts = partition.load_parts(run.path / "partition.npz")
    assert [part.tolist() for part in parts] == [sorted(part) for part in THREE.values()]

    write(file, {**THREE, "0": [1, 2]})
    with pytest.raises(FldiagError, match=r"another config.*partition\.digest"):
        rounds.train(of_file(file, rounds=3), out=run.path, resume=True)
    with pytest.raises(FldiagError, match="has changed since the config was made"):
        rounds.train(first, out=tmp_path / "new")
    file.unlink()
    for name in ("forgetting", "personalise", "doctor"):
        assert len(fldiag.diagnose(run, name))
    file = write(tmp_path / "elsewhere.json", THREE)
    assert rounds.train(of_file(file, rounds=3), out=run.path, resume=True).done == 3


def test_the_folder_of_a_run_is_a_partition(tmp_path):
    dealt = config(total=4, per_round=2, data="digits", rounds=1).replace(
        partition__kind="dirichlet", partition__alpha=0.3
    )
    run = rounds.train(dealt, out=tmp_path / "run")  # its clients have some examples twice
    again = of_file(run.path, 4, data="digits")
    assert partition.same(Setup(again).parts, Setup(dealt).parts)
    partition.save(run.path / "partition.npz", [np.arange(4)] * 4)
    with pytest.raises(FldiagError, match="not the file this run wrote"):
        of_file(run.path, 4, data="digits")


def test_it_is_drawn(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "mine.json", {**THREE, "1": [0, 1, 7]})
    options = ["partition.kind=file", "partition.path=mine.json", "clients.total=3"]
    words = [word for option in options for word in ("--set", option)]
    result = typed("partition", "digits", *words, "--set", "clients.per_round=2", "--out", "out")
    assert "belong to several clients" in result.stderr
    assert (tmp_path / "out" / "partition-digits-file-mine.png").is_file()
