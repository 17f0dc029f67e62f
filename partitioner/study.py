"""Follow a model on the meta device, in each precision and length that is asked for: what its layers run and hold.

    capture     -> layers, the tensors between them, parameters      the whole model, once a length
    kernels     -> what each layer launches                          in 32 bits; priced in any precision
    footprint   -> what each layer keeps and works with              in each width of numbers

Of a long list of equal blocks, each feeding the next, only the first few are followed for the last two: the others are
the same. 70 billion parameters take two seconds and no memory.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn

from partitioner.capture import Capture, CapturedTensor, capture
from partitioner.errors import ArgumentError, UnsupportedModelError
from partitioner.footprint import Footprint, bare_copy, bare_inputs, footprint
from partitioner.graph import CostGraph
from partitioner.kernels import record_work
from partitioner.losses import Loss, LossFunction
from partitioner.microbatches import BatchDim, Cutter, as_call, named_dims
from partitioner.profiles import Layer, LayerCost, LayerMemory, Parameter, Profile, Tensor
from partitioner.steps import Layout, Planner
from partitioner.structures import tensors_in
from partitioner.work import LayerWork, ModelWork

FOLLOWED = 3
"""So many blocks of a list of equal ones are followed; the last of them stands for the rest."""

Sizes = tuple[int, int]
Made = TypeVar("Made")


class Study:
    """One model and one batch of its inputs; what was followed is kept."""

    def __init__(
        self,
        model: nn.Module,
        inputs: Any,
        *,
        loss_fn: LossFunction | None = None,
        target: Any = None,
        batch_dim: BatchDim = 0,
        sequence_dim: int = 1,
        max_share: float = 1 / 16,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise ArgumentError(f"the model is {type(model).__name__}, not an nn.Module")
        self.model, self.loss_fn, self.max_share = model, loss_fn, max_share
        self.batch_dim, self.sequence_dim = named_dims(model, batch_dim), sequence_dim
        self._cutter = Cutter(self.batch_dim)
        args, kwargs = as_call(inputs)
        self.samples = self._cutter.batch_size(args, kwargs)
        self._call = bare_inputs((args, kwargs, target))
        self.length = next(
            (
                t.shape[sequence_dim]
                for t in tensors_in((args, kwargs))
                if t.dim() > max(sequence_dim, self._cutter.batch_dim)
            ),
            None,
        )
        stored = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
        self.stored_bytes = sum(tensor.numel() * tensor.element_size() for tensor in stored.values())
        self._captured: dict[int | None, Capture] = {}
        self._works: dict[int | None, ModelWork] = {}
        self._footprints: dict[tuple[torch.dtype | None, int | None], tuple[Sizes, list[Footprint]]] = {}
        self._graphs: dict[tuple[torch.dtype | None, int | None], CostGraph] = {}

    def expect_length(self) -> int:
        """That of the samples; ArgumentError where they have none."""
        if self.length is None:
            raise ArgumentError("the inputs have no length to change: say which dimension it is with sequence_dim")
        return self.length

    def check_positions(self, length: int | None) -> None:
        """ArgumentError where samples of that length (None: their own) are longer than a table of positions.

        Without values no index is looked up, so the model itself does not tell. Known are Hugging Face's, whose
        config says for how many positions there is a table; positions that are computed have no end.
        """
        config = getattr(self.model, "config", None)
        most, wanted = getattr(config, "max_position_embeddings", None), length or self.length
        if not isinstance(most, int) or wanted is None or wanted <= most:
            return
        for name, module in self.model.named_modules():
            # some tables keep two rows more than there are positions
            if isinstance(module, nn.Embedding) and most <= module.num_embeddings <= most + 2 and _of_positions(name):
                raise ArgumentError(
                    f"samples of length {wanted:,} are longer than the {most:,} positions of {name}: use at most "
                    f"{most:,}, or a model with a longer table"
                )

    def part(self, samples: int, length: int | None = None, dtype: torch.dtype | None = None) -> Any:
        """Arguments, keywords and target of so many samples of that length, without values."""

        def sized(tensor: torch.Tensor, dim: int | None) -> torch.Tensor:
            shape = list(tensor.shape)
            if dim is not None and len(shape) > dim and shape[dim] == self.samples:
                shape[dim] = samples
            if length is not None and len(shape) > self.sequence_dim and shape[self.sequence_dim] == self.length:
                shape[self.sequence_dim] = length
            return torch.empty(shape, dtype=tensor.dtype, device="meta", requires_grad=tensor.requires_grad)

        args, kwargs, target = self._call
        return bare_inputs(self._cutter.changed(args, kwargs, target, sized), dtype)

    def captured(self, length: int | None = None) -> Capture:
        """The layers, as captured with the larger of two micro-batch sizes."""
        if length not in self._captured:

            def found(dtype: torch.dtype | None) -> Capture:
                def at(sizes: Sizes) -> Capture:
                    args, kwargs, _ = self.part(sizes[1], length, dtype)
                    try:
                        return capture(bare_copy(self.model, dtype), args, kwargs, max_share=self.max_share)
                    except (NotImplementedError, RuntimeError) as error:
                        raise UnsupportedModelError(
                            f"the model cannot be followed without values: {str(error).splitlines()[0]}; measure it "
                            "with profile() instead"
                        ) from error

                return at_two_sizes(at)

            self._captured[length] = _in_some_width(found, None)
        return self._captured[length]

    def work(self, length: int | None = None) -> ModelWork:
        """Kernels, recorded in 32 bits."""
        if length not in self._works:
            self._works[length] = _in_some_width(lambda dtype: self._work(dtype, length), torch.float32)
        return self._works[length]

    def _work(self, dtype: torch.dtype | None, length: int | None) -> ModelWork:
        captured = self.captured(length)

        def followed(bare: nn.Module, stands_for: dict[str, str]) -> ModelWork:
            layers = [layer.id for layer in captured.layers if layer.id not in stands_for]

            def recorded(sizes: Sizes) -> ModelWork:
                args, kwargs, target = self.part(sizes[1], length, dtype)
                return record_work(
                    bare,
                    kwargs or args,
                    layers,
                    loss_fn=_bare_loss(self.loss_fn, dtype),
                    example_target=target,
                    batch_dim=self.batch_dim,
                    sizes=sizes,
                )

            return _complete(at_two_sizes(recorded), captured, stands_for)

        return self._shortened(dtype, captured, followed)

    def footprints(self, dtype: torch.dtype | None, length: int | None = None) -> tuple[Sizes, list[Footprint]]:
        """What each layer holds at two micro-batch sizes, floating-point tensors in `dtype` (None: as they are)."""
        key = (dtype, length)
        if key not in self._footprints:
            captured = self.captured(length)

            def followed(bare: nn.Module, stands_for: dict[str, str]) -> tuple[Sizes, list[Footprint]]:
                modules = {layer.id: layer.module for layer in captured.layers if layer.id not in stands_for}
                loss_fn = _bare_loss(self.loss_fn, dtype)

                def told(sizes: Sizes) -> tuple[Sizes, list[Footprint]]:
                    found = []
                    for size in sizes:
                        args, kwargs, target = self.part(size, length, dtype)
                        print_ = footprint(bare, modules, args, kwargs, _finish(bare, loss_fn, target))
                        found.append(_whole(print_, captured, stands_for))
                    return sizes, found

                return at_two_sizes(told)

            self._footprints[key] = self._shortened(dtype, captured, followed)
        return self._footprints[key]

    def graph(self, dtype: torch.dtype | None, prices: Planner, length: int | None = None) -> CostGraph:
        """The layers with what they hold, in `dtype`, and what they take in the first precision asked for."""
        key = (dtype, length)
        if key not in self._graphs:
            sizes, prints = self.footprints(dtype, length)
            captured = self.captured(length)
            self._graphs[key] = CostGraph(self._profile(captured, sizes, prints, prices, dtype))
        return self._graphs[key]

    def must_divide(self, dtype: torch.dtype | None, length: int | None = None) -> dict[str, int]:
        """Weights that tensor parallelism must divide evenly, and that dimension's size; tables can be padded."""
        captured = self.captured(length)
        print_ = self.footprints(dtype, length)[1][0]
        return {
            parameter.names[0]: parameter.shape[print_.divided[parameter.names[0]]]
            for parameter in captured.parameters
            if parameter.names[0] in print_.divided
            and len(parameter.shape) > 1
            and parameter.names[0] not in print_.tables
        }

    def _shortened(
        self, dtype: torch.dtype | None, captured: Capture, follow: Callable[[nn.Module, dict[str, str]], Made]
    ) -> Made:
        """`follow(model, stands for)` with long lists of equal blocks cut short, or else with the whole model."""
        lists = _repeated(captured, self.model)
        if lists:
            bare = bare_copy(self.model, dtype)
            stands_for: dict[str, str] = {}
            for path, blocks in lists.items():
                container = bare.get_submodule(path)
                for block in blocks[FOLLOWED:]:
                    del container._modules[block.removeprefix(f"{path}." if path else "")]
                    stands_for[block] = blocks[FOLLOWED - 1]
            try:
                return follow(bare, stands_for)
            except (UnsupportedModelError, ArgumentError, LookupError, ValueError, TypeError, RuntimeError):
                pass  # its forward counts the blocks
        return follow(bare_copy(self.model, dtype), {})

    def _profile(
        self,
        captured: Capture,
        sizes: Sizes,
        prints: list[Footprint],
        prices: Planner,
        dtype: torch.dtype | None,
    ) -> Profile:
        parameters = tuple(_parameter(one, prints[0], dtype) for one in captured.parameters)
        bytes_of = {parameter.names[0]: parameter for parameter in parameters}

        def layer(k: int) -> Layer:
            one = captured.layers[k]
            own = [bytes_of[name] for name in one.parameters]
            costs = []
            for size, told in zip(sizes, prints, strict=True):
                seconds, memory = prices.layer(prices.work.at(size)[k], Layout()), told.layers[one.id]
                costs.append(
                    LayerCost(
                        samples=size,
                        forward_s=max(seconds.forward),
                        backward_s=max(seconds.backward),
                        saved_bytes=memory.saved_bytes,
                        flops=one.flops,
                        memory=memory,
                    )
                )
            return Layer(
                id=one.id,
                class_name=one.class_name,
                parameter_bytes=sum(p.bytes for p in own),
                gradient_bytes=sum(p.bytes for p in own if p.trainable),
                key=one.key,
                costs=tuple(costs),
            )

        return Profile(
            model=captured.model,
            layers=tuple(layer(k) for k in range(len(captured.layers))),
            tensors=tuple(_tensor(one, sizes, self._cutter.batch_dim, dtype) for one in captured.tensors),
            parameters=parameters,
            buffers=captured.buffers,
            microbatch_sizes=sizes,
            no_cut=captured.no_cut,
            buffer_bytes=captured.buffer_bytes,
            batch_dim=self.batch_dim,
            device=prices.rates.name,
            device_kind="cuda",
            provenance="estimated",
            fingerprint=captured.fingerprint,
            call_digest=captured.call_digest,
        )


