"""Models of transformers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as hf
from torch import nn

from architectures import Architecture, Batch, images, text, tokens

TEXT = dict(
    hidden_size=64,
    intermediate_size=112,
    num_hidden_layers=2,
    num_attention_heads=4,
    vocab_size=1000,
    max_position_embeddings=128,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
GROUPED = dict(**TEXT, num_key_value_heads=2)
LLAMA = dict(**GROUPED, head_dim=16)
VISION = dict(
    hidden_size=64,
    intermediate_size=112,
    num_hidden_layers=2,
    num_attention_heads=4,
    image_size=32,
    patch_size=8,
)
ENCODER_DECODER = dict(
    d_model=64,
    encoder_layers=2,
    decoder_layers=2,
    encoder_attention_heads=4,
    decoder_attention_heads=4,
    encoder_ffn_dim=112,
    decoder_ffn_dim=112,
    vocab_size=1000,
    pad_token_id=0,
    decoder_start_token_id=0,
)
T5 = dict(d_model=64, d_kv=16, d_ff=112, num_layers=2, num_heads=4, vocab_size=1000)
DISTILBERT = dict(dim=64, hidden_dim=112, n_layers=2, n_heads=4, vocab_size=1000, pad_token_id=0)
SPEECH = dict(
    hidden_size=64,
    intermediate_size=112,
    num_hidden_layers=2,
    num_attention_heads=4,
    vocab_size=40,
    conv_dim=[16, 16],
    conv_kernel=[10, 3],
    conv_stride=[5, 2],
    num_conv_pos_embeddings=8,
    num_conv_pos_embedding_groups=8,
)

# What many of them call their layers.
ATTENTION = "q_proj k_proj v_proj o_proj "
OUT_ATTENTION = "q_proj k_proj v_proj out_proj "
GATED = "gate_proj up_proj down_proj "
BERT = "query key value dense "
BERT_TABLES = "word_embeddings position_embeddings token_type_embeddings "
VIT = "q_proj k_proj v_proj o_proj fc1 fc2 "


def causal(kind: str, **config: Any) -> Callable[[], nn.Module]:
    return lambda: hf.AutoModelForCausalLM.from_config(hf.AutoConfig.for_model(kind, **config))


def of(model: str, config: str, **arguments: Any) -> Callable[[], nn.Module]:
    return lambda: getattr(hf, model)(getattr(hf, config)(**arguments))


# Of some models each example's gradient has rank one.
EXAMPLES = 16


def labelled() -> Batch:
    return {"input_ids": tokens(texts=EXAMPLES), "labels": torch.arange(EXAMPLES) % 2}


def labelled_tokens() -> Batch:
    return {"input_ids": tokens(), "labels": torch.randint(0, 2, (2, 12))}


def labelled_images() -> Batch:
    return {"pixel_values": images(), "labels": torch.tensor([3, 5])}


def pairs() -> Batch:
    texts, pictures = tokens(texts=EXAMPLES), images(count=EXAMPLES)
    return {"input_ids": texts, "pixel_values": pictures, "return_loss": True}


def text_with_image(placeholders: int, **pixels: Any) -> Batch:
    input_ids = torch.cat([torch.full((2, placeholders), 999), tokens(length=8)], 1)
    kinds = (input_ids == 999).long()
    return {"input_ids": input_ids, "labels": input_ids, "mm_token_type_ids": kinds, **pixels}


ENCODERS = {
    "bert": Architecture(of("BertForMaskedLM", "BertConfig", **TEXT), text, BERT, BERT_TABLES),
    "bert_untied": Architecture(
        of("BertForMaskedLM", "BertConfig", **TEXT, tie_word_embeddings=False),
        text,
        BERT,
        BERT_TABLES + "decoder",
    ),
    "bert_classifier": Architecture(
        of("BertForSequenceClassification", "BertConfig", **TEXT),
        labelled,
        BERT,
        BERT_TABLES + "classifier",
    ),
    "roberta": Architecture(
        of("RobertaForMaskedLM", "RobertaConfig", **TEXT), text, BERT, BERT_TABLES
    ),
    "roberta_classifier": Architecture(
        of("RobertaForSequenceClassification", "RobertaConfig", **TEXT),
        labelled,
        BERT,
        BERT_TABLES + "out_proj",
        why="classifier.dense is a hidden layer of the head",
    ),
    "deberta_v2": Architecture(
        of(
            "DebertaV2ForMaskedLM",
            "DebertaV2Config",
            **TEXT,
            relative_attention=True,
            position_buckets=8,
            pos_att_type=["p2c", "c2p"],
            share_att_key=False,
            max_relative_positions=16,
        ),
        text,
        "query_proj key_proj value_proj pos_key_proj pos_query_proj dense",
        "word_embeddings position_embeddings rel_embeddings",
    ),
    "electra": Architecture(
        of("ElectraForPreTraining", "ElectraConfig", **TEXT, embedding_size=32),
        labelled_tokens,
        BERT + "embeddings_project",
        BERT_TABLES + "dense_prediction",
    ),
    "albert": Architecture(
        of("AlbertForMaskedLM", "AlbertConfig", **TEXT, embedding_size=32),
        text,
        BERT + "embedding_hidden_mapping_in ffn ffn_output",
        BERT_TABLES,
    ),
    "distilbert": Architecture(
        of("DistilBertForMaskedLM", "DistilBertConfig", **DISTILBERT),
        text,
        "q_lin k_lin v_lin out_lin lin1 lin2 vocab_transform",
        "word_embeddings position_embeddings",
        why="vocab_transform is the hidden layer before the tied head",
    ),
    "modernbert": Architecture(
        of("ModernBertForMaskedLM", "ModernBertConfig", **TEXT, cls_token_id=1, sep_token_id=2),
        text,
        "Wqkv Wo Wi head.dense",
        "tok_embeddings",
        why="head.dense is the hidden layer before the tied head",
    ),
    "mobilebert": Architecture(
        of(
            "MobileBertForMaskedLM",
            "MobileBertConfig",
            **TEXT,
            intra_bottleneck_size=32,
            embedding_size=32,
        ),
        text,
        BERT + "embedding_transformation",
        BERT_TABLES + "cls.predictions.dense",
        why="cls.predictions.dense is the part of the output head that is not tied",
    ),
    "fnet": Architecture(
        of(
            "FNetForMaskedLM",
            "FNetConfig",
            hidden_size=64,
            intermediate_size=112,
            num_hidden_layers=2,
            vocab_size=1000,
            pad_token_id=0,
        ),
        text,
        "projection dense",
        BERT_TABLES,
    ),
    "xlnet": Architecture(
        of(
            "XLNetLMHeadModel",
            "XLNetConfig",
            d_model=64,
            n_layer=2,
            n_head=4,
            d_inner=112,
            vocab_size=1000,
        ),
        text,
        "layer_1 layer_2",
        "mask_emb word_embedding q k v o r r_r_bias r_s_bias r_w_bias seg_embed",
        why="a warning tells how matrices of three dimensions become Muon's",
    ),
    "llama_classifier": Architecture(
        of("LlamaForSequenceClassification", "LlamaConfig", **LLAMA),
        labelled,
        ATTENTION + GATED,
        "embed_tokens score",
    ),
    "t5": Architecture(
        of(
            "T5ForConditionalGeneration",
            "T5Config",
            **T5,
            feed_forward_proj="gated-gelu",
            decoder_start_token_id=0,
        ),
        text,
        "q k v o wi_0 wi_1 wo",
        "shared relative_attention_bias",
    ),
    "prophetnet": Architecture(
        of(
            "ProphetNetForConditionalGeneration",
            "ProphetNetConfig",
            vocab_size=1000,
            hidden_size=64,
            encoder_ffn_dim=112,
            num_encoder_layers=2,
            num_encoder_attention_heads=4,
            decoder_ffn_dim=112,
            num_decoder_layers=2,
            num_decoder_attention_heads=4,
            max_position_embeddings=64,
        ),
        text,
        "query_proj key_proj value_proj out_proj intermediate feed_forward.output "
        "relative_pos_embeddings",
        "word_embeddings position_embeddings ngram_embeddings",
        why="feed_forward.output is no head; relative_pos_embeddings computes biases from features",
    ),
    "bart": Architecture(
        of("BartForConditionalGeneration", "BartConfig", **ENCODER_DECODER),
        text,
        OUT_ATTENTION + "fc1 fc2",
        "shared embed_positions",
    ),
}

SPEECH_AND_SERIES = {
    "whisper": Architecture(
        of(
            "WhisperForConditionalGeneration",
            "WhisperConfig",
            **ENCODER_DECODER,
            bos_token_id=0,
            eos_token_id=0,
            num_mel_bins=8,
            max_source_positions=16,
        ),
        lambda: {"input_features": torch.randn(2, 8, 32), "labels": tokens()},
        OUT_ATTENTION + "fc1 fc2",
        "conv1 conv2 embed_tokens embed_positions",
    ),
    "wav2vec2": Architecture(
        of("Wav2Vec2ForCTC", "Wav2Vec2Config", **SPEECH),
        lambda: {"input_values": torch.randn(2, 400), "labels": torch.randint(1, 40, (2, 4))},
        OUT_ATTENTION + "feature_projection.projection intermediate_dense output_dense",
        "conv original0 original1 lm_head",
        why="original0 and original1 are the magnitudes and directions of a convolution",
    ),
    "wav2vec2_conformer": Architecture(
        of(
            "Wav2Vec2ConformerForCTC",
            "Wav2Vec2ConformerConfig",
            **SPEECH,
            position_embeddings_type="relative",
            conv_depthwise_kernel_size=3,
            max_source_positions=64,
        ),
        lambda: {"input_values": torch.randn(2, 400), "labels": torch.randint(1, 40, (2, 4))},
        "linear_q linear_k linear_v linear_out linear_pos feature_projection.projection "
        "intermediate_dense output_dense",
        "conv_layers.0.conv depthwise_conv original0 pos_bias_u pos_bias_v lm_head",
        convolutions="conv_layers.conv pointwise_conv1 pointwise_conv2 original1",
        why="pos_bias_u and pos_bias_v are biases of each head",
    ),
    "hubert": Architecture(
        of("HubertForSequenceClassification", "HubertConfig", **SPEECH, classifier_proj_size=32),
        lambda: {"input_values": torch.randn(2, 400), "labels": torch.tensor([0, 1])},
        OUT_ATTENTION + "feature_projection.projection intermediate_dense output_dense projector",
        "conv original0 original1 classifier",
    ),
    "audio_spectrogram": Architecture(
        of(
            "ASTForAudioClassification",
            "ASTConfig",
            **{**VISION, "image_size": 224},
            max_length=32,
            num_mel_bins=16,
            num_labels=10,
        ),
        lambda: {"input_values": torch.randn(2, 32, 16), "labels": torch.tensor([3, 5])},
        VIT,
        "cls_token distillation_token position_embeddings patch_embeddings.projection "
        "classifier.dense",
    ),
    "patchtst": Architecture(
        of(
            "PatchTSTForPrediction",
            "PatchTSTConfig",
            d_model=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            ffn_dim=64,
            context_length=32,
            patch_length=8,
            patch_stride=8,
            prediction_length=4,
            num_input_channels=2,
            loss="mse",
        ),
        lambda: {"past_values": torch.randn(2, 32, 2), "future_values": torch.randn(2, 4, 2)},
        OUT_ATTENTION + "ff input_embedding",
        "head.projection",
        why="input_embedding is a linear map of a patch's numbers, no table",
    ),
}

IMAGES = {
    "vit": Architecture(
        of("ViTForImageClassification", "ViTConfig", **VISION, num_labels=10),
        labelled_images,
        VIT,
        "cls_token position_embeddings patch_embeddings.projection classifier",
    ),
    "vit_mae": Architecture(
        of(
            "ViTMAEForPreTraining",
            "ViTMAEConfig",
            **VISION,
            decoder_hidden_size=32,
            decoder_num_hidden_layers=1,
            decoder_num_attention_heads=2,
            decoder_intermediate_size=64,
        ),
        lambda: {"pixel_values": images(), "noise": torch.rand(2, 16)},
        VIT + "decoder_embed",
        "cls_token mask_token patch_embeddings.projection decoder_pred",
        why="decoder_embed is a linear map from one stream to the other, decoder_pred a head",
    ),
    "mgp_str": Architecture(
        of(
            "MgpstrForSceneTextRecognition",
            "MgpstrConfig",
            image_size=[16, 32],
            patch_size=4,
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_token_length=5,
            num_bpe_labels=300,
            num_wordpiece_labels=200,
        ),
        lambda: {"pixel_values": torch.randn(2, 3, 16, 32)},
        "qkv attn.proj fc1 fc2",
        "cls_token pos_embed embeddings.proj tokenLearner feat char_head bpe_head wp_head",
        why="three heads of three vocabularies",
    ),
    "swin": Architecture(
        of(
            "SwinForImageClassification",
            "SwinConfig",
            embed_dim=32,
            depths=[1, 2],
            num_heads=[2, 4],
            image_size=32,
            window_size=4,
            num_labels=10,
        ),
        labelled_images,
        VIT + "reduction",
        "patch_embeddings.projection relative_position_bias_table classifier",
    ),
    "dinov2": Architecture(
        of(
            "Dinov2ForImageClassification",
            "Dinov2Config",
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            image_size=32,
            patch_size=8,
            num_labels=10,
        ),
        labelled_images,
        VIT,
        "cls_token mask_token position_embeddings patch_embeddings.projection classifier",
        why="mask_token is a vector that stands for a patch, stored with two dimensions",
    ),
    "convnext": Architecture(
        of(
            "ConvNextForImageClassification",
            "ConvNextConfig",
            hidden_sizes=[16, 32, 48, 64],
            depths=[1, 1, 1, 1],
            num_labels=10,
        ),
        labelled_images,
        "pwconv1 pwconv2",
        "patch_embeddings dwconv classifier",
        convolutions="downsampling_layer",
    ),
    "resnet": Architecture(
        of(
            "ResNetForImageClassification",
            "ResNetConfig",
            embedding_size=16,
            hidden_sizes=[32, 64],
            depths=[1, 1],
            num_labels=10,
        ),
        labelled_images,
        adamw="embedder.convolution classifier",
        convolutions="convolution",
    ),
    "segformer": Architecture(
        of(
            "SegformerForSemanticSegmentation",
            "SegformerConfig",
            hidden_sizes=[16, 32, 48, 64],
            depths=[1, 1, 1, 1],
            num_attention_heads=[1, 2, 2, 4],
            decoder_hidden_size=32,
            num_labels=12,
        ),
        lambda: {"pixel_values": images(64), "labels": torch.randint(0, 12, (2, 64, 64))},
        VIT + "linear_projections.proj",
        "stages.0.patch_embeddings.proj dwconv classifier",
        convolutions="patch_embeddings.proj sequence_reduction linear_fuse",
        why="patch_embeddings of the later stages take features, the first takes pixels",
    ),
    "detr": Architecture(
        of(
            "DetrForObjectDetection",
            "DetrConfig",
            use_timm_backbone=False,
            use_pretrained_backbone=False,
            backbone=None,
            backbone_config=dict(
                model_type="resnet",
                embedding_size=16,
                hidden_sizes=[16, 32],
                depths=[1, 1],
                out_features=["stage2"],
            ),
            d_model=32,
            encoder_layers=1,
            decoder_layers=1,
            encoder_ffn_dim=64,
            decoder_ffn_dim=64,
            encoder_attention_heads=2,
            decoder_attention_heads=2,
            num_queries=5,
            num_labels=11,
        ),
        lambda: {"pixel_values": images(64)},
        VIT + "bbox_predictor.layers",
        "query_position_embeddings class_labels_classifier "
        "bbox_predictor.layers.2 input_projection",
        why="of the three layers that predict boxes only the last is a head",
    ),
    "sam": Architecture(
        of(
            "SamModel",
            "SamConfig",
            vision_config=dict(
                hidden_size=32,
                output_channels=16,
                num_hidden_layers=2,
                num_attention_heads=2,
                image_size=64,
                patch_size=8,
                window_size=4,
                global_attn_indexes=[1],
                mlp_dim=64,
                num_pos_feats=8,
            ),
            prompt_encoder_config=dict(
                hidden_size=16, image_size=64, patch_size=8, mask_input_channels=4
            ),
            mask_decoder_config=dict(
                hidden_size=16,
                mlp_dim=32,
                num_hidden_layers=1,
                num_attention_heads=2,
                iou_head_hidden_dim=16,
                attention_downsample_rate=2,
            ),
        ),
        lambda: {"pixel_values": images(64), "input_points": 64 * torch.rand(2, 1, 1, 2)},
        OUT_ATTENTION + "qkv proj lin1 lin2 proj_in layers proj_out",
        "positional_embedding pos_embed projection rel_pos_h rel_pos_w mask_embed.conv1 "
        "mask_embed.conv2 mask_embed.conv3 no_mask_embed point_embed not_a_point_embed iou_token "
        "mask_tokens upscale_conv2 neck.conv1 neck.conv2 upscale_conv1 "
        "iou_prediction_head.proj_out",
        why="a hypernetwork's proj_out gives features that pixels' are multiplied with",
    ),
}

IMAGES_AND_TEXT = {
    "clip": Architecture(
        of("CLIPModel", "CLIPConfig", text_config=TEXT, vision_config=VISION, projection_dim=48),
        pairs,
        OUT_ATTENTION + "fc1 fc2 visual_projection text_projection",
        "token_embedding position_embedding patch_embedding",
        why="the projections' outputs are compared with each other: they are last, but hidden",
    ),
    "siglip": Architecture(
        of("SiglipModel", "SiglipConfig", text_config=TEXT, vision_config=VISION),
        pairs,
        OUT_ATTENTION + "fc1 fc2 in_proj_weight",
        "token_embedding position_embedding patch_embedding text_model.head probe",
        unsure="text_model.head",
        why="text_model.head is CLIP's text_projection; vision_model.head pools by attention",
    ),
    "qwen2_vl": Architecture(
        of(
            "Qwen2VLForConditionalGeneration",
            "Qwen2VLConfig",
            text_config=dict(
                **GROUPED,
                rope_parameters=dict(
                    rope_type="default", mrope_section=[2, 3, 3], rope_theta=10000.0
                ),
            ),
            vision_config=dict(depth=2, embed_dim=64, hidden_size=64, num_heads=4, patch_size=4),
            image_token_id=999,
            video_token_id=998,
            vision_start_token_id=997,
            vision_end_token_id=996,
        ),
        lambda: text_with_image(
            4,
            pixel_values=torch.randn(32, 96),
            image_grid_thw=torch.tensor([[1, 4, 4], [1, 4, 4]]),
        ),
        ATTENTION + GATED + "attn.qkv attn.proj fc1 fc2 merger.mlp",
        "patch_embed.proj embed_tokens lm_head",
    ),
    "llava": Architecture(
        of(
            "LlavaForConditionalGeneration",
            "LlavaConfig",
            text_config=dict(model_type="llama", **LLAMA),
            vision_config=dict(model_type="clip_vision_model", **VISION),
            image_token_index=999,
            image_token_id=999,
            vision_feature_layer=-1,
        ),
        lambda: text_with_image(16, pixel_values=images()),
        ATTENTION + GATED + "out_proj fc1 fc2 linear_1 linear_2",
        "patch_embedding position_embedding embed_tokens lm_head",
    ),
    "idefics2": Architecture(
        of(
            "Idefics2ForConditionalGeneration",
            "Idefics2Config",
            text_config=dict(model_type="mistral", **LLAMA),
            vision_config=VISION,
            perceiver_config=dict(
                resampler_n_latents=4,
                resampler_depth=1,
                resampler_n_heads=4,
                resampler_head_dim=16,
                num_key_value_heads=2,
            ),
            image_token_id=999,
        ),
        lambda: text_with_image(4, pixel_values=images()[:, None]),
        ATTENTION + GATED + "out_proj fc1 fc2",
        "patch_embedding position_embedding latents embed_tokens lm_head",
        why="latents are vectors that stand for tokens",
    ),
    "blip2": Architecture(
        of(
            "Blip2ForConditionalGeneration",
            "Blip2Config",
            vision_config=VISION,
            qformer_config=dict(**TEXT, encoder_hidden_size=64),
            text_config=dict(model_type="opt", **TEXT, ffn_dim=112, word_embed_proj_dim=64),
            num_query_tokens=4,
            image_token_index=999,
        ),
        lambda: text_with_image(4, pixel_values=images()),
        OUT_ATTENTION + BERT + "qkv self_attn.projection fc1 fc2 language_projection",
        "query_tokens class_embedding position_embedding patch_embedding embed_tokens "
        "embed_positions",
    ),
}

TRANSFORMERS = {**ENCODERS, **SPEECH_AND_SERIES, **IMAGES, **IMAGES_AND_TEXT}
