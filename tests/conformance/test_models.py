"""What holds for every registered model, and the sizes the papers print."""

import inspect
import math

import pytest
import torch
from helpers import HERE, close, inputs, multiply_adds, terms

from fldiag import models, registry
from fldiag.errors import FldiagError
from fldiag.models.network import Network
from fldiag.params import Layout, flatten

#: A shape each model takes; a model without an entry is built on the first of these that it accepts.
SHAPES = [(3, 32, 32), (3, 28, 28), (1, 8, 8), (6,)]
#: (name, shape, classes, options) -> parameters, as printed in the papers or counted by hand.
COUNTS = [
    ("fedavg_cifar", (3, 32, 32), 10, {}, 2_156_490),
    ("fedavg_mnist", (3, 28, 28), 10, {}, 1_664_970),
    ("fedavg_mnist", (3, 28, 28), 9, {}, 1_664_457),
    ("fedavg_mnist", (3, 28, 28), 8, {}, 1_663_944),
    ("mlp", (2,), 3, {}, 4_547),
    ("mlp", (8,), 3, {"hidden": (6, 5)}, 107),
    ("mlp", (4,), 1, {"hidden": (), "bias": False}, 4),
    ("small_cnn", (1, 8, 8), 10, {}, 46_594),
    ("mlp_iris", (2,), 3, {}, 4_547),
    ("lenet", (3, 32, 32), 10, {}, 797_962),
    ("lenet", (3, 32, 32), 100, {}, 815_332),
    ("vgg11", (3, 32, 32), 10, {}, 9_750_922),
    ("vgg11", (3, 28, 28), 9, {}, 9_750_409),
    ("sl_vit", (3, 32, 32), 10, {}, 6_176_275),
    ("sl_vit", (3, 32, 32), 9, {}, 6_176_082),
    ("sl_vit", (3, 28, 28), 9, {}, 6_132_432),
    ("resnet18_cifar", (3, 32, 32), 10, {}, 11_173_962),
    ("resnet18_gn", (3, 32, 32), 10, {}, 11_181_642),
    ("resnet18_gn", (3, 32, 32), 100, {}, 11_227_812),
    ("resnet8_p3", (3, 32, 32), 10, {}, 4_903_242),
    ("resnet18_p3", (3, 32, 32), 100, {}, 11_220_132),
    ("resnet18_p3", (3, 32, 32), 10, {}, 11_173_962),
    ("resnet56", (3, 32, 32), 100, {}, 614_452),
    ("resnet56", (3, 32, 32), 10, {}, 591_322),
    ("resnet56", (3, 32, 32), 100, {"projection": True}, 746_036),
    ("resnet56", (3, 32, 32), 100, {"keep_last": 0.9}, 614_452),
    ("resnet18_imagenet", (3, 64, 64), 200, {}, 11_279_112),
    ("small_resnet", (1, 8, 8), 10, {}, 77_754),
    ("bert_tiny", (64,), 3, {}, 4_385_920 + 387),
    ("bert_tiny", (64,), 2, {}, 4_385_920 + 258),
    ("bert_tiny", (64,), 5, {}, 4_385_920 + 645),
]
#: (name, shape, classes) -> multiply-adds of one forward pass for one example.
COSTS = [
    ("fedavg_cifar", (3, 32, 32), 10, 17_667_072),
    ("fedavg_mnist", (3, 28, 28), 10, 13_527_552),
    (
        "lenet",
        (3, 32, 32),
        10,
        28 * 28 * 64 * 75 + 10 * 10 * 64 * 1600 + 1600 * 384 + 384 * 192 + 192 * 10,
    ),
    (
        "vgg11",
        (3, 28, 28),
        10,
        9
        * (
            32**2 * 3 * 64
            + 16**2 * 64 * 128
            + 8**2 * 384 * 256
            + 4**2 * 768 * 512
            + 2**2 * 1024 * 512
        )
        + 2 * 512**2
        + 5120,
    ),
    ("resnet56", (3, 32, 32), 100, 87_237_632),
    # 1,814,073,344 with ImageNet's 1000 classes
    ("resnet18_imagenet", (3, 224, 224), 200, 1_814_073_344 - 800 * 512),
]
#: Those that are chains of common layers: several models go side by side.
STACKABLE = {"fedavg_cifar", "fedavg_mnist", "lenet", "mlp", "mlp_iris", "small_cnn", "vgg11"}
every_model = pytest.mark.parametrize("name", HERE)


def built(name, seed=0):
    for shape in SHAPES:
        try:
            return models.build(name, shape, 10, seed=seed), shape
        except FldiagError:
            continue
    pytest.fail(f"add a shape that {name} takes")


@pytest.mark.parametrize(("name", "shape", "classes", "options", "count"), COUNTS)
def test_number_of_parameters(name, shape, classes, options, count):
    assert Layout.of(models.build(name, shape, classes, options)).size == count


