"""Models that sizes alone do not describe: written with torch alone, and made of nested configs."""

from __future__ import annotations

from typing import Any

import torch
from timm.layers import GatedMlp
from timm.models import efficientnet as timm_efficientnet
from timm.models import maxxvit as timm_maxxvit
from timm.models import mlp_mixer as timm_mixer
from timm.models import regnet as timm_regnet
from timm.models._efficientnet_builder import decode_arch_def
from torch import nn
from torchvision.models import ConvNeXt, MobileNetV3
from torchvision.models.convnext import CNBlockConfig
from torchvision.models.mobilenetv3 import InvertedResidualConfig


class Translator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(200, 32), nn.Embedding(300, 32)
        self.transformer = nn.Transformer(32, 2, 1, 1, 64, batch_first=True)
        self.generator = nn.Linear(32, 300)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return self.generator(self.transformer(self.source(source), self.target(target)))


class Recurrent(nn.Module):
    """A language model of bytes, two of whose sizes are that of the vocabulary."""

    def __init__(self, kind: str, hidden_size: int):
        super().__init__()
        self.embedding = nn.Embedding(256, 32)
        self.rnn = getattr(nn, kind)(32, hidden_size, 2, batch_first=True)
        self.linear = nn.Linear(hidden_size, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.rnn(self.embedding(x))[0])


class Attentive(nn.Module):
    """A classifier of sequences of vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(8, 32)
        self.attention = nn.MultiheadAttention(32, 2, kdim=8, vdim=8, batch_first=True)
        self.out = nn.Linear(32, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.attention(self.into(x), x, x)[0].mean(1))


def perceptron(normed: bool = False) -> nn.Module:
    layers: list[nn.Module] = [nn.Linear(64, 128), nn.Linear(128, 128), nn.Linear(128, 10)]
    if normed:
        layers = [nn.utils.parametrizations.weight_norm(layer) for layer in layers]
    return nn.Sequential(layers[0], nn.ReLU(), layers[1], nn.ReLU(), layers[2])


def maxxvit(kinds: list[str]) -> nn.Module:
    attention = timm_maxxvit.MaxxVitTransformerCfg(dim_head=8, window_size=(4, 4))
    sizes = ((32, 64), (1, 1), tuple(kinds), 16)
    config = timm_maxxvit.MaxxVitCfg(*sizes, transformer_cfg=attention)
    return timm_maxxvit.MaxxVit(config, img_size=64, num_classes=10)


def gmlp(**config: Any) -> nn.Module:
    block, mlp = timm_mixer.SpatialGatingBlock, GatedMlp
    return timm_mixer.MlpMixer(**config, mlp_ratio=4, block_layer=block, mlp_layer=mlp)


def efficientnet() -> nn.Module:
    stages = [["ds_r1_k3_s1_e1_c16_se0.5"], ["ir_r2_k3_s2_e6_c24_se0.5"]]
    blocks = decode_arch_def(stages, group_size=None)
    sizes = dict(num_features=64, stem_size=16, num_classes=10)
    return timm_efficientnet.EfficientNet(blocks, **sizes)


def regnet() -> nn.Module:
    sizes = dict(depth=6, w0=16, wa=16.0, wm=2.0, group_size=8, se_ratio=0.5)
    return timm_regnet.RegNet(timm_regnet.RegNetCfg(**sizes), num_classes=10)


def mobilenet_v3() -> nn.Module:
    blocks = [(16, 3, 32, 16, True, "RE", 2, 1, 1.0), (16, 5, 64, 24, True, "HS", 2, 1, 1.0)]
    return MobileNetV3([InvertedResidualConfig(*block) for block in blocks], 96, num_classes=10)


def convnext() -> nn.Module:
    return ConvNeXt([CNBlockConfig(16, 32, 2), CNBlockConfig(32, None, 2)], num_classes=10)
