"""Read single tensors out of weights, whatever holds them, so that a rank never loads more than its own."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from partitioner.errors import ArgumentError, SetupError


class Weights:
    """A state dict, a .safetensors file, a folder of them, a distributed checkpoint or a file of torch.save."""

    def __init__(self, source: Mapping[str, torch.Tensor] | str | os.PathLike[str]) -> None:
        self._readers: dict[str, Callable[[], torch.Tensor]] = {}
        if isinstance(source, Mapping):
            self._add_mapping(source)
            return
        path = Path(source)
        if not path.exists():
            raise ArgumentError(f"there are no weights at {path}")
        if path.is_dir():
            self._add_folder(path)
        elif path.suffix == ".safetensors":
            self._add_safetensors(path)
        else:
            try:
                loaded = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
            except (RuntimeError, pickle.UnpicklingError, EOFError) as error:
                raise ArgumentError(f"{path} is neither .safetensors nor a state dict of torch.save: {error}") from None
            if not isinstance(loaded, Mapping):
                raise ArgumentError(f"{path} holds a {type(loaded).__name__}, not a state dict")
            self._add_mapping(loaded)

    def find(self, names: Sequence[str]) -> str | None:
        """The first of a tensor's names that the weights know."""
        return next((name for name in names if name in self._readers), None)

    def read(self, names: Sequence[str], like: torch.Tensor) -> torch.Tensor | None:
        """A copy of the tensor in the dtype of `like`; None where it is missing. Another shape is an ArgumentError."""
        name = self.find(names)
        if name is None:
            return None
        value = self._readers[name]()
        if value.shape != like.shape:
            raise ArgumentError(
                f"{name} is {tuple(value.shape)} in the weights and {tuple(like.shape)} in the model: "
                "these are weights of another model"
            )
        return value.detach().to(like.dtype, copy=True)

    def _add_mapping(self, source: Mapping[str, Any]) -> None:
        for name, value in source.items():
            if isinstance(value, torch.Tensor):
                self._readers[name] = lambda value=value: value  # type: ignore[misc]

    def _add_folder(self, path: Path) -> None:
        files = sorted(path.glob("*.safetensors"))
        if files:
            for file in files:
                self._add_safetensors(file)
        elif (path / ".metadata").exists():
            self._add_checkpoint(path)
        else:
            raise ArgumentError(f"the folder {path} holds neither .safetensors files nor a distributed checkpoint")

    def _add_safetensors(self, path: Path) -> None:
        try:
            from safetensors import safe_open
        except ImportError:
            raise SetupError(f"reading {path.name} needs the package safetensors: pip install safetensors") from None

        def read(name: str) -> torch.Tensor:
            with safe_open(path, "pt") as file:
                tensor: torch.Tensor = file.get_tensor(name)
                return tensor

        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118
                self._readers[name] = lambda name=name: read(name)  # type: ignore[misc]

    def _add_checkpoint(self, path: Path) -> None:
        """In a checkpoint of ours, which has entries under "training.", the model's are under "model."."""
        from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
        from torch.distributed.checkpoint.filesystem import FileSystemReader
        from torch.distributed.checkpoint.metadata import TensorStorageMetadata

        metadata = FileSystemReader(path).read_metadata()
        entries = metadata.state_dict_metadata
        prefix = "model." if any(key.startswith("training.") for key in entries) else ""

        def read(key: str, entry: TensorStorageMetadata) -> torch.Tensor:
            tensor = torch.empty(entry.size, dtype=entry.properties.dtype)
            planner, reader = DefaultLoadPlanner(), FileSystemReader(path)
            planner.set_up_planner({key: tensor}, metadata, is_coordinator=True)
            reader.set_up_storage_reader(metadata, is_coordinator=True)
            reader.read_data(reader.prepare_local_plan(planner.create_local_plan()), planner).wait()
            return tensor

        for key, entry in entries.items():
            if isinstance(entry, TensorStorageMetadata) and key.startswith(prefix):
                self._readers[key.removeprefix(prefix)] = lambda key=key, entry=entry: read(key, entry)  # type: ignore[misc]
