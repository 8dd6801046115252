"""From a run or checkpoint to the Problem that a diagnostic sees, and its parts: data, model, partition."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fldiag import data, losses, models, user_code
from fldiag.data import Dataset, partition, sources
from fldiag.data.packed import Packed
from fldiag.data.public import deal
from fldiag.errors import FldiagError, unknown
from fldiag.models import pretrained
from fldiag.params import Layout
from fldiag.problem.data import arguments, as_slice, describe, is_split, same
from fldiag.problem.loss import is_probabilities
from fldiag.problem.problem import Problem
from fldiag.problem.weights import copy_module, unwrap_model
from fldiag.runs import base
from fldiag.runs.checkpoint import Checkpoint, describe_choice
from fldiag.runs.given import dataset_of
from fldiag.runs.run import Run
from fldiag.sections import FILES, DataSection, Normalise, PartitionSection


def open_problem(
    target: Run | Checkpoint,
    *,
    slice: str = "train",
    samples: int | None = None,
    client: int | None = None,
    round: int | None = None,
    root: str | None = None,
    download: bool = False,
    normalise: Normalise | None = None,
    name: str | None = None,
    loss: str | Callable[..., Any] | None = None,
    device: str = "auto",
    **options: Any,
) -> Problem:
    """The loss surface of stored weights on a slice.

    ``client``: the trained weights of that client instead of the aggregated ones (only if stored). ``slice``,
    ``samples``: see ``fldiag.data.take``. ``round``: of a run (default: the last). ``normalise``: of data that are given,
    see ``fldiag.data.load``. ``loss``: a name of ``losses.BY_NAME``, ``pkg.mod:function`` or a function (outputs, y) -> the mean;
    by default what training minimises on such labels, and of batches that are dicts the model's own. ``options``: further ones
    of ``Problem``.

    Raises FldiagError when model or data are not known and not given, do not fit, or are user code that only
    a file names: such code is never run.
    """
    stored = target.checkpoint(round) if isinstance(target, Run) else target
    checkpoint = replace(stored, data=load_examples(stored.data))
    check_code(checkpoint)
    dataset: Dataset | None = None
    if _is_examples(checkpoint.data):
        _refuse_data_set_options(slice, samples, normalise)
        checkpoint = replace(checkpoint, data=as_slice(checkpoint.data))
    else:
        dataset = load_dataset(checkpoint, root, download, normalise)
    module = build_module(checkpoint, dataset)
    if dataset is None:
        examples: Any = checkpoint.data
        y = examples.batch(0, min(examples.n, 256))[1]
        regression = (
            y.is_floating_point() and not is_probabilities(y) if isinstance(y, Tensor) else None
        )
        criterion = _criterion(loss, regression)
    else:
        parts = load_partition(checkpoint, dataset) if slice.startswith("client") else None
        tests = _own_tests(checkpoint) if slice.endswith("/test") else None
        examples = data.take(dataset, slice, parts, samples, tests)
        criterion = _criterion(loss, dataset.regression, dataset.dense)
    params, buffers = _weights(checkpoint, module, client)
    remarks = [describe_choice(stored.key, stored.alternatives)] if stored.alternatives else []
    labels: dict[str, Any] = {
        "moment": "aggregated" if client is None else "trained",
        "scope": "global" if client is None else "client",
    }
    if client is not None:
        labels["client"] = client
    if checkpoint.manifest:
        labels |= {
            "method": str(checkpoint.config["method"].get("name")),
            "round": checkpoint.round,
            "seed": checkpoint.manifest["seed"],
        }
    label = checkpoint.label if client is None else f"{checkpoint.label} client {client}"
    problem = Problem(
        module,
        criterion,
        examples,
        params,
        buffers,
        name=name or label,
        device=device,
        labels=labels,
        **options,
    )
    problem.checkpoint = stored
    problem.run = target if isinstance(target, Run) else None
    if loss is None and dataset is None:
        problem.remarks.append(f"the loss is {losses.name_of(criterion)}")
    problem.remarks = [
        *(f"{stored.path.name}: {text}" for text in [*problem.remarks, *remarks]),
        *([] if dataset is None else data.remarks(dataset)),
    ]
    return problem


def _refuse_data_set_options(slice: str, samples: int | None, normalise: Normalise | None) -> None:
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


def check_code(c: Checkpoint) -> None:
    """Raises FldiagError, before anything is read, for code that only the file names as the model (or in its options) or the
    data of these weights, without consent. The other keys of its config are not used here."""
    config = c.config
    tree = {"model": config.get("model", {}), "data": {"name": config.get("data", {}).get("name")}}
    user_code.check({k: v for k, v in tree.items() if getattr(c, k) is None}, c.allow_code, c.path)


def _criterion(
    loss: str | Callable[..., Any] | None, regression: bool | None, dense: bool = False
) -> Callable[..., Any]:
    """``regression`` None: the targets are no single tensor."""
    if loss is None:
        return losses.model_loss if regression is None else losses.criterion(regression, dense)
    if callable(loss):
        return loss
    if ":" in loss:
        function: Callable[..., Tensor] = user_code.load_user(loss, {loss}, "loss")
        return function
    if loss not in losses.BY_NAME:
        raise unknown("loss", loss, losses.BY_NAME)
    return losses.BY_NAME[loss]


def _is_examples(source: Any) -> bool:
    """Whether these are inputs and targets, not a data set with its parts."""
    return (
        source is not None and not isinstance(source, (str, Path, Dataset)) and not is_split(source)
    )


def load_examples(source: Any) -> Any:
    """The examples that a user's loader returns where ``source`` names one; all other sources, and loaders of a data set, as
    they are."""
    if not isinstance(source, str) or ":" not in source or source.startswith(FILES):
        return source
    content = sources.call_loader(source, {source})
    arrays = is_split(content) and not any(
        isinstance(part, (Mapping, tuple, list)) for part in content
    )
    return source if isinstance(content, Dataset) or arrays else content


def load_dataset(
    c: Checkpoint, root: str | None, download: bool, normalise: Normalise | None = None
) -> Dataset:
    """The data set that comes with the checkpoint, else the one that it names, which must be the one of its training."""
    source = c.data
    if isinstance(source, (str, Path)):
        section = DataSection(name=str(source), root=root, normalise=normalise)
        return data.load(section, download=download, allow_code={section.name})
    if normalise is not None:
        raise FldiagError(
            f"normalise = {normalise!r} is for data that are given by name, and these are not",
            "leave it out, or give the data: --data npz:PATH",
            usage=True,
        )
    if isinstance(source, Dataset):
        return source
    if source is not None:
        return dataset_of(source)
    spec = c.config.get("data", {})
    if "name" not in spec:
        raise FldiagError(
            f"{c.path} does not say which data it belongs to",
            "give them: --data digits | npz:PATH | csv:PATH | pkg.mod:loader",
            usage=True,
        )
    name, folder = _in_the_run(c, str(spec["name"])), spec.get("root")
    root = root or (folder if isinstance(folder, str) and Path(folder).is_dir() else None)
    values = {key: spec[key] for key in DataSection.model_fields if key in spec}
    section = DataSection(**{**values, "name": name, "root": root})
    dataset = data.load(section, download=download, allow_code=c.allow_code)
    fingerprint = c.manifest.get("provenance", {}).get("data")
    if fingerprint and dataset.fingerprint() != fingerprint:
        raise FldiagError(
            f"the data set {name!r} found here is not the one {c.path} was trained on (fingerprint "
            f"{dataset.fingerprint()}, not {fingerprint})",
            f"point to the same data, or accept it: --data {name}",
        )
    return dataset


def _in_the_run(c: Checkpoint, name: str) -> str:
    """The name of data, where a recorded run keeps them in its own folder their file. Raises FldiagError when they were changed
    or are not there."""
    file = name.removeprefix("npz:")
    if "origin" not in c.manifest or file != "data.npz":
        return name
    folder = c.path.parent.parent
    if (folder / "run.json").is_file() and file in (run := Run.open(folder)).files:
        return f"npz:{run.verified(file)}"
    raise FldiagError(
        f"the data of {c.path} are the file {file} of its run, and it does not lie in that",
        f"give them: --data npz:RUN/{file}",
    )


def build_module(c: Checkpoint, dataset: Dataset | None) -> nn.Module:
    return with_packed_inputs(_built(c, dataset), dataset)


def merges(module: nn.Module) -> bool:
    """Whether the module's eval() rewrites its weights, as adapters do that merge into the weights beneath them."""
    probe = copy_module(module).train()
    before = {n: t.clone() for n, t in probe.state_dict().items()}
    after = probe.eval().state_dict()
    return not same({n: after.get(n, t) for n, t in before.items()}, before)


