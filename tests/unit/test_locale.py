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
#: Functions, and methods of paths, that open, read or write a text -> which arguments are the mode and the encoding.
OPENERS = {
    "open": (1, 3),
    "fdopen": (1, 3),
    "TextIOWrapper": (None, 1),
    "NamedTemporaryFile": (0, None),
    "TemporaryFile": (0, None),
    ".open": (0, 2),
    ".read_text": (None, 0),
    ".write_text": (None, 1),
}


def constant(node):
    return node.value if isinstance(node, ast.Constant) else ""


def unspoken(tree):
    """The lines of calls that read or write a text, and leave it to the locale in what encoding."""
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        owner, _, name = ast.unparse(call.func).rpartition(".")
        options = {k.arg: constant(k.value) for k in call.keywords}
        if "encoding" in options or (name == "open" and owner in OTHERS):
            continue
        is_method = owner not in ("", "io", "os", "tempfile", "codecs")
        mode, encoding = OPENERS.get("." * is_method + name, (None, 0))
        values = dict(enumerate(map(constant, call.args)))
        how = options.get("mode") or values.get(mode, "b" * name.endswith("TemporaryFile"))
        is_opener = (
            "." * is_method + name in OPENERS and encoding not in values and "b" not in str(how)
        )
        if is_opener or options.get("text") or options.get("universal_newlines"):
            yield call.lineno


UNSPOKEN = (
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
)
SPOKEN = (
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
)


@pytest.mark.parametrize("text", UNSPOKEN + SPOKEN)
def test_what_the_next_test_looks_for(text):
    assert list(unspoken(ast.parse(text))) == [1] * (text in UNSPOKEN)


def test_every_text_file_is_opened_in_an_encoding_that_is_named():
    lines = [
        f"{file.relative_to(ROOT)}:{line}"
        for folder in ("fldiag", "analyses", "docs")
        for file in sorted((ROOT / folder).rglob("*.py"))
        for line in unspoken(ast.parse(file.read_text("utf-8")))
    ]
    assert not lines


# -- a terminal that knows ASCII only


def ascii_only(words, cwd, **variables):
    """A verb where the locale, the terminal and the names of files know ASCII only."""
    others = {"PYTHONIOENCODING", "LANG", "LANGUAGE"}
    environment = {name: os.environ[name] for name in os.environ.keys() - others}
    environment |= {"PYTHONPATH": str(ROOT), "LC_ALL": "C", "PYTHONUTF8": "0", **variables}
    command = [sys.executable, "-m", "fldiag.cli", *words.split()]
    return subprocess.run(command, cwd=cwd, capture_output=True, env=environment)


def check(words, cwd, mark, **variables):
    result = ascii_only(words, cwd, **variables)
    assert result.returncode == 0 and mark not in result.stderr, result.stderr
    assert result.stdout.decode("ascii")


SLOW = ("--version", "list", "explain fedsol", "spectrum --help")


@pytest.mark.parametrize(
    "words", ["--help", *(pytest.param(words, marks=pytest.mark.slow) for words in SLOW)]
)
def test_verbs_on_a_terminal_that_knows_ascii_only(words, tmp_path):
    check(words, tmp_path, b"Error")
    check(words, tmp_path, b"Error", PYTHONIOENCODING="ascii")


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
    example = ROOT / "checkpoints" / "example" / "fedavg-digits.pt"
    (tmp_path / example.name).symlink_to(example)
    text = '# κλεινός\nrounds = 1\n[model]\nname = "mlp"\n[train]\nepochs = 1\n'
    (tmp_path / "small.toml").write_text(text, encoding="utf-8")
    check(words, tmp_path, b"unexpected")


# -- names of files


@pytest.mark.slow
def test_a_run_in_a_folder_of_any_letters(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plan = {"checkpoint": {"clients": "sampled"}}
    run = train.train(config(rounds=2, **plan), out=tmp_path / "läufe" / "ß λ")
    assert set(run.metrics["run"]) == {"ß λ"} and fldiag.load(run.path).checkpoint().round == 2
    one = run.path / "rounds" / "0002.safetensors"
    for words in (
        ["spectrum", run.path, "--k", "1"],
        ["spectrum", one, "--k", "1", "--out", "größe"],
        ["drift", run.path],
        ["report", run.path, "--out", "seite é"],
        ["runs", run.path.parent],
    ):
        result = invoke(*words)
        assert result.exit_code == 0, (words, result.output)
    assert train.train(config(rounds=3, **plan), out=run.path, resume=True).done == 3


@pytest.mark.slow
def test_where_names_of_files_are_ascii_the_remedy_works(tmp_path):
    (tmp_path / "läufe").mkdir()
    train.train(config(rounds=1), out=tmp_path / "läufe" / "ß")
    for words in ("drift läufe/ß", "train digits --out läufe/ü"):
        result = ascii_only(words, tmp_path)
        assert result.returncode == 2 and b"cannot read this name" in result.stderr, result.stderr
        assert b"set PYTHONUTF8=1" in result.stderr and b"unexpected" not in result.stderr
    assert "ß" in ascii_only("runs läufe", tmp_path, PYTHONUTF8="1").stdout.decode("utf-8")
