"""The single-paper packages of lucidrains: attention, experts, graphs, tables."""

from __future__ import annotations

import torch
from models import Case

from library_models.building import (
    BATCH,
    CLASSES,
    VOCABULARY,
    classified,
    images,
    language,
    library,
    own_loss,
    squared,
    squares,
    tokens,
)


@library("perceiver_pytorch")
def perceiver() -> Case:
    from perceiver_pytorch import Perceiver

    model = Perceiver(
        input_channels=3,
        input_axis=2,
        num_freq_bands=4,
        max_freq=10.0,
        depth=3,
        num_latents=8,
        latent_dim=32,
        cross_heads=1,
        latent_heads=2,
        cross_dim_head=16,
        latent_dim_head=16,
        num_classes=CLASSES,
        attn_dropout=0.1,
        ff_dropout=0.1,
        weight_tie_layers=True,
        self_per_cross_attn=2,
    )
    return classified(model, torch.randn(BATCH, 8, 8, 3))


@library("perceiver_pytorch")
def perceiver_io() -> Case:
    from perceiver_pytorch import PerceiverIO

    model = PerceiverIO(
        dim=16,
        queries_dim=16,
        logits_dim=10,
        depth=3,
        num_latents=8,
        latent_dim=32,
        cross_heads=1,
        latent_heads=2,
        cross_dim_head=16,
        latent_dim_head=16,
        weight_tie_layers=False,
        decoder_ff=True,
    )
    return Case(
        model, kwargs={"data": torch.randn(BATCH, 20, 16), "queries": torch.randn(BATCH, 6, 16)}, loss_fn=squares
    )


@library("performer_pytorch")
def performer_lm() -> Case:
    from performer_pytorch import PerformerLM

    return language(
        PerformerLM(
            num_tokens=VOCABULARY,
            max_seq_len=16,
            dim=32,
            depth=3,
            heads=2,
            dim_head=16,
            causal=False,
            nb_features=16,
            feature_redraw_interval=2,
            reversible=False,
            use_scalenorm=True,
            local_attn_heads=0,
        )
    )


@library("performer_pytorch")
def performer_lm_reversible() -> Case:
    from performer_pytorch import PerformerLM

    return language(
        PerformerLM(
            num_tokens=VOCABULARY,
            max_seq_len=16,
            dim=32,
            depth=3,
            heads=2,
            dim_head=16,
            causal=False,
            nb_features=16,
            feature_redraw_interval=1000,
            reversible=True,
            ff_chunks=2,
            tie_embed=True,
        )
    )


@library("reformer_pytorch")
def reformer_lm() -> Case:
    from reformer_pytorch import ReformerLM

    return language(
        ReformerLM(
            num_tokens=VOCABULARY,
            dim=32,
            depth=3,
            max_seq_len=32,
            heads=2,
            bucket_size=4,
            n_hashes=2,
            causal=True,
            ff_chunks=2,
            lsh_dropout=0.1,
        ),
        16,
    )


@library("reformer_pytorch")
def reformer_lm_training() -> Case:
    from reformer_pytorch import ReformerLM
    from reformer_pytorch.generative_tools import TrainingWrapper

    net = ReformerLM(
        num_tokens=VOCABULARY,
        dim=32,
        depth=2,
        max_seq_len=32,
        heads=2,
        bucket_size=4,
        n_hashes=2,
        causal=True,
        weight_tie=True,
    )
    return Case(TrainingWrapper(net), kwargs={"x": tokens(17), "return_loss": True})


@library("linformer")
def linformer_lm() -> Case:
    from linformer import LinformerLM

    return language(
        LinformerLM(
            num_tokens=VOCABULARY,
            dim=32,
            seq_len=16,
            depth=3,
            heads=2,
            dim_head=16,
            k=8,
            one_kv_head=True,
            share_kv=False,
            reversible=False,
        )
    )


@library("linformer")
def linformer_lm_reversible() -> Case:
    from linformer import LinformerLM

    return language(LinformerLM(num_tokens=VOCABULARY, dim=32, seq_len=16, depth=3, heads=2, k=8, reversible=True))


@library("linear_attention_transformer")
def linear_attention_lm() -> Case:
    from linear_attention_transformer import LinearAttentionTransformerLM

    return language(
        LinearAttentionTransformerLM(
            num_tokens=VOCABULARY,
            dim=32,
            heads=2,
            depth=3,
            max_seq_len=16,
            causal=True,
            ff_dropout=0.1,
            attn_dropout=0.1,
            blindspot_size=2,
            n_local_attn_heads=1,
            local_attn_window_size=8,
            reversible=True,
            ff_chunks=2,
            ff_glu=True,
            shift_tokens=True,
        )
    )


