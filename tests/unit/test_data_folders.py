"""Sets of picture folders, on tiny trees written here in the official layouts."""

import os

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision import datasets, transforms

from fldiag import data
from fldiag.data import folders
from fldiag.errors import FldiagError

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
IMAGENET = tuple(f"n{i:08d}" for i in range(200))


@pytest.fixture(autouse=True)
def no_data_folder(monkeypatch):
    monkeypatch.delenv("FLDIAG_DATA", raising=False)


def tree(home, split, classes=CLASSES, per_class=2, size=(32, 32), suffix=".png", mode="RGB"):
    rng = np.random.default_rng(sum(split.encode()))
    for name in classes:
        (home / split / name).mkdir(parents=True)
        for i in range(per_class):
            shape = (size[1], size[0]) if mode == "L" else (size[1], size[0], 3)
            Image.fromarray(rng.integers(0, 256, shape, dtype=np.uint8), mode).save(
                home / split / name / f"p{i}{suffix}"
            )


@pytest.fixture
def cinic(tmp_path):
    for split, count in (("train", 3), ("valid", 4), ("test", 2)):
        tree(tmp_path / "cinic10", split, per_class=count)
    return tmp_path


def reference(folder, transform=transforms.PILToTensor()):
    x, y = zip(*datasets.ImageFolder(str(folder), transform), strict=True)
    return torch.stack(x), torch.tensor(y)


def rows(x):
    return [row.numpy().tobytes() for row in x]


def test_cinic10_equals_torchvisions_image_folder_and_leaves_valid_out(cinic):
    loaded = data.load("cinic10", root=cinic)
    for split in ("train", "test"):
        x, y = reference(cinic / "cinic10" / split)
        assert torch.equal(getattr(loaded, f"{split}_x"), x) and torch.equal(
            getattr(loaded, f"{split}_y"), y
        )
    assert (loaded.shape, loaded.classes, loaded.augment) == (
        (3, 32, 32),
        10,
        ("reflectcrop4", "hflip"),
    )
    assert loaded.mean[0] == 0.47889522 and loaded.std[2] == 0.25874835


def test_cinic10_without_valid_and_under_its_official_folder_name(cinic):
    os.rename(cinic / "cinic10", cinic / "CINIC-10")
    os.rename(cinic / "CINIC-10" / "valid", cinic / "elsewhere")
    assert len(data.load("cinic10", root=cinic).train_y) == 30
    with pytest.raises(FldiagError, match=r"there is no .*CINIC-10/valid; get CINIC-10.tar.gz"):
        data.load("cinic10", root=cinic, variant="enlarged")


def test_cinic10_enlarged_trains_on_train_and_valid(cinic):
    loaded = data.load("cinic10", root=cinic, variant="enlarged")
    pairs = [reference(cinic / "cinic10" / split) for split in ("train", "valid")]
    assert torch.equal(loaded.train_x, torch.cat([x for x, _ in pairs]))
    assert torch.equal(loaded.train_y, torch.cat([y for _, y in pairs]))
    assert torch.equal(loaded.test_x, reference(cinic / "cinic10" / "test")[0])


