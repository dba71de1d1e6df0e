from leeway.v1 import trajectory_pb2 as _trajectory_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FailureKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FAILURE_KIND_UNSPECIFIED: _ClassVar[FailureKind]
    FAILURE_KIND_INFRASTRUCTURE: _ClassVar[FailureKind]
    FAILURE_KIND_DATA: _ClassVar[FailureKind]
    FAILURE_KIND_REWARD: _ClassVar[FailureKind]

class OverBudget(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    OVER_BUDGET_UNSPECIFIED: _ClassVar[OverBudget]
    OVER_BUDGET_MASK: _ClassVar[OverBudget]
    OVER_BUDGET_DROP: _ClassVar[OverBudget]
    OVER_BUDGET_KEEP: _ClassVar[OverBudget]
FAILURE_KIND_UNSPECIFIED: FailureKind
FAILURE_KIND_INFRASTRUCTURE: FailureKind
FAILURE_KIND_DATA: FailureKind
FAILURE_KIND_REWARD: FailureKind
OVER_BUDGET_UNSPECIFIED: OverBudget
OVER_BUDGET_MASK: OverBudget
OVER_BUDGET_DROP: OverBudget
OVER_BUDGET_KEEP: OverBudget

class EnqueueTasksRequest(_message.Message):
    __slots__ = ("incarnation", "tasks")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    TASKS_FIELD_NUMBER: _ClassVar[int]
    incarnation: int
    tasks: _containers.RepeatedCompositeFieldContainer[_trajectory_pb2.Task]
    def __init__(self, incarnation: _Optional[int] = ..., tasks: _Optional[_Iterable[_Union[_trajectory_pb2.Task, _Mapping]]] = ...) -> None: ...

class EnqueueTasksResponse(_message.Message):
    __slots__ = ("accepted", "duplicates")
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    DUPLICATES_FIELD_NUMBER: _ClassVar[int]
    accepted: int
    duplicates: int
    def __init__(self, accepted: _Optional[int] = ..., duplicates: _Optional[int] = ...) -> None: ...

class OpenTaskRequest(_message.Message):
    __slots__ = ("producer_id", "version", "task", "wait_seconds")
    PRODUCER_ID_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    WAIT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    producer_id: str
    version: int
    task: _trajectory_pb2.Task
    wait_seconds: float
    def __init__(self, producer_id: _Optional[str] = ..., version: _Optional[int] = ..., task: _Optional[_Union[_trajectory_pb2.Task, _Mapping]] = ..., wait_seconds: _Optional[float] = ...) -> None: ...

class OpenTaskResponse(_message.Message):
    __slots__ = ("lease", "waiting_for", "needs_version", "run_finished", "known")
    LEASE_FIELD_NUMBER: _ClassVar[int]
    WAITING_FOR_FIELD_NUMBER: _ClassVar[int]
    NEEDS_VERSION_FIELD_NUMBER: _ClassVar[int]
    RUN_FINISHED_FIELD_NUMBER: _ClassVar[int]
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    lease: TaskLease
    waiting_for: str
    needs_version: int
    run_finished: bool
    known: bool
    def __init__(self, lease: _Optional[_Union[TaskLease, _Mapping]] = ..., waiting_for: _Optional[str] = ..., needs_version: _Optional[int] = ..., run_finished: _Optional[bool] = ..., known: _Optional[bool] = ...) -> None: ...

class LeaseTasksRequest(_message.Message):
    __slots__ = ("node_id", "version", "max_groups", "wait_seconds", "request_id")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    MAX_GROUPS_FIELD_NUMBER: _ClassVar[int]
    WAIT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    version: int
    max_groups: int
    wait_seconds: float
    request_id: str
    def __init__(self, node_id: _Optional[str] = ..., version: _Optional[int] = ..., max_groups: _Optional[int] = ..., wait_seconds: _Optional[float] = ..., request_id: _Optional[str] = ...) -> None: ...

class TaskLease(_message.Message):
    __slots__ = ("lease_id", "task", "attempt", "ttl_seconds", "done", "partials")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    TTL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    PARTIALS_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    task: _trajectory_pb2.Task
    attempt: int
    ttl_seconds: float
    done: _containers.RepeatedScalarFieldContainer[int]
    partials: _containers.RepeatedCompositeFieldContainer[_trajectory_pb2.Trajectory]
    def __init__(self, lease_id: _Optional[str] = ..., task: _Optional[_Union[_trajectory_pb2.Task, _Mapping]] = ..., attempt: _Optional[int] = ..., ttl_seconds: _Optional[float] = ..., done: _Optional[_Iterable[int]] = ..., partials: _Optional[_Iterable[_Union[_trajectory_pb2.Trajectory, _Mapping]]] = ...) -> None: ...

class LeaseTasksResponse(_message.Message):
    __slots__ = ("leases", "waiting_for", "needs_version", "run_finished")
    LEASES_FIELD_NUMBER: _ClassVar[int]
    WAITING_FOR_FIELD_NUMBER: _ClassVar[int]
    NEEDS_VERSION_FIELD_NUMBER: _ClassVar[int]
    RUN_FINISHED_FIELD_NUMBER: _ClassVar[int]
    leases: _containers.RepeatedCompositeFieldContainer[TaskLease]
    waiting_for: str
    needs_version: int
    run_finished: bool
    def __init__(self, leases: _Optional[_Iterable[_Union[TaskLease, _Mapping]]] = ..., waiting_for: _Optional[str] = ..., needs_version: _Optional[int] = ..., run_finished: _Optional[bool] = ...) -> None: ...

class Progress(_message.Message):
    __slots__ = ("lease_id", "tokens")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    tokens: int
    def __init__(self, lease_id: _Optional[str] = ..., tokens: _Optional[int] = ...) -> None: ...

class ExtendRequest(_message.Message):
    __slots__ = ("node_id", "version", "progress", "waiting_for", "waiting_seconds", "load")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    WAITING_FOR_FIELD_NUMBER: _ClassVar[int]
    WAITING_SECONDS_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    version: int
    progress: _containers.RepeatedCompositeFieldContainer[Progress]
    waiting_for: str
    waiting_seconds: float
    load: float
    def __init__(self, node_id: _Optional[str] = ..., version: _Optional[int] = ..., progress: _Optional[_Iterable[_Union[Progress, _Mapping]]] = ..., waiting_for: _Optional[str] = ..., waiting_seconds: _Optional[float] = ..., load: _Optional[float] = ...) -> None: ...

class ExtendResponse(_message.Message):
    __slots__ = ("lost",)
    LOST_FIELD_NUMBER: _ClassVar[int]
    lost: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, lost: _Optional[_Iterable[str]] = ...) -> None: ...

