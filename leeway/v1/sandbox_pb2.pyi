from leeway.v1 import queue_pb2 as _queue_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class WorkRequest(_message.Message):
    __slots__ = ("begin", "request", "reply")
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    REPLY_FIELD_NUMBER: _ClassVar[int]
    begin: Begin
    request: str
    reply: JudgeReply
    def __init__(self, begin: _Optional[_Union[Begin, _Mapping]] = ..., request: _Optional[str] = ..., reply: _Optional[_Union[JudgeReply, _Mapping]] = ...) -> None: ...

class Begin(_message.Message):
    __slots__ = ("work", "spec", "judges", "patience_seconds")
    WORK_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    JUDGES_FIELD_NUMBER: _ClassVar[int]
    PATIENCE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    work: str
    spec: str
    judges: _containers.RepeatedScalarFieldContainer[str]
    patience_seconds: float
    def __init__(self, work: _Optional[str] = ..., spec: _Optional[str] = ..., judges: _Optional[_Iterable[str]] = ..., patience_seconds: _Optional[float] = ...) -> None: ...

class JudgeReply(_message.Message):
    __slots__ = ("answers", "failed")
    ANSWERS_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    answers: str
    failed: str
    def __init__(self, answers: _Optional[str] = ..., failed: _Optional[str] = ...) -> None: ...

class WorkResponse(_message.Message):
    __slots__ = ("taken", "answer", "question", "failure", "accepted")
    TAKEN_FIELD_NUMBER: _ClassVar[int]
    ANSWER_FIELD_NUMBER: _ClassVar[int]
    QUESTION_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    taken: Taken
    answer: str
    question: str
    failure: WorkFailure
    accepted: Accepted
    def __init__(self, taken: _Optional[_Union[Taken, _Mapping]] = ..., answer: _Optional[str] = ..., question: _Optional[str] = ..., failure: _Optional[_Union[WorkFailure, _Mapping]] = ..., accepted: _Optional[_Union[Accepted, _Mapping]] = ...) -> None: ...

class Accepted(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Taken(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WorkFailure(_message.Message):
    __slots__ = ("kind", "message")
    KIND_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    kind: _queue_pb2.FailureKind
    message: str
    def __init__(self, kind: _Optional[_Union[_queue_pb2.FailureKind, str]] = ..., message: _Optional[str] = ...) -> None: ...
