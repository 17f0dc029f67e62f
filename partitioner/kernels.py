"""Run a model's forward and backward on tensors without memory and write down every kernel, layer by layer.

Nothing is computed: parameters and inputs stand on the meta device. Tensor parallelism is told from the flow of data,
with no names: a matmul with a parameter whose input is whole on each rank is split by columns and makes a divided
tensor; one whose input is divided is split by rows and ends in an all-reduce (Shoeybi et al. 2019,
https://arxiv.org/abs/1909.08053). What lies between works on its share.

    x (whole) -> [q k v: columns] -> divided -> attention -> divided -> [out: rows] -> all-reduce -> whole
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from partitioner.losses import Loss, LossFunction
from partitioner.metarun import Shapes, layer_calls, on_meta, refuse_without_values
from partitioner.microbatches import BatchDim, Cutter, MicroBatch, as_call, named_dims
from partitioner.restore import untouched
from partitioner.structures import map_tensors, storage_of, tensors_in
from partitioner.tracing import unwrap
from partitioner.work import Kernel, KernelKind, LayerWork, ModelWork
from partitioner.written import parameters_kept

aten = torch.ops.aten

_MATMULS = {"mm", "addmm", "bmm", "baddbmm", "matmul", "linear", "_scaled_mm", "_grouped_mm"}
_NORMS = ("layer_norm", "group_norm", "batch_norm", "rms_norm")
_FREE = {
    "view", "_unsafe_view", "t", "transpose", "permute", "expand", "slice", "select", "unsqueeze", "squeeze", "detach",
    "alias", "as_strided", "split", "split_with_sizes", "unbind", "chunk", "reshape", "narrow", "empty", "empty_like",
    "empty_strided", "new_empty", "new_empty_strided", "lift_fresh", "diagonal", "unfold", "real", "imag", "set_",
    "view_as_real", "view_as_complex", "_reshape_alias", "is_same_size", "sym_size", "resize_", "_local_scalar_dense",
}  # fmt: skip
"""Operators that touch no memory of the device."""
_COPIES = {"clone", "copy_", "cat", "stack", "_to_copy", "contiguous", "index", "gather", "repeat", "constant_pad_nd"}
_REDUCTIONS = {"sum", "mean", "var", "var_mean", "amax", "amin", "norm", "linalg_vector_norm", "max", "min", "argmax"}


def record_work(
    model: nn.Module,
    example_inputs: Any,
    layers: Sequence[str],
    *,
    loss_fn: LossFunction | None = None,
    example_target: Any = None,
    batch_dim: BatchDim = 0,
    sizes: Sequence[int] | None = None,
    training: bool = True,
) -> ModelWork:
    """What each of `layers` runs, forward and backward; the model is left as it was.

    `layers`: ids as in a capture ("h.3", "norm#1"), in the order of their calls; the glue before the first one counts
    to it. `sizes`: micro-batch sizes to record, None: 1 and 2 where the batch allows it, or 2 and 4 where a layer
    refuses one sample. With no `loss_fn` the model's own loss is used, or else the backward starts from ones at its
    outputs. `training=False`: no backward.
    A model that decides by values is run for real where its parameters are; on the meta device it is refused by an
    UnsupportedModelError.
    """
    model = unwrap(model)
    args, kwargs = as_call(example_inputs)
    cutter = Cutter(named_dims(model, batch_dim))
    try:
        batch = cutter.batch_size(args, kwargs)
    except ValueError:
        batch = 1

    def at(wanted: Iterable[int]) -> tuple[list[int], list[tuple[LayerWork, ...]]]:
        parts = []
        for size in sorted(set(wanted)):
            whole = MicroBatch(args, dict(kwargs), example_target, batch)
            parts.append(
                cutter.cut(args, kwargs, example_target, math.ceil(batch / size))[0] if size < batch else whole
            )
        return [part.samples for part in parts], [_record(model, part, layers, loss_fn, training) for part in parts]

    try:
        sizes, recorded = at((1, min(2, batch)) if sizes is None else sizes)
    except ValueError:  # BatchNorm of a single value has no variance
        if sizes is not None or batch < 2:
            raise
        sizes, recorded = at((2, min(4, batch)))
    if len(recorded) == 2 and any(
        len(a.forward) != len(b.forward) or len(a.backward) != len(b.backward) for a, b in zip(*recorded, strict=True)
    ):
        sizes, recorded = sizes[-1:], recorded[-1:]
    widths = [parameter.element_size() for parameter in model.parameters()]
    return ModelWork(
        layer_ids=tuple(layers),
        sizes=tuple(sizes),
        layers_at=tuple(recorded),
        dtype_bytes=max(widths, key=widths.count) if widths else 4,
        model=type(model).__name__,
    )


def _record(
    model: nn.Module, part: MicroBatch, layers: Sequence[str], loss_fn: LossFunction | None, training: bool
) -> tuple[LayerWork, ...]:
    try:
        with untouched(model), on_meta(model):
            args, kwargs, target = map_tensors((part.args, part.kwargs, part.target), lambda t: t.detach().to("meta"))
            moved = MicroBatch(args, kwargs, target, part.samples)
            return _Recorder(model, layers).run(moved, loss_fn, training)
    except (RuntimeError, NotImplementedError, TypeError) as error:
        refuse_without_values(model, error)
    with untouched(model), parameters_kept(model):
        return _Recorder(model, layers).run(part, loss_fn, training)


@dataclass
class _Launch:
    """A kernel as it was seen, before it is known who reads what it wrote."""

    kernel: Kernel
    layer: int
    backward: bool
    reads: list[tuple[int, float]]
    writes: list[tuple[int, float]]
    fusible: bool


@dataclass
class _Saved:
    layer: int
    nbytes: float
    float32: bool
    storage: int


@dataclass
class _Notes:
    launches: list[_Launch] = field(default_factory=list)
    saved: dict[int, _Saved] = field(default_factory=dict)
    forward_reduces: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    backward_reduces: dict[int, dict[int, float]] = field(default_factory=lambda: defaultdict(dict))


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every operator under autograd. A tensor is known by its storage, kept alive so that numbers stay unique."""

    def __init__(self, model: nn.Module, layers: Sequence[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.model = model
        self.layer_ids = list(layers)
        self.place = {layer: k for k, layer in enumerate(self.layer_ids)}
        self.layer = 0
        self.notes = _Notes()
        self.keep: list[Any] = []
        self.kept: set[int] = set()
        self.divided: set[int] = set()
        """Storages that tensor parallelism divides."""
        self.parameters = {storage_of(p): p for p in model.parameters()}
        self.ours = set(self.parameters) | {storage_of(b) for b in model.buffers()}
        self.weight_split: dict[int, str] = {}
        """Storage of a parameter -> "column", "row", "vocabulary"."""
        self.columns_input: dict[int, int] = {}
        """Storage of a column-split weight -> its input, whose gradients are summed once."""
        self.used_first: dict[int, int] = {}
        self.shapes = Shapes()
        self.backward = False
        self.starts: list[int] = []
        self.outputs: dict[int, list[torch.Tensor]] = {}

    # -- the run

    def run(self, part: MicroBatch, loss_fn: LossFunction | None, training: bool) -> tuple[LayerWork, ...]:
        training = training and any(p.requires_grad for p in self.model.parameters())
        self.ours |= {storage_of(tensor) for tensor in tensors_in((part.args, part.kwargs, part.target))}
        modules = dict(self.model.named_modules())
        paths = [path for layer in self.layer_ids if (path := layer.partition("#")[0]) in modules]
        with (
            torch.set_grad_enabled(training),
            layer_calls(self.model, paths, self.begin, self.end),
            _Attention(self),
            self,
            self.watch_saved(),
        ):
            self.starts.append(_sequence_number())
            output = self.model(*part.args, **part.kwargs)
            roots = self.roots(output, part, loss_fn)
            self.starts += [_sequence_number()] * (len(self.layer_ids) + 1 - len(self.starts))
            if training:
                self.backward = True
                grads = [torch.ones_like(root) for root in roots]
                wanted = [p for p in self.model.parameters() if p.requires_grad]
                if roots:
                    torch.autograd.grad(roots, wanted, grads, allow_unused=True)
        return self.result()

    def roots(self, output: Any, part: MicroBatch, loss_fn: LossFunction | None) -> list[torch.Tensor]:
        try:
            found = [Loss(self.model, loss_fn, None).of(output, part.target)]
        except ValueError:
            if loss_fn is not None:
                raise
            found = list(tensors_in(output))
        return [tensor for tensor in found if tensor.requires_grad]

    def begin(self, layer: str) -> None:
        place = self.place.get(layer, -1)
        if not self.backward and place >= len(self.starts):
            self.layer = place
            self.starts += [_sequence_number()] * (place + 1 - len(self.starts))

    def end(self, output: Any) -> None:
        if not self.backward:
            self.outputs[self.layer] = list(tensors_in(output))

    def watch_saved(self) -> Any:
        def pack(tensor: torch.Tensor) -> torch.Tensor:
            key = self.number(tensor)
            if key not in self.ours and key not in self.notes.saved and not self.backward:
                nbytes = float(tensor.untyped_storage().nbytes())
                self.notes.saved[key] = _Saved(self.layer, nbytes, tensor.dtype == torch.float32, key)
            return tensor

        return torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)

    def number(self, tensor: torch.Tensor) -> int:
        key = storage_of(tensor)
        if key not in self.kept:
            self.kept.add(key)
            self.keep.append(tensor.untyped_storage())
        return key

    # -- one operator

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = self.shapes.outcome(func, args, kwargs)
        name = func._schema.name.partition("::")[2]
        if self.backward:
            self.follow_node()
        self.note(func, name, args, kwargs, out)
        return out

    def follow_node(self) -> None:
        node = torch._C._current_autograd_node()
        if node is not None and not type(node).__name__.startswith("AccumulateGrad"):
            number = node._sequence_nr()
            if number < self.starts[-1]:
                self.layer = min(max(0, bisect_right(self.starts, number) - 1), len(self.layer_ids) - 1)

    def note(self, func: Any, name: str, args: Any, kwargs: Any, out: Any) -> None:
        inputs = [t for t in tensors_in((args, kwargs)) if isinstance(t, torch.Tensor)]
        outputs = [t for t in tensors_in(out) if isinstance(t, torch.Tensor)]
        numbers = [self.number(t) for t in inputs]
        made = [self.number(t) for t in outputs]
        if not self.backward:
            for key in numbers:
                if key in self.parameters:
                    self.used_first.setdefault(key, self.layer)
        base = name.removesuffix("_") if name not in ("copy_", "set_", "resize_") else name
        if base in _MATMULS:
            self.matmul(func, base, args, inputs, outputs[0])
            return
        sharded = any(key in self.divided for key in numbers)
        if base in _FREE or (all(key in numbers for key in made) and not name.endswith("_") and base != "copy_"):
            if sharded:
                self.divided.update(made)
            return
        if base == "embedding" and numbers and numbers[0] in self.parameters and self.is_large(inputs[0]):
            self.weight_split[numbers[0]] = "vocabulary"
            self.notes.forward_reduces[self.layer].append(_nbytes(outputs[0]))
            sharded = False
        elif sharded:
            self.divided.update(made)
        for key in numbers:
            if sharded and key in self.parameters and self.parameters[key].numel() > 1:
                self.weight_split.setdefault(key, "column")
        flops = self.flops(func, args, kwargs, out)
        kind = self.kind(base)
        reads = _pairs(zip(numbers, inputs, strict=True))
        writes = _pairs(zip(made, outputs, strict=True))
        if base in ("embedding", "gather", "index", "index_select") and reads and writes:
            reads = [(reads[0][0], writes[0][1]), *reads[1:]]
        moved = sum(size for _, size in (*reads, *writes))
        wide = sum(_nbytes(t) for t in (*inputs, *outputs) if t.dtype == torch.float32)
        whole = sum(_nbytes(t) for t in (*inputs, *outputs)) or 1.0
        self.launch(
            Kernel(kind, base, flops, moved, min(1.0, wide / whole), sharded=sharded), reads, writes,
            fusible=kind in ("elementwise", "reduction", "norm", "softmax"),
        )  # fmt: skip

    def is_large(self, table: torch.Tensor) -> bool:
        """A table over the vocabulary, which is split, not one over positions, which is not."""
        return table.shape[0] >= 8192

    def launch(self, kernel: Kernel, reads: Any, writes: Any, fusible: bool = False) -> None:
        self.notes.launches.append(_Launch(kernel, self.layer, self.backward, reads, writes, fusible))

    def flops(self, func: Any, args: Any, kwargs: Any, out: Any) -> float:
        count = flop_registry.get(func._overloadpacket)
        if count is not None:
            try:
                return float(count(*args, **kwargs, out_val=out))
            except (TypeError, ValueError, AttributeError):
                return 0.0
        return float(sum(t.numel() for t in tensors_in(out)))

    def kind(self, base: str) -> KernelKind:
        if "convolution" in base:
            return "convolution"
        if "attention" in base:
            return "attention"
        if any(norm in base for norm in _NORMS):
            return "norm"
        if "softmax" in base or "nll_loss" in base:
            return "softmax"
        if "embedding" in base:
            return "embedding"
        if base in _COPIES:
            return "copy"
        if base in _REDUCTIONS:
            return "reduction"
        return "elementwise"

    # -- matmuls and what tensor parallelism makes of them

    def matmul(self, func: Any, base: str, args: Any, inputs: list[torch.Tensor], out: torch.Tensor) -> None:
        left, right = inputs[:2] if base in ("_grouped_mm", "_scaled_mm") else inputs[-2:]
        a, b, c = self.number(left), self.number(right), self.number(out)
        batch = float(math.prod(left.shape[:-2])) if left.dim() > 2 else 1.0
        m, k, n = float(left.shape[-2]), float(left.shape[-1]), float(right.shape[-1])
        weight = b in self.parameters or a in self.parameters
        bias = self.number(inputs[0]) if base in ("addmm", "baddbmm") else None
        split: Any = ""
        gradient = False
        if left.dim() > 2:
            if a in self.divided or b in self.divided:
                split = "batch"
                self.divided.add(c)
        elif weight:
            split = self.split_linear(a, b, c, bias, _nbytes(out), b not in self.parameters)
        elif a in self.divided or b in self.divided:
            split = "m" if a in self.divided else "n"
            self.divided.add(c)
        if self.backward and not weight and left.dim() == 2:
            gradient = weight = True
        flops = 2 * batch * m * n * k
        reads = _pairs((self.number(t), t) for t in inputs)
        writes = [(c, _nbytes(out))]
        moved = _nbytes(left) + _nbytes(right) + _nbytes(out)
        wide = 1.0 if out.dtype == torch.float32 else 0.0
        kernel = Kernel(
            "matmul", base, flops, moved, wide, (batch, m, n, k), split, bool(split), gradient, weight, moved
        )
        self.launch(kernel, reads, writes)

    def split_linear(self, a: int, b: int, c: int, bias: int | None, nbytes: float, swapped: bool) -> str:
        """How a matmul with a parameter is divided. `swapped`: the parameter is on the left."""
        data, parameter = (b, a) if swapped else (a, b)
        if self.backward:
            if self.weight_split.get(parameter) == "row":
                self.divided.add(c)
                return "n"
            self.notes.backward_reduces[self.layer][self.columns_input.get(parameter, parameter)] = nbytes
            return "k"
        if data in self.divided:
            self.weight_split[parameter] = "row"
            self.notes.forward_reduces[self.layer].append(nbytes)
            return "k"
        self.weight_split.setdefault(parameter, "column")
        if bias is not None and bias in self.parameters:
            self.weight_split[bias] = "column"
        self.columns_input[parameter] = data
        self.divided.add(c)
        return "m" if swapped else "n"

    # -- the end

    def result(self) -> tuple[LayerWork, ...]:
        self.fuse()
        forward: dict[int, list[Kernel]] = defaultdict(list)
        backward: dict[int, list[Kernel]] = defaultdict(list)
        for launch in self.notes.launches:
            (backward if launch.backward else forward)[launch.layer].append(launch.kernel)
        saved: dict[int, list[_Saved]] = defaultdict(list)
        for one in self.notes.saved.values():
            saved[one.layer].append(one)
        own: dict[int, list[int]] = defaultdict(list)
        for key, layer in self.used_first.items():
            own[layer].append(key)
        alike: dict[LayerWork, LayerWork] = {}
        result = []
        for k in range(len(self.layer_ids)):
            outputs = {self.number(t): t for t in self.outputs.get(k, ())}
            work = LayerWork(
                forward=tuple(forward[k]),
                backward=tuple(backward[k]),
                saved_bytes=sum(one.nbytes for one in saved[k]),
                saved_float32_bytes=sum(one.nbytes for one in saved[k] if one.float32),
                saved_sharded_bytes=sum(one.nbytes for one in saved[k] if one.storage in self.divided),
                output_bytes=sum(_nbytes(t) for t in outputs.values()),
                output_float32_bytes=sum(_nbytes(t) for t in outputs.values() if t.dtype == torch.float32),
                parameters=sum(self.parameters[key].numel() for key in own[k]),
                sharded_parameters=sum(self.parameters[key].numel() for key in own[k] if key in self.weight_split),
                forward_reduces=tuple(self.notes.forward_reduces[k]),
                backward_reduces=tuple(self.notes.backward_reduces[k].values()),
            )
            result.append(alike.setdefault(work, work))
        return tuple(result)

    def fuse(self) -> None:
        """Join chains of elementwise operators, as a compiler or a hand-written kernel does.

        A chain grows by an operator of its own layer and direction that reads what it wrote last. It moves what it
        reads from outside, and what others still need of what it wrote.
        """
        launches = self.notes.launches
        readers: dict[int, list[int]] = defaultdict(list)
        writer: dict[int, int] = {}
        chain = list(range(len(launches)))
        needed = set(self.notes.saved)
        for k, launch in enumerate(launches):
            for key, _ in launch.reads:
                readers[key].append(k)
            if launch.fusible:
                for key, _ in launch.reads:
                    before = writer.get(key)
                    if (
                        before is not None
                        and launches[before].fusible
                        and launches[before].layer == launch.layer
                        and launches[before].backward == launch.backward
                        and _alike(launches[before], launch)
                    ):
                        chain[k] = chain[before]
                        break
            for key, _ in launch.writes:
                writer[key] = k
        members: dict[int, list[int]] = defaultdict(list)
        for k, first in enumerate(chain):
            members[first].append(k)
        for first, group in members.items():
            if not launches[first].fusible:
                kernel = launches[first].kernel
                launches[first].kernel = kernel._replace(fused_bytes=kernel.moved_bytes)
                continue
            inside = set(group)
            written = {key: size for k in group for key, size in launches[k].writes}
            read = {key: size for k in group for key, size in launches[k].reads if key not in written}
            last = {
                key: size
                for key, size in written.items()
                if key in needed or not readers[key] or any(k not in inside for k in readers[key])
            }
            moved = sum(read.values()) + sum(last.values())
            for k in group:
                kernel = launches[k].kernel
                bytes_here = moved if k == first else 0.0
                launches[k].kernel = kernel._replace(fused_bytes=bytes_here, fused_launches=int(k == first))


def _alike(first: _Launch, second: _Launch) -> bool:
    """Whether two operators run over the same elements, so that one kernel can do both."""
    largest = max((size for _, size in (*first.reads, *first.writes)), default=0.0)
    other = max((size for _, size in (*second.reads, *second.writes)), default=0.0)
    return 0.25 * largest <= other <= 4 * largest


class _Attention(TorchFunctionMode):
    """Keeps fused attention one kernel: torch has none for the meta device and would fall back to plain matmuls."""

    def __init__(self, recorder: _Recorder) -> None:
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        if func is nn.functional.scaled_dot_product_attention:
            return _fused(self.recorder, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _fused(
    recorder: _Recorder,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    out: torch.Tensor = _FusedAttention.apply(query, key, value, recorder, is_causal)  # type: ignore[no-untyped-call]
    return out


class _FusedAttention(torch.autograd.Function):
    """Attention that keeps only its inputs, its output and a sum a row (Dao 2023, https://arxiv.org/abs/2307.08691)."""

    @staticmethod
    def forward(ctx: Any, query: Any, key: Any, value: Any, recorder: _Recorder, is_causal: bool) -> Any:
        rows_first = (*query.shape[:-3], query.shape[-2], query.shape[-3]) if query.dim() > 2 else query.shape[:-1]
        out = query.new_empty((*rows_first, value.shape[-1]))  # heads of one position beside each other, as on CUDA
        out = out.transpose(-3, -2) if query.dim() > 2 else out
        rows = torch.empty(query.shape[:-1], dtype=torch.float32, device=query.device)
        ctx.save_for_backward(query, key, value, out, rows)
        ctx.recorder, ctx.is_causal = recorder, is_causal
        _note_attention(recorder, query, key, [query, key, value], [out], is_causal, 2.0, value.shape[-1])
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        query, key, value, out, _ = ctx.saved_tensors
        made = [torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)]
        ctx.recorder.follow_node()
        given = [query, key, value, out, *grads]
        _note_attention(ctx.recorder, query, key, given, made, ctx.is_causal, 5.0, value.shape[-1])
        return (*made, None, None)


def _note_attention(
    recorder: _Recorder, query: Any, key: Any, given: Any, made: Any, is_causal: bool, products: float, width: int
) -> None:
    """`products` matmuls of queries x keys x head size; half of them where later keys are masked."""
    pairs = float(math.prod(query.shape[:-1])) * key.shape[-2] * (0.5 if is_causal else 1.0)
    flops = 2 * pairs * (query.shape[-1] + width) / 2 * products
    sharded = any(recorder.number(t) in recorder.divided for t in given)
    if sharded:
        recorder.divided.update(recorder.number(t) for t in made)
    reads, writes = _pairs((recorder.number(t), t) for t in given), _pairs((recorder.number(t), t) for t in made)
    moved = sum(size for _, size in (*reads, *writes))
    wide = 1.0 if query.dtype == torch.float32 else 0.0
    shape = (float(math.prod(query.shape[:-2])), float(query.shape[-2]), float(key.shape[-2]), float(query.shape[-1]))
    split: Any = "batch" if sharded else ""
    recorder.launch(Kernel("attention", "attention", flops, moved, wide, shape, split, sharded), reads, writes)


def _sequence_number() -> int:
    return int(torch._C._autograd._get_sequence_nr())


def _nbytes(tensor: torch.Tensor) -> float:
    """Bytes that a kernel moves for a tensor: one that is expanded is read once."""
    if tensor.layout != torch.strided:
        return float(tensor.numel() * tensor.element_size())
    numel = math.prod(size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride or size == 1)
    return float(numel * tensor.element_size())


def _pairs(tensors: Any) -> list[tuple[int, float]]:
    found: dict[int, float] = {}
    for key, tensor in tensors:
        found[key] = max(found.get(key, 0.0), _nbytes(tensor))
    return list(found.items())
