"""From a run or checkpoint to the Problem that a diagnostic sees; knows stored weights, never the training side."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fldiag import data, losses, models, user_code
from fldiag.checkpoint import base, foreign
from fldiag.checkpoint.run import Run
from fldiag.checkpoint.schema import Checkpoint
from fldiag.data import Dataset, partition, sources
from fldiag.data.public import deal
from fldiag.data.text import Reading
from fldiag.errors import FldiagError, unknown
from fldiag.models import pretrained
from fldiag.params import Layout
from fldiag.problem import inputs
from fldiag.problem.in_memory import as_logits, dataset_of, reading
from fldiag.problem.ingredients import Reduction, forward_of, unwrapped
from fldiag.problem.problem import Problem
from fldiag.sections import FILES, Normalise, PartitionSection


def problem(
    target: Run | Checkpoint,
    *,
    slice: str = "train",
    samples: int | None = None,
    client: int | None = None,
    round: int | None = None,
    device: str = "auto",
    dtype: torch.dtype = torch.float32,
    memory: int = 2 * 2**30,
    root: str | None = None,
    download: bool = False,
    normalise: Normalise | None = None,
    name: str | None = None,
    loss: str | Callable[..., Any] | None = None,
    reduction: Reduction = "mean",
    trainable: bool = False,
    differences: bool = False,
    weight_decay: float = 0.0,
    allow: str = "",
) -> Problem:
    """The loss surface of stored weights on a slice.

    ``client``: the trained weights of that client instead of the aggregated ones (only if stored). ``slice``,
    ``samples``: see ``fldiag.data.take``. ``round``: of a run (default: the last). ``normalise``: of data that are given,
    see ``fldiag.data.load``. ``loss``: a name of ``losses.BY_NAME``, ``pkg.mod:function`` or a function (outputs, y) -> the mean;
    by default what training minimises on such labels, and of batches that are dicts the model's own. ``reduction``,
    ``trainable``, ``differences``, ``weight_decay``, ``allow``: see ``Problem``.

    Raises FldiagError when model or data are not known and not given, do not fit, or are user code that only
    a file names: such code is never run.
    """
    checkpoint = target.checkpoint(round) if isinstance(target, Run) else target
    checkpoint = replace(checkpoint, data=_loaded(checkpoint.data))
    check_code(checkpoint)
    entries = inputs.draw(checkpoint.data) if _is_examples(checkpoint.data) else None
    checkpoint = checkpoint if entries is None else replace(checkpoint, data=entries)
    dataset = None if entries is not None else _dataset(checkpoint, root, download, normalise)
    module = _module(checkpoint, dataset)
    examples = None if entries is None else inputs.as_data(entries, forward_of(module))
    state, told = _named(checkpoint, module)
    params, buffers = _weights(checkpoint, module, state, client)
    where: Any = examples
    if examples is not None:
        if normalise is not None:
            raise FldiagError(
                f"normalise = {normalise!r} is for a data set, and the examples themselves were given",
                "leave it out, and give them as the model sees them",
                usage=True,
            )
        if slice != "train" or samples is not None:
            raise FldiagError(
                "slice and samples choose from a data set, and the examples themselves were given",
                "leave them out, or give the data set",
                usage=True,
            )
        y = examples.batch(0, 1)[1]
        made_of = _loss(loss, y.is_floating_point() if isinstance(y, Tensor) else None)
    else:
        assert dataset is not None
        parts = (
            _partition(checkpoint, dataset) if slice.startswith("client") or dataset.made else None
        )
        where = data.take(dataset, slice, parts, samples)
        made_of = _loss(loss, dataset.regression)
    labels: dict[str, Any] = {
        "moment": "aggregated" if client is None else "trained",
        "scope": "global" if client is None else "client",
    }
    if client is not None:
        labels["client"] = client
    if checkpoint.manifest:
        labels |= {
            "method": str(checkpoint.manifest["method"].get("name")),
            "round": checkpoint.round,
            "seed": checkpoint.manifest["seed"],
        }
    label = name or (checkpoint.label if client is None else f"{checkpoint.label} client {client}")
    made = Problem(
        module,
        made_of,
        where,
        params,
        buffers,
        name=label,
        dtype=dtype,
        device=device,
        memory=memory,
        labels=labels,
        reduction=reduction,
        trainable=trainable,
        differences=differences,
        weight_decay=weight_decay,
        allow=allow,
    )
    made.remarks += [*told, *([] if dataset is None else data.remarks(dataset))]
    return made


def check_code(c: Checkpoint) -> None:
    """Raises FldiagError, before anything is read, for code that only the file names as the model (or in its options) or the
    data of these weights, without consent. The other keys of its config are not used here."""
    config = c.config
    tree = {"model": config.get("model", {}), "data": {"name": config.get("data", {}).get("name")}}
    user_code.check({k: v for k, v in tree.items() if getattr(c, k) is None}, c.allow_code, c.path)


def _loss(named: str | Callable[..., Any] | None, regression: bool | None) -> Callable[..., Any]:
    """``regression`` None: the targets are no single tensor."""
    if named is None or callable(named):
        return named or (losses.own if regression is None else losses.criterion(regression))
    if ":" in named:
        found: Callable[..., Tensor] = user_code.load(named, "loss", {named})
        return found
    if named not in losses.BY_NAME:
        raise unknown("loss", named, losses.BY_NAME)
    return losses.BY_NAME[named]


def _is_examples(given: Any) -> bool:
    """Whether these are inputs and targets, not a data set with its parts."""
    return (
        not isinstance(given, (str, Path, Dataset))
        and given is not None
        and not inputs.is_split(given)
    )


def _loaded(given: Any) -> Any:
    """What was given as data; where it names a user's loader, what that returns, and a data set by its name."""
    if not isinstance(given, str) or ":" not in given or given.startswith(FILES):
        return given
    found = sources.call_loader(given, {given})
    arrays = inputs.is_split(found) and not any(
        isinstance(part, (Mapping, tuple, list)) for part in found
    )
    return given if isinstance(found, Dataset) or arrays else found


