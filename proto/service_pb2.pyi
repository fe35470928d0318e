from carryall.proto import generation_pb2 as _generation_pb2
from carryall.proto import models_pb2 as _models_pb2
from carryall.proto import tasks_pb2 as _tasks_pb2
from google.protobuf import descriptor as _descriptor
from typing import ClassVar as _ClassVar

DESCRIPTOR: _descriptor.FileDescriptor