class PushedTrajectory(_message.Message):
    __slots__ = ("lease_id", "trajectory")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    TRAJECTORY_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    trajectory: bytes
    def __init__(self, lease_id: _Optional[str] = ..., trajectory: _Optional[bytes] = ...) -> None: ...

class PushRequest(_message.Message):
    __slots__ = ("trajectories",)
    TRAJECTORIES_FIELD_NUMBER: _ClassVar[int]
    trajectories: _containers.RepeatedCompositeFieldContainer[PushedTrajectory]
    def __init__(self, trajectories: _Optional[_Iterable[_Union[PushedTrajectory, _Mapping]]] = ...) -> None: ...

class Refusal(_message.Message):
    __slots__ = ("trajectory_id", "field", "message")
    TRAJECTORY_ID_FIELD_NUMBER: _ClassVar[int]
    FIELD_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    trajectory_id: str
    field: str
    message: str
    def __init__(self, trajectory_id: _Optional[str] = ..., field: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...

class PushResponse(_message.Message):
    __slots__ = ("accepted", "duplicates", "refused")
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    DUPLICATES_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    accepted: _containers.RepeatedScalarFieldContainer[str]
    duplicates: _containers.RepeatedScalarFieldContainer[str]
    refused: _containers.RepeatedCompositeFieldContainer[Refusal]
    def __init__(self, accepted: _Optional[_Iterable[str]] = ..., duplicates: _Optional[_Iterable[str]] = ..., refused: _Optional[_Iterable[_Union[Refusal, _Mapping]]] = ...) -> None: ...

class ReturnRequest(_message.Message):
    __slots__ = ("node_id", "lease_id", "partials")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    PARTIALS_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    lease_id: str
    partials: _containers.RepeatedCompositeFieldContainer[_trajectory_pb2.Trajectory]
    def __init__(self, node_id: _Optional[str] = ..., lease_id: _Optional[str] = ..., partials: _Optional[_Iterable[_Union[_trajectory_pb2.Trajectory, _Mapping]]] = ...) -> None: ...

class ReturnResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FailRequest(_message.Message):
    __slots__ = ("node_id", "lease_id", "kind", "message")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    lease_id: str
    kind: FailureKind
    message: str
    def __init__(self, node_id: _Optional[str] = ..., lease_id: _Optional[str] = ..., kind: _Optional[_Union[FailureKind, str]] = ..., message: _Optional[str] = ...) -> None: ...

class FailResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class LeaseBatchRequest(_message.Message):
    __slots__ = ("trainer_id", "incarnation", "version", "groups", "purpose", "wait_seconds", "task_ids", "received")
    TRAINER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    PURPOSE_FIELD_NUMBER: _ClassVar[int]
    WAIT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    TASK_IDS_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_FIELD_NUMBER: _ClassVar[int]
    trainer_id: str
    incarnation: int
    version: int
    groups: int
    purpose: _trajectory_pb2.Purpose
    wait_seconds: float
    task_ids: _containers.RepeatedScalarFieldContainer[str]
    received: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, trainer_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., version: _Optional[int] = ..., groups: _Optional[int] = ..., purpose: _Optional[_Union[_trajectory_pb2.Purpose, str]] = ..., wait_seconds: _Optional[float] = ..., task_ids: _Optional[_Iterable[str]] = ..., received: _Optional[_Iterable[str]] = ...) -> None: ...

