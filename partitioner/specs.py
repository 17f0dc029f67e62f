"""What you have and what you want: devices, links, the cluster they form, the training to run; sizes and units."""

from __future__ import annotations

import functools
import math
import os
import re
import tomllib
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from partitioner.errors import ArgumentError, expect

MOST_SECONDS = 1e8
Seconds = Annotated[float, Field(ge=0, le=MOST_SECONDS, allow_inf_nan=False)]
"""Up to three years: more is a mistake in its unit."""
Bytes = Annotated[int, Field(ge=0, le=2**60)]
"""Up to an exbibyte."""

ScheduleName = Literal["gpipe", "1f1b", "interleaved", "zero-bubble", "zero-bubble-h2", "zero-bubble-v"]
SCHEDULES: tuple[ScheduleName, ...] = get_args(ScheduleName)
EXECUTED: tuple[ScheduleName, ...] = ("gpipe", "1f1b")
"""Schedules that the executor of this version runs, one stage a rank; the others can be predicted and compared."""
Precision = Literal["fp32", "bf16", "fp16", "bf16-mixed", "fp16-mixed"]
"""mixed: weights, activations and gradients in 16 bits, the optimizer's copy of the weights and its state in 32."""
Shard = Literal["none", "zero1", "zero2", "zero3"]
"""Over replicas: zero1 the optimizer's state, zero2 gradients too, zero3 weights too (Rajbhandari et al. 2020)."""
EXECUTED_SHARDS: tuple[Shard, ...] = ("none", "zero1", "zero2")
"""Levels that the executor of this version runs: each parameter is kept up to date by one of the replicas."""


class Saving(NamedTuple):
    """What a stage does to hold less memory, at a cost in time."""

    recompute: bool = False
    """Layers run again in their backward instead of keeping what they save."""
    shard: Shard = "none"
    """What its replicas divide among them."""


class Exchange(NamedTuple):
    """How often replicas exchange what they have of a stage: weights gathered, gradients scattered (summed, a part to
    each). Without sharding gradients are scattered and gathered once a step, as an all-reduce."""

    step_gathers: int
    step_scatters: int
    microbatch_gathers: int
    microbatch_scatters: int


EXCHANGES: dict[Shard, Exchange] = {
    "zero1": Exchange(1, 1, 0, 0),
    "zero2": Exchange(1, 0, 0, 1),  # no replica keeps whole gradients from one micro-batch to the next
    "zero3": Exchange(0, 0, 2, 1),  # weights are whole during a layer's forward and its backward
}

Recompute = Literal["never", "selective", "always"]
"""What a backward computes again: selective all but products with weights and fused attention, always whole layers."""
Objective = Literal["train", "throughput", "latency"]


