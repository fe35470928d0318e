"""The passes for graphs of carryall's own exporter; those for any graph take 40 ms to import."""

from __future__ import annotations

import onnx_ir as ir

from ..passes.cleanup.merge_duplicates import MergeDuplicatesPass
from ..passes.importing.contract_names import ContractNamesPass


def exported_passes() -> list[ir.passes.PassBase]:
    """Return those of ``portable_passes`` that change graphs of carryall's own exporter."""
    return [ContractNamesPass(), MergeDuplicatesPass()]