def with_packed_inputs(module: nn.Module, dataset: Dataset | None) -> nn.Module:
    """The module, or where the data set's rows hold several tensors a copy of it that takes such rows and returns one tensor."""
    if dataset is None or dataset.packed is None:
        return module
    reader = copy.deepcopy(unwrap_model(module))
    reader.register_forward_pre_hook(_Unpack(dataset.packed), with_kwargs=True, prepend=True)
    reader.register_forward_hook(_only_logits)
    return reader


class _Unpack:
    """Calls a module with the tensors of its rows, as a ``Problem`` calls it with these."""

    def __init__(self, packed: Packed):
        self.packed = packed

    def __call__(
        self, module: nn.Module, args: tuple[Tensor], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        dtype = next((p.dtype for p in module.parameters() if p.is_floating_point()), torch.float32)
        return arguments(inspect.signature(module.forward), self.packed.inputs(args[0], dtype))


def _only_logits(module: nn.Module, args: Any, output: Any) -> Tensor:
    return logits_of(output)


def logits_of(output: Any) -> Tensor:
    """A model's outputs, or the entry ``logits`` among them. Raises FldiagError where there is neither."""
    logits = output.get("logits") if isinstance(output, Mapping) else output
    if not isinstance(logits, Tensor):
        raise FldiagError(
            f"the model returns {describe(output)}, and diagnostics of a run need one tensor [n, outputs]",
            "let forward return it, or a dict that has it as 'logits'",
        )
    return logits


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
        kind = c.manifest.get("provenance", {}).get("module")  # a word for people, never imported
        folder = c.path.parent.parent if c.path.parent.name == "rounds" else c.path
        raise FldiagError(
            f"{c.path} holds weights but does not say which model they belong to"
            + (f" (it was recorded as a {kind})" if kind else ""),
            "give it: --model NAME (fldiag list models) or --model pkg.mod:factory, such as --model own_loop:net for a function "
            f"net() in own_loop.py; in Python: fldiag.load({str(folder)!r}, model=net)",
            usage=True,
        )
    name = str(spec.pop("name"))
    module = models.build(
        name,
        tuple(c.manifest["shape"]),
        c.manifest["classes"],
        spec,
        seed=c.manifest["seed"],
        most=sum(t.numel() for t in c.state.values()),
        allow_code=c.allow_code,
    )
    return base.restore(module, c)


def _shapes(c: Checkpoint) -> tuple[tuple[int, ...] | None, int]:
    if c.manifest:
        return tuple(c.manifest["shape"]), c.manifest["classes"]
    examples = as_slice(c.data)
    x, y = examples.batch(0, examples.n)
    if not isinstance(x, Tensor) or not isinstance(y, Tensor):
        return None, 0
    return tuple(x.shape[1:]), int(y.shape[1]) if y.is_floating_point() else int(y.max()) + 1


def _weights(c: Checkpoint, module: nn.Module, client: int | None) -> tuple[Any, Any]:
    """Weights and buffers; a state_dict holds all of them."""
    if client is None:
        return c.state, {}
    if c.clients is None or client not in c.client_ids:
        clients = ", ".join(map(str, c.client_ids)) or "none"
        raise FldiagError(
            f"{c.path} holds no trained weights of client {client} (it has: {clients})",
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


def _own_tests(c: Checkpoint) -> Sequence[Any] | None:
    """The test examples of every client, where the checkpoint's run has such."""
    folder, name = c.path.parent.parent, "test_partition.npz"
    if not (folder / "run.json").is_file() or name not in (run := Run.open(folder)).files:
        return None
    return partition.load_parts(run.verified(name))


def load_partition(c: Checkpoint, dataset: Dataset | None) -> Sequence[Any] | None:
    """The run's own partition file if the checkpoint lies in its run, else dealt again from the config."""
    folder = c.path.parent.parent
    file = folder / "partition.npz"
    if file.is_file():
        if (folder / "run.json").is_file():
            file = Run.open(folder).verified("partition.npz")
        return partition.load_parts(file)
    # how another program dealt its data cannot be told from here
    if not c.manifest or "origin" in c.manifest:
        return None
    assert dataset is not None  # a run of fldiag names its data
    spec = PartitionSection.model_validate(c.config["partition"])
    return deal(dataset, spec, c.config["clients"]["total"], c.config.get("data", {}).get("public"))
