"""Models that predict the next token: attention of every kind, experts, state spaces, recurrences."""

from __future__ import annotations

from typing import Any

import torch
from models import Case

from hf_models.building import LENGTH, SMALL, WIDTH, config, entered, hf, language, tokens


def causal(name: str, kind: str | None = None, **settings: Any) -> None:
    """Enter the causal language model of a config kind (by default its name) with these settings over SMALL."""

    def build() -> Case:
        from transformers import AutoModelForCausalLM

        return language(AutoModelForCausalLM.from_config(config(kind or name, **(SMALL | settings))))

    entered(name, build)


# -- attention with rotary, learned or linear positions
causal("llama")
causal("llama_tied", "llama", tie_word_embeddings=True)
causal("mistral", sliding_window=4)
causal("qwen2", use_sliding_window=True, sliding_window=4, max_window_layers=2)
causal("qwen3", head_dim=8)
causal("gemma", head_dim=8)
causal("gemma2", head_dim=8, sliding_window=4, query_pre_attn_scalar=8)
causal("gemma3", "gemma3_text", head_dim=8, sliding_window=4, query_pre_attn_scalar=8)
causal("phi")
causal("phi3")
causal("olmo")
causal("olmo2")
causal("granite")
causal("cohere")
causal("cohere2", sliding_window=4)
causal("stablelm")
causal("starcoder2")
causal("glm", head_dim=8)
causal("helium", head_dim=8)
causal("smollm3")
causal("nemotron")
causal("persimmon")
causal("exaone4", sliding_window=4)
causal("diffllama")
causal("seed_oss", head_dim=8)
causal("arcee")
causal("modernbert_decoder", "modernbert-decoder")
causal("falcon", alibi=False, multi_query=True)
causal("falcon_alibi", "falcon", alibi=True, new_decoder_architecture=True, num_kv_heads=2)
causal("gpt_neox")
causal("gptj", n_embd=WIDTH, n_layer=4, n_head=4, n_positions=64, rotary_dim=4)
causal("codegen", n_embd=WIDTH, n_layer=4, n_head=4, n_positions=64, rotary_dim=4)
causal("gpt2", n_embd=WIDTH, n_layer=4, n_head=4, n_positions=64)
causal("gpt_bigcode", n_embd=WIDTH, n_layer=4, n_head=4, n_positions=64)
causal("gpt_neo", num_layers=4, num_heads=4, attention_types=[[["global", "local"], 2]], window_size=4)
causal("openai_gpt", "openai-gpt", n_embd=WIDTH, n_layer=4, n_head=4, n_positions=64)
causal("ctrl", n_embd=WIDTH, n_layer=4, n_head=4, n_positions=64, dff=64)
causal("opt", ffn_dim=64, word_embed_proj_dim=WIDTH, layerdrop=0.3)
causal("bloom", n_layer=4, n_head=4)
causal("mpt", d_model=WIDTH, n_heads=4, n_layers=4, max_seq_len=64)
causal("biogpt", layerdrop=0.3)
causal("xglm", d_model=WIDTH, ffn_dim=64, num_layers=4, attention_heads=4)

# -- mixtures of experts
causal("mixtral", num_local_experts=4, output_router_logits=True, router_aux_loss_coef=0.1)
causal("mixtral_without_router_loss", "mixtral", num_local_experts=4)
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
causal("qwen2_moe", **MOE, shared_expert_intermediate_size=16, output_router_logits=True, router_aux_loss_coef=0.1)
causal("qwen3_moe", **MOE, head_dim=8, output_router_logits=True, router_aux_loss_coef=0.1)
causal("olmoe", **MOE, output_router_logits=True, router_aux_loss_coef=0.1)
causal("granitemoe", num_local_experts=4, output_router_logits=True, router_aux_loss_coef=0.1)
causal("phimoe", num_local_experts=4, output_router_logits=True, router_aux_loss_coef=0.1)
causal("gpt_oss", num_local_experts=4, head_dim=8, sliding_window=4, output_router_logits=True)
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
causal(
    "deepseek_v2",
    **LATENT,
    num_key_value_heads=4,
    n_routed_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=16,
    n_group=1,
)
causal(
    "deepseek_v3",
    **LATENT,
    num_key_value_heads=4,
    n_routed_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=16,
    n_group=1,
    topk_group=1,
    first_k_dense_replace=1,
)
causal("jetmoe", kv_channels=8, num_local_experts=4, num_key_value_heads=2, num_attention_heads=4)
causal("ernie4_5_moe", moe_num_experts=4, moe_k=2, moe_intermediate_size=16)

# -- state spaces and recurrences
causal("mamba", state_size=8, time_step_rank=4)
causal("mamba2", num_heads=8, head_dim=8, state_size=8, n_groups=2, chunk_size=4)
causal("falcon_mamba", state_size=8, time_step_rank=4)
causal("rwkv", attention_hidden_size=WIDTH)
causal("jamba", num_experts=2, expert_layer_period=2, attn_layer_period=2, attn_layer_offset=1, use_mamba_kernels=False)
causal(
    "bamba",
    mamba_n_heads=8,
    mamba_d_head=8,
    mamba_d_state=8,
    mamba_n_groups=1,
    mamba_chunk_size=4,
    attn_layer_indices=[1, 3],
)
causal("recurrent_gemma", lru_width=WIDTH, attention_window_size=8, num_key_value_heads=1)
causal("lfm2", full_attn_idxs=[1, 3])
causal(
    "qwen3_next",
    **MOE,
    head_dim=8,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=8,
    linear_value_head_dim=8,
    shared_expert_intermediate_size=16,
    decoder_sparse_step=2,
)


