"""Models of diffusers, adapters of PEFT, and models written with torch alone."""

from __future__ import annotations

from collections.abc import Callable

import diffusers
import peft
import torch
from torch import nn

from architectures import Architecture, Batch, images, text, tokens
from transformers_architectures import LLAMA, TEXT, causal, labelled, of

UNET = dict(block_out_channels=(16, 32), layers_per_block=1, norm_num_groups=8)
CROSS = dict(cross_attention_dim=24, attention_head_dim=8)
STREAM = dict(num_layers=2, num_attention_heads=2, attention_head_dim=16)
LATENTS = dict(sample_size=8, patch_size=2, in_channels=4)
JOINT = dict(joint_attention_dim=32, pooled_projection_dim=32)

TO = "to_q to_k to_v to_out "
NET = "net net.0.proj "
TIME = "linear_1 linear_2 "
RESNET = "conv1 conv2 conv_shortcut downsamplers.conv "
MODULATION = "adaLN's modulation is a linear map of the time's embedding"


def steps(**inputs: torch.Tensor) -> Batch:
    return {"timestep": torch.tensor([3, 7]), **inputs}


def conditions(size: int) -> torch.Tensor:
    return torch.randn(2, 5, size)


llama = causal("llama", **LLAMA)


def adapted(
    config: Callable[[], peft.PeftConfig], base: Callable[[], nn.Module] = llama
) -> Callable[[], nn.Module]:
    return lambda: peft.get_peft_model(base(), config())


DIFFUSERS = {
    "unet": Architecture(
        lambda: diffusers.UNet2DConditionModel(
            **UNET,
            **CROSS,
            sample_size=8,
            down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
            up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        ),
        lambda: steps(sample=images(8, 4), encoder_hidden_states=conditions(24)),
        TIME + TO + NET + "time_emb_proj",
        "conv_in conv_out",
        convolutions=RESNET + "upsamplers.conv proj_in proj_out",
        why="conv_in takes and conv_out gives latents, of four channels",
    ),
    "controlnet": Architecture(
        lambda: diffusers.ControlNetModel(
            **UNET,
            **CROSS,
            down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
            conditioning_embedding_out_channels=(8, 16),
        ),
        lambda: steps(
            sample=images(8, 4), encoder_hidden_states=conditions(24), controlnet_cond=images(16)
        ),
        TIME + TO + NET + "time_emb_proj",
        "conv_in",
        convolutions=RESNET
        + "proj_in proj_out controlnet_cond_embedding.blocks conv_out controlnet_down_blocks "
        "controlnet_mid_block",
        why="what a ControlNet gives is added to features of a UNet: it has no head",
    ),
    "autoencoder_kl": Architecture(
        lambda: diffusers.AutoencoderKL(
            **UNET,
            down_block_types=("DownEncoderBlock2D",) * 2,
            up_block_types=("UpDecoderBlock2D",) * 2,
            latent_channels=4,
        ),
        lambda: {"sample": images(8)},
        TO,
        "conv_in decoder.conv_out post_quant_conv",
        convolutions=RESNET + "upsamplers.conv encoder.conv_out quant_conv",
    ),
    "dit": Architecture(
        lambda: diffusers.DiTTransformer2DModel(
            **STREAM, **LATENTS, out_channels=8, num_embeds_ada_norm=10
        ),
        lambda: steps(hidden_states=images(8, 4), class_labels=torch.tensor([1, 2])),
        TIME + TO + NET + "norm1.linear proj_out_1",
        "pos_embed.proj embedding_table proj_out_2",
        why=MODULATION + ", and so is proj_out_1; proj_out_2 gives the patches",
    ),
    "pixart": Architecture(
        lambda: diffusers.PixArtTransformer2DModel(
            **STREAM,
            **LATENTS,
            out_channels=8,
            cross_attention_dim=32,
            caption_channels=24,
            use_additional_conditions=False,
        ),
        lambda: steps(
            hidden_states=images(8, 4),
            encoder_hidden_states=conditions(24),
            added_cond_kwargs={"resolution": None, "aspect_ratio": None},
        ),
        TIME + TO + NET + "adaln_single.linear",
        "scale_shift_table pos_embed.proj proj_out",
    ),
    "flux": Architecture(
        lambda: diffusers.FluxTransformer2DModel(
            **{**STREAM, "num_layers": 1},
            **JOINT,
            num_single_layers=1,
            axes_dims_rope=(4, 4, 8),
            in_channels=16,
        ),
        lambda: steps(
            hidden_states=torch.randn(2, 6, 16),
            encoder_hidden_states=conditions(32),
            pooled_projections=torch.randn(2, 32),
            img_ids=torch.zeros(6, 3),
            txt_ids=torch.zeros(5, 3),
        ),
        TIME
        + TO
        + NET
        + "context_embedder x_embedder norm1.linear norm1_context.linear norm.linear "
        "norm_out.linear add_q_proj add_k_proj add_v_proj to_add_out proj_mlp "
        "single_transformer_blocks.proj_out",
        "proj_out",
        why=MODULATION + "; the proj_out of a block is hidden, the model's gives the patches",
    ),
    "sd3": Architecture(
        lambda: diffusers.SD3Transformer2DModel(
            **STREAM,
            **LATENTS,
            **JOINT,
            caption_projection_dim=32,
            out_channels=4,
            pos_embed_max_size=8,
        ),
        lambda: steps(
            hidden_states=images(8, 4),
            encoder_hidden_states=conditions(32),
            pooled_projections=torch.randn(2, 32),
        ),
        TIME
        + TO
        + NET
        + "context_embedder norm1.linear norm1_context.linear norm_out.linear add_q_proj "
        "add_k_proj add_v_proj to_add_out",
        "pos_embed.proj proj_out",
        why=MODULATION,
    ),
    "wan": Architecture(
        lambda: diffusers.WanTransformer3DModel(
            patch_size=(1, 2, 2),
            num_attention_heads=2,
            attention_head_dim=12,
            in_channels=4,
            out_channels=4,
            text_dim=16,
            freq_dim=32,
            ffn_dim=48,
            num_layers=2,
        ),
        lambda: steps(
            hidden_states=torch.randn(2, 4, 2, 8, 8), encoder_hidden_states=conditions(16)
        ),
        TIME + TO + NET + "time_proj",
        "scale_shift_table patch_embedding proj_out",
    ),
    "cogvideox": Architecture(
        lambda: diffusers.CogVideoXTransformer3DModel(
            **STREAM,
            in_channels=4,
            out_channels=4,
            time_embed_dim=8,
            text_embed_dim=16,
            sample_width=8,
            sample_height=8,
            sample_frames=5,
            patch_size=2,
            max_text_seq_length=5,
        ),
        lambda: steps(
            hidden_states=torch.randn(2, 2, 4, 8, 8), encoder_hidden_states=conditions(16)
        ),
        TIME + TO + NET + "text_proj norm1.linear norm2.linear norm_out.linear",
        "patch_embed.proj proj_out",
    ),
    "sana": Architecture(
        lambda: diffusers.SanaTransformer2DModel(
            **STREAM,
            in_channels=4,
            out_channels=4,
            num_cross_attention_heads=2,
            cross_attention_head_dim=16,
            cross_attention_dim=32,
            caption_channels=24,
            sample_size=8,
        ),
        lambda: steps(hidden_states=images(8, 4), encoder_hidden_states=conditions(24)),
        TIME + TO + "time_embed.linear",
        "scale_shift_table patch_embed.proj conv_depth proj_out",
        convolutions="conv_inverted conv_point",
    ),
}

