"""Profiles as data: saved, loaded, interpolated, refused."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
from given import given_plan, given_profile
from hypothesis import given
from hypothesis import strategies as st

from partitioner.errors import ArgumentError, SetupError
from partitioner.profiles import Layer, LayerCost, Parameter, Profile, write_whole


def layer(*costs: tuple[int, float]) -> Layer:
    """A layer with these (samples, forward_s); backward is twice forward, saved is a million times it."""
    return Layer(
        id="x",
        class_name="X",
        costs=tuple(
            LayerCost(samples=n, forward_s=t, backward_s=2 * t, saved_bytes=round(1e6 * t), flops=n) for n, t in costs
        ),
    )


def test_what_was_saved_is_what_is_loaded(tmp_path: Path) -> None:
    profile = given_profile(no_cut={"block.1": "a hook"}, step_s=(0.01, 0.02), unattributed_s=(0.0, -0.001))
    profile.save(tmp_path / "p.json")
    assert Profile.load(tmp_path / "p.json") == profile


def test_between_two_sizes_a_cost_is_on_the_line_through_them() -> None:
    cost = layer((2, 3.0), (4, 5.0)).cost(3)
    assert (cost.samples, cost.forward_s, cost.backward_s, cost.saved_bytes, cost.flops) == (
        3,
        4.0,
        8.0,
        4_000_000,
        3.0,
    )


def test_a_measured_size_is_the_measurement_itself() -> None:
    measured = layer((2, 3.0), (4, 5.0))
    assert measured.cost(4) is measured.costs[1]


def test_beyond_the_largest_size_the_last_line_goes_on() -> None:
    assert layer((1, 1.0), (2, 3.0), (4, 5.0)).cost(8).forward_s == pytest.approx(9.0)


def test_one_size_alone_is_scaled_in_proportion() -> None:
    assert layer((4, 2.0)).cost(1).forward_s == pytest.approx(0.5)


def test_below_the_smallest_size_a_cost_stays_above_half_of_proportion() -> None:
    steep = layer((4, 1.0), (8, 10.0))  # the line would be negative at 1
    assert steep.cost(1).forward_s == pytest.approx(0.5 * 1.0 / 4)


@given(
    st.lists(st.floats(0, 1e3), min_size=2, max_size=4),
    st.integers(min_value=1, max_value=200),
)
def test_a_cost_is_never_negative(times: list[float], samples: int) -> None:
    cost = layer(*((4 * 2**k, t) for k, t in enumerate(times))).cost(samples)
    assert cost.forward_s >= 0
    assert cost.saved_bytes >= 0


def test_backward_is_split_only_where_both_sizes_are() -> None:
    whole = LayerCost(samples=1, forward_s=1, backward_s=2)
    split = LayerCost(samples=2, forward_s=1, backward_s=2, backward_input_s=1.5, backward_weight_s=1.4)
    assert Layer(id="x", class_name="X", costs=(whole, split)).cost(3).backward_input_s is None
    halves = LayerCost(samples=4, forward_s=1, backward_s=4, backward_input_s=2.5, backward_weight_s=2.4)
    assert Layer(id="x", class_name="X", costs=(split, halves)).cost(3).backward_input_s == pytest.approx(2.0)


def test_tensor_bytes_are_interpolated_like_costs() -> None:
    profile = given_profile(sizes=(2, 4))
    tensor = profile.tensors[0]
    assert [profile.tensor_bytes(tensor, samples) for samples in (2, 3, 4, 8)] == [2048, 3072, 4096, 8192]


def changed(**fields: Any) -> str:
    return json.dumps(json.loads(given_profile().model_dump_json()) | fields)


def twice() -> str:
    """A file whose every layer is measured twice at one size."""
    data = json.loads(given_profile().model_dump_json())
    for layer in data["layers"]:
        layer["costs"] = layer["costs"][1:] * 2
    return json.dumps(data | {"microbatch_sizes": [2, 2]})


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("{", "not JSON"),
        ("[]", "the file"),
        (changed(surprise=1), "surprise"),
        (changed(version=2), "a Profile of format 2, this partitioner reads format 1"),
        (changed(provenance="guessed"), "provenance"),
        (changed(layers=[]), "layers"),
        (changed(optimizer_s=-1), "optimizer_s"),
        (changed(step_s=["long"]), r"step_s\.0"),
        (changed(step_s=[0.1]), r"step_s: 1 times, but there are 2 microbatch_sizes"),
        (changed(unattributed_s=[0.1] * 3), r"unattributed_s: 3 times, but there are 2 microbatch_sizes"),
        (changed(no_cut={"block.9": "a hook"}), r"no_cut: there is no layer 'block.9'"),
        (changed(microbatch_sizes=[1, 3]), "block.0: its costs are not at the sizes"),
        (changed(device_kind="tpu"), "device_kind"),
        (changed(unattributed_s=[math.nan, 0.0]), r"unattributed_s\.0"),
        (changed(buffers=[{"names": [], "bytes": 4, "layers": ["block.0"]}]), r"buffers\.0\.names"),
        (twice(), r"microbatch_sizes must ascend, got \(2, 2\)"),
    ],
)
def test_a_file_that_is_no_profile_is_refused_by_the_field(tmp_path: Path, text: str, field: str) -> None:
    path = tmp_path / "p.json"
    path.write_text(text)
    with pytest.raises(ArgumentError, match=rf"p\.json is .*{field}"):
        Profile.load(path)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"no file .*none\.json"):
        Profile.load(tmp_path / "none.json")


def test_a_folder_or_a_binary_file_is_refused_like_any_other(tmp_path: Path) -> None:
    (tmp_path / "p.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ArgumentError, match="not JSON"):
        Profile.load(tmp_path / "p.json")
    with pytest.raises(ArgumentError, match="cannot read"):
        Profile.load(tmp_path)


def test_a_saved_file_has_the_rights_of_any_new_file(tmp_path: Path) -> None:
    given_profile().save(tmp_path / "p.json")
    (tmp_path / "plain").touch()
    assert (tmp_path / "p.json").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_nan_and_infinity_are_no_seconds() -> None:
    for value in (float("nan"), float("inf"), -1e-9):
        with pytest.raises(ValueError, match="forward_s"):
            LayerCost(samples=1, forward_s=value, backward_s=0)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"layers": (*given_profile(2).layers, given_profile(2).layers[0])}, "same id"),
        ({"layers": given_profile(2).layers}, "no layer 'block.2'"),
        ({"tensors": (given_profile().tensors[0].model_copy(update={"consumers": ("gone",)}),)}, "no layer 'gone'"),
        (
            {"tensors": (given_profile().tensors[1].model_copy(update={"consumers": ("block.0",)}),)},
            "used before layer 'block.1' makes it",
        ),
        ({"tensors": (given_profile().tensors[0].model_copy(update={"bytes_at": (1,)}),)}, "1 sizes, not 2"),
        ({"parameters": (given_profile().parameters[0].model_copy(update={"layers": ("gone",)}),)}, "no layer 'gone'"),
    ],
)
def test_layers_tensors_and_parameters_must_fit_together(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        given_profile(**changes)


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "p.json"
    path.write_text("old")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(SetupError, match=r"cannot write .*p\.json: No space"):
        given_profile().save(path)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_rights_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(ArgumentError, match="permission denied"):
        given_profile().save(tmp_path / "p.json")


def test_a_file_of_another_kind_is_named(tmp_path: Path) -> None:
    given_plan().save(tmp_path / "plan.json")
    with pytest.raises(ArgumentError, match=r"plan\.json holds a Plan, and a Profile is needed here"):
        Profile.load(tmp_path / "plan.json")


def test_a_write_replaces_the_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    path.write_text("x" * 10_000)
    write_whole(path, "new")
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


def test_trainable_element_bytes_is_the_mean_width_of_what_is_trained() -> None:
    def parameter(dtype: str, num_bytes: int, trainable: bool) -> Parameter:
        return Parameter(
            names=(dtype,), shape=(10,), dtype=dtype, bytes=num_bytes, trainable=trainable, layers=("block.0",)
        )

    half, full, frozen = parameter("float16", 20, True), parameter("float32", 40, True), parameter("int8", 10, False)
    assert given_profile(parameters=(half, frozen)).trainable_element_bytes == 2
    assert given_profile(parameters=(half, full)).trainable_element_bytes == 3
    assert given_profile(parameters=(frozen,)).trainable_element_bytes == 4


@pytest.mark.parametrize(
    ("field", "value"),
    [("forward_s", -1.0), ("backward_s", 1e12), ("saved_bytes", -5), ("saved_bytes", 2**70), ("forward_s", None)],
)
def test_a_cost_that_cannot_be_is_refused_with_the_name_of_its_field(field, value, tmp_path):
    data = json.loads(given_profile().model_dump_json())
    if value is None:
        del data["layers"][2]["costs"][1][field]
    else:
        data["layers"][2]["costs"][1][field] = value
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(data))
    with pytest.raises(ArgumentError, match=rf"is not a Profile: layers\.2\.costs\.1\.{field}: "):
        Profile.load(path)


def test_a_pipe_is_written_into_and_a_link_followed_where_a_file_would_be_replaced(tmp_path: Path) -> None:
    pipe, link, file = tmp_path / "pipe", tmp_path / "link.json", tmp_path / "there" / "file.json"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_whole(pipe, "text")
        assert os.read(reader, 16) == b"text"
    finally:
        os.close(reader)
    assert pipe.is_fifo()
    file.parent.mkdir()
    link.symlink_to(file)
    for text in ("first", "second"):
        write_whole(link, text)
        assert link.is_symlink()
        assert file.read_text() == text
    assert [f.name for f in file.parent.iterdir()] == ["file.json"]
