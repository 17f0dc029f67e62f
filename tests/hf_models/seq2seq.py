"""Encoders with decoders: text to text, and time series."""

from __future__ import annotations

from typing import Any

import torch
from models import Case

from hf_models.building import LENGTH, SMALL, WIDTH, config, entered, hf, tokens

T5: dict[str, Any] = {
    "vocab_size": 99,
    "d_model": WIDTH,
    "d_kv": 8,
    "d_ff": 64,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "num_heads": 4,
}
BART: dict[str, Any] = {
    "vocab_size": 99,
    "d_model": WIDTH,
    "encoder_layers": 3,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": 2,
}


def to_text(model: Any, length: int = LENGTH) -> Case:
    ids = tokens(8, length)
    mask = torch.ones_like(ids)
    mask[0, length - 3 :] = 0
    labels = tokens(8, 7)
    labels[1, 4:] = -100
    return Case(model, kwargs={"input_ids": ids, "attention_mask": mask, "labels": labels})


def seq2seq(name: str, kind: str | None = None, *, length: int = LENGTH, **settings: Any) -> None:
    """Enter the text to text model of a config kind."""

    def build() -> Case:
        from transformers import AutoModelForSeq2SeqLM

        return to_text(AutoModelForSeq2SeqLM.from_config(config(kind or name, **settings)), length)

    entered(name, build)


START = {"decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1}
seq2seq("t5", **T5, **START)
seq2seq("t5_gated_untied", "t5", **T5, **START, feed_forward_proj="gated-gelu", tie_word_embeddings=False)
seq2seq("mt5", **T5, **START)
seq2seq("umt5", **T5, **START)
seq2seq("longt5", **T5, **START, local_radius=4, encoder_attention_type="transient-global", global_block_size=4)
SPARSE = {"num_experts": 4, "expert_capacity": 8, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1}
seq2seq("switch_transformers", **T5, **START, **SPARSE, router_jitter_noise=0.1, output_router_logits=True)
seq2seq("bart", **BART)
seq2seq("bart_layerdrop", "bart", **BART, encoder_layerdrop=0.3, decoder_layerdrop=0.3)
seq2seq("mbart", **BART)
seq2seq("pegasus", **BART)
seq2seq("pegasus_x", **BART, block_size=4, num_global_tokens=4, length=16)
seq2seq("bigbird_pegasus", **BART, attention_type="block_sparse", block_size=4, num_random_blocks=1, length=48)
seq2seq("blenderbot", **BART)
seq2seq("blenderbot_small", "blenderbot-small", **BART)
seq2seq("m2m_100", **BART)
seq2seq("marian", **BART, decoder_vocab_size=99)
seq2seq("plbart", **BART)
seq2seq("mvp", **BART, use_prompt=True, prompt_length=4, prompt_mid_dim=16)
seq2seq(
    "led", **(BART | {"max_encoder_position_embeddings": 64, "max_decoder_position_embeddings": 64}), attention_window=4
)
seq2seq(
    "nllb_moe",
    "nllb-moe",
    **BART,
    num_experts=4,
    expert_capacity=16,
    encoder_sparse_step=2,
    decoder_sparse_step=2,
    output_router_logits=True,
    encoder_layerdrop=0.0,  # with all its sparse layers dropped, the model itself fails
    decoder_layerdrop=0.0,
)
seq2seq(
    "prophetnet",
    vocab_size=99,
    hidden_size=WIDTH,
    encoder_ffn_dim=64,
    decoder_ffn_dim=64,
    num_encoder_layers=2,
    num_decoder_layers=2,
    num_encoder_attention_heads=4,
    num_decoder_attention_heads=4,
    max_position_embeddings=64,
    ngram=2,
    num_buckets=8,
    relative_max_distance=16,
    pad_token_id=0,
    decoder_start_token_id=1,
)


@hf
def fsmt() -> Case:
    from transformers import FSMTConfig, FSMTForConditionalGeneration

    sizes = {name: BART[name] for name in BART if name != "vocab_size"}
    model = FSMTForConditionalGeneration(
        FSMTConfig(langs=["en", "de"], src_vocab_size=99, tgt_vocab_size=99, **sizes, encoder_layerdrop=0.2)
    )
    case = to_text(model)
    return Case(model, kwargs=case.kwargs | {"decoder_input_ids": tokens(8, 7)})


@hf
def encoder_decoder() -> Case:
    """Two BERTs, the second with cross attention."""
    from transformers import BertConfig, EncoderDecoderConfig, EncoderDecoderModel

    settings = EncoderDecoderConfig.from_encoder_decoder_configs(BertConfig(**SMALL), BertConfig(**SMALL))
    settings.decoder_start_token_id, settings.pad_token_id = 1, 0
    return to_text(EncoderDecoderModel(config=settings))


def series(name: str, kind: str, **settings: Any) -> None:
    """Enter a forecaster of time series: distribution heads, lagged inputs, scaling by the mean."""

    def build() -> Case:
        from transformers import AutoConfig
        from transformers.models import auto

        del auto
        import transformers

        made = AutoConfig.for_model(
            kind,
            prediction_length=4,
            context_length=8,
            input_size=1,
            lags_sequence=[1, 2, 3],
            num_time_features=2,
            num_static_categorical_features=1,
            cardinality=[5],
            embedding_dimension=[3],
            d_model=16,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=2,
            decoder_attention_heads=2,
            encoder_ffn_dim=32,
            decoder_ffn_dim=32,
            **settings,
        )
        class_name = {
            "time_series_transformer": "TimeSeriesTransformerForPrediction",
            "informer": "InformerForPrediction",
            "autoformer": "AutoformerForPrediction",
        }[kind]
        past = 8 + 3
        kwargs = {
            "past_values": torch.rand(8, past) + 1,
            "past_time_features": torch.randn(8, past, 2),
            "past_observed_mask": torch.ones(8, past),
            "static_categorical_features": torch.randint(0, 5, (8, 1)),
            "future_values": torch.rand(8, 4) + 1,
            "future_time_features": torch.randn(8, 4, 2),
        }
        return Case(getattr(transformers, class_name)(made), kwargs=kwargs)

    entered(name, build)


series("time_series_transformer", "time_series_transformer", encoder_layerdrop=0.2, decoder_layerdrop=0.2)
series("informer", "informer", sampling_factor=2)
series("autoformer", "autoformer", moving_average=3, label_length=4)


@hf
def patchtst() -> Case:
    from transformers import PatchTSTConfig, PatchTSTForPrediction

    settings = PatchTSTConfig(
        num_input_channels=2,
        context_length=16,
        patch_length=4,
        patch_stride=4,
        d_model=16,
        num_hidden_layers=3,
        num_attention_heads=2,
        ffn_dim=32,
        prediction_length=4,
    )
    kwargs = {"past_values": torch.randn(8, 16, 2), "future_values": torch.randn(8, 4, 2)}
    return Case(PatchTSTForPrediction(settings), kwargs=kwargs, trains_batch_norm=True)


@hf
def patchtsmixer() -> Case:
    from transformers import PatchTSMixerConfig, PatchTSMixerForPrediction

    settings = PatchTSMixerConfig(
        num_input_channels=2, context_length=16, patch_length=4, patch_stride=4, d_model=8, num_layers=3
    )
    settings.prediction_length = 4
    kwargs = {"past_values": torch.randn(8, 16, 2), "future_values": torch.randn(8, 4, 2)}
    return Case(PatchTSMixerForPrediction(settings), kwargs=kwargs)
