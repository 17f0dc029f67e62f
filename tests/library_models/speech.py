"""torchaudio, speechbrain, demucs: recognition, synthesis and separation of sound."""

from __future__ import annotations

import torch
from models import Case

from library_models.building import (
    BATCH,
    library,
    squared,
)


@library("torchaudio")
def torchaudio_conformer() -> Case:
    from torchaudio.models import Conformer

    return squared(Conformer(16, 2, 32, 2, 7, dropout=0.1), torch.randn(BATCH, 20, 16), torch.full((BATCH,), 20))


@library("torchaudio")
def torchaudio_wav2letter() -> Case:
    from torchaudio.models import Wav2Letter

    return squared(Wav2Letter(num_classes=10, input_type="mfcc", num_features=13), torch.randn(BATCH, 13, 60))


@library("torchaudio")
def torchaudio_tacotron2() -> Case:
    from torchaudio.models import Tacotron2

    model = Tacotron2(
        n_mels=8,
        n_symbol=20,
        symbol_embedding_dim=16,
        encoder_embedding_dim=16,
        encoder_n_convolution=2,
        decoder_rnn_dim=16,
        prenet_dim=8,
        attention_rnn_dim=16,
        attention_hidden_dim=8,
        attention_location_n_filter=4,
        postnet_embedding_dim=16,
        postnet_n_convolution=2,
    )
    return squared(
        model,
        torch.randint(0, 20, (BATCH, 9)),
        torch.full((BATCH,), 9),
        torch.randn(BATCH, 8, 12),
        torch.full((BATCH,), 12),
    )


@library("torchaudio")
def torchaudio_wav2vec2() -> Case:
    from torchaudio.models import wav2vec2_model

    model = wav2vec2_model(
        "layer_norm",
        [(16, 10, 5), (16, 3, 2)],
        True,
        32,
        0.1,
        16,
        4,
        3,
        2,
        0.1,
        64,
        0.1,
        0.1,
        True,
        0.1,
        aux_num_out=10,
    )
    return squared(model, torch.randn(BATCH, 800), torch.full((BATCH,), 800))


@library("torchaudio")
def torchaudio_emformer() -> Case:
    from torchaudio.models import Emformer

    return squared(
        Emformer(16, 2, 32, 3, segment_length=4, left_context_length=4, right_context_length=2),
        torch.randn(BATCH, 14, 16),
        torch.full((BATCH,), 12),
    )


@library("torchaudio")
def torchaudio_conv_tasnet() -> Case:
    from torchaudio.models import ConvTasNet

    return squared(
        ConvTasNet(
            num_sources=2,
            enc_kernel_size=8,
            enc_num_feats=16,
            msk_kernel_size=3,
            msk_num_feats=8,
            msk_num_hidden_feats=16,
            msk_num_layers=2,
            msk_num_stacks=2,
        ),
        torch.randn(BATCH, 1, 160),
    )


@library("torchaudio")
def torchaudio_deepspeech() -> Case:
    from torchaudio.models import DeepSpeech

    return squared(DeepSpeech(n_feature=8, n_hidden=16, n_class=10, dropout=0.1), torch.randn(BATCH, 1, 12, 8))


@library("torchaudio")
def torchaudio_wavernn() -> Case:
    from torchaudio.models import WaveRNN

    model = WaveRNN(
        upsample_scales=[2, 2, 2],
        n_classes=16,
        hop_length=8,
        n_res_block=2,
        n_rnn=16,
        n_fc=16,
        kernel_size=3,
        n_freq=8,
        n_hidden=16,
        n_output=16,
    )
    return squared(model, torch.randn(BATCH, 1, 8 * 6), torch.randn(BATCH, 1, 8, 8))


@library("torchaudio")
def torchaudio_rnnt() -> Case:
    from torchaudio.models.rnnt import emformer_rnnt_model

    model = emformer_rnnt_model(
        input_dim=8,
        encoding_dim=16,
        num_symbols=11,
        segment_length=4,
        right_context_length=1,
        time_reduction_input_dim=8,
        time_reduction_stride=1,
        transformer_num_heads=2,
        transformer_ffn_dim=16,
        transformer_num_layers=2,
        transformer_dropout=0.1,
        transformer_activation="gelu",
        transformer_left_context_length=4,
        transformer_max_memory_size=0,
        transformer_weight_init_scale_strategy="depthwise",
        transformer_tanh_on_mem=True,
        symbol_embedding_dim=8,
        num_lstm_layers=1,
        lstm_layer_norm=True,
        lstm_layer_norm_epsilon=1e-3,
        lstm_dropout=0.1,
    )
    return squared(
        model,
        torch.randn(BATCH, 9, 8),
        torch.full((BATCH,), 8),
        torch.randint(0, 11, (BATCH, 5)),
        torch.full((BATCH,), 5),
    )


@library("torchaudio")
def torchaudio_hdemucs() -> Case:
    from torchaudio.models import HDemucs

    return squared(
        HDemucs(sources=["a", "b"], audio_channels=1, channels=4, nfft=64, depth=3), torch.randn(BATCH, 1, 1024)
    )


@library("speechbrain")
def speechbrain_ecapa() -> Case:
    from speechbrain.lobes.models.ECAPA_TDNN import ECAPA_TDNN

    return squared(
        ECAPA_TDNN(
            16,
            channels=[16, 16, 16, 16, 48],
            kernel_sizes=[5, 3, 3, 3, 1],
            dilations=[1, 2, 3, 4, 1],
            attention_channels=8,
            lin_neurons=8,
            res2net_scale=4,
            se_channels=8,
        ),
        torch.randn(BATCH, 20, 16),
    )


@library("speechbrain")
def speechbrain_crdnn() -> Case:
    from speechbrain.lobes.models.CRDNN import CRDNN

    return squared(
        CRDNN(
            input_shape=[None, None, 16],
            cnn_blocks=1,
            cnn_channels=(8,),
            rnn_layers=1,
            rnn_neurons=16,
            dnn_blocks=1,
            dnn_neurons=16,
        ),
        torch.randn(BATCH, 12, 16),
    )


@library("speechbrain")
def speechbrain_transformer_asr() -> Case:
    from speechbrain.lobes.models.transformer.TransformerASR import TransformerASR

    model = TransformerASR(
        input_size=16,
        tgt_vocab=11,
        d_model=16,
        nhead=2,
        num_encoder_layers=2,
        num_decoder_layers=2,
        d_ffn=32,
        encoder_module="conformer",
        attention_type="RelPosMHAXL",
        causal=False,
        kernel_size=7,
        normalize_before=True,
    )
    return squared(model, torch.randn(BATCH, 12, 16), torch.randint(1, 11, (BATCH, 5)))


@library("speechbrain")
def speechbrain_sepformer() -> Case:
    from speechbrain.lobes.models.dual_path import Dual_Path_Model, SBTransformerBlock

    block = lambda: SBTransformerBlock(num_layers=1, d_model=16, nhead=2, d_ffn=32)  # noqa: E731
    return squared(
        Dual_Path_Model(
            in_channels=16, out_channels=16, intra_model=block(), inter_model=block(), num_layers=2, K=8, num_spks=2
        ),
        torch.randn(BATCH, 16, 40),
    )


@library("demucs")
def demucs() -> Case:
    from demucs.demucs import Demucs

    return squared(
        Demucs(["a", "b"], audio_channels=1, channels=4, depth=3, resample=False, dconv_depth=1),
        torch.randn(BATCH, 1, 1000),
    )
