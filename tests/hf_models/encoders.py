"""Models that read a whole text: fill in masked tokens, answer, label."""

from __future__ import annotations

from typing import Any

import torch
from models import Case

from hf_models.building import LENGTH, SMALL, WIDTH, classes, config, entered, hf, language, tokens


def masked(name: str, kind: str | None = None, **settings: Any) -> None:
    """Enter the masked language model of a config kind."""

    def build() -> Case:
        from transformers import AutoModelForMaskedLM

        return language(AutoModelForMaskedLM.from_config(config(kind or name, **(SMALL | settings))))

    entered(name, build)


masked("bert")
masked("roberta", max_position_embeddings=66)
masked("roberta_prelayernorm", "roberta-prelayernorm", max_position_embeddings=66)
masked("camembert", max_position_embeddings=66)
masked("xlm_roberta", "xlm-roberta", max_position_embeddings=66)
masked("xmod", max_position_embeddings=66, languages=["en_XX", "de_DE"], default_language="en_XX")
masked("data2vec_text", "data2vec-text", max_position_embeddings=66)
masked("albert", embedding_size=16)
masked("albert_in_groups", "albert", embedding_size=16, num_hidden_groups=2, inner_group_num=2)
masked("electra", embedding_size=16)
masked("distilbert", dim=WIDTH, n_layers=4, n_heads=4, hidden_dim=64)
masked("deberta", relative_attention=True, pos_att_type=["c2p", "p2c"])
masked(
    "deberta_v2",
    "deberta-v2",
    relative_attention=True,
    pos_att_type=["c2p", "p2c"],
    position_buckets=8,
    norm_rel_ebd="layer_norm",
    share_att_key=True,
    conv_kernel_size=3,
)
masked("mpnet", max_position_embeddings=66)
masked("mobilebert", embedding_size=16, intra_bottleneck_size=16, true_hidden_size=16)
masked("squeezebert", embedding_size=WIDTH)
masked("convbert", embedding_size=16, head_ratio=2, conv_kernel_size=3)
masked("fnet")
masked("ibert", max_position_embeddings=66)
masked("megatron_bert", "megatron-bert")
masked("nystromformer", num_landmarks=LENGTH, segment_means_seq_len=LENGTH)
masked("rembert", input_embedding_size=16, output_embedding_size=16)
masked("roformer", embedding_size=16)
masked("yoso", max_position_embeddings=66, use_expectation=True)
masked("ernie")
masked("layoutlm")
masked("xlm", emb_dim=WIDTH, n_layers=4, n_heads=4)
masked("flaubert", emb_dim=WIDTH, n_layers=4, n_heads=4, layerdrop=0.3)
masked("modernbert", global_attn_every_n_layers=2, local_attention=4)
masked("eurobert")
masked("esm", max_position_embeddings=66, mask_token_id=3, token_dropout=True, emb_layer_norm_before=True)
masked("tapas")


@hf
def longformer() -> Case:
    from transformers import AutoModelForMaskedLM

    model = AutoModelForMaskedLM.from_config(
        config("longformer", **(SMALL | {"attention_window": 4, "max_position_embeddings": 66}))
    )
    case = language(model)
    case.kwargs["global_attention_mask"] = torch.zeros(8, LENGTH, dtype=torch.long).index_fill_(1, torch.tensor([0]), 1)
    return case


@hf
def big_bird() -> Case:
    from transformers import BigBirdConfig, BigBirdForMaskedLM

    settings = SMALL | {"attention_type": "block_sparse", "block_size": 4, "num_random_blocks": 1}
    ids = tokens(8, 48)
    return Case(BigBirdForMaskedLM(BigBirdConfig(**settings)), kwargs={"input_ids": ids, "labels": ids})