def at_two_sizes(make: Callable[[Sizes], Made]) -> Made:
    """With one and two samples; where a layer refuses one (BatchNorm of a single value does), with two and four."""
    try:
        return make((1, 2))
    except (ValueError, UnsupportedModelError):
        return make((2, 4))


def _in_some_width(make: Callable[[torch.dtype | None], Made], dtype: torch.dtype | None) -> Made:
    """In `dtype`, or in 16 bits where the model's kernels take nothing else."""
    try:
        return make(dtype)
    except UnsupportedModelError:
        try:
            return make(torch.bfloat16)
        except UnsupportedModelError:
            pass
        raise


def _repeated(captured: Capture, model: nn.Module) -> dict[str, list[str]]:
    """Lists of more than FOLLOWED equal blocks, of which each but the first feeds the next alone: path -> blocks."""
    order = [layer.id for layer in captured.layers]
    place = {name: k for k, name in enumerate(order)}
    keys = {layer.id: layer.key for layer in captured.layers}
    reach: dict[str, int] = {}
    for tensor in captured.tensors:
        last = max(place[name] for name in tensor.consumers)
        reach[tensor.producer] = max(reach.get(tensor.producer, 0), last)
    tied = {name for p in captured.parameters if len(p.layers) > 1 for name in p.layers}
    found = {}
    for path, module in model.named_modules():
        if not isinstance(module, (nn.ModuleList, nn.Sequential)):
            continue
        blocks = [f"{path}.{name}" if path else name for name in module._modules]
        run = [name for name in blocks if name in place]
        if len(run) <= FOLLOWED or len(run) < len(blocks):
            continue
        first = place[run[0]]
        chain = all(place[name] == first + k for k, name in enumerate(run))
        alike = len({keys[name] for name in run[1:]}) == 1 and not tied.intersection(run)
        feeds = all(reach.get(name, 0) <= place[name] + 1 for name in run[1:])
        if chain and alike and feeds:
            found[path] = run
    return found