class Frozen(BaseModel):
    """Data that leaves the process: immutable, unknown fields refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Given(Frozen):
    """What users write down by hand: a field that cannot be is an ArgumentError that names it.

    >>> Training(batch_size=0)
    Traceback (most recent call last):
    partitioner.errors.ArgumentError: Training(batch_size=0): Input should be greater than or equal to 1
    """

    def __init__(self, **fields: Any) -> None:
        try:
            super().__init__(**fields)
        except ValidationError as error:
            faults = error.errors()
            place = faults[0]["loc"]
            said = " or ".join(dict.fromkeys(str(one["msg"]) for one in faults if one["loc"][:1] == place[:1]))
            name = str(place[0]) if place else ""
            shown = f"{name}={fields[name]!r}" if name in fields else name
            where = f"{type(self).__name__}({shown})" if name else type(self).__name__
            raise ArgumentError(f"{where}: {said.removeprefix('Value error, ')}") from error


_UNITS: dict[str, int] = {"": 1, "B": 1} | {
    prefix + suffix: base**power
    for base, suffix in ((1000, "B"), (1024, "iB"))
    for power, prefix in enumerate("KMGT", start=1)
}


def parse_bytes(text: int | float | str) -> int:
    """Bytes of a size such as "70GiB" (1024-based), "80 GB" (1000-based) or a plain number of bytes.

    >>> parse_bytes("1GiB"), parse_bytes("1GB"), parse_bytes(80)
    (1073741824, 1000000000, 80)

    Bits ("1Gib"), unknown units and negative sizes are an ArgumentError.
    """
    if isinstance(text, (int, float)) and not isinstance(text, bool):
        if not 0 <= text < float("inf"):
            raise ArgumentError(f"a size of {text} bytes is impossible: give a number of bytes >= 0")
        return int(text)
    found = re.fullmatch(r"\s*([0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]+)?)\s*([A-Za-z]*)\s*", str(text))
    if found is not None and found[2].endswith("b"):
        raise ArgumentError(f"the size {text!r} is in bits (lower-case b): write bytes, like '70GiB' or '80GB'")
    if found is None or (found[2] not in _UNITS and found[2].upper() not in _UNITS):
        raise ArgumentError(f"cannot read the size {text!r}: write it like '70GiB', '80GB' or a number of bytes")
    return parse_bytes(float(found[1]) * _UNITS.get(found[2], _UNITS.get(found[2].upper(), 1)))


def format_bytes(num_bytes: float, *, up: bool = False) -> str:
    """A size for people, in 1024-based units. up: never less than it is, for what is to be enough.

    >>> format_bytes(1536), format_bytes(70 * 2**30), format_bytes(3000), format_bytes(3000, up=True)
    ('1.5 KiB', '70.0 GiB', '2.9 KiB', '3.0 KiB')
    """
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        digits = 0 if unit == "B" else 1
        shown = math.ceil(value * 10**digits) / 10**digits if up else value
        if abs(shown) < 1024:
            break
        value /= 1024
    return f"{shown:.{digits}f} {unit}"


def counted(number: int, one: str, many: str = "") -> str:
    """
    >>> counted(1, "sample"), counted(2, "micro-batch", "micro-batches")
    ('1 sample', '2 micro-batches')
    """
    return f"{number:,} {one if number == 1 else many or one + 's'}"


class Device(Given):
    """One accelerator or CPU rank. `relative_speed` scales measured times: 2.0 runs a layer in half the time."""

    name: str
    kind: Literal["cuda", "cpu"] = "cuda"
    memory_bytes: Bytes
    overhead_bytes: Bytes = 0
    """The context, before anything is allocated."""
    communicator_bytes: Bytes = 0
    """Of each group of ranks that it communicates with: one for each axis of the mesh."""
    slack: Annotated[float, Field(ge=0)] = 0.0
    """What the allocator holds beyond what is in use, as a share of it."""
    relative_speed: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0

    @property
    def usable_bytes(self) -> int:
        return max(0, self.memory_bytes - self.overhead_bytes)


class Link(Given):
    """Seconds of one message as a table over its size; straight lines between, the last slope beyond.

    `sizes_bytes` ascending, `seconds` beside it. At least two points.
    """

    sizes_bytes: tuple[Bytes, ...]
    seconds: tuple[Annotated[float, Field(ge=0, allow_inf_nan=False)], ...]
    source: str = ""
    through_host: bool = False
    """Messages go through the host's memory: devices cannot write to each other's."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if len(self.sizes_bytes) != len(self.seconds) or len(self.seconds) < 2:
            raise ValueError(f"a link needs two or more points, got {len(self.sizes_bytes)} and {len(self.seconds)}")
        if list(self.sizes_bytes) != sorted(set(self.sizes_bytes)):
            raise ValueError("the sizes of a link's points must ascend")
        return self

    @classmethod
    def of(cls, latency_s: float, bytes_per_s: float, source: str = "", through_host: bool = False) -> Link:
        """The straight line latency + bytes / bandwidth.

        >>> round(Link.of(1e-5, 1e9).time(1_000_000), 6)
        0.00101
        """
        if not bytes_per_s > 0:
            raise ArgumentError(f"a link of {bytes_per_s} bytes/s moves nothing: give bytes_per_s > 0")
        return cls(
            sizes_bytes=(0, 2**30),
            seconds=(latency_s, latency_s + 2**30 / bytes_per_s),
            source=source,
            through_host=through_host,
        )

    def time(self, num_bytes: float) -> float:
        """Seconds to move `num_bytes` from one rank to another."""
        sizes, seconds = self.sizes_bytes, self.seconds
        k = next((k for k in range(1, len(sizes) - 1) if num_bytes <= sizes[k]), len(sizes) - 1)
        slope = (seconds[k] - seconds[k - 1]) / (sizes[k] - sizes[k - 1])
        return max(0.0, seconds[k - 1] + slope * (num_bytes - sizes[k - 1]))

    def gather_time(self, num_bytes: float, num_ranks: int) -> float:
        """Seconds in which each of the ranks gets what the others have a part of, all `num_bytes` together, round a
        ring; as many in which sums are scattered."""
        return self.all_reduce_time(num_bytes, num_ranks) / 2

    def all_reduce_time(self, num_bytes: float, num_ranks: int) -> float:
        """Seconds of a ring all-reduce: 2 (n - 1) messages of 1/n of the data (Patarasuk & Yuan 2009)."""
        if num_ranks < 2 or num_bytes <= 0:
            return 0.0
        return 2 * (num_ranks - 1) * self.time(num_bytes / num_ranks)


