"""The data of a Profile: what each layer costs, which tensors flow between layers, which parameters they use."""

from __future__ import annotations

import json
import math
import os
import secrets
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self, TypeVar

from pydantic import Field, ValidationError, model_validator

from partitioner.display import Shown
from partitioner.errors import ArgumentError, SetupError, expect_path
from partitioner.specs import Bytes, Frozen, Seconds

FORMAT_VERSION: Final = 1


class LayerMemory(Frozen):
    """What one layer holds at one micro-batch size, told without a device. `divided` is the part that a tensor-parallel
    group would divide; the rest every rank of the group holds whole, or by sequence under sequence parallelism."""

    saved_bytes: Bytes = 0
    """What autograd keeps from its forward until its backward; storages once, parameters left out."""
    saved_divided_bytes: Bytes = 0
    product_bytes: Bytes = 0
    """The part that selective recomputation keeps: results of products with weights and of fused attention."""
    product_divided_bytes: Bytes = 0
    forward_peak_bytes: Bytes = 0
    """The most alive during its forward, beyond what earlier layers saved; its own saved bytes are part of it."""
    forward_peak_divided_bytes: Bytes = 0
    backward_peak_bytes: Bytes = 0
    """Likewise during its backward."""
    backward_peak_divided_bytes: Bytes = 0
    whole_input_bytes: Bytes = 0
    """The largest whole tensor that a product with a weight divided by columns takes."""
    whole_input_divided_bytes: Bytes = 0


class LayerCost(Frozen):
    """One layer at one micro-batch size. Spreads are half of the interquartile range of the repeats."""

    samples: Annotated[int, Field(ge=1)]
    forward_s: Seconds
    backward_s: Seconds
    forward_spread_s: Seconds = 0.0
    backward_spread_s: Seconds = 0.0
    backward_input_s: Seconds | None = None
    backward_weight_s: Seconds | None = None
    saved_bytes: Bytes = 0
    """What autograd keeps from this layer's forward until its backward; storages once, parameters left out."""
    flops: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    memory: LayerMemory | None = None
    """Where it was told without a device."""


class Layer(Frozen):
    """The smallest unit placed: one call of a submodule, with the glue code that follows it."""

    id: str
    """Module path, plus #k for its k-th further call: "h.3", "norm#1"."""
    class_name: str
    parameter_bytes: Bytes = 0
    gradient_bytes: Bytes = 0
    buffer_bytes: Bytes = 0
    key: str = ""
    """Structural key: layers with equal keys were measured once."""
    costs: tuple[LayerCost, ...]
    """At ascending micro-batch sizes, the same for every layer."""

    def cost(self, samples: float) -> LayerCost:
        """The cost at a micro-batch of `samples`: the straight line through the two nearest sizes measured.

        Below the smallest size it is bounded by half of what pure proportion gives, so never negative.
        """
        exact = next((cost for cost in self.costs if cost.samples == samples), None)
        if exact is not None:
            return exact
        first, second = _around(tuple(cost.samples for cost in self.costs), samples)
        a, b = self.costs[first], self.costs[second]

        def at(x: float, y: float) -> float:
            return _line(a.samples, x, b.samples, y, samples)

        split = a.backward_input_s is not None and b.backward_input_s is not None
        return LayerCost(
            samples=max(1, round(samples)),
            forward_s=at(a.forward_s, b.forward_s),
            backward_s=at(a.backward_s, b.backward_s),
            forward_spread_s=at(a.forward_spread_s, b.forward_spread_s),
            backward_spread_s=at(a.backward_spread_s, b.backward_spread_s),
            backward_input_s=at(a.backward_input_s or 0, b.backward_input_s or 0) if split else None,
            backward_weight_s=at(a.backward_weight_s or 0, b.backward_weight_s or 0) if split else None,
            saved_bytes=round(at(a.saved_bytes, b.saved_bytes)),
            flops=at(a.flops, b.flops),
        )


def _around(sizes: tuple[int, ...], samples: float) -> tuple[int, int]:
    """Indices of the two measured sizes whose line is used; twice the same where there is only one."""
    if len(sizes) == 1:
        return 0, 0
    k = next((k for k, size in enumerate(sizes) if size >= samples), len(sizes) - 1)
    return max(0, k - 1), max(1, k)


