from __future__ import annotations

import onnx_ir as ir
import pytest
from graph_asserts import apply, graph

from carryall.graph_opt.passes.importing.contract_names import ContractNamesPass


def decoder(past: list[str], present: list[str], ids: str = "input_ids") -> ir.Model:
    inputs = ", ".join(f"float[b, 2, p, 8] i{index}" for index in range(len(past)))
    outputs = ", ".join(f"float[b, 2, t, 8] o{index}" for index in range(len(present)))
    body = " ".join(f"o{index} = Identity(i{index})" for index in range(len(present)))
    signature = f"g (int64[b, s] {ids}, {inputs}) => (float[b, s] logits, {outputs})"
    model = graph(f"{signature} {{ logits = Cast <to = 1> ({ids}) {body} }}")
    for value, name in zip(
        [*model.graph.inputs[1:], *model.graph.outputs[1:]], [*past, *present], strict=True
    ):
        value.name = name
    return model


@pytest.mark.parametrize(
    ("past", "present"),
    [
        (["past_key_values.0.key", "past_key_values.0.value"], ["present.0.key", "present.0.value"]),
        (["in.past.layers.0.keys", "in.past.layers.0.values"], ["out.layers.0.keys", "out.layers.0.values"]),
        (["past_key_0", "past_value_0"], ["present_key_0", "present_value_0"]),
        (["key_cache.0", "value_cache.0"], ["updated_key_cache.0", "updated_value_cache.0"]),
    ],
)
def test_caches_get_the_names_of_the_contract(past: list[str], present: list[str]) -> None:
    model = decoder(past, present)
    apply(ContractNamesPass(), model)
    names = [str(value.name) for value in [*model.graph.inputs[1:], *model.graph.outputs[1:]]]
    assert names == ["past_key_values.0.key", "past_key_values.0.value", "present.0.key", "present.0.value"]


def test_sizes_written_as_symbols_become_numbers() -> None:
    model = decoder(["past_key_0"], ["present_key_0"])
    model.graph.inputs[1].shape = ir.Shape(["b", "2", "p", "8"])
    apply(ContractNamesPass(), model)
    assert list(model.graph.inputs[1].shape or ())[1::2] == [2, 8]


def test_two_caches_of_one_name_stay_and_say_so() -> None:
    model = decoder(["a.0.key", "b.0.key"], ["present_key_0"])
    assert apply(ContractNamesPass(), model) == ["two of its caches would be named past_key_values.N.key"]


def test_a_graph_of_no_decoder_keeps_its_names() -> None:
    model = decoder(["past_key_0"], ["present_key_0"], ids="x")
    apply(ContractNamesPass(), model)
    assert model.graph.inputs[1].name == "past_key_0"


def with_axes(*shapes: list[str | int]) -> ir.Model:
    """Return a decoder whose ids, mask, cache and scores have these shapes."""
    model = graph(
        "g (int64[a, b] input_ids, int64[a, b] attention_mask, float[a, b, c, d] cache) "
        "=> (float[a, b, 9] logits) { logits = Cast <to = 1> (input_ids) }"
    )
    model.graph.inputs[2].name = "past_key_values.0.key"
    for value, shape in zip([*model.graph.inputs, *model.graph.outputs], shapes, strict=True):
        value.shape = ir.Shape(shape)
    return model


def axes(model: ir.Model) -> list[list[int | str | None]]:
    shapes = [value.shape or ir.Shape([]) for value in [*model.graph.inputs, *model.graph.outputs]]
    return [[dim if isinstance(dim, int) else dim.value for dim in shape] for shape in shapes]


def test_axes_get_the_names_of_the_contract_wherever_they_stand() -> None:
    model = with_axes(["B", "S"], ["B", "T"], ["B", 2, "P", 8], ["B", "S", 9])
    apply(ContractNamesPass(), model)
    expected = [["batch", "sequence"], ["batch", "total"], ["batch", 2, "past", 8], ["batch", "sequence", 9]]
    assert axes(model) == expected
    pass_ = ContractNamesPass()
    pass_(model)
    assert pass_.fired == 0


def test_axes_that_the_contract_makes_one_get_one_name() -> None:
    model = with_axes(["B", "S"], ["C", "P + S"], ["D", 2, "P", 8], ["B", "S", 9])
    apply(ContractNamesPass(), model)
    expected = [["batch", "sequence"], ["batch", "total"], ["batch", 2, "past", 8], ["batch", "sequence", 9]]
    assert axes(model) == expected


def test_a_name_that_means_something_else_is_not_taken() -> None:
    model = with_axes(["B", "S"], ["B", "T"], ["B", 2, "P", 8], ["B", "S", "batch"])
    apply(ContractNamesPass(), model)
    assert axes(model)[0] == ["B", "sequence"]


def test_one_axis_in_two_places_keeps_one_name() -> None:
    model = with_axes(["B", "S"], ["B", "S"], ["B", 2, "P", 8], ["B", "S", 9])
    apply(ContractNamesPass(), model)
    assert axes(model)[:2] == [["batch", "sequence"], ["batch", "sequence"]]
