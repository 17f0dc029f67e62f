"""Classical problems on bare cost graphs, each solved to a bound: what published partitioners are compared on.

    branching    a step of synchronous training, stages in any order that the edges allow
    maxload      the busiest device with its transfers, stages in order; `scattered`: any device has any layers
    latency      one request through devices that work side by side
    replicated   PipeDream: stages of unequal numbers of replicas, on one level of links or two
    synchronous  Alpa: stages on meshes of several sizes
    servers      DAPPLE: groups of devices on servers, slow links between them
    sharded      Piper: data and tensor parallel degrees, and ways to run each layer

`loads` and `ideals` are their common data, `frontier` and `knapsack` parts of them. Planning a profile needs none of
them: `partitioner.solve` cuts layers in the order in which the model calls them, since that is how stages run it.
"""