def _complete(work: ModelWork, captured: Capture, stands_for: dict[str, str]) -> ModelWork:
    """The work of all layers, those that were not followed like the one that stands for them."""
    if not stands_for:
        return work
    ids = [layer.id for layer in captured.layers]

    def of(layers: tuple[LayerWork, ...]) -> tuple[LayerWork, ...]:
        known = dict(zip(work.layer_ids, layers, strict=True))
        return tuple(known[stands_for.get(name, name)] for name in ids)

    return dataclasses.replace(
        work, layer_ids=tuple(ids), layers_at=tuple(of(layers) for layers in work.layers_at), _cache={}
    )


def _whole(print_: Footprint, captured: Capture, stands_for: dict[str, str]) -> Footprint:
    """The footprint of all layers, those that were not followed like the one that stands for them."""
    if not stands_for:
        return print_
    layers: dict[str, LayerMemory] = {
        layer.id: print_.layers[stands_for.get(layer.id, layer.id)] for layer in captured.layers
    }
    divided = dict(print_.divided)
    for name, other in stands_for.items():
        prefix = f"{other}."
        for parameter, dim in print_.divided.items():
            if parameter.startswith(prefix):
                divided[f"{name}.{parameter.removeprefix(prefix)}"] = dim
    return Footprint(layers, divided, print_.tables)


