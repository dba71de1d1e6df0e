"""Checkpoints: immutable generations, and a pointer to the newest whole one.

    checkpoints/step-000012/   weights*.safetensors    float32 masters
                               optimizer*.safetensors  a file of each for every rank that wrote
                               critic/                 the same of a critic, where there is one
                               manifest.json           run, model, step, hash of every file, `extra`
                LATEST                                 "step-000012"
                PUBLISHED                              "14": nodes may hold this version
                export -> export-000012                a model directory
                critic -> critic-000012                the same of a critic

A generation is written under a temporary name, flushed to disk, renamed, and only then does LATEST
point to it. What must hold, whenever the process is killed: LATEST names a whole generation, or
there is none. What LATEST does not name, nobody may rely on. One process writes.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors.torch import save_file
from torch import Tensor
from transformers.models.auto.modeling_auto import MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES

from leeway.errors import ConfigError, DataError
from trainer_service.backends import lora
from trainer_service.backends.files import WEIGHTS, TensorFiles
from trainer_service.learners import CRITIC

LATEST = "LATEST"
PUBLISHED = "PUBLISHED"
MANIFEST = "manifest.json"
EXPORTED_WEIGHTS = "model.safetensors"
TEMPORARY = ".partial-"
READ_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A whole generation. `extra` is what the saver handed in: version, sampler position and the
    like."""

    path: Path
    step: int
    extra: Mapping[str, Any]


class Checkpoints:
    """The checkpoints of one run, with one model."""

    def __init__(self, directory: Path, *, run_id: str, model_hash: str, kept: int) -> None:
        """Creates the directory and removes what a killed predecessor left half done.

        Args:
            model_hash: Of the model that the run began with; see `model_hash`.
            kept: So many newest generations stay.
        """
        self._directory = directory
        self._identity = {"run_id": run_id, "model_hash": model_hash}
        self._kept = kept
        directory.mkdir(parents=True, exist_ok=True)
        self._sweep()

    def save(
        self,
        step: int,
        write: Callable[[Path], None],
        extra: Mapping[str, Any] | None = None,
        *,
        flush: bool = True,
    ) -> Checkpoint:
        """Makes `step` the newest generation, durably, and drops the oldest beyond those kept.

        Args:
            write: Writes weights and optimizer into the directory it is given (see
                `Backend.snapshot`).
            extra: JSON values that must be as old as the weights.
            flush: Without, it survives the end of the process at once, but a crash of the machine
                only when the system has written it back: for a process that is asked to end.

        Raises:
            DataError: LATEST already names this step or a later one; generations are immutable.
        """
        newest = self._latest_step()
        if newest is not None and step <= newest:
            raise DataError(
                f"checkpoint: step = {step}, but the latest is of step {newest} already"
            )
        name = _name(step)
        partial = self._directory / f"{TEMPORARY}{name}"
        _remove(partial)
        partial.mkdir()
        write(partial)
        paths = sorted(partial.rglob("*"))
        files = {
            path.relative_to(partial).as_posix(): _describe(path)
            for path in paths
            if path.is_file()
        }
        manifest: dict[str, Any] = {
            **self._identity,
            "step": step,
            "files": files,
            "extra": dict(extra or {}),
        }
        (partial / MANIFEST).write_text(json.dumps(manifest, indent=1))
        for path in (*paths, partial / MANIFEST, partial) if flush else ():
            _flush(path)
        final = self._directory / name
        _remove(final)
        partial.rename(final)
        self._point(LATEST, name, flush=flush)
        self._sweep()
        return Checkpoint(final, step, manifest["extra"])

    def latest(self) -> Checkpoint | None:
        """The generation that LATEST names, verified; None when there is none yet.

        Raises:
            ConfigError: It belongs to another run or model.
            DataError: A file is missing or damaged.
        """
        step = self._latest_step()
        if step is None:
            return None
        path = self._directory / _name(step)
        try:
            manifest = json.loads((path / MANIFEST).read_text())
        except (OSError, ValueError) as error:
            raise DataError(f"checkpoint {path}: its manifest cannot be read: {error}") from error
        for key, own in self._identity.items():
            if manifest[key] != own:
                raise ConfigError(
                    f"checkpoint {path}: {key} = {manifest[key]!r}, this run's is {own!r}; give "
                    "the run another name, or continue with the model it began with"
                )
        for name, expected in manifest["files"].items():
            if not (path / name).is_file() or _describe(path / name) != expected:
                raise DataError(
                    f"checkpoint {path}: {name} is missing or damaged; restore it, or delete "
                    f"{self._directory / LATEST} to begin anew"
                )
        return Checkpoint(path, manifest["step"], manifest["extra"])

    @property
    def published(self) -> int:
        """The newest version that any life of this run has handed out; 0 at first."""
        try:
            return int((self._directory / PUBLISHED).read_text())
        except FileNotFoundError:
            return 0

    def set_published(self, version: int) -> None:
        """To be called before the version is handed out; survives the end of the process."""
        if version > self.published:
            self._point(PUBLISHED, str(version), flush=False)

    def _point(self, name: str, text: str, *, flush: bool) -> None:
        """Replaces a small file as a whole."""
        # Not swept: another thread may do that at this moment.
        temporary = self._directory / f".{name}"
        temporary.write_text(text)
        if flush:
            _flush(self._directory)
            _flush(temporary)
        temporary.replace(self._directory / name)
        if flush:
            _flush(self._directory)

    def _latest_step(self) -> int | None:
        try:
            name = (self._directory / LATEST).read_text()
        except FileNotFoundError:
            return None
        return _step(name)

    def _sweep(self) -> None:
        """Removes partial generations, those that LATEST never named, and the oldest."""
        for path in self._directory.glob(f"{TEMPORARY}*"):
            _remove(path)
        newest = self._latest_step()
        steps = sorted(_step(path.name) for path in self._directory.glob("step-*"))
        whole = [step for step in steps if newest is not None and step <= newest]
        for step in set(steps) - set(whole[-self._kept :]):
            _remove(self._directory / _name(step))


