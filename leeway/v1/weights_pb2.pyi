from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Encoding(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ENCODING_UNSPECIFIED: _ClassVar[Encoding]
    ENCODING_FULL: _ClassVar[Encoding]
    ENCODING_SPARSE: _ClassVar[Encoding]
    ENCODING_DENSE: _ClassVar[Encoding]
    ENCODING_SAME: _ClassVar[Encoding]

class NodeState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    NODE_STATE_UNSPECIFIED: _ClassVar[NodeState]
    NODE_STATE_STAGED: _ClassVar[NodeState]
    NODE_STATE_APPLIED: _ClassVar[NodeState]
    NODE_STATE_FAILED: _ClassVar[NodeState]
ENCODING_UNSPECIFIED: Encoding
ENCODING_FULL: Encoding
ENCODING_SPARSE: Encoding
ENCODING_DENSE: Encoding
ENCODING_SAME: Encoding
NODE_STATE_UNSPECIFIED: NodeState
NODE_STATE_STAGED: NodeState
NODE_STATE_APPLIED: NodeState
NODE_STATE_FAILED: NodeState

class TensorEntry(_message.Message):
    __slots__ = ("name", "dtype", "shape", "encoding", "offset", "length", "changed", "digest")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    ENCODING_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    CHANGED_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    name: str
    dtype: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    encoding: Encoding
    offset: int
    length: int
    changed: int
    digest: str
    def __init__(self, name: _Optional[str] = ..., dtype: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., encoding: _Optional[_Union[Encoding, str]] = ..., offset: _Optional[int] = ..., length: _Optional[int] = ..., changed: _Optional[int] = ..., digest: _Optional[str] = ...) -> None: ...

class Manifest(_message.Message):
    __slots__ = ("run_id", "incarnation", "version", "base_digest", "tensors", "payload_length", "digest", "canary")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    BASE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_LENGTH_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    CANARY_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    incarnation: int
    version: int
    base_digest: str
    tensors: _containers.RepeatedCompositeFieldContainer[TensorEntry]
    payload_length: int
    digest: str
    canary: Canary
    def __init__(self, run_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., version: _Optional[int] = ..., base_digest: _Optional[str] = ..., tensors: _Optional[_Iterable[_Union[TensorEntry, _Mapping]]] = ..., payload_length: _Optional[int] = ..., digest: _Optional[str] = ..., canary: _Optional[_Union[Canary, _Mapping]] = ...) -> None: ...

class Canary(_message.Message):
    __slots__ = ("token_ids", "logprobs", "tolerance")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TOLERANCE_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedScalarFieldContainer[float]
    tolerance: float
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[float]] = ..., tolerance: _Optional[float] = ...) -> None: ...

class SubscribeRequest(_message.Message):
    __slots__ = ("node_id", "relay_address", "have_version", "have_digest", "cluster")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    RELAY_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    HAVE_VERSION_FIELD_NUMBER: _ClassVar[int]
    HAVE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    CLUSTER_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    relay_address: str
    have_version: int
    have_digest: str
    cluster: str
    def __init__(self, node_id: _Optional[str] = ..., relay_address: _Optional[str] = ..., have_version: _Optional[int] = ..., have_digest: _Optional[str] = ..., cluster: _Optional[str] = ...) -> None: ...

class SubscribeResponse(_message.Message):
    __slots__ = ("run_id", "incarnation", "version", "digest", "parent")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    incarnation: int
    version: int
    digest: str
    parent: str
    def __init__(self, run_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., version: _Optional[int] = ..., digest: _Optional[str] = ..., parent: _Optional[str] = ...) -> None: ...

class GetManifestRequest(_message.Message):
    __slots__ = ("node_id", "version", "base_digest")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    BASE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    version: int
    base_digest: str
    def __init__(self, node_id: _Optional[str] = ..., version: _Optional[int] = ..., base_digest: _Optional[str] = ...) -> None: ...

class GetManifestResponse(_message.Message):
    __slots__ = ("manifest", "checksum")
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    manifest: bytes
    checksum: int
    def __init__(self, manifest: _Optional[bytes] = ..., checksum: _Optional[int] = ...) -> None: ...

class FetchRequest(_message.Message):
    __slots__ = ("node_id", "digest", "base_digest", "offset")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    BASE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    digest: str
    base_digest: str
    offset: int
    def __init__(self, node_id: _Optional[str] = ..., digest: _Optional[str] = ..., base_digest: _Optional[str] = ..., offset: _Optional[int] = ...) -> None: ...

class FetchResponse(_message.Message):
    __slots__ = ("offset", "data", "checksum")
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    offset: int
    data: bytes
    checksum: int
    def __init__(self, offset: _Optional[int] = ..., data: _Optional[bytes] = ..., checksum: _Optional[int] = ...) -> None: ...

class ReportRequest(_message.Message):
    __slots__ = ("node_id", "version", "digest", "state", "message", "stage_seconds", "pause_seconds", "bytes_received")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    STAGE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PAUSE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    BYTES_RECEIVED_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    version: int
    digest: str
    state: NodeState
    message: str
    stage_seconds: float
    pause_seconds: float
    bytes_received: int
    def __init__(self, node_id: _Optional[str] = ..., version: _Optional[int] = ..., digest: _Optional[str] = ..., state: _Optional[_Union[NodeState, str]] = ..., message: _Optional[str] = ..., stage_seconds: _Optional[float] = ..., pause_seconds: _Optional[float] = ..., bytes_received: _Optional[int] = ...) -> None: ...

class ReportResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ReparentRequest(_message.Message):
    __slots__ = ("node_id", "failed")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    failed: str
    def __init__(self, node_id: _Optional[str] = ..., failed: _Optional[str] = ...) -> None: ...

class ReparentResponse(_message.Message):
    __slots__ = ("parent",)
    PARENT_FIELD_NUMBER: _ClassVar[int]
    parent: str
    def __init__(self, parent: _Optional[str] = ...) -> None: ...

class ListNodesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class NodeWeights(_message.Message):
    __slots__ = ("node_id", "version", "state", "message", "seconds_ago", "parent", "connected", "stage_seconds", "pause_seconds", "bytes_received")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    SECONDS_AGO_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    CONNECTED_FIELD_NUMBER: _ClassVar[int]
    STAGE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PAUSE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    BYTES_RECEIVED_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    version: int
    state: NodeState
    message: str
    seconds_ago: float
    parent: str
    connected: bool
    stage_seconds: float
    pause_seconds: float
    bytes_received: int
    def __init__(self, node_id: _Optional[str] = ..., version: _Optional[int] = ..., state: _Optional[_Union[NodeState, str]] = ..., message: _Optional[str] = ..., seconds_ago: _Optional[float] = ..., parent: _Optional[str] = ..., connected: _Optional[bool] = ..., stage_seconds: _Optional[float] = ..., pause_seconds: _Optional[float] = ..., bytes_received: _Optional[int] = ...) -> None: ...

class ListNodesResponse(_message.Message):
    __slots__ = ("version", "nodes")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    version: int
    nodes: _containers.RepeatedCompositeFieldContainer[NodeWeights]
    def __init__(self, version: _Optional[int] = ..., nodes: _Optional[_Iterable[_Union[NodeWeights, _Mapping]]] = ...) -> None: ...
