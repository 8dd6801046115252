"""Is a network piecewise linear in the weights of each of its layers? Read off its graph, never its name.

If every output is an affine function of each layer's weights as long as no kink is crossed, the second
derivative of the outputs within a layer vanishes, and the layer's block of the Hessian of any loss is its
block of the Gauss-Newton matrix (Martens 2020, section 8.1). That holds when affine layers, each used once,
are joined by operations that are piecewise linear in everything that depends on weights.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional as F

from fldiag.curvature.layer_rules import LAYERS, rules
from fldiag.models.stacked import hooked

#: Of any number of arguments that depend on weights.
_SUMS = {
    operator.add,
    operator.iadd,
    operator.sub,
    operator.isub,
    operator.neg,
    torch.add,
    torch.sub,
    torch.cat,
    torch.stack,
    torch.maximum,
    torch.minimum,
    "add",
    "add_",
    "sub",
    "sub_",
    "neg",
    "maximum",
    "minimum",
}
#: Of one argument that depends on weights.
_LINEAR = {
    F.relu,
    F.relu_,
    torch.relu,
    torch.relu_,
    F.leaky_relu,
    F.relu6,
    F.hardtanh,
    F.max_pool2d,
    F.avg_pool2d,
    F.adaptive_avg_pool2d,
    F.adaptive_max_pool2d,
    F.pad,
    torch.flatten,
    torch.reshape,
    torch.mean,
    torch.sum,
    torch.squeeze,
    torch.unsqueeze,
    torch.permute,
    torch.transpose,
    torch.chunk,
    torch.split,
    torch.mul,
    torch.matmul,
    torch.div,
    torch.abs,
    operator.getitem,
    operator.mul,
    operator.imul,
    operator.truediv,
    operator.itruediv,
    operator.matmul,
    "relu",
    "relu_",
    "flatten",
    "view",
    "reshape",
    "mean",
    "sum",
    "squeeze",
    "unsqueeze",
    "permute",
    "transpose",
    "contiguous",
    "chunk",
    "split",
    "mul",
    "mul_",
    "div",
    "div_",
    "to",
    "float",
    "double",
    "clone",
    "abs",
    "expand",
    "repeat",
    "t",
    "view_as",
    "reshape_as",
}
#: What tells shapes, not values.
_SHAPES = {getattr, len, "size", "dim", "numel", "ndimension"}


class _Value(fx.Proxy):
    """Tells ``a += b`` from ``a + b``, which are the same to torch.fx."""


for _name in ("iadd", "isub", "imul", "itruediv"):

    def _write(self: _Value, other: Any, function: Any = getattr(operator, _name)) -> Any:
        return self.tracer.create_proxy("call_function", function, (self, other), {})

    setattr(_Value, f"__{_name}__", _write)


class _Tracer(fx.Tracer):
    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Value(node, self)

    def is_leaf_module(self, m: nn.Module, name: str) -> bool:
        return type(m) in LAYERS or (
            type(m).__module__.startswith("torch.nn") and not isinstance(m, nn.Sequential)
        )


def obstacle(module: nn.Module) -> str | None:
    """What keeps a module (in eval mode) from being piecewise linear in each layer's weights; None if nothing.

    Unknown operations count as obstacles, so None is a proof and anything else is not a disproof.
    """
    for name, m in module.named_modules():
        if hooked(m):
            return f"{name or 'the model'} has hooks"
        if m.training:
            return f"{name or 'the model'} is in training mode"
    owners: dict[int, str] = {}
    for name, p in module.named_parameters(remove_duplicate=False):
        if owners.setdefault(id(p), name) != name:
            return f"{owners[id(p)]} and {name} are tied"
    for name, m in module.named_modules():
        if any(True for _ in m.parameters(recurse=False)) and rules(m).squares is None:
            return f"{name or 'the model'} ({type(m).__name__}) holds weights outside affine layers"
    if type(module) in LAYERS:
        return _layer("the model", module)
    try:
        graph = _Tracer().trace(module)
    except Exception as error:  # whatever a forward does that cannot be traced
        return f"its forward cannot be traced: {error}"
    return _walk(graph, dict(module.named_modules()))


def _walk(graph: fx.Graph, modules: dict[str, nn.Module]) -> str | None:
    depends: set[fx.Node] = set()  # values that depend on weights
    visited: set[str] = set()  # layers
    for node in graph.nodes:
        heavy = [a for a in node.all_input_nodes if a in depends]
        if node.op == "call_module":
            target, m = str(node.target), modules[str(node.target)]
            if len(node.all_input_nodes) != 1:
                return f"{target} takes several inputs"
            weighted = any(True for _ in m.parameters())
            if weighted and target in visited:
                return f"{target} is used twice"
            visited.add(target)
            if (heavy or weighted) and (why := _layer(target, m)):
                return why
            if heavy or weighted:
                depends.add(node)
        elif node.op == "get_attr":
            owner, _, name = str(node.target).rpartition(".")
            if name in modules[owner]._parameters:
                return f"{node.target} is used outside its layer"
        elif node.op in ("call_function", "call_method") and heavy:
            if node.target in _SHAPES:
                if node.target is getattr and node.args[1] not in (
                    "shape",
                    "ndim",
                    "device",
                    "dtype",
                ):
                    return f"the attribute {node.args[1]}"
                continue
            why = _operation(node, heavy, depends)
            if why:
                return why
            depends.add(node)
    return None


def _operation(node: fx.Node, heavy: list[fx.Node], depends: set[fx.Node]) -> str | None:
    name = (
        node.target
        if isinstance(node.target, str)
        else getattr(node.target, "__name__", str(node.target))
    )
    if node.target in (F.dropout, F.dropout2d):
        active = node.kwargs.get("training", node.args[2] if len(node.args) > 2 else True)
        return "active dropout" if active else None
    in_place = name.endswith("_") or name in ("iadd", "isub", "imul", "itruediv")
    overwritten = node.kwargs.get("out", node.args[0] if in_place else None)
    if overwritten is not None and overwritten not in depends:
        return f"an operation in place on what does not depend on weights ({name})"
    if node.target in _SUMS:
        return None
    if node.target not in _LINEAR:
        return f"the operation {name}"
    if len(heavy) > 1 or _count(node, heavy[0]) > 1:
        return f"a product of activations ({name})"
    if name in ("truediv", "itruediv", "div", "div_") and heavy[0] is not node.args[0]:
        return "a division by activations"
    if name == "getitem" and heavy[0] is not node.args[0]:
        return "an index that depends on activations"
    return None


def _count(node: fx.Node, argument: fx.Node) -> int:
    """How often an argument occurs (x * x names it once among the input nodes)."""
    places: list[Any] = []
    fx.map_arg((node.args, node.kwargs), lambda n: places.append(n) if n is argument else None)
    return len(places)


def _layer(name: str, m: nn.Module) -> str | None:
    why = rules(m).obstacle(m)
    return why and f"{name} {why}"