class Cluster(Given):
    """Devices in rank order, the node each one sits in, and the links within and between nodes."""

    devices: tuple[Device, ...]
    nodes: tuple[int, ...]
    intra: Link
    inter: Link

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.devices:
            raise ValueError("a cluster needs at least one device, got 0")
        if len(self.devices) != len(self.nodes):
            raise ValueError(f"{len(self.devices)} devices but {len(self.nodes)} node numbers")
        return self

    @classmethod
    def of(
        cls, device: Device, per_node: int, num_nodes: int = 1, *, within: Link, between: Link | None = None
    ) -> Cluster:
        """`num_nodes` nodes of `per_node` equal devices; `between` is left out where there is one node."""
        count = per_node * num_nodes
        nodes = tuple(rank // per_node for rank in range(count))
        return cls(devices=(device,) * count, nodes=nodes, intra=within, inter=between or within)

    @classmethod
    def parse(cls, text: str) -> Cluster:
        """The cluster that "8xH100" (one node) or "2x8xA100-80GB" (two nodes of eight) describes.

        >>> cluster = Cluster.parse("2x8xA100-80GB")
        >>> cluster.num_devices, cluster.devices[0].name, cluster.nodes[7:9]
        (16, 'A100-80GB', (0, 1))

        Memory and links are those of `hardware.toml`, where each figure has its source; upper and lower case are the
        same. A device that is not listed there is an ArgumentError that names those that are.
        """
        expect("the cluster", text, str, "the name of one, like '8xH100'")
        found = re.fullmatch(r"\s*(?:(?:(\d+)\s*x\s*)?(\d+)\s*x\s*)?([A-Za-z0-9][A-Za-z0-9_. -]*?)\s*", text)
        if found is None or (found[2] is None and found[3].isdigit()):
            raise ArgumentError(f"cannot read the devices {text!r}: write them like '8xH100' or '2x8xA100-80GB'")
        num_nodes, per_node = int(found[1] or 1), int(found[2] or 1)
        if not num_nodes or not per_node:
            raise ArgumentError(f"{text!r} is a cluster of 0 devices: give at least one")
        device, within, between = known_device(found[3])
        return cls.of(device, per_node, num_nodes, within=within, between=between)

    @property
    def num_devices(self) -> int:
        return len(self.devices)

    def link(self, first: int, second: int) -> Link:
        """The link between two ranks."""
        return self.intra if self.nodes[first] == self.nodes[second] else self.inter

    def slowest_link(self, ranks: tuple[int, ...]) -> Link:
        """The link that a collective over these ranks waits for."""
        return self.inter if len({self.nodes[rank] for rank in ranks}) > 1 else self.intra


def known_device(name: str, hardware: str | None = None) -> tuple[Device, Link, Link]:
    """A device of the catalog by name or alias, its link within a node and its link between nodes."""
    catalog = _catalog(hardware)
    key, entry = catalog_entry(name, hardware)
    device = Device(
        name=key,
        memory_bytes=parse_bytes(entry["memory"]["value"]),
        overhead_bytes=parse_bytes(catalog["overhead"]["value"]),
        communicator_bytes=parse_bytes(catalog["communicator"]["value"]),
        slack=catalog["slack"]["value"],
    )
    return device, known_link(entry["within"], hardware), known_link(entry["between"], hardware)


def catalog_entry(name: str, hardware: str | None = None) -> tuple[str, dict[str, Any]]:
    """The name and the figures of a device in `hardware.toml`, the user's own file laid over it.

    `hardware`: path of that file; None: the environment variable PARTITIONER_HARDWARE, or none. Case is ignored.
    A device that is not listed is an ArgumentError that names those that are.
    """
    devices = _catalog(hardware)["devices"]
    names = {alias.lower(): key for key, entry in devices.items() for alias in (key, *entry.get("aliases", ()))}
    key = names.get(name.lower())
    if key is None:
        close = [known for known in devices if known.lower().startswith(name.lower())]
        if close:
            raise ArgumentError(f"the device {name!r} could be {' or '.join(close)}: write one of them")
        raise ArgumentError(
            f"the device {name!r} is not known. Known: {', '.join(devices)}. For another, "
            "pass gpus=Cluster.of(Device(name=..., memory_bytes=...), 8, within=Link.of(latency_s, bytes_per_s)), "
            "or describe it in a file of your own and set PARTITIONER_HARDWARE"
        )
    return key, devices[key]


def _catalog(hardware: str | None) -> dict[str, Any]:
    text = files("partitioner").joinpath("hardware.toml").read_text(encoding="utf-8")
    own = hardware or os.environ.get("PARTITIONER_HARDWARE")
    if not own:
        return _parsed(text)
    try:
        return _laid_over(_parsed(text), tomllib.loads(Path(own).read_text(encoding="utf-8")))
    except OSError as error:
        raise ArgumentError(f"cannot read the hardware file {own}: {error.strerror}") from None
    except tomllib.TOMLDecodeError as error:
        raise ArgumentError(f"the hardware file {own} is not TOML: {error}") from None


@functools.cache
def _parsed(text: str) -> dict[str, Any]:
    return tomllib.loads(text)


def _laid_over(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Tables joined at every depth; a table that states a figure replaces the other's."""
    if "value" in above or "seconds" in above or ("bandwidth" in above and "latency" in above):
        return above
    joined = dict(below)
    for key, value in above.items():
        under = below.get(key)
        joined[key] = _laid_over(under, value) if isinstance(value, dict) and isinstance(under, dict) else value
    return joined


def known_link(name: str, hardware: str | None = None) -> Link:
    """A link of the catalog by its name there, like "nvlink3"."""
    entry = _catalog(hardware)["links"][name]
    if "seconds" in entry:
        source = f"{entry['what']}: {entry['kind']}, {entry['source']}"
        return Link(sizes_bytes=tuple(entry["sizes_bytes"]), seconds=tuple(entry["seconds"]), source=source)
    rate, latency = entry["bandwidth"], entry["latency"]
    source = f"{entry['what']}: bandwidth {rate['kind']}, {rate['source']}; latency {latency['kind']}"
    return Link.of(latency["value"], rate["value"], source, entry.get("through_host", False))


OPTIMIZER_BYTES = {"sgd": 0, "sgd-momentum": 4, "adam": 8, "adamw": 8}
"""Optimizer state of an fp32 parameter element, bytes: momentum is one copy of it, Adam's two moments are two."""


class StateBytes(NamedTuple):
    """Bytes of a trainable parameter element on a rank that shares nothing."""

    weights: float
    gradients: float
    master: float
    """The optimizer's own 32-bit copy of the weights."""
    moments: float
    step: float
    """Passing, while the optimizer steps: gradients widened to 32 bits."""

    @property
    def total(self) -> float:
        """What is there all the time."""
        return self.weights + self.gradients + self.master + self.moments


def state_bytes(optimizer: str, precision: Precision, *, accumulate: Literal["auto", "fp32"] = "auto") -> StateBytes:
    """What training keeps of each parameter element.

    `accumulate="fp32"`: gradients are added up in 32 bits, whatever the weights are in.

    >>> [state_bytes("adamw", precision).total for precision in ("fp32", "bf16", "bf16-mixed")]
    [16.0, 8.0, 16.0]
    """
    width = 4.0 if precision == "fp32" else 2.0
    mixed = precision.endswith("-mixed")
    gradients = 4.0 if accumulate == "fp32" else width
    moments = optimizer_state_bytes(optimizer, 4.0 if mixed else width)
    return StateBytes(width, gradients, 4.0 if mixed else 0.0, moments, 4.0 if mixed and gradients < 4 else 0.0)


def optimizer_state_bytes(optimizer: str, element_bytes: float = 4) -> float:
    """State of one parameter element of that width, bytes: torch keeps it in the parameter's own dtype.

    >>> optimizer_state_bytes("adamw"), optimizer_state_bytes("adamw", 2)
    (8.0, 4.0)
    """
    if optimizer not in OPTIMIZER_BYTES:
        raise ArgumentError(f"optimizer {optimizer!r} is not known: use {', '.join(OPTIMIZER_BYTES)}")
    return OPTIMIZER_BYTES[optimizer] * element_bytes / 4


class Counted(Given):
    """What a mean is over: the numbers of one tensor of a batch, summed, or those of them that are not `other_than`."""

    argument: int | str
    """Position or name of the model's argument that holds the tensor; "target"."""
    tensor: Annotated[int, Field(ge=0)] = 0
    """Which of the argument's tensors."""
    other_than: float | None = None
    """The value that does not count (padding), each other counting one; None: the numbers themselves count."""
    shifted: bool = False
    """Without the first position of the last dimension, which has nothing before it that could predict it."""

    def __str__(self) -> str:
        which = self.argument if isinstance(self.argument, str) else f"argument {self.argument}"
        which += f" (tensor {self.tensor})" if self.tensor else ""
        which += ", its first position left out" if self.shifted else ""
        return (
            f"the sum of {which}"
            if self.other_than is None
            else f"the entries of {which} other than {self.other_than:g}"
        )


Weighing = Literal["sum", "samples"] | Counted
"""What makes the losses of micro-batches that of the batch: added up, or a mean over samples or what is counted."""


class LossRule(Given):
    """How the losses of micro-batches make that of the batch, for one loss."""

    loss: str
    """Whose rule it is: the name of loss_fn, "" for the model's own loss."""
    how: Literal["sum", "samples", "given", "terms"] | Counted
    """Added up; a mean weighted by samples, or by what is counted; given: by a function of the user's, not saved;
    terms: it adds up several, each as `terms` says."""
    terms: tuple[Weighing, ...] = ()
    """In the order in which the graph of the whole model's loss holds them."""
    received: tuple[Weighing, ...] = ()
    """As the last stage has them, where an earlier one has added some up; () where as `terms`."""


class Training(Given):
    """One optimizer step: its data, and what the planner may choose ("auto") or must keep."""

    batch_size: Annotated[int, Field(ge=1, le=2**31)]
    microbatches: Literal["auto"] | Annotated[int, Field(ge=1)] = "auto"
    mesh: Literal["auto"] | dict[Literal["pp", "dp"], Annotated[int, Field(ge=1)]] = "auto"
    schedule: Literal["auto"] | ScheduleName = "auto"
    optimizer: str = "adamw"
    optimizer_bytes: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 8
    """Optimizer state, bytes a trainable parameter element."""
    precision: Literal["fp32"] = "fp32"
    recompute: Literal["auto", "never", "always"] = "never"
    """Whether stages run their layers again in their backward instead of keeping what these save; auto: those stages
    that do not fit otherwise."""
    shard: Literal["auto"] | Shard = "none"
    """What replicas divide among them of a stage's training; auto: each stage what makes the step the shortest, of the
    levels that the executor runs. zero3 is predicted, and not run."""
    memory_limit_bytes: Bytes | None = None
    objective: Objective = "train"
    """throughput and latency are of forward passes: the time between two batches, and that of one."""
    pin: dict[str, Annotated[int, Field(ge=0)] | Annotated[str, Field(min_length=1)]] = {}
    """Layer id -> stage, kept by the solver, or a word: layers with the same word are on one stage, whichever, with all
    between them. A whole split by hand names every layer."""
    batch_dim: int | dict[str, int | None] = 0
    """Where samples lie: of all arguments, or of each by its name and position; "*" are all others."""
    whole: tuple[str, ...] = ()
    """Where in a batch there are tensors or lists that hold no samples, as the example tells by their sizes."""
    loss_rule: LossRule | None = None
    """None: as each batch tells, by its samples or its labels that are valid."""

    @field_validator("pin", mode="before")
    @classmethod
    def _check_pin(cls, pin: Any) -> Any:
        """True and False are no numbers of stages."""
        if isinstance(pin, Mapping) and (wrong := [name for name, stage in pin.items() if isinstance(stage, bool)]):
            raise ValueError(
                f"{wrong[0]!r}: {pin[wrong[0]]} is no stage: give its number, from 0 on, or a word that layers of one "
                "stage share"
            )
        return pin

    @property
    def stage_pins(self) -> dict[str, int]:
        """Layer id -> stage, of those pinned to one by its number."""
        return {name: stage for name, stage in self.pin.items() if isinstance(stage, int)}

    @property
    def stays_whole(self) -> bool:
        """Whether no batch is cut, whatever is chosen: one micro-batch, and one replica."""
        return self.microbatches == 1 and self.mesh != "auto" and self.mesh.get("dp", 1) == 1

    @property
    def one_shard(self) -> Shard:
        """The level of every stage; none where each has its own."""
        return "none" if self.shard == "auto" else self.shard

    @property
    def together(self) -> dict[str, tuple[str, ...]]:
        """Word -> ids of the layers that are to share a stage."""
        groups: dict[str, tuple[str, ...]] = {}
        for name, word in self.pin.items():
            if isinstance(word, str):
                groups[word] = (*groups.get(word, ()), name)
        return groups
