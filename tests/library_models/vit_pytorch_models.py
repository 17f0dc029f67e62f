"""vit_pytorch: vision transformers, and what trains them."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from models import Case

from library_models.building import (
    BATCH,
    CLASSES,
    classified,
    each,
    images,
    library,
    own_loss,
    squared,
)

SMALL: dict[str, Any] = {
    "image_size": 32,
    "patch_size": 8,
    "num_classes": CLASSES,
    "dim": 32,
    "depth": 3,
    "heads": 2,
    "mlp_dim": 64,
}


def _vit(
    module: str, kind: str, sized: Callable[..., Any] | None = None, drop: tuple[str, ...] = (), **more: Any
) -> Callable[[], Case]:
    def build() -> Case:
        settings = {k: v for k, v in SMALL.items() if k not in drop} | more
        model = getattr(import_module(f"vit_pytorch.{module}"), kind)(**settings)
        return classified(model, images()) if sized is None else sized(model)

    return build


VITS = {
    "vit": _vit("vit", "ViT", dropout=0.1, emb_dropout=0.1),
    "simple_vit": _vit("simple_vit", "SimpleViT"),
    "cait": _vit("cait", "CaiT", cls_depth=2, layer_dropout=0.1, dropout=0.1),
    "deepvit": _vit("deepvit", "DeepViT", dropout=0.1),
    "parallel_vit": _vit("parallel_vit", "ViT", num_parallel_branches=2),
    "patch_dropout": _vit("vit_with_patch_dropout", "ViT", patch_dropout=0.25),
    "patch_merger": _vit("vit_with_patch_merger", "ViT", patch_merge_layer=1, patch_merge_num_tokens=4),
    "small_dataset": _vit("vit_for_small_dataset", "ViT"),
    "learnable_memory": _vit("learnable_memory_vit", "ViT"),
    "ats": _vit("ats_vit", "ViT", max_tokens_per_depth=(12, 8, 4)),
    "rvt": _vit("rvt", "RvT"),
    "normalized": _vit("normalized_vit", "nViT"),
    "jumbo": _vit("jumbo_vit", "JumboViT", num_jumbo_cls=1, jumbo_cls_k=2),
    "hyper_connections": _vit("simple_vit_with_hyper_connections", "SimpleViT", num_residual_streams=2),
    "value_residual": _vit("simple_vit_with_value_residual", "SimpleViT"),
    "qk_norm": _vit("simple_vit_with_qk_norm", "SimpleViT"),
    "registers": _vit("simple_vit_with_register_tokens", "SimpleViT", num_register_tokens=2),
    "simple_fft": _vit("simple_vit_with_fft", "SimpleViT", freq_patch_size=8),
    "simple_patch_dropout": _vit("simple_vit_with_patch_dropout", "SimpleViT"),
    "relative_bias": _vit("simple_vit_with_relative_proj_pos_bias", "SimpleViT"),
    "orthogonal_residual": _vit("simple_vit_orthog_residual_update", "SimpleViT"),
    "uvit": _vit("simple_uvit", "SimpleUViT"),
    "decorr": _vit("vit_with_decorr", "ViT", sized=lambda m: squared(m, images())),
    "keel": _vit("vit_with_keel_post_ln", "ViT"),
    "vit_1d": _vit(
        "vit_1d", "ViT", drop=("image_size",), seq_len=32, sized=lambda m: classified(m, torch.randn(BATCH, 3, 32))
    ),
    "vit_3d": _vit(
        "vit_3d",
        "ViT",
        frames=4,
        image_patch_size=8,
        frame_patch_size=2,
        drop=("patch_size",),
        sized=lambda m: classified(m, torch.randn(BATCH, 3, 4, 32, 32)),
    ),
    "nest": _vit(
        "nest", "NesT", drop=("depth", "mlp_dim"), patch_size=4, num_hierarchies=2, block_repeats=(1, 2), heads=2
    ),
    "pit": _vit("pit", "PiT", depth=(1, 2), patch_size=8, dropout=0.1, heads=2),
    "cct": _vit(
        "cct",
        "CCT",
        drop=("image_size", "patch_size", "dim", "depth", "heads", "mlp_dim"),
        img_size=(32, 32),
        embedding_dim=32,
        n_conv_layers=1,
        kernel_size=7,
        stride=2,
        padding=3,
        num_layers=3,
        num_heads=2,
        mlp_ratio=2.0,
        positional_embedding="learnable",
    ),
    "t2t": _vit("t2t", "T2TViT", drop=("patch_size",), t2t_layers=((7, 4), (3, 2))),
    "cross_vit": _vit(
        "cross_vit",
        "CrossViT",
        drop=("patch_size", "dim", "heads", "mlp_dim"),
        depth=2,
        sm_dim=32,
        lg_dim=48,
        sm_patch_size=8,
        sm_enc_depth=1,
        sm_enc_heads=2,
        sm_enc_mlp_dim=64,
        lg_patch_size=16,
        lg_enc_depth=2,
        lg_enc_heads=2,
        lg_enc_mlp_dim=64,
        cross_attn_depth=1,
        cross_attn_heads=2,
    ),
    "levit": _vit(
        "levit",
        "LeViT",
        drop=("patch_size", "mlp_dim"),
        image_size=64,
        stages=2,
        dim=(32, 48),
        depth=2,
        heads=(2, 2),
        mlp_mult=2,
        sized=lambda m: squared(m, images(64)),
    ),
    "cvt": _vit(
        "cvt",
        "CvT",
        drop=("image_size", "patch_size", "dim", "depth", "heads", "mlp_dim"),
        s1_emb_dim=16,
        s2_emb_dim=24,
        s2_heads=2,
        s2_depth=1,
        s3_emb_dim=32,
        s3_heads=2,
        s3_depth=2,
        sized=lambda m: classified(m, images(64)),
    ),
    "twins": _vit(
        "twins_svt",
        "TwinsSVT",
        drop=("image_size", "patch_size", "dim", "depth", "heads", "mlp_dim"),
        s1_emb_dim=16,
        s1_local_patch_size=2,
        s2_emb_dim=16,
        s2_local_patch_size=2,
        s3_emb_dim=16,
        s3_local_patch_size=2,
        s3_depth=1,
        s4_emb_dim=32,
        s4_local_patch_size=1,
        s4_depth=1,
        s1_global_k=2,
        s2_global_k=2,
        s3_global_k=1,
        s4_global_k=1,
        sized=lambda m: classified(m, images(64)),
    ),
    "max_vit": _vit(
        "max_vit",
        "MaxViT",
        drop=("image_size", "patch_size", "heads", "mlp_dim"),
        dim_conv_stem=16,
        dim=16,
        dim_head=8,
        depth=(1, 1),
        window_size=2,
        dropout=0.1,
        sized=lambda m: classified(m, images(32)),
    ),
    "xcit": _vit("xcit", "XCiT", cls_depth=1, dropout=0.1, local_patch_kernel_size=3),
    "region_vit": _vit(
        "regionvit",
        "RegionViT",
        drop=("image_size", "patch_size", "heads", "mlp_dim"),
        dim=(16, 16, 32, 32),
        depth=(1, 1, 1, 1),
        window_size=2,
        tokenize_local_3_conv=False,
        sized=lambda m: classified(m, images(64)),
    ),
    "scalable": _vit(
        "scalable_vit",
        "ScalableViT",
        drop=("image_size", "patch_size", "mlp_dim"),
        dim=16,
        heads=(2, 2),
        depth=(1, 1),
        ssa_dim_key=(8, 8),
        reduction_factor=(2, 2),
        window_size=(4, 2),
        dropout=0.1,
    ),
    "crossformer": _vit(
        "crossformer",
        "CrossFormer",
        drop=("image_size", "patch_size", "heads", "mlp_dim"),
        dim=(32, 32, 64, 64),
        depth=(1, 1, 1, 1),
        global_window_size=(2, 2, 1, 1),
        local_window_size=(2, 2, 1, 1),
        sized=lambda m: classified(m, images(64)),
    ),
    "mobile_vit": _vit(
        "mobile_vit",
        "MobileViT",
        drop=("patch_size", "dim", "depth", "heads", "mlp_dim"),
        image_size=(64, 64),
        dims=[16, 20, 24],
        channels=[8, 8, 8, 8, 12, 12, 16, 16, 20, 20, 24],
        sized=lambda m: classified(m, images(64)),
    ),
}
each("vit_pytorch", "vit_pytorch", VITS)


def _encoder() -> Any:
    from vit_pytorch import ViT

    return ViT(**SMALL, pool="mean")


@library("vit_pytorch")
def vit_pytorch_mae() -> Case:
    from vit_pytorch import MAE

    return own_loss(MAE(encoder=_encoder(), masking_ratio=0.75, decoder_dim=16, decoder_depth=2), images())


@library("vit_pytorch")
def vit_pytorch_mp3() -> Case:
    from vit_pytorch.mp3 import MP3, ViT

    return own_loss(MP3(ViT(**SMALL), masking_ratio=0.5), images())


@library("vit_pytorch")
def vit_pytorch_dino() -> Case:
    from vit_pytorch import Dino

    model = Dino(
        _encoder(),
        image_size=32,
        hidden_layer="to_latent",
        projection_hidden_size=32,
        projection_layers=2,
        num_classes_K=64,
    )
    return own_loss(model, images())


@library("vit_pytorch")
def vit_pytorch_es_dino() -> Case:
    from vit_pytorch.cvt import CvT
    from vit_pytorch.es_vit import EsViTTrainer

    net = CvT(
        num_classes=CLASSES, s1_emb_dim=16, s2_emb_dim=24, s2_heads=2, s2_depth=1, s3_emb_dim=32, s3_heads=2, s3_depth=1
    )
    model = EsViTTrainer(
        net, image_size=64, hidden_layer="layers", projection_hidden_size=32, projection_layers=2, num_classes_K=64
    )
    return own_loss(model, images(64))


@library("vit_pytorch")
def vit_pytorch_distilled() -> Case:
    from torchvision.models import resnet18
    from vit_pytorch.distill import DistillableViT, DistillWrapper

    student = DistillableViT(**SMALL)
    model = DistillWrapper(
        student=student, teacher=resnet18(weights=None, num_classes=CLASSES), temperature=3, alpha=0.5, hard=False
    )
    return own_loss(model, images(), torch.randint(0, CLASSES, (BATCH,)))


@library("vit_pytorch")
def vit_pytorch_extractor() -> Case:
    from vit_pytorch.extractor import Extractor

    return squared(Extractor(_encoder(), detach=False), images())


@library("vit_pytorch")
def vit_pytorch_recorder() -> Case:
    from vit_pytorch.recorder import Recorder

    return squared(Recorder(_encoder()), images())
