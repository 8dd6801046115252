"""What a federated method is: parts, each filling some slots of one fixed order.

The order, for every method (documented here and nowhere else):

======================  ==========================================================================
slot                    what a part may do there
======================  ==========================================================================
``send``                server: change the vector that is sent (a look-ahead point)
``begin``               client: prepare once per round (``local`` holds K clients as rows)
``batch``               change the minibatch of a step
``loss``                add a term to the local loss L_l, per client
``perturb``             a perturbation e: the gradient is then taken at w + e (at most one part)
``correct``             change the gradient: g -> g' (in the order of the parts)
(base optimiser)        clip, weight decay, momentum: from the config, the same for every method
``finish``              client: update its state, return what is uploaded besides w_k
``server``              server: w (the weighted mean at first) -> w' (in the order of the parts)
``refine``              server: work on the new model with public data (distillation)
``personalise``         after the last round: how a client makes a model of its own
======================  ==========================================================================

What a part asks of the data and of the model it names in ``needs``, and ``Method.check`` refuses a run without it. A new slot: a
method of ``Part`` that does nothing, a line in this table, and its one call (on the client in ``training/client.py``, on the
server in ``training/server.py``).

Rows: during local training every vector is [k, P] for the k clients still training in a stack; reduce over
the last axis with ``keepdim`` and the same line serves one client or many.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fldiag import registry
from fldiag.errors import FldiagError, error_text
from fldiag.local import Local
from fldiag.step import Output, Perturbation, Step

if TYPE_CHECKING:
    from fldiag.config import Config
    from fldiag.data import Dataset
    from fldiag.models.network import Network
    from fldiag.sections import TrainSection


#: What a part may ask of the data and of the model.
NEEDS = {
    "classes": "data with class labels, not real targets",
    "images": "images",
    "head": "a model whose last child module is its classifier, apart from a body",
    "features": "a model that is head(features(x)): an nn.Sequential, or a module with a method features",
    "stages": "a residual network, which shows its stages: model.name = 'small_resnet' (8x8 digits), 'resnet56', ...",
}


@dataclass(frozen=True)
class PersonalPlan:
    """How a client makes its own model of the final global one, and predicts with it.

    It trains e epochs with ``method`` (None: plain cross entropy), for each e of ``epochs`` (0: no training). The
    parts of ``method`` may begin elsewhere than at the global model, from the client's state.
    """

    epochs: tuple[int, ...]
    method: Method | None = None
    lr: str = "decayed"  # lr * lr_decay ** rounds; or "initial"
    steps: Callable[[int, TrainSection], int] | None = (
        None  # local steps of an epoch over n examples (None: one pass)
    )
    neighbours: Neighbours | None = None


@dataclass(frozen=True)
class Neighbours:
    """Prediction from weight p_knn + (1 - weight) p_model (kNN-Per, Marfoq et al. 2022).

    Of ``capacity`` training examples of the client, the ``k`` whose features phi are nearest vote with
    exp(-||phi(x) - phi_j||^2 / (dim scale)), dim the length of phi.
    """

    weight: float = 0.5
    k: int = 5
    capacity: int = 500
    scale: float = 1.0
    logits: bool = False  # mix with the model's raw logits, as the released code does


class Part:
    """A piece of a method: inherit, and override the slots you fill. State is declared by the initial values you return.

    >>> class Halve(Part):
    ...     def correct(self, step, g):
    ...         return g / 2
    >>> Method(Halve())
    Method(Halve)
    """

    #: server state vectors sent to the clients besides w_g (``step.local.sent[name]``)
    sent: tuple[str, ...] = ()
    #: names of what ``finish`` uploads besides w_k
    uploaded: tuple[str, ...] = ()
    #: what it asks of the data and of the model, of ``NEEDS``
    needs: tuple[str, ...] = ()
    #: the part reads ``out.maps`` (staged models)
    maps: bool = False
    #: pieces that the part cuts each minibatch into
    cuts: int = 1
    #: no client sends or receives anything
    isolated: bool = False
    #: the part needs unlabelled inputs (``round.public``, ``local.public``)
    public: bool = False

    def check(self, network: Network, dataset: Dataset, config: Config) -> None:
        """Before training starts: refuse (FldiagError) what the part cannot work with beside ``needs``, and look at the model."""

    def client_init(self, w0: Tensor) -> dict[str, Tensor]:
        """Initial state of each client, from the initial global weights [P]."""
        return {}

    def server_init(self, w0: Tensor) -> dict[str, Tensor]:
        """Initial state of the server, from the initial global weights [P]."""
        return {}

    def send(self, w_g: Tensor, state: dict[str, Tensor]) -> Tensor:
        """What the clients receive for w_g [P], given the server's state."""
        return w_g

    def begin(self, local: Local) -> None:
        """Prepare the clients of ``local`` for a round."""

    def batch(self, step: Step) -> None:
        """Change the minibatch of a step."""

    def loss(self, step: Step, out: Output) -> Tensor | None:
        """A term [k] added to the local loss."""

    def perturb(self, step: Step) -> Perturbation | None:
        """The perturbation e: the gradient is taken at w + e."""

    def correct(self, step: Step, g: Tensor) -> Tensor:
        """The corrected gradient [k, P]; the loop may overwrite the tensor returned."""
        return g

    def finish(self, local: Local) -> dict[str, Tensor]:
        """Update ``local.state``; return the uploads, each [K, ...]."""
        return {}

    def server(self, round: Round, w: Tensor) -> Tensor:
        """The new global weights [P], from the weighted mean w or what the parts before made of it."""
        return w

    def refine(self, round: Round, w: Tensor) -> Tensor:
        """The new global weights after work on public data."""
        return w

    def personalise(self) -> PersonalPlan | None:
        """How a client makes its own model after the last round."""


