"""Models of text with images or sound: two towers, cross attention, language models that see."""

from __future__ import annotations

from typing import Any

import torch
from models import Case

from hf_models.building import LENGTH, SMALL, VISION, WIDTH, classes, config, hf, images, tokens

TEXT = {name: SMALL[name] for name in SMALL if name != "num_key_value_heads"} | {"num_hidden_layers": 3}
EYES = VISION | {"num_hidden_layers": 3}


def _two_towers(model: Any, **more: Any) -> Case:
    ids = tokens()
    ids[:, -1] = 2
    kwargs = {"input_ids": ids, "pixel_values": images(), "return_loss": True}
    return Case(model, kwargs=kwargs | more)


@hf
def clip() -> Case:
    from transformers import CLIPConfig, CLIPModel

    return _two_towers(CLIPModel(CLIPConfig(text_config=TEXT, vision_config=EYES, projection_dim=16)))


@hf
def siglip() -> Case:
    from transformers import SiglipConfig, SiglipModel

    return _two_towers(SiglipModel(SiglipConfig(text_config=TEXT, vision_config=EYES)))


@hf
def chinese_clip() -> Case:
    from transformers import ChineseCLIPConfig, ChineseCLIPModel

    return _two_towers(ChineseCLIPModel(ChineseCLIPConfig(text_config=TEXT, vision_config=EYES, projection_dim=16)))


@hf
def altclip() -> Case:
    from transformers import AltCLIPConfig, AltCLIPModel

    text = TEXT | {"project_dim": 16, "max_position_embeddings": 66}
    return _two_towers(AltCLIPModel(AltCLIPConfig(text_config=text, vision_config=EYES, projection_dim=16)))


@hf
def blip() -> Case:
    """A captioner: image tokens through cross attention."""
    from transformers import BlipConfig, BlipForConditionalGeneration

    text = TEXT | {"encoder_hidden_size": WIDTH, "sep_token_id": 2}
    case = _two_towers(BlipForConditionalGeneration(BlipConfig(text_config=text, vision_config=EYES)))
    del case.kwargs["return_loss"]
    return Case(case.model, kwargs=case.kwargs | {"labels": case.kwargs["input_ids"]})


@hf
def clipseg() -> Case:
    from transformers import CLIPSegConfig, CLIPSegForImageSegmentation

    settings = CLIPSegConfig(
        text_config=TEXT,
        vision_config=EYES,
        projection_dim=16,
        extract_layers=[0, 1, 2],
        reduce_dim=16,
        decoder_num_attention_heads=2,
        decoder_intermediate_size=32,
        conditional_layer=0,
    )
    ids = tokens()
    ids[:, -1] = 2
    kwargs = {"input_ids": ids, "pixel_values": images(), "labels": torch.rand(8, 32, 32)}
    return Case(CLIPSegForImageSegmentation(settings), kwargs=kwargs)


@hf
def git() -> Case:
    from transformers import GitConfig, GitForCausalLM

    model = GitForCausalLM(GitConfig(**TEXT, vision_config=EYES))
    ids = tokens()
    return Case(model, kwargs={"input_ids": ids, "pixel_values": images(), "labels": ids})


@hf
def vilt() -> Case:
    from transformers import ViltConfig, ViltForQuestionAnswering

    settings = TEXT | EYES | {"num_labels": 5, "max_image_length": -1}
    kwargs = {"input_ids": tokens(), "pixel_values": images(), "labels": torch.rand(8, 5)}
    return Case(ViltForQuestionAnswering(ViltConfig(**settings)), kwargs=kwargs)


@hf
def bridgetower() -> Case:
    from transformers import BridgeTowerConfig, BridgeTowerForMaskedLM

    text = TEXT | {"max_position_embeddings": 66, "hidden_size": 64}
    vision = {"hidden_size": 64, "num_hidden_layers": 3, "image_size": 32, "patch_size": 8}
    settings = BridgeTowerConfig(
        text_config=text,
        vision_config=vision,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
    )
    ids = tokens()
    kwargs = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "pixel_values": images(),
        "pixel_mask": torch.ones(8, 32, 32, dtype=torch.long),
        "labels": ids,
    }
    return Case(BridgeTowerForMaskedLM(settings), kwargs=kwargs)


@hf
def lxmert() -> Case:
    from transformers import LxmertConfig, LxmertForQuestionAnswering

    settings = LxmertConfig(
        vocab_size=99,
        hidden_size=WIDTH,
        num_attention_heads=4,
        intermediate_size=64,
        l_layers=2,
        x_layers=2,
        r_layers=2,
        visual_feat_dim=16,
        num_qa_labels=5,
        max_position_embeddings=64,
    )
    kwargs = {
        "input_ids": tokens(),
        "visual_feats": torch.randn(8, 4, 16),
        "visual_pos": torch.rand(8, 4, 4),
        "labels": classes(),
    }
    return Case(LxmertForQuestionAnswering(settings), kwargs=kwargs)


