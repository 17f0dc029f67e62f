"""Detection, contrast, tables, flows, spikes, operators, policies: a few models from each of many packages."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from models import Case
from torch import nn
from torch.nn import functional as F

from library_models.building import (
    BATCH,
    CLASSES,
    VOCABULARY,
    classes,
    classified,
    each,
    images,
    library,
    own_loss,
    squared,
    tokens,
)


@library("open_clip")
def open_clip() -> Case:
    from open_clip import CLIP, ClipLoss

    model = CLIP(
        embed_dim=16,
        vision_cfg={"image_size": 32, "layers": 2, "width": 32, "patch_size": 8, "head_width": 16},
        text_cfg={"context_length": 12, "vocab_size": VOCABULARY, "width": 32, "heads": 2, "layers": 2},
        output_dict=True,
    )
    loss = ClipLoss()
    return Case(model, kwargs={"image": images(), "text": tokens(12)}, loss_fn=lambda output, target: loss(**output))


@library("kan")
def kan() -> Case:
    from kan import KAN

    return squared(KAN(width=[4, 5, 3, 1], grid=3, k=3, auto_save=False), torch.rand(BATCH, 4) * 2 - 1)


@library("e3nn")
def e3nn_gate_points() -> Case:
    from e3nn import o3
    from e3nn.nn import BatchNorm, FullyConnectedNet, Gate

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = Gate("8x0e", [torch.relu], "4x0e", [torch.sigmoid], "4x1o")
            self.product = o3.FullyConnectedTensorProduct(
                "8x0e + 4x1o", "1x0e + 1x1o", self.gate.irreps_in, shared_weights=False
            )
            self.weights, self.norm = (
                FullyConnectedNet([1, 8, self.product.weight_numel], torch.relu),
                BatchNorm(self.gate.irreps_out),
            )

        def forward(self, x: torch.Tensor, direction: torch.Tensor, length: torch.Tensor) -> torch.Tensor:
            return self.norm(self.gate(self.product(x, direction, self.weights(length))))

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.layers = o3.Linear("3x0e", "8x0e + 4x1o"), nn.ModuleList(Layer() for _ in range(3))
            self.last = o3.Linear("8x0e + 4x1o", "1x0e")

        def forward(self, features: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
            x, direction = self.first(features), o3.spherical_harmonics("1x0e + 1x1o", position, normalize=True)
            for layer in self.layers:
                x = layer(x, direction, position.norm(dim=-1, keepdim=True))
            return self.last(x)

    return squared(Net(), torch.randn(BATCH, 3), torch.randn(BATCH, 3))


def _yolo(name: str) -> Case:
    from ultralytics.cfg import get_cfg
    from ultralytics.nn import tasks

    net = getattr(
        tasks, "SegmentationModel" if "seg" in name else "ClassificationModel" if "cls" in name else "DetectionModel"
    )(f"{name}.yaml", nc=CLASSES, verbose=False)
    net.args = get_cfg()
    if "cls" in name:
        return Case(net, (images(64),), target=classes(), loss_fn=F.cross_entropy)

    class Trained(nn.Module):
        """What its trainer does with tensors, since its batch's boxes have no dimension of samples."""

        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def forward(self, img: torch.Tensor, boxes: torch.Tensor, cls: torch.Tensor) -> torch.Tensor:
            index = torch.arange(len(img)).repeat_interleave(boxes.shape[1]).float()
            loss, _ = self.net(
                {"img": img, "bboxes": boxes.flatten(0, 1), "cls": cls.flatten()[:, None].float(), "batch_idx": index}
            )
            return loss.sum()

    boxes = torch.cat([torch.rand(BATCH, 2, 2) * 0.5 + 0.25, torch.rand(BATCH, 2, 2) * 0.3 + 0.1], -1)
    return own_loss(Trained(), torch.rand(BATCH, 3, 64, 64), boxes, torch.randint(0, CLASSES, (BATCH, 2)))


each(
    "ultralytics",
    "ultralytics",
    ["yolov8n", "yolo11n", "yolov5n", "yolov10n", "yolo11n-cls", "yolov9t", "yolo12n"],
    _yolo,
)


@library("efficientnet_pytorch")
def efficientnet_pytorch() -> Case:
    from efficientnet_pytorch import EfficientNet

    return classified(EfficientNet.from_name("efficientnet-b0", {"num_classes": CLASSES}), images())


@library("stable_baselines3")
def baselines_actor_critic() -> Case:
    import gymnasium
    from stable_baselines3.common.policies import ActorCriticPolicy

    model = ActorCriticPolicy(
        gymnasium.spaces.Box(-1, 1, (6,)), gymnasium.spaces.Discrete(3), lambda progress: 1e-3, net_arch=[16, 16]
    )
    del model.optimizer  # it would be made again from the stage's parameters
    return squared(model, torch.randn(BATCH, 6))


