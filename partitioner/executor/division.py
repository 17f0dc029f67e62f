"""Which replica keeps which parameter of a stage up to date, where its replicas divide the optimizer's work.

Each parameter is whole, and one replica's: its gradient is summed there, the optimizer's state of it is there alone,
and its new value goes from there to the others before it is used. So any optimizer does what it does on one device,
also one that looks at a parameter as a whole.

    zero1   gradients are summed after the last backward
    zero2   gradients are summed in each micro-batch's backward, as soon as they are complete, and let go of elsewhere
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import nn

from partitioner.shares import keepers
from partitioner.specs import Shard


class Division:
    """The trainable parameters of one stage over its replicas. `level`: none has them all on every replica."""

    def __init__(self, level: Shard, parameters: Mapping[str, nn.Parameter], num_replicas: int, replica: int) -> None:
        """parameters: of the stage, in an order that is the same on all replicas."""
        self.level: Shard = level if num_replicas > 1 else "none"
        self.replica = replica
        self._keeper: dict[nn.Parameter, int] = {}
        if self.level != "none":
            trained = [parameter for parameter in parameters.values() if parameter.requires_grad]
            self._keeper = dict(zip(trained, keepers([one.numel() for one in trained], num_replicas), strict=True))

    @property
    def divides(self) -> bool:
        return self.level != "none"

    def keeper(self, parameter: nn.Parameter) -> int:
        """The replica that keeps it up to date."""
        return self._keeper[parameter]

    def is_kept(self, parameter: nn.Parameter) -> bool:
        """Whether this replica keeps it up to date; all do where nothing is divided, and what is not trained."""
        return self._keeper.get(parameter, self.replica) == self.replica

    def by_keeper(self, parameters: Iterable[nn.Parameter]) -> dict[int, list[nn.Parameter]]:
        """Replica -> which of these it keeps up to date."""
        kept: dict[int, list[nn.Parameter]] = {}
        for parameter in parameters:
            if parameter in self._keeper:
                kept.setdefault(self._keeper[parameter], []).append(parameter)
        return dict(sorted(kept.items()))
