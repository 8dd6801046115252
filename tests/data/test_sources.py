"""Where data come from: named sets in each of their layouts, files, folders, texts, factories; and what is refused."""

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from torchvision import datasets, transforms

import fldiag
from fldiag import registry
from fldiag.data import named, text
from fldiag.data.partition import deal
from fldiag.data.sources import load, load_public
from fldiag.errors import FldiagError
from fldiag.sections import DataSection, PartitionSection

RNG = np.random.default_rng(0)
KEYS = ("train_images", "train_labels", "test_images", "test_labels")


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    monkeypatch.setenv("FLDIAG_DATA", str(tmp_path))
    return tmp_path


def write(path, shape=(28, 28), n=20, classes=10, **changes):
    """An npz file of random bytes, in which arrays are changed or, if None, left out; its name as data."""
    x, y = RNG.integers(0, 256, (n, *shape)).astype(np.uint8), np.arange(n) % classes
    content = dict(zip(KEYS, (x, y, x[:5], y[:5]), strict=True)) | changes
    np.savez(path, **{key: array for key, array in content.items() if array is not None})
    return f"npz:{path}"


def test_every_name_is_registered_with_its_variants():
    assert {*named.SETS, *text.SETS, "digits", "iris"} <= set(registry.dataset.names())
    assert "fedsol_paper" in registry.dataset.get("mnist").doc


@pytest.mark.parametrize("preset", fldiag.catalogue("presets"))
def test_the_data_of_every_preset_exist(preset):
    section = fldiag.Config.load(preset).data
    for name in (f"{section.name}@{section.variant or ''}", section.public or "digits"):
        base, _, variant = name.partition("@")
        assert base in registry.dataset and (not variant or variant in named.SETS[base].variants)


@pytest.mark.parametrize("name", [name for name in named.SETS if name != "imagenet200"])
def test_a_named_set_in_a_file_is_seen_as_its_variant_says(name, folder):
    spec, file = named.SETS[name], folder / f"{name}.npz"
    shape = spec.shape[1:] if spec.shape[0] == 1 else (*spec.shape[1:], 3)
    write(file, shape, 2 * spec.classes, spec.classes)
    pixels = torch.stack([transforms.ToTensor()(image) for image in np.load(file)["test_images"]])
    for variant, show in {None: next(iter(spec.variants.values())), **spec.variants}.items():
        data = load(DataSection(name=name, variant=variant))
        true = transforms.Normalize(show.mean, show.std)(pixels)
        assert torch.equal(data.normalise(data.test_x), true.repeat(1, show.repeat, 1, 1))
        assert (data.classes, data.augment) == (spec.classes, show.augment)


def test_validation_images_are_trained_on_where_the_papers_do_and_nowhere_else(folder):
    more = {"val_images": np.zeros((3, 28, 28), np.uint8), "val_labels": np.ones(3, int)}
    own, _ = (write(folder / f"{n}.npz", classes=2, **more) for n in ("pneumoniamnist", "mnist"))
    sizes = [len(load(name).train_y) for name in ("pneumoniamnist", "mnist", own)]
    assert sizes == [23, 20, 20] and not load("pneumoniamnist").train_x[20:].any()


def test_torchvisions_own_files_are_read_and_nothing_is_downloaded_unasked(folder, monkeypatch):
    calls = []

    class Cifar:
        def __init__(self, root, train, download):
            calls.append((root, download, train))
            self.data = RNG.integers(0, 256, (10, 32, 32, 3)).astype(np.uint8)
            self.targets = list(range(10))

    monkeypatch.setattr(datasets, "CIFAR10", Cifar)
    assert load("cifar10").train_x.shape == (10, 3, 32, 32)
    load("cifar10", download=True)
    assert calls == [(folder, d, t) for d in (False, True) for t in (True, False)]
    with pytest.raises(FldiagError, match=r"neither .*svhn.npz nor torchvision's SVHN"):
        load("svhn")


def pictures(home, counts, classes, *size):
    for folder in (home / split / name for split in counts for name in classes):
        folder.mkdir(parents=True)
        for i in range(counts[folder.parent.name]):
            pixels = RNG.integers(0, 256, (*size, 3)).astype(np.uint8)
            Image.fromarray(pixels).save(folder / f"p{i}.png")


def rows(x):
    return {row.numpy().tobytes() for row in x}