def _dataset(
    c: Checkpoint, root: str | None, download: bool, normalise: Normalise | None = None
) -> Dataset:
    given = _loaded(c.data)
    if isinstance(given, (str, Path)):
        return data.load(str(given), root, download, normalise=normalise, allow_code={str(given)})
    if normalise is not None:
        raise FldiagError(
            f"normalise = {normalise!r} is for data that are given by name, and these are not",
            "leave it out, or give the data: --data npz:PATH",
            usage=True,
        )
    if given is not None:
        return (
            given if isinstance(given, Dataset) else dataset_of(given, forward=forward_of(c.model))
        )
    spec = c.config.get("data", {})
    if "name" not in spec:
        raise FldiagError(
            f"{c.path} does not say which data it belongs to",
            "give them: --data digits | npz:PATH | csv:PATH | pkg.mod:loader",
            usage=True,
        )
    name = str(spec["name"])
    stored = spec.get("root")
    variant, how = spec.get("variant"), spec.get("normalise")
    own = _in_the_run(c, name)
    found = data.load(
        own or name,
        root or (stored if isinstance(stored, str) and Path(stored).is_dir() else None),
        download,
        variant if isinstance(variant, str) else None,
        normalise=how if isinstance(how, str) else None,
        reading=Reading.of(spec),
        allow_code=c.allow_code,
    )
    found = replace(found, name=name) if own else found
    wanted = c.manifest.get("provenance", {}).get("data")
    if wanted and found.fingerprint() != wanted:
        raise FldiagError(
            f"the data set {name!r} found here is not the one {c.path} was trained on (fingerprint "
            f"{found.fingerprint()}, not {wanted})",
            f"point to the same data, or accept it: --data {name}",
        )
    return found


def _in_the_run(c: Checkpoint, name: str) -> str | None:
    """Where data lie that a recorded run keeps in its own folder. Raises FldiagError when they were changed or are not there."""
    file = name.removeprefix("npz:")
    if "origin" not in c.manifest or file == name or Path(file).is_absolute():
        return None
    folder = c.path.parent.parent
    if (folder / "run.json").is_file() and file in (run := Run.open(folder)).index["files"]:
        return f"npz:{run.verified(file)}"
    if Path(file).is_file():  # a converted folder names its data as the command did
        return None
    raise FldiagError(
        f"the data of {c.path} are the file {file} of its run, and it does not lie in that",
        f"give them: --data npz:RUN/{file}",
    )


