"""Presets: each loads, and has the numbers of its paper's tables of settings."""

import re

import pytest

from fldiag import catalogue, config, registry
from fldiag.data.preprocessing import PREPROCESSING

PAPERS = [
    name
    for name in catalogue("presets")
    if name.split("-")[0] in ("fedsol", "fedtoga", "fedproj", "fedalign")
]

#: FedProj's private texts and the public ones.
TEXTS = {"mnli": "snli", "sst2": "sent140", "marc": "yelp"}
#: What all presets of a paper share.
SHARED = {
    "fedsol": {
        "epochs": 5,
        "batch_size": 50,
        "lr": 0.01,
        "lr_decay": 0.99,
        "momentum": 0.9,
        "nesterov": False,
        "weight_decay": 1e-5,
        "optimizer": "sgd",
        "aggregate": "n",
        "clip": None,
        "drop_last": False,
    },
    "fedtoga": {
        "lr": 0.1,
        "momentum": 0.0,
        "weight_decay": 1e-3,
        "optimizer": "sgd",
        "aggregate": "uniform",
        "clip": 10.0,
        "drop_last": False,
    },
    "fedproj": {
        "epochs": 20,
        "batch_size": 64,
        "lr": 1e-3,
        "lr_decay": 1.0,
        "weight_decay": 5e-5,
        "optimizer": "adam",
        "aggregate": "n",
        "clip": None,
        "drop_last": False,
    },
    "fedalign": {
        "epochs": 20,
        "batch_size": 64,
        "lr": 0.01,
        "lr_decay": 1.0,
        "momentum": 0.9,
        "nesterov": True,
        "weight_decay": 1e-4,
        "optimizer": "sgd",
        "aggregate": "batches",
        "clip": None,
        "drop_last": True,
    },
}
#: paper, data set -> clients, per round, rounds, model.
FEDERATIONS = {
    ("fedsol", "mnist"): (100, 10, 200, "fedavg_mnist"),
    ("fedsol", "cifar10"): (100, 10, 300, "fedavg_cifar"),
    ("fedsol", "svhn"): (100, 10, 200, "fedavg_cifar"),
    ("fedsol", "cinic10"): (200, 10, 300, "fedavg_cifar"),
    ("fedsol", "pathmnist"): (200, 10, 200, "fedavg_mnist"),
    ("fedsol", "tissuemnist"): (200, 10, 200, "fedavg_mnist"),
    ("fedtoga", "cifar10"): (100, 10, 800, "lenet"),
    ("fedtoga", "cifar100"): (100, 10, 800, "lenet"),
    ("fedproj", "cifar10"): (100, 10, 100, "resnet8_p3"),
    ("fedproj", "cifar100"): (50, 5, 100, "resnet18_p3"),
    ("fedproj", "cinic10"): (100, 10, 60, "resnet18_p3"),
    **{("fedproj", data): (15, 4, 15, "bert_tiny") for data in TEXTS},
    ("fedalign", "cifar100"): (16, 16, 25, "resnet56"),
    ("fedalign", "cifar10"): (16, 16, 25, "resnet56"),
    ("fedalign", "imagenet200"): (16, 16, 25, "resnet18_imagenet"),
}
#: The end of a preset's name -> the partition.
PARTITIONS = {
    "lda": ("lda", "alpha", float),
    "shard": ("sharding", "shards", int),
    "dir": ("dirichlet", "alpha", float),
    "path": ("pathological", "classes", int),
}
TABLES = {
    "fedsol": {
        *(
            f"{data}-{split}"
            for data in ("mnist", "svhn", "cinic10", "pathmnist", "tissuemnist")
            for split in ("lda0.1", "shard2")
        ),
        *(f"cifar10-lda{a}" for a in (0.05, 0.1, 0.3, 0.5)),
        *(f"cifar10-shard{s}" for s in (2, 3, 5, 10)),
    },
    "fedtoga": {
        f"{start}-{split}"
        for start in ("cifar10", "cifar100", "cifar10-resnet18")
        for split in ("dir0.6", "dir0.1", "path6", "path3")
    },
    "fedproj": {
        f"{data}-lda{a}" for data in ("cifar10", "cifar100", "cinic10", *TEXTS) for a in (0.3, 0.5)
    },
    "fedalign": {
        *(f"cifar100-{split}" for split in ("lda0.1", "lda0.5", "lda2.5", "iid", "64clients")),
        "cifar10-lda0.5",
        "cifar10-64clients",
        "imagenet200-lda0.5",
        "imagenet200-32clients",
    },
}


