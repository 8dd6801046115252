"""Texts: the same tables always give the same tokens; tokens stay integers; what is wrong with a table is said."""

import gzip
import json

import pytest
import torch

import fldiag
from fldiag import data
from fldiag.data.public import load_public
from fldiag.data.text import Reading
from fldiag.data.words import END, PAD, START, UNKNOWN, Words
from fldiag.errors import FldiagError

GOOD, BAD, REST = "fine great superb", "dull weak poor", "the film a story of actors and music"


def rows(n):
    """(label, text): a word decides."""
    rest, told = REST.split(), {"bad": BAD.split(), "good": GOOD.split()}
    for i in range(n):
        label = ("bad", "good")[i % 2]
        yield (
            label,
            f"{rest[i % 8]} {told[label][i // 2 % 3]} {rest[i // 3 % 8]}, {rest[i // 5 % 8]}!",
        )


@pytest.fixture
def films(tmp_path):
    """A name of data: 120 texts, every seventh for testing."""
    file = tmp_path / "films.csv"
    file.write_text(
        "label,text,split\n"
        + "".join(
            f'{label},"{text}",{"test" if i % 7 == 0 else "train"}\n'
            for i, (label, text) in enumerate(rows(120))
        )
    )
    return f"csv:{file}"


def test_words_are_those_of_the_vocabulary_and_others_are_spelled():
    words = Words.learn([("the film the film the", "A film")], pieces=40, length=12)
    numbers = words.numbers([("The film!",), ("film the", "a mile")])
    assert numbers.dtype == torch.int32 and numbers.shape == (2, 12)
    assert (
        [*numbers[0, :4]] == [START, *numbers[1, [2, 1]], UNKNOWN]
        and numbers[0, 4] == END
        and set(numbers[0, 5:].tolist()) == {PAD}
    )
    assert numbers[1].tolist().count(END) == 2, "a pair has two ends"
    assert words.text(words.numbers([("film a mile",)])[0]) == "film a mile", "m ##i ##l ##e"


def test_the_same_texts_give_the_same_tokens_whatever_their_order():
    texts = [(text,) for _, text in rows(60)]
    first, second = (Words.learn(some, 60, 8) for some in (texts, texts[::-1]))
    assert first.spec == second.spec
    with pytest.raises(
        FldiagError, match=r"data.vocabulary = 20, and the characters of the texts alone need \d+"
    ):
        Words.learn(texts, 20, 8)


def test_a_table_becomes_a_data_set(films):
    found = data.load(films, reading=Reading(80, 10))
    assert (
        found.shape == (10,)
        and found.classes == 2
        and len(found.train_y) + len(found.test_y) == 120 == len(found.texts)
    )
    x = found.batch(torch.tensor([0, 5]))
    assert x.dtype == torch.int64 and found.words.text(x[0]) == " ".join(
        found.texts[0][0].replace(",", " ,").replace("!", " !").split()
    )
    assert found.fingerprint() != data.load(films, reading=Reading(50, 10)).fingerprint()


def test_a_part_of_the_training_texts_has_each_class_with_its_share(films):
    whole, part = (data.load(films, reading=Reading(80, 10, n)) for n in (None, 21))
    assert (
        len(part.train_y) == 21
        and abs(int(part.train_y.sum()) - 21 * float(whole.train_y.float().mean())) <= 1
    )
    assert len(part.test_y) == len(whole.test_y) and set(part.texts[:21]) <= set(
        whole.texts[: len(whole.train_y)]
    )
    assert data.load(films, reading=Reading(80, 10, 10**6)).fingerprint() == whole.fingerprint()


def test_a_named_set_of_pairs_and_its_sentences_as_public_data(tmp_path, films):
    for part, n in (("dev", 30), ("test", 9)):
        with gzip.open(tmp_path / f"snli_{part}.tsv.gz", "wt") as file:
            file.write(
                "label\tpremise\thypothesis\n"
                + "".join(f'{i % 3}\tthe "film {i % 2}\tit is a film\n' for i in range(n))
            )
    pairs = data.load("snli", tmp_path, reading=Reading(60, 12))
    assert (pairs.classes, len(pairs.train_y), len(pairs.test_y)) == (3, 30, 9) and pairs.texts[
        0
    ] == ('the "film 0', "it is a film")
    private = data.load(films, reading=Reading(80, 10))
    public, kept = load_public("snli", private, tmp_path)
    assert len(kept) == len(private.train_y) and public.shape == (3, 10), (
        "three different sentences"
    )
    assert private.words.text(public[1]) == "it is a film"
    with pytest.raises(FldiagError, match=r"public data 'digits' has inputs of shape \(1, 8, 8\)"):
        load_public("digits", private)


