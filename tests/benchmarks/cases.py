"""Cases made from public bug reports, each asked of this package and compared with the snippet's own values.

    python tests/benchmarks/cases.py tests/data/cases.jsonl --json cases.json

A case is a snippet that defines a model, its inputs, what a user asked for and the right values. A function for each id
says the same in this package's calls. Verdicts: holds; fails, and why; not built, and what. A verdict is nothing but
the comparison of what came out with what is right. Exit code 1: a case fails, or one that must hold is not built.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import textwrap
import warnings
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import case_life
import case_numbers
import case_planning
from casebook import Row, judge, read_cases
from rank_pool import RankPool

ANSWERS = case_planning.ANSWERS | case_numbers.ANSWERS | case_life.ANSWERS


WIDTH = 140
"""Of a verdict on the terminal; --json has all of it."""
REQUIRED = ("PL-02", "PL-05", "PL-14", "execution", "numerics")
"""Cases and kinds of cases that must hold; of others it is enough that what is missing is named."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", type=Path, help="the cases, one JSON object a line")
    parser.add_argument("--only", nargs="*", metavar="ID", help="ids to run; all of them if left out")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    rows: list[Row] = []
    ranks = RankPool(4)
    try:
        for case in read_cases(options.cases):
            if not options.only or case.id in options.only:
                rows.append(judge(case, ANSWERS.get(case.id), ranks))
                verdict = textwrap.shorten(rows[-1].verdict, WIDTH, placeholder=" ...")
                print(f"{case.id:7} {case.kind:11} {verdict}", flush=True)
    finally:
        ranks.close()
    counts = Counter(row.verdict.partition(":")[0] for row in rows)
    print(f"{len(rows)} cases: " + ", ".join(f"{number} {name}" for name, number in counts.most_common()))
    if options.json:
        options.json.write_text(json.dumps({"rows": [row._asdict() for row in rows]}, indent=1))
    if any(row.verdict.startswith("fails") for row in rows):
        raise SystemExit(1)
    return int(any(row.verdict != "holds" and (row.verdict.startswith("fails") or _is(row, REQUIRED)) for row in rows))


def _is(row: Row, names: tuple[str, ...]) -> bool:
    return row.id in names or row.kind in names


if __name__ == "__main__":
    sys.exit(main())
