"""The table of a solution: every second and byte of its cost in one row."""

from __future__ import annotations

import pytest
from sharding_op_lists import H100S, mlp_problem, transformer_problem

from echelon.layout.collective import wire_bytes
from echelon.parallel.auto_sharding.solve_sharding import solve
from echelon.parallel.auto_sharding.split_table import layer_pattern, split_table


@pytest.mark.parametrize("tokens", [False, True])
@pytest.mark.parametrize("share", [1.0, 0.85])
def test_rows_add_up_to_the_cost(tokens: bool, share: float) -> None:
    problem = transformer_problem(layers=8, gated=True, tied=True, tokens=tokens)
    solution = solve(problem, H100S, memory_cap=solve(problem, H100S).memory_bytes * share)
    assert bool(solution.recomputed_layers) == (share < 1)
    table = split_table(problem, solution, H100S)
    assert sum(row.seconds + row.collective_seconds for row in table.rows) == pytest.approx(solution.cost.total)
    items = [item for row in table.rows for item in row.collectives]
    sent = sum(item.count * wire_bytes(item.op, item.bytes, H100S.size) for item in items)
    calls = sum(item.count for item in items if item.purpose != "partial gradients")
    seconds = sent / H100S.bandwidth + calls * H100S.latency
    assert seconds == pytest.approx(solution.cost.collectives)
    assert sum(row.layers for row in table.rows) == sum(bool(op.inputs) for op in problem.ops)


def test_a_conversion_stands_at_its_first_reader() -> None:
    problem = transformer_problem(layers=4, gated=True, tied=False)
    rows = {row.name: row for row in split_table(problem, solve(problem, H100S), H100S).rows}
    q, k = rows["blocks.*.attn.q"], rows["blocks.*.attn.k"]
    assert (q.inputs, q.params, q.output, q.layers) == (("R->B",), ("blocks.*.attn.q.weight S0",), "S2", 4)
    assert [(item.op, item.count, item.bytes) for item in q.collectives] == [
        ("all_reduce", 4 * problem.microbatches, 4096 * 4096 * 2)
    ]
    assert k.inputs == ("R->B",)
    assert k.collectives == ()
    # The first layer reads the embedding, the others the layer before them.
    assert rows["blocks.*.norm1"].inputs == ("P/R->R",)


def test_what_stays_whole_is_named_with_its_time() -> None:
    problem = transformer_problem(layers=4, gated=True, tied=False)
    table = split_table(problem, solve(problem, H100S), H100S)
    assert {row.op for row in table.whole_rows} == {"rms_norm", "add"}
    assert table.whole_seconds == pytest.approx(sum(row.seconds for row in table.whole_rows) * 3 / 4)
    text = table.as_text()
    assert f"{table.whole_seconds * 1e3:.2f} ms of the step" in text
    assert "stays whole: blocks.*.add1, blocks.*.add2, blocks.*.norm1, blocks.*.norm2, norm; " in text


def test_the_text_of_an_mlp() -> None:
    problem = mlp_problem()
    lines = split_table(problem, solve(problem, H100S), H100S).as_text().splitlines()
    assert [line.rstrip() for line in lines] == [
        "operator  op      layers  inputs  parameters          output  share  ms    collectives of a step",
        "mlp.up    linear  1       R->B    mlp.up.weight S0    S2      0.25   6.60  8 x all-reduce 32 MiB (1.42 ms)",
        "mlp.gelu  gelu    1       S2                          S2      0.25   0.64",
        "mlp.down  linear  1       S2      mlp.down.weight S1  P       0.25   6.60",
        "output    output  1       P->R                        R       1      0.64  8 x all-reduce 32 MiB (1.42 ms)",
        "",
        "step: 17.33 ms on each of 4 ranks = compute 13.19 + memory traffic 1.29 + collectives 2.84",
        "memory: 0.59 GiB on each rank",
        "stays whole: nothing that takes time",
    ]


def test_recomputed_layers_and_the_note_are_printed() -> None:
    problem = transformer_problem(layers=2, gated=True, tied=False)
    cap = solve(problem, H100S).memory_bytes * 0.9
    text = split_table(problem, solve(problem, H100S, memory_cap=cap, time_limit_s=0.0), H100S).as_text()
    assert "; 2 of 2 equal layers are recomputed" in text
    assert text.rstrip().splitlines()[-1].startswith("not proven optimal: the integer program ran out of time")


def test_layer_pattern() -> None:
    assert layer_pattern(["norm"]) == "norm"
    assert layer_pattern(["h.0.attn.c_fc2", "h.1.attn.c_fc2"]) == "h.*.attn.c_fc2"
    assert layer_pattern(["blocks.0.a", "other"]) == "blocks.0.a"
