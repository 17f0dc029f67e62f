"""vector_quantize_pytorch, denoising_diffusion_pytorch and others: quantizers and diffusion."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from models import Case

from library_models.building import (
    BATCH,
    CLASSES,
    each,
    library,
    own_loss,
    squared,
)


def _quantized(quantizer: Callable[[], Any]) -> Case:
    class AutoEncoder(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.quantizer = (
                torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 16)),
                quantizer(),
            )
            self.decoder = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 16))

        def forward(self, x: torch.Tensor) -> Any:
            found = self.quantizer(self.encoder(x))
            quantized, *rest = found if isinstance(found, tuple) else (found,)
            left = [t.mean() for t in rest if isinstance(t, torch.Tensor) and t.is_floating_point() and t.requires_grad]
            return (self.decoder(quantized) - x).square().mean() + sum(left)

    return own_loss(AutoEncoder(), torch.randn(BATCH, 12, 16))


def _vq(kind: str, **more: Any) -> Callable[[], Case]:
    return lambda: _quantized(lambda: getattr(import_module("vector_quantize_pytorch"), kind)(**({"dim": 16} | more)))


QUANTIZERS = {
    "ema": _vq("VectorQuantize", codebook_size=32, decay=0.8, commitment_weight=1.0),
    "cosine": _vq("VectorQuantize", codebook_size=32, use_cosine_sim=True, kmeans_init=True, kmeans_iters=4),
    "kmeans": _vq("VectorQuantize", codebook_size=16, kmeans_init=True, kmeans_iters=4, threshold_ema_dead_code=2),
    "learnable": _vq("VectorQuantize", codebook_size=32, learnable_codebook=True, ema_update=False),
    "heads": _vq("VectorQuantize", codebook_size=32, heads=2, separate_codebook_per_head=True, codebook_dim=8),
    "stochastic": _vq("VectorQuantize", codebook_size=32, stochastic_sample_codes=True, sample_codebook_temp=0.1),
    "rotation_off": _vq("VectorQuantize", codebook_size=32, rotation_trick=False, orthogonal_reg_weight=1.0),
    "residual": _vq("ResidualVQ", num_quantizers=3, codebook_size=32),
    "residual_dropout": _vq(
        "ResidualVQ", num_quantizers=3, codebook_size=32, quantize_dropout=True, shared_codebook=True
    ),
    "grouped": _vq("GroupedResidualVQ", num_quantizers=2, groups=2, codebook_size=32),
    "random_projection": _vq("SimVQ", codebook_size=32),
    "fsq": _vq("FSQ", levels=[8, 5, 5]),
    "residual_fsq": _vq("ResidualFSQ", levels=[8, 5, 5], num_quantizers=2),
    "lfq": _vq("LFQ", codebook_size=32, entropy_loss_weight=0.1),
    "residual_lfq": _vq("ResidualLFQ", codebook_size=32, num_quantizers=2),
    "residual_sim": _vq("ResidualSimVQ", codebook_size=32, num_quantizers=2),
}
each("vector_quantize_pytorch", "vq", QUANTIZERS)


@library("denoising_diffusion_pytorch")
def diffusion() -> Case:
    from denoising_diffusion_pytorch import GaussianDiffusion, Unet

    return own_loss(
        GaussianDiffusion(Unet(dim=8, dim_mults=(1, 2), flash_attn=False), image_size=16, timesteps=20),
        torch.rand(BATCH, 3, 16, 16),
    )


@library("denoising_diffusion_pytorch")
def diffusion_self_conditioned() -> Case:
    from denoising_diffusion_pytorch import GaussianDiffusion, Unet

    return own_loss(
        GaussianDiffusion(
            Unet(dim=8, dim_mults=(1, 2), self_condition=True, flash_attn=False), image_size=16, timesteps=20
        ),
        torch.rand(BATCH, 3, 16, 16),
    )


@library("denoising_diffusion_pytorch")
def diffusion_1d() -> Case:
    from denoising_diffusion_pytorch import GaussianDiffusion1D, Unet1D

    return own_loss(
        GaussianDiffusion1D(
            Unet1D(dim=8, dim_mults=(1, 2), channels=3), seq_length=16, timesteps=20, objective="pred_v"
        ),
        torch.rand(BATCH, 3, 16),
    )


@library("denoising_diffusion_pytorch")
def diffusion_continuous() -> Case:
    from denoising_diffusion_pytorch import ContinuousTimeGaussianDiffusion, Unet

    return own_loss(
        ContinuousTimeGaussianDiffusion(
            Unet(dim=8, dim_mults=(1, 2), learned_sinusoidal_cond=True, flash_attn=False),
            image_size=16,
            noise_schedule="learned",
        ),
        torch.rand(BATCH, 3, 16, 16),
    )


@library("denoising_diffusion_pytorch")
def diffusion_learned_variance() -> Case:
    from denoising_diffusion_pytorch import LearnedGaussianDiffusion, Unet

    return own_loss(
        LearnedGaussianDiffusion(
            Unet(dim=8, dim_mults=(1, 2), learned_variance=True, flash_attn=False), image_size=16, timesteps=20
        ),
        torch.rand(BATCH, 3, 16, 16),
    )


@library("denoising_diffusion_pytorch")
def diffusion_elucidated() -> Case:
    from denoising_diffusion_pytorch import ElucidatedDiffusion, Unet

    return own_loss(
        ElucidatedDiffusion(
            Unet(dim=8, dim_mults=(1, 2), learned_sinusoidal_cond=True, flash_attn=False), image_size=16
        ),
        torch.rand(BATCH, 3, 16, 16),
    )


@library("denoising_diffusion_pytorch")
def diffusion_classifier_free() -> Case:
    from denoising_diffusion_pytorch.classifier_free_guidance import GaussianDiffusion, Unet

    model = GaussianDiffusion(
        Unet(dim=8, dim_mults=(1, 2), num_classes=CLASSES, cond_drop_prob=0.5), image_size=16, timesteps=20
    )
    return Case(model, kwargs={"img": torch.rand(BATCH, 3, 16, 16), "classes": torch.randint(0, CLASSES, (BATCH,))})


@library("denoising_diffusion_pytorch")
def diffusion_karras() -> Case:
    from denoising_diffusion_pytorch import KarrasUnet

    return squared(
        KarrasUnet(
            image_size=16,
            dim=16,
            dim_max=32,
            num_downsamples=1,
            num_blocks_per_stage=1,
            attn_dim_head=8,
            attn_res=8,
            num_classes=None,
        ),
        torch.randn(BATCH, 4, 16, 16),
        torch.rand(BATCH),
    )


@library("enformer_pytorch")
def enformer() -> Case:
    from enformer_pytorch import Enformer

    model = Enformer.from_hparams(
        dim=48,
        depth=2,
        heads=2,
        output_heads={"human": 3, "mouse": 2},
        target_length=2,
        num_downsamples=3,
        dim_divisible_by=4,
        attn_dim_key=8,
    )
    return squared(model, torch.randint(0, 4, (BATCH, 128)))