@pytest.mark.parametrize(
    "content, said",
    [
        ("label,text\n0,a\n", r"too few texts \(1\)"),
        ("label,text,split\n0,a,train\n", "does not say which texts are for training"),
        ("kind,words,split\n0,a,train\n1,b,test\n", "has the columns kind, words, split"),
        ('label,text,split\n0,"a,train\n', "is not a readable table"),
        ("", "is not a readable table"),
    ],
)
def test_a_table_with_something_missing(content, said, tmp_path):
    file = tmp_path / "bad.csv"
    file.write_text(content)
    with pytest.raises(FldiagError, match=said):
        data.load(f"csv:{file}")


def test_a_table_without_splits(tmp_path):
    """About a fifth is for testing, by the text alone: the order of rows does not matter, and equal texts stay together."""
    rows = [f"{i % 2},word{i // 2}" for i in range(400)]
    files = [tmp_path / "one.csv", tmp_path / "other.csv"]
    for file, order in zip(files, (rows, rows[::-1]), strict=True):
        file.write_text("label,text\n" + "\n".join(order) + "\n")
    with pytest.warns(UserWarning, match=r"no column 'split': \d+ of its 400 texts"):
        one, other = (data.load(f"csv:{file}", reading=Reading(300, 4)) for file in files)
    n = len(one.train_y)
    assert len(one.test_y) == 400 - n and 20 < len(one.test_y) < 140
    sides = [{text for (text,) in side} for side in (one.texts[:n], one.texts[n:])]
    assert not sides[0] & sides[1] and {text for (text,) in other.texts[:n]} == sides[0]


def test_other_wrong_uses(tmp_path, films, monkeypatch):
    monkeypatch.delenv("FLDIAG_DATA", raising=False)
    for name, said in (
        (f"csv:{tmp_path}", "has no train.csv"),
        (f"csv:{tmp_path}/none.csv", "no file"),
        ("sst2", "needs a data folder"),
    ):
        with pytest.raises(FldiagError, match=said):
            data.load(name)
    with pytest.raises(FldiagError, match=r"looked for .*agnews_train\.csv"):
        data.load("agnews", tmp_path)
    with pytest.raises(FldiagError, match="cannot be normalised"):
        data.load(films, normalise="standard", reading=Reading(80, 10))


def config(films, **more):
    return fldiag.Config.load(
        "digits",
        **{
            "data__name": films,
            "data__vocabulary": 80,
            "data__length": 8,
            "model__name": "bert_tiny",
            "rounds": 2,
            "clients__total": 3,
            "clients__per_round": 3,
            "partition__alpha": 1.0,
            "train__optimizer": "adam",
            "train__lr": 1e-3,
            "train__momentum": 0.0,
            "checkpoint__clients": "sampled",
            **more,
        },
    )


@pytest.mark.slow
def test_a_run_on_texts_and_its_diagnostics(films, tmp_path):
    run = fldiag.train(config(films, rounds=3), out=tmp_path / "run", device="cpu")
    assert run.config.model.options["vocabulary"] == 80
    assert (
        Words((run.path / "tokenizer.json").read_text(), 8).size
        == json.loads((run.path / "tokenizer.json").read_text())["model"]["vocab"].__len__()
    )
    assert (
        float(run.metrics.query("metric == 'accuracy' and scope == 'global'").value.iloc[-1]) > 0.7
    )
    found = fldiag.diagnose(run, "forgetting", device="cpu")
    assert not found.empty and found.converged.ne(False).all()
    drift = fldiag.diagnose(run, "drift", device="cpu", rho=[0.0])
    assert not drift.empty
    resumed = fldiag.train(config(films), out=tmp_path / "part", device="cpu")
    assert resumed.config.rounds == 2
    more = fldiag.train(config(films, rounds=3), out=tmp_path / "part", resume=True, device="cpu")
    assert all(
        torch.equal(w, run.checkpoint().state[n]) for n, w in more.checkpoint().state.items()
    )


def test_padding_changes_nothing(films):
    """The model attends to no padding: longer rows of the same text give the same outputs."""
    short, long = (data.load(films, reading=Reading(80, n)) for n in (10, 16))
    from fldiag import models

    module = models.build("bert_tiny", (10,), 2, {"vocabulary": 80}).double()
    index = torch.arange(6)
    assert int((short.batch(index) != PAD).sum()) == int((long.batch(index) != PAD).sum()), (
        "nothing is cut"
    )
    torch.testing.assert_close(
        module(short.batch(index)), module(long.batch(index)), rtol=1e-10, atol=1e-12
    )
