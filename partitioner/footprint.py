"""What each layer of a model holds in memory, told from one forward and backward of it on the meta device.

Every tensor that a kernel makes is noted when it is born and when it dies, so three things are known without a device:
what autograd keeps of each layer until its backward, how much a layer needs beside that while it runs forward and
backward, and which of it a tensor-parallel group would divide.

What a group divides follows from the weights, as Megatron-LM splits a block (Shoeybi et al. 2019, section 3):

    whole input   x weight -> the weight is split by columns, the output is split
    split input   x weight -> the weight is split by rows, the output is whole (after an all-reduce)
    table of an embedding  -> split by rows, the output is whole

Anything made of split tensors is split, until it meets a whole one of the same size: there it is gathered.
"""

from __future__ import annotations

import contextlib
import copy
import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from partitioner.errors import UnsupportedModelError
from partitioner.metarun import layer_calls
from partitioner.profiles import LayerMemory
from partitioner.structures import map_tensors, storage_of, tensors_in

ALIGNMENT = 512
"""The CUDA caching allocator gives out memory in pieces of so many bytes."""


@dataclass(frozen=True)
class Footprint:
    """Memory of one forward and backward, by layer, and the parameters that a tensor-parallel group divides."""

    layers: dict[str, LayerMemory]
    divided: dict[str, int]
    """Parameter name -> its dimension that is divided."""
    tables: frozenset[str]
    """Those of them that are tables of embeddings: padded where they do not divide evenly."""


def bare_copy(model: nn.Module, dtype: torch.dtype | None = None) -> nn.Module:
    """A copy of the model without values, its floating-point tensors in `dtype`; the model itself is untouched."""

    def empty(tensor: torch.Tensor) -> torch.Tensor:
        wanted = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        return torch.empty_like(tensor, dtype=wanted, device="meta")

    memo: dict[int, Any] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None and id(parameter) not in memo:
                memo[id(parameter)] = nn.Parameter(empty(parameter), requires_grad=parameter.requires_grad)
        for buffer in module._buffers.values():
            if buffer is not None and id(buffer) not in memo:
                memo[id(buffer)] = empty(buffer)
    return copy.deepcopy(model, memo)


def bare_inputs(values: Any, dtype: torch.dtype | None = None) -> Any:
    """Inputs without values, their floating-point tensors in `dtype`."""

    def empty(tensor: torch.Tensor) -> torch.Tensor:
        wanted = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        return torch.empty_like(tensor, dtype=wanted, device="meta").requires_grad_(tensor.requires_grad)

    return map_tensors(values, empty)


def footprint(
    model: nn.Module,
    layers: Mapping[str, str],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    finish: Callable[[Any], torch.Tensor | None],
) -> Footprint:
    """Run forward and backward of a model on meta, as a CUDA device would, and tell what each layer holds.

    `layers`: layer id -> module path, in the order of the calls; a layer is its module's call and the code after it, up
    to the next layer. `finish(output)`: the loss, or None to start the backward from the output's tensors. Bytes are of
    this batch. A model whose forward needs values is an UnsupportedModelError.
    """
    with _untied(model) as names:
        return _followed(model, layers, args, kwargs, finish, _Ledger(model, list(layers), (args, kwargs), names))


def _followed(
    model: nn.Module,
    layers: Mapping[str, str],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    finish: Callable[[Any], torch.Tensor | None],
    ledger: _Ledger,
) -> Footprint:
    with layer_calls(model, layers.values(), ledger.begin), _gradients_dropped(model):
        try:
            with (
                torch.enable_grad(),
                LikeCuda(),
                ledger,
                torch.autograd.graph.saved_tensors_hooks(ledger.pack, ledger.unpack),
            ):
                output = model(*args, **kwargs)
                roots = finish(output)
                ledger.end_forward()
                if roots is None:
                    starts = [t for t in tensors_in(output) if t.requires_grad]
                else:
                    starts = [roots] if roots.requires_grad else []
                del output, roots
                if starts:
                    # torch.autograd.backward would leave the function mode, and checkpoints run their forward in it
                    ones = tuple(torch.ones_like(tensor) for tensor in starts)
                    torch.autograd.Variable._execution_engine.run_backward(
                        tuple(starts), ones, False, False, (), allow_unreachable=True, accumulate_grad=True
                    )
        except (NotImplementedError, RuntimeError) as error:
            raise UnsupportedModelError(
                f"the model cannot be followed without values: {type(error).__name__}: {str(error).splitlines()[0]}; "
                "measure it on a device with profile() instead"
            ) from error
        finally:
            for parameter in model.parameters():
                parameter.grad = None
    return ledger.result()