@hf
def visual_bert() -> Case:
    from transformers import VisualBertConfig, VisualBertForQuestionAnswering

    settings = VisualBertConfig(**TEXT, visual_embedding_dim=16, num_labels=5)
    ids = tokens()
    kwargs = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "visual_embeds": torch.randn(8, 4, 16),
        "visual_attention_mask": torch.ones(8, 4),
        "labels": torch.rand(8, 5).softmax(-1),
    }
    return Case(VisualBertForQuestionAnswering(settings), kwargs=kwargs)


@hf
def layoutlmv3() -> Case:
    from transformers import LayoutLMv3Config, LayoutLMv3ForTokenClassification

    settings = LayoutLMv3Config(
        **(TEXT | {"max_position_embeddings": 66}),
        coordinate_size=4,
        shape_size=8,
        input_size=32,
        patch_size=8,
        num_labels=5,
        max_2d_position_embeddings=64,
    )
    kwargs = {
        "input_ids": tokens(),
        "bbox": torch.arange(4).view(1, 1, 4).expand(8, LENGTH, 4).contiguous(),
        "pixel_values": images(),
        "labels": torch.randint(0, 5, (8, LENGTH)),
    }
    return Case(LayoutLMv3ForTokenClassification(settings), kwargs=kwargs)


IMAGE = 98
"""The token that stands where an image patch goes."""


@hf
def llava() -> Case:
    from transformers import LlavaConfig, LlavaForConditionalGeneration

    settings = LlavaConfig(
        vision_config=config("clip_vision_model", **EYES),
        text_config=config("llama", **SMALL),
        image_token_index=IMAGE,
        vision_feature_layer=-2,
    )
    ids = tokens(8, 24, IMAGE)
    ids[:, 1:17] = IMAGE
    kwargs = {"input_ids": ids, "pixel_values": images(), "labels": ids.masked_fill(ids == IMAGE, -100)}
    return Case(LlavaForConditionalGeneration(settings), kwargs=kwargs)


@hf
def paligemma() -> Case:
    from transformers import PaliGemmaConfig, PaliGemmaForConditionalGeneration

    settings = PaliGemmaConfig(
        vision_config=config("siglip_vision_model", **EYES, projection_dim=WIDTH),
        text_config=config("gemma", **SMALL, head_dim=8),
        image_token_index=IMAGE,
        projection_dim=WIDTH,
    )
    ids = tokens(8, 24, IMAGE)
    ids[:, :16] = IMAGE
    kwargs = {
        "input_ids": ids,
        "token_type_ids": (torch.arange(24) > 18).long().expand(8, 24),
        "attention_mask": torch.ones_like(ids),
        "pixel_values": images(),
        "labels": ids.masked_fill(ids == IMAGE, -100),
    }
    return Case(PaliGemmaForConditionalGeneration(settings), kwargs=kwargs)


@hf
def idefics3() -> Case:
    from transformers import Idefics3Config, Idefics3ForConditionalGeneration

    settings = Idefics3Config(
        vision_config=config("idefics3_vision", **EYES),
        text_config=config("llama", **SMALL),
        image_token_id=IMAGE,
        scale_factor=2,
        pad_token_id=0,
    )
    ids = tokens(8, 12, IMAGE)
    ids[:, 1:5] = IMAGE
    kwargs = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "pixel_values": torch.randn(8, 1, 3, 32, 32),
        "labels": ids.masked_fill(ids == IMAGE, -100),
    }
    return Case(Idefics3ForConditionalGeneration(settings), kwargs=kwargs)


@hf
def blip_2() -> Case:
    from transformers import Blip2Config, Blip2ForConditionalGeneration

    text = config("opt", **SMALL, ffn_dim=64, word_embed_proj_dim=WIDTH)
    query = {
        "hidden_size": WIDTH,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 64,
        "encoder_hidden_size": WIDTH,
    }
    settings = Blip2Config(
        vision_config=EYES,
        qformer_config=query | {"vocab_size": 99},
        text_config=text.to_dict(),
        num_query_tokens=4,
        image_token_index=IMAGE,
    )
    ids = tokens(8, 12, IMAGE)
    ids[:, :4] = IMAGE
    kwargs = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "pixel_values": images(),
        "labels": ids.masked_fill(ids == IMAGE, -100),
    }
    return Case(Blip2ForConditionalGeneration(settings), kwargs=kwargs)


