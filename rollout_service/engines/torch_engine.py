"""The embedded engine: continuous batching over a Hugging Face model, in this process, on CPUs.

Owns one thread, which alone touches weights, cache and sequences. Everything else reaches it as a
command in its inbox, and is carried out between two decode steps: that is the gate of an update.
The event loop only builds commands and receives results.

When the thread fails, everything pending fails with `InfrastructureError` (with `CanaryError` if it
does not hold the weights it was given), and so does every later call. Nothing waits for a thread
that has ended.

What an idle engine generates for one `generate` call is, bit for bit, a function of the weights and
of that call (given the number of torch threads).
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from leeway.config import UpdateMode
from leeway.errors import DeadlineError, EngineError, InfrastructureError, LeewayError
from leeway.manifests import Canary
from leeway.trajectory import Int32Array
from rollout_service.engines.base import (
    CanaryError,
    EngineLoad,
    EngineStats,
    GenerateRequest,
    Generation,
    Update,
    check_request,
    check_tokens,
)
from rollout_service.engines.scheduler import ContinuousBatch, RunningSequence
from rollout_service.engines.torch_model import HeldModel
from rollout_service.engines.torch_weights import Staged

# A decode step takes well under a second; a step that prefills long prompts may take many.
CLOSE_SECONDS = 60.0


@dataclass(slots=True)
class _Command:
    done: Future[Any] = field(default_factory=Future)


@dataclass(slots=True, kw_only=True)
class _Submit(_Command):
    sequences: Sequence[RunningSequence]


@dataclass(slots=True, kw_only=True)
class _Abort(_Command):
    request_ids: frozenset[str]


@dataclass(slots=True, kw_only=True)
class _Swap(_Command):
    staged: Staged
    version: int
    mode: UpdateMode
    canary: Canary | None


@dataclass(slots=True)
class _Close(_Command):
    pass


class _Stream:
    """What one `generate` call has yet to yield: fed by the engine's thread, read in a loop."""

    def __init__(self, request_ids: Collection[str]) -> None:
        self.pending = set(request_ids)
        self._loop = asyncio.get_running_loop()
        self._items: asyncio.Queue[Generation | LeewayError] = asyncio.Queue()

    def post(self, item: Generation | LeewayError) -> None:
        # RuntimeError: the loop has closed, nobody is left to read.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._items.put_nowait, item)

    def tell(self, listener: Callable[[Int32Array], None], tokens: Int32Array) -> None:
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(listener, tokens)

    async def next(self) -> Generation:
        item = await self._items.get()
        if isinstance(item, LeewayError):
            raise item
        self.pending.discard(item.request_id)
        return item


