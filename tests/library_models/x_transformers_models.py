"""x_transformers: a decoder with each of its options, and the wrappers around one."""

from __future__ import annotations

from typing import Any

import torch
from models import Case

from library_models.building import (
    BATCH,
    CLASSES,
    VOCABULARY,
    classified,
    each,
    images,
    language,
    library,
    own_loss,
    squared,
    tokens,
)


def _decoder(**more: Any) -> Any:
    from x_transformers import Decoder, TransformerWrapper

    outer = {k: more.pop(k) for k in list(more) if k in OUTER}
    return TransformerWrapper(
        num_tokens=VOCABULARY,
        max_seq_len=32,
        attn_layers=Decoder(dim=32, depth=3, heads=2, attn_dim_head=16, **more),
        **outer,
    )


OUTER = (
    "num_memory_tokens",
    "tie_embedding",
    "use_abs_pos_emb",
    "emb_dropout",
    "emb_frac_gradient",
    "attn_z_loss_weight",
    "post_emb_norm",
    "l2norm_embed",
    "return_only_embed",
    "recycling",
    "shift_tokens",
    "memory_tokens_interspersed_every",
    "num_output_heads",
    "mixture_of_softmax",
)
XT: dict[str, dict[str, Any]] = {
    "plain": {},
    "rotary": {"rotary_pos_emb": True},
    "alibi": {"alibi_pos_bias": True},
    "t5_bias": {"rel_pos_bias": True},
    "dynamic_bias": {"dynamic_pos_bias": True, "dynamic_pos_bias_log_distance": False},
    "xpos": {"rotary_xpos": True},
    "rmsnorm_glu": {"use_rmsnorm": True, "ff_glu": True, "ff_swish": True},
    "relu_squared": {"ff_relu_squared": True},
    "memory_tokens": {"num_memory_tokens": 4},
    "persistent_memory": {"attn_num_mem_kv": 4},
    "talking_heads": {"attn_pre_talking_heads": True},
    "sparse_topk": {"attn_sparse_topk": 4},
    "qk_norm": {"attn_qk_norm": True},
    "one_kv_head": {"attn_kv_heads": 1},
    "macaron": {"macaron": True},
    "sandwich": {"sandwich_coef": 1},
    "weight_tied": {"weight_tie_layers": True},
    "gated_residual": {"gate_residual": True},
    "scale_residual": {"scale_residual": True},
    "layer_dropout": {"layer_dropout": 0.3},
    "cross_residual": {"residual_attn": True},
    "value_residual": {"add_value_residual": True},
    "hyper_connections": {"num_residual_streams": 2},
    "tied_embedding": {"tie_embedding": True},
    "flash": {"attn_flash": True},
    "flash_dropout": {"attn_flash": True, "attn_dropout": 0.1, "ff_dropout": 0.1},
    "recycling": {"recycling": True},
    "softclamp": {"attn_softclamp_logits": True},
    "mixture_of_softmax": {"mixture_of_softmax": True},
    "sandwich_norm": {"sandwich_norm": True},
    "custom": {"custom_layers": ("a", "f", "f", "a")},
    "deepnorm": {"pre_norm": False},
    "gate_values": {"attn_gate_values": True},
    "on_attn": {"attn_on_attn": True},
    "z_loss": {"attn_z_loss_weight": 1e-3},
    "frac_gradient": {"emb_frac_gradient": 0.1},
    "unet_skips": {"unet_skips": True},
    "integrated_hybrid": {"attn_data_dependent_alibi": True},
    "learned_residual_scale": {"softclamp_output": True},
    "dynamic_tanh": {"use_dynamic_tanh": True},
}
each("x_transformers", "x_transformers", list(XT), lambda name: language(_decoder(**XT[name])))


@library("x_transformers")
def x_transformers_autoregressive() -> Case:
    from x_transformers import AutoregressiveWrapper

    return own_loss(AutoregressiveWrapper(_decoder()), tokens())


@library("x_transformers")
def x_transformers_masked_autoregressive() -> Case:
    from x_transformers import AutoregressiveWrapper

    return own_loss(AutoregressiveWrapper(_decoder(), mask_prob=0.15), tokens())


@library("x_transformers")
def x_transformers_nonautoregressive() -> Case:
    from x_transformers import Encoder, NonAutoregressiveWrapper, TransformerWrapper

    net = TransformerWrapper(num_tokens=VOCABULARY + 1, max_seq_len=16, attn_layers=Encoder(dim=32, depth=3, heads=2))
    return own_loss(NonAutoregressiveWrapper(net, mask_id=VOCABULARY), tokens(16))


@library("x_transformers")
def x_transformers_xl() -> Case:
    from x_transformers import Decoder, TransformerWrapper, XLAutoregressiveWrapper

    net = TransformerWrapper(
        num_tokens=VOCABULARY,
        max_seq_len=8,
        max_mem_len=8,
        attn_layers=Decoder(dim=32, depth=3, heads=2, rel_pos_bias=True),
    )
    return own_loss(XLAutoregressiveWrapper(net), tokens(25))


@library("x_transformers")
def x_transformers_encoder_decoder() -> Case:
    from x_transformers import XTransformer

    model = XTransformer(
        dim=32,
        enc_num_tokens=VOCABULARY,
        enc_depth=2,
        enc_heads=2,
        enc_max_seq_len=16,
        dec_num_tokens=VOCABULARY,
        dec_depth=2,
        dec_heads=2,
        dec_max_seq_len=16,
        tie_token_emb=True,
    )
    return own_loss(model, src=tokens(), tgt=tokens())


@library("x_transformers")
def x_transformers_vit() -> Case:
    from x_transformers import Encoder, ViTransformerWrapper

    return classified(
        ViTransformerWrapper(
            image_size=32, patch_size=8, num_classes=CLASSES, attn_layers=Encoder(dim=32, depth=3, heads=2)
        ),
        images(),
    )


@library("x_transformers")
def x_transformers_continuous() -> Case:
    from x_transformers import ContinuousTransformerWrapper, Encoder

    model = ContinuousTransformerWrapper(
        dim_in=8, dim_out=8, max_seq_len=16, attn_layers=Encoder(dim=32, depth=3, heads=2)
    )
    return squared(model, torch.randn(BATCH, 16, 8))


@library("x_transformers")
def x_transformers_multi_input() -> Case:
    from x_transformers import Decoder, MultiInputTransformerWrapper

    model = MultiInputTransformerWrapper(
        num_tokens={"note": 20, "pitch": 32},
        max_seq_len=16,
        return_only_embed=True,
        attn_layers=Decoder(dim=32, depth=3, heads=2),
    )
    return squared(model, {"note": torch.randint(0, 20, (BATCH, 12)), "pitch": torch.randint(0, 32, (BATCH, 12))})


@library("x_transformers")
def x_transformers_belief_state() -> Case:
    from x_transformers import Decoder, TransformerWrapper
    from x_transformers.belief_state_wrapper import BeliefStateWrapper

    def net() -> Any:
        return TransformerWrapper(
            num_tokens=VOCABULARY, max_seq_len=16, attn_layers=Decoder(dim=32, depth=2, heads=2, rotary_pos_emb=True)
        )

    return own_loss(BeliefStateWrapper(forward_decoder=net(), backward_decoder=net()), tokens(8))
