"""Write a custom graph pass: the model also returns its greedy next tokens.

Run this file, or use the pass on the command line: carryall optimize IN OUT --pass
custom_pass.GreedyTokensPass
"""

from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import onnx_ir as ir

from carryall import InferenceSession
from carryall.exporter.demo import demo_path
from carryall.exporter.export import export_model
from carryall.graph_opt.passes.base import GraphPass
from carryall.graph_opt.pipeline.pipeline import run


class GreedyTokensPass(GraphPass):
    """Add the output ``next_tokens`` int64 [batch, sequence]: the most likely token after each position."""

    def rewrite(self, graph: ir.Graph) -> None:
        """Append one ArgMax after the logits."""
        logits = next((value for value in graph.outputs if value.name == "logits"), None)
        if logits is None or logits.shape is None:
            return
        node = ir.node("ArgMax", [logits], {"axis": -1, "keepdims": 0}, name="next_tokens")
        tokens = node.outputs[0]
        tokens.name, tokens.dtype, tokens.shape = (
            "next_tokens",
            ir.DataType.INT64,
            ir.Shape(logits.shape[:-1]),
        )
        graph.append(node)
        graph.outputs.append(tokens)
        self.fired += 1


def main() -> None:
    """Export the demo model, run the pass, and compute the new output."""
    model, report = run(export_model(demo_path()), [GreedyTokensPass()])
    print(report.to_text(explain=True))
    with TemporaryDirectory() as folder:
        path = Path(folder, "model.onnx")
        ir.save(model, path, external_data="model.onnx.data")
        session = InferenceSession(path, providers=["cpu"])
        feed = {"input_ids": np.array([[1, 2, 3]]), "attention_mask": np.ones((1, 3), np.int64)}
        feed["position_ids"] = np.arange(3)[None]
        caches = [value for value in session.get_inputs() if value.name.startswith("past_key_values.")]
        past = {value.name: np.zeros((1, value.shape[1], 0, value.shape[3]), np.float32) for value in caches}
        print("next tokens:", session.run(["next_tokens"], {**feed, **past})[0])


if __name__ == "__main__":
    main()
