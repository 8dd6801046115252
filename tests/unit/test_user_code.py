"""Code that a file names is imported only with consent to that very name, whichever key or verb it comes through."""

import json
import pickle
import re
import shlex
import shutil
import sys

import pytest
import torch
from commands import invoke
from helpers import config

import fldiag
from fldiag import Config, FldiagError, known, models, sections, user_code
from fldiag.runs.run import Run
from fldiag.training import rounds
from fldiag.training.setup import Setup

MINE = """
    import torch
    from torch import nn
    from fldiag import data
    def net(shape, classes): return nn.Linear(shape[0], classes)
    def flowers():
        iris = data.load("iris")
        return iris.train_x, iris.train_y, iris.test_x, iris.test_y
    def public(): return torch.ones(9, 4), torch.zeros(9).long(), torch.zeros(2, 4), torch.zeros(2).long()
"""
EVIL = "open('marker', 'w').close()\ndef go(*words, **options): raise RuntimeError('called')\n"
DIAGNOSTICS = known.built_in()["diagnostics"]
TRAINERS = ["personalise"]
#: Key of a config -> how a file comes to name code there.
KEYS = {
    "data.name": lambda c: c["data"].update(name="evilmod:go"),
    "data.public": lambda c: c["data"].update(public="evilmod:go"),
    "model.name": lambda c: c.update(model={"name": "evilmod:go"}),
    "method.name": lambda c: c.update(method={"name": "evilmod:go"}),
    "model.head": lambda c: c.update(model={"name": "mine:net", "head": ["evilmod:go"]}),
}


def write(folder, text, name):
    (folder / name).write_text("\n".join(line.removeprefix("    ") for line in text.splitlines()))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run whose model, data and public data are a user's code, and one of none."""
    folder = tmp_path_factory.mktemp("code")
    write(folder, MINE, "mine.py")
    (folder / "evilmod.py").write_text(EVIL)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        rounds.train(
            config(model="mine:net", model_options={}, data="mine:flowers", public="mine:public"),
            out=folder / "own",
        )
        rounds.train(config(), out=folder / "plain")
    sys.modules.pop("mine", None)
    return folder


@pytest.fixture
def folder(trained, monkeypatch):
    monkeypatch.chdir(trained)
    yield trained
    (trained / "marker").unlink(missing_ok=True)
    for name in ("mine", "evilmod"):
        sys.modules.pop(name, None)


def poisoned(source, target, edit):
    """A copy of a run in which index and manifests say something else, and all checksums hold."""
    run = Run.open(source)
    made = Run(
        target, {**run.index, "config": json.loads(json.dumps(run.index["config"])), "files": {}}
    )
    edit(made.index["config"])
    for name in run.index["files"]:
        if name.startswith("rounds/"):
            content = torch.load(source / name, weights_only=True)
            manifest = json.loads(content.pop("manifest"))
            edit(manifest["config"])
            manifest.pop("schema")
            made.put_checkpoint(manifest["round"], manifest, content.pop("model"), **content)
        else:
            made.put(name, lambda f, name=name: f.write((source / name).read_bytes()))
    made.commit()
    return made.path


def run_verb(*words):
    result = invoke(*words)
    assert "unexpected" not in result.output, result.output
    return result


def every_verb(run, tmp_path):
    """All verbs that open a run or a checkpoint, with both."""
    file = run / "rounds" / "0002.pt"
    for name, item in DIAGNOSTICS.items():
        yield [name, run]
        if item["on"] in ("problem", "checkpoints"):
            yield [name, file]
    for target in (run, file):
        yield ["check", target, "--fail-if", "loss > 9"]
        yield ["check", target, "--baseline", target, "--fail-if", "lambda_1 > baseline"]
        yield ["diff", target, target, "--number", "accuracy"]
    yield from (
        ["partition", run],
        ["report", run, "--compute", "spectrum,drift"],
        ["runs", run],
        ["prune", run, "--dry-run"],
    )


def test_no_verb_imports_what_a_file_names(folder, tmp_path):
    def everywhere(c):
        for key in ("model.head", "model.name", "method.name", "data.name", "data.public"):
            KEYS[key](c)

    run, refused = poisoned(folder / "plain", tmp_path / "run", everywhere), 0
    for words in every_verb(run, tmp_path):
        result = run_verb(
            *words,
            *(["--out", tmp_path / "out"] if words[0] not in ("runs", "prune") else []),
        )
        refused += "--allow-code evilmod:go" in result.output
        assert not (folder / "marker").exists() and "evilmod" not in sys.modules, words
    assert refused > len(DIAGNOSTICS)