def _module(c: Checkpoint, dataset: Dataset | None) -> nn.Module:
    module = reading(_built(c, dataset), dataset)
    return (
        as_logits(module, dataset)[0] if dataset is not None and "origin" in c.manifest else module
    )


def _built(c: Checkpoint, dataset: Dataset | None) -> nn.Module:
    if isinstance(c.model, nn.Module):
        return base.restore(c.model, c)
    if c.model is not None:
        shape, classes = (dataset.shape, dataset.classes) if dataset is not None else _shapes(c)
        return base.restore(
            models.build(str(c.model), shape, classes, allow_code={str(c.model)}), c
        )
    if not c.manifest and (c.path.parent / pretrained.CONFIG).is_file():
        return pretrained.build(c.path.parent)
    spec = dict(c.config.get("model", {}))
    if "name" not in spec:
        raise FldiagError(
            f"{c.path} holds weights but does not say which model they belong to",
            "give it: --model NAME (fldiag list models) or --model pkg.mod:factory",
            usage=True,
        )
    name = str(spec.pop("name"))
    held = sum(t.numel() for t in c.state.values())
    made = models.build(
        name,
        tuple(c.manifest["shape"]),
        c.manifest["classes"],
        spec,
        seed=c.manifest["seed"],
        most=held,
        allow_code=c.allow_code,
    )
    return base.restore(made, c)


def _shapes(c: Checkpoint) -> tuple[tuple[int, ...] | None, int]:
    if c.manifest:
        return tuple(c.manifest["shape"]), c.manifest["classes"]
    examples = inputs.as_data(c.data)
    x, y = examples.batch(0, examples.n)
    if not isinstance(x, Tensor) or not isinstance(y, Tensor):
        return None, 0
    return tuple(x.shape[1:]), int(y.shape[1]) if y.is_floating_point() else int(y.max()) + 1


def _named(c: Checkpoint, module: nn.Module) -> tuple[foreign.State, list[str]]:
    """The state_dict with the model's own names, and a remark where it had others."""
    module = unwrapped(module)[0]
    if not c.manifest:
        c = replace(c, state=foreign.with_first_names(c.state, module))
    if c.manifest:
        return c.state, []
    state, prefix, alternatives = foreign.without_prefix(c.state, module)
    remarks = [foreign.several(c.key, c.alternatives)] if c.alternatives else []
    remarks += [foreign.several(prefix, alternatives)] if alternatives else []
    remarks += [f"the names fit the model without {prefix!r} before them"] if prefix else []
    return state, [f"{c.path.name}: {text}" for text in remarks]


def _weights(
    c: Checkpoint, module: nn.Module, state: foreign.State, client: int | None
) -> tuple[Any, Any]:
    names = {n for n, _ in module.named_buffers()}
    params = {n: t for n, t in state.items() if n not in names}
    buffers = {n: t for n, t in state.items() if n in names}
    if client is None:
        return params, buffers
    if c.clients is None or client not in c.client_ids:
        have = ", ".join(map(str, c.client_ids)) or "none"
        raise FldiagError(
            f"{c.path} holds no trained weights of client {client} (it has: {have})",
            "train with checkpoint.clients = 'sampled'",
            usage=True,
        )
    row = c.client_ids.index(client)
    if c.clients.shape[1:] != (Layout.of(module).size,):
        raise FldiagError(
            f"{c.path}: client weights of shape {list(c.clients.shape)} do not fit the model",
            "the file was edited; use the original",
        )
    return c.clients[row], {n: b[row] for n, b in c.buffers.items()}


def _partition(c: Checkpoint, dataset: Dataset | None) -> Sequence[Any] | None:
    """The run's own partition file if the checkpoint lies in its run, else dealt again from the config."""
    run = c.path.parent.parent
    if (run / "partition.npz").is_file():
        file = (
            Run.open(run).verified("partition.npz")
            if (run / "run.json").is_file()
            else run / "partition.npz"
        )
        return partition.load_parts(file)
    if (
        not c.manifest or "origin" in c.manifest
    ):  # how another program dealt its data cannot be told from here
        return None
    assert dataset is not None  # a run of fldiag names its data
    spec = PartitionSection.model_validate(c.config["partition"])
    return deal(dataset, spec, c.config["clients"]["total"], c.config.get("data", {}).get("public"))
