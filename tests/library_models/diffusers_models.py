"""diffusers: U-Nets, autoencoders and transformers of diffusion, from small configs."""

from __future__ import annotations

from typing import Any

import torch
from models import Case
from torch import nn

from library_models.building import (
    BATCH,
    images,
    library,
    named,
    squared,
    squares,
)


@library("diffusers")
def diffusers_unet() -> Case:
    from diffusers import UNet2DModel

    model = UNet2DModel(
        sample_size=16,
        block_out_channels=(8, 16),
        norm_num_groups=4,
        layers_per_block=1,
        attention_head_dim=4,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        dropout=0.1,
    )
    return named(model, sample=torch.randn(BATCH, 3, 16, 16), timestep=torch.randint(0, 1000, (BATCH,)))


@library("diffusers")
def diffusers_conditioned_unet() -> Case:
    from diffusers import UNet2DConditionModel

    model = UNet2DConditionModel(
        sample_size=16,
        block_out_channels=(8, 16),
        norm_num_groups=4,
        layers_per_block=1,
        cross_attention_dim=16,
        attention_head_dim=4,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    )
    return named(
        model,
        sample=torch.randn(BATCH, 4, 16, 16),
        timestep=torch.randint(0, 1000, (BATCH,)),
        encoder_hidden_states=torch.randn(BATCH, 7, 16),
    )


@library("diffusers")
def diffusers_conditioned_unet_checkpointed() -> Case:
    case = diffusers_conditioned_unet()
    case.model.enable_gradient_checkpointing()
    return case


@library("diffusers")
def diffusers_kandinsky_unet3d() -> Case:
    from diffusers import UNet3DConditionModel

    model = UNet3DConditionModel(
        sample_size=8,
        block_out_channels=(8, 16),
        norm_num_groups=4,
        layers_per_block=1,
        cross_attention_dim=16,
        attention_head_dim=4,
        down_block_types=("CrossAttnDownBlock3D", "DownBlock3D"),
        up_block_types=("UpBlock3D", "CrossAttnUpBlock3D"),
    )
    return named(
        model,
        sample=torch.randn(BATCH, 4, 2, 8, 8),
        timestep=torch.randint(0, 1000, (BATCH,)),
        encoder_hidden_states=torch.randn(BATCH, 7, 16),
    )


@library("diffusers")
def diffusers_controlnet() -> Case:
    from diffusers import ControlNetModel

    model = ControlNetModel(
        block_out_channels=(8, 16),
        norm_num_groups=4,
        layers_per_block=1,
        cross_attention_dim=16,
        attention_head_dim=4,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        conditioning_embedding_out_channels=(4, 8),
    )
    return named(
        model,
        sample=torch.randn(BATCH, 4, 16, 16),
        timestep=torch.randint(0, 1000, (BATCH,)),
        encoder_hidden_states=torch.randn(BATCH, 7, 16),
        controlnet_cond=torch.randn(BATCH, 3, 32, 32),
    )


@library("diffusers")
def diffusers_autoencoder_kl() -> Case:
    from diffusers import AutoencoderKL

    model = AutoencoderKL(
        block_out_channels=(8, 16),
        norm_num_groups=4,
        latent_channels=4,
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
    )
    return Case(model, kwargs={"sample": images(), "sample_posterior": True}, loss_fn=squares)


@library("diffusers")
def diffusers_vq() -> Case:
    from diffusers import VQModel

    return squared(
        VQModel(block_out_channels=(8,), norm_num_groups=4, num_vq_embeddings=16, latent_channels=4), images()
    )


@library("diffusers")
def diffusers_dit() -> Case:
    from diffusers import DiTTransformer2DModel

    model = DiTTransformer2DModel(
        num_attention_heads=2,
        attention_head_dim=8,
        in_channels=4,
        out_channels=8,
        num_layers=3,
        sample_size=8,
        num_embeds_ada_norm=1000,
    )
    return named(
        model,
        hidden_states=torch.randn(BATCH, 4, 8, 8),
        timestep=torch.randint(0, 1000, (BATCH,)),
        class_labels=torch.randint(0, 1000, (BATCH,)),
    )


@library("diffusers")
def diffusers_sd3() -> Case:
    from diffusers import SD3Transformer2DModel

    model = SD3Transformer2DModel(
        sample_size=8,
        patch_size=2,
        in_channels=4,
        num_layers=3,
        attention_head_dim=8,
        num_attention_heads=2,
        joint_attention_dim=16,
        caption_projection_dim=16,
        pooled_projection_dim=16,
        out_channels=4,
    )
    return named(
        model,
        hidden_states=torch.randn(BATCH, 4, 8, 8),
        encoder_hidden_states=torch.randn(BATCH, 7, 16),
        pooled_projections=torch.randn(BATCH, 16),
        timestep=torch.randint(0, 1000, (BATCH,)),
    )


@library("diffusers")
def diffusers_flux() -> Case:
    from diffusers import FluxTransformer2DModel

    model = FluxTransformer2DModel(
        patch_size=1,
        in_channels=4,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=16,
        pooled_projection_dim=16,
        axes_dims_rope=(4, 4, 8),
        guidance_embeds=True,
    )
    model.requires_grad_(True)

    class Fed(nn.Module):
        """The identities of tokens have no dimension of samples: made here."""

        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, latents: torch.Tensor, text: torch.Tensor, pooled: torch.Tensor, time: torch.Tensor) -> Any:
            return self.model(
                hidden_states=latents,
                encoder_hidden_states=text,
                pooled_projections=pooled,
                timestep=time,
                guidance=time,
                img_ids=torch.zeros(latents.shape[1], 3),
                txt_ids=torch.zeros(text.shape[1], 3),
            )

    return squared(
        Fed(), torch.randn(BATCH, 16, 4), torch.randn(BATCH, 7, 16), torch.randn(BATCH, 16), torch.rand(BATCH)
    )


@library("diffusers")
def diffusers_pixart() -> Case:
    from diffusers import PixArtTransformer2DModel

    model = PixArtTransformer2DModel(
        num_attention_heads=2,
        attention_head_dim=8,
        in_channels=4,
        out_channels=8,
        num_layers=3,
        sample_size=8,
        cross_attention_dim=16,
        caption_channels=16,
        use_additional_conditions=False,
    )
    return named(
        model,
        hidden_states=torch.randn(BATCH, 4, 8, 8),
        encoder_hidden_states=torch.randn(BATCH, 7, 16),
        timestep=torch.randint(0, 1000, (BATCH,)),
    )


@library("diffusers")
def diffusers_prior() -> Case:
    from diffusers import PriorTransformer

    model = PriorTransformer(
        num_attention_heads=2,
        attention_head_dim=8,
        num_layers=3,
        embedding_dim=16,
        num_embeddings=7,
        additional_embeddings=4,
    )
    return named(
        model,
        hidden_states=torch.randn(BATCH, 16),
        timestep=torch.randint(0, 1000, (BATCH,)),
        proj_embedding=torch.randn(BATCH, 16),
        encoder_hidden_states=torch.randn(BATCH, 7, 16),
    )
