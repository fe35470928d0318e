from __future__ import annotations

from graph_asserts import apply, graph

from carryall.graph_opt.passes.cleanup.remove_passthrough_inputs import RemovePassthroughInputsPass

TABLE = [[0.0] * 4] * 9


def interface(body: str, outputs: str = "logits") -> tuple[list[str | None], list[str | None]]:
    results = ", ".join(
        f"float[b, s, 4] {name}" if name == "logits" else f"int64 {name}" for name in outputs.split()
    )
    model = graph(f"g (int64[b, s] input_ids, int64 window) => ({results}) {{ {body} }}", table=TABLE)
    assert apply(RemovePassthroughInputsPass(), model) == []
    return [value.name for value in model.graph.inputs], [value.name for value in model.graph.outputs]


def test_pass_through_inputs_are_removed() -> None:
    body = "logits = Gather(table, input_ids) inner = Identity(window) out = Identity(inner)"
    assert interface(body, "logits out") == (["input_ids"], ["logits"])


def test_inputs_that_are_read_stay() -> None:
    body = "rows = Gather(table, input_ids) w = Cast <to = 1> (window) logits = Add(rows, w)"
    body += " out = Identity(window)"
    assert interface(body, "logits out") == (["input_ids", "window"], ["logits", "out"])


def test_unused_inputs_stay() -> None:
    assert interface("logits = Gather(table, input_ids)") == (["input_ids", "window"], ["logits"])
