"""monai and segmentation_models_pytorch: networks that label every pixel."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from models import Case

from library_models.building import (
    BATCH,
    each,
    images,
    squared,
)

MONAI: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "UNet": (
        {
            "spatial_dims": 2,
            "in_channels": 1,
            "out_channels": 2,
            "channels": (4, 8, 16),
            "strides": (2, 2),
            "num_res_units": 1,
        },
        (1, 32, 32),
    ),
    "AttentionUnet": (
        {"spatial_dims": 2, "in_channels": 1, "out_channels": 2, "channels": (4, 8, 16), "strides": (2, 2)},
        (1, 32, 32),
    ),
    "BasicUNet": (
        {"spatial_dims": 2, "in_channels": 1, "out_channels": 2, "features": (4, 4, 8, 8, 16, 4)},
        (1, 32, 32),
    ),
    "BasicUNetPlusPlus": (
        {
            "spatial_dims": 2,
            "in_channels": 1,
            "out_channels": 2,
            "features": (4, 4, 8, 8, 16, 4),
            "deep_supervision": True,
        },
        (1, 32, 32),
    ),
    "DynUNet": (
        {
            "spatial_dims": 2,
            "in_channels": 1,
            "out_channels": 2,
            "kernel_size": [3, 3, 3, 3],
            "strides": [1, 2, 2, 2],
            "upsample_kernel_size": [2, 2, 2],
            "deep_supervision": True,
            "filters": [4, 8, 16, 16],
            "deep_supr_num": 2,
        },
        (1, 32, 32),
    ),
    "SegResNet": (
        {"spatial_dims": 2, "init_filters": 8, "in_channels": 1, "out_channels": 2, "dropout_prob": 0.1},
        (1, 32, 32),
    ),
    "SegResNetVAE": (
        {"input_image_size": (32, 32), "spatial_dims": 2, "init_filters": 8, "in_channels": 1, "out_channels": 2},
        (1, 32, 32),
    ),
    "SegResNetDS": (
        {
            "spatial_dims": 2,
            "init_filters": 8,
            "in_channels": 1,
            "out_channels": 2,
            "blocks_down": (1, 1, 1),
            "dsdepth": 2,
        },
        (1, 32, 32),
    ),
    "VNet": ({"spatial_dims": 2, "in_channels": 1, "out_channels": 2}, (1, 32, 32)),
    "UNETR": (
        {
            "in_channels": 1,
            "out_channels": 2,
            "img_size": 32,
            "feature_size": 4,
            "hidden_size": 24,
            "mlp_dim": 32,
            "num_heads": 2,
            "spatial_dims": 2,
        },
        (1, 32, 32),
    ),
    "SwinUNETR": (
        {
            "in_channels": 1,
            "out_channels": 2,
            "feature_size": 12,
            "depths": (1, 1, 1, 1),
            "num_heads": (1, 2, 2, 2),
            "spatial_dims": 2,
            "use_checkpoint": True,
        },
        (1, 64, 64),
    ),
    "FlexibleUNet": (
        {"in_channels": 3, "out_channels": 2, "backbone": "efficientnet-b0", "spatial_dims": 2},
        (3, 64, 64),
    ),
    "HighResNet": ({"spatial_dims": 2, "in_channels": 1, "out_channels": 2}, (1, 16, 16)),
    "ViTAutoEnc": (
        {
            "in_channels": 1,
            "img_size": 16,
            "patch_size": 4,
            "hidden_size": 24,
            "mlp_dim": 32,
            "num_layers": 2,
            "num_heads": 2,
            "spatial_dims": 2,
        },
        (1, 16, 16),
    ),
    "MILModel": (
        {"num_classes": 2, "mil_mode": "att_trans", "pretrained": False, "backbone": "resnet18"},
        (3, 3, 32, 32),
    ),
    "AutoEncoder": (
        {
            "spatial_dims": 2,
            "in_channels": 1,
            "out_channels": 1,
            "channels": (4, 8),
            "strides": (2, 2),
            "inter_channels": (8, 8),
            "num_inter_units": 1,
        },
        (1, 32, 32),
    ),
    "VarAutoEncoder": (
        {
            "spatial_dims": 2,
            "in_shape": (1, 16, 16),
            "out_channels": 1,
            "latent_size": 4,
            "channels": (4, 8),
            "strides": (2, 2),
        },
        (1, 16, 16),
    ),
    "VQVAE": (
        {
            "spatial_dims": 2,
            "in_channels": 1,
            "out_channels": 1,
            "channels": (8, 8),
            "num_res_layers": 1,
            "num_res_channels": (8, 8),
            "downsample_parameters": ((2, 4, 1, 1),) * 2,
            "upsample_parameters": ((2, 4, 1, 1, 0),) * 2,
            "num_embeddings": 16,
            "embedding_dim": 8,
        },
        (1, 16, 16),
    ),
    "RegUNet": ({"spatial_dims": 2, "in_channels": 1, "num_channel_initial": 4, "depth": 2}, (1, 32, 32)),
    "GlobalNet": (
        {"image_size": [32, 32], "spatial_dims": 2, "in_channels": 1, "num_channel_initial": 4, "depth": 2},
        (1, 32, 32),
    ),
    "Quicknat": ({"num_classes": 3, "num_channels": 1, "num_filters": 8}, (1, 32, 32)),
}


def _monai(name: str) -> Case:
    settings, shape = MONAI[name]
    return squared(getattr(import_module("monai.networks.nets"), name)(**settings), torch.randn(BATCH, *shape))


each("monai", "monai", list(MONAI), _monai)


def _smp(name: str) -> Case:
    smp = import_module("segmentation_models_pytorch")
    encoder = {"DPT": "tu-vit_tiny_patch16_224", "Segformer": "mit_b0"}.get(name, "resnet18")
    more = {"dynamic_img_size": True} if name == "DPT" else {}
    model = getattr(smp, name)(encoder, encoder_weights=None, classes=3, **more)
    return Case(
        model, (images(64),), target=torch.randint(0, 3, (BATCH, 64, 64)), loss_fn=smp.losses.DiceLoss("multiclass")
    )


each(
    "segmentation_models_pytorch",
    "smp",
    ["Unet", "UnetPlusPlus", "MAnet", "Linknet", "FPN", "PSPNet", "DeepLabV3", "DeepLabV3Plus", "UPerNet", "Segformer"],
    _smp,
)