PEFT = {
    "lora": Architecture(
        adapted(lambda: peft.LoraConfig(r=8, target_modules=["q_proj", "v_proj", "down_proj"])),
        text,
        "lora_A.default lora_B.default",
    ),
    "lora_embedding": Architecture(
        adapted(
            lambda: peft.LoraConfig(
                r=8, target_modules=["q_proj", "embed_tokens"], modules_to_save=["lm_head"]
            )
        ),
        text,
        "lora_A.default lora_B.default",
        "lora_embedding_A.default lora_embedding_B.default lm_head.modules_to_save.default",
        why="an embedding's factors belong together, and A has a row for each token",
    ),
    "lora_classifier": Architecture(
        adapted(
            lambda: peft.LoraConfig(r=8, task_type="SEQ_CLS", target_modules=["query", "value"]),
            of("BertForSequenceClassification", "BertConfig", **TEXT),
        ),
        labelled,
        "lora_A.default lora_B.default",
        "classifier.modules_to_save.default",
    ),
    "adalora": Architecture(
        adapted(
            lambda: peft.AdaLoraConfig(
                target_modules=["q_proj", "v_proj"], init_r=8, total_step=100, tinit=10, tfinal=10
            )
        ),
        text,
        "lora_A.default lora_B.default",
        "lora_E.default",
        why="lora_E holds singular values",
    ),
    "ia3": Architecture(
        adapted(
            lambda: peft.IA3Config(
                target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"]
            )
        ),
        text,
        adamw="ia3_l.default",
        warning="no parameter of this model is Muon's",
        why="ia3_l scales features one by one",
    ),
    "loha": Architecture(
        adapted(lambda: peft.LoHaConfig(r=4, target_modules=["q_proj", "v_proj"])),
        text,
        "hada_w1_a.default hada_w1_b.default hada_w2_a.default hada_w2_b.default",
        why="factors are matrices, as LoRA's are",
    ),
    "lokr": Architecture(
        adapted(
            lambda: peft.LoKrConfig(r=4, target_modules=["q_proj", "v_proj"], decompose_both=True)
        ),
        text,
        "lokr_w1.default lokr_w2.default",
        why="Kronecker factors are matrices",
    ),
    "oft": Architecture(
        adapted(lambda: peft.OFTConfig(oft_block_size=8, target_modules=["q_proj", "v_proj"])),
        text,
        adamw="oft_R.default",
        warning="no parameter of this model is Muon's",
        why="a row holds the entries above the diagonal of one rotation's generator",
    ),
    "prompt_tuning": Architecture(
        adapted(lambda: peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=6)),
        text,
        adamw="embedding",
        warning="no parameter of this model is Muon's",
    ),
    "prefix_tuning": Architecture(
        adapted(
            lambda: peft.PrefixTuningConfig(
                task_type="CAUSAL_LM",
                num_virtual_tokens=6,
                prefix_projection=True,
                encoder_hidden_size=32,
            )
        ),
        text,
        "transform",
        "embedding prompt_encoder.default.transform.2",
        unsure="prompt_encoder.default.transform.2",
        warning="left to AdamW: may be an output head",
        why="the last layer gives keys and values, which looks like predictions",
    ),
}