@pytest.mark.parametrize("paper", TABLES)
def test_every_column_of_the_papers_tables_has_a_preset(paper):
    assert {name.removeprefix(f"{paper}-") for name in PAPERS if name.startswith(paper)} == TABLES[
        paper
    ]


@pytest.mark.parametrize("name", PAPERS)
def test_a_preset_has_the_numbers_of_its_paper(name):
    made = config.load(name)
    paper, data, *_, split = name.split("-")
    variant = "fedsol_paper" if data == "mnist" else None if data in TEXTS else paper
    assert (made.name, made.method.name, made.data.name, made.data.variant, made.seed) == (
        name,
        paper,
        data,
        variant,
        0,
    )
    total, each, rounds, model = FEDERATIONS[paper, data]
    if "resnet18" in name:
        model = "resnet18_gn"
    if split == "64clients":
        total, each, rounds = 64, 16, 100
    if split == "32clients":
        total, each, rounds = 32, 4, 50
    assert (made.clients.total, made.clients.per_round, made.rounds, made.model.name) == (
        total,
        each,
        rounds,
        model,
    )
    assert made.clients.sampling == ("independent" if paper == "fedtoga" else "fixed")
    expected = {
        **SHARED[paper],
        **({"epochs": 1, "lr": 3e-5, "weight_decay": 0.0} if data in TEXTS else {}),
    }
    if paper == "fedtoga":
        expected |= (
            {"epochs": 5, "batch_size": 50}
            if data == "cifar10"
            else {"epochs": 2, "batch_size": 20}
        )
        expected["lr_decay"] = 0.998 if model == "resnet18_gn" else 0.997
    assert {key: getattr(made.train, key) for key in expected} == expected


@pytest.mark.parametrize("name", PAPERS)
def test_a_preset_has_the_partition_of_its_name(name):
    partition, split = config.load(name).partition, name.split("-")[-1]
    if split in ("64clients", "32clients"):
        split = "lda0.5"
    if split == "iid":
        assert (partition.kind, partition.options) == ("iid", {})
        return
    kind, key, read = PARTITIONS[re.match(r"[a-z]+", split)[0]]
    value = read(re.sub(r"^[a-z]+", "", split))
    assert (partition.kind, partition.options[key]) == (kind, value)
    if kind == "lda":
        assert partition.options["min_size"] == (15 if name.startswith("fedproj") else 10)


@pytest.mark.parametrize("name", PAPERS)
def test_a_presets_data_model_and_description_exist(name):
    made = config.load(name)
    assert made.data.name in TEXTS or made.data.variant in PREPROCESSING[made.data.name]
    assert made.model.name in registry.model
    what = catalogue("presets")[name]
    assert f"{made.clients.total} clients" in what and f"{made.rounds} rounds" in what
    assert (made.data.public is not None) == name.startswith("fedproj")
    if made.data.name in TEXTS:
        assert made.data.public == TEXTS[made.data.name] and made.data.public in registry.dataset
    elif made.data.public:
        base, _, variant = made.data.public.partition("@")
        assert base != made.data.name and variant in PREPROCESSING[base]


@pytest.mark.parametrize(
    "name, gamma, memory",
    [
        ("cifar10-lda0.3", 0.0, 12500),
        ("cifar10-lda0.5", 0.3, 12500),
        ("cifar100-lda0.3", 0.0, 15000),
        ("cifar100-lda0.5", 0.5, 15000),
        ("cinic10-lda0.3", 0.0, 10000),
        ("cinic10-lda0.5", 0.3, 10000),
    ],
)
def test_fedproj_has_its_tables_divergence_weight_and_memory(name, gamma, memory):
    options = config.load(f"fedproj-{name}").method.options
    assert (
        options["gamma_wd"],
        options["memory_size"],
        options["memory_batch"],
        options["tau"],
        options["lr"],
    ) == (gamma, memory, 256, 3.0, 1e-5)
    assert (options["epochs"], options["batch_size"]) == (3 if "cifar100" in name else 1, 256)