def _line(x0: int, y0: float, x1: int, y1: float, x: float) -> float:
    if x0 == x1:
        return y0 * x / x0
    return max(y0 + (y1 - y0) * (x - x0) / (x1 - x0), 0.5 * y0 * min(1.0, x / x0), 0.0)


class Tensor(Frozen):
    """A tensor that one layer makes and later layers use. `bytes_at` is beside the profile's micro-batch sizes.

    `alias` is the storage it shares with other tensors: views of one storage cross a cut one by one all the same.
    """

    id: str
    producer: str
    consumers: tuple[str, ...]
    shape: tuple[Annotated[int, Field(ge=0)], ...]
    dtype: str
    bytes_at: tuple[Bytes, ...]
    needs_gradient: bool = False


class Parameter(Frozen):
    """One parameter, tied or not: `names` are all its names, the model's first one first."""

    names: Annotated[tuple[str, ...], Field(min_length=1)]
    shape: tuple[Annotated[int, Field(ge=0)], ...]
    dtype: str
    bytes: Bytes
    trainable: bool
    layers: tuple[str, ...]
    """Layers that use it, in order; a parameter used on two stages lives on both and is kept equal."""
    written: Literal["", "first", "every"] = ""
    """Whether forwards write into it: none, the first one alone, or every one."""
    divided: Annotated[int, Field(ge=0)] | None = None
    """The dimension that a tensor-parallel group divides; None: each of its ranks holds it whole."""


class Buffer(Frozen):
    """One buffer under all its names. It lives on the stages of the layers that use it."""

    names: Annotated[tuple[str, ...], Field(min_length=1)]
    bytes: Bytes
    layers: Annotated[tuple[str, ...], Field(min_length=1)]


class Attribute(Frozen):
    """A module attribute in plain Python that not one layer has for itself: the `first` and `last` layer to read it.

    None of what is outside of modules: who reads a global is not seen.
    """

    name: str
    first: str | None = None
    last: str | None = None
    writers: tuple[str, ...] = ()
    inside: tuple[str, ...] = ()
    """Of these the layers that change it themselves, not the code between layers."""
    returns: bool = False
    """Whether it is at the end of the forward what it was at the start, plus what that `adds`."""
    adds: tuple[int, int] = (0, 0)
    """In training and in evaluation."""
    set_first: bool = False
    """Whether the forward sets it before it reads it."""
    foretold: bool = False
    """Whether code between layers sets it last, and stages that end before can tell to what; see `ending`."""


