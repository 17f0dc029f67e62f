"""Wrong arguments of the public functions: each is refused by name with one of our errors, which is a ValueError."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from drawn_plans import drawn_plan
from given import given_cluster, given_plan, given_profile
from torch import nn

import partitioner as pt
from partitioner.errors import ArgumentError


def asked(**given: Any) -> Callable[[], Any]:
    """A call of partition() with one argument that cannot be."""
    how = {"gpus": 2, "loss_fn": nn.functional.mse_loss, "example_target": torch.zeros(16, 4)}
    return lambda: pt.partition(nn.Linear(8, 4), torch.zeros(16, 8), **(how | given))


def measured(**given: Any) -> Callable[[], Any]:
    how = {"loss_fn": nn.functional.mse_loss, "example_target": torch.zeros(16, 4)}
    return lambda: pt.profile(nn.Linear(8, 4), torch.zeros(16, 8), **(how | given))


def capacity(**given: Any) -> Callable[[], Any]:
    return lambda: pt.capacity(nn.Linear(8, 4), torch.zeros(16, 8), **({"gpus": "8xH100"} | given))


SOLVED: tuple[Any, ...] = (given_profile(), given_cluster(2), pt.Training(batch_size=8))


def solved(place: int, value: Any) -> Callable[[], Any]:
    return lambda: pt.solve(*(value if k == place else one for k, one in enumerate(SOLVED)))


CASES: list[tuple[Callable[[], Any], str]] = [
    (asked(gpus=None), "gpus=None: give a number"),
    (asked(gpus=[0, 1]), r"gpus=\[0, 1\]: give a number"),
    (asked(mesh=2), "mesh=2 is a int: give 'auto' or"),
    (asked(mesh={"pp": "two"}), r"mesh\['pp'\]='two' is a str: give its number of ranks"),
    (asked(microbatches=2.0), "microbatches=2.0 is impossible"),
    (asked(batch_dim="x"), "batch_dim='x' is a str: give the dimension"),
    (asked(batch_dim=-1), "batch_dim=-1 counts from the end"),
    (asked(loss_fn=3), "loss_fn=3 is a int: give a function"),
    (asked(pin=[1]), r"pin=\[1\] is a list: give the stage of some layers"),
    (asked(pin={"0": -1}), r"pin=\{'0': -1\} is no stage"),
    (asked(pin={"0": "a"}), r"pin has 'a' for layer '0' alone"),
    (asked(pin={"0": 1.5}), r"pin=\{'0': 1.5\} is no stage"),
    (asked(profile=3), "profile=3 is a int: give a Profile"),
    (asked(seed="a"), "seed='a' is a str"),
    (asked(trace_dir=3), "trace_dir=3 is a int: give the path"),
    (asked(trace_dir="t", profile=given_profile()), "nothing is measured: leave one out"),
    (asked(optimizer=None), "optimizer=None is a NoneType: give its name"),
    (asked(gradient_compression="zip"), "gradient_compression='zip' is unknown; use None"),
    (asked(gradient_compression="fp16"), "gradient_compression='fp16' is not built in this version; use None"),
    (measured(microbatch_sizes=[]), r"micro-batches of \[\] samples"),
    (measured(microbatch_sizes="ab"), "microbatch_sizes='ab' is a str: give numbers of samples"),
    (measured(max_share=-1), "max_share=-1 lets no layer be"),
    (measured(optimizer="zip"), "optimizer='zip' is unknown; use 'sgd'"),
    (measured(num_threads=0), "num_threads=0 is impossible"),
    (measured(device="zip"), "device='zip' is unknown to torch"),
    (measured(device="meta"), "device='meta' is not built"),
    (solved(0, "profile.json"), "profile='profile.json' is a str: give a Profile"),
    (solved(1, "2xH100"), "cluster='2xH100' is a str: give a Cluster"),
    (solved(2, {"batch_size": 8}), r"training=\{'batch_size': 8\} is a dict: give a Training"),
    (lambda: pt.simulate("plan.json"), "plan='plan.json' is a str: give a Plan"),
    (lambda: pt.simulate(given_plan(), microbatches=0), "microbatches=0 is impossible"),
    (lambda: pt.simulate(given_plan(), cluster="4xH100"), "cluster='4xH100' is a str: give a Cluster"),
    (lambda: pt.verify("plan.json", nn.Linear(2, 2), torch.zeros(2, 2)), "plan='plan.json' is a str: give a Plan"),
    (lambda: pt.materialize("plan.json", nn.Linear(2, 2)), "plan='plan.json' is a str: give a Plan"),
    (lambda: pt.load(None), "path=None is a NoneType: give the path"),
    (lambda: given_plan().save(None), "path=None is a NoneType: give the path"),
    (
        lambda: drawn_plan().save_report("x.html", measured="step.json"),
        "measured='step.json' is a str: give a Timeline",
    ),
    (capacity(what_if={"batch_size": 5}), r"what_if=\{'batch_size': 5\}: give a list of values, like \[5\]"),
    (capacity(price_per_hour="x"), "price_per_hour='x' is a str"),
    (capacity(most_devices=0), "most_devices=0 is impossible"),
    (lambda: pt.Cluster.parse(None), "the cluster=None is a NoneType"),
    (lambda: pt.Training(batch_size=-1), r"Training\(batch_size=-1\): Input should be greater than or equal to 1"),
    (lambda: pt.Training(batch_size=8, schedule="x"), r"Training\(schedule='x'\): Input should be 'auto' or Input"),
    (lambda: pt.Training(), r"Training\(batch_size\): Field required"),
    (lambda: pt.Training(batch_size=8, depth=1), r"Training\(depth=1\): Extra inputs are not permitted"),
    (lambda: pt.Device(name="a", memory_bytes=-1), r"Device\(memory_bytes=-1\): "),
    (
        lambda: pt.Cluster.of(pt.Device(name="a", memory_bytes=1), 0, within=pt.Link.of(0.0, 1.0)),
        "Cluster: a cluster needs",
    ),
]


@pytest.mark.parametrize(("call", "says"), CASES, ids=lambda value: value if isinstance(value, str) else "")
def test_a_wrong_argument_is_refused_by_name(
    call: Callable[[], Any], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ArgumentError, match=says) as caught:
        call()
    assert isinstance(caught.value, ValueError)
    assert list(tmp_path.iterdir()) == []


def test_scalars_go_into_a_folder(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    (tmp_path / "file").touch()
    with pytest.raises(ArgumentError, match=r"cannot write scalars to .*file"):
        given_plan().scalars(tmp_path / "file")
