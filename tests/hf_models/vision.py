"""Models that see: classes, masks, boxes, depth, videos."""

from __future__ import annotations

from typing import Any

import torch
from models import Case

from hf_models.building import VISION, WIDTH, classes, config, entered, hf, images


def classifier(name: str, kind: str | None = None, *, size: int = 32, norms: bool = False, **settings: Any) -> None:
    """Enter the image classifier of a config kind; `norms`: it has BatchNorms."""

    def build() -> Case:
        from transformers import AutoModelForImageClassification

        model = AutoModelForImageClassification.from_config(config(kind or name, **settings, num_labels=5))
        kwargs = {"pixel_values": images(size=size), "labels": classes()}
        return Case(model, kwargs=kwargs, trains_batch_norm=norms)

    entered(name, build)


STAGES = {"hidden_sizes": [8, 16, 32], "depths": [1, 2, 1], "embedding_size": 8}
SWIN = {
    "image_size": 32,
    "patch_size": 2,
    "embed_dim": 8,
    "depths": [1, 2, 1],
    "num_heads": [2, 2, 4],
    "window_size": 4,
}
classifier("vit", **VISION)
classifier("beit", **VISION, drop_path_rate=0.2, use_relative_position_bias=True, out_indices=[0, 1, 2, 3])
classifier("dinov2", **VISION, drop_path_rate=0.2)
classifier("dinov2_with_registers", **VISION)
classifier("ijepa", **VISION)
classifier("vit_msn", **VISION)
classifier("data2vec_vision", "data2vec-vision", **VISION, out_indices=[0, 1, 2, 3])
classifier("swin", **SWIN)
classifier("swinv2", **SWIN)
classifier("donut_swin", "donut-swin", **SWIN)
classifier("convnext", hidden_sizes=[8, 16, 24, 32], depths=[1, 1, 2, 1], drop_path_rate=0.2, size=64)
classifier("convnextv2", hidden_sizes=[8, 16, 24, 32], depths=[1, 1, 2, 1], size=64)
classifier("resnet", **STAGES, layer_type="basic", norms=True, size=64)
classifier("regnet", **STAGES, groups_width=4, norms=True, size=64)
classifier("bit", **STAGES, num_groups=2, size=64)
classifier(
    "focalnet",
    image_size=32,
    patch_size=2,
    embed_dim=8,
    depths=[1, 2, 1],
    focal_levels=[1, 1, 1],
    focal_windows=[3, 3, 3],
)
classifier("mobilenet_v1", size=64, norms=True, depth_multiplier=0.25, min_depth=4)
classifier("mobilenet_v2", size=64, norms=True, depth_multiplier=0.25, min_depth=4, depth_divisible_by=4)
classifier(
    "mobilevit",
    hidden_sizes=[16, 16, 16],
    neck_hidden_sizes=[8, 8, 8, 8, 8, 8, 16],
    size=64,
    norms=True,
    num_attention_heads=2,
    image_size=64,
)
classifier("mobilevitv2", size=64, norms=True, width_multiplier=0.25, image_size=64)
classifier(
    "efficientnet",
    size=64,
    norms=True,
    width_coefficient=0.25,
    depth_coefficient=0.3,
    depth_divisor=4,
    hidden_dim=320,
)
classifier(
    "cvt",
    size=64,
    norms=True,
    embed_dim=[8, 16, 32],
    num_heads=[1, 2, 4],
    depth=[1, 2, 3],
)
classifier(
    "pvt",
    image_size=32,
    hidden_sizes=[8, 16, 24, 32],
    depths=[1, 1, 1, 1],
    num_attention_heads=[1, 1, 2, 2],
    sequence_reduction_ratios=[4, 2, 1, 1],
)
classifier(
    "pvt_v2",
    image_size=64,
    size=64,
    hidden_sizes=[8, 16, 24, 32],
    depths=[1, 1, 1, 1],
    num_attention_heads=[1, 1, 2, 2],
)
classifier("poolformer", size=64, hidden_sizes=[8, 16, 24, 32], depths=[1, 1, 2, 1])
classifier("swiftformer", size=64, norms=True, embed_dims=[8, 16, 24, 32], depths=[1, 1, 2, 1])
classifier(
    "hiera",
    image_size=[32, 32],
    patch_size=[3, 3],
    patch_stride=[2, 2],
    patch_padding=[1, 1],
    embed_dim=8,
    depths=[1, 1, 2],
    num_heads=[1, 2, 2],
    masked_unit_size=[4, 4],
    num_query_pool=2,
    query_stride=[2, 2],
)


@hf
def deit() -> Case:
    from transformers import DeiTConfig, DeiTForImageClassification

    model = DeiTForImageClassification(DeiTConfig(**VISION, num_labels=5))
    return Case(model, kwargs={"pixel_values": images(), "labels": classes()})


