"""neuralforecast: what forecasts a window of a series."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from models import Case
from torch import nn

from library_models.building import (
    BATCH,
    each,
    squared,
)


def _forecaster(name: str) -> Case:
    module = import_module("neuralforecast.models")
    more: dict[str, Any] = {
        "NBEATS": {"mlp_units": 3 * [[16, 16]]},
        "TFT": {"hidden_size": 16},
        "PatchTST": {
            "hidden_size": 16,
            "linear_hidden_size": 16,
            "encoder_layers": 2,
            "n_heads": 2,
            "patch_len": 4,
            "stride": 2,
        },
        "TimesNet": {"hidden_size": 8, "conv_hidden_size": 8},
        "Informer": {"hidden_size": 16, "conv_hidden_size": 8, "n_head": 2},
        "Autoformer": {"hidden_size": 16, "conv_hidden_size": 8, "n_head": 2},
        "FEDformer": {"hidden_size": 16, "conv_hidden_size": 8, "n_head": 8, "modes": 4},
        "VanillaTransformer": {"hidden_size": 16, "conv_hidden_size": 8, "n_head": 2},
        "BiTCN": {"hidden_size": 16},
        "TiDE": {"hidden_size": 16, "decoder_output_dim": 8, "temporal_decoder_dim": 16},
        "DLinear": {},
        "NLinear": {},
        "MLP": {"hidden_size": 16},
        "TCN": {"encoder_hidden_size": 8, "decoder_hidden_size": 8},
        "LSTM": {"encoder_hidden_size": 8, "decoder_hidden_size": 8},
        "GRU": {"encoder_hidden_size": 8, "decoder_hidden_size": 8},
        "DilatedRNN": {"encoder_hidden_size": 8, "decoder_hidden_size": 8, "dilations": [[1, 2]]},
        "DeepNPTS": {"hidden_size": 8},
        "KAN": {"hidden_size": 8},
    }[name]
    model = getattr(module, name)(h=4, input_size=16, max_steps=1, **more)

    class Fed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = model

        def forward(self, series: torch.Tensor) -> Any:
            return self.net(
                {
                    "insample_y": series,
                    "insample_mask": torch.ones_like(series),
                    "futr_exog": None,
                    "hist_exog": None,
                    "stat_exog": None,
                }
            )

    return squared(Fed(), torch.randn(BATCH, 16, 1))


each(
    "neuralforecast",
    "forecast",
    [
        "NBEATS",
        "TFT",
        "PatchTST",
        "TimesNet",
        "Informer",
        "Autoformer",
        "FEDformer",
        "VanillaTransformer",
        "BiTCN",
        "TiDE",
        "DLinear",
        "MLP",
        "TCN",
        "LSTM",
        "DilatedRNN",
        "DeepNPTS",
        "KAN",
    ],
    _forecaster,
)
