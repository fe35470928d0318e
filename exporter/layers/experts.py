"""Sparse mixture-of-experts layers, in the canonical form of docs/contract.md."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import onnx_ir as ir

from ...contract import EXPERT_STACKS, EXPERTS_DOMAIN
from ...graph_opt.graph.lazy import STORED, lazy
from ...records import dataclass
from ...storage.stored_tensor import StoredStack
from ..config import ExpertsConfig
from ..decoder import Decoder
from ..weights import Array
from .elementwise import activation
from .feed_forward import gated_linear_unit, gated_mlp
from .projections import linear

STACKS = ("gate_up_proj", "down_proj")
# The activation functions of experts in stacks, by their names in configurations.
_ACTIVATIONS = {"silu": "silu", "swish": "silu", "relu2": "relu2"} | dict.fromkeys(
    ("gelu_new", "gelu_fast", "gelu_pytorch_tanh"), "gelu"
)
LATENT = ("fc1_latent_proj", "fc2_latent_proj")  # in front of experts and behind them


def mlp(net: Decoder, layer: int, x: ir.Value) -> ir.Value:
    """Write the layer's mixture of experts, or its dense feed-forward layer if it has none."""
    experts = net.config.experts[layer]
    return gated_mlp(net, layer, x) if experts is None else sparse_mlp(net, x, experts)


Route = Callable[[Decoder, ir.Value, ExpertsConfig], tuple[ir.Value, ir.Value]]


@dataclass(frozen=True)
class SoftmaxRoute:
    """Routes a token to the experts of the largest scores, weighted by the softmax of all scores.

    Args:
        name: the linear layer of the scores.
        bias: whether it has a bias.
    """

    name: str = "gate"
    bias: bool = False

    def scores(self, net: Decoder, tokens: ir.Value, experts: ExpertsConfig) -> ir.Value:
        """Return the scores [tokens, experts]."""
        return linear(net, self.name, tokens, net.config.hidden_size, experts.count, bias=self.bias)

    def __call__(self, net: Decoder, tokens: ir.Value, experts: ExpertsConfig) -> tuple[ir.Value, ir.Value]:
        """Return the routing weights and indices of each token's experts, both [tokens, per_token]."""
        likely = net.op("Softmax", self.scores(net, tokens, experts), axis=-1)
        weights, chosen = net.ops("TopK", likely, net.ints(experts.per_token), num_outputs=2, axis=-1)
        if experts.normalize:
            weights = net.op("Div", weights, net.op("ReduceSum", weights, net.ints(-1), keepdims=1))
        return weights, chosen


@dataclass(frozen=True)
class StackedForm:
    """Experts whose matrices a file holds in stacks: gate, up and down apart, or the first two as one.

    Args:
        module: the module of the stacks within the layer's; "" for the layer's own.
        bias: whether each expert's linear layers have biases, stored in stacks too.
        beta: added to the up projection.
    """

    module: str = "experts"
    bias: bool = False
    beta: float = 0.0


WriteExpert = Callable[[Decoder, ir.Value, int, ExpertsConfig], ir.Value]


