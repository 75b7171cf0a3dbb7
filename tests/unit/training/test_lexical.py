from pathlib import Path

import numpy as np
import torch

from models.encoder.spec import Side
from models.encoder.tokenizer import Tokenizer
from models.training.losses import LexicalTeacher, stretch
from models.training.passes import TokenTable
from models.training.texts import Texts
from tests.support.tiny_models import tiny_spec
from tests.support.toy_training import ONE

BUNDLED = Path("models/pretrained/care-small-zh/tokenizer.json")


def table(*texts: str) -> TokenTable:
    tokenizer = Tokenizer.load(BUNDLED, 16)
    return TokenTable.build(Texts(Side.DOCUMENT, list(texts)), tiny_spec("bert"), tokenizer, ONE)


def test_shared_rare_bigrams_are_preferred() -> None:
    documents = table("高血压的治疗", "糖尿病的治疗", "骨折的固定")
    scores = LexicalTeacher.fit(documents).scores(table("高血压").padded(np.array([0])), documents.padded(np.arange(3)))
    assert scores[0].argmax() == 0
    assert scores[0, 0] == 1
    assert scores[0, 2] == 0


def test_special_tokens_are_not_part_of_bigrams() -> None:
    documents = table("甲", "乙")
    both = documents.padded(np.arange(2))
    assert LexicalTeacher.fit(documents).scores(both, both).abs().sum() == 0


def test_stretch_scales_each_row_to_0_and_1() -> None:
    assert stretch(torch.tensor([[2.0, 4.0, 3.0], [5.0, 5.0, 5.0]])).tolist() == [[0.0, 1.0, 0.5], [0.0, 0.0, 0.0]]