def test_folders_of_pictures_are_decoded_once_and_split_as_the_variant_says(folder):
    home = folder / "cinic10"
    pictures(home, {"train": 3, "valid": 4, "test": 2}, [f"c{i}" for i in range(10)], 32, 32)
    folders = (
        datasets.ImageFolder(home / n, transforms.PILToTensor()) for n in ("train", "valid", "test")
    )
    train, valid, test = (torch.stack([x for x, _ in pairs]) for pairs in folders)
    data, enlarged, drawn = map(load, ("cinic10", "cinic10@enlarged", "cinic10@fedproj"))
    assert torch.equal(data.train_x, train) and torch.equal(data.test_x, test)
    assert data.train_y.tolist() == [i for i in range(10) for _ in range(3)]
    assert torch.equal(enlarged.train_x, torch.cat([train, valid]))
    assert torch.equal(enlarged.test_x, test)
    assert (len(drawn.train_y), len(drawn.test_y)) == (90 * 10 // 27, 90 * 3 // 27)
    assert rows(drawn.train_x) | rows(drawn.test_x) <= rows(torch.cat([train, valid, test]))
    assert not rows(drawn.train_x) & rows(drawn.test_x)

    def times():
        return [file.stat().st_mtime_ns for file in sorted((home / ".fldiag").iterdir())]

    before = times()
    data.train_x.zero_()  # nothing reaches the file
    assert torch.equal(load("cinic10").train_x, train) and times() == before and len(before) == 3
    picture = home / "train" / "c0" / "p0.png"
    Image.fromarray(np.zeros((32, 32, 3), np.uint8)).save(picture)
    assert not load("cinic10").train_x[0].any() and load("cinic10").train_x[1].any()
    picture.write_bytes(b"no picture")
    with pytest.raises(FldiagError, match="cannot read the pictures"):
        load("cinic10")
    picture.unlink()
    (home / "test" / "c9").rename(home / "test" / "d0")
    with pytest.raises(FldiagError, match="not the same 10 class folders"):
        load("cinic10")


def test_imagenet_is_shown_as_resize_and_centre_crop(folder):
    home, show = folder / "imagenet200", named.SETS["imagenet200"].variants["fedalign"]
    pictures(home, {"train": 1, "val": 1}, [f"n{i:03d}" for i in range(200)], 50, 40)
    data, (image, _) = load("imagenet200"), datasets.ImageFolder(home / "val")[7]
    steps = [transforms.Resize(256), transforms.CenterCrop(224), transforms.ToTensor()]
    true = transforms.Compose([*steps, transforms.Normalize(show.mean, show.std)])(image)
    assert data.shape == (3, 224, 224)
    assert torch.equal(data.normalise(data.test_x[7:8])[0], true)


def test_files_of_ones_own(folder):
    gray, colour = (load(write(folder / "x.npz", shape)) for shape in ((8, 8), (8, 8, 3)))
    assert (gray.shape, colour.shape) == ((1, 8, 8), (3, 8, 8))
    table = load(write(folder / "table.npz", (4,)))
    assert table.train_x.dtype == torch.float32 and table.train_x.max() > 1  # no pixels
    assert load("table").name == "table" and load("table").fingerprint() == table.fingerprint()
    targets = {"train_labels": np.ones((20, 2)), "test_labels": np.ones((5, 2))}
    numbers = load(write(folder / "y.npz", (4,), **targets))
    assert numbers.regression and numbers.classes == 2


def test_own_data_are_normalised_only_as_said(folder):
    name, all_of = write(folder / "x.npz", (8, 8, 3)), torch.arange(20)
    pixels = load(name).train_x / 255
    assert torch.equal(load(name).batch(all_of), pixels)
    x, axes = pixels.double(), {"dim": (0, 2, 3), "keepdim": True}
    standard = x.mean(**axes), x.std(**axes, correction=0)
    cases = {"none": (0, 1 / 255), "unit": (0, 1), "0.5/0.25": (0.5, 0.25), "standard": standard}
    for how, (mean, std) in cases.items():
        shown = load(DataSection(name=name, normalise=how)).batch(all_of).double()
        assert torch.allclose(shown, (x - mean) / std, atol=1e-5)


def own(**changes):
    return lambda folder: write(folder / "x.npz", (8, 8), **changes)


def mnist(*how):
    return lambda folder: write(folder / "mnist.npz", *how) and "mnist"


def table(content):
    def write_table(folder):
        (folder / "x.csv").write_text(content)
        return f"csv:{folder / 'x.csv'}"

    return write_table


CLASSES = np.arange(20) % 10
NO_DATA = [
    (own(train_labels=None), "train_labels is not a file"),
    (own(train_labels=np.full(20, None)), "Object arrays cannot be loaded"),
    (own(train_labels=CLASSES[:-1]), "each example needs both"),
    (own(train_labels=CLASSES * 1.0), "targets are float32"),
    (own(train_labels=CLASSES - 1), "training labels go from -1"),
    (own(train_images=np.zeros((20, 3, 8, 8))), "channels last"),
    (own(train_images=np.zeros(20)), "train_images has shape"),
    (own(test_images=np.zeros((5, 9, 9), np.uint8)), "have different forms"),
    (mnist((32, 32)), r"not 10 of uint8 \[1, 28, 28\]"),
    (mnist((28, 28), 20, 11), "hold 11 classes"),
    (table("label,text\n0,a\n"), "no column 'split'"),
    (table("label,text,split\n0,a,train\n"), "a split has 0 texts"),
    (table("kind,words,split\n0,a,train\n1,b,test\n"), "the columns kind, words, split"),
    (table('label,text,split\n0,"a,train\n'), "is not a readable table"),
    (table(""), "is not a readable table"),
    ("digit", "did you mean 'digits'"),
    ("npz:none.npz", "none.npz is not a readable npz file"),
    ("cifar10@fedavg", "unknown variant of data set 'cifar10'"),
    ({"variant": "fedsol"}, "has no variants"),
    ("bloodmnist", "no file .*bloodmnist.npz"),
    ("cinic10", "cannot read the pictures .*cinic10/train"),
    ({"normalise": "unit"}, "does not fit its inputs"),
    ({"validation": 0.0001}, "0.0001 of 1500 training examples"),
    ("made_up:data", "allow-code|not allowed|consent|allow"),
    ({"public": "iris"}, r"'iris' \(4,\)"),
    ({"public": "digits"}, "use other data than the private ones"),
    ({"public": "holdout:1500"}, "N from 1 to 1499"),
    ({"public": "holdout:few"}, "N from 1 to 1499"),
]


@pytest.mark.parametrize(("data", "words"), NO_DATA)
def test_what_is_not_there_or_has_no_meaning_is_one_sentence(data, words, folder):
    data = data(folder) if callable(data) else data
    section = DataSection(name=data) if isinstance(data, str) else DataSection(**data)
    with pytest.raises(FldiagError, match=words):
        load_public(section, load(section), seed=0)


def test_a_factory_returns_a_data_set_or_four_arrays(folder, monkeypatch):
    (folder / "mine.py").write_text(
        "import numpy as np\nfrom fldiag.data import load\n"
        "def four(): return np.eye(4), [0, 1, 2, 3], np.eye(4)[:2], [0, 1]\n"
        "def tokens(): return np.arange(8).reshape(4, 2), [0, 1, 0, 1], np.ones((1, 2), int), [1]\n"
        "def ready(): return load('iris')\n"
        "def wrong(): return 3\n"
        "def broken(): return 1 / 0\n"
    )
    monkeypatch.chdir(folder)
    names = [f"mine:{name}" for name in ("four", "tokens", "ready", "wrong", "broken")]
    registry.allow(names)
    four, tokens, ready = map(load, names[:3])
    assert four.shape == (4,) and four.classes == 4 and tokens.tokens and ready.name == "iris"
    for name, words in zip(names[3:], ("returned a int", "ZeroDivisionError"), strict=True):
        with pytest.raises(FldiagError, match=words):
            load(name)


# -- validation


def test_validation_takes_its_share_of_the_training_examples_and_no_test_example():
    whole, data = load("digits"), load(DataSection(name="digits", validation=0.1))
    assert (len(data.train_y), len(data.test_y)) == (1350, 150)
    assert rows(data.train_x) | rows(data.test_x) == rows(whole.train_x)
    share = data.test_y.bincount() - whole.train_y.bincount() * 0.1
    assert share.abs().max() <= 1 and data.fingerprint() != whole.fingerprint()


def test_a_run_with_validation_is_judged_by_it_and_refuses_a_partition_of_the_whole(folder):
    plan = {"rounds": 1, "train__epochs": 1, "model__name": "mlp", "data__validation": 0.2}
    start = fldiag.Config.load("digits", **plan)
    run = fldiag.train(start, out=folder / "run")
    test = run.metrics.query("metric == 'accuracy' and slice == 'test'")
    assert set(test["n_examples"]) == {300}
    section = {"kind": "file", "path": str(run.path / "partition.npz")}
    with pytest.raises(FldiagError, match="validation takes examples away"):
        fldiag.train(start.replace(partition=section), out=folder / "other")


# -- public data


@pytest.mark.parametrize("size", [None, 30])
def test_public_data_are_drawn_from_another_set_or_leave_the_private_one(size, folder):
    private, holdout = load("digits"), "holdout:101"
    section = DataSection(name="digits", public=holdout, public_size=size)
    public = load_public(section, private, seed=3)
    clients = np.concatenate(deal(private, PartitionSection(kind="iid", seed=3), 7, holdout))
    assert len(public) == (size or 101) and len(clients) == len(np.unique(clients)) == 1399
    held_out = np.setdiff1d(np.arange(1500), clients)
    assert rows(public) <= rows(private.batch(torch.from_numpy(held_out)))
    (folder / "p.json").write_text(f"[[{held_out[0]}]]")
    plan = PartitionSection(kind="file", path=str(folder / "p.json"), seed=3)
    with pytest.raises(FldiagError, match="client 0 has 1 examples"):
        deal(private, plan, 1, holdout)
    shares = private.train_y[held_out].bincount() - private.train_y.bincount() * 101 / 1500
    assert shares.abs().max() <= 1
    section = section.model_copy(update={"public": write(folder / "other.npz", (8, 8))})
    from_other = load_public(section, private, seed=3)
    assert len(from_other) == 25 and from_other.max() <= 1


# -- texts

FILMS = pd.DataFrame(
    {
        "label": ["bad", "good"] * 30,
        "text": [f"the film {i % 7} a story, {i % 3}!" for i in range(60)],
        "split": ["test", *["train"] * 4] * 12,
    }
)


@pytest.fixture
def films(folder):
    FILMS.to_csv(folder / "films.csv", index=False)
    return DataSection(name=f"csv:{folder / 'films.csv'}", vocabulary=80, length=10)


def test_words_are_those_of_the_vocabulary_and_others_are_spelled():
    words = text.Words.learn([("the film the film the", "A film to")], pieces=24, length=12)
    numbers = words.numbers([("The film!",), ("film the", "a mile")])
    assert numbers.dtype == torch.int32
    first, second = (" ".join(map(words._tokenizer.id_to_token, row)) for row in numbers.tolist())
    assert first == "[CLS] the film [UNK] [SEP]" + " [PAD]" * 7
    assert second == "[CLS] film the [SEP] a m ##i ##l ##e [SEP] [PAD] [PAD]"
    ends = [text.START, text.UNKNOWN, text.END, text.PAD]
    assert numbers[0, [0, 3, 4, 5]].tolist() == ends
    other = text.Words.learn([("A film to", "the film the film the")], pieces=24, length=12)
    assert other.spec == words.spec
    with pytest.raises(FldiagError, match="the characters of the texts alone need"):
        text.Words.learn([("abcdefgh",)], pieces=10, length=4)


def test_a_table_of_texts_in_every_layout_gives_the_same_tokens(films, folder):
    data = load(films)
    assert (len(data.train_y), len(data.test_y), data.classes) == (48, 12, 2)
    labels = FILMS["label"][FILMS["split"] == "train"]
    assert data.train_y.tolist() == [int(label == "good") for label in labels]
    assert data.batch(torch.arange(3)).dtype == torch.int64 and data.shape == (10,)
    for split, part in FILMS.groupby("split"):
        part[["label", "text"]].to_csv(folder / f"sst2_{split}.tsv", sep="\t", index=False)
    again = load(films.model_copy(update={"name": "sst2"}))
    assert torch.equal(again.train_x, data.train_x) and torch.equal(again.test_y, data.test_y)
    fewer = load(films.model_copy(update={"examples": 10}))
    assert fewer.train_y.bincount().tolist() == [5, 5] and len(fewer.test_y) == 12


def test_public_texts_are_sentences_in_the_private_tokens(films, folder):
    premises = {"label": [0, 1, 2] * 3, "premise": [f"one {i}" for i in range(9)]}
    pairs = pd.DataFrame(premises).assign(hypothesis="it is a film", split="train")
    pairs.loc[8, "split"] = "test"
    pairs.to_csv(folder / "pairs.csv", index=False)
    private = load(films)
    section = films.model_copy(update={"public": f"csv:{folder / 'pairs.csv'}"})
    public = load_public(section, private, seed=0)
    assert torch.equal(public[1:2], private.words.numbers([("it is a film",)]).long())
    assert public.shape == (10, 10)  # nine sentences, and one that all pairs share
