"""Kernel and collective prices: closed forms where there are any, the catalog's own figures, a file of one's own."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from partitioner.errors import ArgumentError
from partitioner.rates import PRECISIONS, Network, Rates, constants, matmul_seconds, slope
from partitioner.specs import Link, known_device
from partitioner.work import Kernel

IDEAL = dataclasses.replace(
    constants(), tile_128x128=1.0, tile_128x64=1.0, tile_64x64=1.0, depth_ramp=0.0, launch_s=0.0, bandwidth_ramp_s=0.0
)


def matmul(m: float, n: float, k: float, batch: float = 1, **more: object) -> Kernel:
    moved = 4 * batch * (m * k + k * n + m * n)
    shape = (batch, m, n, k)
    return Kernel("matmul", "mm", 2 * batch * m * n * k, moved, 1.0, shape)._replace(**more)  # type: ignore[arg-type]


def test_a_matmul_of_whole_waves_runs_at_the_full_rate() -> None:
    processors = 100
    seconds = matmul_seconds(1, 128 * 10, 256 * 20, 512, 1e12, processors, IDEAL)
    assert seconds == pytest.approx(2 * 1280 * 5120 * 512 / 1e12)


def test_one_tile_more_than_a_wave_costs_another_wave_of_the_smallest_tile_that_helps() -> None:
    whole = matmul_seconds(1, 64 * 10, 64 * 10, 512, 1e12, 100, IDEAL)
    more = matmul_seconds(1, 64 * 10, 64 * 10 + 1, 512, 1e12, 100, IDEAL)
    assert whole == pytest.approx(2 * 640 * 640 * 512 / 1e12)
    assert more == pytest.approx(2 * whole)


@settings(deadline=None)
@given(
    st.floats(1, 20_000),
    st.floats(1, 20_000),
    st.floats(1, 20_000),
    st.sampled_from(["A100-80GB", "H100", "T4", "B200"]),
)
def test_no_matmul_beats_the_peak_or_the_memory(m: float, n: float, k: float, device: str) -> None:
    rates = Rates.of(device)
    for precision in PRECISIONS:
        kernel = matmul(m, n, k)
        seconds = rates.kernel_seconds(kernel, precision)
        assert seconds >= kernel.flops / rates.peak(precision.removesuffix("-mixed"))
        assert seconds >= kernel.moved_bytes / 2 / rates.bandwidth


def test_tensor_parallelism_divides_what_it_splits_and_nothing_else() -> None:
    rates = Rates.of("A100-80GB")
    split, whole = matmul(8192, 8192, 8192, split="n"), matmul(8192, 8192, 8192)
    assert rates.kernel_seconds(whole, tp=4) == rates.kernel_seconds(whole)
    assert rates.kernel_seconds(split, tp=4) == pytest.approx(rates.kernel_seconds(split) / 4, rel=0.15)
    norm = Kernel("norm", "layer_norm", 0.0, 1e9, 1.0)
    assert rates.kernel_seconds(norm, tp=4) == rates.kernel_seconds(norm)
    assert rates.kernel_seconds(norm, tp=4, sequence_parallel=True) < 0.3 * rates.kernel_seconds(norm)


def test_sixteen_bits_halve_what_is_moved_of_32_bit_floats_only() -> None:
    rates = Rates.of("A100-80GB").with_constants(IDEAL)
    floats = Kernel("elementwise", "add", 0.0, 1e9, 1.0)
    indices = Kernel("elementwise", "add", 0.0, 1e9, 0.0)
    assert rates.kernel_seconds(floats, "bf16") == pytest.approx(rates.kernel_seconds(floats) / 2)
    assert rates.kernel_seconds(indices, "bf16") == rates.kernel_seconds(indices)


def test_a_ring_all_reduce_is_latency_and_twice_the_data() -> None:
    link = Link.of(0.0, 100e9)
    c = constants()
    network = Network(link, Link.of(0.0, 10e9), c)
    within = c.collective_base_s + c.collective_rank_s * 7
    assert network.all_reduce_s(8e9, 8, 8) == pytest.approx(within + 2 * 7 / 8 * 8e9 / (100e9 * c.collective))
    ports = min(100e9 * c.collective, 8 * 10e9 * c.network)
    between = within + c.network_base_s * math.log2(3)  # two nodes: no spread
    assert network.all_reduce_s(8e9, 16, 8) == pytest.approx(between + 2 * 15 / 16 * 8e9 / ports)
    assert network.all_reduce_s(8e9, 1, 8) == 0
    assert network.all_gather_s(8e9, 8, 8) == pytest.approx(network.all_reduce_s(8e9, 8, 8) / 2)


def test_every_device_of_the_catalog_has_rates_that_order_its_formats() -> None:
    for name in ("P4", "P100", "V100-32GB", "T4", "A10", "L4", "L40S", "RTX4090", "A100-40GB", "H100", "B200", "GB300"):
        rates = Rates.of(name)
        assert rates.peak("fp32") <= rates.peak("tf32") <= rates.peak("bf16") <= rates.peak("fp8") <= rates.peak("fp4")
        _, intra, inter = known_device(name)
        assert slope(intra) > 1e9 and slope(inter) > 1e9


def test_a_file_of_ones_own_is_laid_over_the_catalog(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = tmp_path / "mine.toml"
    own.write_text(
        """
        [links.nvlink4]
        sizes_bytes = [1000, 2000]
        seconds = [1e-5, 2e-5]
        what = "ours"
        kind = "measured"
        source = "partitioner links"
        [devices.H100]
        bandwidth = { value = 1e12, kind = "measured", source = "here" }
        [devices.Mine]
        aliases = ["ours"]
        memory = { value = "10GiB", kind = "measured", source = "here" }
        within = "nvlink4"
        between = "ndr"
        bandwidth = { value = 2e12, kind = "measured", source = "here" }
        processors = { value = 10, kind = "measured", source = "here" }
        peak.fp32 = { value = 1e13, kind = "measured", source = "here" }
        """
    )
    before = Rates.of("H100")
    assert Rates.of("H100", hardware=str(own)).bandwidth == 1e12
    assert Rates.of("H100", hardware=str(own)).peak("bf16") == before.peak("bf16")
    with pytest.raises(ArgumentError, match="'ours' is not known"):
        Rates.of("ours")
    monkeypatch.setenv("PARTITIONER_HARDWARE", str(own))
    assert Rates.of("ours").peak("fp16") == 1e13
    device, intra, _ = known_device("mine")
    assert device.memory_bytes == 10 * 2**30 and intra.time(1500) == pytest.approx(1.5e-5)
    monkeypatch.setenv("PARTITIONER_HARDWARE", str(tmp_path / "none.toml"))
    with pytest.raises(ArgumentError, match=r"cannot read the hardware file .*none.toml"):
        Rates.of("H100")
    own.write_text("[devices")
    monkeypatch.setenv("PARTITIONER_HARDWARE", str(own))
    with pytest.raises(ArgumentError, match="is not TOML"):
        Rates.of("H100")