@hf
def qwen2_vl() -> Case:
    """Patches of all images in one row, as many as each image has."""
    from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

    vision = {
        "depth": 3,
        "embed_dim": 32,
        "hidden_size": WIDTH,
        "num_heads": 4,
        "mlp_ratio": 2,
        "patch_size": 4,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "in_channels": 3,
    }
    text = SMALL | {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}}
    settings = Qwen2VLConfig(
        vision_config=vision, text_config=text, image_token_id=IMAGE, vision_start_token_id=97, video_token_id=96
    )
    ids = tokens(8, 12, 96)
    ids[:, 1], ids[:, 2:6] = 97, IMAGE
    kwargs = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "pixel_values": torch.randn(8 * 16, 3 * 2 * 4 * 4).view(8, 16, -1),
        "image_grid_thw": torch.tensor([[1, 4, 4]]).expand(8, 3).contiguous(),
        "mm_token_type_ids": (ids == IMAGE).int(),
        "labels": ids.masked_fill(ids >= 96, -100),
    }
    return Case(Flattening(Qwen2VLForConditionalGeneration(settings)), kwargs=kwargs)


class Flattening(torch.nn.Module):
    """Brings patches from (batch, patches, values), in which they can be cut, into one row."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixel_values: torch.Tensor, **kwargs: Any) -> Any:
        return self.model(pixel_values=pixel_values.flatten(0, 1), **kwargs)


@hf
def vision_encoder_decoder() -> Case:
    from transformers import BertConfig, VisionEncoderDecoderConfig, VisionEncoderDecoderModel, ViTConfig

    settings = VisionEncoderDecoderConfig.from_encoder_decoder_configs(ViTConfig(**EYES), BertConfig(**TEXT))
    settings.decoder_start_token_id, settings.pad_token_id = 1, 0
    model = VisionEncoderDecoderModel(config=settings)
    return Case(model, kwargs={"pixel_values": images(), "labels": tokens(8, 7)})


@hf
def pix2struct() -> Case:
    from transformers import Pix2StructConfig, Pix2StructForConditionalGeneration

    text = {
        "vocab_size": 99,
        "hidden_size": WIDTH,
        "d_kv": 8,
        "d_ff": 64,
        "num_layers": 2,
        "num_heads": 4,
        "decoder_start_token_id": 0,
        "pad_token_id": 0,
        "eos_token_id": 1,
    }
    vision = {
        "hidden_size": WIDTH,
        "patch_embed_hidden_size": 48,
        "d_ff": 64,
        "d_kv": 8,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "seq_len": 16,
    }
    model = Pix2StructForConditionalGeneration(Pix2StructConfig(text_config=text, vision_config=vision))
    patches = torch.randn(8, 16, 50)
    patches[..., :2] = torch.randint(1, 5, (8, 16, 2)).float()
    kwargs = {"flattened_patches": patches, "attention_mask": torch.ones(8, 16), "labels": tokens(8, 7)}
    return Case(model, kwargs=kwargs)


@hf
def groupvit() -> Case:
    from transformers import GroupViTConfig, GroupViTModel

    vision = {
        "hidden_size": WIDTH,
        "depths": [1, 1, 1],
        "num_group_tokens": [4, 2, 0],
        "num_output_groups": [4, 2, 2],
        "num_attention_heads": 4,
        "intermediate_size": 64,
        "image_size": 32,
        "patch_size": 8,
    }
    return _two_towers(
        GroupViTModel(
            GroupViTConfig(text_config=TEXT, vision_config=vision, projection_dim=16, projection_intermediate_dim=32)
        )
    )


@hf
def clap() -> Case:
    from transformers import ClapConfig, ClapModel

    audio = {
        "window_size": 4,
        "num_mel_bins": 16,
        "spec_size": 32,
        "patch_size": 2,
        "patch_stride": [2, 2],
        "num_classes": 5,
        "hidden_size": 32,
        "patch_embeds_hidden_size": 8,
        "depths": [1, 1, 1],
        "num_attention_heads": [2, 2, 2],
        "enable_fusion": False,
        "projection_dim": 16,
    }
    text = TEXT | {"max_position_embeddings": 66, "projection_dim": 16}
    model = ClapModel(ClapConfig(text_config=text, audio_config=audio, projection_dim=16))
    ids = tokens()
    kwargs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "input_features": torch.randn(8, 1, 64, 16)}
    return Case(model, kwargs=kwargs | {"is_longer": torch.zeros(8, 1, dtype=torch.bool), "return_loss": True})
