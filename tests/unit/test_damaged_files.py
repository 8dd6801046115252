"""Files that are damaged, edited or not what they seem: one clear error each, and memory for what is read, not for what is said."""

import contextlib
import json
import os
import random
import re
import resource
import shutil
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import invoke
from helpers import config
from safetensors.torch import save_file
from torch import nn

import fldiag
from fldiag import FldiagError, models
from fldiag.data import load as load_data
from fldiag.report.collect import collect
from fldiag.results.files import read_json
from fldiag.runs import schema
from fldiag.runs.history import History
from fldiag.runs.index import write_index
from fldiag.runs.run import Run
from fldiag.runs.tensor_files import flatten
from fldiag.training import rounds

LONG = "x" * 5000


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return rounds.train(
        config("scaffold", rounds=2, checkpoint={"clients": "sampled"}),
        out=tmp_path_factory.mktemp("run") / "r",
    )


@pytest.fixture
def copy(trained, tmp_path):
    return Path(shutil.copytree(trained.path, tmp_path / "copy"))


@pytest.fixture
def single(trained, tmp_path):
    """A checkpoint outside its run."""
    return Path(shutil.copy(trained.path / "rounds" / "0002.pt", tmp_path / "single.pt"))


def verb(*words):

    return invoke(*words)


# -- checksums


def weights_in(content):
    """Where in the archive the bytes of its largest member, the weights, lie."""
    whole = torch.load(content, weights_only=True)
    data = max((t.untyped_storage() for t in whole["model"].values()), key=lambda s: s.nbytes())
    raw = bytes(data.tolist())
    at = content.read_bytes().index(raw)
    return at, len(raw)


def flipped(content, place, bit):
    return content[:place] + bytes([content[place] ^ 1 << bit]) + content[place + 1 :]


