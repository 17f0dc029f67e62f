"""capacity(): verdicts against sums done by hand, searches against trying all, and no device touched."""

import math
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from partitioner.errors import ArgumentError
from partitioner.forecast import CapacityReport
from partitioner.preflight import capacity
from partitioner.specs import Cluster, Device, Link, state_bytes

HIDDEN, LENGTH, VOCAB = 64, 32, 128
LEVELS = ("none", "zero1", "zero2", "zero3")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Language(nn.Module):
    def __init__(self, layers: int = 6) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCAB, HIDDEN)
        self.h = nn.ModuleList(Block() for _ in range(layers))
        self.head = nn.Linear(HIDDEN, VOCAB, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.table(tokens)
        for block in self.h:
            x = block(x)
        return self.head(x)


def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


TOKENS = torch.zeros(4, LENGTH, dtype=torch.long)


def asked(gpus="4xH100", model=None, **given) -> CapacityReport:
    given = {"loss_fn": loss_fn, "example_target": TOKENS, "batch_size": 32, "curve": False, "max_share": 0.2} | given
    return capacity(model or Language(), TOKENS, gpus=gpus, **given)


def small(memory: str | int, count: int = 4) -> Cluster:
    """Devices of the catalog's speed with little memory, nothing of it taken by a context."""
    from partitioner.specs import parse_bytes

    device = Device(name="H100", memory_bytes=parse_bytes(memory))
    return Cluster.of(device, count, within=Link.of(1e-6, 1e11))


def wide(layers: int) -> tuple[nn.Module, tuple[torch.Tensor]]:
    with torch.device("meta"):
        return nn.Sequential(*[nn.Linear(8192, 8192, bias=False) for _ in range(layers)]), (torch.empty(1, 8192),)


# -- cases of public reports


def test_bytes_of_a_parameter_by_precision():
    """7B in mixed precision was told to need 54 GB, although 16 bytes a parameter give 107 GB."""

    def static(dtype: torch.dtype) -> float:
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).to(dtype)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
        model(torch.randn(4, 64, dtype=dtype)).float().sum().backward()
        optimizer.step()
        total = 0
        for parameter in model.parameters():
            assert parameter.grad is not None
            state = [t for t in optimizer.state[parameter].values() if t.dim()]
            total += sum(t.numel() * t.element_size() for t in (parameter, parameter.grad, *state))
        return total / sum(parameter.numel() for parameter in model.parameters())

    assert state_bytes("adamw", "fp32").total == static(torch.float32) == 16
    assert state_bytes("adamw", "bf16").total == static(torch.bfloat16) == 8
    assert state_bytes("adamw", "fp16-mixed").total == 2 + 2 + 4 + 4 + 4
    assert round(6.7e9 * state_bytes("adamw", "bf16-mixed").total / 1e9, 1) == 107.2
    found = asked(precision="fp16-mixed", mesh={"pp": 1, "dp": 1, "tp": 1}, gpus="1xH100").best.peak
    count = sum(parameter.numel() for parameter in Language().parameters())
    assert (found.weights, found.gradients, found.master, found.optimizer) == tuple(k * count for k in (2, 2, 4, 8))


