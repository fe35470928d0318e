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


def test_what_only_comes_out_again_goes() -> None:
    body = "logits = Gather(table, input_ids) inner = Identity(window) out = Identity(inner)"
    assert interface(body, "logits out") == (["input_ids"], ["logits"])


def test_what_is_read_stays() -> None:
    body = "rows = Gather(table, input_ids) w = Cast <to = 1> (window) logits = Add(rows, w)"
    body += " out = Identity(window)"
    assert interface(body, "logits out") == (["input_ids", "window"], ["logits", "out"])


def test_what_is_not_used_at_all_is_not_ours() -> None:
    assert interface("logits = Gather(table, input_ids)") == (["input_ids", "window"], ["logits"])