@hf
def perceiver() -> Case:
    """Latents attend to the text; the decoder reads the embedding's weights."""
    from transformers import PerceiverConfig, PerceiverForMaskedLM

    settings = PerceiverConfig(
        num_latents=8,
        d_latents=WIDTH,
        d_model=16,
        num_blocks=2,
        num_self_attends_per_block=2,
        num_self_attention_heads=4,
        num_cross_attention_heads=4,
        qk_channels=16,
        v_channels=WIDTH,
        vocab_size=99,
        max_position_embeddings=LENGTH,
    )
    ids = tokens()
    kwargs = {"inputs": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    return Case(PerceiverForMaskedLM(settings), kwargs=kwargs)


@hf
def bert_for_sequences() -> Case:
    from transformers import AutoModelForSequenceClassification

    case = language(AutoModelForSequenceClassification.from_config(config("bert", **SMALL, num_labels=5)))
    return Case(case.model, kwargs=case.kwargs | {"labels": classes()})


@hf
def bert_for_answers() -> Case:
    from transformers import AutoModelForQuestionAnswering

    case = language(AutoModelForQuestionAnswering.from_config(config("bert", **SMALL)))
    del case.kwargs["labels"]
    spans = {name: classes(LENGTH - 3) for name in ("start_positions", "end_positions")}  # no padding there
    return Case(case.model, kwargs=case.kwargs | spans)


@hf
def funnel() -> Case:
    """Pools between blocks; the decoder adds the first block's result again."""
    from transformers import FunnelConfig, FunnelForMaskedLM

    sizes = {"d_model": WIDTH, "n_head": 4, "d_head": 8, "d_inner": 64, "num_decoder_layers": 2}
    return language(FunnelForMaskedLM(FunnelConfig(vocab_size=99, block_sizes=[1, 2, 1], **sizes)))


@hf
def nystromformer_with_landmarks() -> Case:
    from transformers import NystromformerConfig, NystromformerForMaskedLM

    settings = NystromformerConfig(**SMALL, num_landmarks=4, segment_means_seq_len=LENGTH)
    ids = tokens()
    return Case(NystromformerForMaskedLM(settings), kwargs={"input_ids": ids, "labels": ids})


@hf
def canine() -> Case:
    from transformers import CanineConfig, CanineForSequenceClassification

    settings = SMALL | {"downsampling_rate": 4, "local_transformer_stride": 8, "num_hash_buckets": 50, "num_labels": 5}
    settings |= {"type_vocab_size": 4, "num_hash_functions": 2}
    model = CanineForSequenceClassification(CanineConfig(**settings))
    ids = tokens(8, 32)
    return Case(model, kwargs={"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": classes()})


@hf
def splinter() -> Case:
    from transformers import SplinterConfig, SplinterForQuestionAnswering

    case = language(SplinterForQuestionAnswering(SplinterConfig(**SMALL)))
    del case.kwargs["labels"], case.kwargs["attention_mask"]  # with a mask it is NaN in float64
    spans = {name: classes(LENGTH) for name in ("start_positions", "end_positions")}
    return Case(case.model, kwargs=case.kwargs | spans)


@hf
def lilt() -> Case:
    from transformers import LiltConfig, LiltForTokenClassification

    model = LiltForTokenClassification(
        LiltConfig(
            **(
                SMALL
                | {"channel_shrink_ratio": 2, "hidden_size": 48, "max_2d_position_embeddings": 64, "num_labels": 5}
            )
        )
    )
    ids = tokens()
    kwargs = {
        "input_ids": ids,
        "bbox": torch.randint(0, 50, (8, LENGTH, 4)).sort(-1).values,
        "labels": torch.randint(0, 5, ids.shape),
    }
    return Case(model, kwargs=kwargs)


@hf
def luke() -> Case:
    from transformers import LukeConfig, LukeForMaskedLM

    settings = SMALL | {"entity_vocab_size": 20, "entity_emb_size": 16, "max_position_embeddings": 66}
    case = language(LukeForMaskedLM(LukeConfig(**settings)))
    entities = torch.randint(3, 20, (8, 3))
    positions = torch.arange(6).view(1, 3, 2).expand(8, 3, 2).contiguous()
    more = {"entity_ids": entities, "entity_position_ids": positions, "entity_labels": entities.clone()}
    return Case(case.model, kwargs=case.kwargs | more)
