"""Build an example's model: a tiny Qwen3 and its tokenizer, in Hugging Face format. All examples share it.

Owns: the model's shape, and the folder it is saved in. Never touches: the network, other folders.
Invariant: the folder is there only if it is complete; its manifest names seed, recipe and each file's digest.
The same seed and recipe give the same weights, to the bit, on the same machine and library versions.
A crash leaves: at most a hidden folder `.<name>.*.partial` beside the target, safe to delete.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from examples.arithmetic.tokenizer import BOS, EOS, PAD, VOCABULARY_SIZE, build_tokenizer


class Recipe(NamedTuple):
    name: str
    """Changes with every change of tokenizer, model or warm-up: older folders are then rebuilt."""
    warm_up: Callable[[Any, int, Callable[[float, str], None]], None]
    """Trains a model in place; given model, seed and progress."""


MANIFEST = "roadstead_model.json"
_MAX_LENGTH = 512


def build_model(out_dir: Path, seed: int, recipe: Recipe, progress: Callable[[float, str], None]) -> dict[str, Any]:
    """Build the model in `out_dir`, or find it complete there. About 25 to 50 s on one CPU thread.

    progress: called with the fraction done (0 to 1) and a text.
    Returns the manifest (recipe, seed, parameters, build_seconds, files: name to sha256) and `reused`.
    Raises FileExistsError if `out_dir` holds something this function did not write.
    """
    found = _complete(out_dir, seed, recipe)
    if found is not None:
        progress(1.0, f"{out_dir} is complete")
        return {**found, "reused": True}
    if out_dir.exists() and not (out_dir / MANIFEST).is_file() and any(out_dir.iterdir()):
        raise FileExistsError(f"{out_dir} is not empty and has no {MANIFEST}; choose another folder")
    out_dir.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{out_dir.name}.", suffix=".partial", dir=out_dir.parent))
    try:
        manifest = _build(partial, seed, recipe, progress)
        _replace(out_dir, partial)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return {**manifest, "reused": False}


def _build(folder: Path, seed: int, recipe: Recipe, progress: Callable[[float, str], None]) -> dict[str, Any]:
    started = time.monotonic()
    progress(0.0, "loading libraries")
    from transformers.utils import logging

    logging.disable_progress_bar()  # its bar for one small file would cut through the caller's own
    with _deterministic(seed):
        model = _random_model()
        recipe.warm_up(model, seed, progress)
    model.save_pretrained(folder)
    build_tokenizer(_MAX_LENGTH).save_pretrained(folder)
    manifest = {
        "recipe": recipe.name,
        "seed": seed,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "build_seconds": round(time.monotonic() - started, 1),
        "files": {path.name: _sha256(path) for path in sorted(folder.iterdir())},
    }
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
    return manifest


def _random_model() -> Any:
    """0.41 M parameters in float32.

    Input and output embeddings are apart: an engine that keeps a repacked copy of a tied output layer would
    not see it change when weights are reloaded in place.
    """
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=_MAX_LENGTH,
        tie_word_embeddings=False,
        initializer_range=0.05,
        pad_token_id=PAD,
        bos_token_id=BOS,
        eos_token_id=EOS,
        dtype="float32",
    )
    return Qwen3ForCausalLM(config).float()


@contextmanager
def _deterministic(seed: int) -> Iterator[None]:
    """One thread, because the number of threads changes the order of sums; the caller's state comes back."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            yield
    finally:
        torch.set_num_threads(threads)


def _complete(folder: Path, seed: int, recipe: Recipe) -> dict[str, Any] | None:
    """The manifest, if the folder holds exactly this model, undamaged."""
    try:
        manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_text())
        if (manifest["recipe"], manifest["seed"]) != (recipe.name, seed):
            return None
        intact = all(_sha256(folder / name) == digest for name, digest in manifest["files"].items())
    except (OSError, ValueError, KeyError):
        return None
    return manifest if intact else None


def _replace(target: Path, folder: Path) -> None:
    """Put `folder` in the place of `target`; there is no moment at which `target` is half of each."""
    if target.exists():
        old = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".partial", dir=target.parent))
        os.rename(target, old)
        os.rename(folder, target)
        shutil.rmtree(old)
    else:
        os.rename(folder, target)
    target.chmod(0o755)  # mkdtemp's folders are private; a server may run as another user


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