class Translator(nn.Module):
    def __init__(self):
        super().__init__()
        self.source, self.target = nn.Embedding(200, 32), nn.Embedding(300, 32)
        self.transformer = nn.Transformer(32, 2, 1, 1, 64, batch_first=True)
        self.generator = nn.Linear(32, 300)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return self.generator(self.transformer(self.source(source), self.target(target)))


class Recurrent(nn.Module):
    """A language model of bytes, two of whose sizes are that of the vocabulary."""

    def __init__(self, cls: type[nn.RNNBase], hidden_size: int):
        super().__init__()
        self.embedding = nn.Embedding(256, 32)
        self.rnn = cls(32, hidden_size, 2, batch_first=True)
        self.linear = nn.Linear(hidden_size, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.rnn(self.embedding(x))[0])


class Attentive(nn.Module):
    """A classifier of sequences of vectors."""

    def __init__(self):
        super().__init__()
        self.into = nn.Linear(8, 32)
        self.attention = nn.MultiheadAttention(32, 2, kdim=8, vdim=8, batch_first=True)
        self.out = nn.Linear(32, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.attention(self.into(x), x, x)[0].mean(1))


def perceptron(wrap: Callable[[nn.Module], nn.Module] = lambda layer: layer) -> nn.Module:
    linear = [wrap(nn.Linear(*sizes)) for sizes in ((64, 128), (128, 128), (128, 10))]
    return nn.Sequential(linear[0], nn.ReLU(), linear[1], nn.ReLU(), linear[2])


def vectors() -> Batch:
    return {"input": torch.randn(4, 64)}


GATES = "weight_ih_l0 weight_hh_l0 weight_ih_l1 weight_hh_l1"

TORCH = {
    "transformer": Architecture(
        Translator,
        lambda: {"source": tokens(200), "target": tokens(300)},
        "in_proj_weight out_proj linear1 linear2",
        "source target generator",
    ),
    "gru": Architecture(
        lambda: Recurrent(nn.GRU, 256), lambda: {"x": tokens(256)}, GATES, "embedding linear"
    ),
    "lstm": Architecture(
        lambda: Recurrent(nn.LSTM, 64), lambda: {"x": tokens(256)}, GATES, "embedding linear"
    ),
    "perceptron": Architecture(perceptron, vectors, "0 2", "4"),
    "weight_norm": Architecture(
        lambda: perceptron(nn.utils.parametrizations.weight_norm),
        vectors,
        "original1",
        "original0 4.parametrizations.weight.original1",
        why="magnitudes are used one by one; a head under a parametrization is still a head",
    ),
    "attention": Architecture(
        Attentive,
        lambda: {"x": torch.randn(4, 6, 8)},
        "into q_proj_weight k_proj_weight v_proj_weight out_proj",
        "out",
    ),
}

OTHERS = {**DIFFUSERS, **PEFT, **TORCH}