@pytest.mark.parametrize("key", KEYS)
def test_every_key_is_refused_where_it_would_be_imported(folder, tmp_path, key):
    run = poisoned(folder / "plain", tmp_path / "run", KEYS[key])
    verbs = [
        *TRAINERS,
        *(["spectrum", "forgetting"] if key not in ("data.public", "method.name") else []),
        *(["partition"] if key == "data.name" else []),
    ]
    for verb in verbs:
        result = run_verb(verb, run, "--out", tmp_path)
        assert (
            result.exit_code == 1
            and f"{key}" in result.stderr
            and "--allow-code evilmod:go" in result.stderr
        ), result.output
        other = run_verb(
            verb, run, "--out", tmp_path, "--allow-code", "mine:net", "--allow-code", "other:go"
        )
        assert other.exit_code == 1 and "--allow-code evilmod:go" in other.stderr, other.output
    for opened in (fldiag.load(run), fldiag.load(run, allow_code=["mine:net", "evilmod:other"])):
        with pytest.raises(FldiagError, match="evilmod:go"):
            fldiag.train(opened.config, out=tmp_path / "new")
        with pytest.raises(FldiagError, match="evilmod:go"):
            fldiag.sweep(
                pickle.loads(pickle.dumps(opened.config)), {"seed": [0, 1]}, out=tmp_path / "new"
            )
    assert not (folder / "marker").exists() and not (tmp_path / "new").exists()


def remedy(result):
    """The words that an error says to add."""
    assert result.exit_code != 0
    return shlex.split(re.search(r"(--allow-code [\w.:]+ ?)+", result.output)[0])


@pytest.mark.parametrize(
    "words",
    [
        ["spectrum", "own", "--k", 1],
        ["spectrum", "own/rounds/0002.pt", "--k", 1],
        ["forgetting", "own"],
        ["personalise", "own", "--epochs", "0"],
        ["partition", "own"],
        ["check", "own", "--fail-if", "lambda_1 > 1e9"],
    ],
    ids=lambda w: "-".join(map(str, w[:2])),
)
def test_the_remedy_works_as_it_is_written(folder, tmp_path, words):
    first = run_verb(*words, "--out", tmp_path)
    assert run_verb(*words, "--out", tmp_path, *remedy(first)).exit_code == 0


def test_code_is_named_with_the_question_as_before(folder, tmp_path):
    assert (
        run_verb(
            "spectrum",
            "own",
            "--k",
            1,
            "--model",
            "mine:net",
            "--data",
            "mine:flowers",
            "--out",
            tmp_path,
        ).exit_code
        == 0
    )
    result = run_verb(
        "personalise",
        "own",
        "--epochs",
        0,
        "--model",
        "mine:net",
        "--data",
        "mine:flowers",
        "--out",
        tmp_path,
    )
    assert remedy(result) == ["--allow-code", "mine:public"]
    assert "mine:net" not in result.output and "mine:flowers" not in result.output


def test_python_takes_the_same_consent(folder):
    names = ["mine:net", "mine:flowers", "mine:public"]
    with pytest.raises(FldiagError, match="mine:flowers"):
        fldiag.diagnose("own", "spectrum", k=1, allow_code="mine:net")
    direct = fldiag.diagnose("own", "spectrum", k=1, allow_code=names)
    assert direct.equals(fldiag.diagnose(fldiag.load("own", allow_code=names), "spectrum", k=1))
    assert fldiag.check("own", fail_if=["lambda_1 > 1e9"], allow_code=names).verdict == "pass"
    assert fldiag.load("own").allow(names).config.allowed_code == set(names)
    with pytest.raises(FldiagError, match=r"is not pkg\.mod:name"):
        fldiag.load("own", allow_code="mine")