@dataclass(kw_only=True)
class Round:
    """What the server holds after local training: m sampled clients as rows in the order of their ids."""

    t: int
    lr: float
    w_g: Tensor  # [P] the server's weights before the round; what was sent differs where a part sends another point
    ids: list[int]
    rows: Tensor  # [m, P] trained weights
    n: Tensor  # [m] examples of each client
    steps: Tensor  # [m] local steps done
    clients: int  # N
    examples: int  # n, of all N clients
    uploads: dict[str, Tensor]
    state: dict[str, Tensor]
    effective: Tensor  # [m, 1] steps as the base optimiser weighs them
    network: Network
    seed: int
    public: Tensor | None = None  # [M, ...] unlabelled inputs on the server
    #: batch-norm statistics of the clients, [m, ...]
    buffers: dict[str, Tensor] = field(default_factory=dict)
    #: of the new model; ``refine`` may change them
    mean_buffers: dict[str, Tensor] = field(default_factory=dict)
    #: what the clients had received besides w_g
    sent: dict[str, Tensor] = field(default_factory=dict)
    p: Tensor = field(default_factory=lambda: torch.empty(0))
    memo: dict[Any, Any] = field(default_factory=dict)  # what parts keep within the round

    @property
    def m(self) -> int:
        return len(self.ids)

    def mean(self, rows: Tensor, p: Tensor | None = None) -> Tensor:
        """sum_k p_k rows_k (p uniform if not given), accumulated in float64: [m, P] -> [P]."""
        weights = [1 / self.m] * self.m if p is None else p.tolist()
        total = torch.zeros(rows.shape[1:], dtype=torch.float64, device=rows.device)
        for weight, row in zip(weights, rows, strict=True):
            total.add_(row, alpha=weight)
        return total.to(rows.dtype)


