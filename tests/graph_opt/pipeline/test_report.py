"""Reports as text, JSON and HTML page."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from typing import Any

import numpy as np
import pytest
from graph_asserts import graph

from carryall.graph_opt.graph.weight_errors import float_weights
from carryall.graph_opt.passes.base import Refusal
from carryall.graph_opt.pipeline.pipeline import run
from carryall.graph_opt.pipeline.report import PassReport, PipelineReport
from carryall.graph_opt.pipeline.report_page import to_html
from carryall.graph_opt.quantize.algorithms.blockwise import BlockFormat
from carryall.graph_opt.quantize.formats.weight_only import WeightOnlyQuantizationPass

EMPTY_TAGS = {"meta", "br", "rect"}


def report(refusals: list[Refusal], **facts: Any) -> PipelineReport:
    one = PassReport(
        name="Fuse",
        seconds=0.25,
        modified=True,
        fired=2,
        nodes=3,
        added={"Fused": 1},
        removed={"Add": 2},
        refusals=refusals,
    )
    return PipelineReport(before={"Add": 4}, after={"Add": 2, "Fused": 1}, passes=[one], facts=facts)


def layers(reason: str) -> list[Refusal]:
    return [Refusal(f"/model/layers.{layer}/Add_{layer + 7}", reason) for layer in range(28)]


def test_all_layers_are_one_line_with_a_count() -> None:
    text = report([*layers("it adds"), Refusal("head", "it is tied")]).to_text(explain=True, width=200)
    assert ("Fuse refused /model/layers.N/Add_N (28 nodes, first: /model/layers.0/Add_7): it adds") in text
    assert "Fuse refused head: it is tied" in text
    assert text.count("Fuse refused ") == 2


def test_reasons_that_differ_stay_apart_and_values_are_not_names() -> None:
    refusals = [
        Refusal("a.0", "head size 8"),
        Refusal("a.1", "head size 16"),
        Refusal("a.2", "w.2 is used twice"),
    ]
    refusals.append(Refusal("a.3", "w.3 is used twice"))
    found = report(refusals).near_misses
    assert [(miss.count, miss.nodes, miss.reason) for miss in found] == [
        (1, "a.0", "head size 8"),
        (1, "a.1", "head size 16"),
        (2, "a.N", "w.N is used twice"),
    ]


def test_idle_passes_share_a_line_and_are_named_when_explained() -> None:
    idle = PassReport(
        name="Idle", seconds=0.5, modified=False, fired=0, nodes=3, added={}, removed={}, refusals=[]
    )
    found = report([])
    found.passes += [idle, idle]
    assert "2 passes changed nothing" in found.to_text()
    assert "Idle" not in found.to_text()
    assert found.to_text(explain=True).count("Idle") == 1


def test_refusals_are_counted_also_if_there_are_none() -> None:
    assert "2 near misses: --explain" in report([*layers("no"), Refusal("head", "no")]).to_text()
    assert "near miss" not in report([]).to_text()
    assert "No near misses" in report([]).to_text(explain=True)


def test_a_graph_that_is_no_decoder_is_explained_in_text_and_page() -> None:
    found = report([])
    assert "decoder" not in found.to_text(explain=True)
    found.not_decoder = "AddCache refused attn: it is <not> causal"
    line = f"Optimized as any model, not as a decoder: {found.not_decoder}."
    assert line in found.to_text(explain=True).splitlines()
    assert json.loads(found.to_json())["not_decoder"] == found.not_decoder
    assert line.replace("<not>", "&lt;not&gt;") in to_html(found)


def test_json_has_the_facts_of_the_page() -> None:
    content = json.loads(report(layers("no"), source="in", target="cpu").to_json())
    assert content["near_misses"] == [
        {
            "pass_name": "Fuse",
            "nodes": "/model/layers.N/Add_N",
            "reason": "no",
            "count": 28,
            "first": "/model/layers.0/Add_7",
        }
    ]
    assert content["facts"] == {"source": "in", "target": "cpu"}
    assert content["seconds"] == 0.25


class Page(HTMLParser):
    """HTML parser that checks nesting and collects the text and all external references."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.stack: list[str] = []
        self.text = ""
        self.loaded: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        links = [(name, str(value)) for name, value in attrs if name in {"src", "href"}]
        self.loaded += [f"{tag} {name}" for name, value in links if not value.startswith("#")]
        self.loaded += [tag] if tag in {"script", "link", "img", "iframe"} else []
        if tag not in EMPTY_TAGS:
            self.stack.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in EMPTY_TAGS:
            assert self.stack.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def quantized_report() -> PipelineReport:
    rng = np.random.default_rng(0)
    text = """g (float[N, 64] x) => (float[N, 64] y) { a = MatMul(x, w.0) y = MatMul(a, w.1) }"""
    weights = {f"w.{layer}": rng.standard_normal((64, 64), np.float32) for layer in range(2)}
    model = graph(text.replace("w.0", "w0").replace("w.1", "w1"), w0=weights["w.0"], w1=weights["w.1"])
    quantizer = WeightOnlyQuantizationPass(BlockFormat(bits=4, block_size=32))
    _, found = run(model, [quantizer], originals=float_weights(model))
    return found


def test_the_error_of_each_quantized_weight_is_measured() -> None:
    found = quantized_report()
    assert set(found.weight_errors) == {"w0", "w1"}
    assert all(0.05 < error < 0.15 for error in found.weight_errors.values())
    assert found.weights_before == {"FLOAT": {"tensors": 2, "bytes": 2 * 64 * 64 * 4}}
    assert found.weights_after["INT4"] == {"tensors": 2, "bytes": 2 * 64 * 64 // 2}
    assert {tensor["name"] for tensor in found.largest} >= {"w0.values", "w1.scales"}


def test_the_page_is_whole_and_loads_nothing() -> None:
    found = quantized_report()
    found.facts |= {"source": "<b>in</b>", "target": "cpu"}
    found.passes.append(report(layers("the <mask> is odd")).passes[0])
    page = Page(to_html(found))
    assert (page.stack, page.loaded) == ([], [])
    for words in (
        "<b>in</b> → cpu",
        "the <mask> is odd",
        "WeightOnlyQuantization",
        "w0.values",
        "DequantizeLinear",
    ):
        assert words in page.text
    assert "url(" not in to_html(found)


@pytest.mark.parametrize("verification", [{"kl": 0.5, "greedy_equal": 3, "steps": 4}, {"max_rel": 0.25}])
def test_the_page_shows_the_comparison(verification: dict[str, float]) -> None:
    page = Page(to_html(report([], verification=verification)))
    assert ("KL 0.5" in page.text and "3 of 4" in page.text) or "0.25" in page.text


def test_a_report_of_nothing_is_a_page_too() -> None:
    assert "Pipeline report" in Page(to_html(PipelineReport(before={}))).text