def test_cinic10_of_fedproj_draws_ten_and_three_of_27_parts(cinic):
    loaded = data.load("cinic10", root=cinic, variant="fedproj")
    assert (len(loaded.train_y), len(loaded.test_y)) == (90 * 10 // 27, 90 * 3 // 27)
    pairs = [reference(cinic / "cinic10" / split) for split in ("train", "valid", "test")]
    everything = {
        key: (int(label), i)
        for i, pair in enumerate(pairs)
        for key, label in zip(rows(pair[0]), pair[1], strict=True)
    }
    train, test = rows(loaded.train_x), rows(loaded.test_x)
    assert len(set(train) | set(test)) == 43 and {*train, *test} <= everything.keys()
    assert [
        everything[k][0] for k in train + test
    ] == loaded.train_y.tolist() + loaded.test_y.tolist()
    assert {everything[k][1] for k in train} == {everything[k][1] for k in test} == {0, 1, 2}
    assert torch.equal(loaded.train_x, data.load("cinic10", root=cinic, variant="fedproj").train_x)


def test_pictures_are_decoded_once_and_again_when_the_folder_changed(cinic, monkeypatch):
    calls, decode = [], folders.decode
    monkeypatch.setattr(
        folders, "decode", lambda path, side, **k: calls.append(path) or decode(path, side, **k)
    )
    told = []
    first = data.load("cinic10", root=cinic, progress=lambda *event: told.append(event))
    assert (
        len(calls) == 50
        and [event[:2] for event in told] == [(30, 30), (20, 20)]
        and "train" in told[0][2]
    )
    again = data.load("cinic10", root=cinic)
    assert (
        len(calls) == 50
        and torch.equal(first.train_x, again.train_x)
        and first.fingerprint() == again.fingerprint()
    )
    picture = cinic / "cinic10" / "test" / "ship" / "p0.png"
    Image.new("RGB", (32, 32), (9, 8, 7)).save(picture)
    changed = data.load("cinic10", root=cinic)
    assert len(calls) == 70
    assert (changed.test_x[16] == torch.tensor([9, 8, 7], dtype=torch.uint8).view(3, 1, 1)).all()
    assert changed.fingerprint() != first.fingerprint()


def test_the_packed_file_is_mapped_and_never_written_to(cinic):
    loaded = data.load("cinic10", root=cinic)
    packed = sorted((cinic / "cinic10" / ".fldiag").iterdir())
    assert [f.name.split("-")[:2] for f in packed] == [["test", "32"], ["train", "32"]]
    before = packed[1].read_bytes()
    loaded.train_x[0] = 0
    assert packed[1].read_bytes() == before and data.load("cinic10", root=cinic).train_x[0].any()


def test_a_damaged_packed_file_is_made_again(cinic):
    whole = data.load("cinic10", root=cinic).fingerprint()
    for packed in (cinic / "cinic10" / ".fldiag").iterdir():
        packed.write_bytes(packed.read_bytes()[:-1000])
    assert data.load("cinic10", root=cinic).fingerprint() == whole
    for packed in (cinic / "cinic10" / ".fldiag").iterdir():
        np.save(packed, np.zeros((3, 3, 32, 32), dtype=np.uint8))
    assert data.load("cinic10", root=cinic).fingerprint() == whole


def test_a_failure_leaves_no_packed_file(cinic):
    picture = cinic / "cinic10" / "train" / "dog" / "p1.png"
    whole = picture.read_bytes()
    picture.write_bytes(whole[:60])
    with pytest.raises(FldiagError, match=r"dog/p1\.png is not a readable picture"):
        data.load("cinic10", root=cinic)
    assert list((cinic / "cinic10" / ".fldiag").iterdir()) == []
    Image.new("RGB", (32, 31)).save(picture)
    with pytest.raises(FldiagError, match=r"dog/p1\.png has 32x31 pixels, not 32x32"):
        data.load("cinic10", root=cinic)
    picture.write_bytes(whole)
    assert len(data.load("cinic10", root=cinic).train_y) == 30


def test_a_place_that_cannot_be_written_and_a_full_disk_are_explained(cinic, monkeypatch):
    (cinic / "cinic10" / ".fldiag").write_text("in the way")
    with pytest.raises(FldiagError, match=r"cannot write .*\.fldiag.*; make .*cinic10 writable"):
        data.load("cinic10", root=cinic)
    (cinic / "cinic10" / ".fldiag").unlink()
    monkeypatch.setattr(
        folders.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 1000})
    )
    with pytest.raises(FldiagError, match=r"0\.0 GB free, and the packed pictures take"):
        data.load("cinic10", root=cinic)


