"""Hugging Face architectures built small from their configs, with random weights, labels and their own loss.

Every entry of HF gives a `Case`. A new one is a small function under @hf, or a line in a table of its kind. Dropout and
the dropping of layers stay as the configs have them.
"""

from hf_models import audio, decoders, encoders, multimodal, seq2seq, vision
from hf_models.building import HF

__all__ = ["HF", "audio", "decoders", "encoders", "multimodal", "seq2seq", "vision"]
