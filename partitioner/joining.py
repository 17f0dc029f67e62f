"""Which modules of a stage run whole, and which have to be watched."""

from __future__ import annotations

from collections.abc import Mapping

from partitioner.capture import Capture
from partitioner.profiles import Profile
from partitioner.recording import ROOT


def joined(profile: Profile | Capture, stage_of: Mapping[str, int]) -> tuple[dict[str, int], set[str]]:
    """Layers joined to whole modules where no cut goes through; and every module that has to be watched.

    A module is taken whole if it may be, all its layers are on one stage, no tensor of its inside is used on another
    stage, and no stage begins inside of it: one may begin with its first layer where no torch function runs in the
    module before that (it would run on the stage before).
    """
    ids = [layer.id for layer in profile.layers]
    first = {next(name for name in ids if stage_of[name] == stage) for stage in set(stage_of.values())} - {ids[0]}
    below: dict[str, list[str]] = {}
    for name in ids:
        parts = name.split("#")[0].split(".")
        for k in range(1, len(parts)):
            below.setdefault(".".join(parts[:k]), []).append(name)
    repeated = {name.split("#")[0] for name in ids if "#" in name}
    leaking = [
        tensor.id
        for tensor in profile.tensors
        if any(stage_of[layer] != stage_of[tensor.producer] for layer in tensor.consumers)
    ]

    def begins_inside(path: str, names: list[str]) -> bool:
        inside = [name for name in names if name in first]
        if inside != names[:1] or profile.opened:
            return bool(inside)
        parts = names[0].split(".")
        ways = [".".join(parts[:k]) for k in range(path.count(".") + 1, len(parts))]
        return any(profile.glue.get(f">{way}") for way in ways)

    def whole(path: str, names: list[str]) -> bool:
        if len({stage_of[name] for name in names}) > 1 or begins_inside(path, names):
            return False
        if path not in profile.joinable or any(name.split("#")[0] in repeated for name in names):
            return False
        return not any(name.startswith((f"{path}.", f">{path}/", f">{path}.")) for name in leaking)

    whole_modules: dict[str, int] = {}
    for path in sorted(below, key=lambda path: path.count(".")):
        if not any(path.startswith(f"{other}.") for other in whole_modules) and whole(path, below[path]):
            whole_modules[path] = stage_of[below[path][0]]
    alone = {
        name: stage
        for name, stage in stage_of.items()
        if not any(name.startswith(f"{path}.") for path in whole_modules)
    }
    return single(profile, whole_modules | alone)


def with_uncalled(profile: Profile | Capture, stage_of: Mapping[str, int]) -> dict[str, int]:
    """The split, and where modules with parameters belong that were not called when the model was captured."""
    known = {name.partition("#")[0] for name in stage_of}
    around = {path[:k] for path in known for k, letter in enumerate(path) if letter == "."} | {"", *profile.opened}
    found = dict(stage_of)
    for parameter in profile.parameters:
        path = parameter.names[0].rpartition(".")[0]
        inside = ROOT in known or any(path == name or path.startswith(f"{name}.") for name in known)
        if not inside and path not in around and len(parameter.layers) == 1:
            found[path] = stage_of[parameter.layers[0]]
    return found


def single(profile: Profile | Capture, stage_of: Mapping[str, int]) -> tuple[dict[str, int], set[str]]:
    """Layers as they are, and every module that has to be watched: theirs, all around them, and all that call them."""
    tracked = {""}
    for name in (*stage_of, *profile.opened):
        if name != ROOT:
            parts = name.split("#")[0].split(".")
            tracked |= {".".join(parts[:k]) for k in range(1, len(parts) + 1)}
    return dict(stage_of), tracked


def base_name(name: str) -> str:
    """The tensor's own name, without the moment of its last change in place."""
    return name.split("@")[0]