@hf
def gpt2_hidden_states_and_attentions() -> Case:
    """The model's output holds what every layer made, and the loss reads some of it."""
    from transformers import AutoModelForCausalLM

    settings = SMALL | {"n_embd": WIDTH, "n_layer": 4, "n_head": 4, "n_positions": 64}
    model = AutoModelForCausalLM.from_config(config("gpt2", **settings), attn_implementation="eager")
    case = language(model, output_hidden_states=True, output_attentions=True)
    case.target = case.kwargs["labels"]

    def loss_fn(output: Any, target: torch.Tensor) -> torch.Tensor:
        return output.loss + sum(h.pow(2).mean() for h in output.hidden_states) + output.attentions[1].pow(2).mean()

    case.loss_fn = loss_fn
    return case


@hf
def gpt2_double_heads() -> Case:
    from transformers import GPT2Config, GPT2DoubleHeadsModel

    model = GPT2DoubleHeadsModel(GPT2Config(**(SMALL | {"n_embd": WIDTH, "n_layer": 4, "n_head": 4, "num_labels": 1})))
    ids = tokens(8, 24).view(8, 2, 12)
    last = torch.full((8, 2), 11)
    labels = torch.randint(0, 2, (8,))
    return Case(model, kwargs={"input_ids": ids, "mc_token_ids": last, "labels": ids, "mc_labels": labels})


@hf
def gpt2_checkpointed() -> Case:
    """With Hugging Face's own gradient checkpointing."""
    from transformers import AutoModelForCausalLM

    settings = SMALL | {"n_embd": WIDTH, "n_layer": 4, "n_head": 4, "n_positions": 64}
    model = AutoModelForCausalLM.from_config(config("gpt2", **settings))
    model.gradient_checkpointing_enable()
    return language(model)


@hf
def xlnet() -> Case:
    from transformers import XLNetConfig, XLNetLMHeadModel

    model = XLNetLMHeadModel(XLNetConfig(vocab_size=99, d_model=WIDTH, n_layer=4, n_head=4, d_inner=64))
    case = language(model)
    del case.kwargs["attention_mask"]
    return case


@hf
def reformer() -> Case:
    """Reversible layers with hashed attention, axial positions."""
    from transformers import ReformerConfig, ReformerModelWithLMHead

    settings = {
        "attn_layers": ["lsh", "local", "lsh", "local"],
        "hidden_size": WIDTH,
        "num_attention_heads": 4,
        "attention_head_size": 8,
        "feed_forward_size": 64,
        "vocab_size": 99,
        "axial_pos_shape": [4, 8],
        "axial_pos_embds_dim": [8, 24],
        "local_attn_chunk_length": 8,
        "lsh_attn_chunk_length": 8,
        "num_buckets": 4,
        "num_hashes": 2,
        "hash_seed": 1,
        "is_decoder": True,
        "use_cache": False,
        "max_position_embeddings": 32,
        "hidden_dropout_prob": 0.0,
        "local_attention_probs_dropout_prob": 0.0,
    }
    ids = tokens(8, 32)
    return Case(ReformerModelWithLMHead(ReformerConfig(**settings)), kwargs={"input_ids": ids, "labels": ids})


@hf
def imagegpt() -> Case:
    from transformers import ImageGPTConfig, ImageGPTForCausalImageModeling

    settings = ImageGPTConfig(vocab_size=100, n_positions=64, n_embd=WIDTH, n_layer=4, n_head=4)
    ids = tokens()
    return Case(ImageGPTForCausalImageModeling(settings), kwargs={"input_ids": ids, "labels": ids})


@hf
def decision_transformer() -> Case:
    from transformers import DecisionTransformerConfig, DecisionTransformerModel

    model = DecisionTransformerModel(
        DecisionTransformerConfig(state_dim=5, act_dim=3, hidden_size=WIDTH, n_layer=4, n_head=4, max_ep_len=20)
    )
    steps = torch.arange(LENGTH).expand(8, LENGTH)
    kwargs = {
        "states": torch.randn(8, LENGTH, 5),
        "actions": torch.randn(8, LENGTH, 3),
        "rewards": torch.randn(8, LENGTH, 1),
        "returns_to_go": torch.randn(8, LENGTH, 1),
        "timesteps": steps,
        "attention_mask": torch.ones(8, LENGTH),
        "return_dict": True,
    }

    def loss_fn(output: Any, target: torch.Tensor) -> torch.Tensor:
        return (output.action_preds - target).pow(2).mean()

    return Case(model, kwargs=kwargs, target=torch.randn(8, LENGTH, 3), loss_fn=loss_fn)