def _of_positions(name: str) -> bool:
    """By the names that such tables have: position_embeddings, embed_positions, wpe."""
    return "position" in name or name.endswith("wpe")


def _bare_loss(loss_fn: LossFunction | None, dtype: torch.dtype | None) -> LossFunction | None:
    return bare_copy(loss_fn, dtype) if isinstance(loss_fn, nn.Module) else loss_fn


def _finish(model: nn.Module, loss_fn: LossFunction | None, target: Any) -> Callable[[Any], torch.Tensor | None]:
    """The loss of an output; None where the model has none of its own."""
    loss = Loss(model, loss_fn, None)

    def of(output: Any) -> torch.Tensor | None:
        try:
            return loss.of(output, target)
        except ArgumentError:
            if loss_fn is not None:
                raise
            return None

    return of


def _parameter(parameter: Parameter, print_: Footprint, dtype: torch.dtype | None) -> Parameter:
    """In `dtype`, with the dimension that a tensor-parallel group divides."""
    changes: dict[str, Any] = {"divided": print_.divided.get(parameter.names[0])}
    if dtype is not None and parameter.dtype in _FLOATING:
        changes |= {"dtype": str(dtype).removeprefix("torch."), "bytes": math.prod(parameter.shape) * dtype.itemsize}
    return parameter.model_copy(update=changes)


_FLOATING = ("float64", "float32", "float16", "bfloat16")


def _tensor(tensor: CapturedTensor, sizes: Sizes, batch_dim: int, dtype: torch.dtype | None) -> Tensor:
    """At both sizes, in `dtype`: as it was captured, in proportion where it has the samples' dimension."""
    grows = any(extent and extent % sizes[1] == 0 for extent in tensor.shape[: batch_dim + 1])
    changes = dtype is not None and tensor.dtype in _FLOATING
    nbytes = math.prod(tensor.shape) * dtype.itemsize if changes and dtype is not None else tensor.nbytes
    return Tensor(
        id=tensor.id,
        producer=tensor.producer,
        consumers=tensor.consumers,
        shape=tensor.shape,
        dtype=str(dtype).removeprefix("torch.") if changes else tensor.dtype,
        bytes_at=tuple(nbytes * size // sizes[1] if grows else nbytes for size in sizes),
        needs_gradient=tensor.needs_gradient,
    )


def most_common_dtype(model: nn.Module) -> torch.dtype | None:
    """Of the model's floating-point parameters, by their number of elements."""
    kinds: Counter[torch.dtype] = Counter()
    for parameter in model.parameters():
        if parameter.is_floating_point():
            kinds[parameter.dtype] += parameter.numel()
    return kinds.most_common(1)[0][0] if kinds else None