class Profile(Shown, Frozen):
    """A model's layers in execution order with their costs. Plain data: save it on the cluster, plan on a laptop."""

    version: Literal[1] = FORMAT_VERSION
    model: str
    layers: Annotated[tuple[Layer, ...], Field(min_length=1)]
    tensors: tuple[Tensor, ...]
    parameters: tuple[Parameter, ...]
    buffers: tuple[Buffer, ...] = ()
    microbatch_sizes: Annotated[tuple[int, ...], Field(min_length=1)]
    no_cut: dict[str, str] = {}
    """Layer id -> why no cut is possible just before it."""
    opened: tuple[str, ...] = ()
    """Modules that call layers which are not below them: layers of others, handed to them."""
    joinable: tuple[str, ...] = ()
    """Modules around layers that may run whole where no cut goes through: called once, and nothing that their own code
    leaves behind is needed on every rank."""
    glue: dict[str, int] = {}
    """Moments between layers -> how many torch functions ran then: a run in which more do has taken another way."""
    glue_names: dict[str, int] = {}
    """The same moments -> a checksum of the names of those functions, where values decide which run."""
    dynamic: bool = False
    """Whether values decide, between layers, which way the forward takes: then any stage may need what a later one
    needed when the model was captured."""
    fire_hooks: tuple[str, ...] = ()
    """Modules with forward hooks that keep tensors for later: ranks that skip them fire these on what they send."""
    collecting: tuple[str, ...] = ()
    """Names of the functions of those hooks; of other hooks of the modules nothing is told. Empty: all of them."""
    passing: dict[str, int] = {}
    """Layers that return tensors that they were given -> how many: where one returns fewer, others are to be sent."""
    attributes: tuple[Attribute, ...] = ()
    """Python state of modules that not one layer has for itself: a change on one rank matters elsewhere."""
    optimizer_s: Seconds = 0.0
    """One optimizer step over the whole model."""
    optimizer: str = "adamw"
    buffer_bytes: Bytes = 0
    """Of buffers that are not in `buffers`: no layer was seen to use them, and they are whole on every rank."""
    slicing_s: Seconds = 0.0
    """What a stage's forward takes beyond its layers, a micro-batch: the way to its first layer, and its log."""
    step_s: tuple[Seconds, ...] = ()
    """Forward + backward of the unsliced model, beside `microbatch_sizes`; empty where it was not run."""
    unattributed_s: tuple[Annotated[float, Field(allow_inf_nan=False)], ...] = ()
    """`step_s` less the sum over layers."""
    batch_dim: int | dict[str, int | None] = 0
    device: str
    device_kind: Literal["cuda", "cpu"]
    dtype: str = "float32"
    num_threads: Annotated[int, Field(ge=1)] = 1
    processor_share: Annotated[float, Field(ge=0, le=1)] | None = None
    """Of the time that layers were timed in, how much the timing thread had a processor; None: not measured here."""
    torch_version: str = ""
    provenance: Literal["measured", "estimated", "given"]
    """`given`: costs written by hand or taken from a table."""
    traced: bool = False
    """Whether torch.profiler recorded the timed runs, which takes about a microsecond an operator."""
    fingerprint: str = ""
    """Hash over parameter and buffer names, shapes and dtypes."""
    call_digest: str = ""
    """Hash over the order of layer calls."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        ids = [layer.id for layer in self.layers]
        if len(set(ids)) != len(ids):
            raise ValueError("two layers have the same id")
        if list(self.microbatch_sizes) != sorted(set(self.microbatch_sizes)):
            raise ValueError(f"microbatch_sizes must ascend, got {self.microbatch_sizes}")
        place = {layer_id: k for k, layer_id in enumerate(ids)}
        for name, values in (("step_s", self.step_s), ("unattributed_s", self.unattributed_s)):
            if values and len(values) != len(self.microbatch_sizes):
                raise ValueError(
                    f"{name}: {len(values)} times, but there are {len(self.microbatch_sizes)} microbatch_sizes "
                    f"{self.microbatch_sizes}: one for each, or none"
                )
        if unknown := sorted(set(self.no_cut) - set(place)):
            raise ValueError(f"no_cut: there is no layer {unknown[0]!r}")
        for layer in self.layers:
            if tuple(cost.samples for cost in layer.costs) != self.microbatch_sizes:
                raise ValueError(f"layer {layer.id}: its costs are not at the sizes {self.microbatch_sizes}")
        for tensor in self.tensors:
            unknown = [name for name in (tensor.producer, *tensor.consumers) if name not in place]
            if unknown:
                raise ValueError(f"tensor {tensor.id}: there is no layer {unknown[0]!r}")
            if any(place[name] < place[tensor.producer] for name in tensor.consumers):
                raise ValueError(f"tensor {tensor.id}: used before layer {tensor.producer!r} makes it")
            if len(tensor.bytes_at) != len(self.microbatch_sizes):
                raise ValueError(f"tensor {tensor.id}: {len(tensor.bytes_at)} sizes, not {len(self.microbatch_sizes)}")
        everything: tuple[Parameter | Buffer, ...] = (*self.parameters, *self.buffers)
        for held in everything:
            for name in held.layers:
                if name not in place:
                    raise ValueError(f"{held.names[0]}: there is no layer {name!r}")
        return self

    def tensor_bytes(self, tensor: Tensor, samples: float) -> float:
        """Bytes of a tensor at a micro-batch of `samples`."""
        if samples in self.microbatch_sizes:
            return tensor.bytes_at[self.microbatch_sizes.index(int(samples))]
        first, second = _around(self.microbatch_sizes, samples)
        sizes, values = self.microbatch_sizes, tensor.bytes_at
        return _line(sizes[first], values[first], sizes[second], values[second], samples)

    @property
    def trainable_element_bytes(self) -> float:
        """Mean width of a trainable parameter element: 4 for fp32, 2 for bf16; 4 where nothing is trained."""
        trainable = [parameter for parameter in self.parameters if parameter.trainable]
        elements = sum(math.prod(parameter.shape) for parameter in trainable)
        return sum(parameter.bytes for parameter in trainable) / elements if elements else 4.0

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write as JSON; the file is whole or not there."""
        write_whole(path, self.model_dump_json(indent=1))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Profile:
        """Read what `save` wrote. A file that is not a profile is an ArgumentError that names the field."""
        return read_checked(cls, path)


