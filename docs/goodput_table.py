"""The cost of failures in a long run, as `echelon plan --goodput` prints it."""

from __future__ import annotations

import io

from rich.console import Console

from echelon.planning import planner
from echelon.planning.explain.failure_cost import predict_goodput
from echelon.planning.show.goodput_text import goodput_report

LAYOUT = "dp=32,tp=8,cp=2,pp=32,schedule=zb-v,accumulate=64"


def printed() -> str:
    plan = planner.find_plans("llama-405b", "16384xh100", batch=2048, seq_len=8192, layout=LAYOUT).plans[0]
    console = Console(file=io.StringIO(), width=120, color_system=None)
    console.print(goodput_report(plan, predict_goodput(plan)))
    assert isinstance(console.file, io.StringIO)
    lines = [line.rstrip() for line in console.file.getvalue().splitlines()]
    return "\n".join(["```text", *lines, "```", ""])
