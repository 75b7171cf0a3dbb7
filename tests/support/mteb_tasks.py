"""mteb tasks made of our own sentences, held in memory: real mteb classes, nothing to download."""

from __future__ import annotations

from typing import Any

from datasets import Dataset, DatasetDict

from models.evaluation.mteb_model import import_mteb

mteb = import_mteb()

SPLIT = "test"
DOCUMENTS = {
    "d-pressure": ("高血压用药", "血压长期偏高的人应在医生指导下服用降压药，并减少食盐。"),
    "d-sugar": ("糖尿病饮食", "糖尿病患者宜少吃精制糖，主食粗细搭配，定时定量。"),
    "d-cold": ("", "普通感冒多由病毒引起，多喝水、多休息，一周左右可自愈。"),
    "d-flu": ("", "流行性感冒发病急，高热、全身酸痛，应尽早服用抗病毒药物。"),
    "d-bone": ("骨折急救", "怀疑骨折时先固定伤肢，不要随意搬动，尽快就医。"),
    "d-eye": ("", "长时间看屏幕容易眼干，每隔二十分钟向远处看一看。"),
}
QUERIES = {
    "q-pressure": "血压高要吃什么药",
    "q-fever": "突然高烧浑身疼怎么办",
    "q-cold": "着凉流鼻涕要不要紧",
    "q-arm": "摔伤胳膊动不了",
}
QRELS = {
    "q-pressure": {"d-pressure": 1},
    "q-fever": {"d-flu": 2, "d-cold": 1},
    "q-cold": {"d-cold": 1, "d-eye": 0},
    "q-arm": {"d-bone": 1, "d-eye": 1},
}
CANDIDATES = {
    "q-pressure": ["d-sugar", "d-pressure", "d-eye"],
    "q-fever": ["d-cold", "d-flu", "d-bone"],
    "q-cold": ["d-eye", "d-cold"],
    "q-arm": ["d-bone", "d-eye", "d-sugar", "d-flu"],
}
PAIRS = [
    ("发烧了怎么办", "发热应该如何处理", 5.0),
    ("高血压吃什么药", "血压高用什么药", 4.5),
    ("感冒会传染吗", "流感怎样传播", 3.0),
    ("糖尿病能吃水果吗", "孕妇能吃螃蟹吗", 1.0),
    ("骨折多久能好", "近视怎么矫正", 0.0),
]


def _metadata(name: str, kind: str, main_score: str) -> Any:  # noqa: ANN401 -- TaskMetadata, which only mteb has
    unknown: Any = dict.fromkeys(
        ("reference", "date", "domains", "task_subtypes", "license", "annotations_creators", "dialect")
    )
    return mteb.abstasks.task_metadata.TaskMetadata(
        name=name, type=kind, main_score=main_score, description="our own sentences", category="t2t",
        modalities=["text"], eval_splits=[SPLIT], eval_langs=["cmn-Hans"], sample_creation=None, bibtex_citation=None,
        dataset={"path": "none/none", "revision": "none"}, **unknown,
    )  # fmt: skip


class OurRetrieval(mteb.abstasks.AbsTaskRetrieval):
    metadata = _metadata("OurRetrieval", "Retrieval", "ndcg_at_10")
    candidates: dict[str, list[str]] | None = None

    def load_data(self, **_: object) -> None:
        corpus = [{"id": id, "title": title, "text": text} for id, (title, text) in DOCUMENTS.items()]
        queries = [{"id": id, "text": text} for id, text in QUERIES.items()]
        self.dataset = {
            "default": {
                SPLIT: {
                    "corpus": Dataset.from_list(corpus),
                    "queries": Dataset.from_list(queries),
                    "relevant_docs": QRELS,
                    "top_ranked": self.candidates,
                }
            }
        }
        self.data_loaded = True


class OurReranking(OurRetrieval):
    metadata = _metadata("OurReranking", "Reranking", "map_at_10")
    candidates = CANDIDATES


class OurSTS(mteb.abstasks.AbsTaskSTS):
    metadata = _metadata("OurSTS", "STS", "cosine_pearson")

    def load_data(self, **_: object) -> None:
        rows = [{"sentence1": first, "sentence2": second, "score": score} for first, second, score in PAIRS]
        self.dataset = DatasetDict({SPLIT: Dataset.from_list(rows)})
        self.data_loaded = True