@hf
def levit() -> Case:
    from transformers import LevitConfig, LevitForImageClassification

    sizes = {"hidden_sizes": [16, 24, 32], "num_attention_heads": [2, 2, 2], "depths": [1, 2, 1], "key_dim": [4, 4, 4]}
    model = LevitForImageClassification(LevitConfig(image_size=64, **sizes, num_labels=5))
    return Case(model, kwargs={"pixel_values": images(size=64), "labels": classes()}, trains_batch_norm=True)


@hf
def vit_mae() -> Case:
    """Masks patches at random."""
    from transformers import ViTMAEConfig, ViTMAEForPreTraining

    sizes = {"decoder_hidden_size": 16, "decoder_num_hidden_layers": 2, "decoder_num_attention_heads": 2}
    settings = ViTMAEConfig(**VISION, **sizes, decoder_intermediate_size=32, mask_ratio=0.5)
    return Case(ViTMAEForPreTraining(settings), kwargs={"pixel_values": images()})


@hf
def segformer() -> Case:
    from transformers import SegformerConfig, SegformerForSemanticSegmentation

    settings = SegformerConfig(
        hidden_sizes=[8, 16, 24, 32],
        depths=[1, 1, 2, 1],
        num_attention_heads=[1, 1, 2, 2],
        decoder_hidden_size=16,
        num_labels=5,
    )
    kwargs = {"pixel_values": images(size=64), "labels": torch.randint(0, 5, (8, 64, 64))}
    return Case(SegformerForSemanticSegmentation(settings), kwargs=kwargs, trains_batch_norm=True)


def _backbone() -> Any:
    from transformers import ResNetConfig

    return ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16, 32], depths=[1, 1, 1], layer_type="basic", out_features=["stage3"]
    )


def _boxes(count: int = 2) -> list[dict[str, torch.Tensor]]:
    return [
        {"class_labels": torch.randint(0, 5, (count,)), "boxes": torch.rand(count, 4) * 0.4 + 0.3} for _ in range(8)
    ]


def detector(name: str, class_name: str, **settings: Any) -> None:
    """Enter a detector with a small ResNet: matching of boxes on the host, auxiliary losses of every layer."""

    def build() -> Case:
        import transformers

        sizes = {
            "use_timm_backbone": False,
            "use_pretrained_backbone": False,
            "backbone": None,
            "backbone_config": _backbone(),
            "num_queries": 6,
            "d_model": WIDTH,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 64,
            "decoder_ffn_dim": 64,
            "num_labels": 5,
            "auxiliary_loss": True,
        }
        model_class = getattr(transformers, class_name)
        model = model_class(model_class.config_class(**(sizes | settings)))
        kwargs = {"pixel_values": images(size=64), "labels": _boxes()}
        return Case(model, kwargs=kwargs, trains_batch_norm=True)

    entered(name, build)


detector("detr", "DetrForObjectDetection", encoder_layerdrop=0.2)
detector("conditional_detr", "ConditionalDetrForObjectDetection")
detector("table_transformer", "TableTransformerForObjectDetection")
detector(
    "deformable_detr", "DeformableDetrForObjectDetection", num_feature_levels=1, encoder_n_points=2, decoder_n_points=2
)


@hf
def yolos() -> Case:
    from transformers import YolosConfig, YolosForObjectDetection

    settings = YolosConfig(**(VISION | {"image_size": [32, 32]}), num_detection_tokens=6, num_labels=5)
    return Case(YolosForObjectDetection(settings), kwargs={"pixel_values": images(), "labels": _boxes()})


@hf
def maskformer() -> Case:
    from transformers import MaskFormerConfig, MaskFormerForInstanceSegmentation

    settings = MaskFormerConfig(
        fpn_feature_size=32,
        mask_feature_size=32,
        backbone_config=config(
            "swin",
            **(SWIN | {"depths": [1, 1, 1, 1], "num_heads": [1, 1, 2, 2]}),
            out_features=["stage1", "stage2", "stage3", "stage4"],
        ),
        decoder_config=config(
            "detr",
            d_model=16,
            encoder_layers=1,
            decoder_layers=2,
            encoder_attention_heads=2,
            decoder_attention_heads=2,
            encoder_ffn_dim=32,
            decoder_ffn_dim=32,
            num_queries=6,
        ),
        num_labels=5,
    )
    kwargs = {
        "pixel_values": images(),
        "pixel_mask": torch.ones(8, 32, 32),
        "mask_labels": [(torch.rand(2, 32, 32) > 0.5).float() for _ in range(8)],
        "class_labels": [torch.randint(0, 5, (2,)) for _ in range(8)],
    }
    return Case(MaskFormerForInstanceSegmentation(settings), kwargs=kwargs)


