"""Continuous batching: which sequences are in the next forward pass, and what becomes of them.

Synchronous and single-threaded; its caller is the torch engine's thread. A sequence waits (in order),
runs in a slot, and ends. Every step decodes one token of each running sequence and prefills those
that join, in one packed forward pass.

- Joining means forwarding all tokens known so far, prompt or partial generation alike; the first new
  token comes from the last of them. `recompute` is nothing but sending running sequences back to the
  head of the queue.
- Sequences with equal known tokens share that work: in the same step one span serves them all; later
  ones copy it from a slot, unless the weights have changed since (`epoch`), and rerun its last token.
- Running sequences occupy the first slots, without holes. A slot outlives its sequence until the next
  step, so that one that joins may take over its prefix.
- An idle batch keeps nothing. What an idle batch generates is a function of the weights and the
  sequences submitted, in their order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import chain

import numpy as np
import numpy.typing as npt

from leeway.trajectory import FinishReason, Sampling
from leeway.versions import expand, spans_of
from rollout_service.engines.base import GenerateRequest, Generation
from rollout_service.engines.kv_cache import Span
from rollout_service.engines.sampler import draw, uniforms
from rollout_service.engines.torch_model import HeldModel

# Most tokens prefilled in one step (a single longer sequence still goes in whole): bounds the memory
# of a step, and how long running sequences wait for those that join.
PREFILL_TOKENS = 4096


class RunningSequence:
    """One request, and what was generated for it so far."""

    def __init__(self, request: GenerateRequest, submitted: float) -> None:
        self.request_id = request.request_id
        self.sampling: Sampling = request.sampling
        self.seed = request.seed & (2**64 - 1)
        self.prompt_length = int(request.prompt.size)
        self.submitted = submitted
        self.finish_reason = FinishReason.UNFINISHED
        self.slot = -1
        self.interrupted = False
        room = self.prompt_length + max(
            self.sampling.max_new_tokens, request.resume.token_ids.size if request.resume else 0
        )
        self.tokens = np.zeros(room, dtype=np.int64)
        self.logprobs = np.zeros(room - self.prompt_length, dtype=np.float32)
        self.versions = np.zeros(room - self.prompt_length, dtype=np.int64)
        self.tokens[: self.prompt_length] = request.prompt
        self.length = self.prompt_length
        self.earlier_seconds = 0.0
        if request.resume is not None:
            partial = request.resume
            self.length += int(partial.token_ids.size)
            self.tokens[self.prompt_length : self.length] = partial.token_ids
            self.logprobs[: self.generated] = partial.logprobs
            self.versions[: self.generated] = expand(partial.versions)
            self.earlier_seconds = partial.seconds
        self.prefix = b""
        self.prefix_epoch = -1

    @property
    def generated(self) -> int:
        return self.length - self.prompt_length

    @property
    def known(self) -> npt.NDArray[np.int64]:
        return self.tokens[: self.length]

    def append(self, token: int, logprob: float, version: int) -> None:
        self.tokens[self.length] = token
        self.logprobs[self.generated] = logprob
        self.versions[self.generated] = version
        self.length += 1

    def generation(self, now: float) -> Generation:
        n = self.generated
        return Generation(
            request_id=self.request_id,
            token_ids=self.tokens[self.prompt_length : self.length].astype(np.int32),
            logprobs=self.logprobs[:n].copy(),
            versions=spans_of(self.versions[:n]),
            finish_reason=self.finish_reason,
            seconds=self.earlier_seconds + now - self.submitted,
        )


class ContinuousBatch:
    """Attributes:
    version: Stamped on every token; whoever writes the weights sets it, with `weights_changed`.
    """

    def __init__(
        self, model: HeldModel, concurrency: int, stop_tokens: Collection[int], version: int
    ) -> None:
        self.version = version
        self.tokens_generated = 0
        self.tokens_prefilled = 0
        self._model = model
        self._concurrency = concurrency
        self._stop_tokens = frozenset(stop_tokens)
        self._cache = model.new_cache(concurrency)
        self._epoch = 0
        self._waiting: deque[RunningSequence] = deque()
        # Index = slot. Ended sequences stay until the next step.
        self._slots: list[RunningSequence] = []

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def running(self) -> int:
        return sum(1 for _ in self._running())

    @property
    def interrupted(self) -> bool:
        """Whether sequences wait that new weights interrupted."""
        return any(sequence.interrupted for sequence in self._waiting)

    def submit(self, sequences: Iterable[RunningSequence]) -> list[RunningSequence]:
        """Queues the sequences; returns those that have nothing left to generate."""
        ended = []
        for sequence in sequences:
            self._judge(sequence)
            if sequence.finish_reason is FinishReason.UNFINISHED:
                self._waiting.append(sequence)
            else:
                ended.append(sequence)
        return ended

    def abort(self, request_ids: Collection[str]) -> list[RunningSequence]:
        """Takes the sequences out, unfinished; ids that have ended are ignored."""
        running = [s for s in self._running() if s.request_id in request_ids]
        waiting = [s for s in self._waiting if s.request_id in request_ids]
        for sequence in running:
            sequence.slot = -1
        for sequence in waiting:
            self._waiting.remove(sequence)
        return running + waiting

    def weights_changed(self, version: int, recompute: bool) -> None:
        """Kept prefixes are stale from now on; `recompute` sends running sequences back as well."""
        self.version = version
        self._epoch += 1
        if recompute:
            back = sorted(self._running(), key=lambda sequence: sequence.submitted)
            self._waiting.extendleft(reversed(back))
            for sequence in back:
                sequence.slot = -1
                sequence.interrupted = True

    def step(self, admit: bool) -> list[RunningSequence]:
        """One forward pass, one token for each sequence in it; returns those that ended.

        `admit`: whether waiting sequences may join. Does nothing when there is nothing to do.
        """
        spans = self._join(admit)
        decoding = self._slots[: len(self._slots) - sum(len(group) for group in spans)]
        if not self._slots:
            self._cache.clear()
            return []
        lengths = np.array([s.length for s in decoding], dtype=np.int64)
        packed = [np.array([s.tokens[s.length - 1] for s in decoding], dtype=np.int64)]
        positions = [lengths - 1]
        layout: list[Span] = []
        row_of: list[int] = list(range(len(decoding)))
        rows = list(range(len(decoding)))
        offset = len(decoding)
        for group in spans:
            known = group[0].known
            packed.append(known)
            positions.append(np.arange(known.size))
            slots = slice(group[0].slot, group[-1].slot + 1)
            layout.append(Span(offset, offset + known.size, slots))
            offset += known.size
            row_of += [len(rows)] * len(group)
            rows.append(offset - 1)
        self.tokens_prefilled += offset - len(decoding)

        logits = self._model.forward(
            np.concatenate(packed),
            np.concatenate(positions),
            self._cache.plan(lengths, layout),
            np.array(rows) if spans else None,
        )
        if len(row_of) > len(rows):
            logits = logits[row_of]
        return self._sample(logits)

    def _running(self) -> Iterator[RunningSequence]:
        return (s for slot, s in enumerate(self._slots) if s.slot == slot)

    def _join(self, admit: bool) -> list[list[RunningSequence]]:
        """Brings waiting sequences into slots; returns groups that share a span, in slot order.

        Afterwards the slots hold: decoding sequences, then those of the spans.
        """
        copies: list[tuple[RunningSequence, RunningSequence]] = []
        groups: dict[bytes, list[RunningSequence]] = {}
        room = self._concurrency - self.running if admit else 0
        budget = PREFILL_TOKENS
        donors = self._donors() if room and self._waiting else {}
        for sequence in self._next(room):
            known = sequence.known.tobytes()
            if known in donors:
                copies.append((sequence, donors[known]))
            elif known in groups:
                groups[known].append(sequence)
            elif not groups or sequence.length <= budget:
                groups[known] = [sequence]
                budget -= sequence.length
            else:
                self._waiting.appendleft(sequence)
                break
            sequence.prefix, sequence.prefix_epoch = known, self._epoch
            sequence.interrupted = False

        # A slot whose sequence has ended goes to one with the same prefix, in place.
        rest = []
        for sequence, donor in copies:
            slot = self._slots.index(donor)
            if donor.slot != slot:
                self._slots[slot] = sequence
                sequence.slot = slot
                copies = [(s, sequence if d is donor else d) for s, d in copies]
            else:
                rest.append(sequence)
        donor_of = {id(s): d for s, d in copies}
        self._reserve(chain((s for s, _ in copies), *groups.values()))
        # Copies come before the holes are closed: a donor may be one of them.
        occupied = len(self._slots)
        del occupied
        self._close_holes()
        for sequence in rest:
            self._place(sequence)
            donor = donor_of[id(sequence)]
            self._cache.copy(donor.slot, sequence.slot, sequence.length - 1)
        for sequence in chain(*groups.values()):
            self._place(sequence)
        return list(groups.values())
