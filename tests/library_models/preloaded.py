"""Imports what takes longest, once, in the process that the processes of all models are forked from."""

from importlib import import_module
from importlib.util import find_spec

from library_models.building import with_operators_of_torchvision

with_operators_of_torchvision()
for package in ("torchvision", "timm", "vit_pytorch", "x_transformers", "torchaudio", "einops"):
    if find_spec(package):
        import_module(package)
