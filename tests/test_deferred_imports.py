"""Sympy, protobuf's text formats and tools of onnx are imported at their first use, and work then as ever."""

from __future__ import annotations

import subprocess
import sys

import pytest

USES = """
import sys
import carryall, onnx_ir
assert "sympy" not in sys.modules and "onnx_ir._symbolic_shapes" not in sys.modules
size = onnx_ir.SymbolicDim("n") * 2 + 1
import sympy
assert isinstance(size, onnx_ir.SymbolicDim) and str(sympy.sympify(size.value)) == "2*n + 1", size
assert onnx_ir.SymbolicDim("max(n, 4)").evaluate({"n": 9}) == 9
assert onnx_ir.SymbolicDim(sympy.Symbol("m")).value == "m"
assert sys.modules["sympy"].__file__ and onnx_ir.__loader__ is onnx_ir.__spec__.loader
import importlib, inspect
assert "ir" in inspect.getsource(onnx_ir)
importlib.reload(onnx_ir)
"""
SYMPY_FIRST = "import sympy, carryall, onnx_ir\nassert onnx_ir._core.sympy is sympy"
LIBRARY_FIRST = "import onnx_ir, carryall, sys\nassert onnx_ir._core.sympy is sys.modules['sympy']"


TEXTS = """
import sys
import carryall, onnx_ir, onnx
names = ("google.protobuf.json_format", "google.protobuf.text_format")
assert not any(name in sys.modules for name in names)
model = onnx.helper.make_model(onnx.helper.make_graph([], "g", [], []))
for form in ("json", "textproto"):
    text = onnx._get_serializer(form).serialize_proto(model)
    assert onnx.load_model_from_string(text, format=form) == model, form
assert all(name in sys.modules for name in names)
import google.protobuf
assert google.protobuf.json_format is sys.modules[names[0]]
"""


TOOLS = """
import sys
import carryall, onnx_ir, onnx
names = ("onnx.compose", "onnx.gen_proto", "onnx.utils")
assert not any(name in sys.modules for name in names)
graph = onnx.parser.parse_graph("g (float[2] x) => (float[2] y) { y = Relu(x) }")
assert onnx.compose.add_prefix_graph(graph, "a.").node[0].input[0] == "a.x"
from onnx.utils import Extractor
assert onnx.compose is sys.modules["onnx.compose"] and onnx.utils.Extractor is Extractor
assert callable(onnx.gen_proto.main)
"""


METADATA = """
import sys
import carryall, onnx_ir, onnx, importlib
assert "importlib.metadata" not in sys.modules and "packaging.version" not in sys.modules
stated = onnx.__version__
assert importlib.metadata.version("onnx") == stated
from importlib.metadata import PackageNotFoundError, version
assert version("onnx") == stated and importlib.metadata is sys.modules["importlib.metadata"]
import packaging.version
assert packaging.version.Version(stated).release[0] >= 1
"""
# Distributions that have no folder beside their package, as in archives, are found as ever.
NO_FOLDERS = """
import sys
import carryall, importlib, importlib.util
from carryall.storage import distributions
distributions.distribution_folder = lambda name: None
import onnx_ir, onnx
assert "importlib.metadata" in sys.modules and onnx.__version__ == importlib.metadata.version("onnx")
"""


@pytest.mark.long
@pytest.mark.parametrize(
    "program",
    [USES, SYMPY_FIRST, LIBRARY_FIRST, TEXTS, TOOLS, METADATA, NO_FOLDERS],
    ids=["uses", "sympy", "onnx_ir", "texts", "tools", "metadata", "no_folders"],
)
def test_what_is_deferred_works_in_any_order_of_imports(program: str) -> None:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_second_copy_of_the_package_searches_only_once() -> None:
    """As where a checkout is imported beside the installed package; each would ask the other without end."""
    code = """
import importlib.util, pathlib, sys
import carryall
from carryall import deferred_imports as first
spec = importlib.util.spec_from_file_location("carryall.second", pathlib.Path(first.__file__))
second = importlib.util.module_from_spec(spec)
spec.loader.exec_module(second)
sys.meta_path.insert(0, second._Finder())  # what it adds where it comes first
first.defer_sympy()
import onnx_ir
print(onnx_ir.Model.__name__)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "Model\n"), done.stderr
