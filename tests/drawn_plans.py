"""Plans of many stages and layers for the views: costs drawn at random, the split by hand, the prediction simulated."""

from __future__ import annotations

import random
from functools import cache
from itertools import pairwise

from given import MiB, given_cluster, given_plan, given_profile

from partitioner.graph import CostGraph
from partitioner.plan import Plan, Stage
from partitioner.profiles import Layer, LayerCost, Parameter, Profile, Tensor
from partitioner.schedule import placement
from partitioner.simulator import predict
from partitioner.specs import ScheduleName, Training
from partitioner.split import Split


@cache
def drawn_profile(num_layers: int, num_skips: int = 0) -> Profile:
    """Blocks of four layers with unequal costs, named as in a transformer, and tensors that skip layers."""
    chance = random.Random(num_layers)
    kinds = (("ln_1", 0.2), ("attn.c_attn", 1.2), ("ln_2", 0.2), ("mlp.c_fc", 1.6))
    layers, parameters = [], []
    for k in range(num_layers):
        kind, scale = kinds[k % 4]
        name, forward_s = f"transformer.h.{k // 4}.{kind}", 1e-3 * scale * chance.uniform(0.6, 1.4)
        costs = tuple(
            LayerCost(samples=n, forward_s=n * forward_s, backward_s=2.1 * n * forward_s, saved_bytes=n * 4 * MiB)
            for n in (1, 8)
        )
        layers.append(Layer(id=name, class_name="Block", parameter_bytes=4 * MiB, gradient_bytes=4 * MiB, costs=costs))
        parameters.append(
            Parameter(
                names=(f"{name}.weight",),
                shape=(1024, 1024),
                dtype="float32",
                bytes=4 * MiB,
                trainable=True,
                layers=(name,),
            )
        )
    ends = list(pairwise(range(num_layers)))
    for _ in range(num_skips):
        first = chance.randrange(num_layers - 3)
        ends.append((first, min(num_layers - 1, first + chance.randrange(3, max(4, num_layers // 4)))))
    tensors = tuple(
        Tensor(
            id=f"tensor {k}",
            producer=layers[first].id,
            consumers=(layers[last].id,),
            shape=(8, 256),
            dtype="float32",
            bytes_at=(1024 + k, 8 * (1024 + k)),
            needs_gradient=True,
        )
        for k, (first, last) in enumerate(ends)
    )
    return given_profile().model_copy(
        update={
            "model": "Drawn",
            "layers": tuple(layers),
            "parameters": tuple(parameters),
            "tensors": tensors,
            "microbatch_sizes": (1, 8),
        }
    )


@cache
def drawn_plan(
    num_layers: int = 40,
    num_ranks: int = 4,
    num_microbatches: int = 8,
    *,
    schedule: ScheduleName = "1f1b",
    stages_a_rank: int = 1,
    num_replicas: int = 1,
    num_skips: int = 0,
    memory_bytes: int = 64 * 2**30,
) -> Plan:
    """Stages of equal numbers of layers, a sample a micro-batch; the rank of stage s in replica r is p r + place."""
    profile = drawn_profile(num_layers, num_skips)
    graph, num_stages = CostGraph(profile), num_ranks * stages_a_rank
    cuts = [round(k * num_layers / num_stages) for k in range(1, num_stages)]
    cluster = given_cluster(num_ranks * num_replicas, memory_bytes)
    training = Training(batch_size=num_microbatches * num_replicas)
    mesh = {"pp": num_ranks, "dp": num_replicas}
    ranks = [
        tuple(num_ranks * r + place for r in range(num_replicas))
        for place in placement(schedule, num_stages, num_ranks)
    ]
    prediction = predict(graph, cluster, training, Split(tuple(cuts), tuple(ranks), num_microbatches, schedule))
    stages = tuple(Stage(index=k, layers=layers, ranks=ranks[k]) for k, layers in enumerate(graph.stage_ids(cuts)))
    return given_plan(
        profile=profile,
        cluster=cluster,
        training=training,
        mesh=mesh,
        schedule=schedule,
        num_microbatches=num_microbatches,
        stages=stages,
        prediction=prediction,
        lower_bound_s=0.9 * prediction.step_s,
    )
