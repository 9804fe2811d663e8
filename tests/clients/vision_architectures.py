"""Models of timm and of torchvision."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import timm
import torchvision.models as tv
from timm.models import (
    convmixer,
    efficientnet,
    maxxvit,
    metaformer,
    mlp_mixer,
    regnet,
)
from timm.models._efficientnet_builder import decode_arch_def
from torch import nn
from torchvision.models.convnext import CNBlockConfig
from torchvision.models.mobilenetv3 import InvertedResidualConfig

from architectures import Architecture, Batch, images, narrow

VIT = dict(img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=2)
BLOCK = "qkv proj fc1 fc2 "
PATCHES = "patch_embed.proj pos_embed cls_token head "
STAGES = dict(depths=(1, 1, 1, 1), dims=(16, 32, 48, 64))
MIXER = dict(img_size=32, patch_size=8, embed_dim=32, num_blocks=2, num_classes=10)
# A squeeze-and-excitation is a convolution of one pixel: a linear map.
CONVOLUTIONS = "convolutions of many channels each way are most of the model"


def of(name: str, **arguments: Any) -> Callable[[], nn.Module]:
    return lambda: timm.create_model(name, num_classes=10, **arguments)


def maxxvit_of(kinds: tuple[str, str]) -> Callable[[], nn.Module]:
    attention = maxxvit.MaxxVitTransformerCfg(dim_head=8, window_size=(4, 4))
    config = maxxvit.MaxxVitCfg((32, 64), (1, 1), kinds, 16, transformer_cfg=attention)
    return lambda: maxxvit.MaxxVit(config, img_size=64, num_classes=10)


def small() -> Batch:
    return {"x": images(32)}


def large() -> Batch:
    return {"x": images(64)}


TIMM = {
    "timm_vit": Architecture(of("vit_tiny_patch16_224", **VIT), small, BLOCK, PATCHES),
    "timm_deit_distilled": Architecture(
        of("deit_tiny_distilled_patch16_224", **VIT), small, BLOCK, PATCHES + "dist_token head_dist"
    ),
    "timm_beit": Architecture(
        of("beit_base_patch16_224", **VIT),
        small,
        BLOCK,
        "patch_embed.proj cls_token relative_position_bias_table head",
    ),
    "timm_siglip": Architecture(
        of("vit_base_patch16_siglip_224", **VIT),
        small,
        BLOCK + "attn_pool.q attn_pool.kv",
        "patch_embed.proj pos_embed attn_pool.latent head",
    ),
    "timm_cait": Architecture(
        of("cait_xxs24_224", **VIT),
        small,
        BLOCK + "proj_l proj_w q k v",
        PATCHES,
        why="proj_l and proj_w mix attention's heads: linear maps of few rows",
    ),
    "timm_xcit": Architecture(
        of("xcit_nano_12_p16_224", **VIT),
        large,
        BLOCK + "q k v",
        "patch_embed.proj.0.0 conv1 conv2 temperature cls_token head",
        convolutions="patch_embed.proj token_projection",
    ),
    "timm_levit": Architecture(
        of(
            "levit_128s", img_size=64, embed_dim=(64, 96), key_dim=8, num_heads=(2, 4), depth=(1, 1)
        ),
        large,
        "linear",
        "stem.conv1.linear attention_biases head.linear head_dist.linear",
        convolutions="stem.conv2.linear stem.conv3.linear stem.conv4.linear",
        why="attention_biases is a table of biases by head and relative position",
    ),
    "timm_swin": Architecture(
        of(
            "swin_tiny_patch4_window7_224",
            img_size=32,
            window_size=4,
            patch_size=2,
            embed_dim=16,
            depths=(2, 2),
            num_heads=(2, 4),
        ),
        small,
        BLOCK + "reduction",
        "patch_embed.proj relative_position_bias_table head.fc",
    ),
    "timm_pvt_v2": Architecture(
        of("pvt_v2_b0", depths=(1, 1, 1, 1), embed_dims=(8, 16, 32, 64), num_heads=(1, 1, 2, 4)),
        large,
        "q kv proj fc1 fc2",
        "patch_embed.proj dwconv head",
        convolutions="sr downsample.proj",
        why=CONVOLUTIONS,
    ),
    "timm_mixer": Architecture(
        lambda: mlp_mixer.MlpMixer(**MIXER), small, "fc1 fc2", "stem.proj head"
    ),
    "timm_gmlp": Architecture(
        lambda: mlp_mixer.MlpMixer(
            **MIXER,
            mlp_ratio=4,
            block_layer=mlp_mixer.SpatialGatingBlock,
            mlp_layer=timm.layers.GatedMlp,
        ),
        small,
        "fc1 fc2 gate.proj",
        "stem.proj head",
    ),
    "timm_resnet": Architecture(
        of("resnet18", layers=(1, 1, 1, 1), channels=(8, 16, 32, 64), stem_width=8),
        large,
        adamw="conv1 fc",
        convolutions="layer1.conv1 layer2.conv1 layer3.conv1 layer4.conv1 conv2 downsample",
        why=CONVOLUTIONS,
    ),
    "timm_convnext": Architecture(
        of("convnext_atto", **STAGES),
        large,
        adamw="stem conv_dw head.fc",
        convolutions="fc1 fc2 downsample",
        why=CONVOLUTIONS,
    ),
    "timm_efficientnet": Architecture(
        lambda: efficientnet.EfficientNet(
            decode_arch_def(
                [["ds_r1_k3_s1_e1_c16_se0.5"], ["ir_r2_k3_s2_e6_c24_se0.5"]],
                group_size=None,
            ),
            num_features=64,
            stem_size=16,
            num_classes=10,
        ),
        small,
        adamw="conv_stem conv_dw classifier",
        convolutions="conv_reduce conv_expand conv_pw conv_pwl conv_head",
        why=CONVOLUTIONS,
    ),
    "timm_regnet": Architecture(
        lambda: regnet.RegNet(
            regnet.RegNetCfg(depth=6, w0=16, wa=16.0, wm=2.0, group_size=8, se_ratio=0.5),
            num_classes=10,
        ),
        small,
        adamw="stem.conv head.fc",
        convolutions="conv se.fc1 se.fc2",
        why=CONVOLUTIONS + ", those in groups of eight among them",
    ),
    "timm_densenet": Architecture(
        of("densenet121", growth_rate=8, block_config=(2, 2)),
        small,
        adamw="conv0 classifier",
        convolutions="conv1 conv2 conv",
        why=CONVOLUTIONS,
    ),
    "timm_vgg": Architecture(
        lambda: narrow(timm.create_model("vgg11", num_classes=10), by=8),
        large,
        adamw="features.0 head.fc",
        convolutions="features pre_logits.fc1 pre_logits.fc2",
        why=CONVOLUTIONS,
    ),
    "timm_maxvit": Architecture(
        maxxvit_of(("M", "M")),
        large,
        BLOCK,
        "stem.conv1 conv2_kxk relative_position_bias_table head.fc",
        convolutions="stem.conv2 expand conv1_1x1 conv3_1x1 se.fc1 se.fc2",
        why=CONVOLUTIONS,
    ),
    "timm_coatnet": Architecture(
        maxxvit_of(("C", "T")),
        large,
        adamw="stem.conv1 conv2_kxk relative_position_bias_table head.fc",
        convolutions="stem.conv2 expand conv1_1x1 conv3_1x1 se.fc1 se.fc2 " + BLOCK,
        why="attention here is made of convolutions of one pixel",
    ),
    "timm_poolformer": Architecture(
        lambda: metaformer.MetaFormer(**STAGES, num_classes=10),
        large,
        "head.fc.fc1",
        "stem.conv head.fc.fc2",
        convolutions="conv fc1 fc2",
        why=CONVOLUTIONS + "; the first of the head's two layers is hidden",
    ),
    "timm_convmixer": Architecture(
        lambda: convmixer.ConvMixer(dim=32, depth=2, kernel_size=3, patch_size=4, num_classes=10),
        small,
        adamw="stem.0 fn.0 head",
        convolutions="blocks",
        why=CONVOLUTIONS,
    ),
    "timm_mobilevit": Architecture(
        of("mobilevit_xxs"),
        large,
        BLOCK,
        "stem.conv conv2_kxk.conv head.fc",
        convolutions="conv conv_1x1",
        why=CONVOLUTIONS,
    ),
}

TORCHVISION = {
    "alexnet": Architecture(
        lambda: narrow(tv.alexnet(num_classes=10), by=8),
        large,
        "classifier",
        "features.0 classifier.6",
        convolutions="features",
        why="of the stack called classifier only the last layer is a head",
    ),
    "mobilenet_v3_small": Architecture(
        lambda: tv.MobileNetV3(
            [
                InvertedResidualConfig(16, 3, 32, 16, True, "RE", 2, 1, 1.0),
                InvertedResidualConfig(16, 5, 64, 24, True, "HS", 2, 1, 1.0),
            ],
            96,
            num_classes=10,
        ),
        small,
        "classifier",
        "features.0.0 features.1.block.1.0 features.2.block.1.0 classifier.3",
        convolutions="features features.block fc1 fc2",
    ),
    "vit_b_16": Architecture(
        lambda: tv.VisionTransformer(32, 8, 2, 2, 32, 64, num_classes=10),
        small,
        "in_proj_weight out_proj mlp",
        "class_token conv_proj pos_embedding heads.head",
    ),
    "swin_t": Architecture(
        lambda: tv.SwinTransformer([4, 4], 16, [2, 2], [2, 4], [4, 4], num_classes=10),
        small,
        "qkv attn.proj mlp reduction",
        "features.0.0 relative_position_bias_table head",
    ),
    "convnext_tiny": Architecture(
        lambda: tv.ConvNeXt([CNBlockConfig(16, 32, 2), CNBlockConfig(32, None, 2)], num_classes=10),
        small,
        "block",
        "features.0.0 features.2.1 block.0 layer_scale classifier",
    ),
    "squeezenet": Architecture(
        lambda: narrow(tv.squeezenet1_1(num_classes=10), by=2),
        large,
        adamw="features.0 classifier",
        convolutions="squeeze expand1x1 expand3x3",
        why="the head is a convolution",
    ),
    "lraspp": Architecture(
        lambda: narrow(
            tv.segmentation.lraspp_mobilenet_v3_large(
                weights=None, weights_backbone=None, num_classes=12
            ),
            by=4,
        ),
        lambda: {"input": images(64)},
        adamw="backbone.0.0 backbone.1.block.0.0 block.1.0 low_classifier high_classifier",
        convolutions="backbone backbone.1.block.1.0 block fc1 fc2 cbr scale",
        why="the heads are convolutions",
    ),
}
