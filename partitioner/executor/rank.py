"""The process of one launched rank: `python -m partitioner.executor.rank FOLDER` runs the call kept there."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any


def main() -> None:
    """Run the call and leave its result, or its error, beside it; the exit code says which."""
    folder = Path(sys.argv[1])
    _end_with_parent()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        fn, args = _read_call(folder / "call")
        _leave(folder, {"result": fn(*args)})
        code = 0
    except BaseException as error:
        text = traceback.format_exc()
        _leave(folder, {"error": error, "time": time.time(), "traceback": text})
        code = 1
    if code == 0:
        _leave_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # nothing that still waits for another rank may hold this one


def _read_call(path: Path) -> tuple[Any, tuple[Any, ...]]:
    import cloudpickle

    fn, args = cloudpickle.loads(path.read_bytes())
    return fn, args


def _end_with_parent() -> None:
    """Kill this process and all it started when the other end of stdin closes: the launching process has gone."""

    def watch() -> None:
        with contextlib.suppress(OSError):
            os.read(0, 1)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def _leave(folder: Path, answer: dict[str, Any]) -> None:
    """Write the answer whole, then rename it."""
    import cloudpickle

    try:
        content = cloudpickle.dumps(answer)
        pickle.loads(content)
    except Exception as problem:
        kept = {key: value for key, value in answer.items() if key in ("time", "traceback")}
        what = answer.get("error", problem)
        text = f"{type(what).__name__}: {what}"
        if "error" not in answer:
            kept = {"time": time.time(), "traceback": text}
            text = f"the result cannot be sent back: {text}"
        content = cloudpickle.dumps(kept | {"error": RuntimeError(text)})
    name = folder / f"answer {os.environ['RANK']}"
    partial = name.with_name(f".{name.name}")
    partial.write_bytes(content)
    partial.rename(name)


def _leave_group() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