@pytest.mark.parametrize(("name", "shape", "classes", "count"), COSTS)
def test_multiply_adds(name, shape, classes, count):
    from fldiag.models.network import forward_macs

    module = models.build(name, shape, classes)
    assert forward_macs(module, shape) == count
    assert multiply_adds(module.eval(), torch.zeros(1, *shape)) == count


@every_model
def test_logits_have_one_number_a_class(name):
    module, shape = built(name)
    out = module(inputs(module, 3, *shape))
    assert out.shape == (3, 10)
    assert out.dtype == torch.float32


@every_model
def test_the_head_is_the_classifier(name):
    module, shape = built(name)
    layout = Layout.of(module)
    head = getattr(module, layout.head_name)
    assert layout.head_size == sum(p.numel() for p in head.parameters())
    assert 0 < layout.head_size < layout.size
    net = Network(module)
    assert net.has_split
    x = inputs(module, 1, 2, *shape, generator=torch.Generator().manual_seed(0))
    bound = net.bind(flatten(module)[None], {n: b[None].clone() for n, b in net.buffers.items()})
    close(head.eval()(bound.features(x)[0]), bound(x)[0], terms=terms(head))
    close(bound(x)[0], module.eval()(x[0]), terms=terms(module))


def test_which_models_stack():
    assert {name for name in HERE if Network(built(name)[0]).stackable} == STACKABLE


@pytest.mark.parametrize("name", sorted(STACKABLE))
def test_a_stack_gives_each_rows_logits(name):
    module, shape = built(name)
    net = Network(module.double(), precision="fp64")
    w = flatten(module) + 0.01 * torch.randn(
        2, net.size, generator=torch.Generator().manual_seed(1), dtype=torch.float64
    )
    x = torch.randn(2, 3, *shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    stacked = net.bind(w)(x)
    for k in range(2):
        torch.testing.assert_close(
            net.bind(w[k : k + 1])(x[k : k + 1])[0], stacked[k], rtol=1e-10, atol=1e-12
        )


@pytest.mark.slow
@every_model
def test_the_gradient_is_that_of_finite_differences(name):
    module, shape = built(name)
    net = Network(module.double(), precision="fp64")
    generator = torch.Generator().manual_seed(0)
    x = inputs(module, 1, 2, *shape, generator=generator, dtype=torch.float64)
    w = flatten(module)[None].requires_grad_()
    buffers = {n: b[None].clone() for n, b in net.buffers.items()}
    target = torch.randn(1, 2, 10, generator=generator, dtype=torch.float64)
    (net.bind(w, buffers)(x) * target).sum().backward()
    v = torch.randn(w.shape, generator=generator, dtype=torch.float64) / math.sqrt(net.size)
    with torch.no_grad():
        up, down = ((net.bind(w + s * 1e-6 * v, buffers)(x) * target).sum() for s in (1, -1))
    assert float((up - down) / 2e-6) == pytest.approx(float((w.grad * v).sum()), rel=1e-5, abs=1e-8)


@every_model
@pytest.mark.slow
def test_the_initialisation_is_the_seeds_alone(name):
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    first, again, other = (flatten(built(name, seed)[0]) for seed in (3, 3, 4))
    assert torch.equal(before, torch.random.get_rng_state())
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@every_model
def test_described_with_its_size(name):
    entry = registry.model.get(name)
    assert entry.headline
    assert list(inspect.signature(entry.build).parameters)[:2] == ["shape", "classes"]


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("fedavg_cifar", (3, 28, 28)),
        ("fedavg_mnist", (1, 28, 28)),
        ("small_cnn", (6,)),
        ("small_cnn", (1, 3, 8)),
        ("lenet", (3, 15, 32)),
        ("vgg11", (3, 33, 33)),
        ("sl_vit", (3, 32, 28)),
        ("sl_vit", (1, 30, 30)),
        ("sl_vit", (4,)),
        ("resnet56", (3, 7, 32)),
        ("small_resnet", (64,)),
    ],
)
def test_data_of_another_shape_are_refused_with_a_way_out(name, shape):
    with pytest.raises(FldiagError, match=f"model '{name}' takes") as caught:
        models.build(name, shape, 10)
    assert "mlp" in caught.value.remedy
    assert caught.value.usage


def test_user_code_runs_only_when_the_user_says_so():
    with pytest.raises(FldiagError, match="does not import it because a file says so"):
        models.build("torch.nn:Identity", (3,), 2)
    with pytest.raises(FldiagError, match=r"cannot import no\.such"):
        models.build("no.such.module:Net", (3,), 2, allow_code={"no.such.module:Net"})
    with pytest.raises(FldiagError, match="returned OrderedDict; return a torch"):
        models.build("collections:OrderedDict", (3,), 2, allow_code={"collections:OrderedDict"})
