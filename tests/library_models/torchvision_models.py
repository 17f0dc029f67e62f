"""torchvision: classification, segmentation, detection with targets, video, flow."""

from __future__ import annotations

from typing import Any

import torch
from models import Case
from torch import nn
from torch.nn import functional as F

from library_models.building import BATCH, CLASSES, classes, classified, each, images, library, squared, squares

CLASSIFIERS = {
    "alexnet": 64, "convnext_tiny": 32, "densenet121": 32, "efficientnet_b0": 32, "efficientnet_v2_s": 32,
    "googlenet": 64, "mnasnet0_5": 32, "mobilenet_v2": 32, "mobilenet_v3_small": 32, "regnet_y_400mf": 32,
    "regnet_x_400mf": 32, "resnet18": 32, "resnet50": 64, "resnext50_32x4d": 32, "shufflenet_v2_x0_5": 32,
    "squeezenet1_0": 64, "squeezenet1_1": 64, "swin_t": 32, "swin_v2_t": 32, "vgg11_bn": 32, "vgg11": 32,
    "wide_resnet50_2": 32, "inception_v3": 299,
}  # fmt: skip
"""And the size of images that they take."""


def _loss_of_logits(output: Any, target: torch.Tensor) -> torch.Tensor:
    """Also of those that have auxiliary heads, which they return in a named tuple."""
    heads = [output] if isinstance(output, torch.Tensor) else [head for head in output if head is not None]
    return torch.stack([F.cross_entropy(head, target) for head in heads]).sum()


def _classifier(name: str) -> Case:
    import torchvision

    more = {"init_weights": False} if name in ("googlenet", "inception_v3") else {}
    model = torchvision.models.get_model(name, weights=None, num_classes=CLASSES, **more)
    return Case(model, (images(CLASSIFIERS[name]),), target=classes(), loss_fn=_loss_of_logits)


each("torchvision", "torchvision", list(CLASSIFIERS), _classifier)


@library("torchvision")
def torchvision_vit() -> Case:
    from torchvision.models import VisionTransformer

    return classified(VisionTransformer(32, 8, 3, 4, 32, 64, dropout=0.1, num_classes=CLASSES), images())


@library("torchvision")
def torchvision_maxvit() -> Case:
    from torchvision.models.maxvit import MaxVit

    return classified(MaxVit((32, 32), 8, 4, [8, 16], [1, 1], 8, 0.2, num_classes=CLASSES), images())


def _dense_loss(output: dict[str, torch.Tensor], target: torch.Tensor) -> torch.Tensor:
    return sum(F.cross_entropy(head, target) for head in output.values())


def _segmenter(name: str) -> Case:
    from torchvision.models import segmentation

    more = {} if name.startswith("lraspp") else {"aux_loss": True}
    model = getattr(segmentation, name)(weights=None, weights_backbone=None, num_classes=CLASSES, **more)
    return Case(model, (images(64),), target=torch.randint(0, CLASSES, (BATCH, 64, 64)), loss_fn=_dense_loss)


each(
    "torchvision",
    "torchvision",
    ["fcn_resnet50", "deeplabv3_mobilenet_v3_large", "lraspp_mobilenet_v3_large"],
    _segmenter,
)


class Detector(nn.Module):
    """A detector fed by tensors, since lists of images and of dicts cannot be cut into micro-batches; its loss."""

    def __init__(self, detector: nn.Module, masks: bool = False) -> None:
        super().__init__()
        self.detector, self.masks = detector, masks

    def forward(self, pictures: torch.Tensor, boxes: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        targets = [{"boxes": b, "labels": n} for b, n in zip(boxes, labels, strict=True)]
        if self.masks:
            for target, picture in zip(targets, pictures, strict=True):
                size = picture.shape[-2:]
                target["masks"] = torch.zeros(len(target["boxes"]), *size, dtype=torch.uint8)
                for mask, (left, top, right, bottom) in zip(
                    target["masks"], target["boxes"].int().tolist(), strict=True
                ):
                    mask[top:bottom, left:right] = 1
        losses = self.detector(list(pictures), targets)
        return sum(losses.values())


def _boxes(size: int, count: int = 2, batch: int = BATCH) -> torch.Tensor:
    corner = torch.rand(batch, count, 2) * size / 2
    return torch.cat([corner, corner + size / 6 + torch.rand(batch, count, 2) * size / 3], -1)


def _detector(name: str) -> Case:
    from torchvision.models import detection

    size = 96 if name.startswith("ssd") and "lite" not in name else 64
    more: dict[str, Any] = {} if name.startswith("ssd") else {"min_size": size, "max_size": size}
    if "rcnn" in name:  # few proposals: without its kernels torchvision takes them out of feature maps one by one
        more |= {"rpn_pre_nms_top_n_train": 50, "rpn_post_nms_top_n_train": 20, "box_batch_size_per_image": 8}
    model = getattr(detection, name)(weights=None, weights_backbone=None, num_classes=CLASSES, **more)
    labels = torch.randint(1, CLASSES, (BATCH, 2))
    return Case(Detector(model, name.startswith("mask")), (torch.rand(BATCH, 3, size, size), _boxes(size), labels))


DETECTORS = [
    "fasterrcnn_mobilenet_v3_large_fpn", "fasterrcnn_resnet50_fpn", "fcos_resnet50_fpn", "retinanet_resnet50_fpn",
    "ssdlite320_mobilenet_v3_large", "maskrcnn_resnet50_fpn",
]  # fmt: skip
each("torchvision", "torchvision", DETECTORS, _detector)


def _video(name: str) -> Case:
    from torchvision.models import video

    model = getattr(video, name)(weights=None, num_classes=CLASSES)
    return classified(model, torch.randn(BATCH, 3, 8 if name != "s3d" else 16, 32, 32))


each("torchvision", "torchvision", ["r3d_18", "mc3_18", "r2plus1d_18"], _video)


@library("torchvision")
def torchvision_mvit() -> Case:
    from torchvision.models.video.mvit import MSBlockConfig, MViT

    common = {"kernel_kv": [3, 3, 3], "stride_kv": [1, 2, 2]}
    blocks = [
        MSBlockConfig(2, 8, 16, kernel_q=[], stride_q=[], **common),
        MSBlockConfig(2, 16, 16, kernel_q=[3, 3, 3], stride_q=[1, 2, 2], **common),
        MSBlockConfig(2, 16, 16, kernel_q=[], stride_q=[], **common),
    ]
    model = MViT((32, 32), 4, blocks, True, True, True, True, num_classes=CLASSES, stochastic_depth_prob=0.1)
    return classified(model, torch.randn(BATCH, 3, 4, 32, 32))


@library("torchvision")
def torchvision_raft_small() -> Case:
    from torchvision.models.optical_flow import raft_small

    return squared(raft_small(weights=None), images(128), images(128), 3)


@library("torchvision")
def torchvision_feature_extractor() -> Case:
    from torchvision.models import resnet18
    from torchvision.models.feature_extraction import create_feature_extractor

    return squared(create_feature_extractor(resnet18(weights=None), ["layer1", "layer3", "layer4.1.relu_1"]), images())


@library("torchvision")
def torchvision_layer_getter() -> Case:
    from torchvision.models import mobilenet_v3_small
    from torchvision.models._utils import IntermediateLayerGetter

    features = mobilenet_v3_small(weights=None).features
    return Case(IntermediateLayerGetter(features, {"3": "low", "9": "high"}), (images(64),), loss_fn=squares)