def write_whole(path: str | os.PathLike[str], text: str) -> None:
    """Write beside the target, then rename: nobody ever sees half a file. Links are followed, pipes written into."""
    check_writable(path)
    try:
        _write(Path(path), text)
    except OSError as error:
        raise SetupError(f"cannot write {os.fspath(path)}: {error.strerror}") from error


def _write(path: Path, text: str) -> None:
    if path.exists() and not path.is_file():
        path.write_text(text, encoding="utf-8")
        return
    path = path.resolve()
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with temporary.open("x", encoding="utf-8") as file:
            file.write(text)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


Kind = TypeVar("Kind", bound=Frozen)


def read_checked(kind: type[Kind], path: str | os.PathLike[str]) -> Kind:
    """Read a JSON file of that kind; anything else is an ArgumentError that says what it is, or names the field."""
    content = read_json(path)
    try:
        return kind.model_validate_json(json.dumps(content))
    except ValidationError as error:
        shown, first = os.fspath(path), error.errors()[0]
        found, version = kind_of(content), content.get("version") if isinstance(content, dict) else None
        if found not in (kind.__name__, None):
            raise ArgumentError(f"{shown} holds a {found}, and a {kind.__name__} is needed here") from None
        wanted: int = kind.model_fields["version"].default if found else 0
        if found and (not isinstance(version, int) or version > wanted):
            raise ArgumentError(
                f"{shown} is a {found} of format {version}, this partitioner reads format {wanted}: make it again"
            ) from None
        where = ".".join(map(str, first["loc"])) or "the file"
        raise ArgumentError(f"{shown} is not a {kind.__name__}: {where}: {first['msg']}") from None


def read_json(path: str | os.PathLike[str]) -> Any:
    """What a JSON file holds; an ArgumentError where there is none."""
    expect_path("path", path)
    shown = os.fspath(path)
    try:
        text = Path(path).read_text(encoding="utf-8")
        return json.loads(text)
    except FileNotFoundError:
        raise ArgumentError(f"there is no file {shown}") from None
    except OSError as error:
        raise ArgumentError(f"cannot read {shown}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ArgumentError(f"{shown} is not JSON, nor text at all") from None
    except ValueError as error:
        raise ArgumentError(f"{shown} is {'not JSON: ' + str(error) if text.strip() else 'empty'}") from None


def kind_of(content: Any) -> str | None:
    """What a file of ours holds, told by its fields.

    >>> kind_of({"layers": [], "tensors": []}), kind_of({"traceEvents": []}), kind_of([])
    ('Profile', 'trace', None)
    """
    fields = set(content) if isinstance(content, dict) else set()
    return next((kind for kind, its in _FIELDS.items() if its <= fields), None)


_FIELDS = {
    "Plan": {"stages", "profile"},
    "CapacityReport": {"best", "curve"},
    "Profile": {"layers", "tensors"},
    "trace": {"traceEvents"},
}


def check_writable(path: str | os.PathLike[str]) -> None:
    """Refuse a file that cannot be written, before the work whose result it is to hold."""
    expect_path("path", path)
    target = Path(path)
    folder = target.parent
    if target.is_dir():
        why = "it is a folder: name a file in it"
    elif folder.exists() and not folder.is_dir():
        why = f"{folder} is no folder"
    elif not folder.exists():
        why = f"there is no folder {folder}: make it first"
    elif not os.access(target if target.exists() else folder, os.W_OK):
        why = "permission denied"
    else:
        return
    raise ArgumentError(f"cannot write {os.fspath(path)}: {why}")