@library("routing_transformer")
def routing_lm() -> Case:
    from routing_transformer import RoutingTransformerLM

    model = RoutingTransformerLM(
        num_tokens=VOCABULARY,
        dim=32,
        heads=4,
        depth=2,
        max_seq_len=32,
        causal=True,
        window_size=8,
        n_local_attn_heads=2,
        ff_dropout=0.1,
        kmeans_ema_decay=0.99,
    )
    return squared(model, tokens(32))


@library("sinkhorn_transformer")
def sinkhorn_lm() -> Case:
    from sinkhorn_transformer import SinkhornTransformerLM

    return language(
        SinkhornTransformerLM(
            num_tokens=VOCABULARY, dim=32, heads=2, depth=2, max_seq_len=32, bucket_size=8, causal=False, n_sortcut=2
        ),
        32,
    )


@library("nystrom_attention")
def nystromformer() -> Case:
    from nystrom_attention import Nystromformer

    return squared(
        Nystromformer(dim=32, dim_head=16, heads=2, depth=3, num_landmarks=8, pinv_iterations=4),
        torch.randn(BATCH, 16, 32),
    )


@library("compressive_transformer_pytorch")
def compressive() -> Case:
    from compressive_transformer_pytorch import CompressiveTransformer

    return squared(
        CompressiveTransformer(
            num_tokens=VOCABULARY,
            dim=32,
            depth=3,
            heads=2,
            seq_len=16,
            mem_len=16,
            cmem_len=4,
            cmem_ratio=4,
            gru_gated_residual=True,
        ),
        tokens(),
    )


@library("recurrent_memory_transformer_pytorch")
def recurrent_memory() -> Case:
    from recurrent_memory_transformer_pytorch import RecurrentMemoryTransformer

    return squared(
        RecurrentMemoryTransformer(
            num_tokens=VOCABULARY,
            num_memory_tokens=4,
            dim=32,
            depth=3,
            causal=True,
            heads=2,
            dim_head=16,
            seq_len=16,
            use_flash_attn=False,
        ),
        tokens(),
    )


@library("recurrent_memory_transformer_pytorch")
def recurrent_memory_in_segments() -> Case:
    from recurrent_memory_transformer_pytorch import RecurrentMemoryTransformer, RecurrentMemoryTransformerWrapper

    net = RecurrentMemoryTransformer(
        num_tokens=VOCABULARY,
        num_memory_tokens=4,
        dim=32,
        depth=2,
        causal=True,
        heads=2,
        dim_head=16,
        seq_len=8,
        use_flash_attn=False,
    )
    return Case(
        RecurrentMemoryTransformerWrapper(net),
        kwargs={"x": tokens(25), "return_loss": True, "memory_replay_backprop": False},
        loss_fn=lambda output, target: output[0] if isinstance(output, tuple) else output,
    )


@library("titans_pytorch")
def titans_transformer() -> Case:
    from titans_pytorch import MemoryAsContextTransformer

    return language(
        MemoryAsContextTransformer(
            num_tokens=VOCABULARY,
            dim=32,
            depth=2,
            segment_len=8,
            num_persist_mem_tokens=2,
            num_longterm_mem_tokens=4,
            heads=2,
            dim_head=16,
        ),
        16,
    )


@library("palm_pytorch")
def palm() -> Case:
    from palm_pytorch import PaLM

    return language(PaLM(num_tokens=VOCABULARY, dim=32, depth=3, heads=2, dim_head=16))


@library("st_moe_pytorch")
def sparse_experts() -> Case:
    from st_moe_pytorch import MoE, SparseMoEBlock

    return squared(
        SparseMoEBlock(
            MoE(dim=32, num_experts=4, gating_top_n=2, threshold_train=0.2, capacity_factor_train=1.25),
            add_ff_before=True,
            add_ff_after=True,
        ),
        torch.randn(BATCH, 16, 32),
    )


@library("soft_moe_pytorch")
def soft_experts() -> Case:
    from soft_moe_pytorch import SoftMoE

    return squared(
        torch.nn.Sequential(
            SoftMoE(dim=32, seq_len=16, num_experts=4),
            torch.nn.Linear(32, 32),
            SoftMoE(dim=32, seq_len=16, num_experts=4),
        ),
        torch.randn(BATCH, 16, 32),
    )