@contextlib.contextmanager
def _untied(model: nn.Module) -> Iterator[dict[nn.Parameter, str]]:
    """The name of each parameter, shared ones replaced by one for each place that uses them.

    On two stages their gradients never meet; on one device autograd would keep the first until the last is there.
    """
    names = {parameter: name for name, parameter in model.named_parameters()}
    seen: set[nn.Parameter] = set()
    undo: list[tuple[dict[str, Any], str, nn.Parameter]] = []
    for module in model.modules():
        for key, parameter in module._parameters.items():
            if parameter is None:
                continue
            if parameter in seen:
                own = nn.Parameter(torch.empty_like(parameter), requires_grad=parameter.requires_grad)
                names[own] = names[parameter]
                undo.append((module._parameters, key, parameter))
                module._parameters[key] = own
            seen.add(parameter)
    try:
        yield names
    finally:
        for table, key, parameter in undo:
            table[key] = parameter


@contextlib.contextmanager
def _gradients_dropped(model: nn.Module) -> Iterator[None]:
    """Each as soon as it is complete: the rank's own gradient memory is counted apart."""

    def accumulated(parameter: torch.Tensor) -> None:
        parameter.grad = None

    handles = [
        parameter.register_post_accumulate_grad_hook(accumulated)  # type: ignore[no-untyped-call]
        for parameter in model.parameters()
        if parameter.requires_grad
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@dataclass(eq=False)
class _Piece:
    """A piece of memory: whole or split over a tensor-parallel group, made by a matrix product, saved by a layer."""

    num_bytes: int
    split: bool
    product: bool
    layer: int
    saved_by: int | None = None
    dead: bool = False
    reference: Any = field(default=None, repr=False)


class _Ledger(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Every piece of memory from birth to death, in order, with the layer that was at work."""

    def __init__(self, model: nn.Module, layers: list[str], inputs: Any, names: Mapping[nn.Parameter, str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names = layers
        self.place = {name: k for k, name in enumerate(layers)}
        self.layer, self.forward = 0, True
        self.pieces: dict[int, _Piece] = {}
        self.made: list[_Piece] = []
        self.events: list[tuple[int, int, bool, bool]] = []
        """(bytes, layer, split, forward): positive at birth."""
        self.kept: weakref.WeakSet[_Saved] = weakref.WeakSet()
        self.saved: list[_Piece] = []
        self.weights = {storage_of(parameter): name for parameter, name in names.items()}
        self.given = {storage_of(t) for t in (*model.buffers(), *tensors_in(inputs))}
        self.held = list(model.parameters()), list(model.buffers()), inputs  # so that no key is used twice
        self.divided: dict[str, int] = {}
        self.tables: set[str] = set()
        self.whole_inputs: dict[int, int] = {}

    # -- memory

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        outputs = [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        new = [t for t in outputs if t.layout == torch.strided and not self._known(storage_of(t))]
        if new:
            given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
            split, product = self._divide(func, given, outputs[0])
            for tensor in new:
                if not self._known(storage_of(tensor)):
                    self._born(tensor, split, product)
        return out

    def _known(self, key: int) -> bool:
        return key in self.pieces or key in self.weights or key in self.given

    def _born(self, tensor: torch.Tensor, split: bool, product: bool) -> None:
        storage = tensor.untyped_storage()
        key, num_bytes = storage._cdata, math.ceil(storage.nbytes() / ALIGNMENT) * ALIGNMENT
        piece = _Piece(num_bytes, split, product, self.layer)
        self.pieces[key] = piece
        self.made.append(piece)
        self.events.append((num_bytes, self.layer, split, self.forward))

        def died(_: Any) -> None:
            piece.dead = True
            self.pieces.pop(key, None)
            self.events.append((-num_bytes, self.layer, split, self.forward))

        piece.reference = weakref.ref(storage, died)

    def pack(self, tensor: torch.Tensor) -> _Saved:
        saved = _Saved(tensor.detach() if tensor.requires_grad else tensor, self.layer)
        if self.forward:
            self.kept.add(saved)
        return saved

    def unpack(self, saved: _Saved) -> torch.Tensor:
        if not self.forward:
            self.layer = saved.layer
        return saved.tensor

    def begin(self, layer: str) -> None:
        if self.forward:
            self.layer = self.place.get(layer, self.layer)

    def end_forward(self) -> None:
        """What is saved now belongs to the first layer that saved it."""
        for saved in sorted(self.kept, key=lambda one: one.layer):
            piece = self.pieces.get(storage_of(saved.tensor)) if saved.tensor.layout == torch.strided else None
            if piece is not None and piece.saved_by is None:
                piece.saved_by = saved.layer
                self.saved.append(piece)
        self.products = [piece for piece in self.made if piece.product]
        self.forward = False

    # -- tensor parallelism

    def _divide(self, func: Any, given: Sequence[torch.Tensor], out: torch.Tensor) -> tuple[bool, bool]:
        """Whether what a kernel makes is split over a tensor-parallel group, and whether it is a product to keep."""
        name = func.overloadpacket.__name__
        weights = [t for t in given if storage_of(t) in self.weights]
        others = [t for t in given if storage_of(t) not in self.weights]
        split = [t for t in others if (piece := self.pieces.get(storage_of(t))) is not None and piece.split]
        fused = "scaled_dot_product" in name
        if name in _PRODUCTS and weights:
            matrices = [t for t in weights if t.dim() > 1]
            if matrices:
                if self.forward:
                    for weight in weights:
                        self._split_weight(weight, by_rows=bool(split))
                    if not split and others:
                        largest_input = max(t.numel() * t.element_size() for t in others)
                        self.whole_inputs[self.layer] = max(self.whole_inputs.get(self.layer, 0), largest_input)
                return not split, True
        if name == "embedding" and weights and self.forward:
            self.divided.setdefault(self.weights[storage_of(weights[0])], 0)
            self.tables.add(self.weights[storage_of(weights[0])])
        if name == "embedding_dense_backward":
            return True, False
        if not split or name == "embedding":
            return False, fused
        if "norm" in name and weights and weights[0].numel() == split[0].shape[-1] and split[0].dim() <= 3:
            return False, False  # over all of the features: they are gathered before
        largest = max(t.numel() for t in split)
        met = name not in _PRODUCTS and any(
            t.numel() >= largest and t.is_floating_point() and not any(t is one for one in split) for t in others
        )
        return not met, fused

    def _split_weight(self, weight: torch.Tensor, by_rows: bool) -> None:
        """Its dimension of inputs or outputs; `weight` may be seen through a transpose."""
        name = self.weights[storage_of(weight)]
        if weight.dim() < 2:
            if not by_rows:
                self.divided.setdefault(name, 0)
            return
        if weight.dim() > 2:
            return
        turned = weight.stride(0) < weight.stride(1)  # mm takes [inputs, outputs]
        inputs, outputs = (1, 0) if turned else (0, 1)
        self.divided.setdefault(name, inputs if by_rows else outputs)

    # -- the answer

    def result(self) -> Footprint:
        n = len(self.names)
        saved = np.zeros((n, 2))
        for piece in self.saved:
            assert piece.saved_by is not None
            saved[piece.saved_by, int(piece.split)] += piece.num_bytes
        products = np.zeros((n, 2))
        for piece in self.products:
            products[piece.layer, int(piece.split)] += piece.num_bytes
        events = np.array(self.events, dtype=np.int64).reshape(-1, 4)
        alive = np.cumsum(np.stack([events[:, 0] * (events[:, 2] == k) for k in (0, 1)], 1), axis=0)
        before = np.vstack([np.zeros(2), np.cumsum(saved, axis=0)])
        peaks: dict[bool, NDArray[Any]] = {}
        for forward in (True, False):
            peaks[forward] = np.zeros((n, 2))
            mine = events[:, 3] == int(forward)
            over = alive[mine] - before[events[mine, 1]]
            for k in range(n):
                rows = over[events[mine, 1] == k]
                if len(rows):
                    peaks[forward][k] = np.maximum(rows[int(np.argmax(rows.sum(axis=1)))], 0)
        layers = {
            name: LayerMemory(
                saved_bytes=int(saved[k].sum()),
                saved_divided_bytes=int(saved[k, 1]),
                product_bytes=int(products[k].sum()),
                product_divided_bytes=int(products[k, 1]),
                forward_peak_bytes=int(peaks[True][k].sum()),
                forward_peak_divided_bytes=int(peaks[True][k, 1]),
                backward_peak_bytes=int(peaks[False][k].sum()),
                backward_peak_divided_bytes=int(peaks[False][k, 1]),
                whole_input_bytes=self.whole_inputs.get(k, 0),
            )
            for k, name in enumerate(self.names)
        }
        return Footprint(layers, self.divided, frozenset(self.tables))


_PRODUCTS = frozenset("mm addmm bmm baddbmm linear matmul _grouped_mm _scaled_mm".split())


class _Saved:
    """A tensor that autograd holds; it is gone when its graph is."""

    def __init__(self, tensor: torch.Tensor, layer: int) -> None:
        self.tensor, self.layer = tensor, layer


class LikeCuda(TorchFunctionMode):
    """On meta, run the kernels that a CUDA device would run, where torch has others for meta.

    Dropout keeps a mask of one byte an element, attention runs fused (flash for half precision without a mask, else
    memory-efficient), RMSNorm keeps its input and one number a row.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        stand_in = _LIKE_CUDA.get(name)
        first = args[0] if args else kwargs.get("input", kwargs.get("query"))
        if stand_in is not None and isinstance(first, torch.Tensor) and first.is_meta:
            return stand_in(*args, **kwargs)
        return func(*args, **kwargs)


def _dropout(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    if not training or p == 0:
        return input
    return torch.native_dropout(input, p, True)[0]


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    if query.dim() == 3:
        call = (attn_mask, dropout_p, is_causal, scale, enable_gqa)
        return _attention(query[None], key[None], value[None], *call)[0]
    half = query.dtype in (torch.float16, torch.bfloat16)
    if half and attn_mask is None and query.shape[-1] == value.shape[-1]:
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        result: torch.Tensor = flash(query, key, value, dropout_p, is_causal, scale=scale)[0]
        return result
    if enable_gqa:
        groups = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(groups, -3), value.repeat_interleave(groups, -3)
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention
    bias = attn_mask
    if bias is not None and bias.dtype == torch.bool:
        bias = torch.zeros_like(bias, dtype=query.dtype)
    if bias is not None:
        bias = bias.expand(*query.shape[:-1], key.shape[-2])
    needs = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad)
    made: torch.Tensor = efficient(query, key, value, bias, needs, dropout_p, is_causal, scale=scale)[0]
    return made


class _RootMeanSquare(torch.autograd.Function):
    """Saves what the fused kernel saves: the input, the weight and one number a row."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor | None, num_dims: int) -> torch.Tensor:
        rows = x.new_empty(x.shape[: x.dim() - num_dims], dtype=torch.float32)
        ctx.save_for_backward(x, weight, rows)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), None if weight is None else torch.empty_like(weight), None


def _rms_norm(
    input: torch.Tensor, normalized_shape: Sequence[int], weight: torch.Tensor | None = None, eps: float | None = None
) -> torch.Tensor:
    result: torch.Tensor = _RootMeanSquare.apply(input, weight, len(normalized_shape))  # type: ignore[no-untyped-call]
    return result


_LIKE_CUDA: dict[str, Callable[..., torch.Tensor]] = {
    "dropout": _dropout,
    "scaled_dot_product_attention": _attention,
    "rms_norm": _rms_norm,
}