def test_a_config_keeps_what_may_be_imported_for_it(folder, tmp_path):
    run = fldiag.load("own")
    assert run.config.allowed_code == set() and config(data="mine:flowers").allowed_code == {
        "mine:flowers"
    }
    typed = run.config.replace(data__name="mine:flowers", rounds=3)
    assert typed.allowed_code == {"mine:flowers"} == pickle.loads(pickle.dumps(typed)).allowed_code
    with pytest.raises(
        FldiagError, match=r"data\.public = 'mine:public' and model\.name = 'mine:net'"
    ):
        Setup(typed)
    more = fldiag.train(
        run.config.replace(rounds=3),
        out=tmp_path / "more",
        allow_code=["mine:net", "mine:flowers", "mine:public"],
    )
    assert more.done == 3
    assert fldiag.load("plain").config == config()


@pytest.mark.slow
@pytest.mark.parametrize(
    "words", [["personalise", "own", "--epochs", "0,1"], ["forgetting", "own"]], ids=lambda w: w[0]
)
def test_worker_processes_have_the_consent(folder, tmp_path, words):
    words = [*words, "--executor", "processes:2", "--out", tmp_path]
    assert run_verb(*words, *remedy(run_verb(*words))).exit_code == 0


def test_a_later_key_is_covered_without_being_named(tmp_path):
    class Later(sections.DataSection):
        sampler: str | None = None

    class LaterConfig(Config):
        data: Later = Later()

    tree = config().model_dump(mode="json")
    tree["data"]["sampler"] = "evilmod:go"
    stored = LaterConfig.from_stored(tree)
    assert stored.code == {"data.sampler": "evilmod:go"} and stored.allowed_code == set()
    with pytest.raises(FldiagError, match=r"data\.sampler = 'evilmod:go'.*--allow-code evilmod:go"):
        Setup(stored)


def test_what_imports_refuses_by_itself(folder):
    """A caller that forgets to ask runs nothing."""
    for call in (
        lambda: fldiag.data.load("evilmod:go"),
        lambda: models.build("evilmod:go", (4,), 3),
        lambda: user_code.load("evilmod:go", "loss", {"mine:net"}),
        lambda: user_code.load("evilmod:go", "loss", ()),
    ):
        with pytest.raises(FldiagError, match="does not import it"):
            call()
    assert not (folder / "marker").exists()


@pytest.fixture
def beside(folder, tmp_path, monkeypatch):
    """The current folder as of a console script, with what may lie beside a run that was sent: a package with an entry point."""
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p not in ("", str(folder))])
    monkeypatch.setattr(user_code, "_folders", set())
    about = folder / "evil-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: evil\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(
        "[fldiag.models]\nsneaky = evilmod:go\n[fldiag.datasets]\nsneaky = evilmod:go\n"
    )
    yield folder
    shutil.rmtree(about)


@pytest.mark.parametrize("key", ["model", "data"])
def test_a_package_beside_the_run_registers_nothing(beside, tmp_path, key):
    run = poisoned(
        beside / "plain",
        tmp_path / "run",
        lambda c: c.update({key: {**(c[key] if key == "data" else {}), "name": "sneaky"}}),
    )
    for words in (
        ["spectrum", run],
        ["spectrum", run / "rounds" / "0002.pt"],
        ["forgetting", run],
        ["personalise", run],
        ["check", run, "--fail-if", "lambda_1 > 9"],
        ["partition", run],
    ):
        result = run_verb(*words, "--out", tmp_path / "out")
        assert not (beside / "marker").exists() and "evilmod" not in sys.modules, (
            words,
            result.output,
        )


def test_the_current_folder_is_searched_once_its_code_was_allowed(beside):
    before = list(sys.path)
    with user_code.importable():
        assert sys.path == before
        with pytest.raises(FldiagError):
            user_code.load("evilmod:go", "model", ())
        assert sys.path == before
        user_code.load("mine:net", "model", {"mine:net"})
        assert sys.path == [
            *before,
            str(beside),
        ]  # the code may import more of its own when it is called
        with user_code.importable():
            assert sys.path == [*before, str(beside)]
        assert sys.path == [*before, str(beside)]
    assert sys.path == before
    with user_code.importable():
        assert sys.path == [*before, str(beside)]
    assert sys.path == before


@pytest.mark.parametrize(
    "name",
    [
        "digits",
        "npz:mine",
        "csv:texts",
        "holdout:20",
        "C:\\data",
        "a b:c",
        "evil.py:",
        ":go",
        "",
        None,
        3,
        ["a:b"],
    ],
)
def test_other_values_are_no_code(name):
    assert not user_code.is_code(name)