class Method:
    """An ordered composition of parts.

    Args:
        *parts: in the order in which they fill a slot; none: plain local training.

    >>> Method().sent
    ()
    """

    def __init__(self, *parts: Part):
        self.parts = parts

    def __repr__(self) -> str:
        return f"Method({', '.join(type(part).__name__ for part in self.parts)})"

    def __iter__(self) -> Iterator[Part]:
        return iter(self.parts)

    def check(self, network: Network, dataset: Dataset, config: Config) -> None:
        """Raises FldiagError for what a part cannot work with, and for two parts that perturb."""
        has = {
            "classes": not dataset.regression,
            "images": len(dataset.shape) == 3,
            "head": network.layout.has_head,
            "features": network.has_split,
            "stages": network.staged and callable(getattr(network.module, "sub", None)),
        }
        for part in self.parts:
            for need in part.needs:
                if not has[need]:
                    raise FldiagError(
                        f"method {config.method.name!r} needs {NEEDS[need]}", usage=True
                    )
            part.check(network, dataset, config)
        if sum(type(p).perturb is not Part.perturb for p in self.parts) > 1:
            raise FldiagError(
                "the method has two perturbation parts", "compose at most one part that perturbs"
            )

    def client_init(self, w0: Tensor) -> dict[str, Tensor]:
        """The parts' initial states of each client. Raises FldiagError where two parts use one name."""
        return self._merge("client_init", w0)

    def server_init(self, w0: Tensor) -> dict[str, Tensor]:
        """The parts' initial states of the server. Raises FldiagError where two parts use one name."""
        return self._merge("server_init", w0)

    def _merge(self, slot: str, w0: Tensor) -> dict[str, Tensor]:
        state: dict[str, Tensor] = {}
        for part in self.parts:
            for name, value in getattr(part, slot)(w0).items():
                if name in state:
                    raise FldiagError(
                        f"two parts keep a state named {name!r}", "rename one of them"
                    )
                state[name] = value
        return state

    @property
    def sent(self) -> tuple[str, ...]:
        """Names of what the clients receive besides w_g."""
        return tuple(name for part in self.parts for name in part.sent)

    @property
    def isolated(self) -> bool:
        """Whether no client sends or receives anything."""
        return any(part.isolated for part in self.parts)

    @property
    def personal(self) -> PersonalPlan | None:
        """How clients make their own models after the last round; None: the method does not say."""
        ways = (part.personalise() for part in self.parts)
        return next((way for way in ways if way is not None), None)


def build(name: str, options: Mapping[str, Any]) -> Method:
    """A registered method, or what a user's function ``pkg.mod:function`` returns.

    Raises FldiagError for an unknown method or option, for code that is not allowed, and for a function that fails or returns
    something else.
    """
    entry = registry.method.get(name)
    try:
        composition = entry.build(**entry.validate(dict(options)))
    except FldiagError:
        raise
    except Exception as error:  # whatever a user's function does
        raise FldiagError(
            f"method {name!r} failed ({error_text(error)})",
            "fix it; it is called with the options of the section method",
        ) from error
    if not isinstance(composition, Method):
        raise FldiagError(
            f"method {name!r} returned a {type(composition).__name__}",
            "return a fldiag.Method of parts, such as Method(MyPart())",
        )
    return composition


def method(
    name: str,
    *,
    source: str,
    neutral: dict[str, Any] | None = None,
    equals: str | None = None,
    model: tuple[str, ...] = (),
    needs: tuple[registry.Need, ...] = (),
    version: int = 1,
) -> Callable[[Callable[..., Method]], Callable[..., Method]]:
    """Register a method: the decorated function's signature is its hyper-parameter schema.

    ``neutral`` are hyper-parameters at which the method equals the simpler method ``equals``; the
    conformance tests hold every registered method to it. ``source`` is the paper and equation. ``model`` names
    hyper-parameters that are options of the model: they are set there too. ``needs`` says what it cannot train without at its
    defaults: "public" inputs, a model with "stages"; a preset may provide it. ``version`` counts the formulas: raise it
    when the same hyper-parameters come to mean another training, and say in the description what changed; a run is
    not resumed by another version.
    """
    return registry.method(
        name,
        source=source,
        neutral=neutral or {},
        equals=equals,
        model=model,
        needs=needs,
        version=version,
    )
