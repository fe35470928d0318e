"""Programs of several steps over a conversation with a model: see ``carryall.runtime.program``.

>>> from carryall.program import assistant, gen, program, user
"""

from .runtime.program import Branches as Branches
from .runtime.program import Parts as Parts
from .runtime.program import PlaceAnswer as PlaceAnswer
from .runtime.program import Program as Program
from .runtime.program import ProgramCancelledError as ProgramCancelledError
from .runtime.program import ProgramState as ProgramState
from .runtime.program import Run as Run
from .runtime.program import Service as Service
from .runtime.program import ToolCall as ToolCall
from .runtime.program import assistant as assistant
from .runtime.program import gen as gen
from .runtime.program import image as image
from .runtime.program import program as program
from .runtime.program import select as select
from .runtime.program import system as system
from .runtime.program import tool_result as tool_result
from .runtime.program import user as user