@library("stable_baselines3")
def baselines_q_network() -> Case:
    import gymnasium
    from stable_baselines3.common.torch_layers import FlattenExtractor
    from stable_baselines3.dqn.policies import QNetwork

    space = gymnasium.spaces.Box(-1, 1, (6,))
    return squared(
        QNetwork(space, gymnasium.spaces.Discrete(3), FlattenExtractor(space), 6, [16, 16]), torch.randn(BATCH, 6)
    )


@library("gpytorch")
def gpytorch_deep_kernel() -> Case:
    import gpytorch

    class Regression(gpytorch.models.ApproximateGP):
        def __init__(self) -> None:
            points = torch.randn(6, 4)
            strategy = gpytorch.variational.VariationalStrategy(
                self, points, gpytorch.variational.CholeskyVariationalDistribution(6)
            )
            super().__init__(strategy)
            self.mean_module, self.covar_module = (
                gpytorch.means.ConstantMean(),
                gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel()),
            )

        def forward(self, x: torch.Tensor) -> Any:
            return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))

    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.features, self.process = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)), Regression()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found = self.process(self.features(x))
            return torch.stack([found.mean, found.variance])

    return squared(Deep(), torch.randn(BATCH, 8))


@library("pytorch_tabnet")
def tabnet() -> Case:
    from pytorch_tabnet.tab_network import TabNet

    model = TabNet(6, 3, n_d=8, n_a=8, n_steps=2, virtual_batch_size=4, group_attention_matrix=torch.eye(6))
    return squared(model, torch.randn(BATCH, 6))


@library("tabm")
def tabm() -> Case:
    from tabm import TabM

    return squared(
        TabM.make(n_num_features=4, cat_cardinalities=[3, 5], d_out=1, k=4, d_block=16, n_blocks=2),
        torch.randn(BATCH, 4),
        torch.stack([torch.randint(0, 3, (BATCH,)), torch.randint(0, 5, (BATCH,))], 1),
    )


@library("pytorch_tcn")
def tcn() -> Case:
    from pytorch_tcn import TCN

    return squared(TCN(4, [8, 8, 8], kernel_size=3, use_skip_connections=True), torch.randn(BATCH, 4, 20))


