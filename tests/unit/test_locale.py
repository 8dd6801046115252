"""Text is UTF-8 whatever the locale: in files, whose encoding every call names, and on a terminal that knows ASCII only."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
from commands import invoke
from helpers import config

import fldiag
from fldiag.training import train

ROOT = Path(__file__).parents[2]
#: Whose ``open`` opens no text.
OTHERS = {"os", "Image", "Run", "browser", "webbrowser", "zipfile", "tarfile"}
#: Functions that open a text -> which of their positional arguments is the mode, and which the encoding.
OPENERS = {
    "open": (1, 3),
    "fdopen": (1, 3),
    "TextIOWrapper": (None, 1),
    "NamedTemporaryFile": (0, None),
    "TemporaryFile": (0, None),
}
#: Methods of paths likewise. They read or write text by their very name, but for ``open``.
METHODS = {"open": (0, 2), "read_text": (None, 0), "write_text": (None, 1)}


def unspoken(tree):
    """The lines of calls that read or write a text, and leave it to the locale in what encoding."""
    for call in ast.walk(tree):
        if not isinstance(call, ast.Call):
            continue
        keywords = {k.arg: k.value for k in call.keywords}
        if "encoding" in keywords:
            continue
        if any(
            getattr(keywords.get(name), "value", False) for name in ("text", "universal_newlines")
        ):
            yield call.lineno
        method = isinstance(call.func, ast.Attribute)
        name = call.func.attr if method else getattr(call.func, "id", "")
        owner = getattr(call.func.value, "id", "") if method else ""
        if name == "open" and owner in OTHERS:
            continue
        functions = (
            METHODS if method and owner not in ("io", "os", "tempfile", "codecs") else OPENERS
        )
        if name not in functions:
            continue
        mode, encoding = functions[name]
        if encoding is not None and len(call.args) > encoding:
            continue
        how = keywords.get("mode") or (
            call.args[mode] if mode is not None and len(call.args) > mode else None
        )
        binary = (
            "b" in str(how.value)
            if isinstance(how, ast.Constant)
            else name.endswith("TemporaryFile")
        )
        if not binary:
            yield call.lineno


@pytest.mark.parametrize(
    "text",
    [
        "open(p)",
        "open(p, 'w')",
        "open(p, mode='a')",
        "io.open(p)",
        "p.open()",
        "p.open('w')",
        "p.read_text()",
        "(p / 'x').write_text(text)",
        "os.fdopen(h, 'w')",
        "run(words, text=True)",
        "subprocess.Popen(words, universal_newlines=True)",
        "io.TextIOWrapper(stream)",
        "tempfile.NamedTemporaryFile('w')",
        "p.read_text(errors='replace')",
    ],
)
def test_what_the_next_test_looks_for(text):
    assert list(unspoken(ast.parse(text))) == [1]


@pytest.mark.parametrize(
    "text",
    [
        "open(p, 'rb')",
        "open(p, 'w', encoding='utf-8')",
        "p.open('rb')",
        "p.read_text('utf-8')",
        "p.write_text(text, 'utf-8')",
        "os.open(p, os.O_RDONLY)",
        "Run.open(p)",
        "run(words, text=False)",
        "files.write_text(p, text)",
        "tempfile.TemporaryFile()",
        "open(p, mode='xb')",
    ],
)
def test_what_it_does_not_mind(text):
    assert not list(unspoken(ast.parse(text)))


def test_every_text_file_is_opened_in_an_encoding_that_is_named():
    lines = [
        f"{file.relative_to(ROOT)}:{line}"
        for folder in ("fldiag", "analyses", "docs")
        for file in sorted((ROOT / folder).rglob("*.py"))
        for line in unspoken(ast.parse(file.read_text("utf-8")))
    ]
    assert not lines


# -- a terminal that knows ASCII only


def ascii_only(*words, cwd, **variables):
    """A verb where the locale, the terminal and the names of files know ASCII only."""
    environment = {
        k: v for k, v in os.environ.items() if k not in ("PYTHONIOENCODING", "LANG", "LANGUAGE")
    }
    return subprocess.run(
        [sys.executable, "-m", "fldiag.cli", *map(str, words)],
        cwd=cwd,
        capture_output=True,
        env={**environment, "PYTHONPATH": str(ROOT), "LC_ALL": "C", "PYTHONUTF8": "0", **variables},
    )


@pytest.mark.parametrize(
    "words",
    [
        "--help",
        *(
            pytest.param(w, marks=pytest.mark.slow)
            for w in ("--version", "list", "explain fedsol", "spectrum --help")
        ),
    ],
)
def test_verbs_on_a_terminal_that_knows_ascii_only(words, tmp_path):
    for variables in ({}, {"PYTHONIOENCODING": "ascii"}):
        result = ascii_only(*words.split(), cwd=tmp_path, **variables)
        assert (
            result.returncode == 0
            and result.stdout.decode("ascii")
            and b"Error" not in result.stderr
        ), result.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        "train digits --dry-run",
        "spectrum fedavg-digits.pt --k 2",
        "train small.toml --out run",
        "partition digits",
    ],
)
def test_verbs_that_compute_on_a_terminal_that_knows_ascii_only(words, tmp_path):
    (tmp_path / "fedavg-digits.pt").symlink_to(
        ROOT / "checkpoints" / "example" / "fedavg-digits.pt"
    )
    text = '# κλεινός\nrounds = 1\n[model]\nname = "mlp"\n[train]\nepochs = 1\n'
    (tmp_path / "small.toml").write_text(text, encoding="utf-8")
    result = ascii_only(*words.split(), cwd=tmp_path)
    assert (
        result.returncode == 0
        and result.stdout.decode("ascii")
        and b"unexpected" not in result.stderr
    ), result.stderr


# -- names of files


@pytest.fixture(scope="module")
def umlaut(tmp_path_factory):
    folder = tmp_path_factory.mktemp("names")
    return train.train(
        config(rounds=2, checkpoint={"clients": "sampled"}), out=folder / "läufe" / "ß λ"
    )


@pytest.mark.slow
def test_a_run_in_a_folder_of_any_letters(umlaut, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert (
        set(umlaut.metrics["run"]) == {"ß λ"} and fldiag.load(umlaut.path).checkpoint().round == 2
    )
    one = umlaut.path / "rounds" / "0002.safetensors"
    for words in (
        ["spectrum", umlaut.path, "--k", "1"],
        ["spectrum", one, "--k", "1", "--out", "größe"],
        ["drift", umlaut.path],
        ["report", umlaut.path, "--out", "seite é"],
        ["runs", umlaut.path.parent],
    ):
        result = invoke(*words)
        assert result.exit_code == 0, (words, result.output)
    resumed = train.train(
        config(rounds=3, checkpoint={"clients": "sampled"}), out=umlaut.path, resume=True
    )
    assert resumed.done == 3


@pytest.mark.slow
def test_where_names_of_files_are_ascii_the_remedy_works(tmp_path):
    words = ["runs", "läufe"]
    (tmp_path / "läufe").mkdir()
    train.train(config(rounds=1), out=tmp_path / "läufe" / "ß")
    for verb in (
        ["drift", "läufe/ß"],
        ["train", "digits", "--out", "läufe/ü"],
    ):
        result = ascii_only(*verb, cwd=tmp_path)
        assert result.returncode == 2 and b"cannot read this name" in result.stderr, result.stderr
        assert b"set PYTHONUTF8=1" in result.stderr and b"unexpected" not in result.stderr
    assert "ß" in ascii_only(*words, cwd=tmp_path, PYTHONUTF8="1").stdout.decode("utf-8")
