"""Sizes and units, links and clusters."""

from __future__ import annotations

import tomllib
from importlib.resources import files
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from partitioner.errors import ArgumentError
from partitioner.specs import Cluster, Device, Link, Training, format_bytes, known_device, parse_bytes


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("70GiB", 70 * 1024**3),
        ("80GB", 80 * 1000**3),
        ("80 GB", 80_000_000_000),
        ("1.5KiB", 1536),
        ("2TB", 2 * 10**12),
        ("512B", 512),
        ("80", 80),
        (80, 80),
        ("1e3", 1000),
        (".5MiB", 512 * 1024),
        ("  3 MB ", 3_000_000),
        ("80MB", 80_000_000),
    ],
)
def test_a_size_is_1024_based_with_an_i_and_1000_based_without(text: str | int, expected: int) -> None:
    assert parse_bytes(text) == expected


def test_a_bare_number_is_bytes_and_not_gigabytes() -> None:
    assert parse_bytes("80") == 80
    assert "plain number of bytes" in (parse_bytes.__doc__ or "")


@pytest.mark.parametrize("stage", [True, False])
def test_a_pin_to_true_or_false_is_no_stage(stage: bool) -> None:
    with pytest.raises(ArgumentError, match=rf"'a': {stage} is no stage: give its number, from 0 on, or a word"):
        Training(batch_size=4, pin={"a": stage})


@pytest.mark.parametrize("text", ["80Gb", "80Gib", "8b", "80gb"])
def test_bits_are_refused_by_name(text: str) -> None:
    with pytest.raises(ArgumentError, match=r"bits.*GiB"):
        parse_bytes(text)


@pytest.mark.parametrize(
    "text", ["-1GB", -1, "80XB", "GiB", "", "1.2.3GB", "1e999GB", float("nan"), float("inf"), True, None, "eighty"]
)
def test_a_size_that_is_none_is_an_argument_error(text: object) -> None:
    with pytest.raises(ArgumentError):
        parse_bytes(text)  # type: ignore[arg-type]


@given(st.integers(min_value=0, max_value=2**50))
def test_what_is_shown_is_within_the_digit_shown(num_bytes: int) -> None:
    shown = format_bytes(num_bytes)
    unit = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}[shown.split()[1]]
    assert abs(parse_bytes(shown.replace(" ", "")) - num_bytes) <= 0.05 * unit + 1


def test_a_link_goes_through_its_points_and_keeps_its_last_slope() -> None:
    link = Link(sizes_bytes=(0, 1000, 3000), seconds=(1.0, 2.0, 3.0))
    assert [link.time(size) for size in (0, 500, 1000, 2000, 3000, 5000)] == [1.0, 1.5, 2.0, 2.5, 3.0, 4.0]


def test_a_link_of_latency_and_bandwidth_is_that_line_at_every_size() -> None:
    link = Link.of(2e-5, 5e9)
    for size in (0, 1, 10**6, 2**30, 2**33):
        assert link.time(size) == pytest.approx(2e-5 + size / 5e9, rel=1e-12)


@pytest.mark.parametrize("num_ranks", [2, 3, 8])
def test_a_ring_all_reduce_sends_two_times_all_but_one_share(num_ranks: int) -> None:
    size, latency, rate = 12_000_000, 1e-5, 1e9
    steps = [latency + size / num_ranks / rate for _ in range(num_ranks - 1) for _phase in ("reduce", "gather")]
    assert Link.of(latency, rate).all_reduce_time(size, num_ranks) == pytest.approx(sum(steps))


def test_one_rank_reduces_in_no_time() -> None:
    assert Link.of(1.0, 1.0).all_reduce_time(100, 1) == 0


@pytest.mark.parametrize(
    ("sizes", "seconds"), [((0,), (1.0,)), ((0, 1), (1.0,)), ((5, 1), (1.0, 2.0)), ((1, 1), (1.0, 2.0))]
)
def test_a_link_without_a_line_is_refused(sizes: tuple[int, ...], seconds: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="link"):
        Link(sizes_bytes=sizes, seconds=seconds)


def test_two_nodes_of_eight_know_which_link_joins_two_ranks() -> None:
    cluster = Cluster.parse("2x8xA100-80GB")
    assert cluster.num_devices == 16
    assert cluster.nodes == (0,) * 8 + (1,) * 8
    assert cluster.link(0, 7) == cluster.intra
    assert cluster.link(7, 8) == cluster.inter
    assert cluster.slowest_link((0, 1)) == cluster.intra
    assert cluster.slowest_link((0, 8)) == cluster.inter
    assert cluster.inter.time(2**26) > cluster.intra.time(2**26)