@pytest.mark.parametrize(
    ("schedule", "microbatches", "held"),
    [
        ("1f1b", 1, (1, 1, 1, 1)),
        ("1f1b", 2, (2, 2, 2, 1)),
        ("1f1b", 8, (4, 3, 2, 1)),
        ("gpipe", 8, (8, 8, 8, 8)),
    ],
)
def test_activations_are_in_the_ratio_of_micro_batches_in_flight(schedule, microbatches, held):
    class Linears(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(64, 256), nn.Linear(256, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(torch.tanh(self.a(x)))

    model = nn.Sequential(*[Linears() for _ in range(8)])
    found = capacity(
        model,
        torch.randn(512, 64),
        gpus="4xH100",
        mesh={"pp": 4, "dp": 1, "tp": 1},
        schedule=schedule,
        microbatches=microbatches,
        recompute="never",
        curve=False,
    ).best
    each = [items.activations + items.loss for items in found.memory]
    assert found.in_flight == held
    assert each[1:] == pytest.approx([each[-1] * count / held[-1] for count in held[1:]], rel=0.005)
    assert each[0] < each[-1] * held[0] / held[-1]  # what the first layer reads is the input, which is there anyway


def test_a_limit_that_the_first_stage_breaks_moves_layers_to_later_ones():
    wish = {"mesh": {"pp": 4, "dp": 1, "tp": 1}, "schedule": "1f1b", "microbatches": 8, "recompute": "never"}
    free = asked(gpus=small("1GiB"), model=Language(16), **wish)
    even = [items.total for items in free.best.memory]
    assert even.index(max(even)) == 0
    limit = max(even) - 1
    tight = asked(gpus=small(limit), model=Language(16), **wish)
    assert tight.fits and tight.best.cuts != free.best.cuts
    assert tight.best.cuts[0] < free.best.cuts[0] and max(items.total for items in tight.best.memory) <= limit
    hopeless = asked(gpus=small(max(even) // 8), model=Language(16), **wish)
    assert not hopeless.fits and "rank 0 of the pipeline" in hopeless.verdict()


def test_quantised_weights_in_buffers_count_as_they_are_stored():
    class Packed(nn.Module):
        def __init__(self, inputs: int, outputs: int) -> None:
            super().__init__()
            self.register_buffer("packed", torch.zeros(outputs, inputs // 2, dtype=torch.uint8))
            self.register_buffer("scale", torch.full((outputs, 1), 0.01, dtype=torch.float16))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            w = torch.stack([self.packed & 15, self.packed >> 4], -1).flatten(1).to(x.dtype) - 8
            return x @ (w * self.scale.to(x.dtype)).t()

    model = nn.Sequential(Packed(256, 256), nn.ReLU(), Packed(256, 64))
    report = capacity(model, torch.randn(2, 256), gpus="2xH100", mesh={"pp": 2, "dp": 1, "tp": 1}, curve=False)
    assert report.stored_bytes == 41600 and report.num_trainable == 0
    assert sum(items.weights + items.buffers for items in report.best.memory) == 41600
    assert {(items.gradients, items.optimizer, items.master) for items in report.best.memory} == {(0, 0, 0)}
    assert model[0].packed.dtype == torch.uint8


def test_a_recipe_for_one_card_is_refused_on_another_from_a_laptop():
    model, inputs = wide(96)
    need = 16 * sum(parameter.numel() for parameter in model.parameters())
    verdicts = [capacity(model, inputs, gpus=gpus, curve=False) for gpus in ("1xH200", "1xH100", "2xH100")]
    assert [report.fits for report in verdicts] == [True, False, True]
    refused = verdicts[1]
    assert refused.shortfall_bytes >= need - 80e9
    assert refused.fewest_devices == 2
    assert "does not fit" in refused.verdict() and "2 such devices" in refused.verdict()
    assert all(parameter.is_meta for parameter in model.parameters())


# -- memory


def test_sharding_divides_what_its_level_says():
    wish = {"mesh": {"tp": 1, "pp": 1, "dp": 4}, "precision": "bf16-mixed", "microbatches": 1}
    none, one, two, three = (asked(shard=level, **wish).best.peak for level in LEVELS)
    assert one.optimizer == math.ceil(none.optimizer / 4) and one.master == math.ceil(none.master / 4)
    assert (one.gradients, one.weights) == (none.gradients, none.weights)
    assert two.gradients == math.ceil(none.gradients / 4) and two.weights == none.weights
    assert three.weights == math.ceil(none.weights / 4) and three.gathered > 0


def test_tensor_parallel_ranks_hold_their_share_of_divided_weights():
    wish = {"precision": "bf16", "microbatches": 8, "recompute": "never", "shard": "none"}
    whole = asked(gpus="1xH100", mesh={"tp": 1, "pp": 1, "dp": 1}, **wish).best.peak
    half = asked(gpus="2xH100", mesh={"tp": 2, "pp": 1, "dp": 1}, **wish).best.peak
    model = Language()
    kept = {"norm.weight", "norm.bias", "down.bias"}  # norms, and biases added after the sum over ranks
    repeated = sum(p.numel() for name, p in model.named_parameters() if name.split(".", 2)[-1] in kept)
    total = sum(parameter.numel() for parameter in model.parameters())
    assert half.weights == 2 * (repeated + (total - repeated) // 2)
    assert 0.45 * whole.activations < half.activations < 0.55 * whole.activations
    apart = asked(gpus="2xH100", mesh={"tp": 2, "pp": 1, "dp": 1}, sequence_parallel=False, **wish).best.peak
    assert half.activations < apart.activations < whole.activations


def test_recomputation_keeps_less_and_takes_longer():
    wish = {"gpus": "1xH100", "mesh": {"tp": 1, "pp": 1, "dp": 1}, "microbatches": 8}
    never, selective, always = (asked(recompute=how, **wish).best for how in ("never", "selective", "always"))
    assert never.peak.activations > selective.peak.activations > always.peak.activations
    assert never.step_s < selective.step_s < always.step_s
    assert always.peak.activations == pytest.approx(6 * 4 * LENGTH * HIDDEN * 4, rel=0.01)  # a block's input each


# -- the search


def test_more_devices_in_one_node_than_are_sold_is_said():
    told = [line for line in asked("16xH100").why if "one node" in line]
    assert len(told) == 1 and "gpus='2x8xH100'" in told[0]
    assert not any("one node" in line for gpus in ("2x8xH100", "8xH100") for line in asked(gpus).why)


def test_the_best_is_the_fastest_of_all_that_fit():
    wish = {"gpus": "2xH100", "schedule": "1f1b", "recompute": "never", "shard": "none"}
    report = asked(**wish)
    meshes = [{"tp": 2, "pp": 1, "dp": 1}, {"tp": 1, "pp": 2, "dp": 1}, {"tp": 1, "pp": 1, "dp": 2}]
    times = [asked(mesh=mesh, **wish).best.step_s for mesh in meshes]
    assert report.best.step_s <= min(times) * 1.005 + 1e-12
    assert all(other.step_s >= report.best.step_s / 1.005 for other in report.others)
    assert all(other.note for other in report.others)


def test_the_parts_of_a_step_add_up_and_the_items_to_the_peak():
    best = asked(gpus="4xH100", mesh={"tp": 2, "pp": 2, "dp": 1}).best
    assert sum(best.parts.model_dump().values()) == pytest.approx(best.step_s)
    assert best.efficiency == pytest.approx(best.speedup / 4)
    assert best.margin_bytes == best.limit_bytes - max(items.total for items in best.memory)


def test_fewest_devices_is_where_it_begins_to_fit():
    memory = "3MiB"
    report = asked(gpus=small(memory, 1))
    assert not report.fits and report.fewest_devices is not None and report.fewest_devices > 1
    assert asked(gpus=small(memory, report.fewest_devices)).fits
    assert not asked(gpus=small(memory, report.fewest_devices - 1)).fits


def test_the_largest_micro_batch_fits_and_one_more_does_not():
    wish = {"mesh": {"tp": 1, "pp": 1, "dp": 1}, "recompute": "never"}
    report = asked(gpus=small("40MiB", 1), **wish)
    largest = report.largest_microbatch
    assert largest is not None
    assert asked(gpus=small("40MiB", 1), batch_size=largest, microbatches=1, **wish).fits
    assert not asked(gpus=small("40MiB", 1), batch_size=largest + 1, microbatches=1, **wish).fits


def test_curve_costs_and_changes():
    wish = {"mesh": {"pp": 1, "tp": 1}, "recompute": "never", "shard": "none", "microbatches": 2}
    report = asked(
        gpus="4xH100",
        curve=True,
        price_per_hour=2.0,
        **wish,
        what_if={
            "batch_size": [64],
            "sequence_length": [64],
            "precision": ["bf16-mixed"],
            "gpus": ["4xL4"],
            "mesh": [],
        },
    )
    assert [point.num_devices for point in report.curve] == [1, 2, 4]
    first = report.curve[0]
    assert first.price_per_step == pytest.approx(2.0 * first.layout.step_s / 3600)
    assert 0 < first.layout.speedup <= 1 + 1e-9  # the one device chooses its micro-batch
    changes = {one.change: one.layout for one in report.variations}
    assert list(changes) == ["batch_size=64", "sequence_length=64", "precision=bf16-mixed", "gpus=4xL4"]
    longer = changes["sequence_length=64"]
    assert longer is not None and longer.peak.activations == pytest.approx(2 * report.best.peak.activations, rel=0.01)
    refused = asked(gpus="4xH100", what_if={"mesh": [{"tp": 3, "pp": 1, "dp": 1}]}).variations[0]
    assert not refused.fits and "3 devices, there are 4" in refused.refused


def test_a_longer_sequence_is_found():
    report = asked(gpus=small("10MiB", 1), longest_sequence=True)
    assert report.longest_sequence is not None and report.longest_sequence > LENGTH


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_sequence_beyond_the_table_of_positions_is_told(family):
    """Without values no index is looked up: GPT-2 of 64 positions was said to fit with 128. Llama's have no table."""
    if family == "gpt2":
        model = GPT2LMHeadModel(GPT2Config(n_positions=64, n_embd=32, n_layer=2, n_head=2, vocab_size=100))
    else:
        small_llama = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 100}
        model = LlamaForCausalLM(LlamaConfig(**small_llama, intermediate_size=64, max_position_embeddings=64))
    tokens = torch.zeros(4, 32, dtype=torch.long)
    found = capacity(
        model,
        {"input_ids": tokens, "labels": tokens},
        gpus="1xH100",
        curve=False,
        what_if={"sequence_length": [64, 128]},
    )
    least, most = found.variations
    assert least.fits
    if family == "gpt2":
        assert "length 128 are longer than the 64 positions of transformer.wpe" in most.refused
        longer = torch.zeros(4, 65, dtype=torch.long)
        with pytest.raises(ArgumentError, match="length 65 are longer than the 64 positions"):
            capacity(model, {"input_ids": longer, "labels": longer}, gpus="1xH100")
    else:
        assert most.fits


# -- models of other kinds


class Experts(nn.Module):
    """A mixture of experts, dense over all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(HIDDEN, 4, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(HIDDEN, 128), nn.GELU(), nn.Linear(128, HIDDEN)) for _ in range(4)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shares = self.router(x).softmax(-1)
        return x + sum(shares[..., k : k + 1] * expert(x) for k, expert in enumerate(self.experts))


class Skipping(nn.Module):
    """A small U-Net."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([nn.Conv2d(3, 8, 3, 2, 1), nn.Conv2d(8, 16, 3, 2, 1)])
        self.up = nn.ModuleList([nn.ConvTranspose2d(16, 8, 2, 2), nn.ConvTranspose2d(16, 4, 2, 2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a = torch.relu(self.down[0](x))
        b = torch.relu(self.down[1](a))
        return self.up[1](torch.cat([torch.relu(self.up[0](b)), a], 1))


def residual() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, 2, 1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.BatchNorm1d(8),
        nn.Linear(8, 5),
    )


@pytest.mark.parametrize(
    ("model", "inputs"),
    [
        (nn.Sequential(*[Experts() for _ in range(3)]), torch.randn(4, 8, HIDDEN)),
        (Skipping(), torch.randn(4, 3, 16, 16)),
        (residual(), torch.randn(4, 3, 16, 16)),
    ],
    ids=["experts", "u-net", "batch norm"],
)
def test_any_module_is_answered_for(model, inputs):
    report = capacity(model, inputs, gpus="2xV100-16GB", batch_size=16)
    assert report.fits and report.best.step_s > 0 and report.fewest_devices == 1
    assert len(report.layers) >= 2


def test_batch_norm_is_given_no_single_sample():
    report = capacity(residual(), torch.randn(4, 3, 16, 16), gpus="2xV100-16GB", batch_size=4)
    assert all(one.microbatch_samples >= 2 for one in (report.best, *report.others))
    with pytest.raises(ArgumentError, match=r"refuses to train on one sample .* batch of 2 leaves less than 2"):
        capacity(residual(), torch.randn(4, 3, 16, 16), gpus="2xV100-16GB", batch_size=2, mesh={"dp": 2})


def test_convolutions_are_not_divided():
    with pytest.raises(ArgumentError, match=r"tp=2 would divide \d+ % of the parameters"):
        capacity(Skipping(), torch.randn(4, 3, 16, 16), gpus="2xH100", mesh={"tp": 2, "pp": 1, "dp": 1})


# -- what is said


def test_runnable_and_why_not():
    plain = asked(gpus="4xH100", mesh={"tp": 1, "pp": 2, "dp": 2}, shard="none", schedule="1f1b", recompute="never")
    assert plain.best.runnable and plain.best.why_not == ()
    mixed = asked(gpus="4xH100", mesh={"tp": 2, "pp": 2, "dp": 1}, precision="bf16-mixed")
    assert not mixed.best.runnable
    assert any("tp=2" in reason for reason in mixed.best.why_not)
    assert any("bf16-mixed" in reason for reason in mixed.best.why_not)


@pytest.mark.parametrize(
    ("limit", "words"), [(1.5, "to spare"), (1.05, "less than the ± 11 %"), (0.97, "short of less than the ± 11 %")]
)
def test_a_verdict_within_the_error_of_estimates_says_so(limit, words):
    fixed = {"mesh": {"tp": 1, "pp": 1, "dp": 1}, "gpus": "1xH100", "microbatches": 1, "recompute": "never"}
    needed = asked(**fixed).best.peak.total
    told = asked(**fixed, memory_limit=int(limit * needed)).verdict()
    assert told.startswith("fits" if limit > 1 else "does not fit")
    assert words in told and ("less than" in told) == (limit < 1.11)


def test_the_report_is_saved_loaded_and_shown(tmp_path):
    report = asked(gpus="4xH100", curve=True, price_per_hour=1.0, what_if={"shard": ["zero3"]})
    report.save(tmp_path / "report.json")
    assert CapacityReport.load(tmp_path / "report.json") == report
    text = str(report)
    for word in ("verdict", "fits", "weights", "efficiency", "what if", "price a step"):
        assert word in text


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"gpus": "4xH101"}, r"'H101' is not known. Known: .*H100"),
        ({"gpus": 4}, r"gpus=4 names no device"),
        ({"mesh": {"tp": 2, "pp": 2, "dp": 2}}, r"needs 8 devices, there are 4"),
        ({"mesh": {"pp": 4, "dp": 1, "xp": 1}}, r"no axis 'xp'"),
        ({"mesh": {"dp": 4, "tp": 1, "pp": 1}, "batch_size": 6}, r"6 does not divide by 4 replicas"),
        ({"mesh": {"pp": 64, "tp": 1, "dp": 1}, "gpus": "64xH100"}, r"pp=64 needs 64 layers .* the model has 8"),
        ({"precision": "int8"}, r"precision='int8' is unknown"),
        ({"optimizer": "lion"}, r"'lion' is not known"),
        ({"optimizer": None}, r"optimizer=None is a NoneType"),
        ({"shard": "zero4"}, r"shard='zero4' is unknown"),
        ({"recompute": "often"}, r"recompute='often' is unknown"),
        ({"memory_limit": "70Gib"}, r"bits"),
        ({"microbatches": 5}, r"5 micro-batches do not divide"),
        ({"what_if": {"colour": [1]}}, r"cannot change 'colour'"),
        ({"batch_size": 0}, r"batch_size=0 is impossible"),
    ],
)
def test_bad_input_is_told_with_its_numbers(given, message):
    with pytest.raises(ArgumentError, match=message):
        asked(**{"gpus": "4xH100"} | given)


def test_gigabytes_are_not_gibibytes():
    wish = {"mesh": {"tp": 1, "pp": 1, "dp": 1}, "gpus": "1xH100"}
    assert asked(memory_limit="40GB", **wish).best.limit_bytes == 40_000_000_000
    assert asked(memory_limit="40GiB", **wish).best.limit_bytes == 40 * 2**30


def test_no_device_is_touched():
    code = (
        "import torch, sys; from torch import nn; import partitioner as pt\n"
        "with torch.device('meta'): model = nn.Sequential(*[nn.Linear(8192, 8192, bias=False) for _ in range(8)])\n"
        "report = pt.capacity(model, torch.empty(1, 8192, device='meta'), gpus='1xH100')\n"
        "assert report.fits and not torch.cuda.is_initialized()\n"
        "import resource; print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 1500
