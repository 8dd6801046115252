"""The cache: what it gives back is what was put, or nothing."""

import json
import shutil

import helpers
import pandas as pd
import pytest
import torch

import fldiag
from fldiag.diagnosis import places
from fldiag.diagnosis.measure import identity
from fldiag.errors import FldiagError
from fldiag.results.cache import Cache
from fldiag.results.provenance import digest
from fldiag.results.table import table
from fldiag.training import train

KEY = "0123456789abcdef0123456789abcdef"


@pytest.fixture
def frame():
    return table(
        [
            {
                "metric": "eigenvalue",
                "index": i,
                "value": 8.54 / (i + 1),
                "converged": True,
                "scope": "global",
            }
            for i in range(5)
        ],
        run="r",
        seed=0,
        round=3,
    )


@pytest.fixture
def cache(tmp_path, frame):
    made = Cache(tmp_path / "cache")
    made.put("spectrum", KEY, frame, {"seed": 0})
    return made


def test_what_was_put_comes_back(cache, frame):
    found = cache.get("spectrum", KEY)
    pd.testing.assert_frame_equal(found, frame)
    assert [f.name for f in sorted(cache.folder.iterdir())] == [
        "spectrum-0123456789abcdef.json",
        "spectrum-0123456789abcdef.parquet",
    ]
    assert json.loads(cache.path("spectrum", KEY, ".json").read_text())["about"] == {"seed": 0}


def test_another_name_or_key_is_another_entry(cache):
    assert cache.get("density", KEY) is None and cache.get("spectrum", KEY[::-1]) is None
    told = []
    assert (
        cache.get("spectrum", KEY[:16] + "0" * 16, told.append) is None
    )  # the same file, another key
    for ending in (".parquet", ".json"):
        shutil.copy(cache.path("spectrum", KEY, ending), cache.path("density", KEY, ending))
    assert cache.get("density", KEY, told.append) is None and len(told) == 2


def flips(size, step=1):
    """Every byte, or every so many of them, and the first and last sixteen: header, values, footer."""
    return sorted({*range(0, size, step), *range(min(16, size)), *range(max(0, size - 16), size)})


@pytest.mark.parametrize("ending", [".parquet", ".json"])
def test_a_flipped_bit_is_never_a_number(cache, frame, ending):
    file = cache.path("spectrum", KEY, ending)
    good = file.read_bytes()
    for place in flips(len(good), 1 if ending == ".json" else 7):
        for mask in (0x01, 0x80):
            bad = bytearray(good)
            bad[place] ^= mask
            file.write_bytes(bytes(bad))
            told = []
            found = cache.get("spectrum", KEY, told.append)
            if found is None:
                assert told == [
                    "cache entry spectrum-0123456789abcdef was damaged and is computed again"
                ]
            else:  # white space between the words of the json
                assert (
                    ending == ".json"
                    and found.equals(frame)
                    and json.loads(bad) == json.loads(good)
                )


@pytest.mark.parametrize("keep", [0, 1, 4, 100, -8, -1])
@pytest.mark.parametrize("ending", [".parquet", ".json"])
def test_a_truncated_entry_is_computed_again(cache, frame, ending, keep):
    file = cache.path("spectrum", KEY, ending)
    file.write_bytes(file.read_bytes()[:keep])
    told = []
    assert cache.get("spectrum", KEY, told.append) is None and len(told) == 1
    cache.put("spectrum", KEY, frame)
    assert cache.get("spectrum", KEY).equals(frame)


def test_json_that_is_valid_and_of_another_kind(cache):
    for text in ("[]", "3", "null", "{}", '{"digest": 3}', "[" * 10000):
        cache.path("spectrum", KEY, ".json").write_text(text)
        assert cache.get("spectrum", KEY) is None


def test_a_forged_table_with_its_own_checksum_needs_the_digest_too(cache, frame):
    other = Cache(cache.folder.parent / "other")
    other.put("spectrum", KEY, frame.assign(value=frame["value"] * 2))
    shutil.copy(other.path("spectrum", KEY), cache.path("spectrum", KEY))
    note = cache.path("spectrum", KEY, ".json")
    said = json.loads(note.read_text())
    said["sha256"] = json.loads(other.path("spectrum", KEY, ".json").read_text())["sha256"]
    note.write_text(json.dumps(said))
    assert cache.get("spectrum", KEY) is None


def test_a_table_without_its_json(cache, frame):
    cache.path("spectrum", KEY, ".json").unlink()
    told = []
    assert cache.get("spectrum", KEY, told.append) is None
    assert told == ["cache entry spectrum-0123456789abcdef was damaged and is computed again"]


def test_a_folder_that_cannot_be_made(tmp_path, frame):
    (tmp_path / "file").touch()
    cache = Cache(tmp_path / "file" / "cache")
    assert cache.get("spectrum", KEY) is None
    with pytest.raises(FldiagError, match="cannot write"):
        cache.put("spectrum", KEY, frame)


def test_an_answer_that_cannot_be_kept_is_still_an_answer(tmp_path):
    (tmp_path / "file").touch()
    told, net = [], torch.nn.Linear(2, 3)
    problem = fldiag.Problem(
        net, torch.nn.functional.cross_entropy, (torch.eye(2), torch.tensor([0, 2]))
    )
    found = fldiag.diagnose(
        problem, "spectrum", cache=tmp_path / "file" / "cache", tell=told.append
    )
    assert len(found) and any("not kept for later: cannot write" in text for text in told)
    assert (
        places.cache(tmp_path / "file" / "x") is None
        and places.cache(tmp_path / "x") == tmp_path / "x" / "cache"
    )


def test_a_file_that_is_damaged_or_repaired_gives_another_answer(tmp_path):
    config = helpers.config("fedavg", rounds=2, total=4, per_round=2, stack="off")
    run = train.train(config, out=tmp_path / "run")
    file = run.path / "rounds/0001.safetensors"
    content = file.read_bytes()

    def intact():
        table = fldiag.diagnose(fldiag.load(run.path), "doctor", cache=tmp_path / "cache")
        return list(table.loc[table["metric"] == "finite", "severity"])

    assert intact() == ["healthy"]
    file.write_bytes(content[: len(content) // 2] + bytes(1) + content[len(content) // 2 + 1 :])
    assert intact() == ["warning"]
    file.write_bytes(content)
    assert intact() == ["healthy"]


def test_data_that_a_run_was_opened_with_tell_answers_apart(tmp_path):
    train.train(helpers.config("fedavg", rounds=1, total=4, per_round=2), out=tmp_path)
    identities = [
        digest(identity([fldiag.load(tmp_path, data=data)]))
        for data in (None, None, "digits", "digits", "iris")
    ]
    assert identities[0] == identities[1] and identities[2] == identities[3]
    assert len(set(identities)) == 3
