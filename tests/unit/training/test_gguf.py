from pathlib import Path

import pytest
import torch

from models.encoder.folder import infer_spec
from models.encoder.gguf import unpack_gguf
from models.encoder.spec import Pooling
from models.encoder.torch import TorchEncoder
from models.errors import BadEncoder
from tests.support.toy_training import write_gguf


def test_a_gguf_file_becomes_a_folder_with_the_same_weights(tmp_path: Path) -> None:
    expected = write_gguf(tmp_path / "model.gguf")
    folder = unpack_gguf(tmp_path / "model.gguf", tmp_path / "folder")
    found = TorchEncoder.load(folder, infer_spec(folder, space="s", pooling=Pooling.EOS))
    assert found.spec.architecture == "qwen2"
    for name, value in expected.backbone.state_dict().items():
        torch.testing.assert_close(found.backbone.state_dict()[name], value)
    ids = found.tokenizer("的").ids
    assert len(ids) == 2
    assert ids[-1] == found.backbone.config.vocab_size - 1, "the text ends with EOS"
    assert "\\p{N}" in found.tokenizer_json, "numbers are split into digits, as in Qwen"
    assert unpack_gguf(tmp_path / "gone.gguf", folder) == folder, "it is unpacked once"


def test_a_file_that_is_not_gguf_is_refused(tmp_path: Path) -> None:
    (tmp_path / "bad.gguf").write_bytes(b"nothing of the kind")
    with pytest.raises(BadEncoder, match=r"bad\.gguf"):
        unpack_gguf(tmp_path / "bad.gguf", tmp_path / "folder")
    assert not (tmp_path / "folder").exists()
