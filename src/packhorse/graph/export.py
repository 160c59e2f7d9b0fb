"""Export a module to one flat graph of aten operations, without its weights.

In: a module whose forward returns a loss (its parameters may be on `meta`), an example batch.
Out: an `Exported`: the graph, and which placeholder is which parameter, constant or step input.
The export runs on fake tensors: nothing is computed and no weight is allocated. The module is
left as it was. A batch dimension that the model allows to vary stays symbolic.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export.graph_signature import InputKind

from packhorse.errors import ModelError, PackhorseError
from packhorse.graph.losses import as_tuple, find_loss
from packhorse.graph.masks import trace_like_eager
from packhorse.graph.refusals import check_changes, explain_failure

DENOMINATOR = "denominator"
_DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedParameter:
    """A distinct parameter: its canonical name, its other names, and what it looks like."""

    name: str
    aliases: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    trainable: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """A flat graph and the meaning of its placeholders (keys are placeholder names).

    `constants` holds real tensors (module buffers, lifted constants). `batch_is_dynamic` says
    that the graph is right for any number of rows; `device` is where the bodies run.
    """

    graph: fx.Graph
    parameters: Mapping[str, str]
    constants: Mapping[str, Tensor]
    inputs: Mapping[str, str]
    specs: Mapping[str, TracedParameter]
    rows: int
    length: int
    batch_is_dynamic: bool
    device: str


class _DataDependentError(Exception):
    """What the forward does depends on the values of tensors; the cause says where."""


class LossModule(nn.Module):
    """Calls a module with a batch and returns the micro-batch's share of the loss.

    transformers' models take `denominator` as `num_items_in_batch`; another module returns a
    (sum, count) pair, whose sum is divided by it, or a mean, which is divided by it as well (it is
    then the number of micro-batches).
    """

    def __init__(self, module: nn.Module, names: tuple[str, ...], *, takes_items: bool) -> None:
        super().__init__()
        self.module = module
        self.names = names
        self.takes_items = takes_items

    def forward(self, denominator: Tensor, *tensors: Tensor) -> Tensor:
        batch = dict(zip(self.names, tensors, strict=True))
        try:
            return self._find_loss(denominator, batch)
        except RuntimeError as error:
            if "data-dependent" not in str(error):
                raise
            # Torch prints the whole graph so far on stderr where it knows the reason.
            raise _DataDependentError(str(error)) from error

    def _find_loss(self, denominator: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        if self.takes_items:
            output: object = self.module(**batch, num_items_in_batch=denominator, use_cache=False)
            parts = as_tuple(output)
            return find_loss(self.module, output if parts is None else parts[0])[0]
        return find_loss(self.module, self.module(**batch))[0] / denominator


def is_transformers_model(module: nn.Module) -> bool:
    """Whether the module's loss takes `num_items_in_batch`, as transformers' causal LMs do."""
    return any(
        base.__name__ == "PreTrainedModel" and base.__module__.startswith("transformers.")
        for base in type(module).__mro__
    )


def describe_parameters(module: nn.Module) -> dict[str, TracedParameter]:
    """List distinct parameters by canonical name, in module order; tied names become aliases."""
    names: dict[int, list[str]] = {}
    tensors: dict[int, nn.Parameter] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
        tensors[id(parameter)] = parameter
    return {
        found[0]: TracedParameter(
            name=found[0],
            aliases=tuple(found[1:]),
            shape=tuple(tensors[key].shape),
            dtype=tensors[key].dtype,
            trainable=tensors[key].requires_grad,
        )
        for key, found in names.items()
    }


def export_module(
    module: nn.Module,
    batch: Mapping[str, Tensor],
    *,
    compute_dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> Exported:
    """Export the loss of `module` on a batch of this shape.

    Args:
        module: forward takes the batch as keyword arguments and returns a loss; see `LossModule`.
        batch: one micro-batch, rows first; only shapes and dtypes are used.
        compute_dtype: floating parameters are traced in this dtype; buffers keep theirs.
        device: where the bodies will run; a graph's constants name it, so torch must know it.

    Raises:
        ModelError: the module cannot be traced; names the reason torch gives.
    """
    specs = describe_parameters(module)
    _check_parameters(specs)
    first = next(iter(batch.values()))
    rows, length = first.shape[0], first.shape[1] if first.dim() > 1 else 1
    example_rows = max(2, rows)
    failure: Exception | None = None
    for dynamic in (True, False):
        shape_rows = example_rows if dynamic else rows
        try:
            with default_device(device):
                graph, signature, constants = _export(
                    module, batch, shape_rows, dynamic, compute_dtype
                )
        except PackhorseError:
            raise
        except Exception as error:
            if not dynamic:
                raise explain_failure(module, error) from error
            failure = error
            continue
        parameters, inputs, kept = _read_signature(
            module, batch, graph, signature, constants, specs
        )
        return Exported(
            graph=graph,
            parameters=parameters,
            constants=kept,
            inputs=inputs,
            specs=specs,
            rows=rows,
            length=length,
            batch_is_dynamic=dynamic,
            device=device,
        )
    raise ModelError(f"the model cannot be traced: {failure}")


def _check_parameters(specs: Mapping[str, TracedParameter]) -> None:
    """Refuse parameters without elements, or that would be kept and computed in another dtype."""
    for spec in specs.values():
        if 0 in spec.shape:
            raise ModelError(
                f"parameter {spec.name} has shape {list(spec.shape)}, so no elements",
                where=f"parameter {spec.name}",
                fix="register it as a buffer: nothing can be learnt of it",
            )
        if spec.dtype not in _DTYPES:
            kind = str(spec.dtype).removeprefix("torch.")
            raise ModelError(
                f"parameter {spec.name} is {kind}; parameters are float32, bfloat16 or float16",
                where=f"parameter {spec.name}",
                fix="call .float() on the model"
                if spec.dtype.is_floating_point
                else "register it as a buffer: nothing can be learnt of it",
            )


def default_device(device: str) -> contextlib.AbstractContextManager[object]:
    """Make new tensors on a device; on the CPU, where they are anyway, change nothing."""
    return contextlib.nullcontext() if device == "cpu" else torch.device(device)


def _export(
    module: nn.Module,
    batch: Mapping[str, Tensor],
    rows: int,
    dynamic: bool,
    compute_dtype: torch.dtype,
) -> tuple[fx.Graph, torch.export.ExportGraphSignature, dict[str, Tensor]]:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    names = tuple(batch)
    with (
        _fake_weights(module, mode, compute_dtype),
        mode,
        trace_like_eager("position_ids" in batch),
        _silence("torch.fx.experimental.symbolic_shapes"),
    ):
        tensors = tuple(
            torch.zeros((rows, *tensor.shape[1:]), dtype=tensor.dtype) for tensor in batch.values()
        )
        dims = tuple({0: torch.export.Dim.AUTO} for _ in tensors) if dynamic else None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            program = torch.export.export(
                LossModule(module, names, takes_items=is_transformers_model(module)),
                (torch.ones(()), *tensors),
                dynamic_shapes=(None, dims) if dims is not None else None,
                strict=False,
            )
    constants = {n: value for n, value in program.constants.items() if isinstance(value, Tensor)}
    return program.graph, program.graph_signature, constants


def _read_signature(
    module: nn.Module,
    batch: Mapping[str, Tensor],
    graph: fx.Graph,
    signature: torch.export.ExportGraphSignature,
    program_constants: Mapping[str, Tensor],
    specs: Mapping[str, TracedParameter],
) -> tuple[dict[str, str], dict[str, str], dict[str, Tensor]]:
    canonical = {alias: name for name, spec in specs.items() for alias in (name, *spec.aliases)}
    buffers = dict(module.named_buffers(remove_duplicate=False))
    users = iter((DENOMINATOR, *batch))
    parameters: dict[str, str] = {}
    inputs: dict[str, str] = {}
    constants: dict[str, Tensor] = {}
    for spec in signature.input_specs:
        placeholder = spec.arg.name
        target = (spec.target or "").removeprefix("module.")
        match spec.kind:
            case InputKind.PARAMETER:
                parameters[placeholder] = canonical[target]
            case InputKind.BUFFER:
                constants[placeholder] = buffers[target].detach()
            case InputKind.CONSTANT_TENSOR:
                constants[placeholder] = program_constants[spec.target or ""]
            case InputKind.USER_INPUT:
                inputs[placeholder] = next(users)
            case _:
                raise ModelError(f"the model takes an input of kind {spec.kind.name}")
    words: dict[str, str] = {}
    for spec in signature.input_specs:
        target = (spec.target or "").removeprefix("module.")
        kind = {InputKind.PARAMETER: "parameter", InputKind.USER_INPUT: "input"}.get(
            spec.kind, "buffer"
        )
        words[spec.arg.name] = f"the {kind} {target or inputs.get(spec.arg.name)!r}"
    check_changes(graph, words)
    used = {node.name for node in graph.nodes if node.op == "placeholder" and node.users}
    for name, meaning in inputs.items():
        if meaning == DENOMINATOR and name not in used:
            # Its loss would be a mean over each micro-batch, and their sum depend on the cut.
            raise ModelError(
                f"the loss of {type(module).__name__} ignores num_items_in_batch, so it depends on"
                " how a batch is cut",
                where=f"the forward of {type(module).__qualname__}",
                fix="wrap it in a module that returns a (sum, count) pair of the label tokens",
            )
    for name, tensor in constants.items():
        if name in used and tensor.is_meta:
            raise ModelError(
                f"the buffer behind {name!r} is on the meta device and has no values",
                fix="build the module with its buffers on the CPU (parameters may stay on meta)",
            )
    return parameters, inputs, constants


@contextlib.contextmanager
def _silence(name: str) -> Generator[None]:
    """Keep a logger quiet: what it says of a failure is in the error, in a user's words."""
    logger = logging.getLogger(name)
    before = logger.disabled
    logger.disabled = True
    try:
        yield
    finally:
        logger.disabled = before