def sparse_mlp(
    net: Decoder,
    x: ir.Value,
    experts: ExpertsConfig,
    *,
    route: Route = SoftmaxRoute(),  # noqa: B008 -- it is frozen
    expert: WriteExpert | None = None,
    stacked: StackedForm | None = None,
    shared: Callable[[Decoder, ir.Value, ExpertsConfig], ir.Value] | None = None,
) -> ir.Value:
    """Write a sparse mixture of experts with top-k routing (https://arxiv.org/abs/2401.04088).

    Copies of the tokens are sorted by expert and split, so that each expert computes only its own tokens
    (perhaps none) and every weight belongs to a plain MatMul. The results are sorted back by token and
    summed. ScatterND with reduction "add" is not used: onnxruntime's runs in several threads and loses
    additions where a token occurs twice.

    Args:
        net: the graph to write into.
        x: [batch, sequence, hidden].
        experts: their number and sizes.
        route: returns weights and indices of each token's experts.
        expert: writes one expert; by default a gated MLP.
        stacked: the form of what ``expert`` writes, where a target takes it in stacks; None for no such form.
        shared: writes the expert of all tokens; by default with a gate.
    """
    hidden, bias = net.config.hidden_size, net.config.mlp_bias
    size = experts.latent or hidden
    with net.scope(experts.scope):
        tokens = net.op("Reshape", x, net.ints(-1, hidden))
        form = StackedForm() if expert is None else stacked
        stacks = None if form is None else _stacks(net, experts, form)
        routing: tuple[ir.Value, ...]
        if stacks is not None and isinstance(route, SoftmaxRoute):
            routing = (route.scores(net, tokens, experts),)  # the kernel computes the softmax
        else:
            routing = route(net, tokens, experts)
        if experts.latent:
            tokens = linear(net, LATENT[0], tokens, hidden, size, bias=bias)
        if form is not None and stacks is not None:
            mixed = _stacked_experts(net, tokens, routing, stacks, experts, form)
        else:
            mixed = _single_experts(net, tokens, routing, experts, expert or _expert)
        if experts.latent:
            mixed = net.op("Reshape", mixed, net.ints(-1, size))
            mixed = linear(net, LATENT[1], mixed, size, hidden, bias=bias)
        mixed = net.op("Reshape", mixed, net.op("Shape", x))
        if not experts.shared:
            return mixed
        return net.op("Add", mixed, (shared or _shared_expert)(net, x, experts))


def _single_experts(
    net: Decoder,
    tokens: ir.Value,
    routing: tuple[ir.Value, ...],
    experts: ExpertsConfig,
    write: WriteExpert,
) -> ir.Value:
    """Write each expert; return the weighted sum of their results [tokens, 1, hidden]."""
    weights, chosen = routing
    order, sizes = _sort_by_expert(net, chosen, experts.count)
    rows = net.op("Div", order, net.constant(experts.per_token, np.int64, "experts_per_token"))
    groups = net.ops("Split", net.op("Gather", tokens, rows), sizes, num_outputs=experts.count, axis=0)
    results = [write(net, group, index, experts) for index, group in enumerate(groups)]
    by_token = net.op("Gather", net.op("Concat", *results, axis=0), _argsort(net, order))
    of_token = net.op(
        "Reshape", by_token, net.ints(-1, experts.per_token, experts.latent or net.config.hidden_size)
    )
    return net.op("MatMul", net.op("Unsqueeze", weights, net.ints(1)), of_token)


def _stacks(net: Decoder, experts: ExpertsConfig, form: StackedForm) -> dict[str, StoredStack] | None:
    """Return the stacks of gate, up and down by module; None unless the graph may take them as they are."""
    if net.config.hidden_act not in _ACTIVATIONS:
        return None
    hidden, width = experts.latent or net.config.hidden_size, experts.width
    *entering, down = (name for name in experts.names if name)
    for apart in (entering, [STACKS[0]]):
        names = [f"{form.module}.{name}".lstrip(".") for name in (*apart, down)]
        stacks = net.checkpoint.stacks([net.qualified(f"{name}.weight") for name in names])
        rows = width * len(entering) // len(apart)
        shapes = [(experts.count, rows, hidden)] * len(apart) + [(experts.count, hidden, width)]
        # The kernels have one form for gate and up.
        if stacks and len({stack.type_name for stack in stacks[:-1]}) == 1:
            return dict(zip(names, stacks, strict=True)) if [s.shape for s in stacks] == shapes else None
    return None


def _stacked_experts(
    net: Decoder,
    tokens: ir.Value,
    routing: tuple[ir.Value, ...],
    stacks: Mapping[str, StoredStack],
    experts: ExpertsConfig,
    form: StackedForm,
) -> ir.Value:
    """Write the experts as one node; return the weighted sum of their results [tokens, 1, hidden].

    Args:
        net: the graph to write into.
        tokens: [tokens, hidden].
        routing: weights and indices of each token's experts; or the router's scores only.
        stacks: gate, up and down by module.
        experts: their number and sizes.
        form: what ``stacks`` leave out.
    """
    weights = [
        net.initializer(_floats_of(stack, net.qualified(f"{name}.weight"))) for name, stack in stacks.items()
    ]
    if form.bias:
        sizes = {name: (experts.count, stack.shape[1]) for name, stack in stacks.items()}
        weights += [net.weight(f"{name}.bias", *size) for name, size in sizes.items()]
    mixed = net.foreign_op(
        EXPERTS_DOMAIN,
        EXPERT_STACKS,
        tokens,
        routing[0],
        routing[1] if len(routing) > 1 else None,
        *weights,
        per_token=experts.per_token,
        normalize=int(experts.normalize and len(routing) == 1),
        activation=_ACTIVATIONS[net.config.hidden_act],
        gated=int(bool(experts.names[0])),
        alpha=experts.alpha,
        beta=form.beta,
        limit=experts.limit,
        stored_bits=[stack.bits for stack in stacks.values()],
    )
    mixed.dtype, mixed.shape = (
        ir.DataType.FLOAT,
        ir.Shape([None, 1, experts.latent or net.config.hidden_size]),
    )
    return mixed