def model_hash(model_directory: Path) -> str:
    """Of a model's configuration, tokenizer and weights: xxh3-128 as hex."""
    digest = xxhash.xxh3_128()
    names = {"config.json", "tokenizer.json"}
    for path in sorted(model_directory.iterdir()):
        if path.name in names or path.suffix == ".safetensors":
            digest.update(f"{path.name} {_describe(path)}".encode())
    return digest.hexdigest()


def export_hf(checkpoint: Path, model_directory: Path, out: Path, *, lora_alpha: float) -> None:
    """Writes a model directory that `AutoModelForCausalLM.from_pretrained` loads, in bf16.

    Args:
        checkpoint: A generation's directory.
        model_directory: The model that the run began with; its configuration, tokenizer and chat
            template are copied.
        out: Becomes a link to what is written, at once and never to less than a whole model.
        lora_alpha: With which adapters, if any, are added to the weights.
    """
    weights = _exported(checkpoint, model_directory, lora_alpha)
    _export(_step(checkpoint.name), weights, model_directory, out, {})


def export_critic(checkpoint: Path, model_directory: Path, out: Path) -> None:
    """The same of a generation's critic: for `AutoModelForTokenClassification`, with one label, and
    for `trainer.critic.model`."""
    family = json.loads((model_directory / "config.json").read_text())["model_type"]
    kind = MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES[family]
    head = {"architectures": [kind], "id2label": {0: "value"}, "label2id": {"value": 0}}
    masters = TensorFiles(checkpoint / CRITIC, WEIGHTS)
    weights = ((name, masters.read(name).to(torch.bfloat16)) for name in masters.names())
    _export(_step(checkpoint.name), weights, model_directory, out, head)


def _export(
    step: int,
    weights: Iterable[tuple[str, Tensor]],
    model_directory: Path,
    out: Path,
    changes: Mapping[str, Any],
) -> None:
    """
    Args:
        changes: To the model's configuration.
    """
    target = out.with_name(f"{out.name}-{step:06d}")
    if not target.exists():
        _write_model(weights, model_directory, target, changes)
    link = out.with_name(f"{TEMPORARY}{out.name}")
    _remove(link)
    link.symlink_to(target.name)
    link.replace(out)
    for path in set(out.parent.glob(f"{out.name}-*")) - {target}:
        _remove(path)


def _write_model(
    weights: Iterable[tuple[str, Tensor]],
    model_directory: Path,
    target: Path,
    changes: Mapping[str, Any],
) -> None:
    partial = target.with_name(f"{TEMPORARY}{target.name}")
    _remove(partial)
    partial.mkdir(parents=True)
    for path in model_directory.iterdir():
        if path.is_file() and ".safetensors" not in path.name:
            shutil.copyfile(path, partial / path.name)
    config = json.loads((partial / "config.json").read_text())
    config |= {**changes, "dtype": "bfloat16"}
    (partial / "config.json").write_text(json.dumps(config, indent=2))
    save_file(dict(weights), partial / EXPORTED_WEIGHTS, metadata={"format": "pt"})
    for path in (*partial.iterdir(), partial):
        _flush(path)
    partial.rename(target)


def _exported(
    checkpoint: Path, model_directory: Path, lora_alpha: float
) -> Iterator[tuple[str, Tensor]]:
    """(name, bf16) of all weights."""
    masters = TensorFiles(checkpoint, WEIGHTS)
    adapters = {lora.adapted(name): name for name in masters.names() if lora.adapted(name)}
    if not adapters:
        for name in masters.names():
            yield name, masters.read(name).to(torch.bfloat16)
        return
    frozen = TensorFiles(model_directory)
    for name in frozen.names():
        weight = frozen.read(name)
        if name in adapters:
            # Rounded first, as the policy that was published.
            halves = (adapters[name], lora.pair(adapters[name]))
            a, b = (masters.read(half).to(torch.bfloat16).to(torch.float32) for half in halves)
            weight = lora.merge(weight.to(torch.float32), a, b, lora_alpha)
        yield name, weight.to(torch.bfloat16)


def _name(step: int) -> str:
    return f"step-{step:06d}"


def _step(name: str) -> int:
    return int(name.removeprefix("step-"))


def _describe(path: Path) -> dict[str, Any]:
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while block := file.read(READ_BYTES):
            digest.update(block)
    return {"bytes": path.stat().st_size, "xxh3_128": digest.hexdigest()}


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