def test_a_flipped_bit_in_a_weight_is_noticed(single):
    at, length = weights_in(single)
    good = single.read_bytes()
    for place in range(at, at + length, max(1, length // 42)):
        single.write_bytes(flipped(good, place, place % 8))
        with pytest.raises(FldiagError, match=r"checksum of its member .* does not match"):
            fldiag.load(single)
    single.write_bytes(good)
    assert fldiag.load(single).round == 2


def test_a_file_without_checksums_is_read(tmp_path):
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(nn.Linear(3, 2).state_dict(), tmp_path / "x.pt")
    finally:
        torch.serialization.set_crc32_options(before)
    assert len(fldiag.load(tmp_path / "x.pt").state) == 2


def test_the_partition_of_a_run_is_verified_by_a_question_about_one_of_its_checkpoints(copy):
    file = copy / "partition.npz"
    file.write_bytes(flipped(file.read_bytes(), 50, 0))
    with pytest.raises(FldiagError, match="sha256 differs"):
        fldiag.diagnose(
            fldiag.load(copy / "rounds" / "0002.pt"), "spectrum", k=1, slice="client:0/train"
        )


# -- what is no checkpoint


def itself():
    found = {}
    found["state_dict"] = found
    return found


ODD = {
    "float8": lambda: {"w": torch.ones(4).to(torch.float8_e4m3fn)},
    "meta": lambda: {"w": torch.ones(4, device="meta")},
    "sparse": lambda: {"w": torch.eye(3).to_sparse()},
    "sparse_csr": lambda: {"w": torch.eye(3).to_sparse_csr()},
    "quantized": lambda: {"w": torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8)},
    "complex": lambda: {"w": torch.ones(2, dtype=torch.complex64)},
    "itself": itself,
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", ODD)
def test_tensors_of_unusual_kinds(kind, tmp_path):
    torch.save(ODD[kind](), tmp_path / "x.pt")
    with pytest.raises(FldiagError, match=r"float8|meta|sparse|qint8|complex|holds itself"):
        fldiag.load(tmp_path / "x.pt")


def test_dicts_nested_too_deeply(tmp_path):
    """5,000 dicts in one another, put together opcode by opcode."""
    text = b"\x80\x02" + b"}X\x01\x00\x00\x00a" * 5000 + b"}" + b"s" * 5000 + b"."
    torch.save({"w": torch.ones(1)}, tmp_path / "x.pt")
    with zipfile.ZipFile(tmp_path / "x.pt") as old, zipfile.ZipFile(tmp_path / "y.pt", "w") as new:
        for member in old.infolist():
            new.writestr(
                member.filename, text if member.filename.endswith("data.pkl") else old.read(member)
            )
    with pytest.raises(FldiagError, match="nested more than 100 deep"):
        fldiag.load(tmp_path / "y.pt")


@pytest.mark.parametrize(
    "change",
    [
        {"schema": int("9" * 4000)},
        {"schema": -5},
        {"round": 10**30},
        {"classes": 10**12},
        {"shape": [10**9, 10**9]},
        {"shape": []},
        {"clients": [0, 1]},
    ],
)
def test_a_manifest_with_absurd_numbers(change, single):
    content = torch.load(single, weights_only=True)
    manifest = {**json.loads(content["manifest"]), **change}
    torch.save({**content, "manifest": json.dumps(manifest)}, single)
    with pytest.raises(FldiagError):
        fldiag.diagnose(fldiag.load(single), "spectrum", k=1)


def test_a_member_that_says_an_absurd_version(single, tmp_path):
    with zipfile.ZipFile(single) as old, zipfile.ZipFile(tmp_path / "y.pt", "w") as new:
        for member in old.infolist():
            new.writestr(
                member.filename,
                "9" * 40 if member.filename.endswith("/version") else old.read(member),
            )
    with pytest.raises(FldiagError, match="not a checkpoint that is read"):
        fldiag.load(tmp_path / "y.pt")


def strange_paths(folder):
    (folder / "self.pt").symlink_to(folder / "self.pt")
    (folder / "self").symlink_to(folder / "self")
    os.mkfifo(folder / "pipe.pt")
    (folder / "run.json").mkdir()
    (folder / "binary").write_bytes(bytes(range(256)))
    return [
        "/etc/passwd",
        "/dev/zero",
        "/dev/null",
        folder / "self.pt",
        folder / "self",
        folder / "pipe.pt",
        folder / LONG,
        f"{folder}/{LONG}.pt",
        folder,
        folder / "run.json",
        folder / "binary",
        "a\0b",
        "",
    ]


@pytest.mark.parametrize(
    "words",
    [
        "spectrum",
        "forgetting",
        "matching",
        "landscape",
        "report",
        "train",
        "partition",
        "personalise",
        "diff {}",
        "check {} --fail-if accuracy<baseline",
        "convert x.pt",
        "doctor",
        "prune",
    ],
)
@pytest.mark.slow
def test_every_path_is_one_clear_error(words, tmp_path):
    name, *more = words.split()
    for path in strange_paths(tmp_path):
        found = verb(name, path, *(path if word == "{}" else word for word in more))
        assert found.exit_code in (1, 2), (path, found.output)
        assert "unexpected" not in found.stderr and "Traceback" not in found.stderr, (
            path,
            found.stderr[-500:],
        )


# -- run.json


@pytest.mark.parametrize(
    "edit",
    [
        lambda i: i["files"].update({"rounds/abc.pt": "0" * 64}),
        lambda i: i["files"].update({"steps/x.parquet": "0"}),
        lambda i: i["files"].update({"../../etc/passwd": "0"}),
        lambda i: i["files"].update({"/etc/passwd": "0"}),
        lambda i: i["files"].update({"rounds/0001.pt": 3}),
        lambda i: i["state"].update(server=["x"]),
        lambda i: i["state"].update(ann="state/x.pt"),
        lambda i: i.update(metrics=3),
        lambda i: i.update(done=True),
        lambda i: i.update(done=10**30),
        lambda i: i.update(done=1.5),
        lambda i: i.update(schema="1"),
        lambda i: i.update(segments=3),
        lambda i: i.update(segments=[{"checkpoint": 3}]),
        lambda i: i["config"].update(checkpoint=[]),
        lambda i: i["config"]["checkpoint"].update(every=0),
        lambda i: i["config"]["clients"].update(total="x"),
    ],
)
def test_an_index_with_something_odd_in_it(edit, copy):
    index = json.loads((copy / "run.json").read_text())
    edit(index)
    write_index(copy, index)
    with pytest.raises(FldiagError, match=r"run\.json is not valid"):
        fldiag.load(copy)


@pytest.mark.parametrize(
    "text",
    ["[" * 100_000, '{"a":' * 100_000, '{"done": ' + "9" * 5000 + "}", "\0", '{"files": NaN}'],
)
def test_an_index_that_no_reader_likes(text, copy):
    (copy / "run.json").write_text(text)
    with pytest.raises(FldiagError, match=r"run\.json is not valid"):
        fldiag.load(copy)


def test_an_index_that_is_a_folder_a_pipe_or_a_device(copy):
    (copy / "run.json").unlink()
    (copy / "run.json").mkdir()
    with pytest.raises(FldiagError, match="it is not a file"):
        fldiag.load(copy)
    (copy / "run.json").rmdir()
    (copy / "run.json").symlink_to("/dev/zero")
    with pytest.raises(FldiagError, match="it is not a file"):
        fldiag.load(copy)


@pytest.mark.parametrize(
    "about",
    [
        "[" * 100_000,
        "{",
        '{"diagnostic": "forgetting", "options": {"every_round": {}}}',
        '{"diagnostic": ["x"], "checkpoints": {"\\u00b2": "x"}}',
        '{"checkpoints": 3}',
        '"x"',
    ],
)
def test_a_damaged_table_beside_a_run_does_not_kill_its_report(about, copy):
    (copy / "diagnostics").mkdir()
    (copy / "diagnostics" / "forgetting.json").write_text(about)
    (copy / "diagnostics" / "forgetting.csv").write_bytes(b"\xff\x00,\n")
    (copy / "diagnostics" / "loop.json").symlink_to(copy / "diagnostics" / "loop.json")
    (copy / "diagnostics" / "loop.csv").symlink_to(copy / "diagnostics" / "loop.csv")
    assert "metrics" in collect([copy]).members[0].tables


def everywhere(content, every=67):
    """The content with one bit flipped, for a dense sample of its bits; ``every`` is odd, so every bit of a byte has its turn."""
    for place in range(0, 8 * len(content), every):
        yield flipped(content, place // 8, place % 8)


def meaning(content):
    try:
        return json.loads(content.decode("utf-8"))
    except (ValueError, RecursionError):
        return None


def test_a_flipped_bit_in_run_json_is_believed_nowhere(copy):
    """Wherever it is, in the name of the digest too: what is read is what was written, or an error that names the file."""
    file = copy / "run.json"
    good, index = file.read_bytes(), Run.open(copy).index
    for at in (0, good.index(b'"digest"')):
        part = good[at : at + 90] if at else good
        for bad in everywhere(part, 5 if at else 67):
            file.write_bytes(good[:at] + bad + good[at + len(part) :])
            if meaning(file.read_bytes()) == meaning(good):
                assert Run.open(copy).index == index
                continue
            with pytest.raises(FldiagError, match=r"run\.json"):
                Run.open(copy)


@pytest.mark.parametrize(
    "edit",
    [
        lambda i: i["config"]["train"].update(lr=0.2),
        lambda i: i["config"].update(seed=7),
        lambda i: i["config"]["method"].update(name="fedavg"),
        lambda i: i.update(status="diverged"),
        lambda i: i["files"].pop("rounds/0002.pt"),
        lambda i: i.update(digest="0" * 64),
        lambda i: i.update(digest=None),
        lambda i: i.update(note="edited"),
    ],
)
@pytest.mark.parametrize(
    "words",
    ["spectrum", "forgetting", "report", "train --resume --out", "prune --dry-run", "diff {}"],
)
def test_an_edited_index_is_one_error_whose_remedy_works(edit, words, copy, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    index = json.loads((copy / "run.json").read_text("utf-8"))
    edit(index)
    (copy / "run.json").write_text(json.dumps(index), encoding="utf-8")
    name, *more = words.split()
    result = verb(
        name,
        *(["digits"] if "--resume" in more else []),
        *(copy if word == "{}" else word for word in more),
        copy,
    )
    assert (
        result.exit_code == 1 and "run.json is not the file that fldiag wrote" in result.stderr
    ), result.output
    key, digest = re.search(r'write "(\w+)": "(\w+)" into it', result.stderr).groups()
    (copy / "run.json").write_text(json.dumps({**index, key: digest}), encoding="utf-8")
    assert Run.open(copy).index == {k: v for k, v in index.items() if k != key}


def test_an_index_of_an_earlier_version_has_no_digest_and_is_read_with_a_word(copy, tmp_path):
    index = Run.open(copy).index
    (copy / "run.json").write_text(json.dumps(index), encoding="utf-8")
    assert Run.open(copy).index == index
    for words in (["spectrum", copy, "--k", "1", "--format", "png"], ["runs", tmp_path]):
        assert verb(*words).stderr.count("run.json has no digest") == 1, words
    assert sum("run.json has no digest" in note for note in collect([copy]).notes) == 1
    one = verb("spectrum", copy / "rounds" / "0002.pt", "--k", "1", "--format", "png")
    assert "digest" not in one.stderr
    Run.open(copy).commit()  # as training that goes on does
    again = verb("spectrum", copy, "--k", "1", "--format", "png")
    assert "digest" not in again.stderr and not collect([copy]).notes


def test_a_flipped_bit_in_the_json_beside_an_answer_is_believed_nowhere(copy):
    assert verb("drift", copy, "--format", "png").exit_code == 0
    (file,) = (copy / "diagnostics").glob("drift*.json")
    good, about = file.read_bytes(), read_json(file)
    assert (
        about["diagnostic"] == "drift"
        and "digest" not in about
        and "drift" in collect([copy]).members[0].tables
    )
    for bad in everywhere(good, 131):
        file.write_bytes(bad)
        if meaning(bad) == meaning(good):
            assert read_json(file) == about
        elif meaning(bad) is None:
            with pytest.raises(ValueError):
                read_json(file)
        else:
            with pytest.raises(
                FldiagError, match=r"drift.*\.json is not the file that fldiag wrote"
            ):
                read_json(file)
    content = json.loads(good)
    file.write_text(json.dumps({**content, "diagnostic": "forgetting"}), encoding="utf-8")
    page = collect([copy])
    assert (
        not page.members[0].tables.keys() - {"metrics"}
        and "is not the file that fldiag wrote" in page.notes[0]
    )
    del content["digest"]
    file.write_text(json.dumps(content), encoding="utf-8")  # as an earlier version wrote it
    assert "drift" in collect([copy]).members[0].tables


# -- files in each other's place


@pytest.fixture(scope="module")
def sibling(tmp_path_factory):
    """The same training with another seed."""
    chosen = config("scaffold", rounds=2, seed=1, checkpoint={"clients": "sampled"})
    return rounds.train(chosen, out=tmp_path_factory.mktemp("sibling") / "r")


def in_place_of(name, other):
    def change(run, sibling):
        shutil.copy(run / other if isinstance(other, str) else sibling / name, run / name)

    return change


def swapped(run, sibling):
    one, other = run / "rounds" / "0001.pt", run / "rounds" / "0002.pt"
    one.rename(run / "aside")
    other.rename(one)
    (run / "aside").rename(other)


MISPLACED = {
    "renamed": lambda run, sibling: (run / "rounds" / "0001.pt").replace(
        run / "rounds" / "0002.pt"
    ),
    "swapped": swapped,
    "copied": in_place_of("rounds/0002.pt", "rounds/0001.pt"),
    "of another run": in_place_of("rounds/0002.pt", None),
}


@pytest.mark.parametrize("kind", MISPLACED)
def test_a_checkpoint_in_the_place_of_another_answers_for_neither(kind, copy, sibling, tmp_path):
    MISPLACED[kind](copy, sibling.path)
    for words in (
        ["spectrum", copy, "--k", "1"],
        ["spectrum", copy / "rounds" / "0002.pt", "--k", "1"],
        ["landscape", copy],
    ):
        result = verb(*words)
        assert (
            result.exit_code == 1 and "0002.pt is not the file this run wrote" in result.stderr
        ), (words, result.output)
    history = (
        History.of(Run.open(copy), rounds=[1, 2]) if kind in ("copied", "of another run") else None
    )
    if history is not None:
        assert [stored.round for stored in history.each()] == [1]
        assert "0002.pt is not the file this run wrote" in str(history.notes)


def test_a_checkpoint_of_another_round_is_refused_though_run_json_lists_it(copy):
    """What an earlier version's run.json, which has no digest, may have been made to say."""
    index = Run.open(copy).index
    shutil.copy(copy / "rounds" / "0001.pt", copy / "rounds" / "0002.pt")
    index["files"]["rounds/0002.pt"] = index["files"]["rounds/0001.pt"]
    (copy / "run.json").write_text(json.dumps(index), encoding="utf-8")
    for words in (
        ["spectrum", copy, "--k", "1"],
        ["spectrum", copy / "rounds" / "0002.pt", "--k", "1"],
    ):
        result = verb(*words)
        assert result.exit_code == 1 and "0002.pt is the checkpoint of round 1" in result.stderr, (
            words,
            result.output,
        )


@pytest.mark.parametrize("name", ["state", "metrics"])
def test_state_and_tables_of_another_run_are_refused(name, copy, sibling):
    index = Run.open(copy).index
    names = [f for f in index["files"] if f.startswith(name)]
    assert names
    for file in names:
        shutil.copy(sibling.path / file, copy / file)
    with pytest.raises(FldiagError, match="is not the file this run wrote"):
        if name == "metrics":
            _ = Run.open(copy).metrics
        rounds.train(
            config("scaffold", rounds=3, checkpoint={"clients": "sampled"}), out=copy, resume=True
        )


# -- memory


@pytest.mark.slow
def test_a_deflated_member_is_refused_before_it_is_unpacked(tmp_path):
    with (
        zipfile.ZipFile(tmp_path / "x.pt", "w", zipfile.ZIP_DEFLATED) as new,
        new.open("x/data/0", "w", force_zip64=True) as member,
    ):
        for _ in range(300):
            member.write(bytes(2**20))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(FldiagError, match=r"claims to hold 315 MB and has 0\.3 MB"):
        fldiag.load(tmp_path / "x.pt")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000


def test_a_tensor_of_stride_0_is_refused(tmp_path):
    torch.save({"w": torch.ones(1).expand(10**6, 10**6)}, tmp_path / "x.pt")
    with pytest.raises(FldiagError, match="claims to hold 4,000,000 MB"):
        fldiag.load(tmp_path / "x.pt")


@pytest.mark.parametrize("hidden", [[10**6, 10**6], [10**12, 10**12]])
def test_a_model_larger_than_the_memory_is_refused(hidden):
    with pytest.raises(FldiagError, match=r"this machine has .* GB of memory"):
        models.build("mlp", (4,), 3, {"hidden": hidden})
    with pytest.raises(FldiagError, match=r"this machine has .* GB of memory"):
        rounds.train(config(model_options={"hidden": hidden}), out="never")
    assert not Path("never").exists()


def test_a_model_larger_than_the_weights_beside_its_description_is_refused(single):
    content = torch.load(single, weights_only=True)
    manifest = json.loads(content["manifest"])
    manifest["config"]["model"]["hidden"] = [3000, 3000]
    torch.save({**content, "manifest": json.dumps(manifest)}, single)
    with pytest.raises(
        FldiagError, match="has 9,027,003 parameters, and the file holds 93 numbers"
    ):
        fldiag.diagnose(fldiag.load(single), "spectrum", k=1)


def test_a_label_that_is_no_class(tmp_path):
    arrays = {
        f"{split}_{what}": np.zeros(
            (4, 2) if what == "images" else 4, np.float32 if what == "images" else np.int64
        )
        for split in ("train", "test")
        for what in ("images", "labels")
    }
    arrays["train_labels"][2] = 10**9
    np.savez(tmp_path / "x.npz", **arrays)
    with pytest.raises(FldiagError, match="label 1,000,000,000 among 8 examples"):
        load_data(f"npz:{tmp_path / 'x.npz'}")


# -- many


def mutated(content, chance):
    """A file with something wrong: bits flipped, a piece removed, doubled, zeroed, or put elsewhere."""
    found, kind = bytearray(content), chance.randrange(6)
    a, length = chance.randrange(len(found)), chance.randrange(1, 200)
    if kind == 0:
        found[a] ^= 1 << chance.randrange(8)
    elif kind == 1:
        for _ in range(chance.randrange(2, 30)):
            found[chance.randrange(len(found))] = chance.randrange(256)
    elif kind == 2:
        del found[a : a + length]
    elif kind == 3:
        found[a:a] = found[a : a + length]
    elif kind == 4:
        found[a : a + length] = bytes(len(found[a : a + length]))
    else:
        del found[a:]
    return bytes(found)


def same(state, good):
    return state.keys() == good.keys() and all(torch.equal(state[k], good[k]) for k in good)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["pt", "legacy", "safetensors", "foreign"])
def test_mutated_checkpoints(form, single, tmp_path):
    """600 of them: refused in a sentence, or (with a checksum) the very weights; never anything else."""
    good = fldiag.load(single).state
    file = tmp_path / ("x.safetensors" if form == "safetensors" else "x.pt")
    if form == "safetensors":
        tensors, metadata = flatten(torch.load(single, weights_only=True))
        save_file(tensors, file, metadata)
    elif form == "foreign":
        torch.save({"epoch": 3, "state_dict": good}, file)
    else:
        torch.save(
            torch.load(single, weights_only=True), file, _use_new_zipfile_serialization=form == "pt"
        )
    content, chance, refused = file.read_bytes(), random.Random(form), 0
    for _ in range(150):
        file.write_bytes(mutated(content, chance))
        try:
            found = schema.read(file)
        except FldiagError:
            refused += 1
            continue
        if form in ("pt", "foreign"):
            assert same(found.state, good)
    assert refused > 20


@pytest.mark.slow
def test_mutated_runs(copy):
    """500: whichever file of a run is damaged, reading it all is right or one error."""
    good = Run.open(copy)
    weights, metrics = good.checkpoint().state, good.metrics
    names, chance = sorted([*good.index["files"], "run.json"]), random.Random(0)
    for i in range(500):
        file = copy / names[i % len(names)] if i % 2 else copy / "run.json"
        content = file.read_bytes()
        file.write_bytes(mutated(content, chance))
        try:
            run = fldiag.load(copy)
            assert same(run.checkpoint(2).state, weights) and run.metrics.equals(metrics)
            (
                run.server_state,
                dict(run.states),
                run.origin,
                run.config,
                run.verified("partition.npz"),
            )
        except FldiagError:
            pass
        with contextlib.suppress(FldiagError):
            collect([copy])
        file.write_bytes(content)