@pytest.mark.parametrize(
    ("text", "count", "name"),
    [("8xH100", 8, "H100"), ("h200", 1, "H200"), (" 2 x 4 x v100-32gb ", 8, "V100-32GB"), ("4x4090", 4, "RTX4090")],
)
def test_a_cluster_is_read_from_a_word(text: str, count: int, name: str) -> None:
    cluster = Cluster.parse(text)
    assert (cluster.num_devices, {device.name for device in cluster.devices}) == (count, {name})


def test_an_unknown_device_is_answered_with_those_that_are_known() -> None:
    with pytest.raises(ArgumentError, match=r"'Z9' is not known.*V100-32GB.*H100.*Cluster.of"):
        Cluster.parse("8xZ9")


def test_a_name_that_could_be_several_is_not_guessed() -> None:
    with pytest.raises(ArgumentError, match="A100-40GB or A100-80GB"):
        Cluster.parse("8xA100")


@pytest.mark.parametrize("text", ["4", "", "0xH100", "8x", "-8xH100", "8xxH100", "2x2x2xH100"])
def test_what_is_no_cluster_is_refused(text: str) -> None:
    with pytest.raises(ArgumentError):
        Cluster.parse(text)


def test_every_known_figure_names_its_source_and_kind() -> None:
    catalog = tomllib.loads(files("partitioner").joinpath("hardware.toml").read_text(encoding="utf-8"))
    figures = [catalog["overhead"]]
    figures += [device["memory"] for device in catalog["devices"].values()]
    for link in catalog["links"].values():
        figures += [link] if "seconds" in link else [link["bandwidth"], link["latency"]]
    for figure in figures:
        assert figure["kind"] in {"measured", "specified", "assumed"}
        assert figure["source"]
    assert len(catalog["devices"]) >= 12


def test_every_known_device_is_whole_and_its_names_are_its_own() -> None:
    catalog = tomllib.loads(files("partitioner").joinpath("hardware.toml").read_text(encoding="utf-8"))
    names = [name.lower() for key, entry in catalog["devices"].items() for name in (key, *entry["aliases"])]
    assert len(names) == len(set(names))
    for name in names:
        device, within, between = known_device(name)
        assert 5 * 2**30 < device.usable_bytes < 300 * 2**30
        assert 0 < within.time(2**20) < 1e-3
        assert 0 < between.time(2**20) < 1e-3


@pytest.mark.parametrize(
    ("name", "box_gb"), [("V100-32GB", 32), ("A100-80GB", 80), ("H100", 80), ("L4", 24), ("T4", 16)]
)
def test_what_the_driver_reports_is_near_the_number_on_the_box(name: str, box_gb: int) -> None:
    memory = known_device(name)[0].memory_bytes
    assert 0.9 * box_gb * 2**30 < memory < box_gb * 2**30


def test_the_published_all_reduce_comes_back_from_the_link_made_of_it() -> None:
    """2 x A100: 256 MiB at a bus bandwidth of 184.39 GB/s; of two ranks, that is the data over the time."""
    _, within, _ = known_device("A100-80GB")
    assert 256 * 2**20 / within.all_reduce_time(256 * 2**20, 2) == pytest.approx(184.39e9, rel=1e-3)


def test_a_cluster_counts_its_devices_and_nodes() -> None:
    device = Device(name="Toy", memory_bytes=100, overhead_bytes=120)
    assert device.usable_bytes == 0
    link = Link.of(0.0, 1.0)
    with pytest.raises(ValueError, match="at least one device, got 0"):
        Cluster(devices=(), nodes=(), intra=link, inter=link)
    with pytest.raises(ValueError, match="2 devices but 1 node"):
        Cluster(devices=(device, device), nodes=(0,), intra=link, inter=link)


def test_unknown_and_impossible_fields_are_refused() -> None:
    with pytest.raises(ValueError, match="Extra inputs"):
        Training(batch_size=8, batchsize=8)  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="greater than or equal to 1"):
        Training(batch_size=0)


@pytest.mark.parametrize("rate", [0, -1e9, float("nan")])
def test_a_link_that_moves_nothing_is_refused(rate: float) -> None:
    with pytest.raises(ArgumentError, match="moves nothing"):
        Link.of(1e-5, rate)


@pytest.mark.parametrize("values", [{"batch_size": 2**40}, {"batch_size": 8, "optimizer_bytes": float("inf")}])
def test_absurd_requests_are_refused_by_name(values: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=list(values)[-1]):
        Training(**values)