@library("mixture_of_experts")
def mixture_of_experts() -> Case:
    from mixture_of_experts import MoE

    return squared(
        MoE(dim=32, num_experts=4, hidden_dim=64, second_policy_train="random", loss_coef=1e-2),
        torch.randn(BATCH, 16, 32),
    )


@library("product_key_memory")
def product_keys() -> Case:
    from product_key_memory import PKM

    return squared(
        torch.nn.Sequential(
            torch.nn.Linear(32, 32), PKM(dim=32, heads=2, num_keys=16, topk=4, dim_head=16, input_dropout=0.1)
        ),
        torch.randn(BATCH, 16, 32),
    )


@library("g_mlp_pytorch")
def g_mlp() -> Case:
    from g_mlp_pytorch import gMLPVision

    return classified(
        gMLPVision(image_size=32, patch_size=8, num_classes=CLASSES, dim=32, depth=4, prob_survival=0.8), images()
    )


@library("mlp_mixer_pytorch")
def mlp_mixer() -> Case:
    from mlp_mixer_pytorch import MLPMixer

    return classified(
        MLPMixer(image_size=32, channels=3, patch_size=8, dim=32, depth=3, num_classes=CLASSES, dropout=0.1), images()
    )


@library("conformer")
def conformer() -> Case:
    from conformer import Conformer

    return squared(
        Conformer(dim=32, depth=3, dim_head=16, heads=2, ff_mult=2, conv_kernel_size=7, conv_dropout=0.1),
        torch.randn(BATCH, 16, 32),
    )


@library("halonet_pytorch")
def halonet() -> Case:
    from halonet_pytorch import HaloAttention

    return squared(
        torch.nn.Sequential(
            torch.nn.Conv2d(3, 16, 1),
            HaloAttention(dim=16, block_size=4, halo_size=2, dim_head=8, heads=2),
            torch.nn.BatchNorm2d(16),
        ),
        images(16),
    )


@library("lambda_networks")
def lambda_layers() -> Case:
    from lambda_networks import LambdaLayer

    return squared(
        torch.nn.Sequential(
            torch.nn.Conv2d(3, 16, 1),
            LambdaLayer(dim=16, dim_out=16, r=5, dim_k=8, heads=2, dim_u=1),
            LambdaLayer(dim=16, dim_out=16, n=8, dim_k=8, heads=2, dim_u=2),
        ),
        images(8),
    )


@library("bottleneck_transformer_pytorch")
def bottleneck_transformer() -> Case:
    from bottleneck_transformer_pytorch import BottleStack

    return squared(
        BottleStack(
            dim=16, fmap_size=16, dim_out=32, proj_factor=4, downsample=True, heads=2, dim_head=8, rel_pos_emb=True
        ),
        torch.randn(BATCH, 16, 16, 16),
    )


@library("byol_pytorch")
def byol() -> Case:
    from byol_pytorch import BYOL
    from torchvision.models import resnet18

    return own_loss(
        BYOL(
            resnet18(weights=None), image_size=32, hidden_layer="avgpool", projection_size=16, projection_hidden_size=32
        ),
        images(),
    )


@library("tab_transformer_pytorch")
def ft_transformer() -> Case:
    from tab_transformer_pytorch import FTTransformer

    model = FTTransformer(categories=(10, 5, 6), num_continuous=4, dim=16, dim_out=1, depth=3, heads=2)
    return squared(model, torch.stack([torch.randint(0, n, (BATCH,)) for n in (10, 5, 6)], 1), torch.randn(BATCH, 4))


@library("egnn_pytorch")
def egnn() -> Case:
    from egnn_pytorch import EGNN_Network

    return squared(
        EGNN_Network(
            num_tokens=21,
            num_positions=16,
            dim=16,
            depth=3,
            num_nearest_neighbors=4,
            norm_coors=True,
            coor_weights_clamp_value=2.0,
        ),
        torch.randint(0, 21, (BATCH, 16)),
        torch.randn(BATCH, 16, 3),
    )


@library("en_transformer")
def en_transformer() -> Case:
    from en_transformer import EnTransformer

    return squared(
        EnTransformer(dim=16, depth=2, dim_head=32, heads=2, edge_dim=0, neighbors=4, num_tokens=21),
        torch.randint(0, 21, (BATCH, 12)),
        torch.randn(BATCH, 12, 3),
    )
