"""What `capacity()` is asked, checked: its arguments make a Request, a Request and what was followed make a Demand."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, cast, get_args

import torch
from torch import nn

from partitioner.calibration import Calibration, Evidence
from partitioner.errors import ArgumentError, expect
from partitioner.layouts import Demand, Wish
from partitioner.profiles import Profile
from partitioner.specs import (
    SCHEDULES,
    Cluster,
    Precision,
    Recompute,
    Shard,
    StateBytes,
    Training,
    parse_bytes,
    state_bytes,
)
from partitioner.steps import planner
from partitioner.study import Study, most_common_dtype

CHANGES = ("batch_size", "sequence_length", "precision", "optimizer", "recompute", "shard", "gpus", "mesh")
"""What `what_if` may change."""
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Request:
    """A training on a cluster, as far as the user fixed it."""

    cluster: Cluster
    batch_size: int
    precision: Precision
    accumulate: Literal["auto", "fp32"]
    optimizer: str | float
    wish: Wish
    memory_limit_bytes: int | None
    hardware: str | None
    sequence_length: int | None = None
    evidence: tuple[Evidence, ...] = ()
    """What measured runs showed of predictions, on this kind of device and in this precision."""

    def check(self) -> None:
        """ArgumentError where a value is impossible."""
        _whole("batch_size", self.batch_size)
        expect("optimizer", self.optimizer, (str, int, float), "a name like 'adamw', or bytes of state a parameter")
        self.state(None)
        if self.accumulate not in ("auto", "fp32"):
            raise ArgumentError(f"accumulate={self.accumulate!r} is unknown; use 'auto' or 'fp32'")

    def changed(self, study: Study, name: str, value: Any) -> Request:
        """With one of CHANGES made."""
        match name:
            case "gpus":
                changed = replace(self, cluster=_cluster(value))
                if changed.cluster.devices[0].name != self.cluster.devices[0].name:
                    changed = replace(changed, evidence=())
            case "mesh":
                changed = replace(self, wish=replace(self.wish, mesh=_mesh(value)))
            case "precision":
                changed = replace(self, precision=_precision(value, study.model))
                if changed.precision != self.precision:
                    changed = replace(changed, evidence=())
            case "recompute":
                changed = replace(self, wish=replace(self.wish, recompute=_one_of(name, value, get_args(Recompute))))
            case "shard":
                changed = replace(self, wish=replace(self.wish, shard=_one_of(name, value, get_args(Shard))))
            case "sequence_length":
                study.expect_length()
                changed = replace(self, sequence_length=_whole(name, value))
            case "batch_size":
                changed = replace(self, batch_size=value)
            case _:
                changed = replace(self, optimizer=value)
        changed.check()
        return changed

    def demand(self, study: Study) -> Demand:
        """What the training takes, in the width of numbers and the length that are asked for."""
        own = self.precision == _own_precision(study.model)
        dtype = None if own else _DTYPES[self.precision.removesuffix("-mixed")]
        per_node = max(Counter(self.cluster.nodes).values())
        study.check_positions(self.sequence_length)
        prices = planner(
            study.work(self.sequence_length),
            self.cluster,
            precision=self.precision,
            per_node=per_node,
            hardware=self.hardware,
        )
        prices.length = self.sequence_length or study.length or 1
        prices.calibration = Calibration(list(self.evidence))
        graph = study.graph(dtype, prices, self.sequence_length)
        return Demand(
            graph=graph,
            prices=prices,
            training=Training(
                batch_size=self.batch_size,
                optimizer_bytes=0,
                memory_limit_bytes=self.memory_limit_bytes,
                batch_dim=study.batch_dim,
            ),
            state=self.state(graph.profile),
            precision=self.precision,
            accumulate=self.accumulate,
            device=self.cluster.devices[0],
            per_node=per_node,
            divided=study.must_divide(dtype, self.sequence_length),
        )

    def state(self, profile: Profile | None) -> StateBytes:
        """What training keeps of a parameter element; adafactor's state depends on the shapes."""
        optimizer = self.optimizer
        if isinstance(optimizer, str) and optimizer != "adafactor":
            return state_bytes(optimizer, self.precision, accumulate=self.accumulate)
        plain = state_bytes("sgd", self.precision, accumulate=self.accumulate)
        if isinstance(optimizer, str):
            trained = [p for p in profile.parameters if p.trainable] if profile else []
            elements = sum(math.prod(p.shape) for p in trained)
            state = 4 * sum(_factored(p.shape) for p in trained)
            return plain._replace(moments=state / elements if elements else 0.0)
        if isinstance(optimizer, bool) or optimizer < 0:
            raise ArgumentError(f"optimizer={optimizer!r} bytes a parameter is impossible: give 0 or more")
        return plain._replace(moments=float(optimizer))


