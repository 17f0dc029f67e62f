"""Models of public libraries, small and with random weights; what is not installed is skipped.

Every entry of LIBRARIES gives a `Case`. A new one is a small function under @library, or a line in a table of its kind.
"""

from library_models import (
    diffusers_models,
    fields,
    generation,
    graphs,
    lucidrains,
    segmentation,
    series,
    speech,
    timm_models,
    torchvision_models,
    vit_pytorch_models,
    x_transformers_models,
)
from library_models.building import LIBRARIES, PACKAGES, missing

__all__ = [
    "LIBRARIES",
    "PACKAGES",
    "missing",
    "diffusers_models",
    "fields",
    "generation",
    "graphs",
    "lucidrains",
    "segmentation",
    "series",
    "speech",
    "timm_models",
    "torchvision_models",
    "vit_pytorch_models",
    "x_transformers_models",
]