@library("snntorch")
def spiking() -> Case:
    import snntorch

    class Spiking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)
            self.fire, self.out = snntorch.Leaky(beta=0.9, learn_beta=True), snntorch.Leaky(beta=0.8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            inner, outer, found = self.fire.init_leaky(), self.out.init_leaky(), []
            for _ in range(4):
                spike, inner = self.fire(self.first(x), inner)
                spike, outer = self.out(self.second(spike), outer)
                found.append(outer)
            return torch.stack(found)

    return squared(Spiking(), torch.randn(BATCH, 8))


@library("spikingjelly")
def spiking_with_state() -> Case:
    from spikingjelly.activation_based import functional, layer, neuron

    class Spiking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(
                layer.Linear(8, 16), neuron.IFNode(), layer.Linear(16, 16), neuron.LIFNode(), layer.Linear(16, 4)
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            functional.reset_net(self.net)
            return sum(self.net(x) for _ in range(3))

    return squared(Spiking(), torch.randn(BATCH, 8))


@library("torchdiffeq")
def neural_ode() -> Case:
    from torchdiffeq import odeint

    class Ode(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.field, self.last = (
                nn.Linear(8, 8),
                nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)),
                nn.Linear(8, 2),
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            path = odeint(lambda t, y: self.field(y), self.first(x), torch.linspace(0, 1, 3), method="rk4")
            return self.last(path[-1])

    return squared(Ode(), torch.randn(BATCH, 8))


@library("torchdiffeq")
def neural_ode_adjoint() -> Case:
    from torchdiffeq import odeint_adjoint

    class Field(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))

        def forward(self, t: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return self.net(y)

    class Ode(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.field, self.last = nn.Linear(8, 8), Field(), nn.Linear(8, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(odeint_adjoint(self.field, self.first(x), torch.linspace(0, 1, 3), method="rk4")[-1])

    return squared(Ode(), torch.randn(BATCH, 8))


def _lightly(name: str) -> Case:
    import copy

    from lightly.loss import BarlowTwinsLoss, NTXentLoss, VICRegLoss
    from lightly.models.modules import heads
    from lightly.models.utils import deactivate_requires_grad

    class Two(nn.Module):
        """Two views of each picture; teachers move after the step, outside of it."""

        def __init__(self) -> None:
            super().__init__()
            self.backbone = nn.Sequential(
                nn.Conv2d(3, 8, 3, 2),
                nn.BatchNorm2d(8),
                nn.ReLU(),
                nn.Conv2d(8, 16, 3, 2),
                nn.ReLU(),
                nn.AdaptiveAvgPool2d(1),
                nn.Flatten(),
            )
            self.head = heads.BarlowTwinsProjectionHead(16, 16, 16)
            self.loss = {
                "simclr": NTXentLoss,
                "barlow": BarlowTwinsLoss,
                "vicreg": VICRegLoss,
                "moco": lambda: NTXentLoss(memory_bank_size=(32, 16)),
            }[name]()
            for buffer in self.loss.buffers():
                if name == "simclr":  # a bank of no size leaves its place as it came
                    buffer.zero_()
            if name == "moco":
                self.teacher, self.teacher_head = copy.deepcopy(self.backbone), copy.deepcopy(self.head)
                deactivate_requires_grad(self.teacher)
                deactivate_requires_grad(self.teacher_head)

        def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            z = self.head(self.backbone(a))
            if name != "moco":
                return self.loss(z, self.head(self.backbone(b)))
            with torch.no_grad():
                t = self.teacher_head(self.teacher(b))
            return self.loss(z, t)

    return own_loss(Two(), images(), images())


each("lightly", "lightly", ["simclr", "barlow", "vicreg", "moco"], _lightly)


@library("deepctr_torch")
def deepctr_deepfm() -> Case:
    from deepctr_torch.inputs import DenseFeat, SparseFeat
    from deepctr_torch.models import DeepFM

    columns = [SparseFeat(f"c{k}", 10, embedding_dim=4) for k in range(3)] + [DenseFeat("d", 2)]
    model = DeepFM(columns, columns, dnn_hidden_units=(16, 16), dnn_dropout=0.1, dnn_use_bn=True)
    return squared(model, torch.cat([torch.randint(0, 10, (BATCH, 3)).float(), torch.randn(BATCH, 2)], 1))


def _braindecode(name: str) -> Case:
    model = getattr(import_module("braindecode.models"), name)(n_chans=8, n_outputs=CLASSES, n_times=512, sfreq=128)
    return classified(model, torch.randn(BATCH, 8, 512))


each(
    "braindecode",
    "braindecode",
    [
        "EEGNet",
        "ShallowFBCSPNet",
        "Deep4Net",
        "EEGConformer",
        "ATCNet",
        "TIDNet",
        "EEGInceptionERP",
        "BIOT",
    ],
    _braindecode,
)


@library("neuralop")
def fourier_operator() -> Case:
    from neuralop.models import FNO

    return squared(
        FNO(n_modes=(4, 4), hidden_channels=8, in_channels=2, out_channels=1, n_layers=3), torch.randn(BATCH, 2, 16, 16)
    )


@library("pyro")
def pyro_spline_flow() -> Case:
    import pyro.distributions as dist
    import pyro.distributions.transforms as transforms

    class Flow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.flows = nn.ModuleList(
                [
                    transforms.affine_autoregressive(4, hidden_dims=[16]),
                    transforms.spline_coupling(4, 2, hidden_dims=[16]),
                    transforms.affine_coupling(4, hidden_dims=[16]),
                ]
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            base = dist.Normal(torch.zeros(4), torch.ones(4))
            return -dist.TransformedDistribution(base, list(self.flows)).log_prob(x).mean()

    return own_loss(Flow(), torch.randn(BATCH, 4))


@library("TorchCRF")
def tagger_with_crf() -> Case:
    from TorchCRF import CRF

    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.rnn, self.head, self.crf = (
                nn.Embedding(VOCABULARY, 16),
                nn.LSTM(16, 8, bidirectional=True, batch_first=True),
                nn.Linear(16, CLASSES),
                CRF(CLASSES),
            )

        def forward(self, ids: torch.Tensor, tags: torch.Tensor) -> torch.Tensor:
            return -self.crf(
                self.head(self.rnn(self.embed(ids))[0]), tags, torch.ones_like(ids, dtype=torch.bool)
            ).mean()

    return own_loss(Tagger(), tokens(8), torch.randint(0, CLASSES, (BATCH, 8)))


@library("chronos")
def chronos_bolt() -> Case:
    from chronos.chronos_bolt import ChronosBoltModelForForecasting
    from transformers import T5Config

    settings = T5Config(
        d_model=32,
        d_kv=8,
        d_ff=32,
        num_layers=2,
        num_heads=2,
        vocab_size=2,
        pad_token_id=0,
        decoder_start_token_id=0,
        dropout_rate=0.1,
    )
    settings.chronos_config = {
        "context_length": 32,
        "prediction_length": 8,
        "input_patch_size": 8,
        "input_patch_stride": 8,
        "quantiles": [0.1, 0.5, 0.9],
        "use_reg_token": True,
    }
    return Case(
        ChronosBoltModelForForecasting(settings),
        kwargs={"context": torch.randn(BATCH, 32), "target": torch.randn(BATCH, 8)},
    )