@pytest.mark.parametrize("name", ["cinic10", "imagenet200"])
@pytest.mark.parametrize("download", [False, True])
def test_a_missing_set_names_the_places_and_the_source(tmp_path, name, download):
    with pytest.raises(FldiagError) as caught:
        data.load(name, root=tmp_path, download=download)
    assert (
        str(tmp_path / name) in caught.value.what
        and ("does not download" in caught.value.what) == download
    )
    for word in (
        str(tmp_path),
        f"{name}/{{train,",
        "<class>",
        "FLDIAG_DATA",
        {"cinic10": "datashare", "imagenet200": "image-net"}[name],
    ):
        assert word in caught.value.remedy
    with pytest.raises(FldiagError, match=f"none is set; set FLDIAG_DATA .* holds {name}/"):
        data.load(name)


def test_faulty_folders_are_explained(cinic):
    home = cinic / "cinic10"
    os.rename(home / "test" / "ship", home / "test" / "boat")
    with pytest.raises(FldiagError, match="test has other class folders than train"):
        data.load("cinic10", root=cinic)
    os.rename(home / "test" / "boat", home / "ship")
    with pytest.raises(FldiagError, match="test has 9 class folders, and cinic10 has the same 10"):
        data.load("cinic10", root=cinic)
    (home / "test" / "ship").mkdir()
    with pytest.raises(FldiagError, match=r"test: Found no valid file for the classes ship.*\.png"):
        data.load("cinic10", root=cinic)


@pytest.mark.parametrize("size, mode", [((300, 400), "RGB"), ((401, 256), "RGB"), ((90, 120), "L")])
def test_stored_imagenet_pictures_evaluate_as_torchvision_does(tmp_path, size, mode):
    tree(tmp_path, "val", ("a",), 1, size, mode=mode)
    path = tmp_path / "val" / "a" / "p0.png"
    stored = torch.from_numpy(folders.decode(path, 256).copy())[None]
    shown = data.Dataset(
        "d",
        stored,
        torch.zeros(1).long(),
        stored,
        torch.zeros(1).long(),
        1,
        side=224,
        mean=(0.485, 0.456, 0.406),
        std=(0.229, 0.224, 0.225),
    ).normalise(stored)
    official = transforms.Compose(
        [
            transforms.Resize(256),
            transforms.CenterCrop(224),
            transforms.ToTensor(),
            transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
        ]
    )
    assert torch.equal(shown[0], official(Image.open(path).convert("RGB")))


def test_imagenet200(tmp_path):
    for split in ("train", "val"):
        tree(tmp_path / "imagenet200", split, IMAGENET, 1, (90, 80), ".JPEG")
    loaded = data.load("imagenet200", root=tmp_path, variant="small")
    assert (loaded.shape, loaded.classes, loaded.train_x.shape) == (
        (3, 64, 64),
        200,
        (200, 3, 72, 72),
    )
    assert loaded.test_y.tolist() == list(range(200))
    x, _ = reference(
        tmp_path / "imagenet200" / "val",
        transforms.Compose(
            [transforms.Resize(72), transforms.CenterCrop(64), transforms.ToTensor()]
        ),
    )
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in (loaded.mean, loaded.std))
    assert torch.equal(loaded.normalise(loaded.test_x), (x - mean) / std)
    batch = loaded.batch(torch.tensor([3, 5]), torch.Generator().manual_seed(0))
    assert batch.shape == (2, 3, 64, 64) and not torch.equal(
        batch[0], loaded.normalise(loaded.train_x[3:4])[0]
    )


def test_the_papers_imagenet_look():
    from fldiag.data.preprocessing import choose

    _, look = choose("imagenet200", None)
    assert (look.stored_side, look.side, look.augment) == (
        256,
        224,
        ("resizedcrop224", "jitter0.4", "hflip"),
    )
    assert (look.mean, look.std) == ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