class LeasedGroup(_message.Message):
    __slots__ = ("task", "trajectories", "staleness", "staleness_in_flight", "mask_below_version")
    TASK_FIELD_NUMBER: _ClassVar[int]
    TRAJECTORIES_FIELD_NUMBER: _ClassVar[int]
    STALENESS_FIELD_NUMBER: _ClassVar[int]
    STALENESS_IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    MASK_BELOW_VERSION_FIELD_NUMBER: _ClassVar[int]
    task: bytes
    trajectories: _containers.RepeatedScalarFieldContainer[bytes]
    staleness: int
    staleness_in_flight: int
    mask_below_version: int
    def __init__(self, task: _Optional[bytes] = ..., trajectories: _Optional[_Iterable[bytes]] = ..., staleness: _Optional[int] = ..., staleness_in_flight: _Optional[int] = ..., mask_below_version: _Optional[int] = ...) -> None: ...

class Untrained(_message.Message):
    __slots__ = ("groups", "trajectories", "score_sum")
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    TRAJECTORIES_FIELD_NUMBER: _ClassVar[int]
    SCORE_SUM_FIELD_NUMBER: _ClassVar[int]
    groups: int
    trajectories: int
    score_sum: float
    def __init__(self, groups: _Optional[int] = ..., trajectories: _Optional[int] = ..., score_sum: _Optional[float] = ...) -> None: ...

class LeaseBatchResponse(_message.Message):
    __slots__ = ("batch_id", "leased", "waiting_for", "untrained", "budget")
    BATCH_ID_FIELD_NUMBER: _ClassVar[int]
    LEASED_FIELD_NUMBER: _ClassVar[int]
    WAITING_FOR_FIELD_NUMBER: _ClassVar[int]
    UNTRAINED_FIELD_NUMBER: _ClassVar[int]
    BUDGET_FIELD_NUMBER: _ClassVar[int]
    batch_id: str
    leased: _containers.RepeatedCompositeFieldContainer[LeasedGroup]
    waiting_for: str
    untrained: Untrained
    budget: int
    def __init__(self, batch_id: _Optional[str] = ..., leased: _Optional[_Iterable[_Union[LeasedGroup, _Mapping]]] = ..., waiting_for: _Optional[str] = ..., untrained: _Optional[_Union[Untrained, _Mapping]] = ..., budget: _Optional[int] = ...) -> None: ...

class CommitRequest(_message.Message):
    __slots__ = ("trainer_id", "incarnation", "batch_id", "version", "tokens_trained", "tokens_masked", "metrics")
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    TRAINER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    BATCH_ID_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    TOKENS_TRAINED_FIELD_NUMBER: _ClassVar[int]
    TOKENS_MASKED_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    trainer_id: str
    incarnation: int
    batch_id: str
    version: int
    tokens_trained: int
    tokens_masked: int
    metrics: _containers.ScalarMap[str, float]
    def __init__(self, trainer_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., batch_id: _Optional[str] = ..., version: _Optional[int] = ..., tokens_trained: _Optional[int] = ..., tokens_masked: _Optional[int] = ..., metrics: _Optional[_Mapping[str, float]] = ...) -> None: ...

class CommitResponse(_message.Message):
    __slots__ = ("committed",)
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    committed: int
    def __init__(self, committed: _Optional[int] = ...) -> None: ...

class ReleaseRequest(_message.Message):
    __slots__ = ("trainer_id", "incarnation", "batch_id")
    TRAINER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    BATCH_ID_FIELD_NUMBER: _ClassVar[int]
    trainer_id: str
    incarnation: int
    batch_id: str
    def __init__(self, trainer_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., batch_id: _Optional[str] = ...) -> None: ...

class ReleaseResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CheckpointedRequest(_message.Message):
    __slots__ = ("incarnation", "version")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    incarnation: int
    version: int
    def __init__(self, incarnation: _Optional[int] = ..., version: _Optional[int] = ...) -> None: ...

class CheckpointedResponse(_message.Message):
    __slots__ = ("payloads_freed",)
    PAYLOADS_FREED_FIELD_NUMBER: _ClassVar[int]
    payloads_freed: int
    def __init__(self, payloads_freed: _Optional[int] = ...) -> None: ...

class ResumeRequest(_message.Message):
    __slots__ = ("trainer_id", "incarnation", "version", "vocabulary")
    TRAINER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    VOCABULARY_FIELD_NUMBER: _ClassVar[int]
    trainer_id: str
    incarnation: int
    version: int
    vocabulary: int
    def __init__(self, trainer_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., version: _Optional[int] = ..., vocabulary: _Optional[int] = ...) -> None: ...

class ResumeResponse(_message.Message):
    __slots__ = ("incarnation", "restored")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    RESTORED_FIELD_NUMBER: _ClassVar[int]
    incarnation: int
    restored: int
    def __init__(self, incarnation: _Optional[int] = ..., restored: _Optional[int] = ...) -> None: ...

class NodeStatus(_message.Message):
    __slots__ = ("node_id", "version", "leases", "waiting_for", "waiting_seconds", "seen_seconds_ago", "load")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    WAITING_FOR_FIELD_NUMBER: _ClassVar[int]
    WAITING_SECONDS_FIELD_NUMBER: _ClassVar[int]
    SEEN_SECONDS_AGO_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    version: int
    leases: int
    waiting_for: str
    waiting_seconds: float
    seen_seconds_ago: float
    load: float
    def __init__(self, node_id: _Optional[str] = ..., version: _Optional[int] = ..., leases: _Optional[int] = ..., waiting_for: _Optional[str] = ..., waiting_seconds: _Optional[float] = ..., seen_seconds_ago: _Optional[float] = ..., load: _Optional[float] = ...) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatusResponse(_message.Message):
    __slots__ = ("run_id", "version", "incarnation", "budget", "batch_groups", "groups", "enqueued", "counters", "payload_bytes", "nodes", "trainer_waiting_for", "trainer_waiting_seconds", "oldest_queued_seconds", "paused", "draining", "eval_groups", "step_metrics", "nodes_wanted")
    class GroupsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class CountersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class EvalGroupsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class StepMetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    BUDGET_FIELD_NUMBER: _ClassVar[int]
    BATCH_GROUPS_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    ENQUEUED_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    TRAINER_WAITING_FOR_FIELD_NUMBER: _ClassVar[int]
    TRAINER_WAITING_SECONDS_FIELD_NUMBER: _ClassVar[int]
    OLDEST_QUEUED_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PAUSED_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    EVAL_GROUPS_FIELD_NUMBER: _ClassVar[int]
    STEP_METRICS_FIELD_NUMBER: _ClassVar[int]
    NODES_WANTED_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    version: int
    incarnation: int
    budget: int
    batch_groups: int
    groups: _containers.ScalarMap[str, int]
    enqueued: int
    counters: _containers.ScalarMap[str, int]
    payload_bytes: int
    nodes: _containers.RepeatedCompositeFieldContainer[NodeStatus]
    trainer_waiting_for: str
    trainer_waiting_seconds: float
    oldest_queued_seconds: float
    paused: bool
    draining: bool
    eval_groups: _containers.ScalarMap[str, int]
    step_metrics: _containers.ScalarMap[str, float]
    nodes_wanted: int
    def __init__(self, run_id: _Optional[str] = ..., version: _Optional[int] = ..., incarnation: _Optional[int] = ..., budget: _Optional[int] = ..., batch_groups: _Optional[int] = ..., groups: _Optional[_Mapping[str, int]] = ..., enqueued: _Optional[int] = ..., counters: _Optional[_Mapping[str, int]] = ..., payload_bytes: _Optional[int] = ..., nodes: _Optional[_Iterable[_Union[NodeStatus, _Mapping]]] = ..., trainer_waiting_for: _Optional[str] = ..., trainer_waiting_seconds: _Optional[float] = ..., oldest_queued_seconds: _Optional[float] = ..., paused: _Optional[bool] = ..., draining: _Optional[bool] = ..., eval_groups: _Optional[_Mapping[str, int]] = ..., step_metrics: _Optional[_Mapping[str, float]] = ..., nodes_wanted: _Optional[int] = ...) -> None: ...