def _floats_of(stack: StoredStack, name: str) -> ir.LazyTensor:
    tensor = lazy(stack.read, ir.DataType.FLOAT, stack.shape)
    tensor.name, tensor.meta[STORED] = name, stack
    return tensor


def _sort_by_expert(net: Decoder, chosen: ir.Value, count: int) -> tuple[ir.Value, ir.Value]:
    """Return the permutation that sorts the flattened choices by expert, and each expert's count."""
    flat = net.op("Reshape", chosen, net.ints(-1))
    one_hot = net.op("OneHot", flat, net.constant(count, np.int64, "experts"), net.ints(0, 1), axis=-1)
    return _argsort(net, flat), net.op("ReduceSum", one_hot, net.ints(0), keepdims=0)


def _argsort(net: Decoder, numbers: ir.Value) -> ir.Value:
    _, order = net.ops("TopK", numbers, net.op("Shape", numbers), num_outputs=2, axis=0, largest=0)
    return order


def _expert(net: Decoder, x: ir.Value, index: int, experts: ExpertsConfig) -> ir.Value:
    """Write expert ``index``, applied to its tokens x [n, hidden]. Weights are stored alone or in stacks."""
    with net.scope("experts"):
        if net.qualified(STACKS[0]) in net.checkpoint:
            return stacked_expert(net, x, index, experts)
        with net.scope(str(index)):
            return gated_linear_unit(net, x, experts.names, experts.width)


def stacked_expert(
    net: Decoder,
    x: ir.Value,
    index: int,
    experts: ExpertsConfig,
    stacks: tuple[str, str] = STACKS,
    *,
    transposed: bool = False,
) -> ir.Value:
    """Write expert ``index``, whose weights are parts of two stacks, for x [n, hidden].

    The stacks are [experts, out, in], or [experts, in, out] if ``transposed``. Of GGUF files, the matrices of
    each expert are read instead.
    """
    with net.scope(str(index)):
        if net.qualified("gate_proj.weight") in net.checkpoint:
            return gated_linear_unit(net, x, ("gate_proj", "up_proj", "down_proj"), experts.width)
    hidden, width = net.config.hidden_size, experts.width

    def product(stored: str, name: str, x: ir.Value, shape: tuple[int, int], part: slice) -> ir.Value:
        def view(array: Array) -> Array:
            return array[index][:, part] if transposed else np.transpose(array[index][part])

        name = f"{index}.{name}"
        sizes = shape[::-1] if transposed else shape
        weight = net.weight(stored, experts.count, *sizes, view=view, new_name=f"{name}.weight")
        with net.scope(name):
            return net.op("MatMul", x, weight)

    both = (2 * width, hidden)
    gate = activation(net, product(stacks[0], "gate_proj", x, both, slice(width)))
    up = product(stacks[0], "up_proj", x, both, slice(width, None))
    return product(stacks[1], "down_proj", net.op("Mul", gate, up), (hidden, width), slice(None))


def _shared_expert(net: Decoder, x: ir.Value, experts: ExpertsConfig) -> ir.Value:
    """Write the shared expert, times sigmoid(gate(x))."""
    share = net.op("Sigmoid", linear(net, "shared_expert_gate", x, net.config.hidden_size, 1))
    with net.scope("shared_expert"):
        return net.op("Mul", share, gated_linear_unit(net, x, experts.names, experts.shared))
