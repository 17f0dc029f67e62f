"""Models that hear: connectionist labels, transcription, classes."""

from __future__ import annotations

from typing import Any

import torch
from models import Case

from hf_models.building import WIDTH, classes, entered, hf, tokens

CONV: dict[str, Any] = {
    "hidden_size": WIDTH,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "conv_dim": [16, 16, 16],
    "conv_kernel": [10, 3, 3],
    "conv_stride": [5, 2, 2],
    "num_feat_extract_layers": 3,
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 2,
    "vocab_size": 30,
    "pad_token_id": 0,
    "ctc_zero_infinity": True,
}


def ctc(name: str, class_name: str, **settings: Any) -> None:
    """Enter a speech model over the waveform with connectionist temporal classification."""

    def build() -> Case:
        import transformers

        model_class = getattr(transformers, class_name)
        model = model_class(model_class.config_class(**(CONV | settings)))
        kwargs = {"input_values": torch.randn(8, 1000), "labels": torch.randint(1, 30, (8, 6))}
        return Case(model, kwargs=kwargs)

    entered(name, build)


MASKS = {"mask_time_prob": 0.1, "mask_time_length": 2, "mask_feature_prob": 0.1, "mask_feature_length": 4}
ctc("wav2vec2", "Wav2Vec2ForCTC", layerdrop=0.3, **MASKS)
ctc("wav2vec2_stable", "Wav2Vec2ForCTC", layerdrop=0.3, do_stable_layer_norm=True, feat_extract_norm="layer")
ctc("hubert", "HubertForCTC", layerdrop=0.3, **MASKS)
ctc("wavlm", "WavLMForCTC", layerdrop=0.3, num_buckets=8, max_bucket_distance=16, mask_feature_min_masks=0, **MASKS)
ctc("unispeech", "UniSpeechForCTC", layerdrop=0.3, **MASKS)
ctc("unispeech_sat", "UniSpeechSatForCTC", **MASKS)
ctc("data2vec_audio", "Data2VecAudioForCTC", conv_pos_kernel_size=3, **MASKS)
ctc("sew", "SEWForCTC", squeeze_factor=2, **MASKS)
ctc("sew_d", "SEWDForCTC", squeeze_factor=2, position_buckets=8, max_position_embeddings=32, **MASKS)
ctc("wav2vec2_conformer", "Wav2Vec2ConformerForCTC", conv_depthwise_kernel_size=5, **MASKS)


@hf
def wav2vec2_pretraining() -> Case:
    """Quantizes with Gumbel noise against sampled negatives."""
    from transformers import Wav2Vec2Config, Wav2Vec2ForPreTraining

    sizes = {
        "num_codevectors_per_group": 8,
        "num_codevector_groups": 2,
        "codevector_dim": 16,
        "proj_codevector_dim": 16,
    }
    model = Wav2Vec2ForPreTraining(Wav2Vec2Config(**CONV, **sizes, **MASKS, num_negatives=3))
    length = int(model._get_feat_extract_output_lengths(1000))
    mask = torch.zeros(8, length, dtype=torch.bool)
    mask[:, 2:12] = True
    negatives = torch.randint(0, length, (8, length, 3))
    offset = {"mask_time_indices": mask, "sampled_negative_indices": negatives}
    return Case(model, kwargs={"input_values": torch.randn(8, 1000)} | offset)


@hf
def wav2vec2_bert() -> Case:
    from transformers import Wav2Vec2BertConfig, Wav2Vec2BertForCTC

    sizes = {
        name: CONV[name] for name in ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
    }
    settings = Wav2Vec2BertConfig(
        **sizes,
        vocab_size=30,
        feature_projection_input_dim=16,
        conv_depthwise_kernel_size=5,
        layerdrop=0.3,
        pad_token_id=0,
    )
    kwargs = {"input_features": torch.randn(8, 40, 16), "labels": torch.randint(1, 30, (8, 6))}
    return Case(Wav2Vec2BertForCTC(settings), kwargs=kwargs)


@hf
def whisper() -> Case:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    settings = WhisperConfig(
        vocab_size=99,
        num_mel_bins=8,
        d_model=WIDTH,
        encoder_layers=3,
        decoder_layers=3,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        max_source_positions=20,
        max_target_positions=20,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        encoder_layerdrop=0.2,
        decoder_layerdrop=0.2,
    )
    kwargs = {"input_features": torch.randn(8, 8, 40), "labels": tokens(8, 7)}
    return Case(WhisperForConditionalGeneration(settings), kwargs=kwargs)


@hf
def speech_to_text() -> Case:
    from transformers import Speech2TextConfig, Speech2TextForConditionalGeneration

    settings = Speech2TextConfig(
        vocab_size=99,
        d_model=WIDTH,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        input_feat_per_channel=8,
        conv_channels=16,
        max_source_positions=40,
        max_target_positions=20,
        pad_token_id=0,
    )
    kwargs = {"input_features": torch.randn(8, 40, 8), "labels": tokens(8, 7)}
    return Case(Speech2TextForConditionalGeneration(settings), kwargs=kwargs)


@hf
def moonshine() -> Case:
    from transformers import MoonshineConfig, MoonshineForConditionalGeneration

    settings = MoonshineConfig(
        vocab_size=99,
        hidden_size=WIDTH,
        intermediate_size=64,
        encoder_num_hidden_layers=2,
        decoder_num_hidden_layers=2,
        encoder_num_attention_heads=4,
        decoder_num_attention_heads=4,
        pad_token_id=0,
    )
    kwargs = {"input_values": torch.randn(8, 2000), "labels": tokens(8, 7)}
    return Case(MoonshineForConditionalGeneration(settings), kwargs=kwargs)


@hf
def audio_spectrogram_transformer() -> Case:
    from transformers import ASTConfig, ASTForAudioClassification

    settings = ASTConfig(
        hidden_size=WIDTH,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=64,
        patch_size=4,
        frequency_stride=4,
        time_stride=4,
        max_length=32,
        num_mel_bins=16,
        num_labels=5,
    )
    return Case(
        ASTForAudioClassification(settings), kwargs={"input_values": torch.randn(8, 32, 16), "labels": classes()}
    )