def requested(
    study: Study,
    *,
    gpus: Any,
    batch_size: int | None,
    mesh: Any,
    microbatches: int | Literal["auto"],
    schedule: str,
    optimizer: str | float,
    precision: str,
    accumulate: Literal["auto", "fp32"],
    recompute: str,
    shard: str,
    sequence_parallel: bool,
    memory_limit: str | int | None,
    hardware: str | None,
) -> Request:
    """From the arguments of `capacity()`; an ArgumentError names the one that cannot be."""
    made = Request(
        cluster=_cluster(gpus),
        batch_size=study.samples if batch_size is None else batch_size,
        precision=_precision(precision, study.model),
        accumulate=accumulate,
        optimizer=optimizer,
        wish=Wish(
            mesh=_mesh(mesh),
            num_microbatches=None if microbatches == "auto" else _whole("microbatches", microbatches),
            schedule=_one_of("schedule", schedule, SCHEDULES),
            recompute=_one_of("recompute", recompute, get_args(Recompute)),
            shard=_one_of("shard", shard, get_args(Shard)),
            sequence_parallel=sequence_parallel,
        ),
        memory_limit_bytes=None if memory_limit is None else parse_bytes(memory_limit),
        hardware=hardware,
    )
    made.check()
    return made


def check_changes(what_if: Mapping[str, Sequence[Any]]) -> None:
    """ArgumentError where `what_if` is no table of values of CHANGES."""
    expect("what_if", what_if, Mapping, "values to change: {'batch_size': [128, 512]}")
    for name, values in what_if.items():
        if isinstance(values, str) or not isinstance(values, Sequence):
            raise ArgumentError(f"what_if={{{name!r}: {values!r}}}: give a list of values, like [{values!r}]")
    unknown = sorted(set(what_if) - set(CHANGES))
    if unknown:
        raise ArgumentError(f"what_if cannot change {unknown[0]!r}: use {', '.join(CHANGES)}")


def _whole(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ArgumentError(f"{name}={value!r} is impossible: give a number of 1 or more")
    return value


def _cluster(gpus: Any) -> Cluster:
    if isinstance(gpus, Cluster):
        cluster = gpus
    elif isinstance(gpus, str) and not gpus.strip().isdigit():
        cluster = Cluster.parse(gpus)
    else:
        raise ArgumentError(f"gpus={gpus!r} names no device: write what you would rent, like '8xH100', or a Cluster")
    kinds = sorted({device.name for device in cluster.devices})
    if len(set(cluster.devices)) > 1:
        raise ArgumentError(f"capacity compares equal devices, this cluster has {', '.join(kinds)}: ask for one kind")
    return cluster


def _mesh(mesh: Any) -> Mapping[str, int]:
    if mesh == "auto":
        return {}
    if not isinstance(mesh, Mapping):
        raise ArgumentError(f"mesh={mesh!r} is unknown; use 'auto' or {{'tp': 8, 'pp': 4, 'dp': 2}}")
    return {str(axis): size for axis, size in mesh.items()}


def _one_of(name: str, value: str, known: Sequence[str]) -> Any:
    """None for "auto"."""
    expect(name, value, str, f"'auto', {', '.join(map(repr, known))}")
    if value == "auto":
        return None
    if value not in known:
        raise ArgumentError(f"{name}={value!r} is unknown; use 'auto', {', '.join(map(repr, known))}")
    return value


def _precision(precision: str, model: nn.Module) -> Precision:
    known = get_args(Precision)
    expect("precision", precision, str, f"'auto', {', '.join(map(repr, known))}")
    if precision == "auto":
        return _own_precision(model)
    if precision not in known:
        raise ArgumentError(f"precision={precision!r} is unknown; use 'auto', {', '.join(map(repr, known))}")
    return cast(Precision, precision)


def _own_precision(model: nn.Module) -> Precision:
    """That of most of the model's floating-point parameters."""
    names: dict[torch.dtype | None, Precision] = {torch.bfloat16: "bf16", torch.float16: "fp16"}
    return names.get(most_common_dtype(model), "fp32")


def _factored(shape: tuple[int, ...]) -> int:
    """Numbers that Adafactor keeps (Shazeer & Stern 2018): a row and a column of each matrix, all of a vector."""
    if len(shape) < 2:
        return math.prod(shape)
    return math.prod(shape[:-2]) * (shape[-2] + shape[-1])