@hf
def dpt() -> Case:
    from transformers import DPTConfig, DPTForDepthEstimation

    sizes = {"backbone_out_indices": [0, 1, 2, 3], "neck_hidden_sizes": [8, 8, 16, 16], "fusion_hidden_size": 8}
    settings = DPTConfig(**VISION, **sizes, head_in_index=-1)

    def loss_fn(output: Any, target: torch.Tensor) -> torch.Tensor:
        return (output.predicted_depth - target).pow(2).mean()

    return Case(
        DPTForDepthEstimation(settings),
        kwargs={"pixel_values": images()},
        target=torch.rand(8, 64, 64),
        loss_fn=loss_fn,
    )


@hf
def glpn() -> Case:
    from transformers import GLPNConfig, GLPNForDepthEstimation

    settings = GLPNConfig(
        hidden_sizes=[8, 16, 24, 32], depths=[1, 1, 1, 1], num_attention_heads=[1, 1, 2, 2], decoder_hidden_size=8
    )
    kwargs = {"pixel_values": images(size=64), "labels": torch.rand(8, 64, 64) + 0.1}
    return Case(GLPNForDepthEstimation(settings), kwargs=kwargs, trains_batch_norm=True)


@hf
def upernet() -> Case:
    from transformers import UperNetConfig, UperNetForSemanticSegmentation

    backbone = config(
        "convnext",
        hidden_sizes=[8, 8, 16, 16],
        depths=[1, 1, 1, 1],
        out_features=["stage1", "stage2", "stage3", "stage4"],
    )
    settings = UperNetConfig(
        backbone_config=backbone,
        hidden_size=8,
        pool_scales=[1, 2],
        auxiliary_channels=8,
        auxiliary_in_channels=16,
        num_labels=5,
    )
    kwargs = {"pixel_values": images(size=64), "labels": torch.randint(0, 5, (8, 64, 64))}
    return Case(UperNetForSemanticSegmentation(settings), kwargs=kwargs, trains_batch_norm=True)


@hf
def videomae() -> Case:
    from transformers import VideoMAEConfig, VideoMAEForVideoClassification

    settings = VideoMAEConfig(**VISION, num_frames=4, tubelet_size=2, num_labels=5)
    kwargs = {"pixel_values": torch.randn(8, 4, 3, 32, 32), "labels": classes()}
    return Case(VideoMAEForVideoClassification(settings), kwargs=kwargs)


@hf
def timesformer() -> Case:
    from transformers import TimesformerConfig, TimesformerForVideoClassification

    settings = TimesformerConfig(**VISION, num_frames=4, num_labels=5)
    kwargs = {"pixel_values": torch.randn(8, 4, 3, 32, 32), "labels": classes()}
    return Case(TimesformerForVideoClassification(settings), kwargs=kwargs)


@hf
def vivit() -> Case:
    from transformers import VivitConfig, VivitForVideoClassification

    settings = VivitConfig(**VISION, num_frames=4, tubelet_size=[2, 8, 8], num_labels=5)
    kwargs = {"pixel_values": torch.randn(8, 4, 3, 32, 32), "labels": classes()}
    return Case(VivitForVideoClassification(settings), kwargs=kwargs)


@hf
def sam() -> Case:
    """An image encoder with relative positions, prompts, and a decoder that attends both ways."""
    from transformers import SamConfig, SamMaskDecoderConfig, SamModel, SamPromptEncoderConfig, SamVisionConfig

    vision = SamVisionConfig(
        hidden_size=WIDTH,
        output_channels=16,
        num_hidden_layers=3,
        num_attention_heads=4,
        image_size=32,
        patch_size=8,
        window_size=2,
        global_attn_indexes=[1],
        mlp_dim=64,
        num_pos_feats=8,
    )
    prompt = SamPromptEncoderConfig(hidden_size=16, image_size=32, patch_size=8, mask_input_channels=4)
    mask = SamMaskDecoderConfig(
        hidden_size=16, mlp_dim=32, num_hidden_layers=2, num_attention_heads=2, iou_head_hidden_dim=16
    )
    model = SamModel(SamConfig(vision_config=vision, prompt_encoder_config=prompt, mask_decoder_config=mask))
    kwargs = {"pixel_values": images(), "input_points": torch.rand(8, 1, 2, 2) * 32}

    def loss_fn(output: Any, target: torch.Tensor) -> torch.Tensor:
        return (output.pred_masks[:, 0, 0] - target).pow(2).mean() + output.iou_scores.mean()

    return Case(model, kwargs=kwargs, target=torch.rand(8, 16, 16), loss_fn=loss_fn)