class SetBudgetRequest(_message.Message):
    __slots__ = ("budget", "actor")
    BUDGET_FIELD_NUMBER: _ClassVar[int]
    ACTOR_FIELD_NUMBER: _ClassVar[int]
    budget: int
    actor: str
    def __init__(self, budget: _Optional[int] = ..., actor: _Optional[str] = ...) -> None: ...

class SetBudgetResponse(_message.Message):
    __slots__ = ("previous",)
    PREVIOUS_FIELD_NUMBER: _ClassVar[int]
    previous: int
    def __init__(self, previous: _Optional[int] = ...) -> None: ...

class PauseRequest(_message.Message):
    __slots__ = ("paused", "actor")
    PAUSED_FIELD_NUMBER: _ClassVar[int]
    ACTOR_FIELD_NUMBER: _ClassVar[int]
    paused: bool
    actor: str
    def __init__(self, paused: _Optional[bool] = ..., actor: _Optional[str] = ...) -> None: ...

class PauseResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("actor",)
    ACTOR_FIELD_NUMBER: _ClassVar[int]
    actor: str
    def __init__(self, actor: _Optional[str] = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class InspectRequest(_message.Message):
    __slots__ = ("id",)
    ID_FIELD_NUMBER: _ClassVar[int]
    id: str
    def __init__(self, id: _Optional[str] = ...) -> None: ...

class InspectResponse(_message.Message):
    __slots__ = ("task_id", "state", "attempts", "reasons", "group")
    TASK_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    REASONS_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    task_id: str
    state: str
    attempts: int
    reasons: _containers.RepeatedScalarFieldContainer[str]
    group: _trajectory_pb2.Group
    def __init__(self, task_id: _Optional[str] = ..., state: _Optional[str] = ..., attempts: _Optional[int] = ..., reasons: _Optional[_Iterable[str]] = ..., group: _Optional[_Union[_trajectory_pb2.Group, _Mapping]] = ...) -> None: ...

class ListDeadRequest(_message.Message):
    __slots__ = ("limit",)
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    limit: int
    def __init__(self, limit: _Optional[int] = ...) -> None: ...

class DeadTask(_message.Message):
    __slots__ = ("task_id", "reasons")
    TASK_ID_FIELD_NUMBER: _ClassVar[int]
    REASONS_FIELD_NUMBER: _ClassVar[int]
    task_id: str
    reasons: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, task_id: _Optional[str] = ..., reasons: _Optional[_Iterable[str]] = ...) -> None: ...

class ListDeadResponse(_message.Message):
    __slots__ = ("tasks",)
    TASKS_FIELD_NUMBER: _ClassVar[int]
    tasks: _containers.RepeatedCompositeFieldContainer[DeadTask]
    def __init__(self, tasks: _Optional[_Iterable[_Union[DeadTask, _Mapping]]] = ...) -> None: ...

class RequeueRequest(_message.Message):
    __slots__ = ("task_ids", "actor")
    TASK_IDS_FIELD_NUMBER: _ClassVar[int]
    ACTOR_FIELD_NUMBER: _ClassVar[int]
    task_ids: _containers.RepeatedScalarFieldContainer[str]
    actor: str
    def __init__(self, task_ids: _Optional[_Iterable[str]] = ..., actor: _Optional[str] = ...) -> None: ...

class RequeueResponse(_message.Message):
    __slots__ = ("requeued",)
    REQUEUED_FIELD_NUMBER: _ClassVar[int]
    requeued: int
    def __init__(self, requeued: _Optional[int] = ...) -> None: ...

class ListAuditRequest(_message.Message):
    __slots__ = ("limit",)
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    limit: int
    def __init__(self, limit: _Optional[int] = ...) -> None: ...

class AuditRecord(_message.Message):
    __slots__ = ("at_seconds", "actor", "what")
    AT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    ACTOR_FIELD_NUMBER: _ClassVar[int]
    WHAT_FIELD_NUMBER: _ClassVar[int]
    at_seconds: float
    actor: str
    what: str
    def __init__(self, at_seconds: _Optional[float] = ..., actor: _Optional[str] = ..., what: _Optional[str] = ...) -> None: ...

class ListAuditResponse(_message.Message):
    __slots__ = ("records",)
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    records: _containers.RepeatedCompositeFieldContainer[AuditRecord]
    def __init__(self, records: _Optional[_Iterable[_Union[AuditRecord, _Mapping]]] = ...) -> None: ...