class TorchEngine:
    """The `Engine` named `torch`; see rollout_service.engines.base for the contract."""

    def __init__(
        self,
        directory: Path,
        *,
        concurrency: int,
        context: int | None = None,
        version: int = 0,
        stop_tokens: Collection[int] | None = None,
        deterministic: bool = False,
    ) -> None:
        """Loads the model, which takes seconds, and starts the engine's thread.

        Args:
            directory: A Hugging Face model directory.
            concurrency: Sequences that are generated at once; more wait, in order.
            context: Longest prompt + answer in tokens; by default what the model allows.
            version: The policy version of the weights in the directory.
            stop_tokens: End an answer; by default those of the model's generation config.
            deterministic: What a request samples, and its log-probabilities, are the same to the
                last bit whatever else the engine generates; see `engine.deterministic`.

        Raises:
            EngineError: the directory holds no model that this engine can serve.
        """
        self._model = HeldModel(directory, context, deterministic=deterministic)
        stops = self._model.stop_tokens if stop_tokens is None else stop_tokens
        self._batch = ContinuousBatch(self._model, concurrency, stops, version)
        self._inbox: queue.SimpleQueue[_Command] = queue.SimpleQueue()
        self._accepted: list[_Command] = []
        self._swaps: deque[_Swap] = deque()
        # A swap that was applied, and when, until all it interrupted goes on and it is proven.
        self._settling: tuple[_Swap, float] | None = None
        self._pause: float | None = None
        self._busy_seconds = self._pause_seconds = 0.0
        self._pauses = 0
        # Guards what follows: the streams in flight, by request, and why the engine has ended.
        self._lock = threading.Lock()
        self._streams: dict[str, _Stream] = {}
        self._sequences: dict[str, RunningSequence] = {}
        self._failure: LeewayError | None = None
        self._thread = threading.Thread(target=self._supervise, name="torch-engine", daemon=True)
        self._thread.start()

    @property
    def version(self) -> int:
        return self._batch.version

    @property
    def context_length(self) -> int:
        return self._model.context_length

    @property
    def vocabulary_size(self) -> int:
        return self._model.vocabulary_size

    @property
    def takes_constraints(self) -> bool:
        return False

    def check(self, request: GenerateRequest) -> None:
        check_request(self, request)

    def generate(self, requests: Sequence[GenerateRequest]) -> AsyncIterator[Generation]:
        """Queues at the call itself, not when first iterated.

        Closing the iterator early, or cancelling its reader, aborts what it has not yielded.
        """
        for request in requests:
            self.check(request)
        ids = [request.request_id for request in requests]
        if len(set(ids)) < len(ids):
            raise EngineError(f"request_id: each must be unique, got {ids}")
        now = time.monotonic()
        stream = _Stream(ids)
        command = _Submit(sequences=[RunningSequence(request, now) for request in requests])
        with self._lock:
            self._check_alive()
            taken = [i for i in ids if i in self._streams]
            if taken:
                raise EngineError(f"request_id: already being generated: {taken}")
            self._streams.update(dict.fromkeys(ids, stream))
            self._sequences.update(zip(ids, command.sequences, strict=True))
            self._inbox.put(command)
        return self._read(stream)

    async def abort(self, request_ids: Sequence[str]) -> None:
        await self._call(_Abort(request_ids=frozenset(request_ids)))

    async def swap(
        self,
        updates: Mapping[str, Update],
        version: int,
        mode: UpdateMode,
        canary: Canary | None = None,
    ) -> float:
        """Also takes LoRA adapters, under PEFT's names; their scale belongs into lora_B.

        Raises:
            EngineError: a name, shape or dtype that the model does not have; nothing is changed.
            CanaryError: the engine does not hold what it was given; it has failed.
        """
        if canary is not None:
            check_tokens("canary", canary.token_ids, self.context_length, self.vocabulary_size)
        staged = await asyncio.to_thread(self._model.weights.stage, updates)
        seconds: float = await self._call(
            _Swap(staged=staged, version=version, mode=mode, canary=canary)
        )
        return seconds

    def progress(self, request_ids: Collection[str]) -> int:
        with self._lock:
            live = [self._sequences[i] for i in request_ids if i in self._sequences]
        return sum(sequence.generated for sequence in live)

    def stats(self) -> EngineStats:
        with self._lock:
            live = list(self._sequences.values())
        return EngineStats(
            running=self._batch.running,
            # By themselves: one that has ended may not have been handed out yet.
            waiting=sum(sequence.waits for sequence in live),
            tokens_generated=self._batch.tokens_generated,
            tokens_prefilled=self._batch.tokens_prefilled,
            busy_seconds=self._busy_seconds,
            pauses=self._pauses,
            pause_seconds=self._pause_seconds,
        )

    async def load(self) -> EngineLoad:
        """Its cache has a place for each sequence, so that none is ever preempted."""
        updating = bool(self._swaps) or self._settling is not None
        return EngineLoad(self._batch.kv_use, 0 if updating else self.stats().waiting, 0)

    async def close(self) -> None:
        """Ends the thread; what is pending fails. Closing twice is fine.

        Raises:
            DeadlineError: the step in progress did not end in time.
        """
        self._inbox.put(_Close())
        await asyncio.to_thread(self._thread.join, CLOSE_SECONDS)
        if self._thread.is_alive():
            raise DeadlineError(f"the engine's last step did not end within {CLOSE_SECONDS:g} s")

    # In the event loop.

    async def _read(self, stream: _Stream) -> AsyncIterator[Generation]:
        try:
            while stream.pending:
                yield await stream.next()
        finally:
            if stream.pending:
                self._inbox.put(_Abort(request_ids=frozenset(stream.pending)))

    async def _call(self, command: _Command) -> Any:
        with self._lock:
            self._check_alive()
            self._inbox.put(command)
        return await asyncio.wrap_future(command.done)

    def _check_alive(self) -> None:
        if self._failure is not None:
            raise self._failure

    # In the engine's thread.

    def _supervise(self) -> None:
        failure: LeewayError = InfrastructureError("the torch engine was closed")
        try:
            with torch.inference_mode():
                self._serve()
        except CanaryError as error:
            failure = error
        except Exception as error:
            # The thread's boundary: whatever it was reaches everyone who waits.
            failure = InfrastructureError(f"the torch engine failed: {error!r}")
            failure.__cause__ = error
        finally:
            self._end(failure)

    def _serve(self) -> None:
        while self._obey():
            self._apply_swaps()
            if self._batch.running or self._batch.waiting or self._batch.unproven:
                started = time.monotonic()
                self._deliver(self._batch.step(self._admits()))
                self._tell()
                self._busy_seconds += time.monotonic() - started
            self._settle()

    def _obey(self) -> bool:
        """Carries out all commands in the inbox, waiting for one when idle; false: close."""
        self._accepted = [command for command in self._accepted if not command.done.done()]
        idle = not (self._batch.running or self._batch.waiting or self._swaps)
        while True:
            try:
                command = self._inbox.get(block=idle)
            except queue.Empty:
                return True
            idle = False
            if not command.done.set_running_or_notify_cancel():
                continue
            self._accepted.append(command)
            match command:
                case _Submit(sequences=sequences):
                    self._deliver(self._batch.submit(sequences))
                    command.done.set_result(None)
                case _Abort(request_ids=request_ids):
                    self._deliver(self._batch.abort(request_ids))
                    command.done.set_result(None)
                case _Swap():
                    self._swaps.append(command)
                case _Close():
                    return False

    def _admits(self) -> bool:
        """Nothing joins while a swap waits for running sequences to end."""
        draining = bool(self._swaps) and self._swaps[0].mode is UpdateMode.DRAIN
        return not draining or self._settling is not None

    def _apply_swaps(self) -> None:
        while self._swaps and self._settling is None:
            swap = self._swaps[0]
            if swap.mode is UpdateMode.DRAIN and self._batch.running:
                return
            started = time.monotonic()
            self._model.weights.write(swap.staged)
            recompute = swap.mode is UpdateMode.RECOMPUTE
            self._batch.weights_changed(swap.version, recompute, swap.canary)
            self._swaps.popleft()
            self._settling = (swap, started)
            self._settle()

    def _settle(self) -> None:
        """Ends the pause of an update once all that it interrupted goes on, and the update once it
        is proven: the canary pauses nothing, it shares a step."""
        if self._settling is None or self._batch.interrupted:
            return
        swap, started = self._settling
        if self._pause is None:
            self._pause = time.monotonic() - started
        if self._batch.unproven:
            return
        self._pauses += 1
        self._pause_seconds += self._pause
        swap.done.set_result(self._pause)
        self._settling = self._pause = None

    def _deliver(self, ended: Sequence[RunningSequence]) -> None:
        now = time.monotonic()
        for sequence in ended:
            with self._lock:
                stream = self._streams.pop(sequence.request_id)
                del self._sequences[sequence.request_id]
            stream.post(sequence.generation(now))

    def _tell(self) -> None:
        for sequence in self._batch.followed():
            assert sequence.on_tokens is not None  # that is what `followed` says
            self._streams[sequence.request_id].tell(sequence.on_tokens, sequence.news())

    def _end(self, failure: LeewayError) -> None:
        with self._lock:
            self._failure = failure
            streams = set(self._streams.values())
            self._streams.clear()
            self._sequences.clear()
        while not self._inbox.empty():
            self._accepted.append(self._inbox.get())
        # Commands first: whoever sent the weights hears of it before those who generate.
        for command in self._accepted:
            if not command.done.done():
                command.done.set_exception(failure)
        for stream in streams:
            stream.post(failure)