@contextlib.contextmanager
def _fake_weights(
    module: nn.Module, mode: FakeTensorMode, compute_dtype: torch.dtype
) -> Generator[None]:
    """Swap parameters and buffers for fake tensors while tracing; ties stay ties."""
    parameters: list[tuple[nn.Module, str, nn.Parameter]] = []
    buffers: list[tuple[nn.Module, str, Tensor]] = []
    fakes: dict[int, nn.Parameter] = {}
    for owner in module.modules():
        parameters += [(owner, n, p) for n, p in _parameters_of(owner).items() if p is not None]
        buffers += [(owner, n, b) for n, b in _buffers_of(owner).items() if b is not None]

    def dtype_of(tensor: Tensor) -> torch.dtype:
        return compute_dtype if tensor.is_floating_point() else tensor.dtype

    with mode:
        for owner, name, parameter in parameters:
            if id(parameter) not in fakes:
                fakes[id(parameter)] = nn.Parameter(
                    torch.empty(parameter.shape, dtype=dtype_of(parameter)),
                    requires_grad=parameter.requires_grad,
                )
            _parameters_of(owner)[name] = fakes[id(parameter)]
        for owner, name, buffer in buffers:
            _buffers_of(owner)[name] = torch.empty(buffer.shape, dtype=buffer.dtype)
    try:
        yield
    finally:
        for owner, name, parameter in parameters:
            _parameters_of(owner)[name] = parameter
        for owner, name, buffer in buffers:
            _buffers_of(owner)[name] = buffer


def _parameters_of(module: nn.Module) -> dict[str, nn.Parameter | None]:
    return module._parameters  # pyright: ignore[reportPrivateUsage]  # swapped without side effects


def _buffers_of(module: nn.Module) -> dict[str, Tensor | None]:
    return module._buffers  # pyright: ignore[reportPrivateUsage]  # swapped without side effects
