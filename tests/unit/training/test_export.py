"""Shards and digest of an export, on a plain torch module."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("deepspeed")

from safetensors.torch import load_file  # noqa: E402

from roadstead.storage.weights import tensors_digest  # noqa: E402
from roadstead.training import export as exports  # noqa: E402


def tied_model(dtype: object) -> torch.nn.Module:
    torch.manual_seed(0)
    model = torch.nn.ModuleDict({"embed": torch.nn.Embedding(6, 4), "head": torch.nn.Linear(4, 6, bias=True)})
    model["head"].weight = model["embed"].weight
    return model.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shard_bytes", [1, 1 << 30])
def test_digest_is_that_of_the_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: object, shard_bytes: int
) -> None:
    monkeypatch.setattr(exports, "_SHARD_BYTES", shard_bytes)
    model = tied_model(dtype)
    folder = tmp_path / "export"
    digest = exports.export(model, 0, folder)
    assert digest == tensors_digest(folder) == exports.export(model, 0, None)
    names = sorted(path.name for path in folder.iterdir())
    if shard_bytes == 1:
        assert names == [
            "model-00001-of-00002.safetensors",
            "model-00002-of-00002.safetensors",
            "model.safetensors.index.json",
        ]
        index = json.loads((folder / names[2]).read_text())
        assert index["weight_map"] == {"embed.weight": names[0], "head.bias": names[1]}
    else:
        assert names == ["model.safetensors"]
        tensors = load_file(folder / names[0])
        assert set(tensors) == {"embed.weight", "head.bias"}, "the tied duplicate is left out"
        assert torch.equal(tensors["embed.weight"], model["embed"].weight)


def test_only_rank_0_writes(tmp_path: Path) -> None:
    assert exports.export(tied_model(torch.float32), 1, tmp_path / "export") is None
    assert not (tmp_path / "export").exists()
